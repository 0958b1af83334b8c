"""Processes that make batches ahead of the trainer. They share no memory and no lock with it: a
job goes in by one pipe, batches come back by another.

Not `multiprocessing`, whose children import the trainer's main module, and with it torch: 3 s and
300 MB a worker.
"""

from __future__ import annotations

import atexit
import json
import os
import pickle
import queue
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any, Generic, TypeVar

from nsa.train.data.packing import Cursor, PackedBatch, StreamRecipe
from nsa.train.errors import TrainError, TrainExit

T = TypeVar("T")

COMMAND = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
    " from nsa.train.data.fetching import serve; serve(int(sys.argv[2]))"
)
LENGTH = struct.Struct("<Q")
# How often a waiting side looks whether the other one still lives.
LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class FetchedBatch:
    """``cursor``: where the shard stands behind this batch. ``fetch_s``: seconds to make it."""

    shard: int
    cursor: dict[str, int]
    packed: PackedBatch
    fetch_s: float


def next_in_turn(cursors: Mapping[int, Cursor]) -> int:
    """The shard that gave fewest batches, the first of several: the same order whoever asks, for
    all shards of a rank or for some, and after a resume on another number of ranks.
    """
    return min(cursors, key=lambda shard: (cursors[shard].get("batches", 0), shard))


def batches_in_turn(recipe: StreamRecipe, cursors: Mapping[int, Cursor]) -> Iterator[FetchedBatch]:
    """Batches of the shards that ``cursors`` names, from there on, until every stream ends."""
    streams = {shard: recipe.stream(shard, cursor) for shard, cursor in cursors.items()}
    at = {shard: stream.cursor for shard, stream in streams.items()}
    while at:
        shard = next_in_turn(at)
        began = time.perf_counter()
        packed = streams[shard].next_batch()
        if packed is None:
            del at[shard]
            continue
        at[shard] = streams[shard].cursor
        yield FetchedBatch(shard, at[shard], packed, time.perf_counter() - began)


class FetchProcess(Generic[T]):
    """A worker process, and the thread of the trainer that reads its pipe and calls ``ready`` on
    each batch; up to ``prefetch`` of them wait to be taken.
    """

    def __init__(
        self,
        recipe: StreamRecipe,
        cursors: Mapping[int, Cursor],
        *,
        prefetch: int,
        ready: Callable[[FetchedBatch], T],
    ) -> None:
        self._ready, self._queue = ready, queue.Queue[T](prefetch)
        self._closed, self._failure = False, None
        self.process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, json.dumps(sys.path), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._job = pickle.dumps((recipe, dict(cursors)))
        self._thread = threading.Thread(target=self._read, name="data", daemon=True)
        self._thread.start()
        # A thread that still reads while the interpreter ends would abort it.
        atexit.register(self.close)

    _failure: TrainError | None

    def raise_failure(self) -> None:
        """TrainError where the process failed or died."""
        if self._failure is not None:
            raise self._failure

    def poll(self) -> T | None:
        """The next batch, in the worker's order; None where there is none within 0.2 s."""
        try:
            return self._queue.get(timeout=LOOK_S)
        except queue.Empty:
            return None

    def close(self) -> None:
        atexit.unregister(self.close)
        self._closed = True
        self.process.kill()
        self._thread.join()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            try:
                stream.close()
            except BrokenPipeError:  # what was left in its buffer has no reader
                continue

    def _read(self) -> None:
        try:
            self._receive()
        finally:  # whatever ended it, nobody may wait for its next batch
            if self._failure is None and not self._closed:
                self._failure = TrainError(
                    TrainExit.DATA,
                    "the trainer's thread that takes batches ended by an error; its traceback"
                    " stands above; resume goes on",
                )

    def _receive(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            write_frame(self.process.stdin, self._job)
        except BrokenPipeError:
            self._job = b""  # the process died; why is known by its end of the other pipe
        while not self._closed:
            frame = read_frame(self.process.stdout)
            if frame is None:
                self._failure = self._death()
                return
            received = pickle.loads(frame)
            if not isinstance(received, FetchedBatch):
                code, message = received
                self._failure = TrainError(TrainExit(code), message)
                return
            self._put(self._ready(received))

    def _put(self, batch: T) -> None:
        while not self._closed:
            try:
                self._queue.put(batch, timeout=LOOK_S)
            except queue.Full:
                continue
            return

    def _death(self) -> TrainError:
        code = self.process.wait()
        how = f"ended with exit code {code}; its traceback stands above"
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}; was it out of memory?"
        return TrainError(
            TrainExit.DATA,
            f"the data worker of process id {self.process.pid} {how} data.workers=0 reads in the"
            " trainer, resume goes on",
        )


def write_frame(stream: IO[bytes], content: bytes) -> None:
    stream.write(LENGTH.pack(len(content)))
    stream.write(content)
    stream.flush()


def read_frame(stream: IO[bytes]) -> bytes | None:
    """None where the other side is gone, also in the middle of a frame."""
    header = stream.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(header)
    content = stream.read(length)
    return content if len(content) == length else None


def serve(parent: int) -> None:
    """The worker process: reads its job, then writes batches until its parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's, which closes the pipe
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints goes to stderr
    job = read_frame(sys.stdin.buffer)
    if job is None:
        return
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    recipe, cursors = pickle.loads(job)
    try:
        for batch in batches_in_turn(recipe, cursors):
            write_frame(out, pickle.dumps(batch, protocol=5))
    except TrainError as error:
        failure: Any = (int(error.code), str(error))
        write_frame(out, pickle.dumps(failure))
    except BrokenPipeError:
        os._exit(0)


def _end_with_parent(parent: int) -> None:
    """Ends the process when its parent died, or closed the pipe: also in a long read."""
    while os.getppid() == parent:
        readable, _, _ = select.select([0], [], [], 1.0)
        if readable and not os.read(0, 1):
            break
    os._exit(0)
