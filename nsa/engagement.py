"""Counts of the implementations that ran.

Of nsa's own only ``nsa.dispatch`` increments them, in the line before it calls an implementation.

Nothing is counted inside torch.compile, and a CUDA graph counts its captures, not its runs: there
the profiler is the witness.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch

from nsa.routing import BranchRoute


@dataclass(slots=True)
class Engagement:
    """Calls per counter since ``collect`` was entered, e.g. {'sel.v2': 12, 'sel.fa2': 12}."""

    counts: dict[str, int] = field(default_factory=dict)


_ACTIVE: ContextVar[tuple[Engagement, ...]] = ContextVar("nsa_engagement", default=())


@contextmanager
def collect() -> Iterator[Engagement]:
    """Count every dispatched call in this context (thread or task); may be nested."""
    engagement = Engagement()
    token = _ACTIVE.set((*_ACTIVE.get(), engagement))
    try:
        yield engagement
    finally:
        _ACTIVE.reset(token)


def record(route: BranchRoute) -> None:
    """Count one call of ``route`` in every open collection."""
    # A count made while tracing would be of traces; one made in a backward, of a checkpointed
    # layer's second forward, which runs in this thread on a CPU and in autograd's own on CUDA.
    if torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1:
        return
    for engagement in _ACTIVE.get():
        for counter in route.counters:
            engagement.counts[counter] = engagement.counts.get(counter, 0) + 1
