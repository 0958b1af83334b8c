"""Certify the gate's rule by simulation: whole sessions of cells, judged by `stats` itself, with
and without a slower cell.

A world says how a machine's noise looks; a session draws every process of every cell from it.
Deterministic for a seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from perfbench.gate import stats
from perfbench.matrix import GatePolicy

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    # C cells, R replicates or slots of time
    Array = NDArray[np.float64]

Shape = Literal["normal", "heavy", "drift", "stored"]
Outcome = Literal["SAME", "WATCH", "BLIND", "REGRESSED"]
STORED_REPLICATES = 5


@dataclass(frozen=True, slots=True)
class World:
    """The noise of one kind of machine, in per cent of speed (sd).

    ``process_sd_pct``: between processes, taken in turn by the cells. ``session_shared_pct``: one
    deviation for all cells of a session,
    ``session_own_pct``: one for each. ``assumed_session_pct``: what the gate assumes of a
    session; None: the actual value.
    ``shape``: heavy: Student's t with 3 degrees of freedom; drift: 2 % over the session, and 2 %
    between two states that each last some ten processes; stored: real samples. ``process_state``:
    (share, per cent) of the processes that are slower by so much; ``session_state_pct``: half of
    the sessions are.
    """

    name: str
    process_sd_pct: tuple[float, ...]
    cells: int = 12
    session_shared_pct: float = 0.5
    session_own_pct: float = 0.5
    assumed_session_pct: float | None = None
    shape: Shape = "normal"
    process_state: tuple[float, float] = (0.0, 0.0)
    session_state_pct: float = 0.0
    replicates: int = STORED_REPLICATES

    @property
    def between_session_variance(self) -> float:
        if self.assumed_session_pct is not None:
            return (self.assumed_session_pct / 100) ** 2
        # a fair coin has sd 1/2
        parts = (self.session_shared_pct, self.session_own_pct, self.session_state_pct / 2)
        return math.fsum((part / 100) ** 2 for part in parts)


GPU_BOUND = (0.34, 0.93, 1.0)  # % between processes of an idle H100: copy, flash attention, GEMM
HOST_BOUND = (7.3, 12.0)  # % one tiny launch, 60 small layers in eager mode
ASSUMED = 100 * stats.ASSUMED_BETWEEN_SESSION_SD
WORLDS = (
    World("GPU bound", GPU_BOUND),
    World("GPU bound, bad sessions", GPU_BOUND, session_shared_pct=2.0, session_own_pct=1.0),
    World(
        "GPU bound, sessions unknown and as assumed",
        GPU_BOUND,
        session_shared_pct=0.7,
        session_own_pct=0.7,
        assumed_session_pct=ASSUMED,
    ),
    World(
        "GPU bound, sessions twice as bad as assumed",
        GPU_BOUND,
        session_shared_pct=1.4,
        session_own_pct=1.4,
        assumed_session_pct=ASSUMED,
    ),
    World("GPU bound, 3 stored replicates", GPU_BOUND, replicates=3),
    World("one cell of 1 %", (1.0,), cells=1),
    World("two cells, 0.34 and 1 %", (0.34, 1.0), cells=2),
    World("40 cells", GPU_BOUND, cells=40),
    World("GPU and host bound in one family", GPU_BOUND + HOST_BOUND, cells=20),
    World("host bound", HOST_BOUND),
    World("heavy tails", GPU_BOUND, shape="heavy"),
    World("sessions in two states, 3 % apart", GPU_BOUND, session_state_pct=3.0),
    World("processes in two states, 2 % apart", (0.34,), process_state=(0.5, 2.0)),
    World("one process in ten 10 % slower", (0.34,), process_state=(0.1, 10.0)),
    World("drift in the session", GPU_BOUND, shape="drift"),
)


@dataclass(frozen=True, slots=True)
class Judged:
    """One cell in one session: its outcome, and what the confirmation saw (None: not confirmed)."""

    outcome: Outcome
    screened: bool
    significant: bool  # the screen's test alone: p_slower < alpha_screen
    blocks: int | None = None
    p_slower: float | None = None


@dataclass(slots=True)
class Tally:
    """Outcomes of many sessions of cells of one kind."""

    outcomes: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("SAME", "WATCH", "BLIND", "REGRESSED"), 0)
    )
    screened: int = 0
    significant: int = 0
    blocks: list[int] = field(default_factory=list)
    p_values: list[float] = field(default_factory=list)

    def add(self, judged: Judged) -> None:
        self.outcomes[judged.outcome] += 1
        self.screened += judged.screened
        self.significant += judged.significant
        if judged.blocks is not None and judged.p_slower is not None:
            self.blocks.append(judged.blocks)
            self.p_values.append(judged.p_slower)

    @property
    def sessions(self) -> int:
        return sum(self.outcomes.values())


def judge_session(
    base: Sequence[Sequence[float]],
    candidate: Sequence[Sequence[float]],
    again: tuple[Sequence[Sequence[float]], Sequence[Sequence[float]]],
    between_session_variance: float,
    policy: GatePolicy,
) -> list[Judged]:
    """The two stages on one family of cells; ``again``: the pairs of both sides, `stats.MAX_BLOCKS`
    ready for each cell.
    """
    prior = stats.prior_of(
        *zip(*(stats.pooled(b, c) for b, c in zip(base, candidate, strict=True)), strict=True)
    )
    bound = stats.screen_alpha(policy)
    first = [
        stats.unpaired(
            b,
            c,
            prior=prior,
            between_session_variance=between_session_variance,
            alpha=bound,
            power=policy.power,
        )
        for b, c in zip(base, candidate, strict=True)
    ]
    chosen = [cell for cell, comparison in enumerate(first) if stats.screened(comparison, policy)]
    plan = {
        cell: stats.planned_blocks(
            base[cell], candidate[cell], prior=prior, cells=len(chosen), policy=policy
        )
        for cell in chosen
    }
    pairs = {
        cell: (again[0][cell][:n], again[1][cell][:n]) for cell, n in plan.items() if n is not None
    }
    spreads = [
        (stats.variance_of(stats.differences(b, c)), len(b) - 1.0) for b, c in pairs.values()
    ]
    prior = stats.prior_of([s2 for s2, _ in spreads], [df for _, df in spreads])
    second = {
        cell: stats.paired(b, c, prior=prior, alpha=policy.alpha_confirm, power=policy.power)
        for cell, (b, c) in pairs.items()
    }
    adjusted = dict(
        zip(
            second, stats.holm([comparison.p_slower for comparison in second.values()]), strict=True
        )
    )
    judged = []
    for cell in range(len(base)):
        significant = first[cell].p_slower < policy.alpha_screen
        if cell not in second:
            judged.append(Judged("BLIND" if cell in plan else "SAME", cell in plan, significant))
            continue
        found = second[cell]
        outcome: Outcome = "SAME" if stats.proved_same(found, policy) else "WATCH"
        if stats.regressed(found, adjusted[cell], policy):
            outcome = "REGRESSED"
        judged.append(Judged(outcome, True, significant, found.n_base, found.p_slower))
    return judged


def simulate(
    world: World,
    policy: GatePolicy,
    *,
    sessions: int,
    seed: Sequence[int],
    drop_pct: float = 0.0,
    stored: Sequence[float] = (),
) -> dict[float, Tally]:
    """Tallies by process sd: of every cell where ``drop_pct`` is 0, else of every second cell,
    which alone got slower.

    ``stored``: standardised real samples for the shape of that name.
    """
    import numpy as np

    rng = np.random.default_rng(list(seed))
    sd = np.resize(np.array(world.process_sd_pct), world.cells)
    pool = np.array(stored)
    tallies = {one: Tally() for one in world.process_sd_pct}
    for session in range(sessions):
        turn = np.arange(world.cells) // len(world.process_sd_pct) + session
        hit = (turn % 2 == 0) if drop_pct else np.ones(world.cells, bool)
        slower = np.where(hit, math.log1p(-drop_pct / 100), 0.0)[:, None]
        old, new = (_session(world, rng, sd, world.replicates, pool) for _ in range(2))
        slots = _session(world, rng, sd, 2 * stats.MAX_BLOCKS, pool)
        base_at, candidate_at = abba(stats.MAX_BLOCKS)
        again = slots[:, base_at].tolist(), (slots[:, candidate_at] + slower).tolist()
        judged = judge_session(
            old.tolist(), (new + slower).tolist(), again, world.between_session_variance, policy
        )
        for cell in np.flatnonzero(hit):
            tallies[float(sd[cell])].add(judged[cell])
    return tallies


def abba(pairs: int) -> tuple[list[int], list[int]]:
    """The places in time of base and candidate: base first in even pairs, last in odd ones."""
    base = [2 * pair + pair % 2 for pair in range(pairs)]
    return base, [2 * pair + 1 - pair % 2 for pair in range(pairs)]


def _session(
    world: World, rng: np.random.Generator, sd_pct: Array, slots: int, pool: Array
) -> Array:
    """ln speed [C, R] of one session's processes in the order of time; about zero."""
    import numpy as np

    size = (world.cells, slots)
    shift_C1 = rng.normal(0, world.session_own_pct, (world.cells, 1)) + rng.normal(
        0, world.session_shared_pct
    )
    if world.shape == "heavy":
        noise_CR = rng.standard_t(3, size) / math.sqrt(3)
    elif world.shape == "stored":
        noise_CR = rng.choice(pool, size)
    else:
        noise_CR = rng.normal(size=size)
    speed_CR = shift_C1 + noise_CR * sd_pct[:, None]
    share, gap_pct = world.process_state
    speed_CR -= gap_pct * (rng.random(size) < share) + world.session_state_pct * (
        rng.random() < 0.5
    )
    if world.shape == "drift":
        # changes every ten processes or so
        state_1R = np.cumsum(rng.random((1, slots)) < 0.1, 1) % 2
        speed_CR += np.linspace(-1, 1, slots)[None] * rng.choice([-1, 1]) + 2 * state_1R
    return speed_CR / 100
