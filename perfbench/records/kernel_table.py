"""What one step ran, as a table: name, calls, seconds.

Kernels of the device on a GPU, operators on a CPU.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from perfbench.records.memory_table import Memory

# template arguments can be longer; two names that agree this far are one row
NAME_CHARS = 2000


class Kernel(BaseModel):
    """All calls of one name in one step; ``seconds`` together, null where nothing timed them."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)
    count: int = Field(ge=0, lt=2**63)
    seconds: float | None = Field(ge=0, lt=1e100)


class Kernels(BaseModel):
    """One step.

    On a GPU ``rows`` are device kernels and copies; on a CPU operators, each without what it
    called.
    """

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)
    device: Literal["cuda", "cpu"]
    rows: dict[str, Kernel]
    host_syncs: int | None = None  # null on a CPU, which waits for nobody
    tuned: dict[str, str] = {}  # autotuner -> the configuration in use
    # on a CPU: row -> 'nsa/FILE.py:LINE FUNCTION' that called it -> calls
    called_from: dict[str, dict[str, int]] = {}
    chrome_absent: str = ""  # why there is no timeline next to this table
    memory: Memory | None = None  # null with the reason below, or in an older trace
    memory_absent: str = ""

    @property
    def launches(self) -> int:
        return sum(row.count for row in self.rows.values())

    @property
    def total_s(self) -> float | None:
        """Null where any row has no time: the sum of some rows is not the total."""
        times_s = [row.seconds for row in self.rows.values()]
        return (
            None
            if not times_s or None in times_s
            else sum(seconds for seconds in times_s if seconds is not None)
        )


def totalled(calls: Iterable[tuple[str, int]]) -> dict[str, Kernel]:
    """Rows of (name, duration in ns), one for each call."""
    found: dict[str, list[int]] = defaultdict(list)
    for name, duration_ns in calls:
        found[name[:NAME_CHARS]].append(duration_ns)
    return {
        name: Kernel(count=len(times_ns), seconds=sum(times_ns) * 1e-9)
        for name, times_ns in found.items()
    }


def own_times(calls: Iterable[tuple[str, int, int, int]]) -> list[tuple[str, int]]:
    """(name, duration in ns without what it called itself) of (name, thread, start in ns, duration
    in ns), in order of start.

    Calls of one thread nest or follow one another, as function calls do.
    """
    found: list[tuple[str, int]] = []
    # thread -> (end, place in found), outermost first
    open_calls: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for name, thread, start_ns, duration_ns in sorted(calls, key=lambda call: (call[2], -call[3])):
        callers = open_calls[thread]
        while callers and callers[-1][0] <= start_ns:
            callers.pop()
        if callers:
            caller, own_ns = found[callers[-1][1]]
            found[callers[-1][1]] = caller, max(0, own_ns - duration_ns)
        callers.append((start_ns + duration_ns, len(found)))
        found.append((name, duration_ns))
    return found


def table_path(chrome: Path) -> Path:
    """Where the table of the timeline ``chrome`` lies."""
    return chrome.with_name(f"{chrome.name.removesuffix('.json.gz')}.kernels.json")
