"""The bounds that `expect` may set on what one step costs, each with the number that it bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from types import MappingProxyType

from perfbench.records.measured import MEASURED
from perfbench.records.rows import Expect, Replicate


@dataclass(frozen=True, slots=True)
class StepBound:
    """``measured``: its name in MEASURED. ``of`` reduces the replicates that have the number, and
    ``how`` says that. ``needs_gpu``: a CPU has no such number.
    """

    measured: str
    title: str
    of: Callable[[Sequence[float]], float]
    how: str
    needs_gpu: bool


# A count differs by no noise, so its most counts; a time differs between processes.
BOUNDS: Mapping[str, StepBound] = MappingProxyType(
    {
        "max_launches": StepBound("launches", "kernel launches a step", max, "most", True),
        "max_host_ms": StepBound("host_ms", "host ms a step", median, "median", False),
        "max_device_ms": StepBound("device_ms", "device ms a step", median, "median", True),
    }
)


def bounds_of(expect: Expect) -> dict[str, float]:
    """Those that are stated, by name."""
    return {name: most for name in BOUNDS if (most := getattr(expect, name)) is not None}


def measured_of(rows: Iterable[Replicate], name: str) -> list[float]:
    """One number of MEASURED of each replicate that has it."""
    return [value for row in rows if (value := MEASURED[name](row)) is not None]
