"""The sequential confirmation: blocks that no period of the machine favours, looks that spend their
share once, and verdicts that depend on a cell's own pairs alone.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from perfbench.calibration import simulate
from perfbench.gate import sequential, stats
from perfbench.gate.confirmation import confirm_all, next_looks, plan_confirmation
from perfbench.gate.judgement import CellVerdict, Judgement
from perfbench.gate.judging import judge
from perfbench.gate.pair_rows import MeasuredPairs
from perfbench.gate.sequential import LOOKS, PAIRS_PER_BLOCK, base_first, decide_at, looks_of
from perfbench.matrix.policy import GatePolicy
from perfbench.records import ConfirmationPlan, Run, Verdict
from tests.perfbench import builders as b
from tests.perfbench.edits import reason_of, verdict_of

POLICY = GatePolicy()
TRAIN = "fa2=on,path=v2,seq_len=2048,workload=train"
FORWARD = "fa2=on,path=v2,seq_len=2048,workload=forward"


def contrast(signal: Callable[[int], float], block: int, cell_id: str = "cell") -> float:
    """What a machine that adds ``signal(process)`` does to the candidate in one block."""
    total = 0.0
    for place in range(PAIRS_PER_BLOCK):
        pair = block * PAIRS_PER_BLOCK + place
        first, second = signal(2 * pair), signal(2 * pair + 1)
        total += second - first if base_first(5, cell_id, pair) else first - second
    return total / PAIRS_PER_BLOCK


@pytest.mark.parametrize(
    "signal",
    [lambda t: t, lambda t: t % 2, lambda t: t % 4 // 2, lambda t: (t + 1) % 4 // 2, lambda t: 1],
    ids=["trend", "period 2", "period 4", "period 4, shifted", "constant"],
)
def test_a_block_cancels_drift_and_short_periods(signal: Callable[[int], float]) -> None:
    assert [contrast(signal, block) for block in range(12)] == [0.0] * 12


def test_two_blocks_cancel_a_period_of_a_block() -> None:
    """One of them favours a side, by the seed, and the next one the other side."""
    favoured = [contrast(lambda t: (t % 8) in (0, 3, 5, 6), block) for block in range(400)]
    assert {abs(value) for value in favoured} == {1.0}
    assert [a + b for a, b in zip(favoured[::2], favoured[1::2], strict=True)] == [0.0] * 200
    assert 70 < sum(value > 0 for value in favoured[::2]) < 130
    others = [contrast(lambda t: (t % 8) in (0, 3, 5, 6), n, "another") for n in range(400)]
    assert favoured != others  # each cell has a draw of its own


def test_a_machine_with_the_period_of_a_block_raises_no_false_alarm() -> None:
    """Of the noisier cell; with an order drawn for every block 7 of 5,000 sessions were."""
    world = next(one for one in simulate.WORLDS if one.name == "alone: period of 8")
    tallies = simulate.simulate(world, POLICY, sessions=3000, seed=(9, 0))
    assert sum(tally.sessions for tally in tallies.values()) == 3000
    assert sum(tally.outcomes["REGRESSED"] for tally in tallies.values()) == 0


def test_the_looks_of_all_cells_together_spend_alpha_once() -> None:
    for tests in (1, 7, 57):
        looks = looks_of(LOOKS, tests, POLICY)
        assert [look.pairs for look in looks] == [4, 8, 16, 28, 40]
        spent = tests * math.fsum(look.alpha for look in looks)
        assert spent == pytest.approx(POLICY.alpha_confirm)
        same = math.fsum(look.alpha_same for look in looks)
        assert same == pytest.approx(stats.screen_alpha(POLICY))
    (only,) = looks_of([12], 3, POLICY)
    assert only.is_last and only.alpha <= POLICY.alpha_confirm / 3


def red_of(differences: list[float], pairs: int, tests: int = 1) -> bool:
    look = next(one for one in looks_of(LOOKS, tests, POLICY) if one.pairs == pairs)
    found = decide_at(
        [0.0] * pairs, differences[:pairs], look, POLICY, tolerance_pct=POLICY.tolerance_pct
    )
    return stats.regressed(found.comparison, found.adjusted_p, POLICY)


def test_before_the_last_look_only_a_drop_beyond_ten_per_cent_is_red() -> None:
    rng = random.Random(3)
    noise = [rng.gauss(0, 0.005) for _ in range(40)]
    for pct, early in ((3, False), (9, False), (14, True), (80, True)):
        slower = [x + math.log1p(-pct / 100) for x in noise]
        assert [red_of(slower, pairs) for pairs in (16, 28)] == [early] * 2, pct
        assert red_of(slower, 40)
    assert red_of([x + math.log(0.2) for x in noise], 4, tests=57)


def test_the_last_look_asks_for_the_blocks_too() -> None:
    """Nine of ten blocks favour the base by a period of their own length, in every second pair:
    the pairs alone would call the candidate slower.
    """
    rng = random.Random(1)
    signs = [-1.0] * 36 + [1.0] * 4
    differences = [0.03 * sign * (n % 2) + rng.gauss(0, 1e-4) for n, sign in enumerate(signs)]
    found = stats.paired([0.0] * 40, differences, prior=None, alpha=0.001, power=0.99)
    last = looks_of(LOOKS, 1, POLICY)[-1]
    assert found.p_slower < last.alpha and not red_of(differences, 40)


@pytest.mark.parametrize("name", ["period of 4", "period of 2", "period of 8", "two clocks"])
def test_a_machine_that_alternates_raises_no_false_alarm(name: str) -> None:
    """At 0.1 % two of 300 sessions are seen in 4 % of the cases; a fixed ABBA called every session
    with a period of 4 slower.
    """
    world = next(one for one in simulate.WORLDS if one.name == f"alone: {name}")
    tallies = simulate.simulate(world, POLICY, sessions=300, seed=(9, 0)).values()
    assert sum(tally.sessions for tally in tallies) == 300
    assert sum(tally.outcomes["REGRESSED"] for tally in tallies) <= 1


def test_a_fixed_order_is_fooled_by_a_period_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    """The certificate can fail: with the order of before it does."""
    monkeypatch.setattr(simulate, "base_first", lambda seed, cell_id, pair: pair % 2 == 0)
    world = next(one for one in simulate.WORLDS if one.name == "alone: period of 4")
    tallies = simulate.simulate(world, POLICY, sessions=200, seed=(9, 0)).values()
    assert sum(tally.outcomes["REGRESSED"] for tally in tallies) > 20


# ---- the rows of real runs


def pairs_of(
    factors: dict[str, float], *, pairs: int = 40, sd: float = 0.004, plan: list[str] | None = None
) -> tuple[Run, Run]:
    """Base and candidate with a plan for ``factors``' cells, and rows up to ``pairs``."""
    run = b.small_run(replicates=pairs)
    order = plan or list(factors)
    confirmation = ConfirmationPlan(tests=len(order), looks=list(LOOKS), cells=order)
    sides = []
    for side, seed in (("a", 1), ("b", 2)):
        found = b.with_manifest(run, replicates=LOOKS[-1], confirmation=confirmation)
        for cell_id, factor in factors.items():
            cell = next(one for one in run.manifest.cells if one.cell_id == cell_id)
            rng = random.Random(f"{seed}-{cell_id}")
            speed = b.speed_of(cell) * (factor if side == "b" else 1.0)
            noise = [math.exp(rng.gauss(0, sd)) for _ in range(pairs)]
            found = b.change_rows(
                found,
                cell_id,
                lambda row, cell=cell, speed=speed, noise=noise: b.replicate(  # type: ignore[misc]
                    cell, row.replicate, tok_per_s=speed * noise[row.replicate]
                ),
            )
        sides.append(found)
    return sides[0], sides[1]


def cell_of(judgement: Judgement, cell_id: str) -> CellVerdict:
    return next(cell for cell in judgement.cells if cell.cell_id == cell_id)


def screened(*cells: str) -> Judgement:
    run = b.small_run(replicates=5)
    slow = run
    for cell_id in cells:
        slow = b.scale_rows(slow, cell_id, 0.9)
    found = judge(slow, b.baseline_of(run), POLICY)
    assert sorted(found.to_confirm) == sorted(cells)
    return found


def confirmed(factors: dict[str, float], pairs: int, plan: list[str] | None = None) -> Judgement:
    base, candidate = pairs_of(factors, pairs=pairs, plan=plan)
    measured = MeasuredPairs(base, candidate, list(factors))
    return confirm_all(screened(*factors), [measured], POLICY, {})


def wanted(factors: dict[str, float], pairs: int) -> dict[str, int]:
    base, candidate = pairs_of(factors, pairs=pairs)
    return next_looks(MeasuredPairs(base, candidate, list(factors)), POLICY)


def test_each_cell_stops_by_its_own_pairs() -> None:
    """80 % slower: one block; unchanged: one or two; 3 % slower: all ten."""
    cells = {TRAIN: 0.2, FORWARD: 1.0}
    assert wanted(cells, 4) in ({}, {FORWARD: 8})
    found = confirmed(cells, 8)
    assert (verdict_of(found, TRAIN), verdict_of(found, FORWARD)) == (
        Verdict.REGRESSED,
        Verdict.SAME,
    )
    assert cell_of(found, TRAIN).evidence[0].comparison.n_base == 4
    small = {TRAIN: 0.97, FORWARD: 1.0}
    for pairs, following in ((4, 8), (8, 16), (16, 28), (28, 40)):
        assert wanted(small, pairs)[TRAIN] == following
    assert wanted(small, 40) == {}
    assert verdict_of(confirmed(small, 40), TRAIN) is Verdict.REGRESSED


def test_a_certain_drop_below_min_effect_is_still_found() -> None:
    """2 % with little noise: 3 % is refuted at once, but the cell looks slower beyond its tolerance
    of 1 %, and goes on; .5 % is within it.
    """
    assert wanted({TRAIN: 0.98}, 8)[TRAIN] == 16
    found = confirmed({TRAIN: 0.98}, 40)
    assert verdict_of(found, TRAIN) is Verdict.REGRESSED
    assert wanted({TRAIN: 0.995}, 8) == {}


@pytest.mark.parametrize("factor", [1 / 19, 19.0, 0.8])
def test_the_base_of_a_plan_is_held_against_its_stored_speed(factor: float) -> None:
    """Both sides far from what was stored: the pairs prove them alike, and something is wrong with
    the session or with the baseline. A drop that they confirm stays one.
    """
    for drop, verdict in ((1.0, Verdict.SUSPECT), (0.2, Verdict.REGRESSED)):
        base, candidate = (b.scale_rows(x, TRAIN, factor) for x in pairs_of({TRAIN: drop}, pairs=8))
        measured = [MeasuredPairs(base, candidate, [TRAIN])]
        found = confirm_all(screened(TRAIN), measured, POLICY, {})
        assert verdict_of(found, TRAIN) is verdict
        assert "in this session and is stored with" in reason_of(found, TRAIN)


def test_nothing_is_decided_between_two_looks() -> None:
    """39 of 40 pairs of a drop of 3 %: SUSPECT, and the reason counts the pairs."""
    found = confirmed({TRAIN: 0.97}, 39)
    assert verdict_of(found, TRAIN) is Verdict.SUSPECT
    reason = reason_of(found, TRAIN)
    assert "cut short: 39 of 40 planned pairs; not settled by the look after 28" in reason
    assert cell_of(found, TRAIN).evidence[0].comparison.n_base == 28


def test_another_cells_pairs_change_no_verdict() -> None:
    """As one of two planned cells, with the other's rows, without, and wild."""
    lone = confirmed({TRAIN: 0.97}, 40, plan=[TRAIN, FORWARD])
    both = confirmed({TRAIN: 0.97, FORWARD: 0.5}, 40, plan=[TRAIN, FORWARD])
    assert cell_of(lone, TRAIN).evidence == cell_of(both, TRAIN).evidence


def test_the_share_of_a_cell_is_fixed_at_the_screen() -> None:
    """As one of 57 a cell's p counts 57 times, whatever became of the others."""
    alone = confirmed({TRAIN: 0.97}, 40)
    many = confirmed({TRAIN: 0.97}, 40, plan=[TRAIN, *(f"cell{n}" for n in range(56))])
    p, p_of_many = (cell_of(found, TRAIN).evidence[0].adjusted_p for found in (alone, many))
    assert p_of_many == pytest.approx(57 * p)


def test_the_worst_cell_is_planned_first() -> None:
    run = b.small_run(replicates=5, noise=0.002)
    slow = b.scale_rows(b.scale_rows(run, FORWARD, 0.5), TRAIN, 0.98)
    first = judge(slow, b.baseline_of(run), POLICY)
    plan = plan_confirmation(first)
    assert plan.cells == [FORWARD, TRAIN] and plan.tests == 2 and plan.looks == list(LOOKS)


def test_a_cell_of_few_pairs_waits_for_the_policys_replicates() -> None:
    """min_replicates of 5: the look after 4 pairs judges nothing."""
    policy = GatePolicy(min_replicates=5)
    base, candidate = pairs_of({TRAIN: 0.2}, pairs=4)
    assert next_looks(MeasuredPairs(base, candidate, [TRAIN]), policy) == {TRAIN: 8}
    base, candidate = pairs_of({TRAIN: 0.2}, pairs=8)
    assert next_looks(MeasuredPairs(base, candidate, [TRAIN]), policy) == {}


def test_half_of_the_share_and_more_is_for_the_last_look() -> None:
    looks = looks_of(LOOKS, 1, POLICY)
    assert looks[-1].alpha == pytest.approx(sequential.LAST_SHARE * POLICY.alpha_confirm)
    assert all(one.alpha < looks[-1].alpha for one in looks[:-1])
