"""torch.compile and numbers that change: one graph for steps of a cache, for scales, for
lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from nsa import NSAAttention, TinyLM, nsa_attention
from nsa.config import preset
from nsa.decode import Steps
from tests.cases import SMALL, assert_parity, randn

TINY = preset("tiny")
PATHS = ("masked", "v2")


@pytest.fixture(autouse=True)
def forget() -> None:
    torch._dynamo.reset()


class Counted:
    """``function`` compiled; ``graphs`` that Dynamo made of it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.graphs: list[fx.GraphModule] = []
        self.call = torch.compile(function, backend=self._backend, fullgraph=True)

    def _backend(self, graph: fx.GraphModule, inputs: list[Tensor]) -> fx.GraphModule:
        self.graphs.append(graph)
        return graph


def layer_of(path: str = "masked", **options: Any) -> NSAAttention:
    torch.manual_seed(0)
    return NSAAttention(32, 4, 2, 16, config=replace(SMALL, **options), path=path, fa2="off")


def steps_of(module: nn.Module, x: Tensor, caches: list[Any], first: int) -> tuple[Tensor, Counted]:
    """The results of one compiled step a token from ``first`` on, of caches that hold the rest."""
    one = caches[0] if isinstance(module, NSAAttention) else caches
    with torch.no_grad():
        module(x[:, :first], cache=one)
        steps, counted = Steps(caches), Counted(module)
        parts = [counted.call(x[:, t : t + 1], cache=one) for t in range(first, x.shape[1])]
    assert caches[0].lengths == (x.shape[1],) * x.shape[0]
    steps.end()
    assert caches[0].lengths == (x.shape[1],) * x.shape[0]
    return torch.cat(parts, 1), counted


@pytest.mark.parametrize(
    ("path", "options"), [("masked", {"phi": "linear"}), ("v2", {"window": 7})], ids=str
)
def test_a_compiled_step_of_a_cache_is_one_graph(path: str, options: dict[str, Any]) -> None:
    """FAULTS.md, compiled decode and changing arguments: 9 graphs in 13 calls. Blocks are completed
    and the window's ring goes round within these.
    """
    layer, x = layer_of(path, **options), randn(2, 115, 32, seed=1)
    got, counted = steps_of(layer, x, [layer.new_cache(2, 120)], 89)
    assert_parity(got, layer(x)[:, 89:], path)
    assert len(counted.graphs) == 1


def test_a_compiled_step_of_a_model_is_one_graph() -> None:
    torch.manual_seed(0)
    model = TinyLM(TINY, path="masked", fa2="off")
    ids = torch.randint(256, (2, 100))
    got, counted = steps_of(model, ids, model.new_cache(2, 100), 90)
    assert_parity(got, model(ids)[:, 90:], "model")
    assert len(counted.graphs) == 1


def test_layers_that_stepped_apart_are_refused() -> None:
    """Only a compiled step cannot compare the lengths of its caches."""
    torch.manual_seed(0)
    model = TinyLM(TINY, path="masked", fa2="off")
    ids, caches = torch.randint(256, (1, 20)), model.new_cache(1, 24)
    with torch.no_grad():
        model(ids, cache=caches)
        Steps(caches)
        second: Any = model.blocks[1]
        second.attention(randn(1, 1, TINY.dim, seed=1), cache=caches[1])
        with pytest.raises(ValueError, match=r"caches that hold \[\(20,\), \(21,\)\] tokens"):
            model(ids[:, :1], cache=caches)


def test_compiled_and_ordinary_steps_count_together() -> None:
    layer, x = layer_of(), randn(1, 40, 32, seed=2)
    with torch.no_grad():
        cache = layer.new_cache(1, 40)
        layer(x[:, :20], cache=cache)
        steps, counted = Steps([cache]), Counted(layer)
        for t in range(20, 40):
            got = (counted.call if t % 3 else layer)(x[:, t : t + 1], cache=cache)
            assert_parity(got, layer(x)[:, t : t + 1], f"{t}")
            if t % 5 == 0:  # the token again: the step before it is forgotten
                steps.forget_last()
                assert cache.lengths == (t,)
                again = (layer if t % 3 else counted.call)(x[:, t : t + 1], cache=cache)
                assert_parity(again, got.double(), "again")
            assert cache.lengths == (t + 1,)
        with pytest.raises(ValueError, match="a row would hold 41 tokens"):
            layer(x[:, :1], cache=cache)
        with pytest.raises(RuntimeError, match="a row that holds max_len=40; wanted room"):
            counted.call(x[:, :1], cache=cache)
        assert cache.lengths == (40,)


@pytest.mark.parametrize("path", PATHS)
def test_scales_share_a_graph(path: str) -> None:
    """FAULTS.md, the same row: five values of scale were 5 graphs. Dynamo takes the first as a
    constant, and the others as a number that changes.
    """
    q, gates = randn(1, 100, 4, 16, seed=1), torch.rand(1, 100, 4, 3)
    pairs = [(randn(1, 100, 2, 16, seed=s), randn(1, 100, 2, 16, seed=s + 1)) for s in (2, 4, 6)]

    def attend(scale: float) -> Tensor:
        options: dict[str, Any] = {"config": SMALL, "path": path, "fa2": "off"}
        return nsa_attention(q, *pairs, gates, scale=scale, **options)

    counted = Counted(attend)
    for scale in (0.1, 0.2, 0.25, 1.0, 0.033, -0.5):
        assert_parity(counted.call(scale), attend(scale).double(), f"scale {scale}")
    assert len(counted.graphs) == 2


@pytest.mark.parametrize(("path", "options"), [("masked", {"phi": "mlp"}), ("v2", {})], ids=str)
def test_short_lengths_share_a_graph(path: str, options: dict[str, Any]) -> None:
    """FAULTS.md, the same row: S = 16, 9, 7, 1 each another. The first is a constant, and a length
    of 1 is Dynamo's own graph.
    """
    layer = layer_of(path, **options)
    counted = Counted(layer)
    for length in (16, 9, 7, 33, 2, 8, 100, 1):
        x = randn(2, length, 32, seed=length)
        assert_parity(counted.call(x), layer(x).double(), f"{length} tokens")
    assert len(counted.graphs) == 3
