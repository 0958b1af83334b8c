"""`perfbench detect` prints what is new, once, with its commits; `perfbench triage` decides."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from perfbench.commands.app import invoke
from perfbench.commands.triage import accept_promoted
from perfbench.errors import Exit
from perfbench.history import writing
from perfbench.history.nouns import MeasuredValue
from perfbench.history.store import History
from tests.perfbench.history.made_runs import SEGMENT, made_cell, made_run

ROOT = Path(__file__).parents[3]
CELL = "path=triton,seq_len=512"
OTHER = "path=dense,seq_len=512"
Command = Callable[..., tuple[int, str, str]]


def levels(*parts: tuple[int, float], seed: int = 3) -> list[float]:
    """(points, level) after one another, with noise of 0.5 %."""
    level = np.concatenate([np.full(count, value) for count, value in parts])
    rng = np.random.default_rng(seed)
    return (level * np.exp(0.005 * rng.normal(size=len(level)))).tolist()


def write(
    url: Path,
    values: Sequence[float],
    *,
    commits: Sequence[str] = (),
    segments: Mapping[int, Mapping[str, str]] | None = None,
    metric: str = "tok_per_s",
    other: Sequence[float] | None = None,
    **fields: object,
) -> None:
    """A run a day: ``values`` of CELL; OTHER never changes, where it has no values of its own."""
    steady, segment = other or levels((len(values), 50.0), seed=4), SEGMENT
    with History.open(url, create=True) as history, history._database.write() as connection:
        for day, value in enumerate(values):  # one transaction: each waits for the disk
            segment = dict((segments or {}).get(day, segment))
            cells = [
                made_cell(name, {metric: MeasuredValue(one, None, None, 3)})
                for name, one in ((CELL, value), (OTHER, steady[day]))
            ]
            about = dict(fields) | ({"commit": commits[day]} if commits else {})
            writing.add(connection, made_run(day, *cells, segment=segment, **about))


@pytest.fixture
def url(tmp_path: Path) -> Path:
    return tmp_path / "history.db"


@pytest.fixture
def command(
    url: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Command:
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = invoke([*words, "--history", str(url)])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def test_a_new_step_is_printed_once_and_fails(url: Path, command: Command) -> None:
    write(url, levels((40, 100.0), (20, 95.0)))
    code, out, err = command("detect")
    assert code == Exit.REGRESSED
    first, commits, after = out.splitlines()[:3]
    assert first.startswith(("-5.", "-4."))
    assert f"tok_per_s of {CELL} (nightly, h200): worse, at run run-040, after run-039" in first
    assert "commits 0027002700..0028002800 (git does not know them here)" in commits
    typed = f"perfbench bisect {CELL} --good 0027002700 --bad 0028002800 --matrix nightly.yaml"
    assert after.strip() == f"next: {typed}"
    assert "1 new change (1 worse, 0 better) in 2 series of 120 points" in err
    assert command("detect")[:2] == (Exit.OK, "nothing new\n")
    code, out, _ = command("detect", "--all")
    assert (code, out.startswith("[reported] -")) == (Exit.OK, True)


def test_more_points_make_no_reported_step_new(url: Path, command: Command) -> None:
    values = levels((40, 100.0), (30, 98.0))
    write(url, values[:50])
    assert command("detect")[0] == Exit.REGRESSED
    for end in (55, 60, 70):
        write(url, values[:end])
        assert command("detect")[:2] == (Exit.OK, "nothing new\n")


def test_what_became_faster_is_no_failure(url: Path, command: Command) -> None:
    write(url, levels((40, 100.0), (20, 108.0)))
    code, out, _ = command("detect", "--forget")
    assert code == Exit.OK
    assert ": better, at run run-040" in out
    assert command("detect")[1] == out  # --forget remembers nothing


def test_report_only_fails_nothing(url: Path, command: Command) -> None:
    write(url, levels((40, 100.0), (20, 95.0)))
    code, out, _ = command("detect", "--report-only")
    assert (code, ": worse," in out) == (Exit.OK, True)


def test_the_largest_change_is_first(url: Path, command: Command) -> None:
    write(url, levels((40, 100.0), (30, 95.0), (30, 75.0)))
    changes = json.loads(command("detect", "--json")[1])["changes"]
    assert [one["run_id"] for one in changes] == ["run-070", "run-040"]
    assert changes[0]["low_pct"] < changes[0]["size_pct"] < changes[0]["high_pct"]


def test_several_cells_are_all_looked_at(url: Path, command: Command) -> None:
    write(url, levels((40, 100.0), (20, 95.0)), other=levels((30, 50.0), (30, 40.0), seed=5))
    for asked in ([CELL, OTHER], [OTHER, CELL, OTHER]):
        words = [word for cell in asked for word in ("--cell", cell)]
        printed = json.loads(command("detect", "--json", "--forget", *words)[1])
        assert {one["cell_id"] for one in printed["changes"]} == {CELL, OTHER}
        assert printed["series"] == 2
    (one,) = json.loads(command("detect", "--json", "--forget", "--cell", CELL)[1])["changes"]
    assert one["cell_id"] == CELL


def test_since_limits_what_is_shown_and_not_what_is_compared(url: Path, command: Command) -> None:
    write(url, levels((40, 100.0), (30, 95.0), (30, 75.0)))
    (one,) = json.loads(command("detect", "--json", "--since", "2026-05-01")[1])["changes"]
    assert one["run_id"] == "run-070"


def test_a_new_segment_and_a_new_card_are_printed_and_compared_with_nothing(
    url: Path, command: Command
) -> None:
    values = levels((40, 100.0), (40, 90.0))
    write(url, values, segments={40: {**SEGMENT, "torch": "2.14.0"}})
    code, out, _ = command("detect")
    expected = f"new segment at run run-040 (nightly, h200): torch {SEGMENT['torch']} -> 2.14.0;"
    assert code == Exit.OK
    assert out.startswith(f"{expected} 2 series, of which nothing is compared across it")
    with History.open(url) as history:
        history.add(made_run(80, made_cell(CELL), card="h100"))
    (card, _) = json.loads(command("detect", "--json")[1])["segments"]
    assert (card["card"], card["changed"]) == ("h100", {"card": {"from": "h200", "to": "h100"}})


def test_commits_between_are_named_where_git_knows_them(
    url: Path, command: Command, tmp_path: Path
) -> None:
    def git(*words: str) -> str:
        name = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(
            ["git", *name, *words], cwd=tmp_path, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    git("init", "-q")
    shas = []
    for subject in ("first", "tiles of 64", "a <b>bold</b> claim"):
        git("commit", "-q", "--allow-empty", "-m", subject)
        shas.append(git("rev-parse", "HEAD"))
    commits = [shas[0]] * 40 + [shas[2]] * 20
    write(url, levels((40, 100.0), (20, 95.0)), commits=commits)
    (one,) = json.loads(command("detect", "--json", "--forget")[1])["changes"]
    assert one["commits_between"] == 2
    assert [line.partition(" ")[2] for line in one["subjects"]] == [
        "a <b>bold</b> claim",
        "tiles of 64",
    ]
    assert "(2 between: " in command("detect")[1]


def test_one_commit_on_both_sides_is_no_commits_fault(url: Path, command: Command) -> None:
    write(url, levels((40, 100.0), (20, 95.0)), commits=["a" * 40] * 60)
    _, out, _ = command("detect")
    assert "both of commit aaaaaaaaaa: no commit lies between" in out
    assert f"next: perfbench history {CELL} --metric tok_per_s" in out


def test_uncommitted_changes_are_named_and_not_bisected(url: Path, command: Command) -> None:
    write(url, levels((40, 100.0), (20, 95.0)), is_dirty=True)
    _, out, _ = command("detect", "--forget")
    runs = "run-039 and run-040"
    assert f"    uncommitted changes may be the cause: the tree of {runs} was dirty\n" in out
    assert f"next: perfbench history {CELL} --metric tok_per_s" in out
    assert "bisect" not in out
    (one,) = json.loads(command("detect", "--json", "--forget")[1])["changes"]
    assert one["dirty_runs"] == ["run-039", "run-040"]


def test_of_one_commit_uncommitted_changes_may_differ(url: Path, command: Command) -> None:
    write(url, levels((40, 100.0), (20, 95.0)), is_dirty=True, commits=["a" * 40] * 60)
    _, out, _ = command("detect")
    assert "both of commit aaaaaaaaaa: no commit lies between\n    uncommitted changes" in out


def test_from_zero_no_percentage_is_printed(url: Path, command: Command) -> None:
    write(url, [0.0] * 30 + [3.0] * 10, metric="host_syncs")
    _, out, _ = command("detect", "--forget")
    assert out.startswith(f"0 -> 3 host_syncs of {CELL} (nightly, h200): worse, at run run-030")
    assert "%" not in out
    (one, *_) = json.loads(command("detect", "--json")[1])["changes"]
    assert (one["size_pct"], one["low_pct"], one["high_pct"]) == (None, None, None)
    assert one["reason"] == "no percentage of 0 exists: 0 -> 3"
    assert (one["old_level"], one["new_level"]) == (0.0, 3.0)


def test_a_series_of_odd_numbers_is_skipped_and_the_rest_is_judged(
    url: Path, command: Command
) -> None:
    write(url, levels((40, 100.0), (20, 95.0)), other=[1e308, 0.0, -1.0, 5e-324] * 15)
    code, out, _ = command("detect", "--json", "--forget")
    assert code == Exit.REGRESSED
    printed = json.loads(out)
    assert [one["cell_id"] for one in printed["changes"]] == [CELL]
    assert [one["cell_id"] for one in printed["skipped"]] == [OTHER]
    assert command("detect")[1].endswith(
        f"\nskipped: tok_per_s of {OTHER} (nightly, h200): a value of 1e+308 is too large to be"
        " compared\n"
    )


def test_a_drift_is_stored_as_far_as_it_was_news(url: Path, command: Command) -> None:
    line = np.clip((np.arange(120) - 40) / 80, 0, 1)
    values = (levels((120, 100.0)) * np.exp(-0.5 * line)).tolist()
    codes = []
    for end in (60, 62, 75, 77, 120):
        write(url, values[:end])
        codes.append(command("detect")[0])
    assert codes == [Exit.REGRESSED, Exit.OK, Exit.REGRESSED, Exit.OK, Exit.REGRESSED]
    with History.open(url) as history:
        (stored,) = history.change_points()
    assert stored.size_pct == pytest.approx(100 * np.expm1(-0.5), abs=2)
    assert stored.run_id == "run-119"


def test_an_accepted_step_is_no_news_and_the_next_one_is(url: Path, command: Command) -> None:
    values = levels((40, 100.0), (30, 95.0), (30, 91.0))
    write(url, values[:70])
    code, out, _ = command("triage", "accept", "run-045", "--cell", CELL, "--note", "fp32 sums")
    assert (code, out) == (Exit.OK, "accepted at run run-045: 1 series\n")
    assert command("detect")[:2] == (Exit.OK, "nothing new\n")
    write(url, values)
    code, out, _ = command("detect")
    assert (code, "at run run-070" in out) == (Exit.REGRESSED, True)
    assert "run-040" not in out


def test_what_is_called_noise_stays_silent(url: Path, command: Command) -> None:
    write(url, levels((40, 100.0), (20, 95.0)))
    assert command("triage", "noise", "run-040", "--metric", "tok_per_s")[0] == Exit.OK
    assert command("detect")[:2] == (Exit.OK, "nothing new\n")
    assert command("detect", "--all")[1].startswith("[noise] -")


def test_the_last_decision_wins_and_can_be_taken_back(url: Path, command: Command) -> None:
    write(url, levels((40, 100.0), (20, 95.0)))
    for verb, shown in (("accept", "[accepted]"), ("noise", "[noise]"), ("accept", "[accepted]")):
        assert command("triage", verb, "run-040", "--cell", CELL)[0] == Exit.OK
        assert command("detect", "--all")[1].startswith(shown)
    assert command("triage", "undo", "run-040", "--cell", OTHER)[0] == Exit.USAGE
    code, out, _ = command("triage", "undo", "run-040", "--cell", CELL)
    assert (code, out) == (Exit.OK, "taken back at run run-040: accepted, noise, accepted\n")
    assert command("detect")[0] == Exit.REGRESSED
    code, _, err = command("triage", "undo", "run-040")
    assert (code, "nothing was decided at run run-040" in err) == (Exit.USAGE, True)


def test_a_note_is_printed_with_its_change(url: Path, command: Command) -> None:
    write(url, levels((40, 100.0), (20, 95.0)))
    assert command("triage", "note", "run-040", "--note", "a fan broke")[0] == Exit.OK
    assert "    note: a fan broke\n" in command("detect")[1]


def test_a_mistake_is_one_line(url: Path, command: Command) -> None:
    write(url, levels((5, 100.0)))
    for words, wanted in (
        (("triage", "note", "run-001"), "Next: add --note TEXT"),
        (("triage", "accept", "run-9"), "has no run 'run-9'"),
        (("triage", "noise", "run-001", "--metric", "launches"), "no series has this suite"),
        (("detect", "--card", "b200"), "the history has no series of card 'b200'. Next:"),
    ):
        code, out, err = command(*words)
        assert (code, out, err.count("\n")) == (Exit.USAGE, "", 1)
        assert wanted in err


def test_a_promotion_accepts_the_cells_that_it_promotes(
    url: Path, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    write(url, levels((40, 100.0), (20, 95.0)))
    accept_promoted("run-050", "nightly", "h200", [OTHER], str(url))
    assert command("detect", "--forget")[0] == Exit.REGRESSED
    accept_promoted("run-050", "nightly", "h200", [CELL, OTHER], str(url))
    assert command("detect")[:2] == (Exit.OK, "nothing new\n")
    accept_promoted("never-added", "nightly", "h200", [CELL], str(url))
    assert "perfbench triage accept never-added" in capsys.readouterr().err
    accept_promoted("run-050", "nightly", "h200", [CELL], "none")
    assert capsys.readouterr().err == ""


def test_baseline_promote_accepts_in_the_configured_history(
    url: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ROOT / "tests/data/runs/h200-drop/a"
    command("history", "init")
    assert command("history", "add", str(run))[0] == Exit.OK
    promote = ("baseline", "promote", str(run), "--to", "made.json", "--allow-dirty")
    assert command(*promote)[0] == Exit.OK
    with History.open(url) as history:
        decisions = history.decisions()
        (info,) = history.runs()
        keys = history.keys()
    assert {one.cell_id for one in decisions} == {key.cell_id for key in keys}
    assert all(any(one.matches(key) for one in decisions) for key in keys)
    assert {(one.kind, one.run_id) for one in decisions} == {("accepted", info.run_id)}
