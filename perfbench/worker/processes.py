"""The measuring processes as their parent sees them: what is started, and how all of it is ended.

Needs no torch.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress

SERVER = "perfbench.worker"  # the module that is started with `python -m`
MEASURE = "perfbench.worker.measure:measure"  # the function that it calls in each child
# Of a measuring process on a CPU. On a shared machine a second thread that has to wait stalls the
# first: tok/s fell 10 to 60 times next to another process.
CPU_THREADS = 1


def kill_group(pid: int) -> None:
    """SIGKILL the process group; the process alone where it has not called setsid yet."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
