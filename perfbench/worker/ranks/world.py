"""The ranks that this process is one of; None in a process that measures alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from perfbench.worker.ranks.board import Board


@dataclass(frozen=True, slots=True)
class Ranks:
    """``folder``: private to these ranks, and to be removed by their launcher."""

    rank: int
    size: int
    board: Board
    folder: Path

    def note(self, stage: int) -> None:
        self.board.note(self.rank, stage)

    def agree(self, value: float = 0.0) -> float:
        """The largest of all ranks' values; waits for them."""
        return self.board.agree(self.rank, value)


_joined: list[Ranks] = []


def join(ranks: Ranks) -> None:
    """Once a process, when its group exists."""
    _joined.append(ranks)


def current() -> Ranks | None:
    return _joined[-1] if _joined else None
