"""AdamW written out (Loshchilov and Hutter, arXiv 1711.05101, Algorithm 2), by which a step of the
optimizer is judged: its state and its update, from the step's own gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from perfbench.worker.ranks.model import local

# Root mean square of error over unit, where a unit is half a step of the stored dtype and an fp32
# rounding of each term: sums of two roundings come to half of it, at most all of it.
LIMIT = 2.0
_STATE = ("exp_avg", "exp_avg_sq")
_F32 = torch.finfo(torch.float32).eps


@dataclass(frozen=True, slots=True)
class Rule:
    """What a step should do. ``decayed_from``: the fewest dimensions of a tensor that decays;
    ``divisor``: of the gradients.
    """

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decayed_from: int = 0
    divisor: float = 1.0


# Of workload train; the betas and the rest are AdamW's usual ones.
TRAIN = Rule(lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2)


@dataclass(frozen=True, slots=True)
class Held:
    """What an optimizer holds of a parameter: the tensor that it steps, and its state ("step",
    "exp_avg", "exp_avg_sq"), empty where it has none.
    """

    stepped: Tensor
    state: Mapping[str, Any] = field(default_factory=dict)

    def copy(self) -> Held:
        state = {key: torch.as_tensor(x).detach().clone() for key, x in self.state.items()}
        return Held(self.stepped.detach().clone(), state)


def held_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Held]:
    """By the parameter's name, the live tensors; of a sharded one this rank's part."""
    return {
        name: Held(
            local(p),
            {
                key: local(x) if isinstance(x, Tensor) else x
                for key, x in optimizer.state.get(p, {}).items()
            },
        )
        for name, p in model.named_parameters()
    }


@torch.no_grad()
def judge(
    gradients: Mapping[str, Tensor | None],
    held: Mapping[str, Held],
    begin: Mapping[str, Held],
    rule: Rule,
) -> tuple[float, str]:
    """(error over tolerance, what is worst), after a step that began with the copies ``begin``.

    A parameter without a state, or a step that was not counted, is 1e9.
    """
    worst, where = 0.0, ""
    for name, gradient in gradients.items():
        if gradient is None:
            continue
        ratio, what = _judge_one(gradient, held.get(name), begin.get(name), rule)
        if ratio > worst or not where:
            worst, where = ratio, f"{what} of {name}"
    return worst, where


def settings_fault(model: nn.Module, optimizer: torch.optim.Optimizer, rule: Rule) -> str:
    """The hyperparameter that is not the rule's, or the parameter that the optimizer does not
    hold; empty where all are right.
    """
    wanted: dict[str, Any] = {
        "lr": rule.lr,
        "betas": rule.betas,
        "eps": rule.eps,
        "weight_decay": rule.weight_decay,
        "amsgrad": False,
        "maximize": False,
    }
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, p in model.named_parameters():
        if id(p) not in held:
            return f"the optimizer does not hold {name}"
    for group in optimizer.param_groups:
        for key, value in wanted.items():
            if group.get(key) != value:
                return f"the optimizer's {key} is {group.get(key)!r}; wanted {value!r}"
    return ""


def _judge_one(
    gradient: Tensor, held: Held | None, old: Held | None, rule: Rule
) -> tuple[float, str]:
    if held is None or old is None:
        return 1e9, "no state of the optimizer: the update"
    if any(key not in held.state or key not in old.state for key in ("step", *_STATE)):
        return 1e9, "no state of the optimizer: the update"
    state, before = held.state, float(old.state["step"])
    count = float(torch.as_tensor(state["step"]))
    if count != before + 1:
        return 1e9, f"a step count of {count:g} after {before:g}"
    g, w = gradient.double() / rule.divisor, old.stepped.double()
    found = []
    moments = []
    for key, beta, x in zip(_STATE, rule.betas, (g, g * g), strict=True):
        kept, fresh = beta * old.state[key].double(), (1 - beta) * x
        moments.append(kept + fresh)
        rounding = 2 * _F32 * (kept.abs() + fresh.abs())
        found.append((_ratio(state[key], moments[-1], rounding), f"{key}"))
    m, v = (x / (1 - beta**count) for x, beta in zip(moments, rule.betas, strict=True))
    update = rule.lr * m / (v.sqrt() + rule.eps)
    decay = rule.weight_decay if w.ndim >= rule.decayed_from else 0.0
    wanted = w * (1 - rule.lr * decay) - update
    rounding = _F32 * (w.abs() + 8 * update.abs())
    found.append((_ratio(held.stepped, wanted, rounding), "the update"))
    return max(found)


def _ratio(got: Tensor, wanted: Tensor, rounding: Tensor) -> float:
    """Root mean square of the error in units of what storing and computing may round, over
    `LIMIT`.
    """
    if got.numel() == 0:  # of a tensor that was sharded over more ranks than it has rows
        return 0.0
    tiny = torch.finfo(got.dtype).tiny
    unit = torch.finfo(got.dtype).eps / 2 * wanted.abs() + rounding + tiny
    error = ((got.double() - wanted) / unit).square().mean().sqrt().item() / LIMIT
    return min(error, 1e9) if error == error else 1e9
