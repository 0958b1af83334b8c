"""Axis `without`: a step of path triton off in the cell's own process, in its name, and proved."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from nsa.routing import TRITON_STEPS, Capability
from nsa.settings import Settings, load
from perfbench.errors import Exit, PerfbenchError
from perfbench.gate.judging import judge
from perfbench.matrix import attention_calls, plan
from perfbench.matrix import matrix as matrices
from perfbench.matrix.policy import GatePolicy
from perfbench.records import cells
from perfbench.records.cells import Cell
from perfbench.records.rows import PlannedCell, RouteLine, Run, Status
from perfbench.records.verdict import Verdict
from perfbench.runner.executor import ForkServerExecutor
from perfbench.worker import measure
from tests.perfbench import builders as b
from tests.perfbench.edits import reason_of, verdict_of
from tests.perfbench.fakes import FakeClock, FakeSampler
from tests.perfbench.jobs import TINY, job
from tests.perfbench.test_executor import ROOT
from tests.perfbench.test_executor import job as stub_job

H200 = Capability(
    "cuda", "NVIDIA H200", (9, 0), "torch.varlen 2.13.0", "", "2.13.0", "triton 3.7.1", ""
)
LISTS = "path=triton,seq_len=8192,without=lists,workload=attention"
WHOLE = "path=triton,seq_len=8192,workload=attention"
MATRIX = """\
version: 1
name: t
target: {gpu: H200}
model: m7c_125m
axes: {workload: [attention], seq_len: [8192], path: [triton], without: [none, lists]}
measure: {processes: 3}
"""


def planned(text: str = MATRIX, **environ: str) -> list[PlannedCell]:
    settings = load(environ) if environ else Settings()
    return plan.build_plan(
        matrices.parse_matrix(text, "t.yaml"), only=[], capability=H200, settings=settings
    ).cells


def test_a_cells_name_tells_the_step_and_no_other_cell_is_renamed() -> None:
    assert [cell.cell_id for cell in planned()] == [WHOLE, LISTS]
    assert Cell("attention", 8192, "triton").cell_id == WHOLE
    assert Cell("attention", 8192, "triton", without="lists").without == "lists"


def test_the_steps_are_those_of_nsa() -> None:
    assert tuple(TRITON_STEPS) == cells.STEPS, (
        "written once more, because the base of a pair may be an nsa without any"
    )
    assert cells.AXES["without"].choices == ("none", *cells.STEPS)


@pytest.mark.parametrize(
    "path", ["v1", "v2", "masked", "reference", "adaptive", "dense", "dense_flash"]
)
def test_another_path_has_one_cell_for_all_its_values(path: str) -> None:
    assert Cell("train", 512, path, without="copy") == Cell("train", 512, path)


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        (
            Cell("attention", 512, "auto", without="copy"),
            "with path=auto: another path may serve it",
        ),
        (
            Cell("train", 512, "triton", without="split"),
            "only a decode step splits its keys; wanted workload=decode",
        ),
        (
            Cell("decode", 512, "triton", without="lists"),
            "a decode step has too few queries to sort",
        ),
        (
            Cell("forward", 512, "triton", without="join"),
            "only a backward of all branches is joined",
        ),
        (Cell("attention_forward", 512, "triton", without="join"), "wanted train or attention"),
        (Cell("selected", 512, "triton", without="join"), "wanted train or attention"),
        (Cell("decode", 512, "triton", without="copy"), "its kernels load no tile by a descriptor"),
        (
            Cell("selected_forward", 512, "triton", without="copy"),
            "its kernels load no tile by a descriptor",
        ),
        (
            Cell("attention_forward", 512, "triton", without="copy"),
            "so few are loaded without descriptors; wanted at least 12582912",
        ),
        (
            Cell("chunked_prefill", 1 << 20, "triton", chunk=512, without="copy"),
            "so few are loaded without descriptors",
        ),
        (
            Cell("attention", 2048, "triton", without="lists"),
            "so few are not sorted; wanted at least 8192",
        ),
        (
            Cell("attention", 2048, "triton", without="roles"),
            "so few are not sorted; wanted at least 8192",
        ),
        (
            Cell("chunked_prefill", 1 << 20, "triton", without="lists"),
            "so few are not sorted; wanted at least 8192",
        ),
    ],
)
def test_a_step_that_the_cell_does_not_take_is_refused_in_one_line(cell: Cell, words: str) -> None:
    reason = str(attention_calls.why_not(cell, TINY))
    assert (
        reason.startswith(f"without={cell.without} with ")
        and words in reason
        and "\n" not in reason
    )


@pytest.mark.parametrize(
    "cell",
    [
        Cell("decode", 512, "triton", without="split"),
        Cell("attention_forward", 1 << 20, "triton", without="copy"),
        Cell("train", 1 << 19, "triton", batch=2, without="copy"),
        Cell("train", 512, "triton", without="join"),
        Cell("attention", 512, "triton", without="join"),
        Cell("selected_forward", 8192, "triton", without="lists"),
        Cell("chunked_prefill", 1 << 20, "triton", chunk=8192, without="lists"),
    ],
)
def test_a_step_that_the_cell_takes_is_planned(cell: Cell) -> None:
    assert attention_calls.why_not(cell, TINY) is None


def test_a_plan_refuses_such_a_cell() -> None:
    with pytest.raises(PerfbenchError, match="only a decode step splits its keys"):
        planned(MATRIX.replace("none, lists", "none, split"))


def test_the_plan_turns_the_step_off_in_that_cell_alone() -> None:
    whole, lists = planned()
    assert (whole.route.off, lists.route.off) == ([], ["lists"])
    assert (
        whole.route.counters == lists.route.counters and whole.config_sha256 != lists.config_sha256
    )
    assert any("NSA_TRITON_LISTS=0" in note for note in lists.route.notes) and not whole.route.notes


def test_a_setting_of_the_whole_run_holds_next_to_it() -> None:
    assert [cell.route.off for cell in planned(NSA_TRITON_COPY="0")] == [
        ["copy"],
        ["copy", "lists"],
    ]


def test_a_proof_is_not_lent_across_a_step() -> None:
    whole, lists = planned()
    keys = {
        cells.proof_key(cell.axes, cell.route.counters, own_length=False) for cell in (whole, lists)
    }
    assert len(keys) == 2


def test_the_variable_reaches_that_process_alone() -> None:
    """Real children of one server, one after another: the second must not find what the first was
    given.
    """
    with ForkServerExecutor("tests.perfbench.settings_measure:measure", cwd=ROOT) as executor:
        base = stub_job().axes
        found = [
            json.loads(executor.execute(stub_job(axes=replace(base, path="triton", **own))).reason)
            for own in ({"without": "lists"}, {}, {"without": "none"})
        ]
    own = {"NSA_THRESHOLDS": "off"}  # no process that measures reads the table of a home
    assert found == [{"NSA_TRITON_LISTS": "0", **own}, own, own]


@pytest.mark.usefixtures("one_thread", "light")
def test_a_process_that_the_setting_did_not_reach_times_nothing() -> None:
    """A job of path v2, whose Route has no step off, under a plan that has one."""
    clock, plain = FakeClock(1 / 128), job("v2").plan
    row = measure.measure(
        job("v2", plan=plain.model_copy(update={"off": ["lists"]})),
        clock,
        FakeSampler(b.telemetry(gpu=False)),
    )
    assert row.status is Status.WRONG_PATH and row.tok_per_s is None and clock.now() == 0
    assert "this process turns off [], the plan said ['lists']" in row.reason


def run_of() -> Run:
    return b.make_run(planned(), environment=b.environment(device_name=H200.device_name))


def rerouted(run: Run, cell_id: str, off: list[str]) -> Run:
    """The rows of one cell whose processes report these steps as off."""

    def change(row: Any) -> Any:
        return row.model_copy(update={"route": row.route.model_copy(update={"off": off})})

    return b.change_rows(run, cell_id, change)


@pytest.mark.parametrize(
    ("cell_id", "off", "words"),
    [
        (LISTS, [], "its process turned off nothing, the plan says lists"),
        (LISTS, ["copy"], "its process turned off copy, the plan says lists"),
        (WHOLE, ["lists"], "its process turned off lists, the plan says nothing"),
    ],
)
def test_a_setting_that_did_not_reach_the_process_fails_the_hard_gate(
    cell_id: str, off: list[str], words: str
) -> None:
    assert judge(run_of(), None, GatePolicy()).exit_code is Exit.OK
    judgement = judge(rerouted(run_of(), cell_id, off), None, GatePolicy())
    assert (
        verdict_of(judgement, cell_id) is Verdict.WRONG_PATH
        and judgement.exit_code is Exit.WRONG_PATH
    )
    assert words in reason_of(judgement, cell_id)


def test_a_plan_that_forgets_the_step_fails_too() -> None:
    whole, lists = planned()
    forgetful = lists.model_copy(update={"route": lists.route.model_copy(update={"off": []})})
    judgement = judge(b.make_run([whole, forgetful]), None, GatePolicy())
    assert "the cell is without lists, and its plan turns off nothing" in reason_of(
        judgement, LISTS
    )
    assert verdict_of(judgement, WHOLE) is None


def test_a_setting_of_the_whole_run_is_no_cell_with_everything_on() -> None:
    whole, _ = planned()
    crippled = whole.model_copy(update={"route": whole.route.model_copy(update={"off": ["copy"]})})
    judgement = judge(b.make_run([crippled]), None, GatePolicy())
    assert "the cell is without none, and its plan turns off copy: unset NSA_TRITON_*" in reason_of(
        judgement, WHOLE
    )


def test_an_older_row_has_every_step() -> None:
    assert RouteLine.model_validate({"branches": [], "counters": []}).off == []


def test_how_to_measure_it_again_names_the_step() -> None:
    judgement = judge(rerouted(run_of(), LISTS, []), None, GatePolicy())
    (cell,) = [one for one in judgement.cells if one.cell_id == LISTS]
    assert "without=lists" in cell.reproduce


OLDER = """
import importlib
from nsa import routing, settings
from nsa.routing import nouns, thresholds
for module in (routing, nouns, thresholds):
    for name in MISSING:
        vars(module).pop(name, None)
rooms = ("records", "matrix", "gate")
for name in (*rooms, "worker.profile", "worker.parity.proof", "worker.measure", "worker.server"):
    importlib.import_module(f"perfbench.{name}")
from nsa.config import ModelConfig
from perfbench.matrix import attention_calls
from perfbench.records import Cell
if "SORT_MIN_ROWS" in vars(thresholds):  # one that has steps to be without
    model = ModelConfig.from_mapping({"preset": "m7c_125m"})
    cells = [Cell("attention", 512, "triton", without=step) for step in ("copy", "join")]
    assert [attention_calls.why_not(cell, model) for cell in cells] == [None, None]
"""


@pytest.mark.parametrize(
    "missing",
    [("TRITON_STEPS", "SORT_MIN_ROWS", "COPY_MIN_ELEMENTS"), ("COPY_MIN_ELEMENTS",)],
    ids=len,
)
def test_an_older_nsa_that_lacks_newer_names_is_measured_all_the_same(
    missing: tuple[str, ...],
) -> None:
    """The base of an A/B brings its own nsa; what measures it is this perfbench."""
    done = subprocess.run(
        [sys.executable, "-c", f"MISSING = {missing}\n{OLDER}"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=3600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
