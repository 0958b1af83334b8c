"""Two versions measured in turns, by real processes of two real commits."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import pytest

from nsa.capability import assumed
from perfbench.commands import app, outcome
from perfbench.errors import Exit, PerfbenchError
from perfbench.gate.sequential import base_first
from perfbench.matrix import matrix as matrices
from perfbench.records import run_file
from perfbench.records.job import Job, MeasureOptions
from perfbench.records.rows import Run, Status
from perfbench.runner.ab import checkout, pair, schedule, version_executor, version_plan
from perfbench.worker.nsa_version import NSA_WITNESS
from tests.perfbench import repositories
from tests.perfbench.ab_bench import LONG, MATRIX, SHORT, Bench
from tests.perfbench.digested import lines_of, run_bytes
from tests.perfbench.repositories import git, worktrees

STUB = "tests.perfbench.stub_measure:measure"
REAL = schedule.prepared_versions
# a seed by which side a is first in the first pair of both cells
A_FIRST = next(
    str(seed) for seed in range(99) if base_first(seed, SHORT, 0) and base_first(seed, LONG, 0)
)


@pytest.fixture
def real(template: tuple[Path, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Real processes, started in the project's own folder: its nsa is in their current folder and
    must not be taken.
    """
    monkeypatch.setattr(outcome, "CHECKOUT", template[0])
    monkeypatch.chdir(repositories.ROOT)
    monkeypatch.setattr(
        schedule,
        "prepared_versions",
        partial(REAL, measure="tests.perfbench.version_measure:measure"),
    )
    (tmp_path / "small.yaml").write_text(MATRIX, encoding="utf-8")
    return tmp_path


def pair_in(out: Path) -> pair.Pair:
    (folder,) = out.iterdir()
    return pair.read_pair(folder)


def speeds(run: Run) -> set[int]:
    """Rounded to hundreds, which the noise does not reach."""
    return {round((row.tok_per_s or 0.0) / 100) * 100 for row in run.replicates}


def files(run: Run) -> set[str]:
    return {row.reason.partition("file=")[2] for row in run.replicates}


def test_each_side_runs_its_own_code_in_turns(
    real: Path, template: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Real worktrees, servers and children: order, origin, sources, verdict, and nothing left
    behind.
    """
    out = real / "out"
    assert (
        app.invoke(
            [
                "ab",
                "HEAD~1",
                "HEAD",
                str(real / "small.yaml"),
                "--pairs",
                "4",
                "--seed",
                "3",
                "--out",
                str(out),
                "--json",
            ]
        )
        == 3
    )
    printed = json.loads(capsys.readouterr().out)
    assert {cell["verdict"] for cell in printed["cells"]} == {"REGRESSED"}
    found = pair_in(out)
    assert (speeds(found.base), speeds(found.candidate)) == ({1000}, {900})
    assert len(files(found.base)) == len(files(found.candidate)) == 1 and files(
        found.base
    ) != files(found.candidate)
    assert [run.manifest.source.commit for run in (found.base, found.candidate)] == template[1]
    assert pair.are_paired(found.base, found.candidate) and not pair.are_paired(
        found.candidate, found.base
    )
    order = []
    for name, run in (("a", found.base), ("b", found.candidate)):
        order += [
            (int(re.findall(r"at=(\d+)", row.reason)[0]), row.replicate, row.cell_id, name)
            for row in run.replicates
        ]
    order.sort()
    assert [block for _, block, _, _ in order] == sorted([0, 1, 2, 3] * 4)
    for cell_id in (SHORT, LONG):
        turns = "".join(name for _, _, one, name in order if one == cell_id)
        assert turns in ("abbabaab", "baababba")
    # the two of a cell are neighbours
    assert all(order[i][2] == order[i + 1][2] for i in range(0, 16, 2))
    # cells are shuffled
    assert len({tuple(cell for _, block, cell, _ in order if block == b) for b in range(4)}) > 1
    assert len(worktrees(template[0])) == 1
    assert (next(iter(out.iterdir())) / "report.md").exists()


def test_the_working_tree_is_a_side_and_an_injection_hits_side_b_alone(
    real: Path, template: tuple[Path, list[str]]
) -> None:
    """HEAD against the same folder with an uncommitted change; the fault is on top of it."""
    repositories.mark(template[0], 2000.0)
    try:
        argv = [
            "ab",
            "HEAD",
            str(template[0]),
            str(real / "small.yaml"),
            "--pairs",
            "4",
            "--out",
            str(real / "out"),
        ]
        app.invoke([*argv, "--inject", f"slowdown=50%@{LONG}"])
        assert git(template[0], "status", "--porcelain") == "M nsa/marker.py"
    finally:
        git(template[0], "checkout", "-q", "nsa/marker.py")
    found = pair_in(real / "out")
    assert speeds(found.base) == {900}
    by_cell = {
        row.cell_id: round((row.tok_per_s or 0) / 100) * 100 for row in found.candidate.replicates
    }
    assert by_cell == {SHORT: 2000, LONG: 1000}
    assert (found.base.manifest.injections, found.candidate.manifest.injections) == (
        [],
        [f"slowdown=50%@{LONG}"],
    )
    assert (
        found.base.manifest.source.dirty_sha256 is None
        and found.candidate.manifest.source.dirty_sha256 is not None
    )


def job_of(one: checkout.Checkout) -> Job:
    matrix = matrices.parse_matrix(MATRIX, "m.yaml")
    plan = version_plan.plan_of_version(one, matrix, [f"cell={SHORT}"], assumed("none"))
    (cell,) = plan.plan.cells
    fields = {
        "cell_id": SHORT,
        "axes": cell.axes,
        "config_sha256": cell.config_sha256,
        "plan": cell.route,
        "expect": cell.expect,
    }
    return Job(
        **fields,
        replicate=0,
        model=plan.model,
        measure=MeasureOptions(),
        timeout_s=3600,
        device="cpu",
        seed=1,
        profile=False,
    )


def test_a_server_without_its_version_yields_no_row(
    real: Path, template: tuple[Path, list[str]]
) -> None:
    """The worst bug would be a silent A/A; here the one argument that prevents it is taken away."""
    with (
        checkout.checked_out("HEAD", template[0]) as one,
        version_executor.VersionExecutor(one, STUB) as executor,
    ):
        command = list(executor._command)
        assert command[-2:] == ["--nsa", str(one.folder)]
        job = job_of(one)
        row = executor.execute(job)
        assert (row.model_extra or {})[NSA_WITNESS] == str(one.folder)
        executor._command = command[:-2]
        executor.new_block()
        with pytest.raises(PerfbenchError, match="compared a version with itself") as caught:
            executor.execute(job)
    assert caught.value.exit_code is Exit.INTERNAL


def test_a_server_whose_version_is_no_package_refuses_to_start(
    real: Path, template: tuple[Path, list[str]], tmp_path: Path
) -> None:
    (tmp_path / "empty" / "nsa").mkdir(parents=True)
    with checkout.checked_out("HEAD", template[0]) as one:
        wrong = checkout.Checkout("v0", tmp_path / "empty", one.source)
        with (
            version_executor.VersionExecutor(
                wrong, "tests.perfbench.stub_measure:measure"
            ) as executor,
            pytest.raises(checkout.CannotBuild, match="WrongSide"),
        ):
            executor.prepare([])


def test_nothing_is_timed_before_both_servers_are_ready(bench: Bench) -> None:
    assert bench.run("ab", "HEAD~1", "HEAD", "small.yaml", "--pairs", "4") == 0
    assert bench.held == [True]  # to the trace's end no other perfbench has the card
    assert bench.log[:4] == [
        ("a", "block", -1),
        ("b", "block", -1),
        ("a", "ready", -1),
        ("b", "ready", -1),
    ]
    for cell_id in (SHORT, LONG):
        turns = "".join(name for name, what, _ in bench.log if what == cell_id)
        assert turns in ("abbabaab", "baababba")
    assert all(job.waiting_peers == 0 for job in bench.a.jobs + bench.b.jobs)
    assert [(j.cell_id, j.replicate, j.seed) for j in bench.a.jobs] == [
        (j.cell_id, j.replicate, j.seed) for j in bench.b.jobs
    ]


def test_pairs_are_the_policys_by_default_and_one_cell_can_be_chosen(bench: Bench) -> None:
    assert bench.run("ab", "HEAD", "HEAD", "small.yaml", "--only", "seq_len=128") == 0
    assert {job.cell_id for job in bench.a.jobs} == {SHORT} and len(bench.a.jobs) == len(
        bench.b.jobs
    ) == 8


def test_a_side_that_fails_stops_its_cell_and_the_other_still_proves_itself(bench: Bench) -> None:
    bench.a.ends[SHORT] = Status.CRASH
    bench.run("ab", "HEAD~1", "HEAD", "small.yaml", "--pairs", "4")
    assert [job.replicate for job in bench.a.jobs if job.cell_id == SHORT] == [0]
    assert [job.replicate for job in bench.b.jobs if job.cell_id == SHORT] == [0]
    assert len([job for job in bench.b.jobs if job.cell_id == LONG]) == 4


def test_a_candidate_that_fails_has_its_own_verdict(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.b.ends[SHORT] = Status.WRONG_PATH
    assert bench.run("ab", "HEAD~1", "HEAD", "small.yaml") == 4
    assert "WRONG_PATH" in capsys.readouterr().out


def test_an_interrupted_pair_goes_on_and_parts_no_pair(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.b.interrupt_at = 3  # side b of the second pair of its cell; then resumed
    assert bench.run("ab", "HEAD~1", "HEAD", "small.yaml", "--pairs", "4", "--seed", "9") == 130
    (folder,) = Path("reports/runs").iterdir()
    assert f"--resume {folder}" in capsys.readouterr().err
    assert len(worktrees(bench.repository)) == 1
    bench.b.interrupt_at = None
    assert bench.run("ab", "HEAD~1", "HEAD", "small.yaml", "--resume", str(folder)) == 0
    for run in (pair.read_pair(folder).base, pair.read_pair(folder).candidate):
        assert {(row.cell_id, row.replicate) for row in run.replicates} == {
            (cell_id, number) for cell_id in (SHORT, LONG) for number in range(4)
        }
    assert pair.read_pair(folder).missing == []
    assert {
        run.manifest.seed for run in (pair.read_pair(folder).base, pair.read_pair(folder).candidate)
    } == {9}


def test_half_a_pair_is_measured_again(bench: Bench) -> None:
    bench.b.interrupt_at = 0  # side a of the first cell is on the disk, side b is not
    argv = ["ab", "HEAD~1", "HEAD", "small.yaml", "--pairs", "4", "--seed", A_FIRST]
    assert bench.run(*argv) == 130
    (folder,) = Path("reports/runs").iterdir()
    first = bench.a.jobs[0]
    bench.b.interrupt_at = None
    assert bench.run("ab", "HEAD~1", "HEAD", "small.yaml", "--resume", str(folder)) == 0
    assert [job.replicate for job in bench.a.jobs if job.cell_id == first.cell_id] == [0, *range(4)]
    assert [job.replicate for job in bench.b.jobs if job.cell_id == first.cell_id] == [*range(4)]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--resume", "{folder}", "--inject", f"oom@{SHORT}"], "--inject"),
        (["HEAD"], ""),
        (["--resume", "nowhere"], "nowhere"),
    ],
)
def test_a_resumed_pair_takes_no_new_faults_and_no_other_code(
    bench: Bench, capsys: pytest.CaptureFixture[str], extra: list[str], message: str
) -> None:
    bench.run("ab", "HEAD~1", "HEAD", "small.yaml", "--pairs", "4", "--budget", "0.000001s")
    (folder,) = Path("reports/runs").iterdir()
    capsys.readouterr()
    argv = ["HEAD~1", "HEAD", "small.yaml", *(word.format(folder=folder) for word in extra)]
    if extra == ["HEAD"]:
        argv = ["HEAD", "HEAD", "small.yaml", "--resume", str(folder)]  # side a was HEAD~1
        message = "restore that code"
    assert bench.run("ab", *argv) == 2
    assert message in capsys.readouterr().err


def test_a_budget_stops_before_the_next_pair(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.run("ab", "HEAD~1", "HEAD", "small.yaml", "--budget", "0.000001s") == 6
    err = capsys.readouterr().err
    assert "the budget is spent; not measured: " in err and " and 6 more. Resume with perfb" in err
    assert bench.a.jobs == bench.b.jobs == []


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nonsense", "HEAD", "small.yaml"], "got 'nonsense'"),
        (["HEAD", "HEAD", "absent.yaml"], "absent.yaml"),
        (["HEAD", "HEAD", "small.yaml", "--pairs", "0"], "--pairs"),
        (["HEAD", "HEAD", "small.yaml", "--pairs", "6"], "whole blocks of 4. Next: --pairs 8"),
        (["HEAD", "HEAD", "small.yaml", "--only", "seq_len=7"], "seq_len=7"),
        (["HEAD", "HEAD", "small.yaml", "--inject", "oom@nowhere"], "'nowhere'"),
        (["HEAD", "HEAD", "small.yaml", "--out", "small.yaml"], "--out DIR"),
    ],
)
def test_usage_errors_exit_2(
    bench: Bench, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    assert bench.run("ab", *argv) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert len(worktrees(bench.repository)) == 1


@pytest.mark.parametrize(
    ("where", "least", "asked"),
    [("whole", 5, ["--pairs", "4"]), ("one cell", 5, ["--pairs", "4"]), ("policy", 9, [])],
    ids=["whole", "one cell", "policy"],
)
def test_what_cannot_be_judged_is_not_measured(
    bench: Bench, capsys: pytest.CaptureFixture[str], where: str, least: int, asked: list[str]
) -> None:
    """FAULTS "cannot judge, measures all the same": pairs below the policy's min_replicates, also
    where one cell alone wants more, and where the policy's own confirm_pairs are too few.
    """
    text = MATRIX.replace("processes: 4", f"processes: {least}")
    if where == "one cell":
        gate = f"gate: {{min_replicates: {least}}}"
        text += f'overrides:\n  - {{match: {{seq_len: 256}}, {gate}, reason: "x"}}\n'
    else:
        text = text.replace("min_replicates: 2", f"min_replicates: {least}")
    Path("strict.yaml").write_text(text, encoding="utf-8")
    assert bench.run("ab", "HEAD", "HEAD", "strict.yaml", *asked) == 2
    err = " ".join(capsys.readouterr().err.split())
    assert f"at least the policy's min_replicates of {least}. Next: --pairs" in err
    assert bench.a.jobs == bench.b.jobs == []


def test_compare_judges_both_sides_of_an_ab_or_two_runs(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.b.speed = 800.0
    assert bench.run("ab", "HEAD~1", "HEAD", "small.yaml") == 3
    (folder,) = Path("reports/runs").iterdir()
    assert bench.run("compare", str(folder)) == 3
    assert bench.run("compare", str(folder / "a"), str(folder / "b")) == 3
    assert bench.run("compare", str(folder / "a"), str(folder / "a")) == 0
    capsys.readouterr()
    assert bench.run("run", "small.yaml", "--out", "single") == 0
    (single,) = Path("single").iterdir()
    capsys.readouterr()
    # two sessions: a drop is at most SUSPECT
    assert bench.run("compare", str(single), str(folder / "b"), "--strict") == 7
    assert "SUSPECT" in capsys.readouterr().out
    assert bench.run("compare", str(single)) == 2
    assert "wanted two" in capsys.readouterr().err
    assert bench.run("compare", str(folder), str(single)) == 2
    assert str(folder / "a") in capsys.readouterr().err


def in_the_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while a throttled card cools down, the first time only."""
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(schedule, "interleave", partial(schedule.interleave, pause=pause))


@pytest.mark.parametrize(
    ("hot", "a_attempts", "b_attempts"), [("a", [0, 1], [0]), ("b", [0, 0], [0, 1])]
)
def test_a_throttled_attempt_is_no_half_of_a_pair_and_its_retry_follows(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    hot: str,
    a_attempts: list[int],
    b_attempts: list[int],
) -> None:
    """Pair 0 is AB. Where b was hot, a's half is measured again too, next to b's retry."""
    in_the_pause(monkeypatch)
    getattr(bench, hot).hot = {(SHORT, 0)}
    argv = ["ab", "HEAD~1", "HEAD", "small.yaml", "--only", "seq_len=128", "--pairs", "4"]
    assert bench.run(*argv, "--seed", A_FIRST) == 130
    (folder,) = Path("reports/runs").iterdir()
    before = pair.read_pair(folder)
    assert before.missing == [(SHORT, number) for number in range(4)]
    assert bench.run("ab", "HEAD~1", "HEAD", "small.yaml", "--resume", str(folder)) == 0
    found = pair.read_pair(folder)
    assert found.missing == []
    for run, attempts in ((found.base, a_attempts), (found.candidate, b_attempts)):
        # all stay in the file
        assert [row.attempt for row in run.replicates if row.replicate == 0] == attempts
        assert [row.attempt for row in run.replicates if row.replicate == 1] == [0]
    measured = [(name, number) for name, cell, number in bench.log if cell == SHORT]
    assert measured[-8:-4] == [("a", 0), ("b", 0), ("b", 1), ("a", 1)]


def test_a_pair_with_a_resume_between_its_rows_does_not_count_and_is_measured_again(
    bench: Bench,
) -> None:
    """Side a of pair 1 in one invocation, side b in the next: the machine may have changed in
    between.
    """
    assert bench.run("ab", "HEAD~1", "HEAD", "small.yaml", "--pairs", "4") == 0
    (folder,) = Path("reports/runs").iterdir()
    for name in pair.NAMES:
        path = folder / name / run_file.RUN_FILE
        lines = lines_of(path.read_bytes())
        for line in lines[1:]:
            late = name == "b" and line["replicate"] == 1
            line["started_utc"] = (
                "2026-01-03T01:00:00+00:00" if late else "2026-01-02T01:00:00+00:00"
            )
        again = {
            "kind": "resumed",
            "resumed_utc": "2026-01-03T00:00:00+00:00",
            "argv": [],
            "environment": lines[0]["environment"],
        }
        path.write_bytes(run_bytes([*lines, again]))
    assert sorted(pair.read_pair(folder).missing) == sorted([(SHORT, 1), (LONG, 1)])
    bench.a.jobs.clear(), bench.b.jobs.clear()
    assert bench.run("ab", "HEAD~1", "HEAD", "small.yaml", "--resume", str(folder)) == 0
    for side in (bench.a, bench.b):
        assert sorted((job.cell_id, job.replicate) for job in side.jobs) == sorted(
            [(SHORT, 1), (LONG, 1)]
        )
    assert pair.read_pair(folder).missing == []


def test_a_throttled_side_leaves_the_pair_out(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its retries are spent: the pair does not count, and the verdict says how many do."""
    Path("small.yaml").write_text(
        MATRIX.replace("processes: 4", "processes: 4, throttle_retries: 0"), encoding="utf-8"
    )
    bench.b.hot = {(SHORT, 1)}
    assert bench.run("ab", "HEAD", "HEAD", "small.yaml", "--pairs", "8", "--json") == 0
    (folder,) = Path("reports/runs").iterdir()
    assert pair.read_pair(folder).missing == [(SHORT, 1)]
    reasons = {
        cell["cell_id"]: cell["reason"] for cell in json.loads(capsys.readouterr().out)["cells"]
    }
    assert "7 of 8 pairs count" in reasons[SHORT] and "pairs count" not in reasons[LONG]


def test_a_pair_that_was_cut_short_names_the_command_that_goes_on(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seven of eight pairs of a drop that all eight show; the command that is printed measures the
    eighth, HEAD or not.
    """
    bench.b.interrupt_at, bench.b.speed = 14, 985.0
    assert bench.run("ab", "HEAD~1", "HEAD", "small.yaml", "--pairs", "8", "--seed", "4") == 130
    (folder,) = Path("reports/runs").iterdir()
    capsys.readouterr()
    bench.run("compare", str(folder), "--json")
    printed = json.loads(capsys.readouterr().out)
    base, candidate = (commit[:12] for commit in bench.commits)
    command = f"perfbench ab {base} {candidate} small.yaml --resume {folder}"
    assert "cut short: 7 of 8 planned pairs" in printed["headline"]
    for cell in printed["cells"]:
        assert (
            cell["reason"].startswith("cut short: 7 of 8 planned pairs; ")
            and f"`{command}` resumes it" in cell["reason"]
        )
    bench.run("compare", str(folder / "a"), str(folder / "b"), "--json")
    assert f"`{command}` resumes it" in capsys.readouterr().out
    bench.b.interrupt_at = None
    bench.run(*command.split()[1:])
    capsys.readouterr()
    bench.run("compare", str(folder), "--json")
    assert "cut short" not in capsys.readouterr().out and pair.read_pair(folder).missing == []


def test_explain_and_report_take_a_pair(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.b.speed = 800.0
    assert bench.run("ab", "HEAD~1", "HEAD", "small.yaml") == 3
    (folder,) = Path("reports/runs").iterdir()
    capsys.readouterr()
    assert bench.run("report", str(folder), "--json") == 3
    assert json.loads(capsys.readouterr().out)["counts"] == {"REGRESSED": 2}
    assert bench.run("explain", str(folder), SHORT) == 0
    text = capsys.readouterr().out
    assert (
        text.startswith(f"{SHORT}: REGRESSED")
        and "Base: measured interleaved with the candidate" in text
        and "Pairs, tok_per_s" in text
    )
    assert bench.run("explain", str(folder), SHORT, "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["cell"]["cell_id"], data["cell"]["verdict"]) == (SHORT, "REGRESSED")
    assert text.startswith("\n".join(data["explanation"]) + "\n")
    for command in (["report", str(folder)], ["explain", str(folder), SHORT]):
        assert bench.run(*command, "--baseline", "any.json") == 2
        assert f"omit --baseline, or name {folder / 'b'}" in capsys.readouterr().err
    assert bench.run("explain", str(folder), SHORT.replace("128", "129")) == 2
    assert "did you mean" in capsys.readouterr().err
