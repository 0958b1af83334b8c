"""BlockGrid: all index arithmetic of NSA. Integers only, 0-based; no torch.

l = cmp_block, d = cmp_stride, l' = sel_block, n = num_selected, w = window (arXiv 2502.11089,
section 3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from nsa.config import NSAConfig


@dataclass(frozen=True)
class BlockGrid:
    """Where blocks begin, which of them a query sees, and how many keys each branch reads."""

    cmp_block: int
    cmp_stride: int
    sel_block: int
    num_selected: int
    window: int
    num_initial: int
    num_local: int

    @classmethod
    def of(cls, config: NSAConfig) -> Self:
        return cls(
            config.cmp_block,
            config.cmp_stride,
            config.sel_block,
            config.num_selected,
            config.window,
            config.num_initial,
            config.num_local,
        )

    def num_cmp(self, tokens: int) -> int:
        """Compressed blocks that are whole within the first ``tokens`` tokens: C(S); a partial tail
        does not count.
        """
        return 0 if tokens < self.cmp_block else (tokens - self.cmp_block) // self.cmp_stride + 1

    def visible_cmp(self, position: int) -> int:
        """Compressed blocks that the query at ``position`` sees: those that end at or before it."""
        return self.num_cmp(position + 1)

    def num_sel(self, tokens: int) -> int:
        """Selection blocks that hold at least one of the first ``tokens`` tokens; the last may be
        partial.
        """
        return -(-tokens // self.sel_block)

    def forced(self, position: int) -> tuple[int, ...]:
        """Selection blocks that the query at ``position`` always attends to, ascending and
        distinct.
        """
        current = position // self.sel_block
        initial = range(min(self.num_initial, current + 1))
        local = range(max(0, current - self.num_local + 1), current + 1)
        return tuple(sorted({*initial, *local}))

    @property
    def overlap(self) -> tuple[tuple[int, int], ...]:
        """Eq. 9 as geometry: pairs (offset, weight).

        Selection block j receives weight * p[j * l'/d + offset], weight being the number of d-sized
        sub-chunks that the two blocks share. For l = 32, d = 16, l' = 64: offsets -1 .. 3, weights
        1, 2, 2, 2, 1.
        """
        cmp_chunks, sel_chunks = (
            self.cmp_block // self.cmp_stride,
            self.sel_block // self.cmp_stride,
        )
        shared = (
            (offset, min(sel_chunks, offset + cmp_chunks) - max(0, offset))
            for offset in range(1 - cmp_chunks, sel_chunks)
        )
        return tuple(shared)

    @property
    def everything_selected_tokens(self) -> int:
        """Up to this many tokens every block fits into the n slots, so selection is full causal
        attention.
        """
        return self.num_selected * self.sel_block

    def keys_sel(self, position: int) -> int:
        """Keys that the selected branch reads for the query at ``position``, in closed form."""
        current = position // self.sel_block
        return (
            (min(self.num_selected, current + 1) - 1) * self.sel_block
            + position % self.sel_block
            + 1
        )

    def keys_win(self, position: int) -> int:
        return min(self.window, position + 1)

    def pairs(self, tokens: int) -> dict[str, int]:
        """(query, key) pairs per query head and sequence of ``tokens`` tokens, for each branch and
        for ``dense``.
        """
        seen = max(0, tokens - self.cmp_block + 1)  # queries that see a compressed block
        steps, rest = divmod(seen, self.cmp_stride)
        size, slots = self.sel_block, self.num_selected - 1  # next to a query's own block
        blocks, last = divmod(tokens, size)
        few = min(blocks, slots)  # blocks whose queries see fewer than `slots` others
        others = few * (few - 1) // 2 + (blocks - few) * slots
        window = min(self.window, tokens)
        return {
            "cmp": self.cmp_stride * steps * (steps - 1) // 2 + rest * steps + seen,
            "sel": size**2 * others
            + last * min(slots, blocks) * size
            + blocks * (size * (size + 1) // 2)
            + last * (last + 1) // 2,
            "win": window * (window + 1) // 2 + (tokens - window) * self.window,
            "dense": tokens * (tokens + 1) // 2,
        }
