"""The plan of a matrix as one version's own `nsa` makes it: its routes, its presets, in a process
of its own (``perfbench.worker.version_plan``).

An older commit may route `auto` elsewhere; judged by this checkout's routes it would be WRONG_PATH,
and it is not.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from perfbench.errors import Exit, PerfbenchError
from perfbench.matrix import Excluded, Matrix, Plan, step_folder
from perfbench.records import OwnStepFile, PlannedCell
from perfbench.runner.ab.checkout import CannotBuild, Checkout

if TYPE_CHECKING:
    from nsa.routing import Capability

TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class VersionPlan:
    """What one version would measure; ``model`` is the matrix's model, resolved by that version's
    presets and defaults.
    """

    checkout: Checkout
    plan: Plan
    model: dict[str, Any]


def plan_of_version(
    one: Checkout, matrix: Matrix, only: Sequence[str], capability: Capability
) -> VersionPlan:
    """Ask the version's own code; CannotBuild where it lacks what this harness needs, or the matrix
    does not fit it.
    """
    request = {
        "folder": str(one.folder),
        "text": matrix.text,
        "path": matrix.path,
        "trained_blocks": matrix.trained.model_dump() if matrix.trained else None,
        "own_folder": str(one.own_folder(step_folder(matrix.path))),
        "only": list(only),
        "capability": asdict(capability),
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", "perfbench.worker.version_plan"],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CannotBuild(
            f"{one.name} cannot be planned: no answer within {TIMEOUT_S:.0f} s. Next: look at what"
            " its nsa imports",
            one.name,
        ) from None
    if done.returncode:
        words = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise CannotBuild(
            f"{one.name} lacks what this harness needs of nsa: {words}. Next: take a newer"
            " revision",
            one.name,
        ) from None
    answer = json.loads(done.stdout)
    if "error" in answer:
        error, message = Exit(answer["exit_code"]), f"{one.name}: {answer['error']}"
        if error is Exit.USAGE:
            raise CannotBuild(message, one.name)
        raise PerfbenchError(error, message)
    return VersionPlan(one, _plan(answer["plan"]), answer["model"])


def _plan(stored: dict[str, Any]) -> Plan:
    cells = [PlannedCell.model_validate(cell) for cell in stored["cells"]]
    excluded = [Excluded(**one) for one in stored["excluded"]]
    return Plan(
        cells,
        excluded,
        stored["warnings"],
        stored["estimate_s"],
        stored["replicates"],
        own_steps=tuple(OwnStepFile.model_validate(step) for step in stored["own_steps"]),
    )
