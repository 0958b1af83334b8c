"""Which lines of the measured package called the operators of a step: one more untimed step, under
the profiler with Python's frames. A step of its own, so that the timeline and its table are not
slowed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity

# Frames come with every call of a Python function: 50 ms more for a step of 5,000 events.
MAX_EVENTS = 20_000
_PACKAGE = "nsa/"  # torch names a file from the folder in sys.path that has it


def callers(step: Callable[[], None]) -> dict[str, dict[str, int]]:
    """Operator -> 'nsa/FILE.py:LINE FUNCTION' -> calls from there, of one ``step`` on a CPU; a call
    without a frame of the package, as all of a backward, is left out.
    """
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], with_stack=True) as recorded:
        step()
    return counted_callers(recorded.profiler.kineto_results.experimental_event_tree())


def counted_callers(roots: Iterable[Any]) -> dict[str, dict[str, int]]:
    """As `callers`, of the profiler's event tree."""
    found: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for name, place in _calls(roots):
        found[name][place] += 1
    return {name: dict(places) for name, places in found.items()}


def _calls(roots: Iterable[Any]) -> Iterator[tuple[str, str]]:
    stack = [(root, "") for root in roots]
    while stack:
        node, place = stack.pop()
        kind = node.tag.name
        if kind in ("PyCall", "PyCCall"):
            place = _place_of(node.extra_fields) or place
        elif kind == "TorchOp" and place:
            yield node.name, place
        stack.extend((child, place) for child in node.children)


def _place_of(fields: Any) -> str:
    """The line that makes the call, where the package makes it; else the first line of the function
    of the package that is called; else empty.
    """
    for frame in (fields.caller, getattr(fields, "callsite", None)):
        if frame is not None and frame.file_name.startswith(_PACKAGE):
            return f"{frame.file_name}:{frame.line_number} {frame.function_name}"
    return ""
