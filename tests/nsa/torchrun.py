"""Scripts of tests on several ranks, started by torchrun, or forking their ranks themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

ROOT = Path(__file__).parents[2]


def found_by_ranks(script: Path, ranks: int, out: Path) -> Any:
    """The JSON that ``script``, whose argument is ``out``, has rank 0 write there."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return _found([sys.executable, "-m", *launcher, "--no-python", sys.executable], script, out)


def found_by_forks(script: Path, out: Path) -> Any:
    """Of a script that forks its ranks, which then import torch once: 2 s of CPU less a rank."""
    return _found([sys.executable], script, out)


def _found(command: list[str], script: Path, out: Path) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("PYTHONPATH", str(ROOT))
        done = subprocess.run(
            [*command, str(script), str(out)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text())


def end_together() -> NoReturn:
    """End this rank when all have come here.

    Without destructors: after its last line a rank over gloo ended by SIGABRT ("terminate called
    without an active exception") in one run of CI, and in 3 of 8 runs of an example.
    """
    import torch.distributed as dist  # the tests that start ranks need none

    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
