"""The commits between two revisions, and which of them change what is measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from perfbench.errors import Exit, PerfbenchError
from perfbench.machine import PACKAGE, subjects_between
from perfbench.runner.ab.checkout import CannotBuild, commit_of, git

SHORT = 12
_ABSENT = ""  # the tree of a commit without the package


@dataclass(frozen=True, slots=True)
class Commit:
    """``tree``: git's hash of the measured package at this commit; empty where it has none.

    ``parents`` are those that a search follows.
    """

    sha: str
    tree: str
    subject: str
    parents: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.sha[:SHORT]} {self.subject}"


@dataclass(frozen=True, slots=True)
class CommitRange:
    """``commits``: those after ``good`` up to ``bad``, each after its parents."""

    good: Commit
    bad: Commit
    commits: tuple[Commit, ...]

    def of(self, sha: str) -> Commit | None:
        """The commit of this hash; None outside the range."""
        return next((one for one in (self.good, *self.commits) if one.sha == sha), None)


def commits_between(
    good: str, bad: str, repository: Path, *, every_parent: bool = False
) -> CommitRange:
    """The history from ``good`` to ``bad``, by first parents unless ``every_parent``.

    USAGE where one is no commit of this repository, where they are one commit, where ``good`` is
    no ancestor of ``bad``, and in a shallow clone, whose history ends anywhere.
    """
    ends = [commit_of(text, repository) for text in (good, bad)]
    if git(repository, "rev-parse", "--is-shallow-repository").strip() == "true":
        raise CannotBuild(
            "got a shallow clone, wanted the whole history. Next: `git fetch --unshallow`, in CI"
            " `fetch-depth: 0`"
        )
    if ends[0] == ends[1]:
        raise PerfbenchError(
            Exit.USAGE,
            f"got one commit twice ({good} and {bad} are {ends[0][:SHORT]}), wanted two. Next:"
            " name the last good one and a bad one",
        )
    if (shared := _merge_base(ends, repository)) != ends[0]:
        step = "name two commits of one history"
        if shared:
            step = f"--good {shared[:SHORT]}, where they part"
        if shared == ends[1]:
            step = "exchange them, --bad is the older one"
        trees = _trees(repository, ends)
        if trees[ends[0]] == trees[ends[1]]:
            step += f"; {PACKAGE}/ is the same at both"
        raise PerfbenchError(
            Exit.USAGE,
            f"got --good {good}, which is no ancestor of --bad {bad}, wanted one. Next: {step}",
        )
    follow = [] if every_parent else ["--first-parent"]
    between = f"{ends[0]}..{ends[1]}"
    listed = _listed(repository, *follow, "--reverse", "--topo-order", between)
    (first,) = _listed(repository, "--max-count=1", ends[0])
    trees = _trees(repository, [first[0], *(sha for sha, _, _ in listed)])
    commits = tuple(
        Commit(sha, trees[sha], subject, parents if every_parent else parents[:1])
        for sha, parents, subject in listed
    )
    return CommitRange(Commit(first[0], trees[first[0]], first[2], ()), commits[-1], commits)


@dataclass(frozen=True, slots=True)
class ListedChanges:
    """``lines``: 'abc1234 subject' of the newest commits that touch the package, of ``count``.

    ``is_ancestor``: whether the one revision is an ancestor of the other.
    """

    lines: tuple[str, ...]
    count: int
    is_ancestor: bool


def changes_between(base: str, candidate: str, repository: Path, most: int) -> ListedChanges:
    """What `git log --oneline base..candidate` lists of the measured package, ``most`` at most.

    CannotBuild where git does not know one of them.
    """
    ends = [commit_of(text, repository) for text in (base, candidate)]
    listed = subjects_between(repository, ends[0], ends[1], most, under=f"{PACKAGE}/")
    if listed is None:
        raise CannotBuild(f"git cannot list the commits from {ends[0]} to {ends[1]}")
    count, lines = listed
    is_ancestor = _merge_base(ends, repository) == ends[0] != ends[1]
    return ListedChanges(tuple(lines), count, is_ancestor)


def touching(found: CommitRange) -> list[Commit]:
    """The commits of a range that change the measured package, oldest first: those whose package
    is that of none of their parents.
    """
    trees = {one.sha: one.tree for one in (found.good, *found.commits)}
    return [one for one in found.commits if all(trees.get(sha) != one.tree for sha in one.parents)]


def _merge_base(ends: list[str], repository: Path) -> str:
    """Empty where the two share no history: git then exits with 1 and says nothing."""
    try:
        return git(repository, "merge-base", *ends).strip()
    except CannotBuild:
        return ""


def _listed(repository: Path, *args: str) -> list[tuple[str, tuple[str, ...], str]]:
    """(hash, parents, subject) of each commit that `git log` lists."""
    printed = git(repository, "log", "--format=%H%x00%P%x00%s", *args, "--")
    fields = (line.split("\0", 2) for line in printed.splitlines() if line.count("\0") >= 2)
    return [(sha, tuple(parents.split()), subject) for sha, parents, subject in fields]


def _trees(repository: Path, commits: Iterable[str]) -> Mapping[str, str]:
    """The package's tree at each commit, in one call of git."""
    shas = list(commits)
    inside = git(repository, "rev-parse", "--show-prefix").strip()
    names = "".join(f"{sha}:{inside}{PACKAGE}\n" for sha in shas)
    answers = git(repository, "cat-file", "--batch-check", given=names).splitlines()
    return {
        sha: fields[0] if fields[1:2] == ["tree"] else _ABSENT
        for sha, line in zip(shas, answers, strict=True)
        for fields in [line.split()]
    }
