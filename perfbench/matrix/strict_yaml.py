"""Strict YAML 1.2 with positions: text in, plain data and the line of every value out.

Built on ruamel.yaml's events, because its constructors accept what a matrix must not: explicit
tags, aliases that expand without bound, and numbers that readers take for others (010, 0x10, .inf).
"""

from __future__ import annotations

import errno
import math
import pathlib
import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NoReturn

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentEndEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
    StreamEndEvent,
)

from perfbench.errors import Exit, PerfbenchError
from perfbench.records import read_regular_file
from perfbench.text import plain

Loc = tuple[str | int, ...]
# the deepest valid matrix has 5; a bound keeps hostile input from exhausting the stack
MAX_DEPTH = 16
MAX_BYTES = 2**20
MAX_VALUES = 25_000  # two seconds of parsing; ten thousand cells spelled out one by one have fewer

_NULL = ("", "~", "null", "Null", "NULL")
_TRUE, _FALSE = ("true", "True", "TRUE"), ("false", "False", "FALSE")
_INT = re.compile(r"-?(0|[1-9][0-9]{0,17})")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_MISLEADING = re.compile(
    r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
_DIRECTIVE = re.compile(r"^%", re.MULTILINE)


def fail(path: str, line: int | None, message: str) -> NoReturn:
    """Raise the error of one place of a file; ``path`` may be what a damaged run file says it
    was.
    """
    raise PerfbenchError(
        Exit.USAGE, plain(f"{path}:{line}: {message}" if line else f"{path}: {message}")
    )


@dataclass(frozen=True, slots=True)
class Document:
    """The data of a file; ``line`` knows where each key or item began (1-based)."""

    path: str
    data: dict[str, Any]
    lines: dict[Loc, int]

    def line(self, loc: Loc) -> int:
        """The line of ``loc``, or of the nearest thing around it that the file states."""
        while loc and loc not in self.lines:
            loc = loc[:-1]
        return self.lines.get(loc, 1)

    def fail(self, loc: Loc, message: str) -> NoReturn:
        where = "".join(
            f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc
        ).lstrip(".")
        fail(self.path, self.line(loc), f"{where}: {message}" if where else message)


def read_text(path: str) -> str:
    """The text of a UTF-8 file, a byte order mark removed."""
    try:
        raw = read_regular_file(pathlib.Path(path), MAX_BYTES)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        if isinstance(error, OSError) and error.errno == errno.EFBIG:
            fail(
                path,
                None,
                f"larger than {MAX_BYTES} bytes, which no matrix is; check that it is the right"
                " file",
            )
        reason = getattr(error, "strerror", None) or str(error)
        raise PerfbenchError(
            Exit.USAGE,
            f"cannot read {path!r}: {reason}; give the path of a matrix, or @cpu, which is shipped",
        ) from None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        fail(path, line, f"byte 0x{raw[error.start]:02x} is not UTF-8; save the file as UTF-8")


def parse(text: str, path: str) -> Document:
    """Parse one YAML document whose top is a mapping; PerfbenchError gives file and line of what is
    wrong.
    """
    parsed = _parsed(text, path)
    return replace(parsed, data=deepcopy(parsed.data), lines=dict(parsed.lines))


@lru_cache(maxsize=8)
def _parsed(text: str, path: str) -> Document:
    """Remembered, since a command parses the matrix of a run several times."""
    if found := _DIRECTIVE.search(text):
        fail(
            path,
            _line_of(text, found.start()),
            "a line that begins with % is a YAML directive; remove it, matrices are YAML 1.2",
        )
    try:
        return _Builder(path, iter(YAML(typ="safe", pure=True).parse(text))).document()
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        if r"'\t'" in str(error.problem):
            fail(path, mark.line + 1 if mark else None, "not valid YAML: a TAB; use spaces")
        what = ", ".join(str(part) for part in (error.context, error.problem) if part)
        fail(path, mark.line + 1 if mark else None, f"not valid YAML: {what}; fix the syntax here")
    except YAMLError as error:  # the reader's: a character that YAML forbids
        position = getattr(error, "position", None)
        line = _line_of(text, position) if isinstance(position, int) else None
        fail(
            path,
            line,
            f"not valid YAML: {getattr(error, 'reason', None) or error}; remove the character",
        )
    except (ValueError, OverflowError) as error:  # an escape such as "\UFFFFFFFF", beyond Unicode
        fail(path, None, f"not valid YAML: {error}; look for a broken escape in a quoted text")


def _line_of(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


class _Builder:
    """Turns events into data, and refuses what a strict file does not need."""

    def __init__(self, path: str, events: Iterator[Event]) -> None:
        self._path = path
        self._events = events
        self._lines: dict[Loc, int] = {}
        self._values = 0

    def document(self) -> Document:
        next(self._events)  # stream start
        if isinstance(next(self._events), StreamEndEvent):
            fail(self._path, 1, "empty file; wanted a mapping that begins with `version: 1`")
        top = next(self._events)
        if not isinstance(top, MappingStartEvent):
            fail(self._path, _line(top), "the top must be a mapping that begins with `version: 1`")
        data = self._value(top, ())
        end = next(self._events)  # read outside the assert, which PYTHONOPTIMIZE=1 leaves out
        assert isinstance(end, DocumentEndEvent)
        extra = next(self._events)
        if not isinstance(extra, StreamEndEvent):
            fail(
                self._path,
                _line(extra),
                "a second document begins here; one file is one matrix, split it",
            )
        return Document(self._path, data, self._lines)

    def _value(self, event: Event, loc: Loc) -> Any:
        self._lines.setdefault(loc, _line(event))
        self._values += 1
        if self._values > MAX_VALUES:
            fail(
                self._path,
                _line(event),
                f"more than {MAX_VALUES} values, which no matrix has; check that it is the right"
                " file",
            )
        self._refuse_unneeded(event, loc)
        if isinstance(event, MappingStartEvent):
            return self._mapping(loc)
        if isinstance(event, SequenceStartEvent):
            items: list[Any] = []
            while not isinstance(item := next(self._events), SequenceEndEvent):
                items.append(self._value(item, (*loc, len(items))))
            return items
        assert isinstance(event, ScalarEvent)
        return self._scalar(event)

    def _mapping(self, loc: Loc) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        while not isinstance(event := next(self._events), MappingEndEvent):
            key = self._scalar(event) if isinstance(event, ScalarEvent) else None
            if not isinstance(key, str):
                fail(self._path, _line(event), "a key must be text; quote it, or remove it")
            self._refuse_unneeded(event, loc)
            at = (*loc, key)
            if key in entries:
                fail(
                    self._path,
                    _line(event),
                    f"duplicate key {key[:60]!r}, first given in line {self._lines[at]}; keep one",
                )
            self._lines[at] = _line(event)
            entries[key] = self._value(next(self._events), at)
        return entries

    def _refuse_unneeded(self, event: Event, loc: Loc) -> None:
        if isinstance(event, AliasEvent) or getattr(event, "anchor", None):
            fail(
                self._path,
                _line(event),
                "anchors (&) and aliases (*) are not used in a matrix; write the value out, or"
                " quote the text",
            )
        if tag := getattr(event, "tag", None):
            fail(
                self._path,
                _line(event),
                f"the tag {str(tag)[:60]!r} is not used in a matrix; remove it, or quote the text",
            )
        if len(loc) > MAX_DEPTH:
            fail(
                self._path,
                _line(event),
                f"nested deeper than {MAX_DEPTH} levels, which no matrix is; look for a missing"
                " bracket",
            )

    def _scalar(self, event: ScalarEvent) -> str | int | float | bool | None:
        text = event.value
        if event.style is not None or event.tag:  # quoted or a block: always text
            return str(text)
        if text in _NULL:
            return None
        if text in _TRUE or text in _FALSE:
            return text in _TRUE
        if _INT.fullmatch(text):
            return int(text)
        if _MISLEADING.fullmatch(text):
            fail(
                self._path,
                _line(event),
                f"{text[:60]} is a number that readers take for another one; write plain decimal"
                " digits without leading zeros (at most 18), or quote it as text",
            )
        if _FLOAT.fullmatch(text):
            if not math.isfinite(number := float(text)):
                fail(
                    self._path,
                    _line(event),
                    f"{text[:60]} is beyond the range of numbers; write a smaller one",
                )
            return number
        return str(text)


def _line(event: Event) -> int:
    return int(event.start_mark.line) + 1
