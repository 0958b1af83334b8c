"""A measuring process's word to its parent: that it is prepared, and when it times."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Turn(Protocol):
    def __call__(self) -> None:
        """Say that everything is prepared; return when this process may have the machine to
        itself.
        """
        ...

    def timing(self) -> AbstractContextManager[None]:
        """What is timed lies inside: the parent watches it by its own clock, which nothing that
        this process imports can reach.
        """
        ...


class Alone:
    """The turn of a process that has no parent to tell."""

    def __call__(self) -> None: ...

    @contextmanager
    def timing(self) -> Iterator[None]:
        yield
