"""AdamW written out (Loshchilov and Hutter, arXiv 1711.05101, Algorithm 2), by which a step of the
optimizer is judged: its state and its update, from the step's own gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# of a cell that trains; the betas and the rest are AdamW's usual ones
LR, BETAS, EPS, WEIGHT_DECAY = 1e-4, (0.9, 0.999), 1e-8, 1e-2
# Root mean square of error over unit, where a unit is half a step of the stored dtype and an fp32
# rounding of each term: sums of two roundings come to half of it, at most all of it.
LIMIT = 2.0
_STATE = ("exp_avg", "exp_avg_sq")
_F32 = torch.finfo(torch.float32).eps


@dataclass(frozen=True, slots=True)
class Before:
    """Weights and the optimizer's state, by the parameter's name, before a step."""

    weights: Mapping[str, Tensor]
    states: Mapping[str, Mapping[str, Tensor]]


def before(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Before:
    """Copies."""
    named = dict(model.named_parameters())
    weights = {name: p.detach().clone() for name, p in named.items()}
    states: dict[str, dict[str, Tensor]] = {}
    if optimizer is not None:
        for name, p in named.items():
            if p in optimizer.state:
                states[name] = {
                    key: torch.as_tensor(value).detach().clone()
                    for key, value in optimizer.state[p].items()
                }
    return Before(weights, states)


@torch.no_grad()
def judge(model: nn.Module, optimizer: torch.optim.Optimizer, begin: Before) -> tuple[float, str]:
    """(error over tolerance, what is worst), after a step that began at ``begin``.

    A wrong hyperparameter, a parameter that is not the optimizer's, one without a state, or a step
    that was not counted is 1e9.
    """
    if fault := _settings_fault(model, optimizer):
        return 1e9, fault
    worst, where = 0.0, ""
    for name, p in model.named_parameters():
        if p.grad is None:
            continue
        ratio, what = _judge_one(p, optimizer.state.get(p, {}), begin, name)
        if ratio > worst or not where:
            worst, where = ratio, f"{what} of {name}"
    return worst, where


def _settings_fault(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    wanted: dict[str, Any] = {
        "lr": LR,
        "betas": BETAS,
        "eps": EPS,
        "weight_decay": WEIGHT_DECAY,
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


def _judge_one(p: Tensor, state: Mapping[str, Any], begin: Before, name: str) -> tuple[float, str]:
    old = begin.states.get(name)
    if old is None or any(key not in state or key not in old for key in ("step", *_STATE)):
        return 1e9, "no state of the optimizer: the update"
    count = float(torch.as_tensor(state["step"]))
    if count != float(old["step"]) + 1:
        return 1e9, f"a step count of {count:g} after {float(old['step']):g}"
    assert p.grad is not None
    g, w = p.grad.double(), begin.weights[name].double()
    found = []
    moments = []
    for key, beta, x in zip(_STATE, BETAS, (g, g * g), strict=True):
        kept, fresh = beta * old[key].double(), (1 - beta) * x
        moments.append(kept + fresh)
        rounding = 2 * _F32 * (kept.abs() + fresh.abs())
        found.append((_ratio(state[key], moments[-1], rounding), f"{key}"))
    m, v = (x / (1 - beta**count) for x, beta in zip(moments, BETAS, strict=True))
    update = LR * m / (v.sqrt() + EPS)
    wanted = w * (1 - LR * WEIGHT_DECAY) - update
    found.append((_ratio(p, wanted, _F32 * (w.abs() + 8 * update.abs())), "the update"))
    return max(found)


def _ratio(got: Tensor, wanted: Tensor, rounding: Tensor) -> float:
    """Root mean square of the error in units of what storing and computing may round, over
    `LIMIT`.
    """
    tiny = torch.finfo(got.dtype).tiny
    unit = torch.finfo(got.dtype).eps / 2 * wanted.abs() + rounding + tiny
    error = ((got.double() - wanted) / unit).square().mean().sqrt().item() / LIMIT
    return min(error, 1e9) if error == error else 1e9
