"""Builds everything that path triton launches, down to machine code, for a GPU that is not here;
launches nothing.

The interpreter runs kernels as Python, so it accepts what Triton's compiler refuses: run as `python
-m tests.nsa.gpu_build ARCH SHAPE`, in a process of its own, because Triton's driver is one for all.
Prints `kernel bytes-of-shared-memory` for each build.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from nsa.ops import decode_step, paged
from nsa.ops.decode_step import kernels as step_kernels
from nsa.ops.gated_sum import kernels as combine
from nsa.ops.interval import kernels as interval
from nsa.ops.joint_backward import kernels as joint_backward
from nsa.ops.kernels import common, products, tiles
from nsa.ops.learned_phi import kernels as learned_phi
from nsa.ops.linear_step import kernels as linear
from nsa.ops.means import kernels as means
from nsa.ops.scores import kernels as scores
from nsa.ops.selected.triton import dense_tiles
from nsa.ops.selected.triton import kernels as selected
from nsa.ops.selected.triton.block_lists import Lists

# G kv heads, H query heads of each, key and value dim, dtype: the two shapes that the targets name,
# and one that fits no tile.
SHAPES = {
    "A": (2, 6, 64, 64, torch.bfloat16),
    "B": (4, 16, 128, 128, torch.bfloat16),
    "odd": (2, 3, 60, 100, torch.float16),
}
TOKENS = 1024
# What is in use and what else fits the registers without spills, of an SM 9.0.
FORWARD_ROLES = {
    "A": (selected.FORWARD_ROLES[0], selected.RoleTiles(128, 2, 4, 2, 16, 168)),
    "B": (selected.RoleTiles(64, 1, 3, 1, 16, 128), selected.RoleTiles(64, 2, 4, 2, 16, 168)),
}
BACKWARD_ROLES = {"A": selected.BACKWARD_ROLES[:1], "B": selected.BACKWARD_ROLES[1:2]}
INTERVAL_ROLES = {
    "A": (interval.RoleSizes(128, 2, 3, 128, 160), interval.RoleSizes(64, 3, 2, 80, 112)),
    "B": (interval.RoleSizes(128, 2, 2, 168, 240),),
}
GEOMETRIES: tuple[dict[str, Any], ...] = (
    {"block": 32, "stride": 16, "width": None},
    {"block": 1, "stride": 1, "width": 512},
)


class Absent:
    """Triton's driver of a GPU that is not here."""

    def __init__(self, arch: int) -> None:
        self._arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def instead_of_launching(found: list[tuple[str, int]]) -> None:
    """Every launch from now on builds its kernel, notes (name, bytes of shared memory), and
    returns.
    """
    run = JITFunction.run

    def build(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        found.append((self.fn.__name__, kernel.metadata.shared))

    JITFunction.run = build


def everything(
    shape: str,
    *,
    batch: int = 1,
    ragged: bool = False,
    documents: bool = False,
    roles: bool = False,
) -> None:
    """Forward and backward of every operation, with tensors of zeros; ``roles``: those with warp
    roles as well.
    """
    G, H, DK, DV, dtype = SHAPES[shape]

    def kv(heads: int, length: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(batch, length, heads, DK, dtype=dtype), torch.zeros(
            batch, length, heads, DV, dtype=dtype
        )

    (q, do), tokens = kv(G * H, TOKENS), kv(G, TOKENS)
    where: dict[str, Any] = {
        "q_start": torch.zeros(batch, dtype=torch.int64) if ragged else 0,
        "scale": 0.1,
    }
    first = torch.zeros(TOKENS, dtype=torch.int64) if documents else None
    for geometry, keys in zip(GEOMETRIES, (kv(G, (TOKENS - 32) // 16 + 1), tokens), strict=True):
        o, lse = interval.forward(q, *keys, first=first, **geometry, **where)
        interval.backward(
            do, q, *keys, lse, products.row_products(o, do), first=first, **geometry, **where
        )
    chosen = {
        "block": 32,
        "stride": 16,
        "sel_block": 64,
        "num_selected": 16,
        "num_initial": 1,
        "num_local": 2,
        "kv_len": TOKENS,
    }
    blocks = scores.choose(
        q, kv(G, (TOKENS - 32) // 16 + 1)[0], lse, first=first, **chosen, **where
    )
    for by_row in (True, False):
        o, lse = selected.forward(q, *tokens, blocks, sel_block=64, by_row=by_row, **where)
    # without tiles so few rows go by dense ones
    by_lists = selected._backward_tiles(q, DV, 64, H)
    selected.backward(do, q, *tokens, blocks, lse, lse, sel_block=64, tiles=by_lists, **where)
    o, lse = dense_tiles.forward(q, *tokens, blocks, sel_block=64, **where)
    dense_tiles.backward(do, q, *tokens, blocks, lse, lse, sel_block=64, **where)
    if roles:
        k_cmp, v_cmp = kv(G, (TOKENS - 32) // 16 + 1)
        for sizes in INTERVAL_ROLES[shape]:
            interval.forward(q, k_cmp, v_cmp, first=None, roles=sizes, **GEOMETRIES[0], **where)
        for passing in filter(None, scores.PASSING):
            if scores.passing_takes(q, k_cmp, passing):
                scores.choose(q, k_cmp, lse, first=None, passing=passing, **chosen, **where)
        options = {"sel_block": 64, **where}
        for tiles in FORWARD_ROLES[shape]:
            selected.forward(q, *tokens, blocks, by_row=False, tiles=tiles, **options)
        for tiles in BACKWARD_ROLES[shape]:
            selected.backward(do, q, *tokens, blocks, lse, lse, tiles=tiles, **options)
    Lists.of(blocks, TOKENS // 64, batch * TOKENS, full=0, counted=False)
    means.backward(*means.forward(*tokens, block=32, stride=16), tokens=TOKENS, block=32, stride=16)
    learned(shape, batch)
    gates = torch.zeros(batch, TOKENS, G * H, 3, dtype=dtype)
    combine.forward(gates, (o, o, o))
    combine.backward(do, gates, (o, o, o))
    geometry = joint_backward.Geometry(32, 16, 64, 512, 0.1, where["q_start"], first, 512)
    outputs, of_three = (o, o, o), (lse, lse, lse)
    delta, lse_gated, _ = products.gate_products(do, gates, outputs, of_three)
    joint_backward.backward(
        do,
        q,
        kv(G, (TOKENS - 32) // 16 + 1),
        tokens,
        tokens,
        blocks,
        delta,
        lse_gated,
        geometry,
    )


def learned(shape: str, batch: int) -> None:
    """A learned phi of so many tokens that its tiles are the largest; linear, which is less of the
    same, of one shape.
    """
    G, _, DK, DV, dtype = SHAPES[shape]
    grid, block = {"block": 32, "stride": 16}, 32

    def pair(*sizes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        k, v = (torch.zeros(*one, dtype=dtype) for one in sizes)
        return k, v

    k, v = pair(*((batch, 64 * TOKENS, G, d) for d in (DK, DV)))
    up, position, down = (
        pair(*(sizes(d) for d in (DK, DV)))
        for sizes in (lambda d: (d, block * d), lambda d: (block, d), lambda d: (d, d))
    )
    out, pre = learned_phi.forward(k, v, up, position, down, **grid)
    learned_phi.backward(out, k, v, up, position, down, pre, **grid)
    if shape == "A":
        out, _ = learned_phi.forward(k, v, up, **grid)
        learned_phi.backward(out, k, v, up, **grid)


def decoding(
    shape: str, *, queries: int = 1, ragged: bool = False, documents: bool = False
) -> None:
    """The forwards of few queries, whose keys are split over programs, of one batch row; and of
    many, where they are not.
    """
    G, H, DK, DV, dtype = SHAPES[shape]
    for batch in (1, 300):
        q, k, v = (
            torch.zeros(batch, n, h, d, dtype=dtype)
            for n, h, d in ((queries, G * H, DK), (TOKENS, G, DK), (TOKENS, G, DV))
        )
        where: dict[str, Any] = {
            "q_start": torch.zeros(batch, dtype=torch.int64) if ragged else TOKENS - queries,
            "scale": 0.1,
        }
        first = torch.zeros(queries, dtype=torch.int64) if documents and batch == 1 else None
        for geometry in GEOMETRIES:
            interval.forward(q, k, v, first=first, **geometry, **where)
        for slots in (16, 512):  # one slot a split, and several
            selected.forward(
                q,
                k,
                v,
                torch.zeros(batch, queries, G, slots, dtype=torch.int32),
                sel_block=64,
                **where,
            )


def stepping(shape: str) -> None:
    """A fused decode step: with gates of its own or given ones, one K and V or three, any RoPE."""
    G, H, DK, DV, dtype = SHAPES[shape]
    for batch, copies, rope in ((1, 3, "interleaved"), (300, 1, "half")):

        def zeros(*sizes: int, of: torch.dtype = dtype, batch: int = batch) -> Tensor:
            return torch.zeros(batch, *sizes, dtype=of)

        held = 65_536 if batch == 1 else TOKENS
        counts = (held + 1, 512, 32, held // 16)  # sel, win, raw, cmp
        rows = [zeros(n, G, d) for n in counts for d in (DK, DV)]
        gates = zeros(1, G * H, 3) if copies == 1 else None
        up, down = (torch.zeros(G, DK, n, dtype=dtype) for n in (DK, 3))
        projected = decode_step.Projected(
            zeros(1, G * H, DK),
            zeros(1, copies * G, DK),
            zeros(1, copies * G, DV),
            zeros(1, 1, DK // 2, 2, of=torch.float32),
            torch.zeros(batch, dtype=torch.int64),
            gates,
            None if copies == 1 else up,
            None if copies == 1 else down,
        )
        geometry = decode_step.StepGeometry(32, 16, 64, 16, 1, 2, 0.1, 1.0, rope)
        buffers = decode_step.Buffers(*rows)
        q, made = step_kernels.append(projected, buffers, geometry)
        step_kernels.attend(q, made, projected.position, buffers, geometry)
    dim = 768  # of m7c_125m
    for batch in (1, 64):
        x, hidden = (torch.zeros(batch, 1, n, dtype=dtype) for n in (dim, 4 * dim))
        wide, narrow = (torch.zeros(n, m, dtype=dtype) for n, m in ((4 * dim, dim), (dim, 4 * dim)))
        norm = {"norm": torch.zeros(dim, dtype=dtype), "eps": 1e-7}
        plain: dict[str, Any] = {"norm": None, "eps": 0.0}
        linear.apply(x, [wide[:dim], wide[:384], wide[:384]], silu=False, residual=None, **norm)
        linear.apply(x, [wide], silu=True, residual=None, **norm)
        linear.apply(hidden, [narrow], silu=False, residual=x, **plain)


def over_pages(shape: str, *, fp8: bool = False) -> None:
    """A decode step of few rows over pages of 64 tokens."""
    G, H, DK, DV, dtype = SHAPES[shape]
    B, rows = 2, torch.zeros(2, dtype=torch.int32)

    def pages(kind: torch.dtype) -> paged.Pages:
        k, v = (torch.zeros(3, 64, G, dim, dtype=dtype).to(kind) for dim in (DK, DV))
        scales = (torch.ones(G), torch.ones(G)) if kind != dtype else None
        return paged.Pages(k, v, torch.zeros(B, TOKENS // 64, dtype=torch.int32), scales)

    kept = pages(torch.float8_e4m3fn if fp8 else dtype)
    own = pages(dtype)
    layer = paged.LayerPages(own, own, kept, kept, rows.long(), rows, TOKENS)
    q = torch.zeros(B, 1, G * H, DK, dtype=dtype)
    kv = torch.zeros(B, 1, G, DK, dtype=dtype), torch.zeros(B, 1, G, DV, dtype=dtype)
    paged.append(layer, kv, kv, kv)
    paged.append_means(layer, 1, block=32, stride=16)
    paged.attend(q, layer, paged.StepGeometry(32, 16, 512, 16, (1, 2), 0.1))


def main(arch: int, shape: str) -> None:
    driver.set_active(Absent(arch))
    tiles.sm_of = lambda device: divmod(arch, 10)
    found: list[tuple[str, int]] = []
    instead_of_launching(found)
    # few queries, loaded without descriptors
    everything(shape, roles=arch == 90 and shape in FORWARD_ROLES)
    common.COPY_MIN_ELEMENTS = 0
    if arch >= 90:  # before Hopper nothing is loaded by descriptors
        everything(shape)
    decoding(shape)
    stepping(shape)
    over_pages(shape)
    if shape == "B":
        decoding(shape, queries=4)  # a tile of 64 rows
    if (arch, shape) == (90, "A"):
        # Ragged rows and documents change masks: the language that they are written in is the same
        # for every GPU, and their shared memory was within 512 bytes of the plain kernels' on both.
        over_pages(shape, fp8=True)
        decoding(shape, ragged=True)
        decoding(shape, queries=4, documents=True)
        everything(shape, batch=2, ragged=True)
        everything(shape, documents=True)
    for name, shared_bytes in sorted(set(found)):
        print(name, shared_bytes)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
