"""One rank: joins the group, measures with the others, leaves its row or its error in a file."""

from __future__ import annotations

import faulthandler
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from pydantic import BaseModel

from nsa.train import stacks
from perfbench.records import Job, Replicate, Status
from perfbench.worker.ranks.board import Board
from perfbench.worker.ranks.model import backend_of, end_group
from perfbench.worker.ranks.world import Ranks, join
from perfbench.worker.turn import Turn

RED = 3  # exit status of a rank whose row is not green
# A rank's error may be another's end, which the launcher must see first.
GRACE_S = 0.5
STACK_SIGNAL = stacks.SIGNALS[0]  # Triton's compiler takes SIGUSR1
GROUP_TIMEOUT = timedelta(days=1)  # the launcher's is shorter, and names the rank that hangs


class RankEnd(BaseModel):
    """How a rank ended: ``at`` on the machine's monotonic clock; ``stack`` as Python prints it."""

    at: float
    text: str
    stack: str = ""
    is_oom: bool = False


def row_file(folder: Path, rank: int) -> Path:
    return folder / f"row-{rank}.json"


def error_file(folder: Path, rank: int) -> Path:
    return folder / f"error-{rank}.json"


def main(
    rank: int,
    size: int,
    board: Board,
    folder: str,
    measured: Callable[[Job, Turn], Replicate],
    job: Job,
    turn: Turn,
) -> None:
    """Ends the process with RED, or by raising, where it is not green."""
    faulthandler.register(STACK_SIGNAL, file=sys.stderr, all_threads=False)
    ranks = Ranks(rank, size, board, Path(folder))
    row = None
    try:
        _connect(ranks, job)
        row = measured(job, turn)
    finally:
        if row is None:
            _leave(ranks)
            time.sleep(GRACE_S)
    row_file(ranks.folder, rank).write_text(row.model_dump_json(), encoding="utf-8")
    if row.status is not Status.OK:
        _write(ranks, RankEnd(at=time.monotonic(), text=row.reason))
        sys.exit(RED)
    ranks.agree()
    end_group(job.device)


def _leave(ranks: Ranks) -> None:
    """The error that is being raised."""
    error = sys.exc_info()[1]
    text = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
    is_oom = isinstance(error, torch.OutOfMemoryError | MemoryError)
    _write(
        ranks,
        RankEnd(at=time.monotonic(), text=text, stack=traceback.format_exc(), is_oom=is_oom),
    )


def _write(ranks: Ranks, end: RankEnd) -> None:
    error_file(ranks.folder, ranks.rank).write_text(end.model_dump_json(), encoding="utf-8")


def _connect(ranks: Ranks, job: Job) -> None:
    """Through a file: ports are shared with whatever else runs here."""
    device = None
    if job.device == "cuda":
        device = torch.device("cuda", 0)  # the only one that this rank sees
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend_of(job.device),
        init_method=f"file://{ranks.folder}/rendezvous",
        rank=ranks.rank,
        world_size=ranks.size,
        timeout=GROUP_TIMEOUT,
        device_id=device,
    )
    join(ranks)
