"""One step of a cell, by the callable that is timed, against the twin: logits, loss, gradients, the
optimizer, the blocks that it chose, and how many parameters and layers there are.

B batch, T tokens, G kv heads, N blocks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nsa.config import ModelConfig
from perfbench import older_nsa
from perfbench.records import (
    ATTENTION,
    NOT_RECORDED,
    SELECTED,
    TRAINING,
    Job,
    StepProof,
    torch_dtype_name,
)
from perfbench.worker.ranks.model import local, whole
from perfbench.worker.ranks.world import Ranks, current
from perfbench.worker.step_proof import adamw, blocks, loop_step, shapes, twin
from perfbench.worker.step_proof.attend import Attention
from perfbench.worker.step_proof.compare import LOSS_TOLERANCE, Ratios
from perfbench.worker.step_proof.ranks import Reduced, Share, begin_alike, digest_of, exchange
from perfbench.worker.workloads.attention import parameters_of
from perfbench.worker.workloads.cache_steps import CachedSteps
from perfbench.worker.workloads.made import Made
from perfbench.worker.workloads.workload import Workload

# Tokens of a step from which replicate 0 proves it for all replicates of its cell: below, the proof
# costs less than the warm-up.
TOKENS_OF_ALL_REPLICATES = 4096
# Where the step's blocks cannot be seen, a near tie may fall otherwise than in the twin; a fault
# fails every batch.
TRIES_OF_UNSEEN_BLOCKS = 3
# An attention call against the same in another graph, in roundings of its dtype.
ROUNDINGS_OF_A_CALL = 8
Blocks = Sequence[Tensor | None]


def prove(work: Workload, job: Job, model: ModelConfig) -> StepProof:
    """Run one step and compare it; never raises for a wrong number, but records it.

    The weights and the optimizer are one step further afterwards. ``ok`` is None, with the reason
    in ``absent``, where no proof was made: by an older nsa, for a replicate that need not, or
    without memory for the twin. On several ranks that raises torch.OutOfMemoryError.
    """
    begin = time.monotonic()
    if why := _why_not(work, job):
        return StepProof(ok=None, absent=why)
    try:
        line = _proved(work, job, model)
    except torch.OutOfMemoryError:
        if current() is not None:  # the others would wait for this rank, or go on one step apart
            raise
        line = StepProof(ok=None, absent="the twin does not fit into memory next to the step")
    if job.device == "cuda":
        torch.cuda.empty_cache()
    return line.model_copy(update={"seconds": round(time.monotonic() - begin, 3)})


def _why_not(work: Workload, job: Job) -> str:
    if work.made is None and work.loop is None:
        return "this workload keeps nothing of a step"
    alone = job.axes.workload in (*ATTENTION, *SELECTED)
    with older_nsa.collect_blocks() as seen:
        if seen is None and not alone:
            return f"{NOT_RECORDED}: older nsa, which shows no blocks"
    if job.replicate > 0 and work.tokens_per_step > TOKENS_OF_ALL_REPLICATES:
        return "replicate 0 proves it"
    return ""


def _proved(work: Workload, job: Job, model: ModelConfig) -> StepProof:
    alone = job.axes.workload in (*ATTENTION, *SELECTED)
    dtype: torch.dtype = getattr(torch, torch_dtype_name(job.axes.dtype))
    if not alone:
        wanted = shapes.parameter_shapes(model, dense=job.axes.is_dense)
        if fault := shapes.fault_of(work.model, wanted, train=job.axes.workload in TRAINING):
            return StepProof(ok=False, worst=f"parameters: {fault}")
    for _ in range(TRIES_OF_UNSEEN_BLOCKS if work.compiled else 1):
        compare = Ratios(dtype)
        if alone:
            _compare_call(work, compare)
        else:
            _ModelStep(work, job, model, dtype).compare(compare)
        if _agreed(compare.ok):
            break
    return StepProof(
        ok=compare.ok,
        tokens=work.tokens_per_step,
        num_parameters=None if alone else sum(p.numel() for p in work.model.parameters()),
        num_layers=1 if alone else model.num_layers,
        blocks="own" if work.compiled else "given",
        tensors={kind: round(ratio, 4) for kind, ratio in compare.ratios.items()},
        worst=compare.worst,
    )


def _agreed(ok: bool) -> bool:
    """Of all ranks: they take another step together, or none."""
    ranks = current()
    return ok if ranks is None else not ranks.agree(float(not ok))


def _compare_call(work: Workload, compare: Ratios) -> None:
    """Attention alone: what the timed callable gives, against the module called plainly."""
    made = work.made
    assert made is not None
    work.step()
    if not made.gradients:
        with torch.no_grad():
            _same_call(compare, "output", made.outputs[0], work.model(*made.inputs))
        return
    *tensors, grad = made.inputs
    arguments = [x for x in tensors if x.requires_grad] + parameters_of(work.model)
    output = work.model(*tensors)
    _same_call(compare, "output", made.outputs[0], output)
    wanted = torch.autograd.grad(output, arguments, grad)
    for i, (got, want) in enumerate(zip(made.gradients, wanted, strict=True)):
        _same_call(compare, "gradients", got, want, f"gradient {i}")


def _same_call(compare: Ratios, kind: str, got: Tensor, want: Tensor, name: str = "output") -> None:
    rounding = (ROUNDINGS_OF_A_CALL - 1) * torch.finfo(compare.dtype).eps
    floor = rounding * want.detach().double().norm().item()
    compare.tensor(kind, name, got, want, want, floor=floor)


@dataclass(frozen=True, slots=True)
class _Ran:
    """What one step was given and made; ``labels`` and ``loss`` of one that trains."""

    blocks: Blocks | None
    ids: Tensor
    labels: Tensor | None
    logits: Tensor
    loss: float
    gradients: Mapping[str, Tensor | None]


@dataclass(frozen=True, slots=True)
class _ModelStep:
    """One step of a language model."""

    work: Workload
    job: Job
    model: ModelConfig
    dtype: torch.dtype

    def compare(self, compare: Ratios) -> None:
        if (ranks := current()) is not None:
            self._compare_ranks(compare, ranks)
            return
        weights = {name: p.detach().clone() for name, p in self.work.model.named_parameters()}
        run = self._run if self.work.loop is None else self._run_loop
        if (ran := run(compare)) is None:
            return
        chosen, ids, labels, logits = ran.blocks, ran.ids, ran.labels, ran.logits
        if tuple(logits.shape) != (*ids.shape, self.model.vocab_size):
            wanted = (*ids.shape, self.model.vocab_size)
            compare.add("logits", 1e9, f"logits are {tuple(logits.shape)}; wanted {wanted}")
            return
        layers = self._by_layer(chosen, compare)
        if layers is None and chosen is not None:
            return
        own, own_attention = self._twin(weights, self.dtype, layers, ids, labels)
        wide_dtype = torch.float64 if self.dtype == torch.float32 else torch.float32
        wide, wide_attention = self._twin(weights, wide_dtype, layers, ids, labels)
        compare.tensor("logits", "logits", logits, wide.logits, own.logits)
        compare.rows("logits", "logits", logits, wide.logits, own.logits)
        if labels is not None:
            self._compare_learning(compare, ran, labels, own, wide)
        self._compare_blocks(compare, layers, wide_attention, own_attention, ids.shape[1])

    def _compare_blocks(
        self,
        compare: Ratios,
        layers: Blocks | None,
        wide: Attention,
        own: Attention,
        tokens: int,
        who: str = "",
    ) -> None:
        for layer, mine in enumerate(layers or ()):
            if mine is not None and "sel" in self.model.nsa.branches:
                first = 0 if self._decodes is None else self._decodes.tokens
                ratio, what = blocks.judge(
                    mine,
                    wide.seen[layer],
                    own.seen[layer],
                    self.model.nsa,
                    first=first,
                    kv_len=first + tokens,
                )
                compare.add("blocks", ratio, f"{who}layer {layer}: {what}")

    def _compare_ranks(self, compare: Ratios, ranks: Ranks) -> None:
        """The step of all ranks, on rank 0, against one process that takes the global batch a
        rank's sequences at a time: their gradients and losses have the same mean.
        """
        named = list(self.work.model.named_parameters())
        weights = {name: whole(p.detach()).clone() for name, p in named}
        alike = begin_alike(ranks, dict(named), weights)
        ran = self._run(compare)
        assert ran is not None and ran.labels is not None
        layers = self._by_layer(ran.blocks, compare)
        gradients = {name: None if p.grad is None else whole(p.grad) for name, p in named}
        self._compare_loss(compare, ran, ran.labels)
        share = Share(ran.ids, ran.labels, ran.loss, layers, digest_of(gradients), alike)
        with exchange(ranks, share, self.job.device, compare) as shares:
            if ranks.rank > 0:
                return
            reduced = Reduced(gradients)
            for rank, one in enumerate(shares):
                own, own_attention = self._twin(
                    weights, self.dtype, one.layers, one.ids, one.labels
                )
                wide_dtype = torch.float64 if self.dtype == torch.float32 else torch.float32
                wide, wide_attention = self._twin(
                    weights, wide_dtype, one.layers, one.ids, one.labels
                )
                reduced.add(one.loss, wide, own)
                if rank == 0:
                    compare.tensor("logits", "logits", ran.logits, wide.logits, own.logits)
                    compare.rows("logits", "logits", ran.logits, wide.logits, own.logits)
                tokens = one.ids.shape[1]
                self._compare_blocks(
                    compare, one.layers, wide_attention, own_attention, tokens, f"rank {rank}, "
                )
            reduced.compare(compare)

    def _compare_learning(
        self,
        compare: Ratios,
        ran: _Ran,
        labels: Tensor,
        own: twin.TwinStep,
        wide: twin.TwinStep,
    ) -> None:
        self._compare_loss(compare, ran, labels)
        compare.gradients(ran.gradients, wide.gradients, own.gradients)

    def _compare_loss(self, compare: Ratios, ran: _Ran, labels: Tensor) -> None:
        loss, wanted = ran.loss, float(twin.cross_entropy(ran.logits.double(), labels))
        tolerance = LOSS_TOLERANCE * max(1.0, abs(wanted))
        compare.add(
            "loss", abs(loss - wanted) / tolerance, f"the loss is {loss:.8g}, wanted {wanted:.8g}"
        )

    def _run(self, compare: Ratios) -> _Ran | None:
        made, model, optimizer = self.work.made, self.work.model, self.work.optimizer
        assert made is not None
        held = {} if optimizer is None else adamw.held_of(model, optimizer)
        begin = {name: one.copy() for name, one in held.items()}
        made.keep = True
        chosen = self._step()
        made.keep = False
        gradients = {
            name: None if p.grad is None else local(p.grad) for name, p in model.named_parameters()
        }
        if optimizer is not None:
            fault = adamw.settings_fault(model, optimizer, adamw.TRAIN)
            held = adamw.held_of(model, optimizer)
            judged = adamw.judge(gradients, held, begin, adamw.TRAIN)
            compare.add("optimizer", *((1e9, fault) if fault else judged))
        ids, labels = self._fed(made)
        loss = math.nan if made.loss is None else float(made.loss)
        return _Ran(chosen, ids, labels, torch.cat(made.outputs, 1), loss, gradients)

    def _run_loop(self, compare: Ratios) -> _Ran | None:
        loop = self.work.loop
        assert loop is not None
        begin = loop_step.begin(loop)
        chosen = self._step()
        ran = loop_step.compare(loop, begin, compare)
        if ran is None:
            return None
        return _Ran(chosen, ran.ids, ran.labels, ran.logits, ran.loss, ran.gradients)

    def _step(self) -> Blocks | None:
        """One step; the blocks of its calls, None where a compiled graph hides them."""
        with older_nsa.collect_blocks() as seen:
            self.work.step()
        if self.work.compiled is not None:
            return None
        # a replay calls nothing: its blocks are where the capture left them
        return seen or (self.work.captured.blocks if self.work.captured else seen)

    def _fed(self, made: Made) -> tuple[Tensor, Tensor | None]:
        """(ids, labels); labels of a training step."""
        ids = made.inputs[0]
        if self.work.steps is not None:
            return ids, None
        return ids[:, :-1], ids[:, 1:] if self.work.optimizer is not None else None

    def _by_layer(self, chosen: Blocks | None, compare: Ratios) -> Blocks | None:
        """The blocks of each layer, of all chunks; None where they are not known or were not chosen
        in as many calls as there are layers and chunks.
        """
        if chosen is None or self.job.axes.is_dense:
            return None if chosen is None else []
        layers, pieces, along = self.model.num_layers, 1, 1
        if self.work.steps is not None:
            pieces = len(self.work.steps.pieces)
        if self.work.loop is not None:  # its micro-steps are of other sequences
            pieces, along = self.work.loop.config.train.accumulate, 0
        if len(chosen) != layers * pieces:
            compare.add(
                "blocks",
                1e9,
                f"{len(chosen)} calls of the attention in a step; wanted {layers * pieces}",
            )
            return None
        return [_joined(chosen[layer::layers], along) for layer in range(layers)]

    def _twin(
        self,
        weights: Mapping[str, Tensor],
        dtype: torch.dtype,
        layers: Blocks | None,
        ids: Tensor,
        labels: Tensor | None,
    ) -> tuple[twin.TwinStep, Attention]:
        decodes = self._decodes
        caches = None if decodes is None else decodes.ordinary()
        attention = Attention(self.model, self.job.axes, self.dtype, layers, caches)
        made = twin.step(
            self.model,
            {name: w.to(dtype) for name, w in weights.items()},
            attention,
            ids,
            labels=labels,
            position=0 if decodes is None else decodes.tokens,
        )
        return made, attention

    @property
    def _decodes(self) -> CachedSteps | None:
        return self.work.steps if self.job.axes.workload == "decode" else None


def _joined(parts: Blocks, along: int) -> Tensor | None:
    known = [part for part in parts if part is not None]
    return torch.cat(known, along) if len(known) == len(parts) else None
