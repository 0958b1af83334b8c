"""Which commit of a history is to be measured next, and what is left: pure.

A good commit clears itself and its ancestors, a bad one all that are no ancestors of it. Commits
that leave the measured package as a parent has it are never measured, and one whose package was
judged at another commit is known.
"""

from __future__ import annotations

from copy import copy

from perfbench.gate import StepTurn
from perfbench.runner.ab.commits import Commit, CommitRange, touching


class Halving:
    """The commits that may be the first bad one. The bad end of the range is bad."""

    def __init__(self, found: CommitRange) -> None:
        place = {one.sha: number for number, one in enumerate(found.commits)}
        self.good = found.good
        self._commits = found.commits
        self._ancestors: list[int] = []  # bit n: commit n or an ancestor of it
        for number, one in enumerate(found.commits):
            mine = 1 << number
            for sha in one.parents:
                mine |= self._ancestors[place[sha]] if sha in place else 0
            self._ancestors.append(mine)
        self._left = sum(1 << place[one.sha] for one in touching(found))
        self._known: dict[str, StepTurn] = {
            found.good.tree: StepTurn.GOOD,
            found.bad.tree: StepTurn.BAD,
        }
        self._apply_known()

    @property
    def left(self) -> list[Commit]:
        """Oldest first."""
        return [one for number, one in enumerate(self._commits) if self._left >> number & 1]

    @property
    def num_steps(self) -> int:
        """The steps until one is left, where none is skipped and each answer is the one that leaves
        more: the most of a history without merges, about the most of another.
        """
        ahead, steps = self, 0
        while (commit := ahead.next()) is not None:
            answers = [ahead._answered(commit, turn) for turn in (StepTurn.GOOD, StepTurn.BAD)]
            ahead, steps = max(answers, key=lambda one: one._left.bit_count()), steps + 1
        return steps

    def next(self) -> Commit | None:
        """The one that divides what is left best; None where no answer could divide it."""
        found = [
            (least, -number)
            for number, one in enumerate(self._commits)
            if self._left >> number & 1 and one.tree not in self._known
            for least in [self._least_cleared(number)]
            if least
        ]
        return self._commits[-max(found)[1]] if found else None

    def answer(self, commit: Commit, turn: StepTurn) -> None:
        """What was measured of ``commit`` holds for every commit with its package."""
        self._known[commit.tree] = turn
        self._apply_known()

    def _answered(self, commit: Commit, turn: StepTurn) -> Halving:
        """What is left after an answer, which this one does not get."""
        one = copy(self)
        one._known = dict(self._known)
        one.answer(commit, turn)
        return one

    def _apply_known(self) -> None:
        """A history with both a good commit after a bad one and the reverse has several first bad
        commits; the newest is kept, whose descendants are all as bad as the end.
        """
        for number in reversed(range(len(self._commits))):
            turn = self._known.get(self._commits[number].tree)
            if not self._left >> number & 1 or turn in (None, StepTurn.SKIPPED):
                continue
            mine = self._ancestors[number]
            # among merges a good commit may contain every bad one; that answer divides nothing
            self._left = self._left & (~mine if turn is StepTurn.GOOD else mine) or self._left

    def _least_cleared(self, number: int) -> int:
        """How many commits the less telling answer clears."""
        cleared = (self._ancestors[number] & self._left).bit_count()
        return min(cleared, self._left.bit_count() - cleared)
