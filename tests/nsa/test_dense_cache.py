"""The dense twin's cache: prefill = chunked prefill = decode = steps of static shapes, against the
fp64 oracle; what is counted and refused.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import engagement, oracle
from nsa.capability import assumed, probe
from nsa.config import preset
from nsa.decode import DenseCache, NSACache
from nsa.decode.graph_cache import Steps
from nsa.dense import DenseAttention
from nsa.model import DenseLM
from nsa.ops import sdpa
from nsa.routing import CACHED_DENSE_KINDS, Problem, RouteError, route_dense_cached
from tests.cases import INTERPRETED, assert_parity, randn

MODEL = replace(preset("tiny"), dim=24, num_heads=4, num_kv_heads=2, head_dim=16, v_head_dim=16)
KINDS = ("dense", "dense_triton") if INTERPRETED else ("dense",)
DTYPE = torch.float32 if INTERPRETED else torch.float64


def layer_of(kind: str = "dense", **nsa: Any) -> DenseAttention:
    torch.manual_seed(0)
    return DenseAttention(MODEL, kind, config=replace(MODEL.nsa, **nsa)).to(DTYPE)


@torch.no_grad()
def in_chunks(
    layer: DenseAttention, x: Tensor, cuts: Sequence[int], steps_from: int, tokens: int = 1
) -> Tensor:
    """By a cache that begins with room for 3 tokens; from ``steps_from`` on by static steps of
    ``tokens``.
    """
    cache = layer.new_cache(x.shape[0], x.shape[1], initial_len=3)
    bounds = [b for b in (0, *cuts) if b < steps_from] + [steps_from]
    parts = [layer(x[:, a:b], cache=cache) for a, b in itertools.pairwise(bounds)]
    if steps_from < x.shape[1]:
        steps = Steps([cache], tokens)
        for t in range(steps_from, x.shape[1], tokens):
            assert cache.lengths == (t,) * x.shape[0]
            parts.append(layer(x[:, t : t + tokens], cache=cache))
        steps.end()
    assert cache.lengths == (x.shape[1],) * x.shape[0]
    return torch.cat(parts, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_steps_and_the_whole_are_one(kind: str) -> None:
    x = randn(2, 21, 24, seed=1, dtype=DTYPE)
    with torch.no_grad():
        whole = layer_of()(x)
    for cuts, steps_from in (([1, 2, 3, 9], 21), ([7], 12), ([16], 21), ([], 1)):
        got = in_chunks(layer_of(kind), x, cuts, steps_from)
        assert_parity(got, whole, f"{kind} {cuts} {steps_from}")


# 48 tokens of 2 heads a kv head are more rows than a tile of few queries has
@pytest.mark.parametrize(("begin", "tokens"), [(0, 5), (7, 48)])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_chunks_that_step_are_the_whole(kind: str, batch: int, begin: int, tokens: int) -> None:
    """The last one fills the cache; one that is run again takes its own place; rows beyond a query
    hold large numbers; afterwards the cache is an ordinary one.
    """
    room = begin + 2 * tokens
    x = randn(batch, room, 24, seed=1, dtype=DTYPE)
    layer, plain = layer_of(kind), layer_of()
    cache, whole = layer.new_cache(batch, room), plain(x)
    for buffer in cache.kv:
        buffer.fill_(1e6)
    if begin:
        layer(x[:, :begin], cache=cache)
    steps = Steps([cache], tokens)
    with pytest.raises(ValueError, match=f"a chunk of 1 tokens .*; wanted {tokens} tokens"):
        layer(x[:, :1], cache=cache)
    layer(x.flip(1)[:, :tokens], cache=cache)
    steps.forget_last()
    for t in (begin, begin + tokens):
        got = layer(x[:, t : t + tokens], cache=cache)
        assert_parity(got, whole[:, t : t + tokens], t)
        assert cache.lengths == (t + tokens,) * batch == tuple(steps.length_B.tolist())
        seen = torch.arange(t, t + tokens).expand(batch, -1) + 1
        assert torch.equal(cache.keys_read["dense"], seen)
    if not begin:  # another prompt over what the first left
        steps.forget_all()
        other = randn(batch, tokens, 24, seed=2, dtype=DTYPE)
        assert_parity(layer(other, cache=cache), plain(other), "another prompt")
        steps.end()
        last = randn(batch, 1, 24, seed=3, dtype=DTYPE)
        want = plain(torch.cat([other, last], 1))[:, -1:]
        assert_parity(layer(last, cache=cache), want, "a token afterwards")
        return
    with pytest.raises(ValueError, match=f"would hold {room + tokens} tokens; wanted at most"):
        layer(x[:, :tokens], cache=cache)


def test_the_layers_own_options_hold_in_a_cache() -> None:
    x = randn(2, 9, 24, seed=1, dtype=DTYPE)
    for options in ({"qk_norm": True}, {"rope": "half"}, {"rope": "none"}):
        layer = layer_of(**options)
        with torch.no_grad():
            assert_parity(in_chunks(layer, x, [4], 6), layer(x), str(options))
            assert_parity(in_chunks(layer, x, [2], 3, tokens=3), layer(x), f"{options} by 3")


@pytest.mark.parametrize("starts", [4, [4, 0, 11]], ids=["alike", "ragged"])
@pytest.mark.parametrize("tokens", [1, 3])
def test_attention_over_a_cache_is_the_oracles(tokens: int, starts: int | list[int]) -> None:
    """Rows of K and V beyond each query hold large numbers, of which none may be read."""
    q = randn(3, tokens, 4, 16, seed=0, dtype=torch.float64)
    k, v = (randn(3, 16, 2, 16, seed=s, dtype=torch.float64) for s in (1, 2))
    at = torch.tensor([starts] * 3 if isinstance(starts, int) else starts)
    for b in range(3):
        k[b, at[b] + tokens :], v[b, at[b] + tokens :] = 1e9, -1e9
    end = starts + tokens if isinstance(starts, int) else 16
    got = sdpa.cached(
        q,
        k[:, :end],
        v[:, :end],
        q_start=starts if isinstance(starts, int) else at,
        scale=0.3,
        kernel="sdpa",
    )
    for b in range(3):
        want = oracle.causal(
            q[b : b + 1],
            k[b : b + 1],
            v[b : b + 1],
            positions=at[b] + torch.arange(tokens)[None],
            scale=0.3,
        )
        assert_parity(got[b : b + 1], want, b)


def test_fa3_stores_by_itself_at_the_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is Hopper's: here a stand-in with its contract, which stores and attends."""
    given: list[dict[str, Any]] = []

    def with_kvcache(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, **o: Any):
        given.append(o)
        at = o["cache_seqlens"]
        assert at.dtype == torch.int32 and o["causal"]
        rows = at[:, None].long() + torch.arange(q.shape[1])
        for buffer, x in ((k_cache, k), (v_cache, v)):
            buffer.scatter_(1, rows[:, :, None, None].expand_as(x), x)
        return sdpa.cached(
            q, k_cache, v_cache, q_start=at.long(), scale=o["softmax_scale"], kernel="sdpa"
        )

    module = SimpleNamespace(flash_attn_with_kvcache=with_kvcache)
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", module)
    hopper = replace(probe("cpu"), sm=(9, 0), fa3_provider="fa3-fwd 0.0.3", fa3_reason="")
    problem = replace(Problem.of(MODEL, batch=2, tokens=1, dtype="bfloat16"), whole=False)
    taken = route_dense_cached("dense_fa3", problem, hopper)
    assert taken.counters == ("dense.fa3",)
    layer = layer_of()
    monkeypatch.setattr(layer, "_route_cached", lambda q, cache: taken)
    x = randn(2, 12, 24, seed=1, dtype=DTYPE)
    with torch.no_grad():
        assert_parity(in_chunks(layer, x, [5], 7), layer(x), "fa3")
        assert len(given) == 2 + 5
        assert_parity(in_chunks(layer, x, [], 4, tokens=4), layer(x), "fa3 by 4")
    assert len(given) == 2 + 5 + 1 + 2


def test_routes_of_a_dense_cache() -> None:
    h200 = replace(
        assumed("h200"), triton_provider="triton 3.6.0", fa3_provider=None, fa3_reason="no fa3-fwd"
    )
    host = replace(Problem.of(MODEL, batch=2, tokens=1, dtype="bfloat16"), whole=False)
    device = replace(host, ragged=True)
    assert [route_dense_cached(kind, host, h200).counters for kind in CACHED_DENSE_KINDS[:3]] == [
        ("dense.sdpa",),
        ("dense.flash",),
        ("dense.triton",),
    ]
    for kind, problem, message in (
        ("dense_flash", device, "no positions that are on the device"),
        ("dense_fa3", host, "no fa3-fwd"),
        ("dense_cudnn", host, "keeps no cache"),
        ("dense_fa4", host, "not known"),
        ("dense", replace(host, extras=("softcap",)), "softcap"),
    ):
        with pytest.raises(RouteError, match=message):
            route_dense_cached(kind, problem, h200)


def test_a_dense_model_decodes_and_refuses_what_does_not_fit() -> None:
    torch.manual_seed(0)
    model = DenseLM(MODEL).to(DTYPE)
    ids = torch.randint(0, MODEL.vocab_size, (2, 10))
    with torch.no_grad():
        whole, cache = model(ids), model.new_cache(2, 10)
        model(ids[:, :6], cache=cache)
        steps = Steps(cache)
        for t in range(6, 10):
            got = model(ids[:, t : t + 1], cache=cache)
            assert_parity(got[:, 0], whole[:, t], t)
        with pytest.raises(ValueError, match="would hold 11 tokens; wanted at most max_len=10"):
            model(ids[:, :1], cache=cache)
        steps.forget_last()
        again = model(ids[:, 9:], cache=cache)
        assert torch.equal(again, got), "a step that is run again"
        steps.end()
        for wrong, message in (
            (cache[:1], "got 1 caches for 2 layers"),
            ([*model.new_cache(2, 9)[:1], cache[1]], "wanted the same in each layer"),
            ([object(), object()], "wanted a DenseCache; DenseLM.new_cache"),
            (model.new_cache(3, 10), "the cache holds 3 rows, the chunk 2"),
        ):
            with pytest.raises(ValueError, match=message):
                model(ids[:, :1], cache=wrong)
        with pytest.raises(ValueError, match="DenseCache initial_len=11 exceeds max_len=10"):
            model.new_cache(2, 10, initial_len=11)
    with pytest.raises(ValueError, match="gradient"):
        model(ids[:, :1], cache=model.new_cache(2, 10))
    nsa = NSACache.empty(MODEL.nsa, 2, 9, num_kv_heads=2, head_dim=16)
    with pytest.raises(ValueError, match="wanted a DenseCache"):
        model.blocks[0].attention(randn(2, 1, 24, seed=0, dtype=DTYPE), cache=nsa)


def test_bytes_are_those_of_the_rows() -> None:
    cache = DenseCache.empty(2, 100, num_kv_heads=2, head_dim=16, v_head_dim=8, initial_len=17)
    assert cache.memory_bytes() == 2 * 32 * 2 * (16 + 8) * 4
    cache.grow(33)
    assert cache.memory_bytes() == 2 * 48 * 2 * (16 + 8) * 4, "34 rows, in whole 16"


def test_the_counter_is_the_kernels() -> None:
    layer = layer_of()
    x = randn(1, 2, 24, seed=0, dtype=DTYPE)
    with torch.no_grad(), engagement.collect() as counted:
        layer(x, cache=layer.new_cache(1, 4))
    assert counted.counts == {"dense.sdpa": 1}
