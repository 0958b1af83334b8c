"""Plans a matrix with one version's own `nsa`, in a process of its own.

``python -m perfbench.worker.planner`` reads one JSON object on stdin and answers with one on
stdout: {"plan": ..., "model": ...}, or {"error": ..., "exit_code": ...} for a matrix that does not
fit. `nsa` must not be loaded before the version's folder is known, so the imports are inside.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from perfbench.errors import PerfbenchError
from perfbench.worker import nsa_version


def main() -> None:
    request = json.load(sys.stdin)
    folder = Path(request["folder"])
    nsa_version.use(folder)
    try:
        answer = _answer(request)
    except PerfbenchError as error:
        answer = {"error": str(error), "exit_code": int(error.exit_code)}
    nsa_version.verify(folder)
    json.dump(answer, sys.stdout)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    from nsa import settings
    from nsa.routing import Capability
    from perfbench.matrix import build_plan, parse_matrix, plan_json

    matrix = parse_matrix(request["text"], request["path"])
    asked = request["capability"]
    capability = Capability(**{**asked, "sm": tuple(asked["sm"]) if asked["sm"] else None})
    built = build_plan(
        matrix, only=request["only"], capability=capability, settings=settings.current()
    )
    return {"plan": plan_json(built), "model": matrix.model.to_mapping()}


if __name__ == "__main__":
    main()
