"""A needle in a haystack: one key that the queries want, in one selection block, among noise.

For the CPU and the GPU tests.

G kv heads, H query heads per kv head, D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nsa import NSAConfig
from tests.cases import randn

PAPER = NSAConfig()
G, H, D = 2, 2, 64
PULL = 160.0  # logit of the needle's key; 5 even after a mean over 32 tokens
# logit of every other key of its block, so that without the needle no query wants the block
PUSH = -2.0
VALUE = 10.0  # along the last value dimension, in which everything else is exactly 0


@dataclass(frozen=True, slots=True)
class Haystack:
    q: Tensor
    k: Tensor
    v: Tensor
    positions: Mapping[int, int]  # kv head -> the needle's token

    def block(self, head: int) -> int:
        return self.positions[head] // PAPER.sel_block

    def without(self) -> Haystack:
        """The same with the needles' keys and values zeroed."""
        k, v = self.k.clone(), self.v.clone()
        for head, token in self.positions.items():
            k[:, token, head] = 0
            v[:, token, head] = 0
        return Haystack(self.q, k, v, self.positions)

    def queries(self, rows: slice) -> Haystack:
        return Haystack(self.q[:, rows], self.k, self.v, self.positions)

    @property
    def kv(self) -> tuple[Tensor, Tensor]:
        return self.k, self.v


def haystack(
    tokens: int,
    blocks: Mapping[int, int],
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Haystack:
    """Every query wants the needle of its kv head, which lies at a random token of selection block
    ``blocks[head]``.
    """
    direction_GD = torch.nn.functional.normalize(randn(G, D, seed=seed), dim=-1)
    q = (direction_GD * D**0.5)[:, None].expand(-1, H, -1).reshape(G * H, D) + 0.1 * randn(
        1, tokens, G * H, D, seed=seed + 1
    )
    k, v = randn(1, tokens, G, D, seed=seed + 2), randn(1, tokens, G, D, seed=seed + 3)
    v[..., -1] = 0
    # for each head, so that a needle of one head is no reason for another
    for block in blocks.values():
        k[:, block * PAPER.sel_block : (block + 1) * PAPER.sel_block] = PUSH * direction_GD
    generator = torch.Generator().manual_seed(seed + 4)
    positions = {}
    for head, block in blocks.items():
        token = block * PAPER.sel_block + int(
            torch.randint(PAPER.sel_block, (), generator=generator)
        )
        k[:, token, head] = PULL * direction_GD[head]
        v[:, token, head] = 0
        v[:, token, head, -1] = VALUE
        positions[head] = token
    return Haystack(*(x.to(device, dtype) for x in (q, k, v)), positions)


def chosen(blocks_BTGN: Tensor, head: int, block: int) -> Tensor:
    """Boolean [B, T]: whether the kv head's set holds ``block``."""
    return (blocks_BTGN[:, :, head] == block).any(-1)


def of_head(o_BTQD: Tensor, head: int) -> Tensor:
    """[B, T, H, D]: the outputs of the kv head's query heads."""
    return o_BTQD[:, :, head * H : (head + 1) * H]


def assert_found(o_BTHD: Tensor, gate: float) -> None:
    """The needle's value, weighted by the selected branch's gate, is nearly all of the output."""
    needle, rest = o_BTHD[..., -1].float(), o_BTHD[..., :-1].float().norm(dim=-1)
    assert bool((needle >= 0.99 * gate * VALUE).all()), (
        f"least share of the needle's value {needle.min().item() / (gate * VALUE):.3f}"
    )
    assert bool((rest <= 0.3 * needle).all()), (
        f"other values make {float((rest / needle).max()):.2f} of the needle's"
    )
