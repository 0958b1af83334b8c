"""What a matrix asks of a cluster, and what is said where an extra is not installed."""

from __future__ import annotations

from dataclasses import dataclass

from nsa.installing import pip_install
from perfbench.errors import Exit, PerfbenchError


@dataclass(frozen=True, slots=True)
class CardsWanted:
    """``gpu`` and ``count`` of a matrix's target; at most ``cards`` such cards, None: all that
    there are.
    """

    gpu: str
    count: int
    is_cpu: bool
    cards: int | None = None

    def __str__(self) -> str:
        if self.is_cpu:
            return "the CPUs of a node"
        return f"{self.count} x {self.gpu}" if self.count > 1 else self.gpu


def missing_package(name: str, extra: str, error: ImportError) -> PerfbenchError:
    """USAGE, with the command that installs it."""
    return PerfbenchError(
        Exit.USAGE,
        f"--executor {extra} needs {name} ({error}). Next: {pip_install(extra)}",
    )
