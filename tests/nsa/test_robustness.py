"""Property 8: extreme logits, strange strides, poisoned neighbours in memory, and refusals that say
what to do.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nsa import (
    compress,
    compressed_attention,
    nsa_attention,
    select_blocks,
    selected_attention,
    sliding_attention,
)
from nsa.routing import Path, RouteError
from tests import oracle
from tests.cases import PATHS_HERE, SMALL, Case, here, leaves, qkv, randn, run

EVERY_PATH = pytest.mark.parametrize("path", PATHS_HERE)
CASE = here(Case(100, 3, 12, 8, 2), Case(17, 3, 12, 8, 2))
HEADS = [CASE.kv_heads * CASE.group, CASE.kv_heads, CASE.kv_heads]  # of q, k and v


def layer(path: str) -> Callable[..., Tensor]:
    def whole(q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
        return nsa_attention(q, (k, v), (k, v), (k, v), gates, config=SMALL, path=path, fa2="off")

    return whole


def layer_inputs(case: Case = CASE) -> tuple[Tensor, ...]:
    q, k, v = qkv(case)
    return q, k, v, torch.rand(*q.shape[:3], 3, generator=torch.Generator().manual_seed(1))


def assert_finite(o: Tensor, grads: list[Tensor]) -> None:
    assert torch.isfinite(o).all(), "o"
    for index, grad in enumerate(grads):
        assert torch.isfinite(grad).all(), f"gradient of input {index}"


# Extreme logits.

KINDS = ["times 50", "times 1e4", "all equal", "zero q", "one huge key", "negative"]


@EVERY_PATH
@pytest.mark.parametrize("kind", here(KINDS, KINDS[1::3]))
def test_extreme_logits_stay_finite_and_true(path: Path, kind: str) -> None:
    q, k, v, gates = layer_inputs()
    if kind.startswith("times"):
        q = q * float(kind.split()[1])
    elif kind == "all equal":
        q, k = torch.ones_like(q), torch.ones_like(k)
    elif kind == "zero q":
        q = torch.zeros_like(q)
    elif kind == "one huge key":
        k = k.clone()
        k[:, CASE.tokens * 2 // 5] *= 1e4
    else:
        q, k = q.abs() * 100, -k.abs() * 100
    o, grads = run(layer(path), (q, k, v, gates))
    assert_finite(o, grads)
    blocks = select_blocks(q, compress(k, config=SMALL), config=SMALL)
    want = oracle.nsa(q, (k, v), (k, v), (k, v), gates, config=SMALL, blocks=blocks)
    # fp32 knows a logit of size L to about L * 2^-23, and a weight moves by as much.
    largest = float((q.abs().max() * k.abs().max()) * CASE.key_dim**0.5)
    assert float((o - want).abs().max()) <= 1e-5 + 4 * largest * 2**-23 * float(v.abs().max())


@EVERY_PATH
def test_a_shift_is_taken_from_the_row_itself(path: Path) -> None:
    """Logits of neighbouring rows differ by hundreds: a softmax shift borrowed from another row
    would overflow.
    """
    q, k, v, gates = layer_inputs()
    q = q * torch.where(torch.arange(CASE.tokens) % 2 == 0, 1e3, 1e-3)[None, :, None, None]
    o, grads = run(layer(path), (q, k, v, gates))
    assert_finite(o, grads)
    assert float(o.abs().max()) <= 3 * float(v.abs().max())


# Strides.


@EVERY_PATH
def test_views_of_a_fused_projection(path: Path) -> None:
    """q, k and v as slices of one tensor, and heads of a [B, H, S, D] one."""
    fused = randn(2, CASE.tokens, sum(HEADS), 12, seed=0)
    q, k, v = fused.split(HEADS, 2)
    gates = randn(2, CASE.tokens, 3, HEADS[0], seed=1).transpose(2, 3)
    assert not any(x.is_contiguous() for x in (q, k, v, gates))
    o, grads = run(layer(path), (q, k, v, gates))
    for view in (q.transpose(1, 2).contiguous().transpose(1, 2), q[:, :, :].flip(1).flip(1)):
        other, _ = run(layer(path), (view, k.contiguous(), v.contiguous(), gates.contiguous()))
        torch.testing.assert_close(other, o, rtol=1e-6, atol=1e-6)
    # Through autograd, the views' gradients land in the fused tensor.
    leaf = fused.clone().requires_grad_()
    upstream = randn(*o.shape, seed=99)
    (layer(path)(*leaf.split(HEADS, 2), gates) * upstream).sum().backward()
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, torch.cat(grads[:3], 2), rtol=1e-5, atol=1e-5)


@EVERY_PATH
def test_expanded_inputs(path: Path) -> None:
    """One K/V for the whole batch, expanded with stride 0; its gradient is the sum."""
    q, k, v, gates = layer_inputs()
    one_k, one_v = leaves((k[:1], v[:1]))
    o = layer(path)(q, one_k.expand(2, -1, -1, -1), one_v.expand(2, -1, -1, -1), gates)
    upstream = randn(*o.shape, seed=99)
    grads = torch.autograd.grad(o, (one_k, one_v), upstream)
    copies = leaves((k[:1].repeat(2, 1, 1, 1), v[:1].repeat(2, 1, 1, 1)))
    want = layer(path)(q, *copies, gates)
    torch.testing.assert_close(o, want, rtol=1e-6, atol=1e-6)
    for got, full in zip(grads, torch.autograd.grad(want, copies, upstream), strict=True):
        torch.testing.assert_close(got, full.sum(0, keepdim=True), rtol=1e-5, atol=1e-5)


@EVERY_PATH
def test_an_expanded_upstream_gradient(path: Path) -> None:
    """`.sum().backward()` hands every branch a dO of stride 0."""
    tensors = layer_inputs()
    summed = leaves(tensors)
    layer(path)(*summed).sum().backward()
    explicit = leaves(tensors)
    o = layer(path)(*explicit)
    o.backward(torch.ones_like(o))
    for a, b in zip(summed, explicit, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=1e-6)


@EVERY_PATH
@pytest.mark.parametrize("branch", ["cmp", "sel", "win"])
def test_every_branch_takes_an_expanded_upstream_gradient(path: Path, branch: str) -> None:
    q, k, v = qkv(CASE)
    blocks = select_blocks(q, compress(k, config=SMALL), config=SMALL)
    functions: dict[str, Callable[..., Tensor]] = {
        "cmp": lambda q, k, v: compressed_attention(
            q, compress(k, config=SMALL), compress(v, config=SMALL), block=8, stride=4
        )[0],
        "sel": lambda q, k, v: selected_attention(
            q, k, v, blocks, sel_block=16, path=path, fa2="off"
        ),
        "win": lambda q, k, v: sliding_attention(q, k, v, window=24),
    }
    summed = leaves((q, k, v))
    functions[branch](*summed).sum().backward()
    # Each row's weights sum to 1, so the sum of all of dV counts the rows that see something.
    rows = CASE.tokens - (7 if branch == "cmp" else 0)
    assert summed[2].grad is not None
    expected = CASE.batch * rows * CASE.kv_heads * CASE.group * CASE.value_dim
    assert float(summed[2].grad.double().sum()) == pytest.approx(expected, rel=1e-5)


# Neighbours in memory.


def inside_poison(x: Tensor) -> tuple[Tensor, Tensor]:
    """A view of x's values inside a larger storage of NaN (before, after and between the rows), and
    that storage.
    """
    shape = (x.shape[0], x.shape[1] + 37, x.shape[2] + 1, x.shape[3] + 3)
    storage = torch.full(shape, torch.nan, dtype=x.dtype)
    view = storage[:, 5 : 5 + x.shape[1], : x.shape[2], : x.shape[3]]
    view.copy_(x)
    return view, storage


@EVERY_PATH
def test_poison_around_the_tensors_is_neither_read_nor_written(path: Path) -> None:
    tensors = layer_inputs()
    o, grads = run(layer(path), tensors)
    views, storages = zip(*(inside_poison(x) for x in tensors), strict=True)
    before = [s.isnan().sum().item() for s in storages]
    inputs = [view.requires_grad_() for view in (v.detach() for v in views)]
    got = layer(path)(*inputs)
    got_grads = torch.autograd.grad(got, inputs, randn(*got.shape, seed=99))
    torch.testing.assert_close(got, o, rtol=1e-6, atol=1e-6)
    for a, b in zip(got_grads, grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    for storage, nans, x, view in zip(storages, before, tensors, views, strict=True):
        assert storage.isnan().sum().item() == nans and torch.equal(view.detach(), x), (
            "inputs and canaries untouched"
        )


@EVERY_PATH
@pytest.mark.parametrize("tokens", here([1, 5, 15, 17, 33, 81, 100], [1, 17, 33]))
def test_poison_around_every_branch(path: Path, tokens: int) -> None:
    tensors = qkv(Case(tokens, 2, 8, 8, 1))
    q, k, v = (inside_poison(x)[0] for x in tensors)
    k_cmp, v_cmp = (inside_poison(compress(x, config=SMALL))[0] for x in (k, v))
    blocks = select_blocks(q, k_cmp, config=SMALL)
    assert torch.equal(
        blocks, select_blocks(tensors[0], compress(tensors[1], config=SMALL), config=SMALL)
    )
    o, lse = compressed_attention(q, k_cmp, v_cmp, block=8, stride=4)
    for branch in (
        o,
        selected_attention(q, k, v, blocks, sel_block=16, path=path, fa2="off"),
        sliding_attention(q, k, v, window=24),
    ):
        assert torch.isfinite(branch).all()
    assert not lse.isnan().any()


@EVERY_PATH
def test_blocks_may_be_a_view_and_are_not_changed(path: Path) -> None:
    q, k, v = qkv(CASE)
    blocks = select_blocks(q, compress(k, config=SMALL), config=SMALL)
    wide = torch.full((*blocks.shape[:3], 9), 10**6, dtype=torch.int32)
    wide[..., 2:7] = blocks
    want = selected_attention(q, k, v, blocks, sel_block=16, path=path, fa2="off")
    got = selected_attention(q, k, v, wide[..., 2:7], sel_block=16, path=path, fa2="off")
    assert torch.equal(got, want)
    assert torch.equal(wide[..., 2:7], blocks) and (wide[..., [0, 1, 7, 8]] == 10**6).all()


@EVERY_PATH
def test_all_rows_blind(path: Path) -> None:
    q, k, v = qkv(CASE)
    blocks = torch.full((2, CASE.tokens, CASE.kv_heads, 5), -1, dtype=torch.int32)
    o, grads = run(
        lambda *x: selected_attention(*x, blocks, sel_block=16, path=path, fa2="off"), (q, k, v)
    )
    assert not o.any() and not any(g.any() for g in grads)


def test_no_query_may_stand_before_any_block() -> None:
    q, k, v = qkv(Case(5, 2, 8, 8, 1))
    o, lse = compressed_attention(
        q, compress(k, config=SMALL), compress(v, config=SMALL), block=8, stride=4
    )
    assert o.shape == (1, 5, 4, 8) and not o.any() and torch.isneginf(lse).all()


@EVERY_PATH
def test_inference_mode_and_no_grad(path: Path) -> None:
    tensors = layer_inputs()
    want = layer(path)(*tensors)
    with torch.inference_mode():
        assert torch.equal(layer(path)(*(x.clone() for x in tensors)), want)
    with torch.no_grad():
        assert torch.equal(layer(path)(*(x.requires_grad_() for x in tensors)), want)


# Refusals.


def test_heads_that_form_no_whole_groups_are_refused() -> None:
    """33 query heads over 2 KV heads: elsewhere accepted, with the last head never written."""
    q, k, v = randn(1, 16, 33, 8, seed=0), randn(1, 16, 2, 8, seed=1), randn(1, 16, 2, 8, seed=2)
    blocks = torch.zeros(1, 16, 2, 1, dtype=torch.int32)
    calls: list[Callable[[], object]] = [
        lambda: selected_attention(q, k, v, blocks, sel_block=16),
        lambda: sliding_attention(q, k, v, window=4),
        lambda: compressed_attention(q, k, v, block=1, stride=1),
        lambda: select_blocks(q, k, config=SMALL),
        lambda: nsa_attention(q, (k, v), (k, v), (k, v), torch.ones(1, 16, 33, 3), config=SMALL),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="33"):
            call()


@pytest.mark.parametrize("shape", [(1, 15, 2, 8), (2, 16, 2, 8), (1, 16, 1, 8)])
def test_shapes_that_disagree_are_refused(shape: tuple[int, ...]) -> None:
    q, k, v = randn(1, 16, 4, 8, seed=0), randn(1, 16, 2, 8, seed=1), randn(*shape, seed=2)
    with pytest.raises(ValueError):
        sliding_attention(q, k, v, window=4)
    with pytest.raises(ValueError):
        selected_attention(q, k, v, torch.zeros(1, 16, 2, 1, dtype=torch.int32), sel_block=16)


def test_blocks_of_the_wrong_shape_are_refused() -> None:
    q, k, v = qkv(Case(16, 2, 8, 8, 1))
    for bad in (torch.zeros(1, 15, 2, 1), torch.zeros(1, 16, 4, 1), torch.zeros(1, 16, 2)):
        with pytest.raises(ValueError, match="blocks"):
            selected_attention(q, k, v, bad.int(), sel_block=16)


def test_unknown_paths_and_fa2_are_route_errors() -> None:
    q, k, v = qkv(Case(16, 2, 8, 8, 1))
    blocks = torch.zeros(1, 16, 2, 1, dtype=torch.int32)
    with pytest.raises(RouteError, match="maskd.*masked"):
        selected_attention(q, k, v, blocks, sel_block=16, path="maskd")
    with pytest.raises(RouteError, match="not CUDA"):
        selected_attention(q, k, v, blocks, sel_block=16, path="v2", fa2="on")
    with pytest.raises(RouteError, match="not CUDA"):
        sliding_attention(q, k, v, window=4, fa2="on")
