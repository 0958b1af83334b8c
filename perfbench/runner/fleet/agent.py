"""The end of a fleet that runs on a node: it holds one card, and measures what it is sent, one job
after another.

A request and its reply are JSON objects, so that every transport is a pipe for text. The agent asks
its own machine what it is, and shares nothing with the agent of another card: it sees only its own
GPU, holds the card's lock, and compiles into caches of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from perfbench.errors import PerfbenchError
from perfbench.machine import (
    TargetFit,
    adopt_settings,
    capability_here,
    check_target,
    collect_environment,
    give,
    gpu_lock,
    package_sha256,
    source_of,
    uuid_sha256,
)
from perfbench.records import Job
from perfbench.runner.ab.checkout import checked_out, own_checkout
from perfbench.runner.ab.version_executor import prepared_versions
from perfbench.runner.executor import ROOT, Executor, ForkServerExecutor, prepared_executors
from perfbench.worker import MEASURE

Reply = dict[str, Any]
# Two measuring processes that compile into one folder wait for each other's files.
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


def versions_here() -> dict[str, str]:
    """What must be the same on every node, and at whoever asks them: the source."""
    return {
        "perfbench": package_sha256(ROOT / "perfbench"),
        "nsa": package_sha256(ROOT / "nsa"),
    }


@dataclass(frozen=True, slots=True)
class AgentTarget:
    """The target of a matrix, which a card of a fleet either is or is not."""

    gpu: str
    count: int
    is_cpu: bool
    on_mismatch: str = "refuse"


class CardAgent:
    """Answers requests until `close`."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._open = ExitStack()  # what measures now
        self._executors: tuple[Executor, ...] = ()
        self._fit: TargetFit | None = None
        self._measure = MEASURE
        self._operations: Mapping[str, Callable[[Mapping[str, Any]], object]] = {
            "hello": self._hello,
            "new_block": self._new_block,
            "prepare": self._prepare,
            "execute": self._execute,
            "versions": self._open_versions,
            "end_versions": self._end_versions,
        }

    def handle(self, text: str) -> str:
        """The reply to one request: {"ok": ...}, or {"error": ..., "exit_code": ...} where a user's
        problem ended it.
        """
        request = json.loads(text)
        reply: Reply
        try:
            reply = {"ok": self._operations[request["op"]](request)}
        except PerfbenchError as error:
            reply = {"error": str(error), "exit_code": int(error.exit_code)}
        return json.dumps(reply)

    def close(self) -> None:
        """End every process that was started, and let go of the card."""
        self._open.close()
        self._stack.close()

    def _hello(self, request: Mapping[str, Any]) -> Reply:
        """Take the card; ENVIRONMENT where it is not the target's, or is in use."""
        adopt_settings(request["settings"])
        target = AgentTarget(**request["target"])
        fit = check_target(target)
        self._measure = request.get("measure") or MEASURE
        # held for as long as this agent lives; what measures takes the GPU's own, too
        card, what = request["cpu_card"] or socket.gethostname(), "node's CPUs"
        if fit.gpu is not None:
            card, what = fit.gpu.uuid, "GPU for a fleet"
            give({"CUDA_VISIBLE_DEVICES": card})
        self._stack.enter_context(gpu_lock(f"agent {card}", what=what))
        scratch = self._stack.enter_context(_scratch(card))
        give({name: str(scratch / name.lower()) for name in CACHES})
        self._fit = fit
        self._end_versions({})
        return {
            "host": socket.gethostname(),
            "environment": collect_environment(fit.device).model_dump(),
            "capability": asdict(capability_here(fit)),
            "versions": versions_here(),
            "warning": fit.warning,
        }

    def _new_block(self, request: Mapping[str, Any]) -> None:
        self._executors[request["slot"]].new_block()

    def _prepare(self, request: Mapping[str, Any]) -> None:
        jobs = [Job.model_validate(job) for job in request["jobs"]]
        self._executors[request["slot"]].prepare(jobs)

    def _execute(self, request: Mapping[str, Any]) -> Reply:
        job = Job.model_validate(request["job"])
        row: Reply = self._executors[request["slot"]].execute(job).model_dump()
        return row

    def _open_versions(self, request: Mapping[str, Any]) -> None:
        """Executors 0 and 1 are then those of the commit ``base`` and of this node's own tree."""
        assert self._fit is not None
        self._open.close()
        with ExitStack() as stack:
            base = stack.enter_context(checked_out(request["base"], ROOT))
            own = stack.enter_context(own_checkout(ROOT, source_of(ROOT)))
            versions = prepared_versions(self._fit, (base, own), self._measure)
            self._executors = stack.enter_context(versions)
            self._open = stack.pop_all()

    def _end_versions(self, request: Mapping[str, Any]) -> None:
        """Back to one executor, of this node's own tree."""
        assert self._fit is not None
        self._open.close()
        make = partial(ForkServerExecutor, self._measure)
        with ExitStack() as stack:
            self._executors = stack.enter_context(prepared_executors(self._fit, [make]))
            self._open = stack.pop_all()


@contextmanager
def _scratch(card: str) -> Iterator[Path]:
    """A folder of this card's own; what an agent that was killed left there is removed first, which
    the card's lock allows.
    """
    folder = Path(tempfile.gettempdir(), f"perfbench-card-{os.getuid()}-{uuid_sha256(card)[:16]}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
