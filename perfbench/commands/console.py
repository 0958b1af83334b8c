"""What a command prints: data on stdout, progress and warnings on stderr.

All of it goes through `inert`, so that no name or reason of a file is obeyed by a terminal or by
GitHub; only `print_commands` writes workflow commands.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial

import typer

from perfbench.errors import Exit, PerfbenchError
from perfbench.text import inert

_collected: ContextVar[list[str] | None] = ContextVar("collected", default=None)


def print_text(text: str) -> None:
    """On stdout; USAGE where it cannot be written, e.g. to a full disk. A reader that has seen
    enough (`| head`) is no error: the rest is dropped, and the command goes on.
    """
    try:
        typer.echo(inert(text.rstrip("\n"), colour=is_terminal()))
    except OSError as error:
        drop_stdout()
        if error.errno == errno.EPIPE:
            return
        raise PerfbenchError(
            Exit.USAGE, f"stdout cannot be written: {error.strerror or error}"
        ) from None


def print_first(text: str, *writes: Callable[[], None]) -> None:
    """Print the result, then write the files that hold it: a full disk loses neither. What failed
    is said, and the first PerfbenchError is raised after all were tried.
    """
    failed: list[PerfbenchError] = []
    steps: list[Callable[[], None]] = [partial(print_text, text), *writes]
    for step in steps:
        try:
            step()
        except PerfbenchError as error:
            failed.append(error)
    for other in failed[1:]:
        say(str(other))
    if failed:
        raise failed[0]


def say(text: str) -> None:
    """On stderr; what cannot be written there is lost, and changes no exit code. Inside `collected`
    it is kept instead.
    """
    if (kept := _collected.get()) is not None:
        kept.append(inert(text))
        return
    with suppress(OSError):
        print(inert(f"perfbench: {text}"), file=sys.stderr, flush=True)


def warn(text: str) -> None:
    say(f"warning: {text}")


@contextmanager
def collected() -> Iterator[list[str]]:
    """What `say` and `warn` would print, as a list that grows: for callers of the library."""
    kept: list[str] = []
    before = _collected.set(kept)
    try:
        yield kept
    finally:
        _collected.reset(before)


def print_commands(lines: Iterable[str]) -> None:
    """Workflow commands for GitHub, whose data is escaped already; on stderr, since stdout is
    data.
    """
    for line in lines:
        with suppress(OSError):
            print(line, file=sys.stderr, flush=True)


def is_terminal() -> bool:
    """Whether stdout is one; it may be closed."""
    return sys.stdout is not None and sys.stdout.isatty()


def drop_stdout() -> None:
    """What is still buffered would fail again when the process ends, and replace its exit code."""
    with suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
