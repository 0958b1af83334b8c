"""``watch``: a run seen from another shell."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nsa.train.config import WatchdogConfig
from nsa.train.errors import TrainExit
from nsa.train.heartbeat import HeartbeatReader, HeartbeatWriter, MachineClock
from nsa.train.log import log_path, read_log
from nsa.train.records import Phase
from nsa.train.watchdog import heartbeat_path, read_halt, watch
from nsa.train.watchdog.outside import config_of
from nsa.train.watchdog.watched import WatchedRank
from tests.nsa.train.stand_in import record
from tests.nsa.train.supervised import LONG_S, PATIENT, ROOT, stand_in, wait_for

Start = Any


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts stand-ins without a supervisor."""
    running: list[subprocess.Popen[bytes]] = []

    def begin(**order: Any) -> subprocess.Popen[bytes]:
        running.append(subprocess.Popen(stand_in(tmp_path, **order), cwd=ROOT))
        return running[-1]

    yield begin
    for process in running:
        process.kill()
        process.wait()


def looked(out: Path, config: dict[str, Any] | None = None, **how: Any) -> tuple[int, str]:
    stream = io.StringIO()
    watching = WatchdogConfig(**{**PATIENT, **(config or {})})
    return watch(out, config=watching, stream=stream, **how), stream.getvalue()


def step_of(out: Path, rank: int = 0) -> int:
    beat = HeartbeatReader(heartbeat_path(out, rank)).read()
    return 0 if beat is None else beat.step


def test_a_folder_without_heartbeats_is_refused(tmp_path: Path) -> None:
    code, text = looked(tmp_path, once=True)
    assert code == TrainExit.DATA == 3
    assert text == f"{tmp_path} has no heartbeat/rank*.bin; wanted the folder of a run\n"


def test_healthy_ranks_are_a_table(tmp_path: Path, start: Start) -> None:
    for rank in range(2):
        start(rank=rank, world_size=2)
    wait_for(lambda: step_of(tmp_path, 0) >= 3 and step_of(tmp_path, 1) >= 3)
    code, text = looked(tmp_path, once=True)
    header, first, second = text.splitlines()
    assert code == 0
    assert header.split() == ["rank", "phase", "step", "beat", "loss_nats", "tok/s", "state"]
    for rank, row in enumerate((first, second)):
        cells = row.split()
        assert cells[0] == str(rank) and cells[1] in ("step", "data")
        assert cells[4] == "ago" and 2.5 < float(cells[5]) < 3.1
        assert cells[6:] == ["400,000", "healthy"]


def test_a_hang_is_seen_from_outside(tmp_path: Path, start: Start) -> None:
    start(hang_in="save", at=5)
    config = {"save_s": 0.5}
    wait_for(lambda: looked(tmp_path, config, once=True)[0] == TrainExit.STALLED)
    code, text = looked(tmp_path, config, once=True)
    assert code == TrainExit.STALLED
    assert "in phase save at step 5; wanted a beat within watchdog.save_s=0.5" in text
    assert read_halt(tmp_path) is None


def test_a_rank_that_died_is_named(tmp_path: Path, start: Start) -> None:
    start(end="SIGKILL").wait()
    code, text = looked(tmp_path, once=True)
    assert code == TrainExit.STALLED
    assert "ended in phase step at step 3; wanted phase done" in text and "died" in text


def test_a_run_that_is_done_is_healthy(tmp_path: Path, start: Start) -> None:
    start(steps=4).wait()
    code, text = looked(tmp_path, {"step_s": 0.0}, once=True)
    assert code == 0 and "finished" in text and "healthy" not in text
    assert looked(tmp_path)[0] == 0  # returns, since there is nothing to wait for


def test_what_reports_show_is_seen_over_lines(tmp_path: Path, start: Start) -> None:
    """Without --halt the run goes on, and the code is that of the worst."""
    start(wrong="zero_gradient", at=3, steps=200, step_s=0.01)
    wait_for(lambda: step_of(tmp_path))
    code, text = looked(tmp_path, {"zero_gradient_lines": 2}, every_s=LONG_S)
    assert code == TrainExit.UNHEALTHY
    assert text.count("rank 0: zero_gradient: gradient norm 0 in 2 lines in a row") == 1
    assert read_halt(tmp_path) is None
    assert step_of(tmp_path) == 200


def test_with_halt_the_trainer_ends(tmp_path: Path, start: Start) -> None:
    healthy = start(rank=0, world_size=2)
    wait_for(lambda: step_of(tmp_path, 0))
    sick = start(rank=1, world_size=2, wrong="slow_path", at=3)
    wait_for(lambda: step_of(tmp_path, 1))
    assert looked(tmp_path, halt=True)[0] == TrainExit.UNHEALTHY
    assert healthy.wait() == sick.wait() == TrainExit.UNHEALTHY
    halt = read_halt(tmp_path)
    assert halt is not None and (halt.kind, halt.rank) == ("slow_path", 1)
    assert "seen from outside: engaged: sel.v1" in halt.detail
    assert read_log(log_path(tmp_path, 0))[-1]["kind"] == "halted"
    code, text = looked(tmp_path, once=True)
    assert code == TrainExit.UNHEALTHY and "slow_path: halted: rank 1, seen from outside" in text
    assert "died" not in text  # rank 0 left because of the halt


def test_a_halt_of_an_earlier_run_does_not_stop_one_without_a_supervisor(
    tmp_path: Path, start: Start
) -> None:
    (tmp_path / "halt.json").write_text("")
    assert start(steps=5).wait() == 0
    assert step_of(tmp_path) == 5 and read_halt(tmp_path) is None


def test_an_interrupt_ends_the_watch_and_not_the_run(tmp_path: Path, start: Start) -> None:
    process = start()
    wait_for(lambda: step_of(tmp_path) >= 3)
    timer = threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    assert looked(tmp_path)[0] == 0
    assert process.poll() is None


def test_ranks_that_a_smaller_world_left_behind_are_not_shown(tmp_path: Path) -> None:
    for world_size in (4, 2):
        for rank in range(world_size):
            path = heartbeat_path(tmp_path, rank)
            heart = HeartbeatWriter(path, rank=rank, pid=os.getpid(), world_size=world_size)
            heart.beat(Phase.STEP, 5)
    assert [row.split()[0] for row in looked(tmp_path, once=True)[1].splitlines()] == [
        "rank",
        "0",
        "1",
    ]


def test_another_host_is_judged_by_the_wall_clock(tmp_path: Path) -> None:
    path = heartbeat_path(tmp_path, 0)
    process = subprocess.Popen(["sleep", "300"])
    heart = HeartbeatWriter(path, rank=0, pid=process.pid)
    heart.beat(Phase.STEP, 5)
    process.kill()
    process.wait()
    code, text = looked(tmp_path, once=True)
    assert code == TrainExit.STALLED and "died" in text
    data = path.read_bytes()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().encode()
    path.write_bytes(data.replace(boot, b"f" * 36))
    code, text = looked(tmp_path, once=True)
    assert code == 0 and "healthy" in text  # its pid is not looked up here
    assert looked(tmp_path, {"step_s": 0.0}, once=True)[0] == TrainExit.STALLED


def test_lines_of_an_earlier_process_do_not_count(tmp_path: Path) -> None:
    path = heartbeat_path(tmp_path, 0)
    watched = WatchedRank(path, WatchdogConfig(**PATIENT, zero_gradient_lines=3))
    found = []
    for pid in (os.getpid(), os.getppid()):
        heart = HeartbeatWriter(path, rank=0, pid=pid)
        for step in (10, 20, 30):
            heart.report(record(step=step, gradient_norm=0.0), entropy_floor_nats=None, slow="")
            heart.beat(Phase.STEP, step)
            found.append([str(one.kind) for one in watched.look(MachineClock.now()).alarms])
    assert found == [[], [], ["zero_gradient"]] * 2


def test_the_config_is_the_runs_own(tmp_path: Path) -> None:
    assert config_of(tmp_path) == WatchdogConfig()
    values = {"watchdog": {"step_s": 7.0}, "train": {}}
    (tmp_path / "config.json").write_text(json.dumps({**values, "sha256": "ab"}))
    assert config_of(tmp_path).step_s == 7.0
    (tmp_path / "config.json").write_text(json.dumps({"config": values, "sha256": "ab"}))
    assert config_of(tmp_path).step_s == 7.0
