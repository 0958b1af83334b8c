"""A series as a line of 120 by 24 pixels, in SVG path data: 300 of them are one page."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT, PAD = 120, 24, 3
MAX_BINS = 90  # several runs share a bin beyond that


@dataclass(frozen=True, slots=True)
class Sparkline:
    """``path``: an SVG path, broken at gaps. ``last``: where the newest value is, null without one.
    ``changes``: places of change points. ``failures``: x of runs without a value.
    """

    path: str
    last: tuple[float, float] | None
    changes: tuple[tuple[float, float], ...]
    failures: tuple[float, ...]


def sparkline(values: Sequence[float | None], changes: Collection[int] = ()) -> Sparkline:
    """Draw ``values``, oldest first; null is a gap. ``changes``: indices of change points."""
    size = max(1, -(-len(values) // MAX_BINS))
    bins = [values[start : start + size] for start in range(0, len(values), size)]
    means = [_mean(one) for one in bins]
    known = [mean for mean in means if mean is not None]
    low, high = (min(known), max(known)) if known else (0.0, 0.0)

    def x_of(place: int) -> float:
        share = place / (len(bins) - 1) if len(bins) > 1 else 1.0
        return round(PAD + share * (WIDTH - 2 * PAD), 1)

    def y_of(value: float) -> float:
        share = (value - low) / (high - low) if high > low else 0.5
        return round(HEIGHT - PAD - share * (HEIGHT - 2 * PAD), 1)

    places = [(x_of(i), None if mean is None else y_of(mean)) for i, mean in enumerate(means)]
    drawn = [(x, y) for x, y in places if y is not None]
    marked = {index // size for index in changes if 0 <= index < len(values)}
    return Sparkline(
        _path(places),
        drawn[-1] if drawn else None,
        tuple((x, y) for i, (x, y) in enumerate(places) if i in marked and y is not None),
        tuple(x_of(i) for i, one in enumerate(bins) if any(value is None for value in one)),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _path(places: Sequence[tuple[float, float | None]]) -> str:
    """A lone value between gaps is a stroke of no length, which a round cap makes a dot."""
    parts, pen_down = [], False
    for x, y in places:
        if y is not None:
            parts.append(f"L{x} {y}" if pen_down else f"M{x} {y}h0")
        pen_down = y is not None
    return "".join(parts)
