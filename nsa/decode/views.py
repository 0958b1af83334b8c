"""What attention and a cache exchange: views of keys, and where a step's token goes.

B batch, T tokens of the chunk, G kv heads, D head dim, l compressed block, d its stride.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from nsa.blocks import BlockGrid
from nsa.config import NSAConfig
from nsa.ops.paged import LayerPages, blocks_before

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

    @property
    def num_keys(self) -> int:
        """Tokens that the selected branch may attend to."""
        return self.sel[1].shape[1]

    @property
    def num_cmp(self) -> int:
        return self.cmp[0].shape[1]

    @property
    def num_win(self) -> int:
        return self.win[0].shape[1]


class PagedView(View):
    """The same of a cache in pages: kernels read them where they lie; whatever asks for ``cmp``,
    ``sel`` or ``win`` gets contiguous copies (`gathered`).
    """

    pages: LayerPages
    grid: BlockGrid
    new_win: KV
    uniform_start: int | None
    by_kernels: bool

    def __init__(
        self,
        pages: LayerPages,
        grid: BlockGrid,
        new_win: KV,
        uniform_start: int | None,
        *,
        by_kernels: bool,
    ) -> None:
        """``new_win`` is the chunk's window K and V, ``uniform_start`` the position of its first
        query where that is alike in all rows and known on the host. ``by_kernels``: the chunk was
        stored by kernels, and is short enough for those of attention.
        """
        of = {
            "pages": pages,
            "grid": grid,
            "new_win": new_win,
            "uniform_start": uniform_start,
            "by_kernels": by_kernels,
        }
        for name, value in of.items():  # a View is frozen
            object.__setattr__(self, name, value)

    @property
    def cmp(self) -> KV:  # type: ignore[override]
        return self.gathered.cmp

    @property
    def sel(self) -> KV:  # type: ignore[override]
        return self.gathered.sel

    @property
    def win(self) -> KV:  # type: ignore[override]
        return self.gathered.win

    @property
    def q_start(self) -> int | Tensor:  # type: ignore[override]
        return self.pages.start_B if self.uniform_start is None else self.uniform_start

    @property
    def win_start(self) -> int | Tensor:  # type: ignore[override]
        if self.uniform_start is None:
            return self.pages.start_B.clamp(max=self._reach)
        return min(self._reach, self.uniform_start)

    @property
    def num_keys(self) -> int:
        return self.pages.max_tokens

    @property
    def num_cmp(self) -> int:
        """Compressed blocks of the longest row."""
        return self.grid.num_cmp(self.pages.max_tokens)

    @property
    def num_win(self) -> int:
        """Tokens of the window before the chunk, and the chunk."""
        before = self._reach if self.uniform_start is None else min(self._reach, self.uniform_start)
        return before + self.new_win[0].shape[1]

    @property
    def _reach(self) -> int:
        """The most tokens of the window before a query."""
        return min(self.grid.window, self.pages.max_tokens) - 1

    @cached_property
    def gathered(self) -> View:
        """Contiguous copies: compressed blocks and tokens of each row from its first one on, the
        last w - 1 of the window and the chunk; 0 where a row holds none.
        """
        pages, (k, _) = self.pages, self.new_win
        start_B1, total_B1 = pages.start_B[:, None], pages.seq_lens[:, None]
        (B, T), dtype, device = k.shape[:2], k.dtype, k.device

        def first(number: int) -> Tensor:
            return torch.arange(number, device=device).expand(B, number)

        token_BS, block_BC = first(self.num_keys), first(self.num_cmp)
        due_B1 = blocks_before(total_B1, self.grid.cmp_block, self.grid.cmp_stride)
        before = self.num_win - T
        position_BI = start_B1 - start_B1.clamp(max=before) + first(before + T)
        old = pages.win.take(position_BI, position_BI < start_B1, dtype)
        at_BI = position_BI - start_B1
        own_BI = ((at_BI >= 0) & (position_BI < total_B1))[..., None, None]
        at_BI = at_BI.clamp(0, T - 1)[..., None, None]
        win_k, win_v = (
            torch.where(own_BI, x.gather(1, at_BI.expand(-1, -1, *x.shape[2:])), kept)
            for x, kept in zip(pages.win.rounded(self.new_win), old, strict=True)
        )
        return View(
            cmp=pages.cmp.take(block_BC, block_BC < due_B1, dtype),
            sel=pages.sel.take(token_BS, token_BS < total_B1, dtype),
            win=(win_k, win_v),
            q_start=self.q_start,
            win_start=self.win_start,
        )


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
