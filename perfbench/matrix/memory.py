"""The memory that a cell needs at least, in closed form: what no implementation can do without.

A lower bound, so a cell that it refuses cannot run; one that it lets pass still may not fit.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from nsa.config import ModelConfig
from nsa.routing import Capability
from perfbench.records import ATTENTION, CACHED, SELECTED, TRAINING, Cell
from perfbench.roofline import BYTES_OF

GIB = 2**30
# By the marketing name that NVML reports, as in the datasheets; an unknown card has none.
CARD_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "NVIDIA A100-SXM4-40GB": 40 * GIB,
        "NVIDIA A100-SXM4-80GB": 80 * GIB,
        "NVIDIA A100 80GB PCIe": 80 * GIB,
        "NVIDIA H100 80GB HBM3": 80 * GIB,
        "NVIDIA H100 PCIe": 80 * GIB,
        "NVIDIA H200": 141 * GIB,
        "NVIDIA L40S": 48 * GIB,
        "NVIDIA GeForce RTX 4090": 24 * GIB,
    }
)


def least_bytes(cell: Cell, model: ModelConfig) -> int:
    """Of one step of ``cell``: queries, keys and values of attention alone; keys and values of
    all layers in a cache; else what each layer reads, kept for the backward in training. Nothing is
    known of a user's own step.
    """
    if cell.is_own_step:
        return 0
    tokens, size = cell.batch * cell.seq_len, BYTES_OF[cell.dtype]
    keys = 2 * model.num_kv_heads * model.head_dim
    if cell.workload in ATTENTION or cell.workload in SELECTED:
        return tokens * size * (model.num_heads * model.head_dim + keys)
    if cell.workload in CACHED:
        return tokens * size * keys * model.num_layers
    return tokens * size * model.dim * (model.num_layers if cell.workload in TRAINING else 1)


def bytes_here(capability: Capability) -> int | None:
    """The memory of the card, or of this machine for a CPU; None where it is not known."""
    if capability.sm is not None:
        return CARD_BYTES.get(capability.device_name)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def too_large(
    cells: Iterable[Cell], model: ModelConfig, capability: Capability
) -> dict[str, list[str]]:
    """Why cells cannot fit -> their ids; empty where all may, or where the memory is not known."""
    here = bytes_here(capability)
    found: dict[str, list[str]] = {}
    for cell in cells:
        needed = least_bytes(cell, model)
        if here is not None and needed > here:
            reason = (
                f"it needs {gib(needed)} of memory at least, and {capability.device_name} has"
                f" {gib(here)}; a smaller seq_len or batch"
            )
            found.setdefault(reason, []).append(cell.cell_id)
    return found


def gib(size: int) -> str:
    """'1,234.5 GiB'; what is small in MiB or KiB, so that it is not 0.0."""
    for unit, bytes_ in (("GiB", GIB), ("MiB", 2**20)):
        if size >= bytes_ / 10:
            return f"{size / bytes_:,.1f} {unit}"
    return f"{size / 2**10:,.1f} KiB"
