"""How a verdict looks: one of four lights, each with a shape, and a letter.

The colours are those of Okabe and Ito (https://jfly.uni-koeln.de/color/), which colour-blind
readers tell apart; shape and letter serve where there is no colour at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from perfbench.errors import Exit
from perfbench.records import EXIT_OF, FAIL_UNDER_STRICT, Verdict


class Light(StrEnum):
    """Green passes, blind passes without proof (WATCH, BLIND, UNSTABLE), red fails the command."""

    GREEN = "green"
    BLIND = "blind"
    RED = "red"
    NONE = "none"  # nothing was compared, and nothing is wrong


LETTERS: Mapping[Verdict, str] = MappingProxyType(
    {
        Verdict.SAME: "S",
        Verdict.FASTER: "F",
        Verdict.NEW: "N",
        Verdict.WATCH: "W",
        Verdict.SUSPECT: "?",
        Verdict.BLIND: "B",
        Verdict.UNSTABLE: "U",
        Verdict.REGRESSED: "R",
        Verdict.WRONG_PATH: "P",
        Verdict.OVER_BOUND: "O",
        Verdict.PARITY: "≠",
        Verdict.IMPOSSIBLE: "!",
        Verdict.FAILED: "X",
        Verdict.MISSING: "M",
        Verdict.ENV: "E",
        Verdict.INCOMPARABLE: "I",
        Verdict.NO_BASELINE: "0",
        Verdict.CORRUPT: "C",
        Verdict.LOOSENED: "L",
    }
)


def _light(verdict: Verdict) -> Light:
    if verdict in FAIL_UNDER_STRICT:
        return Light.BLIND
    return Light.GREEN if EXIT_OF[verdict] == Exit.OK else Light.RED


LIGHTS: Mapping[str | None, Light] = MappingProxyType(
    {None: Light.NONE, **{verdict.value: _light(verdict) for verdict in Verdict}}
)


def light_of(verdict: str | None) -> Light:
    """The light of a verdict; red for one that this perfbench does not know."""
    return LIGHTS.get(verdict, Light.RED)


def letter_of(verdict: str | None) -> str:
    if verdict is None:
        return "–"
    return LETTERS[Verdict(verdict)] if verdict in set(Verdict) else "*"
