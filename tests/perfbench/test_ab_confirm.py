"""Which pairs of a confirmation count, where they lie, what a second invocation does with them,
and what is reported of the others.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from nsa.capability import assumed
from perfbench.errors import Exit, PerfbenchError
from perfbench.gate import confirmation
from perfbench.gate.judging import judge
from perfbench.machine import nvml
from perfbench.machine.environment import TargetFit
from perfbench.matrix import matrix as matrices
from perfbench.matrix.policy import GatePolicy
from perfbench.records import ConfirmationPlan, run_file
from perfbench.records.run_file import RUN_FILE
from perfbench.records.verdict import Verdict
from perfbench.runner.ab import checkout, confirm, pair, schedule
from perfbench.runner.context import MeasuringContext
from perfbench.runner.progress import SilentProgress
from perfbench.tracing import TracedPair
from tests.perfbench import builders as b
from tests.perfbench.ab_bench import LONG, MATRIX, SHORT, Bench
from tests.perfbench.digested import edit_baseline
from tests.perfbench.edits import conclude, reason_of, verdict_of

BASELINE = Path("reports/baselines/cpu/small.json")


@pytest.fixture
def slow(bench: Bench) -> Bench:
    """A baseline of 1000 tok/s at the newest commit, and a candidate of 800."""
    assert bench.run("run", "small.yaml", "--out", "first") == 0
    (first,) = Path("first").iterdir()
    assert bench.run("baseline", "promote", str(first)) == 0
    bench.current.speed = bench.b.speed = 800.0
    return bench


def run_folder(out: str = "reports/runs") -> Path:
    (folder,) = Path(out).iterdir()
    return folder


def homes(folder: Path) -> list[str]:
    return sorted(one.name for one in (folder / "confirm").iterdir())


def baseline_at(commits: dict[str, str | None], name: str = "other.json") -> str:
    """The baseline with other commits for its cells."""
    shutil.copy(BASELINE, name)

    def change(content: dict[str, Any]) -> None:
        for cell_id, commit in commits.items():
            content["cells"][cell_id]["commit"] = commit

    edit_baseline(Path(name), change)
    return name


def cells_of(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return {cell["cell_id"]: cell for cell in json.loads(capsys.readouterr().out)["cells"]}


def test_pairs_against_another_baselines_commit_settle_nothing(
    slow: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    """Confirmed against baseline A, then gated by B, which was measured at another commit."""
    old, new = slow.commits
    assert slow.run("check", "small.yaml") == 3
    folder, other = run_folder(), baseline_at({SHORT: old, LONG: old})
    capsys.readouterr()
    assert slow.run("gate", str(folder), "--baseline", other, "--json") == 7
    for cell in cells_of(capsys).values():
        assert (
            cell["verdict"] == "SUSPECT" and "no pair against its baseline here" in cell["reason"]
        )
        assert new[:12] in cell["reason"] and old[:12] in cell["reason"]
    assert slow.run("gate", str(folder), "--baseline", other, "--strict") == 7
    assert slow.run("check", "small.yaml", "--resume", str(folder), "--baseline", other) == 3
    assert homes(folder) == sorted([old[:12], new[:12]])
    assert pair.read_pair(folder / "confirm" / old[:12]).base.manifest.source.commit == old
    assert slow.run("gate", str(folder), "--baseline", other) == slow.run("gate", str(folder)) == 3


def test_each_cell_keeps_the_pair_of_its_own_baseline(
    slow: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    """A slice was promoted at another commit, so the cells have two bases; one cell moves to a
    third baseline.
    """
    old, new = slow.commits
    assert slow.run("check", "small.yaml", "--baseline", baseline_at({SHORT: old, LONG: new})) == 3
    folder = run_folder()
    assert homes(folder) == sorted([old[:12], new[:12]])
    capsys.readouterr()
    assert (
        slow.run("gate", str(folder), "--baseline", baseline_at({SHORT: old, LONG: old}), "--json")
        == 3
    )
    found = cells_of(capsys)
    assert (found[SHORT]["verdict"], found[LONG]["verdict"]) == ("REGRESSED", "SUSPECT")
    assert (
        slow.run(
            "gate", str(folder), "--baseline", baseline_at({SHORT: None, LONG: new[:10]}), "--json"
        )
        == 3
    )
    found = cells_of(capsys)
    assert (found[SHORT]["verdict"], found[LONG]["verdict"]) == (
        "SUSPECT",
        "REGRESSED",
    ) and "not known" in found[SHORT]["reason"]


def test_more_cells_than_the_first_time_have_a_folder_of_their_own(
    slow: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    home = slow.commits[1][:12]
    assert slow.run("check", "small.yaml", "--only", "seq_len=256") == 3
    folder = run_folder()
    first = len(slow.b.jobs)
    capsys.readouterr()
    assert slow.run("check", "small.yaml", "--resume", str(folder), "--json") == 3
    assert {cell["verdict"] for cell in cells_of(capsys).values()} == {"REGRESSED"}
    assert homes(folder) == [home, f"{home}-2"]
    assert {job.cell_id for job in slow.b.jobs[first:]} == {SHORT}  # LONG's pairs are complete
    assert slow.run("gate", str(folder)) == 3
    before = len(slow.b.jobs)
    assert (
        slow.run("check", "small.yaml", "--resume", str(folder)) == 3 and len(slow.b.jobs) == before
    )


@pytest.mark.parametrize(
    "left", [b"", b'{"kind": "manifest", "schema', None], ids=["empty", "torn", "absent"]
)
def test_a_confirmation_that_was_killed_between_its_two_files_is_measured_anew(
    slow: Bench, left: bytes | None
) -> None:
    assert slow.run("check", "small.yaml") == 3
    folder = run_folder()
    home = folder / "confirm" / slow.commits[1][:12]
    manifest = (home / "a" / RUN_FILE).read_bytes().splitlines(keepends=True)[0]
    (home / "a" / RUN_FILE).write_bytes(manifest)
    (
        (home / "b" / RUN_FILE).unlink()
        if left is None
        else (home / "b" / RUN_FILE).write_bytes(left)
    )
    # as if never confirmed
    assert slow.run("gate", str(folder)) == 7
    assert slow.run("check", "small.yaml", "--resume", str(folder)) == 3
    assert homes(folder) == [home.name] and pair.read_pair(home).missing == []


def test_a_damaged_confirmation_is_refused_with_a_way_out(
    slow: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    assert slow.run("check", "small.yaml") == 3
    folder = run_folder()
    home = folder / "confirm" / slow.commits[1][:12]
    lines = (home / "b" / RUN_FILE).read_bytes().splitlines(keepends=True)
    (home / "b" / RUN_FILE).write_bytes(b"".join([lines[0], b"rubbish\n", *lines[2:]]))
    capsys.readouterr()
    for argv in (["gate", str(folder)], ["check", "small.yaml", "--resume", str(folder)]):
        assert slow.run(*argv) == 9
        err = " ".join(capsys.readouterr().err.split())
        assert f"{home}/b/run.jsonl:2" in err and f"remove {home}" in err and "Traceback" not in err
    shutil.rmtree(home)
    assert slow.run("check", "small.yaml", "--resume", str(folder)) == 3


def test_a_complete_confirmation_needs_its_base_no_more(
    slow: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The base's commit went away since: what was proved stays proved."""
    assert slow.run("check", "small.yaml") == 3

    def gone(*_: object) -> None:
        raise checkout.CannotBuild("gone")

    monkeypatch.setattr(confirm, "checked_out", gone)
    capsys.readouterr()
    assert slow.run("check", "small.yaml", "--resume", str(run_folder())) == 3
    err = capsys.readouterr().err
    assert "not all is confirmed" not in err and "confirming against" not in err


def test_half_a_confirmation_counts_and_says_what_is_missing(
    slow: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow.b.interrupt_at, slow.b.speed = 12, 950.0  # 6 pairs of two cells: the first look, and half
    assert slow.run("check", "small.yaml") == 130
    folder = run_folder()
    capsys.readouterr()
    slow.run("gate", str(folder), "--json")
    gated = cells_of(capsys)
    for cell in gated.values():
        assert cell["reason"].startswith(
            "cut short: 6 of 40 planned pairs; not settled by the look"
        )
        assert confirm.UNFINISHED in cell["reason"] and cell["verdict"] == "SUSPECT"

    def gone(*_: object) -> None:
        raise checkout.CannotBuild("gone")

    monkeypatch.setattr(confirm, "checked_out", gone)
    slow.run("check", "small.yaml", "--resume", str(folder), "--json")
    reported = cells_of(capsys)
    assert all(
        "cannot be measured: gone" in cell["reason"] and "6 of 40 planned" in cell["reason"]
        for cell in reported.values()
    )
    assert {name: cell["verdict"] for name, cell in reported.items()} == {
        name: cell["verdict"] for name, cell in gated.items()
    }


def test_a_base_that_cannot_be_built_is_reported_next_to_the_others_pairs(
    slow: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    """One cell's base is there, the other's is not."""
    other = baseline_at({SHORT: "0" * 40})
    capsys.readouterr()
    assert slow.run("check", "small.yaml", "--baseline", other, "--json") == 3
    out, err = capsys.readouterr()
    found = {cell["cell_id"]: cell for cell in json.loads(out)["cells"]}
    assert (found[SHORT]["verdict"], found[LONG]["verdict"]) == ("SUSPECT", "REGRESSED")
    assert "not confirmed: the base 000000000000 cannot be measured" in found[SHORT]["reason"]
    assert "cannot be measured" not in found[LONG]["reason"]
    assert f"{SHORT}: the base 000000000000 cannot be measured" in " ".join(err.split())


def test_a_baselines_commit_names_no_folder_elsewhere(slow: Bench) -> None:
    """A baseline is a file that anybody may have written: its commit must not lead out of the run's
    folder.
    """
    assert (
        slow.run(
            "check",
            "small.yaml",
            "--baseline",
            baseline_at({SHORT: slow.commits[1], LONG: "../.."}),
        )
        == 3
    )
    assert (run_folder() / RUN_FILE).is_file()


@dataclass
class Clockwork:
    """Each pair takes 60 s and settles nothing; ``asked`` holds (cells, budget in s) of
    each.
    """

    seconds: float = 1000.0
    asked: list[tuple[list[str], float | None]] = field(default_factory=list)

    def now(self) -> float:
        return self.seconds

    def interleave(self, spec: pair.PairSpec, *others: Any, **__: object) -> pair.Pair:
        self.asked.append((spec.only, spec.budget_s))
        self.seconds += 60.0
        run = b.make_run([c for c in b.cpu_cells() if f"cell={c.cell_id}" in spec.only], gpu=False)
        run = b.with_manifest(run, confirmation=spec.plan)
        return pair.Pair(others[-1], run, run, [(cell.cell_id, 2) for cell in run.manifest.cells])


@pytest.mark.parametrize(
    ("budget_s", "budgets"), [(100.0, [100.0, 40.0]), (None, [None, None, None]), (0.0, [])]
)
def test_the_budget_is_for_the_whole_confirmation(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    budget_s: float | None,
    budgets: list[float | None],
) -> None:
    """Three bases at 60 s each: 100 s are spent before the third one."""
    clock, said = Clockwork(), list[str]()
    monkeypatch.setattr(schedule, "interleave", clock.interleave)
    cells = sorted(cell.cell_id for cell in b.cpu_cells())[:3]
    commits: dict[str, str | None] = dict(
        zip(cells, ["HEAD", bench.commits[0], bench.commits[1]], strict=True)
    )
    matrix = matrices.parse_matrix(MATRIX, "m.yaml")
    monkeypatch.setattr(schedule, "plan_of_version", lambda *_: None)
    fit, here = TargetFit("cpu", None), b.environment(gpu=False)
    context = MeasuringContext(
        fit, assumed("none"), here, bench.repository, SilentProgress(), said.append
    )
    plan = ConfirmationPlan(tests=3, looks=[40], cells=cells)
    spec = pair.PairSpec(matrix, [], 40, 1, ["perfbench", "check"], [], budget_s, plan=plan)
    reported = confirm.confirm_cells(
        b.make_run(b.cpu_cells(), gpu=False), tmp_path, commits, spec, context, clock.now
    )
    assert [budget for _, budget in clock.asked] == budgets
    assert len(reported.measured) == len(said) == len(budgets)
    reasons = [reported.reasons[cell] for cell in cells]
    assert reasons == [confirm.UNFINISHED] * len(budgets) + [confirm.SPENT] * (3 - len(budgets))
    assert str(reported).count(confirm.SPENT) == (len(budgets) < 3)


@pytest.mark.parametrize(("budget", "num_cells"), [([], 2), (["--budget", "20s"], 1)])
def test_a_budget_too_small_for_all_lets_the_worst_cell_reach_its_look(
    slow: Bench, budget: list[str], num_cells: int
) -> None:
    """The servers of four pairs alone are expected to take 24 s. What is measured first is one
    cell's four pairs, not two pairs of each, after which neither is judged.
    """
    assert slow.run("check", "small.yaml", *budget) == 3
    measured = [cell_id for _, cell_id, pair_number in slow.log if pair_number >= 0]
    assert len(set(measured[: 2 * 4])) == num_cells
    assert set(measured) == {SHORT, LONG}


@pytest.mark.parametrize(
    ("left_s", "size"),
    [(float("inf"), 12), (4 * (6 + 12 * 10), 12), (4 * (6 + 12 * 10) - 1, 11), (65, 1), (0, 1)],
)
def test_as_many_cells_are_measured_together_as_reach_their_look(left_s: float, size: int) -> None:
    """Four pairs of 10 s each, and 6 s of servers for each pair of all of them."""
    cells = [f"cell {n}" for n in range(20)]
    assert schedule.group_size(dict.fromkeys(cells, 4), dict.fromkeys(cells, 10.0), left_s) == size


def test_a_cell_that_lacks_little_leaves_room_for_the_next() -> None:
    lacks = {"one of four pairs is missing": 1, "all are": 4}
    pair_s = dict.fromkeys(lacks, 10.0)
    assert schedule.group_size(lacks, pair_s, 10 + 40 + 4 * 6) == 2
    assert schedule.group_size(lacks, pair_s, 10 + 40 + 4 * 6 - 1) == 1


def settled(first: Any, measured: list[confirmation.MeasuredPairs], reasons: dict[str, str]) -> Any:
    return confirmation.confirm_all(first, measured, GatePolicy(), reasons)


def test_cells_of_several_pairs_are_judged_each_by_its_own_runs() -> None:
    """The second pair knows the first one's cell too, at another speed, and lends it nothing."""
    run = b.small_run(replicates=8, noise=0.001)
    one, two = (
        "fa2=on,path=v2,seq_len=2048,workload=train",
        "fa2=on,path=v2,seq_len=2048,workload=forward",
    )
    slow = b.scale_rows(b.scale_rows(run, one, 0.9), two, 0.9)
    first = judge(slow, b.baseline_of(run), GatePolicy())
    assert sorted(first.to_confirm) == sorted([one, two])
    measured = [
        confirmation.MeasuredPairs(run, slow, [two]),
        confirmation.MeasuredPairs(run, run, [one]),
    ]
    found = settled(first, measured, {two: "why not"})
    assert (verdict_of(found, one), verdict_of(found, two)) == (Verdict.SAME, Verdict.REGRESSED)
    assert "why not" not in reason_of(found, two)  # every pair is there
    lonely = settled(first, measured[:1], {one: "the base went away"})
    assert reason_of(lonely, one).startswith("not confirmed: the base went away; ")
    nothing = settled(first, [], {})
    assert all(
        reason_of(nothing, cell).startswith("not confirmed: no confirmation was run; ")
        for cell in (one, two)
    )


def test_a_reason_is_reported_where_pairs_exist_and_one_cell_has_none() -> None:
    run = b.small_run(replicates=8, noise=0.001)
    train, forward = (
        f"fa2=on,path=v2,seq_len=2048,workload={word}" for word in ("train", "forward")
    )
    slow = b.scale_rows(b.scale_rows(run, train, 0.9), forward, 0.9)
    first = judge(slow, b.baseline_of(run), GatePolicy())
    base = b.with_manifest(
        run, cells=[cell for cell in run.manifest.cells if cell.cell_id != train]
    )
    found = conclude(first, base, slow, GatePolicy(), "the base of some cells cannot be built")
    assert "the base of some cells cannot be built" in reason_of(found, train)
    assert verdict_of(found, forward) is Verdict.REGRESSED and "cannot be built" not in reason_of(
        found, forward
    )


def test_two_sessions_are_no_pair(slow: Bench) -> None:
    """Both confirmed against one commit, with one seed; only within a session are rows adjacent in
    time.
    """
    for session in ("one", "two"):
        assert slow.run("check", "small.yaml", "--out", session, "--seed", "5") == 3
    homes_ = [run_folder(session) / "confirm" / slow.commits[1][:12] for session in ("one", "two")]
    one, two = (pair.read_pair(home) for home in homes_)
    assert pair.are_paired(one.base, one.candidate) and pair.are_paired(two.base, two.candidate)
    assert not pair.are_paired(one.base, two.candidate) and not pair.are_paired(
        two.base, one.candidate
    )
    assert slow.run("compare", str(homes_[0])) == 3
    assert slow.run("compare", str(homes_[0] / "a"), str(homes_[1] / "b")) == 7


@pytest.mark.parametrize(
    ("changes", "paired"),
    [
        ({}, True),
        ({"created_utc": "2026-01-02T03:04:30Z"}, True),
        ({"created_utc": "2026-01-03T03:04:05Z"}, False),
        ({"created_utc": "yesterday"}, False),
        ({"created_utc": "2026-01-02T03:04:05"}, False),
        ({"seed": 8}, False),
        ({"replicates": 9}, False),
        ({"matrix_sha256": "0" * 64}, False),
        ({"run_id": "1234567890ac-b"}, False),
        ({"run_id": "1234567890ab-a"}, False),
    ],
)
def test_a_pair_was_begun_together(changes: dict[str, Any], paired: bool) -> None:
    """Also older pairs, whose name is the base's commit alone."""
    base = b.with_manifest(b.small_run(), run_id="1234567890ab-a")
    candidate = b.with_manifest(b.small_run(), **{"run_id": "1234567890ab-b", **changes})
    assert pair.are_paired(base, candidate) is paired


@pytest.mark.parametrize(
    "trouble",
    [
        PerfbenchError(Exit.ENVIRONMENT, "NVML cannot read the\ncompute capability"),
        nvml.unavailable(999),
        OSError(5, "Input/output error"),
        KeyboardInterrupt(),
    ],
    ids=["perfbench", "nvml", "os", "interrupt"],
)
def test_a_trace_that_cannot_be_taken_changes_no_verdict(
    slow: Bench,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    trouble: BaseException,
) -> None:
    """The machine answers while confirming, and no more when the trace is due."""
    calls: list[object] = []

    def trace_on_red(*arguments: object) -> None:
        calls.append(arguments)
        raise trouble

    monkeypatch.setattr("perfbench.tracing.trace_on_red", trace_on_red)
    assert slow.run("check", "small.yaml") == 3
    out, err = capsys.readouterr()
    (line,) = [line for line in err.splitlines() if "no trace was taken" in line]
    words = (
        "interrupted" if isinstance(trouble, KeyboardInterrupt) else " ".join(str(trouble).split())
    )
    assert line.endswith(words) and " tok/s), 4 pairs: REGRESSED, exit 3" in out and len(calls) == 1


def test_a_suspect_is_traced_against_the_baselines_commit(
    slow: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither confirmed nor cleared, so nothing but its kernels says where the time went."""
    asked: list[TracedPair] = []
    monkeypatch.setattr(
        "perfbench.tracing.trace_on_red", lambda judgement, pair, out: asked.append(pair)
    )
    assert slow.run("check", "small.yaml", "--no-confirm") == Exit.STRICT
    assert " processes: SUSPECT, exit 7" in capsys.readouterr().out
    (pair,) = asked
    assert pair.base == dict.fromkeys((SHORT, LONG), slow.commits[-1])


def test_a_side_of_an_ab_that_is_gated_says_which_sentinels_it_lacks(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its matrix asks for them, an `ab` measures none, and the baseline has none either."""
    assert bench.run("run", "small.yaml", "--out", "first") == 0
    assert bench.run("baseline", "promote", str(run_folder("first"))) == 0
    Path("small.yaml").write_text(MATRIX + "sentinels: [gemm, copy]\n", encoding="utf-8")
    assert bench.run("ab", "HEAD", "HEAD", "small.yaml") == 0
    capsys.readouterr()
    assert bench.run("gate", str(run_folder() / "b"), "--json") == 0
    _, note = json.loads(capsys.readouterr().out)["notes"]  # the first: where the baseline is from
    assert "without the sentinel gemm, copy" in note
    assert run_file.read_run(run_folder() / "b").manifest.sentinels == []
    assert bench.run("gate", str(run_folder("first")), "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["notes"]) == 1


def test_a_confirmation_is_named_after_its_run(slow: Bench) -> None:
    assert slow.run("check", "small.yaml") == 3
    folder = run_folder()
    found = pair.read_pair(folder / "confirm" / slow.commits[1][:12])
    assert found.base.manifest.run_id == f"{folder.name}-{slow.commits[1][:12]}-a"
