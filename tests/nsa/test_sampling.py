"""Choosing a token of logits: the sample that multinomial draws, and no token of NaN."""

from __future__ import annotations

import math

import pytest
import torch

from nsa import checks
from nsa.sampling import next_token
from tests.cases import randn
from tests.nsa.test_decode_step import Calls


@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_a_sample_is_the_one_that_multinomial_draws(
    top_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its look at the probabilities, which would make the host wait in every step."""
    monkeypatch.setattr(checks, "may_read", lambda x: False)  # as on CUDA
    logits = randn(64, 50, seed=3)
    p = (logits / 0.8).softmax(-1)
    order = p.argsort(-1, descending=True)
    for b, row in enumerate(p if top_p < 1 else []):
        sizes = row[order[b]].cumsum(0)
        p[b, order[b][int((sizes < top_p).sum()) + 1 :]] = 0
    want = torch.multinomial(p, 1, generator=torch.Generator().manual_seed(5))[:, 0]
    with Calls() as calls:
        got = next_token(
            logits, temperature=0.8, top_p=top_p, generator=torch.Generator().manual_seed(5)
        )
    assert torch.equal(got, want) and len(set(got.tolist())) > 5 and calls.of_host == {}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_no_token_is_chosen_of_nan(bad: float, temperature: float) -> None:
    logits = randn(3, 7, seed=3)
    logits[0, 2] = -math.inf  # one that may not be chosen
    assert next_token(logits, temperature=temperature).shape == (3,)
    logits[1, 4] = bad
    with pytest.raises(
        ValueError, match=f"got logits of row 1 with a maximum of {bad:g}; wanted a finite one"
    ):
        next_token(logits, temperature=temperature)
