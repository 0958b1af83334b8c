"""On CUDA, at the sizes that matter: the lists of queries of each block are bitwise those of
PyTorch's stable sort; the interpreter has neither barriers nor caches.
"""

from __future__ import annotations

import pytest
import torch

from nsa.ops.selected.triton.block_lists import Lists

SIZES = [  # batch, rows, kv heads, slots, blocks, rows a chunk
    (1, 2_048, 2, 16, 32, 2_048),
    (8, 2_048, 2, 16, 32, 16_384),
    (1, 65_536, 2, 16, 1_024, 21_845),
    (3, 5_000, 3, 13, 79, 4_099),
    (1, 131_072, 4, 16, 2_048, 8_192),
]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("kind", ["random", "hot"])
def test_counted_lists_are_those_of_a_stable_sort(size: tuple[int, ...], kind: str) -> None:
    B, T, G, N, J, step = size
    given = torch.Generator("cuda").manual_seed(1)
    low, high = (-2, J + 1) if kind == "random" else (J // 2, J // 2 + 1)
    shape = (B, T, G, N)
    blocks = torch.randint(low, high, shape, dtype=torch.int32, device="cuda", generator=given)
    for full in (0, 700):
        counted, again, by_sort = (
            Lists.of(blocks, J, step, full=full, counted=how) for how in (True, True, False)
        )
        for name in ("key_E", "order_E", "bound"):
            want = getattr(by_sort, name)
            assert torch.equal(getattr(counted, name), want), (name, full)
            assert torch.equal(getattr(again, name), want), (name, full)
