"""A training step of one's own under perfbench: a plain MLP, with its own reference in fp64.

    perfbench run examples/own-step.yaml

Nothing here imports perfbench or nsa: `mlp` is given the cell and the device, and returns an object
with a step and what one declares of it. `bare` declares nothing, so that nothing but its time is
known.
"""

from __future__ import annotations

import copy
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, CLASSES = 64, 10
LEARNING_RATE = 1e-2
# of the fp32 step against the fp64 one, relative to values near 1
TOLERANCE = 1e-4


class MlpStep:
    """One step of SGD on ``tokens`` random vectors."""

    def __init__(self, tokens: int, device: str, dtype: torch.dtype, seed: int) -> None:
        torch.manual_seed(seed)
        self.tokens_per_step = tokens
        self.model = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, CLASSES)
        ).to(device=device, dtype=dtype)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE)
        self.inputs = torch.randn(tokens, WIDTH, device=device, dtype=dtype)
        self.labels = torch.randint(CLASSES, (tokens,), device=device)

    def step(self) -> None:
        """Forward, loss, backward, update; no value is read back to the host."""
        self.optimizer.zero_grad(set_to_none=True)
        loss_of(self.model, self.inputs, self.labels).backward()
        self.optimizer.step()


class DeclaredMlpStep(MlpStep):
    """The same with all that can be declared."""

    # in the profiler's words: two layers forward, and the optimizer's update
    operators = MappingProxyType({"aten::addmm": 2, "Optimizer.step#SGD.step": 1})

    @property
    def flops(self) -> float:
        """Three products a weight, but for the first layer's gradient of its inputs."""
        first, second = WIDTH * 4 * WIDTH, 4 * WIDTH * CLASSES
        return 2.0 * self.tokens_per_step * (2 * first + 3 * second)

    def parity(self) -> dict[str, tuple[Tensor, Tensor, float]]:
        """Loss and update of one step against the same step in fp64: got, wanted, tolerance."""
        twin = copy.deepcopy(self.model).double()
        loss = loss_of(twin, self.inputs.double(), self.labels)
        gradients = torch.autograd.grad(loss, list(twin.parameters()))
        before = [parameter.detach().double() for parameter in self.model.parameters()]
        with torch.no_grad():
            got_loss = loss_of(self.model, self.inputs, self.labels)
        self.step()
        wanted = [b - LEARNING_RATE * g for b, g in zip(before, gradients, strict=True)]
        return {
            "loss": (got_loss, loss.detach(), TOLERANCE),
            "weights": (
                torch.cat([one.detach().flatten() for one in self.model.parameters()]),
                torch.cat([one.flatten() for one in wanted]),
                TOLERANCE,
            ),
        }


def loss_of(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy."""
    return nn.functional.cross_entropy(model(inputs), labels)


def mlp(cell: Any, device: str) -> DeclaredMlpStep:
    """``cell`` has batch, seq_len, dtype, torch_dtype, path, compile, cuda_graph and seed."""
    return DeclaredMlpStep(cell.batch * cell.seq_len, device, cell.torch_dtype, cell.seed)


def bare(cell: Any, device: str) -> MlpStep:
    """The same step, of which nothing is declared."""
    return MlpStep(cell.batch * cell.seq_len, device, cell.torch_dtype, cell.seed)
