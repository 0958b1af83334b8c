"""kill -9 at every write, a full disk, a second run, clocks that step back, and ten thousand cells;
all with a fake executor.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from perfbench.errors import Exit, PerfbenchError
from perfbench.records import run_file
from perfbench.records.job import Job, failed
from perfbench.records.rows import PlannedCell, Replicate, SentinelLine, Status
from perfbench.runner import run as runner
from perfbench.runner.attempts import Ledger
from perfbench.runner.loop import Budget, measure_all
from perfbench.runner.progress import SilentProgress
from perfbench.runner.recorder import Recorder
from perfbench.runner.schedule import CellSchedule
from tests import effort
from tests.perfbench import builders
from tests.perfbench.schedule_cases import CARD, IDS, SENTINELS, TEXT, Executor, planned_from, run


def killed_at(folder: pathlib.Path, moment: int) -> tuple[bool, int]:
    """Run in a forked process that kills itself at its ``moment``-th call of write or fsync;
    (killed, appends that returned).
    """
    heard, say = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(heard)
        _run_and_die(folder, moment, say)
    os.close(say)
    with os.fdopen(heard, "rb") as pipe:
        acknowledged = len(pipe.read())
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status != 0, acknowledged


def _run_and_die(folder: pathlib.Path, moment: int, say: int) -> None:
    """Every third moment is before a write, in its middle, and before the fsync that follows it."""
    calls = 0
    write, fsync, append = os.write, os.fsync, run_file.RunWriter.append

    def at(cut: Callable[[], None] = lambda: None) -> None:
        nonlocal calls
        calls += 1
        if calls == moment:
            cut()
            os.kill(os.getpid(), signal.SIGKILL)

    def dying_write(fd: int, data: memoryview) -> int:
        at()
        at(lambda: write(fd, data[: len(data) // 2]) and None)
        return write(fd, data)

    def dying_fsync(fd: int) -> None:
        at()
        fsync(fd)

    def reported_append(writer: run_file.RunWriter, record: run_file.Record) -> None:
        append(writer, record)
        write(say, b".")

    os.write, os.fsync, run_file.RunWriter.append = dying_write, dying_fsync, reported_append  # type: ignore[assignment,method-assign]
    code = 1
    try:
        run(folder, Executor(hot={(IDS[0], 0): 1}), TEXT.replace("processes: 3", "processes: 1"))
        code = 0
    finally:
        os._exit(code)


def test_kill_9_at_every_write_loses_no_finished_line(tmp_path: pathlib.Path) -> None:
    text = TEXT.replace("processes: 3", "processes: 1")
    rows = 1 + 3 + 5  # manifest, sentinels, four cells of which one throttles
    for moment in range(1, 10_000):
        folder = tmp_path / str(moment)
        killed, acknowledged = killed_at(folder, moment)
        files = list(folder.glob("*/run.jsonl"))
        if acknowledged == 0:
            continue  # killed while the manifest was written: there is no run yet
        kept = run_file.read_run(files[0].parent)
        assert 1 + len(kept.sentinels) + len(kept.replicates) in (
            acknowledged,
            acknowledged + 1,
        ), "one may be complete, and not yet reported"
        after = run(folder, Executor(), text, resume=files[0].parent).run
        assert (
            after.sentinels[: len(kept.sentinels)] == kept.sentinels
            and after.replicates[: len(kept.replicates)] == kept.replicates
        )
        assert sorted((line.name, line.block) for line in after.sentinels) == sorted(
            (name, 0) for name in SENTINELS
        )
        last = {(row.cell_id, row.replicate): row for row in after.replicates}
        assert sorted(last) == sorted((name, 0) for name in IDS) and not after.torn
        assert all(row.telemetry and row.telemetry.throttled is False for row in last.values())
        if not killed:
            break
    assert acknowledged == rows and moment > 3 * rows


def test_a_full_disk_stops_the_run_and_nothing_is_lost(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, fsync = Executor(), os.fsync

    def full(fd: int) -> None:
        if len(executor.jobs) == 7:
            raise OSError(28, "No space left on device")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(PerfbenchError, match="free space, then resume with --resume") as caught:
        run(tmp_path, executor)
    (folder,) = tmp_path.iterdir()
    assert caught.value.exit_code is Exit.USAGE and str(folder) in str(caught.value)
    assert (
        len(run_file.read_run(folder).replicates) == 3
        and len(run_file.read_run(folder).sentinels) == 3
    )
    monkeypatch.undo()
    again = Executor()
    assert len(run(tmp_path, again, resume=folder).run.replicates) == 12 and len(again.cells) == 9


def test_two_runs_in_one_folder_do_not_meet(tmp_path: pathlib.Path) -> None:
    """Each makes its own run folder; one that shall resume the other's is refused while
    that one writes.
    """
    inner: list[runner.Finished] = []
    executor = Executor()
    execute = executor.execute

    def with_state(job: Job) -> Replicate:
        if len(executor.jobs) == 5:
            (folder,) = tmp_path.iterdir()
            with pytest.raises(PerfbenchError, match="another perfbench is writing"):
                run(tmp_path, Executor(), resume=folder)
            inner.append(run(tmp_path, Executor()))
        return execute(job)

    executor.execute = with_state  # type: ignore[method-assign]
    outer = run(tmp_path, executor)
    assert outer.folder != inner[0].folder and outer.folder.parent == inner[0].folder.parent
    for finished in (outer, inner[0]):
        assert len(finished.run.replicates) == 12 and len(finished.run.sentinels) == 9


def test_a_wall_clock_that_steps_back_changes_nothing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every reading of it is an hour before the last; it names rows and measures nothing."""
    stamp = [datetime(2026, 3, 29, 3, tzinfo=UTC)]

    def back() -> datetime:
        stamp[0] -= timedelta(hours=1)
        return stamp[0]

    class Backwards(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
            return back()

    monkeypatch.setattr(runner, "datetime", Backwards)
    monkeypatch.setattr("perfbench.records.job.datetime", Backwards)
    monkeypatch.setattr(time, "time", lambda: back().timestamp())
    executor = Executor(ends={(IDS[0], 0): Status.CRASH})
    ticks = iter(range(10_000))
    finished = run(tmp_path, executor, now=lambda: float(next(ticks)), budget_s=12.0)
    assert finished.missing, "the budget is counted on the monotonic clock"
    rest = Executor()
    after = run(tmp_path, rest, resume=finished.folder)
    assert (
        after.missing == []
        and len(after.run.replicates) == 10
        and after.run.resumed[0].resumed_utc < after.run.manifest.created_utc
    )
    assert executor.cells + rest.cells == list(dict.fromkeys(executor.cells + rest.cells))


def test_no_module_times_by_the_wall_clock() -> None:
    sources = (pathlib.Path(__file__).parents[2] / "perfbench").rglob("*.py")
    assert [path.name for path in sources if "time.time(" in path.read_text()] == []


def many_cells(count: int) -> list[PlannedCell]:
    """Four cells' routes at ``count // 4`` lengths; planning is not what is tested here."""
    made = []
    for cell in planned_from(
        TEXT.replace("[forward]", "[forward, train]").replace("[128, 256]", "[128]")
    )[1].cells:
        for number in range(1, count // 4 + 1):
            axes = replace(cell.axes, seq_len=64 * number)
            made.append(
                cell.model_copy(update={"cell_id": f"{cell.cell_id} {number}", "axes": axes})
            )
    return made


@pytest.mark.parametrize("together", [1, 8])
def test_many_cells_have_no_quadratic_step(tmp_path: pathlib.Path, together: int) -> None:
    """The disk and the writing of JSON left out; half of the cells run out of memory or are
    skipped, one question each.
    """
    matrix, _ = planned_from(
        TEXT.replace("processes: 3", f"processes: 2, prepare_together: {together}")
    )
    fixed = builders.telemetry()

    class Quick(Executor):
        def execute(self, job: Job) -> Replicate:
            if job.sentinel is None and job.axes.path == "v2" and job.axes.seq_len >= 640:
                return failed(job, Status.OOM, "planted")
            return failed(job, Status.OK, "").model_copy(
                update={"telemetry": fixed, "tok_per_s": 1.0}
            )

    class Writer:
        folder = tmp_path

        def __init__(self) -> None:
            self.rows: list[Any] = []

        def append(self, row: Replicate | SentinelLine) -> None:
            self.rows.append(row)

    def sweeping(count: int) -> Callable[[], None]:
        cells, writer = many_cells(count), Writer()
        recorder = Recorder(
            manifest=builders.manifest(cells, replicates=2, sentinels=["gemm"]),
            matrix=matrix,
            executor=Quick(),
            writer=writer,  # type: ignore[arg-type]
            ledger=Ledger(2),
            faults=[],
            progress=SilentProgress(),
            card=CARD,
            budget=Budget(),
            model={},
            pause=lambda seconds: None,
        )

        def work() -> None:
            schedule = CellSchedule(recorder, {cell.cell_id for cell in cells})
            assert measure_all(schedule, recorder.progress, recorder.budget) == []
            ended = Counter(row.status for row in writer.rows if isinstance(row, Replicate))
            assert (
                len(cells) == count
                and ended[Status.OK] == count + 2 * 18
                and ended[Status.OOM] + ended[Status.SKIPPED] == count // 2 - 18
            )
            assert ended[Status.SKIPPED] > 0.3 * count
            ledger = Ledger(2, writer.rows)
            assert all(ledger.next_attempt(cell.cell_id, 1) is None for cell in cells)

        return work

    assert effort.growth(sweeping, 1000) < 8


def test_a_line_on_the_disk_is_one_json_object(tmp_path: pathlib.Path) -> None:
    folder = run(tmp_path, Executor()).folder
    kinds = [
        json.loads(line)["kind"] for line in (folder / run_file.RUN_FILE).read_bytes().splitlines()
    ]
    assert (
        kinds[:5] == ["manifest", "sentinel", "sentinel", "sentinel", "replicate"]
        and len(kinds) == 1 + 9 + 12
    )
