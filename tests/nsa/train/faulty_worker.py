"""The trainer's process with one planted fault: argv is FAULT OUT [CHECKPOINT].

Faults begin in step 6, so that each run is first a sound one. OUT/fault is written as it hangs or
is killed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nsa.model import TinyLM
from nsa.train import assemble, observe, worker
from nsa.train.checkpoint import CheckpointStore
from nsa.train.config import RunConfig
from nsa.train.loop import Trainer
from nsa.train.records import Phase
from nsa.train.step import TrainStep

FIRST_BAD_STEP = 6
kept: list[bytes] = []


def begin_fault() -> None:
    Path(sys.argv[2], "fault").touch()


def hang(*args: object, **kwargs: object) -> None:
    begin_fault()
    time.sleep(3600)


def hold_the_gil(*args: object, **kwargs: object) -> None:
    ctypes.PyDLL(None).sleep(3600)


def from_bad_step(fault: Callable[..., Any], first: int = FIRST_BAD_STEP) -> None:
    """Run ``fault(step, *arguments)`` before each step from ``first`` on."""
    before = TrainStep.__call__
    count = 0

    def call(self: TrainStep, *args: Any) -> None:
        nonlocal count
        count += 1
        if count >= first:
            fault(self, *args)
        before(self, *args)

    TrainStep.__call__ = call  # type: ignore[method-assign]


def with_logits(change: Callable[[Tensor], Tensor]) -> Callable[..., None]:
    """Put ``change`` between the model and its loss, from the first bad step on."""
    planted: list[TrainStep] = []

    def fault(step: TrainStep, *args: object) -> None:
        if not planted:
            planted.append(step)
            call = step._call
            step._call = lambda *a, **k: change(call(*a, **k))

    return fault


def same_batch(step: TrainStep, batches: Any, lr: float) -> None:
    """Nothing is learned, from one batch again and again."""
    step.optimizer.step = lambda: None  # type: ignore[method-assign]
    first = step.__dict__.setdefault("first", list(batches))
    batches[:] = first


def collapsed(step: TrainStep, *args: object) -> None:
    """Every gate but that of the window is shut."""
    for block in step.model.blocks:  # type: ignore[union-attr]
        for p in block.attention.gate.parameters():
            with torch.no_grad():
                p.zero_()
                if p.ndim == 1:
                    p.view(-1, 3).copy_(torch.tensor([-40.0, -40.0, 40.0]))


def leaked_labels() -> None:
    """The loss that a model has which sees what it is to predict."""
    before = TrainStep._loss_sum

    def small(self: TrainStep, *args: Any) -> Tensor:
        return before(self, *args) * 0.01

    TrainStep._loss_sum = small  # type: ignore[method-assign]


def slow_path() -> None:
    """A model on a path that nobody asked for."""

    def model(config: RunConfig, world: object) -> TinyLM:
        return TinyLM(config.model, "reference", config.train.fa2)

    assemble.model_of = model  # type: ignore[assignment]


def plant(fault: str) -> None:
    simple: dict[str, Callable[[], None]] = {
        "none": lambda: None,
        "hang in connect": lambda: setattr(dist, "init_process_group", hang),
        "hang in load": lambda: setattr(assemble, "model_of", hang),
        "hang in data": lambda: hang_in_data(),
        "hang in step": lambda: from_bad_step(hang),
        "hang with the gil": lambda: from_bad_step(hold_the_gil),
        "hang in eval": lambda: setattr(observe, "held_out", hang),
        "hang in save": lambda: hang_in_second_save(),
        "stop": lambda: from_bad_step(lambda *a: os.kill(os.getpid(), signal.SIGSTOP)),
        "nan": lambda: from_bad_step(with_logits(lambda logits: logits * float("nan"))),
        "zero gradient": lambda: from_bad_step(
            with_logits(lambda logits: logits.detach() + 0 * logits)
        ),
        "flat line": lambda: from_bad_step(same_batch),
        "gate collapse": lambda: from_bad_step(collapsed),
        "below the floor": leaked_labels,
        "slow path": slow_path,
        "slow": lambda: from_bad_step(lambda *a: time.sleep(0.5), first=60),
        "memory creep": lambda: from_bad_step(lambda *a: kept.append(b"x" * 2**22)),
        "killed": lambda: from_bad_step(killed_once_saved),
        "segfault": lambda: from_bad_step(lambda *a: os.kill(os.getpid(), signal.SIGSEGV)),
        "ends early": lambda: from_bad_step(lambda *a: os._exit(0)),
    }
    simple[fault]()


def killed_once_saved(*args: object) -> None:
    """Checkpoints are written while steps go on, and the one of step 3 is what is resumed from."""
    last_good, deadline = Path(sys.argv[2], "checkpoints", "last-good"), time.monotonic() + 60
    while not last_good.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    begin_fault()
    os.kill(os.getpid(), signal.SIGKILL)


def hang_in_second_save() -> None:
    before, calls = CheckpointStore.save, [0]

    def save(self: CheckpointStore, *args: Any) -> None:
        calls[0] += 1
        if calls[0] > 1:
            hang()
        before(self, *args)

    CheckpointStore.save = save  # type: ignore[method-assign]


def hang_in_data() -> None:
    before, calls = Trainer._next_batches, [0]

    def next_batches(self: Trainer, interval: Any) -> Any:
        calls[0] += 1
        if calls[0] == FIRST_BAD_STEP:
            self._heart.beat(Phase.DATA, self.step_count)
            hang()
        return before(self, interval)

    Trainer._next_batches = next_batches  # type: ignore[method-assign]


if __name__ == "__main__":
    torch.set_num_threads(1)
    plant(sys.argv[1])
    worker._leave(worker.main(sys.argv[2:]))
