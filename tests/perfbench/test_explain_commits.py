"""What `explain` adds to a verdict: the commits between, and the commands that look further."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perfbench.commands import outcome
from tests.perfbench.ab_bench import SHORT, Bench


def test_explain_lists_the_commits_between_and_the_next_commands(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.b.speed = 800.0
    assert bench.run("ab", "HEAD~1", "HEAD", "small.yaml", "--only", "seq_len=128") == 3
    (folder,) = Path("reports/runs").iterdir()
    capsys.readouterr()
    assert bench.run("explain", str(folder), SHORT, "--json") == 0
    data = json.loads(capsys.readouterr().out)
    base, candidate = (commit[:12] for commit in bench.commits)
    head, *commits = data["commits"]
    assert head == f"Commits between {base} and {candidate} that touch nsa/: 1"
    assert [line.split() for line in commits] == [[candidate[:7], "speed", "900.0"]]
    assert data["next"] == [
        f"perfbench trace {folder} {SHORT}",
        f"perfbench bisect --good {base} --bad {candidate} --matrix small.yaml {SHORT}",
    ]
    assert bench.run("explain", str(folder), SHORT) == 0
    assert capsys.readouterr().out.endswith(f"next: {data['next'][1]}\n")


def test_explain_of_commits_that_git_does_not_know_is_a_line(
    bench: Bench,
    template: tuple[Path, list[str]],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench.b.speed = 800.0
    assert bench.run("ab", "HEAD~1", "HEAD", "small.yaml", "--only", "seq_len=128") == 3
    (folder,) = Path("reports/runs").iterdir()
    monkeypatch.setattr(outcome, "CHECKOUT", tmp_path)  # no repository
    capsys.readouterr()
    assert bench.run("explain", str(folder), SHORT, "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert len(data["commits"]) == 1 and "git says: fatal: not a git repository" in str(data)
    assert data["next"] == [f"perfbench trace {folder} {SHORT}"]


def test_explain_of_what_is_not_red_lists_no_commits(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.run("ab", "HEAD~1", "HEAD", "small.yaml", "--only", "seq_len=128") == 0
    (folder,) = Path("reports/runs").iterdir()
    capsys.readouterr()
    assert bench.run("explain", str(folder), SHORT) == 0
    text = capsys.readouterr().out
    assert "Commits between" not in text and "next:" not in text
