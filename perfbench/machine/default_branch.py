"""The commit whose baseline and policy judge a change: the merge base with the default branch, so
that a change cannot edit its own judge.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from perfbench.machine.source import NoGit, git_output

# The first that exists is taken for the default branch.
DEFAULT_BRANCHES = ("origin/HEAD", "origin/main", "origin/master", "main", "master")


@dataclass(frozen=True, slots=True)
class JudgingCommit:
    """``name`` says which commit it is; ``head`` is the commit that is checked out."""

    root: Path
    commit: str
    name: str
    head: str

    def read(self, path: Path) -> bytes | None:
        """The file at ``path`` (from the current folder) as it is in the commit; None where the
        commit has none.
        """
        if (inside := self._inside(path)) is None:
            return None
        name = f"{self.commit}:{inside.as_posix()}"
        try:
            # a folder would be listed, and a link's target printed
            if git_output(self.root, "cat-file", "-t", name).strip() != b"blob":
                return None
            return git_output(self.root, "cat-file", "blob", name)
        except NoGit:
            return None

    def files(self, folder: Path) -> list[Path]:
        """The files below ``folder`` (from the current folder) in the commit."""
        if (inside := self._inside(folder)) is None:
            return []
        listed = git_output(
            self.root, "ls-tree", "-r", "-z", "--name-only", self.commit, "--", str(inside)
        )
        names = [name.decode("utf-8", "surrogateescape") for name in listed.split(b"\0") if name]
        return [folder / Path(name).relative_to(inside) for name in names]

    def _inside(self, path: Path) -> Path | None:
        """``path`` from the root; a link that the change put there is not followed."""
        whole = Path(os.path.normpath(Path.cwd().resolve() / path))
        return whole.relative_to(self.root) if whole.is_relative_to(self.root) else None

    def __str__(self) -> str:
        return f"{self.commit[:12]}, {self.name}"


def judging_commit(folder: Path) -> JudgingCommit | str:
    """That of the repository around ``folder``; why there is none, as text."""
    try:
        root = Path(git_output(folder, "rev-parse", "--show-toplevel").decode().rstrip("\n"))
        head = _commit(root, "HEAD")
    except NoGit as error:
        return str(error)
    if head is None:
        return "the repository has no commit"
    for name in DEFAULT_BRANCHES:
        if (branch := _commit(root, name)) is None:
            continue
        try:
            base = git_output(root, "merge-base", head, branch).decode().strip()
        except NoGit:
            return JudgingCommit(
                root, branch, f"{name} itself, which shares no known commit with HEAD", head
            )
        if base == head:
            return JudgingCommit(root, head, f"HEAD, which is on the default branch {name}", head)
        return JudgingCommit(root, base, f"the merge base of HEAD with {name}", head)
    return JudgingCommit(
        root, head, f"HEAD, since none of {', '.join(DEFAULT_BRANCHES)} is known here", head
    )


def _commit(root: Path, name: str) -> str | None:
    try:
        found = git_output(root, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
    except NoGit:
        return None
    return found.decode().strip()
