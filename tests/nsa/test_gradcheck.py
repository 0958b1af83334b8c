"""Analytic gradients against central differences in fp64, for every input of every public function
that has a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError, gradcheck

from nsa import (
    NSAConfig,
    compress,
    compressed_attention,
    nsa_attention,
    select_blocks,
    selected_attention,
    sliding_attention,
)
from nsa.compression import param_shapes
from nsa.routing import Path
from tests.cases import FP64_PATHS, leaves, randn

# central differences need fp64, which no Triton kernel takes
EVERY_PATH = pytest.mark.parametrize("path", FP64_PATHS)
# Blocks compete from 13 tokens on: of 14, the last two rows choose 3 blocks of 4.
TINY = NSAConfig(cmp_block=4, cmp_stride=2, sel_block=4, num_selected=3, window=3)
TOKENS, KV_HEADS, GROUP, DK, DV = 14, 1, 2, 2, 3
Q_HEADS = KV_HEADS * GROUP


pytestmark = pytest.mark.usefixtures("one_thread")


def qkv(*, tokens: int = TOKENS, queries: int = TOKENS) -> list[Tensor]:
    shapes = (1, queries, Q_HEADS, DK), (1, tokens, KV_HEADS, DK), (1, tokens, KV_HEADS, DV)
    return leaves(
        [randn(*shape, seed=seed, dtype=torch.float64) for seed, shape in enumerate(shapes)]
    )


def gates(queries: int = TOKENS) -> Tensor:
    return leaves([randn(1, queries, Q_HEADS, 3, seed=7, dtype=torch.float64).sigmoid()])[0]


def assert_gradients(function: Callable[..., Tensor], inputs: list[Tensor]) -> None:
    """Central differences with a step of 1e-6 know a gradient of size 1 to about 1e-9."""
    assert all(x.dtype == torch.float64 and x.requires_grad for x in inputs)
    assert gradcheck(function, inputs, eps=1e-6, atol=1e-7, rtol=1e-5)


def choose(q: Tensor, k: Tensor, q_start: int = 0) -> Tensor:
    return select_blocks(
        q, compress(k, config=TINY), config=TINY, q_start=q_start, kv_len=k.shape[1]
    )


def test_the_blocks_compete() -> None:
    """Else the selected branch below would be full attention."""
    q, k, _ = qkv()
    assert (choose(q, k)[0, 12:] >= 0).all() and TINY.num_selected * TINY.sel_block < TOKENS


def test_a_wrong_gradient_goes_red() -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: object, do: Tensor) -> Tensor:
            return do * 2.0001

    with pytest.raises(GradcheckError):
        assert_gradients(Wrong.apply, qkv()[:1])


@pytest.mark.parametrize("queries", [TOKENS, 4])
def test_compressed_attention(queries: int) -> None:
    """Blind rows included where the queries begin at 0."""
    start = TOKENS - queries

    def branch(q: Tensor, k_cmp: Tensor, v_cmp: Tensor) -> Tensor:
        return compressed_attention(q, k_cmp, v_cmp, block=4, stride=2, q_start=start)[0]

    q, k, v = qkv(queries=queries)
    assert_gradients(branch, [q, *leaves([compress(k, config=TINY), compress(v, config=TINY)])])


@EVERY_PATH
@pytest.mark.parametrize("queries", [TOKENS, 4])
def test_selected_attention(path: Path, queries: int) -> None:
    start = TOKENS - queries
    q, k, v = qkv(queries=queries)
    blocks = choose(q, k, start)
    blocks[:, 1] = -1  # a row that sees nothing
    assert_gradients(
        lambda q, k, v: selected_attention(
            q, k, v, blocks, sel_block=4, q_start=start, path=path, fa2="off"
        ),
        [q, k, v],
    )


@EVERY_PATH
def test_selected_attention_with_rows_of_different_lengths(path: Path) -> None:
    q, k, v = (
        torch.cat([x, x.flip(1)]).detach().requires_grad_() for x in qkv(tokens=9, queries=3)
    )
    start = torch.tensor([0, 6])
    blocks = select_blocks(q, compress(k, config=TINY), config=TINY, q_start=start, kv_len=9)
    assert_gradients(
        lambda q, k, v: selected_attention(
            q, k, v, blocks, sel_block=4, q_start=start, path=path, fa2="off"
        ),
        [q, k, v],
    )


@pytest.mark.parametrize(("queries", "window"), [(TOKENS, 3), (TOKENS, 99), (4, 3), (4, 1)])
def test_sliding_attention(queries: int, window: int) -> None:
    start = TOKENS - queries
    assert_gradients(
        lambda q, k, v: sliding_attention(q, k, v, window=window, q_start=start, fa2="off"),
        qkv(queries=queries),
    )


@EVERY_PATH
def test_nsa_attention_with_its_gates(path: Path) -> None:
    """Each branch has K and V of its own, so that no branch's gradient hides in another's."""
    # two of up to four blocks of 8 tokens
    config = replace(TINY, sel_block=2, num_initial=0, num_local=1, num_selected=2)

    def layer(q: Tensor, *rest: Tensor) -> Tensor:
        *kv, g = rest
        return nsa_attention(
            q,
            (kv[0], kv[1]),
            (kv[2], kv[3]),
            (kv[4], kv[5]),
            g,
            config=config,
            path=path,
            fa2="off",
        )

    q, k, v = qkv(tokens=8, queries=8)
    other = leaves([k + 1, v.flip(1), k.flip(1), v - 1])
    assert_gradients(layer, [q, k, v, *other, gates(8)])


@pytest.mark.parametrize("phi", ["linear", "mlp"])
@pytest.mark.parametrize("cmp_rope", ["before", "after"])
def test_nsa_attention_with_a_learned_phi(phi: str, cmp_rope: str) -> None:
    config = replace(TINY, phi=phi, cmp_rope=cmp_rope, phi_hidden=3 if phi == "mlp" else None)
    names = list(param_shapes(config, DK))
    params = [
        0.5 * randn(*shape, seed=20 + i, dtype=torch.float64)
        for i, shape in enumerate(param_shapes(config, DK).values())
    ]
    params += [
        0.5 * randn(*shape, seed=30 + i, dtype=torch.float64)
        for i, shape in enumerate(param_shapes(config, DV).values())
    ]

    def layer(q: Tensor, k: Tensor, v: Tensor, g: Tensor, *params: Tensor) -> Tensor:
        of_k, of_v = (
            dict(zip(names, part, strict=True))
            for part in (params[: len(names)], params[len(names) :])
        )
        return nsa_attention(
            q,
            (k, v),
            (k, v),
            (k, v),
            g,
            config=config,
            phi_params=(of_k, of_v),
            path="masked",
            fa2="off",
        )

    assert_gradients(layer, [*qkv(tokens=9, queries=9), gates(9), *leaves(params)])


def test_nsa_attention_of_packed_documents() -> None:
    """Two documents, an empty one, and a row beyond the last."""
    cu_seqlens = torch.tensor([0, 6, 6, 10])

    def layer(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        return nsa_attention(
            q,
            (k, v),
            (k, v),
            (k, v),
            g,
            config=TINY,
            cu_seqlens=cu_seqlens,
            path="masked",
            fa2="off",
        )

    assert_gradients(layer, [*qkv(tokens=11, queries=11), gates(11)])
