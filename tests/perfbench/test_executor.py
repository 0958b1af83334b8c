"""Real servers and children with a stub for the measuring function: every way to fail is a status,
and no process stays.
"""

import contextlib
import itertools
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from perfbench.errors import Exit, PerfbenchError
from perfbench.records.job import Injection, Job, MeasureOptions
from perfbench.records.rows import Expect, Replicate, RouteLine, Status
from perfbench.runner import server_client
from perfbench.runner.executor import ForkServerExecutor
from perfbench.runner.server_client import describe_exit, tail
from tests.perfbench import stub_measure as stub

ROOT = pathlib.Path(__file__).parents[2]
STUB = "tests.perfbench.stub_measure:measure"


def job(batch: int = 1, **changes: Any) -> Job:
    values: dict[str, Any] = {
        "cell_id": f"batch={batch}",
        "replicate": 2,
        "axes": {
            "workload": "train",
            "seq_len": 128,
            "path": "v2",
            "fa2": "off",
            "batch": batch,
            "dtype": "fp32",
        },
        "config_sha256": "c" * 64,
        "model": {},
        "measure": MeasureOptions(),
        "timeout_s": 300.0,
        "plan": RouteLine(branches=[], counters=["sel.v2"]),
        "expect": Expect(),
        "device": "cpu",
        "seed": 1,
        "profile": False,
    }
    return Job(**{**values, **changes})


@pytest.fixture(scope="module")
def executor() -> Iterator[ForkServerExecutor]:
    with ForkServerExecutor(STUB, cwd=ROOT) as made:
        yield made


def facts(row: Replicate) -> dict[str, int]:
    assert row.status is Status.OK, row
    return {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", row.reason)}


def alive(pid: int) -> bool:
    try:
        status = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rsplit(")", 1)[1].split()[0] != "Z"


def wait_until_gone(pid: int, seconds: float = 120.0) -> bool:
    deadline = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


def test_each_replicate_has_a_process_and_a_session_of_its_own(
    executor: ForkServerExecutor,
) -> None:
    first, second = facts(executor.execute(job())), facts(executor.execute(job()))
    assert first["pid"] != second["pid"] and first["server"] == second["server"]
    assert first["session"] == first["pid"] and os.getpid() not in first.values()
    assert os.getsid(first["server"]) == first["server"], (
        "the terminal's Ctrl-C must reach the parent alone"
    )


def test_the_server_is_a_program_of_its_own(executor: ForkServerExecutor) -> None:
    """Started through the executor it would hold that module twice."""
    server = facts(executor.execute(job()))["server"]
    command = pathlib.Path(f"/proc/{server}/cmdline").read_bytes().split(b"\0")
    assert command[1:3] == [b"-m", b"perfbench.worker"]
    assert "worker.server import" not in (ROOT / "perfbench/runner/executor.py").read_text()
    said = subprocess.run(
        [*command[:3], "--help"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert (
        said.returncode == 0 and "python -m perfbench.worker" in said.stdout and said.stderr == ""
    )


def test_nothing_starts_where_the_look_before_a_block_finds_company() -> None:
    looks = iter([None, PerfbenchError(Exit.ENVIRONMENT, "busy")])

    def look() -> None:
        if error := next(looks):
            raise error

    with ForkServerExecutor(STUB, cwd=ROOT, before_block=look) as watched:
        others = set(children_of(os.getpid()))
        server = facts(watched.execute(job()))["server"]
        with pytest.raises(PerfbenchError, match="busy"):
            watched.new_block()
        assert not alive(server) and set(children_of(os.getpid())) <= others


def test_a_block_has_a_fresh_server(executor: ForkServerExecutor) -> None:
    before = facts(executor.execute(job()))["server"]
    executor.new_block()
    assert facts(executor.execute(job()))["server"] != before
    assert not alive(before)


def test_a_row_without_gpu_has_telemetry_with_reasons(executor: ForkServerExecutor) -> None:
    row = executor.execute(job())
    assert (
        row.telemetry is not None
        and row.telemetry.power_w is None
        and "no GPU" in row.telemetry.absent["power_w"]
    )
    assert row.device_uuid_sha256 is None


@pytest.mark.parametrize(
    ("batch", "status", "reason"),
    [
        (stub.OOM, Status.OOM, "CUDA out of memory. Tried to allocate 20.00 GiB"),
        (stub.CPU_OOM, Status.OOM, "DefaultCPUAllocator"),
        (stub.SEGV, Status.CRASH, "killed by SIGSEGV"),
        (stub.RAISE, Status.CRASH, "LookupError: no such weight: layer 3 look at"),
        (stub.KILLED, Status.CRASH, "killed by SIGKILL, perhaps out of host memory"),
        (stub.SILENT, Status.CRASH, "without a result"),
        (stub.EXIT, Status.CRASH, "exit status 1"),
        (stub.OTHER, Status.CRASH, "measured another"),
    ],
)
def test_a_failure_is_a_status_and_the_next_job_goes_on(
    executor: ForkServerExecutor, batch: int, status: Status, reason: str
) -> None:
    row = executor.execute(job(batch))
    assert row.status is status and reason in row.reason, row
    assert row.tok_per_s is None and row.samples_s == []
    assert (row.cell_id, row.replicate) == (f"batch={batch}", 2)
    assert facts(executor.execute(job()))


def test_a_crash_keeps_the_tail_of_stderr(executor: ForkServerExecutor) -> None:
    segfault = executor.execute(job(stub.SEGV))
    assert (
        "Segmentation fault" in segfault.stderr_tail and "stub_measure.py" in segfault.stderr_tail
    )
    noisy = executor.execute(job(stub.NOISY))
    assert len(noisy.stderr_tail.splitlines()) == server_client.TAIL_LINES
    assert (
        noisy.stderr_tail.endswith("LookupError: after much noise")
        and "line 99" in noisy.stderr_tail
    )
    assert "\x1b" not in noisy.stderr_tail and "\x00" not in noisy.stderr_tail


@contextlib.contextmanager
def sleeping_parent() -> Iterator[None]:
    """Fails where this process computes for a fifth of the time that passes inside."""
    begin, used = time.monotonic(), time.process_time()
    yield
    assert time.process_time() - used < 0.2 * (time.monotonic() - begin), (
        "the parent must sleep while its child measures"
    )


def test_a_timeout_kills_the_group_and_costs_the_parent_nothing(
    executor: ForkServerExecutor,
) -> None:
    executor.execute(job())
    for limit_s in (1.0, 8.0, 64.0):
        begin = time.monotonic()
        with sleeping_parent():
            row = executor.execute(job(stub.HANG, timeout_s=limit_s))
        whole_s = time.monotonic() - begin
        if row.stderr_tail:  # else this machine is so busy that the child has not come to hang
            break
    assert row.status is Status.TIMEOUT and row.stderr_tail == "about to hang"
    assert f"after {limit_s:g} s" in row.reason
    assert limit_s <= row.wall_s <= whole_s, "no sooner, and the child's 600 s were not waited for"
    assert facts(executor.execute(job())), "the server must be in step after a timeout"


def test_what_a_child_leaves_behind_is_killed(executor: ForkServerExecutor) -> None:
    row = executor.execute(job(stub.LITTER))
    found = re.search(r"helper=(\d+)", row.stderr_tail)
    assert found and wait_until_gone(int(found[1]))


def test_a_server_that_died_is_replaced(executor: ForkServerExecutor) -> None:
    server = facts(executor.execute(job()))["server"]
    os.kill(server, signal.SIGKILL)
    assert wait_until_gone(server)
    row = executor.execute(job())
    assert row.status is Status.CRASH and "server" in row.reason and "SIGKILL" in row.reason
    assert facts(executor.execute(job()))["server"] != server


def test_a_server_that_dies_under_a_child_takes_it_along(executor: ForkServerExecutor) -> None:
    others = set(children_of(os.getpid()))  # processes that tests of other files share
    server = facts(executor.execute(job()))["server"]

    def kill_once_a_child_hangs() -> None:
        while not hanging_children(server):
            time.sleep(0.01)
        os.kill(server, signal.SIGKILL)

    killer = threading.Thread(target=kill_once_a_child_hangs)
    killer.start()
    row = executor.execute(job(stub.HANG, timeout_s=300.0))
    killer.join()
    assert row.status is Status.CRASH and "server" in row.reason
    assert row.stderr_tail == "about to hang"
    assert set(children_of(os.getpid())) <= others


def hanging_children(server: int) -> list[int]:
    """Children that have said so; their stderr is a file."""
    found = []
    for pid in children_of(server):
        with contextlib.suppress(OSError):
            said = pathlib.Path(f"/proc/{pid}/fd/2").resolve()
            found += [pid] if said.is_file() and "about to hang" in tail(said) else []
    return found


def children_of(pid: int) -> list[int]:
    """Living descendants' ids; /proc is the witness."""
    found = []
    for entry in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(entry.parent.name))
    return found


@pytest.mark.parametrize(
    ("kind", "status", "reason"),
    [("hang", Status.TIMEOUT, "killed"), ("segv", Status.CRASH, "SIGSEGV")],
)
def test_injections(executor: ForkServerExecutor, kind: str, status: Status, reason: str) -> None:
    limit_s = 0.5 if kind == "hang" else 300.0
    row = executor.execute(
        job(timeout_s=limit_s, injection=Injection(kind=kind, cell_id="batch=1"))
    )
    assert row.status is status and reason in row.reason


def test_an_injected_oom_raises_torchs_own_error(executor: ForkServerExecutor) -> None:
    row = executor.execute(job(injection=Injection(kind="oom", cell_id="batch=1")))
    assert row.status is Status.OOM and "injected: out of memory" in row.reason


def test_a_slowdown_is_left_to_the_measuring_function(executor: ForkServerExecutor) -> None:
    assert facts(
        executor.execute(job(injection=Injection(kind="slowdown", percent=10.0, cell_id="batch=1")))
    )


@pytest.mark.parametrize(
    "measure", ["tests.perfbench.stub_measure:nothing", "tests.perfbench.no_such_module:measure"]
)
def test_a_server_that_cannot_start_is_an_environment_error(measure: str) -> None:
    with (
        ForkServerExecutor(measure, cwd=ROOT) as broken,
        pytest.raises(PerfbenchError, match="no") as caught,
    ):
        broken.execute(job())
    assert (
        caught.value.exit_code is Exit.ENVIRONMENT
        and "Error" in str(caught.value)
        and "doctor" in str(caught.value)
    )


def test_waits_until_the_gpu_memory_is_back() -> None:
    used = iter([0, 5 * 2**30, 5 * 2**30, 0])
    with ForkServerExecutor(STUB, cwd=ROOT, used_memory=lambda: next(used)) as watching:
        row = watching.execute(job())
    assert row.status is Status.OK and "still held" not in row.reason and next(used, None) is None


def test_memory_that_does_not_come_back_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perfbench.runner.executor.MEMORY_BACK_S", 0.1)
    used = iter([0, *[5 * 2**30] * 1000])
    with ForkServerExecutor(STUB, cwd=ROOT, used_memory=lambda: next(used)) as watching:
        assert "the GPU still held 5120 MiB" in watching.execute(job()).reason


PARENT = f"""
import sys, threading, time
sys.path.insert(0, {str(ROOT)!r})
from tests.perfbench.test_executor import job, stub
from perfbench.runner.executor import ForkServerExecutor
with ForkServerExecutor({STUB!r}) as executor:
    print(executor.execute(job()).reason, flush=True)
    executor.execute(job(stub.HANG))
"""


@pytest.fixture
def hanging() -> Iterator[tuple[subprocess.Popen[str], int, int]]:
    """A parent process, its server, and the child that hangs."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert parent.stdout is not None
    server = int(dict(re.findall(r"(\w+)=(\d+)", parent.stdout.readline()))["server"])
    deadline = time.monotonic() + 120
    while not (children := children_of(server)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(children) == 1
    yield parent, server, children[0]
    parent.kill()
    parent.communicate()


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL, signal.SIGTERM])
def test_no_orphan_survives_the_parent(
    hanging: tuple[subprocess.Popen[str], int, int], sent: signal.Signals
) -> None:
    parent, server, child = hanging
    parent.send_signal(sent)
    parent.wait(timeout=120)
    assert wait_until_gone(child) and wait_until_gone(server)


def test_no_child_survives_its_server(hanging: tuple[subprocess.Popen[str], int, int]) -> None:
    parent, server, child = hanging
    parent.send_signal(signal.SIGSTOP)  # so that it cannot clean up
    os.kill(server, signal.SIGKILL)
    assert wait_until_gone(child)


def test_descriptions_of_exits(tmp_path: pathlib.Path) -> None:
    assert (
        describe_exit(3) == "exit status 3"
        and describe_exit(-11) == "killed by SIGSEGV"
        and describe_exit(-77) == "killed by signal 77"
    )
    assert describe_exit(None) == "it does not answer"
    assert tail(tmp_path / "missing") == ""
    (tmp_path / "huge").write_bytes(b"x" * 100_000 + b"\n\xff\xfe last\r\n\n")
    assert tail(tmp_path / "huge").endswith("\ufffd\ufffd last")


def together(
    executor: ForkServerExecutor, *batches: int, changes: dict[int, Any] | None = None
) -> list[Replicate]:
    """``changes`` are those of the job of one batch."""
    changes = changes or {}
    jobs = [
        job(batch, replicate=number, waiting_peers=len(batches) - 1, **changes.get(batch, {}))
        for number, batch in enumerate(batches)
    ]
    executor.prepare(jobs)
    return [executor.execute(one) for one in jobs]


def test_prepared_side_by_side_and_timed_one_by_one(executor: ForkServerExecutor) -> None:
    rows = [facts(row) for row in together(executor, 1, 2, 3)]
    assert len({row["pid"] for row in rows}) == 3 and len({row["server"] for row in rows}) == 1
    assert all(first["ended"] < then["began"] for first, then in itertools.pairwise(rows)), (
        "no two may time at once"
    )


def test_a_failure_in_company_is_the_status_of_its_own_job_alone(
    executor: ForkServerExecutor,
) -> None:
    kinds = [1, stub.SEGV, 2, stub.SILENT, stub.HANG, 3]
    rows = together(executor, *kinds, changes={stub.HANG: {"timeout_s": 1.0}})
    wanted = [Status.OK, Status.CRASH, Status.OK, Status.CRASH, Status.TIMEOUT, Status.OK]
    assert [row.status for row in rows] == wanted and [row.axes.batch for row in rows] == kinds
    assert facts(executor.execute(job()))


def test_out_of_memory_in_company_is_tried_again_alone(executor: ForkServerExecutor) -> None:
    """The memory of those that wait is not the cell's own."""
    scarce, last = together(executor, stub.CROWDED, 1)
    assert facts(scarce) and scarce.waiting_peers == 0 and facts(last)
    assert facts(scarce)["server"] == facts(last)["server"], (
        "nobody else may live while it is tried again"
    )
    assert together(executor, stub.OOM, 1)[0].status is Status.OOM


def test_a_server_that_dies_while_children_wait_loses_only_their_preparation(
    executor: ForkServerExecutor,
) -> None:
    jobs = [job(batch, replicate=batch, waiting_peers=1) for batch in (1, 2)]
    server = facts(executor.execute(job()))["server"]
    executor.prepare(jobs)
    waiting = children_of(server)
    assert len(waiting) == 2
    os.kill(server, signal.SIGKILL)
    assert all(wait_until_gone(pid) for pid in waiting)
    first, second = (executor.execute(one) for one in jobs)
    assert (
        first.status is Status.CRASH
        and "SIGKILL" in first.reason
        and facts(second)["server"] != server
    )


def test_memory_is_waited_for_when_the_last_of_a_company_has_ended() -> None:
    used = iter([0, 5 * 2**30, 0])
    with ForkServerExecutor(STUB, cwd=ROOT, used_memory=lambda: next(used)) as watching:
        rows = together(watching, 1, 2, 3)
    assert all(row.status is Status.OK for row in rows) and next(used, None) is None
