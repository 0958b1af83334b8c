"""How many keys each branch really gathers, counted from the masks and blocks of a call (never from
a formula).

B batch, T query tokens, G kv heads. All counts are int64 and stay on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from nsa.ops.interval.compressed import visible_blocks
from nsa.ops.positions import query_positions


class KeysRead(Mapping[str, Tensor]):
    """Branch -> keys read in the last call, computed when read: a count that
    nobody reads should cost no wait.
    """

    def __init__(self) -> None:
        self._counts: dict[str, Callable[[], Tensor]] = {}

    def later(self, branch: str, count: Callable[[], Tensor]) -> None:
        """``count`` holds what the branch was called with."""
        self._counts[branch] = count

    def __getitem__(self, branch: str) -> Tensor:
        return self._counts[branch]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._counts)

    def __len__(self) -> int:
        return len(self._counts)


def compressed(
    q: Tensor, num_blocks: int, *, block: int, stride: int, q_start: int | Tensor
) -> Tensor:
    """Compressed keys a query, [B or 1, T]."""
    return visible_blocks(q, num_blocks, block=block, stride=stride, q_start=q_start).sum(-1)


def selected(
    blocks: Tensor, num_keys: int | None, *, q_start: int | Tensor, sel_block: int
) -> Tensor:
    """Tokens at or before the query in its chosen ``blocks`` [B, T, G, N]: [B, T, G]. ``num_keys``:
    how many exist; None: all those.
    """
    limit = query_positions(q_start, blocks.shape[1], blocks.device) + 1
    limit = (limit if num_keys is None else limit.clamp(max=num_keys))[..., None, None]
    return (
        (limit - blocks.long() * sel_block).clamp(0, sel_block).masked_fill(blocks < 0, 0).sum(-1)
    )


def sliding(q: Tensor, num_keys: int, *, q_start: int | Tensor, window: int) -> Tensor:
    """Keys of the last ``window`` positions that exist, [B or 1, T]."""
    position = query_positions(q_start, q.shape[1], q.device)[..., None]
    key = torch.arange(num_keys, device=q.device)
    return ((key <= position) & (key > position - window)).sum(-1)
