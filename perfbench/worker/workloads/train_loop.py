"""Workload train_loop: the loader, step, optimizer and schedule of `nsa.train`, called as its
Trainer calls them.

B sequences of a micro-step, T tokens, V vocabulary.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

from nsa.config import ModelConfig
from nsa.train.assemble import assemble
from nsa.train.config import DataConfig, LoopConfig, RunConfig
from nsa.train.data import load, tokenizer_of
from nsa.train.parallel import TrainWorld
from nsa.train.records import Batch
from nsa.train.schedule import learning_rate
from nsa.train.step import EAGER_STEPS
from perfbench.records import Job, LoopLine
from perfbench.worker.workloads.graphs import AtCapture

PRECISIONS = {"bf16": "bf16_master", "fp32": "fp32"}  # what the loop makes of the axis dtype
ACCUMULATE = 1  # micro-steps
WORKERS = DataConfig(kind="synthetic").workers  # as in a run that sets none


@dataclass(frozen=True, slots=True)
class LastStep:
    """``given``: what the loader gave to the last step, on the CPU; ``seen``: ids and labels [B, T]
    and logits [B, T, V] of each of its micro-steps, as the model had them.
    """

    given: Sequence[Batch]
    seen: Sequence[tuple[Tensor, Tensor, Tensor]]


class LoopSteps:
    """A call enqueues one step of ``tokens_per_step`` tokens, without waiting for the device: it
    takes the next batches of the loader, which a process of its own makes ahead, and trains on
    them.

    The first call of a captured step makes the eager steps that come before the capture, too, and
    ``recorded`` has what the capture called.
    """

    def __init__(
        self,
        job: Job,
        model: ModelConfig,
        compiled: Callable[[nn.Module], nn.Module] | None = None,
    ) -> None:
        """``compiled``: what compiles the model, so as to read its graph; None: it is not."""
        self.config = config_of(job, model)
        device = torch.device("cuda", 0) if job.device == "cuda" else torch.device(job.device)
        trained = assemble(self.config, TrainWorld(0, 1, device, "none"), compiled=compiled)
        self.model, self.optimizer, self.step = (
            trained.plain_model,
            trained.optimizer,
            trained.step,
        )
        self.step.witness = self._see
        with TemporaryDirectory(prefix="perfbench-") as folder:
            tokenizer = tokenizer_of(self.config, Path(folder))
        self.loader = load(self.config, rank=0, world_size=1, split="train", tokenizer=tokenizer)
        self.close = self.loader.close
        self.tokens_per_step = self.config.tokens_per_step
        self.recorded = AtCapture()
        self._names_operators = job.profile
        self.num_steps = 0
        self._given: list[Batch] = []
        self._seen: list[tuple[Tensor, Tensor, Tensor]] = []
        self._waits_s: list[float] = []  # of each step
        self._fetches_s: list[float] = []  # of each batch
        self._rows: list[int] = []  # of each batch the hash of its first row

    def __call__(self) -> None:
        if self.step.no_graph or self.step.is_captured:
            self._one()
            return
        for _ in range(EAGER_STEPS):
            self._one()
        self.recorded.watch(self._one, names_operators=self._names_operators)

    def last(self) -> LastStep:
        return LastStep(tuple(self._given), tuple(self._seen))

    def line(self, num_steps: int) -> LoopLine:
        """Of the last ``num_steps`` steps."""
        waits_s = self._waits_s[-num_steps:]
        num_batches = num_steps * self.config.train.accumulate
        fetches_s = self._fetches_s[-num_batches:]
        return LoopLine(
            precision=self.config.train.precision,
            batches=len(fetches_s),
            wait_p50_s=percentile(waits_s, 0.5),
            wait_p95_s=percentile(waits_s, 0.95),
            fetch_p50_s=percentile(fetches_s, 0.5),
            fetch_p95_s=percentile(fetches_s, 0.95),
        )

    def why_not_distinct(self) -> str:
        """Which batches began like an earlier one; empty where none did."""
        if len(set(self._rows)) == len(self._rows):
            return ""
        return (
            f"the loader gave {len(set(self._rows))} distinct batches among the"
            f" {len(self._rows)} that were trained on; wanted each of them once; look at its shards"
        )

    def _one(self) -> None:
        begin = time.perf_counter()
        self._given = list(itertools.islice(self.loader, self.config.train.accumulate))
        self._waits_s.append(time.perf_counter() - begin)
        for batch in self._given:
            self._fetches_s.append(batch.fetch_s)
            self._rows.append(hash(batch.ids[0].numpy().tobytes()))
        if not self.step.is_captured:  # else they are the graph's own
            self._seen.clear()
        self.step(self._given, learning_rate(self.num_steps, self.config.train))
        self.num_steps += 1

    def _see(self, ids: Tensor, labels: Tensor, logits: Tensor) -> None:
        self._seen.append((ids, labels, logits))


def config_of(job: Job, model: ModelConfig) -> RunConfig:
    """A run of the cell's shape, all else as in a run that sets nothing; perfbench compiles the
    model itself.
    """
    cell = job.axes
    return RunConfig(
        model=model,
        data=DataConfig(kind="synthetic", workers=WORKERS, seed=job.seed),
        train=LoopConfig(
            seq_len=cell.seq_len,
            batch=cell.batch,
            accumulate=ACCUMULATE,
            attention="dense" if cell.is_dense else "nsa",
            path="auto" if cell.is_dense else cell.path,
            fa2="auto" if cell.is_dense else cell.fa2,
            precision=PRECISIONS[cell.dtype],
            cuda_graph=cell.cuda_graph,
            schedule="cosine",
            device=job.device,
            seed=job.seed,
        ),
    )


def percentile(values: Sequence[float], share: float) -> float:
    """By nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
