"""Shapes, inputs and comparisons that the NSA tests share (the tolerances are NSA.md's)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from nsa.blocks import BlockGrid
from nsa.capability import probe
from nsa.config import NSAConfig
from nsa.ops import interval, scores
from nsa.routing import SPECS, Path, Problem
from nsa.routing.support import triton_reasons

T = TypeVar("T")

# Triton's interpreter runs the kernels in this process (`--require interpreter`): 10 ms a program,
# so cases are few and small.
INTERPRETED = probe("cpu").triton_provider is not None


def here(usual: T, interpreted: T) -> T:
    return interpreted if INTERPRETED else usual


def paths_on_cpu(dtype: str) -> tuple[Path, ...]:
    """Every path that runs on the CPU in this process: triton only in its interpreter, which takes
    neither fp64 nor bf16.
    """
    refused = triton_reasons(Problem(1, 16, 16, 1, 1, 16, 16, dtype), probe("cpu"))
    return tuple(path for path in Path if path is not Path.TRITON or not refused)


PATHS_HERE = paths_on_cpu("float32")
FP64_PATHS, BF16_PATHS = paths_on_cpu("float64"), paths_on_cpu("bfloat16")
# Blocks compete from 81 tokens on, instead of 1,025 at the paper's geometry.
SMALL = NSAConfig(cmp_block=8, cmp_stride=4, sel_block=16, num_selected=5, window=24)
FAST_PATHS = tuple(path for path in PATHS_HERE if not SPECS[path].slow and path is not Path.V1)
SLOW_PATHS = tuple(path for path in PATHS_HERE if path not in FAST_PATHS)

TOKENS = (1, 15, 16, 31, 32, 33, 63, 64, 65, 100, 127, 129, 511, 513)
GROUPS = (1, 6, 16)
DIMS = ((64, 64), (192, 128), (60, 100))


@dataclass(frozen=True)
class Case:
    tokens: int
    group: int
    key_dim: int
    value_dim: int
    batch: int

    @property
    def kv_heads(self) -> int:
        return 1 if self.group == 16 else 2

    def __str__(self) -> str:
        return f"S{self.tokens}-H{self.group}-D{self.key_dim}_{self.value_dim}-B{self.batch}"


def pairwise() -> tuple[Case, ...]:
    """Every pair of values of (S, group, dims, B) in 42 cases, the least that 14 x 3 pairs of (S,
    group) allow.
    """
    return tuple(
        Case(tokens, group, *DIMS[(i + j) % 3], (1, 3)[(i + j) % 2])
        for i, tokens in enumerate(TOKENS)
        for j, group in enumerate(GROUPS)
    )


COVER = pairwise()


def randn(
    *shape: int, seed: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Tensor:
    return (
        torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        .to(dtype)
        .to(device)
    )


def qkv(
    case: Case,
    *,
    seed: int = 0,
    q_tokens: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor]:
    """Random q [B, T, HQ, DK], k [B, S, HKV, DK], v [B, S, HKV, DV]."""
    tokens = case.tokens if q_tokens is None else q_tokens
    q = randn(
        case.batch,
        tokens,
        case.kv_heads * case.group,
        case.key_dim,
        seed=seed,
        dtype=dtype,
        device=device,
    )
    k = randn(
        case.batch,
        case.tokens,
        case.kv_heads,
        case.key_dim,
        seed=seed + 1,
        dtype=dtype,
        device=device,
    )
    v = randn(
        case.batch,
        case.tokens,
        case.kv_heads,
        case.value_dim,
        seed=seed + 2,
        dtype=dtype,
        device=device,
    )
    return q, k, v


def random_blocks(
    case: Case, config: NSAConfig, *, seed: int, q_tokens: int | None = None
) -> Tensor:
    """Blocks given by hand: arbitrary sets, non-local, some wholly in the future, some rows of
    nothing but -1.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = case.tokens if q_tokens is None else q_tokens
    num_sel = -(-case.tokens // config.sel_block)
    blocks = torch.full(
        (case.batch, tokens, case.kv_heads, config.num_selected), -1, dtype=torch.int32
    )
    for row in blocks.view(-1, config.num_selected):
        count = int(
            torch.randint(0, min(num_sel, config.num_selected) + 1, (), generator=generator)
        )
        row[:count] = torch.randperm(num_sel, generator=generator)[:count].sort().values.int()
    return blocks


def choose_by_kernel(
    q: Tensor,
    k_cmp: Tensor,
    config: NSAConfig,
    *,
    q_start: int | Tensor,
    kv_len: int,
    first: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """`select_blocks` by the kernels of path triton, as its layer calls them: from the lse that the
    compressed branch left.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    grid = {
        "block": config.cmp_block,
        "stride": config.cmp_stride,
        "q_start": q_start,
        "first": first,
        "scale": scale,
    }
    _, lse = interval.attend(q, k_cmp, k_cmp, width=None, **grid)
    return scores.choose(
        q,
        k_cmp,
        lse,
        kv_len=kv_len,
        sel_block=config.sel_block,
        num_selected=config.num_selected,
        num_initial=config.num_initial,
        num_local=config.num_local,
        **grid,
    )


def leaves(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    return [t.detach().clone().to(dtype or t.dtype).requires_grad_() for t in tensors]


def run(
    function: Callable[..., Tensor],
    tensors: Sequence[Tensor],
    *,
    dtype: torch.dtype | None = None,
    seed: int = 99,
) -> tuple[Tensor, list[Tensor]]:
    """(output, gradient of each input) in ``dtype``, under one fixed random dO that is rounded as
    the inputs are.
    """
    inputs = leaves(tensors, dtype)
    o = function(*inputs)
    upstream = randn(*o.shape, seed=seed, dtype=tensors[0].dtype, device=str(o.device)).to(o.dtype)
    grads = torch.autograd.grad(o, inputs, upstream, allow_unused=True)
    return o.detach(), [
        torch.zeros_like(t) if g is None else g for t, g in zip(inputs, grads, strict=True)
    ]


def error(got: Tensor, want: Tensor) -> float:
    """max |got - want|; NaN where got is not finite and want is."""
    assert got.shape == want.shape, f"shape {tuple(got.shape)}, wanted {tuple(want.shape)}"
    if got.numel() == 0:
        return 0.0
    return float((got.detach().double() - want.detach().double()).abs().max())


def magnitude(x: Tensor) -> float:
    return float(x.detach().double().abs().max()) if x.numel() else 0.0


def assert_parity(got: Tensor, want: Tensor, what: str, *, tolerance: float = 1e-5) -> None:
    """NSA.md: max|x - oracle| <= 1e-5 * max(1, max|oracle|)."""
    bound = tolerance * max(1.0, magnitude(want))
    found = error(got, want)
    assert found <= bound, f"{what}: error {found:.3e} exceeds {bound:.3e}"


def assert_lse(got: Tensor, want: Tensor) -> None:
    assert torch.equal(torch.isneginf(got), torch.isneginf(want)), (
        "lse = -inf on other rows than the oracle's"
    )
    finite = torch.isfinite(want)
    assert_parity(got[finite], want[finite], "lse")


def assert_same_function(
    function: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    tensors: Sequence[Tensor],
    names: Sequence[str],
    *,
    tolerance: float = 1e-5,
) -> None:
    """Value and every input's gradient of ``function`` against the oracle's on the same (rounded)
    inputs.
    """
    o, grads = run(function, tensors)
    true_o, true_grads = run(reference, tensors, dtype=torch.float64)
    assert o.dtype == tensors[0].dtype, f"output dtype {o.dtype}, inputs {tensors[0].dtype}"
    assert_parity(o, true_o, "o", tolerance=tolerance)
    for name, got, want in zip(names, grads, true_grads, strict=True):
        assert_parity(got, want, f"d{name}", tolerance=tolerance)


def eager_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Softmax attention over a kept set with every step rounded to the inputs' dtype: the yardstick
    of the bf16 rule.
    """
    batch, tokens, q_heads, key_dim = q.shape
    grouped = q.reshape(batch, tokens, k.shape[2], -1, key_dim)
    logits = torch.einsum("btghd,bsgd->btghs", grouped, k) * key_dim**-0.5
    seen = visible[:, :, :, None, :]
    weights = torch.softmax(logits.masked_fill(~seen, torch.finfo(q.dtype).min), -1).masked_fill(
        ~seen, 0
    )
    return torch.einsum("btghs,bsgd->btghd", weights, v).reshape(
        batch, tokens, q_heads, v.shape[-1]
    )


def assert_bf16_rule(
    function: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    eager: Callable[..., Tensor],
    tensors: Sequence[Tensor],
    names: Sequence[str],
) -> None:
    """NSA.md: error <= 2 * (eager bf16 attention's error over the same kept set) + 2^-8 *
    max|oracle|.
    """
    o, grads = run(function, tensors)
    eager_o, eager_grads = run(eager, tensors)
    true_o, true_grads = run(reference, tensors, dtype=torch.float64)
    rows = zip(
        ["o", *(f"d{n}" for n in names)],
        [o, *grads],
        [eager_o, *eager_grads],
        [true_o, *true_grads],
        strict=True,
    )
    for what, got, rough, want in rows:
        bound = 2 * error(rough, want) + 2**-8 * magnitude(want)
        # No narrower than the rule for fp32: a gradient of exactly 0 may come out as the rest of an
        # fp32 subtraction.
        bound = max(bound, 1e-5 * max(1.0, magnitude(want)))
        found = error(got, want)
        assert found <= bound, (
            f"{what}: error {found:.3e} exceeds {bound:.3e} (eager bf16: {error(rough, want):.3e})"
        )


def assert_blocks(got: Tensor, want: Tensor, gap: Tensor, *, near_tie: float = 1e-5) -> float:
    """Chosen sets are equal wherever the n-th and (n+1)-th score differ by more than 1e-5; returns
    the share of closer rows.
    """
    assert got.dtype == torch.int32 and got.shape == want.shape, (got.dtype, got.shape, want.shape)
    clear = gap > near_tie
    wrong = (got.long() != want).any(-1) & clear
    assert not wrong.any(), (
        f"{int(wrong.sum())} rows differ, first {wrong.nonzero()[0].tolist()}: {got[wrong][0]}"
        f" {want[wrong][0]}"
    )
    return 1.0 - float(clear.double().mean()) if clear.numel() else math.nan


def cache_bytes(
    config: NSAConfig,
    *,
    batch: int,
    capacity: int,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    element_size: int,
    max_len: int | None = None,
) -> int:
    """Bytes of an NSACache of ``capacity`` (of ``max_len``) tokens a row, in closed form."""
    rows = (
        (capacity + 1)
        + (BlockGrid.of(config).num_cmp(capacity) + 1)
        + min(config.window, max_len or capacity)
        + (config.cmp_block - 1)
    )
    return batch * rows * num_kv_heads * (head_dim + v_head_dim) * element_size
