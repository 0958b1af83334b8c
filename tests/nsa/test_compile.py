"""torch.compile(fullgraph=True) with a dynamic length: one graph for many lengths, and the same numbers as eager."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from nsa import engagement
from nsa.attention import NSAAttention
from nsa.config import preset
from nsa.dense import DenseAttention
from tests.cases import randn

TINY = preset("tiny")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", ["masked", "dense"])
def test_one_graph_serves_every_length(kind: str) -> None:
    """Lengths that are no multiple of the selection block: those that are one are a second graph of `masked`."""
    torch.manual_seed(0)
    heads = (TINY.dim, TINY.num_heads, TINY.num_kv_heads, TINY.head_dim, None, TINY.nsa)
    layer = DenseAttention(TINY) if kind == "dense" else NSAAttention(*heads, path=kind, fa2="off")
    counter = CompileCounter()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    for tokens in (200, 201, 333, 111):
        x = randn(2, tokens, TINY.dim, seed=tokens).requires_grad_()
        (got,) = torch.autograd.grad(compiled(x).square().sum(), x)
        (want,) = torch.autograd.grad(layer(x).square().sum(), x)
        assert torch.equal(compiled(x), layer(x)) and torch.equal(got, want)
    assert counter.frame_count == 1


def test_nothing_is_counted_inside_a_compiled_region() -> None:
    layer = NSAAttention(TINY.dim, TINY.num_heads, TINY.num_kv_heads, TINY.head_dim, None, TINY.nsa, path="masked", fa2="off")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="eager")
    with engagement.collect() as seen, torch.no_grad():
        compiled(randn(1, 100, TINY.dim, seed=0))
        assert seen.counts == {}
        layer(randn(1, 100, TINY.dim, seed=0))
        assert seen.counts["sel.masked"] == 1
