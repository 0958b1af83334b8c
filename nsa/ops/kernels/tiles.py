"""Tiles of cards that give a program less than the one that the kernels were measured with.

A kernel's own table, measured on an H200, holds where a card gives 227 KB of shared memory. On the
others multiplies read their operands from registers, and a program may have 163 KB (A100) or 99 KB:
what is here was compiled for them and never timed. It fits, spills at most 128 bytes a thread, and
where the choice is free, two programs share a multiprocessor.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch

from nsa.routing.cards import (
    HOPPER,
    CardClass,
    card_class,
    selected_backward_bytes,
)

_MIDDLE, _LITTLE = 163 * 1024, 99 * 1024  # bytes of shared memory
Tile = Mapping[str, Any]  # fields of a launch's tile
_KEEP: Tile = {}


def _tile(BM: int, BC: int, num_warps: int, num_stages: int) -> Tile:
    return {"BM": BM, "BC": BC, "num_warps": num_warps, "num_stages": num_stages}


def _rows(M: int, num_warps: int, num_stages: int = 1) -> Tile:
    return {"M": M, "num_warps": num_warps, "num_stages": num_stages, "max_registers": None}


# Up to these bytes of shared memory: by kernel, what the tile of each width class is replaced by.
# The last class, fp32 wider than 128, is for tests and stays as it is.
SMALLER: Mapping[int, Mapping[str, tuple[Tile, ...]]] = {
    _MIDDLE: {
        "interval_forward": (_KEEP, _tile(64, 64, 4, 2), _tile(64, 32, 8, 2), _KEEP),
        "interval_backward_q": (_KEEP, _tile(64, 64, 4, 2), _tile(64, 32, 8, 2), _KEEP),
        "interval_backward_kv": (_tile(64, 64, 4, 2), _KEEP, _KEEP, _KEEP),
        "selected_forward": (_KEEP, _rows(64, 8), _KEEP, _KEEP),
        "selected_backward": (_rows(64, 4), _rows(64, 8), _rows(32, 8), _KEEP),
        "by_row": (_KEEP, {"num_warps": 2}, {"num_warps": 4}, _KEEP),
        "dense_forward": ({"max_registers": None}, _KEEP, _KEEP, _KEEP),
    },
    _LITTLE: {
        "interval_forward": (_KEEP, _tile(64, 32, 4, 2), _tile(64, 32, 8, 2), _KEEP),
        "interval_backward_q": (_KEEP, _tile(64, 64, 8, 2), _tile(32, 32, 8, 2), _KEEP),
        "interval_backward_kv": (
            _tile(64, 64, 4, 2),
            _tile(64, 64, 8, 2),
            _tile(32, 32, 8, 2),
            _KEEP,
        ),
        "selected_forward": (_KEEP, _rows(64, 8), _rows(32, 8), _KEEP),
        "selected_backward": (_rows(64, 4), _rows(64, 8), _rows(32, 8), _KEEP),
        "by_row": (_KEEP, {"num_warps": 2}, {"num_warps": 4}, _KEEP),
        "dense_forward": ({"max_registers": None}, _KEEP, _KEEP, _KEEP),
    },
}
# Where products gather in tensor memory: a tile of 128 rows spills 352 bytes a thread with the
# measured 4 warps and 2 stages, and none with these; rows of one query are not multiplied there.
TENSOR_MEMORY: Mapping[str, tuple[Tile, ...]] = {
    "selected_backward": (_rows(128, 8), _KEEP, _KEEP, _KEEP),
    "by_row": (_KEEP, {"num_warps": 2}, {"num_warps": 4}, _KEEP),
}


@lru_cache(maxsize=32)
def card_at(device: torch.device) -> CardClass:
    """What the card of a tensor's device gives; a CPU stands for the one that was measured."""
    return card_class(sm_of(device))


def sm_of(device: torch.device) -> tuple[int, int] | None:
    """Its compute capability; None where it is no GPU of NVIDIA's."""
    if device.type != "cuda" or torch.version.hip:
        return None
    return torch.cuda.get_device_capability(device)


@lru_cache(maxsize=256)  # before each launch
def smaller(kernel: str, of_class: int, device: torch.device) -> Tile:
    """What replaces fields of the measured tile of ``kernel`` and width class ``of_class`` there:
    nothing, on a card that gives as much as the one that was measured.
    """
    card = card_at(device)
    table: Mapping[str, tuple[Tile, ...]] = TENSOR_MEMORY if card.has_tensor_memory else {}
    for shared_bytes in sorted(SMALLER, reverse=True):
        if card.shared_bytes <= shared_bytes:
            table = SMALLER[shared_bytes]
    return table[kernel][of_class] if kernel in table else _KEEP


def rows_that_fit(rows: int, least: int, block: int, dims: tuple[int, int], x: torch.Tensor) -> int:
    """``rows`` of the selected branch's backward, halved until its tile fits the card of x, but
    never below ``least``; block and dims (of keys and of values) are padded.
    """
    card = card_at(x.device)
    if card.shared_bytes < HOPPER.shared_bytes:
        while (
            rows > least
            and selected_backward_bytes(rows, block, *dims, x.element_size()) > card.shared_bytes
        ):
            rows //= 2
    return rows
