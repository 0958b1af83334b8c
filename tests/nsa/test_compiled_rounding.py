"""torch.compile skips the rounding of a kernel's result that it fuses with the next one. The choice
of blocks keeps it.

Without, of keys compressed in bf16, 20 of 8,192 rows were chosen by keys that nobody else sees, and
eight compiled cells failed their proof on an H200.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nsa import compression, selection
from nsa.config import NSAConfig
from tests.cases import randn

T, D = 1024, 64
CONFIG = NSAConfig(num_selected=8)


@pytest.mark.parametrize(
    ("dtype", "score_dtype"),
    [
        (torch.bfloat16, "float32"),
        (torch.float16, "float32"),
        (torch.float32, "bfloat16"),
        (torch.bfloat16, "float16"),
    ],
    ids=str,
)
def test_a_compiled_choice_is_of_rounded_queries_and_keys(
    dtype: torch.dtype, score_dtype: str
) -> None:
    """The graph itself rounds them, as a layer's RoPE rounds q, and phi the compressed keys."""
    config = replace(CONFIG, score_dtype=score_dtype)

    def chosen(q: Tensor, k: Tensor) -> Tensor:
        k_cmp = compression.compress(k, config=config)
        options = {"config": config, "q_start": 0, "kv_len": T, "scale": D**-0.5}
        return selection.choose((q * 1.37).to(dtype), k_cmp, **options)

    torch._dynamo.reset()
    q, k = randn(2, T, 8, D, seed=1), randn(2, T, 2, D, seed=2).to(dtype)
    compiled = torch.compile(chosen, fullgraph=True, dynamic=False)
    differs = (compiled(q, k) != chosen(q, k)).any(-1)
    # what is left is the order of fp32 sums: ties of 1e-6, and a mean on the edge of a rounding
    assert int(differs.sum()) <= 1, f"{int(differs.sum())} of {differs.numel()} rows"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_value_of_a_dtype_is_kept(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All 65,536 of them, and what lies between two goes to the one that a cast takes."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    wide = selection._widened(every)
    assert wide.dtype == torch.float32
    assert torch.equal(wide.view(torch.int32), every.float().view(torch.int32))

    class Skipped(torch.Tensor):
        """fp32 values that claim to be rounded, as a fused kernel's are."""

    between = randn(100_000, seed=3) * torch.logspace(-4, 4, 100_000)
    between = between[between.abs() >= 2**-14]  # fp16's normal range
    skipped = between.as_subclass(Skipped)
    monkeypatch.setattr(Skipped, "dtype", property(lambda self: dtype), raising=False)
    got = selection._widened(skipped).as_subclass(torch.Tensor)
    assert torch.equal(got, between.to(dtype).float())
