"""How lines of attention alone are written in a table: times with their range, paths, shares."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from perfbench.records import NOT_APPLICABLE
from perfbench.text import NULL, escape, number
from tools.studies.kernellines import KernelTiming, Line

COLUMNS = ("path", "seq_len", "selection")  # axes that have one of their own
TEXT = (
    "path",
    "selection",
    "step",
    "kernels",
    "target",
    "measured",
    "must",
    "aim",
    "far aim",
    "cell",
    "verdict",
    "why",
    "bound",
    "workload",
    "step off",
    "batch x tokens",
    "link",
)


def with_range(timed: KernelTiming | None) -> str:
    if timed is None:
        return NULL
    low, high = number(min(timed.times_ms)), number(max(timed.times_ms))
    return number(timed.ms) if len(timed.times_ms) < 2 else f"{number(timed.ms)} ({low} to {high})"


def backward(line: Line) -> str:
    span = line.backward_range_ms
    if (
        span is None
        or line.backward_ms is None
        or line.whole is None
        or len(line.whole.times_ms) < 2
    ):
        return number(line.backward_ms)
    # no time is below 0: one of the two was held up by something else
    low = number(span[0]) if span[0] > 0 else NULL
    return f"{number(line.backward_ms)} ({low} to {number(span[1])})"


def path_of(line: Line, lines: Sequence[Line]) -> str:
    """The path, with every axis in which the lines differ and that has no column."""
    parts = []
    for name, value in line.axes.items():
        several = {one.axes.get(name) for one in lines} - {NOT_APPLICABLE}
        if name not in COLUMNS and value != NOT_APPLICABLE and len(several) > 1:
            parts.append(f"{name} {value}")
    return escape(", ".join([line.path, *parts]))


def share(ms: float, total_ms: float) -> str:
    return NULL if ms <= 0 else f"{ms:.3f} ({100 * ms / total_ms:.0f} %)"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Columns whose names are in `TEXT` are text, the others numbers."""
    rule = ["---" if name in TEXT else "---:" for name in head]
    return [f"| {' | '.join(row)} |" for row in (head, rule, *rows)]
