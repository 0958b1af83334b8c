"""The targets that the kernels of path triton are held to, each with what a run of attention alone
measured against it.

Set on an H200 on 2026-11-28, from what each branch needs at cuDNN's own rate there: must, aim and
far aim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from nsa.config import ModelConfig, NSAConfig
from perfbench.records import EVERYTHING
from perfbench.text import NULL, number, ratio
from tools.studies.kernellines import GIB, Line, speedup

SET_FOR = "NVIDIA H200"
PATH = "triton"
TOKENS = 65_536  # at which the targets of time and memory are set
# bytes a token at the longest length over those at TOKENS: up to here the growth is called linear
LINEAR = 1.1
MET, MISSED, OPEN = "met", "**not met**", "open"
Limits = tuple[float | None, float | None, float | None]  # must, aim, far aim


@dataclass(frozen=True, slots=True)
class SpeedTarget:
    """One line: what was measured, and for must, aim and far aim the limit with its answer, as
    text.
    """

    what: str
    measured: str
    answers: tuple[str, str, str]


# Query heads, KV heads, DK, DV of the shapes that the targets name; batch 1, bf16, the paper's
# geometry.
SHAPES: Mapping[tuple[int, int, int, int], str] = {(12, 2, 64, 64): "A", (64, 4, 128, 128): "B"}
FORWARD_MS: Mapping[str, Limits] = {"A": (3.6, 3.0, 2.5), "B": (26.0, 17.5, 14.0)}
BACKWARD_MS: Mapping[str, Limits] = {"A": (6.0, 5.2, 4.2), "B": (55.0, 38.0, 32.0)}
EXTRA_GIB: Mapping[str, Limits] = {"A": (0.9, 0.6, 0.48), "B": (6.0, 4.0, 4.0)}
# launched from Python, and replayed from a CUDA graph
CROSSOVER_TOKENS: Mapping[str, Limits] = {"A": (16_000, 12_000, 8_000)}
CAPTURED_CROSSOVER_TOKENS: Mapping[str, Limits] = {"A": (11_000, 8_000, 5_000)}
# of steps that Python launches
HOST_TOKENS = 2_048
FORWARD_HOST_MS: Mapping[str, Limits] = {"A": (0.6, 0.35, 0.2)}
BOTH_HOST_MS: Mapping[str, Limits] = {"A": (1.8, 1.0, 0.6)}
LAUNCH_TOKENS = 16_384
BOTH_LAUNCHES: Mapping[str, Limits] = {"A": (36, 24, 14)}

CROSSOVER = "crossover with the best dense kernel, forward and backward, tokens"


def shape_of(model: ModelConfig) -> str | None:
    """'A' or 'B', None for heads or a geometry that no target is set for."""
    config, paper = model.nsa, NSAConfig()
    names = (
        "cmp_block",
        "cmp_stride",
        "sel_block",
        "num_selected",
        "window",
        "num_initial",
        "num_local",
        "branches",
        "phi",
    )
    if any(getattr(config, name) != getattr(paper, name) for name in names):
        return None
    return SHAPES.get((model.num_heads, model.num_kv_heads, model.head_dim, model.value_dim))


def targets(shape: str, lines: Sequence[Line]) -> list[SpeedTarget]:
    """Every target of ``shape``; what was not measured has no answer.

    Where a length has several lines, its first one counts.

    None of a line without a step of the path: it shows what the step buys. Steps from a CUDA graph
    have a crossover of their own.
    """
    first: dict[int, Line] = {}
    captured: dict[int, Line] = {}
    for line in lines:
        whole = line.axes.get("without", EVERYTHING) == EVERYTHING
        if (
            line.path == PATH
            and whole
            and int(line.axes["batch"]) == 1
            and line.axes["dtype"] == "bf16"
        ):
            (captured if line.axes.get("cuda_graph") == "on" else first).setdefault(
                line.tokens, line
            )
    mine = list(first.values())
    at = first.get(TOKENS)
    launched, replayed = (
        {
            line.tokens: ratio_
            for line in some.values()
            if (ratio_ := speedup(lines, line, "both_ms")) is not None
        }
        for some in (first, captured)
    )
    syncs = [
        one.host_syncs
        for line in mine
        for timed in (line.forward, line.whole)
        if timed
        for one in timed.profiles
    ]
    found = [
        _at_most(
            f"forward at {TOKENS:,}, ms",
            None if at is None else at.forward_ms,
            FORWARD_MS.get(shape),
        ),
        _at_most(
            f"backward at {TOKENS:,}, ms",
            None if at is None else at.backward_ms,
            BACKWARD_MS.get(shape),
        ),
        (
            _crossover(CROSSOVER, launched, CROSSOVER_TOKENS.get(shape))
            if launched or not replayed
            else None
        ),
        (
            _crossover(
                f"{CROSSOVER}, from a CUDA graph", replayed, CAPTURED_CROSSOVER_TOKENS.get(shape)
            )
            if replayed
            else None
        ),
        _at_most(
            f"extra memory at {TOKENS:,}, forward and backward, GiB",
            _extra_gib(at),
            EXTRA_GIB.get(shape),
        ),
        _linear(mine),
        _at_most(
            f"host time at {HOST_TOKENS:,}, forward, ms",
            _host_ms(first.get(HOST_TOKENS), "forward"),
            FORWARD_HOST_MS.get(shape),
        ),
        _at_most(
            f"host time at {HOST_TOKENS:,}, forward and backward, ms",
            _host_ms(first.get(HOST_TOKENS), "whole"),
            BOTH_HOST_MS.get(shape),
        ),
        _at_most(
            f"launches at {LAUNCH_TOKENS:,}, forward and backward",
            _launches(first.get(LAUNCH_TOKENS)),
            BOTH_LAUNCHES.get(shape),
        ),
        _at_most("host syncs in a step", max(syncs, default=None), (0.0, 0.0, 0.0)),
    ]
    return [one for one in found if one is not None]


def crossing(ratios: Mapping[int, float]) -> tuple[int | None, int | None, float | None]:
    """(longest length at which dense is faster, shortest from which on it is not, where they meet)
    of tokens -> x best dense.

    The meeting point is a straight line between both in logarithms; None unless both lengths were
    measured.
    """
    lengths = sorted(ratios)
    slower = [tokens for tokens in lengths if ratios[tokens] < 1]
    low = slower[-1] if slower else None
    high = next((tokens for tokens in lengths if low is None or tokens > low), None)
    if low is None or high is None:
        return low, high, None
    share = -math.log(ratios[low]) / (math.log(ratios[high]) - math.log(ratios[low]))
    return low, high, low * (high / low) ** share


def _crossover(what: str, ratios: Mapping[int, float], limits: Limits | None) -> SpeedTarget | None:
    if limits is None:
        return None
    low, high, meeting = crossing(ratios)
    if meeting is not None:
        measured = f"about {meeting:,.0f}, between {low:,} and {high:,}"
    elif low is not None:
        measured = f"beyond {low:,}"
    else:
        measured = NULL if high is None else f"at or below {high:,}"

    def answer(limit: float) -> str:
        if high is not None and high <= limit:
            return MET
        if low is not None and low >= limit:
            return MISSED
        return OPEN

    return SpeedTarget(what, measured, _answers(limits, "at most", answer))


def _linear(mine: Sequence[Line]) -> SpeedTarget | None:
    """Bytes a token of the longest length against those at `TOKENS`."""
    per_token = {
        line.tokens: line.whole.extra_bytes / line.tokens
        for line in mine
        if line.whole and line.whole.extra_bytes
    }
    longest = max(per_token, default=0)
    what = "extra memory grows as S: bytes a token"
    if TOKENS not in per_token or longest <= TOKENS:
        return SpeedTarget(what, NULL, ("linear", NULL, NULL))
    grown = per_token[longest] / per_token[TOKENS]
    measured = f"{ratio(grown)} x from {TOKENS:,} to {longest:,}"
    return SpeedTarget(
        what, measured, (f"at most {LINEAR:g} x: {MET if grown <= LINEAR else MISSED}", NULL, NULL)
    )


def _at_most(what: str, value: float | None, limits: Limits | None) -> SpeedTarget | None:
    if limits is None:
        return None
    return SpeedTarget(
        what,
        number(value),
        _answers(limits, "at most", lambda limit: _answer(value, lambda got: got <= limit)),
    )


def _answer(value: float | None, holds: Callable[[float], bool]) -> str:
    return "not measured" if value is None else MET if holds(value) else MISSED


def _answers(limits: Limits, how: str, answer: Callable[[float], str]) -> tuple[str, str, str]:
    must, aim, far = (
        NULL if limit is None else f"{how} {_limit(limit)}: {answer(limit)}" for limit in limits
    )
    return must, aim, far


def _limit(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:g}"


def _host_ms(line: Line | None, what: Literal["forward", "whole"]) -> float | None:
    """What the host takes to enqueue a step, the median over processes; None where no file has
    it.
    """
    timing = None if line is None else line.forward if what == "forward" else line.whole
    times_s = [one.host_time_s for one in timing.profiles if one.host_time_s] if timing else []
    return 1000 * median(times_s) if times_s else None


def _launches(line: Line | None) -> float | None:
    counts = [one.kernel_count for one in line.whole.profiles] if line and line.whole else []
    return max(counts, default=None)


def _extra_gib(at: Line | None) -> float | None:
    return (
        None
        if at is None or at.whole is None or at.whole.extra_bytes is None
        else at.whole.extra_bytes / GIB
    )
