"""The parent's clock: a process that times, and all of whose own clocks are wrong alike, is found
by the process that waits for it. Cells and sentinels, by real children.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from perfbench.errors import Exit
from perfbench.gate import judge
from perfbench.gate.clocks import MESSAGE_SLACK_S, clock_faults
from perfbench.gate.judgement import Judgement
from perfbench.matrix import policies
from perfbench.records import OtherClocks, Run, SentinelLine, Status, Verdict
from perfbench.runner.executor import ForkServerExecutor
from perfbench.worker import MEASURE
from tests.perfbench import builders
from tests.perfbench.plan_cases import planned_from
from tests.perfbench.runner_cases import run as run_plan

ROOT = Path(__file__).parents[2]
FAST = "tests.perfbench.fast_measure:measure"
SILENT = "tests.perfbench.fast_measure:without_words"
MATRIX, PLAN = planned_from("""\
version: 1
name: clocks
target: {gpu: none}
model: tiny
axes: {workload: [forward], seq_len: [64], path: [v2], fa2: [off], dtype: [fp32]}
measure: {processes: 1, warmup_s: 0.0001, min_sample_ms: 5, samples: 4}
sentinels: [gemm]
""")


def run(tmp_path: Path, measure: str) -> Run:
    with ForkServerExecutor(measure, cwd=ROOT) as executor:
        found: Any = executor
        return run_plan(tmp_path, found, plan=PLAN, matrix=MATRIX).run


def judged(run: Run) -> Judgement:
    return judge(run, None, policies(MATRIX))


def test_fast_clocks_that_agree_are_found_by_the_parent(tmp_path: Path) -> None:
    """All but the parent's: the raw clock and the CPU time of the process confirm the samples."""
    found = run(tmp_path, FAST)
    (row,) = found.replicates
    assert row.status is Status.OK and row.other_clocks is not None, row.reason
    judgement = judged(found)
    assert judgement.exit_code == Exit.NOT_TRUE
    (cell,) = judgement.cells
    assert cell.verdict is Verdict.IMPOSSIBLE and "the parent's clock saw" in cell.reason
    assert "raw clock" not in cell.reason and "CPU time" not in cell.reason
    (finding,) = [one for one in judgement.findings if one.rule == "sentinel clock"]
    assert finding.verdict is Verdict.IMPOSSIBLE
    assert finding.reason.startswith("sentinel gemm, block 0: the samples add up to")
    assert "the parent's clock saw" in finding.reason and "raw clock" not in finding.reason


def test_true_clocks_pass_and_the_parents_window_holds_the_samples(tmp_path: Path) -> None:
    found = run(tmp_path, MEASURE)
    (row,), (line,) = found.replicates, found.sentinels
    for timed, of in ((row, 1), (line, line.steps_per_sample)):
        assert timed.other_clocks is not None and timed.other_clocks.parent_s is not None
        assert of * sum(timed.samples_s) <= timed.other_clocks.raw_s <= timed.other_clocks.parent_s
    assert row.other_clocks is not None and row.other_clocks.parent_s is not None
    assert row.other_clocks.parent_s < row.wall_s
    assert not [one for one in judged(found).findings if "clock" in one.rule]
    assert Verdict.IMPOSSIBLE not in {cell.verdict for cell in judged(found).cells}


def test_a_child_that_does_not_say_when_it_times_is_a_crash(tmp_path: Path) -> None:
    """A child cannot write the parent's seconds itself."""
    found = run(tmp_path, SILENT)
    (row,), (line,) = found.replicates, found.sentinels
    assert row.status is line.status is Status.CRASH and row.tok_per_s is line.rate_per_s is None
    assert "never said when its timing began and ended" in row.reason


def clocks(**known: Any) -> OtherClocks:
    return OtherClocks(**{"raw_s": 4.0, "cpu_s": 3.9, "threads": 1, "parent_s": 4.0, **known})


@pytest.mark.parametrize(
    ("parent_s", "is_odd"),
    [
        (None, False),  # an older row
        (4.0, False),
        (4.0 + MESSAGE_SLACK_S, False),  # a busy machine that passes words on late
        (400.0, True),  # fast by 100
        (5.0, True),
        (3.8, True),  # more samples than time
    ],
)
def test_the_window_holds_the_samples_and_little_else(parent_s: float, is_odd: bool) -> None:
    found = clock_faults([1.0] * 4, clocks(parent_s=parent_s))
    assert len(found) == is_odd and all("the parent's clock saw" in fault for fault in found)


def test_flushes_between_the_steps_may_be_in_the_window() -> None:
    assert clock_faults([1.0] * 4, clocks(raw_s=5.0, between_s=1.0, parent_s=5.5)) == []
    assert clock_faults([1.0] * 4, clocks(raw_s=5.0, between_s=1.0, parent_s=9.0)) != []


def sentinel_run(**changes: Any) -> Run:
    lines: list[SentinelLine] = [builders.sentinel("gemm", **changes)]
    made = builders.small_run(replicates=2)
    return builders.with_manifest(made, sentinels=["gemm"]).model_copy(update={"sentinels": lines})


@pytest.mark.parametrize(
    ("known", "words"),
    [
        ({"raw_s": 3.0, "cpu_s": 2.9}, ""),
        ({"raw_s": 300.0, "cpu_s": 2.9}, "the kernel's raw clock saw 300 s"),
        ({"raw_s": 3.0, "cpu_s": 290.0, "threads": 1}, "290 s of CPU time"),
        ({"raw_s": 3.0, "cpu_s": 2.9, "parent_s": 300.0}, "the parent's clock saw 300 s"),
    ],
)
def test_a_sentinel_is_held_against_every_clock(known: dict[str, Any], words: str) -> None:
    """Three samples, each the mean of ten units of 0.1 s."""
    found = judge(
        sentinel_run(steps_per_sample=10, other_clocks=OtherClocks(**known)),
        None,
        policies(MATRIX),
    ).findings
    odd = [one.reason for one in found if one.rule == "sentinel clock"]
    assert (words == "" and odd == []) or (len(odd) == 1 and words in odd[0])


def test_an_older_sentinel_has_no_other_clock() -> None:
    found = judge(sentinel_run(), None, policies(MATRIX)).findings
    assert not [one for one in found if one.rule == "sentinel clock"]
