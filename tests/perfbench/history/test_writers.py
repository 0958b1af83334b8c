"""Writers in processes of their own: several at once, and some that are killed."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from multiprocessing.queues import Queue

import pytest
from sqlalchemy import event, text

from perfbench.history.nouns import ChangeKind, ChangePoint, HistoryRun, MeasuredValue
from perfbench.history.store import Added, History
from tests.perfbench.history.made_runs import FIRST, key, made_cell, made_run

FORK = multiprocessing.get_context("fork")  # each opens a connection of its own
BOTH = {"tok_per_s": MeasuredValue(1.5, 1.0, 2.0, 3), "step_ms": MeasuredValue(None, reason="x")}


def run_of(day: int, content: str = "a" * 64, cells: int = 40) -> HistoryRun:
    made = (made_cell(f"c{i}", BOTH, reason=f"{day}-{i}") for i in range(cells))
    return made_run(day, *made, content_sha256=content)


def add_all(address: str, days: list[int], results: Queue[tuple[int, str]]) -> None:
    with History.open(address, create=True) as history:
        for day in days:
            results.put((day, history.add(run_of(day)).value))


def test_writers_at_once(address: str) -> None:
    """The same and different runs, in different orders, into a history that none of them found."""
    results: Queue[tuple[int, str]] = FORK.Queue()
    orders = [list(range(8)), list(range(7, -1, -1)), [3, 100], [200, 3]]
    writers = [FORK.Process(target=add_all, args=(address, days, results)) for days in orders]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0] * len(writers)
    found = [results.get() for days in orders for _ in days]
    new = Counter(day for day, what in found if what == Added.NEW)
    assert new == dict.fromkeys([*range(8), 100, 200], 1)
    assert Counter(what for _, what in found) == {Added.NEW: 10, Added.SAME: 10}
    with History.open(address) as history:
        assert len(history.runs()) == 10
        for day in new:
            assert history.run(f"run-{day:03d}") == run_of(day)
        check_whole(history)


def add_and_die(address: str, run: HistoryRun, statement: int) -> None:
    """Killed before its ``statement``-th statement that writes, or else before it commits."""
    with History.open(address) as history:
        left = statement

        def before(connection, cursor, sql: str, *_: object) -> None:
            nonlocal left
            left -= sql.startswith(("INSERT", "UPDATE", "DELETE"))
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

        engine = history._database._engine
        event.listen(engine, "before_cursor_execute", before)
        event.listen(engine, "commit", lambda _: os.kill(os.getpid(), signal.SIGKILL))
        history.add(run)


def check_whole(history: History) -> None:
    """Nothing of a run without the run, nothing of it missing."""
    orphans = "SELECT count(*) FROM {0} WHERE run NOT IN (SELECT id FROM runs)"
    with history._database.read() as connection:
        for table in ("points", "outcomes", "reports"):
            assert connection.execute(text(orphans.format(table))).scalar() == 0
        points = connection.execute(text("SELECT count(*) FROM points")).scalar()
        if connection.dialect.name == "sqlite":
            assert connection.execute(text("PRAGMA integrity_check")).scalar() == "ok"
            assert connection.execute(text("PRAGMA foreign_key_check")).all() == []
    cells = [cell for _, cell in history.cells()]
    assert points == sum(len(cell.measured) for cell in cells)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_writer_killed_at_each_statement(history: History, address: str, replaced: bool) -> None:
    """A new run is not there, and of one that would be replaced the old content is."""
    before = run_of(0, cells=2)
    history.add(before)
    run = run_of(0 if replaced else 1, content="b" * 64, cells=3)
    history._database.close()  # no connection is shared with the children
    for statement in range(12):
        child = FORK.Process(target=add_and_die, args=(address, run, statement))
        child.start()
        child.join()
        assert child.exitcode == -signal.SIGKILL
        assert [history.run(info.run_id) for info in history.runs()] == [before]
        history._database.close()
    check_whole(history)
    assert history.add(run) is (Added.REPLACED if replaced else Added.NEW)
    assert history.run(run.info.run_id) == run
    check_whole(history)


def add_for_ever(address: str, first: int) -> None:
    with History.open(address) as history:
        for day in range(first, first + 1000):
            history.add(run_of(day))
            history.add(run_of(day, content="b" * 64, cells=20))


def test_writers_killed_at_random_moments(history: History, address: str) -> None:
    rng = random.Random(18)
    history._database.close()
    for first in range(0, 6000, 1000):
        child = FORK.Process(target=add_for_ever, args=(address, first))
        child.start()
        while f"run-{first:03d}" not in {info.run_id for info in history.runs()}:
            assert child.is_alive()
            history._database.close()
        time.sleep(rng.uniform(0, 0.15))
        child.kill()
        child.join()
    check_whole(history)
    found = history.runs()
    assert len(found) >= 6
    for info in found:
        cells = 20 if info.content_sha256 == "b" * 64 else 40
        day = int(info.run_id.removeprefix("run-"))
        assert history.run(info.run_id) == run_of(day, info.content_sha256, cells)
        history.add(run_of(day, content="c" * 64))
    check_whole(history)


def report(address: str, change: ChangePoint, results: Queue[int]) -> None:
    with History.open(address) as history:
        results.put(len(history.report_changes([change])))


def test_of_two_that_find_a_change_one_reports_it(history: History, address: str) -> None:
    for day in range(2):
        history.add(made_run(day))
    before, after = (made_run(day).info for day in range(2))
    change = ChangePoint(
        *(key(), ChangeKind.STEP, before.run_id, after.run_id, before.commit, after.commit),
        *(after.measured_utc, -5.0, -6.0, -4.0, True, 0.01),
    )
    assert after.measured_utc > FIRST
    history._database.close()
    results: Queue[int] = FORK.Queue()
    children = [FORK.Process(target=report, args=(address, change, results)) for _ in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * len(children)
    assert sorted(results.get() for _ in children) == [0, 0, 0, 1]
    assert history.change_points() == [change]
