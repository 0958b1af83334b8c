"""Ends a measuring process together with all that it started."""

from __future__ import annotations

import os
import signal
from contextlib import suppress


def kill_group(pid: int) -> None:
    """SIGKILL the process group; the process alone where it has not called setsid yet."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
