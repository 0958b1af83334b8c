"""DecodeGraph on a CPU, by a stand-in for the card's graphs: what is captured, counted, refused and
given back.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import NSAAttention, RouteError, checks, engagement, statistics
from nsa.blocks import BlockGrid
from nsa.decode import graph as decoding
from nsa.decode.graph import DecodeGraph
from nsa.decode.graph_cache import Steps
from tests.cases import assert_parity
from tests.nsa.test_cache import layer_of
from tests.nsa.test_decode_step import model_of


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A capture that replays like a graph: the device's part of the step alone, which moves no
    count of the host's.
    """
    done: list[str] = []

    def warm_up(work: Callable[[], None], device: torch.device) -> None:
        done.append("warm")
        work()
        work()

    def capture(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
        done.append("capture")
        work()
        owner: Any = work.__self__  # type: ignore[attr-defined]
        into = owner._logits_BTV

        def replay() -> None:
            done.append("replay")
            steps = owner.steps
            taken, length_B = steps._taken, steps.length_B
            with steps.unmoved():
                work()
                into.copy_(owner._logits_BTV)
                moved = length_B.clone()
            owner._logits_BTV = into
            length_B.copy_(moved)
            assert steps._taken == taken

        return replay

    monkeypatch.setattr(decoding, "check_device", lambda device: None)
    monkeypatch.setattr("nsa.model.check_device", lambda device: None)
    monkeypatch.setattr(decoding, "warm_up", warm_up)
    monkeypatch.setattr(decoding, "capture", capture)
    return done


@pytest.mark.parametrize("lengths", [None, [33, 7, 20]])
def test_generation_by_graph_is_generation(graphs: list[str], lengths: list[int] | None) -> None:
    model = model_of().double()
    ids = torch.randint(256, (3, 33))
    want = model.generate(ids, max_new_tokens=30, prompt_lengths=lengths)
    got = model.generate(ids, max_new_tokens=30, prompt_lengths=lengths, cuda_graph=True)
    assert torch.equal(got, want)
    assert graphs == ["warm", "capture"] + ["replay"] * 29
    a, b = (
        model.generate(
            ids,
            max_new_tokens=9,
            temperature=0.9,
            top_p=0.8,
            generator=torch.Generator().manual_seed(2),
            cuda_graph=graph,
        )
        for graph in (False, True)
    )
    assert torch.equal(a, b)
    graphs.clear()
    model.generate(ids, max_new_tokens=1, cuda_graph=True)
    assert graphs == [], "the first token is the prefill's"


@torch.no_grad()
def test_a_graph_counts_its_steps_and_gives_the_cache_back(graphs: list[str]) -> None:
    model = model_of().double()
    cache, plain = model.new_cache(2, 40), model.new_cache(2, 40)
    prompt = torch.randint(256, (2, 30))
    for c in (cache, plain):
        model(prompt, cache=c, num_tokens=[30, 11])
    graph = DecodeGraph(model, cache)
    assert {c.lengths for c in cache} == {(30, 11)} and graph.steps.length_B.tolist() == [
        30,
        11,
    ], "neither warm-up nor capture is a step"
    assert graph.engaged == {"cmp.sdpa": 2, "sel.masked": 2, "sel.sdpa": 2, "win.sdpa": 2}
    grid = BlockGrid.of(model.config.nsa)
    for step in range(6):
        ids = torch.randint(256, (2, 1))
        assert_parity(graph(ids), model(ids, cache=plain)[:, -1], step)
        assert {c.lengths for c in cache} == {(31 + step, 12 + step)}
        assert cache[1].keys_read["sel"][:, 0, 0].tolist() == [
            grid.keys_sel(30 + step),
            grid.keys_sel(11 + step),
        ]
    for wrong in (
        torch.zeros(2, 2, dtype=torch.int64),
        torch.zeros(2, 1),
        torch.zeros(3, 1, dtype=torch.int64),
    ):
        with pytest.raises(
            ValueError, match=r"wanted torch.int64 \(2, 1\) on cpu: one token a row"
        ):
            graph(wrong)
    graph.close()
    graph.close()
    with pytest.raises(ValueError, match="closed DecodeGraph"):
        graph(ids)
    with pytest.raises(ValueError, match="model is NSAAttention; wanted a TinyLM"):
        DecodeGraph(NSAAttention(32, 4, 2, 8), cache)
    ids = torch.randint(256, (2, 3))
    assert_parity(model(ids, cache=cache), model(ids, cache=plain), "an ordinary chunk afterwards")
    assert cache[0].lengths == (39, 20)
    graph = DecodeGraph(model, cache)
    graph(ids[:, :1])
    before, replays = (
        [t.clone() for c in cache for t in (*c.sel, *c.win, *c.raw)],
        graphs.count("replay"),
    )
    with pytest.raises(ValueError, match="would hold 41 tokens; wanted at most max_len=40"):
        graph(ids[:, :1])
    assert (
        all(map(torch.equal, before, (t for c in cache for t in (*c.sel, *c.win, *c.raw))))
        and graphs.count("replay") == replays
    )


@torch.no_grad()
def test_what_a_graph_refuses(graphs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    full = model.new_cache(1, 3)
    model(torch.zeros(1, 3, dtype=torch.int64), cache=full)
    with pytest.raises(ValueError, match="would hold 4 tokens"):
        DecodeGraph(model, full)
    assert all(c.steps is None for c in full), "a cache that was refused is an ordinary one"
    slow = model_of("reference")
    cache = slow.new_cache(1, 9)
    with pytest.raises(
        RouteError,
        match=r"sel.reference, whose loop runs on the host.*wanted one of v2, masked, triton",
    ):
        DecodeGraph(slow, cache)
    assert graphs.count("capture") == 0 and cache[0].steps is None
    cache = model.new_cache(1, 9)
    DecodeGraph(model, cache)
    with pytest.raises(ValueError, match="close their DecodeGraph"):
        DecodeGraph(model, cache)
    with pytest.raises(ValueError, match="only some step"):
        model(torch.zeros(1, 1, dtype=torch.int64), cache=[cache[0], model.new_cache(1, 9)[1]])
    monkeypatch.setattr(checks, "is_strict", lambda: True)
    with pytest.raises(ValueError, match="NSA_STRICT_ASSERTS=1.*unset it"):
        DecodeGraph(model, model.new_cache(1, 9))


@torch.no_grad()
@pytest.mark.parametrize("fails_at", ["warm-up", "capture"])
def test_a_graph_that_fails_leaves_no_token(
    graphs: list[str], fails_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of().double()
    cache, plain = model.new_cache(2, 40), model.new_cache(2, 40)
    prompt, ids = torch.randint(256, (2, 9)), torch.randint(256, (2, 3))
    for c in (cache, plain):
        model(prompt, cache=c)
    # the fixture warms up by two steps
    head, calls = (model.head.forward, [1 if fails_at == "warm-up" else 2])

    def fails(x: Tensor) -> Tensor:
        calls[0] -= 1
        if calls[0] < 0:
            raise torch.OutOfMemoryError("planted")
        return head(x)

    monkeypatch.setattr(model.head, "forward", fails)
    with pytest.raises(torch.OutOfMemoryError):
        DecodeGraph(model, cache)
    monkeypatch.setattr(model.head, "forward", head)
    assert all(c.steps is None and c.lengths == (9, 9) for c in cache)
    assert_parity(model(ids, cache=cache), model(ids, cache=plain), "an ordinary chunk afterwards")


@torch.no_grad()
def test_nobody_counts_steps_that_are_no_tokens(graphs: list[str]) -> None:
    model = model_of()
    cache = model.new_cache(1, 9)
    model(torch.zeros(1, 4, dtype=torch.int64), cache=cache)
    with engagement.collect() as counted, statistics.collect() as observed:
        DecodeGraph(model, cache)
    assert graphs == ["warm", "capture"] and not counted.counts and observed.read().rows is None


def test_caches_go_when_nobody_holds_them() -> None:
    """They are freed at once, not when Python collects cycles: their buffers are most of a GPU's
    memory.
    """
    cache = layer_of().new_cache(1, 9)
    steps, held = Steps([cache]), weakref.ref(cache)
    gc.disable()
    try:
        del cache
        assert held() is None
    finally:
        gc.enable()
    steps.end()


def test_a_cpu_has_no_graphs() -> None:
    model = model_of()
    with pytest.raises(
        ValueError,
        match=r"for a model on cpu; wanted one on 'cuda'; move it there, or leave cuda_graph off",
    ):
        model.generate(torch.zeros(1, 3, dtype=torch.int64), max_new_tokens=2, cuda_graph=True)
    with pytest.raises(ValueError, match="wanted one on 'cuda'"):
        DecodeGraph(model, model.new_cache(1, 9))
