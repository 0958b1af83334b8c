"""Verdicts, and the exit code that each gives a command."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from perfbench.errors import Exit


class Verdict(StrEnum):
    SAME = "SAME"
    FASTER = "FASTER"
    NEW = "NEW"
    WATCH = "WATCH"
    SUSPECT = "SUSPECT"
    BLIND = "BLIND"
    UNSTABLE = "UNSTABLE"
    REGRESSED = "REGRESSED"
    WRONG_PATH = "WRONG_PATH"
    OVER_BOUND = "OVER_BOUND"
    PARITY = "PARITY"
    IMPOSSIBLE = "IMPOSSIBLE"
    FAILED = "FAILED"
    MISSING = "MISSING"
    ENV = "ENV"
    INCOMPARABLE = "INCOMPARABLE"
    NO_BASELINE = "NO_BASELINE"
    CORRUPT = "CORRUPT"
    LOOSENED = "LOOSENED"


EXIT_OF: Mapping[Verdict, Exit] = {
    Verdict.SAME: Exit.OK,
    Verdict.FASTER: Exit.OK,
    Verdict.NEW: Exit.OK,
    Verdict.WATCH: Exit.OK,
    Verdict.SUSPECT: Exit.STRICT,
    Verdict.BLIND: Exit.OK,
    Verdict.UNSTABLE: Exit.OK,
    Verdict.REGRESSED: Exit.REGRESSED,
    Verdict.WRONG_PATH: Exit.WRONG_PATH,
    Verdict.OVER_BOUND: Exit.WRONG_PATH,
    Verdict.PARITY: Exit.NOT_TRUE,
    Verdict.IMPOSSIBLE: Exit.NOT_TRUE,
    Verdict.FAILED: Exit.FAILED,
    Verdict.MISSING: Exit.FAILED,
    Verdict.ENV: Exit.ENVIRONMENT,
    Verdict.INCOMPARABLE: Exit.ENVIRONMENT,
    Verdict.NO_BASELINE: Exit.BASELINE,
    Verdict.CORRUPT: Exit.BASELINE,
    Verdict.LOOSENED: Exit.USAGE,
}


FAIL_UNDER_STRICT = (Verdict.WATCH, Verdict.BLIND, Verdict.UNSTABLE)
