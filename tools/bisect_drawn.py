"""A bisect whose pairs are drawn: speeds around planted levels, judged by the product's functions.

What is drawn stands in for the measuring alone. `tools.bisect_study` counts how often the whole
procedure is right, and the tests of `bisect` break parts of it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from perfbench.gate import (
    LOOKS,
    PairFound,
    SoughtDrop,
    StepFound,
    StepTurn,
    decide_at,
    decide_step,
    interval,
    looks_of,
    stats,
)
from perfbench.matrix import GatePolicy
from perfbench.records import Verdict
from perfbench.runner import BisectResult, Commit, CommitRange, find_first_bad

POLICY = GatePolicy()
COMMITS = 64
BRANCHES = 16
PAIR_S = 10.0  # of a drawn pair, for the minutes that are announced

Drops = Callable[[random.Random], dict[int, float]]


def line(trees: Sequence[str]) -> CommitRange:
    """A history without merges; the first is the good end."""
    commits = [
        Commit(f"c{number}", tree, f"commit {number}", (f"c{number - 1}",))
        for number, tree in enumerate(trees)
    ]
    return CommitRange(commits[0], commits[-1], tuple(commits[1:]))


def octopus(branches: int) -> CommitRange:
    """Branches of one commit each from the good end c0, and the merge of all of them."""
    good, *sides = (Commit(f"c{n}", f"t{n}", f"commit {n}", ("c0",)) for n in range(branches + 1))
    last, shas = branches + 1, tuple(one.sha for one in sides)
    merge = Commit(f"c{last}", f"t{last}", "the merge", shas)
    return CommitRange(good, merge, (*sides, merge))


def levels_of(found: CommitRange, drops: Mapping[int, float]) -> dict[str, float]:
    """ln speed of each commit against the good end: it and its ancestors lose the share of speed
    that ``drops`` names by their numbers (c1 is 1).
    """
    held: dict[str, frozenset[str]] = {found.good.sha: frozenset()}
    for one in found.commits:
        held[one.sha] = frozenset({one.sha}).union(*(held[sha] for sha in one.parents))
    lost = {f"c{number}": math.log1p(-share) for number, share in drops.items()}
    return {sha: math.fsum(lost.get(one, 0.0) for one in held[sha]) for sha in held}


@dataclass
class DrawnPairs:
    """Draws pairs of ln speed around the levels of its commits, with ``sd`` a process, and decides
    by the gate's own functions.
    """

    levels: dict[str, float]
    sd: float
    rng: random.Random
    broken: frozenset[str] = frozenset()
    measured: list[str] = field(default_factory=list)

    def pairs(self, base: Commit, candidate: Commit) -> list[float]:
        """Differences of ln speed, as many as the last look wants."""
        change = self.levels[candidate.sha] - self.levels[base.sha]
        return [change + self.rng.gauss(0, self.sd * math.sqrt(2)) for _ in range(LOOKS[-1])]

    def judge(self, name: str, base: Commit, candidate: Commit) -> PairFound:
        return judged(self.pairs(base, candidate))

    def step(self, name: str, base: Commit, candidate: Commit, drop: SoughtDrop) -> StepFound:
        self.measured.append(candidate.sha)
        if candidate.sha in self.broken:
            return StepFound(StepTurn.SKIPPED, "it cannot be measured: ImportError: no such name")
        drawn = self.pairs(base, candidate)
        return next(
            one
            for look in LOOKS
            if (one := decide_step(drawn[:look], drop, is_last=look == LOOKS[-1])) is not None
        )


def judged(drawn: Sequence[float]) -> PairFound:
    """The gate's rule of one cell without rows, with which `compare` takes a hundred times as long.
    A test holds the two together.
    """
    for look in looks_of(LOOKS, 1, POLICY):
        seen = drawn[: look.pairs]
        one = decide_at([0.0] * look.pairs, seen, look, POLICY, tolerance_pct=1)
        change = one.comparison
        slower = stats.regressed(change, one.adjusted_p, POLICY)
        looks_slower = change.p_slower < POLICY.alpha_screen and change.estimate < -0.01
        if slower or (stats.proved_same(change, POLICY) and not looks_slower):
            break
    verdict = Verdict.REGRESSED if slower else Verdict.SAME
    sd = math.sqrt(stats.variance_of(seen))
    return PairFound(verdict, "drawn", interval(seen), sd, pair_s=PAIR_S)


def drawn_bisect(
    seed: int, drops: Drops, *, found: CommitRange | None = None, sd: float = 0.01
) -> tuple[BisectResult, dict[int, float]]:
    """One bisect of 64 commits (or ``found``) of which ``drops`` names those that lose a share of
    the speed; the result, and those drops.
    """
    rng = random.Random(seed)
    planted = drops(rng)
    history = found or line([f"t{number}" for number in range(COMMITS + 1)])
    measurer = DrawnPairs(levels_of(history, planted), sd, rng)
    return find_first_bad(history, measurer, POLICY, lambda text: None), planted
