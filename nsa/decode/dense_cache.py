"""DenseCache: what one layer of full causal attention keeps of the tokens so far.

B batch, T tokens of the chunk, G kv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from nsa.decode.cache import TokenShape, check_chunk, room_of
from nsa.decode.views import KV, DenseStep, Replay
from nsa.ops import key_counts

# SDPA's masked kernels want rows of a mask aligned to 16 bytes: a mask over all rows of a buffer of
# this many, or a multiple, needs no copy
ROW_ALIGNMENT = 16


class TakesDenseSteps(Protocol):
    """What a cache asks of the `nsa.decode.Steps` that it belongs to."""

    length_B: Tensor
    replays: dict[int, Replay]

    @property
    def is_between(self) -> bool: ...

    def lengths_of(self, cache: Any) -> tuple[int, ...]: ...
    def next_dense(self) -> DenseStep: ...
    def check_turn(self, cache: Any, chunk: Mapping[str, KV], num_tokens: None) -> None: ...
    def took(self, cache: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class DenseView:
    """What full causal attention of a chunk reads: K and V [B, S, G, D], the chunk's tokens among
    them, and the position of its first query: an int, or (while the cache steps) int64 [B], and as
    int32 [B] in ``store_at``. Then rows of K and V beyond the last query hold nothing.
    """

    kv: KV
    q_start: int | Tensor
    store_at: int | Tensor


class DenseCache:
    """Preallocated keys and values of one layer with full causal attention; DenseLM fills it.

    All rows hold as many tokens. No gradient. While ``steps`` is not None (`nsa.decode.Steps`,
    which DecodeGraph and ChunkGraph use) it takes a fixed number of tokens a row at a time, and the
    length is on the device, too.
    """

    def __init__(self, batch: int, max_len: int, capacity: int, token: TokenShape) -> None:
        self.batch, self.max_len, self.capacity = batch, max_len, capacity
        self._length = 0
        (self.kv,) = token.buffers(batch, (_aligned(capacity),))
        self.steps: TakesDenseSteps | None = None
        self.keys_read = key_counts.KeysRead()

    @classmethod
    def empty(
        cls,
        batch: int,
        max_len: int,
        *,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        initial_len: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Self:
        """Room for ``max_len`` tokens a row, or for ``initial_len`` at first, then doubled as
        needed up to ``max_len``.

        Of k [B, T, G, head_dim] and v [B, T, G, v_head_dim] in ``dtype``. ValueError for sizes
        below 1 or beyond max_len.
        """
        capacity = room_of("DenseCache", batch, max_len, initial_len)
        token = TokenShape(
            num_kv_heads, head_dim, head_dim if v_head_dim is None else v_head_dim, dtype, device
        )
        return cls(batch, max_len, capacity, token)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens that each row holds."""
        return (self._length,) * self.batch if self.steps is None else self.steps.lengths_of(self)

    def q_start(self, device: torch.device) -> int | Tensor:
        """Position of the next token: an int, or while it steps int64 [B]."""
        return self._length if self.steps is None else self.steps.length_B.clone()

    def memory_bytes(self) -> int:
        """Bytes of the buffers as they are now."""
        return sum(x.nbytes for x in self.kv)

    def next_step(self) -> DenseStep | None:
        """Where the next tokens go; None unless it steps."""
        return None if self.steps is None else self.steps.next_dense()

    def append(self, kv: KV, *, step: DenseStep | None = None, stored: bool = True) -> DenseView:
        """Store a chunk of T tokens a row, k [B, T, G, D] and v [B, T, G, DV] of the cache's dtype
        and device, and return what its queries attend to.

        ``stored=False``: the caller's kernel stores them, at the view's ``q_start``. ``step``: that
        of the forward, where the cache steps and its layers share one. ValueError, and nothing
        stored, where one is of another kind or a row would exceed max_len.
        """
        if self.steps is not None:
            self.steps.check_turn(self, {"dense": kv}, None)
            step = self.steps.next_dense() if step is None else step
            if stored:
                for buffer, x in zip(self.kv, kv, strict=True):
                    buffer.scatter_(1, step.row_BT11.expand_as(x), x)
            self.steps.took(self)
            return self._view(kv, self.capacity, step.position_B, step.position_int32_B)
        T, start = kv[0].shape[1], self._length
        check_chunk(self, {"dense": kv}, None)
        self.grow(start + T)
        if stored:
            for buffer, x in zip(self.kv, kv, strict=True):
                buffer[:, start : start + T] = x
        self._length = start + T
        return self._view(kv, start + T, start, start)

    def _view(self, kv: KV, end: int, q_start: int | Tensor, store_at: int | Tensor) -> DenseView:
        rows = end if isinstance(q_start, int) else self.kv[0].shape[1]
        count = partial(key_counts.sliding, kv[0], end, q_start=q_start, window=end)
        self.keys_read.later("dense", count)
        k, v = (x[:, :rows] for x in self.kv)
        return DenseView((k, v), q_start, store_at)

    def grow(self, needed: int) -> None:
        """Make room for ``needed`` tokens a row, at most max_len, by doubling what there is."""
        if needed <= self.capacity:
            return
        capacity = self.capacity
        while capacity < needed:
            capacity = min(2 * capacity, self.max_len)
        rows = _aligned(capacity)
        with torch.inference_mode(False), torch.no_grad():
            self.kv = [
                torch.cat([x, x.new_zeros(self.batch, rows - x.shape[1], *x.shape[2:])], 1)
                for x in self.kv
            ]
        self.capacity = capacity

    def begin_steps(self, steps: TakesDenseSteps, raw: list[Tensor], win: list[Tensor]) -> None:
        """Take a step's tokens from now on. Called by `Steps`; ``raw``, ``win``: of an NSACache."""
        self.steps = steps

    def end_steps(self, lengths: tuple[int, ...] | list[int], tail: list[Tensor]) -> None:
        """Turn back into an ordinary cache that holds ``lengths`` tokens. Called by `Steps.end`;
        ``tail`` is of an NSACache.
        """
        self._length, self.steps = lengths[0], None


def _aligned(rows: int) -> int:
    return -(-rows // ROW_ALIGNMENT) * ROW_ALIGNMENT


def check_dense_cache(cache: object) -> None:
    """ValueError unless ``cache`` is a DenseCache."""
    if not isinstance(cache, DenseCache):
        raise ValueError(
            f"got a cache of type {type(cache).__name__}; wanted a DenseCache; DenseLM.new_cache"
            " makes it"
        )
