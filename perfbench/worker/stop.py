"""How a measuring process ends a replicate without a speed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from perfbench.records import Status


@dataclass(slots=True)
class Stop(Exception):
    """The replicate ends without a speed; ``facts`` are the fields of its row that are known."""

    status: Status
    reason: str
    facts: dict[str, Any] = field(default_factory=dict)


def without_speed(facts: dict[str, Any]) -> dict[str, Any]:
    """``facts`` of a row that ends without one."""
    speeds = ("tok_per_s", "samples_s", "cycles_per_step", "energy_j_per_token")
    return {key: value for key, value in facts.items() if key not in speeds}
