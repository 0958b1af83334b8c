"""On CUDA: the gradients of three branches together are the oracle's, through the kernels of many
rows and of few.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nsa import NSAConfig, compress, nsa_attention
from nsa.ops.kernels import common
from nsa.ops.selected.triton import chunks, list_calls
from tests import oracle
from tests.cases import assert_bf16_rule, choose_by_kernel, eager_attention, randn
from tests.nsa.kernel_cases import ORDINARY_LOADS

PAPER = NSAConfig()
TOKENS = 1_401
NAMES = ("q", "k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win", "gates")
SHAPES = pytest.mark.parametrize(
    ("kv_heads", "group", "dim"), [(2, 6, 64), (1, 16, 128)], ids=["A", "B"]
)


def inputs(kv_heads: int, group: int, dim: int) -> list[Tensor]:
    def one(heads: int, width: int, seed: int) -> Tensor:
        return randn(1, TOKENS, heads, width, seed=seed, dtype=torch.bfloat16, device="cuda")

    return [
        one(kv_heads * group, dim, 0),
        *(one(kv_heads, dim, i) for i in range(1, 7)),
        one(kv_heads * group, 3, 7).sigmoid(),
    ]


@SHAPES
@pytest.mark.parametrize("by", ["lists", "rows"])
def test_the_gated_sum_of_three_branches(
    kv_heads: int, group: int, dim: int, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by == "lists":
        monkeypatch.setattr(list_calls, "SORT_MIN_ROWS", 0)
        monkeypatch.setattr(chunks, "PART_BYTES", 1 << 24)  # several chunks
        monkeypatch.setattr(chunks, "PARTS_OF_Q", 0)
    else:
        # as such small calls are served
        monkeypatch.setattr(common, "COPY_MIN_ELEMENTS", ORDINARY_LOADS)
    tensors = inputs(kv_heads, group, dim)
    blocks = choose_by_kernel(
        tensors[0], compress(tensors[1], config=PAPER), PAPER, q_start=0, kv_len=TOKENS
    )

    def ours(*x: Tensor) -> Tensor:
        q, *kv, gates = x
        pairs = ((kv[0], kv[1]), (kv[2], kv[3]), (kv[4], kv[5]))
        return nsa_attention(q, *pairs, gates, config=PAPER, path="triton", nonnegative_gates=True)

    def branches(*x: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """K, V and what each query sees of them: [B, HQ, T, S]."""
        q, *kv, _ = x
        means = [
            (
                oracle.compress_mean(y, 32, 16)
                if y.dtype == torch.float64
                else y.unfold(1, 32, 16).mean(-1)
            )
            for y in kv[:2]
        ]
        return [
            (*means, oracle.kept_compressed(q, means[0], block=32, stride=16)),
            (kv[2], kv[3], oracle.kept_selected(q, kv[2], blocks, sel_block=64)),
            (kv[4], kv[5], oracle.kept_window(q, kv[4], window=512)),
        ]

    def reference(*x: Tensor) -> Tensor:
        outputs = [oracle.masked_attention(x[0], k, v, keep)[0] for k, v, keep in branches(*x)]
        return torch.stack([x[-1][..., i, None] * o for i, o in enumerate(outputs)]).sum(0)

    def eager(*x: Tensor) -> Tensor:
        outputs = [eager_attention(x[0], k, v, keep) for k, v, keep in branches(*x)]
        return torch.stack([x[-1][..., i, None] * o for i, o in enumerate(outputs)]).sum(0)

    assert_bf16_rule(ours, reference, eager, tensors, NAMES)
