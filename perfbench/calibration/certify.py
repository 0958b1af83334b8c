"""The certificate of the gate's rule: false alarms and power with their bounds, by simulation and
from stored samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from perfbench.calibration.simulate import GPU_BOUND, WORLDS, Tally, World, simulate
from perfbench.gate import modes, stats
from perfbench.matrix import GatePolicy

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

CONFIDENCE = 0.95  # of every bound, one-sided
DROPS_PCT = (1.0, 2.0, 3.0, 5.0, 10.0)
LEAST_STORED = 8  # samples of a process that say something about the shape of its noise
SHUFFLES = 20  # of the samples of one stored process


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is simulated: cells of a session for each world, drops for each power row."""

    null_cell_sessions: int = 6_000
    null_alone: int = 10_000  # of a cell that is always confirmed
    drops: int = 3_000
    claimed_drops: int = 5_000  # of the first world at min_effect, which carries the claim
    mode_trials: int = 400


@dataclass(frozen=True, slots=True)
class Rate:
    """``hits`` of ``trials``, with Clopper and Pearson's one-sided bounds at 95 %."""

    hits: int
    trials: int

    @property
    def share(self) -> float:
        return self.hits / self.trials if self.trials else math.nan

    @property
    def upper(self) -> float:
        from scipy.special import betaincinv

        return (
            1.0
            if self.hits >= self.trials
            else float(betaincinv(self.hits + 1, self.trials - self.hits, CONFIDENCE))
        )

    @property
    def lower(self) -> float:
        from scipy.special import betaincinv

        return (
            0.0
            if self.hits == 0
            else float(betaincinv(self.hits, self.trials - self.hits + 1, 1 - CONFIDENCE))
        )


@dataclass(frozen=True, slots=True)
class NullRow:
    """Sessions in which nothing got slower.

    ``red``: REGRESSED, or SUSPECT, which fails too. ``ks_p``: that the p-values of the first look
    are uniform (Kolmogorov and Smirnov).
    """

    world: World
    red: Rate
    suspect: Rate
    mean_pairs: float | None
    screened: Rate
    blind: Rate
    p_values: int
    ks_distance: float | None
    ks_p: float | None
    below_hundredth: Rate  # p < 0.01


@dataclass(frozen=True, slots=True)
class PowerRow:
    """One drop at one noise.

    ``significant``: what a screen by alpha_screen alone would have let through to be confirmed.
    """

    world: World
    process_sd_pct: float
    drop_pct: float
    red: Rate
    screened: Rate
    significant: Rate
    blind: Rate
    mean_pairs: float | None

    @property
    def power(self) -> Rate:
        """REGRESSED of the drops that were judged: a BLIND cell says that it was not."""
        return Rate(self.red.hits, self.red.trials - self.blind.hits)


@dataclass(frozen=True, slots=True)
class ModesRow:
    """How often `bimodality.modes` sees two modes in ``samples`` samples of this kind."""

    kind: str
    two_modes: bool
    samples: int
    flagged: Rate


@dataclass(frozen=True, slots=True)
class PermutationRow:
    """Stored samples of one process shuffled into two sides, again and again: what is called slower
    at alpha_confirm.
    """

    processes: int
    red: Rate
    ks_distance: float
    below_hundredth: Rate


@dataclass(frozen=True, slots=True)
class Certificate:
    seed: int
    policy: GatePolicy
    null: list[NullRow]
    power: list[PowerRow]
    modes: list[ModesRow]
    permutation: PermutationRow | None
    stored_samples: int

    @property
    def false_alarms(self) -> Rate:
        return _sum(row.red for row in self.null)

    @property
    def claim(self) -> PowerRow:
        """The row that the promise rests on: the worst noise of the first world, at min_effect."""
        rows = [
            row
            for row in self.power
            if row.world == WORLDS[0] and row.drop_pct == self.policy.min_effect_pct
        ]
        return min(rows, key=lambda row: row.red.share)


def certify(
    policy: GatePolicy,
    *,
    seed: int,
    stored: Sequence[Sequence[float]] = (),
    effort: Effort | None = None,
) -> Certificate:
    """Simulate every world, shuffle ``stored`` (ln speed of the samples of real processes).

    The same seed, the same certificate.
    """
    effort = effort or Effort()
    shape = standardised(stored)
    worlds = [
        *WORLDS,
        *(
            [World("GPU bound, noise of the stored samples", GPU_BOUND, shape="stored")]
            if shape
            else []
        ),
    ]
    null, power = [], []
    for place, world in enumerate(worlds):
        null.append(
            _null_row(
                world,
                policy,
                max(1, _null_cells(world, effort) // world.cells),
                (seed, place, 0),
                shape,
            )
        )
        drops = (
            sorted({*DROPS_PCT, policy.min_effect_pct})
            if world is WORLDS[0]
            else [policy.min_effect_pct]
        )
        for drop in drops:
            wanted = (
                effort.claimed_drops
                if world is WORLDS[0] and drop == policy.min_effect_pct
                else effort.drops
            )
            # every second cell gets slower
            per_session = world.cells / len(world.process_sd_pct) / 2
            power += _power_rows(
                world,
                policy,
                math.ceil(wanted / per_session),
                (seed, place, round(100 * drop)),
                shape,
                drop,
            )
    return Certificate(
        seed,
        policy,
        null,
        power,
        _modes_rows(seed, effort.mode_trials),
        _permute(stored, policy, seed),
        len(shape),
    )


def _null_cells(world: World, effort: Effort) -> int:
    return effort.null_alone if world.is_confirmed else effort.null_cell_sessions


def standardised(stored: Sequence[Sequence[float]]) -> list[float]:
    """Samples of many processes in sd of their own process, about its mean: a shape without a
    size.
    """
    shape = []
    for samples in stored:
        sd = math.sqrt(stats.variance_of(samples))
        if len(samples) >= LEAST_STORED and sd > 0:
            mean = math.fsum(samples) / len(samples)
            shape += [(x - mean) / sd for x in samples]
    return shape


def uniformity(p: Sequence[float]) -> tuple[float, float]:
    """(distance, p-value) of Kolmogorov and Smirnov's test that ``p`` is uniform; large n
    (Kolmogorov's limit).
    """
    from scipy.special import kolmogorov

    n = len(p)
    distance = max(
        max((rank + 1) / n - value, value - rank / n) for rank, value in enumerate(sorted(p))
    )
    return distance, float(kolmogorov(math.sqrt(n) * distance))


def _sum(rates: Iterable[Rate]) -> Rate:
    rates = list(rates)
    return Rate(sum(rate.hits for rate in rates), sum(rate.trials for rate in rates))


def _null_row(
    world: World, policy: GatePolicy, sessions: int, seed: tuple[int, ...], shape: list[float]
) -> NullRow:
    tallies = list(simulate(world, policy, sessions=sessions, seed=seed, stored=shape).values())
    p = [value for tally in tallies for value in tally.p_values]
    distance, ks_p = uniformity(p) if p else (None, None)
    regressed, suspect, blind = (
        _sum(Rate(tally.outcomes[name], tally.sessions) for tally in tallies)
        for name in ("REGRESSED", "SUSPECT", "BLIND")
    )
    red = Rate(regressed.hits + suspect.hits, regressed.trials)
    screened = _sum(Rate(tally.screened, tally.sessions) for tally in tallies)
    return NullRow(
        world,
        red,
        suspect,
        _mean_pairs(tallies),
        screened,
        blind,
        len(p),
        distance,
        ks_p,
        Rate(sum(value < 0.01 for value in p), len(p)),
    )


def _power_rows(
    world: World,
    policy: GatePolicy,
    sessions: int,
    seed: tuple[int, ...],
    shape: list[float],
    drop: float,
) -> list[PowerRow]:
    found = simulate(world, policy, sessions=sessions, seed=seed, drop_pct=drop, stored=shape)
    return [_power_row(world, sd, drop, tally) for sd, tally in found.items()]


def _power_row(world: World, sd: float, drop: float, tally: Tally) -> PowerRow:
    red, blind = (Rate(tally.outcomes[name], tally.sessions) for name in ("REGRESSED", "BLIND"))
    screened, significant = (
        Rate(tally.screened, tally.sessions),
        Rate(tally.significant, tally.sessions),
    )
    return PowerRow(world, sd, drop, red, screened, significant, blind, _mean_pairs([tally]))


def _mean_pairs(tallies: Sequence[Tally]) -> float | None:
    """That a confirmed cell took."""
    pairs = [one for tally in tallies for one in tally.pairs]
    return math.fsum(pairs) / len(pairs) if pairs else None


def _permute(
    stored: Sequence[Sequence[float]], policy: GatePolicy, seed: int
) -> PermutationRow | None:
    import numpy as np

    rng = np.random.default_rng([seed, 10_000])
    long = [samples for samples in stored if len(samples) >= LEAST_STORED]
    p, red = [], 0
    for samples in long:
        half = len(samples) // 2
        for _ in range(SHUFFLES):
            mixed = rng.permutation(np.array(samples)).tolist()
            found = stats.paired(
                mixed[:half],
                mixed[half : 2 * half],
                prior=None,
                alpha=policy.alpha_confirm,
                power=policy.power,
            )
            p.append(found.p_slower)
            red += stats.regressed(found, found.p_slower, policy)
    if not p:
        return None
    return PermutationRow(
        len(long),
        Rate(red, len(p)),
        uniformity(p)[0],
        Rate(sum(value < 0.01 for value in p), len(p)),
    )


def _modes_rows(seed: int, trials: int) -> list[ModesRow]:
    """Noise of 1 % in five shapes, and two modes 10 % apart with 1 % about each."""
    import numpy as np

    rng = np.random.default_rng([seed, 20_000])
    draw: dict[str, Callable[[int], NDArray[np.float64]]] = {
        "normal": lambda n: rng.normal(size=n),
        "uniform": lambda n: rng.uniform(-1.7, 1.7, n),
        "lognormal": lambda n: rng.lognormal(0, 0.5, n),
        "exponential": lambda n: rng.exponential(size=n),
        "heavy tails": lambda n: rng.standard_t(3, n),
        "two modes, 10 % apart": lambda n: rng.normal(size=n) + 10 * (rng.random(n) < 0.5),
    }
    rows = []
    for kind, one in draw.items():
        for n in (5, 13, 30, 100, 1000):
            tries = trials if n < 1000 else trials // 4
            flagged = sum(modes(np.exp(0.01 * one(n)).tolist()) is not None for _ in range(tries))
            rows.append(ModesRow(kind, kind.startswith("two"), n, Rate(flagged, tries)))
    return rows
