"""The parts of a run, and the witness of a step: what it is given is what the model had."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from nsa.config import preset
from nsa.model import DenseLM, TinyLM, next_token_labels
from nsa.train.assemble import assemble, model_of
from nsa.train.config import RunConfig
from nsa.train.parallel import TrainWorld
from nsa.train.records import Batch

ALONE = TrainWorld(0, 1, torch.device("cpu"), "none")
SHARDED = TrainWorld(0, 2, torch.device("cpu"), "fsdp")


def config_of(**train: Any) -> RunConfig:
    values = {"precision": "fp32", "batch": 2, "seq_len": 40, "path": "masked", **train}
    config = RunConfig.from_mapping({"train": values})
    return replace(config, model=replace(preset("tiny"), vocab_size=32))


def batch_of(seed: int) -> Batch:
    ids = torch.randint(32, (2, 40), generator=torch.Generator().manual_seed(seed))
    return Batch(ids, next_token_labels(ids), None, 78, 78, 0.0)


@pytest.mark.parametrize(
    ("precision", "alone", "sharded"),
    [
        ("bf16_master", torch.bfloat16, torch.float32),
        ("bf16", torch.bfloat16, torch.bfloat16),
        ("autocast", torch.float32, torch.float32),
        ("fp32", torch.float32, torch.float32),
    ],
)
def test_the_weights_are_of_the_precision(
    precision: str, alone: torch.dtype, sharded: torch.dtype
) -> None:
    """A sharded model keeps fp32 weights, which its own policy casts."""
    config = config_of(precision=precision)
    for world, dtype in ((ALONE, alone), (SHARDED, sharded)):
        assert {p.dtype for p in model_of(config, world).parameters()} == {dtype}


def test_the_model_is_the_configs() -> None:
    made = model_of(config_of(fa2="off"), ALONE)
    assert isinstance(made, TinyLM)
    assert isinstance(model_of(config_of(attention="dense"), ALONE), DenseLM)


def test_the_seed_draws_the_weights() -> None:
    one, same, other = (assemble(config_of(seed=seed), ALONE).plain_model for seed in (1, 1, 2))
    torch.testing.assert_close(one.state_dict(), same.state_dict(), rtol=0, atol=0)
    assert not torch.equal(one.head.weight, other.head.weight)


class Doubled(nn.Module):
    """Stands for a compiled model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = 2 * self.inner(ids)
        return logits


def test_the_step_calls_what_was_compiled() -> None:
    made = assemble(config_of(), ALONE, compiled=Doubled)
    assert isinstance(made.model, Doubled) and made.model.inner is made.plain_model
    seen: list[Tensor] = []
    made.step.witness = lambda ids, labels, logits: seen.append(logits)
    batch = batch_of(0)
    made.step([batch], 0.0)
    with torch.no_grad():
        torch.testing.assert_close(seen[0], 2 * made.plain_model(batch.ids))


@pytest.mark.parametrize("kind", ["none", "ddp"])
def test_a_compiled_step_is_the_uncompiled_one(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one graph, also among ranks: DistributedDataParallel's own forward is in none."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    world, states = replace(ALONE, kind=kind), []
    if kind == "ddp":
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for compiles in (False, True):
            made = assemble(config_of(accumulate=2, compile=compiles), world)
            for seed in range(2):
                made.step([batch_of(seed), batch_of(seed + 2)], 1e-3)
            states.append(made.plain_model.state_dict())
    finally:
        if kind == "ddp":
            dist.destroy_process_group()
    torch.testing.assert_close(states[0], states[1])


def test_the_witness_has_each_micro_step() -> None:
    made = assemble(config_of(accumulate=3), ALONE)
    seen: list[tuple[Tensor, ...]] = []
    made.step.witness = lambda *tensors: seen.append(tensors)
    batches = [batch_of(seed) for seed in range(3)]
    with torch.no_grad():
        wanted = [made.plain_model(one.ids) for one in batches]
    made.step(batches, 1e-3)
    assert len(seen) == 3
    for (ids, labels, logits), batch, want in zip(seen, batches, wanted, strict=True):
        assert torch.equal(ids, batch.ids) and torch.equal(labels, batch.labels)
        assert not logits.requires_grad
        torch.testing.assert_close(logits, want)


def test_a_witness_changes_nothing() -> None:
    states = []
    for watched in (False, True):
        made = assemble(config_of(), ALONE)
        if watched:
            made.step.witness = lambda ids, labels, logits: None
        made.step([batch_of(0)], 1e-3)
        states.append(made.plain_model.state_dict())
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)
