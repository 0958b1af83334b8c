"""The training step of one of several ranks as the axes compile and cuda_graph want it run.

Compiled: under ddp within DistributedDataParallel, whose own forward is in no graph; under fsdp
each block by itself, so that its weights are gathered and freed between two graphs.

Captured, under ddp alone: the whole step, its collectives among it, by PyTorch's rules for it
(notes/cuda, "Usage with DistributedDataParallel"). `perfbench.worker.ranks.launch` gives the
process its environment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from perfbench.records import Cell, Job
from perfbench.worker.ranks.board import STAGES
from perfbench.worker.ranks.model import unsynchronised, wrap
from perfbench.worker.ranks.world import Ranks
from perfbench.worker.workloads.graphs import Batches, Body, Captured, Compiled, eager

# DistributedDataParallel times its first ten iterations by events that the host reads.
WARM_STEPS = 11
OUTSIDE, REPLAY = 0, STAGES.index("replay")
# (what is called in the model's place, the optimizer) -> the body of a step
BodyOf = Callable[[Callable[..., Tensor], torch.optim.Optimizer], Body]


@dataclass(frozen=True, slots=True)
class RanksStep:
    """``step``, ``compiled``, ``captured``, ``optimizer``, ``unsynchronised`` and ``close`` as of a
    Workload.
    """

    step: Callable[[], None]
    optimizer: torch.optim.Optimizer
    compiled: Compiled | None
    captured: Captured | None
    unsynchronised: Callable[[], None] | None
    close: Callable[[], None]


class RanksGrapher:
    """Graphs of a step with collectives: the model is wrapped, the step warmed up and captured on
    one stream, because DistributedDataParallel keeps autograd nodes of the stream that it was made
    on.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Work inside is on the stream of the graphs, after what came before and before what
        follows.
        """
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream().wait_stream(self._stream)

    def warm(self, work: Callable[[], None]) -> None:
        """As often on every rank: a step waits for the others'."""
        with self.stream():
            for _ in range(WARM_STEPS):
                work()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """NCCL's watchdog asks for events in a thread of its own, which a capture of mode global
        would take for a fault.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            work()
        replay: Callable[[], None] = graph.replay
        return replay


def ranks_step(
    job: Job, model: nn.Module, body_of: BodyOf, batches: Batches, ranks: Ranks
) -> RanksStep:
    """Of ``model``, on its device, whose parameters stay its own, under fsdp as DTensors.

    ``job`` is of workload train; nothing is compiled or captured before the first step.
    """
    cell = job.axes
    compiled = _compiled(model, cell) if cell.compile == "on" else None
    called: Any = model
    if compiled is not None and cell.parallel == "ddp":
        called = compiled.run
    if cell.cuda_graph == "on":
        return _captured(job, model, called, body_of, batches, ranks, compiled)
    wrapped = wrap(called, cell.parallel, ranks, job.device)
    optimizer = _optimizer(model, cell)
    step = eager(body_of(wrapped, optimizer), batches)
    alone = unsynchronised(wrapped, step)
    return RanksStep(step, optimizer, compiled, None, alone, lambda: None)


def _optimizer(model: nn.Module, cell: Cell) -> torch.optim.Optimizer:
    """A graph cannot count its steps on the host."""
    captured = cell.cuda_graph == "on"
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=captured)


def _compiled(model: nn.Module, cell: Cell) -> Compiled:
    """The model, or under fsdp its blocks, one graph of which all layers run."""
    if cell.parallel == "ddp":
        return Compiled(model)
    blocks: Any = model.blocks
    compiled = Compiled(type(blocks[0]).forward, runs=len(blocks))
    for block in blocks:
        # of the instance: fsdp's hooks, which it puts around the call, stay out of the graph
        block.forward = MethodType(compiled.run, block)
    return compiled


def _captured(
    job: Job,
    model: nn.Module,
    called: nn.Module,
    body_of: BodyOf,
    batches: Batches,
    ranks: Ranks,
    compiled: Compiled | None,
) -> RanksStep:
    grapher = RanksGrapher()
    with grapher.stream():
        ddp: Any = wrap(called, job.axes.parallel, ranks, job.device)
    optimizer = _optimizer(model, job.axes)
    body = body_of(ddp, optimizer)

    def alone(*inputs: Tensor) -> None:
        with ddp.no_sync():
            body(*inputs)

    captured = Captured(body, batches, grapher, names_operators=job.profile)
    without_collectives = Captured(alone, batches, grapher)

    def unsynchronised_step() -> None:
        captured.close()  # two graphs would hold the memory of two steps
        without_collectives()

    def close() -> None:
        captured.close()
        without_collectives.close()

    return RanksStep(
        _noted(captured, ranks.note), optimizer, compiled, captured, unsynchronised_step, close
    )


def _noted(step: Callable[[], None], note: Callable[[int], None]) -> Callable[[], None]:
    """A replay calls nothing, so that ``note`` hears of it here."""

    def noted() -> None:
        note(REPLAY)
        step()
        note(OUTSIDE)

    return noted
