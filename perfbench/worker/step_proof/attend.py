"""The attention of the twin, over given blocks: plain softmax attention under masks, which shares
no code with `nsa`; and where that is too large, the functions of `nsa` that the proof of the
attention is of, in the cell's dtype, half of the queries at a time.

Halves are calls of another shape than the step's, so that nothing that the step left behind for its
own shape can answer them.

B batch, T query tokens, S keys, G kv heads, N blocks, C compressed keys.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nsa.config import BRANCHES, ModelConfig
from nsa.functional import (
    compressed_attention,
    select_blocks,
    selected_attention,
    sliding_attention,
)
from nsa.routing import DENSE, DENSE_KINDS, Path
from perfbench.older_nsa import KV, View
from perfbench.records import Cell
from perfbench.worker.step_proof.blocks import sampled
from perfbench.worker.step_proof.twin_parts import compressed, masked_attention
from perfbench.worker.workloads.attention import FullAttention

PLAIN_LOGITS = 2**24  # of one branch, all sequences and heads


@dataclass(frozen=True, slots=True)
class Heads:
    """What the projections of a layer make of its input: q [B, T, HQ, D] rotated, and of each
    branch k and v; ``k_raw`` is the compressed branch's before rotation. ``gates`` [B, T, HQ, 3].
    """

    q: Tensor
    k_raw: Tensor
    k: tuple[Tensor, Tensor, Tensor]
    v: tuple[Tensor, Tensor, Tensor]
    gates: Tensor | None
    phi: dict[str, Tensor]


@dataclass(slots=True)
class Attention:
    """Attends for each layer.

    ``blocks``: of each layer int32 [B, T, G, N], None where it attends to all of them; without the
    list each layer chooses by NSA.md's rule from its own q. ``caches``, one a layer, hold what
    comes before the one token that attends.

    ``seen`` afterwards has q of the `sampled` rows and the compressed keys of each layer, as the
    attention had them.
    """

    model: ModelConfig
    cell: Cell
    dtype: torch.dtype
    blocks: Sequence[Tensor | None] | None = None
    caches: Sequence[Any] | None = None
    seen: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __call__(self, layer: int, heads: Heads) -> Tensor:
        """[B, T, HQ, DV] in the dtype of ``heads``."""
        wide, plain = heads.q.dtype, self.is_plain(heads.q)
        inside = wide if plain else self.dtype
        q = heads.q.to(inside)
        if self.cell.is_dense:
            k, v = heads.k[0].to(inside), heads.v[0].to(inside)
            if self.caches is not None:
                return self._dense_with_cache(layer, heads)
            if plain:
                return masked_attention(q, k, v, causal(q, k.shape[1], 0))
            # kernels that serve a cache alone take no whole sequence: SDPA's stands in
            kind = self.cell.path if self.cell.path in DENSE_KINDS else DENSE
            o: Tensor = FullAttention(self.model, kind)(q, k, v)
            return o.to(wide)
        assert heads.gates is not None
        keys = self._keys(layer, heads, inside)
        self.seen[layer] = (q[:, sampled(q)].detach(), keys.cmp[0].detach())
        of_branch = self._plain(layer, q, keys) if plain else self._in_halves(layer, q, keys)
        total = torch.zeros((), dtype=torch.promote_types(wide, torch.float32), device=q.device)
        for column, branch in enumerate(BRANCHES):
            if branch in of_branch:
                gate = heads.gates[..., column, None].to(total.dtype)
                total = total + gate * of_branch[branch].to(total.dtype)
        return total.to(wide)

    def _dense_with_cache(self, layer: int, heads: Heads) -> Tensor:
        """Of one token a row over the cache and itself, a row at a time: so many keys at once."""
        assert self.caches is not None
        cache, wide = self.caches[layer], heads.q.dtype
        k, v = (x[0].to(self.dtype) for x in (heads.k, heads.v))
        held = cache.lengths[0]
        rows = []
        for b in range(heads.q.shape[0]):
            keys, values = (
                torch.cat([buffer[b : b + 1, :held], new[b : b + 1]], 1).to(wide)
                for buffer, new in zip(cache.kv, (k, v), strict=True)
            )
            q = heads.q[b : b + 1]
            rows.append(masked_attention(q, keys, values, causal(q, held + 1, held)))
        return torch.cat(rows)

    def is_plain(self, q: Tensor) -> bool:
        """Whether all logits of a branch are few enough to be made."""
        held = self.caches[0].lengths[0] if self.caches else 0
        return q.shape[0] * q.shape[2] * q.shape[1] * (q.shape[1] + held) <= PLAIN_LOGITS

    def _keys(self, layer: int, heads: Heads, dtype: torch.dtype) -> View:
        """The keys of each branch, and where the first query stands among them."""
        nsa = self.model.nsa
        first = heads.k[0] if nsa.rotates_before_compression else heads.k_raw
        if self.caches is not None:
            return self._with_cache(layer, first, heads, dtype)
        kv_cmp = compressed(first, heads.v[0], nsa, heads.phi)
        kv_cmp, kv_sel, kv_win = (
            (k.to(dtype), v.to(dtype))
            for k, v in (kv_cmp, *zip(heads.k[1:], heads.v[1:], strict=True))
        )
        return View(kv_cmp, kv_sel, kv_win, 0, 0)

    def _plain(self, layer: int, q: Tensor, keys: View) -> dict[str, Tensor]:
        nsa, start, win_start = self.model.nsa, int(keys.q_start), int(keys.win_start)
        keep: dict[str, Tensor] = {}
        if "cmp" in nsa.branches:
            end = torch.arange(keys.cmp[0].shape[1], device=q.device) * nsa.cmp_stride
            seen = end + nsa.cmp_block - 1 <= _positions(q, start)[:, None]
            keep["cmp"] = seen[None, None]
        if "sel" in nsa.branches:
            S = keys.sel[0].shape[1]
            blocks = self._blocks(layer, q, keys)
            j = torch.arange(-(-S // nsa.sel_block), device=q.device)
            chosen = (blocks[..., None] == j).any(3).transpose(1, 2)  # [B, G, T, J]
            keys_of = chosen[..., None].expand(*chosen.shape, nsa.sel_block).flatten(3)
            keep["sel"] = keys_of[..., :S] & causal(q, S, start)
        if "win" in nsa.branches:
            near = causal(q, keys.win[0].shape[1], win_start)
            far = causal(q, keys.win[0].shape[1], win_start - nsa.window)
            keep["win"] = near & ~far
        kv = {"cmp": keys.cmp, "sel": keys.sel, "win": keys.win}
        return {branch: masked_attention(q, *kv[branch], mask) for branch, mask in keep.items()}

    def _in_halves(self, layer: int, q: Tensor, keys: View) -> dict[str, Tensor]:
        nsa, cell, T = self.model.nsa, self.cell, q.shape[1]
        blocks = self._blocks(layer, q, keys) if "sel" in nsa.branches else None
        parts: dict[str, list[Tensor]] = {branch: [] for branch in nsa.branches}
        cuts = [slice(0, T // 2), slice(T // 2, T)] if T > 1 else [slice(0, 1)]
        for cut in cuts:
            mine, start = q[:, cut], int(keys.q_start) + cut.start
            if "cmp" in parts:
                parts["cmp"].append(self._compressed(mine, keys.cmp, start))
            if blocks is not None:
                o = selected_attention(
                    mine,
                    *keys.sel,
                    blocks[:, cut],
                    sel_block=nsa.sel_block,
                    q_start=start,
                    path=cell.path,
                    fa2=fa2_of_selected(cell),
                )
                parts["sel"].append(o)
            if "win" in parts:
                begin = int(keys.win_start) + cut.start
                upto = (x[:, : begin + mine.shape[1]] for x in keys.win)
                parts["win"].append(
                    sliding_attention(mine, *upto, window=nsa.window, q_start=begin, fa2=cell.fa2)
                )
        return {branch: torch.cat(found, 1) for branch, found in parts.items()}

    def _compressed(self, q: Tensor, kv: KV, start: int) -> Tensor:
        if kv[0].shape[1] == 0:
            return q.new_zeros(*q.shape[:3], self.model.value_dim)
        nsa = self.model.nsa
        return compressed_attention(
            q, *kv, block=nsa.cmp_block, stride=nsa.cmp_stride, q_start=start
        )[0]

    def _blocks(self, layer: int, q: Tensor, keys: View) -> Tensor:
        start, S = int(keys.q_start), keys.sel[0].shape[1]
        if self.blocks is None:
            return select_blocks(
                q.detach(), keys.cmp[0].detach(), config=self.model.nsa, q_start=start, kv_len=S
            )
        given = self.blocks[layer]
        if given is not None:
            return given
        j = torch.arange(-(-S // self.model.nsa.sel_block), device=q.device, dtype=torch.int32)
        current = _positions(q, start) // self.model.nsa.sel_block
        every = torch.where(j <= current[:, None], j, -1)[None, :, None]
        return every.expand(q.shape[0], -1, self.model.num_kv_heads, -1).contiguous()

    def _with_cache(self, layer: int, first: Tensor, heads: Heads, dtype: torch.dtype) -> View:
        """The keys of the cache and the token's own behind them.

        The copy shares the buffers of the original, which the next step overwrites where this one
        writes.
        """
        assert self.caches is not None
        pairs = [
            (k.to(self.dtype), v.to(self.dtype))
            for k, v in zip((first, *heads.k[1:]), heads.v, strict=True)
        ]
        view = copy.copy(self.caches[layer]).append(*pairs, compress=_no_block)
        kv_cmp, kv_sel, kv_win = (
            (k.to(dtype), v.to(dtype)) for k, v in (view.cmp, view.sel, view.win)
        )
        return View(kv_cmp, kv_sel, kv_win, view.q_start, view.win_start)


def causal(q: Tensor, keys: int, start: int) -> Tensor:
    """Boolean [1, 1, T, S]: keys at or before their query, the first of which is at ``start``."""
    key = torch.arange(keys, device=q.device)
    return (key <= _positions(q, start)[:, None])[None, None]


def _positions(q: Tensor, start: int) -> Tensor:
    return torch.arange(q.shape[1], device=q.device) + start


def _no_block(k: Tensor, v: Tensor, first_block: Tensor) -> KV:
    raise AssertionError("a timed decode step completes no compressed block")


def fa2_of_selected(cell: Cell) -> str:
    """What `selected_attention` alone is asked of FA-2: of the branch's paths only v2 can use it,
    and an explicit "on", which the cell's window meets, would be refused to the others.
    """
    return cell.fa2 if cell.path == Path.V2 or cell.fa2 != "on" else "off"
