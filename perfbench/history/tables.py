"""The tables of a history, as the newest migration leaves them.

A point is one metric of one cell in one run: eight numbers, in the order of (series, time), so that
a series is one range of the primary key. What repeats is stored once and found by a digest: names
may be longer than a B-tree's entry.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Dialect,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
)

from perfbench.errors import Exit, PerfbenchError

CHUNK = 500  # values of one `IN`
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)
ESCAPE = "\ufffe"  # no character of any script
UNSTORABLE = re.compile("[\ud800-\udfff\ufffe]")
ESCAPED = re.compile("\ufffe([0-9a-f]{4})")


def digest(*parts: object) -> str:
    """sha256 of parts that JSON knows, mappings by their items: equal parts, equal digest."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def chunks(values: Iterable[Any]) -> Iterator[list[Any]]:
    """At most CHUNK values each."""
    left = iter(values)
    while some := list(islice(left, CHUNK)):
        yield some


def stored(text: str) -> str:
    """As `AnyText` stores it."""
    return UNSTORABLE.sub(lambda found: f"{ESCAPE}{ord(found[0]):04x}", text)


class AnyText(TypeDecorator[str]):
    """Text with lone surrogates, which no UTF-8 holds: each is stored as U+FFFE and four digits.

    PerfbenchError: NUL, which PostgreSQL does not store.
    """

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        if value is None:
            return None
        if "\0" in value:
            at = value.index("\0")
            raise PerfbenchError(
                Exit.USAGE,
                f"{value[max(0, at - 40) : at + 20]!r} holds a NUL character, wanted text without."
                " Next: remove it where the text is made",
            )
        return stored(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> str | None:
        if value is None or ESCAPE not in value:
            return value
        return ESCAPED.sub(lambda found: chr(int(found[1], 16)), value)


def aware(time: datetime) -> datetime:
    """The time. PerfbenchError: it has no zone."""
    if time.utcoffset() is None:
        raise PerfbenchError(Exit.USAGE, f"{time} has no time zone, wanted UTC. Next: give it one")
    return time


class UtcMicroseconds(TypeDecorator[datetime]):
    """An aware time as microseconds since 1970, which both databases compare exactly.

    PerfbenchError: a time without a zone.
    """

    impl = BigInteger
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> int | None:
        return None if value is None else (aware(value) - EPOCH) // MICROSECOND

    def process_result_value(self, value: int | None, dialect: Dialect) -> datetime | None:
        return None if value is None else EPOCH + value * MICROSECOND


class JsonText(TypeDecorator[Any]):
    """A mapping or a list as ASCII JSON, which holds every character as an escape."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        if value is None:
            return None
        return json.dumps(dict(value) if isinstance(value, Mapping) else value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        return None if value is None else json.loads(value)


def _id() -> Column[int]:
    return Column("id", Integer, primary_key=True)


def _digest() -> Column[str]:
    return Column("digest", Text, nullable=False, unique=True)


def _one(name: str, table: str, *, null: bool = False, cascade: bool = False) -> Column[int]:
    """A reference to ``table``; with ``cascade`` the row goes when that one goes."""
    key = ForeignKey(f"{table}.id", ondelete="CASCADE" if cascade else None)
    return Column(name, Integer, key, nullable=null)


METADATA = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

metrics = Table(
    "metrics",
    METADATA,
    _id(),
    _digest(),  # of the name
    Column("name", AnyText, nullable=False),
    Column("title", AnyText, nullable=False),
    Column("unit", AnyText, nullable=False),
    Column("better", Text, nullable=False),
)
segments = Table(
    "segments", METADATA, _id(), _digest(), Column("mapping", JsonText, nullable=False)
)
texts = Table(  # reasons and verdicts, which thousands of points share
    "texts", METADATA, _id(), _digest(), Column("body", AnyText, nullable=False)
)
definitions = Table(  # what a cell is, which most of its runs share
    "definitions",
    METADATA,
    _id(),
    _digest(),
    Column("axes", JsonText, nullable=False),
    Column("reproduce", AnyText, nullable=False),
    Column("config_sha256", AnyText),
)
cells = Table(
    "cells",
    METADATA,
    _id(),
    _digest(),  # of the three below
    Column("suite", AnyText, nullable=False),
    Column("card", AnyText, nullable=False),
    Column("cell_id", AnyText, nullable=False),
)
series = Table(
    "series",
    METADATA,
    _id(),
    _one("cell", "cells"),
    _one("metric", "metrics"),
    UniqueConstraint("cell", "metric"),
)
runs = Table(
    "runs",
    METADATA,
    _id(),
    _digest(),  # of run_id
    Column("run_id", AnyText, nullable=False),
    Column("content_sha256", AnyText, nullable=False),
    Column("origin", AnyText, nullable=False),
    Column("suite", AnyText, nullable=False),
    Column("card", AnyText, nullable=False),
    Column("measured_utc", UtcMicroseconds, nullable=False, index=True),
    Column("commit_sha", AnyText),
    Column("commit_utc", UtcMicroseconds),
    Column("branch", AnyText),
    Column("is_dirty", Boolean),
    _one("segment", "segments"),
    Column("command", AnyText, nullable=False),
    Column("headline", AnyText, nullable=False),
    Column("exit_code", Integer),
    Column("injections", JsonText, nullable=False),
    Column("folder", AnyText, nullable=False),
)
reports = Table(  # apart, so that a list of runs reads no reports
    "reports",
    METADATA,
    Column("run", ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True, autoincrement=False),
    Column("body", AnyText, nullable=False),
)
outcomes = Table(  # of a cell in a run
    "outcomes",
    METADATA,
    _one("cell", "cells"),
    _one("run", "runs", cascade=True),
    Column("place", Integer, nullable=False),  # among the run's cells
    _one("verdict", "texts", null=True),
    _one("reason", "texts"),
    _one("definition", "definitions"),
    PrimaryKeyConstraint("cell", "run", postgresql_include=["verdict", "reason"]),
    Index(None, "run"),
    sqlite_with_rowid=False,
)
points = Table(
    "points",
    METADATA,
    _one("series", "series"),
    Column("measured_utc", UtcMicroseconds, nullable=False),  # the run's
    _one("run", "runs", cascade=True),
    Column("value", Double),
    Column("low", Double),
    Column("high", Double),
    Column("count", Integer, nullable=False),
    _one("reason", "texts", null=True),
    # A series is read from the index alone: a run's points lie together in PostgreSQL's table.
    PrimaryKeyConstraint(
        "series",
        "measured_utc",
        "run",
        postgresql_include=["value", "low", "high", "count", "reason"],
    ),
    Index(None, "run"),
    sqlite_with_rowid=False,
)
changes = Table(
    "changes",
    METADATA,
    _id(),
    _one("series", "series"),
    Column("kind", Text, nullable=False),
    Column("before_run_id", AnyText, nullable=False),
    _one("run", "runs", cascade=True),
    Column("before_commit", AnyText),
    Column("commit_sha", AnyText),
    Column("measured_utc", UtcMicroseconds, nullable=False),
    Column("size_pct", Double, nullable=False),
    Column("low_pct", Double, nullable=False),
    Column("high_pct", Double, nullable=False),
    Column("is_worse", Boolean),
    Column("p", Double),
    Index(None, "series"),
    Index(None, "run"),
)
decisions = Table(
    "decisions",
    METADATA,
    _id(),
    Column("kind", Text, nullable=False),
    _one("run", "runs", cascade=True),
    Column("note", AnyText, nullable=False),
    Column("author", AnyText, nullable=False),
    Column("created_utc", UtcMicroseconds, nullable=False),
    Column("suite", AnyText),  # null matches every value, here and below
    Column("card", AnyText),
    Column("cell_id", AnyText),
    Column("metric", AnyText),
    Index(None, "run"),
)
