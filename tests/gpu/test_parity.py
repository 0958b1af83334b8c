"""On CUDA: every path and FA-2 setting against the fp64 oracle, forward and backward, at the
paper's geometry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

import pytest
import torch
from torch import Tensor

from nsa import (
    NSAConfig,
    RouteError,
    compress,
    compressed_attention,
    engagement,
    nsa_attention,
    select_blocks,
    selected_attention,
    sliding_attention,
)
from nsa.capability import probe
from nsa.config import BRANCHES
from nsa.routing import SPECS, BranchRoute, Path, Problem, Request, route
from tests import oracle
from tests.cases import (
    SMALL,
    Case,
    assert_bf16_rule,
    assert_blocks,
    assert_lse,
    assert_same_function,
    choose_by_kernel,
    eager_attention,
    qkv,
    random_blocks,
    run,
)

DEVICE = "cuda"
PAPER = NSAConfig()
LONG = Case((PAPER.num_selected + 4) * PAPER.sel_block + 1, 6, 64, 64, 1)
SHORT = Case(129, 6, 64, 64, 2)
QKV = ("q", "k", "v")
Attend = Callable[..., Tensor]
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
# FA-2 serves v2 alone, and half precision alone; every other combination is SDPA or a loop.
SELECTED = [(path, "off", dtype) for path in Path for dtype in (torch.bfloat16, torch.float32)]
SELECTED += [(Path.V2, "on", torch.bfloat16)]
EVERY_SELECTED = pytest.mark.parametrize(
    ("path", "fa2", "dtype"), SELECTED, ids=lambda value: str(value).removeprefix("torch.")
)
WINDOW = [("off", torch.bfloat16), ("off", torch.float32), ("on", torch.bfloat16)]
EVERY_WINDOW = pytest.mark.parametrize(
    ("fa2", "dtype"), WINDOW, ids=lambda value: str(value).removeprefix("torch.")
)


@pytest.fixture(autouse=True)
def full_precision_matmuls() -> Iterator[None]:
    """TF32 would make fp32 parity a statement about TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@lru_cache(maxsize=4)
def inputs(case: Case, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return qkv(case, dtype=dtype, device=DEVICE)


@lru_cache(maxsize=2)
def chosen(dtype: torch.dtype) -> Tensor:
    q, k, _ = inputs(LONG, dtype)
    return select_blocks(q, compress(k, config=PAPER), config=PAPER)


def assert_rule(
    function: Attend, reference: Attend, tensors: tuple[Tensor, ...], kept: Tensor
) -> None:
    """The tolerance that NSA.md sets for the tensors' dtype."""
    if tensors[0].dtype == torch.float32:
        assert_same_function(function, reference, tensors, QKV)
    else:
        assert_bf16_rule(function, reference, lambda *x: eager_attention(*x, kept), tensors, QKV)


@DTYPES
def test_selection_at_the_papers_geometry(dtype: torch.dtype) -> None:
    q, k, _ = inputs(LONG, dtype)
    k_cmp = compress(k, config=PAPER)
    assert_blocks(chosen(dtype), *oracle.select(q, k_cmp, config=PAPER))


@EVERY_SELECTED
def test_selected(path: Path, fa2: str, dtype: torch.dtype) -> None:
    tensors, blocks = inputs(LONG, dtype), chosen(dtype)
    assert_rule(
        lambda *x: selected_attention(*x, blocks, sel_block=64, path=path, fa2=fa2),
        lambda *x: oracle.selected(*x, blocks, sel_block=64),
        tensors,
        oracle.kept_selected(*tensors[:2], blocks, sel_block=64),
    )


@EVERY_SELECTED
@pytest.mark.parametrize("ragged", [False, True], ids=["aligned", "ragged"])
def test_selected_with_blocks_given_by_hand(
    path: Path, fa2: str, dtype: torch.dtype, ragged: bool
) -> None:
    """Arbitrary sets, blocks of the future, rows of nothing but -1, rows that begin at different
    positions.
    """
    q, k, v = inputs(SHORT, dtype)
    start: int | Tensor = 0
    if ragged:
        q, start = q[:, :40].contiguous(), torch.tensor([11, 89], device=DEVICE)
    blocks = random_blocks(SHORT, SMALL, seed=5, q_tokens=q.shape[1]).to(DEVICE)
    kept = oracle.kept_selected(q, k, blocks, sel_block=16, q_start=start)
    blind = ~kept.any(-1)
    assert blind.any() and kept.any()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return selected_attention(q, k, v, blocks, sel_block=16, q_start=start, path=path, fa2=fa2)

    assert_rule(
        attend, lambda *x: oracle.selected(*x, blocks, sel_block=16, q_start=start), (q, k, v), kept
    )
    o, grads = run(attend, (q, k, v))
    heads = blind.repeat_interleave(SHORT.group, 2)
    assert not o[heads].any() and not grads[0][heads].any(), "exactly 0"


@EVERY_WINDOW
@pytest.mark.parametrize("case", [LONG, SHORT, Case(1, 6, 64, 64, 1)], ids=str)
@pytest.mark.parametrize("window", [512, 24, 5000])
def test_sliding(case: Case, window: int, fa2: str, dtype: torch.dtype) -> None:
    tensors = inputs(case, dtype)
    assert_rule(
        lambda *x: sliding_attention(*x, window=window, fa2=fa2),
        lambda *x: oracle.sliding(*x, window=window),
        tensors,
        oracle.kept_window(*tensors[:2], window=window),
    )


@EVERY_WINDOW
def test_sliding_with_queries_at_the_end(fa2: str, dtype: torch.dtype) -> None:
    """FA-2's causal mask is aligned bottom-right, SDPA's top-left."""
    q, k, v = inputs(LONG, dtype)
    q = q[:, -70:].contiguous()
    start = LONG.tokens - 70
    assert_rule(
        lambda *x: sliding_attention(*x, window=512, q_start=start, fa2=fa2),
        lambda *x: oracle.sliding(*x, window=512, q_start=start),
        (q, k, v),
        oracle.kept_window(q, k, window=512, q_start=start),
    )


@EVERY_WINDOW
def test_keys_beyond_the_last_query_are_masked(fa2: str, dtype: torch.dtype) -> None:
    """q_start + T < S: bottom-right alignment alone would show the query the wrong keys."""
    q, k, v = inputs(SHORT, dtype)
    q = q[:, :50].contiguous()
    assert_rule(
        lambda *x: sliding_attention(*x, window=24, q_start=20, fa2=fa2),
        lambda *x: oracle.sliding(*x, window=24, q_start=20),
        (q, k, v),
        oracle.kept_window(q, k, window=24, q_start=20),
    )


@DTYPES
@pytest.mark.parametrize("case", [LONG, SHORT, Case(31, 6, 64, 64, 1)], ids=str)
def test_compressed(case: Case, dtype: torch.dtype) -> None:
    q, k, v = inputs(case, dtype)
    k_cmp, v_cmp = compress(k, config=PAPER), compress(v, config=PAPER)
    kept = oracle.kept_compressed(q, k_cmp, block=32, stride=16)
    assert_rule(
        lambda *x: compressed_attention(*x, block=32, stride=16)[0],
        lambda *x: oracle.compressed(*x, block=32, stride=16)[0],
        (q, k_cmp, v_cmp),
        kept,
    )
    o, lse = compressed_attention(q, k_cmp, v_cmp, block=32, stride=16)
    _, true_lse = oracle.compressed(q, k_cmp, v_cmp, block=32, stride=16)
    assert lse.dtype == torch.float32 and not o[:, :31].any()
    if dtype == torch.float32:
        assert_lse(lse, true_lse)
    assert torch.equal(torch.isneginf(lse), torch.isneginf(true_lse))


@DTYPES
def test_compress_mean(dtype: torch.dtype) -> None:
    x = inputs(LONG, dtype)[1]
    assert_bf16_rule(
        lambda x: compress(x, config=PAPER),
        lambda x: oracle.compress_mean(x, 32, 16),
        lambda x: x.unfold(1, 32, 16).mean(-1),
        (x,),
        ("x",),
    )


# The layer: what ran is what was asked for.


def layer(
    tensors: tuple[Tensor, ...], path: Path, fa2: str, branches: tuple[str, ...] = BRANCHES
) -> Tensor:
    q, k, v, gates = tensors
    config = NSAConfig(branches=branches)
    return nsa_attention(q, (k, v), (k, v), (k, v), gates, config=config, path=path, fa2=fa2)


def layer_inputs(dtype: torch.dtype) -> tuple[Tensor, ...]:
    q, k, v = inputs(LONG, dtype)
    gates = torch.rand(*q.shape[:3], 3, generator=torch.Generator().manual_seed(3)).to(
        DEVICE, dtype
    )
    return q, k, v, gates


def routed(path: Path, fa2: str, dtype: torch.dtype, branch: str) -> BranchRoute:
    problem = Problem(
        1, LONG.tokens, LONG.tokens, 12, 2, 64, 64, str(dtype).removeprefix("torch."), (branch,)
    )
    return route(Request(path, fa2), problem, probe("cuda")).branch(branch)


@pytest.mark.parametrize(
    ("path", "fa2", "counters"),
    [
        (Path.MASKED, "off", ("cmp.sdpa", "sel.masked", "sel.sdpa", "win.sdpa")),
        (Path.MASKED, "on", ("cmp.sdpa", "sel.masked", "sel.sdpa", "win.fa2")),
        (Path.V2, "off", ("cmp.sdpa", "sel.v2", "sel.sdpa", "win.sdpa")),
        (Path.V2, "on", ("cmp.sdpa", "sel.v2", "sel.fa2", "win.fa2")),
        (Path.V1, "on", ("cmp.sdpa", "sel.v1", "sel.sdpa", "win.fa2")),
        (Path.TRITON, "off", ("cmp.triton", "score.triton", "sel.triton", "win.triton")),
        (Path.TRITON, "on", ("cmp.triton", "score.triton", "sel.triton", "win.fa2")),
    ],
)
def test_layer(path: Path, fa2: str, counters: tuple[str, ...]) -> None:
    """bf16, gates in bf16: each branch may err by its own rule, so the sum is held to three of
    them.
    """
    tensors = layer_inputs(torch.bfloat16)
    with engagement.collect() as engaged:
        o, grads = run(lambda *x: layer(x, path, fa2), tensors)
    assert dict(engaged.counts) == dict.fromkeys(counters, 1)
    blocks = chosen(torch.bfloat16)
    # which may decide a near-tie otherwise; its choice is judged in test_kernels.py
    if path is Path.TRITON:
        q, k, _ = inputs(LONG, torch.bfloat16)
        blocks = choose_by_kernel(
            q, compress(k, config=PAPER), PAPER, q_start=0, kv_len=LONG.tokens
        )

    def reference(q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
        return oracle.nsa(q, (k, v), (k, v), (k, v), gates, config=PAPER, blocks=blocks)

    true_o, true_grads = run(reference, tensors, dtype=torch.float64)
    for what, got, want in zip(
        ("o", "dq", "dk", "dv", "dgates"), (o, *grads), (true_o, *true_grads), strict=True
    ):
        assert float((got.double() - want).abs().max()) <= 6 * 2**-8 * float(want.abs().max()), what


@pytest.mark.parametrize("path", [Path.V2, "auto"])
def test_fa2_in_fp32_is_refused(path: str) -> None:
    with pytest.raises(RouteError, match="float32"):
        layer(layer_inputs(torch.float32), path, "on")  # type: ignore[arg-type]


# FA-2's backward sums by atomics, and its routes say so.
REPEATABLE = [(path, "sel") for path in Path if SPECS[path].repeatable_on_cuda] + [
    (Path.TRITON, "cmp"),
    (Path.TRITON, "win"),
]


@pytest.mark.parametrize(("path", "branch"), REPEATABLE)
def test_routes_that_claim_it_are_bitwise_repeatable(path: Path, branch: str) -> None:
    assert routed(path, "off", torch.bfloat16, branch).repeatable
    tensors = layer_inputs(torch.bfloat16)
    first, *others = (run(lambda *x: layer(x, path, "off", (branch,)), tensors) for _ in range(3))
    for other in others:
        assert torch.equal(first[0], other[0]), "o"
        for name, a, b in zip((*QKV, "gates"), first[1], other[1], strict=True):
            assert torch.equal(a, b), f"d{name}"


def test_selection_is_bitwise_repeatable() -> None:
    q, k, _ = inputs(LONG, torch.bfloat16)
    k_cmp = compress(k, config=PAPER)
    assert all(
        torch.equal(select_blocks(q, k_cmp, config=PAPER), chosen(torch.bfloat16)) for _ in range(3)
    )


@pytest.mark.parametrize("path", [path for path in Path if not SPECS[path].syncs])
@pytest.mark.parametrize("fa2", ["off", "on"])
def test_routes_that_claim_it_do_not_sync(path: Path, fa2: str) -> None:
    assert not routed(path, "auto", torch.bfloat16, "sel").syncs
    leaves = [x.clone().requires_grad_() for x in layer_inputs(torch.bfloat16)]
    upstream = torch.randn_like(leaves[0])
    # first use may initialise libraries
    torch.autograd.grad(layer(tuple(leaves), path, fa2), leaves, upstream)
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.autograd.grad(layer(tuple(leaves), path, fa2), leaves, upstream)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("fa2", ["off", "on"])
def test_the_window_copies_no_window_per_row(fa2: str) -> None:
    """A copy of w keys per row would take S * w * HKV * D * 2 bytes = 1 GiB for K alone at this
    shape.
    """
    tensors = [
        x.requires_grad_()
        for x in qkv(Case(8192, 6, 64, 64, 1), dtype=torch.bfloat16, device=DEVICE)
    ]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    sliding_attention(*tensors, window=512, fa2=fa2).sum().backward()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 2**29
