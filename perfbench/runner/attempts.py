"""What a run holds so far, indexed: each question costs the same however many rows there are.

Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from perfbench.records import Cell, Replicate, SentinelLine, Status

_Key = tuple[object, ...]


class Ledger:
    """Rows as they come.

    ``throttle_retries`` is how often what was throttled may be measured again.
    """

    def __init__(
        self, throttle_retries: int, rows: Iterable[Replicate | SentinelLine] = ()
    ) -> None:
        self.num_replicates = 0
        self._retries = throttle_retries
        self._next: dict[_Key, int | None] = {}
        self._seen: set[str] = set()
        self._failed: set[str] = set()
        # The axes but length and batch -> the cells that ran out.
        self._ran_out: dict[Cell, dict[str, Cell]] = {}
        for row in rows:
            self.add(row)

    def add(self, row: Replicate | SentinelLine) -> None:
        if isinstance(row, SentinelLine):
            self._next[row.name, row.block, row.card] = self.attempt_after(row)
            return
        self.num_replicates += 1
        self._seen.add(row.cell_id)
        self._next[row.cell_id, row.replicate] = self.attempt_after(row)
        if row.status is not Status.OK:
            self._failed.add(row.cell_id)
        if row.status is Status.OOM:
            self._ran_out.setdefault(family_of(row.axes), {})[row.cell_id] = row.axes

    def next_attempt(self, cell_id: str, replicate: int) -> int | None:
        """Which attempt of a replicate is due: 0 where there is no row, None where the last one
        counts or the cell has failed.
        """
        return None if cell_id in self._failed else self._next.get((cell_id, replicate), 0)

    def next_sentinel_attempt(self, name: str, block: int, card: str | None) -> int | None:
        """The same for a sentinel of a block on ``card``, as `SentinelLine.card` names it."""
        return self._next.get((name, block, card), 0)

    def forget(self, cell_ids: Collection[str]) -> None:
        """Their finished replicates are due again: on another card, which cannot complete them."""
        gone = [key for key in self._next if key[0] in cell_ids]
        for key in gone:
            del self._next[key]

    def has_failed(self, cell_id: str) -> bool:
        return cell_id in self._failed

    def smaller_ran_out(self, cell_id: str, axes: Cell) -> str | None:
        """The smallest cell of the same path that ran out of memory with no more tokens and no
        more sequences, for a cell without any row; else None.
        """
        if cell_id in self._seen:
            return None
        found = [
            (other.batch, other.seq_len, its_id)
            for its_id, other in self._ran_out.get(family_of(axes), {}).items()
            if other.batch <= axes.batch and other.seq_len <= axes.seq_len
        ]
        return min(found)[-1] if found else None

    def attempt_after(self, row: Replicate | SentinelLine) -> int | None:
        """The attempt that must follow ``row``, because the card throttled and retries are left;
        None where the row counts.
        """
        again = row.status is Status.OK and row.is_throttled and row.attempt < self._retries
        return row.attempt + 1 if again else None


def family_of(axes: Cell) -> Cell:
    """The same for cells that differ in their length and batch alone."""
    return replace(axes, seq_len=1, batch=1)
