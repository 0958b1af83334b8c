"""What is proved of a step of nsa.train's loop besides the model's arithmetic: that it trained on
the loader's next tokens, reports the loss and gradient norm that it had, and that AdamW over the
masters did what the config wants.

B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from perfbench.worker.step_proof import adamw
from perfbench.worker.step_proof.compare import Ratios

if TYPE_CHECKING:
    from nsa.train.records import Batch
    from perfbench.worker.workloads.train_loop import LoopSteps

NUM_DISTINCT = 8  # batches, whose rows must all differ
# Relative: an fp32 sum of as many squares as the largest weight has.
NORM_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Began:
    """Copies of what the optimizer held, and the bad steps, before a step."""

    held: Mapping[str, adamw.Held]
    bad_steps: int


@dataclass(frozen=True, slots=True)
class RanLoop:
    """What a step trained on and made, its micro-steps one after another: ids and labels [B, T],
    logits [B, T, V]; ``loss`` in nats a token, as the loop reports it; ``gradients`` by name, as
    before clipping.
    """

    ids: Tensor
    labels: Tensor
    logits: Tensor
    loss: float
    gradients: Mapping[str, Tensor | None]


def begin(loop: LoopSteps) -> Began:
    """Before the step that is proved; what the loop reports of earlier ones is read away."""
    totals = loop.step.read()
    return Began({name: one.copy() for name, one in held_of(loop).items()}, totals.bad_steps)


def held_of(loop: LoopSteps) -> dict[str, adamw.Held]:
    """What the optimizer steps is a weight's master where it has one."""
    state, weights = loop.optimizer.state_dict(), dict(loop.model.named_parameters())
    masters = state["master"]
    return {
        name: adamw.Held(
            masters.get(name, weight),
            {
                kind: state[kind][name]
                for kind in ("step", "exp_avg", "exp_avg_sq")
                if name in state[kind]
            },
        )
        for name, weight in weights.items()
    }


def compare(loop: LoopSteps, before: Began, ratios: Ratios) -> RanLoop | None:
    """Add 'data', 'norm' and 'optimizer' of the step that has just run; None where it did not run
    as many micro-steps as it should.
    """
    last, totals = loop.last(), loop.step.read()
    wanted = loop.config.train.accumulate
    if len(last.seen) != wanted or len(last.given) != wanted:
        ratios.add(
            "data",
            1e9,
            f"{len(last.seen)} micro-steps on {len(last.given)} batches; wanted {wanted}",
        )
        return None
    ids, labels, logits = (torch.cat(parts) for parts in zip(*last.seen, strict=True))
    fault = data_fault(last.given, ids, labels, loop.config.model.vocab_size)
    fault = fault or repeated([*last.given, *itertools.islice(loop.loader, NUM_DISTINCT)])
    ratios.add("data", 1e9 if fault else 0.0, fault or "tokens")
    norm, train = totals.gradient_norm, loop.config.train
    divisor = max(1.0, norm / train.clip) if train.clip else 1.0
    gradients = _gradients(loop, divisor)
    _compare_norm(gradients, norm, ratios)
    if totals.bad_steps != before.bad_steps:
        ratios.add("optimizer", 1e9, "the loop took the step for one without a finite loss")
    ratios.add("optimizer", *_judge(loop, before, gradients, divisor))
    loss = math.nan if totals.loss_nats is None else totals.loss_nats
    return RanLoop(ids, labels, logits, loss, gradients)


def data_fault(given: Sequence[Batch], ids: Tensor, labels: Tensor, vocab_size: int) -> str:
    """How what the model saw is not what the loader gave, or that no text with its next tokens."""
    for name, seen in (("ids", ids), ("labels", labels)):
        wanted = torch.cat([getattr(one, name) for one in given])
        if seen.shape != wanted.shape or not torch.equal(seen.cpu(), wanted):
            return f"the {name} that the model had are not those that the loader gave"
    if not torch.equal(labels[:, :-1], ids[:, 1:]):
        return "the labels are not the ids that follow"
    least, most = (int(x) for x in torch.cat([ids, labels]).aminmax())
    if least < 0 or most >= vocab_size:
        return f"ids and labels from {least} to {most}; wanted 0 to {vocab_size - 1}"
    for one in given:
        if one.num_labels != one.labels.numel():
            return f"{one.num_labels} labels are counted of {one.labels.numel()}"
    return ""


def repeated(batches: Sequence[Batch]) -> str:
    """How many of the rows of these batches are another's; empty where none is."""
    rows = torch.cat([one.ids for one in batches])
    distinct = len(torch.unique(rows, dim=0))
    if distinct == len(rows):
        return ""
    return (
        f"{len(batches)} batches of the loader in a row have {distinct} distinct rows of"
        f" {len(rows)}"
    )


def learning_rate(finished: int, loop: LoopSteps) -> float:
    """Of the step after ``finished`` ones: linear to lr over warmup_steps, then half a cosine."""
    train = loop.config.train
    assert train.schedule == "cosine"
    if finished < train.warmup_steps:
        return train.lr * (finished + 1) / (train.warmup_steps + 1)
    span = max(1, train.steps - train.warmup_steps)
    done = min(1.0, (finished - train.warmup_steps) / span)
    low = train.min_lr_ratio
    return train.lr * (low + (1 - low) * (1 + math.cos(math.pi * done)) / 2)


def _gradients(loop: LoopSteps, divisor: float) -> dict[str, Tensor | None]:
    """By name, before clipping: the fused kernel leaves its quotient in the gradient that it is
    given, which of a weight with a master is a copy.
    """
    masters = loop.optimizer.state_dict()["master"]
    return {
        name: p.grad if p.grad is None or name in masters else p.grad.double() * divisor
        for name, p in loop.model.named_parameters()
    }


def _compare_norm(gradients: Mapping[str, Tensor | None], got: float, ratios: Ratios) -> None:
    """The norm that the loop reports against that of all gradients, in fp64."""
    squares = [x.double().square().sum() for x in gradients.values() if x is not None]
    wanted = float(torch.stack(squares).sum().sqrt()) if squares else 0.0
    where = f"the gradient norm is {got:.8g}, wanted {wanted:.8g}"
    error = abs(got - wanted)
    ratios.add("norm", error / (NORM_TOLERANCE * wanted) if wanted else error, where)


def _judge(
    loop: LoopSteps, before: Began, gradients: Mapping[str, Tensor | None], divisor: float
) -> tuple[float, str]:
    train = loop.config.train
    held = held_of(loop)
    if fault := _masters_fault(loop, held):
        return 1e9, fault
    rule = adamw.Rule(
        lr=learning_rate(loop.num_steps - 1, loop),
        betas=(train.beta1, train.beta2),
        eps=train.eps,
        weight_decay=train.weight_decay,
        decayed_from=2,  # norms and biases do not
        divisor=divisor,
    )
    return adamw.judge(gradients, held, before.held, rule)


def _masters_fault(loop: LoopSteps, held: Mapping[str, adamw.Held]) -> str:
    """The weight that has no fp32 master, or is not its master rounded."""
    for name, weight in loop.model.named_parameters():
        stepped = held[name].stepped
        if stepped.dtype != torch.float32:
            return f"{name} has no fp32 master"
        if not torch.equal(weight, stepped.to(weight.dtype)):
            return f"{name} is not its master rounded"
    return ""
