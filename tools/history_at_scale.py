"""How long a history of 10 million points takes to answer, on SQLite and on PostgreSQL.

    python -m tools.history_at_scale --write docs/history-scale.md

Builds each history in a temporary folder, run after run as months would, 300 cells of 13 metrics;
reads it cold (nothing of it in a cache of the system or the server) and warm. PostgreSQL's server
is Debian's, started for this on loopback.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import sqlalchemy
from sqlalchemy import (
    BigInteger,
    Connection,
    Engine,
    MetaData,
    create_engine,
    event,
    func,
    insert,
    literal,
    select,
    table,
)

from perfbench.history import (
    METRICS,
    HistoryCell,
    HistoryRun,
    MeasuredValue,
    RunInfo,
    SeriesKey,
    make_history,
    open_history,
)
from tests.perfbench.history.postgres import Server, running

if TYPE_CHECKING:
    from perfbench.history import History

CELLS = 300
TIMES = 20  # a read is repeated
GOAL_MS = 200
BUSY = ": other processes waited for the CPUs, too, and the worst times are theirs as well"
FIRST = datetime(2019, 1, 1, 2, tzinfo=UTC)
Forget = Callable[[], None]  # empties the caches
Read = Callable[["History"], object]


@dataclass(frozen=True)
class TimedRead:
    """Milliseconds of a read, one a repetition."""

    read: str
    cold_ms: list[float]
    warm_ms: list[float]


@dataclass(frozen=True)
class MeasuredHistory:
    """What was found of one database."""

    database: str
    points: int
    size: int  # bytes
    build_s: float
    add_s: list[float]  # of a run by History.add, on top
    reads: list[TimedRead]
    loads: list[float]  # of the system over a minute, before the reads and after


def first_run() -> HistoryRun:
    info = RunInfo(
        run_id="20190101-020000-0",
        content_sha256="0" * 64,
        origin="perfbench",
        suite="nightly",
        card="h200",
        measured_utc=FIRST,
        commit="0" * 40,
        segment={"torch": "2.13.0", "triton": "3.7.1", "driver": "580.65.06", "method": "3"},
        branch="main",
        headline="300 PASS",
        report="# A report\n" * 500,
    )
    measured = {name: MeasuredValue(100.0, 99.0, 101.0, 5) for name in METRICS}
    cells = tuple(
        HistoryCell(
            cell_id=f"fwdbwd/triton/b8-s{512 << number % 8}-h64-{number}",
            axes={"path": "triton", "batch": 8, "seq": 512 << number % 8, "number": number},
            verdict="PASS",
            reason=f"{number % 40 / 10} % within the band",
            reproduce=f"perfbench run matrices/nightly.yaml --only {number}",
            measured=measured,
        )
        for number in range(CELLS)
    )
    return HistoryRun(info, cells)


def build(engine: Engine, address: str, runs: int) -> None:
    """The first run by `History.add`; the others as its copies with other numbers, in order."""
    history, _ = make_history(address)
    with history:
        history.add(first_run())
    tables = MetaData()
    tables.reflect(engine)
    with engine.begin() as connection:
        if engine.dialect.name == "postgresql":  # the keys are right, and their check takes hours
            role = func.set_config("session_replication_role", "replica", True)
            connection.execute(select(role))
        (first,) = connection.execute(select(tables.tables["runs"])).mappings().all()
        for number in range(1, runs):
            add_copy(connection, tables, dict(first), number)
            if number % 500 == 0:
                print(f"{number} of {runs} runs", file=sys.stderr)


def add_copy(
    connection: Connection, tables: MetaData, first: dict[str, object], number: int
) -> None:
    names = ("runs", "outcomes", "points", "series", "reports")
    runs, outcomes, points, series, reports = (tables.tables[name] for name in names)
    at = int((FIRST + timedelta(days=number)).timestamp()) * 1_000_000
    run_id = f"run-{number}"
    row = {name: value for name, value in first.items() if name != "id"}
    row |= {"run_id": run_id, "digest": f"{number:064x}", "measured_utc": at}
    row |= {"commit_sha": f"{number:040x}", "content_sha256": f"{number:064x}"}
    made = connection.execute(insert(runs).values(row)).inserted_primary_key
    (run,) = made or (0,)
    body = literal("# A report\n" * 500)
    connection.execute(insert(reports).values(run=run, body=body))
    columns = [one for one in outcomes.c if one.name != "run"]
    copied = select(*columns, literal(run).label("run")).where(outcomes.c.run == first["id"])
    names = [*(one.name for one in columns), "run"]
    connection.execute(insert(outcomes).from_select(names, copied))
    # Numbers without a pattern that a page could be compressed by.
    value = 100.0 + (series.c.id * 7919 + number * 104_729) % 10_007 / 1000.0
    time = literal(at, BigInteger)
    copied = select(series.c.id, time, literal(run), value, value - 1.25, value + 1.25, literal(5))
    names = ["series", "measured_utc", "run", "value", "low", "high", "count"]
    connection.execute(insert(points).from_select(names, copied))


def drop_from_cache(*files: Path) -> None:
    """The system forgets what it holds of them."""
    for file in files:
        if file.is_file():
            number = os.open(file, os.O_RDONLY)
            os.fsync(number)
            os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(number)


@contextmanager
def on_sqlite(folder: Path) -> Iterator[tuple[str, Engine, Forget]]:
    path = folder / "history.db"
    engine = create_engine(f"sqlite:///{path}")

    @event.listens_for(engine, "connect")
    def _hurry(connection, record) -> None:
        for pragma in ("cache_size=-3000000", "journal_mode=OFF", "synchronous=OFF"):
            connection.execute(f"PRAGMA {pragma}")

    yield f"sqlite:///{path}", engine, lambda: drop_from_cache(path)


@contextmanager
def on_postgres(server: Server) -> Iterator[tuple[str, Engine, Forget]]:
    def forget() -> None:
        server.stop("fast")
        drop_from_cache(*server.data.rglob("*"))
        server.start()

    address = f"{server.address}postgres"
    yield address, create_engine(address.replace("sql:", "sql+psycopg:")), forget


def timed(history: History, read: Read) -> float:
    begin = time.perf_counter()
    read(history)
    return (time.perf_counter() - begin) * 1000


def read_all(address: str, forget: Forget, keys: list[SeriesKey]) -> list[TimedRead]:
    """Each read cold, with a history that is just open, then warm."""

    def of_cell(key: SeriesKey) -> Read:
        names = {"suite": key.suite, "card": key.card, "cell_id": key.cell_id}
        return lambda history: list(history.every_series(**names))

    reads: dict[str, list[Read]] = {
        "one series": [lambda history, key=key: history.series(key) for key in keys],
        f"the {len(METRICS)} series of a cell": [of_cell(key) for key in keys],
        "the newest run with its cells": [lambda history: history.run("latest")] * TIMES,
    }
    found = []
    for name, every in reads.items():
        cold = []
        for read in every:
            forget()
            with open_history(address) as history:
                cold.append(timed(history, read))
        with open_history(address) as history:
            for read in every:
                read(history)
            found.append(TimedRead(name, cold, [timed(history, read) for read in every]))
        print(name, statistics.median(cold), file=sys.stderr)
    return found


def measure(address: str, engine: Engine, forget: Forget, wanted: int) -> MeasuredHistory:
    runs = math.ceil(wanted / CELLS / len(METRICS))
    begin = time.perf_counter()
    build(engine, address, runs)
    build_s = time.perf_counter() - begin
    add_s = []
    with open_history(address) as history:
        for number in range(5):
            run = first_run()
            at = FIRST + timedelta(days=runs + number)
            info = replace(run.info, run_id=f"added-{number}", measured_utc=at)
            add_s.append(timed(history, lambda h, i=info, r=run: h.add(replace(r, info=i))) / 1000)
        keys = random.Random(0).sample(history.keys(), TIMES)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        if engine.dialect.name == "postgresql":  # autovacuum does it within minutes
            connection.exec_driver_sql("VACUUM ANALYZE")
            query = select(func.version(), func.pg_database_size(func.current_database()))
            version, size = connection.execute(query).one()
            version = " ".join(version.split()[:2])
        else:
            version = f"SQLite {connection.dialect.dbapi.sqlite_version}"
            size = Path(engine.url.database or "").stat().st_size
        points = connection.execute(select(func.count()).select_from(table("points"))).scalar_one()
    engine.dispose()
    before = os.getloadavg()[0]
    reads = read_all(address, forget, keys)
    loads = [before, os.getloadavg()[0]]
    return MeasuredHistory(version, points, size, build_s, add_s, reads, loads)


def markdown(found: list[MeasuredHistory], runs: int) -> str:
    """The page."""
    cpu = next(
        (
            line.partition(": ")[2]
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    loads = [load for one in found for load in one.loads]
    lines = [
        "# How a history scales",
        "",
        f"{runs:,} runs of {CELLS} cells with {len(METRICS)} metrics each, measured on"
        f" {time.strftime('%Y-%m-%d', time.gmtime())}: {cpu}, {os.cpu_count()} CPUs that other"
        f" processes shared, Python {platform.python_version()}, SQLAlchemy"
        f" {sqlalchemy.__version__}. `python -m tools.history_at_scale --write"
        " docs/history-scale.md` measures it again and writes this page.",
        "",
        f"Cold: nothing of the database is in a cache of the system or the server. Each read was"
        f" repeated {TIMES} times, each time of another series; the time contains the objects that"
        f" Python gets, and not the opening. The system's load was {min(loads):.1f} to"
        f" {max(loads):.1f}{BUSY if max(loads) > 2 * (os.cpu_count() or 1) else ''}.",
        "",
        "| database | read | cold, median ms | cold, worst ms | warm, median ms | warm, worst ms |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for one in found:
        for row in one.reads:
            numbers = (
                f"{how(times):,.1f}"
                for times in (row.cold_ms, row.warm_ms)
                for how in (statistics.median, max)
            )
            lines.append(f"| {one.database} | {row.read} | {' | '.join(numbers)} |")
    lines += [
        "",
        "| database | points | GB | bytes a point | built in s | one more run of 3,900 points, s |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for one in found:
        add_s, a_point = statistics.median(one.add_s), one.size / one.points
        lines.append(
            f"| {one.database} | {one.points:,} | {one.size / 1e9:.2f} | {a_point:.0f} |"
            f" {one.build_s:.0f} | {add_s:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--points", type=int, default=10_000_000)
    parser.add_argument("--write", type=Path, default=None, metavar="FILE")
    options = parser.parse_args()
    found = []
    with (
        tempfile.TemporaryDirectory(prefix="perfbench-history-") as folder,
        on_sqlite(Path(folder)) as (address, engine, forget),
    ):
        found.append(measure(address, engine, forget, options.points))
    with running() as server, on_postgres(server) as (address, engine, forget):
        found.append(measure(address, engine, forget, options.points))
    page = markdown(found, math.ceil(options.points / CELLS / len(METRICS)))
    print(page)
    if options.write is not None:
        options.write.write_text(page, encoding="utf-8")
    slowest = max(max(one.reads[0].cold_ms) for one in found)
    return 0 if slowest < GOAL_MS else 1


if __name__ == "__main__":
    raise SystemExit(main())
