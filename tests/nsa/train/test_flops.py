"""FLOPs of a training step, and peaks of cards."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nsa.config import ModelConfig, NSAConfig, preset
from nsa.train import flops
from perfbench import roofline

TINY = preset("tiny")
MODELS = {
    "tiny": TINY,
    "m7c_125m": preset("m7c_125m"),
    "shared": replace(TINY, nsa=replace(TINY.nsa, share_kv=True)),
    "two branches": replace(TINY, nsa=replace(TINY.nsa, branches=("cmp", "win"))),
    "values": replace(TINY, v_head_dim=24, num_heads=8, vocab_size=999),
}


@pytest.mark.parametrize("attention", ["nsa", "dense"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("batch", "tokens"), [(1, 64), (3, 1000)])
def test_step_is_what_the_matrices_count(
    name: str, attention: str, batch: int, tokens: int
) -> None:
    counted = roofline.step_flops(
        MODELS[name],
        workload="train",
        batch=batch,
        tokens=tokens,
        dense=attention == "dense",
    )
    assert flops.step_flops(
        MODELS[name], batch=batch, tokens=tokens, attention=attention
    ) == pytest.approx(counted, rel=1e-12)


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_packed_documents_are_steps_of_their_own(attention: str) -> None:
    lengths = [700, 1, 64, 235]
    alone = [
        roofline.step_flops(
            TINY, workload="train", batch=1, tokens=length, dense=attention == "dense"
        )
        for length in lengths
    ]
    found = flops.documents_flops(TINY, lengths, attention=attention)
    assert found == pytest.approx(sum(alone), rel=1e-12)
    assert found < flops.step_flops(TINY, batch=1, tokens=1000, attention=attention)


def test_products_of_a_dense_step_counted_one_by_one() -> None:
    """Two layers of width 8, one head of 4, 3 tokens: by hand."""
    model = ModelConfig(
        dim=8, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4, vocab_size=10, mlp_ratio=2
    )
    tokens = 3
    q = o = 2 * tokens * 8 * 8
    k = v = 2 * tokens * 8 * 4
    mlp = 2 * (2 * tokens * 8 * 16)
    pairs = 1 + 2 + 3
    scores = values = 2 * pairs * 4 * 2
    forward = 2 * (q + k + v + o + mlp + scores + values) + 2 * tokens * 8 * 10
    assert flops.step_flops(model, batch=1, tokens=tokens, attention="dense") == 3 * forward


def test_layers_of_their_own_are_counted_each() -> None:
    """A layer of full attention has one K and V, no gate, and every key."""
    own = replace(TINY, layers=(TINY.nsa, TINY.nsa.full_attention()))
    count = {
        name: flops.step_flops(one, batch=1, tokens=200, attention="nsa")
        for name, one in {"nsa": TINY, "own": own}.items()
    }
    dense = flops.step_flops(TINY, batch=1, tokens=200, attention="dense")
    assert count["own"] == pytest.approx((count["nsa"] + dense) / 2)


def test_adaptive_rule_reads_fewer_keys() -> None:
    base = ModelConfig(nsa=NSAConfig())
    adaptive = ModelConfig(nsa=NSAConfig(adaptive_num_selected=True))
    fewer = ModelConfig(nsa=NSAConfig(num_selected=12))

    def count(model: ModelConfig, tokens: int) -> float:
        return flops.step_flops(model, batch=1, tokens=tokens, attention="nsa")

    assert count(adaptive, 1024) == count(fewer, 1024) < count(base, 1024)
    assert count(adaptive, 1025) == count(base, 1025)


def test_peaks_are_those_of_the_matrices() -> None:
    both = set(flops.PEAK_BF16_FLOP_PER_S) & set(roofline.CARDS)
    assert len(both) == len(roofline.CARDS)
    for name in both:
        assert flops.PEAK_BF16_FLOP_PER_S[name] == roofline.CARDS[name].half_flops_per_s


def test_unknown_card_has_no_peak_and_no_mfu() -> None:
    assert flops.peak_of("NVIDIA H2000") is None
    assert flops.mfu_pct(1e12, 1.0, flops.peak_of("NVIDIA H2000")) is None
    assert flops.mfu_pct(494.7e12, 1.0, flops.peak_of("NVIDIA H200")) == pytest.approx(50)
