"""Worker processes: one that fails ends the trainer, and none outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsa.train.data.fetching import FetchedBatch
from nsa.train.data.loader import Loader, LoaderPlan
from nsa.train.data.packing import BatchShape
from nsa.train.errors import TrainError, TrainExit
from nsa.train.records import Batch
from tests.nsa.train.data.streams import Scripted

ROOT = Path(__file__).parents[4]
WITHIN_S = 60  # of a machine that is busy


def loader_of(recipe: Scripted, workers: int, prefetch: int = 2) -> Loader:
    plan = LoaderPlan(
        split="train",
        rank=0,
        world_size=1,
        workers=workers,
        prefetch=prefetch,
        pin=False,
        identity={},
        entropy_floor_nats=None,
    )
    return Loader(recipe, BatchShape(1, 4, "rows"), plan)


@pytest.fixture
def loaders() -> Iterator[list[Loader]]:
    made: list[Loader] = []
    yield made
    for one in made:
        one.close()


def error_of(loader: Loader) -> TrainError:
    began = time.monotonic()
    try:
        while time.monotonic() - began < WITHIN_S:
            next(loader)
    except TrainError as error:
        return error
    raise AssertionError("no error")


def is_alive(pid: int) -> bool:
    """Whether the process runs; a dead one that nobody waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_dead(pid: int) -> None:
    began = time.monotonic()
    while is_alive(pid):
        assert time.monotonic() - began < WITHIN_S
        time.sleep(0.05)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_refusal_in_a_worker_is_the_trainers(workers: int, loaders: list[Loader]) -> None:
    loaders.append(loader_of(Scripted(3, "refuse"), workers))
    error = error_of(loaders[0])
    assert (error.code, str(error)) == (TrainExit.DATA, "x.txt is not UTF-8")


def test_a_defect_in_a_worker_ends_the_trainer(
    loaders: list[Loader], capfd: pytest.CaptureFixture[str]
) -> None:
    loaders.append(loader_of(Scripted(3, "break"), 2))
    error = error_of(loaders[0])
    assert error.code == TrainExit.DATA
    assert "ended with exit code 1; its traceback stands above" in str(error)
    assert "ZeroDivisionError: a defect" in capfd.readouterr().err


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_batch_that_cannot_be_pinned_ends_the_trainer(
    loaders: list[Loader], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is raised in the thread that takes batches; the trainer must not wait for ever."""

    def pin(self: Loader, fetched: FetchedBatch) -> Batch:
        raise RuntimeError("out of pinned memory")

    monkeypatch.setattr(Loader, "_batch", pin)
    loaders.append(loader_of(Scripted(3, "hang"), 1))
    errors: list[TrainError] = []
    taking = threading.Thread(target=lambda: errors.append(error_of(loaders[0])), daemon=True)
    taking.start()
    taking.join(WITHIN_S)
    assert [one.code for one in errors] == [TrainExit.DATA]
    assert "its traceback stands above" in str(errors[0])


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_worker_ends_the_trainer(sig: signal.Signals, loaders: list[Loader]) -> None:
    """Also while the trainer waits for a batch."""
    loaders.append(loader_of(Scripted(3, "hang"), 2))
    next(loaders[0])
    victim = loaders[0]._processes[1].process
    threading.Timer(0.5, victim.send_signal, [sig]).start()
    error = error_of(loaders[0])
    assert error.code == TrainExit.DATA
    assert f"process id {victim.pid} was killed by {sig.name}; was it out of memory?" in str(error)
    with pytest.raises(TrainError):
        next(loaders[0])


def test_a_worker_does_not_import_torch(loaders: list[Loader]) -> None:
    loaders.append(loader_of(Scripted(9, "hang"), 1))
    assert next(loaders[0]).ids.flatten().tolist() == [0, 0, 0, 0]


def test_a_worker_makes_no_more_than_is_wanted(loaders: list[Loader]) -> None:
    """``prefetch`` wait, one is in the thread's hands, and the pipe holds 64 KiB."""
    loaders.append(loader_of(Scripted(10**9, "hang"), 1, prefetch=2))
    next(loaders[0])
    process = loaders[0]._processes[0]
    began = time.monotonic()
    while not process._queue.full():
        assert time.monotonic() - began < WITHIN_S
        time.sleep(0.01)
    assert process._queue.qsize() == 2


def test_closing_ends_the_processes(loaders: list[Loader]) -> None:
    loader = loader_of(Scripted(10**9, "hang"), 2)
    next(loader)
    next(loader)
    pids = [one.process.pid for one in loader._processes]
    assert len(pids) == 2
    loader.close()
    assert not any(map(is_alive, pids))
    loader.close()


TRAINER = """
import sys, time
from tests.nsa.train.data.streams import Scripted
from tests.nsa.train.data.test_fetching import loader_of
loader = loader_of(Scripted({good}, "hang"), 2)
next(loader)
print(*[one.process.pid for one in loader._processes], flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("good", [1, 10**9])  # in the middle of a read, and while it writes
@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGINT])
def test_workers_die_with_their_trainer(good: int, sig: signal.Signals) -> None:
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER.format(good=good)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert trainer.stdout is not None
    pids = [int(one) for one in trainer.stdout.readline().split()]
    assert len(pids) == 2
    assert all(map(is_alive, pids))
    trainer.send_signal(sig)
    assert trainer.wait() == -sig
    trainer.stdout.close()
    for pid in pids:
        wait_until_dead(pid)


def test_ctrl_c_of_the_terminal_is_no_workers_business(loaders: list[Loader]) -> None:
    loaders.append(loader_of(Scripted(10**9, "hang"), 1))
    next(loaders[0])
    os.kill(loaders[0]._processes[0].process.pid, signal.SIGINT)
    for _ in range(50):
        next(loaders[0])
