"""The machine, the code under test, and where to report: what every measurement needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from perfbench.runner.progress import Progress

if TYPE_CHECKING:
    from nsa.routing import Capability
    from perfbench.machine import TargetFit
    from perfbench.records import Environment
    from perfbench.runner.fleet import Fleet


@dataclass(frozen=True, slots=True)
class MeasuringContext:
    """``repository`` holds the candidate's code and knows the base's commit; ``say`` takes one line
    for the user. With a ``fleet`` its cards measure; ``fit``, ``capability`` and ``environment``
    are then those of its first.
    """

    fit: TargetFit
    capability: Capability
    environment: Environment
    repository: Path
    progress: Progress
    say: Callable[[str], None]
    fleet: Fleet | None = None
