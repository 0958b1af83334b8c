"""Every launch of path triton, forward, backward and decoding, on tensors of zeros.

`at` names the operation that follows; what is launched in it becomes a variant of that name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nsa.ops.gated_sum import kernels as gated_sum
from nsa.ops.interval import backward as interval_backward
from nsa.ops.interval import backward_kv_kernels
from nsa.ops.interval import forward_kernels as interval_forward
from nsa.ops.interval.tile_sizes import BACKWARD_KV_ROLES, RoleSizes
from nsa.ops.interval.tile_sizes import FORWARD_ROLES as IN_USE
from nsa.ops.joint_backward import kernels as joint_backward
from nsa.ops.kernels import common, products, tiles
from nsa.ops.learned_phi import backward as phi_backward
from nsa.ops.learned_phi import forward_kernels as phi_forward
from nsa.ops.means import kernels as means
from nsa.ops.scores import kernels as scores
from nsa.ops.selected.triton import backward as selected_backward
from nsa.ops.selected.triton import dense_tiles
from nsa.ops.selected.triton import forward as selected_forward
from nsa.ops.selected.triton import tile_sizes as selected_sizes
from nsa.ops.selected.triton.block_lists import Lists
from nsa.ops.selected.triton.tile_sizes import RoleTiles
from perfbench.worker.codegen import decode_cases
from perfbench.worker.codegen.builds import SHAPES, CodeShape

At = Callable[[str], None]
TOKENS = 1024
# of compressed keys (blocks of 32 every 16), and of the window
GEOMETRIES: dict[str, dict[str, Any]] = {
    "compressed": {"block": 32, "stride": 16, "width": None},
    "window": {"block": 1, "stride": 1, "width": 512},
}
CHOSEN: dict[str, Any] = {"block": 32, "stride": 16, "sel_block": 64, "num_selected": 16}
# What is in use, and what else fits an SM 9.0 without spills; by the width of keys.
FORWARD_ROLES = {
    64: (*filter(None, selected_sizes.FORWARD_ROLES[:1]), RoleTiles(128, 2, 4, 2, 16, 168)),
    128: (RoleTiles(64, 1, 3, 1, 16, 128), RoleTiles(64, 2, 4, 2, 16, 168)),
}
BACKWARD_ROLES = {
    64: (*filter(None, selected_sizes.BACKWARD_ROLES[:1]),),
    128: (*filter(None, selected_sizes.BACKWARD_ROLES[1:2]),),
}
# by branch, and by the width of keys
INTERVAL_ROLES = {
    "compressed": {
        64: (*filter(None, IN_USE[0][:1]), RoleSizes(64, 3, 2, 80, 112)),
        128: (*filter(None, IN_USE[1][:1]),),
    },
    "window": {
        64: (RoleSizes(64, 3, 2, 80, 112),),  # as fast as Triton's kernel
        128: (*filter(None, IN_USE[1][1:]),),
    },
}


def launch_all(sm: str, name: str, at: At) -> None:
    """Everything that path triton launches for the shape ``name`` on ``sm``, '9.0'; the active
    driver and its launches are the caller's.
    """
    major, minor = map(int, sm.split("."))
    shape = SHAPES[name]
    # masks, and the card whose code takes longest to compile, are compiled as large calls take them
    only_large = shape.ragged or shape.documents or major > 9
    with on_card((major, minor)):
        if not only_large:
            with copied(False):  # few queries are loaded without descriptors
                training(shape, at)
            if major == 9 and shape.key_dim in FORWARD_ROLES:
                warp_roles(shape, at)
        elif major > 9 and name == "A":
            with copied(False):  # one kernel serves few queries alone
                joint(shape, at)
        if major >= 9:  # before Hopper nothing is loaded by descriptors
            with copied(True):
                training(shape, lambda case: at(f"{case}.copy"))
        if shape.dtype == "bfloat16":  # the odd shape's tiles are those of its whole sequences
            decoding(shape, at, many_rows=major == 9)
        if name == "A":  # the one shape of a matrix that decodes
            decode_cases.stepping(shape, at)
            decode_cases.linear_layers(shape, at)
            decode_cases.over_pages(shape, at)
            at("phi")
            learned(shape)
        if sm == "9.0" and name == "A":
            decode_cases.stepping(shape, lambda case: at(f"{case}.pages"), in_pages=True)
            # below 8.9 there is no float8
            decode_cases.over_pages(shape, lambda case: at(f"{case}.float8"), float8=True)


@contextmanager
def on_card(sm: tuple[int, int]) -> Iterator[None]:
    """The kernels' tiles are those of such a card."""
    before = tiles.sm_of
    tiles.sm_of = lambda device: sm
    try:
        for known in (tiles.card_at, tiles.smaller):
            known.cache_clear()
        yield
    finally:
        tiles.sm_of = before
        for known in (tiles.card_at, tiles.smaller):
            known.cache_clear()


@contextmanager
def copied(wanted: bool) -> Iterator[None]:
    """Whether tiles are fetched by descriptors, as where q is large."""
    before = common.COPY_MIN_ELEMENTS
    common.COPY_MIN_ELEMENTS = 0 if wanted else 1 << 62
    try:
        yield
    finally:
        common.COPY_MIN_ELEMENTS = before


def training(shape: CodeShape, at: At) -> None:
    """Forward and backward of every operation, of `TOKENS` queries and keys."""
    batch = 2 if shape.ragged else 1
    q, k, v, do = tensors(shape, batch)
    first = torch.zeros(TOKENS, dtype=torch.int64) if shape.documents else None
    where: dict[str, Any] = {
        "q_start": torch.zeros(batch, dtype=torch.int64) if shape.ragged else 0,
        "scale": 0.1,
    }
    compressed = k[:, : (TOKENS - 32) // 16 + 1].clone(), v[:, : (TOKENS - 32) // 16 + 1].clone()
    for branch, keys in (("compressed", compressed), ("window", (k, v))):
        at(branch)
        given = {"first": first, **GEOMETRIES[branch], **where}
        o, lse = interval_forward.forward(q, *keys, **given)
        interval_backward.backward(do, q, *keys, lse, products.row_products(o, do), **given)
    at("choice")
    of_choice: dict[str, Any] = {"num_initial": 1, "num_local": 2, "kv_len": TOKENS, "first": first}
    blocks = scores.choose(q, compressed[0], lse, **CHOSEN, **of_choice, **where)
    options = {"sel_block": 64, **where}
    at("rows")
    selected_forward.forward(q, k, v, blocks, by_row=True, **options)
    at("lists")
    o, lse = selected_forward.forward(q, k, v, blocks, by_row=False, **options)
    # without tiles so few rows go by dense ones
    by_lists = selected_sizes.backward_tiles(q, shape.value_dim, 64, shape.heads)
    selected_backward.backward(do, q, k, v, blocks, lse, lse, tiles=by_lists, **options)
    Lists.of(blocks, TOKENS // 64, batch * TOKENS, full=0, counted=False)
    at("tiles")
    o, lse = dense_tiles.forward(q, k, v, blocks, **options)
    dense_tiles.backward(do, q, k, v, blocks, lse, lse, **options)
    at("means")
    of_means: dict[str, Any] = {"block": 32, "stride": 16}
    means.backward(*means.forward(k, v, **of_means), tokens=TOKENS, **of_means)
    at("gates")
    gates = torch.zeros(batch, TOKENS, q.shape[2], 3, dtype=q.dtype)
    gated_sum.forward(gates, (o, o, o))
    gated_sum.backward(do, gates, (o, o, o))
    # what is joined was compiled branch by branch, but for two kernels of A and B
    if not shape.ragged and not shape.documents and shape.dtype == "bfloat16":
        joint(shape, at)


def joint(shape: CodeShape, at: At) -> None:
    """The backward of all branches together."""
    q, k, v, do = tensors(shape, 1)
    compressed = k[:, : (TOKENS - 32) // 16 + 1].clone(), v[:, : (TOKENS - 32) // 16 + 1].clone()
    blocks = torch.zeros(1, TOKENS, shape.groups, 16, dtype=torch.int32)
    gates = torch.zeros(1, TOKENS, q.shape[2], 3, dtype=q.dtype)
    o, lse = torch.zeros_like(do), torch.zeros(1, TOKENS, q.shape[2])
    at("joint")
    geometry = joint_backward.Geometry(32, 16, 64, 512, 0.1, 0, None, 512)
    outputs, of_three = (o, o, o), (lse, lse, lse)
    delta, lse_gated, _ = products.gate_products(do, gates, outputs, of_three)
    joint_backward.backward(do, q, compressed, (k, v), (k, v), blocks, delta, lse_gated, geometry)


def learned(shape: CodeShape) -> None:
    """A learned phi of so many tokens that its tiles are the largest."""
    grid: dict[str, Any] = {"block": 32, "stride": 16}
    dims = shape.key_dim, shape.value_dim

    def pair(sizes: Callable[[int], tuple[int, ...]]) -> tuple[Tensor, Tensor]:
        k, v = (torch.zeros(*sizes(d), dtype=getattr(torch, shape.dtype)) for d in dims)
        return k, v

    k, v = pair(lambda d: (1, 64 * TOKENS, shape.groups, d))
    up, position, down = (
        pair(lambda d: (d, 32 * d)),
        pair(lambda d: (32, d)),
        pair(lambda d: (d, d)),
    )
    out, before = phi_forward.forward(k, v, up, position, down, **grid)
    phi_backward.backward(out, k, v, up, position, down, before, **grid)
    out, _ = phi_forward.forward(k, v, up, **grid)
    phi_backward.backward(out, k, v, up, **grid)


def warp_roles(shape: CodeShape, at: At) -> None:
    """What Hopper alone has: branches by warps that fetch and warps that multiply, and scores of
    queries that stay in shared memory.
    """
    q, k, v, do = tensors(shape, 1)
    lse = torch.zeros(1, TOKENS, q.shape[2])
    compressed = k[:, : (TOKENS - 32) // 16 + 1].clone(), v[:, : (TOKENS - 32) // 16 + 1].clone()
    where: dict[str, Any] = {"q_start": 0, "first": None, "scale": 0.1}
    for branch, keys in (("compressed", compressed), ("window", (k, v))):
        geometry = {**GEOMETRIES[branch], **where}
        for sizes in INTERVAL_ROLES[branch][shape.key_dim]:
            at(f"roles.{branch}.{sizes.BC}x{sizes.groups}")
            interval_forward.forward(q, *keys, **geometry, role_sizes=sizes)
        at(f"roles.{branch}")
        of_keys = {
            **geometry,
            "role_sizes": BACKWARD_KV_ROLES[shape.key_dim > 64][branch == "window"],
        }
        backward_kv_kernels.backward_kv(do, q, *keys, lse, lse, **of_keys)
    of_choice: dict[str, Any] = {"num_initial": 1, "num_local": 2, "kv_len": TOKENS}
    at("roles")
    for passing in filter(None, scores.PASSING):
        if scores.passing_takes(q, compressed[0], passing):
            scores.choose(q, compressed[0], lse, passing=passing, **CHOSEN, **of_choice, **where)
            at("roles.million")  # rows of more blocks than `nsa_choose` holds
            far = {**of_choice, **where, "q_start": 1 << 20, "kv_len": (1 << 20) + TOKENS}
            scores.choose(q, compressed[0], lse, passing=passing, **CHOSEN, **far)
    blocks = torch.zeros(1, TOKENS, shape.groups, 16, dtype=torch.int32)
    options: dict[str, Any] = {"sel_block": 64, "q_start": 0, "scale": 0.1}
    for tile in FORWARD_ROLES[shape.key_dim]:
        at(f"roles.{tile.M}x{tile.groups}")
        selected_forward.forward(q, k, v, blocks, by_row=False, tiles=tile, **options)
    for tile in BACKWARD_ROLES[shape.key_dim]:
        at(f"roles.{tile.M}x{tile.groups}")
        selected_backward.backward(do, q, k, v, blocks, lse, lse, tiles=tile, **options)


def decoding(shape: CodeShape, at: At, *, many_rows: bool) -> None:
    """The forwards of one query and of four; of one batch row, whose keys are split over programs,
    and of ``many_rows``, where they are not: the same kernels.
    """
    for queries in (1, 4):
        for batch in (1, 300):
            if batch > 1 and not many_rows:
                continue
            # a tile of 64 rows; many rows of four queries are no other kernels than of one
            if queries > 1 and (batch > 1 or (shape.key_dim < 128 and not shape.documents)):
                continue
            q, k, v, _ = tensors(shape, batch, queries)
            where: dict[str, Any] = {
                "q_start": torch.zeros(batch, dtype=torch.int64)
                if shape.ragged
                else TOKENS - queries,
                "scale": 0.1,
            }
            first = torch.zeros(queries, dtype=torch.int64) if shape.documents else None
            for branch, geometry in GEOMETRIES.items():
                at(f"decode{queries}.{branch}.of{batch}")
                interval_forward.forward(
                    q, k, v, first=first if batch == 1 else None, **geometry, **where
                )
            for slots in (16, 512):  # one slot a split, and several
                at(f"decode{queries}.slots{slots}.of{batch}")
                blocks = torch.zeros(batch, queries, shape.groups, slots, dtype=torch.int32)
                selected_forward.forward(q, k, v, blocks, sel_block=64, **where)


def tensors(
    shape: CodeShape, batch: int, queries: int = TOKENS
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(q, k, v, dO) of ``batch`` rows of `TOKENS` keys and ``queries``."""
    heads, dtype = shape.groups * shape.heads, getattr(torch, shape.dtype)
    sizes = (
        (queries, heads, shape.key_dim),
        (TOKENS, shape.groups, shape.key_dim),
        (TOKENS, shape.groups, shape.value_dim),
        (queries, heads, shape.value_dim),
    )
    q, k, v, do = (torch.zeros(batch, *size, dtype=dtype) for size in sizes)
    return q, k, v, do
