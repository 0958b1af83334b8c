"""Proof of steps over pages: what a decode step of a PagedCache gives, for the oracle that judges
complete sequences. As `perfbench.worker.parity.cache`, whose cuts it takes.

B batch, T tokens, G kv heads, N blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nsa import engagement, functional
from nsa.attention import NSAAttention
from nsa.config import ModelConfig
from perfbench import older_nsa
from perfbench.worker.parity.cache import (
    Pieces,
    Tensors,
    Through,
    appended,
    compression,
    projected,
)

if TYPE_CHECKING:  # an older nsa has no pages, and none is asked for there
    from perfbench.older_nsa import PagedCache


@torch.no_grad()
def attention(
    model: ModelConfig,
    t: Tensors,
    pieces: Pieces,
    phi: functional.PhiParams,
    *,
    path: str,
    fa2: str,
    rows: Sequence[int],
    stepping: int = 0,
) -> Through:
    """As `cache.attention`, through the pages of a cache of one layer; a piece's blocks are those
    that its call chose.
    """
    from nsa.cached import decode_attention  # an older nsa has none

    nsa, q = model.nsa, t["q"]
    shape = older_nsa.PageShape(
        model.num_kv_heads, model.head_dim, model.value_dim, q.dtype, q.device
    )
    cache = _joined(older_nsa.PagedCache([nsa], q.shape[0], q.shape[1], shape))

    compress = compression(nsa, phi)
    outputs, blocks, engaged, judged = [], [], set[str](), set(rows)
    for begin, end in pieces:
        part = slice(begin, end)
        with (
            _planned(cache, end - begin, stepping),
            engagement.collect() as counted,
            older_nsa.collect_blocks() as seen,
        ):
            o = None
            if end - begin == 1:
                o = _one_step(model, t, cache, part, path=path, fa2=fa2)
            if o is None:
                view = cache.layers[0].append(*appended(t, part), compress=compress)
                o = decode_attention(
                    q[:, part], t["gates"][:, part], view, config=nsa, path=path, fa2=fa2
                )
            outputs.append(o)
        assert seen is not None and seen[0] is not None
        blocks.append(seen[0])
        if not judged.isdisjoint(range(begin, end)):
            engaged |= counted.counts.keys()
    return Through(torch.cat(outputs, 1), torch.cat(blocks, 1), frozenset(engaged))


def _one_step(
    model: ModelConfig, t: Tensors, cache: PagedCache, part: slice, *, path: str, fa2: str
) -> Tensor | None:
    """`attention` of one token by the operator that a step over pages calls for all branches; None
    where it calls one for each.
    """
    nsa = model.nsa
    if not (cache.has_kernels and older_nsa.takes_pages_in_one_step(nsa)):
        return None
    from nsa import fused_step  # an older nsa has none
    from nsa.decode import Step

    route = functional.route_for(
        t["q"][:, part],
        model.num_kv_heads,
        model.value_dim,
        cache.max_len,
        branches=nsa.branches,
        q_start=cache.start_B,
        path=path,
        fa2=fa2,
        config=nsa,
    )
    if not older_nsa.is_one_step(route, nsa):
        return None
    step: Any = Step(cache.start_B, nsa, cache.max_len)
    x = projected(t, part, step.position_B)
    return fused_step.attend_projected(route, cache.layers[0], step, x, rope="none")


@torch.no_grad()
def layer(layer: nn.Module, x_BTM: Tensor, pieces: Pieces, *, stepping: int = 0) -> Tensor:
    """As `cache.layer`."""
    assert isinstance(layer, NSAAttention)
    k, v = layer.new_cache(1, 1).sel  # of what kind they are
    shape = older_nsa.PageShape(k.shape[2], k.shape[3], v.shape[3], k.dtype, k.device)
    B, T = x_BTM.shape[:2]
    cache = _joined(older_nsa.PagedCache([layer.config], B, T, shape))
    parts = []
    for begin, end in pieces:
        with _planned(cache, end - begin, stepping):
            parts.append(layer(x_BTM[:, begin:end], cache=cache.layers[0]))
    return torch.cat(parts, 1)


def _joined(cache: PagedCache) -> PagedCache:
    """With a row at each place."""
    for _ in range(cache.max_batch):
        cache.join()
    return cache


@contextmanager
def _planned(cache: PagedCache, tokens: int, stepping: int) -> Iterator[None]:
    """A step of ``tokens`` a row; with ``stepping`` and one token of the shapes that a captured
    step has.
    """
    cache.plan(tokens)
    if not stepping or tokens > 1:
        yield
        return
    with cache.static():
        yield
    cache.taken()
