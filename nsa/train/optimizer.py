"""AdamW (arXiv 1711.05101) over a model's weights or their fp32 masters, without a host sync."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nsa.parallel.norm import local_of, squared_norm
from nsa.train.config import LoopConfig

_WRAPPERS = ("module", "_orig_mod")  # DistributedDataParallel, torch.compile
_STATES = ("step", "exp_avg", "exp_avg_sq")


class TrainOptimizer:
    """Fused AdamW that a CUDA graph can hold; `build_optimizer` makes it.

    ``lr``: float32 0-dim on the weights' device, filled by the caller before a step. ``found_inf``:
    the same; where it is 1, `step` changes nothing, neither weights nor moments nor their count.

    A weight of a DTensor is stepped as its local shard. A weight with a master has its gradient
    copied to fp32 and its value rounded from the master after the step.
    """

    lr: Tensor
    found_inf: Tensor

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], config: LoopConfig, *, masters: bool
    ) -> None:
        self._parameters = dict(parameters)
        self._locals = {name: local_of(one.detach()) for name, one in self._parameters.items()}
        device = next(iter(self._locals.values())).device
        self.lr = torch.tensor(config.lr, dtype=torch.float32, device=device)
        self.found_inf = torch.zeros((), dtype=torch.float32, device=device)
        self._scale = torch.ones((), dtype=torch.float32, device=device)
        self._masters = {
            name: one.to(torch.float32, copy=True)
            for name, one in self._locals.items()
            if masters and one.dtype != torch.float32
        }
        self._stepped = {**self._locals, **self._masters}
        self._gradients = {name: torch.zeros_like(one) for name, one in self._masters.items()}
        matrices: dict[str, Any] = {"params": [o for o in self._stepped.values() if o.ndim >= 2]}
        others = {"params": [o for o in self._stepped.values() if o.ndim < 2], "weight_decay": 0.0}
        self._adamw = torch.optim.AdamW(
            [matrices, others],
            lr=self.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
            capturable=device.type == "cuda",
        )
        # AdamW makes its state in its first step; a checkpoint is loaded in place before that.
        for one in self._stepped.values():
            self._adamw.state[one] = {
                "step": torch.zeros((), dtype=torch.float32, device=device),
                "exp_avg": torch.zeros_like(one),
                "exp_avg_sq": torch.zeros_like(one),
            }
        # What torch.amp.GradScaler sets: the fused kernel divides each gradient by the one and
        # returns at once where the other is 1.
        optimizer: Any = self._adamw
        optimizer.grad_scale = self._scale
        optimizer.found_inf = self.found_inf

    @torch.no_grad()
    def clip(self, max_norm: float) -> Tensor:
        """The 2-norm of all gradients, before clipping: float32 0-dim on the device, of all shards.

        The next `step` takes gradients scaled to at most ``max_norm``; 0: as they are. The scale is
        applied in the fused kernel, in fp32; ``.grad`` itself is not read again. Call it after the
        backward of a step's last micro-step, before `step`; without it a step does not clip.
        """
        gradients = [one.grad for one in self._parameters.values() if one.grad is not None]
        norm = squared_norm(gradients).sqrt() if gradients else torch.zeros_like(self._scale)
        if max_norm > 0:
            self._scale.copy_((norm / max_norm).clamp(min=1.0))
        return norm

    @torch.no_grad()
    def step(self) -> None:
        """One update of every weight that has a gradient."""
        given = {
            name: local_of(one.grad)
            for name, one in self._parameters.items()
            if one.grad is not None
        }
        mastered = [name for name in given if name in self._masters]
        if mastered:
            torch._foreach_copy_(
                [self._gradients[name] for name in mastered], [given[name] for name in mastered]
            )
        for name, stepped in self._stepped.items():
            stepped.grad = self._gradients[name] if name in mastered else given.get(name)
        self._adamw.step()
        self._scale.fill_(1.0)
        if mastered:
            torch._foreach_copy_(
                [self._locals[name] for name in mastered],
                [self._masters[name] for name in mastered],
            )

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        """Drop the weights' gradients, or zero them in place."""
        for name, one in self._parameters.items():
            if set_to_none:
                one.grad = self._stepped[name].grad = None
            elif one.grad is not None:
                local_of(one.grad).zero_()

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """The live tensors: {"step", "exp_avg", "exp_avg_sq", "master"} -> weight's name -> tensor,
        a DTensor where the weight is one. What `CheckpointStore.load` fills in place.
        """
        states: dict[str, dict[str, Tensor]] = {
            kind: {
                name: self._global(name, self._adamw.state[one][kind])
                for name, one in self._stepped.items()
            }
            for kind in _STATES
        }
        states["master"] = {name: self._global(name, one) for name, one in self._masters.items()}
        return states

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Copy what `state_dict` returned into place, so that a captured graph reads it; ValueError
        for other names.
        """
        own = self.state_dict()
        for kind, tensors in own.items():
            given = state.get(kind, {})
            if given.keys() != tensors.keys():
                odd = sorted(given.keys() ^ tensors.keys())
                raise ValueError(
                    f"the optimizer's state differs in {kind} of {odd[0]} and {len(odd) - 1} more;"
                    " wanted the state of the same model and precision"
                )
            for name, one in tensors.items():
                local_of(one).copy_(local_of(given[name]))

    def _global(self, name: str, local: Tensor) -> Tensor:
        parameter = self._parameters[name]
        if not isinstance(parameter, DTensor) or local.ndim != parameter.ndim:
            return local  # a step's count is 0-dim and the same in all ranks
        return DTensor.from_local(
            local,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )


def build_optimizer(model: nn.Module, config: LoopConfig) -> TrainOptimizer:
    """AdamW by ``config.precision``: "bf16_master" steps fp32 masters of weights that are narrower,
    "bf16" steps the weights themselves, "fp32" and "autocast" want fp32 weights.

    Weight decay is of matrices (two dimensions or more, embeddings among them, as GPT-2's trainers
    do), not of norms and biases. ValueError for weights of another dtype than the precision's, and
    for a model without weights that need gradients.
    """
    parameters = {
        _plain_name(name): one for name, one in model.named_parameters() if one.requires_grad
    }
    if not parameters:
        raise ValueError(f"{type(model).__name__} has no weight that needs a gradient to step")
    if config.precision in ("fp32", "autocast"):
        for name, one in parameters.items():
            if one.dtype != torch.float32:
                raise ValueError(
                    f"train.precision={config.precision} with {name} in {one.dtype}; wanted fp32"
                    " weights; call model.float() or choose bf16_master"
                )
    return TrainOptimizer(parameters, config, masters=config.precision == "bf16_master")


def _plain_name(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
