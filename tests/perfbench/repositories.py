"""Git repositories that hold a whole `nsa` with a marker, for the tests of two versions."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def git(folder: Path, *args: str) -> str:
    identity = (
        "-c",
        "user.name=t",
        "-c",
        "user.email=t@example.org",
        "-c",
        "commit.gpgsign=false",
        "-c",
        "init.defaultBranch=main",
    )
    done = subprocess.run(
        ["git", "-C", str(folder), *identity, *args], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def mark(folder: Path, speed: float) -> None:
    (folder / "nsa" / "marker.py").write_text(f"SPEED = {speed}\n", encoding="utf-8")


def commit(folder: Path, message: str) -> str:
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", message)
    return git(folder, "rev-parse", "HEAD")


def make(folder: Path, *speeds: float) -> list[str]:
    """One commit for each speed, oldest first; their hashes."""
    folder.mkdir(parents=True)
    git(folder, "init", "-q")
    (folder / ".gitignore").write_text("__pycache__/\n", encoding="utf-8")
    shutil.copytree(ROOT / "nsa", folder / "nsa", ignore=shutil.ignore_patterns("__pycache__"))
    commits = []
    for speed in speeds:
        mark(folder, speed)
        commits.append(commit(folder, f"speed {speed}"))
    return commits


def worktrees(folder: Path) -> list[str]:
    return [
        line
        for line in git(folder, "worktree", "list", "--porcelain").splitlines()
        if line.startswith("worktree ")
    ]
