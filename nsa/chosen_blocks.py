"""The blocks that each call of the attention chose, for whoever wants to look at them afterwards.

Only ``nsa.branches`` records them. Nothing is recorded inside torch.compile; a CUDA graph records
when it is captured, and each replay overwrites what was recorded then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

# of each call, int32 [B, T, G, N]; None where it needed none, since it attends to all of them
Chosen = list[Tensor | None]

_ACTIVE: ContextVar[tuple[Chosen, ...]] = ContextVar("nsa_chosen_blocks", default=())


@contextmanager
def collect() -> Iterator[Chosen]:
    """Keep the blocks of every call in this context (thread or task), in order; may be nested.

    The tensors are the call's own: not copied, and alive as long as the list is.
    """
    chosen: Chosen = []
    token = _ACTIVE.set((*_ACTIVE.get(), chosen))
    try:
        yield chosen
    finally:
        _ACTIVE.reset(token)


def record(blocks: Tensor | None) -> None:
    """Add the blocks of one call to every open collection."""
    # A checkpointed layer's second forward, in a backward, chooses what the first one did.
    if torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1:
        return
    for chosen in _ACTIVE.get():
        chosen.append(blocks)
