"""``python -m perfbench.worker.version_plan``: plans a matrix with the `nsa` of one folder.

Reads one JSON object on stdin and answers with one on stdout.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from perfbench.errors import PerfbenchError
from perfbench.worker.nsa_version import use, verify


def main() -> None:
    """Answer with {"plan": ..., "model": ...}, or {"error": ..., "exit_code": ...} for a matrix
    that does not fit.
    """
    asked = json.load(sys.stdin)
    use(Path(asked["folder"]))
    try:
        answer = _answer(asked)
    except PerfbenchError as error:
        answer = {"error": str(error), "exit_code": int(error.exit_code)}
    verify(Path(asked["folder"]))
    json.dump(answer, sys.stdout)


def _answer(asked: dict[str, Any]) -> dict[str, Any]:
    from nsa import settings
    from perfbench.machine import give, without_users_table
    from perfbench.matrix import build_plan, parse_matrix, plan_json
    from perfbench.older_nsa import capability_of
    from perfbench.records import TrainedBlocks

    give(without_users_table())
    stored = asked["trained_blocks"]
    trained = TrainedBlocks.model_validate(stored) if stored else None
    matrix = parse_matrix(asked["text"], asked["path"], trained=trained)
    built = build_plan(
        matrix,
        only=asked["only"],
        capability=capability_of(asked["capability"]),
        settings=settings.current(),
        own_folder=Path(asked["own_folder"]),
    )
    return {"plan": plan_json(built), "model": matrix.model.to_mapping()}


if __name__ == "__main__":
    main()
