"""On CUDA: the kernels of path `triton` one by one, at the paper's geometry; tensors beyond 32-bit
indices; what torch.compile sees.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from nsa import compress
from nsa.ops import gated_sum, interval, means
from nsa.ops.interval import backward_kv_kernels, forward_kernels, roles, tile_sizes
from nsa.ops.kernels import common
from nsa.ops.scores import kernels as scores
from nsa.ops.selected import triton as operator
from nsa.ops.selected.triton import backward as selected_backward
from nsa.ops.selected.triton import chunks, list_calls
from nsa.ops.selected.triton import forward as selected_forward
from nsa.ops.selected.triton.tile_sizes import RoleTiles
from tests import oracle
from tests.cases import (
    SMALL,
    Case,
    assert_bf16_rule,
    assert_blocks,
    assert_lse,
    choose_by_kernel,
    error,
    magnitude,
    randn,
    random_blocks,
)
from tests.gpu.test_parity import (
    DEVICE,
    DTYPES,
    LONG,
    PAPER,
    SHORT,
    assert_rule,
    full_precision_matmuls,  # noqa: F401
    inputs,
)
from tests.nsa.kernel_cases import ORDINARY_LOADS, differentiable, operator_calls

LN2 = 0.6931471805599453
LATE = LONG.tokens - 70
LOADS = pytest.mark.parametrize("loads", ["copy engine", "ordinary"], indirect=True)


@pytest.fixture(autouse=True)
def loads(
    request: pytest.FixtureRequest,
    copy_engine_for_small_tensors: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if getattr(request, "param", "copy engine") == "ordinary":
        monkeypatch.setattr(common, "COPY_MIN_ELEMENTS", ORDINARY_LOADS)


@LOADS
@DTYPES
@pytest.mark.parametrize(
    "case",
    [LONG, SHORT, Case(31, 6, 64, 64, 1), Case(300, 16, 192, 128, 1), Case(300, 6, 60, 100, 2)],
    ids=str,
)
def test_compressed_branch(case: Case, dtype: torch.dtype) -> None:
    q, k, v = inputs(case, dtype)
    k_cmp, v_cmp = compress(k, config=PAPER), compress(v, config=PAPER)
    options = {"block": 32, "stride": 16, "width": None, "q_start": 0, "scale": case.key_dim**-0.5}
    assert_rule(
        lambda *x: interval.attend(*x, **options)[0],
        lambda *x: oracle.compressed(*x, block=32, stride=16)[0],
        (q, k_cmp, v_cmp),
        oracle.kept_compressed(q, k_cmp, block=32, stride=16),
    )
    o, lse = interval.attend(q, k_cmp, v_cmp, **options)
    _, want = oracle.compressed(q, k_cmp, v_cmp, block=32, stride=16)
    assert not o[:, :31].any() and torch.equal(torch.isneginf(lse), torch.isneginf(want))
    if dtype == torch.float32:
        assert_lse(lse * LN2, want)


@LOADS
@DTYPES
@pytest.mark.parametrize("window", [512, 24, 5000])
@pytest.mark.parametrize(
    "case",
    [LONG, SHORT, Case(1, 6, 64, 64, 1), Case(300, 17, 192, 128, 1), Case(300, 1, 60, 100, 2)],
    ids=str,
)
def test_window_branch(case: Case, window: int, dtype: torch.dtype) -> None:
    tensors = inputs(case, dtype)
    assert_rule(
        lambda *x: interval.attend(
            *x, block=1, stride=1, width=window, q_start=0, scale=case.key_dim**-0.5
        )[0],
        lambda *x: oracle.sliding(*x, window=window),
        tensors,
        oracle.kept_window(*tensors[:2], window=window),
    )


@DTYPES
@pytest.mark.parametrize("ragged", [False, True], ids=["late", "ragged"])
def test_window_branch_of_late_queries(ragged: bool, dtype: torch.dtype) -> None:
    q, k, v = inputs(SHORT if ragged else LONG, dtype)
    start = torch.tensor([11, 89], device=DEVICE) if ragged else LATE
    q = q[:, :40].contiguous() if ragged else q[:, LATE:].contiguous()
    assert_rule(
        lambda *x: interval.attend(*x, block=1, stride=1, width=24, q_start=start, scale=64**-0.5)[
            0
        ],
        lambda *x: oracle.sliding(*x, window=24, q_start=start),
        (q, k, v),
        oracle.kept_window(q, k, window=24, q_start=start),
    )


@LOADS
@DTYPES
@pytest.mark.parametrize("start", [0, LATE], ids=["whole", "late"])
def test_choice_of_blocks(start: int, dtype: torch.dtype) -> None:
    q, k, _ = inputs(LONG, dtype)
    q, k_cmp = q[:, start:], compress(k, config=PAPER)
    got = choose_by_kernel(q, k_cmp, PAPER, q_start=start, kv_len=LONG.tokens)
    assert assert_blocks(got, *oracle.select(q, k_cmp, config=PAPER, q_start=start)) <= 0.01
    for _ in range(2):
        assert torch.equal(
            choose_by_kernel(q, k_cmp, PAPER, q_start=start, kv_len=LONG.tokens), got
        )


@DTYPES
@pytest.mark.parametrize("by", ["query-outer", "KV-outer", "KV-outer in chunks"])
@pytest.mark.parametrize(
    "case",
    [SHORT, Case(129, 16, 192, 128, 1), Case(129, 17, 60, 100, 1), Case(129, 1, 16, 256, 2)],
    ids=str,
)
def test_selected_branch_by_either_kernel(
    case: Case, by: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, blocks = inputs(case, dtype), random_blocks(case, SMALL, seed=5).to(DEVICE)
    if by != "query-outer":
        monkeypatch.setattr(list_calls, "SORT_MIN_ROWS", 0)
    if by == "KV-outer in chunks":
        monkeypatch.setattr(
            chunks, "PART_BYTES", 50 * case.kv_heads * case.group * SMALL.num_selected * 64 * 2
        )
    options = {"sel_block": 16, "q_start": 0}
    assert_rule(
        lambda *x: operator.attend(*x, blocks, **options, scale=case.key_dim**-0.5, fa2=None)[0],
        lambda *x: oracle.selected(*x, blocks, **options),
        tensors,
        oracle.kept_selected(*tensors[:2], blocks, **options),
    )


ROLES = {  # of the forward and the backward, by width
    64: (RoleTiles(128, 1, 3, 2, 16, 128), RoleTiles(128, 2, 3, 2, 64, 168, 96)),
    128: (RoleTiles(64, 2, 4, 2, 16, 168), RoleTiles(64, 2, 3, 1, 64, 168)),
}


@pytest.mark.parametrize("rows_of_a_chunk", [None, 300])
@pytest.mark.parametrize("case", [LONG, Case(LONG.tokens, 16, 128, 128, 2)], ids=str)
def test_selected_branch_with_warp_roles(
    case: Case, rows_of_a_chunk: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Hopper the table's entry serves, and no other kernel; elsewhere none has warp roles."""
    tensors = inputs(case, torch.bfloat16)
    blocks = random_blocks(case, PAPER, seed=5).to(DEVICE)
    forward, backward = ROLES[case.key_dim]
    monkeypatch.setattr(list_calls, "SORT_MIN_ROWS", 0)
    monkeypatch.setattr(selected_forward, "FORWARD_ROLES", (forward,) * 4)
    monkeypatch.setattr(selected_backward, "BACKWARD_ROLES", (backward,) * 4)
    if torch.cuda.get_device_capability()[0] == 9:
        monkeypatch.setattr(selected_forward, "nsa_selected_forward", None)
        monkeypatch.setattr(selected_backward, "nsa_selected_backward", None)
    if rows_of_a_chunk is not None:
        row_bytes = case.kv_heads * case.group * PAPER.num_selected * case.key_dim * 2
        monkeypatch.setattr(chunks, "PART_BYTES", rows_of_a_chunk * row_bytes)
        monkeypatch.setattr(chunks, "PARTS_OF_Q", 0)
    options = {"sel_block": 64, "q_start": 0}

    def attend(*x: Tensor) -> Tensor:
        return operator.attend(*x, blocks, **options, scale=case.key_dim**-0.5, fa2=None)[0]

    kept = oracle.kept_selected(*tensors[:2], blocks, **options)
    assert_rule(attend, lambda *x: oracle.selected(*x, blocks, **options), tensors, kept)
    once = attend(*tensors)
    assert all(torch.equal(attend(*tensors), once) for _ in range(2))


@pytest.mark.parametrize("window", [None, 96], ids=["compressed", "window"])
@pytest.mark.parametrize("case", [LONG, Case(LONG.tokens, 16, 128, 128, 2)], ids=str)
def test_intervals_with_warp_roles(
    case: Case, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Hopper the tables' entries serve the forward and the gradients of keys, and no other
    kernel; elsewhere none has warp roles.
    """
    q, k, v = inputs(case, torch.bfloat16)
    monkeypatch.setattr(roles, "SORT_MIN_ROWS", 0)
    if torch.cuda.get_device_capability()[0] == 9:
        monkeypatch.setattr(backward_kv_kernels, "nsa_interval_backward_kv", None)
        if tile_sizes.FORWARD_ROLES[case.key_dim > 64][window is not None]:
            monkeypatch.setattr(forward_kernels, "nsa_interval_forward", None)
    options = {"width": window, "q_start": 0, "scale": case.key_dim**-0.5}
    if window is None:
        k, v = compress(k, config=PAPER), compress(v, config=PAPER)
        options |= {"block": 32, "stride": 16}
        kept = oracle.kept_compressed(q, k, block=32, stride=16)
    else:
        options |= {"block": 1, "stride": 1}
        kept = oracle.kept_window(q, k, window=window)

    def attend(*x: Tensor) -> Tensor:
        return interval.attend(*x, **options)[0]

    def exact(*x: Tensor) -> Tensor:
        if window is None:
            return oracle.compressed(*x, block=32, stride=16)[0]
        return oracle.sliding(*x, window=window)

    assert_rule(attend, exact, (q, k, v), kept)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    once, *others = (
        torch.autograd.grad(attend(*leaves).float().square().sum(), leaves) for _ in range(3)
    )
    for again in others:
        assert all(torch.equal(a, b) for a, b in zip(again, once, strict=True))


@DTYPES
@pytest.mark.parametrize("case", [LONG, Case(32, 6, 64, 64, 1), Case(300, 1, 60, 100, 2)], ids=str)
def test_means_of_keys_and_values(case: Case, dtype: torch.dtype) -> None:
    tensors = inputs(case, dtype)[1:]
    for which in (0, 1):
        assert_bf16_rule(
            lambda k, v, which=which: means.means(k, v, block=32, stride=16)[which],
            lambda k, v, which=which: (
                oracle.compress_mean((k, v)[which], 32, 16) + 0 * (v, k)[which].sum()
            ),
            lambda k, v, which=which: (
                (k, v)[which].unfold(1, 32, 16).mean(-1) + 0 * (v, k)[which].sum()
            ),
            tensors,
            ("k", "v"),
        )


def test_gated_sum() -> None:
    gates = randn(2, 300, 12, 3, seed=0, dtype=torch.bfloat16, device=DEVICE)
    outputs = [
        randn(2, 300, 12, 100, seed=i, dtype=torch.bfloat16, device=DEVICE) for i in (1, 2, 3)
    ]

    def reference(g: Tensor, *outputs: Tensor) -> Tensor:
        return (g[..., None, :] @ torch.stack(outputs, -2))[..., 0, :]

    def fused(g: Tensor, *outputs: Tensor) -> Tensor:
        return gated_sum.fused_gated_sum(g, outputs, (0, 1, 2))

    def eager(g: Tensor, *outputs: Tensor) -> Tensor:
        return gated_sum.gated_sum(g, outputs, (0, 1, 2))

    assert_bf16_rule(fused, reference, eager, (gates, *outputs), ("gates", "cmp", "sel", "win"))


# Beyond 32-bit indices.


def assert_close(got: Tensor, want: Tensor, what: str) -> None:
    """bf16, random inputs: an index that wraps gives another row's numbers."""
    assert error(got, want) <= 4 * 2**-8 * magnitude(want), what


def test_partial_results_of_more_than_2_to_the_31_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows in one chunk: S * N * H * D = 2.2e9 numbers, 4 GB each for o and dQ.

    The last rows are compared.
    """
    tokens, slots, case = 136_000, 16, Case(136_000, 16, 64, 64, 1)
    assert tokens * slots * case.group * case.key_dim > 2**31
    monkeypatch.setattr(chunks, "PART_BYTES", 1 << 40)
    assert_last_rows(case, slots)


def test_inputs_of_more_than_2_to_the_31_elements() -> None:
    """q, o and their gradients hold S * HQ * D = 2.2e9 numbers."""
    case = Case(132_000, 128, 128, 128, 1)
    assert case.tokens * 128 * case.key_dim > 2**31
    assert_last_rows(Case(case.tokens, 64, 128, 128, 1), 2)  # two kv heads of 64 query heads


def assert_last_rows(case: Case, slots: int, rows: int = 64) -> None:
    """Selected and window branch, forward and backward, of the last rows; the last keys are seen by
    those alone.
    """
    T, G, H, D = case.tokens, case.kv_heads, case.group, case.key_dim
    q, k, v = (
        torch.randn(1, T, n, D, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        for n in (G * H, G, G)
    )
    current = torch.arange(T, device=DEVICE, dtype=torch.int32)[:, None] // 64
    slot = torch.arange(slots, device=DEVICE, dtype=torch.int32)
    # a run that ends at the current one
    blocks = (current - slots + 1 + slot).where(
        current >= slots, torch.where(slot <= current, slot, -1)
    )
    blocks = blocks.int()[None, :, None].expand(1, T, G, slots).contiguous()
    tail = slice(T - rows, T)
    kept = (slots + 2) * 64  # tokens that the last rows may see
    base = (T - kept) // 64 * 64
    small = [
        x.detach()[:, part].double().requires_grad_()
        for x, part in ((q, tail), (k, slice(base, T)), (v, slice(base, T)))
    ]
    do = torch.randn(1, rows, G * H, D, device=DEVICE, dtype=torch.bfloat16)
    branches = {
        "sel": (
            lambda: operator.attend(
                q, k, v, blocks, sel_block=64, q_start=0, scale=D**-0.5, fa2=None
            )[0],
            oracle.selected(
                *small, blocks[:, tail] - base // 64, sel_block=64, q_start=T - rows - base
            ),
        ),
        "win": (
            lambda: interval.attend(
                q, k, v, block=1, stride=1, width=100, q_start=0, scale=D**-0.5
            )[0],
            oracle.sliding(*small, window=100, q_start=T - rows - base),
        ),
    }
    for name, (run, want) in branches.items():
        o = run()
        assert_close(o[:, tail], want, name)
        upstream = torch.zeros_like(o)
        upstream[:, tail] = do
        grads = torch.autograd.grad(o, (q, k, v), upstream)
        del o, upstream
        for what, got, true in zip(
            ("dq", "dk", "dv"), grads, torch.autograd.grad(want, small, do.double()), strict=True
        ):
            assert_close(got[:, T - true.shape[1] :], true, f"{name} {what}")
            assert not got[:, : T - true.shape[1]].any(), (
                f"{name} {what}: rows before have no gradient"
            )
        del grads, got


# What torch.compile sees of the operators.


@pytest.fixture
def new_memory_is_filled() -> Iterator[None]:
    """With one value, by PyTorch's deterministic mode."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", operator_calls())
def test_the_operators_keep_what_their_schemas_promise(
    name: str, new_memory_is_filled: None
) -> None:
    """No alias, no mutation, a gradient that is registered; fake tensors as real ones, for dynamic
    shapes as well.

    So few rows leave the lists unwritten, and two calls would find other things in them.
    """
    torch.library.opcheck(getattr(torch.ops.nsa, name).default, differentiable(name, DEVICE))


def test_choice_of_rows_of_a_million_tokens() -> None:
    """16,384 blocks a row, read by tiles, are chosen as where they are held; a chunk of few queries
    chooses what a chunk that fills the GPU does.
    """
    where = {"block": 32, "stride": 16, "q_start": 1 << 20, "first": None, "scale": 0.125}
    keys = (1 << 20) + 8192
    q = randn(1, 8192, 12, 64, seed=1).to(DEVICE, torch.bfloat16)
    k_cmp = randn(1, (keys - 32) // 16 + 1, 2, 64, seed=2).to(DEVICE, torch.bfloat16)
    _, lse = interval.attend(q, k_cmp, k_cmp, width=None, **where)
    slots = {"sel_block": 64, "num_selected": 16, "num_initial": 1, "num_local": 2, "kv_len": keys}

    choose = partial(scores.choose, q, k_cmp, lse, **where, **slots)
    got = choose()
    assert (got[..., 0] == 0).all() and (got.diff(dim=-1) > 0).all()
    assert torch.equal(choose(most_held=1 << 15), got)
    passing = scores.PASSING[0]
    if torch.cuda.get_device_capability()[0] == 9 and passing is not None:
        assert torch.equal(choose(passing=replace(passing, programs=1)), got)
