"""NSA in somebody's model: projections that were replaced, models made on meta, unusual batches."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nsa import (
    ModelConfig,
    NSAAttention,
    NSAConfig,
    TinyLM,
    compress,
    compressed_attention,
    nsa_attention,
    select_blocks,
    selected_attention,
    sliding_attention,
)
from nsa.config import BRANCHES, PHI_KINDS
from tests.cases import randn

CFG = NSAConfig(cmp_block=8, cmp_stride=4, sel_block=16, num_selected=5, window=24)
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


def layer_of(config: NSAConfig = CFG, **options: str) -> NSAAttention:
    torch.manual_seed(0)
    return NSAAttention(32, 4, 2, 8, config=config, **options)


def model_of(**options: object) -> TinyLM:
    torch.manual_seed(0)
    return TinyLM(ModelConfig.from_mapping({"preset": "tiny", **options}))


class Adapter(nn.Module):
    """A projection with a low-rank addition, which has no weight of its own."""

    def __init__(self, base: nn.Module, features: tuple[int, int]) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(features[0], 2, bias=False)
        self.up = nn.Linear(2, features[1], bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Bytes(nn.Module):
    """A projection whose weight is kept as uint8, as quantized ones are."""

    weight: Tensor
    scale: Tensor

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        scale = base.weight.detach().abs().amax() / 127
        self.register_buffer("weight", (base.weight.detach() / scale).round().add(128).byte())
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, (self.weight.to(x.dtype) - 128) * self.scale.to(x.dtype))


class Packed(nn.Linear):
    """A Linear whose weight is flat bytes, so that its shape and dtype say nothing of x."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features, bias=False)
        kept = base.weight.detach().reshape(-1, 1)
        self.weight = nn.Parameter(kept.view(torch.uint8).clone(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.weight.view(torch.float32).view(self.out_features, self.in_features)
        return nn.functional.linear(x, wide.to(x.dtype))


def adapted(base: nn.Linear) -> nn.Module:
    return Adapter(base, (base.in_features, base.out_features))


def offloaded(base: nn.Linear) -> nn.Module:
    """Weights on meta, loaded in a forward of the user's own."""
    kept = base.weight.detach().clone()
    base.weight = nn.Parameter(kept.to("meta"))
    base.forward = lambda x: nn.functional.linear(x, kept)  # type: ignore[method-assign]
    return base


REPLACEMENTS = {
    "adapter": (adapted, 0.0),
    "uint8": (Bytes, 0.2),
    "flat bytes": (Packed, 0.0),
    "offloaded": (offloaded, 0.0),
}


@pytest.mark.parametrize("kind", REPLACEMENTS)
def test_a_replaced_projection_runs(kind: str) -> None:
    """FAULTS "code reads `proj.weight` of a projection that was replaced": forward, cache and
    reserve.
    """
    replaced, tolerance = REPLACEMENTS[kind]
    layer, x = layer_of(), randn(2, 90, 32, seed=1)
    want = layer(x).detach()
    for name in PROJECTIONS:
        setattr(layer, name, replaced(getattr(layer, name)))
    with torch.no_grad():
        torch.testing.assert_close(layer(x), want, atol=tolerance, rtol=1e-5)
        cache = layer.new_cache(2, 90)
        steps = [layer(x[:, :89], cache=cache), layer(x[:, 89:], cache=cache)]
    torch.testing.assert_close(torch.cat(steps, 1), want, atol=max(tolerance, 1e-5), rtol=1e-4)
    layer.path = "v2"
    assert layer.reserve(2, 90) > 0


def quantized(module: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces that this moves to another package
        done: nn.Module = torch.ao.quantization.quantize_dynamic(module, {nn.Linear})
    return done


def test_quantize_dynamic_of_a_layer_and_of_a_model() -> None:
    """FAULTS "code reads `proj.weight` of a projection that was replaced": `quantize_dynamic`."""
    x = randn(1, 70, 32, seed=1)
    layer = layer_of()
    torch.testing.assert_close(quantized(layer)(x), layer(x).detach(), atol=0.1, rtol=0)
    model = model_of()
    ids = torch.arange(70)[None] % 256
    assert quantized(model)(ids).isfinite().all()
    assert quantized(model).generate(ids, max_new_tokens=3).shape == (1, 73)


def test_a_replaced_embedding_runs() -> None:
    """Another instance: the model asks the embedding's weight for no more than the layer does."""
    model = model_of()
    ids = torch.arange(40)[None]
    want = model(ids).detach()
    model.embedding = nn.Sequential(model.embedding, nn.Identity())  # type: ignore[assignment]
    torch.testing.assert_close(model(ids), want)
    with pytest.raises(ValueError, match=r"ids holds 0 .. 256; wanted 0 .. 255"):
        model(torch.tensor([[0, 256]]))


@pytest.mark.parametrize(
    ("x", "want"),
    [
        (torch.zeros(1, 9, 31), r"wanted \[B, tokens, 32\]"),
        (torch.zeros(1, 9, 32, dtype=torch.int64), r"wanted a floating dtype"),
    ],
    ids=["width", "dtype"],
)
def test_what_does_not_fit_is_refused_with_replaced_projections_too(x: Tensor, want: str) -> None:
    """Only x and the sizes that the layer keeps are looked at, and these are."""
    layer = layer_of()
    layer.q_proj = adapted(layer.q_proj)  # type: ignore[assignment]
    with pytest.raises(ValueError, match=want):
        layer(x)


META_OPTIONS = (
    {"gate": "softmax"},
    {"gate": "softmax", "branches": ("sel", "win"), "phi": "linear"},
    {"gate": "softmax", "branches": ("win",), "gate_temperature": 2.0},
    {"gate": "sigmoid", "phi": "mlp", "phi_hidden": 24},
)


@pytest.mark.parametrize("options", META_OPTIONS, ids=lambda x: "-".join(map(str, x.values())))
def test_a_model_made_on_meta_is_initialised_as_one_made_plainly(options: dict[str, Any]) -> None:
    """FAULTS "meta device": to_empty and every reset_parameters, by torchtitan's loop; buffers
    that are not stored included.
    """
    nsa = {"l": 8, "d": 4, "l_sel": 16, "n_sel": 5, "w": 24, **options}
    want = model_of(nsa=nsa)
    with torch.device("meta"):
        model = model_of(nsa=nsa)
    model.to_empty(device="cpu")
    tensors = [*model.named_parameters(), *model.named_buffers()]
    with torch.no_grad():
        for _, tensor in tensors:  # what memory may hold
            tensor.fill_(float("nan") if tensor.is_floating_point() else 1)
    torch.manual_seed(0)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    expected = dict([*want.named_parameters(), *want.named_buffers()])
    assert [name for name, x in tensors if not torch.equal(x, expected[name])] == []
    assert len(tensors) == len(expected)
    ids = torch.arange(60)[None]
    assert torch.equal(model(ids), want(ids))


@pytest.mark.parametrize("path", ["auto", "v2", "masked"])
@pytest.mark.parametrize("phi", PHI_KINDS)
def test_a_forward_on_meta_gives_shapes(path: str, phi: str) -> None:
    """FAULTS "meta device": plain, packed, cached and backward, where blocks compete."""
    with torch.device("meta"):
        layer = layer_of(replace(CFG, phi=phi), path=path)
        x = torch.empty(1, 200, 32, requires_grad=True)
        cu_seqlens = torch.empty(3, dtype=torch.int64)
        bf16 = layer_of(replace(CFG, phi=phi, gate="softmax"), path=path).bfloat16()
    layer(x).sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape
    assert layer(x, cu_seqlens=cu_seqlens).shape == x.shape
    assert bf16(x.bfloat16()).dtype == torch.bfloat16
    with torch.no_grad():
        cache = layer.new_cache(1, 300)
        assert layer(x, cache=cache).shape == x.shape
        assert layer(x[:, :1], cache=cache).device.type == "meta"
    assert cache.lengths == (201,)


def test_functions_on_meta_give_shapes() -> None:
    """Another instance: the functions, each branch's own and the log-sum-exp included."""
    q, k = torch.empty(2, 150, 4, 8, device="meta"), torch.empty(2, 150, 2, 8, device="meta")
    k_cmp = compress(k, config=CFG)
    o, lse = compressed_attention(q, k_cmp, k_cmp, block=8, stride=4)
    blocks = select_blocks(q, k_cmp, config=CFG)
    assert (o.shape, lse.shape, blocks.shape) == (q.shape, q.shape[:3], (2, 150, 2, 5))
    assert selected_attention(q, k, k, blocks, sel_block=16).shape == q.shape
    assert sliding_attention(q, k, k, window=24).shape == q.shape
    gates = torch.empty(2, 150, 4, len(BRANCHES), device="meta")
    assert nsa_attention(q, (k, k), (k, k), (k, k), gates, config=CFG).shape == q.shape


NEARLY_VALID: dict[str, tuple[dict[str, Any], str]] = {
    "temperature nan": ({"temperature": float("nan")}, "temperature=nan; wanted a finite number"),
    "temperature inf": ({"temperature": float("inf")}, "temperature=inf; wanted a finite number"),
    "temperature text": ({"temperature": "0.5"}, "temperature='0.5'; wanted a finite number"),
    "top_p": ({"top_p": float("nan")}, "top_p=nan; wanted a number above 0, at most 1"),
    "top_p true": ({"top_p": True}, "top_p=True; wanted a number"),
    "new tokens": ({"max_new_tokens": 1.5}, "max_new_tokens=.1.5.; wanted whole numbers"),
    "lengths": ({"prompt_lengths": [2.7]}, r"prompt_lengths=\[2.7\]; wanted whole numbers"),
}


@pytest.mark.parametrize("kind", NEARLY_VALID)
def test_arguments_of_generate_that_are_nearly_valid_are_refused(kind: str) -> None:
    """FAULTS "values that are nearly valid": temperature=nan passed, a length of 2.7 was 2."""
    options, words = NEARLY_VALID[kind]
    with pytest.raises(ValueError, match=words):
        model_of().generate(
            torch.zeros(1, 4, dtype=torch.int64), **{"max_new_tokens": 2, **options}
        )


def test_whole_numbers_of_any_kind_are_counts() -> None:
    layer, x = layer_of(), randn(2, 3, 32, seed=1)
    with torch.no_grad():
        cache = layer.new_cache(2, 9)
        layer(x, cache=cache, num_tokens=torch.tensor([3, 1]))  # type: ignore[arg-type]
        assert cache.lengths == (3, 1)
        with pytest.raises(ValueError, match=r"num_tokens=\[1.9, 3\]; wanted whole numbers"):
            layer(x, cache=cache, num_tokens=[1.9, 3])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("config", "max_len"), [(CFG, 10**13), (replace(CFG, window=10**9), 10**13), (CFG, 10**30)]
)
def test_a_cache_beyond_memory_says_its_bytes(config: NSAConfig, max_len: int) -> None:
    """FAULTS "window 10**9 in `new_cache`": the allocator's error said nothing of the cause."""
    with pytest.raises(RuntimeError, match="got no memory on cpu for a cache of") as caught:
        layer_of(config).new_cache(1, max_len)
    token = 2 * 2 * 8 * 4
    found = int(str(caught.value).split("cache of ")[1].split(" bytes")[0].replace(",", ""))
    assert found >= max_len * token  # and the blocks that are compressed
    assert found < 2 * max_len * token
    assert f"{token} a token, 1 x {max_len:,} tokens, window {config.window:,}" in str(caught.value)
