"""Values with their unit, as a page shows them."""

from __future__ import annotations

from datetime import UTC, datetime

from perfbench.text import NULL, number


def shown(value: float | None, unit: str) -> str:
    """Four significant digits; bytes as decimal GB, MB or kB."""
    if value is None:
        return NULL
    if unit == "bytes":
        for size, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
            if abs(value) >= size:
                return f"{number(value / size, 4)} {name}"
    return f"{number(value, 4)} {unit}".rstrip()


def half_width_pct(value: float | None, low: float | None, high: float | None) -> float | None:
    """Half of the interval in percent of the value; null without one."""
    if not value or low is None or high is None:
        return None
    return 50 * (high - low) / abs(value)


def minute(when: datetime) -> str:
    """'2026-11-29 02:17', in UTC."""
    return f"{_utc(when):%Y-%m-%d %H:%M}"


def iso(when: datetime) -> str:
    return f"{_utc(when):%Y-%m-%dT%H:%M:%SZ}"


def _utc(when: datetime) -> datetime:
    return when.replace(tzinfo=UTC) if when.tzinfo is None else when.astimezone(UTC)


def short_commit(commit: str | None) -> str:
    return commit[:8] if commit else "?"
