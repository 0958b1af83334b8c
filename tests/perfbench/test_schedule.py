"""Sentinels and throttled replicates, with a fake executor."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from perfbench.errors import PerfbenchError
from perfbench.records import run_file
from perfbench.records.job import Job
from perfbench.records.rows import Replicate, Status
from perfbench.runner.progress import SilentProgress
from tests.perfbench.digested import lines_of, run_bytes
from tests.perfbench.schedule_cases import CARD, IDS, OTHER_CARD, SENTINELS, TEXT, Executor, run

NO_SENTINELS = TEXT.replace("sentinels: [gemm, copy, sdpa_frozen]\n", "")


# Sentinels.


def test_every_block_begins_with_each_sentinel_in_a_job_of_its_own(tmp_path: pathlib.Path) -> None:
    executor = Executor()
    finished = run(tmp_path, executor)
    assert executor.log[:5] == ["block", *SENTINELS, executor.cells[0][0]]
    assert executor.sentinels == [(name, block) for block in range(3) for name in SENTINELS]
    starts = [at for at, what in enumerate(executor.log) if what == "block"]
    assert (
        all(executor.log[at + 1 : at + 4] == list(SENTINELS) for at in starts) and len(starts) == 3
    )
    assert [(line.name, line.block) for line in finished.run.sentinels] == executor.sentinels
    assert len(finished.run.replicates) == 12 and finished.run.manifest.sentinels == list(SENTINELS)


def test_a_sentinels_line(tmp_path: pathlib.Path) -> None:
    line = run(tmp_path, Executor()).run.sentinels[1]
    assert (line.name, line.block, line.attempt, line.status, line.unit) == (
        "copy",
        0,
        0,
        Status.OK,
        "byte",
    )
    assert line.rate_per_s == 102.0 and line.samples_s and line.device_uuid_sha256 == CARD
    assert line.telemetry is not None and line.telemetry.power_w == 512.0


def test_a_sentinel_that_fails_is_a_row_and_the_block_goes_on(tmp_path: pathlib.Path) -> None:
    executor = Executor(ends={("sentinel copy", 1): Status.CRASH})
    finished = run(tmp_path, executor)
    (line,) = [line for line in finished.run.sentinels if line.status is not Status.OK]
    assert (line.name, line.block, line.status, line.reason, line.rate_per_s) == (
        "copy",
        1,
        Status.CRASH,
        "planted",
        None,
    )
    assert (
        line.unit == "byte" and line.device_uuid_sha256 == CARD and len(finished.run.sentinels) == 9
    )
    assert len(finished.run.replicates) == 12


def test_a_matrix_without_sentinels_measures_none(tmp_path: pathlib.Path) -> None:
    executor = Executor()
    assert run(tmp_path, executor, NO_SENTINELS).run.sentinels == [] and executor.sentinels == []


def cut_after(executor: Executor, jobs: int) -> Callable[[], float]:
    """A clock by which a budget of 1 s is spent once ``jobs`` have run."""
    return lambda: 0.0 if len(executor.jobs) < jobs else 2.0


def test_a_resumed_block_keeps_its_sentinels_and_another_card_measures_its_own(
    tmp_path: pathlib.Path,
) -> None:
    first = Executor()
    folder = run(tmp_path, first, now=cut_after(first, 5), budget_s=1.0).folder
    assert len(first.cells) == 2 and len(first.sentinels) == 3, "cut in the middle of block 0"
    second = Executor()
    with pytest.raises(PerfbenchError, match="measures the sentinels"):
        run(tmp_path, second, NO_SENTINELS, resume=folder)
    run(tmp_path, second, resume=folder, now=cut_after(second, 2), budget_s=1.0)
    assert second.sentinels == [] and len(second.cells) == 2, "block 0 has them on this card"
    third = Executor()
    folder = run(
        tmp_path, Executor(), now=cut_after(first, 5), budget_s=3.0, only=["path=v2"]
    ).folder
    lines = run(tmp_path, third, card=OTHER_CARD, resume=folder).run.sentinels
    assert third.sentinels == [(name, block) for block in range(3) for name in SENTINELS]
    assert [line.device_uuid_sha256 for line in lines] == [CARD] * 9 + [OTHER_CARD] * 9
    fourth = Executor()
    run(tmp_path, fourth, card=OTHER_CARD, resume=folder)
    assert fourth.jobs == [], "a block without anything missing needs no sentinel"


def test_a_block_that_lacks_one_sentinel_measures_that_one(tmp_path: pathlib.Path) -> None:
    first, second = Executor(), Executor()
    folder = run(tmp_path, first, now=cut_after(first, 4), budget_s=1.0).folder
    path = folder / run_file.RUN_FILE
    kept = [line for line in lines_of(path.read_bytes()) if line.get("name") != "copy"]
    path.write_bytes(run_bytes(kept))
    run(tmp_path, second, resume=folder)
    assert second.sentinels[0] == ("copy", 0) and second.sentinels[1:4] == [
        (name, 1) for name in SENTINELS
    ]


def test_the_budget_holds_for_sentinels_too(tmp_path: pathlib.Path) -> None:
    executor = Executor()
    finished = run(tmp_path, executor, now=cut_after(executor, 3), budget_s=1.0)
    assert executor.cells == [] and len(finished.missing) == 12 and len(finished.run.sentinels) == 3


# Throttled blocks.


def test_a_throttled_replicate_is_measured_again_and_the_last_one_counts(
    tmp_path: pathlib.Path,
) -> None:
    executor = Executor(hot={(IDS[0], 1): 1})
    finished = run(tmp_path, executor)
    rows = [row for row in finished.run.of_cell(IDS[0]) if row.replicate == 1]
    assert [(row.attempt, row.telemetry.throttled if row.telemetry else None) for row in rows] == [
        (0, True),
        (1, False),
    ]
    at = executor.log.index("pause 10")
    assert executor.log[at - 1] == executor.log[at + 1] == IDS[0], (
        "at once after the pause, in the same place of the block"
    )
    assert len(finished.run.replicates) == 13 and executor.log.count("pause 10") == 1


def test_retries_end_and_pauses_grow(tmp_path: pathlib.Path) -> None:
    executor = Executor(hot={(IDS[0], 0): 99})
    finished = run(tmp_path, executor)
    rows = [row for row in finished.run.of_cell(IDS[0]) if row.replicate == 0]
    assert [row.attempt for row in rows] == [0, 1, 2] and all(
        row.telemetry and row.telemetry.throttled for row in rows
    )
    assert [entry for entry in executor.log if entry.startswith("pause")] == [
        "pause 10",
        "pause 20",
    ]
    assert len(finished.run.replicates) == 14 and finished.missing == []


def test_pauses_are_bounded(tmp_path: pathlib.Path) -> None:
    executor = Executor(hot={(IDS[0], 0): 99})
    run(tmp_path, executor, TEXT.replace("throttle_retries: 2", "throttle_retries: 6"))
    assert [entry for entry in executor.log if entry.startswith("pause")] == [
        f"pause {s}" for s in (10, 20, 40, 60, 60, 60)
    ]


def test_no_retries_where_none_are_asked_for(tmp_path: pathlib.Path) -> None:
    executor = Executor(hot={(IDS[0], 0): 99})
    assert (
        len(
            run(
                tmp_path, executor, TEXT.replace("throttle_retries: 2", "throttle_retries: 0")
            ).run.replicates
        )
        == 12
    )


def test_a_throttled_sentinel_is_measured_again_too(tmp_path: pathlib.Path) -> None:
    executor = Executor(hot={("sentinel copy", 0): 1})
    lines = run(tmp_path, executor).run.sentinels[:4]
    assert [(line.name, line.attempt) for line in lines] == [
        ("gemm", 0),
        ("copy", 0),
        ("copy", 1),
        ("sdpa_frozen", 0),
    ]
    assert executor.log[1:6] == ["gemm", "copy", "pause 10", "copy", "sdpa_frozen"]


def test_a_throttled_one_with_retries_left_is_missing_on_resume(tmp_path: pathlib.Path) -> None:
    first, second, third = (
        Executor(hot={(name, 0): 99 for name in IDS}),
        Executor(hot={(IDS[1], 0): 99}),
        Executor(),
    )
    # the budget does not hold a pause of 10 s
    finished = run(tmp_path, first, now=lambda: 0.0, budget_s=5.0)
    assert (
        len(first.cells) == 1 and first.cells[0] in finished.missing and len(finished.missing) == 12
    )
    after = run(tmp_path, second, resume=finished.folder)
    assert second.cells[0] == first.cells[0] and len(second.cells) == 12 + (
        2 if first.cells[0][0] != IDS[1] else 1
    )
    rows = [row for row in after.run.of_cell(first.cells[0][0]) if row.replicate == 0]
    assert [row.attempt for row in rows][:2] == [0, 1] and after.missing == []
    run(tmp_path, third, resume=finished.folder)
    assert third.jobs == [], "out of retries is finished: the gate says UNSTABLE"


def test_company_waits_while_a_throttled_one_is_repeated(tmp_path: pathlib.Path) -> None:
    executor = Executor(hot={(name, 0): 1 for name in IDS[:2]})
    text = TEXT.replace("processes: 3", "processes: 1, prepare_together: 4")
    finished = run(tmp_path, executor, text)
    assert len(executor.prepared) == 1 and sorted(executor.prepared[0]) == sorted(IDS), (
        "sentinels are not prepared next to cells"
    )
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
def test_which_replicates_are_profiled(
    tmp_path: pathlib.Path, word: str, profiled: set[int]
) -> None:
    executor = Executor()
    run(tmp_path, executor, TEXT.replace("processes: 3", f"processes: 3, profile: {word}"))
    assert {job.replicate for job in executor.jobs if job.profile} == profiled
    assert not any(job.profile for job in executor.jobs if job.sentinel)
