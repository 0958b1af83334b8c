"""How tests start the stand-in under the watchdog, in this process or in one of its own.

python -m tests.nsa.train.supervised OUT ORDER CONFIG RANK
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nsa.train.config import WatchdogConfig
from nsa.train.watchdog import supervise

ROOT = Path(__file__).parents[3]
LONG_S = 60.0  # for what must happen; reached only where it does not
# What a loaded machine may take; a test shortens the one time-out that it is about.
PHASES = ("start", "connect", "load", "build", "data", "step", "eval", "save", "sample")
PATIENT: dict[str, Any] = {f"{phase}_s": LONG_S for phase in PHASES} | {"grace_s": 5.0}


def stand_in(out: Path, **order: Any) -> list[str]:
    """The command of the stand-in."""
    return [sys.executable, "-m", "tests.nsa.train.stand_in", str(out), json.dumps(order)]


def run(out: Path, config: dict[str, Any] | None = None, **order: Any) -> int:
    """Supervise a stand-in here; the exit code."""
    watching = WatchdogConfig(**{**PATIENT, **(config or {})})
    argv = stand_in(out, **order)
    return supervise(argv, out, watching, order.get("rank", 0), poll_s=0.01)


def start(out: Path, config: dict[str, Any] | None = None, **order: Any) -> subprocess.Popen[str]:
    """Supervise a stand-in in a process of its own."""
    arguments = [json.dumps(order), json.dumps({**PATIENT, **(config or {})})]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.nsa.train.supervised", str(out), *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for(what: Callable[[], Any], seconds: float = LONG_S) -> Any:
    """The first true value of ``what``; AssertionError where none comes."""
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, f"{what} stays {found!r}"
        time.sleep(0.01)
    return found


def is_running(pid: int) -> bool:
    """Whether ``pid`` is a process that has not ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


if __name__ == "__main__":
    os.chdir(ROOT)
    here, its_order, its_config = sys.argv[1:4]
    asked = json.loads(its_order)
    sys.exit(
        supervise(
            stand_in(Path(here), **asked),
            Path(here),
            WatchdogConfig(**json.loads(its_config)),
            asked.get("rank", 0),
            poll_s=0.01,
            live_every_s=0.2,
        )
    )
