"""What the report says of the two sides of a comparison, of pairs, and of how to resume
them.
"""

from __future__ import annotations

from perfbench.gate import comparison
from perfbench.gate.judging import judge
from perfbench.records.rows import Replicate, Run, Source
from perfbench.report.context import ReportContext
from tests.perfbench import builders as b
from tests.perfbench.report_cases import POLICY, TRAIN, section, written


def _slower(run: Run, row: Replicate) -> Replicate:
    cell = next(one for one in run.manifest.cells if one.cell_id == row.cell_id)
    return b.replicate(cell, row.replicate, tok_per_s=0.9 * b.speed_of(cell))


def test_two_sides_are_called_what_the_user_called_them() -> None:
    base = b.with_manifest(
        b.small_run(), run_id="x-a", source=Source(commit="a" * 40, dirty_sha256=None)
    )
    run = b.with_manifest(
        b.small_run(),
        run_id="x-b",
        argv=["perfbench", "ab", "v1.2", "my branch", "matrices/h100.yaml", "--seed", "7"],
    )
    judgement = comparison.compare(base, b.scale_rows(run, TRAIN, 0.9), POLICY, paired=True)
    text = written(run, judgement, ReportContext.of(base_run=base))
    assert (
        "candidate `my branch` against base `v1.2`, commit `aaaaaaaaaaaa`, run `x-a`" in text
        and "those of the base." in text
    )
    # branches move
    assert (
        "- against its base, in turns: `perfbench ab aaaaaaaaaaaa 4f1c2d3e4f1c matrices/h100.yaml"
        f" --only cell={TRAIN}`" in text
    )
    assert "`perfbench ab aaaaaaaaaaaa 4f1c2d3e4f1c matrices/h100.yaml --seed 7`, one cell" in text
    four = comparison.compare(
        base, b.with_rows(run, [_slower(run, row) for row in run.replicates]), POLICY, paired=True
    )
    assert four.counts == {"REGRESSED": 4}
    red = section(written(run, four), "Red")
    assert (
        red.index("| cell | verdict | change | adjusted p | MDE |") < red.index("### REGRESSED")
        and red.count("| REGRESSED | -10.00 % |") == 4
    )
    # one red needs no overview
    assert "adjusted p | MDE |\n| --- | --- |" not in section(text, "Red")
    two_files = written(
        b.small_run(),
        comparison.compare(base, b.small_run(), POLICY, paired=False),
        ReportContext.of(base_run=base),
    )
    assert "candidate `4f1c2d3e4f1c` against base `aaaaaaaaaaaa`" in two_files


def test_the_commands_of_a_pair_name_its_commits_and_its_faults() -> None:
    """`ab HEAD HEAD` and a planted slowdown: another HEAD without the fault would measure something
    else.
    """
    fault = f"slowdown=10%@{TRAIN}"
    argv = ["perfbench", "ab", "HEAD", ".", "matrices/h100.yaml", "--inject", fault, "--seed", "5"]
    base = b.with_manifest(
        b.small_run(), run_id="x-a", source=Source(commit="a" * 40, dirty_sha256=None)
    )
    run = b.with_manifest(
        b.scale_rows(b.small_run(), TRAIN, 0.9), run_id="x-b", argv=argv, injections=[fault], seed=5
    )
    text = written(
        run,
        comparison.compare(base, run, POLICY, paired=True),
        ReportContext.of(base_run=base, paired=True),
    )
    assert (
        f"`perfbench ab aaaaaaaaaaaa 4f1c2d3e4f1c matrices/h100.yaml --only cell={TRAIN} --inject"
        f" {fault}`" in text
    )
    assert (
        f"`perfbench ab aaaaaaaaaaaa 4f1c2d3e4f1c matrices/h100.yaml --inject {fault} --seed 5`,"
        " one cell" in text
    )
    dirty = b.with_manifest(run, source=Source(commit="b" * 40, dirty_sha256="5f" * 32))
    text = written(
        dirty,
        comparison.compare(base, dirty, POLICY, paired=True),
        ReportContext.of(base_run=base, paired=True),
    )
    # uncommitted changes are in no commit
    assert "`perfbench ab aaaaaaaaaaaa . matrices/h100.yaml --inject" in text


def test_pairs_need_no_sentinel_and_two_sessions_do() -> None:
    base = b.small_run()
    judgement = comparison.compare(base, base, POLICY, paired=True)
    paired, apart = (
        written(base, judgement, ReportContext.of(base_run=base, paired=paired))
        for paired in (True, False)
    )
    assert (
        "both sides share the session" in paired
        and "cannot be distinguished from slower code" not in paired
    )
    assert (
        "both sides share the session" not in apart
        and "cannot be distinguished from slower code" in apart
    )


def test_a_pair_that_was_cut_short_says_so_at_the_top_and_how_to_go_on() -> None:
    whole = b.small_run(replicates=8, noise=0.05)
    run = b.with_rows(whole, [row for row in whole.replicates if row.replicate < 4])
    base = b.with_rows(
        run, [_slower(run, row) if row.replicate % 2 else row for row in run.replicates]
    )
    judgement = comparison.compare(
        base, run, POLICY, paired=True, resume_command="perfbench ab A B M --resume F"
    )
    text = written(run, judgement, ReportContext.of(base_run=base, paired=True))
    assert (
        judgement.counts == {"WATCH": 4}
        and "cut short: 4 of 8 planned pairs" in text.splitlines()[0]
    )
    assert (
        "What would settle it: The other pairs of the plan (4 of 8 planned pairs were measured)"
        in text
    )
    assert "perfbench ab A B M --resume F" in text


def test_a_run_that_is_its_own_baseline_is_reported() -> None:
    run = b.small_run()
    itself = b.baseline_of(run, run_id=run.manifest.run_id)
    assert "it is compared with itself" in written(run, judge(run, itself, POLICY))
    assert "with itself" not in written(run, judge(run, b.baseline_of(run), POLICY))
