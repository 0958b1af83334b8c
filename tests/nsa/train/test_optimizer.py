"""The optimizer against AdamW written out from its paper, in every precision."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from nsa.train.config import PRECISIONS, LoopConfig
from nsa.train.optimizer import TrainOptimizer, build_optimizer

CONFIG = LoopConfig(precision="fp32", lr=1e-2, weight_decay=0.1, beta1=0.9, beta2=0.95)


def small(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 3)).to(dtype)


def gradients(model: nn.Module, step: int) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(step)
    return {
        name: torch.randn(one.shape, generator=source) for name, one in model.named_parameters()
    }


def give(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    for name, one in model.named_parameters():
        one.grad = tensors[name].to(one.dtype, copy=True)


def run(model: nn.Module, optimizer: TrainOptimizer, steps: range, clip: float = 0.0) -> None:
    for step in steps:
        give(model, gradients(model, step))
        optimizer.lr.fill_(1e-2 / (1 + step))
        optimizer.clip(clip)
        optimizer.step()
        optimizer.zero_grad()


def copied(state: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    return {kind: {name: one.clone() for name, one in of.items()} for kind, of in state.items()}


def same(a: dict[str, dict[str, Tensor]], b: dict[str, dict[str, Tensor]]) -> bool:
    return a.keys() == b.keys() and all(
        a[kind].keys() == b[kind].keys()
        and all(torch.equal(a[kind][name], b[kind][name]) for name in a[kind])
        for kind in a
    )


@dataclass
class ByHand:
    """Algorithm 2 of arXiv 1711.05101 on lists of numbers, with Adam's bias correction."""

    theta: list[float]
    decay: float
    m: list[float] = field(default_factory=list)
    v: list[float] = field(default_factory=list)
    t: int = 0

    def step(self, g: list[float], lr: float) -> None:
        self.t += 1
        m, v = self.m or [0.0] * len(g), self.v or [0.0] * len(g)
        self.m = [0.9 * a + 0.1 * b for a, b in zip(m, g, strict=True)]
        self.v = [0.95 * a + 0.05 * b * b for a, b in zip(v, g, strict=True)]
        for i, theta in enumerate(self.theta):
            m_hat = self.m[i] / (1 - 0.9**self.t)
            v_hat = self.v[i] / (1 - 0.95**self.t)
            self.theta[i] = theta - lr * (m_hat / (math.sqrt(v_hat) + 1e-8) + self.decay * theta)


@pytest.mark.parametrize("precision", ["fp32", "autocast", "bf16_master"])
@pytest.mark.parametrize("clip", [0.0, 2.0])
def test_follows_the_paper(precision: str, clip: float) -> None:
    model = small()
    decayed = {"0.weight": 0.1, "1.weight": 0.0, "1.bias": 0.0, "2.weight": 0.1, "2.bias": 0.0}
    by_hand = {
        name: ByHand(one.detach().flatten().tolist(), decayed[name])
        for name, one in model.named_parameters()
    }
    optimizer = build_optimizer(model, LoopConfig(precision=precision, weight_decay=0.1))
    for step in range(20):
        given = gradients(model, step)
        give(model, given)
        optimizer.lr.fill_(1e-2 / (1 + step))
        norm = math.sqrt(sum(g * g for one in given.values() for g in one.flatten().tolist()))
        assert optimizer.clip(clip).item() == pytest.approx(norm, rel=1e-6)
        optimizer.step()
        scale = min(1.0, clip / norm) if clip else 1.0
        for name, one in by_hand.items():
            one.step([g * scale for g in given[name].flatten().tolist()], 1e-2 / (1 + step))
    for name, one in model.named_parameters():
        assert one.flatten().tolist() == pytest.approx(by_hand[name].theta, rel=1e-5, abs=1e-6)
    # without the clip the first moments would differ by the norm, about 8
    for name, one in optimizer.state_dict()["exp_avg"].items():
        assert one.flatten().tolist() == pytest.approx(by_hand[name].m, rel=1e-5, abs=1e-6)


def test_a_step_without_clip_is_not_scaled_by_the_one_before() -> None:
    model = small()
    optimizer = build_optimizer(model, CONFIG)
    run(model, optimizer, range(1), clip=1e-3)
    before = copied(optimizer.state_dict())["exp_avg"]
    given = gradients(model, 1)
    give(model, given)
    optimizer.step()
    for name, one in optimizer.state_dict()["exp_avg"].items():
        torch.testing.assert_close(one, 0.9 * before[name] + 0.1 * given[name])


def test_a_master_follows_fp32_where_bf16_stays() -> None:
    moved = {}
    for precision, dtype in (
        ("fp32", torch.float32),
        ("bf16", torch.bfloat16),
        ("bf16_master", torch.bfloat16),
    ):
        model = nn.Linear(2, 2, bias=False).to(dtype)
        nn.init.ones_(model.weight)
        optimizer = build_optimizer(
            model, LoopConfig(precision=precision, lr=1e-4, weight_decay=0.0)
        )
        for _ in range(100):
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
        moved[precision] = model.weight.detach()
        if precision == "bf16_master":
            assert torch.equal(optimizer.state_dict()["master"]["weight"], moved["fp32"])
    # a constant gradient moves by lr a step: 1 - 100 x 1e-4, with 100 roundings of fp32;
    # bf16's neighbour of 1 is 1 - 2^-8
    torch.testing.assert_close(moved["fp32"], torch.full((2, 2), 0.99), rtol=100 * 2**-24, atol=0)
    assert torch.equal(moved["bf16"], torch.ones(2, 2).bfloat16())
    assert torch.equal(moved["bf16_master"], moved["fp32"].bfloat16())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_found_inf_changes_nothing(precision: str) -> None:
    dtype = torch.bfloat16 if precision.startswith("bf16") else torch.float32
    model = small(dtype)
    optimizer = build_optimizer(model, LoopConfig(precision=precision))
    run(model, optimizer, range(2))
    weights, state = copied({"": model.state_dict()}), copied(optimizer.state_dict())
    broken = gradients(model, 2)
    broken["2.weight"][0, 0] = float("nan")
    give(model, broken)
    assert optimizer.clip(1.0).isnan()
    optimizer.found_inf.fill_(1.0)
    optimizer.step()
    assert same({"": model.state_dict()}, weights) and same(optimizer.state_dict(), state)
    optimizer.found_inf.fill_(0.0)
    run(model, optimizer, range(2, 3))
    assert not same({"": model.state_dict()}, weights)
    assert {one.item() for one in optimizer.state_dict()["step"].values()} == {3}
    assert all(one.isfinite().all() for one in model.parameters())


@pytest.mark.parametrize("precision", ["fp32", "bf16_master"])
def test_resumes_bitwise_in_place(precision: str) -> None:
    dtype = torch.bfloat16 if precision == "bf16_master" else torch.float32
    model = small(dtype)
    optimizer = build_optimizer(model, LoopConfig(precision=precision))
    run(model, optimizer, range(3), clip=1.0)
    weights, state = copied({"": model.state_dict()})[""], copied(optimizer.state_dict())
    run(model, optimizer, range(3, 6), clip=1.0)

    again = small(dtype)
    resumed = build_optimizer(again, LoopConfig(precision=precision))
    addresses = [one.data_ptr() for of in resumed.state_dict().values() for one in of.values()]
    again.load_state_dict(weights)
    resumed.load_state_dict(state)
    run(again, resumed, range(3, 6), clip=1.0)
    assert same({"": again.state_dict()}, {"": model.state_dict()})
    assert same(resumed.state_dict(), optimizer.state_dict())
    assert addresses == [
        one.data_ptr() for of in resumed.state_dict().values() for one in of.values()
    ]


def test_the_norm_of_bf16_gradients_is_accumulated_in_fp32() -> None:
    model = nn.Linear(300, 300, bias=False).bfloat16()
    optimizer = build_optimizer(model, LoopConfig(precision="bf16"))
    model.weight.grad = torch.full_like(model.weight, 1 / 3)
    third = torch.tensor(1 / 3).bfloat16().item()
    # 100.195: bf16 has 100.0 and 100.5; a sum in bf16 stops where an addend is below its rounding
    assert optimizer.clip(0.0).item() == pytest.approx(300 * third, rel=1e-3)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_weight_without_a_gradient_stays(set_to_none: bool) -> None:
    model = small(torch.bfloat16)
    optimizer = build_optimizer(model, LoopConfig(precision="bf16_master"))
    run(model, optimizer, range(1))
    before = copied({"": model.state_dict()})[""]
    give(model, gradients(model, 1))
    optimizer.zero_grad(set_to_none=set_to_none)
    grads = [one.grad for one in model.parameters()]
    assert all(g is None if set_to_none else not g.any() for g in grads)
    model[2].weight.grad = torch.ones_like(model[2].weight)
    for index in (0, 1):
        model[index].weight.grad = None
    optimizer.step()
    changed = {name for name, one in model.state_dict().items() if not one.equal(before[name])}
    assert "2.weight" in changed and not changed & {"0.weight", "1.weight"}


def test_names_are_the_models_own_under_compile_and_frozen_weights_are_left() -> None:
    model = small()
    model[1].weight.requires_grad_(False)
    optimizer = build_optimizer(torch.compile(model), CONFIG)
    wanted = {"0.weight", "1.bias", "2.weight", "2.bias"}
    assert set(optimizer.state_dict()["exp_avg"]) == wanted


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"0\.weight in torch\.bfloat16; wanted fp32"):
        build_optimizer(small(torch.bfloat16), CONFIG)
    with pytest.raises(ValueError, match="no weight"):
        build_optimizer(nn.ReLU(), CONFIG)
    other = build_optimizer(nn.Linear(2, 2), CONFIG).state_dict()
    with pytest.raises(ValueError, match="same model and precision"):
        build_optimizer(small(), CONFIG).load_state_dict(other)


SHARDED = """
import os, sys, torch
from torch import distributed as dist, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from nsa.train.config import LoopConfig
from nsa.train.optimizer import build_optimizer

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
norms, weights = [], []
for sharded in (False, True):
    torch.manual_seed(0)
    # 1 x 5: rank 1 holds nothing of it
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
    if sharded:
        fully_shard(model, mesh=mesh)
    optimizer = build_optimizer(model, LoopConfig(precision="fp32", lr=1e-2))
    for step in range(3):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        model(x).square().sum().backward()  # the mean over ranks of the same gradient
        norms.append(optimizer.clip(0.1).item())
        optimizer.step()
        optimizer.zero_grad()
    weights.append([
        one.full_tensor() if isinstance(one, DTensor) else one.detach()
        for one in (*model.parameters(), *optimizer.state_dict()["exp_avg"].values())
    ])
    assert any(isinstance(one, DTensor) for one in model.parameters()) == sharded
torch.testing.assert_close(norms[3:], norms[:3], rtol=1e-6, atol=0)
torch.testing.assert_close(weights[1], weights[0])
assert norms[0] > 0.2
dist.barrier()
os._exit(0)  # gloo's threads abort some interpreters' ends
"""


def test_shards_are_stepped_and_clipped_as_the_whole(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen([sys.executable, "-c", SHARDED, str(rank), str(tmp_path / "store")])
        for rank in range(2)
    ]
    assert [one.wait() for one in ranks] == [0, 0]
