"""Two versions measured in turns, by real processes of two real commits; and what `check` confirms with them."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nsa.capability import assumed
from nsa.routing import Capability
from nsa.settings import Settings
from perfbench import ab, checkout, cli, isolate, pair, runfile, runner, session, sideplan, trace
from perfbench import matrix as matrices
from perfbench import plan as plans
from perfbench.environment import TargetFit
from perfbench.job import Job, MeasureOptions
from perfbench.matrix import Matrix
from perfbench.result import Replicate, Run, Status
from perfbench.side import WITNESS
from perfbench.verdict import Exit, PerfbenchError
from tests.perfbench import repositories, side_measure
from tests.perfbench.repositories import git, worktrees

MATRIX = """\
version: 1
name: small
target: {gpu: none}
model: tiny
axes: {workload: [forward], seq_len: [128, 256], path: [v2], fa2: [off], dtype: [fp32]}
measure: {processes: 4}
gate: {min_effect_pct: 5, tolerance_pct: 1, min_replicates: 2, confirm_blocks: 6}
"""
SHORT, LONG = (f"dtype=fp32,fa2=off,path=v2,seq_len={n},workload=forward" for n in (128, 256))
STUB = "tests.perfbench.stub_measure:measure"
REAL, REAL_PLAN = ab.prepared, sideplan.plan_of


@dataclass
class FakeSide:
    """One side's executor: green rows at ``speed``, written into the shared ``log``."""

    name: str
    speed: float
    log: list[tuple[str, str, int]]
    ends: dict[str, Status] = field(default_factory=dict)
    interrupt_at: int | None = None
    jobs: list[Job] = field(default_factory=list)

    def new_block(self) -> None:
        self.log.append((self.name, "block", -1))

    def prepare(self, jobs: Sequence[Job]) -> None:
        self.log.append((self.name, "ready", -1))

    def close(self) -> None: ...

    def execute(self, job: Job) -> Replicate:
        if len(self.jobs) == self.interrupt_at:
            raise KeyboardInterrupt
        self.jobs.append(job)
        self.log.append((self.name, job.cell_id, job.replicate))
        if job.cell_id in self.ends:
            return isolate.failed(job, self.ends[job.cell_id], "planted")
        slower = 1 - (job.injection.percent or 0.0) / 100 if job.injection else 1.0
        return side_measure.row_of(job, self.speed * slower)


@dataclass
class Bench:
    """A repository of two commits (1000 and 900 tok/s), and what stands in for the machine."""

    repository: Path
    commits: list[str]
    a: FakeSide
    b: FakeSide
    tonight: FakeSide
    log: list[tuple[str, str, int]]

    def run(self, *argv: str) -> int:
        return cli.invoke(argv)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("ab") / "repository"
    return folder, repositories.make(folder, 1000.0, 900.0)


@pytest.fixture
def bench(template: tuple[Path, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """In an empty folder with small.yaml; all executors are fakes."""
    monkeypatch.setattr(session, "CHECKOUT", template[0])
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(MATRIX, encoding="utf-8")
    random.seed(5)
    log: list[tuple[str, str, int]] = []
    made = Bench(*template, FakeSide("a", 1000.0, log), FakeSide("b", 1000.0, log), FakeSide("tonight", 1000.0, []), log)

    @contextmanager
    def prepared(fit: TargetFit) -> Iterator[FakeSide]:
        yield made.tonight

    @contextmanager
    def both(fit: TargetFit, sides: tuple[checkout.Side, checkout.Side]) -> Iterator[tuple[FakeSide, FakeSide]]:
        yield made.a, made.b

    monkeypatch.setattr(runner, "prepared", prepared)
    monkeypatch.setattr(ab, "prepared", both)
    monkeypatch.setattr(sideplan, "plan_of", plan_here)  # half a second of process each
    monkeypatch.setattr(session.Outcome, "write_report", lambda outcome, out=None: [])
    monkeypatch.setattr(trace, "on_red", lambda *arguments, **options: [])  # tests/perfbench/test_trace.py
    return made


def plan_here(one: checkout.Side, matrix: Matrix, only: Sequence[str], capability: Capability) -> sideplan.SidePlan:
    """What the side's own process would answer, since its nsa differs in the marker alone."""
    return sideplan.SidePlan(plans.build(matrix, only=list(only), capability=capability, settings=Settings()), matrix.model.to_mapping())


@pytest.fixture
def real(template: tuple[Path, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Real processes, started in the project's own folder: its nsa is in their current folder and must not be taken."""
    monkeypatch.setattr(session, "CHECKOUT", template[0])
    monkeypatch.chdir(repositories.ROOT)
    monkeypatch.setattr(ab, "prepared", partial(REAL, measure="tests.perfbench.side_measure:measure"))
    (tmp_path / "small.yaml").write_text(MATRIX, encoding="utf-8")
    return tmp_path


def pair_in(out: Path) -> pair.Pair:
    (folder,) = out.iterdir()
    return pair.read(folder)


def speeds(run: Run) -> set[int]:
    """Rounded to hundreds, which the noise does not reach."""
    return {round((row.tok_per_s or 0.0) / 100) * 100 for row in run.replicates}


def files(run: Run) -> set[str]:
    return {row.reason.partition("file=")[2] for row in run.replicates}


def test_each_side_runs_its_own_code_in_turns(real: Path, template: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    """Real worktrees, servers and children: order, origin, sources, verdict, and nothing left behind."""
    out = real / "out"
    assert cli.invoke(["ab", "HEAD~1", "HEAD", str(real / "small.yaml"), "--blocks", "4", "--seed", "3", "--out", str(out), "--json"]) == 3
    printed = json.loads(capsys.readouterr().out)
    assert {cell["verdict"] for cell in printed["cells"]} == {"REGRESSED"}
    found = pair_in(out)
    assert (speeds(found.base), speeds(found.candidate)) == ({1000}, {900})
    assert len(files(found.base)) == len(files(found.candidate)) == 1 and files(found.base) != files(found.candidate)
    assert [run.manifest.source.commit for run in (found.base, found.candidate)] == template[1]
    assert pair.are_paired(found.base, found.candidate) and not pair.are_paired(found.candidate, found.base)
    order = []
    for name, run in (("a", found.base), ("b", found.candidate)):
        order += [(int(re.findall(r"at=(\d+)", row.reason)[0]), row.replicate, row.cell_id, name) for row in run.replicates]
    order.sort()
    assert [block for _, block, _, _ in order] == sorted([0, 1, 2, 3] * 4)
    assert "".join(name for _, _, _, name in order) == "abab" + "baba" + "abab" + "baba"
    assert all(order[i][2] == order[i + 1][2] for i in range(0, 16, 2))  # the two of a cell are neighbours
    assert len({tuple(cell for _, block, cell, _ in order if block == b) for b in range(4)}) > 1  # cells are shuffled
    assert len(worktrees(template[0])) == 1
    assert (next(iter(out.iterdir())) / "report.md").exists()


def test_the_working_tree_is_a_side_and_an_injection_hits_side_b_alone(real: Path, template: tuple[Path, list[str]]) -> None:
    """HEAD against the same folder with an uncommitted change; the fault is on top of it."""
    repositories.mark(template[0], 2000.0)
    try:
        argv = ["ab", "HEAD", str(template[0]), str(real / "small.yaml"), "--blocks", "2", "--out", str(real / "out")]
        cli.invoke([*argv, "--inject", f"slowdown=50%@{LONG}"])
        assert git(template[0], "status", "--porcelain") == "M nsa/marker.py"
    finally:
        git(template[0], "checkout", "-q", "nsa/marker.py")
    found = pair_in(real / "out")
    assert speeds(found.base) == {900}
    by_cell = {row.cell_id: round((row.tok_per_s or 0) / 100) * 100 for row in found.candidate.replicates}
    assert by_cell == {SHORT: 2000, LONG: 1000}
    assert (found.base.manifest.injections, found.candidate.manifest.injections) == ([], [f"slowdown=50%@{LONG}"])
    assert found.base.manifest.source.dirty_sha256 is None and found.candidate.manifest.source.dirty_sha256 is not None


def job_of(one: checkout.Side) -> Job:
    matrix = matrices.parse(MATRIX, "m.yaml")
    plan = sideplan.plan_of(one, matrix, [f"cell={SHORT}"], assumed("none"))
    (cell,) = plan.plan.cells
    fields = {"cell_id": SHORT, "axes": cell.axes, "config_sha256": cell.config_sha256, "plan": cell.route, "expect": cell.expect}
    return Job(**fields, replicate=0, model=plan.model, measure=MeasureOptions(), timeout_s=30, device="cpu", seed=1, profile=False)


def test_a_server_that_was_not_told_its_side_yields_no_row(real: Path, template: tuple[Path, list[str]]) -> None:
    """The worst bug would be a silent A/A; here the one argument that prevents it is taken away."""
    with checkout.side("HEAD", template[0]) as one, ab.SideExecutor(one, STUB) as executor:
        told = list(executor._command)
        assert told[-2:] == ["--nsa", str(one.folder)]
        job = job_of(one)
        row = executor.execute(job)
        assert (row.model_extra or {})[WITNESS] == str(one.folder)
        executor._command = told[:-2]
        executor.new_block()
        with pytest.raises(PerfbenchError, match="compared a version with itself") as caught:
            executor.execute(job)
    assert caught.value.exit_code is Exit.INTERNAL


def test_a_server_whose_side_is_no_package_refuses_to_start(real: Path, template: tuple[Path, list[str]], tmp_path: Path) -> None:
    (tmp_path / "empty" / "nsa").mkdir(parents=True)
    with checkout.side("HEAD", template[0]) as one:
        wrong = checkout.Side("v0", tmp_path / "empty", one.source)
        with (
            ab.SideExecutor(wrong, "tests.perfbench.stub_measure:measure") as executor,
            pytest.raises(checkout.CannotBuild, match="WrongSide"),
        ):
            executor.prepare([])


def test_nothing_is_timed_before_both_servers_are_ready(bench: Bench) -> None:
    assert bench.run("ab", "HEAD~1", "HEAD", "small.yaml", "--blocks", "2") == 0
    assert bench.log[:4] == [("a", "block", -1), ("b", "block", -1), ("a", "ready", -1), ("b", "ready", -1)]
    assert [name for name, what, _ in bench.log if what.startswith("dtype")] == list("ababbaba")
    assert all(job.company == 0 for job in bench.a.jobs + bench.b.jobs)
    assert [(j.cell_id, j.replicate, j.seed) for j in bench.a.jobs] == [(j.cell_id, j.replicate, j.seed) for j in bench.b.jobs]


def test_blocks_are_the_policys_by_default_and_one_cell_can_be_chosen(bench: Bench) -> None:
    assert bench.run("ab", "HEAD", "HEAD", "small.yaml", "--only", "seq_len=128") == 0
    assert {job.cell_id for job in bench.a.jobs} == {SHORT} and len(bench.a.jobs) == len(bench.b.jobs) == 6


def test_a_side_that_fails_stops_its_cell_and_the_other_still_proves_itself(bench: Bench) -> None:
    bench.a.ends[SHORT] = Status.CRASH
    bench.run("ab", "HEAD~1", "HEAD", "small.yaml", "--blocks", "4")
    assert [job.replicate for job in bench.a.jobs if job.cell_id == SHORT] == [0]
    assert [job.replicate for job in bench.b.jobs if job.cell_id == SHORT] == [0]
    assert len([job for job in bench.b.jobs if job.cell_id == LONG]) == 4


def test_a_candidate_that_fails_has_its_own_verdict(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.b.ends[SHORT] = Status.WRONG_PATH
    assert bench.run("ab", "HEAD~1", "HEAD", "small.yaml") == 4
    assert "WRONG_PATH" in capsys.readouterr().out


def test_an_interrupted_pair_goes_on_and_parts_no_pair(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.b.interrupt_at = 3  # block 1 is BA: side b of its second pair; then resumed
    assert bench.run("ab", "HEAD~1", "HEAD", "small.yaml", "--blocks", "3", "--seed", "9") == 130
    (folder,) = Path("reports/runs").iterdir()
    assert f"--resume {folder}" in capsys.readouterr().err
    assert len(worktrees(bench.repository)) == 1
    bench.b.interrupt_at = None
    assert bench.run("ab", "HEAD~1", "HEAD", "small.yaml", "--resume", str(folder)) == 0
    for side in (bench.a, bench.b):
        assert sorted((job.cell_id, job.replicate) for job in side.jobs) == sorted((c, r) for c in (SHORT, LONG) for r in range(3))
    assert {run.manifest.seed for run in (pair.read(folder).base, pair.read(folder).candidate)} == {9}


def test_half_a_pair_is_measured_again(bench: Bench) -> None:
    bench.b.interrupt_at = 0  # block 0 is AB: side a is on the disk, side b is not
    assert bench.run("ab", "HEAD~1", "HEAD", "small.yaml", "--blocks", "2") == 130
    (folder,) = Path("reports/runs").iterdir()
    first = bench.a.jobs[0]
    bench.b.interrupt_at = None
    assert bench.run("ab", "HEAD~1", "HEAD", "small.yaml", "--resume", str(folder)) == 0
    assert [job.replicate for job in bench.a.jobs if job.cell_id == first.cell_id] == [0, 0, 1]
    assert [job.replicate for job in bench.b.jobs if job.cell_id == first.cell_id] == [0, 1]


@pytest.mark.parametrize(
    ("extra", "message"),
    [(["--resume", "{folder}", "--inject", f"oom@{SHORT}"], "--inject"), (["HEAD"], ""), (["--resume", "nowhere"], "nowhere")],
)
def test_a_resumed_pair_takes_no_new_faults_and_no_other_code(
    bench: Bench, capsys: pytest.CaptureFixture[str], extra: list[str], message: str
) -> None:
    bench.run("ab", "HEAD~1", "HEAD", "small.yaml", "--blocks", "2", "--budget", "0.000001s")
    (folder,) = Path("reports/runs").iterdir()
    capsys.readouterr()
    argv = ["HEAD~1", "HEAD", "small.yaml", *(word.format(folder=folder) for word in extra)]
    if extra == ["HEAD"]:
        argv = ["HEAD", "HEAD", "small.yaml", "--resume", str(folder)]  # side a was HEAD~1
        message = "restore that code"
    assert bench.run("ab", *argv) == 2
    assert message in capsys.readouterr().err


def test_a_budget_stops_before_the_next_pair(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run("ab", "HEAD~1", "HEAD", "small.yaml", "--budget", "0.000001s") == 6
    assert "12 pairs are not measured" in capsys.readouterr().err
    assert bench.a.jobs == bench.b.jobs == []


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nonsense", "HEAD", "small.yaml"], "got 'nonsense'"),
        (["HEAD", "HEAD", "absent.yaml"], "absent.yaml"),
        (["HEAD", "HEAD", "small.yaml", "--blocks", "1"], "--blocks"),
        (["HEAD", "HEAD", "small.yaml", "--only", "seq_len=7"], "seq_len=7"),
        (["HEAD", "HEAD", "small.yaml", "--inject", "oom@nowhere"], "'nowhere'"),
        (["HEAD", "HEAD", "small.yaml", "--out", "small.yaml"], "--out DIR"),
    ],
)
def test_usage_errors_exit_2(bench: Bench, capsys: pytest.CaptureFixture[str], argv: list[str], message: str) -> None:
    assert bench.run("ab", *argv) == 2
    assert message in capsys.readouterr().err
    assert len(worktrees(bench.repository)) == 1


def test_compare_judges_both_sides_of_an_ab_or_two_runs(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.b.speed = 800.0
    assert bench.run("ab", "HEAD~1", "HEAD", "small.yaml") == 3
    (folder,) = Path("reports/runs").iterdir()
    assert bench.run("compare", str(folder)) == 3
    assert bench.run("compare", str(folder / "a"), str(folder / "b")) == 3
    assert bench.run("compare", str(folder / "a"), str(folder / "a")) == 0
    capsys.readouterr()
    assert bench.run("run", "small.yaml", "--out", "night") == 0
    (night,) = Path("night").iterdir()
    capsys.readouterr()
    assert bench.run("compare", str(night), str(folder / "b"), "--strict") == 7  # two nights: a drop is at most WATCH
    assert "WATCH" in capsys.readouterr().out
    assert bench.run("compare", str(night)) == 2
    assert "wanted two" in capsys.readouterr().err
    assert bench.run("compare", str(folder), str(night)) == 2
    assert str(folder / "a") in capsys.readouterr().err


def promote(bench: Bench) -> None:
    """A baseline of 1000 tok/s at the newest commit."""
    assert bench.run("run", "small.yaml", "--out", "first") == 0
    (first,) = Path("first").iterdir()
    assert bench.run("baseline", "promote", str(first)) == 0


def confirmed(out: str = "reports/runs") -> Path:
    (folder,) = Path(out).iterdir()
    return folder


def test_check_confirms_a_drop_before_it_is_red(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    promote(bench)
    bench.tonight.speed = bench.b.speed = 800.0
    capsys.readouterr()
    assert bench.run("check", "small.yaml") == 3
    out, err = capsys.readouterr()
    assert out.startswith("REGRESSED, exit 3")
    assert re.search(r"2 cells are not proved as fast .* in \d+ interleaved pairs each, about [\d.]+ minutes", err)
    folder = confirmed()
    found = pair.read(folder / "confirm" / bench.commits[1][:12])
    assert found.base.manifest.source.commit == bench.commits[1]
    assert {row.cell_id for row in found.base.replicates} == {SHORT, LONG}
    assert len(bench.a.jobs) == len(bench.b.jobs) == 2 * found.base.manifest.replicates >= 12
    # the same bytes later: what was confirmed lies beside the run
    assert bench.run("gate", str(folder)) == 3
    assert capsys.readouterr().out == out
    assert bench.run("report", str(folder), "--baseline", "reports/baselines/cpu/small.json") == 3


def test_check_clears_what_only_tonights_machine_slowed(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    promote(bench)
    bench.tonight.speed, bench.a.speed, bench.b.speed = 800.0, 800.0, 800.0
    assert bench.run("check", "small.yaml", "--strict") == 0
    assert len(bench.a.jobs) == len(bench.b.jobs) >= 12


def test_check_injects_into_the_candidate_alone(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    promote(bench)
    assert bench.run("check", "small.yaml", "--inject", f"slowdown=10%@{LONG}") == 3
    assert f"REGRESSED, exit 3: 1 of 2 cells: {LONG}" in capsys.readouterr().out
    assert {job.cell_id for job in bench.a.jobs} == {LONG}  # only what was screened
    assert all(job.injection is None for job in bench.a.jobs) and all(job.injection for job in bench.b.jobs)


def test_nothing_is_confirmed_where_nothing_looks_slower(bench: Bench) -> None:
    promote(bench)
    assert bench.run("check", "small.yaml") == 0
    assert bench.a.jobs == [] and not (confirmed() / "confirm").exists()


def test_no_confirm_leaves_it_a_warning(bench: Bench) -> None:
    promote(bench)
    bench.tonight.speed = 800.0
    assert bench.run("check", "small.yaml", "--no-confirm") == 0
    assert bench.run("check", "small.yaml", "--no-confirm", "--strict") == 7
    assert bench.a.jobs == []


def edit_baseline(**changes: Any) -> None:
    path = Path("reports/baselines/cpu/small.json")
    data = json.loads(path.read_text(encoding="utf-8"))
    for cell in data["cells"].values():
        cell.update(changes)
    path.write_text(json.dumps(data), encoding="utf-8")


@pytest.mark.parametrize(("base", "why"), [("0" * 40, "does not have"), (None, "knows no commit of")])
def test_a_base_that_cannot_be_built_leaves_it_watched(
    bench: Bench, capsys: pytest.CaptureFixture[str], base: str | None, why: str
) -> None:
    promote(bench)
    edit_baseline(commit=base)
    bench.tonight.speed = 800.0
    assert bench.run("check", "small.yaml") == 0
    out, err = capsys.readouterr()
    assert "WATCH" in out and why in err and "not confirmed" in out
    assert bench.run("check", "small.yaml", "--strict") == 7


def test_a_base_whose_package_is_too_old_leaves_it_watched(bench: Bench, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    promote(bench)
    git(tmp_path, "clone", "-q", str(bench.repository), "clone")
    old = tmp_path / "clone"
    (old / "nsa" / "routing.py").unlink()
    edit_baseline(commit=repositories.commit(old, "before routing"))
    bench.tonight.speed = 800.0
    with pytest.MonkeyPatch.context() as patch:
        git(old, "checkout", "-q", bench.commits[1])
        patch.setattr(session, "CHECKOUT", old)
        patch.setattr(sideplan, "plan_of", REAL_PLAN)
        assert bench.run("check", "small.yaml") == 0
    err = capsys.readouterr().err
    assert "lacks what this harness needs of nsa" in err and "nsa.routing" in err


def test_an_interrupted_confirmation_goes_on(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    promote(bench)
    bench.tonight.speed = bench.b.speed = 800.0
    bench.b.interrupt_at = 5
    assert bench.run("check", "small.yaml") == 130
    folder = confirmed()
    assert f"--resume {folder}" in capsys.readouterr().err
    bench.b.interrupt_at = None
    assert bench.run("check", "small.yaml", "--resume", str(folder)) == 3
    assert len(bench.b.jobs) >= 12 and len(runfile.read(folder).replicates) == 8


def test_a_spent_budget_leaves_it_watched(bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from perfbench import check

    promote(bench)
    bench.tonight.speed = 800.0
    readings = iter([0.0, 100.0])
    monkeypatch.setattr(check, "time", type("Clock", (), {"monotonic": staticmethod(lambda: next(readings))}))
    assert bench.run("check", "small.yaml", "--budget", "90s") == 0
    assert "the budget is spent" in " ".join(capsys.readouterr().out.split()) and bench.a.jobs == []
