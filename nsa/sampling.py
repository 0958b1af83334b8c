"""Choosing the next token from logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import torch
from torch import Tensor

from nsa import checks


class Sampling(TypedDict, total=False):
    """Keyword arguments of `next_token`."""

    temperature: float
    top_p: float
    top_k: int | None
    generator: torch.Generator | None


SAMPLING = tuple(Sampling.__annotations__)


def next_token(
    logits_BV: Tensor,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """int64 [B]: the most likely token at temperature 0, else a sample from the nucleus of
    ``top_p`` probability among the ``top_k`` most likely tokens (None: all).

    The nucleus is the smallest set of most likely tokens whose probability reaches ``top_p``; it
    always holds one. ValueError for a temperature, top_p or top_k out of range and, where contents
    may be read (a CPU, strict mode), for a row without a most likely token.
    """
    checks.sampling(temperature=temperature, top_p=top_p, top_k=top_k)
    if checks.may_read(logits_BV) and not (most_B := logits_BV.amax(-1)).isfinite().all():
        row = int((~most_B.isfinite()).nonzero()[0])
        raise ValueError(
            f"got logits of row {row} with a maximum of {most_B[row]:g}; wanted a finite one; look"
            " for the first NaN or inf"
        )
    if temperature == 0:
        return logits_BV.argmax(-1)
    # below the largest: a small temperature gives -inf and never inf - inf
    below_BV = logits_BV.float() - logits_BV.float().amax(-1, keepdim=True)
    if top_k is not None and top_k < below_BV.shape[-1]:
        rank_BV = below_BV.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
        below_BV = below_BV.masked_fill(rank_BV >= top_k, -torch.inf)
    p = (below_BV / max(temperature, torch.finfo(torch.float32).tiny)).softmax(-1)
    if top_p < 1:
        order = p.sort(dim=-1, descending=True, stable=True)
        before = order.values.cumsum(-1) - order.values
        p = p.new_zeros(p.shape).scatter(
            -1, order.indices, order.values.masked_fill(before >= top_p, 0.0)
        )
    # Of independent exponential times with rates p, the first belongs to i with probability p_i.
    # torch.multinomial draws a token the same way, but first syncs to check that p is valid.
    return (p / torch.empty_like(p).exponential_(generator=generator)).argmax(-1)


def endings(
    eos_token_id: int | Sequence[int] | None, stop: Sequence[Sequence[int]] | None
) -> list[list[int]]:
    """The sequences of new tokens after which a row ends; tensors and arrays of ids, too.
    ValueError for an empty one and for other values than ids.
    """
    single: object = [] if eos_token_id is None else eos_token_id
    if getattr(single, "ndim", None) == 0 or isinstance(single, int):
        single = [single]
    found = [[token] for token in checks.counts("eos_token_id", single)]
    for ids in () if stop is None else stop:
        if isinstance(ids, str | int) or not len(ids):
            raise ValueError(
                f"stop holds {ids!r}; wanted lists of one id at least; encode text with the"
                " model's tokenizer"
            )
        found.append(checks.counts("stop", ids))
    return found


def has_ended(new_BN: Tensor, ending: Sequence[int]) -> Tensor:
    """bool [B]: whether the new tokens [B, N] of a row end with ``ending``."""
    if new_BN.shape[1] < len(ending):
        return new_BN.new_zeros(new_BN.shape[0], dtype=torch.bool)
    last = new_BN.new_tensor(ending)
    return (new_BN[:, new_BN.shape[1] - len(ending) :] == last).all(1)
