"""The first bad commit of a drop: the history between two commits is halved, each step a pair of
the good commit and a midpoint.

No file and no clock: a `Measurer` does what costs time, so that the whole procedure is simulated in
the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from perfbench.gate import (
    LOOKS,
    PairFound,
    SoughtDrop,
    StepFound,
    StepShares,
    StepTurn,
    pairs_of_step,
    sought,
    step_shares,
)
from perfbench.matrix import GatePolicy
from perfbench.records import Verdict
from perfbench.runner.ab.commits import SHORT, Commit, CommitRange
from perfbench.runner.ab.halving import Halving

WHOLE = "whole"  # the pair of both ends


class Measurer(Protocol):
    """Measures pairs of commits; ``name`` is the pair's own, and the same when it is resumed."""

    def judge(self, name: str, base: Commit, candidate: Commit) -> PairFound:
        """By the gate's own rule."""
        ...

    def step(self, name: str, base: Commit, candidate: Commit, drop: SoughtDrop) -> StepFound:
        """By the rule of a step; SKIPPED where the candidate cannot be measured."""
        ...


class Ending(StrEnum):
    """How a bisect ended."""

    FOUND = "first bad commit"
    NOT_SLOWER = "not confirmed slower"
    SAME_CODE = "same code"
    NO_SPEED = "no speed"
    RANGE = "several commits are left"
    NOT_CONFIRMED = "not confirmed"
    OPEN = "not finished"


@dataclass(frozen=True, slots=True)
class BisectStep:
    """One commit that was measured; ``left``: the commits that may be the first bad one, after
    its answer.
    """

    name: str
    commit: Commit
    found: StepFound
    left: int


@dataclass(frozen=True, slots=True)
class BisectResult:
    """``left`` are the commits that may be the first bad one, oldest first: one where it was found.

    ``whole`` is of both ends, ``confirmation`` of that one against ``parent``.
    """

    ending: Ending
    range: CommitRange
    reason: str
    whole: PairFound | None = None
    steps: tuple[BisectStep, ...] = ()
    left: tuple[Commit, ...] = ()
    parent: str = ""
    confirmation: PairFound | None = None

    @property
    def first_bad(self) -> Commit | None:
        """Null unless it was confirmed against its parent."""
        return self.left[0] if self.ending is Ending.FOUND else None

    @property
    def verdict(self) -> Verdict | None:
        """Of the bad end against the good one."""
        return None if self.whole is None else self.whole.verdict


def find_first_bad(
    found: CommitRange, measurer: Measurer, policy: GatePolicy, say: Callable[[str], None]
) -> BisectResult:
    """Measure both ends, halve what lies between, and confirm the last one left against its parent.

    The good end is one side of every step, so that a slow drift is seen.
    """
    result = BisectResult(Ending.SAME_CODE, found, "")
    if found.good.tree == found.bad.tree:
        why = "the measured package is the same at both: no commit between them changes its speed"
        return replace(result, reason=why)
    halving = Halving(found)
    whole = measurer.judge(WHOLE, found.good, found.bad)
    result = replace(result, whole=whole, left=tuple(halving.left), reason=whole.reason)
    if whole.is_open:
        return replace(result, ending=Ending.OPEN)
    if whole.change is None:
        return replace(result, ending=Ending.NO_SPEED)
    if not whole.is_slower:
        return replace(result, ending=Ending.NOT_SLOWER)
    shares = step_shares(policy, halving.num_steps)
    drop = sought(whole, policy, shares.of(0))
    say(_announced(whole, drop, halving, policy))
    steps = _halve(halving, measurer, drop, shares, say)
    result = replace(result, steps=tuple(steps), left=tuple(halving.left))
    if steps and steps[-1].found.turn is StepTurn.OPEN:
        return replace(result, ending=Ending.OPEN, reason=steps[-1].found.reason)
    if len(halving.left) > 1:
        why = "every other one was skipped: the reasons are with the steps"
        return replace(result, ending=Ending.RANGE, reason=why)
    return _confirmed(result, measurer, say)


def pairs_ahead(found: CommitRange, pair_s: float) -> str:
    """What a bisect takes, before its first pair; ``pair_s``: about the seconds of one."""
    halving = Halving(found)
    steps, trees = halving.num_steps, {one.tree for one in found.commits}
    least, most = ((steps + 2) * look * pair_s / 60 for look in (LOOKS[0], LOOKS[-1]))
    return (
        f"{len(found.commits)} commits, {len(halving.left)} of them change what is measured"
        f" ({len(trees)} versions of it): both ends, at most {steps} steps and a confirmation,"
        f" {LOOKS[0]} to {LOOKS[-1]} pairs each, about {max(least, 0.1):.1f} to"
        f" {max(most, 0.1):.1f} minutes"
    )


def _halve(
    halving: Halving,
    measurer: Measurer,
    drop: SoughtDrop,
    shares: StepShares,
    say: Callable[[str], None],
) -> list[BisectStep]:
    steps: list[BisectStep] = []
    while (commit := halving.next()) is not None:
        name = f"{len(steps) + 1:02d}-{commit.sha[:SHORT]}"
        say(f"step {len(steps) + 1}, {len(halving.left)} commits are left: {commit}")
        one = measurer.step(name, halving.good, commit, drop)
        if one.turn is not StepTurn.OPEN:
            halving.answer(commit, one.turn)
        steps.append(BisectStep(name, commit, one, len(halving.left)))
        say(f"{one.turn}: {one.reason}")
        if one.turn is StepTurn.OPEN:
            break
        tested = sum(one.found.change is not None for one in steps)
        drop = drop.after(one).with_share(shares.of(tested))
    return steps


def _confirmed(
    result: BisectResult, measurer: Measurer, say: Callable[[str], None]
) -> BisectResult:
    """``result`` with the pair of the last one left and its parent; where the two are the code of
    both ends, those were measured already.
    """
    (commit,) = result.left
    sha = commit.parents[0]
    parent = result.range.of(sha) or Commit(sha, "", "", ())
    result = replace(result, parent=sha)
    ends = (result.range.good.tree, result.range.bad.tree)
    if (parent.tree, commit.tree) == ends and result.whole is not None:
        found = result.whole
    else:
        say(f"confirming {commit} against its parent {sha[:SHORT]}")
        found = measurer.judge(f"confirm-{commit.sha[:SHORT]}", parent, commit)
    result = replace(result, confirmation=found, reason=found.reason)
    if found.is_open:
        return replace(result, ending=Ending.OPEN)
    return replace(result, ending=Ending.FOUND if found.is_slower else Ending.NOT_CONFIRMED)


def _announced(whole: PairFound, drop: SoughtDrop, halving: Halving, policy: GatePolicy) -> str:
    """What is ahead once the drop and its noise are known."""
    pairs = pairs_of_step(whole.pair_sd, drop, policy)
    steps = halving.num_steps
    ahead = (
        f"the bad end is slower, {whole.change}; {len(halving.left)} commits change what is"
        f" measured: at most {steps} step{'' if steps == 1 else 's'}"
    )
    minutes = (steps * (pairs or LOOKS[-1]) + LOOKS[-1]) * whole.pair_s / 60
    about = f" and a confirmation, about {max(minutes, 0.1):.1f} minutes"
    if pairs is None:
        return (
            f"{ahead}{about}; in this noise {LOOKS[-1]} pairs may leave a step undecided, which"
            " skips its commit"
        )
    return (
        f"{ahead}, each of about {pairs} pairs,{about.removeprefix(' and')}"
        if steps
        else ahead + about
    )
