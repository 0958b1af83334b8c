"""Closed forms against brute force: masks counted, weights of the real model added up, torch's own
FLOP counter.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from nsa.capability import KNOWN_GPUS
from nsa.config import ModelConfig, NSAConfig, preset
from nsa.gate import SoftmaxGate
from nsa.model import DenseLM, TinyLM
from perfbench import roofline
from perfbench.roofline import CARDS
from tests import oracle
from tests.cases import randn

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = preset("tiny")
WIDE = NSAConfig(
    cmp_block=16, cmp_stride=4, sel_block=8, num_selected=4, window=7, num_initial=2, num_local=1
)
ALONE = NSAConfig(
    cmp_block=4, cmp_stride=4, sel_block=4, num_selected=1, window=1, num_initial=0, num_local=1
)
LENGTHS = (1, 7, 8, 9, 24, 81, 130)
MODELS = {
    "tiny": TINY,
    "softmax": replace(TINY, nsa=replace(TINY.nsa, gate="softmax")),
    "shared": replace(TINY, nsa=replace(TINY.nsa, share_kv=True)),
    "shared-softmax": replace(TINY, nsa=replace(TINY.nsa, share_kv=True, gate="softmax")),
    "uneven": ModelConfig(
        dim=40,
        num_layers=3,
        num_heads=6,
        num_kv_heads=3,
        head_dim=12,
        v_head_dim=20,
        vocab_size=97,
        mlp_ratio=2,
    ),
}
EVERY_MODEL = pytest.mark.parametrize("name", MODELS)


def counted_pairs(config: NSAConfig, tokens: int) -> dict[str, int]:
    """(query, key) pairs of each branch, from masks of one head over random inputs."""
    q, k = randn(1, tokens, 1, 4, seed=1), randn(1, tokens, 1, 4, seed=2)
    k_cmp = oracle.compress_mean(k, config.cmp_block, config.cmp_stride)
    blocks, _ = oracle.select(q, k_cmp, config=config)
    return {
        "cmp": int(
            oracle.kept_compressed(q, k_cmp, block=config.cmp_block, stride=config.cmp_stride).sum()
        ),
        "sel": int(oracle.kept_selected(q, k, blocks, sel_block=config.sel_block).sum()),
        "win": int(oracle.kept_window(q, k, window=config.window).sum()),
    }


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("config", [TINY.nsa, WIDE, ALONE], ids=["tiny", "wide", "alone"])
def test_pairs_are_what_masks_keep(config: NSAConfig, tokens: int) -> None:
    counted = counted_pairs(config, tokens)
    for branches in (("cmp", "sel", "win"), ("cmp",), ("sel",), ("win",), ("cmp", "win")):
        model = replace(TINY, nsa=replace(config, branches=branches))
        assert roofline.attention_pairs(model, tokens, dense=False) == sum(
            counted[b] for b in branches
        )
        assert roofline.attention_pairs(model, tokens, dense=True) == int(
            torch.ones(tokens, tokens).tril().sum()
        )


def multiplied_weights(model: nn.Module) -> int:
    total = sum(part.weight.numel() for part in model.modules() if isinstance(part, nn.Linear))
    return total + sum(
        part.up.numel() + part.down.numel()
        for part in model.modules()
        if isinstance(part, SoftmaxGate)
    )


@EVERY_MODEL
def test_parameters_are_the_real_models(name: str) -> None:
    model = MODELS[name]
    assert roofline.linear_parameters(model, dense=False) == multiplied_weights(TinyLM(model))
    assert roofline.linear_parameters(model, dense=True) == multiplied_weights(DenseLM(model))


def products_of(
    model: nn.Module, config: ModelConfig, *, batch: int, tokens: int, train: bool
) -> int:
    """FLOPs of the products with weights, as torch counts them; the attention's own batched
    products left out.
    """
    counter = FlopCounterMode(display=False)
    with counter:
        logits = model(torch.zeros(batch, tokens, dtype=torch.int64))
        if train:
            logits.sum().backward()
    counted = counter.get_flop_counts()["Global"]
    return sum(
        flops for operator, flops in counted.items() if str(operator) in ("aten.mm", "aten.addmm")
    )


@pytest.mark.parametrize("train", [False, True], ids=["forward", "train"])
@pytest.mark.parametrize("dense", [False, True], ids=["nsa", "dense"])
# a softmax gate's products are batched, like attention's
@pytest.mark.parametrize("name", ["tiny", "shared", "uneven"])
def test_flops_are_what_torch_counts(name: str, dense: bool, train: bool) -> None:
    config, batch, tokens = MODELS[name], 2, 40
    model = DenseLM(config) if dense else TinyLM(config, "masked")
    workload = "train" if train else "forward"
    total = roofline.step_flops(config, workload=workload, batch=batch, tokens=tokens, dense=dense)
    pairs = counted_pairs(config.nsa, tokens)
    keys = tokens * (tokens + 1) // 2 if dense else sum(pairs.values())
    # One product over head_dim for the logit of a pair, one over value_dim for its share of the
    # output.
    attention = (
        2
        * batch
        * config.num_layers
        * config.num_heads
        * keys
        * (config.head_dim + config.value_dim)
    )
    counted = products_of(model, config, batch=batch, tokens=tokens, train=train)
    assert total - attention * (3 if train else 1) == counted


def test_flops_grow_with_batch_and_length() -> None:
    def flops(batch: int, tokens: int, dense: bool = False) -> float:
        return roofline.step_flops(TINY, workload="train", batch=batch, tokens=tokens, dense=dense)

    assert flops(3, 100) == 3 * flops(1, 100)
    assert flops(1, 4096, dense=True) / flops(1, 2048, dense=True) > 3, (
        "full attention is quadratic"
    )
    assert flops(1, 65536, dense=True) > flops(1, 65536) and flops(1, 16, dense=True) < flops(1, 16)


@EVERY_MODEL
@pytest.mark.parametrize(("dtype", "size"), [("bf16", 2), ("fp16", 2), ("fp32", 4)])
def test_least_bytes(name: str, dtype: str, size: int) -> None:
    model = MODELS[name]
    for dense, built in ((False, TinyLM(model)), (True, DenseLM(model))):
        weights = multiplied_weights(built) * size
        shape: dict[str, Any] = {"batch": 2, "tokens": 33, "dtype": dtype, "dense": dense}
        assert (
            roofline.step_min_bytes(model, workload="forward", **shape)
            == weights + 2 * 33 * model.vocab_size * size
        )
        train = roofline.step_min_bytes(model, workload="train", **shape)
        assert train == 6 * weights, "weight and both moments, each read and written"
        assert train <= 6 * size * sum(x.numel() for x in built.parameters()), (
            "a floor must not exceed the traffic"
        )


H100 = "NVIDIA H100 80GB HBM3"


def judged(**changes: Any) -> Any:
    values: dict[str, Any] = {
        "flops": 6e12,
        "min_bytes": 3.35e9,
        "step_s": 0.1,
        "gemm_flops_per_s": 6e14,
        "dtype": "bf16",
    }
    return roofline.judge_step(**{**values, "device_name": H100, "is_gpu": True, **changes})


def test_rates_and_the_floor_of_a_known_card() -> None:
    row = judged()
    assert row.flops_per_s == pytest.approx(6e13) and row.bytes_per_s == pytest.approx(3.35e10)
    assert (row.datasheet_bytes_per_s, row.l2_bytes, row.notes) == (3.35e12, 50 * 2**20, [])
    assert (
        row.datasheet_flops_per_s == 989.4e12
        and judged(dtype="fp32").datasheet_flops_per_s == 66.9e12
    )
    assert row.floor_s == pytest.approx(0.01) and row.floor_fraction == pytest.approx(0.1), (
        "FLOPs take 10 ms, bytes 1 ms"
    )


def test_the_larger_floor_counts() -> None:
    row = judged(min_bytes=3.35e11 / 2)
    assert row.floor_s == pytest.approx(0.05) and row.floor_fraction == pytest.approx(0.5)
    assert judged(gemm_flops_per_s=None).floor_s == pytest.approx(1e-3), "bytes alone"
    assert judged(step_s=0.005).floor_fraction == pytest.approx(2.0), (
        "not capped: the hard gate must see it"
    )


def test_an_unknown_card_has_null_ceilings() -> None:
    row = judged(device_name="NVIDIA H100 NVL")
    assert (
        row.datasheet_bytes_per_s is None
        and row.l2_bytes is None
        and row.datasheet_flops_per_s is None
    )
    assert row.notes == ["no datasheet entry for 'NVIDIA H100 NVL': datasheet ceilings are null"]
    assert row.floor_s == pytest.approx(0.01), "the measured GEMM rate still holds"
    blind = judged(device_name="NVIDIA H100 NVL", gemm_flops_per_s=None)
    assert blind.floor_s is None and blind.floor_fraction is None and blind.gemm_flops_per_s is None
    assert blind.flops_per_s == pytest.approx(6e13)


def test_a_cpu_says_so() -> None:
    row = judged(device_name="cpu", is_gpu=False)
    assert row.notes == ["CPU: datasheet ceilings are null"] and row.datasheet_bytes_per_s is None
    assert row.floor_fraction == pytest.approx(0.1)


def test_cards_that_the_planner_knows_have_a_ceiling() -> None:
    assert {name for name, _ in KNOWN_GPUS.values()} <= set(CARDS)
    for name, card in CARDS.items():
        assert (
            name.startswith("NVIDIA ")
            and 5e11 < card.bytes_per_s < 1e13
            and 2**20 < card.l2_bytes < 2**28
        ), name
