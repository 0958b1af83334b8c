"""A user's own step: found without importing it, measured as far as it declares, never called
proved, and its faults are red cells with its own line.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import torch

from nsa.settings import Settings
from perfbench.commands import app, outcome
from perfbench.commands.own_code import refuse_stored_code
from perfbench.errors import Exit, PerfbenchError
from perfbench.gate import baseline_of_run, explain_cell
from perfbench.gate.judgement import CellVerdict
from perfbench.gate.judging import judge
from perfbench.gate.own_steps import changed_files, own_line
from perfbench.gate.suspicion import mark_suspects
from perfbench.history.from_run import history_run
from perfbench.history.site.cells_of_suite import dense_twins
from perfbench.matrix import build_plan, find
from perfbench.matrix.matrix import load_matrix, parse_matrix
from perfbench.matrix.policy import GatePolicy, Policies
from perfbench.records import (
    AXES,
    Baseline,
    Cell,
    OwnStepFile,
    OwnStepLine,
    Replicate,
    Run,
    Status,
    Verdict,
    is_own_step,
    read_run,
)
from perfbench.report import junit, verdict_json
from perfbench.report.rows import is_window
from perfbench.report.scaling import growths
from perfbench.report.speeds import crossovers
from perfbench.report.terminal import terminal_table
from perfbench.runner.ab.checkout import Checkout
from perfbench.runner.ab.own_sides import shared_steps
from perfbench.runner.resume import check_cells
from perfbench.worker import own_measure, profile
from perfbench.worker.own_step import DeclaredStep, ratios_of
from perfbench.worker.plugin_object import resolve
from tests.perfbench import builders as b
from tests.perfbench.jobs import job
from tests.perfbench.measure_cases import STEP_S, run
from tests.perfbench.report_cases import alone
from tests.perfbench.test_report_workloads import rows_in
from tests.perfbench.test_report_workloads import run_of as run_of_cells

ROOT = Path(__file__).parents[2]
POLICY = GatePolicy(min_replicates=1)
MATRIX = """\
version: 1
name: mine
target: {gpu: none}
axes: {workload: ["my_step:make"], seq_len: [8], batch: [4], dtype: [fp32]}
measure: {processes: 1, warmup_s: 0.02, samples: 3, min_sample_ms: 5}
gate: {min_replicates: 1}
"""
# What a user's module holds; each test fills in its class and what `make` does.
MODULE = """\
import torch

class Step:
    tokens_per_step = 32
    weight = torch.ones(8, 8)

    def step(self):
        torch.mm(self.weight, self.weight)
{more}

def make(cell, device):
    made = Step()
    {begin}
    return made
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for a user's files; what was imported out of it is forgotten."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield tmp_path
    sys.modules.pop("my_step", None)


def module(home: Path, more: str = "", begin: str = "pass") -> Path:
    body = "".join(f"\n    {line}" for line in more.splitlines())
    (home / "my_step.py").write_text(MODULE.format(more=body, begin=begin), encoding="utf-8")
    return home


def measured(home: Path, clock: Any = None, **changes: Any) -> Replicate:
    """The row of one process, measured here with a clock that only steps move."""
    cell = Cell("my_step:make", 8, "n/a", batch=4, dtype="fp32")
    values = {"axes": cell, "cell_id": cell.cell_id, "own_step_folder": str(home), "profile": True}
    plan = b.planned_cell(Cell("forward", 64, "v2", fa2="off", dtype="fp32"), gpu=False).route
    empty = plan.model_copy(update={"branches": [], "counters": []})
    return run(job(**{**values, "plan": empty, **changes}), clock)


def run_of(home: Path, *rows: Replicate) -> Run:
    """A run of the user's matrix with these rows, as its plan has it."""
    (home / "mine.yaml").write_text(MATRIX, encoding="utf-8")
    matrix = load_matrix(home / "mine.yaml")
    plan = build_plan(matrix, only=[], capability=b.CPU, settings=Settings())
    (cell,) = plan.cells
    whole = b.manifest([cell], gpu=False).model_copy(
        update={
            "own_steps": list(plan.own_steps),
            "matrix_text": matrix.text,
            "matrix_path": matrix.path,
            "matrix_sha256": matrix.sha256,
            "replicates": len(rows),
        }
    )
    kept = [
        row.model_copy(update={"config_sha256": cell.config_sha256, "other_clocks": None})
        for row in rows
    ]
    return Run(manifest=whole, replicates=kept)


# --- finding, without importing


def test_a_plan_finds_the_file_and_runs_none_of_it(home: Path) -> None:
    (home / "my_step.py").write_text("raise SystemExit('imported')\n")
    (home / "pack").mkdir()
    (home / "pack" / "__init__.py").write_text("raise SystemExit('imported')\n")
    (home / "pack" / "inner.py").write_text("raise SystemExit('imported')\n")
    (home / "mine.yaml").write_text(MATRIX.replace('make"]', 'make", "pack.inner:make"]'))
    plan = build_plan(
        load_matrix(home / "mine.yaml"), only=[], capability=b.CPU, settings=Settings()
    )
    assert [one.file for one in plan.own_steps] == ["my_step.py", "pack/inner.py"]
    assert plan.cells[0].cell_id == "batch=4,dtype=fp32,seq_len=8,workload=my_step:make"
    assert not {"my_step", "pack", "pack.inner"} & set(sys.modules)
    assert find("json.decoder:x").folder is None, "what Python has installed"


@pytest.mark.parametrize("target", ["my_stop:make", "pack.none:make", "math:floor"])
def test_what_is_not_found_is_said_with_the_nearest(home: Path, target: str) -> None:
    module(home)
    text = MATRIX.replace("my_step:make", target)
    with pytest.raises(PerfbenchError) as caught:
        build_plan(
            parse_matrix(text, str(home / "m.yaml")),
            only=[],
            capability=b.CPU,
            settings=Settings(),
        )
    assert caught.value.exit_code is Exit.USAGE and f"got {target}" in str(caught.value)
    assert target != "my_stop:make" or "did you mean 'my_step'?" in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"my_step:make"', "train", "m.yaml"),
        ('"my_step:make"', '"my_step:make", train', "missing"),
        ('"my_step:make"', '"my step:make"', "or module:function"),
        ("seq_len: [8]", "seq_len: [8], path: [n/a]", "n/a is what dense paths record"),
    ],
)
def test_only_a_matrix_of_own_steps_states_no_model_and_no_path(
    old: str, new: str, said: str
) -> None:
    with pytest.raises(PerfbenchError, match=said):
        parse_matrix(MATRIX.replace(old, new), "m.yaml")


def test_a_line_end_is_no_part_of_a_name() -> None:
    assert is_own_step("a.b:c") and not is_own_step("a.b:c\n")
    with pytest.raises(ValueError, match="wanted one of"):
        AXES["workload"].check("a.b:c\n")


def test_a_module_that_another_hides_is_an_error(home: Path) -> None:
    module(home)
    shutil.copy(home / "my_step.py", home / "colorsys.py")
    import colorsys  # the standard library's

    assert "colorsys" in sys.modules and colorsys.rgb_to_hsv
    with pytest.raises(ValueError, match="give the module another name"):
        resolve("colorsys:make", [home])
    with pytest.raises(ValueError, match=r"my_step.py has no mode; define it"):
        resolve("my_step:mode", [home])
    (home / "no_code.py").write_text("thing = 3\n")
    with pytest.raises(ValueError, match="thing of .*no_code.py is of type int, wanted a function"):
        resolve("no_code:thing", [home])


# --- measuring, as far as it declares


def test_a_bare_step_is_timed_and_nothing_of_it_is_proved(home: Path) -> None:
    row = measured(module(home))
    assert row.status is Status.OK and row.tok_per_s == pytest.approx(32 / STEP_S)
    assert row.own_step is not None and row.own_step.proved == []
    assert row.own_step.not_proved == [
        "parity (none declared)",
        "engagement (none declared)",
        "physics (no flops or min_bytes declared)",
    ]
    nulls = {name for name in Replicate.model_fields if getattr(row, name) is None}
    assert nulls <= set(row.absent), row.absent


DECLARED = """\
operators = {"aten::mm": 1}
flops = 1024.0
def parity(self):
    return {"o": (self.weight @ self.weight, torch.full((8, 8), 8.0), 1e-5), "one": (1.0, 1.5, 2)}
"""


@pytest.mark.usefixtures("light")
def test_a_step_that_declares_all_has_it_proved(home: Path) -> None:
    row = measured(module(home, DECLARED))
    assert row.status is Status.OK and row.own_step is not None, row.reason
    assert row.own_step.not_proved == []
    assert [word.partition(" ")[0] for word in row.own_step.proved] == [
        "parity",
        "engagement:",
        "physics",
    ]
    assert row.own_step.comparisons == {"o": 0.0, "one": 0.25}
    assert row.physics is not None and row.physics.flops == 1024.0
    assert row.profile is not None and row.profile.witness_ok is True
    judgement = judge(run_of(home, row), None, POLICY)
    assert judgement.exit_code is Exit.OK and "not proved" not in judgement.headline
    assert "by what these declare" in judgement.headline and "each proved" not in judgement.headline


FAULTY = {
    "operators": ('operators = {"aten::mm": 3}', Status.WRONG_PATH, "3 calls of aten::mm, the"),
    "parity": (
        'def parity(self):\n    return {"o": (1.0, 2.0, 0.5)}',
        Status.PARITY,
        "differs from the step's own reference: o 2 of its tolerance",
    ),
    "parity of nan": (
        'def parity(self):\n    return {"o": (float("nan"), 2.0, 0.5)}',
        Status.PARITY,
        "o inf of its",
    ),
    "parity that asserts": (
        "def parity(self):\n    assert 1 == 2, 'off by one'",
        Status.PARITY,
        "in its parity: AssertionError: off by one at ",
    ),
    "parity of nothing": (
        "def parity(self):\n    return None",
        Status.CRASH,
        "got nothing from parity of my_step:make, wanted a mapping",
    ),
    "parity of another shape": (
        'def parity(self):\n    return {"o": (torch.ones(2), torch.ones(1), 1.0)}',
        Status.CRASH,
        "got o of shape (2,) from parity",
    ),
    "raises": ("def setup(self):\n    {}['x']", Status.CRASH, "when it was built: KeyError: 'x'"),
    "exits": ("def setup(self):\n    raise SystemExit(3)", Status.CRASH, "SystemExit: 3 at "),
    "tokens": ("tokens_per_step = 0", Status.CRASH, "got tokens_per_step=0 from my_step:make"),
    "step": ("step = None", Status.CRASH, "whose step is nothing; wanted an object with"),
    "flops": ("flops = -1", Status.CRASH, "got flops=-1 from my_step:make, wanted a number above"),
    "kernels": ("kernels = {'a': 0}", Status.CRASH, "got kernels={'a': 0} from my_step:make"),
    "teardown": (
        "def teardown(self):\n    raise OSError('disk')",
        Status.CRASH,
        "in its teardown: OSError: disk at ",
    ),
}


@pytest.mark.parametrize("fault", FAULTY)
def test_a_fault_of_the_users_is_a_red_cell_with_its_line(home: Path, fault: str) -> None:
    more, status, said = FAULTY[fault]
    row = measured(module(home, more))
    assert (row.status, row.tok_per_s) == (status, None) and said in row.reason, row.reason
    if " at " in said:
        assert f"{home / 'my_step.py'}:" in row.reason and row.reason.endswith("correct it there")
    judgement = judge(run_of(home, row), None, POLICY)
    wanted = {
        Status.CRASH: Verdict.FAILED,
        Status.PARITY: Verdict.PARITY,
        Status.WRONG_PATH: Verdict.WRONG_PATH,
    }[status]
    assert judgement.cells[0].verdict is wanted and said in judgement.cells[0].reason


def test_a_folder_behind_a_link_is_the_users_too(home: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    module(tmp_path / "real", "def setup(self):\n    {}['x']")
    row = measured(tmp_path / "link")
    assert row.status is Status.CRASH and "KeyError: 'x' at " in row.reason


def test_a_step_that_raises_late_and_a_file_with_a_slip_are_named_by_line(home: Path) -> None:
    late = "count = 0\ndef step(self):\n    self.count += 1\n    if self.count > 3:\n        [][1]"
    row = measured(module(home, late))
    assert "IndexError: list index out of range at " in row.reason and "while it" in row.reason
    sys.modules.pop("my_step")
    (home / "my_step.py").write_text("def make(:\n")
    row = measured(home)
    assert f"SyntaxError: invalid syntax at {home / 'my_step.py'}:1" in row.reason


@pytest.mark.parametrize(
    ("launches", "on_gpu", "ok", "said"),
    [
        (2, True, True, "*flash_fwd* (2 launches)"),
        (1, True, False, "declares 2 launches of *flash_fwd*, the profiler saw 1"),
        (0, False, None, "nothing that the profiler could see here"),
    ],
)
def test_declared_kernels_are_witnessed_where_there_is_a_device(
    launches: int, on_gpu: bool, ok: bool | None, said: str
) -> None:
    declared = DeclaredStep(lambda: None, 1, kernels={"flash_fwd": 2})
    kernels = {"flash_fwd_kernel<64>": (1e-3, launches), "add": (1e-6, 9)}
    seen = profile.Observed(kernels if on_gpu else {}, {}, {}, 0.1, 0.1, 0.1, on_gpu)
    word = own_measure._Word()
    found, sentence = own_measure._witness(declared, seen, word)
    assert found is ok and said in sentence
    assert word.not_proved == ([] if on_gpu else ["kernels (a CPU launches none)"])
    assert len(word.proved) == (ok is True)


def test_out_of_memory_is_no_fault_of_the_users(home: Path) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        measured(module(home, "def setup(self):\n    raise torch.OutOfMemoryError('CUDA')"))


def test_counters_that_the_matrix_expects_are_held(home: Path) -> None:
    row = measured(module(home), expect={"engaged": ["sel.v2"]})
    assert row.status is Status.WRONG_PATH and "expected sel.v2 to be engaged" in row.reason


@pytest.mark.parametrize(
    ("comparison", "ratio"),
    [
        (([1.0, 2.0], [1.0, 2.5], 0.25), 2.0),
        ((torch.tensor([3, 4]), [3, 4], 1), 0.0),
        ((float("inf"), float("inf"), 1.0), float("inf")),
    ],
)
def test_a_comparison_is_the_largest_difference(comparison: Any, ratio: float) -> None:
    assert ratios_of("m:f", {"x": comparison}) == {"x": ratio}


def test_a_tensor_is_no_reference_of_its_own() -> None:
    x = torch.ones(3)
    for wanted in (x, x.view(3), x[:3]):
        with pytest.raises(ValueError, match="o is compared with its own memory"):
            ratios_of("m:f", {"o": (x, wanted, 0.1)})
    assert ratios_of("m:f", {"o": (x, x.clone(), 0.1), "n": (1.0, 1.0, 0.1)}) == {"o": 0, "n": 0}


def test_a_list_of_operators_wants_each_once() -> None:
    @dataclasses.dataclass
    class Made:
        tokens_per_step: int = 1
        operators: tuple[str, ...] = ("aten::mm", "aten::add")

        def step(self) -> None: ...

    found = DeclaredStep.of("m:f", Made())
    assert found.operators == {"aten::mm": 1, "aten::add": 1} and found.parity is None


# --- what every output says


def test_every_output_names_what_is_not_proved(home: Path) -> None:
    whole = run_of(home, measured(module(home)))
    judgement = judge(whole, None, POLICY)
    said = "parity (none declared)"
    assert judgement.exit_code is Exit.OK
    assert "not proved of 1 own steps: parity (none declared), engagement" in judgement.headline
    (cell,) = verdict_json.to_json(judgement, whole)["cells"]
    assert cell["proved"] == [] and cell["not_proved"][0] == said
    properties = ET.fromstring(junit.text(whole, judgement)).findall(".//testcase//property")
    assert said in {one.get("name"): one.get("value", "") for one in properties}["not_proved"]
    assert f"not proved: {said}" in " ".join(terminal_table(whole, judgement).split())
    page = alone(whole)
    assert "## User's own steps" in page and said in page and "agree with the fp64" not in page
    assert "fastest path of NSA" not in page
    cell_id = whole.manifest.cells[0].cell_id
    assert f"Not proved: {said}" in explain_cell(whole, judgement, cell_id, POLICY, None)
    (kept,) = history_run(whole, judgement).cells
    assert f"not proved: {said}" in kept.reason and kept.measured["tok_per_s"].value


def test_what_one_process_does_not_declare_is_not_proved(home: Path) -> None:
    """A function may declare by its seed: what a verdict calls proved, every process has proved."""
    bare = measured(module(home))
    assert bare.own_step is not None
    whole = OwnStepLine(
        sha256=bare.own_step.sha256,
        proved=[
            "parity by its own reference (1 compared, worst o 0.1 of its tolerance)",
            "engagement: aten::mm (1 calls)",
            "physics by its own count of work",
        ],
        not_proved=["cuda_graph=on (the step was asked for it)"],
    )
    first = bare.model_copy(update={"own_step": whole})
    second = bare.model_copy(
        update={
            "replicate": 1,
            "profile": None,
            "own_step": whole.model_copy(
                update={"proved": [], "not_proved": ["parity (none declared)"]}
            ),
        }
    )
    found = own_line([first, second])
    assert found is not None
    assert found.proved == ["engagement: aten::mm (1 calls)", "physics by its own count of work"]
    assert found.not_proved == [
        "cuda_graph=on (the step was asked for it)",
        "parity (none declared)",
    ]
    assert own_line([first, first]) == whole and own_line([]) is None


def test_no_closed_form_and_no_twin_is_claimed_of_an_own_step() -> None:
    """Its path is a parameter, and what it computes nobody knows."""
    line = OwnStepLine(sha256="0" * 64)
    file = OwnStepFile(workload="my_step:make", file="my_step.py", sha256=line.sha256)
    cells = [
        (Cell("my_step:make", tokens, path, fa2), tokens * (2.0 if path == "v2" else 1.0), {})
        for tokens in (1024, 2048, 4096, 8192)
        for path, fa2 in (("v2", "on"), ("dense", "n/a"))
    ]
    whole = run_of_cells(
        *[(cell, ms, {"own_step": line}) for cell, ms, _ in cells], own_steps=[file]
    )
    rows = rows_in(whole)
    assert all(row.tok_per_s for row in rows)
    found = growths(whole, rows)
    assert found and {one.closed_form for one in found} == {None}
    assert {row.x_dense for row in rows} == {None} and crossovers(rows) == []
    assert not is_window(Cell("my_step:make", 1024, "flex_window"))
    axes = {cell.cell_id: cell.to_mapping() for cell, _, _ in cells}
    assert all(dense_twins(cell_id, axes) == [] for cell_id in axes)


def test_a_row_of_another_file_is_no_number_of_this_run(home: Path) -> None:
    row = measured(module(home))
    module(home, "more = 1")
    judgement = judge(run_of(home, row), None, POLICY)
    assert judgement.exit_code is Exit.ENVIRONMENT
    assert "it changed while the run was measured" in judgement.cells[0].reason


def test_another_file_than_the_baselines_is_said(home: Path) -> None:
    before = run_of(home, measured(module(home)))
    base = baseline_of_run(before)
    assert isinstance(base, Baseline)
    assert changed_files(before, base) == []
    sys.modules.pop("my_step")
    after = run_of(home, measured(module(home, "more = 1")))
    (note,) = judge(after, base, POLICY).notes[-1:]
    assert note.startswith("the file of my_step:make is not the baseline's: sha256 ")
    cell_id = after.manifest.cells[0].cell_id
    outside = shared_steps(after, [cell_id], base, home / "elsewhere")
    assert "both sides of a pair would run today's" in outside[cell_id]
    assert shared_steps(after, [cell_id], base, home) == {}
    assert shared_steps(before, [cell_id], base, home / "elsewhere") == {}


def test_each_side_of_a_pair_has_the_step_of_its_own_checkout(tmp_path: Path) -> None:
    repository, tree = tmp_path / "here", tmp_path / "tree"
    source = b.manifest([]).source
    side = Checkout("old", tmp_path, source, tree, repository)
    assert side.own_folder(repository / "bench") == tree / "bench"
    assert side.own_folder(tmp_path / "outside") == tmp_path / "outside"
    assert Checkout("old", tmp_path, source).own_folder(repository) == repository


def test_a_run_whose_step_has_changed_is_not_resumed(home: Path) -> None:
    before = run_of(home, measured(module(home)))
    module(home, "more = 1")
    matrix = load_matrix(home / "mine.yaml")
    plan = build_plan(matrix, only=[], capability=b.CPU, settings=Settings())
    with pytest.raises(PerfbenchError, match=r"my_step.py of workload my_step:make has changed"):
        check_cells(before.manifest, plan, matrix, [], home / "run.jsonl")


def test_a_stored_matrix_runs_no_code_of_another_folder(tmp_path: Path) -> None:
    stored = parse_matrix(MATRIX, str(tmp_path / "mine.yaml"))
    refuse_stored_code(stored, [ROOT, tmp_path])
    with pytest.raises(PerfbenchError, match="a stored file chooses no code to run"):
        refuse_stored_code(stored, [ROOT, tmp_path / "other"])
    ours = "workload: [forward], path: [v2], fa2: [off]"
    harmless = MATRIX.replace('workload: ["my_step:make"]', ours) + "model: tiny\n"
    refuse_stored_code(parse_matrix(harmless, str(tmp_path / "m.yaml")), [ROOT])


# --- by the command


def test_the_example_is_measured_and_judged_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("own_step.py", "own-step.yaml"):
        shutil.copy(ROOT / "examples" / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    few = ["--only", "workload=own_step:mlp", "--out", "runs"]
    monkeypatch.setattr(outcome, "CHECKOUT", ROOT)
    text = Path("own-step.yaml").read_text().replace("processes: 2", "processes: 1")
    Path("own-step.yaml").write_text(text.replace("min_replicates: 2", "min_replicates: 1"))
    assert app.invoke(["run", str(tmp_path / "own-step.yaml"), *few]) == Exit.OK
    (folder,) = Path("runs").iterdir()
    stored = read_run(folder)
    (row,) = stored.replicates
    assert row.own_step is not None and row.own_step.not_proved == []
    assert set(row.own_step.comparisons) == {"loss", "weights"}
    assert {one.file for one in stored.manifest.own_steps} == {"own_step.py"}
    capsys.readouterr()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert app.invoke(["trace", str(tmp_path / folder), row.cell_id]) == Exit.USAGE
    assert "a stored file chooses no code to run" in " ".join(capsys.readouterr().err.split())
    monkeypatch.chdir(tmp_path)
    assert app.invoke(["trace", str(folder), row.cell_id]) == Exit.OK
    assert "aten::addmm" in capsys.readouterr().out
    Path("own_step.py").unlink()  # the judge needs no module
    app.invoke(["gate", str(folder), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["cells"][0]["proved"][0].startswith("parity by its own reference (2 compared")


@pytest.mark.parametrize("workload", ["train", "own_step:train_step"])
def test_pairs_are_advised_with_the_condition_under_which_they_settle(workload: str) -> None:
    """Of a step outside of the repository both sides run the same file, and a drop is cleared."""
    axes = Cell(workload, 128, "n/a" if ":" in workload else "dense")
    cell = CellVerdict(axes.cell_id, axes, Verdict.WATCH, "", screened=True)
    command = {axes.cell_id: "perfbench ab A . m.yaml"}
    (found,) = mark_suspects([cell], Policies(GatePolicy()), {axes.cell_id}, command)
    assert found.verdict is Verdict.SUSPECT
    assert "`perfbench ab A . m.yaml` settles it" in found.suspicion
    is_told = "if the step's file lies in the repository" in found.suspicion
    assert is_told == (workload != "train")
