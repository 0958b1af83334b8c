"""What attention and a cache exchange: views of keys, and where a step's token goes.

B batch, T tokens of the chunk, G kv heads, D head dim, l compressed block, d its stride.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nsa.blocks import BlockGrid
from nsa.config import NSAConfig

KV = tuple[Tensor, Tensor]
# (k, v) raw [B, L, G, D] and the index of the first block of each row [B] -> (k, v) compressed [B,
# C(L), G, D]
CompressFn = Callable[[Tensor, Tensor, Tensor], KV]


@dataclass(frozen=True, slots=True)
class View:
    """What the branches attend to: ``cmp`` compressed, ``sel`` all tokens, ``win`` the last w - 1
    and the chunk.

    ``q_start`` is the position of the chunk's first query (int, or int64 [B] where rows differ),
    ``win_start`` the same within ``win``, whose keys begin later.
    """

    cmp: KV
    sel: KV
    win: KV
    q_start: int | Tensor
    win_start: int | Tensor


@dataclass(frozen=True, slots=True)
class DenseStep:
    """As `Step`, of a layer with full causal attention: ``position_B`` int64, the same as int32,
    and the row [B, 1, 1, 1] of K and V that takes the token.
    """

    position_B: Tensor
    position_int32_B: Tensor
    row_B111: Tensor


class Step:
    """Where the one token of each row goes, int64; the same for every layer, so a model makes it
    once a forward.

    ``position_B``, and ``win_start_B`` within the ring; the rows [B, 1, 1, 1] of each buffer that
    take the token, or in ``cmp`` the block that it completes; ``block_BL11`` the slots of the last
    l raw tokens; ``block_B`` which block they are, were they one. All but the position are made
    when they are asked for: a fused step asks for none.
    """

    def __init__(self, position_B: Tensor, config: NSAConfig, max_len: int) -> None:
        self.position_B = position_B
        self._config, self._max_len = config, max_len
        self._ring = min(config.window, max_len)  # rows of the window's
        self._made: dict[str, Tensor] = {}

    @property
    def win_start_B(self) -> Tensor:
        return self._once("win_start", lambda: self.position_B.clamp(max=self._ring - 1))

    @property
    def sel_B111(self) -> Tensor:
        return _as_rows(self.position_B)

    @property
    def win_B111(self) -> Tensor:
        return self._once("win", lambda: _as_rows(self.position_B % self._ring))

    @property
    def raw_B111(self) -> Tensor:
        return self._once("raw", lambda: _as_rows(self.position_B % self._config.cmp_block))

    @property
    def cmp_B111(self) -> Tensor:
        return self._once("cmp", self._row_of_cmp)

    @property
    def block_BL11(self) -> Tensor:
        return self._once("slots", self._slots)

    @property
    def block_B(self) -> Tensor:
        first_B = self._first_B
        return self._once("block", lambda: (first_B // self._config.cmp_stride).clamp(min=0))

    @property
    def _first_B(self) -> Tensor:
        """Of the last l tokens."""
        return self._once("first", lambda: self.position_B + (1 - self._config.cmp_block))

    def _row_of_cmp(self) -> Tensor:
        first_B, d = self._first_B, self._config.cmp_stride
        completes_none_B = (first_B < 0) | (first_B % d != 0)
        spare = BlockGrid.of(self._config).num_cmp(self._max_len)  # the last row of cmp
        return _as_rows(self.block_B.masked_fill(completes_none_B, spare))

    def _slots(self) -> Tensor:
        l = self._config.cmp_block  # noqa: E741 (the paper's)
        token = torch.arange(l, device=self.position_B.device)
        return ((self._first_B[:, None] + token) % l)[..., None, None]

    def _once(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        # functools.cached_property takes a lock, which no compiled graph holds
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]


def _as_rows(x_B: Tensor) -> Tensor:
    return x_B[:, None, None, None]
