"""The flight recorder's trace of a rank's collectives, kept when its run is halted.

A rank that hangs in a collective cannot write it; a thread of its own does, since a collective
waits without the GIL.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch.distributed as dist
from torch._C import _distributed_c10d

from nsa.train.errors import TrainError
from nsa.train.parallel import TrainWorld
from nsa.train.watchdog import read_halt

POLL_S = 0.5


def trace_path(out: Path, rank: int) -> Path:
    return out / "stacks" / f"rank{rank}.flight.json"


def gloo_path(out: Path, rank: int) -> Path:
    """Next to it under NCCL: what the rank sent by gloo, which is how checkpoints agree."""
    return out / "stacks" / f"rank{rank}.gloo-flight.json"


@contextmanager
def recorded(out: Path, world: TrainWorld) -> Iterator[None]:
    """Meanwhile a halt of the run, or an error that ends this rank, has its last collectives
    written as JSON, by PyTorch's flight recorder (the newest 2,000: TORCH_FR_BUFFER_SIZE).
    """
    over = threading.Event()
    if world.size == 1:
        yield
        return

    def keep() -> None:
        dump = _dump(dist.get_backend())
        trace_path(out, world.rank).write_bytes(dump())
        if (gloo := _dump("gloo")) is not dump:
            gloo_path(out, world.rank).write_bytes(gloo())

    def wait_for_halt() -> None:
        while not over.wait(POLL_S):
            if read_halt(out) is not None:
                keep()
                return

    thread = threading.Thread(target=wait_for_halt, name="flight recorder", daemon=True)
    thread.start()
    try:
        yield
    except (RuntimeError, TrainError):  # of another rank's death gloo is faster than its halt
        over.set()
        thread.join()
        with suppress(OSError):  # a full disk must not hide the error
            keep()
        raise
    finally:
        over.set()
        thread.join()


def _dump(backend: str) -> Callable[[], bytes]:
    """What has the trace of ``backend``: a torch with NCCL keeps NCCL's collectives and those of
    other backends in two recorders, and either's dump says nothing of the other's.
    """
    names = ("_dump_fr_trace_json", "_dump_nccl_trace_json")  # an older torch has the second alone
    for name in reversed(names) if backend == "nccl" else names:
        found: Callable[[], bytes] | None = getattr(_distributed_c10d, name, None)
        if found is not None:
            return found
    return _missing


def _missing() -> bytes:
    return b'{"entries": [], "missing": "this torch has no flight recorder"}'
