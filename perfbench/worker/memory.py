"""One untimed step under the profiler's memory hooks: which operator allocated what, and what was
alive at the peak. A step of its own, so that the timeline next to it is not slowed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from perfbench.records import Memory, table_of_memory

# Python objects of the profiler's tree, some microseconds each: the slow loop makes millions.
MAX_EVENTS = 300_000
BACKWARD = "autograd::engine::evaluate_function: "


def profile_memory(
    step: Callable[[], None], device: str, before: Callable[[], None] | None = None
) -> tuple[Memory | None, str]:
    """The table of one ``step`` on ``device`` ('cpu' or 'cuda'), or (None, why there is none).

    A replay of a CUDA graph allocates nothing: its memory was taken when it was captured.
    """
    if before is not None:
        before()
    on_gpu = device == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with torch.profiler.profile(activities=activities, profile_memory=True) as recorded:
        step()
        if on_gpu:
            torch.cuda.synchronize()
    results = recorded.profiler.kineto_results
    if (count := len(results.events())) > MAX_EVENTS:
        return None, f"{count:,} events in one step, and memory is recorded up to {MAX_EVENTS:,}"
    found = sorted(_allocations(results.experimental_event_tree(), device), key=lambda one: one[0])
    if not found:
        return None, "the step allocated nothing"
    return table_of_memory(event for _, event in found), ""


def _allocations(roots: list[Any], device: str) -> Iterator[tuple[int, tuple[str, int, int, int]]]:
    """(time in ns, (owner, address, bytes, bytes held then)) of every allocation and release on
    ``device``.
    """
    stack = [(root, "") for root in roots]
    while stack:
        node, owner = stack.pop()
        if node.tag.name == "Allocation":
            fields = node.extra_fields
            if str(fields.device).startswith(device):
                sizes = fields.ptr, fields.alloc_size, fields.total_allocated
                yield node.start_time_ns, (owner or "outside of operators", *sizes)
            continue
        name = node.name.removeprefix(BACKWARD)
        # An operator of nsa names what it does; of others the outermost: linear, not empty.
        inner = name if not owner or (name.startswith("nsa::") and owner[:5] != "nsa::") else owner
        stack.extend((child, inner) for child in node.children)
