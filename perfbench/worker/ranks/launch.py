"""Runs a job on several ranks of this machine, through torchrun's API, and makes one row of theirs.

The ranks are forked from a process that has imported torch and touched no GPU, so that they cost
milliseconds, and die with its process group.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std, start_processes

from perfbench.machine import visible_gpus
from perfbench.records import Job, RankLine, RanksLine, Replicate, Status, failed
from perfbench.worker.ranks.board import WAITS_FOR_TURN, Board
from perfbench.worker.ranks.model import backend_of
from perfbench.worker.ranks.rank import STACK_SIGNAL, RankEnd, error_file, main, row_file
from perfbench.worker.turn import Turn

LOOK_S = 0.1  # between looks at the ranks
# Of the job's time-out: the ranks are judged that much earlier than this whole process would be.
SHARE_OF_TIMEOUT = 0.8
STACK_S = 1.0  # until a rank has written its stack
NUM_FRAMES = 3
_FRAME = re.compile(r'  File "([^"]+)", line (\d+),? in (\S+)')


def launch(measured: Callable[[Job, Turn], Replicate], job: Job, turn: Turn) -> Replicate:
    """The row of ``job``, whose cell has world_size > 1, by ``measured`` on each rank.

    The first rank that dies, hangs or ends red makes the row red, by its number.
    """
    size = job.axes.world_size
    variables: dict[int, dict[str, str]] = {rank: {} for rank in range(size)}
    if job.device == "cuda":
        gpus, reason = visible_gpus()
        if len(gpus) < size:
            return failed(
                job,
                Status.CRASH,
                f"got {len(gpus)} GPUs{f' ({reason})' if reason else ''}, wanted {size}, one a"
                " rank; look at CUDA_VISIBLE_DEVICES, or lower world_size",
            )
        variables = {
            rank: {"CUDA_VISIBLE_DEVICES": gpus[rank].uuid, **variables_of(job)}
            for rank in range(size)
        }
    folder = Path(tempfile.mkdtemp(prefix="perfbench-ranks-"))
    try:
        return _run(measured, job, turn, folder, variables)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def variables_of(job: Job) -> dict[str, str]:
    """What NCCL's group of a captured step wants before it begins: no thread that ends work which a
    graph holds.
    """
    return {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"} if job.axes.cuda_graph == "on" else {}


def _run(
    measured: Callable[[Job, Turn], Replicate],
    job: Job,
    turn: Turn,
    folder: Path,
    variables: Mapping[int, dict[str, str]],
) -> Replicate:
    size, board = job.axes.world_size, Board(job.axes.world_size)
    begin = time.monotonic()
    processes = start_processes(
        "perfbench",
        main,
        {rank: (rank, size, board, str(folder), measured, job, turn) for rank in range(size)},
        dict(variables),
        DefaultLogsSpecs(str(folder / "logs"), redirects=Std.ALL),
        start_method="fork",
    )
    stderrs = {rank: Path(name) for rank, name in processes.stderrs.items()}
    limit_s = SHARE_OF_TIMEOUT * job.timeout_s
    try:
        while (ended := processes.wait(LOOK_S, LOOK_S)) is None:
            if board.turn == WAITS_FOR_TURN:
                continue  # others are timed, for as long as they take
            if time.monotonic() - max(begin, board.turn_since) > limit_s:
                return _hung(job, board, processes.pids(), stderrs)
    finally:
        processes.close(signal.SIGKILL)
    if ended.is_failed():
        return _died(job, board, folder, ended.failures, stderrs)
    rows = [Replicate.model_validate_json(row_file(folder, r).read_bytes()) for r in range(size)]
    return _joined(rows)


def _joined(rows: list[Replicate]) -> Replicate:
    """Rank 0's row, whose samples are the slowest rank's, with what each rank showed."""
    first = rows[0]
    if first.ranks is None:
        return first
    lines = [line for row in rows if row.ranks is not None for line in row.ranks.ranks]
    return first.model_copy(update={"ranks": first.ranks.model_copy(update={"ranks": lines})})


def with_rank(row: Replicate, rank: int, own_s: list[float], job: Job) -> Replicate:
    """``row`` of ``rank`` with its line; ``own_s``: its samples by its own clock."""
    line = RankLine(
        rank=rank,
        samples_s=own_s,
        engaged=row.engaged,
        route=[] if row.route is None else row.route.counters,
        telemetry=row.telemetry,
        peak_memory_bytes=row.peak_memory_bytes,
        device_uuid_sha256=row.device_uuid_sha256,
    )
    shown = row.ranks or RanksLine(
        parallel=job.axes.parallel, backend=backend_of(job.device), ranks=[]
    )
    return row.model_copy(update={"ranks": shown.model_copy(update={"ranks": [line]})})


def _hung(
    job: Job, board: Board, pids: Mapping[int, int], stderrs: Mapping[int, Path]
) -> Replicate:
    """Ranks wait for one another, so the one that is behind holds all of them."""
    for pid in pids.values():
        os.kill(pid, STACK_SIGNAL)
    time.sleep(STACK_S)
    last = board.last()
    stacks = {rank: _text(path) for rank, path in stderrs.items()}
    for rank, text in stacks.items():
        print(f"rank {rank}, in {board.place(rank)}:\n{text[-2000:]}", file=sys.stderr)
    who = f"rank {last[0]}" if len(last) == 1 else f"ranks {', '.join(map(str, last))}"
    others = "; ".join(
        f"rank {rank} in {board.place(rank)}" for rank in range(board.size) if rank not in last
    )
    reason = (
        f"{who} did not go on within {SHARE_OF_TIMEOUT * job.timeout_s:g} s, in"
        f" {board.place(last[0])} ({others or 'as all ranks'}), at {_stack(stacks[last[0]])}"
    )
    return failed(job, Status.TIMEOUT, reason)


def _died(
    job: Job,
    board: Board,
    folder: Path,
    failures: Mapping[int, Any],
    stderrs: Mapping[int, Path],
) -> Replicate:
    """Of the rank that ended first: a red row, an exception, or a signal."""
    rank, failure = next(iter(failures.items()))
    outcomes = {
        one: RankEnd.model_validate_json(error_file(folder, one).read_bytes())
        for one in range(board.size)
        if error_file(folder, one).exists()
    }
    if failure.exitcode >= 0 and outcomes:  # an exception may be another rank's end
        rank = min(outcomes, key=lambda one: outcomes[one].at)
    print(f"rank {rank}:\n{_text(stderrs[rank])[-4000:]}", file=sys.stderr)
    if row_file(folder, rank).exists():
        row = Replicate.model_validate_json(row_file(folder, rank).read_bytes())
        return row.model_copy(update={"reason": f"rank {rank}: {row.reason}"})
    if rank in outcomes:
        outcome = outcomes[rank]
        status = Status.OOM if outcome.is_oom else Status.CRASH
        where = f", in {board.place(rank)}, at {_stack(outcome.stack, newest_last=True)}"
        return failed(job, status, f"rank {rank}: {outcome.text}{where}")
    code = failure.exitcode
    known = next((one.name for one in signal.Signals if one == -code), f"signal {-code}")
    how = f"was killed by {known}" if code < 0 else f"ended with exit status {code}"
    return failed(job, Status.CRASH, f"rank {rank} {how}, in {board.place(rank)}")


def _stack(text: str, *, newest_last: bool = False) -> str:
    """'pause (a.py:3) < step (b.py:8)', of faulthandler's or of a traceback's lines."""
    frames = [f"{name} ({Path(file).name}:{line})" for file, line, name in _FRAME.findall(text)]
    if newest_last:
        frames.reverse()
    return " < ".join(frames[:NUM_FRAMES]) or "no Python frame"


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
