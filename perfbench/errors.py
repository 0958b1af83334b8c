"""Exit codes, by severity, and the error that carries one to the user."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from pathlib import Path


class Exit(IntEnum):
    OK = 0
    INTERNAL = 1
    USAGE = 2  # usage, matrix or policy error
    REGRESSED = 3
    WRONG_PATH = 4  # WRONG_PATH, OVER_BOUND: not what the plan or `expect` says
    NOT_TRUE = 5  # PARITY, IMPOSSIBLE
    FAILED = 6  # FAILED, MISSING
    STRICT = 7  # a warning under --strict
    ENVIRONMENT = 8
    BASELINE = 9
    INTERRUPTED = 130


# Several at once: the exit by severity.
SEVERITY = (
    Exit.INTERNAL,
    Exit.USAGE,
    Exit.NOT_TRUE,
    Exit.WRONG_PATH,
    Exit.FAILED,
    Exit.BASELINE,
    Exit.REGRESSED,
    Exit.ENVIRONMENT,
    Exit.STRICT,
)


def worst(exits: Iterable[Exit]) -> Exit:
    """The exit code of several findings, by severity."""
    found = set(exits)
    return next((code for code in SEVERITY if code in found), Exit.OK)


class PerfbenchError(Exception):
    """A user's problem: one message (got, wanted, next step) and the exit code that says which
    kind.
    """

    def __init__(self, exit_code: Exit, message: str) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class FewerRows(PerfbenchError):
    """A history refused a copy of a run with fewer rows than it holds; `--force` overrides it."""


def unwritable(path: Path, error: OSError, next_step: str) -> PerfbenchError:
    """USAGE: the operating system refused to write ``path``, and what the user can do."""
    return PerfbenchError(
        Exit.USAGE, f"{path} cannot be written: {error.strerror or error}. Next: {next_step}"
    )
