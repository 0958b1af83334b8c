"""Options of block selection: packed documents, adaptive n, scoring below fp32, hierarchical
search; and the report on them.

Traps 6 and 9 to 14 again under every option, against a loop over rows in fp64 that shares no code
with the package.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from nsa import selection
from nsa.config import NSAConfig
from tests.cases import SMALL, randn
from tests.selection_report import SelectionReport, recall

# Blocks of four strides over blocks of two, other forced counts, an even n.
WIDE = NSAConfig(
    cmp_block=16, cmp_stride=4, sel_block=8, num_selected=8, num_initial=2, num_local=3
)
LONE = replace(SMALL, num_selected=6, num_initial=0, num_local=1)
ROUNDING = {"float32": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
SCALE = 0.4


def num_cmp(tokens: int, config: NSAConfig) -> int:
    return sum(
        1 for start in range(0, tokens, config.cmp_stride) if start + config.cmp_block <= tokens
    )


def inputs(
    tokens: int,
    config: NSAConfig,
    *,
    queries: int,
    heads: int = 2,
    groups: int = 1,
    batch: int = 1,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """fp64, so that the package's sums and the loop's agree to 1e-13 and no random row is a near
    tie.
    """
    q = randn(batch, queries, groups * heads, 6, seed=seed, dtype=torch.float64)
    return q, randn(batch, num_cmp(tokens, config), groups, 6, seed=seed + 1, dtype=torch.float64)


def loop_scores(
    q_HD: Tensor, k_CD: Tensor, position: int, first: int, config: NSAConfig
) -> dict[int, float]:
    """Score of every candidate block of one row: tokens that it shares with a visible compressed
    block, over the stride.
    """
    dtype = ROUNDING[config.score_dtype]
    limit = torch.finfo(dtype).max
    size, d, width = config.cmp_block, config.cmp_stride, config.sel_block
    visible = [i for i in range(k_CD.shape[0]) if i * d >= first and i * d + size - 1 <= position]
    mass = dict.fromkeys(visible, 0.0)
    for q_D in q_HD.clamp(-limit, limit).to(dtype).double():
        logits = [
            float(q_D @ k_CD[i].clamp(-limit, limit).to(dtype).double()) * SCALE for i in visible
        ]
        weights = [math.exp(x - max(logits)) for x in logits]
        for i, w in zip(visible, weights, strict=True):
            mass[i] += w / sum(weights)
    scores = {}
    for j in range(first // width, position // width + 1):
        shared = {i: min(i * d + size, (j + 1) * width) - max(i * d, j * width) for i in visible}
        scores[j] = sum(mass[i] * tokens / d for i, tokens in shared.items() if tokens > 0)
    return scores


def loop_choice(scores: dict[int, float], config: NSAConfig, n: int) -> list[int]:
    """The chosen blocks of one row, ascending, from the scores of its candidates."""
    begin, current = min(scores), max(scores)
    forced = {j for j in scores if j - begin < config.num_initial or current - j < config.num_local}
    pool = sorted(scores.keys() - forced, key=lambda j: (-scores[j], j))
    if config.selection == "hierarchical" and n < math.inf:
        by_region: dict[int, list[int]] = {}
        for j in pool:  # best first, so each region's list is, too
            by_region.setdefault((j - begin) // 4, []).append(j)
        searched = sorted(by_region, key=lambda r: (-scores[by_region[r][0]], r))[: n // 2]
        pool = sorted(
            (j for r in searched for j in by_region[r][:2]), key=lambda j: (-scores[j], j)
        )
    return sorted(forced | set(pool[: n - len(forced)]))


def loop(
    q: Tensor,
    k_cmp: Tensor,
    config: NSAConfig,
    *,
    q_start: int = 0,
    kv_len: int,
    first: Tensor | None = None,
) -> Tensor:
    B, T = q.shape[:2]
    G = k_cmp.shape[2]
    H, n = q.shape[2] // G, config.num_selected_for(kv_len)
    everything_fits = config.selection == "exact" and n >= math.ceil(kv_len / config.sel_block)
    blocks = torch.full((B, T, G, n), -1, dtype=torch.int32)
    for b, t, g in ((b, t, g) for b in range(B) for t in range(T) for g in range(G)):
        begin = 0 if first is None else int(first[b % first.shape[0], t])
        scores = loop_scores(
            q[b, t, g * H : (g + 1) * H], k_cmp[b, :, g], q_start + t, begin, config
        )
        chosen = sorted(scores) if everything_fits else loop_choice(scores, config, n)
        blocks[b, t, g, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
    return blocks


def choose(
    q: Tensor,
    k_cmp: Tensor,
    config: NSAConfig,
    *,
    q_start: int = 0,
    kv_len: int,
    first: Tensor | None = None,
) -> Tensor:
    return selection.choose(
        q, k_cmp, config=config, q_start=q_start, kv_len=kv_len, scale=SCALE, first=first
    )


def assert_contract(
    blocks: Tensor, config: NSAConfig, *, q_start: int = 0, first: Tensor | None = None
) -> None:
    """Ascending, unique, -1 at the end, inside the document, not in the future, forced blocks once
    each.
    """
    B, T, G, n = blocks.shape
    assert blocks.dtype == torch.int32
    for b, t, g in ((b, t, g) for b in range(B) for t in range(T) for g in range(G)):
        begin = 0 if first is None else int(first[b % first.shape[0], t]) // config.sel_block
        current = (q_start + t) // config.sel_block
        row = blocks[b, t, g].tolist()
        chosen = [j for j in row if j != -1]
        assert row == sorted(set(chosen)) + [-1] * (n - len(chosen))
        assert begin <= chosen[0] and chosen[-1] == current
        initial = range(begin, min(begin + config.num_initial, current + 1))
        local = range(max(begin, current - config.num_local + 1), current + 1)
        assert {*initial, *local} <= set(chosen)


def document_starts(blocks: list[int], sel_block: int, q_start: int, queries: int) -> Tensor:
    """first [1, T] where documents begin at these blocks (and at 0)."""
    starts = [0, *(j * sel_block for j in blocks)]
    return torch.tensor([[max(s for s in starts if s <= q_start + t) for t in range(queries)]])


@settings(max_examples=60)
@given(st.data())
def test_every_option_equals_the_loop(data: st.DataObject) -> None:
    """Trap 9 (Eq. 9 by shared tokens), 11 (softmax over visible blocks only), 13 (no block
    twice).
    """
    base = data.draw(st.sampled_from([SMALL, WIDE, LONE]))
    kind, dtype = (
        data.draw(st.sampled_from(["exact", "hierarchical"])),
        data.draw(st.sampled_from(sorted(ROUNDING))),
    )
    config = replace(base, selection=kind, score_dtype=dtype)
    queries, q_start, rest = (
        data.draw(st.integers(1, 9)),
        data.draw(st.integers(0, 230)),
        data.draw(st.integers(0, 40)),
    )
    heads, groups, batch = (data.draw(st.sampled_from(x)) for x in ((1, 3, 6), (1, 2), (1, 2)))
    kv_len = q_start + queries + rest
    q, k_cmp = inputs(
        kv_len,
        config,
        queries=queries,
        heads=heads,
        groups=groups,
        batch=batch,
        seed=data.draw(st.integers(0, 99)),
    )
    documents = data.draw(st.none() | st.sets(st.integers(1, 14), max_size=3))
    first = (
        None
        if documents is None
        else document_starts(sorted(documents), config.sel_block, q_start, queries)
    )
    blocks = choose(q, k_cmp, config, q_start=q_start, kv_len=kv_len, first=first)
    assert_contract(blocks, config, q_start=q_start, first=first)
    assert torch.equal(blocks, loop(q, k_cmp, config, q_start=q_start, kv_len=kv_len, first=first))


@pytest.mark.parametrize("kind", ["exact", "hierarchical"])
# whose edge blocks are forced: they sum in another order, and tie only on paper
@pytest.mark.parametrize("base", [SMALL, WIDE])
def test_equal_scores_choose_the_lowest_index(base: NSAConfig, kind: str) -> None:
    """Trap 12. q = 0: interior blocks tie exactly; the loop counts shared sub-chunks in whole
    numbers. Two documents.
    """
    config, tokens = replace(base, selection=kind), 240
    _, k_cmp = inputs(tokens, config, queries=1)
    first = document_starts([80 // config.sel_block], config.sel_block, 0, tokens)
    blocks = choose(
        torch.zeros(1, tokens, 3, 6).double(), k_cmp, config, kv_len=tokens, first=first
    )
    size, d, width = config.cmp_block, config.cmp_stride, config.sel_block
    for t in range(tokens):
        begin = int(first[0, t])
        visible = [i for i in range(k_cmp.shape[1]) if i * d >= begin and i * d + size - 1 <= t]
        counts = {
            j: float(
                sum(
                    max(0, min(i * d + size, (j + 1) * width) - max(i * d, j * width)) // d
                    for i in visible
                )
            )
            for j in range(begin // width, t // width + 1)
        }
        assert [j for j in blocks[0, t, 0].tolist() if j >= 0] == loop_choice(
            counts, config, config.num_selected
        ), f"row {t}"


@pytest.mark.parametrize("num_selected", [5, 40])
@pytest.mark.parametrize("kind", ["exact", "hierarchical"])
def test_packed_documents_equal_each_document_alone(kind: str, num_selected: int) -> None:
    """Also where every candidate fits (40 slots), with documents of one token and of many
    blocks.
    """
    config = replace(SMALL, selection=kind, num_selected=num_selected)
    # (begin, end); each begins at a multiple of 16
    rows = [(0, 176), (176, 177), (192, 400), (400, 415)]
    q, k_cmp = inputs(416, config, queries=416, heads=3, groups=2, batch=2)
    first = document_starts([begin // 16 for begin, _ in rows], 16, 0, 416).expand(2, -1)
    packed = choose(q, k_cmp, config, kv_len=416, first=first)
    assert torch.equal(packed, choose(q, k_cmp, config, kv_len=416, first=first[:1]))
    assert_contract(packed, config, first=first)
    for begin, end in rows:
        own = k_cmp[:, begin // 4 : begin // 4 + num_cmp(end - begin, config)]
        alone = choose(q[:, begin:end], own, config, kv_len=end - begin)
        assert torch.equal(packed[:, begin:end], torch.where(alone < 0, -1, alone + begin // 16))


def test_first_of_zeros_is_no_first() -> None:
    q, k_cmp = inputs(300, SMALL, queries=60, heads=3, groups=2, batch=2)
    for config in (
        SMALL,
        replace(SMALL, selection="hierarchical"),
        replace(SMALL, num_selected=20),
    ):
        zeros = choose(
            q, k_cmp, config, q_start=240, kv_len=300, first=torch.zeros(1, 60, dtype=torch.int64)
        )
        assert torch.equal(zeros, choose(q, k_cmp, config, q_start=240, kv_len=300))


def test_chunks_of_queries_carry_their_own_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k_cmp = inputs(300, SMALL, queries=300)
    first = document_starts([3, 11], 16, 0, 300)
    whole = choose(q, k_cmp, SMALL, kv_len=300, first=first)
    # seven queries a chunk
    monkeypatch.setattr(selection, "SCORE_CHUNK_BYTES", 7 * 2 * k_cmp.shape[1] * 4)
    assert torch.equal(choose(q, k_cmp, SMALL, kv_len=300, first=first), whole)


@pytest.mark.parametrize(
    "kind, dtype", [("hierarchical", "float32"), ("exact", "bfloat16"), ("exact", "float16")]
)
@pytest.mark.parametrize("packed", [False, True])
def test_no_hidden_key_changes_a_set(kind: str, dtype: str, packed: bool) -> None:
    """Traps 10 and 11: future keys, and those of another document, made attractive; bit for bit."""
    config = replace(SMALL, selection=kind, score_dtype=dtype)
    q, k_cmp = inputs(240, config, queries=240, heads=3)
    first = document_starts([6], 16, 0, 240) if packed else torch.zeros(1, 240, dtype=torch.int64)
    before = choose(q, k_cmp, config, kv_len=240, first=first)
    for t in (100, 181, 239):
        ends = torch.arange(k_cmp.shape[1]) * 4 + 7
        hidden = (ends > t) | (ends - 7 < first[0, t])
        changed = choose(
            q,
            torch.where(hidden[:, None, None], 1e3 * q[0, t, :1], k_cmp),
            config,
            kv_len=240,
            first=first,
        )
        assert torch.equal(changed[:, t], before[:, t])


@pytest.mark.parametrize("kv_len, width", [(100, 8), (512, 8), (513, 12), (1024, 12), (1025, 16)])
@pytest.mark.parametrize("sel_block", [16, 64])
def test_adaptive_n_goes_by_length(kv_len: int, width: int, sel_block: int) -> None:
    """Trap 6 as well: fewer blocks than slots (sel_block 64)."""
    config = NSAConfig(cmp_block=8, cmp_stride=4, sel_block=sel_block, adaptive_num_selected=True)
    q, k_cmp = inputs(kv_len, config, queries=3)
    blocks = choose(q, k_cmp, config, q_start=kv_len - 3, kv_len=kv_len)
    assert blocks.shape[-1] == width
    assert_contract(blocks, config, q_start=kv_len - 3)
    assert int((blocks[0, -1, 0] >= 0).sum()) == min(width, math.ceil(kv_len / sel_block))
    fixed = replace(config, adaptive_num_selected=False, num_selected=width)
    assert torch.equal(blocks, loop(q, k_cmp, fixed, q_start=kv_len - 3, kv_len=kv_len))


def test_adaptive_n_holds_the_forced_blocks() -> None:
    config = replace(SMALL, adaptive_num_selected=True, num_selected=16, num_initial=4, num_local=6)
    q, k_cmp = inputs(400, config, queries=4)
    blocks = choose(q, k_cmp, config, q_start=396, kv_len=400)
    assert blocks[0, :, 0].tolist() == [[0, 1, 2, 3, 19, 20, 21, 22, 23, 24]] * 4


@pytest.mark.parametrize("score_dtype, bits, mean", [("bfloat16", 8, 8.0), ("float16", 11, 64.0)])
def test_narrow_scoring_changes_close_rows_only(score_dtype: str, bits: int, mean: float) -> None:
    """A logit moves by at most delta = scale * sum |q k| * 2^-bits, so two scores that swap are
    within a factor e^(4 delta).
    """
    config = replace(SMALL, score_dtype=score_dtype)
    q, k_cmp = inputs(400, config, queries=240, heads=2)
    # keys of a common mean: rounding removes part of what distinguishes them
    q, k_cmp = (q * 0.2, k_cmp + mean)
    narrow, exact = (choose(q, k_cmp, c, q_start=160, kv_len=400) for c in (config, SMALL))
    differs = (narrow != exact).any(-1)[0, :, 0]
    for t in differs.nonzero()[:, 0].tolist():
        scores = loop_scores(q[0, t], k_cmp[0, :, 0], 160 + t, 0, SMALL)
        delta = (
            SCALE * float((q[0, t].abs() @ k_cmp[0, :, 0].abs().T).max()) * (2**-bits + 4**-bits)
        )
        lost, gained = (
            set(a[0, t, 0].tolist()) - set(b[0, t, 0].tolist())
            for a, b in ((exact, narrow), (narrow, exact))
        )
        assert max(scores[j] for j in lost) <= min(scores[j] for j in gained) * math.exp(4 * delta)
    report = recall(q, k_cmp, config=config, q_start=160, kv_len=400, scale=SCALE)
    assert 0 < report.changed_share < 0.5 and report.changed_share == pytest.approx(
        int(differs.sum()) / 240
    )
    assert report.near_tie_share < report.changed_share


def test_values_beyond_float16_saturate() -> None:
    config = replace(SMALL, score_dtype="float16")
    q, k_cmp = inputs(200, config, queries=20)
    k_cmp[:, ::7] *= 3e5  # to inf in float16, which would make a row of NaN
    assert torch.equal(
        choose(q, k_cmp, config, q_start=180, kv_len=200),
        loop(q, k_cmp, config, q_start=180, kv_len=200),
    )


def test_narrow_inputs_lose_nothing_in_a_wider_score_dtype() -> None:
    """bf16 inputs within float16's range are exact there, and float32 scores are of the inputs as
    they came.
    """
    q, k_cmp = (x.bfloat16() for x in inputs(200, SMALL, queries=20))
    want = choose(q.float(), k_cmp.float(), SMALL, q_start=180, kv_len=200)
    for score_dtype in ROUNDING:
        assert torch.equal(
            choose(q, k_cmp, replace(SMALL, score_dtype=score_dtype), q_start=180, kv_len=200), want
        )


def hot(logits: dict[int, float]) -> tuple[Tensor, Tensor]:
    """One query at 255, and keys whose logit is given for these selection blocks (of SMALL), 0
    elsewhere.
    """
    k_cmp = torch.zeros(1, 63, 1, 4, dtype=torch.float64)
    for j, logit in logits.items():
        # compressed block 4j + 1 lies inside selection block j
        k_cmp[0, 4 * j + 1] = logit / (4 * SCALE)
    return torch.ones(1, 1, 1, 4, dtype=torch.float64), k_cmp


def test_hierarchical_search_by_hand() -> None:
    """Three hot blocks in one region, of which two stay; block 0 is hot, but forced, and does not
    raise region 0.
    """
    q, k_cmp = hot({0: 9.5, 4: 10, 5: 9, 6: 8, 9: 7, 12: 6})
    config = replace(SMALL, num_selected=7)
    assert choose(q, k_cmp, config, q_start=255, kv_len=256)[0, 0, 0].tolist() == [
        0,
        4,
        5,
        6,
        9,
        14,
        15,
    ]
    config = replace(config, selection="hierarchical")
    assert choose(q, k_cmp, config, q_start=255, kv_len=256)[0, 0, 0].tolist() == [
        0,
        4,
        5,
        9,
        12,
        14,
        15,
    ]
    report = recall(q, k_cmp, config=config, q_start=255, scale=SCALE)
    assert dataclasses.astuple(report) == pytest.approx((1, 6 / 7, 6 / 7, 1.0, 0.0))


@pytest.mark.parametrize("kind", ["exact", "hierarchical"])
def test_a_longer_call_chooses_the_same_blocks(kind: str) -> None:
    """NSA.md, property 5: 256 tokens have 16 blocks for 16 slots, 400 have more."""
    config = replace(SMALL, num_selected=16, selection=kind)
    q, k_cmp = inputs(400, config, queries=400)
    short = choose(q[:, :256], k_cmp[:, : num_cmp(256, config)], config, kv_len=256)
    assert torch.equal(choose(q, k_cmp, config, kv_len=400)[:, :256], short)


def test_hierarchical_search_leaves_slots_empty_where_regions_are_few() -> None:
    """17 blocks, 16 slots: 0, 15 and 16 forced, and two of each of the four regions that hold
    candidates.
    """
    config = replace(SMALL, num_selected=16, selection="hierarchical")
    q, k_cmp = inputs(272, config, queries=1)
    row = choose(q, k_cmp, config, q_start=271, kv_len=272)[0, 0, 0].tolist()
    assert row[11:] == [-1] * 5 and [sum(j // 4 == r for j in row[1:9]) for r in range(4)] == [
        2,
        2,
        2,
        2,
    ]


@pytest.mark.parametrize(
    "kind, score_dtype",
    [("hierarchical", "float32"), ("exact", "bfloat16"), ("hierarchical", "bfloat16")],
)
def test_recall_counts_what_the_loops_differ_in(kind: str, score_dtype: str) -> None:
    config = replace(SMALL, selection=kind, score_dtype=score_dtype, num_selected=8)
    q, k_cmp = inputs(300, config, queries=40, groups=2)
    q = q * 0.05  # near-uniform rows, where rounding matters
    report = recall(q, k_cmp, config=config, q_start=torch.tensor([260]), scale=SCALE)
    exact = (
        loop(q, k_cmp, replace(SMALL, num_selected=8), q_start=260, kv_len=300)
        .flatten(0, 2)
        .tolist()
    )
    chosen = loop(q, k_cmp, config, q_start=260, kv_len=300).flatten(0, 2).tolist()
    shares = [
        len(set(a) & set(b) - {-1}) / len(set(a) - {-1}) for a, b in zip(exact, chosen, strict=True)
    ]
    assert report.rows == 80 == len(shares)
    assert (
        report.mean_recall == pytest.approx(sum(shares) / 80)
        and report.min_recall == pytest.approx(min(shares))
        and min(shares) < 1
    )
    assert report.changed_share == pytest.approx(sum(s < 1 for s in shares) / 80)


def test_recall_is_whole_where_everything_fits_or_nothing_is_changed() -> None:
    q, k_cmp = inputs(80, SMALL, queries=80)
    for config in (
        replace(SMALL, selection="hierarchical"),
        replace(SMALL, score_dtype="bfloat16"),
        SMALL,
    ):
        assert recall(q, k_cmp, config=config) == SelectionReport(80, 1.0, 1.0, 0.0, 0.0)
    q, k_cmp = inputs(300, SMALL, queries=300)
    assert recall(q, k_cmp, config=SMALL) == SelectionReport(300, 1.0, 1.0, 0.0, 0.0)


def test_near_ties_are_counted() -> None:
    """q = 0 ties every two interior blocks, and from the 81st token on they compete."""
    _, k_cmp = inputs(240, SMALL, queries=1)
    report = recall(torch.zeros(1, 240, 2, 6, dtype=torch.float64), k_cmp, config=SMALL)
    assert report.near_tie_share == pytest.approx((240 - 80) / 240) and report.changed_share == 0
    # One logit of 1e4: every other block's score is exactly 0.
    assert recall(*hot({7: 1e4}), config=SMALL, q_start=255, scale=SCALE).near_tie_share == 1
    assert (
        recall(*hot({7: 9.0, 3: 8.0}), config=SMALL, q_start=255, scale=SCALE).near_tie_share == 0
    )


def test_a_report_of_nothing_is_refused_and_one_of_something_is_frozen() -> None:
    q, k_cmp = inputs(80, SMALL, queries=80)
    with pytest.raises(ValueError, match="at least one query"):
        recall(q[:, :0], k_cmp, config=SMALL)
    with pytest.raises(ValueError, match="q is torch.float64"):
        recall(q, k_cmp.float(), config=SMALL)
    with pytest.raises(dataclasses.FrozenInstanceError):
        recall(q, k_cmp, config=SMALL).rows = 0  # type: ignore[misc]


@pytest.mark.parametrize("kind", ["exact", "hierarchical"])
@pytest.mark.parametrize("num_selected", [5, 40])
def test_choose_reads_nothing_on_the_host(kind: str, num_selected: int) -> None:
    """Trap 26. Tensors without contents: reading one value of them raises."""
    config = replace(SMALL, selection=kind, num_selected=num_selected, score_dtype="bfloat16")
    with FakeTensorMode():
        q, k_cmp, first = (
            torch.empty(1, 300, 4, 8),
            torch.empty(1, 74, 2, 8),
            torch.empty(1, 300, dtype=torch.int64),
        )
        assert choose(q, k_cmp, config, kv_len=300, first=first).shape == (1, 300, 2, num_selected)
