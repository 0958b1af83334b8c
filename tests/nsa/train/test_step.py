"""One step of training against the same written out in plain PyTorch."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nsa.config import preset
from nsa.model import TinyLM, next_token_labels
from nsa.train.config import RunConfig
from nsa.train.errors import TrainError, TrainExit
from nsa.train.optimizer import build_optimizer
from nsa.train.parallel import TrainWorld
from nsa.train.records import Batch
from nsa.train.step import TrainStep, why_no_graph

ALONE = TrainWorld(0, 1, torch.device("cpu"), "none")
ON_GPU = TrainWorld(0, 1, torch.device("cuda", 0), "none")
LEARNING_RATES = (3e-3, 2e-3, 1e-3)


def config_of(**train: Any) -> RunConfig:
    values = {"precision": "fp32", "batch": 2, "seq_len": 40, "accumulate": 2, **train}
    config = RunConfig.from_mapping({"train": values})
    return replace(config, model=replace(preset("tiny"), vocab_size=32))


def batch_of(seed: int, *, ignored: int = 0) -> Batch:
    ids = torch.randint(32, (2, 40), generator=torch.Generator().manual_seed(seed))
    labels = next_token_labels(ids)
    labels[0, :ignored] = -100
    num_labels = int((labels != -100).sum())
    return Batch(ids, labels, None, num_labels, num_labels, 0.0)


def step_of(config: RunConfig) -> tuple[TinyLM, TrainStep]:
    torch.manual_seed(0)
    model = TinyLM(config.model, "masked")
    return model, TrainStep(model, build_optimizer(model, config.train), config, ALONE)


def losses(model: nn.Module, batches: list[Batch]) -> Tensor:
    """Summed over every label of the step, divided by their number."""
    found = [
        nn.functional.cross_entropy(model(one.ids).flatten(0, 1), one.labels.flatten())
        * one.num_labels
        for one in batches
    ]
    return torch.stack(found).sum() / sum(one.num_labels for one in batches)


def plain_steps(model: nn.Module, steps: list[list[Batch]], clip: float) -> list[float]:
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    seen = []
    for batches, lr in zip(steps, LEARNING_RATES, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad()
        loss = losses(model, batches)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        seen.append(loss.item())
    return seen


def test_three_steps_are_those_of_plain_adamw() -> None:
    """Micro-steps of unlike label counts weigh by their labels; the clip is felt."""
    config = config_of(clip=0.5)
    model, step = step_of(config)
    twin = copy.deepcopy(model)
    steps = [[batch_of(2 * i), batch_of(2 * i + 1, ignored=7 * i)] for i in range(3)]
    wanted = plain_steps(twin, steps, 0.5)
    for batches, lr, loss in zip(steps, LEARNING_RATES, wanted, strict=True):
        step(batches, lr)
        assert step.read().loss_nats == pytest.approx(loss, rel=1e-5)
    for (name, got), want in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-6, msg=name)


def test_totals_are_means_over_all_steps_since_the_last_read() -> None:
    config = config_of(accumulate=1)
    model, step = step_of(config)
    batches = [batch_of(5), batch_of(6, ignored=30)]
    with torch.no_grad():
        by_hand = losses(model, batches).item()
    for one in batches:
        step([one], 0.0)  # the weights stay
    assert step.read().loss_nats == pytest.approx(by_hand, rel=1e-6)
    assert step.read().loss_nats is None


class Poisoned(nn.Module):
    """The model, whose logits are NaN while ``broken``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.broken = model, False

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(ids)
        return logits * float("nan") if self.broken else logits


def test_a_step_without_a_finite_loss_changes_nothing_and_is_counted() -> None:
    config = config_of(accumulate=1)
    model, step = step_of(config)
    step.model = step._call = poisoned = Poisoned(model)
    step([batch_of(1)], 1e-3)
    before = copy.deepcopy(model.state_dict())
    state = copy.deepcopy(step.optimizer.state_dict())
    poisoned.broken = True
    for _ in range(2):
        step([batch_of(2)], 1e-3)
    totals = step.read()
    assert (totals.bad_steps, totals.bad_run) == (2, 2)
    assert totals.loss_nats is not None and totals.loss_nats < 10  # of the good step alone
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    torch.testing.assert_close(step.optimizer.state_dict(), state, rtol=0, atol=0)
    poisoned.broken = False
    step([batch_of(3)], 1e-3)
    totals = step.read()
    assert (totals.bad_steps, totals.bad_run) == (2, 0)
    assert not torch.equal(model.head.weight, before["head.weight"])


def test_packed_documents_train_as_if_each_were_alone() -> None:
    config = config_of(accumulate=1, clip=0.0)
    model, step = step_of(config)
    twin = copy.deepcopy(model)
    ids = batch_of(9).ids.reshape(1, 80)
    cuts = torch.tensor([0, 33, 80], dtype=torch.int32)
    labels = next_token_labels(ids, cu_seqlens=cuts)
    step([Batch(ids, labels, cuts, 78, 78, 0.0)], 1e-3)
    total = torch.stack(
        [
            nn.functional.cross_entropy(
                twin(ids[:, a:b])[0, :-1], ids[0, a + 1 : b], reduction="sum"
            )
            for a, b in ((0, 33), (33, 80))
        ]
    ).sum()
    (total / 78).backward()
    norm = torch.stack([p.grad.norm() for p in twin.parameters() if p.grad is not None]).norm()
    totals = step.read()
    assert totals.loss_nats == pytest.approx(total.item() / 78, rel=1e-5)
    assert totals.gradient_norm == pytest.approx(norm.item(), rel=1e-4)


@pytest.mark.parametrize(
    "world, changes, reason",
    [
        (ALONE, {}, "a CPU has no CUDA graphs"),
        (ON_GPU, {"data": {"packing": "documents"}}, "packed documents"),
        (ON_GPU, {"train": {"path": "v1"}}, "path v1 loops on the host"),
        (ON_GPU, {"model": {"checkpoint_layers": [0, 1]}}, "activation checkpointing"),
        (replace(ON_GPU, size=2, kind="ddp"), {}, "the collectives of ddp"),
        (ON_GPU, {}, ""),
    ],
)
def test_why_a_step_is_not_captured(
    world: TrainWorld, changes: dict[str, Any], reason: str
) -> None:
    why = why_no_graph(RunConfig.from_mapping(changes), world)
    assert why.startswith(reason) if reason else why == ""


def test_a_graph_that_cannot_be_is_refused() -> None:
    config = config_of(cuda_graph="on")
    with pytest.raises(TrainError, match="a CPU has no CUDA graphs") as caught:
        step_of(config)
    assert caught.value.code is TrainExit.USAGE
