"""``python -m perfbench.worker.codegen``: compiles what each line of stdin asks for.

A line holds ``sm``, ``shape``, ``kernels`` (globs) and ``skip`` (variants). Answers are lines of
JSON: `versions`, then `begin` and `built` or `failed` for each variant, then `done`. Nothing else
reaches stdout: Triton prints the code that ptxas refuses.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def main() -> None:
    """Serve until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def emit(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    import torch

    from perfbench.worker.codegen.cases import launch_all
    from perfbench.worker.codegen.recording import CodeRecorder, versions

    torch.set_num_threads(1)
    recorder = CodeRecorder(emit)
    for line in sys.stdin:
        job = json.loads(line)
        emit({"event": "versions", **versions(job["sm"])})
        recorder.start(job["sm"], job["shape"], job["kernels"], frozenset(job["skip"]))
        launch_all(job["sm"], job["shape"], recorder.at)
        emit({"event": "done"})


if __name__ == "__main__":
    main()
