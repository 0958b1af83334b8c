"""Proof of steps that go through an NSACache: what decode and chunked prefill give, for the oracle
that judges complete sequences.

B batch, T tokens, G kv heads, N blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from nsa import engagement, functional, routing
from nsa.attention import NSAAttention
from nsa.config import BRANCHES, ModelConfig, NSAConfig
from nsa.dense import DenseAttention
from nsa.functional import capability_of
from nsa.routing import Problem
from perfbench import older_nsa
from perfbench.older_nsa import KV, NSACache, Steps
from perfbench.worker.parity.blocks import Place, chosen

MIN_CHUNKS = 3  # of a proof: a first, one between and a last
Tensors = Mapping[str, Tensor]
Pieces = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Through:
    """``o`` [B, T, HQ, DV] and ``blocks`` int32 [B, T, G, N] of all tokens; ``engaged``: the
    counters of the calls that hold a judged row.
    """

    o: Tensor
    blocks: Tensor
    engaged: frozenset[str]


def pieces_of(chunk: int, rows: Sequence[int], tokens: int) -> list[tuple[int, int]]:
    """How a proof cuts ``tokens``: with ``chunk`` 1 each of ``rows`` is a call of its own, and what
    is between is filled in.

    Else into chunks of that size, or of a third where they would be fewer than three.
    """
    if chunk == 1:
        cuts = sorted({0, tokens} | {cut for row in rows for cut in (row, row + 1)})
    else:
        cuts = [*range(0, tokens, min(chunk, -(-tokens // MIN_CHUNKS))), tokens]
    return list(itertools.pairwise(cuts))


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
    """The attention function of the inputs ``t``, a piece at a time; engagement counted in pieces
    that hold one of ``rows``.

    A piece of at most ``stepping`` tokens is a step of static shapes, on a cache that is turned for
    it and back.
    """
    nsa, q = model.nsa, t["q"]
    cache = NSACache.empty(
        nsa,
        q.shape[0],
        q.shape[1],
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        v_head_dim=model.value_dim,
        dtype=q.dtype,
        device=q.device,
    )

    compress = compression(nsa, phi)
    outputs, blocks, engaged, judged = [], [], set[str](), set(rows)
    for begin, end in pieces:
        part = slice(begin, end)
        options: dict[str, Any] = {"config": nsa, "path": path, "fa2": fa2}
        if (
            stepping
            and end - begin == 1
            and (one := _one_step(model, t, cache, part, **options)) is not None
        ):
            outputs.append(one.o)
            blocks.append(one.blocks)
            engaged |= one.engaged if begin in judged else frozenset()
            continue
        with _turned(cache, end - begin, stepping):
            view = cache.append(*appended(t, part), compress=compress)
        k_cmp, v_cmp = view.cmp
        at = Place(view.q_start, view.sel[0].shape[1], is_whole_sequence=False)
        blocks.append(chosen(q[:, part], k_cmp, v_cmp, at=at, **options))
        with engagement.collect() as counted:
            outputs.append(older_nsa.attend_view(q[:, part], t["gates"][:, part], view, **options))
        if not judged.isdisjoint(range(begin, end)):
            engaged |= counted.counts.keys()
    return Through(torch.cat(outputs, 1), torch.cat(blocks, 1), frozenset(engaged))


def _one_step(
    model: ModelConfig, t: Tensors, cache: NSACache, part: slice, **options: Any
) -> Through | None:
    """`attention` of one token by the operator that a captured step calls for all branches; None
    where it calls one for each.
    """
    q, k, v = t["q"][:, part], t["k_sel"], t["v_sel"]
    place = torch.tensor(cache.lengths, device=q.device)
    heads = (q, k.shape[2], v.shape[3], cache.max_len)
    route = functional.route_for(
        *heads, branches=options["config"].branches, q_start=place, **options
    )
    if not older_nsa.is_one_step(route, model.nsa):
        return None
    from nsa import fused_step  # an older nsa has none

    with (
        _turned(cache, 1, 1),
        engagement.collect() as counted,
        older_nsa.collect_blocks() as seen,
    ):
        step: Any = cache.next_step()
        x = projected(t, part, step.position_B)
        o = fused_step.attend_projected(route, cache, step, x, rope="none")
    assert seen is not None and seen[0] is not None
    return Through(o, seen[0], frozenset(counted.counts))


def appended(t: Tensors, part: slice) -> list[KV]:
    """K and V of each branch that a piece appends."""
    return [(t[f"k_{b}"][:, part], t[f"v_{b}"][:, part]) for b in BRANCHES]


def compression(
    config: NSAConfig, phi: functional.PhiParams
) -> Callable[[Tensor, Tensor, Tensor], KV]:
    """What compresses raw K and V, from a first block on, for a cache."""

    def compress(k: Tensor, v: Tensor, first_block: Tensor) -> KV:
        return functional.compress_kv(k, v, first_block, config=config, phi_params=phi)

    return compress


def projected(t: Tensors, part: slice, position_B: Tensor) -> Any:
    """What that operator takes: q and k are as they are, and gates are given."""
    from nsa.ops.decode_step import Projected  # an older nsa has none

    q = t["q"][:, part].contiguous()
    k, v = (
        torch.cat([t[f"{kind}_{b}"][:, part] for b in ("cmp", "sel", "win")], 2) for kind in "kv"
    )
    turns = q.new_zeros(1, dtype=torch.float32)
    return Projected(q, k, v, turns, position_B, t["gates"][:, part].contiguous(), None, None)


@torch.no_grad()
def dense_attention(
    model: ModelConfig, t: Tensors, pieces: Pieces, *, kind: str, stepping: int = 0
) -> tuple[Tensor, frozenset[str]]:
    """(o of all tokens by full causal attention of ``kind``, the counters of its calls); the rest
    as in `attention`, the K and V being the selected branch's.
    """
    from nsa.dense import attend_cached  # an older nsa has none

    q, k, v = (t[name] for name in ("q", "k_sel", "v_sel"))
    cache = older_nsa.DenseCache.empty(
        *q.shape[:2],
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        v_head_dim=model.value_dim,
        dtype=q.dtype,
        device=q.device,
    )
    here, outputs = capability_of(str(q.device)), []
    problem = Problem.of(
        model, batch=q.shape[0], tokens=1, dtype=str(q.dtype).removeprefix("torch.")
    )
    with engagement.collect() as counted:
        for begin, end in pieces:
            part, steps = slice(begin, end), end - begin <= stepping
            route = routing.route_dense_cached(
                kind, replace(problem, whole=False, ragged=steps), here
            )
            with _turned(cache, end - begin, stepping):
                kv, step = (k[:, part], v[:, part]), cache.next_step()
                outputs.append(
                    attend_cached(route, q[:, part], kv, cache, step, scale=model.head_dim**-0.5)
                )
    return torch.cat(outputs, 1), frozenset(counted.counts)


@torch.no_grad()
def layer(layer: nn.Module, x_BTM: Tensor, pieces: Pieces, *, stepping: int = 0) -> Tensor:
    """The layer's y [B, T, M], a piece at a time through a cache of its own; ``stepping`` as in
    `attention`.
    """
    assert isinstance(layer, NSAAttention | DenseAttention)
    cache: Any = layer.new_cache(*x_BTM.shape[:2])
    parts = []
    for begin, end in pieces:
        with _turned(cache, end - begin, stepping):
            parts.append(layer(x_BTM[:, begin:end], cache=cache))
    return torch.cat(parts, 1)


@contextmanager
def _turned(cache: Any, tokens: int, stepping: int) -> Iterator[None]:
    """The cache as one that steps by ``tokens``, where they are at most ``stepping``, while this is
    open.
    """
    steps = None
    if tokens <= stepping:
        # an older nsa knows steps of one token alone
        steps = Steps([cache], tokens) if tokens > 1 else Steps([cache])
    yield
    if steps is not None:
        steps.end()
