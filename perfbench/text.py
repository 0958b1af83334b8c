"""Values as text: numbers with their null, and strings that cannot break Markdown."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from itertools import takewhile

NULL = "-"
# An underscore inside a word is no markup for GitHub, and stays greppable in the raw file.
_SPECIAL = re.compile(r"([\\`*\[\]<>|#~$&!]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9]))")
# Control characters but tab and line feed; what turns the direction of text; line separators; BOM.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]")
_COLOUR = re.compile(r"(\x1b\[[0-9;]*m)")
# GitHub's runner reads commands at the beginning of a line, after spaces, and '##[' anywhere in it.
_COMMAND = re.compile(r"^(\s*):(?=:)|#(?=#\[)", re.MULTILINE)

# Of rendered text GitHub links @name, #1, GH-1, http://x and www.x, and notifies the first.
_LINKING = re.compile(r"@|#(?=\d)|\bgh(?=-\d)|:(?=//)|\bwww(?=\.)", re.IGNORECASE)
NO_WIDTH = "&#8203;"  # as an entity, so that the raw text shows it

_SCHEME = re.compile(r"[^/?@:]*://")
_HOSTS = re.compile(r"[\w.,-]*(:\d{1,5})?|\[[0-9A-Fa-f:.]*\](:\d{1,5})?")
_PASSWORD = re.compile(r"([?&][^=&?]*pass[^=&?]*=).*", re.DOTALL | re.IGNORECASE)
# Of a database's address: options whose values are no secrets. A misspelt password is no option.
_OPEN_OPTIONS = frozenset(
    ("application_name", "connect_timeout", "dbname", "host", "hostaddr", "options", "passfile")
) | frozenset(("port", "service", "sslcert", "sslkey", "sslmode", "sslrootcert", "user"))


def shown_address(address: str) -> str:
    """The address of a database, or a path, without its secrets, whatever is wrong with it: the
    password, and the values of options from the first that is not known to be open.
    """
    scheme = found[0] if (found := _SCHEME.match(address)) else ""
    account, at, place = address[len(scheme) :].rpartition("@")
    if re.search("[?&].*=", account, re.DOTALL):  # what follows may belong to an option
        return f"{scheme}***"
    user, colon, _ = account.partition(":")
    account = f"{user}:***" if colon else account
    if not scheme:
        return account + at + _PASSWORD.sub(r"\1***", place)
    place, question, query = place.partition("?")
    if not at and not _HOSTS.fullmatch(place.partition("/")[0]):
        return f"{scheme}***"
    return f"{scheme}{account}{at}{place}{question}{_open(query)}"


def _open(query: str) -> str:
    items = query.split("&")
    kept = list(takewhile(lambda item: item.partition("=")[0] in _OPEN_OPTIONS, items))
    if len(kept) < len(items) and items != [""]:
        key, equals, _ = items[len(kept)].partition("=")
        kept.append(f"{key}=***" if equals else "***")
    return "&".join(kept)


def visible(text: str) -> str:
    """``text`` with control characters, marks of direction and lone surrogates (undecodable bytes)
    as escapes, which JSON reads, too; its lines and tabs stay.
    """
    decoded = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", decoded)


def inert(text: str, *, colour: bool = False) -> str:
    """``text`` for a terminal or the log of a workflow: `visible`, and no line of it is a command
    to GitHub. ``colour``: the codes that set colours stay.
    """
    parts = _COLOUR.split(text) if colour else [text]
    shown = "".join(part if colour and _COLOUR.fullmatch(part) else visible(part) for part in parts)
    return _COMMAND.sub(
        lambda found: f"{found[1]}\\u003a" if found[1] is not None else "\\u0023", shown
    )


def plain(value: object) -> str:
    """One line, with control characters as escapes."""
    return " ".join(visible(str(value).replace("\r\n", "\n")).split())


def escape(value: object) -> str:
    """Prose for anywhere in GitHub's Markdown: nothing in it is markup, and it stays on one
    line.
    """
    return _SPECIAL.sub(r"\\\1", plain(value))


def unlinked(value: object) -> str:
    """`escape` for a comment on GitHub: nothing in it notifies a person, refers to an issue or
    becomes a link. A backslash does not stop these, since GitHub looks for them in what was
    rendered; a space of no width does.
    """
    return _LINKING.sub(rf"\g<0>{NO_WIDTH}", escape(value))


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


def table_cell(markdown: str) -> str:
    """Markdown for a cell of a table, where every bar ends it that is not escaped."""
    return re.sub(r"(?<!\\)\|", r"\\|", markdown)


def block(value: str) -> str:
    """A fenced block; the fence is longer than any inside."""
    text = visible(value.replace("\r\n", "\n").replace("\r", "\n")).strip("\n")
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


def counted(count: int, noun: str) -> str:
    """'1 run', '2 runs'."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


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
    line = plain(text)
    return line if len(line) <= limit else f"{line[: limit - 3]}..."


def aligned(
    head: Sequence[str], lines: Sequence[Sequence[str]], right: Collection[str] = ()
) -> list[str]:
    """A table as lines of text, each column as wide as its widest value; the columns named in
    ``right`` end at one place. Without a line, nothing but the head.
    """
    table = [list(head), *([plain(value) for value in line] for line in lines)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    found = []
    for line in table:
        padded = [
            value.rjust(width) if name in right else value.ljust(width)
            for value, width, name in zip(line, widths, head, strict=True)
        ]
        found.append("  ".join(padded).rstrip())
    return found
