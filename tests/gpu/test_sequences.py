"""On CUDA: a cache and packed documents change nothing but the rounding, on every fast path, FA-2
and bf16 included.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from nsa import NSAAttention, NSAConfig, engagement
from nsa.config import preset
from nsa.model import TinyLM
from nsa.routing import SPECS, Path
from tests.cases import assert_parity, error, magnitude, randn

DEVICE = "cuda"
FAST = [(path, fa2) for path in Path if not SPECS[path].slow for fa2 in ("off", "on")]
LENGTHS = (700, 0, 1, 513, 64, 300)


def layer_of(path: Path, fa2: str, dtype: torch.dtype) -> NSAAttention:
    torch.manual_seed(0)
    return NSAAttention(96, 12, 2, 64, config=NSAConfig(), path=path, fa2=fa2).to(DEVICE, dtype)


def assert_no_worse(got: Tensor, whole: Tensor, reference: Tensor, what: str) -> None:
    """``whole`` is the same layer in the same dtype, uncached and unpacked; ``truth`` the same in
    fp64 on the CPU.
    """
    bound = max(2 * error(whole.cpu(), reference) + 2**-8 * magnitude(reference), 1e-5)
    found = error(got.cpu(), reference)
    assert found <= bound, f"{what}: error {found:.3e} exceeds {bound:.3e}"


@torch.no_grad()
def reference_of(layer: NSAAttention, x: Tensor) -> Tensor:
    twin = NSAAttention(96, 12, 2, 64, config=NSAConfig(), path="masked", fa2="off").double()
    twin.load_state_dict({name: value.cpu().double() for name, value in layer.state_dict().items()})
    return twin(x.cpu().double())


@pytest.mark.parametrize(("path", "fa2"), FAST)
@torch.no_grad()
def test_chunks_and_decode_equal_a_whole_prefill(path: Path, fa2: str) -> None:
    layer = layer_of(path, fa2, torch.bfloat16)
    x = randn(2, 1300, 96, seed=1, dtype=torch.bfloat16, device=DEVICE)
    cache, bounds = (
        layer.new_cache(2, 1300, initial_len=256),
        [0, 15, 47, 512, 1250, *range(1251, 1301)],
    )
    with engagement.collect() as ran:
        got = torch.cat([layer(x[:, a:b], cache=cache) for a, b in itertools.pairwise(bounds)], 1)
    assert ran.counts[f"sel.{path}"] == len(bounds) - 1
    # Near-ties of bf16 keys may choose other blocks than fp64, so both are judged where every block
    # is chosen.
    every = slice(0, 1024)
    assert_no_worse(
        got[:, every], layer(x)[:, every], reference_of(layer, x)[:, every], f"{path} {fa2}"
    )
    assert error(got[:, 1024:], layer(x)[:, 1024:]) <= 0.05 * magnitude(got)


@pytest.mark.parametrize(("path", "fa2"), FAST)
def test_packed_equals_one_by_one(path: Path, fa2: str) -> None:
    layer = layer_of(path, fa2, torch.bfloat16)
    total = sum(LENGTHS)
    x = randn(1, total + 9, 96, seed=2, dtype=torch.bfloat16, device=DEVICE)
    x[:, total:] = torch.nan
    x.requires_grad_()
    bounds = [0, *itertools.accumulate(LENGTHS)]
    packed = layer(x, cu_seqlens=torch.tensor(bounds, device=DEVICE, dtype=torch.int32))
    assert bool((packed[:, total:] == 0).all())
    with torch.no_grad():
        alone = torch.cat([layer(x[:, a:b]) for a, b in itertools.pairwise(bounds) if b > a], 1)
        reference = torch.cat(
            [reference_of(layer, x[:, a:b]) for a, b in itertools.pairwise(bounds) if b > a], 1
        )
    assert_no_worse(packed[:, :total].detach(), alone, reference, f"{path} {fa2}")
    packed[:, :total].sum().backward()
    assert x.grad is not None and bool(x.grad.isfinite().all()) and not x.grad[:, total:].any()
    assert all(bool(p.grad.isfinite().all()) for p in layer.parameters() if p.grad is not None)


@pytest.mark.parametrize("path", [Path.MASKED, Path.TRITON])
def test_packing_and_a_cache_do_not_sync(path: Path) -> None:
    layer = layer_of(path, "off", torch.bfloat16)
    x = randn(1, 700, 96, seed=3, dtype=torch.bfloat16, device=DEVICE)
    cu_seqlens = torch.tensor([0, 300, 650], device=DEVICE)
    with torch.no_grad():
        for _ in range(2):  # first use may initialise libraries, and compiles kernels
            layer(x, cu_seqlens=cu_seqlens)
            cache = layer.new_cache(1, 800)
            layer(x, cache=cache)
            layer(x[:, :1], cache=cache)
        torch.cuda.set_sync_debug_mode("error")
        try:
            layer(x, cu_seqlens=cu_seqlens)
            cache = layer.new_cache(1, 800)
            layer(x, cache=cache)
            layer(x[:, :1], cache=cache)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_generation_in_fp32_is_the_cpu_s() -> None:
    torch.manual_seed(0)
    model = TinyLM(preset("tiny"), fa2="off")
    ids = torch.randint(256, (2, 70))
    on_cpu = model.generate(ids, max_new_tokens=30, prompt_lengths=[70, 33])
    with torch.no_grad():
        logits = model(ids)
        assert_parity(model.to(DEVICE)(ids.to(DEVICE)).cpu(), logits, "logits", tolerance=1e-4)
    assert torch.equal(
        model.generate(ids.to(DEVICE), max_new_tokens=30, prompt_lengths=[70, 33]).cpu(), on_cpu
    )
