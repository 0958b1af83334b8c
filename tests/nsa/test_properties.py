"""Properties 2, 3, 4 and 10, which need no oracle at all: every path, forward and backward."""

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
from nsa.config import NSAConfig
from nsa.routing import Path
from tests import oracle
from tests.cases import (
    FP64_PATHS,
    PATHS_HERE,
    SMALL,
    Case,
    assert_parity,
    assert_same_function,
    here,
    leaves,
    qkv,
    randn,
    run,
)

QKV = ("q", "k", "v")
EVERY_PATH = pytest.mark.parametrize("path", PATHS_HERE)
CASE = here(Case(100, 3, 12, 8, 2), Case(17, 3, 12, 8, 2))
PAST = here(51, 9)  # tokens before a change


def whole(
    q: Tensor, k: Tensor, v: Tensor, gates: Tensor, *, path: str, config: NSAConfig = SMALL
) -> Tensor:
    return nsa_attention(q, (k, v), (k, v), (k, v), gates, config=config, path=path, fa2="off")


def gates_for(case: Case) -> Tensor:
    return torch.rand(
        case.batch,
        case.tokens,
        case.kv_heads * case.group,
        3,
        generator=torch.Generator().manual_seed(2),
    )


# 2. Everything selected, or a window as long as the sequence, is full causal attention.


@EVERY_PATH
@pytest.mark.parametrize("tokens", here([1, 16, 79, 80], [1, 17]))
def test_everything_selected_is_full_causal_attention(path: Path, tokens: int) -> None:
    tensors = qkv(Case(tokens, 3, 12, 8, 2))
    blocks = select_blocks(tensors[0], compress(tensors[1], config=SMALL), config=SMALL)
    assert_same_function(
        lambda *x: selected_attention(*x, blocks, sel_block=16, path=path, fa2="off"),
        oracle.causal,
        tensors,
        QKV,
    )


@pytest.mark.parametrize("window", [100, 101, 5000])
def test_a_window_as_long_as_the_sequence_is_full_causal_attention(window: int) -> None:
    assert_same_function(
        lambda *x: sliding_attention(*x, window=window), oracle.causal, qkv(CASE), QKV
    )


def test_compressing_single_tokens_is_full_causal_attention() -> None:
    config = NSAConfig(cmp_block=1, cmp_stride=1, sel_block=16)

    def branch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return compressed_attention(
            q, compress(k, config=config), compress(v, config=config), block=1, stride=1
        )[0]

    assert_same_function(branch, oracle.causal, qkv(CASE), QKV)


@EVERY_PATH
def test_one_visible_key_returns_its_value(path: Path) -> None:
    """One query row over five keys: `is_causal` would see key 0 only."""
    q, k, v = qkv(Case(5, 2, 8, 8, 1), q_tokens=1)
    o = sliding_attention(q, k, v, window=1, q_start=4)
    torch.testing.assert_close(o[0, 0], v[0, 4].repeat_interleave(2, 0))
    every = torch.zeros(1, 1, 2, 5, dtype=torch.int32).fill_(-1)
    every[..., 0] = 0
    o = selected_attention(q, k, v, every, sel_block=16, q_start=4, path=path, fa2="off")
    assert_parity(o, oracle.causal(q, k, v, q_start=4), "o")


# 3. The future moves nothing, bit for bit; nor does a token outside the selected set.


@EVERY_PATH
@pytest.mark.parametrize("t", here([0, 6, 7, 15, 16, 23, 24, 80, 81, 98], [7, 12]))
def test_tokens_after_t_move_nothing_at_or_before_t(path: Path, t: int) -> None:
    q, k, v = qkv(CASE)
    gates, past = gates_for(CASE), slice(0, t + 1)
    changed = [x.clone() for x in (q, k, v, gates)]
    for x, noise in zip(changed, (31.0, 1e3, -1e3, 0.5), strict=True):
        x[:, t + 1 :] = noise * torch.randn_like(x[:, t + 1 :])
    before, after = (
        select_blocks(a, compress(b, config=SMALL), config=SMALL) for a, b in ((q, k), changed[:2])
    )
    assert torch.equal(before[:, past], after[:, past]), "selected blocks"
    assert torch.equal(
        whole(q, k, v, gates, path=path)[:, past], whole(*changed, path=path)[:, past]
    ), "outputs"


@EVERY_PATH
def test_every_branch_alone_ignores_the_future(path: Path) -> None:
    """A leak that one gate hides would show here: each branch for itself."""
    q, k, v = qkv(CASE)
    future = k.clone(), v.clone()
    for x in future:
        x[:, PAST:] = 77.0
    blocks = select_blocks(q, compress(k, config=SMALL), config=SMALL)
    branches: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "cmp": lambda k, v: compressed_attention(
            q, compress(k, config=SMALL), compress(v, config=SMALL), block=8, stride=4
        )[0],
        "sel": lambda k, v: selected_attention(q, k, v, blocks, sel_block=16, path=path, fa2="off"),
        "win": lambda k, v: sliding_attention(q, k, v, window=24),
    }
    for name, branch in branches.items():
        now, then = branch(k, v), branch(*future)
        assert torch.equal(now[:, :PAST], then[:, :PAST]), name
        assert not torch.equal(now[:, PAST:], then[:, PAST:]), (
            f"{name}: the change must matter somewhere"
        )


@EVERY_PATH
@pytest.mark.parametrize("t", here([6, 40, 85], [9]))
def test_a_loss_up_to_t_has_no_gradient_after_t(path: Path, t: int) -> None:
    inputs = leaves((*qkv(CASE), gates_for(CASE)))
    o = whole(*inputs, path=path)
    grads = torch.autograd.grad(o[:, : t + 1].square().sum(), inputs)
    for name, grad in zip((*QKV, "gates"), grads, strict=True):
        assert torch.isfinite(grad).all()
        assert not grad[:, t + 1 :].any(), f"d{name} after {t}"
        assert grad[:, : t + 1].any()


@EVERY_PATH
def test_the_past_gradients_do_not_depend_on_the_future(path: Path) -> None:
    tensors = (*qkv(CASE), gates_for(CASE))
    changed = [x.clone() for x in tensors]
    for x in changed:
        x[:, PAST:] = torch.randn_like(x[:, PAST:])

    def grads(source: list[Tensor] | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        inputs = leaves(source)
        return torch.autograd.grad(whole(*inputs, path=path)[:, :PAST].square().sum(), inputs)

    for name, now, then in zip((*QKV, "gates"), grads(tensors), grads(changed), strict=True):
        assert torch.equal(now, then), f"d{name}"


@EVERY_PATH
def test_tokens_outside_the_selected_set_move_nothing(path: Path) -> None:
    case = here(Case(200, 3, 8, 8, 1), Case(97, 16, 8, 8, 1))
    q, k, v = qkv(case)
    blocks = select_blocks(q, compress(k, config=SMALL), config=SMALL)
    before = selected_attention(q, k, v, blocks, sel_block=16, path=path, fa2="off")
    for t in here((95, 130, 199), (95,)):
        for g in range(case.kv_heads):
            unseen = [s for s in range(t) if s // 16 not in blocks[0, t, g].tolist()]
            changed_k, changed_v = k.clone(), v.clone()
            changed_k[:, unseen, g], changed_v[:, unseen, g] = 50.0, -1e4
            after = selected_attention(
                q, changed_k, changed_v, blocks, sel_block=16, path=path, fa2="off"
            )
            heads = slice(case.group * g, case.group * (g + 1))
            assert unseen and torch.equal(before[:, t, heads], after[:, t, heads]), (t, g)
            assert not torch.equal(before[:, :, heads], after[:, :, heads])


# 4. RoPE: shifting all positions changes nothing beyond rounding.


@pytest.mark.parametrize("path", FP64_PATHS)
@pytest.mark.parametrize("kind", ["interleaved", "half"])
def test_shifting_all_positions_changes_nothing(path: Path, kind: str) -> None:
    q, k, v = qkv(CASE, dtype=torch.float64)
    gates = gates_for(CASE).double()

    def shifted(by: int) -> Callable[..., Tensor]:
        at = torch.arange(CASE.tokens) + by

        def layer(q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
            return whole(
                oracle.rope(q, at, kind=kind), oracle.rope(k, at, kind=kind), v, gates, path=path
            )

        return layer

    assert_same_function(
        shifted(1000), shifted(0), (q, k, v, gates), (*QKV, "gates"), tolerance=1e-9
    )
    assert (shifted(0)(q, k, v, gates) - whole(q, k, v, gates, path=path)).abs().max() > 1e-3, (
        "RoPE must matter"
    )


@pytest.mark.parametrize("kind", ["interleaved", "half"])
@pytest.mark.parametrize(("base", "scale"), [(10_000.0, 1.0), (500.0, 0.25)])
def test_rope_equals_the_oracle(kind: str, base: float, scale: float) -> None:
    from nsa.rope import angles, rotate

    at = torch.cat([torch.arange(70), torch.tensor([1000])])
    x = randn(2, 71, 3, 12, seed=0)

    def function(x: Tensor) -> Tensor:
        return rotate(x, angles(at[None], 12, base=base, scale=scale), kind=kind)

    def reference(x: Tensor) -> Tensor:
        return oracle.rope(x, at, base=base, scale=scale, kind=kind)

    # Angles are fp32 by the norm, so position 1,000 is known to 1,000 * 2^-23 radians only.
    assert_same_function(function, reference, (x,), ("x",), tolerance=1e-5 + 1000 * scale * 2**-23)
    small = x[:, :40]
    assert_parity(
        rotate(small, angles(at[None, :40], 12, base=base, scale=scale), kind=kind),
        oracle.rope(small, at[:40], base=base, scale=scale, kind=kind),
        "rope",
    )
    assert (
        rotate(x.bfloat16(), angles(at[None], 12, base=base, scale=scale), kind=kind).dtype
        == torch.bfloat16
    )


# 10. Three runs are bitwise equal (on a CPU every path is).


@EVERY_PATH
def test_three_runs_are_bitwise_equal(path: Path) -> None:
    tensors = (*qkv(CASE), gates_for(CASE))
    first, *others = (run(lambda *x: whole(*x, path=path), tensors) for _ in range(3))
    for other in others:
        assert torch.equal(first[0], other[0])
        assert all(torch.equal(a, b) for a, b in zip(first[1], other[1], strict=True))


@EVERY_PATH
def test_batch_rows_are_independent(path: Path) -> None:
    tensors = (*qkv(CASE), gates_for(CASE))
    order = torch.tensor([1, 0])
    o = whole(*tensors, path=path)
    assert_parity(
        whole(*(x[order] for x in tensors), path=path), o[order].double(), "permuted batch"
    )
    assert_parity(whole(*(x[:1] for x in tensors), path=path), o[:1].double(), "alone")


def test_paths_agree_with_one_another() -> None:
    tensors = (*qkv(CASE), gates_for(CASE))
    outputs = [whole(*tensors, path=path) for path in (*PATHS_HERE, "auto", "adaptive")]
    for other in outputs[1:]:
        assert_parity(other, outputs[0].double(), "o")
