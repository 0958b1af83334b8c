"""Versions of the code next to one another: a revision becomes a git worktree, a folder is taken
as it is.

A checkout is a folder with nothing but a link named `nsa` in it, because only that package may
differ: the harness is the running one on both sides. The user's own tree is never touched, so it
may be dirty.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from perfbench.errors import Exit, PerfbenchError
from perfbench.machine import source_of
from perfbench.records import Source

PREFIX = "perfbench-side-"
_TIMEOUT_S = 300.0  # a checkout from a cold disk


class CannotBuild(PerfbenchError):
    """This version of the code cannot be measured here: no git, no such commit, or an `nsa` that
    the harness cannot drive.

    ``version``: what the user called it, where the fault is that version's own; empty where git or
    the disk refused.
    """

    def __init__(self, message: str, version: str = "") -> None:
        super().__init__(Exit.USAGE, message)
        self.version = version


@dataclass(frozen=True, slots=True)
class Checkout:
    """One version of the code, ready to be imported from ``folder``; ``name`` is what the user
    called it. ``root`` is what holds its nsa/, and ``repository`` the running checkout.
    """

    name: str
    folder: Path
    source: Source
    root: Path | None = None
    repository: Path | None = None

    def own_folder(self, folder: Path) -> Path:
        """Where this version has ``folder`` of the running checkout; itself where it lies
        outside.
        """
        if self.root is None or self.repository is None:
            return folder
        here, home = folder.resolve(), self.repository.resolve()
        return self.root / here.relative_to(home) if here.is_relative_to(home) else folder


@contextmanager
def checked_out(text: str, repository: Path) -> Iterator[Checkout]:
    """The code that ``text`` names: a folder that holds nsa/ (FOLDER@SHA where git is missing
    there), or a revision of ``repository``.

    A worktree lives until the end of the block, Ctrl-C and errors included; one that a killed
    process left is removed by the next.
    """
    folder, _, commit = (
        text.rpartition("@") if _holds_nsa(text.rpartition("@")[0]) else (text, "", "")
    )
    with ExitStack() as stack:
        home = stack.enter_context(_temporary_folder())
        if _holds_nsa(folder):
            code, found = Path(folder).resolve(), source_of(Path(folder).resolve(), commit or None)
        else:
            code = stack.enter_context(_worktree(text, repository, home))
            found = source_of(code)
        yield Checkout(text, _link(code, home, text), found, code, repository)


@contextmanager
def own_checkout(root: Path, found: Source) -> Iterator[Checkout]:
    """The running checkout itself, uncommitted changes included."""
    with _temporary_folder() as home:
        yield Checkout("this checkout", _link(root, home, "this checkout"), found, root, root)


def is_commit(text: str | None) -> bool:
    """Whether a stored file names a commit: a folder or a branch would be code of its own choice,
    which is run only where the user typed it.
    """
    return re.fullmatch(r"[0-9a-fA-F]{4,64}", text or "") is not None


def _holds_nsa(folder: str) -> bool:
    return bool(folder) and (Path(folder) / "nsa" / "__init__.py").is_file()


def _link(code: Path, home: Path, name: str) -> Path:
    if not _holds_nsa(str(code)):
        raise CannotBuild(
            f"got {code} without nsa/__init__.py, wanted a version of the code that has the"
            " package. Next: take another one",
            name,
        )
    folder = home / "path"
    folder.mkdir()
    (folder / "nsa").symlink_to(code.resolve() / "nsa", target_is_directory=True)
    return folder


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    """Locked while we live, so that another process can recognise what a killed one left behind."""
    home = Path(tempfile.mkdtemp(prefix=PREFIX)).resolve()
    fd = os.open(home / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield home
    finally:
        shutil.rmtree(home, ignore_errors=True)
        os.close(fd)


@contextmanager
def _worktree(revision: str, repository: Path, home: Path) -> Iterator[Path]:
    """The folder that holds nsa/ in a fresh checkout of ``revision``."""
    commit = commit_of(revision, repository)
    # Not empty where the package is not at the repository's top.
    inside = git(repository, "rev-parse", "--show-prefix").strip()
    _remove_left_behind(repository)
    tree = home / "checkout"
    try:
        git(
            repository,
            "-c",
            "core.hooksPath=/dev/null",
            "worktree",
            "add",
            "--detach",
            "--quiet",
            str(tree),
            commit,
        )
        yield tree / inside
    finally:
        _remove(repository, tree)


def commit_of(revision: str, repository: Path) -> str:
    """The hash of a commit, branch or tag; CannotBuild with the next step."""
    wanted = "wanted a commit, branch or tag, or a folder that holds nsa/"
    try:
        git(repository, "rev-parse", "--git-dir")
    except CannotBuild as error:
        raise CannotBuild(
            f"got {revision!r}, {wanted}, and {error}. Next: work in a git checkout, or name two"
            " folders"
        ) from None
    try:
        return git(
            repository,
            "rev-parse",
            "--verify",
            "--quiet",
            "--end-of-options",
            f"{revision}^{{commit}}",
        ).strip()
    except CannotBuild:
        shallow = git(repository, "rev-parse", "--is-shallow-repository").strip() == "true"
        step = (
            "this clone is shallow: `git fetch --unshallow`, in CI `fetch-depth: 0`"
            if shallow
            else "`git fetch`, or see `git log`"
        )
        if revision.endswith("-dirty"):  # as `git describe --dirty` names it
            step = (
                f"commit the changes first, or name {revision.removesuffix('-dirty')!r}, which is"
                " without them"
            )
        raise CannotBuild(
            f"got {revision!r}, which {repository} does not have, {wanted}. Next: {step}"
        ) from None


def _remove_left_behind(repository: Path) -> None:
    """Worktrees of ours whose process is gone (kill -9): their lock is free, or their folder is not
    there any more.
    """
    for line in git(repository, "worktree", "list", "--porcelain").splitlines():
        home = Path(line.removeprefix("worktree ")).parent
        if not line.startswith("worktree ") or not home.name.startswith(PREFIX):
            continue
        if _is_abandoned(home):
            _remove(repository, home / "checkout")
            shutil.rmtree(home, ignore_errors=True)


def _is_abandoned(home: Path) -> bool:
    try:
        fd = os.open(home / "lock", os.O_RDWR)
    except FileNotFoundError:
        return True
    except OSError:  # another user's
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def _remove(repository: Path, tree: Path) -> None:
    """With git's own record of it; twice --force, because an interrupted `worktree add` leaves it
    locked.
    """
    subprocess.run(
        ["git", "-C", str(repository), "worktree", "remove", "--force", "--force", str(tree)],
        capture_output=True,
        timeout=_TIMEOUT_S,
        check=False,
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # a second Ctrl-C must not end it half way
    )


def git(repository: Path, *args: str, given: str = "") -> str:
    """What git prints of ``given`` on its stdin; CannotBuild with git's own first line."""
    command = ["git", "-C", str(repository), *args]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="surrogateescape",
            timeout=_TIMEOUT_S,
            check=False,
            input=given,
        )
    except OSError as error:
        raise CannotBuild(f"git cannot be started ({error.strerror})") from error
    except subprocess.TimeoutExpired as error:
        raise CannotBuild(f"git {args[0]} took longer than {_TIMEOUT_S:.0f} s") from error
    if done.returncode:
        message = done.stderr.strip().splitlines()
        raise CannotBuild(
            f"git says: {message[0] if message else f'exit status {done.returncode}'}"
        )
    return done.stdout
