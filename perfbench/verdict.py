"""Verdicts and exit codes: the table that every command obeys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntEnum, StrEnum


class Exit(IntEnum):
    OK = 0
    INTERNAL = 1
    USAGE = 2  # usage, matrix or policy error
    REGRESSED = 3
    WRONG_PATH = 4
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


class Verdict(StrEnum):
    SAME = "SAME"
    FASTER = "FASTER"
    NEW = "NEW"
    WATCH = "WATCH"
    BLIND = "BLIND"
    UNSTABLE = "UNSTABLE"
    REGRESSED = "REGRESSED"
    WRONG_PATH = "WRONG_PATH"
    PARITY = "PARITY"
    IMPOSSIBLE = "IMPOSSIBLE"
    FAILED = "FAILED"
    MISSING = "MISSING"
    ENV = "ENV"
    INCOMPARABLE = "INCOMPARABLE"
    NO_BASELINE = "NO_BASELINE"
    CORRUPT = "CORRUPT"


EXIT_OF: Mapping[Verdict, Exit] = {
    Verdict.SAME: Exit.OK,
    Verdict.FASTER: Exit.OK,
    Verdict.NEW: Exit.OK,
    Verdict.WATCH: Exit.OK,
    Verdict.BLIND: Exit.OK,
    Verdict.UNSTABLE: Exit.OK,
    Verdict.REGRESSED: Exit.REGRESSED,
    Verdict.WRONG_PATH: Exit.WRONG_PATH,
    Verdict.PARITY: Exit.NOT_TRUE,
    Verdict.IMPOSSIBLE: Exit.NOT_TRUE,
    Verdict.FAILED: Exit.FAILED,
    Verdict.MISSING: Exit.FAILED,
    Verdict.ENV: Exit.ENVIRONMENT,
    Verdict.INCOMPARABLE: Exit.ENVIRONMENT,
    Verdict.NO_BASELINE: Exit.BASELINE,
    Verdict.CORRUPT: Exit.BASELINE,
}
FAIL_UNDER_STRICT = (Verdict.WATCH, Verdict.BLIND, Verdict.UNSTABLE)


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
