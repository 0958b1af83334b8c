"""Bounds of `expect` on what a step costs: read from the matrix, held against stored rows without a
baseline, shown everywhere, and looser only by a reviewed change.
"""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from nsa.settings import Settings
from perfbench.errors import Exit
from perfbench.gate.judgement import CellVerdict, Judgement
from perfbench.gate.judging import judge
from perfbench.gate.strictness import joint_rules
from perfbench.history.from_run import history_run
from perfbench.matrix import JudgeRules, build_plan, policies
from perfbench.matrix.matrix import parse_matrix
from perfbench.matrix.policy import GatePolicy
from perfbench.records.rows import Expect, Run
from perfbench.records.verdict import Verdict
from perfbench.report import junit, verdict_json
from perfbench.report.terminal import terminal_table
from perfbench.worker import profile
from tests.perfbench import builders as b
from tests.perfbench import version_measure
from tests.perfbench.ab_bench import SHORT, Bench
from tests.perfbench.edits import edit, reason_of, verdict_of
from tests.perfbench.matrix_text import edited, error_of, parse

POLICY = GatePolicy()

TRAIN = "fa2=on,path=v2,seq_len=2048,workload=train"
DENSE = "path=dense,seq_len=2048,workload=train"
RULE = "  - {match: {path: v2}, engaged: [sel.v2], forbidden: [sel.v1]}\n"


def bounded(run: Run, **bounds: float) -> Run:
    """``run`` with TRAIN planned to keep ``bounds``."""
    cells = [
        cell.model_copy(update={"expect": cell.expect.model_copy(update=bounds)})
        if cell.cell_id == TRAIN
        else cell
        for cell in run.manifest.cells
    ]
    return b.with_manifest(run, cells=cells)


def costing(*host_ms: float, launches: tuple[int, ...] = (420, 420, 420)) -> Run:
    """A green run whose replicates of TRAIN took these host ms and launches."""
    run = b.small_run()
    return b.change_rows(
        run,
        TRAIN,
        lambda row: row.model_copy(
            update={
                "profile": b.profile(
                    host_time_s=host_ms[row.replicate] / 1e3,
                    kernel_count=launches[row.replicate],
                )
            }
        ),
    )


def cell_of(judgement: Judgement, cell_id: str = TRAIN) -> CellVerdict:
    return next(cell for cell in judgement.cells if cell.cell_id == cell_id)


# --- the rule


def test_the_median_of_times_and_the_most_of_counts_decide() -> None:
    run = costing(0.5, 0.61, 9.0, launches=(36, 36, 37))
    assert verdict_of(judge(bounded(run, max_host_ms=0.61), None, POLICY), TRAIN) is None
    judgement = judge(bounded(run, max_host_ms=0.6), None, POLICY)
    assert judgement.exit_code is Exit.WRONG_PATH == 4
    assert reason_of(judgement, TRAIN).startswith(
        "got 0.61 host ms a step (the median of 3 replicates), wanted at most 0.6 (max_host_ms);"
    )
    assert verdict_of(judgement, DENSE) is None
    launched = judge(bounded(run, max_launches=36), None, POLICY)
    assert "got 37 kernel launches a step (the most of 3" in reason_of(launched, TRAIN)
    assert verdict_of(judge(bounded(run, max_launches=37), None, POLICY), TRAIN) is None
    device = judge(bounded(run, max_device_ms=19.9), None, POLICY)
    assert "got 20 device ms a step" in reason_of(device, TRAIN)
    both = reason_of(judge(bounded(run, max_device_ms=19.9, max_launches=1), None, POLICY), TRAIN)
    assert "max_device_ms" in both and "max_launches" in both


def test_a_true_speed_is_shown_and_not_compared() -> None:
    run = bounded(costing(1, 1, 1), max_host_ms=0.5)
    judgement = judge(run, b.baseline_of(b.small_run()), POLICY)
    cell = cell_of(judgement)
    assert cell.verdict is Verdict.OVER_BOUND and cell.cand_tok_per_s and not cell.screened
    assert judgement.headline.startswith("OVER_BOUND, exit 4: 1 of ") and "max_host_ms" in (
        judgement.headline
    )
    kept = {one.cell_id: one for one in history_run(run, judgement).cells}[TRAIN]
    assert kept.verdict == "OVER_BOUND"
    assert [kept.measured[name].value for name in ("device_ms", "host_ms", "launches")] == [
        pytest.approx(20),
        pytest.approx(1),
        420,
    ]


def test_another_fault_is_not_hidden_by_a_bound() -> None:
    run = bounded(costing(1, 1, 1), max_host_ms=0.5)
    judgement = judge(edit(run, TRAIN, parity=None), None, POLICY)
    assert verdict_of(judgement, TRAIN) is Verdict.PARITY
    base = b.baseline_of(b.small_run())
    other = base.cells[TRAIN].model_copy(update={"counters": ["sel.masked"]})
    moved = base.model_copy(update={"cells": {**base.cells, TRAIN: other}})
    routed = judge(run, moved, POLICY)
    assert verdict_of(routed, TRAIN) is Verdict.WRONG_PATH
    assert "max_host_ms" in reason_of(routed, TRAIN) and "routed to" in reason_of(routed, TRAIN)


def test_what_was_not_measured_does_not_pass() -> None:
    judgement = judge(bounded(b.small_run(), max_host_ms=5), None, POLICY)
    assert verdict_of(judgement, TRAIN) is Verdict.FAILED and judgement.exit_code is Exit.FAILED
    assert "which is not proved: no replicate has a profiled step" in reason_of(judgement, TRAIN)
    cpu = b.make_run(b.cpu_cells(), gpu=False)
    cell = cpu.manifest.cells[0]
    planned = cell.model_copy(update={"expect": Expect(max_launches=36)})
    cpu = b.with_manifest(cpu, cells=[planned, *cpu.manifest.cells[1:]])
    found = judge(cpu, None, POLICY)
    assert verdict_of(found, cell.cell_id) is Verdict.FAILED
    assert "a CPU has no device whose kernels count" in reason_of(found, cell.cell_id)


# --- the outputs


def test_the_three_numbers_of_a_step_are_in_every_output() -> None:
    run = costing(1.25, 1.25, 1.25)
    judgement = judge(run, None, POLICY)
    (line,) = (
        one for one in verdict_json.to_json(judgement, run)["cells"] if one["cell_id"] == TRAIN
    )
    assert (line["device_ms"], line["host_ms"], line["launches"]) == (20.0, 1.25, 420.0)
    case = ET.fromstring(junit.text(run, judgement)).find(f".//testcase[@name='{TRAIN}']")
    assert case is not None
    values = {one.get("name"): one.get("value") for one in case.iter("property")}
    assert (values["device_ms"], values["host_ms"], values["launches"]) == ("20", "1.25", "420")
    head, row = (
        next(
            line for line in terminal_table(run, judgement, width=160).splitlines() if mark in line
        )
        for mark in ("host ms", "path=v2,workload=train")
    )
    assert "dev ms host ms launches" in " ".join(head.split())
    assert {"20", "1.25", "420"} <= set(row.split())


# --- the matrix


def test_bounds_of_a_rule_reach_its_cells_and_the_lowest_holds() -> None:
    more = "  - {match: {path: v2, seq_len: 256}, max_host_ms: 0.5}\n"
    matrix = parse(edited(RULE, RULE.replace("}\n", ", max_host_ms: 2}\n") + more))
    expect = JudgeRules.of(matrix).expect
    assert {expect[one].max_host_ms for one in expect if "path=v2" in one} == {0.5, 2.0}
    assert all(
        one.max_host_ms == (0.5 if "seq_len=256" in name else 2.0)
        for name, one in expect.items()
        if "path=v2" in name
    )
    assert {one.max_host_ms for name, one in expect.items() if "path=v2" not in name} == {None}


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("max_launches: 36", "got 36 with target.gpu: none, and a CPU has no device"),
        ("max_device_ms: 1", "bound max_host_ms instead"),
        ("max_host_ms: 0", "max_host_ms"),
        ("max_launches: 3.5", "max_launches"),
        ("max_host_ms: '1m'", "max_host_ms: got the text '1m', wanted a number; write 60000"),
        ("max_lunches: 3", "max_launches"),
    ],
)
def test_a_bound_that_cannot_hold_is_refused_with_its_line(written: str, said: str) -> None:
    error = error_of(edited(RULE, f"  - {{match: {{path: v2}}, {written}}}\n"))
    assert error.startswith("m.yaml:") and said in error


def test_a_plan_on_a_cpu_says_which_bounds_nothing_can_be_held_against() -> None:
    matrix = parse(
        edited("{gpu: none}", "{gpu: H200}").replace(
            RULE, RULE.replace("}\n", ", max_launches: 9, max_host_ms: 9}\n")
        )
    )
    plan = build_plan(matrix, only=["path=v2", "fa2=off"], capability=b.CPU, settings=Settings())
    told = [one for one in plan.warnings if "will be FAILED" in one]
    assert len(told) == len(plan.cells)
    assert told[0].endswith("will be FAILED: a CPU has no number for max_launches")
    assert plan.wrong_paths == ()


# --- the judge's own strictness


@pytest.mark.parametrize(
    ("own", "base", "loosened"),
    [
        (
            "max_host_ms: 2.5",
            "max_host_ms: 2",
            "expect.max_host_ms of {}: got 2.5, the baseline's 2",
        ),
        ("engaged: [sel.v2]", "max_host_ms: 2, engaged: [sel.v2]", "got none, the baseline's 2"),
        ("max_host_ms: 1", "max_host_ms: 2", ""),
        ("max_host_ms: 1", "engaged: []", ""),
    ],
)
def test_a_higher_bound_or_none_is_looser(own: str, base: str, loosened: str) -> None:
    def rules(written: str) -> JudgeRules:
        rule = f"  - {{match: {{path: v2}}, forbidden: [sel.v1], {written}}}\n"
        matrix = parse_matrix(edited(RULE, rule), "m.yaml")
        return JudgeRules.from_stored(json.loads(json.dumps(JudgeRules.of(matrix).to_stored())))

    joint = joint_rules(rules(own), rules(base), policies(parse()), rules(base).expect)
    said = [str(one) for one in joint.loosened]
    first = min(name for name in rules(base).expect if "path=v2" in name)
    assert bool(said) is bool(loosened)
    assert not loosened or loosened.format(first) in said[0]
    # the stricter of both judges
    here = joint.expect.get(first, rules(own).expect[first])
    assert here.max_host_ms == (1.0 if not loosened else 2.0)


# --- a run on a CPU


def test_a_stored_run_is_judged_by_the_bound_later(
    bench: Bench, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    row_of = version_measure.row_of
    profiled = {"profile": b.profile(gpu=False, host_time_s=0.002)}
    monkeypatch.setattr(
        version_measure,
        "row_of",
        lambda job, speed: row_of(job, speed).model_copy(update=profiled),
    )
    text = Path("small.yaml").read_text()
    ruled = text + "expect:\n  - {match: {seq_len: 128}, max_host_ms: 0.001}\n"
    Path("small.yaml").write_text(ruled)
    assert bench.run("run", "small.yaml", "--out", "first") == Exit.WRONG_PATH
    (run,) = Path("first").iterdir()
    capsys.readouterr()
    bench.run("gate", str(run), "--json")
    found = json.loads(capsys.readouterr().out)
    assert found["exit_code"] in (4, 9)
    (cell,) = (one for one in found["cells"] if one["cell_id"] == SHORT)
    assert cell["verdict"] == "OVER_BOUND" and "got 2 host ms a step" in cell["reason"]


def test_host_time_is_what_the_step_takes_to_return(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a device whose queue is full the step would wait; it is empty before each."""
    now, queue = [0.0], [0]

    def step() -> None:
        queue[0] += 1
        now[0] += 0.001 if queue[0] == 1 else 1.0  # a full queue lets the host wait

    monkeypatch.setattr(profile.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(profile.torch.cuda, "synchronize", lambda: queue.__setitem__(0, 0))
    assert profile._host_time_s(step, None) == pytest.approx(0.001)
