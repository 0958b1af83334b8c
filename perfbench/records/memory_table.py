"""What one step allocated, as a table: operator, allocations, bytes, and what was alive at the
peak.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from pydantic import BaseModel, ConfigDict, Field


class MemoryRow(BaseModel):
    """All allocations of one operator in one step.

    ``at_peak_bytes``: of those, what was alive when the step held the most.
    """

    model_config = ConfigDict(extra="allow", frozen=True)
    count: int = Field(ge=0, lt=2**63)
    allocated_bytes: int = Field(ge=0, lt=2**63)
    at_peak_bytes: int = Field(ge=0, lt=2**63)


class Memory(BaseModel):
    """One step on its device. ``peak_bytes``: the most that it held beyond what was there when it
    began; ``kept_bytes``: what it left behind, negative where it freed more.
    """

    model_config = ConfigDict(extra="allow", frozen=True)
    peak_bytes: int = Field(ge=0, lt=2**63)
    kept_bytes: int = Field(gt=-(2**63), lt=2**63)
    rows: Mapping[str, MemoryRow]


def table_of_memory(events: Iterable[tuple[str, int, int, int]]) -> Memory:
    """From (operator, address, bytes, bytes that the allocator then holds) in order of time; bytes
    are negative where memory is freed.

    The allocator's own count says what the step holds: a release in another thread may be missing
    among the events. What is freed without having been allocated here was there before, and what
    is allocated at an address in use had been freed.
    """
    alive: dict[int, tuple[str, int]] = {}
    counts: dict[str, int] = defaultdict(int)
    allocated: dict[str, int] = defaultdict(int)
    now: dict[str, int] = defaultdict(int)  # alive by operator
    start: int | None = None
    held, peak = 0, 0
    at_peak: dict[str, int] = {}
    for owner, address, size, total in events:
        start = total - size if start is None else start
        held = total - start
        if address in alive:
            who, had = alive.pop(address)
            now[who] -= had
        if size > 0:
            alive[address] = owner, size
            counts[owner] += 1
            allocated[owner] += size
            now[owner] += size
        if held > peak:
            peak, at_peak = held, dict(now)
    rows = {
        owner: MemoryRow(
            count=counts[owner],
            allocated_bytes=allocated[owner],
            at_peak_bytes=at_peak.get(owner, 0),
        )
        for owner in counts
    }
    return Memory(peak_bytes=peak, kept_bytes=held, rows=rows)
