"""What a run's parent shows: one live line, from heartbeats alone, and lines above it.

A thread of its own draws, so that a terminal that takes no text (Ctrl-S) never stops the watchdog.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TextIO

from nsa.installing import pip_install
from nsa.train.heartbeat import Beat, MachineClock
from nsa.train.records import Phase

if TYPE_CHECKING:
    from rich.live import Live

DRAW_S = 0.25
CLOSE_S = 1.0
SILENT_S = 5.0  # from here the line names the silence
LONG_START_S = 60.0  # importing torch has taken 10 s on a loaded machine
BAR = 24
LEAST_BAR = 4  # where the terminal has room for less, the line goes without


def describe(beat: Beat | None, silent_s: float, clock: MachineClock) -> str:
    """A rank in one line: step, loss, tok/s, ETA, phase, and how long nothing came."""
    if beat is None:
        if silent_s < LONG_START_S:
            return f"start: {silent_s:.0f} s so far, while torch is imported"
        return f"start: no heartbeat for {silent_s:.0f} s"
    parts = [f"step {beat.step:,}" + (f"/{beat.steps:,}" if beat.steps else "")]
    report = beat.report
    if report is not None:
        parts.append("loss n/a" if report.loss_nats is None else f"loss {report.loss_nats:.4f}")
        speed = report.tokens_per_s
        parts.append("tok/s n/a" if speed is None else f"{speed:,.0f} tok/s")
    if beat.phase is Phase.DONE:
        parts.append("ended early" if beat.step < beat.steps else "done")
        return "  ".join(parts)
    if (eta_s := beat.eta_s(clock)) is not None:
        parts.append(f"ETA {duration(eta_s)}")
    phase = beat.phase.name.lower()
    parts.append(f"no progress for {silent_s:.0f} s in {phase}" if silent_s >= SILENT_S else phase)
    return "  ".join(parts)


def bar(step: int, steps: int, width: int = BAR) -> str:
    """``width`` characters, filled to ``step`` of ``steps``; "" where ``steps`` is not known."""
    if steps <= 0:
        return ""
    filled = width * min(max(step, 0), steps) // steps
    return "━" * filled + "─" * (width - filled)


def duration(seconds: float) -> str:
    """Days, hours, minutes, seconds: "2d 03:04:05"."""
    whole = round(seconds)
    days, rest = divmod(whole, 86_400)
    text = f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days}d {text}" if days else text


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns as wide as their longest cell."""
    cells = [list(header), *(list(row) for row in rows)]
    widths = [max(len(row[at]) for row in cells) for at in range(len(header))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]
    return "\n".join(lines)


def show_text(text: str, stream: TextIO) -> None:
    """``text`` and a newline, at once."""
    print(text, file=stream, flush=True)


class LiveLine:
    """Draws the newest beat on ``stream`` (stdout): a line that stays where that is a terminal and
    rich is installed, else a line every ``every_s`` seconds. Not ``live``: only `line`'s lines.
    """

    def __init__(self, *, live: bool, every_s: float = 10.0, stream: TextIO | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._live, self._every_s = live, every_s
        self._lines: deque[str] = deque()
        self._seen: tuple[Beat | None, float] = (None, 0.0)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._draw, name="live line", daemon=True)
        self._thread.start()

    def show(self, beat: Beat | None, silent_s: float) -> None:
        """Draw this from now on; never waits."""
        self._seen = (beat, silent_s)

    def line(self, text: str) -> None:
        """Write a line above the live one; never waits."""
        self._lines.append(text)

    def drop(self) -> None:
        """Draw the live line no more: the last word is another's."""
        self._live = False

    def close(self) -> None:
        """Draw the last state, unless it was dropped; gives up where the terminal takes nothing for
        CLOSE_S.
        """
        self._over.set()
        self._thread.join(CLOSE_S)

    def is_drawing(self) -> bool:
        """Whether the thread runs: after `close` only where the terminal takes nothing."""
        return self._thread.is_alive()

    def _draw(self) -> None:
        try:
            live = self._rich() if self._live and self._stream.isatty() else None
            if live is None:
                self._draw_lines()
            else:
                with live:
                    self._draw_live(live)
        except (OSError, ValueError):
            return  # the terminal has gone; the run goes on without it

    def _draw_lines(self) -> None:
        drawn_at, drawn = time.monotonic(), ""
        is_over = False
        while not is_over:
            is_over = self._over.wait(DRAW_S)
            while self._lines:
                self._write(self._lines.popleft())
            due = time.monotonic() - drawn_at >= self._every_s
            text = self._text()
            if self._live and text != drawn and (due or (is_over and self._seen[0] is not None)):
                self._write(text)
                drawn_at, drawn = time.monotonic(), text

    def _draw_live(self, live: Live) -> None:
        is_over = False
        while not is_over:
            is_over = self._over.wait(DRAW_S)
            while self._lines:
                live.console.print(
                    self._lines.popleft(), markup=False, highlight=False, soft_wrap=True
                )
            if not self._live:
                live.update("", refresh=True)
                continue
            text, beat = self._text(), self._seen[0]
            width = min(BAR, live.console.width - len(text) - 2)
            if beat is not None and beat.steps > 0 and width >= LEAST_BAR:
                text = f"{bar(beat.step, beat.steps, width)}  {text}"
            live.update(text, refresh=True)

    def _text(self) -> str:
        return describe(*self._seen, MachineClock.now())

    def _write(self, text: str) -> None:
        show_text(text, self._stream)

    def _rich(self) -> Live | None:
        try:
            from rich.console import Console
            from rich.live import Live
        except ImportError:
            self._write(f"plain lines: the package rich is missing; {pip_install('train')}")
            return None
        console = Console(file=self._stream)
        return Live("", console=console, auto_refresh=False, redirect_stdout=False)
