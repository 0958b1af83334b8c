"""Progress on stderr: a bar with ETA on a terminal, one plain line per replicate elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol, TextIO

from perfbench.records import Replicate, Status
from perfbench.text import inert


class Progress(Protocol):
    def start(self, total: int, done: int) -> None: ...

    def begin(self, cell_id: str, replicate: int) -> None: ...

    def finished(self, row: Replicate, *, covers: int = 1) -> None:
        """``covers`` planned replicates end with this row: more than one where a failed cell
        is not repeated.
        """
        ...

    def note(self, text: str) -> None: ...

    def stop(self) -> None: ...


class SilentProgress:
    """Prints nothing."""

    def start(self, total: int, done: int) -> None: ...

    def begin(self, cell_id: str, replicate: int) -> None: ...

    def finished(self, row: Replicate, *, covers: int = 1) -> None: ...

    def note(self, text: str) -> None: ...

    def stop(self) -> None: ...


class PlainProgress:
    """For logs: each line stands alone."""

    def __init__(self, stream: TextIO, now: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._now = stream, now
        self._total = self._done = self._measured = 0
        self._began = 0.0

    def start(self, total: int, done: int) -> None:
        self._total, self._done, self._measured, self._began = total, done, 0, self._now()
        self.note(f"{total - done} of {total} replicates to measure")

    def begin(self, cell_id: str, replicate: int) -> None: ...

    def finished(self, row: Replicate, *, covers: int = 1) -> None:
        self._done += covers
        self._measured += covers
        left_s = (self._now() - self._began) / self._measured * (self._total - self._done)
        self.note(
            f"[{self._done}/{self._total}] {row.cell_id} #{row.replicate}: {outcome(row)}, ETA"
            f" {_minutes(left_s)}"
        )

    def note(self, text: str) -> None:
        with suppress(OSError):  # a full disk stops no measurement before its row is written
            print(inert(f"perfbench: {text}"), file=self._stream, flush=True)

    def stop(self) -> None: ...


class RichProgress:
    """A bar with the cell, done/total and ETA; failures stay above it as lines."""

    def __init__(self, stream: TextIO, no_color: bool) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
        from rich.progress import Progress as Bar

        self._bar = Bar(
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False),
            console=Console(file=stream, no_color=no_color),
            refresh_per_second=2,  # the bar shares the machine with what it watches
        )
        self._task: Any = None

    def start(self, total: int, done: int) -> None:
        if self._task is not None:
            self._bar.remove_task(self._task)  # of the measurement before this one
        self._task = self._bar.add_task("", total=total, completed=done)
        self._bar.start()

    def begin(self, cell_id: str, replicate: int) -> None:
        self._bar.update(self._task, description=f"{cell_id} #{replicate}")

    def finished(self, row: Replicate, *, covers: int = 1) -> None:
        self._bar.advance(self._task, covers)
        if row.status is not Status.OK:
            self.note(f"{row.cell_id} #{row.replicate}: {outcome(row)}")

    def note(self, text: str) -> None:
        self._bar.console.print(inert(text), markup=False, highlight=False)

    def stop(self) -> None:
        self._bar.stop()


def outcome(row: Replicate) -> str:
    if row.status is Status.OK and row.tok_per_s is not None:
        return f"{row.tok_per_s:,.0f} tok/s"
    return f"{row.status.value}: {row.reason.splitlines()[0] if row.reason else 'no reason given'}"


def progress_for(stream: TextIO | None = None, *, no_color: bool = False) -> Progress:
    """The bar where ``stream`` (stderr) is a terminal, else plain lines."""
    stream = stream or sys.stderr
    return RichProgress(stream, no_color) if stream.isatty() else PlainProgress(stream)


def _minutes(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
