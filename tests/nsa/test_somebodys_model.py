"""NSA in somebody's model: projections that were replaced, models made on meta, unusual batches."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

from nsa import ModelConfig, NSAAttention, NSAConfig, TinyLM
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
    replace, tolerance = REPLACEMENTS[kind]
    layer, x = layer_of(), randn(2, 90, 32, seed=1)
    want = layer(x).detach()
    for name in PROJECTIONS:
        setattr(layer, name, replace(getattr(layer, name)))
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
