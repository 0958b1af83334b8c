"""NSA in somebody's model: projections that were replaced, models made on meta, unusual batches."""

from __future__ import annotations

import itertools
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
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
from nsa.config import BRANCHES, PHI_KINDS, preset
from nsa.decode import Steps
from nsa.model import DenseLM, next_token_labels
from nsa.ops import operator
from nsa.sampling import next_token
from tests.cases import randn

CFG = NSAConfig(cmp_block=8, cmp_stride=4, sel_block=16, num_selected=5, window=24)
CFG_MAPPING = {"l": 8, "d": 4, "l_sel": 16, "n_sel": 5, "w": 24}
HERE = ("reference", "v1", "v2", "masked")  # what needs no GPU
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
    nsa = CFG_MAPPING | options
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
    with pytest.raises(
        torch.OutOfMemoryError, match="got no memory on cpu for a cache of"
    ) as caught:
        layer_of(config).new_cache(1, max_len)
    token = 2 * 2 * 8 * 4
    found = int(str(caught.value).split("cache of ")[1].split(" bytes")[0].replace(",", ""))
    assert found >= max_len * token  # and the blocks that are compressed
    assert found < 2 * max_len * token
    assert f"{token} a token, 1 x {max_len:,} tokens, window {config.window:,}" in str(caught.value)


@pytest.mark.parametrize("path", ["auto", *HERE, "triton"])
def test_an_empty_batch_gives_an_empty_batch(path: str) -> None:
    """FAULTS "empty and unusual batches": batch 0, forward and backward, of a layer on every path;
    gradients are 0, so that DDP's reducer sees every parameter.
    """
    for options in ({}, {"phi": "mlp", "gate": "softmax"}):
        layer = layer_of(replace(CFG, **options), path=path)
        x = torch.zeros(0, 50, 32, requires_grad=True)
        y = layer(x)
        y.sum().backward()
        assert y.shape == (0, 50, 32) and x.grad is not None and x.grad.shape == x.shape
        for name, parameter in layer.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.count_nonzero() == 0, name


def test_an_empty_batch_of_functions_and_models() -> None:
    """FAULTS "empty and unusual batches": batch 0 of every function, of both models, generate."""
    q, k = (torch.zeros(0, 50, n, 8, requires_grad=True) for n in (4, 2))
    start = torch.zeros(0, dtype=torch.int64)
    k_cmp = compress(k, config=CFG)
    blocks = select_blocks(q, k_cmp, config=CFG, q_start=start, kv_len=50)
    o, lse = compressed_attention(q, k_cmp, k_cmp, block=8, stride=4)
    outputs = [
        o,
        selected_attention(q, k, k, blocks, sel_block=16, path="v2"),
        sliding_attention(q, k, k, window=24),
        nsa_attention(q, (k, k), (k, k), (k, k), torch.zeros(0, 50, 4, 3), config=CFG),
    ]
    assert lse.shape == (0, 50, 4) and blocks.shape == (0, 50, 2, 5)
    for output in outputs:
        assert output.shape == q.shape
        q.grad = None
        output.sum().backward(retain_graph=True)
        assert q.grad is not None
    with pytest.raises(ValueError, match="nonsense"):
        selected_attention(q, k, k, blocks, sel_block=16, path="nonsense")
    ids = torch.zeros(0, 9, dtype=torch.int64)
    for model in (model_of(), DenseLM(preset("tiny"))):
        logits = model(ids)
        logits.sum().backward()
        assert logits.shape == (0, 9, 256)
        assert all(p.grad is not None for p in model.parameters())
    assert model_of().generate(ids, max_new_tokens=2).shape == (0, 11)


def test_ids_may_be_int32() -> None:
    """FAULTS "empty and unusual batches": int32 ids were refused."""
    model, ids = model_of(), torch.arange(30)[None]
    assert torch.equal(model(ids.int()), model(ids))
    out = model.generate(ids.int(), max_new_tokens=3)
    assert out.dtype == torch.int64 and torch.equal(out, model.generate(ids, max_new_tokens=3))
    assert next_token_labels(ids.int()).dtype == torch.int64


def test_cu_seqlens_may_be_a_list() -> None:
    """FAULTS "empty and unusual batches": a list of bounds is what a data loader has."""
    model, ids, bounds = model_of(), torch.arange(90)[None], [0, 31, 31, 80]
    as_tensor = torch.tensor(bounds)
    assert torch.equal(model(ids, cu_seqlens=bounds), model(ids, cu_seqlens=as_tensor))
    labels = (next_token_labels(ids, cu_seqlens=x) for x in (bounds, as_tensor))
    assert torch.equal(*labels)
    for wrong, words in (([0, 91], "wanted 0 first"), ([0, 4.5], "wanted whole numbers")):
        with pytest.raises(ValueError, match=words):
            model(ids, cu_seqlens=wrong)


MASKS = {
    "right": [[1] * 61 + [0] * 9, [1] * 70, [1] * 1 + [0] * 69],
    "left": [[0] * 9 + [1] * 61, [1] * 70, [0] * 69 + [1]],
    "between": [[0, 1, 1, 0] * 17 + [1, 1], [1] * 35 + [0] + [1] * 34, [0, 1] * 35],
}


@pytest.mark.parametrize("kind", MASKS)
def test_padding_is_as_if_it_were_not_there(kind: str) -> None:
    """FAULTS "empty and unusual batches": attention_mask; each row equals its tokens alone, what
    padding holds (an id of none, NaN) reaches nothing, and a cache continues each row.
    """
    mask = torch.tensor(MASKS[kind])
    model = model_of()
    ids = torch.arange(3 * 70).view(3, 70).masked_fill(mask == 0, -100)
    logits = model(ids, attention_mask=mask)
    assert not logits[mask == 0].any()
    x = randn(3, 70, 64, seed=2).masked_fill((mask == 0)[..., None], torch.nan).requires_grad_()
    y = model.blocks[0].attention(x, attention_mask=mask.bool())
    y.sum().backward()
    assert x.grad is not None and x.grad.isfinite().all() and not x.grad[mask == 0].any()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    with torch.no_grad():
        cache = model.new_cache(3, 75)
        cached = model(ids, cache=cache, attention_mask=mask)
        torch.testing.assert_close(cached, logits.detach(), atol=1e-5, rtol=1e-4)
        assert cache[0].lengths == tuple(mask.sum(1).tolist())
    generated = model.generate(ids, max_new_tokens=3, attention_mask=mask)
    for row in range(3):
        alone = ids[row, mask[row] == 1][None]
        want = model(alone)[0]
        torch.testing.assert_close(logits[row, mask[row] == 1], want, atol=1e-5, rtol=1e-4)
        out = model.generate(alone, max_new_tokens=3)[0]
        assert torch.equal(generated[row, : len(out)], out) and not generated[row, len(out) :].any()


def test_a_mask_that_is_no_padding_is_refused() -> None:
    """FAULTS "empty and unusual batches": refused only where it cannot be packed."""
    model, ids = model_of(), torch.arange(9)[None]
    for mask in (torch.ones(1, 1, 9, 9), torch.zeros(1, 9), torch.ones(1, 8).bool(), [[1] * 9]):
        with pytest.raises(ValueError, match=r"attention_mask is .*; wanted bool or 0 and 1"):
            model(ids, attention_mask=mask)
    ones = torch.ones(1, 9, dtype=torch.bool)
    with pytest.raises(ValueError, match="got attention_mask and cu_seqlens"):
        model(ids, attention_mask=ones, cu_seqlens=[0, 9])
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match="attention_mask of 1 rows holds no token"),
    ):
        model(ids, attention_mask=~ones, cache=model.new_cache(1, 9))
    adaptive = model_of(nsa={**CFG_MAPPING, "adaptive_num_selected": True})
    with pytest.raises(ValueError, match="adaptive_num_selected=True with num_tokens"):
        adaptive(ids, attention_mask=ones)


def test_num_tokens_without_a_cache() -> None:
    """Another instance: rows of different lengths, with their lengths known on the host."""
    layer, x = layer_of(), randn(2, 70, 32, seed=3)
    y = layer(x, num_tokens=[70, 33])
    torch.testing.assert_close(y[1, :33], layer(x[1:, :33])[0], atol=1e-5, rtol=1e-4)
    assert not y[1, 33:].any()
    assert torch.equal(y, layer(x, num_tokens=torch.tensor([70, 33])))
    for wrong in ([71, 3], [3], [-1, 3], torch.tensor([71, 3]), torch.tensor([1.0, 2.0])):
        with pytest.raises(ValueError, match="num_tokens.*wanted 2 whole numbers from 0 to 70"):
            layer(x, num_tokens=wrong)


@pytest.mark.parametrize("max_len", [13, 24, 60])
@pytest.mark.parametrize("window", [24, 10**9])
def test_the_ring_of_a_window_has_the_rows_that_are_needed(max_len: int, window: int) -> None:
    """FAULTS "memory by configuration, not by need": min(window, max_len) rows, and the numbers of
    one call, by chunks, ragged rows and steps up to max_len.
    """
    layer = layer_of(replace(CFG, window=window))
    x = randn(2, max_len, 32, seed=4)
    with torch.no_grad():
        want = layer(x)
        cache = layer.new_cache(2, max_len)
        assert cache.win[0].shape[1] == min(window, max_len)
        y = [layer(x[:, :5], cache=cache), layer(x[:, 5:11], cache=cache)]
        y.append(layer(x[:, 11:12], cache=cache))
        rest = [layer(x[:, t : t + 1], cache=cache) for t in range(12, max_len)]
        torch.testing.assert_close(torch.cat([*y, *rest], 1), want, atol=1e-5, rtol=1e-4)
        ragged = layer.new_cache(2, max_len, initial_len=2)
        lengths = [9, 4]
        layer(x[:, :9], cache=ragged, num_tokens=lengths)
        steps = Steps([ragged]) if max_len == 24 else None
        for _ in range(max_len - 9):
            token = torch.stack([x[b, n] for b, n in enumerate(lengths)])[:, None]
            y = layer(token, cache=ragged)
            for b, n in enumerate(lengths):
                torch.testing.assert_close(y[b, 0], want[b, n], atol=1e-5, rtol=1e-4)
            lengths = [n + 1 for n in lengths]
        if steps is not None:
            steps.end()
    assert ragged.lengths == (max_len, max_len - 5)


def test_a_cache_of_a_window_beyond_memory_takes_what_its_tokens_take() -> None:
    """FAULTS "window 10**9 in `new_cache`": bytes go by max_len."""
    small, wide = (layer_of(replace(CFG, window=w)).new_cache(1, 64) for w in (64, 10**9))
    assert small.memory_bytes() == wide.memory_bytes()


def test_a_cache_outlives_the_inference_mode_that_it_was_made_in() -> None:
    """FAULTS "a cache made under inference_mode": made, grown, stepped and ended there, then used
    under no_grad, and the other way round.
    """
    model, ids = model_of(), torch.arange(40)[None]
    with torch.no_grad():
        want = model(ids)
    modes = (torch.inference_mode, torch.no_grad)
    for first, second in (modes, modes[::-1]):
        with first():
            cache = model.new_cache(1, 40, initial_len=4)
            y = [model(ids[:, :8], cache=cache)]
        with second():
            y.append(model(ids[:, 8:20], cache=cache))
            steps = Steps(cache)
            y.append(model(ids[:, 20:21], cache=cache))
        with first():
            y.append(model(ids[:, 21:22], cache=cache))
            steps.end()
        with second():
            y.append(model(ids[:, 22:], cache=cache))
        torch.testing.assert_close(torch.cat(y, 1), want, atol=1e-5, rtol=1e-4)


SUBSETS = [c for n in (1, 2, 3) for c in itertools.combinations(BRANCHES, n)]


@pytest.mark.parametrize("branches", SUBSETS, ids="-".join)
@pytest.mark.parametrize("phi", PHI_KINDS)
def test_the_loss_reaches_every_parameter(branches: tuple[str, ...], phi: str) -> None:
    """FAULTS "parameters that no loss reaches": a gradient that is None ends DDP's second step;
    for any branches, before the first block is whole, too, and packed.
    """
    for gate, tokens, bounds in (("sigmoid", 3, None), ("softmax", 90, None), ("sigmoid", 90, 3)):
        layer = layer_of(replace(CFG, branches=branches, phi=phi, gate=gate))
        y = layer(
            randn(1, tokens, 32, seed=5), cu_seqlens=None if bounds is None else [0, bounds, tokens]
        )
        y.sum().backward()
        missing = [name for name, p in layer.named_parameters() if p.grad is None]
        assert missing == [], (gate, tokens, bounds)
        learned = [*layer.phi_k.parameters(), *layer.phi_v.parameters()]
        assert "cmp" in branches or not any(p.grad.any() for p in learned)


def test_a_parameter_that_is_not_finite_and_not_used_changes_nothing() -> None:
    layer, x = layer_of(replace(CFG, branches=("win",), phi="linear")), randn(1, 40, 32, seed=6)
    want = layer(x).detach()
    with torch.no_grad():
        layer.phi_v.weight.fill_(torch.nan)
    assert torch.equal(layer(x), want)


def test_data_parallel_training_of_branches_without_the_compressed_one(tmp_path: Path) -> None:
    """FAULTS "parameters that no loss reaches": the second step raised. One process has the same
    reducer, which asks for a gradient of every parameter.
    """
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1
    )
    try:
        layer = layer_of(replace(CFG, branches=("sel", "win"), phi="linear"))
        parallel = nn.parallel.DistributedDataParallel(layer)
        for step in range(3):
            parallel(randn(1, 90, 32, seed=step)).sum().backward()
    finally:
        torch.distributed.destroy_process_group()


def test_generation_ends_where_it_is_told_to() -> None:
    """FAULTS "generation": eos_token_id and stop; a row keeps what ended it, then zeros."""
    model, ids = model_of(), torch.tensor([[5, 6, 7], [80, 81, 82]])
    free = model.generate(ids, max_new_tokens=8)
    first, second = (row[3:].tolist() for row in free)
    for options in (
        {"eos_token_id": first[2]},
        {"eos_token_id": [first[2]]},
        {"stop": [first[1:3]]},
        {"stop": [[first[2]], [999]]},
    ):
        out = model.generate(ids, max_new_tokens=8, **options)
        pair = options.get("stop", [[]])[0] == first[1:3]
        cut = 3 if pair else first.index(first[2]) + 1
        assert out[0, 3 : 3 + cut].tolist() == first[:cut] and not out[0, 3 + cut :].any()
        assert out.shape == free.shape
    assert model.generate(ids, max_new_tokens=8, eos_token_id=999).equal(free)
    assert out[1, 3:].tolist() == second or first[2] in second
    for wrong in ({"stop": ["text"]}, {"stop": [[]]}, {"eos_token_id": [1.5]}, {"top_k": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}.*wanted"):
            model.generate(ids, max_new_tokens=2, **wrong)


def test_top_k_takes_of_the_most_likely_alone() -> None:
    """FAULTS "generation": top_k, ties by the lower index; with 1 it is greedy."""
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.9]]).expand(2000, -1)
    rng = torch.Generator().manual_seed(0)
    drawn = next_token(logits, temperature=1.0, top_k=3, generator=rng)
    assert set(drawn.tolist()) == {1, 3, 4}
    assert set(next_token(logits, temperature=1.0, top_k=1).tolist()) == {1}
    assert len(set(next_token(logits, temperature=9.0, top_k=99, generator=rng).tolist())) == 5


@pytest.mark.parametrize("temperature", [1e-30, 1e-38, 1e-320])
def test_a_small_temperature_is_greedy(temperature: float) -> None:
    """FAULTS "generation": temperature 1e-38 gave token 0."""
    logits = randn(64, 50, seed=7)
    for dtype in (torch.float32, torch.bfloat16):
        chosen = next_token(logits.to(dtype), temperature=temperature)[:, None]
        assert torch.equal(logits.to(dtype).gather(1, chosen)[:, 0], logits.to(dtype).amax(-1))


def test_a_cache_made_under_autocast_takes_its_dtype() -> None:
    """FAULTS "generation": generate under autocast had an fp32 cache for bf16 chunks."""
    model, ids = model_of(), torch.arange(20)[None]
    with torch.autocast("cpu", torch.bfloat16):
        assert model.generate(ids, max_new_tokens=3).shape == (1, 23)
        assert model.new_cache(1, 9)[0].sel[0].dtype == torch.bfloat16
        assert model.new_cache(1, 9, dtype=torch.float32)[0].sel[0].dtype == torch.float32
    assert model.new_cache(1, 9)[0].sel[0].dtype == torch.float32


def test_every_operator_runs_on_the_device_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """FAULTS "another device than the current one": Triton launches on the current device. Every
    operator is defined at one place, which enters a guard with its tensors' device.
    """
    entered: list[torch.device] = []

    def recorder(device: torch.device) -> AbstractContextManager[None]:
        entered.append(device)
        return nullcontext()

    monkeypatch.setattr(operator, "device_guard", recorder)
    layer_of(path="v2")(randn(1, 200, 32, seed=8)).sum().backward()
    assert entered == [torch.device("cpu")] * 2  # selected_v2 and its backward
    seen = []

    def run(options: list[Tensor], x: Tensor) -> int:
        seen.append(len(entered))
        return x.ndim

    meta = torch.empty(3, device="meta")
    assert operator._on_its_device(run)([], meta) == 1
    assert operator._on_its_device(run)([meta], torch.empty(3)) == 1
    assert seen == [3, 4] and entered[2:] == [meta.device] * 2
    sources = [path.read_text() for path in Path(operator.__file__).parents[1].rglob("*.py")]
    assert sum(text.count("torch.library.impl(") for text in sources) == 1


def test_the_guard_enters_another_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext(entered.append(device)))
    for device in ("cpu", "meta", "cuda:0", "cuda:1"):
        with operator.device_guard(torch.device(device)):
            pass
    assert entered == [torch.device("cuda:1")]
