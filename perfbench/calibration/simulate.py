"""Certify the gate's rule by simulation: whole sessions of cells, judged by `stats` itself, with
and without a slower cell.

A world says how a machine's noise looks; a session draws every process of every cell from it.
Deterministic for a seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from perfbench.gate import LOOKS, base_first, decide_at, has_fresh_servers, looks_of, stats
from perfbench.matrix import GatePolicy

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    # C cells, R replicates or slots of time
    Array = NDArray[np.float64]

Shape = Literal["normal", "heavy", "stored", "drift", "trend", "ar", "sticky", "square", "sine"]
Outcome = Literal["SAME", "WATCH", "BLIND", "SUSPECT", "REGRESSED"]
STORED_REPLICATES = 5
HEAVY_DF = 2.5  # of Student's t
SWING_PCT = 3.0  # between the two states of a machine, or the top and bottom of its wave
TREND_PCT = 6.0  # over a confirmation
STICKY_FLIP = 0.1  # of the state, from one process to the next


@dataclass(frozen=True, slots=True)
class World:
    """The noise of one kind of machine, in per cent of speed (sd).

    ``process_sd_pct``: between processes, taken in turn by the cells. ``session_shared_pct``: one
    deviation for all cells of a session,
    ``session_own_pct``: one for each. ``assumed_session_pct``: what the gate assumes of a
    session; None: the actual value.
    ``shape``, from one process of a cell to its next. heavy: Student's t with 2.5 degrees of
    freedom; stored: real samples; drift: 2 % over the session, and 2 % between two states that each
    last some ten processes; trend: 6 % over the session; ar: autoregressive with ``rho``; sticky:
    two states 3 % apart; square and sine: a wave of ``period`` processes, 3 % high, whose phase is
    the session's. ``process_state``: (share, per cent) of the processes that are slower by so much;
    ``session_state_pct``: half of the sessions are. ``is_confirmed``: every cell goes on to its
    pairs, whatever the screen says, and one that is alone has the whole of alpha_confirm.
    ``server_pct``: between the servers that fork the processes of one side.
    """

    name: str
    process_sd_pct: tuple[float, ...]
    cells: int = 12
    session_shared_pct: float = 0.5
    session_own_pct: float = 0.5
    assumed_session_pct: float | None = None
    shape: Shape = "normal"
    rho: float = 0.0
    period: int = 0
    process_state: tuple[float, float] = (0.0, 0.0)
    session_state_pct: float = 0.0
    replicates: int = STORED_REPLICATES
    is_confirmed: bool = False
    server_pct: float = 0.0

    @property
    def between_session_variance(self) -> float:
        if self.assumed_session_pct is not None:
            return (self.assumed_session_pct / 100) ** 2
        # a fair coin has sd 1/2
        parts = (self.session_shared_pct, self.session_own_pct, self.session_state_pct / 2)
        return math.fsum((part / 100) ** 2 for part in parts)


def alone(name: str, **noise: Any) -> World:
    """One cell that is always confirmed, in such noise."""
    return World(f"alone: {name}", (0.34, 0.93), cells=1, is_confirmed=True, **noise)


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
    World("GPU bound, sessions off by 3 %", GPU_BOUND, session_shared_pct=3.0),
    World("heavy tails", GPU_BOUND, shape="heavy"),
    World("sessions in two states, 3 % apart", GPU_BOUND, session_state_pct=3.0),
    World("processes in two states, 2 % apart", (0.34,), process_state=(0.5, 2.0)),
    World("one process in ten 10 % slower", (0.34,), process_state=(0.1, 10.0)),
    World("drift in the session", GPU_BOUND, shape="drift"),
    alone("normal"),
    alone("sessions off by 3 %", session_shared_pct=3.0),
    alone("heavy tails", shape="heavy"),
    alone("autoregressive, 0.8", shape="ar", rho=0.8),
    alone("autoregressive, -0.8", shape="ar", rho=-0.8),
    alone("two clocks", process_state=(0.5, SWING_PCT)),
    alone("two sticky clocks", shape="sticky"),
    alone("period of 2", shape="square", period=2),
    alone("period of 4", shape="square", period=4),
    alone("period of 8", shape="square", period=8),
    alone("sine of period 8", shape="sine", period=8),
    alone("trend", shape="trend"),
    alone("servers differ by 0.5 %", server_pct=0.5),
)


@dataclass(frozen=True, slots=True)
class Judged:
    """One cell in one session: its outcome, and what the confirmation saw (None: not confirmed).

    ``p_slower``: at the first look, before any choice.
    """

    outcome: Outcome
    screened: bool
    significant: bool  # the screen's test alone: p_slower < alpha_screen
    pairs: int | None = None
    p_slower: float | None = None


@dataclass(slots=True)
class Tally:
    """Outcomes of many sessions of cells of one kind."""

    outcomes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(get_args(Outcome), 0))
    screened: int = 0
    significant: int = 0
    pairs: list[int] = field(default_factory=list)
    p_values: list[float] = field(default_factory=list)

    def add(self, judged: Judged) -> None:
        self.outcomes[judged.outcome] += 1
        self.screened += judged.screened
        self.significant += judged.significant
        if judged.pairs is not None and judged.p_slower is not None:
            self.pairs.append(judged.pairs)
            self.p_values.append(judged.p_slower)

    @property
    def sessions(self) -> int:
        return sum(self.outcomes.values())


Speeds = Sequence[Sequence[float]]  # ln speed of each cell's processes


def judge_session(
    base: Speeds,
    candidate: Speeds,
    again: tuple[Speeds, Speeds],
    between_session_variance: float,
    policy: GatePolicy,
    *,
    is_confirmed: bool = False,
) -> list[Judged]:
    """The two stages on one family of cells; ``again``: the pairs of both sides, as many as the
    last look wants. ``is_confirmed``: all cells are.
    """
    prior = stats.prior_of(
        *zip(*(stats.pooled(b, c) for b, c in zip(base, candidate, strict=True)), strict=True)
    )
    first = [
        stats.unpaired(
            b,
            c,
            prior=prior,
            between_session_variance=between_session_variance,
            alpha=stats.screen_alpha(policy),
            power=policy.power,
        )
        for b, c in zip(base, candidate, strict=True)
    ]
    significant = [one.p_slower < policy.alpha_screen for one in first]
    tolerated = math.log1p(-policy.tolerance_pct / 100)
    rejected = [
        p < policy.alpha_screen and one.estimate < tolerated
        for p, one in zip(stats.holm([one.p_slower for one in first]), first, strict=True)
    ]
    screened = [is_confirmed or stats.screened(one, policy) for one in first]

    def is_blind(cell: int) -> bool:
        variance, df = stats.moderated(*stats.pooled(base[cell], candidate[cell]), prior)
        return df > 0 and stats.is_blind(math.sqrt(2 * variance), policy)

    chosen = [
        cell
        for cell in range(len(base))
        if screened[cell] and (is_confirmed or significant[cell] or not is_blind(cell))
    ]
    judged = []
    for cell in range(len(base)):
        if cell not in chosen:
            judged.append(
                Judged("BLIND" if screened[cell] else "SAME", screened[cell], significant[cell])
            )
            continue
        outcome, found, p_slower = _confirmed(again[0][cell], again[1][cell], len(chosen), policy)
        shows_it = found.estimate < tolerated and found.p_slower < policy.alpha_screen
        is_cleared = not shows_it and found.lower > first[cell].estimate
        if rejected[cell] and outcome in ("WATCH", "BLIND") and not is_cleared:
            outcome = "SUSPECT"
        judged.append(Judged(outcome, True, significant[cell], found.n_base, p_slower))
    return judged


def _confirmed(
    base: Sequence[float], candidate: Sequence[float], tests: int, policy: GatePolicy
) -> tuple[Outcome, stats.SpeedChange, float]:
    """(outcome, what the last look saw, p of the first look) of one of ``tests`` confirmed
    cells.
    """
    drop = -math.log1p(-policy.min_effect_pct / 100)
    p_slower: list[float] = []
    for look in looks_of(LOOKS, tests, policy):
        found = decide_at(
            base[: look.pairs],
            candidate[: look.pairs],
            look,
            policy,
            tolerance_pct=policy.tolerance_pct,
        )
        p_slower.append(found.comparison.p_slower)
        if stats.regressed(found.comparison, found.adjusted_p, policy):
            return "REGRESSED", found.comparison, p_slower[0]
        is_same = stats.proved_same(found.comparison, policy)
        looks_slower = (
            found.comparison.estimate < math.log1p(-policy.tolerance_pct / 100)
            and found.comparison.p_slower < policy.alpha_screen
        )
        if is_same and (look.is_last or not looks_slower):
            return "SAME", found.comparison, p_slower[0]
    is_blind = found.comparison.mde > drop
    return ("BLIND" if is_blind else "WATCH"), found.comparison, p_slower[0]


def simulate(
    world: World,
    policy: GatePolicy,
    *,
    sessions: int,
    seed: Sequence[int],
    drop_pct: float = 0.0,
    stored: Sequence[float] = (),
) -> dict[float, Tally]:
    """Tallies by process sd: of every cell where ``drop_pct`` is 0, or a cell is alone, else of
    every second cell, which alone got slower.

    ``stored``: standardised real samples for the shape of that name.
    """
    import numpy as np

    rng = np.random.default_rng(list(seed))
    pool = np.array(stored)
    tallies = {one: Tally() for one in world.process_sd_pct}
    for session in range(sessions):
        # fewer cells than sds take them in turn
        shift = session if world.cells < len(world.process_sd_pct) else 0
        sd = np.resize(np.roll(np.array(world.process_sd_pct), shift), world.cells)
        turn = np.arange(world.cells) // len(world.process_sd_pct) + session
        is_all = world.is_confirmed or not drop_pct
        hit = np.ones(world.cells, bool) if is_all else turn % 2 == 0
        slower = np.where(hit, math.log1p(-drop_pct / 100), 0.0)[:, None]
        old, new = (_session(world, rng, sd, world.replicates, pool) for _ in range(2))
        slots = _session(world, rng, sd, 2 * LOOKS[-1], pool)
        orders = [in_turns(LOOKS[-1], seed[0], f"{session}-{n}") for n in range(len(sd))]
        again = [
            [
                [line[place] for place in order[side]]
                for line, order in zip(found, orders, strict=True)
            ]
            for side, found in enumerate(
                (_forked(world, rng, slots), _forked(world, rng, slots + slower))
            )
        ]
        judged = judge_session(
            old.tolist(),
            (new + slower).tolist(),
            (again[0], again[1]),
            world.between_session_variance,
            policy,
            is_confirmed=world.is_confirmed,
        )
        for cell in np.flatnonzero(hit):
            tallies[float(sd[cell])].add(judged[cell])
    return tallies


def in_turns(pairs: int, seed: int, cell_id: str) -> tuple[list[int], list[int]]:
    """The places in time of base and candidate, in the order that a confirmation measures them."""
    first = [base_first(seed, cell_id, pair) for pair in range(pairs)]
    base = [2 * pair + (not is_base) for pair, is_base in enumerate(first)]
    return base, [2 * pair + is_base for pair, is_base in enumerate(first)]


def _session(
    world: World, rng: np.random.Generator, sd_pct: Array, slots: int, pool: Array
) -> Array:
    """ln speed [C, R] of one session's processes in the order of time; about zero."""

    size = (world.cells, slots)
    shift_C1 = rng.normal(0, world.session_own_pct, (world.cells, 1)) + rng.normal(
        0, world.session_shared_pct
    )
    if world.shape == "heavy":
        noise_CR = rng.standard_t(HEAVY_DF, size) / math.sqrt(HEAVY_DF / (HEAVY_DF - 2))
    elif world.shape == "stored":
        noise_CR = rng.choice(pool, size)
    elif world.shape == "ar":
        noise_CR = _autoregressive(rng, size, world.rho)
    else:
        noise_CR = rng.normal(size=size)
    speed_CR = shift_C1 + noise_CR * sd_pct[:, None]
    share, gap_pct = world.process_state
    speed_CR -= gap_pct * (rng.random(size) < share) + world.session_state_pct * (
        rng.random() < 0.5
    )
    return (speed_CR + _machine_state(world, rng, slots)) / 100


def _forked(world: World, rng: np.random.Generator, speed_CR: Array) -> list[list[float]]:
    """The same speeds as the processes of one side's servers."""
    import numpy as np

    cells, slots = speed_CR.shape
    server_R = np.cumsum([has_fresh_servers(slot // 2) and slot % 2 == 0 for slot in range(slots)])
    server_CS = rng.normal(0, world.server_pct / 100, (cells, int(server_R[-1]) + 1))
    shifted: list[list[float]] = (speed_CR + server_CS[:, server_R]).tolist()
    return shifted


def _machine_state(world: World, rng: np.random.Generator, slots: int) -> Array:
    """What the machine adds to every cell alike [1, R], in per cent."""
    import numpy as np

    state_R: Array = np.zeros(slots)
    if world.shape == "drift":
        # changes every ten processes or so
        state_R[:] = np.linspace(-1, 1, slots) * rng.choice([-1, 1]) + 2 * _states(rng, slots)
    elif world.shape == "trend":
        state_R[:] = np.linspace(0, TREND_PCT, slots) * rng.choice([-1, 1])
    elif world.shape == "sticky":
        state_R = SWING_PCT * _states(rng, slots)
    elif world.shape == "square":
        place_R = np.arange(slots) + rng.integers(world.period)
        state_R[:] = SWING_PCT * (place_R % world.period < world.period // 2)
    elif world.shape == "sine":
        turn_R = np.arange(slots) / world.period + rng.random()
        state_R[:] = SWING_PCT / 2 * np.sin(2 * np.pi * turn_R)
    return state_R[None]


def _states(rng: np.random.Generator, slots: int) -> Array:
    import numpy as np

    return (np.cumsum(rng.random(slots) < STICKY_FLIP) % 2).astype(np.float64)


def _autoregressive(rng: np.random.Generator, size: tuple[int, int], rho: float) -> Array:
    """Of variance 1."""
    import numpy as np

    noise_CR = rng.normal(size=size)
    for slot in range(1, size[1]):
        noise_CR[:, slot] *= math.sqrt(1 - rho**2)
        noise_CR[:, slot] += rho * noise_CR[:, slot - 1]
    return np.asarray(noise_CR)
