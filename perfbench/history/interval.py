"""The one number that stands for an interval, in the terminal and on the page."""

from __future__ import annotations


def half_width_pct(value: float | None, low: float | None, high: float | None) -> float | None:
    """The larger half of the 95 % interval in percent of the value; null without one."""
    if not value or low is None or high is None:
        return None
    return 100 * max(high - value, value - low) / abs(value)
