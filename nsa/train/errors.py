"""What ends a training run: a line for the user, and an exit code of its own."""

from __future__ import annotations

from enum import IntEnum


class TrainExit(IntEnum):
    """The exit codes of ``python -m nsa.train``."""

    OK = 0
    USAGE = 2  # a config or an option that cannot be
    DATA = 3  # a missing, empty or unreadable corpus; a tokenizer of another vocabulary
    CHECKPOINT = 4  # none to resume from, damaged, or of another config
    DEVICE = 5  # no GPU where one was asked for; a world size that does not divide
    MEMORY = 6  # out of memory: the line has the largest batch that fits
    UNHEALTHY = 7  # halted by the watchdog: NaN, collapse, flat line, ...
    STALLED = 8  # ended by the watchdog: no progress within the time-out of a phase
    PEER = 9  # ended because another rank died or was halted
    MISSING = 10  # an optional package is not installed
    INTERRUPTED = 130


# With these a trainer ends by itself, and has printed its one line: what was got and what to do.
EXPLAINED = (
    TrainExit.USAGE,
    TrainExit.DATA,
    TrainExit.CHECKPOINT,
    TrainExit.DEVICE,
    TrainExit.MEMORY,
    TrainExit.MISSING,
)


class TrainError(Exception):
    """One line: what was got, what was wanted, what to do next."""

    def __init__(self, code: TrainExit, message: str) -> None:
        super().__init__(message)
        self.code = code
