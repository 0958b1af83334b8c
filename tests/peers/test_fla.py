"""Against fla-core's pure-PyTorch references (`fla.ops.nsa.naive`, 0.6.0): what is the same
function, and what is not.

They know one geometry: compressed blocks, stride and selection blocks of one size. Their whole
layer also needs a Triton kernel for mean pooling and FlashAttention for its window, neither of
which runs on a CPU; in the tests that call it, these two functions are replaced by loops written
here. Nothing else is replaced.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from nsa import (
    NSAConfig,
    compress,
    compressed_attention,
    functional,
    nsa_attention,
    select_blocks,
    selected_attention,
)
from nsa.settings import Setting, Settings
from tests import oracle
from tests.cases import PATHS_HERE, Case, assert_lse, assert_parity, qkv, randn, run

SIZE = 16
CONFIG = NSAConfig(cmp_block=SIZE, cmp_stride=SIZE, sel_block=SIZE, num_selected=5, window=24)
CASES = [Case(100, 1, 16, 16, 2), Case(129, 6, 12, 8, 1), Case(150, 16, 8, 12, 1)]
EVERY_CASE = pytest.mark.parametrize("case", CASES, ids=str)


@pytest.fixture(scope="module")
def naive() -> ModuleType:
    try:
        return importlib.import_module("fla.ops.nsa.naive")
    except ImportError as missing:
        pytest.fail(
            f"tests/peers was asked for, and fla-core cannot be imported ({missing}); run nox -s"
            " peers, or pip install fla-core==0.6.0"
        )


# What is the same function.


@EVERY_CASE
@pytest.mark.parametrize("path", PATHS_HERE)
def test_selected_attention(naive: ModuleType, path: str, case: Case) -> None:
    """For given blocks of the past, forward and backward; their -1 is masked wherever it stands."""
    q, k, v = qkv(case)
    blocks = select_blocks(q, compress(k, config=CONFIG), config=CONFIG)
    o, grads = run(
        lambda *x: selected_attention(*x, blocks, sel_block=SIZE, path=path, fa2="off"), (q, k, v)
    )
    shuffled = blocks.flip(-1).long()
    want, want_grads = run(lambda *x: naive.naive_nsa_selection(*x, shuffled, SIZE), (q, k, v))
    assert_parity(o, want, "o")
    for name, got, other in zip("qkv", grads, want_grads, strict=True):
        assert_parity(got, other, f"d{name}")


def test_selected_attention_of_packed_documents(naive: ModuleType) -> None:
    """Block ids are each document's own in theirs; here each document goes alone."""
    bounds = [0, 37, 38, 100]
    q, k, v = qkv(Case(100, 2, 8, 8, 1))
    parts = [slice(a, b) for a, b in itertools.pairwise(bounds)]
    blocks = [
        select_blocks(q[:, p], compress(k[:, p], config=CONFIG), config=CONFIG) for p in parts
    ]
    alone = [
        selected_attention(q[:, p], k[:, p], v[:, p], b, sel_block=SIZE)
        for p, b in zip(parts, blocks, strict=True)
    ]
    packed = naive.naive_nsa_selection(
        q, k, v, torch.cat(blocks, 1).long(), SIZE, cu_seqlens=torch.tensor(bounds)
    )
    assert_parity(torch.cat(alone, 1), packed, "o")


@EVERY_CASE
def test_compressed_attention(naive: ModuleType, case: Case) -> None:
    """l = d = l': mean pooling, the staircase, blind rows of 0 and -inf."""
    q, k, v = qkv(case)
    scale = q.shape[-1] ** -0.5

    def ours(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return compressed_attention(
            q, compress(k, config=CONFIG), compress(v, config=CONFIG), block=SIZE, stride=SIZE
        )

    def theirs(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return naive.naive_nsa_compression(q, pooled(k, SIZE), pooled(v, SIZE), SIZE, scale)

    o, grads = run(lambda *x: ours(*x)[0], (q, k, v))
    want, want_grads = run(lambda *x: theirs(*x)[0], (q, k, v))
    assert_parity(o, want, "o")
    for name, got, other in zip("qkv", grads, want_grads, strict=True):
        assert_parity(got, other, f"d{name}")
    assert_lse(ours(q, k, v)[1], theirs(q, k, v)[1])


@EVERY_CASE
def test_chosen_sets(naive: ModuleType, case: Case) -> None:
    """Where nothing ties or underflows, the sets are the same: sum and mean over the heads rank
    alike.
    """
    q, k, _ = qkv(case)
    k_cmp = compress(k, config=CONFIG)
    _, gap = oracle.select(q, k_cmp, config=CONFIG)
    ours = select_blocks(q, k_cmp, config=CONFIG)
    theirs = naive.naive_nsa_topk(
        q, pooled(k, SIZE), CONFIG.num_selected, SIZE, q.shape[-1] ** -0.5
    )
    clear, competing = gap > 1e-4, torch.isfinite(gap)
    assert competing.any() and bool((clear & competing).any())
    assert torch.equal(as_sets(theirs)[clear], ours[clear].long())


def test_a_number_of_blocks_for_each_row(naive: ModuleType) -> None:
    """Theirs takes one count a row, here one call has one n: each row equals the call with its
    n.
    """
    case = CASES[0]
    q, k, _ = qkv(case)
    counts = torch.arange(100).remainder(3).add(3).expand(2, 100)[..., None].repeat(1, 1, 2)
    theirs = as_sets(naive.naive_nsa_topk(q, pooled(k, SIZE), counts, SIZE, q.shape[-1] ** -0.5))
    for n in (3, 4, 5):
        config = replace(CONFIG, num_selected=n)
        ours = select_blocks(q, compress(k, config=CONFIG), config=config)
        assert torch.equal(theirs[counts == n][:, :n], ours[counts == n].long())


def test_a_whole_layer(naive: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three branches and their gates; the window that theirs asks FlashAttention for is w tokens,
    as here.
    """
    asked = on_a_cpu(naive, monkeypatch)
    q, k, v = qkv(CASES[2])
    gates = randn(*q.shape[:3], 3, seed=5).sigmoid()
    options = {
        "block_counts": 5,
        "block_size": SIZE,
        "window_size": CONFIG.window,
        "return_block_indices": True,
    }
    want, blocks = naive.naive_nsa(q, k, v, *gates.unbind(-1), **options)
    assert asked == [{"causal": True, "window_size": (CONFIG.window - 1, 0)}]
    assert torch.equal(
        as_sets(blocks), select_blocks(q, compress(k, config=CONFIG), config=CONFIG).long()
    )
    assert_parity(nsa_attention(q, (k, v), (k, v), (k, v), gates, config=CONFIG), want, "o")


# What is not. Each row is shown by an input in which both disagree.


@dataclass(frozen=True, slots=True)
class Difference:
    """``ours`` and ``theirs`` say in words what ``show`` asserts in numbers; ``why`` is NSA.md's
    reason.
    """

    what: str
    ours: str
    theirs: str
    why: str
    show: Callable[[ModuleType, pytest.MonkeyPatch], None]


def too_few_slots(naive: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len({0, 18, 19} - set(topk(naive, hot(20, b7=3.0), 319, 2))) == 1
    with pytest.raises(ValueError, match="forced"):
        replace(CONFIG, num_selected=2)


def saturated_scores(naive: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = [set(topk(naive, hot(11, **{f"b{j}": 500.0}), 175, 3)) for j in range(1, 9)]
    ours = [set(ours_for(hot(11, **{f"b{j}": 500.0}), 175, 3)) for j in range(1, 9)]
    assert ours == [{0, 9, 10}] * 8
    assert any(
        j in chosen and len(chosen & {0, 9, 10}) == 2 for j, chosen in enumerate(theirs, start=1)
    )


def future_blocks(naive: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = topk(naive, hot(64, b5=500.0), 175, 7), ours_for(hot(64, b5=500.0), 175, 7)
    assert ours == [0, 1, 2, 3, 5, 9, 10]
    assert {0, 5, 9, 10} <= set(theirs) and -1 in theirs


def ties(naive: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = (
        topk(naive, torch.zeros(1, 1100), 17_599, 9),
        ours_for(torch.zeros(1, 1100), 17_599, 9),
    )
    assert ours == [0, 1, 2, 3, 4, 5, 6, 1098, 1099] != sorted(theirs)


def partial_tail(naive: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    k = randn(1, 166, 1, 8, seed=0)
    assert compress(k, config=CONFIG).shape[1] == 10 and pooled(k, SIZE).shape[1] == 11
    assert 10 in ours_for(torch.zeros(1, 10), 165, 5)
    assert 10 not in topk(naive, torch.zeros(1, 10), 165, 5), (
        "their current block must be among the pooled ones"
    )
    assert 10 in topk(naive, torch.zeros(1, 11), 165, 5)


def order(naive: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = naive.naive_nsa_topk(*as_query(hot(20, b3=1.0, b7=3.0), 319), 5, SIZE, 1.0)
    assert theirs.dtype == torch.int64 and theirs[0, -1, 0].tolist()[-2:] == [7, 3]
    assert ours_for(hot(20, b3=1.0, b7=3.0), 319, 5) == [0, 3, 7, 18, 19]


def blind_rows(naive: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv(Case(32, 2, 8, 8, 1))
    blocks = torch.full((1, 32, 2, 2), -1)
    assert naive.naive_nsa_selection(q, k, v, blocks, SIZE).isnan().all()
    assert not selected_attention(q, k, v, blocks.int(), sel_block=SIZE).any()


def repeated_blocks(naive: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv(Case(32, 2, 8, 8, 1))
    once, twice = (torch.tensor(row).expand(1, 32, 2, -1) for row in ([0, 1], [0, 0, 1]))
    theirs = [naive.naive_nsa_selection(q, k, v, blocks, SIZE) for blocks in (once, twice)]
    assert float((theirs[0] - theirs[1])[:, 16:].abs().max()) > 0.05
    monkeypatch.setattr(
        functional.settings,
        "current",
        lambda: Settings(strict_asserts=Setting(True, "environment")),
    )
    with pytest.raises(ValueError, match="without repetition"):
        selected_attention(q, k, v, twice.int(), sel_block=SIZE)


def bf16_scores(naive: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 knows 64 and 64.5: of logits (64.26, 64) and (64.24, 64.24) it makes (64.5, 64) and (64,
    64).
    """
    k_cmp = torch.zeros(1, 20, 1, 4, dtype=torch.bfloat16)
    k_cmp[0, 3, 0], k_cmp[0, 7, 0] = (
        torch.tensor([64, 0.26, 64, 0]).bfloat16(),
        torch.tensor([64, 0.24, 64, 0.24]).bfloat16(),
    )
    q = torch.tensor([[1, 1, 0, 0], [0, 0, 1, 1]]).bfloat16().expand(1, 320, 2, 4)
    theirs = naive.naive_nsa_topk(q, k_cmp, 4, SIZE, 1.0)[0, -1, 0].tolist()
    ours = select_blocks(q, k_cmp, config=replace(CONFIG, num_selected=4), scale=1.0)[
        0, -1, 0
    ].tolist()
    assert set(theirs) == {0, 3, 18, 19} and ours == [0, 7, 18, 19]


def wide_inputs(naive: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv(Case(64, 2, 8, 8, 1), dtype=torch.float64)
    blocks = select_blocks(q, compress(k, config=CONFIG), config=CONFIG)
    reference = oracle.selected(q, k, v, blocks, sel_block=SIZE)
    assert (
        float((naive.naive_nsa_selection(q, k, v, blocks.long(), SIZE) - reference).abs().max())
        > 1e-9
    )
    assert (
        float((selected_attention(q, k, v, blocks, sel_block=SIZE) - reference).abs().max()) < 1e-13
    )


def group_sizes(naive: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv(CASES[1])
    gates = torch.ones(*q.shape[:3], 3)
    with pytest.raises(AssertionError, match="power of 2"):
        naive.naive_nsa(q, k, v, *gates.unbind(-1), block_counts=5, block_size=SIZE)
    assert nsa_attention(q, (k, v), (k, v), (k, v), gates, config=CONFIG).isfinite().all()


def scale_of_the_window(naive: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = on_a_cpu(naive, monkeypatch)
    q, k, v = qkv(CASES[2])
    gates = torch.zeros(*q.shape[:3], 3)
    gates[..., 2] = 1  # the window alone
    options = {"block_counts": 5, "block_size": SIZE, "window_size": CONFIG.window}
    scaled, plain = (
        naive.naive_nsa(q, k, v, *gates.unbind(-1), scale=scale, **options)
        for scale in (0.05, None)
    )
    assert torch.equal(scaled, plain) and all("softmax_scale" not in call for call in asked)
    assert_parity(
        nsa_attention(q, (k, v), (k, v), (k, v), gates, config=CONFIG, scale=0.05),
        oracle.sliding(q, k, v, window=CONFIG.window, scale=0.05),
        "scaled window",
    )
    assert (
        float(
            (nsa_attention(q, (k, v), (k, v), (k, v), gates, config=CONFIG, scale=0.05) - scaled)
            .abs()
            .max()
        )
        > 0.05
    )


DIFFERENCES = (
    Difference(
        "fewer slots than forced blocks",
        "ValueError",
        "a forced block is dropped, perhaps the query's own",
        "forced blocks are reserved inside n; without the current block a query does not see"
        " itself",
        too_few_slots,
    ),
    Difference(
        "forced blocks",
        "ranked above every score",
        "given the score 1.0, which a saturated probability equals, and lose the tie to it",
        "a magic score is a score; slots are reserved",
        saturated_scores,
    ),
    Difference(
        "blocks of the future",
        "absent",
        "ranked with score 0, so they take slots (as -1) from past blocks whose probability"
        " underflowed",
        "a slot for -1 is a block not attended, and which one depends on how long the sequence"
        " will be",
        future_blocks,
    ),
    Difference(
        "equal scores",
        "the lower index",
        "as torch.topk happens to order them",
        "selection is repeatable, and the same on a CPU and a GPU",
        ties,
    ),
    Difference(
        "the partial block at the end",
        "is no compressed block, and is selected all the same",
        "is pooled from fewer tokens, and must be, or the current block cannot be selected",
        "C(S) = (S - l) // d + 1; a block's score needs whole tokens, a forced block needs no"
        " score",
        partial_tail,
    ),
    Difference(
        "order and type of a row of blocks",
        "ascending int32, -1 at the end",
        "by score, int64, -1 where it fell",
        "neighbouring queries' rows are then comparable, and visible tokens are a prefix",
        order,
    ),
    Difference(
        "a row without any key",
        "exactly 0",
        "NaN",
        "one such row would reach every weight's gradient",
        blind_rows,
    ),
    Difference(
        "a block given twice",
        "refused in strict mode; select_blocks never does it",
        "counts twice in the softmax",
        "the selected branch is a softmax over a union of tokens",
        repeated_blocks,
    ),
    Difference(
        "scores of bf16 inputs",
        "fp32, whatever the inputs",
        "logits and probabilities in bf16, which choose another set",
        "rounding scores to bf16 changes the set of most near-uniform rows",
        bf16_scores,
    ),
    Difference(
        "fp64 inputs",
        "attended in fp64",
        "attended in fp32",
        "softmax in fp32, or in the inputs' dtype if wider: gradcheck needs it",
        wide_inputs,
    ),
    Difference(
        "query heads per kv head in the whole layer",
        "any",
        "a power of 2, at least 16",
        "any HQ % HKV == 0 is a model somebody trains",
        group_sizes,
    ),
    Difference(
        "`scale` of the whole layer",
        "of all three branches",
        "of two: the window is called without it",
        "one attention has one scale",
        scale_of_the_window,
    ),
)


@pytest.mark.parametrize("difference", DIFFERENCES, ids=lambda d: d.what)
def test_difference(
    naive: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
    difference: Difference,
) -> None:
    difference.show(naive, monkeypatch)
    record_property(
        "difference", (difference.what, difference.ours, difference.theirs, difference.why)
    )


# Helpers.


def pooled(x: Tensor, size: int, cu_seqlens: Tensor | None = None) -> Tensor:
    """Their mean pooling (a Triton kernel), which takes a partial tail for a block."""
    assert cu_seqlens is None
    return torch.stack(
        [x[:, start : start + size].mean(1) for start in range(0, x.shape[1], size)], 1
    )


def on_a_cpu(naive: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """Let their whole layer run here; returns what it will have asked FlashAttention for."""
    asked: list[dict[str, object]] = []

    def flash(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
        asked.append(options)
        before = options["window_size"][0]  # type: ignore[index]
        return oracle.sliding(q, k, v, window=before + 1).to(q.dtype)

    monkeypatch.setattr(naive, "mean_pooling", pooled)
    monkeypatch.setattr(naive, "flash_attn_func", flash)
    return asked


def as_sets(blocks: Tensor) -> Tensor:
    """Ascending, with -1 at the end."""
    last = torch.iinfo(blocks.dtype).max
    ascending = blocks.masked_fill(blocks < 0, last).sort(-1).values
    return ascending.masked_fill(ascending == last, -1)


def hot(num_blocks: int, **logits: float) -> Tensor:
    """Logits [1, C] of 0, except ``b7=3.0``: block 7 has 3."""
    row = torch.zeros(1, num_blocks)
    for name, value in logits.items():
        row[0, int(name.removeprefix("b"))] = value
    return row


def as_query(logits_HC: Tensor, position: int) -> tuple[Tensor, Tensor]:
    """q [1, position + 1, H, H] and k_cmp [1, C, 1, H] with these logits at scale 1, for every
    query.
    """
    H = logits_HC.shape[0]
    return torch.eye(H).expand(1, position + 1, H, H), logits_HC.T[None, :, None]


def topk(naive: ModuleType, logits_HC: Tensor, position: int, count: int) -> list[int]:
    q, k_cmp = as_query(logits_HC, position)
    return naive.naive_nsa_topk(q, k_cmp, count, SIZE, 1.0)[0, -1, 0].tolist()


def ours_for(logits_HC: Tensor, position: int, count: int) -> list[int]:
    q, k_cmp = as_query(logits_HC, position)
    config = replace(CONFIG, num_selected=count)
    kv_len = max(position + 1, logits_HC.shape[1] * SIZE)
    return select_blocks(
        q[:, -1:], k_cmp, config=config, q_start=position, kv_len=kv_len, scale=1.0
    )[0, 0, 0].tolist()
