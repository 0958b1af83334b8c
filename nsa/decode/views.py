"""What attention and a cache exchange: views of keys, and where a step's token goes.

B batch, T tokens of the chunk, G kv heads, D head dim, l compressed block, d its stride.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

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
    """As `Step`, of layers with full causal attention: ``position_B`` int64 of the first token, the
    same as int32, those of all tokens, and the rows [B, T, 1, 1] of K and V that take them.
    """

    position_B: Tensor
    position_int32_B: Tensor
    positions_BT: Tensor
    row_BT11: Tensor

    @classmethod
    def of(cls, position_B: Tensor, tokens: int) -> Self:
        """Of ``tokens`` a row, the first at ``position_B``."""
        positions_BT = position_B[:, None]
        if tokens > 1:  # else two launches fewer
            positions_BT = positions_BT + torch.arange(tokens, device=position_B.device)
        return cls(position_B, position_B.int(), positions_BT, _as_rows(positions_BT))

    @property
    def tokens(self) -> int:
        return self.positions_BT.shape[1]


class Step:
    """Where the ``tokens`` new tokens of each row go, int64; the same for every layer, so a model
    makes it once a forward.

    ``position_B`` of the first, ``positions_BT`` of all, and ``win_start_B`` the first query's
    within the window's view. Rows of each buffer, [B, n, 1, 1], that take the tokens
    (``sel_BT11``, ``win_BT11``, ``raw_BT11``), or in ``cmp_BM11`` the M blocks that they may
    complete, the spare row for one that they do not. ``block_B`` is the first of these blocks, and
    ``raw_BL11`` the slots of the raw tokens that all M cover. ``win_view_BV11`` are the slots of
    the window before the tokens and of the tokens, oldest first. All but the position are made when
    they are asked for: a fused step asks for none.
    """

    def __init__(
        self, position_B: Tensor, config: NSAConfig, max_len: int, tokens: int = 1
    ) -> None:
        self.position_B, self.tokens = position_B, tokens
        self._config, self._max_len = config, max_len
        self._made: dict[str, Tensor] = {}

    @staticmethod
    def window_rows(config: NSAConfig, max_len: int, tokens: int) -> int:
        """Of the window's ring: what the first query sees, and the tokens behind it."""
        return min(config.window - 1 + tokens, max_len)

    @staticmethod
    def raw_rows(config: NSAConfig, tokens: int) -> int:
        """Of the raw tokens' ring: those of an unfinished block, and the new ones."""
        return config.cmp_block - 1 + tokens

    @property
    def positions_BT(self) -> Tensor:
        return self._once("positions", lambda: self.position_B[:, None] + self._up_to(self.tokens))

    @property
    def win_start_B(self) -> Tensor:
        before = min(self._config.window, self._max_len) - 1
        return self._once("win_start", lambda: self.position_B.clamp(max=before))

    @property
    def sel_BT11(self) -> Tensor:
        return _as_rows(self.positions_BT)

    @property
    def win_BT11(self) -> Tensor:
        return self._once("win", lambda: _as_rows(self.positions_BT % self._ring))

    @property
    def win_view_BV11(self) -> Tensor:
        return self._once("win_view", self._window_view)

    @property
    def raw_BT11(self) -> Tensor:
        ring = self.raw_rows(self._config, self.tokens)
        return self._once("raw", lambda: _as_rows(self.positions_BT % ring))

    @property
    def block_B(self) -> Tensor:
        l, d = self._config.cmp_block, self._config.cmp_stride  # noqa: E741 (the paper's)
        return self._once("block", lambda: ((self.position_B - l) // d + 1).clamp(min=0))

    @property
    def cmp_BM11(self) -> Tensor:
        return self._once("cmp", self._rows_of_cmp)

    @property
    def raw_BL11(self) -> Tensor:
        return self._once("slots", self._slots)

    @property
    def _ring(self) -> int:
        return self.window_rows(self._config, self._max_len, self.tokens)

    @property
    def _num_blocks(self) -> int:
        """That the tokens can complete at most."""
        return -(-self.tokens // self._config.cmp_stride)

    def _up_to(self, number: int) -> Tensor:
        return torch.arange(number, device=self.position_B.device)

    def _window_view(self) -> Tensor:
        before = min(self._config.window, self._max_len) - 1
        oldest_B = self.position_B - self.win_start_B
        slot_BV = (oldest_B[:, None] + self._up_to(before + self.tokens)) % self._ring
        return _as_rows(slot_BV)

    def _rows_of_cmp(self) -> Tensor:
        block_BM = self.block_B[:, None] + self._up_to(self._num_blocks)
        end_BM = block_BM * self._config.cmp_stride + self._config.cmp_block
        spare = BlockGrid.of(self._config).num_cmp(self._max_len)  # the last row of cmp
        complete_BM = end_BM <= (self.position_B + self.tokens)[:, None]
        return _as_rows(block_BM.masked_fill(~complete_BM, spare))

    def _slots(self) -> Tensor:
        d = self._config.cmp_stride
        covered = (self._num_blocks - 1) * d + self._config.cmp_block
        first_B1 = (self.block_B * d)[:, None]
        ring = self.raw_rows(self._config, self.tokens)
        return _as_rows((first_B1 + self._up_to(covered)) % ring)

    def _once(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        # functools.cached_property takes a lock, which no compiled graph holds
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]


class Replay(Protocol):
    """A layer's step as a CUDA graph of its own (`nsa.decode.LayerGraphs`)."""

    @property
    def layer(self) -> nn.Module: ...

    def step(self, x_B1M: Tensor, cache: Any, num_tokens: object) -> Tensor: ...


def replay_of(cache: Any, layer: nn.Module) -> Replay | None:
    """What replays the step of ``layer``, where it is the module whose step with ``cache`` was
    captured.
    """
    if cache is None or cache.steps is None or not cache.steps.replays:
        return None
    replay: Replay | None = cache.steps.replays.get(id(cache))
    return replay if replay is not None and replay.layer is layer else None


def not_a_step(got: str, tokens: int) -> ValueError:
    """Of what was given to a cache whose steps are of ``tokens``."""
    wanted = "one token" if tokens == 1 else f"{tokens} tokens"
    return ValueError(
        f"got {got} for a cache that steps; wanted {wanted} for every row; end its Steps (or"
        " DecodeGraph, or ChunkGraph) first"
    )


def _as_rows(x_BN: Tensor) -> Tensor:
    return x_BN[:, :, None, None]
