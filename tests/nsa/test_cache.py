"""Prefill = chunked prefill = decode step by step; rows of different lengths; what is kept, counted
and refused. Of both caches, contiguous rows and pages.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nsa.attention import NSAAttention
from nsa.blocks import BlockGrid
from nsa.config import NSAConfig, preset
from nsa.decode import NSACache, PagedCache, PageShape
from nsa.model import TinyLM
from nsa.routing import Path
from tests.cases import FP64_PATHS, PATHS_HERE, SMALL, assert_parity, cache_bytes, here, randn

DIM, HEADS, KV_HEADS, KEY_DIM, VALUE_DIM = 24, 4, 2, 8, 6
KINDS = ("contiguous", "paged")
OPTIONS = {
    "mean": SMALL,
    "mean-after": replace(SMALL, cmp_rope="after"),
    "linear": replace(SMALL, phi="linear"),
    "mlp": replace(SMALL, phi="mlp"),
    "mlp-before": replace(SMALL, phi="mlp", cmp_rope="before"),
    "half-shared-softmax": replace(SMALL, rope="half", share_kv=True, gate="softmax"),
    "norm-no-rope-no-gate": replace(SMALL, qk_norm=True, rope="none", gate="none"),
    "norm-mlp": replace(SMALL, qk_norm=True, phi="mlp"),
    "full": SMALL.full_attention(),
    "no-window": replace(SMALL, branches=("cmp", "sel")),
    "no-overlap": replace(SMALL, cmp_block=4, cmp_stride=4),
    "hierarchical": replace(SMALL, selection="hierarchical"),
    "bf16-scores": replace(SMALL, score_dtype="bfloat16"),
    "paper": NSAConfig(),
}


def layer_of(config: NSAConfig = SMALL, path: str = "masked", **changes: int) -> NSAAttention:
    torch.manual_seed(0)
    heads = {
        "num_heads": HEADS,
        "num_kv_heads": KV_HEADS,
        "head_dim": KEY_DIM,
        "v_head_dim": VALUE_DIM,
    } | changes
    return NSAAttention(DIM, **heads, config=config, path=path, fa2="off").double()


def cache_of(
    layer: NSAAttention, kind: str, batch: int, max_len: int, *, initial_len: int | None = None
) -> NSACache:
    """An NSACache, or the one layer of a PagedCache whose rows have all joined."""
    plain = layer.new_cache(batch, max_len, initial_len=initial_len)
    if kind == "contiguous":
        return plain
    (k, v), weight = plain.sel, layer.q_proj.weight
    shape = PageShape(layer.num_kv_heads, k.shape[3], v.shape[3], weight.dtype)
    paged = PagedCache([layer.config], batch, max_len, shape)
    for _ in range(batch):
        paged.join()
    return paged.layers[0]


@torch.no_grad()
def in_chunks(
    layer: NSAAttention,
    x: Tensor,
    cuts: Sequence[int],
    *,
    kind: str = "contiguous",
    initial_len: int | None = None,
) -> Tensor:
    cache = cache_of(layer, kind, x.shape[0], x.shape[1], initial_len=initial_len)
    bounds = [0, *cuts, x.shape[1]]
    return torch.cat(
        [layer(x[:, a:b], cache=cache) for a, b in itertools.pairwise(bounds) if b > a], 1
    )


# pages do not know what most options are about
SPLIT = [("contiguous", option) for option in OPTIONS] + [
    ("paged", option) for option in ("mean-after", "mlp-before", "full", "paper")
]


@pytest.mark.parametrize(("kind", "option"), SPLIT)
def test_prefill_is_chunked_prefill_is_decode(kind: str, option: str) -> None:
    """NSA.md property 5, at every boundary of the small geometry, and of the paper's to 70
    tokens.
    """
    layer = layer_of(OPTIONS[option])
    x = randn(2, 133 if option != "paper" else 70, DIM, seed=3, dtype=torch.float64)
    with torch.no_grad():
        whole = layer(x)
    for cuts in (
        [1],
        [7],
        [8],
        [15],
        [16],
        [23, 24, 25],
        [31, 32, 63, 64],
        [5, 60],
        range(1, x.shape[1]),
    ):
        assert_parity(in_chunks(layer, x, cuts, kind=kind), whole, f"cuts {list(cuts)[:4]}")


@pytest.mark.parametrize("path", PATHS_HERE)
def test_every_path_decodes(path: Path) -> None:
    dtype = torch.float64 if path in FP64_PATHS else torch.float32
    layer = layer_of(path=path).to(dtype)
    tokens, first = here((100, 37), (45, 17))
    x = randn(2, tokens, DIM, seed=4, dtype=dtype)
    with torch.no_grad():
        whole = layer(x)
    cuts = [first, *range(tokens - here(10, 4), tokens)]
    for kind in KINDS:
        assert_parity(in_chunks(layer, x, cuts, kind=kind), whole, f"{path} {kind}")


@settings(max_examples=35, deadline=None)
@given(
    st.lists(st.integers(1, 139), max_size=4, unique=True).map(sorted),
    st.sampled_from([(8, 4, 16, 24), (4, 4, 8, 1), (6, 2, 4, 7), (12, 4, 16, 200)]),
    st.integers(1, 140),
    st.sampled_from(KINDS),
)
def test_any_split_of_any_geometry(
    cuts: list[int], geometry: tuple[int, int, int, int], initial_len: int, kind: str
) -> None:
    l, d, sel, w = geometry  # noqa: E741 (the paper's letters)
    layer = layer_of(replace(SMALL, cmp_block=l, cmp_stride=d, sel_block=sel, window=w))
    x = randn(1, 140, DIM, seed=5, dtype=torch.float64)
    with torch.no_grad():
        whole = layer(x)
    got = in_chunks(layer, x, cuts, kind=kind, initial_len=initial_len)
    assert_parity(got, whole, f"{kind}, cuts {cuts}")


@settings(max_examples=35, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(0, 40)),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from(["mean", "mlp"]),
    st.sampled_from(KINDS),
)
def test_rows_of_different_lengths_are_each_row_alone(
    chunks: list[tuple[int, int, int]], option: str, kind: str
) -> None:
    """Each chunk adds its own number of tokens to each of three rows; what pads a row may be
    NaN.
    """
    layer = layer_of(OPTIONS[option])
    totals = [sum(chunk[b] for chunk in chunks) for b in range(3)]
    x = randn(3, max(1, *totals), DIM, seed=6, dtype=torch.float64)
    cache = cache_of(layer, kind, 3, max(1, *totals))
    got: list[list[Tensor]] = [[], [], []]
    with torch.no_grad():
        for chunk in chunks:
            if max(chunk) == 0:
                continue
            padded = torch.full((3, max(chunk), DIM), torch.nan, dtype=torch.float64)
            for b, count in enumerate(chunk):
                padded[b, :count] = x[b, cache.lengths[b] : cache.lengths[b] + count]
            y = layer(padded, cache=cache, num_tokens=chunk)
            for b, count in enumerate(chunk):
                got[b].append(y[b, :count])
                assert bool((y[b, count:] == 0).all())
        for b in range(3):
            if totals[b]:
                assert_parity(torch.cat(got[b])[None], layer(x[b : b + 1, : totals[b]]), f"row {b}")
    assert cache.lengths == tuple(totals)


def test_trap_21_emission_goes_on_after_any_prefill() -> None:
    """31 raw tokens are kept at S = 47 of the paper's geometry, and no block is due twice or
    never.
    """
    layer = layer_of(NSAConfig())
    cache = layer.new_cache(1, 400)
    grid = BlockGrid.of(NSAConfig())
    with torch.no_grad():
        layer(randn(1, 47, DIM, seed=1, dtype=torch.float64), cache=cache)
        assert grid.num_cmp(47) == 1 and 47 - 16 == 31 == cache.tail[0].shape[1]
        for step in range(48, 400):
            layer(randn(1, 1, DIM, seed=step, dtype=torch.float64), cache=cache)
            emitted = int((cache.cmp[0][0, :-1].abs().sum((1, 2)) > 0).sum())
            assert emitted == grid.num_cmp(step)


@pytest.mark.parametrize("kind", KINDS)
def test_trap_22_a_later_chunk_sees_no_future(kind: str) -> None:
    layer = layer_of()
    x = randn(1, 120, DIM, seed=7, dtype=torch.float64)
    changed = x.clone()
    changed[:, 100:] = 9.0
    first, second = (in_chunks(layer, y, [40, 90], kind=kind) for y in (x, changed))
    assert torch.equal(first[:, :100], second[:, :100])


@pytest.mark.parametrize(
    ("kind", "ragged"), [("contiguous", False), ("contiguous", True), ("paged", True)]
)
def test_keys_read_are_counted_and_equal_the_closed_form(kind: str, ragged: bool) -> None:
    layer, grid = layer_of(), BlockGrid.of(SMALL)
    cache = cache_of(layer, kind, 2, 200)
    starts = [90, 37] if ragged else [90, 90]
    with torch.no_grad():
        layer(randn(2, 90, DIM, seed=8, dtype=torch.float64), cache=cache, num_tokens=starts)
        for step in range(30):
            layer(randn(2, 1, DIM, seed=step, dtype=torch.float64), cache=cache)
            for b, start in enumerate(starts):
                t = start + step
                read = {
                    name: count.expand(2, *count.shape[1:])[b].flatten().tolist()
                    for name, count in cache.keys_read.items()
                }
                assert read == {
                    "cmp": [grid.visible_cmp(t)],
                    "sel": [grid.keys_sel(t)] * KV_HEADS,
                    "win": [grid.keys_win(t)],
                }


@pytest.mark.parametrize("capacity", [1, 7, 8, 100])
def test_memory_is_the_formula(capacity: int) -> None:
    cache = NSACache.empty(
        SMALL, 3, capacity, num_kv_heads=2, head_dim=8, v_head_dim=6, dtype=torch.float32
    )
    shape = {"batch": 3, "num_kv_heads": 2, "head_dim": 8, "v_head_dim": 6, "element_size": 4}
    assert cache.memory_bytes() == cache_bytes(SMALL, capacity=capacity, **shape)
    by_hand = 3 * 2 * (8 + 6) * 4 * ((100 + 1) + (24 + 1) + 24 + 7)
    assert capacity != 100 or cache.memory_bytes() == by_hand


def test_growth_doubles_at_most_and_stops_at_max_len() -> None:
    layer = layer_of()
    cache = layer.new_cache(1, 100, initial_len=10)
    seen = []
    with torch.no_grad():
        for _ in range(10):
            layer(randn(1, 10, DIM, seed=0, dtype=torch.float64), cache=cache)
            seen.append(cache.capacity)
        assert seen == [10, 20, 40, 40, 80, 80, 80, 80, 100, 100]
        before = [x.clone() for x in (*cache.sel, *cache.cmp, *cache.win, *cache.tail)]
        with pytest.raises(ValueError, match=r"would hold 101 tokens.*max_len=100.*make it larger"):
            layer(randn(1, 1, DIM, seed=0, dtype=torch.float64), cache=cache)
        assert all(
            torch.equal(a, b)
            for a, b in zip(before, (*cache.sel, *cache.cmp, *cache.win, *cache.tail), strict=True)
        )
        assert cache.lengths == (100,)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_cache_refuses(kind: str) -> None:
    layer = layer_of()
    x = randn(2, 5, DIM, seed=0, dtype=torch.float64)
    with pytest.raises(ValueError, match="keeps none; wrap the call in torch.no_grad"):
        layer(x, cache=cache_of(layer, kind, 2, 9))
    with torch.no_grad():
        narrow = layer_of().float()
        for cache, words in (
            (cache_of(layer, kind, 3, 9), "holds 3 rows, the chunk 2"),
            (cache_of(narrow, kind, 2, 9), "float32 on cpu, the chunk torch.float64"),
            (
                NSACache.empty(SMALL, 2, 9, num_kv_heads=1, head_dim=8, dtype=torch.float64),
                "holds heads",
            ),
        ):
            with pytest.raises(ValueError, match=words):
                layer(x, cache=cache)
        for num_tokens in ([5], [5, 6], [-1, 5], [4, 4]):
            with pytest.raises(
                ValueError, match="wanted 2 numbers from 0 to 5, the largest being 5"
            ):
                layer(x, cache=cache_of(layer, kind, 2, 9), num_tokens=num_tokens)
        with pytest.raises(ValueError, match="got num_tokens and cu_seqlens; wanted at most one"):
            layer(x[:1], num_tokens=[5], cu_seqlens=torch.tensor([0, 5]))
        with pytest.raises(ValueError, match="at most one"):
            layer(x[:1], cache=layer.new_cache(1, 9), cu_seqlens=torch.tensor([0, 5]))
    for wrong in ({"batch": 0}, {"max_len": 0}, {"initial_len": 0}, {"initial_len": 10}):
        with pytest.raises(ValueError, match="NSACache"):
            NSACache.empty(
                SMALL, **{"batch": 1, "max_len": 9, "num_kv_heads": 1, "head_dim": 8} | wrong
            )


@pytest.mark.parametrize("lengths", [None, [33, 7, 20]])
def test_greedy_generation_is_the_argmax_of_a_whole_forward(lengths: list[int] | None) -> None:
    torch.manual_seed(1)
    model = TinyLM(preset("tiny"), fa2="off").double()
    ids = torch.randint(256, (3, 33))
    out = model.generate(ids, max_new_tokens=20, prompt_lengths=lengths)
    assert out.shape == (3, 53)
    for b, length in enumerate(lengths or [33] * 3):
        row = ids[b : b + 1, :length]
        with torch.no_grad():
            for _ in range(20):
                row = torch.cat([row, model(row)[:, -1:].argmax(-1)], 1)
        assert torch.equal(out[b, : length + 20], row[0]) and not out[b, length + 20 :].any()


def test_sampling_is_seeded_and_keeps_to_the_nucleus() -> None:
    model = TinyLM(preset("tiny"), fa2="off")
    ids = torch.randint(256, (2, 9))
    one, same, other = (
        model.generate(
            ids, max_new_tokens=12, temperature=1.0, generator=torch.Generator().manual_seed(seed)
        )
        for seed in (1, 1, 2)
    )
    assert torch.equal(one, same) and not torch.equal(one, other)
    narrow = model.generate(ids, max_new_tokens=12, temperature=1.0, top_p=1e-9)
    assert torch.equal(narrow, model.generate(ids, max_new_tokens=12))
    for wrong in (
        {"max_new_tokens": 0},
        {"prompt_lengths": [0, 9]},
        {"prompt_lengths": [9]},
        {"temperature": -1.0},
        {"top_p": 0.0},
    ):
        with pytest.raises(ValueError, match="wanted"):
            model.generate(ids, **{"max_new_tokens": 1} | wrong)


@pytest.mark.parametrize("part", ["q_proj", "k_proj", "v_proj", "gate"])
def test_a_cache_refuses_a_gradient_of_any_part(part: str) -> None:
    """A frozen query hid those of keys, values and gates."""
    layer = NSAAttention(24, 3, 1, 12, 20, config=SMALL).requires_grad_(False)
    getattr(layer, part).requires_grad_(True)
    with pytest.raises(ValueError, match="a cache was given while gradients are recorded"):
        layer(randn(1, 5, 24, seed=0), cache=layer.new_cache(1, 8))
