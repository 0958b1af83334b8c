"""Kinds of selections for the selected branch alone: what a model would choose, and what is hardest
for one kernel or another.

All have the contract of `nsa.selected_attention`'s blocks, the forced blocks of the config, and as
many others as the slots and the query's past hold. So every kind reads the same number of keys, and
a difference in time is the pattern's alone.

B batch, T tokens, G kv heads, D head dim, J selection blocks, N slots, K slots that no forced block
takes, F blocks to fill them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from nsa.blocks import BlockGrid
from nsa.compression import compress
from nsa.config import NSAConfig
from nsa.functional import select_blocks
from perfbench.records import SELECTIONS, TRAINED

NONE = torch.iinfo(torch.int32).max  # an empty slot until all are sorted: it comes last


@torch.no_grad()
def chosen(
    kind: str,
    q: Tensor,
    *,
    config: NSAConfig,
    num_kv_heads: int,
    generator: torch.Generator,
    trained: Tensor | None = None,
) -> Tensor:
    """Blocks int32 [B, T, G, N], ascending, unique, -1 padded at the end, none beyond its query,
    for q [B, T, HQ, D] at positions 0 on.

    ``kind`` is one of records.SELECTIONS. ``own``: what `nsa.select_blocks` chooses for q
    and random keys compressed by their mean. ``trained``: the first T rows of the tensor
    ``trained`` [T or more, G, N], in each sequence; a prefix of a causal selection is one. The
    others are the forced blocks and, of the free ones
    (those before the local and after the initial blocks):

    - ``random``: uniform and distinct, drawn anew for each query and kv head;
    - ``local``: one set for all queries of a selection block, but for one block of each query's
    own;
    - ``hot``: the earliest ones, the same for every query that is late enough to see them.

    ``generator`` is of q's device and decides all of it. N is config.num_selected_for(T). No host
    sync but of ``own``, whose scores are made in chunks; memory is O(T N). ValueError for a kind
    that does not exist.
    """
    if kind == "own":
        B, T, _, D = q.shape
        keys = torch.randn(
            B, T, num_kv_heads, D, dtype=q.dtype, device=q.device, generator=generator
        )
        return select_blocks(q, compress(keys, config=replace(config, phi="mean")), config=config)
    if kind == TRAINED:
        return _repeated(trained, q, config, num_kv_heads)
    if kind not in _FREE:
        raise ValueError(f"selection={kind!r}: wanted {', '.join(SELECTIONS)}; name one of them")
    return _with_forced(
        _FREE[kind](_Free.of(q, config, num_kv_heads), generator), q.shape[1], config
    )


def _repeated(trained: Tensor | None, q: Tensor, config: NSAConfig, num_kv_heads: int) -> Tensor:
    B, T = q.shape[:2]
    wanted = (num_kv_heads, config.num_selected_for(T))
    if trained is None or len(trained) < T or trained.shape[1:] != wanted:
        got = "no blocks" if trained is None else f"blocks {list(trained.shape)}"
        raise ValueError(
            f"selection={TRAINED}: got {got}; wanted at least [{T}, {wanted[0]}, {wanted[1]}]; name"
            " a file of them by trained_blocks"
        )
    return trained[:T].to(q.device, torch.int32).expand(B, -1, -1, -1).contiguous()


class _Free:
    """How many free blocks each query has, ids num_initial .. num_initial + F - 1, and how many of
    them its K slots take.
    """

    def __init__(
        self, size: tuple[int, int, int], slots: int, config: NSAConfig, device: torch.device
    ) -> None:
        self.size, self.slots, self.config, self.device = size, slots, config, device

    @classmethod
    def of(cls, q: Tensor, config: NSAConfig, num_kv_heads: int) -> _Free:
        B, T = q.shape[:2]
        slots = config.num_selected_for(T) - config.num_initial - config.num_local
        return cls((B, T, num_kv_heads), slots, config, q.device)

    def counts(self, current: Tensor) -> Tensor:
        """F of queries whose own block is ``current``."""
        return (current + 1 - self.config.num_initial - self.config.num_local).clamp(min=0)

    @property
    def current_T(self) -> Tensor:
        return torch.arange(self.size[1], device=self.device) // self.config.sel_block


def _random(free: _Free, generator: torch.Generator) -> Tensor:
    B, _, G = free.size
    return _distinct(free.counts(free.current_T), B, G, free.slots, generator)


def _local(free: _Free, generator: torch.Generator) -> Tensor:
    """K - 1 free blocks for all queries of a block, and one of the rest for each of them."""
    B, T, G = free.size
    if free.slots == 0:
        return _random(free, generator)
    blocks_J = torch.arange(BlockGrid.of(free.config).num_sel(T), device=free.device)
    shared_BJGK = _distinct(free.counts(blocks_J), B, G, free.slots - 1, generator)
    shared_BTGK = shared_BJGK[:, free.current_T].sort(-1).values
    left_T = (free.counts(free.current_T) - (free.slots - 1)).clamp(min=0)[None, :, None]
    own_BTG = _below(left_T.expand(B, T, G), generator)
    # the own-th of those that are not shared: step over each shared one at or before it
    for shared_BTG in shared_BTGK.unbind(-1):
        own_BTG = own_BTG + (shared_BTG <= own_BTG)
    return torch.cat([shared_BTGK, own_BTG.masked_fill(left_T == 0, NONE)[..., None]], -1)


def _hot(free: _Free, generator: torch.Generator) -> Tensor:
    B, T, G = free.size
    slot_K = torch.arange(free.slots, device=free.device)
    seen_TK = slot_K < free.counts(free.current_T)[:, None]
    return torch.where(seen_TK, slot_K, NONE)[None, :, None].expand(B, T, G, free.slots)


_FREE = {"random": _random, "local": _local, "hot": _hot}


def _distinct(count_T: Tensor, B: int, G: int, K: int, generator: torch.Generator) -> Tensor:
    """min(K, count) distinct numbers below ``count_T``, every set equally likely; int64 [B, T, G,
    K], the rest `NONE`.

    Floyd's way (Bentley and Floyd, CACM 30(9), 1987): for each j of the last K numbers one below or
    equal to it, or j itself where that was drawn before. It needs K numbers a row, not one for each
    of the count.
    """
    T = len(count_T)
    drawn = torch.full((B, T, G, K), NONE, dtype=torch.int64, device=count_T.device)
    for k in range(K):
        j_BTG = (count_T - K + k)[None, :, None].expand(B, T, G)
        pick_BTG = _below((j_BTG + 1).clamp(min=1), generator)
        taken_BTG = (drawn[..., :k] == pick_BTG[..., None]).any(-1)
        drawn[..., k] = torch.where(taken_BTG, j_BTG, pick_BTG).masked_fill(j_BTG < 0, NONE)
    return drawn


def _below(limit: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform whole numbers in [0, limit), 0 for a limit of 0, in limit's shape."""
    share = torch.rand(limit.shape, dtype=torch.float64, device=limit.device, generator=generator)
    return torch.minimum((share * limit).long(), (limit - 1).clamp(min=0))


def _with_forced(free_BTGK: Tensor, T: int, config: NSAConfig) -> Tensor:
    """The free blocks, counted from num_initial, with the forced ones, in the order that the
    contract wants.
    """
    B, _, G, _ = free_BTGK.shape
    device = free_BTGK.device
    current_T1 = (torch.arange(T, device=device) // config.sel_block)[:, None]
    initial = torch.arange(config.num_initial, device=device).expand(T, -1)
    local = current_T1 - torch.arange(config.num_local, device=device)
    initial = initial.masked_fill(initial > current_T1, NONE)
    # an initial one already, or before the first
    local = local.masked_fill(local < config.num_initial, NONE)
    forced_BTGN = torch.cat([initial, local], -1)[None, :, None].expand(B, T, G, -1)
    found = torch.where(free_BTGK == NONE, NONE, free_BTGK + config.num_initial)
    blocks = torch.cat([forced_BTGN, found], -1).to(torch.int32).sort(-1).values
    return blocks.masked_fill(blocks == NONE, -1)
