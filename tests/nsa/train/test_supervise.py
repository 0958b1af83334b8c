"""The watchdog around a real process: every fault is provoked in a trainer, not shown to a rule.

The trainer is the stand-in (stand_in.py), which needs no torch. Time-outs are tenths of a second
for the one phase that a test is about.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from nsa.train import stacks
from nsa.train.config import WatchdogConfig
from nsa.train.errors import TrainExit
from nsa.train.heartbeat import HeartbeatReader
from nsa.train.log import log_path, read_log
from nsa.train.records import Phase
from nsa.train.watchdog import Halt, heartbeat_path, read_halt, write_halt
from nsa.train.watchdog.child import oom_kills
from nsa.train.watchdog.halt import begin, exit_path, is_younger, read_exit, write_exit
from tests.nsa.train.stand_in import EXPLAINED
from tests.nsa.train.supervised import (
    PHASES,
    ROOT,
    is_running,
    run,
    stand_in,
    start,
    wait_for,
)

SHORT = {"grace_s": 0.3}


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def halt_of(out: Path) -> Halt:
    found = read_halt(out)
    assert found is not None
    return found


def kinds(out: Path, rank: int = 0) -> list[str]:
    return [line["kind"] for line in read_log(log_path(out, rank))]


def phase_of(out: Path, rank: int = 0) -> Phase | None:
    beat = HeartbeatReader(heartbeat_path(out, rank)).read()
    return None if beat is None else beat.phase


def step_of(out: Path, rank: int = 0) -> int:
    beat = HeartbeatReader(heartbeat_path(out, rank)).read()
    return 0 if beat is None else beat.step


# A healthy run


def test_a_healthy_run_ends_with_0(tmp_path: Path) -> None:
    assert run(tmp_path, steps=10) == 0
    assert kinds(tmp_path) == ["step"] * 10
    assert read_halt(tmp_path) is None
    assert read_exit(tmp_path, 0) == 0
    assert phase_of(tmp_path) is Phase.DONE


def test_a_healthy_run_shows_its_lines(tmp_path: Path) -> None:
    process = start(tmp_path, steps=40)
    text, _ = process.communicate()
    assert process.returncode == 0
    assert "step 40/40  loss 2.96" in text and "400,000 tok/s" in text


# Stall by phase


@pytest.mark.parametrize("phase", PHASES)
def test_a_hang_is_named_by_its_phase(tmp_path: Path, phase: str) -> None:
    # the interpreter's own start counts as well, and the machine is shared
    limit_s = 3.0 if phase == "start" else 0.4
    assert run(tmp_path, {f"{phase}_s": limit_s, **SHORT}, hang_in=phase) == TrainExit.STALLED
    halt = halt_of(tmp_path)
    assert (halt.kind, halt.phase, halt.rank) == ("stall", phase, 0)
    assert halt.step == (0 if phase in PHASES[:4] else 3)
    assert f"in phase {phase} at step" in halt.detail
    assert f"watchdog.{phase}_s={limit_s:g}" in halt.detail
    assert "in hang" in (tmp_path / "stacks/rank0.txt").read_text()
    assert read_exit(tmp_path, 0) == TrainExit.STALLED


@pytest.mark.parametrize("how", ["gil", "pattern"])
def test_stacks_are_dumped_while_a_c_call_holds_the_gil(tmp_path: Path, how: str) -> None:
    config = {"step_s": 0.4, **SHORT}
    assert run(tmp_path, config, hang_in="step", how=how) == TrainExit.STALLED
    text = (tmp_path / "stacks/rank0.txt").read_text()
    assert "in hang" in text and "in enter" in text and "in main" in text
    assert "hangs" in kinds(tmp_path) and "halted" not in kinds(tmp_path)


def test_a_stopped_trainer_is_killed_and_the_kernel_names_its_state(tmp_path: Path) -> None:
    config = {"step_s": 0.4, **SHORT}
    assert run(tmp_path, config, hang_in="step", how="stop", deaf=True) == TrainExit.STALLED
    text = (tmp_path / "stacks/rank0.txt").read_text()
    assert "no Python stacks (stopped by a signal)" in text
    assert "state T (stopped)" in text


def test_a_trainer_without_a_handler_is_not_killed_by_the_question(tmp_path: Path) -> None:
    config = {"step_s": 0.4, **SHORT}
    order: dict[str, Any] = {"hang_in": "step", "without_stacks": True}
    assert run(tmp_path, config, **order) == TrainExit.STALLED
    text = (tmp_path / "stacks/rank0.txt").read_text()
    assert "no Python stacks (no handler is installed)" in text
    assert "state S (sleeping)" in text


def test_a_trainer_that_never_beats_has_stalled_in_start(tmp_path: Path) -> None:
    from nsa.train.watchdog import supervise

    argv = [sys.executable, "-c", "import time; time.sleep(300)"]
    config = WatchdogConfig(start_s=0.3, grace_s=0.1)
    assert supervise(argv, tmp_path, config, 0, poll_s=0.01) == TrainExit.STALLED
    assert halt_of(tmp_path).phase == "start"


def test_a_trainer_that_hangs_after_done_has_stalled(tmp_path: Path) -> None:
    config = {"step_s": 0.5, **SHORT}
    assert run(tmp_path, config, hang_in="done", steps=5) == TrainExit.STALLED
    assert halt_of(tmp_path).phase == "done"


# What reports show


LINES = {
    "flat_lines": 6,
    "zero_gradient_lines": 3,
    "collapse_lines": 4,
    "slow_lines": 4,
}
WRONG = (
    "not_finite",
    "zero_gradient",
    "flat_line",
    "gate_collapse",
    "speed_collapse",
    "below_floor",
    "slow_path",
    "memory_creep",
)


@pytest.mark.parametrize("wrong", WRONG)
def test_what_a_trainer_reports_halts_it(tmp_path: Path, wrong: str) -> None:
    """The trainer obeys: it leaves by itself, after the step at which it finds halt.json."""
    assert run(tmp_path, LINES, wrong=wrong, at=25) == TrainExit.UNHEALTHY
    halt = halt_of(tmp_path)
    assert (halt.kind, halt.rank) == (wrong, 0)
    assert halt.step > 25 and "wanted" in halt.detail
    assert kinds(tmp_path)[-1] == "halted"


def test_memory_that_is_really_leaked_halts_it(tmp_path: Path) -> None:
    config = {**LINES, "memory_creep_pct": 200.0}
    assert run(tmp_path, config, wrong="real_leak", at=25) == TrainExit.UNHEALTHY
    assert halt_of(tmp_path).kind == "memory_creep"


def test_a_watchdog_that_is_off_lets_a_sick_run_go_on(tmp_path: Path) -> None:
    config = {**LINES, "enabled": False}
    assert run(tmp_path, config, wrong="zero_gradient", at=3, steps=30) == 0
    assert read_halt(tmp_path) is None


def test_a_trainer_that_ignores_the_halt_is_ended(tmp_path: Path) -> None:
    order: dict[str, Any] = {"wrong": "zero_gradient", "obeys": False, "deaf": True}
    assert run(tmp_path, {**LINES, **SHORT}, **order) == TrainExit.UNHEALTHY
    assert "halted" not in kinds(tmp_path)
    assert "in main" in (tmp_path / "stacks/rank0.txt").read_text()
    pid = HeartbeatReader(heartbeat_path(tmp_path, 0)).read()
    assert pid is not None and not is_running(pid.pid)


@pytest.mark.parametrize("how", ["sleep", "stop"])
def test_a_trainer_may_clean_up_before_it_is_killed(tmp_path: Path, how: str) -> None:
    config = {"step_s": 0.4, "grace_s": 1.0}
    assert run(tmp_path, config, hang_in="step", how=how, tidy=True) == TrainExit.STALLED
    assert kinds(tmp_path)[-2:] == ["hangs", "terminated"]


# How a trainer may end


def test_exit_0_before_done_is_a_failure(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, end="early") == TrainExit.UNHEALTHY
    shown = capfd.readouterr().out
    assert "exit code 0 in phase step at step 3; wanted phase done" in shown


def test_a_trainers_own_exit_code_is_kept(tmp_path: Path) -> None:
    assert run(tmp_path, end="explained") == TrainExit.MEMORY
    assert read_exit(tmp_path, 0) == TrainExit.MEMORY
    assert read_halt(tmp_path) is None


def test_what_the_trainer_has_explained_stays_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, end="explained") == TrainExit.MEMORY
    shown = capfd.readouterr()
    assert (shown.out, shown.err) == ("", f"{EXPLAINED}\n")


def test_what_the_trainer_has_not_explained_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, end="crash") == 1
    shown = capfd.readouterr()
    named = "nsa.train rank 0: the trainer ended with exit code 1 in phase step at step 3\n"
    assert shown.out.startswith(named) and "ZeroDivisionError" in shown.err


def test_of_several_ranks_the_one_that_ended_is_named(tmp_path: Path) -> None:
    process = start(tmp_path, rank=1, world_size=2, end="explained")
    text, _ = process.communicate()
    assert process.returncode == TrainExit.MEMORY
    assert EXPLAINED in text
    assert "nsa.train rank 1: the trainer ended with exit code 6 in phase step at step 3" in text


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGTERM", "SIGABRT"])
def test_death_by_a_signal_is_named(
    tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, end=name) == 128 + signal.Signals[name]
    assert f"the trainer was killed by {name} in phase step at step 3" in capfd.readouterr().out


def test_data_workers_end_with_their_trainer(tmp_path: Path) -> None:
    order: dict[str, Any] = {"workers": 2, "leaves_it_to_its_parent": True}
    assert run(tmp_path, end="SIGKILL", **order) == 137
    workers = json.loads((tmp_path / "workers0.json").read_text())
    assert len(workers) == 2
    assert not any(map(is_running, workers))


def test_stacks_of_data_workers_are_dumped_too(tmp_path: Path) -> None:
    config = {"data_s": 0.4, **SHORT}
    assert run(tmp_path, config, hang_in="data", workers=2) == TrainExit.STALLED
    for number in range(2):
        text = (tmp_path / f"stacks/rank0-worker{number}.txt").read_text()
        assert "in hang" in text and "in start_workers" in text
    assert not any(map(is_running, json.loads((tmp_path / "workers0.json").read_text())))


def test_an_oom_kill_is_guessed_from_the_kernels_counts(tmp_path: Path) -> None:
    """Fake counters: a test cannot have the kernel kill something."""

    def root(name: str, files: dict[str, str]) -> Path:
        for path, text in files.items():
            (tmp_path / name / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / path).write_text(text)
        return tmp_path / name

    vmstat = {"proc/vmstat": "pgfault 12\noom_kill 7\nx 1\n"}
    own = {
        "proc/self/cgroup": "0::/job/9\n",
        "sys/fs/cgroup/job/9/memory.events": "low 0\noom 3\noom_kill 2\noom_group_kill 0\n",
    }
    first = {"sys/fs/cgroup/memory/memory.oom_control": "under_oom 0\noom_kill 4\n"}
    assert oom_kills(root("machine", vmstat)) == 7
    assert oom_kills(root("second", {**vmstat, **own})) == 2
    assert oom_kills(root("first", {**vmstat, **first})) == 4
    assert oom_kills(root("nothing", {"proc/self/cgroup": ""})) == 0


def test_an_oom_kill_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = iter([3, 4])
    monkeypatch.setattr("nsa.train.watchdog.child.oom_kills", lambda: next(counts))
    assert run(tmp_path, end="SIGKILL") == 137
    shown = capfd.readouterr().out
    assert "killed by SIGKILL, and the kernel killed 1 for want of memory" in shown


# Signals, and the death of the parent


@pytest.mark.parametrize(
    ("number", "deaf", "code"),
    [(signal.SIGINT, False, 130), (signal.SIGTERM, False, 143), (signal.SIGTERM, True, 137)],
)
def test_a_signal_is_passed_on(tmp_path: Path, number: int, deaf: bool, code: int) -> None:
    process = start(tmp_path, {"grace_s": 0.5}, deaf=deaf)
    wait_for(lambda: step_of(tmp_path) >= 2)
    process.send_signal(number)
    text, _ = process.communicate()
    assert process.returncode == code
    assert f"{signal.Signals(number).name} received" in text
    assert read_exit(tmp_path, 0) == code
    # of one that does not end itself: where a launcher asks, another rank may have died
    written = stacks.stacks_path(tmp_path, 0)
    assert ("stand_in.py" in written.read_text()) == deaf


def test_a_third_interrupt_ends_a_trainer_that_ignores_two(tmp_path: Path) -> None:
    process = start(tmp_path, {"grace_s": 30.0}, deaf=True)
    wait_for(lambda: step_of(tmp_path) >= 2)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        step = step_of(tmp_path)
        wait_for(lambda step=step: step_of(tmp_path) > step + 5)
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode == 137


def test_the_trainer_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    process = start(tmp_path, leaves_it_to_its_parent=True, steps=1_000_000)
    wait_for(lambda: step_of(tmp_path) >= 2)
    beat = HeartbeatReader(heartbeat_path(tmp_path, 0)).read()
    assert beat is not None
    process.kill()
    try:
        wait_for(lambda: not is_running(beat.pid), seconds=15.0)
    finally:
        with suppress(ProcessLookupError):
            os.kill(beat.pid, signal.SIGKILL)
        process.communicate()


# Several ranks


def test_a_rank_that_dies_ends_the_others(tmp_path: Path) -> None:
    """Rank 1's trainer is killed; rank 0 hangs in what would be a collective."""
    first = start(tmp_path, SHORT, rank=0, world_size=2, hang_in="step", at=8)
    wait_for(lambda: step_of(tmp_path) >= 8)
    second = start(tmp_path, SHORT, rank=1, world_size=2, end="SIGKILL", at=8)
    texts = [first.communicate()[0], second.communicate()[0]]
    assert (first.returncode, second.returncode) == (TrainExit.PEER, 137), texts
    halt = halt_of(tmp_path)
    assert (halt.kind, halt.rank) == ("died", 1)
    assert "SIGKILL" in halt.detail
    assert "in hang" in (tmp_path / "stacks/rank0.txt").read_text()


def test_a_rank_whose_parent_dies_as_well_ends_the_others(tmp_path: Path) -> None:
    """Nobody leaves an exit code; the heartbeat names a process that has gone."""
    first = start(tmp_path, SHORT, rank=0, world_size=2, obeys=False)
    second = start(tmp_path, SHORT, rank=1, world_size=2)
    wait_for(lambda: step_of(tmp_path, 0) >= 5 and step_of(tmp_path, 1) >= 5)
    second.kill()
    second.communicate()
    text, _ = first.communicate()
    assert first.returncode == TrainExit.PEER, text
    assert "has lost its process" in halt_of(tmp_path).detail
    assert (halt_of(tmp_path).rank, read_exit(tmp_path, 1)) == (1, None)


def test_a_rank_that_stalls_halts_all_and_all_dump_their_stacks(tmp_path: Path) -> None:
    config = {"data_s": 0.5, **SHORT}
    first = start(tmp_path, config, rank=0, world_size=2, obeys=False)
    wait_for(lambda: step_of(tmp_path) >= 2)
    second = start(tmp_path, config, rank=1, world_size=2, hang_in="data", at=8)
    texts = [first.communicate()[0], second.communicate()[0]]
    assert (first.returncode, second.returncode) == (TrainExit.PEER, TrainExit.STALLED), texts
    assert (halt_of(tmp_path).kind, halt_of(tmp_path).rank) == ("stall", 1)
    assert "in hang" in (tmp_path / "stacks/rank1.txt").read_text()
    assert "in main" in (tmp_path / "stacks/rank0.txt").read_text()


def test_ranks_that_end_well_leave_each_other_alone(tmp_path: Path) -> None:
    first = start(tmp_path, rank=0, world_size=2, steps=60)
    second = start(tmp_path, rank=1, world_size=2, steps=5)
    for process in (second, first):
        text, _ = process.communicate()
        assert process.returncode == 0, text
    assert read_halt(tmp_path) is None


def test_only_rank_0_shows_the_live_line(tmp_path: Path) -> None:
    process = start(tmp_path, rank=1, world_size=2, steps=20)
    assert process.communicate()[0] == ""
    assert process.returncode == 0


# Halt files


def test_a_halt_of_an_earlier_run_does_not_stop_the_next(tmp_path: Path) -> None:
    assert run(tmp_path, LINES, wrong="zero_gradient") == TrainExit.UNHEALTHY
    detail = halt_of(tmp_path).detail
    assert run(tmp_path, LINES, steps=10) == 0
    assert read_halt(tmp_path) is None
    assert json.loads((tmp_path / "halt.last.json").read_text())["detail"] == detail
    assert kinds(tmp_path).count("resumed") == 1


def test_old_files_of_a_job_do_not_stop_a_rank_that_starts_before_rank_0(tmp_path: Path) -> None:
    """Rank 1's parent meets the old halt and the old exit of rank 0, which has not begun."""
    begin(tmp_path, 0)
    write_exit(tmp_path, 0, 8)
    write_halt(tmp_path, Halt("stall", "old", 0, 5, "data", ""))
    order: dict[str, Any] = {"world_size": 2, "steps": 30}
    second = start(tmp_path, {"connect_s": 1.0, **SHORT}, rank=1, hang_in="connect", **order)
    second.communicate()
    assert second.returncode == TrainExit.STALLED  # its own, in connect; not PEER of the old one
    assert halt_of(tmp_path).detail == "old"
    process = start(tmp_path, SHORT, rank=0, **order)
    text, _ = process.communicate()
    # rank 1's exit was left before this run; a real rank 1 would remove it before they connect
    assert process.returncode == TrainExit.PEER and "rank 1 ended with exit code 8" in text


def test_what_a_rank_finds_before_it_connects_counts_only_if_it_is_younger(tmp_path: Path) -> None:
    write_halt(tmp_path, Halt("stall", "old", 0, 5, "data", ""))
    mark_ns = begin(tmp_path, 1)
    path = tmp_path / "halt.json"
    assert path.exists() and not is_younger(path, mark_ns)
    os.utime(path, ns=(mark_ns + 1, mark_ns + 1))
    assert is_younger(path, mark_ns)
    begin(tmp_path, 0)
    assert not path.exists() and not is_younger(path, mark_ns)


@pytest.mark.parametrize("phase", [Phase.CONNECT, Phase.LOAD])
def test_a_halt_before_the_first_step_ends_a_rank(tmp_path: Path, phase: Phase) -> None:
    process = start(tmp_path, SHORT, hang_in=phase.name.lower())
    wait_for(lambda: phase_of(tmp_path) is phase)
    write_halt(tmp_path, Halt("stall", "rank 3: no progress", 3, 5, "data", ""))
    process.communicate()
    assert process.returncode == TrainExit.PEER


@pytest.mark.parametrize("text", ["", "please stop\n", "[1]", '{"kind": 3, "rank": 0}'])
def test_a_halt_that_somebody_makes_by_hand_counts(tmp_path: Path, text: str) -> None:
    process = start(tmp_path)
    wait_for(lambda: step_of(tmp_path) >= 2)
    (tmp_path / "halt.json").write_text(text)
    process.communicate()
    assert process.returncode == TrainExit.UNHEALTHY
    assert (halt_of(tmp_path).kind, halt_of(tmp_path).rank) == ("request", -1)
    assert kinds(tmp_path)[-1] == "halted"


def test_the_first_halt_wins(tmp_path: Path) -> None:
    """Of 16 threads that write at once, one publishes; nobody ever reads a half of it."""
    barrier, won = threading.Barrier(16), list[int]()

    def write(rank: int) -> None:
        barrier.wait()
        if write_halt(tmp_path, Halt("stall", "x" * 5000, rank, 5, "data", "")):
            won.append(rank)

    threads = [threading.Thread(target=write, args=(rank,)) for rank in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [halt_of(tmp_path).rank] == won
    assert [one.name for one in tmp_path.iterdir()] == ["halt.json"]


def test_the_first_halt_wins_without_hard_links_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    first, second = (Halt("stall", "x", rank, 5, "data", "") for rank in range(2))
    assert write_halt(tmp_path, first) and not write_halt(tmp_path, second)
    assert halt_of(tmp_path) == first


def test_a_full_disk_does_not_keep_the_watchdog_from_ending_a_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for name in ("halt.write_halt", "halt.write_exit"):
        monkeypatch.setattr(f"nsa.train.watchdog.{name}", full)
    monkeypatch.setattr(stacks, "dump", full)
    config = {"step_s": 0.4, **SHORT}
    assert run(tmp_path, config, hang_in="step") == TrainExit.STALLED
    assert capfd.readouterr().out.count("No space left on device); the run ends without it") == 3


# Webhook


@pytest.fixture
def hook() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    got: list[dict[str, Any]] = []

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/halt", got
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_halt_is_posted(tmp_path: Path, hook: tuple[str, list[dict[str, Any]]]) -> None:
    url, got = hook
    config = {**LINES, "webhook": url}
    assert run(tmp_path, config, wrong="zero_gradient") == TrainExit.UNHEALTHY
    (posted,) = got
    assert (posted["kind"], posted["rank"]) == ("zero_gradient", 0)
    assert posted["out"] == str(tmp_path) and posted["detail"] == halt_of(tmp_path).detail


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/", "http://no address/", "https://"])
def test_a_webhook_that_fails_is_a_line_and_no_more(
    tmp_path: Path, url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    config = {**LINES, "webhook": url}
    assert run(tmp_path, config, wrong="zero_gradient") == TrainExit.UNHEALTHY
    assert f"the webhook {url} failed" in capfd.readouterr().out


# Stacks, asked for from any process


def test_stacks_have_every_thread(tmp_path: Path) -> None:
    code = (
        "import sys, time, threading; from pathlib import Path; from nsa.train import stacks\n"
        "def first(): time.sleep(300)\n"
        "def second(): time.sleep(300)\n"
        "for one in (first, second): threading.Thread(target=one, daemon=True).start()\n"
        "stacks.install(Path(sys.argv[1])); print(flush=True); time.sleep(300)"
    )
    path = stacks.stacks_path(tmp_path, 5)
    argv = [sys.executable, "-c", code, str(path)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        for asked in (1, 2):
            assert stacks.dump(process.pid, path, 30.0)
            text = path.read_text()
            assert text.count("in first") == text.count("in second") == asked
            assert text.count(f"pid {process.pid}") == asked
    finally:
        process.kill()
        process.communicate()
    assert not stacks.dump(process.pid, path, 0.1)
    assert "the process has ended" in path.read_text()


def test_a_parent_that_is_slow_to_look_raises_no_alarm(tmp_path: Path) -> None:
    """The parent is stopped for longer than the time-out, while the trainer is well: it has seen
    nothing, so it may claim nothing.
    """
    process = start(tmp_path, {"step_s": 4.0, "data_s": 4.0})
    wait_for(lambda: step_of(tmp_path) >= 2)
    beat = HeartbeatReader(heartbeat_path(tmp_path, 0)).read()
    assert beat is not None
    for pid in (beat.pid, process.pid):
        os.kill(pid, signal.SIGSTOP)
    time.sleep(5.0)
    os.kill(process.pid, signal.SIGCONT)
    time.sleep(0.5)
    os.kill(beat.pid, signal.SIGCONT)
    step = step_of(tmp_path)
    wait_for(lambda: step_of(tmp_path) > step + 5)
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert read_halt(tmp_path) is None and exit_path(tmp_path, 0).exists()


def test_who_was_orphaned_before_it_asked_dies_at_once() -> None:
    code = "from nsa.train.watchdog import die_with_parent; die_with_parent(%d)"
    for parent, status in ((os.getpid(), 0), (os.getppid(), -signal.SIGKILL)):
        done = subprocess.run([sys.executable, "-c", code % parent], check=False)
        assert done.returncode == status


def test_the_stand_in_dies_without_a_supervisor_too(tmp_path: Path) -> None:
    """`die_with_parent` as data workers call it: their parent is this process' child."""
    process = subprocess.Popen(stand_in(tmp_path, workers=1), cwd=ROOT)
    path = tmp_path / "workers0.json"
    (worker,) = wait_for(
        lambda: path.exists() and path.read_text() and json.loads(path.read_text())
    )
    wait_for(lambda: (tmp_path / "stacks/rank0-worker0.txt").exists())
    assert is_running(worker)
    process.kill()
    process.wait()
    wait_for(lambda: not is_running(worker))
