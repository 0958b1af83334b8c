"""The plan of a matrix as one side's own `nsa` makes it: its routes, its presets, in a process of
its own.

An older commit may route `auto` elsewhere; judged by this checkout's routes it would be WRONG_PATH,
and it is not.
The process is ``python -m perfbench.worker.version_plan``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from perfbench.errors import Exit, PerfbenchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nsa.routing import Capability
    from perfbench.matrix import Matrix, Plan
    from perfbench.runner.ab.checkout import Side

TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class SidePlan:
    """What one side would measure; ``model`` is the matrix's model, resolved by that side's presets
    and defaults.
    """

    plan: Plan
    model: dict[str, Any]


def plan_of(one: Side, matrix: Matrix, only: Sequence[str], capability: Capability) -> SidePlan:
    """Ask the side's own code; CannotBuild where it lacks what this harness needs, USAGE where the
    matrix does not fit it.
    """
    from perfbench.runner.ab.checkout import CannotBuild

    asked = {
        "folder": str(one.folder),
        "text": matrix.text,
        "path": matrix.path,
        "only": list(only),
        "capability": asdict(capability),
    }
    command = [sys.executable, "-m", "perfbench.worker.version_plan"]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CannotBuild(
            f"{one.name} cannot be planned: no answer within {TIMEOUT_S:.0f} s. Next: look at what"
            " its nsa imports"
        ) from None
    if done.returncode:
        words = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise CannotBuild(
            f"{one.name} lacks what this harness needs of nsa: {words}. Next: take a newer revision"
        ) from None
    answer = json.loads(done.stdout)
    if "error" in answer:
        raise PerfbenchError(Exit(answer["exit_code"]), f"{one.name}: {answer['error']}")
    return _side_plan(answer)


def _side_plan(answer: dict[str, Any]) -> SidePlan:
    from perfbench.matrix import Excluded, Plan
    from perfbench.records import PlannedCell

    told = answer["plan"]
    cells = [PlannedCell.model_validate(cell) for cell in told["cells"]]
    excluded = [Excluded(**one) for one in told["excluded"]]
    return SidePlan(
        Plan(cells, excluded, told["warnings"], told["estimate_s"], told["replicates"]),
        answer["model"],
    )
