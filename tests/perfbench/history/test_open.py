"""Opening a history: what is one, what is none, and what the one line says then."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import text

from nsa.installing import pip_install
from perfbench.errors import Exit, PerfbenchError
from perfbench.history import database, reading, tables, writing
from perfbench.history.database import Database, upgrade
from perfbench.history.store import Added, History
from tests.perfbench.history.made_runs import key, made_cell, made_run


def refusal(address: str | Path, *, create: bool = False, code: Exit = Exit.USAGE) -> str:
    with pytest.raises(PerfbenchError) as refused:
        History.open(address, create=create)
    line = str(refused.value)
    assert "\n" not in line and "Next: " in line
    assert refused.value.exit_code is code
    return line


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    assert refusal(path) == f"there is no history at {path}. Next: perfbench history init"
    assert refusal(f"sqlite:///{path}") == refusal(path)
    assert not path.exists()


@pytest.mark.parametrize("name", ["a b%20?x=1#y.db", "100%.db", "file:x.db", "ä.db", "\udcff.db"])
def test_a_path_is_taken_as_it_is(tmp_path: Path, name: str) -> None:
    """Its folder is made, too."""
    path = tmp_path / "new" / name
    with History.open(path, create=True) as history:
        history.add(made_run())
    assert [one.name for one in path.parent.iterdir()] == [name]
    with History.open(str(path)) as history:
        assert history.run("latest") == made_run()


def test_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for address in ("a.db", "sqlite:///b.db", ":memory:"):
        History.open(address, create=True).close()
    assert {one.name for one in tmp_path.iterdir()} == {"a.db", "b.db", ":memory:"}


def test_files_that_are_no_history(tmp_path: Path) -> None:
    made = {name: tmp_path / name for name in ("text", "empty", "other", "pipe")}
    made["text"].write_text("run_id,tok_per_s\n" * 100)
    made["empty"].touch()
    other = sqlite3.connect(made["other"])
    other.execute("CREATE TABLE albums (title)")
    other.close()
    os.mkfifo(made["pipe"])
    assert "is no SQLite database" in refusal(made["text"])
    assert "is no SQLite database" in refusal(made["text"], create=True)
    assert "is no history: it is empty. Next: perfbench history init" in refusal(made["empty"])
    assert "is no history: it has the tables albums" in refusal(made["other"])
    assert "is no history: it has the tables albums" in refusal(made["other"], create=True)
    assert "is no regular file" in refusal(made["pipe"])
    assert "is no regular file" in refusal(tmp_path, create=True)
    assert "cannot be opened" in refusal(made["text"] / "history.db", create=True)
    assert "cannot be opened" in refusal(tmp_path / ("x" * 300))
    for name in ("a\0b", "a\ud800b"):
        assert "cannot be opened: " in ascii(refusal(f"{tmp_path}/{name}", create=True))


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("mysql://root@localhost/x", "is on mysql, wanted sqlite or postgresql"),
        ("sqlite://", "names no file"),
        ("sqlite:///:memory:", "names no file"),
        ("postgresql+psycopg2://h/x", "wanted sqlite or postgresql"),
        ("postgresql:/h", "is no address of a database"),
        ("postgresql://h:port/x", "is no address of a database"),
    ],
)
def test_addresses_of_something_else(url: str, words: str) -> None:
    assert words in refusal(url)


def test_a_server_that_does_not_answer() -> None:
    """And a password that no message shows."""
    line = refusal("postgresql://me:secret@127.0.0.1:1/x", code=Exit.ENVIRONMENT)
    assert "does not answer" in line and "postgresql://me:***@127.0.0.1:1/x" in line
    assert "secret" not in line
    with pytest.raises(PerfbenchError, match="does not answer"):
        upgrade("postgresql://me@127.0.0.1:1/x")


def test_a_driver_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    line = refusal("postgresql://me@127.0.0.1:1/x")
    assert "needs psycopg" in line and line.endswith(f"Next: {pip_install('postgres')}")


@pytest.mark.parametrize("package", ["sqlalchemy", "alembic"])
def test_a_package_that_is_missing(package: str) -> None:
    program = f"""
import sys
sys.modules[{package!r}] = None
from perfbench.errors import PerfbenchError
try:
    from perfbench.history.store import History
except PerfbenchError as error:
    print(int(error.exit_code), error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("2 A history needs SQLAlchemy and alembic (")
    assert done.stdout.endswith(f"Next: {pip_install('history')}\n")


def test_damaged_files(tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    with History.open(path, create=True) as history:
        for day in range(10):
            history.add(made_run(day, *(made_cell(f"c{i}") for i in range(50))))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert "is damaged" in refusal(path, code=Exit.ENVIRONMENT)
    path.write_bytes(whole[:50])
    assert "is damaged" in refusal(path, code=Exit.ENVIRONMENT)
    path.write_bytes(whole[:4096] + b"\x7f" * (len(whole) - 4096))
    with (
        pytest.raises(PerfbenchError, match="is damaged .*Next: put a copy"),
        History.open(path) as history,
    ):
        history.runs()


def test_an_older_history_migrates(address: str) -> None:
    """It is refused until somebody migrates it, and then has what it had."""
    older = Database(database._url(address))
    older.migrate("0001")
    with older.write() as connection:
        writing.add(connection, made_run())
    older.close()
    line = refusal(address)
    assert "is a history of revision 0001, and this perfbench reads 0002" in line
    assert line.endswith("Next: perfbench history upgrade")
    assert refusal(address, create=True) == line
    assert upgrade(address) == ("0001", "0002")
    assert upgrade(address) == ("0002", "0002")
    with History.open(address) as history:
        assert history.revision == "0002"
        assert history.run("latest") == made_run()
        assert history.change_points() == history.decisions() == []


def test_a_newer_history_is_refused(history: History, address: str) -> None:
    with history._database.write() as connection:
        connection.execute(text("UPDATE perfbench_history SET version_num = '0815'"))
    assert "of revision '0815', which this perfbench does not know" in refusal(address)
    with pytest.raises(PerfbenchError, match="revision '0815', which this perfbench does not know"):
        upgrade(address)


def test_upgrade_of_what_is_no_history(tmp_path: Path) -> None:
    with pytest.raises(PerfbenchError, match="there is no history at"):
        upgrade(tmp_path / "history.db")
    (tmp_path / "empty").touch()
    with pytest.raises(PerfbenchError, match="is no history. Next: perfbench history init"):
        upgrade(tmp_path / "empty")
    assert (tmp_path / "empty").stat().st_size == 0


def test_create_leaves_a_history_as_it_is(history: History, address: str) -> None:
    history.add(made_run())
    with History.open(address, create=True) as again:
        assert again.keys() == [key()]


def test_the_migrations_make_the_tables(history: History) -> None:
    options = {"version_table": "perfbench_history", "compare_server_default": True}
    with history._database.read() as connection:
        context = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(context, tables.METADATA) == []


def test_a_writer_waits_and_then_gives_up(
    address: str, history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "WAIT_S", 1)
    with (
        History.open(address) as impatient,
        history._database.write(),
        pytest.raises(PerfbenchError, match="was being written by another process") as refused,
    ):
        impatient.add(made_run())
    assert refused.value.exit_code is Exit.ENVIRONMENT
    with History.open(address) as impatient:
        impatient.add(made_run())
    assert history.run("latest") == made_run()


def test_a_reader_that_stops_to_think_keeps_nobody_waiting(history: History, address: str) -> None:
    history.add(made_run(0))
    with History.open(address) as other:
        reader = history.every_series()
        next(reader)
        assert other.add(made_run(1)) is Added.NEW
        assert list(reader) == []


def test_a_reader_sees_one_state(postgres_address: str) -> None:
    """Of a run that is replaced between two of its queries, the run as it was; in SQLite a writer
    waits for its readers.
    """
    with (
        History.open(postgres_address, create=True) as history,
        History.open(postgres_address) as other,
    ):
        history.add(made_run(0))
        with history._database.read() as connection:
            ((number, info),) = reading.named(connection, "run-000")
            other.add(made_run(0, made_cell("c1"), content_sha256="d" * 64, report="later"))
            assert reading.whole_run(connection, number, info) == made_run(0)


def test_a_server_ends_with_a_killed_process(postgres_address: str) -> None:
    """``postgres_address``: where a server can run."""
    program = (
        "import time; from tests.perfbench.history.postgres import running\n"
        "with running() as server: print(server.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        server = int(parent.stdout.readline())
        assert is_running(server)
        parent.kill()
    end = time.monotonic() + 30
    while is_running(server) and time.monotonic() < end:
        time.sleep(0.05)
    assert not is_running(server)


def is_running(pid: int) -> bool:
    """A process that nobody waits for is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
