"""Compiles the kernels whose tiles depend on the card, for one that is not here; launches nothing.

Run as `python -m tests.nsa.tile_build ARCH SHAPE`, in a process of its own. Prints a line for each
build: kernel, bytes of shared memory, bytes that a thread spills, rows of its tile.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from nsa.ops.interval import backward as interval_backward
from nsa.ops.interval import forward_kernels as interval_forward
from nsa.ops.scores import kernels as scores
from nsa.ops.selected.triton import backward as selected_backward
from nsa.ops.selected.triton import forward as selected_forward
from nsa.ops.selected.triton.tile_sizes import backward_tiles
from perfbench.worker.codegen.cases import GEOMETRIES, on_card
from perfbench.worker.codegen.cubin import read_cubin
from perfbench.worker.codegen.recording import AbsentGpu

# G kv heads, H query heads of each, key and value dim; those of the matrices are built by
# `perfbench codegen`, too
SHAPES = {
    "mla": (1, 16, 192, 128),
    "d256": (2, 8, 256, 256),
}
TOKENS = 1024
# the decode kernels take the same tiles everywhere, and are built by `perfbench codegen`
TILED = (
    "nsa_interval_forward",
    "nsa_interval_backward_q",
    "nsa_interval_backward_kv",
    "nsa_scores",
    "nsa_selected_forward",
    "nsa_selected_backward",
    "nsa_selected_forward_by_row",
)


def instead_of_launching() -> None:
    """Every launch of TILED builds it and prints a line; others do nothing."""
    run = JITFunction.run

    def build(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        name = self.fn.__name__
        if name not in TILED:
            return
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        given = dict(zip((one.name for one in self.params), args, strict=False))
        rows = given.get("M", given.get("BM"))
        print(name, kernel.metadata.shared, read_cubin(kernel.asm["cubin"]).stack, rows, flush=True)

    JITFunction.run = build


def main(arch: int, shape: str) -> None:
    major, minor = divmod(arch, 10)
    driver.set_active(AbsentGpu(f"{major}.{minor}"))
    instead_of_launching()
    with on_card((major, minor)):
        everything(shape)


def everything(shape: str) -> None:
    """Forward and backward of what takes its tiles from the card."""
    G, H, DK, DV = SHAPES[shape]

    def zeros(heads: int, dim: int) -> Tensor:
        return torch.zeros(1, TOKENS, heads, dim, dtype=torch.bfloat16)

    q, do, kv = zeros(G * H, DK), zeros(G * H, DV), (zeros(G, DK), zeros(G, DV))
    lse = torch.zeros(1, TOKENS, G * H)
    where: dict[str, Any] = {"q_start": 0, "scale": 0.1}
    for geometry in GEOMETRIES.values():
        interval_forward.forward(q, *kv, first=None, **geometry, **where)
        interval_backward.backward(do, q, *kv, lse, lse, first=None, **geometry, **where)
    chosen = {"block": 32, "stride": 16, "sel_block": 64, "num_selected": 16, "kv_len": TOKENS}
    blocks = scores.choose(q, kv[0], lse, num_initial=1, num_local=2, first=None, **chosen, **where)
    for by_row in (True, False):
        selected_forward.forward(q, *kv, blocks, sel_block=64, by_row=by_row, **where)
    by_lists = backward_tiles(q, DV, 64, H)
    selected_backward.backward(do, q, *kv, blocks, lse, lse, sel_block=64, tiles=by_lists, **where)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
