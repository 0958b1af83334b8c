"""Sentinels, throttled replicates, kill -9 at every write, clocks that step back, and ten thousand cells; all with a fake executor."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from nsa.capability import assumed
from nsa.settings import Settings
from perfbench import isolate, runfile, runner
from perfbench import matrix as matrices
from perfbench import plan as plans
from perfbench.isolate import failed
from perfbench.job import Job
from perfbench.ledger import Ledger
from perfbench.progress import SilentProgress
from perfbench.result import PlannedCell, Replicate, SentinelLine, Source, Status
from perfbench.sweep import Sweep
from perfbench.verdict import Exit, PerfbenchError
from tests.perfbench import builders

CODE = Source(commit="a" * 40, dirty_sha256=None)
CARD, OTHER_CARD = "ab" * 32, "cd" * 32
SENTINELS = ("gemm", "copy", "sdpa_frozen")
TEXT = """\
version: 1
name: t
target: {gpu: none}
model: tiny
axes:
  workload: [forward]
  seq_len: [128, 256]
  path: [v2, dense]
  fa2: [off]
  dtype: [fp32]
measure: {processes: 3, throttle_retries: 2}
limits: {timeout_s: 30, oom: record_and_skip_larger}
sentinels: [gemm, copy, sdpa_frozen]
"""
NO_SENTINELS = TEXT.replace("sentinels: [gemm, copy, sdpa_frozen]\n", "")


def planned_from(text: str) -> tuple[matrices.Matrix, plans.Plan]:
    matrix = matrices.parse(text, "m.yaml")
    return matrix, plans.build(matrix, only=[], capability=assumed("none"), settings=Settings())


class Executor:
    """Green rows; ``hot`` lists how often a cell (or sentinel) and replicate throttles first, ``ends`` how one fails."""

    def __init__(self, hot: dict[tuple[str, int], int] | None = None, ends: dict[tuple[str, int], Status] | None = None) -> None:
        self.hot, self.ends = dict(hot or {}), dict(ends or {})
        self.jobs: list[Job] = []
        self.log: list[str] = []
        self.prepared: list[list[str]] = []

    def new_block(self) -> None:
        self.log.append("block")

    def prepare(self, jobs: Sequence[Job]) -> None:
        self.prepared.append([job.cell_id for job in jobs])

    def execute(self, job: Job) -> Replicate:
        key = job.cell_id, job.replicate
        self.jobs.append(job)
        self.log.append(job.sentinel or job.cell_id)
        if key in self.ends:
            return failed(job, self.ends[key], "planted")
        hot = self.hot.get(key, 0) > 0
        self.hot[key] = self.hot.get(key, 0) - 1
        reasons = ["hw_thermal_slowdown"] if hot else []
        seen = builders.telemetry(throttled=hot, clock_event_reasons=reasons)
        cell = PlannedCell(
            cell_id=job.cell_id, axes={"seq_len": 64, "batch": 1, **job.axes}, config_sha256=job.config_sha256, route=job.plan
        )
        speed = 100.0 + len(self.jobs)
        row = builders.replicate(cell, job.replicate, tok_per_s=speed, telemetry=seen, device_uuid_sha256=None)
        return row.model_copy(update={"axes": job.axes})

    def close(self) -> None: ...

    @property
    def cells(self) -> list[tuple[str, int]]:
        return [(job.cell_id, job.replicate) for job in self.jobs if job.sentinel is None]

    @property
    def sentinels(self) -> list[tuple[str, int]]:
        return [(job.sentinel, job.replicate) for job in self.jobs if job.sentinel is not None]


def run(folder: pathlib.Path, executor: Executor, text: str = TEXT, card: str | None = CARD, **changes: Any) -> runner.Finished:
    matrix, plan = planned_from(text)
    values: dict[str, Any] = {
        "runs_dir": folder,
        "environment": builders.environment(gpu_uuid_sha256=card),
        "source": CODE,
        "argv": ["perfbench", "run", "m.yaml"],
        "seed": 7,
        "pause": lambda seconds: executor.log.append(f"pause {seconds:g}"),
    }
    return runner.run(plan, matrix, executor, **{**values, **changes})


IDS = [cell.cell_id for cell in planned_from(TEXT)[1].cells]


# Sentinels.


def test_every_block_begins_with_each_sentinel_in_a_job_of_its_own(tmp_path: pathlib.Path) -> None:
    executor = Executor()
    finished = run(tmp_path, executor)
    assert executor.log[:5] == ["block", *SENTINELS, executor.cells[0][0]]
    assert executor.sentinels == [(name, block) for block in range(3) for name in SENTINELS]
    starts = [at for at, what in enumerate(executor.log) if what == "block"]
    assert all(executor.log[at + 1 : at + 4] == list(SENTINELS) for at in starts) and len(starts) == 3
    assert [(line.name, line.block) for line in finished.run.sentinels] == executor.sentinels
    assert len(finished.run.replicates) == 12 and finished.run.manifest.sentinels == list(SENTINELS)


def test_a_sentinels_line(tmp_path: pathlib.Path) -> None:
    line = run(tmp_path, Executor()).run.sentinels[1]
    assert (line.name, line.block, line.attempt, line.status, line.unit) == ("copy", 0, 0, Status.OK, "byte")
    assert line.rate_per_s == 102.0 and line.samples_s and line.device_uuid_sha256 == CARD
    assert line.telemetry is not None and line.telemetry.power_w == 512.0


def test_a_sentinel_that_fails_is_a_row_and_the_block_goes_on(tmp_path: pathlib.Path) -> None:
    executor = Executor(ends={("sentinel copy", 1): Status.CRASH})
    finished = run(tmp_path, executor)
    (line,) = [line for line in finished.run.sentinels if line.status is not Status.OK]
    assert (line.name, line.block, line.status, line.reason, line.rate_per_s) == ("copy", 1, Status.CRASH, "planted", None)
    assert line.unit == "byte" and line.device_uuid_sha256 == CARD and len(finished.run.sentinels) == 9
    assert len(finished.run.replicates) == 12


def test_a_matrix_without_sentinels_measures_none(tmp_path: pathlib.Path) -> None:
    executor = Executor()
    assert run(tmp_path, executor, NO_SENTINELS).run.sentinels == [] and executor.sentinels == []


def cut_after(executor: Executor, jobs: int) -> Callable[[], float]:
    """A clock by which a budget of 1 s is spent once ``jobs`` have run."""
    return lambda: 0.0 if len(executor.jobs) < jobs else 2.0


def test_a_resumed_block_keeps_its_sentinels_and_another_card_measures_its_own(tmp_path: pathlib.Path) -> None:
    first = Executor()
    folder = run(tmp_path, first, now=cut_after(first, 5), budget_s=1.0).folder
    assert len(first.cells) == 2 and len(first.sentinels) == 3, "cut in the middle of block 0"
    second = Executor()
    with pytest.raises(PerfbenchError, match="measures the sentinels"):
        run(tmp_path, second, NO_SENTINELS, resume=folder)
    run(tmp_path, second, resume=folder, now=cut_after(second, 2), budget_s=1.0)
    assert second.sentinels == [] and len(second.cells) == 2, "block 0 has them on this card"
    third = Executor()
    folder = run(tmp_path, Executor(), now=cut_after(first, 5), budget_s=3.0, only=["path=v2"]).folder
    lines = run(tmp_path, third, card=OTHER_CARD, resume=folder).run.sentinels
    assert third.sentinels == [(name, block) for block in range(3) for name in SENTINELS]
    assert [line.device_uuid_sha256 for line in lines] == [CARD] * 9 + [OTHER_CARD] * 9
    fourth = Executor()
    run(tmp_path, fourth, card=OTHER_CARD, resume=folder)
    assert fourth.jobs == [], "a block without anything missing needs no sentinel"


def test_a_block_that_lacks_one_sentinel_measures_that_one(tmp_path: pathlib.Path) -> None:
    first, second = Executor(), Executor()
    folder = run(tmp_path, first, now=cut_after(first, 4), budget_s=1.0).folder
    path = folder / runfile.FILE_NAME
    kept = [line for line in path.read_bytes().splitlines(keepends=True) if b'"name": "copy"' not in line]
    path.write_bytes(b"".join(kept))
    run(tmp_path, second, resume=folder)
    assert second.sentinels[0] == ("copy", 0) and second.sentinels[1:4] == [(name, 1) for name in SENTINELS]


def test_the_budget_holds_for_sentinels_too(tmp_path: pathlib.Path) -> None:
    executor = Executor()
    finished = run(tmp_path, executor, now=cut_after(executor, 3), budget_s=1.0)
    assert executor.cells == [] and len(finished.missing) == 12 and len(finished.run.sentinels) == 3


# Throttled blocks.


def test_a_throttled_replicate_is_measured_again_and_the_last_one_counts(tmp_path: pathlib.Path) -> None:
    executor = Executor(hot={(IDS[0], 1): 1})
    finished = run(tmp_path, executor)
    rows = [row for row in finished.run.of_cell(IDS[0]) if row.replicate == 1]
    assert [(row.attempt, row.telemetry.throttled if row.telemetry else None) for row in rows] == [(0, True), (1, False)]
    at = executor.log.index("pause 10")
    assert executor.log[at - 1] == executor.log[at + 1] == IDS[0], "at once after the pause, in the same place of the block"
    assert len(finished.run.replicates) == 13 and executor.log.count("pause 10") == 1


def test_retries_end_and_pauses_grow(tmp_path: pathlib.Path) -> None:
    executor = Executor(hot={(IDS[0], 0): 99})
    finished = run(tmp_path, executor)
    rows = [row for row in finished.run.of_cell(IDS[0]) if row.replicate == 0]
    assert [row.attempt for row in rows] == [0, 1, 2] and all(row.telemetry and row.telemetry.throttled for row in rows)
    assert [entry for entry in executor.log if entry.startswith("pause")] == ["pause 10", "pause 20"]
    assert len(finished.run.replicates) == 14 and finished.missing == []


def test_pauses_are_bounded(tmp_path: pathlib.Path) -> None:
    executor = Executor(hot={(IDS[0], 0): 99})
    run(tmp_path, executor, TEXT.replace("throttle_retries: 2", "throttle_retries: 6"))
    assert [entry for entry in executor.log if entry.startswith("pause")] == [f"pause {s}" for s in (10, 20, 40, 60, 60, 60)]


def test_no_retries_where_none_are_asked_for(tmp_path: pathlib.Path) -> None:
    executor = Executor(hot={(IDS[0], 0): 99})
    assert len(run(tmp_path, executor, TEXT.replace("throttle_retries: 2", "throttle_retries: 0")).run.replicates) == 12


def test_a_throttled_sentinel_is_measured_again_too(tmp_path: pathlib.Path) -> None:
    executor = Executor(hot={("sentinel copy", 0): 1})
    lines = run(tmp_path, executor).run.sentinels[:4]
    assert [(line.name, line.attempt) for line in lines] == [("gemm", 0), ("copy", 0), ("copy", 1), ("sdpa_frozen", 0)]
    assert executor.log[1:6] == ["gemm", "copy", "pause 10", "copy", "sdpa_frozen"]


def test_a_throttled_one_with_retries_left_is_missing_on_resume(tmp_path: pathlib.Path) -> None:
    first, second, third = Executor(hot={(name, 0): 99 for name in IDS}), Executor(hot={(IDS[1], 0): 99}), Executor()
    finished = run(tmp_path, first, now=lambda: 0.0, budget_s=5.0)  # the budget does not hold a pause of 10 s
    assert len(first.cells) == 1 and first.cells[0] in finished.missing and len(finished.missing) == 12
    after = run(tmp_path, second, resume=finished.folder)
    assert second.cells[0] == first.cells[0] and len(second.cells) == 12 + (2 if first.cells[0][0] != IDS[1] else 1)
    rows = [row for row in after.run.of_cell(first.cells[0][0]) if row.replicate == 0]
    assert [row.attempt for row in rows][:2] == [0, 1] and after.missing == []
    run(tmp_path, third, resume=finished.folder)
    assert third.jobs == [], "out of retries is finished: the gate says UNSTABLE"


def test_company_waits_while_a_throttled_one_is_repeated(tmp_path: pathlib.Path) -> None:
    executor = Executor(hot={(name, 0): 1 for name in IDS[:2]})
    text = TEXT.replace("processes: 3", "processes: 1, prepare_together: 4")
    finished = run(tmp_path, executor, text)
    assert len(executor.prepared) == 1 and sorted(executor.prepared[0]) == sorted(IDS), "sentinels are not prepared beside cells"
    assert len(executor.cells) == 6 and len(finished.run.replicates) == 6
    assert list(dict.fromkeys(executor.cells)) == [(name, 0) for name in executor.prepared[0]]


def test_a_retry_that_fails_ends_the_cell(tmp_path: pathlib.Path) -> None:
    executor = Executor(hot={(IDS[0], 0): 1})
    execute = executor.execute

    def fails_again(job: Job) -> Replicate:
        row = execute(job)
        if (job.cell_id, job.replicate) == (IDS[0], 0):
            executor.ends[IDS[0], 0] = Status.CRASH
        return row

    executor.execute = fails_again  # type: ignore[method-assign]
    rows = run(tmp_path, executor).run.of_cell(IDS[0])
    assert [(row.status, row.attempt) for row in rows] == [(Status.OK, 0), (Status.CRASH, 1)]


def test_progress_counts_each_replicate_once(tmp_path: pathlib.Path) -> None:
    counted: list[int] = []
    notes: list[str] = []

    class Counting(SilentProgress):
        def finished(self, row: Replicate, *, covers: int = 1) -> None:
            counted.append(covers)

        def note(self, text: str) -> None:
            notes.append(text)

    executor = Executor(hot={(IDS[0], 0): 1, (IDS[1], 2): 9}, ends={(IDS[2], 1): Status.CRASH})
    run(tmp_path, executor, progress=Counting())
    assert sum(counted) == 12 and len(counted) == 11
    assert len([text for text in notes if "throttled" in text]) == 3
    assert [text for text in notes if text.startswith("sentinels of block 1: gemm ")]


@pytest.mark.parametrize(("word", "profiled"), [("first", {0}), ("every", {0, 1, 2})])
def test_which_replicates_are_profiled(tmp_path: pathlib.Path, word: str, profiled: set[int]) -> None:
    executor = Executor()
    run(tmp_path, executor, TEXT.replace("processes: 3", f"processes: 3, profile: {word}"))
    assert {job.replicate for job in executor.jobs if job.profile} == profiled
    assert not any(job.profile for job in executor.jobs if job.sentinel)


# Robustness.


def killed_at(folder: pathlib.Path, moment: int) -> tuple[bool, int]:
    """Run in a forked process that kills itself at its ``moment``-th call of write or fsync; (killed, appends that returned)."""
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
    write, fsync, append = os.write, os.fsync, runfile.RunWriter.append

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

    def told(writer: runfile.RunWriter, record: runfile.Record) -> None:
        append(writer, record)
        write(say, b".")

    os.write, os.fsync, runfile.RunWriter.append = dying_write, dying_fsync, told  # type: ignore[assignment,method-assign]
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
        kept = runfile.read(files[0].parent)
        assert 1 + len(kept.sentinels) + len(kept.replicates) in (acknowledged, acknowledged + 1), "one may be whole, and not yet told"
        after = run(folder, Executor(), text, resume=files[0].parent).run
        assert after.sentinels[: len(kept.sentinels)] == kept.sentinels and after.replicates[: len(kept.replicates)] == kept.replicates
        assert sorted((line.name, line.block) for line in after.sentinels) == sorted((name, 0) for name in SENTINELS)
        last = {(row.cell_id, row.replicate): row for row in after.replicates}
        assert sorted(last) == sorted((name, 0) for name in IDS) and not after.torn
        assert all(row.telemetry and row.telemetry.throttled is False for row in last.values())
        if not killed:
            break
    assert acknowledged == rows and moment > 3 * rows


def test_a_full_disk_stops_the_run_and_nothing_is_lost(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor, fsync = Executor(), os.fsync

    def full(fd: int) -> None:
        if len(executor.jobs) == 7:
            raise OSError(28, "No space left on device")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(PerfbenchError, match="free space, then go on with --resume") as caught:
        run(tmp_path, executor)
    (folder,) = tmp_path.iterdir()
    assert caught.value.exit_code is Exit.USAGE and str(folder) in str(caught.value)
    assert len(runfile.read(folder).replicates) == 3 and len(runfile.read(folder).sentinels) == 3
    monkeypatch.undo()
    again = Executor()
    assert len(run(tmp_path, again, resume=folder).run.replicates) == 12 and len(again.cells) == 9


def test_two_runs_in_one_folder_do_not_meet(tmp_path: pathlib.Path) -> None:
    """Each makes its own run folder; one that is told to go on with the other's is refused while that one writes."""
    inner: list[runner.Finished] = []
    executor = Executor()
    execute = executor.execute

    def beside(job: Job) -> Replicate:
        if len(executor.jobs) == 5:
            (folder,) = tmp_path.iterdir()
            with pytest.raises(PerfbenchError, match="another perfbench is writing"):
                run(tmp_path, Executor(), resume=folder)
            inner.append(run(tmp_path, Executor()))
        return execute(job)

    executor.execute = beside  # type: ignore[method-assign]
    outer = run(tmp_path, executor)
    assert outer.folder != inner[0].folder and outer.folder.parent == inner[0].folder.parent
    for finished in (outer, inner[0]):
        assert len(finished.run.replicates) == 12 and len(finished.run.sentinels) == 9


def test_a_wall_clock_that_steps_back_changes_nothing(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    monkeypatch.setattr(isolate, "datetime", Backwards)
    monkeypatch.setattr(time, "time", lambda: back().timestamp())
    executor = Executor(ends={(IDS[0], 0): Status.CRASH})
    ticks = iter(range(10_000))
    finished = run(tmp_path, executor, now=lambda: float(next(ticks)), budget_s=12.0)
    assert finished.missing, "the budget is counted on the monotonic clock"
    rest = Executor()
    after = run(tmp_path, rest, resume=finished.folder)
    assert after.missing == [] and len(after.run.replicates) == 10 and after.run.resumed[0].resumed_utc < after.run.manifest.created_utc
    assert executor.cells + rest.cells == list(dict.fromkeys(executor.cells + rest.cells))


def test_no_module_times_by_the_wall_clock() -> None:
    sources = (pathlib.Path(__file__).parents[2] / "perfbench").rglob("*.py")
    assert [path.name for path in sources if "time.time(" in path.read_text()] == []


def many_cells(count: int) -> list[PlannedCell]:
    """Four cells' routes at ``count // 4`` lengths; planning is not what is tested here."""
    made = []
    for cell in planned_from(TEXT.replace("[forward]", "[forward, train]").replace("[128, 256]", "[128]"))[1].cells:
        for number in range(1, count // 4 + 1):
            axes = {**cell.axes, "seq_len": 64 * number}
            made.append(cell.model_copy(update={"cell_id": f"{cell.cell_id} {number}", "axes": axes}))
    return made


@pytest.mark.parametrize("together", [1, 8])
def test_ten_thousand_cells_have_no_quadratic_step(tmp_path: pathlib.Path, together: int) -> None:
    """The disk and the writing of JSON left out; half of the cells run out of memory or are skipped, one question each."""
    matrix, _ = planned_from(TEXT.replace("processes: 3", f"processes: 2, prepare_together: {together}"))
    cells = many_cells(10_000)
    fixed = builders.telemetry()

    class Quick(Executor):
        def execute(self, job: Job) -> Replicate:
            if job.sentinel is None and job.axes["path"] == "v2" and int(job.axes["seq_len"]) >= 640:
                return failed(job, Status.OOM, "planted")
            return failed(job, Status.OK, "").model_copy(update={"telemetry": fixed, "tok_per_s": 1.0})

    class Writer:
        folder = tmp_path

        def __init__(self) -> None:
            self.rows: list[Any] = []

        def append(self, row: Replicate | SentinelLine) -> None:
            self.rows.append(row)

    writer = Writer()
    sweep = Sweep(
        manifest=builders.manifest(cells, replicates=2, sentinels=["gemm"]),
        matrix=matrix,
        executor=Quick(),
        writer=writer,  # type: ignore[arg-type]
        ledger=Ledger(2),
        faults=[],
        progress=SilentProgress(),
        card=CARD,
        now=time.monotonic,
        pause=lambda seconds: None,
    )
    begin = time.process_time()
    assert sweep.run({cell.cell_id for cell in cells}) == []
    took_s = time.process_time() - begin
    ended = Counter(row.status for row in writer.rows if isinstance(row, Replicate))
    assert len(cells) == 10_000 and ended[Status.OK] == 2 * 5000 + 2 * 18 and ended[Status.OOM] + ended[Status.SKIPPED] == 5000 - 18
    assert ended[Status.SKIPPED] > 4000
    assert took_s < 5.0
    ledger = Ledger(2, writer.rows)
    assert all(ledger.next_attempt(cell.cell_id, 1) is None for cell in cells)


def test_a_line_on_the_disk_is_one_json_object(tmp_path: pathlib.Path) -> None:
    folder = run(tmp_path, Executor()).folder
    kinds = [json.loads(line)["kind"] for line in (folder / runfile.FILE_NAME).read_bytes().splitlines()]
    assert kinds[:5] == ["manifest", "sentinel", "sentinel", "sentinel", "replicate"] and len(kinds) == 1 + 9 + 12
