"""Values as text: numbers with their null, and strings that cannot break Markdown."""

from __future__ import annotations

import re

NULL = "-"
# An underscore inside a word is no markup for GitHub, and stays greppable in the raw file.
_SPECIAL = re.compile(r"([\\`*\[\]<>|#~$&!]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9]))")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")


def plain(value: object) -> str:
    """One line without control characters; lone surrogates (undecodable bytes) spelled out."""
    text = str(value).encode("utf-8", "backslashreplace").decode("utf-8")
    return " ".join(_CONTROL.sub(" ", text).split())


def escape(value: object) -> str:
    """Prose for anywhere in GitHub's Markdown: nothing in it is markup, and it stays on one
    line.
    """
    return _SPECIAL.sub(r"\\\1", plain(value))


def code(value: object) -> str:
    """A code span for prose; whatever backticks it holds."""
    text = plain(value)
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * (longest + 1)
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}" if text else NULL


def cell_code(value: object) -> str:
    """A code span inside a table, where GitHub reads ``\\|`` as a bar even within code."""
    return code(value).replace("|", "\\|")


def block(value: str) -> str:
    """A fenced block; the fence is longer than any inside."""
    text = _CONTROL.sub(
        "",
        value.encode("utf-8", "backslashreplace")
        .decode("utf-8")
        .replace("\r\n", "\n")
        .replace("\r", "\n"),
    ).strip("\n")
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def number(value: float | None, digits: int = 3) -> str:
    """``digits`` significant digits, whole numbers from there on, thousands separated; '-' for
    null.
    """
    if value is None:
        return NULL
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def ratio(value: float | None) -> str:
    """Two places, or two significant digits where two places would hide a small ratio."""
    if value is None:
        return NULL
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def fixed(value: float | None, places: int) -> str:
    return NULL if value is None else f"{value:,.{places}f}"


def signed_pct(value: float | None) -> str:
    return NULL if value is None else f"{value:+.2f} %"


def shorten(text: str, limit: int = 110) -> str:
    """One line of at most ``limit`` characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 3]}..."
