"""What one step is: the model of a cell, its data on the device, and the work that is timed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from nsa.config import ModelConfig
from nsa.model import DenseLM, TinyLM
from perfbench.axes import AXES, torch_dtype_name
from perfbench.job import Job

L2_FLUSH_FACTOR = 2  # the L2 need not evict in order, so a buffer of its own size could leave a part of the old lines
NUM_BATCHES = 8  # distinct random batches, so that no step repeats the last one's inputs


@dataclass(frozen=True, slots=True)
class Workload:
    """``step()`` enqueues one step on the current stream and returns without waiting for it."""

    step: Callable[[], None]
    tokens_per_step: int
    model: nn.Module


def build(job: Job) -> Workload:
    """Build the cell's model in its dtype, with random bytes as data; raises torch.OutOfMemoryError where it does not fit."""
    torch.manual_seed(job.seed)
    config = ModelConfig.from_mapping(job.model)
    path, fa2 = str(job.axes["path"]), str(job.axes["fa2"])
    model = DenseLM(config, path) if path.startswith("dense") else TinyLM(config, path, fa2)
    model = model.to(device=job.device, dtype=getattr(torch, torch_dtype_name(str(job.axes["dtype"]))))
    batch, tokens = int(job.axes["batch"]), int(job.axes["seq_len"])
    ids = torch.randint(config.vocab_size, (NUM_BATCHES, batch, tokens + 1), device=job.device)
    batches = itertools.cycle(ids.unbind(0))
    step = _train_step(model, batches) if job.axes["workload"] == "train" else _forward_step(model, batches)
    return Workload(step, batch * tokens, model)


def l2_flush(job: Job) -> Callable[[], None] | None:
    """What must run before each timed step of a cell with a cold L2: a write of twice the L2; None for a warm one."""
    if job.axes.get("l2", AXES["l2"].default) == "warm":
        return None
    if job.device != "cuda":
        raise ValueError(f"l2=cold on device={job.device}: only a GPU's L2 can be flushed; use l2=warm")
    buffer = torch.empty(L2_FLUSH_FACTOR * torch.cuda.get_device_properties(0).L2_cache_size, dtype=torch.int8, device=job.device)

    def flush() -> None:
        buffer.zero_()

    return flush


def _train_step(model: nn.Module, batches: Iterator[torch.Tensor]) -> Callable[[], None]:
    """Forward, cross-entropy in fp32, backward, fused AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        ids = next(batches)
        logits = model(ids[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _forward_step(model: nn.Module, batches: Iterator[torch.Tensor]) -> Callable[[], None]:
    def step() -> None:
        with torch.no_grad():
            model(next(batches)[:, :-1])

    return step
