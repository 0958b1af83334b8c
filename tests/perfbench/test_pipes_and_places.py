"""A pipe that is closed, a disk that is full and a folder outside git: each has its exit and one
line.

Row of the faults: pipes and places.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from perfbench.records import Source
from tests.perfbench import builders as b
from tests.perfbench.report_cases import alone

ROOT = Path(__file__).parents[2]
RUNS = "tests/data/runs/h100-demo"


def called(*argv: str, stdout: int) -> tuple[int, str]:
    """Exit and stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "perfbench", *argv],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        check=False,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["report", f"{RUNS}/wrong-path"], 4),
        (["report", f"{RUNS}/wrong-path", "--json"], 4),
        (["compare", "reports/evidence/h200-drop"], 3),
        (["plan", "matrices/cpu.yaml"], 0),
        (["plan", "matrices/cpu.yaml", "--json"], 0),
    ],
)
def test_a_reader_that_has_seen_enough_changes_no_exit(
    tmp_path: Path, argv: list[str], code: int
) -> None:
    read, write = os.pipe()
    os.close(read)
    out = ["--out", str(tmp_path)] if argv[0] == "report" else []
    try:
        got, err = called(*argv, *out, stdout=write)
    finally:
        os.close(write)
    assert got == code, err
    assert "internal error" not in err and "Broken pipe" not in err
    assert not out or (tmp_path / "report.md").is_file()


@pytest.mark.parametrize(
    "argv", [["plan", "matrices/cpu.yaml"], ["--help"], ["run", "--help"], ["--version"]]
)
def test_a_full_stdout_is_one_line(argv: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        code, err = called(*argv, stdout=full.fileno())
    assert code == 2
    assert err == "perfbench: stdout cannot be written: No space left on device\n"


def test_a_closed_stdout_changes_no_exit(tmp_path: Path) -> None:
    """`>&-`."""
    line = f"{sys.executable} -m perfbench report {RUNS}/wrong-path --out {tmp_path} >&-"
    done = subprocess.run(line, shell=True, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 4, done.stderr


def test_outside_git_nobody_knows_whether_there_are_changes(tmp_path: Path) -> None:
    run = b.small_run()
    assert "| uncommitted changes | no |" in alone(run)
    for commit in (None, "a" * 40):
        there = Source(commit=commit, dirty_sha256=None, reason="git rev-parse: not a repository")
        text = alone(b.with_manifest(run, source=there))
        assert "| uncommitted changes | unknown (git rev-parse: not a repository) |" in text
    changed = Source(commit="a" * 40, dirty_sha256="b" * 64)
    assert "| uncommitted changes | yes, sha256" in alone(b.with_manifest(run, source=changed))
