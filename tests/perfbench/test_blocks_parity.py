"""Proofs at a cell's own length, and of options that choose other blocks than the exact top n:
green, and red for planted bugs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import dispatch, functional, selection
from nsa.config import ModelConfig, NSAConfig, preset
from nsa.ops import sdpa
from perfbench.records.rows import ParityLine
from perfbench.worker.parity import layer, sizes
from perfbench.worker.parity.blocks import BlocksProof, _against_chance, judge
from tests.perfbench import parity_cases
from tests.perfbench.jobs import TINY, cell_of, route_of

pytestmark = pytest.mark.usefixtures("one_thread")

STANDARD = (5 + 4) * 16 + 1


def prove(path: str = "auto", tokens: int = 64, **options: Any) -> ParityLine:
    return parity_cases.prove(path, tokens, **{"train": False, **options})


def with_options(**changes: Any) -> ModelConfig:
    return replace(TINY, nsa=replace(TINY.nsa, **changes))


# The length of a proof.


@pytest.mark.parametrize("tokens", [1, 7, 20, 24, 25, 80])
def test_a_short_cell_of_auto_is_proved_at_its_own_length(tokens: int) -> None:
    line = prove(tokens=tokens, train=True)
    assert line.ok, line.worst
    assert (line.tokens, line.rows, line.own_length) == (tokens, min(tokens, 64), True)
    assert {"dk_sel", "dv_win", "dgates", "layer"} <= set(line.tensors)


@pytest.mark.parametrize(
    ("path", "tokens"),
    [("auto", 81), ("auto", 4000), ("v2", 20), ("masked", 64), ("adaptive", 2048), ("dense", 20)],
)
def test_other_cells_are_proved_where_blocks_compete(path: str, tokens: int) -> None:
    line = prove(path, tokens)
    assert line.ok and (line.tokens, line.own_length) == (STANDARD, False)


def test_a_window_beyond_the_slots() -> None:
    """Selected blocks compete, and the window leaves nothing out: only auto, at lengths between,
    has that Route.
    """
    model = with_options(window=200)
    assert route_of(cell_of("auto", seq_len=120), model).counters == (
        "cmp.sdpa",
        "sel.masked",
        "sel.sdpa",
        "win.dense",
        "win.sdpa",
    )
    line = prove(tokens=120, model=model)
    assert line.ok and (line.tokens, line.own_length) == (STANDARD, False)
    model = with_options(window=130)  # less than the standard length
    line = prove(tokens=120, model=model)
    assert line.ok and (line.tokens, line.own_length) == (120, True)


def test_without_the_cells_length_a_short_route_is_refused() -> None:
    with pytest.raises(
        sizes.RouteDiffers, match=r"auto at 145 tokens runs .*sel\.masked.*sel\.dense.*time a cell"
    ):
        prove(tokens=STANDARD, timed=route_of(cell_of("auto")))
    with pytest.raises(sizes.RouteDiffers, match=r"auto at 100 tokens"):
        prove(tokens=100, timed=route_of(cell_of("auto")))


@pytest.mark.parametrize("fault", ["sharper", "keys of another head", "not causal"])
def test_a_fault_in_full_causal_attention(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    causal = sdpa.causal
    spoilt: dict[str, Callable[..., Tensor]] = {
        "sharper": lambda q, k, v, *, scale, kernel: causal(
            q, k, v, scale=1.001 * scale, kernel=kernel
        ),
        "keys of another head": lambda q, k, v, **options: causal(q, k.flip(2), v, **options),
        "not causal": lambda q, k, v, *, scale, kernel: sdpa.grouped(
            q, k, v, torch.ones(1, 1, q.shape[1], k.shape[1], dtype=torch.bool), scale=scale
        ),
    }
    monkeypatch.setattr(dispatch.sdpa, "causal", spoilt[fault])
    line = prove()
    assert not line.ok and line.tensors["o"] > 1 and line.tensors["layer"] > 1
    assert prove("masked").ok and prove(tokens=100).ok, "what does not take it is untouched"


def test_adaptive_n_is_proved_with_its_own_number_of_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # 8 at the 225 tokens of the proof
    model = with_options(num_selected=10, adaptive_num_selected=True)
    assert layer.tokens_selecting_all(model.nsa) == 8 * 16
    assert prove("masked", 300, model=model).ok and prove("auto", 128, model=model).ok
    choose = selection.choose
    fixed = replace(model.nsa, num_selected=9, adaptive_num_selected=False)
    monkeypatch.setattr(
        selection, "choose", lambda *x, config, **options: choose(*x, config=fixed, **options)
    )
    assert not prove("masked", 300, model=model).ok


# Options that choose other blocks.

OPTIONS: list[dict[str, Any]] = [
    {"selection": "hierarchical"},
    {"selection": "hierarchical", "score_dtype": "bfloat16"},
    {"selection": "hierarchical", "num_selected": 9},
    {"score_dtype": "bfloat16"},
    {"score_dtype": "float16"},
]


@pytest.mark.parametrize("path", ["masked", "v2"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_an_option_is_proved_and_reported(options: dict[str, Any], path: str) -> None:
    line = prove(path, 300, model=with_options(**options), train=True)
    assert line.ok, line.worst
    report = line.selection
    assert (
        report is not None
        and report["rows"] == 64 * 2 * 2
        and 0.5 < report["recall"] <= 1
        and 0 <= report["changed_share"] < 1
    )
    assert ("recall" in line.tensors) == ("selection" in options)
    assert ParityLine.model_validate_json(line.model_dump_json()).selection == report


def test_the_exact_top_n_reports_nothing() -> None:
    assert prove("masked", 300).selection is None


@pytest.mark.parametrize("seed", range(4))
def test_the_papers_geometry_passes_with_room(seed: int) -> None:
    """Blocks and scores alone, at the length of the proof: 16 slots, 21 blocks."""
    nsa = preset("m7c_125m").nsa
    for options in (
        {"selection": "hierarchical"},
        {"score_dtype": "bfloat16"},
        {"score_dtype": "float16"},
    ):
        config = replace(nsa, **options)
        proof, _ = judged(
            config, kv_len=sizes.standard_tokens(nsa), heads=12, groups=2, dim=64, seed=seed
        )
        assert proof.wrong_rows == 0
        if proof.missed is not None and proof.missed_by_chance is not None:
            assert proof.missed < 0.9 * proof.missed_by_chance


def judged(
    config: NSAConfig,
    *,
    kv_len: int = 300,
    heads: int = 4,
    groups: int = 2,
    dim: int = 16,
    seed: int = 0,
    spoil: Callable[[Tensor], Tensor] = lambda blocks: blocks,
    mean: float = 0.0,
) -> tuple[BlocksProof, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(2, kv_len, heads, dim, generator=generator)
    C = (kv_len - config.cmp_block) // config.cmp_stride + 1
    k_cmp = mean + torch.randn(2, C, groups, dim, generator=generator) * config.cmp_block**-0.5
    rows = torch.randperm(kv_len, generator=generator)[:64].sort().values
    blocks = spoil(functional.select_blocks(q, k_cmp, config=config)[:, rows])
    return (
        judge(q[:, rows], k_cmp, blocks, config=config, rows=rows, kv_len=kv_len),
        blocks,
    )


def one_row(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Change one row alone, the last, whose slots are full."""

    def changed(blocks: Tensor) -> Tensor:
        blocks = blocks.clone()
        blocks[1, -1, 1] = change(blocks[1, -1, 1].clone())
        return blocks

    return changed


MALFORMED: dict[str, Callable[[Tensor], Tensor]] = {
    "descending": lambda row: row.flip(0),
    "repeated": lambda row: row[[0, 1, 2, 2, 4]],
    "a future block": lambda row: torch.where(torch.arange(5) == 4, row + 1, row),
    "below range": lambda row: torch.where(torch.arange(5) == 4, -2, row),
    "padded before the end": lambda row: torch.where(torch.arange(5) == 1, -1, row),
    "without the first block": lambda row: (
        torch.tensor([1, *row[1:].tolist()])
        if row[1] > 1
        else torch.tensor([2, 3, 4, *row[3:].tolist()])
    ),
    "without the current block": lambda row: torch.tensor([*row[:4].tolist(), -1]),
    "none but the forced": lambda row: torch.tensor([0, *row[3:].tolist(), -1, -1]),
}


@pytest.mark.parametrize("fault", MALFORMED)
@pytest.mark.parametrize("options", OPTIONS[:1] + OPTIONS[3:], ids=str)
def test_one_malformed_row_is_seen(options: dict[str, Any], fault: str) -> None:
    config = replace(TINY.nsa, **options)
    proof, blocks = judged(config, spoil=one_row(lambda row: MALFORMED[fault](row).int()))
    assert proof.wrong_rows == 1, blocks[1, -1, 1]


def test_three_of_a_region_are_no_hierarchical_search() -> None:
    config = replace(TINY.nsa, selection="hierarchical", num_selected=6)
    proof, blocks = judged(
        config, spoil=one_row(lambda row: torch.tensor([0, 4, 5, 6, *row[4:].tolist()]).int())
    )
    assert proof.wrong_rows == 1, blocks[1, -1, 1]


def test_more_regions_than_a_search_looks_into() -> None:
    config = replace(TINY.nsa, selection="hierarchical", num_selected=6)
    proof, _ = judged(
        config, spoil=one_row(lambda row: torch.tensor([0, 4, 8, 12, *row[4:].tolist()]).int())
    )
    assert proof.wrong_rows == 0, "three regions are within n // 2"
    proof, _ = judged(
        replace(config, num_selected=5, num_local=1),
        spoil=one_row(lambda row: torch.tensor([0, 4, 8, 12, int(row[4])]).int()),
    )
    assert proof.wrong_rows == 1


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_worst_blocks_are_red(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    """Well formed and attended to rightly: only the scores show it."""
    scores = selection.block_scores
    monkeypatch.setattr(selection, "block_scores", lambda *x: -scores(*x))
    line = prove("masked", 300, model=with_options(**options))
    assert not line.ok and {name for name, ratio in line.tensors.items() if ratio > 1} == {
        "recall" if "selection" in options else "blocks"
    }


@pytest.mark.parametrize("seed", range(5))
def test_a_blind_search_is_red(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Scores drawn at random: as good as chance is not good enough."""
    generator = torch.Generator().manual_seed(seed)
    scores = selection.block_scores
    monkeypatch.setattr(
        selection, "block_scores", lambda *x: torch.rand(scores(*x).shape, generator=generator)
    )
    line = prove("masked", 300, model=with_options(selection="hierarchical"))
    assert not line.ok and line.tensors["recall"] > 1


def test_attention_over_other_blocks_than_the_chosen_is_red(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attend = dispatch.selected
    monkeypatch.setattr(
        dispatch,
        "selected",
        lambda route, q, k, v, blocks, **o: attend(route, q, k, v, blocks.roll(1, 0), **o),
    )
    line = prove("masked", 300, model=with_options(selection="hierarchical"))
    assert not line.ok and line.tensors["o"] > 1 and line.tensors["blocks"] == 0


def test_rounding_explains_many_changed_rows() -> None:
    """Keys of a large common mean lose in bf16 what distinguishes them."""
    proof, _ = judged(replace(TINY.nsa, score_dtype="bfloat16"), mean=32.0)
    assert proof.wrong_rows == 0 and proof.report["changed_share"] > 0.05


def test_only_as_much_as_rounding_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores that are off by up to 0.4 %: within bf16's rounding, beyond fp16's, which is eight
    times finer, and far beyond fp32's.
    """
    scores, generator = selection.block_scores, torch.Generator()

    def off_by(share: float) -> Callable[..., Tensor]:
        return lambda *x: (
            scores(*x) * (1 + share * (2 * torch.rand(scores(*x).shape, generator=generator) - 1))
        )

    wrong: dict[tuple[str, float], int] = {}
    for share in (4e-3, 0.3):
        monkeypatch.setattr(selection, "block_scores", off_by(share))
        for dtype in ("float32", "bfloat16", "float16"):
            proofs = [
                judged(replace(TINY.nsa, score_dtype=dtype), seed=seed)[0] for seed in range(6)
            ]
            wrong[dtype, share] = sum(proof.wrong_rows for proof in proofs)
    assert wrong["bfloat16", 4e-3] == 0 < wrong["float16", 4e-3] <= wrong["float32", 4e-3]
    assert wrong["bfloat16", 0.3] > 100


def test_chance_is_the_hypergeometric_mean() -> None:
    """Drawn without a look, many times: the mean share of hits of k = 2 from f candidates, of which
    s = 2 are exact.
    """
    f, s, k = 7, 2, 2
    hits = [
        len(
            {0, 1} & set(torch.randperm(f, generator=torch.Generator().manual_seed(i))[:k].tolist())
        )
        / s
        for i in range(4000)
    ]
    mean = sum(hits) / len(hits)
    spread = math.sqrt(sum((h - mean) ** 2 for h in hits) / len(hits))
    config = replace(TINY.nsa, selection="hierarchical")
    rows, J = torch.full((50,), 10 * 16 - 1), 10  # current block 9: forced 0, 8 and 9
    chosen = torch.zeros(1, 50, 1, J, dtype=torch.bool)
    chosen[..., [0, 1, 2, 8, 9]] = True
    missed, by_chance = _against_chance(chosen, chosen, config, rows, J)
    assert missed == 0 and by_chance == pytest.approx(
        1 - mean - 3 * spread / math.sqrt(50), abs=0.02
    )
