"""Chunks of a fixed number of tokens, their place on the device: what an ordinary cache gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from nsa.config import ModelConfig
from nsa.decode import ChunkGraph, DecodeGraph
from nsa.decode.graph_cache import Steps
from nsa.model import DenseLM
from nsa.routing import RouteError
from tests.cases import assert_parity
from tests.nsa.test_decode_step import model_of
from tests.nsa.test_decoding import graphs as graphs

ROOM = 96


def ids_of(batch: int, tokens: int, seed: int) -> torch.Tensor:
    return torch.randint(256, (batch, tokens), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("tokens", [2, 5, 16, 24])
@pytest.mark.parametrize("lengths", [(0, 0), (3, 17), (30, 11)], ids=str)
@torch.no_grad()
def test_chunks_that_step_are_chunks(tokens: int, lengths: tuple[int, int]) -> None:
    model = model_of().double()
    cache, plain = model.new_cache(2, ROOM), model.new_cache(2, ROOM)
    if max(lengths):
        for one in (cache, plain):
            model(ids_of(2, max(lengths), 1), cache=one, num_tokens=lengths)
    steps = Steps(cache, tokens)
    model(ids_of(2, tokens, 2), cache=cache)
    steps.forget_last()
    for turn in range(2):
        ids = ids_of(2, tokens, 3 + turn)
        assert_parity(model(ids, cache=cache), model(ids, cache=plain), turn)
        assert cache[0].lengths == plain[0].lengths
        assert steps.length_B.tolist() == list(plain[1].lengths)
        for branch in ("cmp", "sel", "win"):
            got = cache[0].keys_read[branch]
            assert torch.equal(got, plain[0].keys_read[branch].expand_as(got)), branch
    steps.end()
    ids = ids_of(2, 7, 9)
    assert_parity(model(ids, cache=cache), model(ids, cache=plain), "an ordinary chunk afterwards")
    assert_parity(
        model(ids[:, :1], cache=cache), model(ids[:, :1], cache=plain), "a token afterwards"
    )


def dense_of() -> DenseLM:
    torch.manual_seed(1)
    return DenseLM(ModelConfig.from_mapping({"preset": "tiny"}))


@pytest.mark.parametrize(
    ("made", "engaged"),
    [
        (model_of, {"cmp.sdpa": 2, "sel.masked": 2, "sel.sdpa": 2, "win.sdpa": 2}),
        (dense_of, {"dense.sdpa": 2}),
    ],
    ids=["nsa", "dense"],
)
@torch.no_grad()
def test_a_graph_takes_prompts_chunk_by_chunk(
    graphs: list[str], made: Callable[[], Any], engaged: dict[str, int]
) -> None:
    model = made().double()
    cache = model.new_cache(2, ROOM)
    graph = ChunkGraph(model, cache, 24)
    assert graph.engaged == engaged
    for prompt in (ids_of(2, 72, 1), ids_of(2, 48, 2)):  # the second over what the first left
        whole = model(prompt)
        for begin in range(0, prompt.shape[1], 24):
            part = slice(begin, begin + 24)
            assert_parity(graph(prompt[:, part]), whole[:, part], begin)
        assert cache[0].lengths == (prompt.shape[1],) * 2
        graph.forget_all()
        assert cache[0].lengths == (0, 0)
    assert graphs == ["warm", "capture"] + ["replay"] * 5
    graph(prompt[:, :24])
    graph.close()
    decode = DecodeGraph(model, cache)
    for token in range(24, 28):
        assert_parity(decode(prompt[:, token : token + 1]), whole[:, token], token)


@torch.no_grad()
def test_what_chunks_refuse(graphs: list[str]) -> None:
    model = model_of()
    cache = model.new_cache(1, 40)
    for wrong in (0, True, 2.0):
        with pytest.raises(ValueError, match=r"got tokens=.* wanted a whole number of at least 1"):
            ChunkGraph(model, cache, wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got a NSACache for Steps; wanted a list of caches"):
        Steps(cache[0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got 41 tokens a step for caches of max_len=40"):
        ChunkGraph(model, cache, 41)
    assert all(c.steps is None for c in cache), "a cache that was refused is an ordinary one"
    graph = ChunkGraph(model, cache, 24)
    with pytest.raises(ValueError, match=r"wanted torch.int64 \(1, 24\) on cpu: a whole chunk"):
        graph(ids_of(1, 23, 1))
    with pytest.raises(ValueError, match="a chunk of 1 tokens for a cache that steps; wanted 24"):
        model(ids_of(1, 1, 1), cache=cache)
    graph(ids_of(1, 24, 1))
    with pytest.raises(ValueError, match="a row would hold 48 tokens; wanted at most max_len=40"):
        graph(ids_of(1, 24, 1))
    graph.close()
    with pytest.raises(ValueError, match="closed ChunkGraph"):
        graph(ids_of(1, 24, 1))
    later = ChunkGraph(model, cache, 8)
    with pytest.raises(ValueError, match=r"rows that began with \[24\] tokens"):
        later.forget_all()
    dense = DenseLM(ModelConfig.from_mapping({"preset": "tiny"}), "dense_flash")
    own = dense.new_cache(1, 40)
    with pytest.raises(
        RouteError, match="FA-2 of PyTorch takes no positions that are on the device"
    ):
        ChunkGraph(dense, own, 8)
    assert all(c.steps is None and c.lengths == (0,) for c in own)
