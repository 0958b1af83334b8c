"""The kernels with warp roles, on a machine of Python threads: which rows, keys and parts they
take, and that no barrier waits for ever.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from nsa.ops.kernels import products
from nsa.ops.selected.triton import backward as selected_backward
from nsa.ops.selected.triton import chunks
from nsa.ops.selected.triton import forward as selected_forward
from nsa.ops.selected.triton.tile_sizes import RoleTiles
from tests import oracle
from tests.cases import randn
from tests.nsa import warp_roles_machine as machine
from tests.nsa.kernel_cases import poisoned_memory  # noqa: F401

NAMES = ("nsa_selected_forward_roles", "nsa_selected_backward_roles")
ONE_GROUP = RoleTiles(64, 1, 3, 1, 4, 128)
TWO_GROUPS = RoleTiles(64, 2, 4, 2, 4, 168)
SCALE = 0.3
ROWS_OF_A_CHUNK = 31
CASES = pytest.mark.parametrize(
    ("tiles", "batch", "heads", "start"),
    [
        (ONE_GROUP, 1, 6, 0),
        (TWO_GROUPS, 1, 6, 0),
        (TWO_GROUPS, 1, 17, torch.tensor([70])),
        (ONE_GROUP, 2, 6, torch.tensor([3, 70])),
    ],
    ids=["one group", "two groups", "late", "ragged batch"],
)


@pytest.fixture(autouse=True)
def roles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        sys.modules,
        "nsa.ops.selected.triton.warp_roles",
        SimpleNamespace(**machine.kernels(NAMES)),
    )


def inputs(
    batch: int, heads: int, start: int | Tensor, monkeypatch: pytest.MonkeyPatch
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, blocks: block 0, whose list is long, and others, some of the future, some empty; 70
    keys more than queries where rows begin at their own positions. Chunks end inside a sequence.
    """
    tokens, slots = 67, 3
    keys = tokens + (0 if isinstance(start, int) else 70)
    monkeypatch.setattr(chunks, "PART_BYTES", ROWS_OF_A_CHUNK * 2 * slots * heads * 64 * 2)
    monkeypatch.setattr(chunks, "PARTS_OF_Q", 0)
    q = randn(batch, tokens, 2 * heads, 64, seed=1).half()
    k, v = (randn(batch, keys, 2, 64, seed=n).half() for n in (2, 3))
    g = torch.Generator().manual_seed(3)
    count = (keys - 1) // 64 + 1
    blocks = torch.rand(batch, tokens, 2, count, generator=g).argsort(-1)[..., :slots]
    blocks = torch.nn.functional.pad(blocks, (0, slots - blocks.shape[-1]), value=-1)
    blocks[:, 5, 1] = -1
    blocks = blocks.masked_fill(torch.rand(blocks.shape, generator=g) < 0.1, -1)
    return q, k, v, blocks.int()


@CASES
def test_kernels_with_warp_roles(
    tiles: RoleTiles,
    batch: int,
    heads: int,
    start: int | Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q, k, v, blocks = inputs(batch, heads, start, monkeypatch)
    options = {"sel_block": 64, "q_start": start, "scale": SCALE}
    o, lse = selected_forward.forward(q, k, v, blocks, by_row=False, tiles=tiles, **options)
    do = randn(*o.shape, seed=4).half()
    delta = products.row_products(o, do)
    got = (o, *selected_backward.backward(do, q, k, v, blocks, lse, delta, tiles=tiles, **options))
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    want = oracle.selected(*leaves, blocks, **options)
    gradients = torch.autograd.grad(want, leaves, do.double())
    for what, a, b in zip(("o", "dq", "dk", "dv"), got, (want, *gradients), strict=True):
        # fp16 parts, and fp16 weights of their products
        assert (a.double() - b).abs().max() <= 2**-8 * max(1, b.abs().max()), what


def test_rows_that_a_swizzle_does_not_hold_are_refused() -> None:
    q, kv = torch.zeros(1, 3, 4, 60, dtype=torch.float16), torch.zeros(1, 3, 2, 60)
    with pytest.raises(ValueError, match=r"roles want rows of 64 or 128 .* give Tiles, or none"):
        selected_forward.forward(
            q,
            kv.half(),
            kv.half(),
            torch.zeros(1, 3, 2, 1, dtype=torch.int32),
            sel_block=64,
            q_start=0,
            scale=SCALE,
            by_row=False,
            tiles=ONE_GROUP,
        )
