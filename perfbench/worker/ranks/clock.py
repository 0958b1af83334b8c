"""One clock for all ranks: whatever a rank decides by time, all of them decide alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

from perfbench.worker.clock import Clock
from perfbench.worker.ranks.board import HAS_TURN, WAITS_FOR_TURN
from perfbench.worker.ranks.world import Ranks
from perfbench.worker.turn import Turn

_TURN_PAUSE_S = 5e-3


@dataclass(slots=True)
class SlowestClock:
    """``clock`` with the slowest rank's seconds; ``own_s`` has this rank's of each sample of the
    timed window. Every rank must make the same calls.
    """

    clock: Clock
    ranks: Ranks
    own_s: list[float] = field(default_factory=list)
    is_timing: bool = False

    @property
    def is_of_host(self) -> bool:
        return False  # the slowest rank's seconds are not those of these steps

    def now(self) -> float:
        return self.ranks.agree(self.clock.now())

    def time_steps(
        self, step: Callable[[], None], steps: int, between: Callable[[], None] | None = None
    ) -> float:
        self.ranks.agree()  # a sample holds no wait for a rank that has not begun
        own_s = self.clock.time_steps(step, steps, between)
        if self.is_timing:
            self.own_s.append(own_s)
        return self.ranks.agree(own_s)


def own_clock(clock: Clock) -> Clock:
    """The one clock of this rank, for work that no other rank takes part in."""
    return clock.clock if isinstance(clock, SlowestClock) else clock


@dataclass(frozen=True, slots=True)
class CommonTurn:
    """``turn`` is the launcher's, which rank 0 alone takes; the others follow it."""

    turn: Turn
    ranks: Ranks
    clock: SlowestClock

    def __call__(self) -> None:
        self.ranks.agree()  # all are prepared
        if self.ranks.rank == 0:
            self.ranks.board.turn = WAITS_FOR_TURN
            self.turn()
            self.ranks.board.turn = HAS_TURN
            return
        while self.ranks.board.turn != HAS_TURN:
            time.sleep(_TURN_PAUSE_S)

    def timing(self) -> AbstractContextManager[None]:
        return self._timing()

    @contextmanager
    def _timing(self) -> Iterator[None]:
        if self.ranks.rank == 0:
            with self.turn.timing():
                yield from self._recorded()
        else:
            yield from self._recorded()

    def _recorded(self) -> Iterator[None]:
        self.clock.is_timing = True
        try:
            yield
        finally:
            self.clock.is_timing = False
