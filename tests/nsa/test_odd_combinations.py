"""Inputs of users' own that meet two features at once: layers that differ under a compiler, ids and
endings of other types, caches that are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter

from nsa import ModelConfig, NSAAttention, NSAConfig, TinyLM
from nsa.ops.interval import sliding
from tests.cases import randn

CFG = NSAConfig(cmp_block=8, cmp_stride=4, sel_block=16, num_selected=5, window=24)
MAPPING = {"l": 8, "d": 4, "l_sel": 16, "n_sel": 5, "w": 24}
LAYERS = ["nsa", {"branches": ["win"]}, {"rope": "none"}, "dense", {"qk_norm": True, "phi": "mlp"}]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def model_of(layers: list[Any] | None = None, **options: Any) -> TinyLM:
    torch.manual_seed(0)
    more = {} if layers is None else {"layers": layers, "num_layers": len(layers)}
    return TinyLM(ModelConfig.from_mapping({"preset": "tiny", "nsa": MAPPING, **more}), **options)


def layer_of(config: NSAConfig = CFG) -> NSAAttention:
    torch.manual_seed(0)
    return NSAAttention(32, 4, 2, 8, config=config)


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_a_layer_of_full_attention_is_compiled_once(packed: bool) -> None:
    """FAULTS "memory by configuration, not by need": its window is 2^30 tokens, which a compiled
    region made tiles of; one graph serves all lengths.
    """
    torch.manual_seed(0)
    layer = NSAAttention(32, 4, 2, 8, config=CFG.full_attention(), path="masked", fa2="off")
    graphs = CompileCounter()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=graphs)
    for tokens in (64, 45, 30, 90):
        options = {"cu_seqlens": torch.tensor([0, 20, tokens])} if packed else {}
        x = randn(1, tokens, 32, seed=tokens)
        torch.testing.assert_close(
            compiled(x, **options), layer(x, **options), atol=1e-5, rtol=1e-4
        )
    assert graphs.frame_count == 1


@pytest.mark.parametrize("window", [sliding.LONG_WINDOW + 1, 10**9])
def test_a_compiled_window_takes_what_its_tokens_take(window: int) -> None:
    """FAULTS "memory by configuration, not by need": tiles of 10^9 rows for 40 tokens."""
    layer, x = layer_of(replace(CFG, window=window, branches=("win",))), randn(1, 40, 32, seed=1)
    sizes: list[int] = []

    def look(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        values = [node.meta.get("val") for node in graph.graph.nodes]
        sizes.extend(value.numel() for value in values if isinstance(value, Tensor))
        return make_boxed_func(graph.forward)

    with torch.no_grad():
        y = torch.compile(layer, fullgraph=True, backend=aot_autograd(fw_compiler=look))(x)
    torch.testing.assert_close(y, layer(x), atol=1e-5, rtol=1e-4)
    assert sizes and max(sizes) <= 4 * 40 * 64, "heads, and T x T"


def test_a_model_whose_layers_differ_compiles() -> None:
    """A list of layers with full attention among them."""
    model, ids = model_of(LAYERS), torch.arange(64)[None]
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(ids), model(ids), atol=1e-5, rtol=1e-4)
