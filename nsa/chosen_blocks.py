"""The blocks that each call of the attention chose, for whoever wants to look at them afterwards.

Only ``nsa.branches`` records them. Inside torch.compile they are recorded where a collection asks
for it; a CUDA graph records when it is captured, and each replay overwrites what was recorded then.
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
# Dynamo traces no ContextVar; of a list it makes one more output of the graph.
_COMPILED: list[Chosen] = []


@contextmanager
def collect(*, compiled: bool = False) -> Iterator[Chosen]:
    """Keep the blocks of every call in this context (thread or task), in order; may be nested.

    The tensors are the call's own: not copied, and alive as long as the list is.

    ``compiled``: of compiled calls, too, in any thread of the process. The blocks are then one more
    output of a graph, so a function that was compiled without such a collection is compiled once
    more.
    """
    chosen: Chosen = []
    token = _ACTIVE.set((*_ACTIVE.get(), chosen))
    if compiled:
        _COMPILED.append(chosen)
    try:
        yield chosen
    finally:
        _ACTIVE.reset(token)
        if compiled:
            del _COMPILED[next(i for i, one in enumerate(_COMPILED) if one is chosen)]


def is_collecting() -> bool:
    """Whether a collection is open in this context."""
    return bool(_ACTIVE.get())


def record(blocks: Tensor | None) -> None:
    """Add the blocks of one call to every open collection."""
    if torch.compiler.is_compiling():
        if _COMPILED:
            _COMPILED[-1].append(blocks)
        return
    # A checkpointed layer's second forward, in a backward, chooses what the first one did.
    if torch._C._current_graph_task_id() != -1:
        return
    for chosen in _ACTIVE.get():
        chosen.append(blocks)
