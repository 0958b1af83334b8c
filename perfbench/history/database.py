"""A database that holds a history: its address, its transactions, its revision, its errors."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote

from nsa.installing import pip_install
from perfbench.errors import Exit, PerfbenchError
from perfbench.text import shown_address

try:
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory
    from sqlalchemy import (
        URL,
        Column,
        Connection,
        Engine,
        MetaData,
        Table,
        Text,
        create_engine,
        event,
        exc,
        func,
        inspect,
        make_url,
        select,
    )
except ImportError as error:
    raise PerfbenchError(
        Exit.USAGE,
        f"A history needs SQLAlchemy and alembic ({error}). Next: {pip_install('history')}",
    ) from error

VERSIONS = Table("perfbench_history", MetaData(), Column("version_num", Text))
WAIT_S = 60  # of a writer for another one
CONNECT_S = 10
LOCK = 0x706572666265  # of all writers of one PostgreSQL database: 'perfbe' in ASCII
INIT = "perfbench history init"
QUOTED = re.compile(r"\"[^\"]*\"|'[^']*'")


class Database:
    """An open database. A reader sees one state of it throughout its transaction; writers come one
    after the other.
    """

    def __init__(self, url: URL) -> None:
        self.name = _name(url)
        self._engine = _engine(url, self.name)
        self._reads = self._engine
        if url.get_backend_name() == "postgresql":
            self._reads = self._engine.execution_options(isolation_level="REPEATABLE READ")

    @classmethod
    def open(cls, address: str | Path, *, create: bool = False) -> Self:
        """The history there, of this revision; with ``create`` made where there is none.

        PerfbenchError: no history there, another revision, or the database cannot be reached.
        """
        url = _url(address)
        _check_file(url, create=create)
        made = cls(url)
        with ExitStack() as refused:
            refused.callback(made.close)
            made._check(create=create)
            refused.pop_all()
        return made

    def close(self) -> None:
        self._engine.dispose()

    @contextmanager
    def read(self) -> Iterator[Connection]:
        with self.plain_errors(), self._reads.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction that no other writer's overlaps; everything of it is stored, or nothing."""
        with self.plain_errors(), self._engine.connect() as connection:
            connection = connection.execution_options(writes=True)
            with connection.begin():
                if connection.dialect.name == "postgresql":
                    wait = func.set_config("lock_timeout", f"{WAIT_S}s", True)
                    connection.execute(select(wait))
                    connection.execute(select(func.pg_advisory_xact_lock(LOCK)))
                yield connection

    @property
    def revision(self) -> str:
        """Of the tables, e.g. '0002'."""
        with self.read() as connection:
            return _revision(connection) or ""

    def _check(self, *, create: bool) -> None:
        with self.read() as connection:
            found, tables = _revision(connection), inspect(connection).get_table_names()
        if found is None and (tables or not create):
            held = f"it has the tables {', '.join(sorted(tables)[:5])}" if tables else "it is empty"
            after = "name a database of its own" if tables else INIT
            raise PerfbenchError(Exit.USAGE, f"{self.name} is no history: {held}. Next: {after}")
        if found is None:
            self.migrate()
        elif found != newest():
            raise self._refused(found)

    def _refused(self, found: str) -> PerfbenchError:
        if found in _known():
            problem = f"is a history of revision {found}, and this perfbench reads {newest()}"
            return PerfbenchError(
                Exit.USAGE, f"{self.name} {problem}. Next: perfbench history upgrade"
            )
        problem = f"is a history of revision {found!r}, which this perfbench does not know"
        after = f"install the perfbench that wrote it; this one reads up to {newest()}"
        return PerfbenchError(Exit.USAGE, f"{self.name} {problem}. Next: {after}")

    def migrate(self, to: str = "head") -> str:
        """The revision before; all steps are one transaction.

        PerfbenchError: this perfbench does not know the revision that is there.
        """
        with self.write() as connection:
            before = _revision(connection)
            if before is not None and before not in _known():
                raise self._refused(before)
            config = _config()
            config.attributes |= {"connection": connection, "version_table": VERSIONS.name}
            command.upgrade(config, to)
            return before or ""

    @contextmanager
    def plain_errors(self) -> Iterator[None]:
        """What the database's driver says, in one line that says what to do."""
        try:
            yield
        except exc.StatementError as error:
            if isinstance(error.orig, PerfbenchError):
                raise error.orig from error
            if not isinstance(error, exc.DBAPIError):
                raise
            raise _plain(self.name, error) from error


def upgrade(address: str | Path) -> tuple[str, str]:
    """Migrates the history there to the newest revision; (revision before, revision now).

    PerfbenchError: as `Database.open`, but for an older revision.
    """
    url = _url(address)
    _check_file(url, create=False)
    database = Database(url)
    try:
        if not database.revision:
            raise PerfbenchError(Exit.USAGE, f"{database.name} is no history. Next: {INIT}")
        return database.migrate(), newest()
    finally:
        database.close()


def missing_folder(address: str | Path) -> Path | None:
    """Where SQLite's file of this address would lie, and no folder is."""
    url = _url(address)
    if url.get_backend_name() != "sqlite":
        return None
    folder = Path(url.database or "").parent
    try:
        return None if folder.exists() else folder
    except (OSError, ValueError):
        return None  # `open` says what is wrong with it


def newest() -> str:
    """The revision of `perfbench.history.tables`."""
    return ScriptDirectory.from_config(_config()).get_current_head() or ""


def _known() -> set[str]:
    return {one.revision for one in ScriptDirectory.from_config(_config()).walk_revisions()}


def _config() -> Config:
    config = Config()
    folder = str(Path(__file__).with_name("migrations"))
    config.set_main_option("script_location", folder.replace("%", "%%"))
    return config


def _revision(connection: Connection) -> str | None:
    """Null where there is no history."""
    if not inspect(connection).has_table(VERSIONS.name):
        return None
    return connection.execute(select(VERSIONS.c.version_num)).scalar()


def _url(address: str | Path) -> URL:
    """USAGE: an address that no database has; the message holds none of its secrets."""
    if isinstance(address, str):
        address = address.strip()
    if isinstance(address, Path) or not (
        "://" in address or re.match(r"[A-Za-z][\w+.-]*:", address)
    ):
        return URL.create("sqlite", database=str(Path(address).absolute()))
    shown = shown_address(address)
    try:
        url = make_url(address)
        if address.count("@") > 1 and url.get_backend_name() != "sqlite":
            raise PerfbenchError(
                Exit.USAGE, f"{shown} holds two @. Next: write the @ in a password as %40"
            )
        host, _, behind = address.partition("://")[2].partition("/")
        if "@" in behind and "@" not in host and url.get_backend_name() != "sqlite":
            # a / in a user or a password, which is read as the end of the host
            raise PerfbenchError(
                Exit.USAGE, f"{shown} has its @ behind a /. Next: write that / as %2F"
            )
        if "\0" in unquote(address.encode().decode()):
            raise ValueError("libpq ends there")
        if url.get_backend_name() in ("postgresql", "postgres"):
            postgresql = url.set(drivername="postgresql+psycopg")
            postgresql.get_dialect()().create_connect_args(postgresql)
    except (exc.ArgumentError, ValueError):
        wanted = "a path, sqlite:///PATH or postgresql://USER@HOST/NAME"
        # `from` would show what the parser was given.
        raise PerfbenchError(
            Exit.USAGE, f"{shown} is no address of a database. Next: give {wanted}"
        ) from None
    if url.drivername in ("postgresql", "postgres", "postgresql+psycopg"):
        return url.set(drivername="postgresql+psycopg")
    if url.drivername in ("sqlite", "sqlite+pysqlite"):
        if url.database in (None, "", ":memory:"):
            raise PerfbenchError(
                Exit.USAGE, f"{shown} names no file. Next: give sqlite:///PATH, or a path"
            )
        return URL.create("sqlite", database=str(Path(url.database or "").absolute()))
    raise PerfbenchError(
        Exit.USAGE,
        f"{shown} is on {url.drivername}, wanted sqlite or postgresql. Next: give a"
        " path or postgresql://USER@HOST/NAME",
    )


def _name(url: URL) -> str:
    """As messages print it: a file's path, or an address without its secrets."""
    if url.get_backend_name() == "sqlite":
        return shown_address(str(url.database))
    whole = url.set(drivername=url.get_backend_name())
    return shown_address(whole.render_as_string(hide_password=True))


def _check_file(url: URL, *, create: bool) -> None:
    """SQLite would make a missing file, and wait for ever at a pipe."""
    if url.get_backend_name() != "sqlite":
        return
    path, name = Path(url.database or ""), _name(url)
    try:
        os.fsencode(path)
        if "\0" in str(path):
            raise ValueError("its name holds a NUL character")
        if path.exists() and not path.is_file():
            raise PerfbenchError(
                Exit.USAGE, f"{name} is no regular file. Next: name the history's file"
            )
        if not create and not path.exists():
            raise PerfbenchError(Exit.USAGE, f"there is no history at {name}. Next: {INIT}")
        if create:
            path.parent.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        problem = error.strerror if isinstance(error, OSError) else str(error)
        raise PerfbenchError(
            Exit.USAGE, f"{name} cannot be opened: {problem}. Next: name another file"
        ) from error


def _engine(url: URL, name: str) -> Engine:
    if url.get_backend_name() == "sqlite":
        engine = create_engine(url, connect_args={"timeout": WAIT_S})
        event.listen(engine, "connect", _on_connect)
        event.listen(engine, "begin", _on_begin)
        return engine
    try:
        return create_engine(
            url,
            isolation_level="READ COMMITTED",  # a writer sees what the one before it stored
            connect_args={"connect_timeout": CONNECT_S, "client_encoding": "utf8"},
        )
    except ImportError as error:
        raise PerfbenchError(
            Exit.USAGE,
            f"{name} needs psycopg ({error}). Next: {pip_install('postgres')}",
        ) from error


def _on_connect(connection: Any, record: Any) -> None:
    connection.isolation_level = None  # else sqlite3 begins transactions by itself
    connection.execute("PRAGMA foreign_keys=ON")


def _on_begin(connection: Connection) -> None:
    # A writer that begins as a reader would fail, not wait, where another one writes.
    writes = connection.get_execution_options().get("writes")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


# (in what the driver says, what it means, the exit code, what to do)
MEANINGS = (
    (
        "invalid connection option",
        "has an option that PostgreSQL does not know",
        Exit.USAGE,
        "correct the address, and write &, =, ? and % in a password as %26, %3D, %3F and %25",
    ),
    ("file is not a database", "is no SQLite database", Exit.USAGE, "name the history's file"),
    (
        "malformed",
        "is damaged",
        Exit.ENVIRONMENT,
        "put a copy of it in its place, or begin another history",
    ),
    (
        "database is locked",
        f"was being written by another process for {WAIT_S} s",
        Exit.ENVIRONMENT,
        "try again",
    ),
    (
        "lock timeout",
        f"was being written by another process for {WAIT_S} s",
        Exit.ENVIRONMENT,
        "try again",
    ),
    (
        "readonly database",
        "may not be written",
        Exit.USAGE,
        "give yourself the right to write the file and its folder",
    ),
    ("is full", "has no room left on its disk", Exit.ENVIRONMENT, "make room"),
    (
        "unable to open database file",
        "cannot be opened",
        Exit.USAGE,
        "look at the rights of the file and its folder",
    ),
)


def _plain(name: str, error: exc.DBAPIError) -> PerfbenchError:
    said = " ".join(str(error.orig).split())
    if "=***" in name:  # it may quote what belongs to a password with & or ?
        said = QUOTED.sub(lambda found: found[0] if found[0][1:-1] in name else '"***"', said)
    for words, meaning, code, after in MEANINGS:
        if words in said:
            return PerfbenchError(code, f"{name} {meaning} ({said}). Next: {after}")
    if isinstance(error, exc.OperationalError):
        return PerfbenchError(
            Exit.ENVIRONMENT, f"{name} does not answer: {said}. Next: check the address and server"
        )
    return PerfbenchError(
        Exit.ENVIRONMENT, f"{name} refused: {said}. Next: check that nobody else changes its tables"
    )
