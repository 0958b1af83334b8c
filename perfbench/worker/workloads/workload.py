"""What one step is: the model of a cell, its data on the device, and the work that is timed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from nsa.config import ModelConfig
from nsa.model import DenseLM, TinyLM
from nsa.routing import Route
from perfbench.matrix import OperatorCalls
from perfbench.records import (
    ATTENTION,
    CACHED,
    PAGED,
    SELECTED,
    CacheLine,
    Job,
    Peer,
    torch_dtype_name,
)
from perfbench.worker.operators import Calls
from perfbench.worker.ranks.world import Ranks, current
from perfbench.worker.workloads import attention, trained
from perfbench.worker.workloads.cache_steps import CachedSteps
from perfbench.worker.workloads.graphs import (
    AtCapture,
    Batches,
    Body,
    Captured,
    Compiled,
    CudaGrapher,
    eager,
)
from perfbench.worker.workloads.made import Made
from perfbench.worker.workloads.paged_steps import PagedSteps
from perfbench.worker.workloads.ranks_step import ranks_step

if TYPE_CHECKING:
    from perfbench.worker.workloads.train_loop import LoopSteps

# the L2 need not evict in order, so a buffer of its own size could leave a part of the old lines
L2_FLUSH_FACTOR = 2
SEEDS_APART = 1_000_003  # between the data of two ranks
NUM_BATCHES = 8  # distinct random batches, so that no step repeats the last one's inputs


@dataclass(frozen=True, slots=True)
class Workload:
    """``step()`` enqueues one step on the current stream and returns without waiting for it.

    ``cache()`` runs one more step and says what the caches held and gave; None where the workload
    has none. ``compiled`` and
    ``captured`` know what a step engages where its calls are not counted as they run; None where
    they are. ``differs()`` says how a replay differs from the same step without a graph, where that
    was not proved before. ``made`` is what the last step left, by which it is proved; ``optimizer``
    that of a training step, ``steps`` those of one that goes through a cache, ``loop`` those of
    nsa.train, ``peer`` what serves it in nsa's place. ``unsynchronised()`` is the step of several
    ranks without their reduction, after which their weights differ. ``close()`` ends what a
    workload started.
    """

    step: Callable[[], None]
    tokens_per_step: int
    model: nn.Module
    cache: Callable[[], CacheLine] | None = None
    compiled: Compiled | None = None
    captured: AtCapture | None = None
    differs: Callable[[], str] = lambda: ""
    made: Made | None = None
    optimizer: torch.optim.Optimizer | None = None
    steps: CachedSteps | None = None
    loop: LoopSteps | None = None
    peer: Peer | None = None
    unsynchronised: Callable[[], None] | None = None
    close: Callable[[], None] = lambda: None

    @property
    def engaged_by(self) -> str:
        """How it is known what a step engages, as in Replicate."""
        return "graph" if self.compiled else "capture" if self.captured else "call"

    def engaged(self, counted: dict[str, int], steps: int, route: Route) -> dict[str, int]:
        """Counters of ``steps`` steps, while which ``counted`` were: those, or where nothing can be
        counted, one step's times ``steps``.
        """
        if self.compiled:
            return {name: count * steps for name, count in self.compiled.counts(route).items()}
        if self.captured:
            return {name: count * steps for name, count in self.captured.counts.items()}
        return counted

    def calls(self, due: OperatorCalls | None) -> Calls | None:
        """``due`` with what is known of a graph, once a step has run; None where none are due by
        name.
        """
        if due is None:
            return None
        return Calls(
            due,
            captured=self.captured.operators if self.captured else None,
            graph=self.compiled.operators if self.compiled else None,
            peer=self.peer,
        )


def build(job: Job) -> Workload:
    """Build the cell's model in its dtype, with random data; raises torch.OutOfMemoryError where it
    does not fit.
    """
    torch.manual_seed(job.seed)
    config, cell = ModelConfig.from_mapping(job.model), job.axes
    dtype: torch.dtype = getattr(torch, torch_dtype_name(cell.dtype))
    backward, made = cell.has_backward, Made()
    if cell.workload == "train_loop":
        return _looped(job, config)
    if cell.workload in ATTENTION:
        alone = attention.module_of(config, cell.path, cell.fa2, job.peer)
        alone = alone.to(device=job.device, dtype=dtype)
        step = _stepped(
            job,
            alone,
            lambda run: attention.step_body(alone, run, made, backward=backward),
            attention.inputs(
                alone, cell.batch, cell.seq_len, dtype=dtype, device=job.device, backward=backward
            ),
            made,
        )
        return replace(step, peer=job.peer)
    if cell.workload in SELECTED:
        return _stepped(
            job,
            attention.SelectedBranch(config, cell.path, cell.fa2),
            lambda run: attention.body_of(run, [], made, backward=backward),
            attention.selected_inputs(
                config,
                cell,
                dtype=dtype,
                device=job.device,
                seed=job.seed,
                trained=trained.blocks_of(job),
            ),
            made,
        )
    model = (
        DenseLM(config, cell.path) if cell.is_dense else TinyLM(config, cell.path, cell.fa2)
    ).to(device=job.device, dtype=dtype)
    if cell.workload in CACHED:
        return _through_cache(job, config, model)
    if (ranks := current()) is not None:  # equal weights, and sequences of its own for each rank
        torch.manual_seed(job.seed + SEEDS_APART * (ranks.rank + 1))
    ids = torch.randint(
        config.vocab_size, (NUM_BATCHES, cell.batch, cell.seq_len + 1), device=job.device
    )
    batches = itertools.cycle((one,) for one in ids.unbind(0))
    if cell.workload == "forward":
        return _stepped(job, model, lambda run: _forward_body(run, made), batches, made)
    if ranks is not None:
        return _on_ranks(job, model, batches, made, ranks)
    # A graph cannot count the optimizer's steps on the host.
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, fused=True, capturable=cell.cuda_graph == "on"
    )
    step = _stepped(job, model, lambda run: _train_body(run, optimizer, made), batches, made)
    return replace(step, optimizer=optimizer)


def _through_cache(job: Job, config: ModelConfig, model: TinyLM | DenseLM) -> Workload:
    """The step of a decode or a chunked prefill, launched by the host or replayed."""
    cell = job.axes
    kind = PagedSteps if cell.cache == PAGED else CachedSteps
    steps = kind(job, config, model, NUM_BATCHES, stepping=cell.cuda_graph == "on")
    work = Workload(
        steps.run, steps.tokens_per_step, model, steps.line, made=steps.made, steps=steps
    )
    if cell.cuda_graph == "off":
        return work
    captured = Captured(steps.body, steps.batches, CudaGrapher(), names_operators=job.profile)
    step = steps.replayed(captured)
    return replace(
        work,
        step=step,
        cache=partial(steps.line, step),
        captured=captured,
        differs=partial(steps.how_a_replay_differs, step, lambda: captured.inputs),
    )


def _on_ranks(job: Job, model: nn.Module, batches: Batches, made: Made, ranks: Ranks) -> Workload:
    """The training step of one of several ranks; its tokens are those of all."""

    def body_of(run: Callable[..., Tensor], optimizer: torch.optim.Optimizer) -> Body:
        return _train_body(run, optimizer, made, ranks.note)

    of_rank = ranks_step(job, model, body_of, batches, ranks)
    return Workload(
        of_rank.step,
        ranks.size * job.axes.batch * job.axes.seq_len,
        model,
        compiled=of_rank.compiled,
        captured=of_rank.captured,
        made=made,
        optimizer=of_rank.optimizer,
        unsynchronised=of_rank.unsynchronised,
        close=of_rank.close,
    )


def _looped(job: Job, config: ModelConfig) -> Workload:
    # an older nsa, which `ab` measures, too, has no nsa.train
    from perfbench.worker.workloads.train_loop import LoopSteps

    graphs: list[Compiled] = []

    def compiled(model: nn.Module) -> nn.Module:
        graphs.append(Compiled(model))
        return cast("nn.Module", graphs[0].run)

    loop = LoopSteps(job, config, compiled if job.axes.compile == "on" else None)
    return Workload(
        loop,
        loop.tokens_per_step,
        loop.model,
        compiled=graphs[0] if graphs else None,
        captured=loop.recorded if job.axes.cuda_graph == "on" else None,
        loop=loop,
        close=loop.close,
    )


def _stepped(
    job: Job,
    model: nn.Module,
    body_of: Callable[[Callable[..., Tensor]], Body],
    batches: Batches,
    made: Made,
) -> Workload:
    """The body of a step as the axes compile and cuda_graph want it run; nothing is compiled or
    captured before the first step.
    """
    cell = job.axes
    compiled = Compiled(model) if cell.compile == "on" else None
    body = body_of(model if compiled is None else compiled.run)
    captured = (
        Captured(body, batches, CudaGrapher(), names_operators=job.profile)
        if cell.cuda_graph == "on"
        else None
    )
    tokens = cell.batch * cell.seq_len
    return Workload(
        captured or eager(body, batches),
        tokens,
        model,
        compiled=compiled,
        captured=captured,
        made=made,
    )


def l2_flush(job: Job) -> Callable[[], None] | None:
    """What must run before each timed step of a cell with a cold L2: a write of twice the L2; None
    for a warm one.
    """
    if job.axes.l2 == "warm":
        return None
    if job.device != "cuda":
        raise ValueError(
            f"l2=cold on device={job.device}: only a GPU's L2 can be flushed; use l2=warm"
        )
    buffer = torch.empty(
        L2_FLUSH_FACTOR * torch.cuda.get_device_properties(0).L2_cache_size,
        dtype=torch.int8,
        device=job.device,
    )

    def flush() -> None:
        buffer.zero_()

    return flush


def _train_body(
    model: Callable[..., Tensor],
    optimizer: torch.optim.Optimizer,
    made: Made,
    note: Callable[[int], None] = lambda stage: None,
) -> Body:
    """Forward, cross-entropy in fp32, backward, fused AdamW; ``note`` hears where each begins
    (`perfbench.worker.ranks.board.STAGES`).

    Gradients are dropped where the next step begins, so that each parameter has those of the last
    step; in a graph they are of its own memory, as PyTorch wants it.
    """

    def body(ids_BT: Tensor) -> None:
        made.begin(ids_BT)
        optimizer.zero_grad(set_to_none=True)
        note(1)
        logits = model(ids_BT[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids_BT[:, 1:].flatten())
        note(2)
        loss.backward()
        note(3)
        optimizer.step()
        made.outputs, made.loss = [logits.detach()], loss.detach()
        note(0)

    return body


def _forward_body(model: Callable[..., Tensor], made: Made) -> Body:
    def body(ids_BT: Tensor) -> None:
        made.begin(ids_BT)
        with torch.no_grad():
            made.outputs = [model(ids_BT[:, :-1])]

    return body
