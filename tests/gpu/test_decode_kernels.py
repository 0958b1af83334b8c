"""On CUDA: the kernels of few queries at 65,536 tokens against a plain softmax in fp32; in a graph,
while the lengths advance.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from nsa.decode.graph import capture, warm_up
from nsa.ops.interval import forward_kernels
from nsa.ops.selected.triton import forward as selected_forward
from tests.cases import assert_lse, error, magnitude
from tests.gpu.test_parity import full_precision_matmuls  # noqa: F401

DEVICE, LN2 = "cuda", 0.6931471805599453
TOKENS, LAST = 65_536, 65_535
SHAPES = {"A": (2, 6, 64), "B": (4, 16, 128)}  # kv heads, query heads of each, head dim
SHAPE = pytest.mark.parametrize("shape", SHAPES)
BATCH = pytest.mark.parametrize("batch", [1, 8])
DTYPE = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
GRIDS = {"cmp": (32, 16, None), "win": (1, 1, 512), "causal": (1, 1, None)}  # block, stride, width
Pair = tuple[Tensor, Tensor]


def tensors(
    shape: str, batch: int, tokens: int, dtype: torch.dtype, queries: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    G, H, D = SHAPES[shape]
    generator = torch.Generator(DEVICE).manual_seed(1)
    sizes = ((queries, G * H), (tokens, G), (tokens, G))
    q, k, v = (
        torch.randn(batch, n, heads, D, device=DEVICE, dtype=dtype, generator=generator)
        for n, heads in sizes
    )
    return q, k, v


def softmax(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Pair:
    """(o [B, T, Q, D], lse [B, T, Q]) in fp32, of kept bool [B, T, G or 1, S]; (0, -inf) of a row
    that keeps none.
    """
    grouped = q.float().unflatten(2, (k.shape[2], -1))
    logits = torch.einsum("btghd,bsgd->btghs", grouped, k.float()) * q.shape[3] ** -0.5
    logits = logits.masked_fill(~kept[:, :, :, None], -torch.inf)
    o = torch.einsum("btghs,bsgd->btghd", torch.softmax(logits, -1).nan_to_num(0.0), v.float())
    return o.flatten(2, 3), logits.logsumexp(-1).flatten(2)


def seen(position_BT: Tensor, num_keys: int, block: int, stride: int, width: int | None) -> Tensor:
    """bool [B, T, 1, C]."""
    key, at = torch.arange(num_keys, device=DEVICE), position_BT[..., None]
    kept = key * stride + block - 1 <= at
    if width is not None:
        kept = kept & (key > at - width)
    return kept[:, :, None]


def assert_pair(got: Pair, want: Pair) -> None:
    """Of sums over hundreds of keys: weights and o are rounded to q's dtype once each, half a unit
    of the last place.
    """
    dtype = got[0].dtype
    assert error(got[0], want[0]) <= torch.finfo(dtype).eps * magnitude(want[0])
    assert_lse(got[1] * LN2, want[1])


@DTYPE
@BATCH
@SHAPE
@pytest.mark.parametrize("branch", GRIDS)
def test_interval_of_a_long_sequence(
    branch: str, shape: str, batch: int, dtype: torch.dtype
) -> None:
    """And bit for bit three times; the rows of a batch at several lengths."""
    block, stride, width = GRIDS[branch]
    q, k, v = tensors(shape, batch, (TOKENS - block) // stride + 1, dtype)
    starts = LAST - 8_000 * torch.arange(batch, device=DEVICE)
    given: dict[str, Any] = {
        "block": block,
        "stride": stride,
        "width": width,
        "first": None,
        "scale": q.shape[3] ** -0.5,
    }
    o, lse = forward_kernels.forward(q, k, v, q_start=starts, **given)
    assert_pair((o, lse), softmax(q, k, v, seen(starts[:, None], k.shape[1], block, stride, width)))
    for _ in range(2):
        assert all(
            map(torch.equal, forward_kernels.forward(q, k, v, q_start=starts, **given), (o, lse))
        )


@DTYPE
@BATCH
@SHAPE
def test_selected_of_a_long_sequence(shape: str, batch: int, dtype: torch.dtype) -> None:
    q, k, v = tensors(shape, batch, TOKENS, dtype)
    G = k.shape[2]
    shuffled = torch.rand(
        batch, 1, G, TOKENS // 64, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(2)
    ).argsort(-1)
    blocks = shuffled[..., :16].sort(-1).values.int()
    blocks[..., -1] = TOKENS // 64 - 1  # the current one, of which the query sees a half
    blocks[0, :, 0, 12:] = -1
    position = LAST - 32
    kept = (torch.arange(TOKENS, device=DEVICE) // 64 == blocks[..., None]).any(-2) & (
        torch.arange(TOKENS, device=DEVICE) <= position
    )
    given: dict[str, Any] = {"sel_block": 64, "q_start": position, "scale": q.shape[3] ** -0.5}
    o, lse = selected_forward.forward(q, k, v, blocks, **given)
    assert_pair((o, lse), softmax(q, k, v, kept))
    for _ in range(2):
        assert all(map(torch.equal, selected_forward.forward(q, k, v, blocks, **given), (o, lse)))


@DTYPE
@SHAPE
@pytest.mark.parametrize("branch", GRIDS)
def test_a_few_queries(branch: str, shape: str, dtype: torch.dtype) -> None:
    """A chunk of four, from the first token on and later: rows that see nothing next to rows that
    do.
    """
    block, stride, width = GRIDS[branch]
    q, k, v = tensors(shape, 3, (4_096 - block) // stride + 1, dtype, queries=4)
    starts = torch.tensor([0, 29, 4_092], device=DEVICE)
    given: dict[str, Any] = {
        "block": block,
        "stride": stride,
        "width": width,
        "first": None,
        "scale": q.shape[3] ** -0.5,
    }
    o, lse = forward_kernels.forward(q, k, v, q_start=starts, **given)
    kept = seen(starts[:, None] + torch.arange(4, device=DEVICE), k.shape[1], block, stride, width)
    assert (~kept.any(-1)).any() == (branch == "cmp")
    assert_pair((o, lse), softmax(q, k, v, kept))


@DTYPE
@SHAPE
def test_a_graph_goes_on_as_the_lengths_advance(shape: str, dtype: torch.dtype) -> None:
    """One capture of all three branches: rows that see no compressed block at first, and ones that
    come to fill further splits.
    """
    q, k, v = tensors(shape, 3, 8_192, dtype)
    k_cmp, v_cmp = k[:, :511], v[:, :511]
    starts = torch.tensor([20, 2_070, 8_080], device=DEVICE)
    blocks = (
        torch.arange(16, device=DEVICE, dtype=torch.int32).expand(3, 1, k.shape[2], 16).contiguous()
    )
    scale, kept = q.shape[3] ** -0.5, {}

    def step() -> None:
        common: dict[str, Any] = {"q_start": starts, "scale": scale}
        kept["cmp"] = forward_kernels.forward(
            q, k_cmp, v_cmp, block=32, stride=16, width=None, first=None, **common
        )
        kept["win"] = forward_kernels.forward(
            q, k, v, block=1, stride=1, width=512, first=None, **common
        )
        kept["sel"] = selected_forward.forward(q, k, v, blocks, sel_block=64, **common)

    device = torch.device(DEVICE, torch.cuda.current_device())
    warm_up(step, device)
    replay = capture(step, device)
    for _ in range(4):
        replay()
        at = starts[:, None]
        assert_pair(kept["cmp"], softmax(q, k_cmp, v_cmp, seen(at, 511, 32, 16, None)))
        assert_pair(kept["win"], softmax(q, k, v, seen(at, 8_192, 1, 1, 512)))
        in_blocks = seen(at, 8_192, 1, 1, None) & (torch.arange(8_192, device=DEVICE) < 16 * 64)
        assert_pair(kept["sel"], softmax(q, k, v, in_blocks))
        starts += 25


def launches() -> dict[str, Callable[[int], Any]]:
    """Of seven heads, which no other test compiles."""
    q, k, v = (
        torch.randn(1, n, heads, 64, device=DEVICE, dtype=torch.bfloat16)
        for n, heads in ((1, 7), (8_192, 1), (8_192, 1))
    )
    blocks = torch.zeros(1, 1, 1, 16, device=DEVICE, dtype=torch.int32)
    given: dict[str, Any] = {"block": 1, "stride": 1, "first": None, "scale": 0.125}
    return {
        "cmp": lambda n: forward_kernels.forward(
            q, k[:, :n], v[:, :n], width=None, q_start=n - 1, **given
        ),
        "win": lambda n: forward_kernels.forward(
            q, k[:, :n], v[:, :n], width=512, q_start=n - 1, **given
        ),
        "sel": lambda n: selected_forward.forward(
            q, k[:, :n], v[:, :n], blocks, sel_block=64, q_start=n - 1, scale=0.125
        ),
    }


@pytest.mark.parametrize("branch", ["cmp", "win", "sel"])
def test_a_growing_sequence_compiles_nothing_new(
    branch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths that are multiples of 16, and not; as many splits as there may be, and fewer."""
    launch = launches()[branch]
    compiled: list[str] = []
    monkeypatch.setattr(
        triton.knobs.runtime,
        "jit_post_compile_hook",
        lambda **given: compiled.append(given["repr"]),
    )
    launch(1_000)
    once = len(compiled)
    assert once, "attention over splits; another test may have built their sum"
    for n in (1_001, 1_008, 1_024, 2_049, 4_096, 8_192):
        launch(n)
    assert len(compiled) == once, compiled
