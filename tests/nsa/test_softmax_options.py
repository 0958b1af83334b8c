"""Soft cap, sinks and the log-sum-exp: against the oracle on the paths that have them, refused by
name on the others.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from nsa import NSAAttention, NSAConfig, TinyLM, compress, engagement, nsa_attention, select_blocks
from nsa.config import BRANCHES, preset
from nsa.decode import Steps
from nsa.decode.graph import refuse_host_loops
from nsa.model import DenseLM
from nsa.ops import explicit
from nsa.routing import (
    PATH_REQUESTS,
    Capability,
    Path,
    Problem,
    Request,
    Route,
    RouteError,
    plan,
    route,
    route_dense,
)
from tests import oracle
from tests.cases import (
    INTERPRETED,
    SMALL,
    Case,
    assert_blocks,
    assert_lse,
    assert_parity,
    error,
    qkv,
    randn,
)
from tests.nsa.routing_cases import CPU, H100, PROBLEM, TRITON, capabilities, fa2s, problems
from tests.nsa.test_cache import DIM, HEADS, KEY_DIM, KV_HEADS, VALUE_DIM
from tests.nsa.test_layer import attention, by_hand

CAP, SINKS = 0.4, {"sinks": True}  # small enough to bend every logit of the cases
BOTH: dict[str, Any] = {"softcap": CAP, "sinks": True}
OPTIONS: list[dict[str, Any]] = [{"softcap": CAP}, SINKS, BOTH]
Pair = tuple[Tensor, Tensor]
Pairs = tuple[Pair, ...]
TINY = preset("tiny")
TINY_BOTH = replace(TINY, nsa=replace(TINY.nsa, **BOTH))
LSE_PATHS = [Path.REFERENCE, *([Path.TRITON] if INTERPRETED else [])]


def layer_of(config: NSAConfig, dtype: torch.dtype = torch.float64) -> NSAAttention:
    """With sinks that are not 0, which would be seen as one key of logit 0 in every head."""
    torch.manual_seed(0)
    heads = {"head_dim": KEY_DIM, "v_head_dim": VALUE_DIM}
    layer = NSAAttention(DIM, HEADS, KV_HEADS, config=config, path="reference", **heads).to(dtype)
    fill(layer)
    return layer


def fill(layer: NSAAttention) -> None:
    if layer.sinks is not None:
        with torch.no_grad():
            layer.sinks.copy_(randn(*layer.sinks.shape, seed=5))


def inputs(
    tokens: int = 100, *, queries: int | None = None, batch: int = 2, seed: int = 0
) -> tuple[Tensor, Pairs, Tensor, Tensor]:
    """q, (k, v) of each branch, gates and sinks, fp64."""
    case = Case(tokens, 3, 12, 8, batch)
    q = qkv(case, seed=seed, q_tokens=queries, dtype=torch.float64)[0]
    pairs = tuple(qkv(case, seed=seed + 3 * i, dtype=torch.float64)[1:] for i in range(1, 4))
    gates = randn(*q.shape[:3], 3, seed=40, dtype=torch.float64)
    return q, pairs, gates, randn(q.shape[2], 3, seed=41, dtype=torch.float64)


def own_sinks(config: NSAConfig, sinks: Tensor) -> dict[str, Tensor]:
    return {"sinks": sinks} if config.sinks else {}


# Against the oracle.


@pytest.mark.parametrize(
    "options",
    [*OPTIONS, BOTH | {"qk_norm": True, "rope": "none", "gate": "none"}, BOTH | {"share_kv": True}],
    ids=str,
)
def test_the_layer_equals_the_oracle(options: dict[str, Any]) -> None:
    """FAULTS.md has no row of it: attention as models have it today. Forward, and gradients of x,
    of every parameter and of the sinks.
    """
    module = attention("reference", **options)
    fill(module)
    x = randn(2, 100, 32, seed=1).requires_grad_()
    true_x = x.detach().double().requires_grad_()
    o, want = module(x), by_hand(module, true_x, module.config)
    assert_parity(o, want, "o")
    upstream = randn(*o.shape, seed=2)
    grads = torch.autograd.grad(o, [x, *module.parameters()], upstream)
    true_grads = torch.autograd.grad(want, [true_x, *module.parameters()], upstream.double())
    names = ["x", *dict(module.named_parameters())]
    assert ("sinks" in names) == module.config.sinks
    for name, got, true in zip(names, grads, true_grads, strict=True):
        assert_parity(got, true, f"d{name}", tolerance=2e-5)
        assert true.any(), name
    plain = attention("reference", **{k: v for k, v in options.items() if k not in BOTH})
    plain.load_state_dict(module.state_dict(), strict=False)
    assert error(plain(x), o) > 0.01, "the options change what is computed"


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    ("queries", "start"), [(100, 0), (9, 91), (1, 99)], ids=["whole", "chunk", "one"]
)
def test_the_function_equals_the_oracle(options: dict[str, Any], queries: int, start: int) -> None:
    config = replace(SMALL, **options)
    q, pairs, gates, sinks = inputs(queries=queries)
    leaves = [q, *itertools.chain(*pairs), gates, *own_sinks(config, sinks).values()]
    leaves = [x.requires_grad_() for x in leaves]
    given: dict[str, Any] = own_sinks(config, sinks) | {"config": config, "q_start": start}
    got = nsa_attention(q, *pairs, gates, path="reference", **given)
    want = oracle.nsa(q, *pairs, gates, **given)
    assert_parity(got, want, "o", tolerance=1e-11)
    upstream = randn(*got.shape, seed=9, dtype=torch.float64)
    for have, true in zip(
        torch.autograd.grad(got, leaves, upstream),
        torch.autograd.grad(want, leaves, upstream),
        strict=True,
    ):
        assert_parity(have, true, "gradient", tolerance=1e-11)


def test_rows_that_begin_at_different_positions_equal_the_oracle() -> None:
    config = replace(SMALL, **BOTH)
    q, pairs, gates, sinks = inputs(queries=7)
    given: dict[str, Any] = {"config": config, "q_start": torch.tensor([93, 40]), "sinks": sinks}
    got, lse = nsa_attention(q, *pairs, gates, path="reference", return_lse=True, **given)
    want, true_lse = oracle.nsa_with_lse(q, *pairs, gates, **given)
    assert_parity(got, want, "o", tolerance=1e-11)
    assert_lse(lse, true_lse)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_blocks_are_scored_by_what_the_compressed_branch_attends_with(
    options: dict[str, Any],
) -> None:
    config = replace(SMALL, **options, num_selected=4)
    q, pairs, _, sinks = inputs(tokens=200)
    q, k_cmp = 3 * q, compress(pairs[0][0], config=config)
    own = own_sinks(config, 3 * sinks)
    blocks = select_blocks(q, k_cmp, config=config, **own)
    sink = own["sinks"][:, 0] if own else None
    assert_blocks(blocks, *oracle.select(q, k_cmp, config=config, sink=sink))
    plain = select_blocks(q, k_cmp, config=replace(config, softcap=None, sinks=False))
    assert (blocks != plain).any(-1).double().mean() > 0.05, "the options change the choice"


def test_chunks_of_queries_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_of(replace(SMALL, **BOTH))
    x = randn(2, 100, DIM, seed=1, dtype=torch.float64).requires_grad_()

    def value_and_gradients() -> list[Tensor]:
        y = layer(x)
        upstream = randn(*y.shape, seed=2, dtype=y.dtype)
        return [y, *torch.autograd.grad(y, [x, *layer.parameters()], upstream)]

    whole, calls, part = value_and_gradients(), [], explicit._attend
    monkeypatch.setattr(explicit, "CHUNK_BYTES", 2 * HEADS * 100 * 4 * 7)
    monkeypatch.setattr(explicit, "_attend", lambda *a: calls.append(0) or part(*a))
    for got, want in zip(value_and_gradients(), whole, strict=True):
        assert_parity(got, want, "chunks", tolerance=1e-12)
    assert len(calls) > 3 * 15, "a backward computes them again"


# Limits.


def test_a_cap_that_is_huge_is_none_and_a_sink_of_minus_infinity_is_none() -> None:
    x = randn(2, 100, DIM, seed=1, dtype=torch.float64)
    plain = layer_of(SMALL)
    huge = layer_of(replace(SMALL, softcap=1e30))
    huge.load_state_dict(plain.state_dict())
    assert_parity(huge(x), plain(x), "softcap -> inf", tolerance=1e-12)
    sunk = layer_of(replace(SMALL, sinks=True))
    sunk.load_state_dict(plain.state_dict(), strict=False)
    assert error(sunk(x), plain(x)) > 0.01
    for value in (-torch.inf, -1e4):
        torch.nn.init.constant_(sunk.sinks, value)
        assert_parity(sunk(x), plain(x), f"sink {value}", tolerance=1e-12)
        assert torch.isfinite(torch.autograd.grad(sunk(x).sum(), sunk.sinks)[0]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sink_that_is_huge_leaves_nothing_and_the_lse_as_it_is(dtype: torch.dtype) -> None:
    q, pairs, gates, sinks = inputs()
    q, gates = q.to(dtype), gates.to(dtype)
    pairs = tuple((k.to(dtype), v.to(dtype)) for k, v in pairs)
    config = replace(SMALL, sinks=True)
    given: dict[str, Any] = {"config": config, "path": "reference", "return_lse": True}
    o, lse = nsa_attention(q, *pairs, gates, sinks=torch.full_like(sinks, 1e4), **given)
    assert not o.any()
    _, without = nsa_attention(q, *pairs, gates, **(given | {"config": SMALL}))
    # with scores of 0, which follow the sink, other blocks are selected
    assert torch.equal(lse[..., ::2], without[..., ::2]) and torch.isfinite(lse[..., 1]).all()


def test_a_sink_weighs_as_one_key_of_value_0() -> None:
    """By hand: one query over one key of logit 0 and a sink of logit log 3: a quarter is left."""
    config = replace(SMALL, branches=("win",), sinks=True)
    k, v = torch.zeros(1, 1, 1, 2), torch.ones(1, 1, 1, 2)
    o = nsa_attention(
        torch.ones(1, 1, 1, 2),
        *[(k, v)] * 3,
        torch.ones(1, 1, 1, 3),
        config=config,
        sinks=torch.full((1, 3), math.log(3.0)),
        path="reference",
    )
    assert_parity(o, torch.full_like(o, 0.25), "o")


def test_one_cap_by_hand() -> None:
    """Logits 2 and -2 under a cap of 1 are tanh 2 and -tanh 2."""
    config = replace(SMALL, branches=("win",), softcap=1.0)
    q, k = torch.ones(1, 2, 1, 2), torch.tensor([1.0, -1.0]).view(1, 2, 1, 1).expand(-1, -1, -1, 2)
    v = torch.tensor([1.0, 0.0]).view(1, 2, 1, 1)
    gates, path = torch.ones(1, 2, 1, 3), "reference"
    o = nsa_attention(q, *[(k, v)] * 3, gates, config=config, scale=1.0, path=path)
    assert_parity(o[0, 1, 0], torch.tensor([1 / (1 + math.exp(-2 * math.tanh(2)))]), "o")


# What a row that sees no key gets.


@pytest.mark.parametrize("branches", [("cmp",), BRANCHES], ids="+".join)
def test_a_row_without_a_key_is_0_with_every_gradient(branches: tuple[str, ...]) -> None:
    config = replace(SMALL, **BOTH, branches=branches)
    for tokens in (5, 20):  # no block at all, and none for the first 7 rows
        q, pairs, gates, sinks = inputs(tokens=tokens)
        sinks.requires_grad_()
        q.requires_grad_()
        given: dict[str, Any] = {"config": config, "sinks": sinks, "path": "reference"}
        o, lse = nsa_attention(q, *pairs, gates, return_lse=True, **given)
        assert torch.isneginf(lse[:, :7, :, 0]).all() and not lse.requires_grad
        if branches == ("cmp",):
            assert not o[:, :7].any() and torch.isneginf(lse[..., 1:]).all()
        for grad in torch.autograd.grad(o.sum(), [q, sinks]):
            assert torch.isfinite(grad).all()


def test_an_empty_batch() -> None:
    q, pairs, gates, sinks = inputs()
    given: dict[str, Any] = {"config": replace(SMALL, **BOTH), "sinks": sinks.requires_grad_()}
    pairs = tuple((k[:0], v[:0]) for k, v in pairs)
    o, lse = nsa_attention(q[:0], *pairs, gates[:0], path="reference", return_lse=True, **given)
    assert o.shape[:1] == (0,) and lse.shape == gates[:0].shape
    assert not torch.autograd.grad(o.sum(), sinks)[0].any()


# The log-sum-exp.


@pytest.mark.parametrize("nonnegative_gates", [False, True])
@pytest.mark.parametrize("path", LSE_PATHS)
def test_the_lse_is_the_oracles(path: Path, nonnegative_gates: bool) -> None:
    """Path triton leaves it from its kernels, with o and gradients as without."""
    tokens = 100 if path is Path.REFERENCE else 45
    q, pairs, gates, _ = inputs(tokens=tokens, batch=1)
    q, gates = q.float().requires_grad_(), gates.abs().float()
    pairs = tuple((k.float(), v.float()) for k, v in pairs)
    config = replace(SMALL, num_selected=3, num_local=1)
    given: dict[str, Any] = {"config": config, "path": path, "nonnegative_gates": nonnegative_gates}
    with engagement.collect() as engaged:
        o, lse = nsa_attention(q, *pairs, gates, return_lse=True, **given)
    assert not {"sel.dense", "win.dense"} & set(engaged.counts)
    want, true_lse = oracle.nsa_with_lse(q, *pairs, gates, config=config)
    assert lse.dtype == torch.float32 and lse.shape == gates.shape and not lse.requires_grad
    assert_lse(lse, true_lse)
    assert_parity(o, want, "o")
    upstream = randn(*o.shape, seed=2)
    (got,), (true,) = (torch.autograd.grad(x, [q], upstream.to(x.dtype)) for x in (o, want))
    assert_parity(got, true, "dq", tolerance=2e-5)


@pytest.mark.parametrize("path", LSE_PATHS)
def test_the_lse_of_a_chunk_is_that_of_the_whole(path: Path) -> None:
    q, pairs, gates, _ = inputs(tokens=45, batch=1)
    q, gates = q.float(), gates.float()
    pairs = tuple((k.float(), v.float()) for k, v in pairs)
    given: dict[str, Any] = {"config": SMALL, "path": path, "return_lse": True}
    _, whole = nsa_attention(q, *pairs, gates, **given)
    for start, stop in ((40, 45), (44, 45)):
        rows = slice(start, stop)
        _, lse = nsa_attention(q[:, rows], *pairs, gates[:, rows], q_start=start, **given)
        assert_lse(lse, whole[:, rows])


@pytest.mark.parametrize("softcap", [None, CAP])
@pytest.mark.parametrize("path", LSE_PATHS)
def test_halves_of_the_keys_merge_by_their_lse(path: Path, softcap: float | None) -> None:
    """What an lse is for: the window over each half of its keys, added up by weight, is the window
    over all. A window of all keys, so that a half is a call of its own.
    """
    if path is Path.TRITON and softcap is not None:
        with pytest.raises(RouteError, match="no softcap yet"):
            route(Request(path), replaced(("softcap",)), TRITON)
        return
    config = replace(SMALL, branches=("win",), window=64, softcap=softcap)
    q, pairs, _, _ = inputs(tokens=64, batch=1)
    (k, v), q = pairs[2], q[:, 63:].float()
    k, v, gates = k.float(), v.float(), torch.ones(1, 1, q.shape[2], 3)

    def over(keys: slice) -> tuple[Tensor, Tensor]:
        part = (k[:, keys], v[:, keys])
        start = part[0].shape[1] - 1
        given: dict[str, Any] = {"config": config, "q_start": start, "path": path}
        o, lse = nsa_attention(q, part, part, part, gates, return_lse=True, **given)
        return o, lse[..., 2]

    whole, lse = over(slice(0, 64))
    (one, lse_one), (two, lse_two) = over(slice(0, 20)), over(slice(20, 64))
    merged = torch.logaddexp(lse_one, lse_two)
    assert_parity(merged, lse, "lse")
    weights = ((x - merged).exp()[..., None] for x in (lse_one, lse_two))
    assert_parity(sum(w * o for w, o in zip(weights, (one, two), strict=True)), whole, "o")


@pytest.mark.parametrize("path", LSE_PATHS)
def test_the_lse_of_packed_documents_is_each_ones_own(path: Path) -> None:
    bounds, config = [0, 33, 40], replace(SMALL, branches=("cmp", "win"))
    q, pairs, gates, _ = inputs(tokens=45, batch=1)
    q, gates = q.float(), gates.float()
    pairs = tuple((k.float(), v.float()) for k, v in pairs)
    given: dict[str, Any] = {"config": config, "path": path, "return_lse": True}
    o, lse = nsa_attention(q, *pairs, gates, cu_seqlens=bounds, **given)
    for a, b in itertools.pairwise(bounds):
        own = tuple((k[:, a:b], v[:, a:b]) for k, v in pairs)
        alone, own_lse = nsa_attention(q[:, a:b], *own, gates[:, a:b], **given)
        assert_parity(o[:, a:b], alone.double(), "o")
        assert_lse(lse[:, a:b], own_lse)
    assert torch.isneginf(lse[:, 40:]).all() and not o[:, 40:].any()


# Caches and packed documents.


@torch.no_grad()
def in_chunks(layer: NSAAttention, x: Tensor, cuts: Sequence[int], *, steps: int = 0) -> Tensor:
    """The last ``steps`` tokens by `Steps`."""
    cache, end = layer.new_cache(x.shape[0], x.shape[1]), x.shape[1] - steps
    bounds = [0, *cuts, end]
    parts = [layer(x[:, a:b], cache=cache) for a, b in itertools.pairwise(bounds)]
    if steps:
        stepping = Steps([cache])
        parts += [layer(x[:, t : t + 1], cache=cache) for t in range(end, x.shape[1])]
        stepping.end()
    return torch.cat(parts, 1)


@pytest.mark.parametrize(
    "options",
    [
        *OPTIONS,
        BOTH | {"phi": "mlp", "share_kv": True},
        BOTH | {"selection": "hierarchical", "window": 200},
    ],
    ids=str,
)
def test_a_cache_equals_the_whole(options: dict[str, Any]) -> None:
    layer = layer_of(replace(SMALL, **options))
    x = randn(2, 133, DIM, seed=3, dtype=torch.float64)
    with torch.no_grad():
        whole = layer(x)
    for cuts, steps in (([7, 24, 100], 0), ([90, *range(91, 120)], 0), ([60], 40), ([], 132)):
        assert_parity(in_chunks(layer, x, cuts, steps=steps), whole, f"{cuts[:3]}, {steps}")


def test_rows_of_different_lengths_in_one_cache() -> None:
    layer = layer_of(replace(SMALL, **BOTH))
    x = randn(2, 60, DIM, seed=3, dtype=torch.float64)
    with torch.no_grad():
        whole, cache = layer(x), layer.new_cache(2, 60)
        first = layer(x[:, :50], cache=cache, num_tokens=[50, 31])
        nexts = torch.stack([x[0, 50:55], x[1, 31:36]])
        second = layer(nexts, cache=cache)
    assert_parity(first[1, :31], whole[1, :31], "first")
    assert_parity(second, torch.stack([whole[0, 50:55], whole[1, 31:36]]), "second")


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_packed_documents_equal_each_alone(options: dict[str, Any]) -> None:
    layer = layer_of(replace(SMALL, **options))
    bounds = [0, 1, 101, 117, 150]
    x = randn(1, 155, DIM, seed=1, dtype=torch.float64).requires_grad_()
    packed = layer(x, cu_seqlens=bounds)
    alone = [layer(x[:, a:b]) for a, b in itertools.pairwise(bounds)]
    together = torch.cat([*alone, torch.zeros_like(x[:, 150:])], 1)
    assert_parity(packed, together, "y")
    upstream = randn(*packed.shape, seed=2, dtype=packed.dtype)
    for got, want in zip(
        *(torch.autograd.grad(y, [x, *layer.parameters()], upstream) for y in (packed, together)),
        strict=True,
    ):
        assert_parity(got, want, "gradient")


def test_a_poisoned_document_leaves_the_others_alone() -> None:
    """FAULTS 'a poisoned document': rows of its own are NaN from the token on, the lse too."""
    q, pairs, gates, sinks = inputs(batch=1)
    given: dict[str, Any] = {"config": replace(SMALL, **BOTH), "sinks": sinks.requires_grad_()}
    given |= {"path": "reference", "return_lse": True}
    pairs = tuple((k, v.index_fill(1, torch.tensor([70]), torch.nan)) for k, v in pairs)
    o, lse = nsa_attention(q, *pairs, gates, cu_seqlens=[0, 50, 100], **given)
    own = tuple((k[:, :50], v[:, :50]) for k, v in pairs)
    alone, own_lse = nsa_attention(q[:, :50], *own, gates[:, :50], **given)
    assert_parity(o[:, :50], alone, "o")
    assert_lse(lse[:, :50], own_lse)
    assert o[:, 50:70].isfinite().all() and o[:, 70:].isnan().all()
    assert not lse[:, :70].isnan().any() and lse[:, 70:].isnan().all()
    assert torch.autograd.grad(o[:, :50].sum(), sinks)[0].isfinite().all()


@pytest.mark.parametrize("chunk_bytes", [1, explicit.CHUNK_BYTES], ids=["chunks", "one chunk"])
def test_transforms_run_and_a_second_derivative_is_refused(
    chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAULTS 'function transforms': grad and vmap are the gradient and a loop, the sinks' too."""
    monkeypatch.setattr(explicit, "CHUNK_BYTES", chunk_bytes)
    q, pairs, gates, sinks = inputs(tokens=50)
    config = replace(SMALL, **BOTH)

    def loss(q: Tensor, sinks: Tensor) -> Tensor:
        given: dict[str, Any] = {"config": config, "sinks": sinks, "path": "reference"}
        return nsa_attention(q, *pairs, gates, **given).square().sum()

    held = [q.clone().requires_grad_(), sinks.clone().requires_grad_()]
    want = torch.autograd.grad(loss(*held), held)
    for got, true in zip(torch.func.grad(loss, argnums=(0, 1))(q, sinks), want, strict=True):
        assert_parity(got, true, "gradient", tolerance=1e-12)
    several = torch.stack([sinks, 2 * sinks])
    each = torch.stack([loss(q, s) for s in several])
    assert_parity(torch.func.vmap(loss, in_dims=(None, 0))(q, several), each, "vmap")
    (first,) = torch.autograd.grad(loss(*held), held[1:], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        torch.autograd.grad(first.sum(), held[1:])


def test_one_exported_program_serves_every_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """FAULTS 'torch.export with a dynamic length': an explicit softmax reads nothing on the host,
    as path reference does without softcap and sinks. A program has one chunk of queries.
    """
    monkeypatch.setattr(explicit, "CHUNK_BYTES", HEADS * 200 * 4 * 150)
    layer = layer_of(replace(SMALL, **BOTH), torch.float32).eval()
    lengths = ({1: torch.export.Dim("T", min=65, max=1024)},)
    program = torch.export.export(layer, (randn(1, 200, DIM, seed=0),), dynamic_shapes=lengths)
    for tokens in (65, 101, 333):
        x = randn(1, tokens, DIM, seed=tokens)
        assert_parity(program.module()(x), layer(x), f"{tokens} tokens")


def test_a_model_decodes_pads_and_has_layers_of_full_attention() -> None:
    torch.manual_seed(0)
    full = TINY_BOTH.nsa.full_attention()
    assert full.softcap == CAP and full.sinks
    model = replace(TINY_BOTH, num_layers=2, layers=(TINY_BOTH.nsa, full))
    lm = TinyLM(model, path="reference").double()
    for block in lm.blocks:
        fill(block.attention)  # type: ignore[arg-type]
    ids = torch.randint(256, (1, 60))
    with torch.no_grad():
        whole, cache = lm(ids), lm.new_cache(1, 60)
        parts = [lm(ids[:, a:b], cache=cache) for a, b in ((0, 50), (50, 51), (51, 60))]
        mask = torch.arange(70)[None] >= 10
        padded = lm(torch.nn.functional.pad(ids, (10, 0)), attention_mask=mask)
    assert_parity(torch.cat(parts, 1), whole, "decode")
    assert_parity(padded[:, 10:], whole, "padded")


def test_autocast_softmaxes_in_fp32_and_a_layer_in_bf16_has_its_dtype() -> None:
    layer = layer_of(replace(SMALL, **BOTH), torch.float32)
    x = randn(1, 100, DIM, seed=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o = layer(x)
    assert o.dtype == torch.bfloat16 and error(o, layer(x)) < 0.05
    assert layer.bfloat16()(x.bfloat16()).dtype == torch.bfloat16
    q, pairs, gates, sinks = inputs(batch=1)
    q, gates = q.float(), gates.float()
    pairs = tuple((k.float(), v.float()) for k, v in pairs)
    given: dict[str, Any] = {"config": layer.config, "sinks": sinks, "path": "reference"}
    want = nsa_attention(q, *pairs, gates, **given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(nsa_attention(q, *pairs, gates, **given), want)


def test_one_graph_serves_every_length() -> None:
    layer, counter = layer_of(replace(SMALL, **BOTH), torch.float32), CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    for tokens in (100, 101, 48, 133, 80, 17):
        x = randn(2, tokens, DIM, seed=tokens)
        assert_parity(compiled(x), layer(x), f"{tokens} tokens")
    torch._dynamo.reset()
    assert counter.frame_count == 1


# What runs, and what says so.


def test_what_ran_is_counted_named_and_slow(caplog: pytest.LogCaptureFixture) -> None:
    layer = layer_of(replace(SMALL, **BOTH))
    with engagement.collect() as engaged, caplog.at_level(logging.WARNING, logger="nsa"):
        layer(randn(1, 30, DIM, seed=1, dtype=torch.float64))
    ran = ("cmp.explicit", "sel.reference", "sel.explicit", "win.explicit")
    assert dict(engaged.counts) == dict.fromkeys(ran, 1)
    assert [r.getMessage().split(":")[0] for r in caplog.records] == [
        "Using slow explicit softmax"
    ] * 3
    found = routed(Request("reference"), H100, softcap=CAP)
    assert found.counters == ran
    said = "\n".join(found.explain())
    for words in (
        "sel: reference (explicit, torch 2.13.0): path=reference with softcap: an explicit",
        "not sdpa: SDPA and torch's FA-2 take no softcap",
        "not fa2: SDPA and torch's FA-2 take no softcap",
    ):
        assert words in said


def routed(
    request: Request, capability: Capability, *, return_lse: bool = False, **options: Any
) -> Route:
    model = replace(TINY, nsa=replace(TINY.nsa, **options))
    return plan(
        request,
        model,
        batch=1,
        tokens=30,
        dtype="bfloat16",
        capability=capability,
        return_lse=return_lse,
    )


def replaced(extras: tuple[str, ...], **changes: Any) -> Problem:
    return replace(PROBLEM, extras=extras, **changes)


REASONS = {
    "softcap": "SDPA and torch's FA-2 take no softcap",
    "sinks": "SDPA and torch's FA-2 take no sinks",
    "return_lse": "NSA's calls of SDPA and FA-2 leave no lse",
}
LATER = {"softcap": "its kernels have no softcap yet", "sinks": "its kernels have no sinks yet"}
EXTRAS = [("softcap",), ("sinks",), ("return_lse",), ("softcap", "sinks", "return_lse")]


@pytest.mark.parametrize("extras", EXTRAS, ids="+".join)
@pytest.mark.parametrize("capability", [CPU, H100, TRITON], ids=["CPU", "H100", "Triton"])
@pytest.mark.parametrize("path", PATH_REQUESTS)
def test_every_path_serves_or_names_the_option_the_reason_and_the_next_step(
    path: str, capability: Capability, extras: tuple[str, ...]
) -> None:
    problem = replaced(extras, select_all_tokens=4096, window=4096, whole=True)
    if path == Path.REFERENCE:
        found = route(Request(path), problem, capability)
        assert {b.kernel for b in found.branches} == {"explicit"}
        return
    if capability is TRITON and path in ("auto", Path.TRITON) and extras == ("return_lse",):
        found = route(Request(path), problem, capability)
        assert {b.kernel for b in found.branches} == {"triton"}
        if path == "auto":
            refused = {r.alternative: r.reason for r in found.rejected}
            assert all("leave no lse" in refused[f"{b}.dense"] for b in ("sel", "win"))
        return
    with pytest.raises(RouteError) as caught:
        route(Request(path), problem, capability)
    message = str(caught.value)
    assert message.startswith(f"path={path} with {' and '.join(extras)} cannot be served: ")
    assert message.endswith(". Next: use path=reference, which is slow")
    for extra in extras:
        if path != Path.TRITON:
            assert REASONS[extra] in message
        if path in ("auto", Path.TRITON) and extra in LATER:
            assert LATER[extra] in message


@given(
    problem=problems,
    capability=capabilities,
    path=st.sampled_from(PATH_REQUESTS),
    fa2=fa2s,
    extras=st.sampled_from(EXTRAS),
)
def test_no_branch_without_them_ever_runs(
    problem: Problem, capability: Capability, path: str, fa2: str, extras: tuple[str, ...]
) -> None:
    """Whatever is asked for: explicit by path reference alone, else path triton for the lse."""
    try:
        found = route(Request(path, fa2), replace(problem, extras=extras), capability)
    except RouteError as refused:
        assert path != Path.REFERENCE or fa2 == "on", refused
        return
    kernels = {b.kernel for b in found.branches}
    assert tuple(b.branch for b in found.branches if b.branch != "score") == problem.branches
    if path == Path.REFERENCE:
        assert kernels == {"explicit"}
    else:
        assert kernels == {"triton"} and extras == ("return_lse",)


@pytest.mark.parametrize(("loops", "is_refused"), [(0, False), (1, True)])
def test_a_decode_graph_takes_path_reference_where_it_does_not_loop(
    loops: int, is_refused: bool
) -> None:
    engaged = {"sel.reference": 3 + loops, "sel.explicit": 3}
    if not is_refused:
        refuse_host_loops(engaged)
        return
    with pytest.raises(RouteError, match="got sel.reference, whose loop runs on the host"):
        refuse_host_loops(engaged)


@pytest.mark.parametrize(
    "request_",
    [
        Request("reference", "on"),
        Request("reference", fa2_win="on"),
        Request("reference", fa2_cmp="on"),
        Request("triton", "on"),
    ],
    ids=str,
)
def test_fa2_is_refused_by_name(request_: Request) -> None:
    with pytest.raises(RouteError, match="=(on|1) with return_lse cannot be served: .*no lse"):
        route(request_, replaced(("return_lse",)), TRITON)


@pytest.mark.parametrize("path", ["reference", "triton"])
def test_fa2_of_the_environment_is_for_what_it_can_serve(path: str) -> None:
    asked = Request(path, "on", fa2_from_environment=True)
    found = route(asked, replaced(("return_lse",)), TRITON)
    assert "fa2" not in {b.kernel for b in found.branches}
    assert "not fa2: NSA's calls of SDPA and FA-2 leave no lse" in found.explain()


@pytest.mark.parametrize("path", [p for p in PATH_REQUESTS if p not in ("reference", "triton")])
def test_layers_models_and_functions_refuse_at_their_call(path: str) -> None:
    x, ids = randn(1, 30, 32, seed=1), torch.randint(256, (1, 20))
    with pytest.raises(RouteError, match=f"path={path} with softcap and sinks cannot"):
        attention(path, **BOTH)(x)
    with pytest.raises(RouteError, match=f"path={path} with softcap and sinks cannot"):
        TinyLM(TINY_BOTH, path=path)(ids)
    q, pairs, gates, _ = inputs(tokens=30)
    with pytest.raises(RouteError, match=f"path={path} with return_lse cannot"):
        nsa_attention(q, *pairs, gates, config=SMALL, path=path, return_lse=True)


@pytest.mark.parametrize("kind", ["dense", "dense_flash", "dense_cudnn"])
def test_the_dense_twin_refuses_them(kind: str) -> None:
    with pytest.raises(RouteError, match=f"path={kind} with sinks cannot .* take no sinks"):
        route_dense(kind, replaced(("sinks",)), H100)
    with pytest.raises(RouteError, match=r"with softcap and sinks .*NSAConfig.full_attention\(\)"):
        DenseLM(TINY_BOTH)(torch.randint(256, (1, 20)))


# Arguments.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *[({"softcap": x}, f"softcap={x!r} must be > 0") for x in (0, 0.0, -3.0, math.nan)],
        ({"softcap": math.inf}, "softcap=inf must be > 0 and a finite number"),
        ({"softcap": "50"}, "softcap='50' must be"),
        ({"softcap": True}, "softcap=True must be"),
        ({"sinks": "yes"}, "sinks='yes' must be True or False"),
        ({"sinks": 1}, "sinks=1 must be True or False"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        NSAConfig(**options)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: None, "sinks is NoneType, and config.sinks is True; wanted a tensor"),
        (lambda s: s[:, :2], r"sinks is \(6, 2\).*\(6, 3\)"),
        (lambda s: s[0], r"sinks is \(3,\)"),
        (lambda s: s.long(), "sinks is torch.int64 on cpu; wanted a floating dtype"),
    ],
)
def test_sinks_that_do_not_fit_are_refused(change: Callable[[Tensor], Any], words: str) -> None:
    q, pairs, gates, sinks = inputs(tokens=30)
    config = replace(SMALL, sinks=True)
    with pytest.raises(ValueError, match=words):
        nsa_attention(q, *pairs, gates, config=config, sinks=change(sinks), path="reference")
    with pytest.raises(ValueError, match=words):
        select_blocks(q, pairs[0][0], config=config, sinks=change(sinks))


def test_sinks_of_a_config_without_are_refused() -> None:
    q, pairs, gates, sinks = inputs(tokens=30)
    with pytest.raises(ValueError, match="config.sinks is False.*set NSAConfig"):
        nsa_attention(q, *pairs, gates, config=SMALL, sinks=sinks, path="reference")


def test_a_layer_begins_with_sinks_of_0_and_forgets_them() -> None:
    torch.manual_seed(0)
    layer = NSAAttention(DIM, HEADS, KV_HEADS, KEY_DIM, config=replace(SMALL, sinks=True))
    assert layer.sinks is not None and layer.sinks.shape == (HEADS, 3) and not layer.sinks.any()
    fill(layer)
    layer.reset_parameters()
    assert not layer.sinks.any()
    torch.manual_seed(0)
    plain = NSAAttention(DIM, HEADS, KV_HEADS, KEY_DIM, config=SMALL)
    assert set(layer.state_dict()) - set(plain.state_dict()) == {"sinks"}
    for name, x in plain.state_dict().items():
        assert torch.equal(x, layer.state_dict()[name]), name


def test_hashes_without_the_options_stay_and_with_them_differ() -> None:
    """Stored baselines name models by them; these are what they were before the options."""
    assert preset("m7c_125m").sha256().startswith("92cde0e87307ef65")
    assert TINY.sha256().startswith("3fdf05ce6d80d81e")
    others = [replace(TINY, nsa=replace(TINY.nsa, **options)) for options in OPTIONS]
    assert len({model.sha256() for model in [TINY, *others]}) == 4
