"""Inputs of users' own that meet two features at once: layers that differ under a compiler, ids and
endings of other types, caches that are copied.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter

from nsa import (
    ModelConfig,
    NSAAttention,
    NSAConfig,
    TinyLM,
    compress,
    select_blocks,
    selected_attention,
)
from nsa.decode import Steps, graph
from nsa.model import DenseLM
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


def test_a_compiled_step_of_full_attention_takes_what_its_cache_holds() -> None:
    """FAULTS "memory by configuration, not by need": 2^30 rows before the token, 137 GB."""
    model, ids = model_of(["nsa", "dense"]), torch.arange(60)[None]
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        want, cache = model(ids), model.new_cache(1, 64)
        model(ids[:, :50], cache=cache)
        steps = Steps(cache)
        for t in range(50, 52):
            y = compiled(ids[:, t : t + 1], cache=cache)
            torch.testing.assert_close(y, want[:, t : t + 1], atol=1e-5, rtol=1e-4)
        steps.end()


def test_a_model_whose_layers_differ_compiles() -> None:
    """A list of layers with full attention among them."""
    model, ids = model_of(LAYERS), torch.arange(64)[None]
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(ids), model(ids), atol=1e-5, rtol=1e-4)


def test_endings_and_numbers_of_other_libraries() -> None:
    """FAULTS "generation": ids as tensors and arrays, numpy's numbers, and None for no ending."""
    model, ids = model_of(), torch.tensor([[5, 6, 7]])
    free = model.generate(ids, max_new_tokens=6)
    ending = int(free[0, 4])
    want = model.generate(ids, max_new_tokens=6, eos_token_id=ending)
    assert not want.equal(free)
    for eos in (torch.tensor(ending), torch.tensor([ending, 999]), np.array([ending]), (ending,)):
        assert model.generate(ids, max_new_tokens=6, eos_token_id=eos).equal(want)  # type: ignore[arg-type]
    assert model.generate(ids, max_new_tokens=6, stop=None).equal(free)  # type: ignore[arg-type]
    assert model.generate(ids, max_new_tokens=6, stop=torch.tensor([[ending]])).equal(want)  # type: ignore[arg-type]
    assert model.generate(ids, max_new_tokens=6, temperature=np.float32(0)).equal(free)


@pytest.mark.parametrize(
    ("keyword", "words"),
    [("max_tokens", "did you mean 'max_new_tokens'"), ("do_sample", "valid names: .*temperature")],
)
def test_a_keyword_that_generate_lacks_names_the_nearest(keyword: str, words: str) -> None:
    """FAULTS "generation": it was a TypeError of another function, next_token()."""
    with pytest.raises(TypeError, match=f"generate.{keyword}=.*{words}"):
        model_of().generate(torch.tensor([[5]]), max_new_tokens=1, **{keyword: 3})


class Tupled(nn.Module):
    """Gives its bias apart, as some tensor-parallel projections do."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.base(x), None


@pytest.mark.parametrize(
    ("name", "replaced", "words"),
    [
        ("q_proj", Tupled, r"got tuple from q_proj; wanted a Tensor \[..., 32\], 4 heads of 8"),
        (
            "k_proj",
            lambda base: nn.Linear(32, 16),
            r"got \[..., 16\] from k_proj; .* 48\], 6",
        ),
        (
            "v_proj",
            lambda base: nn.Linear(32, 96),
            r"got \[..., 96\] from v_proj; .* 48\], 6",
        ),
    ],
)
def test_a_replaced_projection_of_another_shape_is_named(
    name: str, replaced: Callable[[nn.Module], nn.Module], words: str
) -> None:
    """FAULTS "code reads `proj.weight` of a projection that was replaced": its output is looked at
    instead; "not enough values to unpack" was all that was said.
    """
    layer = layer_of()
    setattr(layer, name, replaced(getattr(layer, name)))
    with pytest.raises(ValueError, match=words):
        layer(randn(1, 40, 32, seed=1))


@pytest.mark.parametrize("options", [{}, {"num_tokens": [40, 9]}, {"cu_seqlens": [0, 9, 40]}])
def test_a_layout_made_under_inference_mode_serves_training(options: dict[str, Any]) -> None:
    """FAULTS "a cache made under inference_mode": torch's "Inference tensors cannot be saved"."""
    layer, x = layer_of(), randn(1 if "cu_seqlens" in options else 2, 40, 32, seed=1)
    with torch.inference_mode():
        layout = layer.layout(x, dtype=x.dtype, **options)
    with torch.no_grad():
        want = layer(x, **options)
    x.requires_grad_()
    y = layer(x, layout=layout, **options)
    y.sum().backward()
    assert torch.equal(y, want) and x.grad is not None and x.grad.any()


def test_blocks_chosen_under_inference_mode_serve_training() -> None:
    """FAULTS "a cache made under inference_mode": blocks, and a cache that is copied and grows."""
    q, k = (randn(1, 90, n, 8, seed=n) for n in (4, 2))
    with torch.inference_mode():
        blocks = select_blocks(q, compress(k, config=CFG), config=CFG)
    q.requires_grad_()
    selected_attention(q, k, k, blocks, sel_block=16).sum().backward()
    assert q.grad is not None and q.grad.any()


def test_a_copy_of_a_cache_made_under_inference_mode_continues() -> None:
    """FAULTS "a cache made under inference_mode": its copy belongs to no mode, either."""
    model, ids = model_of(LAYERS), torch.arange(60)[None]
    with torch.inference_mode():
        cache = model.new_cache(1, 60, initial_len=8)
        model(ids[:, :20], cache=cache)
    with torch.no_grad():
        want = model(ids)[:, 20:]
        for one in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)), cache):
            torch.testing.assert_close(model(ids[:, 20:], cache=one), want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps], ids=["deepcopy", "pickle"])
def test_a_copy_of_caches_that_step_is_refused(copied: Callable[[object], object]) -> None:
    """Its lengths are counted for the originals: a copy's second step was refused as another
    layer's fault.
    """
    model, ids = model_of(), torch.arange(40)[None]
    with torch.no_grad():
        cache = model.new_cache(1, 40)
        model(ids[:, :30], cache=cache)
        steps = Steps(cache)
        with pytest.raises(TypeError, match="caches that step; wanted ordinary ones.*Next: end"):
            copied(cache)
        steps.end()
        copied(cache)


def test_a_mixed_model_made_on_meta_is_initialised() -> None:
    """FAULTS "meta device": layers of other configs; and filled by load_state_dict(assign=True)."""
    want, ids = model_of(LAYERS), torch.arange(60)[None]
    with torch.device("meta"):
        made, given = model_of(LAYERS), model_of(LAYERS)
    made.to_empty(device="cpu")
    tensors = [*made.named_parameters(), *made.named_buffers()]
    with torch.no_grad():
        for _, tensor in tensors:
            tensor.fill_(float("nan") if tensor.is_floating_point() else 1)
    torch.manual_seed(0)
    for module in made.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    given.load_state_dict(want.state_dict(), assign=True)
    for model in (made, given):
        assert torch.equal(model(ids), want(ids))


def test_a_mixed_model_on_meta_gives_shapes() -> None:
    """FAULTS "meta device": of layers that differ and the dense twin, with padding and a cache."""
    with torch.device("meta"):
        model, twin = model_of(LAYERS), DenseLM(ModelConfig.from_mapping({"preset": "tiny"}))
        ids, mask = torch.zeros(2, 60, dtype=torch.int64), torch.ones(2, 60, dtype=torch.bool)
    for logits in (model(ids), twin(ids), model(ids, attention_mask=mask)):
        assert logits.shape == (2, 60, 256) and logits.is_meta
        logits.sum().backward()
    with torch.no_grad():
        cache = model.new_cache(2, 61)
        assert [model(ids, cache=cache).shape, model(ids[:, :1], cache=cache).shape] == [
            (2, 60, 256),
            (2, 1, 256),
        ]


def test_adapters_under_autocast_with_padding_and_a_cache() -> None:
    """FAULTS "empty and unusual batches": int32 ids, left padding and adapters at once, in layers
    that differ; each row continues as its tokens alone do.
    """
    model = model_of(LAYERS)
    for block in model.blocks:
        attention = block.attention
        attention.q_proj = nn.Sequential(attention.q_proj, nn.Identity())  # type: ignore[union-attr]
    ids = torch.arange(2 * 50, dtype=torch.int32).view(2, 50)
    mask = torch.arange(50) >= torch.tensor([[0], [13]])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        cache = model.new_cache(2, 52)
        whole = model(ids, attention_mask=mask)
        assert whole.dtype == torch.bfloat16
        cached = [model(ids, attention_mask=mask, cache=cache), model(ids[:, :2], cache=cache)]
        alone = model(torch.cat([ids[1:, 13:], ids[1:, :2]], 1))
    assert cache[0].lengths == (52, 39)
    torch.testing.assert_close(cached[0], whole, atol=0.05, rtol=0)
    torch.testing.assert_close(cached[1][1], alone[0, -2:], atol=0.05, rtol=0)


@pytest.mark.parametrize("options", [{}, {"num_tokens": []}, {"attention_mask": True}])
def test_an_empty_batch_of_a_mixed_model(options: dict[str, Any]) -> None:
    """FAULTS "empty and unusual batches": of every kind of layer, with lengths and with a mask."""
    model, ids = model_of(LAYERS), torch.zeros(0, 9, dtype=torch.int32)
    if "attention_mask" in options:
        options = {"attention_mask": torch.zeros(0, 9, dtype=torch.bool)}
    logits = model(ids, **options)
    logits.sum().backward()
    assert logits.shape == (0, 9, 256)
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_mixed_model_is_copied_and_its_state_fits_no_other(copied: Callable[[Any], Any]) -> None:
    """FAULTS "models that are saved": its copy is the same; another list of layers is refused."""
    model, ids = model_of(LAYERS), torch.arange(60)[None]
    logits = model(ids)
    logits.sum().backward()  # a graph was made
    assert torch.equal(copied(model)(ids), logits)
    with pytest.raises(RuntimeError, match=r"Missing key.*blocks.3.attention.gate.proj.weight"):
        model_of(["nsa"] * 5).load_state_dict(model.state_dict())


def test_a_decode_graph_is_captured_on_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """FAULTS "another device than the current one": warm-up and capture, too."""
    current = [0]
    seen: list[tuple[str, int]] = []

    @contextmanager
    def device(where: torch.device) -> Iterator[None]:
        current.append(where.index)
        yield
        current.pop()

    def noted(name: str) -> Callable[..., Any]:
        def call(*arguments: object, **options: object) -> Any:
            seen.append((name, current[-1]))
            return MagicMock()

        return call

    monkeypatch.setattr(torch.cuda, "device", device)
    for name in ("Stream", "current_stream", "stream", "CUDAGraph", "graph"):
        monkeypatch.setattr(torch.cuda, name, noted(name))
    for run in (graph.warm_up, graph.capture):
        run(noted("step"), torch.device("cuda:1"))
    assert {where for _, where in seen} == {1} and current == [0]
    assert {name for name, _ in seen} >= {"Stream", "CUDAGraph", "graph", "step"}
