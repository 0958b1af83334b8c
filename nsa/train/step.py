"""One step of training on one rank: micro-steps, clipping, AdamW; eager, or as one CUDA graph.

A accumulated micro-steps, B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nsa import engagement
from nsa.decode import capture
from nsa.model import IGNORED_LABEL
from nsa.train import parallel
from nsa.train.config import RunConfig
from nsa.train.errors import TrainError, TrainExit
from nsa.train.parallel import TrainWorld
from nsa.train.records import Batch

if TYPE_CHECKING:
    from nsa.train.optimizer import TrainOptimizer

# Steps before the capture, which train: kernels compile, autotuners choose, AdamW makes its state.
EAGER_STEPS = 3
HOST_LOOPS = ("v1", "reference", "adaptive")
Witness = Callable[[Tensor, Tensor, Tensor], None]


@dataclass(frozen=True, slots=True)
class StepTotals:
    """What happened since the last read: means over good steps of all ranks; None where there was
    none.

    ``gradient_norm``: of the last step. ``bad_steps``: since the start, ``bad_run``: the last ones,
    in a row.
    """

    loss_nats: float | None
    gradient_norm: float
    bad_steps: int
    bad_run: int


def why_no_graph(config: RunConfig, world: TrainWorld) -> str:
    """Why a step of ``config`` is not captured as one CUDA graph; '' where it can be."""
    if world.device.type != "cuda":
        return "a CPU has no CUDA graphs"
    if config.data.packing == "documents":
        return "packed documents differ from step to step, and a graph has fixed shapes"
    if world.kind != "none":
        return f"the collectives of {world.kind} are not captured"
    if config.model.checkpoint_layers is not None:
        return "activation checkpointing reads the random state of the GPU on the host"
    if config.train.attention == "nsa" and config.train.path in HOST_LOOPS:
        return f"path {config.train.path} loops on the host"
    return ""


class TrainStep:
    """``step(batches, lr)`` enqueues one step and returns without waiting for the device.

    ``model`` maps ids to logits [B, T, V] and is what `parallel.wrap` returned, compiled or not. A
    step whose loss or gradient norm is not finite on some rank changes no weight on any. TrainError
    USAGE for train.cuda_graph=on where `why_no_graph` has a reason.

    ``witness``, where a proof sets one before the first step, is called in each micro-step with its
    ids and labels [B, T] and its logits [B, T, V], on the device and detached. Of a captured step
    it is called at the capture alone: the tensors are the graph's, and each replay fills them.
    """

    witness: Witness | None = None

    def __init__(
        self, model: nn.Module, optimizer: TrainOptimizer, config: RunConfig, world: TrainWorld
    ) -> None:
        self.model, self.optimizer, self._config, self._world = model, optimizer, config, world
        self.no_graph = why_no_graph(config, world)
        if config.train.cuda_graph == "off":
            self.no_graph = "train.cuda_graph=off"
        elif config.train.cuda_graph == "on" and self.no_graph:
            raise TrainError(
                TrainExit.USAGE,
                f"train.cuda_graph=on, and {self.no_graph}; wanted a step that one graph holds;"
                " --set train.cuda_graph=auto",
            )
        self._call: Callable[..., Tensor] = model
        self._num_eager = 0
        self.engaged: dict[str, int] = {}  # counters of a step while it was built; none if compiled
        self._replay: Callable[[], None] | None = None
        self._inputs: tuple[Tensor, ...] = ()
        device = world.device
        # loss, labels and steps since the last read; bad steps, those in a row, gradient norm
        self._totals = torch.zeros(6, dtype=torch.float64, device=device)

    @property
    def is_captured(self) -> bool:
        return self._replay is not None

    @property
    def is_built(self) -> bool:
        """Whether the next step costs what all that follow cost."""
        return self.is_captured if not self.no_graph else self._num_eager >= EAGER_STEPS

    def __call__(self, batches: Sequence[Batch], lr: float) -> None:
        self.optimizer.lr.fill_(lr)
        if self.is_built:
            self._run(batches)
            return
        with engagement.collect() as counted:
            self._run(batches)
        self.engaged = counted.counts

    def _run(self, batches: Sequence[Batch]) -> None:
        if self.no_graph:
            self._num_eager += 1
            self._eager(batches)
        elif self._num_eager < EAGER_STEPS:
            self._num_eager += 1
            self._on_side_stream(lambda: self._eager(batches))
        else:
            self._captured(batches)

    def read(self) -> StepTotals:
        """Totals of all ranks since the last read; waits for the device."""
        shared = parallel.total(self._totals[:2].clone(), self._world)
        own = self._totals.cpu()
        loss_sum, labels = shared.cpu().tolist()
        self._totals[:3] = 0
        return StepTotals(
            loss_nats=loss_sum / labels if labels else None,
            gradient_norm=float(own[5]),
            bad_steps=int(own[3]),
            bad_run=int(own[4]),
        )

    def bad_steps(self) -> int:
        """Since the start; waits for the device."""
        return int(self._totals[3])

    def restore_bad_steps(self, count: int) -> None:
        """Of a resumed run."""
        self._totals[3] = count

    def _eager(self, batches: Sequence[Batch]) -> None:
        device = self._world.device
        moved = [
            tuple(
                None if x is None else x.to(device, non_blocking=True)
                for x in (one.ids, one.labels, one.cu_seqlens)
            )
            for one in batches
        ]
        num_labels = torch.tensor(
            float(sum(one.num_labels for one in batches)), dtype=torch.float32
        ).to(device, non_blocking=True)
        self._body(moved, num_labels)

    def _captured(self, batches: Sequence[Batch]) -> None:
        ids, labels = ([getattr(one, name) for one in batches] for name in ("ids", "labels"))
        num_labels = float(sum(one.num_labels for one in batches))
        if self._replay is None:
            device = self._world.device
            own_ids = torch.stack(ids).to(device)
            own_labels = torch.stack(labels).to(device)
            count = torch.full((), num_labels, device=device)
            self._inputs = (own_ids, own_labels, count)
            micro = [(own_ids[i], own_labels[i], None) for i in range(len(batches))]
            torch.cuda.empty_cache()  # the graph has memory of its own, and no eager step follows
            self._replay = capture(lambda: self._body(micro, count), device)
        else:
            own_ids, own_labels, count = self._inputs
            for i, (one, label) in enumerate(zip(ids, labels, strict=True)):
                own_ids[i].copy_(one, non_blocking=True)
                own_labels[i].copy_(label, non_blocking=True)
            count.fill_(num_labels)
        self._replay()

    def _on_side_stream(self, work: Callable[[], None]) -> None:
        """As PyTorch wants the steps before a capture."""
        with torch.cuda.device(self._world.device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                work()
            torch.cuda.current_stream().wait_stream(stream)

    def _body(self, micro: Sequence[tuple[Any, ...]], num_labels: Tensor) -> None:
        """One step; fixed work on the device, no host sync."""
        optimizer, train = self.optimizer, self._config.train
        optimizer.zero_grad()
        loss = torch.zeros((), device=self._world.device)
        # Ranks' gradients are averaged, and packed documents give each its own number of labels.
        size = self._world.size
        mean_labels = (
            num_labels if size == 1 else parallel.total(num_labels.clone(), self._world) / size
        )
        for i, (ids, labels, cu_seqlens) in enumerate(micro):
            with parallel.accumulating(self.model, last=i == len(micro) - 1):
                part = self._loss_sum(ids, labels, cu_seqlens)
                (part / mean_labels).backward()
            loss = loss + part.detach()
        norm = optimizer.clip(train.clip)
        bad = torch.logical_not(loss.isfinite() & norm.isfinite()).float()
        parallel.any_rank(bad, self._world)
        optimizer.found_inf.copy_(bad)
        optimizer.step()
        self._add(loss, num_labels, bad, norm)

    def _loss_sum(self, ids: Tensor, labels: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """Cross-entropy in nats, summed over labels, in fp32."""
        train, device = self._config.train, self._world.device
        options = {} if cu_seqlens is None else {"cu_seqlens": cu_seqlens}
        # fsdp casts by its own policy
        casts = train.precision == "autocast" and self._world.kind in ("none", "ddp")
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=casts, cache_enabled=False):
            logits = self._call(ids, **options)
        if self.witness is not None:
            self.witness(ids, labels, logits.detach())
        return nn.functional.cross_entropy(
            logits.flatten(0, 1).float(),
            labels.flatten(),
            ignore_index=IGNORED_LABEL,
            reduction="sum",
        )

    def _add(self, loss: Tensor, num_labels: Tensor, bad: Tensor, norm: Tensor) -> None:
        good, totals = 1 - bad, self._totals
        counted = torch.where(bad > 0, torch.zeros_like(loss), loss)
        totals[0] += counted
        totals[1] += num_labels * good
        totals[2] += good
        totals[3] += bad
        totals[4] = (totals[4] + bad) * bad
        totals[5] = norm
