"""Which code is measured: commit and uncommitted changes, asked of git."""

from __future__ import annotations

import hashlib
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path

from perfbench.errors import Exit, PerfbenchError
from perfbench.records import Source

# Results are no part of the measured code: promoting a baseline must not make the tree dirty.
_MEASURED = (".", ":(exclude,top)reports")
PACKAGE = "nsa"  # what is measured
_TIMEOUT_S = 60.0


class NoGit(Exception):
    """Git cannot say; the message is the reason."""


def source_of(root: Path, source_commit: str | None = None) -> Source:
    """The checkout at ``root``; where git cannot say, ``source_commit`` with the reason, else null
    with the reason.
    """
    package = root / PACKAGE
    sha256 = package_sha256(package) if package.is_dir() else None
    try:
        found = _from_git(root)
    except NoGit as error:
        return Source(
            commit=source_commit,
            dirty_sha256=None,
            reason=_unproved(source_commit, str(error)),
            nsa_sha256=sha256,
        )
    if source_commit and not (found.commit or "").startswith(source_commit.lower()):
        raise PerfbenchError(
            Exit.USAGE,
            f"--source-commit {source_commit}, but git says that {root} is at {found.commit}. Next:"
            " omit the option",
        )
    return found.model_copy(update={"nsa_sha256": sha256})


def package_sha256(folder: Path) -> str:
    """Hash of every Python file below ``folder``, names included."""
    digest = hashlib.sha256()
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.py")}
    for name in sorted(files):
        digest.update(name.encode("utf-8", "surrogateescape") + b"\0")
        digest.update(_content_sha256(files[name]))
    return digest.hexdigest()


def _unproved(source_commit: str | None, why: str) -> str:
    if source_commit:
        return f"given by --source-commit, not proved, and changes are not known: {why}"
    return f"{why}; give --source-commit SHA"


def _from_git(root: Path) -> Source:
    if not root.is_dir():
        raise NoGit(f"{root} is not a directory")
    git_output(root, "rev-parse", "--show-toplevel")
    if _ignored(root):
        raise NoGit(
            f"{root} is ignored by the repository around it, so it is an installed copy and no"
            " checkout"
        )
    measured = root / PACKAGE / "__init__.py"
    if measured.is_file() and not git_output(root, "ls-files", "--", f"{PACKAGE}/__init__.py"):
        raise NoGit(f"no git tracks {measured}: the repository around it holds other code")
    commit = git_output(root, "rev-parse", "--verify", "HEAD").decode().strip()
    named = git_output(root, "rev-parse", "--abbrev-ref", "HEAD")
    branch = named.decode("utf-8", "replace").strip()
    return Source(
        commit=commit, dirty_sha256=_dirty_sha256(root), branch=None if branch == "HEAD" else branch
    )


def git_output(root: Path, *args: str) -> bytes:
    """What `git -C root ARGS` prints; NoGit where it fails."""
    command = ["git", "-C", str(root), *args]
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL
        )
    except OSError as error:
        raise NoGit(f"git cannot be started ({error.strerror})") from error
    except subprocess.TimeoutExpired as error:
        raise NoGit(f"git {args[0]} took longer than {_TIMEOUT_S:.0f} s") from error
    if done.returncode:
        message = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise NoGit(
            f"git {' '.join(args[:2])}:"
            f" {message[0] if message else f'exit status {done.returncode}'}"
        )
    return done.stdout


def subjects_between(
    root: Path, old: str, new: str, most: int, *, under: str | None = None
) -> tuple[int, list[str]] | None:
    """How many commits lead from ``old`` to ``new``, and short hash and subject of the newest
    ``most``; None where git at ``root`` does not know both.

    ``under``: only those that touch this folder.
    """
    if not all(re.fullmatch(r"[0-9a-f]{7,64}", one) for one in (old, new)):
        return None
    try:
        only = () if under is None else (under,)
        shown = git_output(
            root, "log", "--format=%h %s", "--no-color", f"{old}..{new}", "--", *only
        )
    except NoGit:
        return None
    lines = shown.decode("utf-8", "replace").splitlines()
    return len(lines), lines[:most]


def commit_time(root: Path, commit: str | None) -> datetime | None:
    """When ``commit`` was committed; None where git at ``root`` does not know it."""
    if commit is None or not re.fullmatch(r"[0-9a-f]{7,64}", commit):
        return None
    try:
        shown = git_output(root, "show", "--no-patch", "--format=%cI", f"{commit}^{{commit}}")
        return datetime.fromisoformat(shown.decode().strip()).astimezone(UTC)
    except (NoGit, ValueError):
        return None


def _ignored(root: Path) -> bool:
    command = ["git", "-C", str(root), "check-ignore", "-q", "."]
    return (
        subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, check=False).returncode
        == 0
    )


def _dirty_sha256(root: Path) -> str | None:
    """Hash of the difference to HEAD and of every untracked file; None where there is neither."""
    changes = git_output(
        root, "diff", "HEAD", "--binary", "--no-ext-diff", "--no-color", "--", *_MEASURED
    )
    listed = git_output(root, "ls-files", "--others", "--exclude-standard", "-z", "--", *_MEASURED)
    untracked = sorted(name for name in listed.split(b"\0") if name)
    if not changes and not untracked:
        return None
    digest = hashlib.sha256(changes)
    for name in untracked:
        digest.update(b"\0" + name + b"\0")
        digest.update(_content_sha256(root / Path(name.decode("utf-8", "surrogateescape"))))
    return digest.hexdigest()


def _content_sha256(path: Path) -> bytes:
    if not path.is_file():  # a nested repository is listed as a folder, a dangling link is no file
        return b""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError as error:
        return f"unreadable: {error.errno}".encode()
