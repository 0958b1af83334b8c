"""Two runs against each other: pairs may be red, two sessions may not, and a side that is not true
is not compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from perfbench.errors import Exit
from perfbench.gate import comparison
from perfbench.matrix.policy import GatePolicy
from perfbench.records.rows import Run, Source, Status
from perfbench.records.verdict import Verdict
from tests.perfbench import builders as b
from tests.perfbench.edits import edit, fail, only_rows, reason_of, throttle, verdict_of

POLICY = GatePolicy()
TRAIN = "fa2=on,path=v2,seq_len=2048,workload=train"


@pytest.mark.parametrize(
    "paired, verdict, exit_code",
    [(True, Verdict.REGRESSED, Exit.REGRESSED), (False, Verdict.SUSPECT, Exit.STRICT)],
)
def test_only_pairs_show_a_regression(paired: bool, verdict: Verdict, exit_code: Exit) -> None:
    base = b.small_run(replicates=8)
    judgement = comparison.compare(base, b.scale_rows(base, TRAIN, 0.95), POLICY, paired=paired)
    assert (verdict_of(judgement, TRAIN), judgement.exit_code) == (verdict, exit_code)
    assert judgement.baseline is not None and judgement.baseline.run_id == base.manifest.run_id
    strict = comparison.compare(
        base, b.scale_rows(base, TRAIN, 0.95), POLICY, paired=paired, strict=True
    )
    assert strict.exit_code is (Exit.REGRESSED if paired else Exit.STRICT)


def test_equal_pairs_are_the_same_and_all_cells_are_one_family() -> None:
    base = b.small_run(replicates=8, noise=0.01)
    judgement = comparison.compare(base, base, POLICY, paired=True)
    assert judgement.counts == {"SAME": 4} and judgement.exit_code is Exit.OK
    assert all(cell.confirmed and cell.evidence[0].adjusted_p == 1 for cell in judgement.cells)
    faster = comparison.compare(base, b.scale_rows(base, TRAIN, 1.5), POLICY, paired=True)
    assert verdict_of(faster, TRAIN) is Verdict.FASTER


@pytest.mark.parametrize("paired", [True, False])
def test_the_hard_gates_hold_for_both_sides(paired: bool) -> None:
    run = b.small_run(replicates=8)
    wrong = comparison.compare(run, edit(run, TRAIN, engaged={}), POLICY, paired=paired)
    assert wrong.exit_code is Exit.WRONG_PATH
    untrue = comparison.compare(edit(run, TRAIN, parity=None), run, POLICY, paired=paired)
    assert verdict_of(
        untrue, TRAIN
    ) is Verdict.NEW and "the base's speed is not to be believed (PARITY" in reason_of(
        untrue, TRAIN
    )


@pytest.mark.parametrize("paired", [True, False])
def test_a_cell_that_one_side_lacks_has_its_name(paired: bool) -> None:
    run = b.small_run(replicates=8)
    fewer = b.with_manifest(
        only_rows(run, TRAIN, set()), cells=[c for c in run.manifest.cells if c.cell_id != TRAIN]
    )
    assert (
        verdict_of(comparison.compare(run, fewer, POLICY, paired=paired), TRAIN) is Verdict.MISSING
    )
    assert verdict_of(comparison.compare(fewer, run, POLICY, paired=paired), TRAIN) is Verdict.NEW


def test_a_base_without_any_speed_compares_nothing() -> None:
    run = b.small_run()
    broken = run
    for cell in run.manifest.cells:
        broken = fail(broken, cell.cell_id, Status.CRASH)
    judgement = comparison.compare(broken, run, POLICY, paired=True)
    assert judgement.exit_code is Exit.BASELINE and "holds no usable speed" in judgement.headline


def test_two_machines_are_incomparable_also_as_pairs() -> None:
    run = b.small_run(replicates=8)
    elsewhere = b.with_manifest(
        b.scale_rows(run, TRAIN, 0.5), environment=b.environment(driver="1")
    )
    judgement = comparison.compare(run, elsewhere, POLICY, paired=True)
    assert (
        judgement.exit_code is Exit.ENVIRONMENT
        and verdict_of(judgement, TRAIN) is Verdict.INCOMPARABLE
    )


@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize(
    ("base_of", "verdict", "words"),
    [
        (lambda run: b.resumed(run, environment=b.environment(driver="1")), Verdict.ENV, "resumed"),
        (
            lambda run: b.with_manifest(run, sentinels=["gemm"]),
            Verdict.ENV,
            "no rate of the sentinel gemm",
        ),
        (
            lambda run: b.with_manifest(run, cells=run.manifest.cells[:-1]),
            Verdict.INCOMPARABLE,
            "not in the run's plan",
        ),
    ],
    ids=["two machines", "no sentinel", "edited"],
)
def test_a_base_run_that_is_wrong_as_a_whole_compares_nothing(
    base_of: Callable[[Run], Run], verdict: Verdict, words: str, paired: bool
) -> None:
    """No cell is judged against it; the finding is reported, with its side."""
    run = b.small_run(replicates=8, noise=0.001)
    judgement = comparison.compare(
        base_of(run), b.scale_rows(run, TRAIN, 0.5), POLICY, paired=paired
    )
    assert judgement.exit_code is Exit.ENVIRONMENT
    (finding,) = judgement.findings
    assert (
        finding.verdict is verdict
        and finding.reason.startswith("the base run: ")
        and words in finding.reason
    )
    assert words in judgement.headline
    assert {cell.verdict for cell in judgement.cells} <= {
        Verdict.INCOMPARABLE,
        Verdict.NEW,
    } and judgement.to_confirm == []
    assert verdict_of(
        judgement, TRAIN
    ) is Verdict.INCOMPARABLE and "the base run is not to be believed" in reason_of(
        judgement, TRAIN
    )


def test_a_base_that_throttled_throughout_says_so() -> None:
    run = b.small_run()
    hot = run
    for cell in run.manifest.cells:
        hot = throttle(hot, cell.cell_id, {0, 1, 2})
    judgement = comparison.compare(hot, run, POLICY, paired=True)
    assert judgement.exit_code is Exit.BASELINE
    assert any(
        f.verdict is Verdict.ENV and "the base run: the card throttled in every one" in f.reason
        for f in judgement.findings
    )


def test_a_base_of_uncommitted_changes_or_faults_is_reported_and_compared() -> None:
    """It may be intended: the user's own tree as a side. No verdict depends on it."""
    run = b.small_run(replicates=8, noise=0.001)
    dirty = b.with_manifest(
        run,
        source=Source(commit=b.COMMIT, dirty_sha256="5f" * 32),
        injections=[f"slowdown=9%@{TRAIN}"],
    )
    judgement = comparison.compare(dirty, run, POLICY, paired=True)
    assert judgement.exit_code is Exit.OK and judgement.counts == {"SAME": 4}
    uncommitted, faults = judgement.notes
    assert "uncommitted changes (5f5f5f5f)" in uncommitted and f"slowdown=9%@{TRAIN}" in faults
    assert comparison.compare(run, run, POLICY, paired=True).notes == ()


def first_pairs(run: Run, count: int, speeds: list[float] | None = None) -> Run:
    """Of every cell the first ``count`` of the planned replicates; of the trained one at these
    speeds.
    """
    kept = b.with_rows(run, [row for row in run.replicates if row.replicate < count])
    cell = next(cell for cell in run.manifest.cells if cell.cell_id == TRAIN)
    return (
        kept
        if speeds is None
        else b.change_rows(
            kept,
            TRAIN,
            lambda row: b.replicate(cell, row.replicate, tok_per_s=speeds[row.replicate]),
        )
    )


def clear_of(p: float) -> tuple[list[float], list[float]]:
    """Three pairs whose one-sided t test (df 2) gives this p: for df 2, p = 1/2 - t / (2 sqrt(2 +
    t^2)).
    """
    root = 1 - 2 * p
    t = root * (2 / (1 - root**2)) ** 0.5
    sd = 0.03 / t * 3**0.5
    return [1000.0] * 3, [1000 * math.exp(-0.03 + sd * z) for z in (-1, 0, 1)]


@pytest.mark.parametrize(("p", "verdict"), [(0.0006, Verdict.WATCH), (0.0001, Verdict.REGRESSED)])
def test_a_pair_that_was_cut_short_is_judged_at_the_alpha_of_all_looks(
    p: float, verdict: Verdict
) -> None:
    """3 of 6 planned pairs of one cell: 0.001 / 6 = 0.000167.

    All 3 of 3 planned are judged at 0.001.
    """
    one = b.make_run(
        [cell for cell in b.small_run().manifest.cells if cell.cell_id == TRAIN], replicates=6
    )
    fast, slow = clear_of(p)
    cut = comparison.compare(
        first_pairs(one, 3, fast),
        first_pairs(one, 3, slow),
        POLICY,
        paired=True,
        resume_command="ab --resume F",
    )
    (cell,) = cut.cells
    assert cell.evidence[0].comparison.p_slower == pytest.approx(p, rel=1e-3)
    assert (cell.verdict, cell.cut_short, cell.confirmed) == (verdict, "3 of 6 planned pairs", True)
    assert (
        cell.reason.startswith("cut short: 3 of 6 planned pairs; ")
        and "alpha 0.001 / 6" in cell.reason
        and "`ab --resume F`" in cell.reason
    )
    assert "cut short: 3 of 6 planned pairs" in cut.headline and cut.exit_code is (
        Exit.REGRESSED if verdict is Verdict.REGRESSED else Exit.OK
    )
    assert cell.evidence[0].alpha == pytest.approx(0.001 / 6)
    whole = [b.with_manifest(first_pairs(one, 3, speeds), replicates=3) for speeds in (fast, slow)]
    (fixed,) = comparison.compare(
        whole[0], whole[1], POLICY, paired=True, resume_command="ab --resume F"
    ).cells
    assert (
        fixed.verdict is Verdict.REGRESSED
        and not fixed.cut_short
        and "cut short" not in fixed.reason
        and "--resume" not in fixed.reason
    )


def test_equal_pairs_that_were_cut_short_say_so_in_the_headline() -> None:
    base = first_pairs(b.small_run(replicates=8, noise=0.0001), 4)
    judgement = comparison.compare(base, base, POLICY, paired=True)
    assert judgement.counts == {"SAME": 4} and judgement.headline.endswith(
        "; cut short: 4 of 8 planned pairs"
    )


def test_noisy_pairs_that_were_cut_short_wait_for_the_others() -> None:
    """At the corrected level 40 pairs would not be enough; the cell is still not BLIND."""
    base = first_pairs(b.small_run(replicates=8, noise=0.06), 4)
    other = first_pairs(b.make_run(base.manifest.cells[::-1], replicates=8, noise=0.06), 4)
    judgement = comparison.compare(
        base, b.with_manifest(other, cells=base.manifest.cells), POLICY, paired=True
    )
    assert judgement.counts == {"WATCH": 4}


def test_throttled_pairs_are_not_cut_short() -> None:
    """They were measured as planned: nobody could have stopped there."""
    base = b.small_run(replicates=8, noise=0.001)
    slow = throttle(b.scale_rows(base, TRAIN, 0.95), TRAIN, {1, 4})
    judgement = comparison.compare(base, slow, POLICY, paired=True)
    (cell,) = (cell for cell in judgement.cells if cell.cell_id == TRAIN)
    assert (
        cell.verdict is Verdict.REGRESSED
        and not cell.cut_short
        and cell.reason.endswith("6 of 8 pairs count")
    )


def test_pairs_that_a_resume_interrupted_were_not_measured_as_planned() -> None:
    """The last pair's second half is of another session: the first one had stopped before it, and
    could be looked at.
    """
    base = b.small_run(replicates=8, noise=0.001)
    again, session = "2026-01-03T00:00:00+00:00", "2026-01-03T01:00:00+00:00"
    late = b.change_rows(
        base,
        TRAIN,
        lambda row: row.model_copy(update={"started_utc": session}) if row.replicate == 7 else row,
    )
    judgement = comparison.compare(base, b.resumed(late, resumed_utc=again), POLICY, paired=True)
    assert {cell.cell_id: cell.cut_short for cell in judgement.cells if cell.cut_short} == {
        TRAIN: "7 of 8 planned pairs"
    }
