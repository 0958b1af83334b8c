"""Started by torchrun in two processes: the trainer over NCCL, a GPU a rank, with whole gradients
and with parallel.compress=bf16. argv: OUT, a JSON file of what rank 0 found; a second word tries it
over gloo on CPUs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from nsa.train import parallel
from nsa.train.config import RunConfig
from nsa.train.errors import TrainExit
from nsa.train.loop import Trainer
from nsa.train.parallel import TrainWorld
from tests.nsa.torchrun import end_together
from tests.nsa.train.parallel_ranks import before_clipping, compressing_over_gloo
from tests.nsa.train.test_provoked import config_of

STEPS = 8
wrap = parallel.wrap


def config_for(out: Path, compress: str, device: str) -> RunConfig:
    train = {"steps": STEPS, "accumulate": 2, "device": device, "path": "masked", "lr": 1e-2}
    return config_of(out, train=train, parallel={"compress": compress}, checkpoint={"every": 100})


def wrap_over_gloo(model: nn.Module, config: RunConfig, world: TrainWorld) -> nn.Module:
    with compressing_over_gloo():
        return wrap(model, config, world)


def trained(config: RunConfig, world: TrainWorld) -> dict[str, Any]:
    """Losses of a run, the share of its last gradient's elements that bf16 holds exactly, and the
    sum of all weights in each rank.
    """
    out, shares = Path(config.out), []
    train = Trainer._train

    def seen(self: Trainer) -> TrainExit:
        shares.append(before_clipping(self.optimizer, self.plain_model))
        return train(self)

    out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(config, out)
    with pytest.MonkeyPatch.context() as patch:  # one group serves both runs
        patch.setattr(parallel, "connect", lambda config: world)
        patch.setattr(parallel, "disconnect", lambda world: None)
        patch.setattr(Trainer, "_train", seen)
        if world.device.type == "cpu":
            patch.setattr(parallel, "wrap", wrap_over_gloo)
        assert trainer.run() is TrainExit.OK
    sums: list[Any] = [None] * world.size
    own = sum(float(p.detach().double().sum()) for p in trainer.plain_model.parameters())
    dist.all_gather_object(sums, own)
    lines = map(json.loads, (out / "log" / "rank0.jsonl").read_text().splitlines())
    return {
        "losses": [one["loss_nats"] for one in lines if "learning_rate" in one],
        "in_bf16": shares[0][-1],
        "weights": sums,
    }


def main(out: Path, device: str) -> None:
    world = parallel.connect(config_for(out, "off", device))
    found = {
        compress: trained(config_for(out.with_name(compress), compress, device), world)
        for compress in ("off", "bf16")
    }
    if world.is_first:
        out.write_text(json.dumps(found))
    end_together()


if __name__ == "__main__":
    main(Path(sys.argv[1]), "cpu" if len(sys.argv) > 2 else "cuda")
