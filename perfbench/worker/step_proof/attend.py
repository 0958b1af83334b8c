"""The attention of the twin: the functions of `nsa` that the proof of the attention is of, called
one by one over given blocks, in the cell's dtype.

B batch, T query tokens, G kv heads, N blocks, C compressed keys.
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
from perfbench.older_nsa import KV, NSACache
from perfbench.records import Cell
from perfbench.worker.step_proof.blocks import sampled
from perfbench.worker.step_proof.twin_parts import compressed
from perfbench.worker.workloads.attention import FullAttention


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
    caches: Sequence[NSACache] | None = None
    seen: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __call__(self, layer: int, heads: Heads) -> Tensor:
        """[B, T, HQ, DV] in the dtype of ``heads``."""
        wide = heads.q.dtype
        q = heads.q.to(self.dtype)
        if self.cell.is_dense:
            k, v = heads.k[0].to(self.dtype), heads.v[0].to(self.dtype)
            o: Tensor = FullAttention(self.model, self.cell.path)(q, k, v)
            return o.to(wide)
        assert heads.gates is not None
        of_branch, k_cmp = self._branches(layer, q, heads)
        self.seen[layer] = (q[:, sampled(q)].detach(), k_cmp.detach())
        total = torch.zeros((), dtype=torch.promote_types(wide, torch.float32), device=q.device)
        for column, branch in enumerate(BRANCHES):
            if branch in of_branch:
                gate = heads.gates[..., column, None].to(total.dtype)
                total = total + gate * of_branch[branch].to(total.dtype)
        return total.to(wide)

    def _branches(self, layer: int, q: Tensor, heads: Heads) -> tuple[dict[str, Tensor], Tensor]:
        model, nsa = self.model, self.model.nsa
        start: int = 0
        win_start: int = 0
        if self.caches is None:
            k_cmp, v_cmp = compressed(
                heads.k_raw if not nsa.rotates_before_compression else heads.k[0],
                heads.v[0],
                nsa,
                heads.phi,
            )
            kv_cmp, kv_sel, kv_win = (
                (k.to(self.dtype), v.to(self.dtype))
                for k, v in (
                    (k_cmp, v_cmp),
                    (heads.k[1], heads.v[1]),
                    (heads.k[2], heads.v[2]),
                )
            )
        else:
            kv_cmp, kv_sel, kv_win, start, win_start = self._with_cache(layer, heads)
        o: dict[str, Tensor] = {}
        if "cmp" in nsa.branches:
            o["cmp"] = self._compressed(q, kv_cmp, start, model)
        if "sel" in nsa.branches:
            o["sel"] = selected_attention(
                q,
                *kv_sel,
                self._blocks(layer, q, kv_cmp[0], start, kv_sel[0].shape[1]),
                sel_block=nsa.sel_block,
                q_start=start,
                path=self.cell.path,
                fa2=self.cell.fa2,
            )
        if "win" in nsa.branches:
            o["win"] = sliding_attention(
                q, *kv_win, window=nsa.window, q_start=win_start, fa2=self.cell.fa2
            )
        return o, kv_cmp[0]

    def _compressed(self, q: Tensor, kv: KV, start: int, model: ModelConfig) -> Tensor:
        if kv[0].shape[1] == 0:
            return q.new_zeros(*q.shape[:3], model.value_dim)
        nsa = model.nsa
        o, _ = compressed_attention(
            q, *kv, block=nsa.cmp_block, stride=nsa.cmp_stride, q_start=start
        )
        return o

    def _blocks(self, layer: int, q: Tensor, k_cmp: Tensor, start: int, keys: int) -> Tensor:
        if self.blocks is None:
            return select_blocks(
                q.detach(), k_cmp.detach(), config=self.model.nsa, q_start=start, kv_len=keys
            )
        given = self.blocks[layer]
        if given is not None:
            return given
        j = torch.arange(-(-keys // self.model.nsa.sel_block), device=q.device, dtype=torch.int32)
        current = (torch.arange(q.shape[1], device=q.device) + start) // self.model.nsa.sel_block
        every = torch.where(j <= current[:, None], j, -1)
        return every[None, :, None].expand(q.shape[0], -1, self.model.num_kv_heads, -1).contiguous()

    def _with_cache(self, layer: int, heads: Heads) -> tuple[KV, KV, KV, int, int]:
        """The keys of the cache and the token's own behind them.

        The copy shares the buffers of the original, which the next step overwrites where this one
        writes.
        """
        assert self.caches is not None
        cache, nsa = copy.copy(self.caches[layer]), self.model.nsa
        first = heads.k[0] if nsa.rotates_before_compression else heads.k_raw
        pairs = [
            (k.to(self.dtype), v.to(self.dtype))
            for k, v in zip((first, *heads.k[1:]), heads.v, strict=True)
        ]
        view: Any = cache.append(pairs[0], pairs[1], pairs[2], compress=_no_block)
        return view.cmp, view.sel, view.win, view.q_start, view.win_start


def _no_block(k: Tensor, v: Tensor, first_block: Tensor) -> KV:
    raise AssertionError("a timed decode step completes no compressed block")
