"""How people write a time in the past, and a length of time. Pure: the clock is an argument."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from perfbench.errors import Exit, PerfbenchError

_UNITS = {"h": "hours", "d": "days", "w": "weeks"}
_DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
WANTED = "wanted a date (2026-11-23), a time ago (12h, 3d, 2w), a weekday, today or yesterday"


def length_of(text: str, option: str) -> timedelta:
    """'12h', '400d' or '2w'; USAGE where it is none."""
    found = re.fullmatch(r"([0-9]{1,5})([hdw])", text.strip().lower())
    if not found:
        raise PerfbenchError(
            Exit.USAGE,
            f"{option}: got {text[:40]!r}, wanted a length of time. Next: write e.g. 90d",
        )
    return timedelta(**{_UNITS[found[2]]: int(found[1])})


def moment_of(text: str, option: str, now: datetime) -> datetime:
    """A time in UTC; a day begins at 00:00 UTC, and a weekday is the last one before ``now``, or
    today. USAGE where it is none, or lies in the future.
    """
    word, midnight = text.strip().lower(), now.replace(hour=0, minute=0, second=0, microsecond=0)
    if word in ("today", "yesterday"):
        return midnight - timedelta(days=word == "yesterday")
    if word in _DAYS:
        return midnight - timedelta(days=(now.weekday() - _DAYS.index(word)) % 7)
    if re.fullmatch(r"[0-9]+[hdw]", word):
        return now - length_of(word, option)
    try:
        found = datetime.fromisoformat(text.strip())
        found = found.astimezone(UTC) if found.tzinfo else found.replace(tzinfo=UTC)
    except (ValueError, OverflowError):  # the year 0 in UTC
        raise PerfbenchError(
            Exit.USAGE, f"{option}: got {text[:40]!r}, {WANTED}. Next: write e.g. {option} 7d"
        ) from None
    if found > now:
        raise PerfbenchError(
            Exit.USAGE, f"{option}: got {text[:40]!r}, which lies in the future, {WANTED}"
        )
    return found
