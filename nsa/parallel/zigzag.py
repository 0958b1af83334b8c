"""Which tokens of a sequence each rank holds: 2P chunks, of which rank r holds r and 2P - 1 - r.

A causal query costs more the later it is: contiguous shards cost the last rank 1.75 x the mean at
P = 4, and a pair of an early and a late chunk costs every rank the same.

P ranks, L tokens of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nsa.config import NSAConfig


@dataclass(frozen=True, slots=True)
class Zigzag:
    """This rank's place among ``size`` ranks."""

    rank: int
    size: int

    @property
    def num_chunks(self) -> int:
        return 2 * self.size

    @property
    def own(self) -> tuple[int, int]:
        """The chunks of this rank, in the order in which its tensors hold them."""
        return self.rank, self.num_chunks - 1 - self.rank

    def shard(self, x: Tensor, dim: int) -> Tensor:
        """This rank's tokens of a global ``x``. ValueError unless 2P divides the tokens, and for
        what is no tensor, or has no such dimension.
        """
        check_dim(x, dim)
        tokens = x.shape[dim]
        if tokens == 0 or tokens % self.num_chunks:
            near = max(1, tokens // self.num_chunks) * self.num_chunks
            raise ValueError(
                f"got {tokens} tokens in dimension {dim} of {tuple(x.shape)}; wanted a multiple of"
                f" {self.num_chunks} for {self.size} ranks; pad or cut the sequence, to {near} say"
            )
        chunks = x.chunk(self.num_chunks, dim)
        return torch.cat([chunks[c] for c in self.own], dim)

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """Positions int64 [tokens] of this rank's tokens."""
        L = tokens // 2
        offset = torch.arange(L, device=device)
        return torch.cat([offset + c * L for c in self.own])

    def chunk_tokens(self, tokens: int, config: NSAConfig) -> int:
        """L of a rank that holds ``tokens``.

        ValueError unless both of its chunks begin at the border of a selection block (and so of a
        compressed one), and a compressed block spans two chunks at most.
        """
        L = tokens // 2
        step, least = config.sel_block, config.cmp_block - config.cmp_stride
        if L == 0 or tokens % 2 or L % step or least > L:
            wanted = -(-max(least, L, 1) // step) * step
            raise ValueError(
                f"got {tokens} tokens a rank, of {self.size} ranks; wanted two chunks of a multiple"
                f" of sel_block={step} tokens, at least cmp_block - cmp_stride = {least}; pad the"
                f" sequence to {self.num_chunks * wanted} tokens before `ContextParallel.shard`"
            )
        return L


def holder(chunk: int, size: int) -> tuple[int, int]:
    """(the rank of ``size`` that holds the chunk, which of its two it is)."""
    return (chunk, 0) if chunk < size else (2 * size - 1 - chunk, 1)


def halves(x: Tensor) -> Tensor:
    """x [B, 2 L, ...] of a rank's two chunks as [B, 2, L, ...], a view."""
    return x.unflatten(1, (2, x.shape[1] // 2))


def check_dim(x: Tensor, dim: int) -> None:
    """ValueError unless ``x`` is a tensor that has dimension ``dim``."""
    if not isinstance(x, Tensor):
        raise ValueError(
            f"got {type(x).__name__}; wanted a tensor with a dimension of tokens; give"
            " torch.as_tensor(x)"
        )
    if isinstance(dim, bool) or not isinstance(dim, int) or not -x.ndim <= dim < x.ndim:
        raise ValueError(
            f"got dim={dim!r} of a tensor of shape {tuple(x.shape)}; wanted a whole number from"
            f" {-x.ndim} to {x.ndim - 1}, the dimension of the tokens; name it by dim"
        )


def check_rank_tokens(tokens: int) -> None:
    """ValueError unless ``tokens`` of a rank are two equal chunks."""
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 2 or tokens % 2:
        even = tokens - tokens % 2 if type(tokens) is int and tokens >= 2 else 0
        raise ValueError(
            f"got {tokens!r} tokens of a rank, wanted a whole number of two chunks of equal length;"
            f" give {f'{even} or {even + 2}' if even else 'an even int from 2 on'}"
        )
