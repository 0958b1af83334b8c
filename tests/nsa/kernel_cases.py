"""What the tests of the Triton kernels share: memory that nobody wrote, intervals of keys, calls of
every operator.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from nsa.ops.selected import triton as operator
from nsa.ops.selected.triton.chunks import grid_of
from tests.cases import Case, qkv, randn

QKV = ("q", "k", "v")
COMPRESSED, WINDOW, CAUSAL = (8, 4, None), (1, 1, 24), (1, 1, None)  # block, stride, width
RAGGED = torch.tensor([5, 60, 31])
DOCUMENTS = torch.tensor([0, 16, 48])  # where they begin


@pytest.fixture(autouse=True)
def poisoned_memory(one_thread: None) -> Iterator[None]:
    """Memory that no kernel wrote holds NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def seen(
    position_BT: Tensor, num_keys: int, grid: tuple[int, int, int | None], first_T: Tensor | None
) -> Tensor:
    """bool [B, T, C]: the key's last token is no later than the query, its first is of the
    document, and it is within the width.
    """
    block, stride, width = grid
    key = torch.arange(num_keys)
    kept = key * stride + block - 1 <= position_BT[..., None]
    if first_T is not None:
        kept = kept & (key * stride >= first_T[:, None])
    if width is not None:
        kept = kept & (key > position_BT[..., None] - width)
    return kept


def first_of(tokens: int) -> Tensor:
    return DOCUMENTS[(torch.arange(tokens)[:, None] >= DOCUMENTS).sum(1) - 1]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    *,
    sel_block: int = 16,
    q_start: int | Tensor = 0,
) -> Tensor:
    return operator.attend(
        q, k, v, blocks, sel_block=sel_block, q_start=q_start, scale=q.shape[-1] ** -0.5, fa2=None
    )[0]


# as nsa.ops.kernels.common.COPY_MIN_ELEMENTS: no tile by a tensor descriptor
ORDINARY_LOADS = 1 << 62


def differentiable(name: str, device: str = "cpu") -> tuple[object, ...]:
    """The arguments of ``operator_calls()[name]``; those that have a gradient require it."""
    # the first so many arguments
    wanted = {
        "interval": 3,
        "selected_triton": 3,
        "gated_sum": 4,
        "means": 2,
        "phi_linear": 4,
        "phi_mlp": 8,
        "joined": 3,
    }.get(name, 0)

    def prepared(x: object, wants: bool) -> object:
        if isinstance(x, list):
            return [prepared(one, wants) for one in x]
        return (
            x.to(device).requires_grad_(wants and x.is_floating_point())
            if isinstance(x, Tensor)
            else x
        )

    return tuple(prepared(x, i < wanted) for i, x in enumerate(operator_calls()[name]))


def operator_calls() -> dict[str, tuple[object, ...]]:
    q, k, v = qkv(Case(6, 2, 16, 24, 1))
    o, lse = randn(1, 6, 4, 24, seed=3), randn(1, 6, 4, seed=4)
    blocks = torch.zeros(1, 6, 2, 2, dtype=torch.int32)
    blocks[..., 1] = -1
    gates, window, chosen = randn(1, 6, 4, 3, seed=5), (0, 1, 1, 3, 0.25), (0, 4, 0, 0.25, True)
    # lists that a forward of so few queries leaves unwritten
    lists = torch.zeros(grid_of(q, v, blocks, 4).room, dtype=torch.int32)
    kv, left = (
        [x + i for i in range(3) for x in (k, v)],
        [*(o + i for i in range(3)), *(lse + i for i in range(3)), lists],
    )
    two = randn(2, 3, 1, 6, 4, seed=2)
    joined = (gates.sigmoid(), q, kv, blocks, left, None, None, [0, 1, 1, 4, 3, 0, 0], 0.25)
    tokens = [randn(1, 9, 2, n, seed=6) for n in (16, 24)]
    flat, hidden = ([randn(n, 4 * n, seed=i) for n in (16, 24)] for i in (7, 8))
    position, down = (
        [randn(4, n, seed=9) for n in (16, 24)],
        [randn(n, n, seed=5) for n in (16, 24)],
    )
    of_mlp, compressed = (*tokens, *hidden, *position, *down, 4, 2), [x[:, :3] for x in tokens]
    return {
        "interval": (q, k, v, None, None, *window),
        "interval_backward": (o, o, lse, q, k, v, None, None, *window),
        "selected_triton": (q, k, v, blocks, None, *chosen),
        "selected_triton_backward": (o, o, lse, lists, q, k, v, blocks, None, *chosen),
        "choose": (q, k, lse, None, None, 0, 6, 1, 1, 4, 2, 1, 1, 0.25),
        "gated_sum": (gates, o, o + 1, o + 2),
        "gated_sum_backward": (o, gates, o, o + 1, o + 2),
        "means": (randn(1, 9, 2, 16, seed=6), randn(1, 9, 2, 24, seed=7), 4, 2),
        "means_backward": (randn(1, 3, 2, 16, seed=8), randn(1, 3, 2, 24, seed=9), 9, 4, 2),
        "phi_linear": (*tokens, *flat, 4, 2),
        "phi_linear_backward": (*compressed, *tokens, *flat, 4, 2),
        "phi_mlp": of_mlp,
        "phi_mlp_backward": (*compressed, *compressed, *of_mlp),
        "joined": joined,
        "gate_products": (o, gates.sigmoid(), left[:6]),
        "joined_backward": (o, q, kv, blocks, two[0], two[1], lists, *joined[5:]),
    }
