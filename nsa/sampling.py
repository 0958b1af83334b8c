"""Choosing the next token from logits."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa import checks


def next_token(
    logits_BV: Tensor,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """int64 [B]: the most likely token at temperature 0, else a sample from the nucleus of
    ``top_p`` probability.

    The nucleus is the smallest set of most likely tokens whose probability reaches ``top_p``; it
    always holds one. ValueError for a temperature or top_p out of range and, where contents may be
    read (a CPU, strict mode), for a row without a most likely token.
    """
    checks.sampling(temperature=temperature, top_p=top_p)
    if checks.may_read(logits_BV) and not (most_B := logits_BV.amax(-1)).isfinite().all():
        row = int((~most_B.isfinite()).nonzero()[0])
        raise ValueError(
            f"got logits of row {row} with a maximum of {most_B[row]:g}; wanted a finite one; look"
            " for the first NaN or inf"
        )
    if temperature == 0:
        return logits_BV.argmax(-1)
    p = (logits_BV.float() / temperature).softmax(-1)
    if top_p < 1:
        order = p.sort(dim=-1, descending=True, stable=True)
        before = order.values.cumsum(-1) - order.values
        p = p.new_zeros(p.shape).scatter(
            -1, order.indices, order.values.masked_fill(before >= top_p, 0.0)
        )
    # Of independent exponential times with rates p, the first belongs to i with probability p_i.
    # torch.multinomial draws a token the same way, but first syncs to check that p is valid.
    return (p / torch.empty_like(p).exponential_(generator=generator)).argmax(-1)
