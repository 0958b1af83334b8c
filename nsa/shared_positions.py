"""The positions of the tokens of one forward, shared by all layers.

A Layout is the same for every layer, so a model makes it once a forward.

B batch, T tokens, R rows (the tokens, or those of packed documents with room between them), M model
dim, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from nsa import checks
from nsa.config import NSAConfig
from nsa.decode import DenseCache, DenseStep, NSACache, Step
from nsa.decode.cache import check_rows
from nsa.decode.views import not_a_step
from nsa.documents import Documents, Packing
from nsa.ops.positions import query_positions, to_device
from nsa.rope import angles, turns


@dataclass(frozen=True, slots=True)
class Layout:
    """What the layers of one forward share.

    ``turns``: RoPE of each row, as `nsa.rope.turns` makes them. ``packing``: of packed documents,
    else None.
    ``absent_BT1``: bool [B or 1, T, 1], tokens that hold nothing; ``present_BR``: bool [B or 1, R],
    rows that hold a token; each None where all do. ``step``: where the tokens go in caches that
    step (`nsa.decode.graph_cache`), else None.
    """

    turns: Tensor
    packing: Packing | None
    absent_BT1: Tensor | None
    present_BR: Tensor | None
    step: Step | DenseStep | None = None

    @classmethod
    def of(
        cls,
        x: Tensor,
        config: NSAConfig,
        head_dim: int,
        *,
        dtype: torch.dtype,
        cache: NSACache | DenseCache | None = None,
        cu_seqlens: Tensor | Sequence[int] | None = None,
        num_tokens: Sequence[int] | Tensor | None = None,
    ) -> Self:
        """The Layout of x [B, T, ...] (ids or states) in a model of ``dtype``; the rest as in
        NSAAttention.forward.

        ValueError for cu_seqlens with a cache or num_tokens, and for any that does not fit x.
        """
        if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
            # else a training step could not use it
            with torch.inference_mode(False), torch.no_grad():
                return cls.of(
                    x,
                    config,
                    head_dim,
                    dtype=dtype,
                    cache=cache,
                    cu_seqlens=cu_seqlens,
                    num_tokens=num_tokens,
                )
        if cache is not None and cu_seqlens is not None:
            raise ValueError(
                "got a cache and cu_seqlens; wanted at most one; fill a cache with rows of"
                " num_tokens, or pack without one"
            )
        if num_tokens is not None and cu_seqlens is not None:
            raise ValueError(
                "got num_tokens and cu_seqlens; wanted at most one; cu_seqlens has the lengths of"
                " packed documents"
            )
        if num_tokens is not None:
            checks.fixed_selection(config, whole=False, what="num_tokens")
        T, device = x.shape[1], x.device
        if cache is not None:  # whose positions are of its rows
            check_rows(cache.batch, x.shape[0])

        def turned(position: Tensor) -> Tensor:
            return turns(
                angles(position, head_dim, base=config.rope_base, scale=config.rope_scale), dtype
            )

        if cu_seqlens is not None:
            cu_seqlens = checks.cu_seqlens_tensor(cu_seqlens, device)
            checks.packed(cu_seqlens, x, x, 0, read=checks.may_read(x))
            packing = Packing.of(cu_seqlens, T, config.sel_block)
            return cls(
                turned(packing.position_R[None]),
                packing,
                packing.outside_T[None, :, None],
                packing.present_R[None],
            )
        if cache is not None and num_tokens is None and (step := cache.next_step()) is not None:
            if step.tokens != T:
                raise not_a_step(f"a chunk of {T} tokens", step.tokens)
            return cls(turned(step.positions_BT), None, None, None, step)
        q_start = 0 if cache is None else cache.q_start(device)
        if isinstance(q_start, Tensor) and not torch.compiler.is_compiling() and T == 1:
            position_BT = q_start[:, None]  # two launches fewer in each step
        else:
            position_BT = query_positions(q_start, T, device)
        if num_tokens is None:
            return cls(turned(position_BT), None, None, None)
        if cache is None:
            count_B = checks.lengths(num_tokens, x)
        else:  # the cache compares them with what it holds
            count_B = to_device(checks.counts("num_tokens", num_tokens), device)
        present_BT = torch.arange(T, device=device) < count_B[:, None]
        return cls(turned(position_BT), None, ~present_BT[..., None], present_BT)

    def check(self, x: Tensor, *, packed: bool, some_absent: bool) -> None:
        """ValueError where this Layout cannot be that of a call with x [B, T, ...]."""
        rows = x.shape[1] if self.packing is None else self.packing.num_rows
        fits = (
            (self.packing is not None) == packed
            and (self.absent_BT1 is not None) == some_absent
            and self.turns.shape[1] == rows
        )
        tokens = x.shape[1] if self.absent_BT1 is None else self.absent_BT1.shape[1]
        if not fits or tokens != x.shape[1]:
            got = (
                f"a layout of {tokens} {'packed ' if self.packing is not None else ''}tokens for x"
                f" {tuple(x.shape)}"
            )
            raise ValueError(
                f"got {got}; wanted that of this call's x, cache, cu_seqlens and num_tokens; make"
                " it anew, or leave it out"
            )

    @property
    def documents(self) -> Documents | None:
        return None if self.packing is None else self.packing.documents

    def rows(self, x: Tensor) -> Tensor:
        """Tokens [B, T, ...] to their rows [B, R, ...]."""
        return x if self.packing is None else self.packing.align(x)

    def tokens(self, x: Tensor) -> Tensor:
        """Rows [B, R, ...] back to the tokens [B, T, ...]."""
        return x if self.packing is None else self.packing.restore(x)
