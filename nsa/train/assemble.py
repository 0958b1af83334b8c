"""What a run trains: the model, the model as it is called, its optimizer and its step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from nsa.model import DenseLM, TinyLM
from nsa.train import parallel
from nsa.train.config import RunConfig
from nsa.train.optimizer import TrainOptimizer, build_optimizer
from nsa.train.parallel import TrainWorld
from nsa.train.step import TrainStep

_DTYPES = {"bf16_master": torch.bfloat16, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Trained:
    """``plain_model`` has the weights; ``model`` is how ``step`` calls it, among ranks or compiled
    by the caller.
    """

    plain_model: TinyLM | DenseLM
    model: nn.Module
    optimizer: TrainOptimizer
    step: TrainStep


def assemble(
    config: RunConfig,
    world: TrainWorld,
    *,
    compiled: Callable[[nn.Module], nn.Module] | None = None,
    weights: Mapping[str, Tensor] | None = None,
) -> Trained:
    """As ``config`` wants them, weights drawn by train.seed, or ``weights`` by their names.
    ``compiled``: what compiles the model where the caller does that and not train.compile, so as to
    read the graph.
    """
    torch.manual_seed(config.train.seed)
    plain = model_of(config, world)
    if weights is not None:
        plain.load_state_dict(weights)
    called: nn.Module = plain
    if compiled is not None:
        called = compiled(plain)
    elif config.train.compile:
        packed = config.data.packing == "documents"
        called = cast("nn.Module", torch.compile(plain, fullgraph=True, dynamic=packed))
    # compiled within: the forward of DistributedDataParallel itself is in no graph
    model = parallel.wrap(called, config, world)
    optimizer = build_optimizer(plain, config.train)
    return Trained(plain, model, optimizer, TrainStep(model, optimizer, config, world))


def model_of(config: RunConfig, world: TrainWorld) -> TinyLM | DenseLM:
    """On the world's device, in the dtype of train.precision."""
    train = config.train
    dtype = torch.float32
    if world.kind in ("none", "ddp"):  # a sharded model casts by its own policy
        dtype = _DTYPES.get(train.precision, torch.float32)
    elif train.precision == "bf16":
        dtype = torch.bfloat16
    model: TinyLM | DenseLM
    if train.attention == "dense":
        model = DenseLM(config.model)
    else:
        model = TinyLM(config.model, train.path, train.fa2)
    return model.to(device=world.device, dtype=dtype)
