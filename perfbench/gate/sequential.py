"""The group-sequential rule of a confirmation: how a block of pairs is ordered, when a cell is
looked at, and what each look may say and spend.

**A block** is one ABBA and one BAAB of fresh processes, four pairs; which of the two comes first is
drawn from the seed for each two blocks, and the second has the other order. Drift within a block,
and a machine that alternates with a period of 2 or 4 processes, so hit both sides alike; one with a
period of 8 does in each two blocks, of which the last look has five. With an order drawn for every
block it favoured one side by chance: 8 of 10,000 sessions were false alarms, now none.

**A cell is cleared** at the first look that refutes a drop of min_effect, unless it looks slower by
more than the tolerance: a certain drop of 2 % may be found at the end. **It is REGRESSED** at
the last look, after ten blocks, where it is slower, by its pairs and by the means of its blocks;
before that only where the drop is for certain larger than `EARLY_DROP_PCT`, more than the states of
a machine are apart. So a drop of 80 % costs one block, an unchanged cell one or two.

A cell's share of alpha_confirm is alpha_confirm / tests, with the number of cells fixed at the
screen (Bonferroni: Holm over tests that stop at different looks is not valid by itself). The looks
divide it, whatever they depend on. Each uses the cell's own variance: no other cell's rows change
its verdict.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from perfbench.gate import stats
from perfbench.matrix import GatePolicy

PAIRS_PER_BLOCK = 4
LOOKS = tuple(PAIRS_PER_BLOCK * blocks for blocks in (1, 2, 4, 7, 10))  # pairs
ABBA_BAAB = (True, False, False, True)  # whether the base of each pair comes first
EARLY_DROP_PCT = 10.0
LAST_SHARE = 0.8  # of the cell's alpha is for the last look
# The test of ten blocks is the stricter one by so much: nine of ten that favour the base, by a
# period of eight, would otherwise raise .1 % of false alarms.
BLOCK_MARGIN = 1.25


@dataclass(frozen=True, slots=True)
class Look:
    """After ``pairs`` pairs: the level of the test for slower, and of the bound that refutes
    min_effect.
    """

    pairs: int
    alpha: float
    alpha_same: float
    is_last: bool


@dataclass(frozen=True, slots=True)
class LookResult:
    """What one look says of one metric.

    ``adjusted_p``: to be compared with alpha_confirm, as the look's own p is with its alpha.
    """

    comparison: stats.SpeedChange
    adjusted_p: float


def base_first(seed: int, cell_id: str, pair: int) -> bool:
    """Whether the base is measured first in a pair: by its place in its block, and the order of
    this cell's block, which is drawn from the seed for each two and is the reverse in the second.
    """
    block, place = divmod(pair, PAIRS_PER_BLOCK)
    two, is_second = divmod(block, 2)
    swapped = random.Random(f"{seed}-{cell_id}-{two}").random() < 0.5
    return ABBA_BAAB[place] is (swapped == bool(is_second))


def has_fresh_servers(pair: int) -> bool:
    """Whether the servers that fork the processes are started anew before this pair: each pair of
    the first four blocks, since a look judges by the variance between pairs; then each block, whose
    means the last look tests, too.
    """
    return pair < LOOKS[2] or pair % PAIRS_PER_BLOCK == 0


def looks_of(counts: Sequence[int], tests: int, policy: GatePolicy) -> tuple[Look, ...]:
    """The looks after ``counts`` pairs at one of ``tests`` cells."""
    share = policy.alpha_confirm / max(tests, 1)
    early = share * (1 - LAST_SHARE) / max(len(counts) - 1, 1)
    same = stats.screen_alpha(policy) / len(counts)
    return tuple(
        Look(
            pairs=count,
            alpha=share * LAST_SHARE if count == counts[-1] else early,
            alpha_same=same,
            is_last=count == counts[-1],
        )
        for count in counts
    )


def decide_at(
    base: Sequence[float],
    candidate: Sequence[float],
    look: Look,
    policy: GatePolicy,
    *,
    tolerance_pct: float,
    metrics: int = 1,
) -> LookResult:
    """``base[i]`` and ``candidate[i]`` (ln speed) are a pair; ``metrics`` share the look's alpha.

    ``tolerance_pct``: the drop of this metric that is never called a regression. ValueError for no
    pairs, or sides of different length.
    """
    alpha = look.alpha / metrics
    found = stats.paired(
        base,
        candidate,
        prior=None,
        alpha=look.alpha_same,
        power=policy.power,
        test_alpha=alpha,
    )
    if look.is_last:
        blocks = _of_blocks(stats.differences(base, candidate), alpha / BLOCK_MARGIN, policy.power)
        p = max(found.p_slower, min(1.0, BLOCK_MARGIN * blocks.p_slower))
        found = replace(found, mde=max(found.mde, blocks.mde))
    else:
        p = stats.p_below(found, math.log1p(-max(EARLY_DROP_PCT, tolerance_pct) / 100))
    return LookResult(found, min(1.0, p * policy.alpha_confirm / alpha))


def _of_blocks(differences: Sequence[float], alpha: float, power: float) -> stats.SpeedChange:
    """The same change by the means of its blocks: what favours one side for a whole block does not
    show between its pairs.
    """
    means = [
        math.fsum(block) / len(block)
        for first in range(0, len(differences), PAIRS_PER_BLOCK)
        for block in [differences[first : first + PAIRS_PER_BLOCK]]
    ]
    zeros = [0.0] * len(means)
    return stats.paired(zeros, means, prior=None, alpha=alpha, power=power)
