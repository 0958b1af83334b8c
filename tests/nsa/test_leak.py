"""Property 9, the leak detector: nothing can be learned from fresh uniform random bytes, unless the
future leaks.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import ModelConfig, TinyLM, engagement
from nsa.config import NSAConfig
from nsa.ops.selected import PATHS
from nsa.routing import Path

STEPS, COUNTED, BATCH, TOKENS = 200, 100, 8, 48
MODEL = ModelConfig(
    dim=64,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    nsa=NSAConfig(cmp_block=4, cmp_stride=2, sel_block=4, num_selected=4, window=8),
)


pytestmark = pytest.mark.usefixtures("one_thread")


def train_on_random_bytes() -> tuple[float, float]:
    """(mean loss of the last 100 steps, its standard error), on the default path; every batch is
    seen once.
    """
    torch.manual_seed(0)
    model = TinyLM(MODEL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    with engagement.collect() as engaged:
        for _ in range(STEPS):
            ids = torch.randint(256, (BATCH, TOKENS))
            logits = model(ids)[:, :-1]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert engaged.counts["sel.masked"] == STEPS, (
        "the detector must watch the path that it plants the leak in"
    )
    counted = torch.tensor(losses[-COUNTED:], dtype=torch.float64)
    return float(counted.mean()), float(counted.std()) / math.sqrt(COUNTED)


def shows_a_leak(mean: float, standard_error: float) -> bool:
    """On fresh uniform bytes no causal model's expected loss is below ln 256."""
    return mean < math.log(256) - 5 * standard_error


def test_random_bytes_cannot_be_learned() -> None:
    mean, standard_error = train_on_random_bytes()
    assert not shows_a_leak(mean, standard_error), (
        f"loss {mean:.4f} +- {standard_error:.4f} is below ln 256"
    )
    assert abs(mean - math.log(256)) < 0.05, (
        f"loss {mean:.4f}: training has not settled, so the detector says nothing"
    )
    assert standard_error < 0.005


def test_a_planted_leak_goes_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each key stands one place early in the selected branch: every query sees one token of the
    future.
    """
    unshifted = PATHS[Path.MASKED]

    def leaky(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Tensor:
        return unshifted(q, k.roll(-1, 1), v.roll(-1, 1), *rest, **options)

    monkeypatch.setitem(PATHS, Path.MASKED, leaky)  # type: ignore[arg-type]
    mean, standard_error = train_on_random_bytes()
    assert shows_a_leak(mean, standard_error), (
        f"loss {mean:.4f} +- {standard_error:.4f}: the leak went unseen"
    )
