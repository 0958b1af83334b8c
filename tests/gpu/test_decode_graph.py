"""On CUDA: a decode step replayed from its graph is the eager step, waits for nothing, and lives
next to another.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import ChunkGraph, DecodeGraph, NSAConfig, RouteError
from nsa.blocks import BlockGrid
from nsa.capability import probe
from nsa.config import ModelConfig
from nsa.decode import LayerGraphs
from nsa.decode.cache import NSACache
from nsa.decode.graph_cache import Steps
from nsa.model import DenseLM, TinyLM
from tests.cases import SMALL, error, magnitude

DEVICE, VOCABULARY = "cuda", 256
# In fp32 every path is exact to rounding, so that greedy tokens may be compared over blocks that
# compete.
PAPER = ModelConfig(
    dim=96,
    num_layers=3,
    num_heads=12,
    num_kv_heads=2,
    head_dim=64,
    vocab_size=VOCABULARY,
    nsa=NSAConfig(),
)
TIGHT = replace(PAPER, nsa=replace(SMALL, sel_block=16))
PATHS = pytest.mark.parametrize("path", ["triton", "masked", "v2"])


def model_of(
    config: ModelConfig = TIGHT, path: str = "triton", dtype: torch.dtype = torch.float32
) -> TinyLM:
    torch.manual_seed(1)
    return TinyLM(config, path=path, fa2="off").to(DEVICE, dtype)


def ids_of(batch: int, tokens: int, seed: int = 1) -> Tensor:
    return torch.randint(
        VOCABULARY, (batch, tokens), generator=torch.Generator().manual_seed(seed)
    ).to(DEVICE)


@torch.no_grad()
def prefilled(model: TinyLM, lengths: Sequence[int], room: int) -> list[NSACache]:
    cache = model.new_cache(len(lengths), room)
    model(ids_of(len(lengths), max(lengths)), cache=cache, num_tokens=lengths)
    return cache


@contextmanager
def no_sync() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@PATHS
@pytest.mark.parametrize(
    ("config", "lengths", "count"),
    [
        (TIGHT, (1, 5, 33, 64), 70),
        (PAPER, (14, 30, 500, 511), 40),
        (PAPER, (1020, 1087, 60, 128), 30),
    ],
    ids=["small", "window", "competing"],
)
@torch.no_grad()
def test_replays_are_eager_steps(
    path: str, config: ModelConfig, lengths: tuple[int, ...], count: int
) -> None:
    """Rows of different lengths, across the boundaries of l, d, l' and w; then an ordinary chunk on
    what the graph left.
    """
    model = model_of(config, path)
    room = max(lengths) + count + 4
    plain, cache = prefilled(model, lengths, room), prefilled(model, lengths, room)
    graph, grid = DecodeGraph(model, cache), BlockGrid.of(config.nsa)
    assert graph.steps.length_B.tolist() == list(lengths) == list(cache[0].lengths), (
        "neither warm-up nor capture is a step"
    )
    for step in range(count):
        ids = ids_of(len(lengths), 1, seed=step)
        got, want = graph(ids), model(ids, cache=plain)[:, -1]
        assert error(got, want) <= 1e-4 * max(1.0, magnitude(want)), step
        assert cache[2].lengths == plain[2].lengths == tuple(n + step + 1 for n in lengths)
    at = [n + count - 1 for n in lengths]
    for branch, closed in (
        ("cmp", grid.visible_cmp),
        ("sel", grid.keys_sel),
        ("win", grid.keys_win),
    ):
        read = cache[2].keys_read[branch].flatten(1)[:, 0].tolist()
        assert read == [closed(t) for t in at], f"{branch}: the last replay's own count"
    assert graph.steps.length_B.tolist() == [n + count for n in lengths]
    graph.close()
    ids = ids_of(len(lengths), 4, seed=99)
    got, want = model(ids, cache=cache), model(ids, cache=plain)
    assert error(got, want) <= 1e-4 * max(1.0, magnitude(want))


@PATHS
@pytest.mark.parametrize(
    ("config", "lengths", "tokens"),
    [(TIGHT, (1, 5, 33, 64), 24), (PAPER, (0, 30, 500, 511), 256)],
    ids=["small", "window"],
)
@torch.no_grad()
def test_replayed_chunks_are_eager_chunks(
    path: str, config: ModelConfig, lengths: tuple[int, ...], tokens: int
) -> None:
    """Then a token on what the graph left."""
    model = model_of(config, path)
    room = max(lengths) + 3 * tokens + 1
    plain, cache = prefilled(model, lengths, room), prefilled(model, lengths, room)
    graph = ChunkGraph(model, cache, tokens)
    for chunk in range(3):
        ids = ids_of(len(lengths), tokens, seed=chunk)
        with no_sync():
            got = graph(ids)
        want = model(ids, cache=plain)
        assert error(got, want) <= 1e-4 * max(1.0, magnitude(want)), chunk
        assert cache[2].lengths == plain[2].lengths
    for branch in ("cmp", "sel", "win"):
        read = cache[2].keys_read[branch]
        assert torch.equal(read, plain[2].keys_read[branch].expand_as(read)), branch
    graph.close()
    ids = ids_of(len(lengths), 1, seed=99)
    got, want = model(ids, cache=cache), model(ids, cache=plain)
    assert error(got, want) <= 1e-4 * max(1.0, magnitude(want))


@pytest.mark.parametrize("kind", ["dense", "dense_triton", "dense_fa3"])
# few queries a tile of heads, which split the keys, and many
@pytest.mark.parametrize(
    ("batch", "begin", "tokens"), [(3, 33, 8), (3, 0, 24), (1, 511, 256)], ids=str
)
@torch.no_grad()
def test_replayed_dense_chunks_are_eager_chunks(
    kind: str, batch: int, begin: int, tokens: int
) -> None:
    """The last one fills the cache. FA-3 computes in bf16, and is refused by name where it is not
    installed.
    """
    torch.manual_seed(1)
    dtype = torch.bfloat16 if kind == "dense_fa3" else torch.float32
    model = DenseLM(PAPER, kind).to(DEVICE, dtype)
    caches = [model.new_cache(batch, begin + 3 * tokens) for _ in range(2)]
    if kind == "dense_fa3" and (reason := probe(DEVICE).fa3_reason):
        with pytest.raises(RouteError, match=re.escape(reason)):
            ChunkGraph(model, caches[0], tokens)
        return
    if begin:
        for one in caches:
            model(ids_of(batch, begin), cache=one)
    plain, cache = caches
    graph = ChunkGraph(model, cache, tokens)
    assert graph.engaged == {"dense." + {"dense": "sdpa"}.get(kind, kind[6:]): 3}
    tolerance = 8 * 2**-8 if kind == "dense_fa3" else 1e-4
    for chunk in range(3):
        ids = ids_of(batch, tokens, seed=chunk)
        with no_sync():
            got = graph(ids)
        want = model(ids, cache=plain)
        assert error(got, want) <= tolerance * max(1.0, magnitude(want)), chunk
        assert cache[2].lengths == plain[2].lengths
        read = cache[2].keys_read["dense"]
        assert torch.equal(read, plain[2].keys_read["dense"].expand_as(read)), chunk
    with pytest.raises(ValueError, match=f"wanted at most max_len={begin + 3 * tokens}"):
        graph(ids)
    if not begin:  # other prompts over what the first left
        graph.forget_all()
        got = graph(ids)
        want = model(ids, cache=model.new_cache(batch, tokens))
        assert error(got, want) <= tolerance * max(1.0, magnitude(want))
    graph.close()
    assert cache[2].lengths == (begin + 3 * tokens if begin else tokens,) * batch


@PATHS
@pytest.mark.parametrize("lengths", [None, [100, 7, 33]])
def test_generation_by_graph_is_greedy_generation(path: str, lengths: list[int] | None) -> None:
    model, ids = model_of(path=path), ids_of(3, 100)
    want = model.generate(ids, max_new_tokens=80, prompt_lengths=lengths)
    assert torch.equal(
        model.generate(ids, max_new_tokens=80, prompt_lengths=lengths, cuda_graph=True), want
    )


def test_sampled_generation_by_graph_is_seeded_and_stays_in_the_vocabulary() -> None:
    model, ids = model_of(), ids_of(2, 20)
    seeds = (torch.Generator(DEVICE).manual_seed(3) for _ in range(2))
    one, same = (
        model.generate(
            ids, max_new_tokens=30, temperature=1.0, top_p=0.9, generator=seed, cuda_graph=True
        )
        for seed in seeds
    )
    assert torch.equal(one, same) and int(one.max()) < VOCABULARY and int(one.min()) >= 0


@torch.no_grad()
def test_bf16_replays_are_close_to_eager_steps_and_repeatable() -> None:
    """Where every block is chosen, since near-ties of bf16 keys may choose others."""
    model, lengths = model_of(PAPER, dtype=torch.bfloat16), (100, 700, 33)
    runs = []
    for _ in range(2):
        graph = DecodeGraph(model, prefilled(model, lengths, 740))
        runs.append(torch.stack([graph(ids_of(3, 1, seed=step)).clone() for step in range(40)]))
    plain = prefilled(model, lengths, 740)
    eager = torch.stack([model(ids_of(3, 1, seed=step), cache=plain)[:, -1] for step in range(40)])
    assert torch.equal(*runs), "property 10"
    assert error(runs[0], eager) <= 2 * 2**-8 * magnitude(eager) * 4


@torch.no_grad()
def test_two_graphs_live_at_once() -> None:
    """Taken in turns, each with a batch, lengths and a model of its own, they do not touch each
    other.
    """
    first, second = model_of(), model_of(PAPER)
    shapes = ((first, (40, 3)), (second, (90, 600, 31)))
    plain = [prefilled(model, lengths, 640) for model, lengths in shapes]
    graphs = [DecodeGraph(model, prefilled(model, lengths, 640)) for model, lengths in shapes]
    for step in range(24):
        ids = [ids_of(len(lengths), 1, seed=step) for _, lengths in shapes]
        # both, before either is looked at
        got = [graph(x) for graph, x in zip(graphs, ids, strict=True)]
        for (model, _), cache, x, y in zip(shapes, plain, ids, got, strict=True):
            want = model(x, cache=cache)[:, -1]
            assert error(y, want) <= 1e-4 * max(1.0, magnitude(want)), step


@torch.no_grad()
def test_neither_a_replay_nor_an_uncaptured_step_syncs() -> None:
    model, ids = model_of(), ids_of(2, 1)
    graph = DecodeGraph(model, prefilled(model, (40, 9), 60))
    cache = prefilled(model, (40, 9), 60)
    steps = Steps(cache)
    model(ids, cache=cache)
    with no_sync():
        for _ in range(5):
            graph(ids)
            model(ids, cache=cache)
        steps.forget_last()
    torch.cuda.synchronize()
    assert graph.steps.length_B.tolist() == steps.length_B.tolist() == [45, 14]


def test_generation_by_graph_does_not_sync_once_it_is_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, ids = model_of(), ids_of(2, 20)
    real = DecodeGraph.__call__

    def watched(self: DecodeGraph, ids_B1: Tensor) -> Tensor:
        # from the first replay to the end, sampling included
        torch.cuda.set_sync_debug_mode("error")
        return real(self, ids_B1)

    monkeypatch.setattr(DecodeGraph, "__call__", watched)
    try:
        model.generate(ids, max_new_tokens=20, temperature=0.8, top_p=0.9, cuda_graph=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@torch.no_grad()
def test_a_full_cache_is_refused_before_anything_is_written() -> None:
    model = model_of()
    cache = prefilled(model, (9, 4), 10)
    graph = DecodeGraph(model, cache)
    graph(ids_of(2, 1))
    before = [x.clone() for c in cache for x in (*c.sel, *c.cmp, *c.win, *c.raw)]
    with pytest.raises(ValueError, match="would hold 11 tokens; wanted at most max_len=10"):
        graph(ids_of(2, 1))
    torch.cuda.synchronize()
    assert all(
        map(torch.equal, before, (x for c in cache for x in (*c.sel, *c.cmp, *c.win, *c.raw)))
    )
    with pytest.raises(ValueError, match="one token a row"):
        graph(torch.zeros(2, 1, dtype=torch.int64))


@torch.no_grad()
def test_a_path_that_loops_on_the_host_is_refused() -> None:
    model = model_of(path="v1")
    cache = prefilled(model, (9,), 12)
    with pytest.raises(RouteError, match="sel.v1, whose loop runs on the host"):
        DecodeGraph(model, cache)
    model(ids_of(1, 2), cache=cache)
    assert cache[0].lengths == (11,)


@PATHS
@torch.no_grad()
def test_layers_that_replay_are_the_step_that_is_captured_whole(path: str) -> None:
    """Across the boundaries of l, d and l', with a hook that changes what a layer gives and a
    weight that changes in place; nothing waits.
    """
    model, lengths, count = model_of(path=path), (1, 5, 33, 64), 40
    room = max(lengths) + count + 8
    whole, cache = prefilled(model, lengths, room), prefilled(model, lengths, room)
    captured, layered = DecodeGraph(model, whole), LayerGraphs(model, cache)
    assert layered.engaged == captured.engaged
    second: Any = model.blocks[1]
    weight = second.attention.q_proj.weight
    for step in range(count):
        ids = ids_of(len(lengths), 1, seed=step)
        with no_sync():
            got = model(ids, cache=cache)[:, -1]
        want = captured(ids)
        assert error(got, want) <= 1e-4 * max(1.0, magnitude(want)), step
        assert cache[2].lengths == whole[2].lengths
        if step == count // 2:
            weight.mul_(1.5)
    for branch in ("cmp", "sel", "win"):
        assert torch.equal(cache[2].keys_read[branch], whole[2].keys_read[branch]), branch
    captured.close()
    plain = Steps(whole)
    hooks = [block.register_forward_hook(lambda *a: 1.25 * a[2]) for block in model.blocks]
    for step in range(4):
        ids = ids_of(len(lengths), 1, seed=count + step)
        got, want = model(ids, cache=cache), model(ids, cache=whole)
        assert error(got, want) <= 1e-4 * max(1.0, magnitude(want)), step
    for hook in hooks:
        hook.remove()
    plain.end()
    layered.close()
    ids = ids_of(len(lengths), 3, seed=99)
    got, want = model(ids, cache=cache), model(ids, cache=whole)
    assert error(got, want) <= 1e-4 * max(1.0, magnitude(want))


@torch.no_grad()
def test_attention_that_replays_in_a_model_of_ones_own() -> None:
    """The attentions of three layers, next to another such model in turns; each graph lives while
    its caches do.
    """
    model = model_of()
    layers: list[Any] = [block.attention for block in model.blocks]
    (a, b), plain = (prefilled(model, (40, 9), 60) for _ in range(2)), prefilled(model, (40, 9), 60)
    for cache in (a, b):
        LayerGraphs(layers, cache)
    Steps(plain)
    for step in range(9):
        ids = ids_of(2, 1, seed=step)
        one, other = model(ids, cache=a), model(ids, cache=b)
        want = model(ids, cache=plain)
        assert torch.equal(one, other)
        assert error(one, want) <= 1e-4 * max(1.0, magnitude(want)), step
    weight = layers[0].o_proj.weight
    weight.data = weight.data.clone()
    with pytest.raises(ValueError, match="a weight at another address"):
        model(ids, cache=a)
