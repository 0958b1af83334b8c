"""Where one operator for all branches (nsa.fused_step) stores the one token of each row: in the
buffers of a cache that steps, or in pages.

B batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from nsa.decode.cache import NSACache
from nsa.decode.paged import PagedLayer
from nsa.decode.views import KV
from nsa.ops import decode_step
from nsa.ops.positions import to_device


def against(cache: NSACache, tokens: int) -> tuple[str, ...]:
    """What keeps the operator from a chunk of ``tokens`` a row; () for nothing."""
    reasons = [] if tokens == 1 else [f"it takes a chunk of one token a row, not of {tokens}"]
    if isinstance(cache, PagedLayer):
        reasons += cache.against_step()
    elif cache.steps is None:
        reasons.append("its cache does not step (nsa.decode.Steps)")
    return tuple(reasons)


def position_of(cache: NSACache) -> Tensor:
    """Of each row's next token, int64 [B]; in pages those of the last plan."""
    if isinstance(cache, PagedLayer):
        return cache.owner.start_B
    if cache.steps is None:  # whose Route says so
        return to_device(cache.lengths, cache.sel[0].device)
    return cache.steps.length_B


def begin(
    cache: NSACache, chunk: Mapping[str, KV], num_tokens: Sequence[int] | None
) -> tuple[decode_step.Buffers, decode_step.StepPages | None]:
    """The memory that takes ``chunk``, k and v of each branch; ``num_tokens`` and errors as of
    `NSACache.append`. `end` follows.
    """
    if isinstance(cache, PagedLayer):
        return cache.begin_step(chunk, num_tokens)
    assert cache.steps is not None
    cache.steps.check_turn(cache, chunk, num_tokens)
    return decode_step.Buffers(*cache.sel, *cache.win, *cache.raw, *cache.cmp), None


def end(cache: NSACache) -> None:
    """The operator is launched; pages have counted the token when it began."""
    if cache.steps is not None:
        cache.steps.took(cache)
