"""Memory that the ranks of a cell and their launcher share: where each rank is, and numbers that
they agree on without a collective, which would be work on the timed device.
"""

from __future__ import annotations

import multiprocessing
import time
from typing import Any

STAGES = ("outside of a step", "forward", "backward", "optimizer", "replay")
PAUSE_S = 2e-4  # between looks at the others' numbers: a spinning rank would slow one on a CPU
# of each rank: steps * len(STAGES) + stage; whether it waits here; rounds; two numbers
_POSITION, _WAITS, _ROUNDS, _EVEN, _ODD, _FIELDS = range(6)
WAITS_FOR_TURN, HAS_TURN = 1.0, 2.0


class Board:
    """Made before the fork, by the launcher; a rank writes to its own fields alone."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._cells: Any = multiprocessing.RawArray("d", size * _FIELDS + 2)

    def note(self, rank: int, stage: int) -> None:
        """``rank`` begins ``stage`` of its current step; stage 0: the step has ended."""
        stages = len(STAGES)
        steps = int(self._get(rank, _POSITION)) // stages + (stage == 0)
        self._set(rank, _POSITION, steps * stages + stage)

    def agree(self, rank: int, value: float) -> float:
        """The largest ``value`` of all ranks, once each of them has called as often as this one."""
        rounds = self._get(rank, _ROUNDS) + 1
        field = _EVEN if rounds % 2 == 0 else _ODD
        self._set(rank, field, value)
        self._set(rank, _ROUNDS, rounds)
        self._set(rank, _WAITS, 1)
        while any(self._get(other, _ROUNDS) < rounds for other in range(self.size)):
            time.sleep(PAUSE_S)
        self._set(rank, _WAITS, 0)
        return max(self._get(other, field) for other in range(self.size))

    @property
    def turn(self) -> float:
        """0, WAITS_FOR_TURN or HAS_TURN, as rank 0 wrote it."""
        return float(self._cells[self.size * _FIELDS])

    @turn.setter
    def turn(self, value: float) -> None:
        self._cells[self.size * _FIELDS] = value
        self._cells[self.size * _FIELDS + 1] = time.monotonic()

    @property
    def turn_since(self) -> float:
        return float(self._cells[self.size * _FIELDS + 1])

    def place(self, rank: int) -> str:
        """In words: 'backward of step 3'."""
        steps, stage = divmod(int(self._get(rank, _POSITION)), len(STAGES))
        if stage == 0:
            waits = ", where it waits for the others" if self._get(rank, _WAITS) else ""
            return f"{STAGES[0]}, after {steps} steps{waits}"
        return f"{STAGES[stage]} of step {steps + 1}"

    def last(self) -> list[int]:
        """The ranks that are behind all others; where none is, all."""
        places = [
            (self._get(rank, _POSITION), self._get(rank, _WAITS)) for rank in range(self.size)
        ]
        return [rank for rank, place in enumerate(places) if place == min(places)]

    def _get(self, rank: int, field: int) -> float:
        return float(self._cells[rank * _FIELDS + field])

    def _set(self, rank: int, field: int, value: float) -> None:
        self._cells[rank * _FIELDS + field] = value
