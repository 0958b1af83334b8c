"""A trainer without torch, which misbehaves on request: what the watchdog's tests run.

    python -m tests.nsa.train.stand_in OUT '{"hang_in": "data", "how": "gil", "at": 5}'

It uses the real heartbeat, log, stacks and halt file, in the order of the real loop.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import re
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsa.train import stacks
from nsa.train.errors import TrainExit
from nsa.train.heartbeat import HeartbeatWriter
from nsa.train.log import RunLog
from nsa.train.records import Phase, StepRecord
from nsa.train.watchdog import begin_alone, die_with_parent, heartbeat_path, read_halt

GIB = 2**30
EXPLAINED = "nsa.train: out of memory in step 3; wanted less; lower train.batch"
HEALTHY: dict[str, Any] = {
    "time_utc": "2026-01-01T00:00:00.000+00:00",
    "rank": 0,
    "step": 0,
    "loss_nats": 3.0,
    "bits_per_byte": 1.4,
    "gradient_norm": 0.7,
    "learning_rate": 6e-4,
    "tokens_per_s": 400_000.0,
    "mfu_pct": 40.0,
    "step_ms": 40.0,
    "wait_p50_ms": 0.1,
    "wait_p95_ms": 0.4,
    "fetch_p50_ms": 2.0,
    "fetch_p95_ms": 5.0,
    "bad_steps": 0,
    "memory_allocated_bytes": 10 * GIB,
    "memory_reserved_bytes": 12 * GIB,
    "memory_rss_bytes": 4 * GIB,
    "engaged": {"sel.triton": 12},
    "statistics": {
        "gate_entropy": 1.0,
        "branch_share": {"cmp": 0.3, "sel": 0.3, "win": 0.4},
    },
    "config_sha256": "ab" * 32,
}
COLLAPSED = {"gate_entropy": 0.01, "branch_share": {"cmp": 0.002, "sel": 0.001, "win": 0.997}}


def record(**values: Any) -> StepRecord:
    """A healthy line, but for ``values``."""
    return StepRecord(**{**HEALTHY, **values})


@dataclass(frozen=True)
class Order:
    """What the stand-in does. ``hang_in`` a phase, at step ``at``, ``how``: sleep, gil (a C call
    that holds the GIL), pattern (re backtracks), stop (SIGSTOP). ``wrong``: what its reports show
    from step ``at``. ``end``: done, early (0 without DONE), explained (its one line and exit code),
    crash (a traceback), or the name of a signal.
    """

    rank: int = 0
    world_size: int = 1
    steps: int = 1000
    step_s: float = 0.02
    at: int = 3
    hang_in: str = ""
    how: str = "sleep"
    wrong: str = ""
    end: str = "done"
    obeys: bool = True
    deaf: bool = False  # to SIGTERM and SIGINT
    workers: int = 0
    tidy: bool = False  # cleans up at SIGTERM
    without_stacks: bool = False
    leaves_it_to_its_parent: bool = False  # asks the kernel for no signal of its parent's death


def hang(how: str) -> None:
    """For minutes."""
    if how == "gil":
        while True:  # a signal ends a call early
            ctypes.PyDLL(None).usleep(300_000_000)
    elif how == "pattern":
        re.match(r"(a+)+$", "a" * 64 + "b")
    elif how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        time.sleep(300)


def reported(order: Order, step: int) -> StepRecord:
    """The line of ``step``: a loss that falls with a little noise, and from ``order.at`` on what is
    wrong.
    """
    values: dict[str, Any] = {
        "rank": order.rank,
        "step": step,
        "loss_nats": 3.0 - 1e-3 * step + 0.01 * math.sin(7.3 * step),
    }
    since = step - order.at
    if order.wrong and since > 0:
        values |= {
            "not_finite": {"loss_nats": None, "gradient_norm": math.nan, "bad_steps": since},
            "zero_gradient": {"gradient_norm": 0.0},
            "flat_line": {"loss_nats": math.log(256)},
            "gate_collapse": {"statistics": COLLAPSED},
            "speed_collapse": {"tokens_per_s": 30_000.0},
            "below_floor": {"loss_nats": 1.0},
            "slow_path": {},
            "memory_creep": {"memory_rss_bytes": int(4 * GIB * (1 + 0.04 * since))},
        }[order.wrong]
    return record(**values)


def hold_memory(order: Order, step: int, held: list[bytearray]) -> dict[str, int]:
    """Really leak 4 MiB a step; the resident bytes."""
    if order.wrong == "real_leak" and step > order.at:
        held.append(bytearray(b"x" * (4 << 20)))
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {"memory_rss_bytes": pages * os.sysconf("SC_PAGE_SIZE")}


def start_workers(out: Path, order: Order) -> list[int]:
    """Forks that prefetch nothing, with a stacks file each."""
    pids = []
    for number in range(order.workers):
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            if not order.leaves_it_to_its_parent:
                die_with_parent(parent)
            stacks.install(stacks.stacks_path(out, order.rank, number))
            hang("sleep")
        pids.append(pid)
    return pids


def main(out: Path, order: Order) -> int:
    if not order.leaves_it_to_its_parent:
        die_with_parent()
    begin_alone(out, order.rank)
    if not order.without_stacks:
        stacks.install(stacks.stacks_path(out, order.rank))
    if order.deaf:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
    else:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    heart = HeartbeatWriter(
        heartbeat_path(out, order.rank),
        rank=order.rank,
        pid=os.getpid(),
        world_size=order.world_size,
        steps=order.steps,
    )
    log = RunLog(out, order.rank, tensorboard=False)

    def tidy_up(*_: object) -> None:
        log.event("terminated")
        os._exit(1)

    if order.tidy:
        signal.signal(signal.SIGTERM, tidy_up)

    def enter(phase: Phase, step: int) -> None:
        heart.beat(phase, step)
        if phase.name.lower() == order.hang_in and (step >= order.at or phase < Phase.DATA):
            log.event("hangs", phase=phase.name.lower(), how=order.how)
            hang(order.how)

    enter(Phase.START, 0)
    (out / f"workers{order.rank}.json").write_text(json.dumps(start_workers(out, order)))
    for phase in (Phase.CONNECT, Phase.LOAD, Phase.BUILD):
        enter(phase, 0)
    held: list[bytearray] = []
    for step in range(1, order.steps + 1):
        enter(Phase.DATA, step - 1)
        enter(Phase.STEP, step - 1)
        time.sleep(order.step_s)
        line = reported(order, step) if order.wrong != "real_leak" else None
        line = line or record(step=step, loss_nats=3 - step / 1e3, **hold_memory(order, step, held))
        log.write(line)
        slow = "sel.v1 (12 calls)" if order.wrong == "slow_path" and step > order.at else ""
        floor = 1.5 if order.wrong == "below_floor" else None
        heart.report(line, entropy_floor_nats=floor, slow=slow)
        heart.beat(Phase.STEP, step)
        for phase in (Phase.EVAL, Phase.SAVE, Phase.SAMPLE):
            if phase.name.lower() == order.hang_in:
                enter(phase, step)
        if order.obeys and (halt := read_halt(out)) is not None:
            log.event("halted", halt=halt.kind)
            return TrainExit.UNHEALTHY
        if step >= order.at and order.end == "early":
            return 0
        if step >= order.at and order.end == "explained":
            sys.stderr.write(f"{EXPLAINED}\n")
            return TrainExit.MEMORY
        if step >= order.at and order.end == "crash":
            raise ZeroDivisionError
        if step >= order.at and order.end.startswith("SIG"):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.Signals[order.end])
    log.close()
    heart.beat(Phase.DONE, order.steps)
    if order.hang_in == "done":
        hang(order.how)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(Path(sys.argv[1]), Order(**json.loads(sys.argv[2]))))
    except KeyboardInterrupt:
        sys.exit(TrainExit.INTERRUPTED)
