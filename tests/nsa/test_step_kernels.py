"""A fused decode step (nsa.ops.decode_step), in Triton's interpreter (`--require interpreter`):
against the fp64 oracle, against the branches one by one, and what sends a step elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import chosen_blocks, engagement, functional, fused_block, fused_step, statistics
from nsa.attention import NSAAttention
from nsa.config import NSAConfig, preset
from nsa.decode import LayerGraphs, NSACache, Steps
from nsa.functional import compress_kv
from nsa.model import TinyLM
from nsa.ops import linear_step
from nsa.ops.decode import kernels as decode
from nsa.ops.decode_step import Projected
from tests import oracle
from tests.cases import SMALL, assert_parity, randn
from tests.nsa.kernel_cases import poisoned_memory  # noqa: F401
from tests.nsa.launch_count import launches
from tests.nsa.test_layer_graphs import graphs as graphs

SOFTMAX = replace(SMALL, gate="softmax")
DIM = 24


def layer_of(config: NSAConfig, **heads: int) -> NSAAttention:
    torch.manual_seed(0)
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "v_head_dim": 6} | heads
    return NSAAttention(DIM, **sizes, config=config, path="triton")


def filled(layer: NSAAttention, lengths: list[int], room: int, dtype: torch.dtype) -> NSACache:
    """Random K and V of as many tokens a row, compressed by PyTorch."""
    cache = layer.new_cache(len(lengths), room, dtype=dtype)
    generator = torch.Generator().manual_seed(5)

    def kv() -> tuple[Tensor, Tensor]:
        k, v = (
            torch.randn(len(lengths), max(lengths), *x.shape[2:], generator=generator).to(dtype)
            for x in cache.sel
        )
        return k, v

    def compress(k: Tensor, v: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        return compress_kv(k, v, first, config=cache.config)

    cache.append(kv(), kv(), kv(), compress=compress, num_tokens=lengths)
    return cache


def kept(cache: NSACache) -> list[Tensor]:
    """What the next step may read; the spare rows hold nothing."""
    spared = [x[:, :-1] for pair in (cache.sel, cache.cmp) for x in pair]
    return [x.clone() for x in (*spared, *cache.win, *cache.raw)]


@contextmanager
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.setattr(fused_step, "serves", lambda *_: False)
        yield


@pytest.mark.parametrize(
    ("config", "heads", "dtype"),
    [
        (SOFTMAX, {}, torch.float32),
        (replace(SOFTMAX, rope="half", share_kv=True, gate_temperature=0.7), {}, torch.float32),
        (replace(SMALL, rope="none", gate="sigmoid"), {"num_heads": 6}, torch.float16),
    ],
    ids=["softmax", "half-shared", "sigmoid-fp16"],
)
def test_a_step_is_the_branches_one_by_one(
    config: NSAConfig, heads: dict[str, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of different lengths, one of which completes a block; the keys of each branch in several
    splits.
    """
    monkeypatch.setattr(decode, "LEAST_KEYS", 8)
    monkeypatch.setattr(decode, "LEAST_KEYS_BANDED", 16)
    layer, lengths = layer_of(config, **heads).to(dtype), [59, 22]
    x = randn(2, 1, DIM, seed=1, dtype=dtype)
    found = []
    for fused in (True, False):
        cache = filled(layer, lengths, 61, dtype)
        Steps([cache])
        with (
            nullcontext() if fused else one_by_one(monkeypatch),
            torch.no_grad(),
            engagement.collect() as counted,
            chosen_blocks.collect() as blocks,
        ):
            y = layer(x, cache=cache)
        read = {
            name: count.expand(2, 1, -1) if count.ndim == 3 else count.expand(2, 1)
            for name, count in cache.keys_read.items()
        }
        found.append((y, kept(cache), counted.counts, blocks, read))
    (got, got_kept, got_counts, got_blocks, got_read), (want, *rest) = found
    assert_parity(got, want, "y", tolerance=1e-5 if dtype is torch.float32 else 2e-3)
    for i, (a, b) in enumerate(zip(got_kept, rest[0], strict=True)):
        assert_parity(a, b, str(i), tolerance=1e-6 if dtype is torch.float32 else 1e-3)
    assert got_counts == rest[1] and all(map(torch.equal, got_blocks, rest[2]))
    assert all(torch.equal(got_read[name], rest[3][name]) for name in ("cmp", "sel", "win"))


@pytest.mark.usefixtures("poisoned_memory")
def test_a_step_is_the_oracles(monkeypatch: pytest.MonkeyPatch) -> None:
    """q and k as they are, gates given: the branches over what was stored, in fp64."""
    monkeypatch.setattr(decode, "LEAST_KEYS", 4)
    layer, lengths = layer_of(SMALL), [91, 7, 83, 75, 91, 79]
    cache = filled(layer, lengths, 93, torch.float32)
    Steps([cache])
    B = len(lengths)
    q, k, v = (randn(B, 1, n, d, seed=n + d) for n, d in ((4, 8), (6, 8), (6, 6)))
    q = q * torch.tensor([1, 6, 2, 9])[:, None]  # heads whose log-sum-exps differ
    gates = randn(B, 1, 4, 3, seed=3).sigmoid()
    step = cache.next_step()
    assert step is not None
    route = functional.route_for(
        q,
        2,
        6,
        93,
        branches=SMALL.branches,
        q_start=step.position_B,
        path="triton",
        fa2="off",
        config=SMALL,
    )
    x = Projected(q, k, v, q.new_zeros(1), step.position_B, gates, None, None)
    with chosen_blocks.collect() as blocks:
        o = fused_step.attend_projected(route, cache, step, x, rope="none")
    at = torch.tensor(lengths)
    place: dict[str, Any] = {"q_start": at, "scale": 8**-0.5}
    k_cmp, v_cmp = (t[:, :-1] for t in cache.cmp)
    wanted, _ = oracle.select(q, k_cmp, config=SMALL, kv_len=93, **place)
    assert blocks[0] is not None and torch.equal(blocks[0].long(), wanted)
    ring = [
        torch.stack([r[b].roll(-(n + 1) if n + 1 > 24 else 0, 0) for b, n in enumerate(lengths)])
        for r in cache.win
    ]
    branches = (
        oracle.compressed(q, k_cmp, v_cmp, block=8, stride=4, **place)[0],
        oracle.selected(
            q, cache.sel[0][:, :93], cache.sel[1][:, :93], wanted, sel_block=16, **place
        ),
        oracle.sliding(q, *ring, window=24, q_start=at.clamp(max=23), scale=8**-0.5),
    )
    want = sum(gates[..., i, None].double() * branch for i, branch in enumerate(branches))
    assert isinstance(want, Tensor)
    assert_parity(o, want, "o")
    for b, n in enumerate(lengths):
        assert torch.equal(cache.sel[0][b, n], k[b, 0, 2:4]), "the selected branch's key"
        assert torch.equal(cache.win[1][b, n % 24], v[b, 0, 4:6]), "the window's value"
        mean = torch.stack([cache.raw[0][b, p % 8] for p in range(n - 7, n + 1)]).double().mean(0)
        assert_parity(cache.cmp[0][b, (n - 7) // 4], mean, "the block that each row completes")


def test_what_sends_a_step_to_the_branches() -> None:
    """Statistics and a phi of its own: served as ever, with the same counters."""
    for config, collects in ((SMALL, True), (replace(SMALL, phi="linear"), False)):
        layer = layer_of(config)
        cache = layer.new_cache(1, 12)
        steps = Steps([cache])
        x = randn(1, 1, DIM, seed=0)
        names: list[str] = []
        with torch.no_grad():
            if collects:
                with statistics.collect(), launches() as names:
                    layer(x, cache=cache)
            else:
                with launches() as names:
                    layer(x, cache=cache)
        assert "nsa_gated_sum" in names and "nsa_sum_step" not in names
        assert steps.lengths_of(cache) == (1,)


def test_five_launches_a_layer_serve_all_of_its_attention() -> None:
    counts = []
    for layers in (1, 2):
        torch.manual_seed(0)
        model = TinyLM(replace(preset("tiny"), num_layers=layers), path="triton")
        caches = model.new_cache(2, 40)
        Steps(caches)
        with torch.no_grad(), launches() as names:
            model(torch.zeros(2, 1, dtype=torch.int64), cache=caches)
        counts.append([name for name in names if name.startswith("nsa_")])
    five = [
        "nsa_append_step",
        "nsa_interval_forward_both_split",
        "nsa_choose_step",
        "nsa_selected_forward_split",
        "nsa_sum_step",
    ]
    assert counts == [five, 2 * five]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_linear_layers_with_what_surrounds_them(dtype: torch.dtype) -> None:
    """Sizes that fill no tile; each part against fp64, by its formula."""
    x, residual = randn(3, 1, 70, seed=0, dtype=dtype), randn(3, 1, 37, seed=1, dtype=dtype)
    x[0] *= 2**-10  # so small that epsilon is most of its norm
    norm = randn(70, seed=2, dtype=dtype)
    weights = [randn(n, 70, seed=n, dtype=dtype) / 8 for n in (37, 20, 3)]
    wide = x.double()
    normed = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.double()
    tolerance = 1e-5 if dtype is torch.float32 else 4e-3
    got = linear_step.apply(x, weights, norm=norm, eps=1e-5)
    for y, w in zip(got, weights, strict=True):
        assert_parity(y, normed @ w.double().T, f"norm {w.shape}", tolerance=tolerance)
    plain = wide @ weights[0].double().T
    (y,) = linear_step.apply(x, weights[:1], residual=residual)
    assert_parity(y, plain + residual.double(), "residual", tolerance=tolerance)
    (y,) = linear_step.apply(x, weights[:1], silu=True)
    assert_parity(y, plain / (1 + (-plain).exp()), "silu", tolerance=tolerance)


def change(block: Any, surroundings: str, seen: list[Any]) -> None:
    """Make one module of the block another than TinyLM's."""
    gate, mlp = block.attention.gate, block.mlp
    with torch.no_grad():
        gate.up *= 4  # gates that differ
    if surroundings == "hook":
        mlp[1].register_forward_hook(lambda *given: seen.append(given))
    elif surroundings == "norm without a weight":
        block.mlp_norm = torch.nn.RMSNorm(block.attention.dim, elementwise_affine=False)
    elif surroundings == "another forward":
        mlp[0].forward = lambda x: 2 * (x @ mlp[0].weight.T)
    elif surroundings == "transposed gate":
        gate.up = torch.nn.Parameter(gate.up.detach().mT.contiguous().mT)
    elif surroundings == "another temperature":
        gate.temperature = 0.25


@pytest.mark.parametrize(
    "surroundings",
    [
        "own",
        "hook",
        "norm without a weight",
        "another forward",
        "transposed gate",
        "another temperature",
    ],
)
def test_a_block_is_its_modules_one_by_one(
    surroundings: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine launches a layer; where a module has a hook or is another, each is called."""
    torch.manual_seed(0)
    tiny = preset("tiny")
    model = TinyLM(replace(tiny, num_layers=1, nsa=replace(tiny.nsa, gate="softmax")), "triton")
    seen: list[Any] = []
    change(model.blocks[0], surroundings, seen)
    ids, logits, named = torch.tensor([[3], [5]]), [], []
    for fused in (True, False):
        with monkeypatch.context() as patched, torch.no_grad():
            if not fused:
                patched.setattr(fused_block, "route_of", lambda *_, **__: None)
                if surroundings != "own":
                    patched.setattr(fused_step, "serves", lambda *_: False)
            caches = model.new_cache(2, 40)
            for cache in caches:
                compress = partial(compress_kv, config=cache.config)
                kv = [tuple(randn(2, 9, 2, 16, seed=s + i) for s in (0, 1)) for i in (2, 4, 6)]
                cache.append(*kv, compress=compress)
            Steps(caches)
            logits.append(model(ids, cache=caches))
            with launches() as names:
                model(ids, cache=caches)
            named.append([name for name in names if name.startswith("nsa_")])
    assert_parity(*logits, "logits")
    taken = surroundings in {"own", "another temperature"}
    assert named[0].count("nsa_linear_step") == (4 if taken else 0)
    if surroundings == "own":
        assert len(named[0]) == 9 and len(named[1]) == 5
    assert (len(seen) > 0) == (surroundings == "hook")


@torch.no_grad()
@pytest.mark.parametrize(("whole", "products"), [(True, 4), (False, 0)], ids=["block", "attention"])
def test_a_layer_that_replays_is_fused(whole: bool, products: int, graphs: list[int]) -> None:
    """LayerGraphs capture a block's nine launches, or the five of its attention alone, whose
    norms, products and MLP then run from Python.
    """
    torch.manual_seed(0)
    tiny = preset("tiny")
    model: Any = TinyLM(
        replace(tiny, num_layers=1, nsa=replace(tiny.nsa, gate="softmax")), "triton"
    )
    cache, plain = (model.new_cache(2, 40) for _ in range(2))
    layers = model if whole else [model.blocks[0].attention]
    LayerGraphs(layers, cache)
    Steps(plain)
    ids = torch.tensor([[3], [5]])
    assert_parity(model(ids, cache=cache), model(ids, cache=plain), "logits")
    with launches() as names:
        model(ids, cache=cache)
    own = [name for name in names if name.startswith("nsa_")]
    assert (
        graphs == [0, 0] and own.count("nsa_linear_step") == products and len(own) == 5 + products
    )


def test_a_gate_that_alone_is_trained_is_refused() -> None:
    """As where each branch is called: a cache keeps no gradients, those of the gate neither."""
    layer = layer_of(SOFTMAX)
    layer.requires_grad_(False).gate.requires_grad_(True)
    cache = layer.new_cache(1, 12)
    Steps([cache])
    with pytest.raises(ValueError, match="a cache was given while gradients are recorded"):
        layer(randn(1, 1, DIM, seed=0), cache=cache)


def test_a_query_of_another_dtype_is_refused() -> None:
    """By the check of the branches' call, before anything is stored."""
    layer = layer_of(SMALL)
    layer.q_proj.register_forward_hook(lambda module, given, q: q.half())
    cache = layer.new_cache(1, 12)
    steps = Steps([cache])
    with torch.no_grad(), pytest.raises(ValueError, match="dtype"):
        layer(randn(1, 1, DIM, seed=0), cache=cache)
    assert steps.lengths_of(cache) == (0,)
