"""A history of marked speeds, and stand-ins for what measures it: what the tests of `bisect`
share.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from nsa.routing import Capability
from perfbench.gate import (
    LOOKS,
    PairFound,
    SoughtDrop,
    StepFound,
    StepTurn,
    decide_at,
    looks_of,
    stats,
)
from perfbench.gate.bisection import decide_step, interval
from perfbench.machine.environment import TargetFit
from perfbench.matrix.matrix import Matrix
from perfbench.matrix.policy import GatePolicy
from perfbench.records import Verdict
from perfbench.runner.ab import checkout, version_plan
from perfbench.runner.ab.bisect import BisectResult, find_first_bad
from perfbench.runner.ab.commits import Commit, CommitRange
from tests.perfbench.ab_bench import FakeSide, plan_here

POLICY = GatePolicy()


def line(trees: Sequence[str]) -> CommitRange:
    """A history without merges; the first is the good end."""
    commits = [
        Commit(f"c{number}", tree, f"commit {number}", (f"c{number - 1}",))
        for number, tree in enumerate(trees)
    ]
    return CommitRange(commits[0], commits[-1], tuple(commits[1:]))


@dataclass
class Drawn:
    """Draws pairs of ln speed around the levels of its commits, with ``sd`` a process, and decides
    by the gate's own functions.
    """

    levels: dict[str, float]
    sd: float
    rng: random.Random
    broken: frozenset[str] = frozenset()
    measured: list[str] = field(default_factory=list)

    def _pairs(self, base: Commit, candidate: Commit) -> list[float]:
        change = self.levels[candidate.sha] - self.levels[base.sha]
        return [change + self.rng.gauss(0, self.sd * math.sqrt(2)) for _ in range(LOOKS[-1])]

    def judge(self, name: str, base: Commit, candidate: Commit) -> PairFound:
        drawn = self._pairs(base, candidate)
        for look in looks_of(LOOKS, 1, POLICY):
            seen = drawn[: look.pairs]
            one = decide_at([0.0] * look.pairs, seen, look, POLICY, tolerance_pct=1)
            change = one.comparison
            slower = stats.regressed(change, one.adjusted_p, POLICY)
            looks_slower = change.p_slower < POLICY.alpha_screen and change.estimate < -0.01
            if slower or (stats.proved_same(change, POLICY) and not looks_slower):
                break
        verdict = Verdict.REGRESSED if slower else Verdict.SAME
        return PairFound(verdict, "drawn", interval(seen), math.sqrt(stats.variance_of(seen)))

    def step(self, name: str, base: Commit, candidate: Commit, drop: SoughtDrop) -> StepFound:
        self.measured.append(candidate.sha)
        if candidate.sha in self.broken:
            return StepFound(StepTurn.SKIPPED, "broken")
        drawn = self._pairs(base, candidate)
        return next(
            one
            for look in LOOKS
            if (one := decide_step(drawn[:look], drop, is_last=look == LOOKS[-1])) is not None
        )


Drops = Callable[[random.Random], dict[int, float]]


def drawn_bisect(
    seed: int, drops: Drops, *, commits: int = 64, sd: float = 0.01
) -> tuple[BisectResult, dict[int, float]]:
    """One bisect of a history whose commits ``drops`` names (1 to ``commits``) lose a share of the
    speed; the result, and those drops.
    """
    rng = random.Random(seed)
    planted = drops(rng)
    found = line([f"t{number}" for number in range(commits + 1)])
    level, levels = 0.0, {}
    for number in range(commits + 1):
        level += math.log1p(-planted.get(number, 0.0))
        levels[f"c{number}"] = level
    return find_first_bad(found, Drawn(levels, sd, rng), POLICY, lambda text: None), planted


@contextmanager
def marked_sides(
    fit: TargetFit, versions: Sequence[checkout.Checkout]
) -> Iterator[tuple[FakeSide, ...]]:
    """Executors whose speed is that of nsa/marker.py in each version."""
    yield tuple(FakeSide(one.name, _marked(one), []) for one in versions)


def marked_plan(
    one: checkout.Checkout, matrix: Matrix, only: Sequence[str], capability: Capability
) -> version_plan.VersionPlan:
    """As the version's own process: CannotBuild where its marker is no number."""
    try:
        _marked(one)
    except ValueError:
        message = f"{one.name} lacks what this harness needs of nsa"
        raise checkout.CannotBuild(message, one.name) from None
    return plan_here(one, matrix, only, capability)


def _marked(one: checkout.Checkout) -> float:
    text = (Path(one.folder) / "nsa" / "marker.py").read_text(encoding="utf-8")
    return float(text.partition("=")[2])
