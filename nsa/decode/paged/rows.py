"""What each row of a paged cache holds, and which pages a step writes: host only, no tensor.

A group is one block table: pages by the index of what they hold. Tokens of the selected branch and
compressed blocks stay; the window and the raw tokens, from which the next compressed block is made,
are kept as far back as the next step, or one after going back by ``rollback`` tokens, reads them.

l = cmp_block, d = cmp_stride, w = window (arXiv 2502.11089, section 3).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from nsa.blocks import BlockGrid
from nsa.decode.paged.allocator import PageAllocator

TOKENS, WINDOW, RAW, COMPRESSED = GROUPS = ("tokens", "window", "raw", "compressed")
# raw tokens lie in pages of the compressed blocks' size, and of their pool
POOL: Mapping[str, str] = {
    TOKENS: TOKENS,
    WINDOW: WINDOW,
    RAW: COMPRESSED,
    COMPRESSED: COMPRESSED,
}


@dataclass(slots=True)
class PagedRow:
    """``length`` tokens, and of each group page by index; ``first`` is the first token that the
    window and the raw group still hold, from which on they hold all. Up to ``ready`` tokens are
    written to pages that the row has and nobody shares.
    """

    length: int = 0
    ready: int = 0
    pages: dict[str, dict[int, int]] = field(default_factory=lambda: {g: {} for g in GROUPS})
    first: dict[str, int] = field(default_factory=lambda: {WINDOW: 0, RAW: 0})

    def copy(self) -> PagedRow:
        return PagedRow(
            self.length, 0, {g: dict(p) for g, p in self.pages.items()}, dict(self.first)
        )


@dataclass(frozen=True, slots=True)
class HeldPages:
    """What a row held when `PagedCache.hold` was called: its pages stay until `PagedCache.drop`."""

    row: PagedRow
    owner: PagedRows

    @property
    def length(self) -> int:
        """Tokens."""
        return self.row.length


@dataclass(frozen=True, slots=True)
class Writes:
    """One step: which pages (source, destination) of each pool are copied before it, since another
    row shares the source, and which rows' tables have changed since the last one.
    """

    copies: dict[str, list[tuple[int, int]]]
    changed: frozenset[int]


class PagedRows:
    """The rows of one batch, their pages and tables; of all layers, which hold the same.

    ``tables[b]`` (of ``table``, int32) is what the device's table of row b is to hold, ``columns``
    where each group begins in it: -1 where a group has no page.
    """

    def __init__(
        self,
        grid: BlockGrid,
        max_batch: int,
        max_len: int,
        num_pages: Mapping[str, int],
        rollback: int,
    ) -> None:
        self.grid, self.page, self.max_len, self.rollback = grid, grid.sel_block, max_len, rollback
        # tokens before a step's first that the step reads
        self.reads = {WINDOW: grid.window - 1, RAW: grid.cmp_block - 1}
        self.keep = {group: n + rollback for group, n in self.reads.items()}
        self.pools = {name: PageAllocator(n, name) for name, n in num_pages.items()}
        of_tokens = -(-max_len // self.page)
        self.widths = dict.fromkeys(GROUPS, of_tokens) | {
            COMPRESSED: max(1, -(-grid.num_cmp(max_len) // self.page))
        }
        ends = [sum(self.widths[g] for g in GROUPS[: i + 1]) for i in range(len(GROUPS))]
        self.columns = dict(zip(GROUPS, [0, *ends], strict=False))
        self.rows: list[PagedRow | None] = [None] * max_batch
        self.width = ends[-1]
        # one array of all rows, which a tensor may share
        self.table = array("i", [-1]) * (max_batch * self.width)
        whole = memoryview(self.table)
        self.tables = [whole[b * self.width : (b + 1) * self.width] for b in range(max_batch)]
        self._changed: set[int] = set()

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each row; 0 where none has joined."""
        return tuple(0 if row is None else row.length for row in self.rows)

    def at(self, b: int) -> PagedRow:
        """ValueError where no row has joined at ``b``."""
        row = self.rows[b] if isinstance(b, int) and 0 <= b < len(self.rows) else None
        if row is None:
            joined = [i for i, one in enumerate(self.rows) if one is not None]
            raise ValueError(f"got row {b!r}; wanted one that has joined: {joined}; join gives it")
        return row

    def join(self, held: HeldPages | None = None) -> int:
        """The lowest place that is free, from now on an empty row, or one that shares all pages of
        ``held``. ValueError where all are taken, and for what was dropped or is another cache's.
        """
        if held is not None:
            self._check_own(held)
            if held.length and not held.row.pages[TOKENS]:
                raise ValueError(
                    f"got {held.length} held tokens whose pages were dropped; wanted pages that are"
                    " still held; join first, then drop, or hold a row again"
                )
        free = [i for i, row in enumerate(self.rows) if row is None]
        if not free:
            raise ValueError(
                f"got one more row for a cache of max_batch={len(self.rows)}, all of which are"
                " taken; wanted a place; let a row leave first, or make the cache larger"
            )
        self._put(free[0], PagedRow() if held is None else self._shared(held.row))
        return free[0]

    def leave(self, b: int) -> None:
        self._release(self.at(b))
        self._put(b, None)

    def hold(self, b: int) -> HeldPages:
        return HeldPages(self._shared(self.at(b)), self)

    def drop(self, held: HeldPages) -> None:
        self._check_own(held)
        self._release(held.row)
        # a second drop would free what others hold
        held.row.pages = {g: {} for g in GROUPS}

    def reorder(self, sources: Sequence[int]) -> None:
        """Row b becomes what row ``sources[b]`` was, sharing its pages."""
        if len(sources) != len(self.rows):
            raise ValueError(
                f"got {len(sources)} sources for {len(self.rows)} rows; wanted one each; a row that"
                " stays is its own source"
            )
        for b, source in enumerate(sources):
            if self.rows[b] is not None or source != b:
                self.at(source)
        new = [
            None if row is None and source == b else self._shared(self.at(source))
            for b, (row, source) in enumerate(zip(self.rows, sources, strict=True))
        ]
        for row in self.rows:
            if row is not None:
                self._release(row)
        for b, row in enumerate(new):
            self._put(b, row)

    def truncate(self, b: int, length: int) -> None:
        """Row ``b`` as it was with ``length`` tokens. ValueError where the window or the raw tokens
        do not reach back so far.
        """
        row = self.at(b)
        if isinstance(length, bool) or not isinstance(length, int) or not 0 <= length <= row.length:
            raise ValueError(
                f"got length={length!r} for row {b} of {row.length} tokens; wanted a whole number"
                f" from 0 to {row.length}; truncate takes the tokens that remain"
            )
        for group, reads in self.reads.items():
            if row.first[group] > max(0, length - reads) and length < row.length:
                raise ValueError(
                    f"got length={length} for row {b} of {row.length} tokens, of which {group}"
                    f" holds those from {row.first[group]} on; wanted at least"
                    f" {row.first[group] + reads}; make the cache with a larger rollback than"
                    f" {self.rollback}"
                )
        self._cut(b, row, length)

    def plan(self, counts: Sequence[int]) -> Writes:
        """Allocate what ``counts[b]`` new tokens of each row b are written to, and count them.

        ValueError where a row would exceed max_len or has not joined, OutOfPages where a pool has
        too few free; nothing is planned then.
        """
        every = [(b, self.at(b), n) for b, n in enumerate(counts) if n]
        for b, row, n in every:
            if row.length + n > self.max_len:
                raise ValueError(
                    f"a row would hold {row.length + n} tokens (row {b}); wanted at most"
                    f" max_len={self.max_len}, for which the cache has room; make it larger, or let"
                    " the row leave"
                )
        # of 64 steps of a token 63 change no table; looking at all pages of 64 rows takes the host
        # about a millisecond
        most = min(self.keep.values())
        growing = [one for one in every if one[1].length + one[2] > one[1].ready or one[2] > most]
        for b, row, _ in growing:
            self._forget(b, row)
        wanted = dict.fromkeys(self.pools, 0)
        given_up: dict[tuple[str, int], int] = {}  # once a row has a copy it shares no more
        for _, row, n in growing:
            for group, _, page in self._written(row, n):
                pool = POOL[group]
                if page is None:
                    wanted[pool] += 1
                elif self._is_shared(pool, page, given_up.get((pool, page), 0)):
                    wanted[pool] += 1
                    given_up[pool, page] = given_up.get((pool, page), 0) + 1
        for pool, number in wanted.items():
            self.pools[pool].check(number)
        copies: dict[str, list[tuple[int, int]]] = {name: [] for name in self.pools}
        for b, row, n in growing:
            for group, index, page in list(self._written(row, n)):
                allocator = self.pools[POOL[group]]
                if page is not None and allocator.count(page) == 1:
                    continue
                new = allocator.allocate()
                if page is not None:
                    copies[POOL[group]].append((page, new))
                    allocator.release([page])
                self._set(b, row, group, index, new)
        for _, row, n in every:
            for group, keep in self.keep.items():
                row.first[group] = max(row.first[group], row.length - keep)
                if n > keep:  # what lies between was not stored
                    row.first[group] = row.length + n - keep
            row.length += n
        for _, row, _ in growing:
            row.ready = self._ready(row)
        changed, self._changed = frozenset(self._changed), set()
        return Writes(copies, changed)

    def undo(self, counts: Sequence[int], first: Sequence[Mapping[str, int]]) -> None:
        """Go back before a plan of ``counts``, when `PagedRow.first` were ``first``."""
        for b, n in enumerate(counts):
            if n:
                row = self.at(b)
                self._cut(b, row, row.length - n)
                # the plan may have released older pages
                row.first = {
                    group: max(first[b][group], min(row.pages[group], default=0) * self.page)
                    for group in self.keep
                }

    def _check_own(self, held: HeldPages) -> None:
        if held.owner is not self:
            raise ValueError(
                f"got {held.length} tokens that another cache holds; wanted this one's, whose pages"
                " they are; hold a row of this cache"
            )

    def _entries(self, group: str, tokens: int) -> int:
        return self.grid.num_cmp(tokens) if group == COMPRESSED else tokens

    def _written(self, row: PagedRow, n: int) -> Iterator[tuple[str, int, int | None]]:
        """(group, index, page or None) of each page that ``n`` more tokens are written to."""
        for group in GROUPS:
            begin, end = (self._entries(group, t) for t in (row.length, row.length + n))
            if group in self.keep:
                begin = max(begin, end - self.keep[group])
            if end > begin:
                for index in range(begin // self.page, -(-end // self.page)):
                    yield group, index, row.pages[group].get(index)

    def _ready(self, row: PagedRow) -> int:
        """`PagedRow.ready` of a row whose last token's pages are its own."""
        blocks = self._entries(COMPRESSED, row.length)
        pages = -(-blocks // self.page)
        last = row.pages[COMPRESSED].get(pages - 1)
        if last is not None and self.pools[POOL[COMPRESSED]].count(last) == 1:
            blocks = pages * self.page
        # the last length with no more blocks than that
        before_next = blocks * self.grid.cmp_stride + self.grid.cmp_block - 1
        return min(-(-row.length // self.page) * self.page, before_next)

    def _is_shared(self, pool: str, page: int, given_up: int) -> bool:
        return self.pools[pool].count(page) - given_up > 1

    def _forget(self, b: int, row: PagedRow) -> None:
        """Release what is too old for the next step and for going back."""
        for group, keep in self.keep.items():
            row.first[group] = max(row.first[group], row.length - keep)
            old = [i for i in row.pages[group] if (i + 1) * self.page <= row.first[group]]
            self._drop_pages(b, row, group, old)

    def _cut(self, b: int, row: PagedRow, length: int) -> None:
        row.length, row.ready = length, 0
        for group in GROUPS:
            end = -(-self._entries(group, length) // self.page)
            self._drop_pages(b, row, group, [i for i in row.pages[group] if i >= end])

    def _drop_pages(self, b: int, row: PagedRow, group: str, indices: Sequence[int]) -> None:
        for index in indices:
            self.pools[POOL[group]].release([row.pages[group].pop(index)])
            self.tables[b][self.columns[group] + index] = -1
            self._changed.add(b)

    def _set(self, b: int, row: PagedRow, group: str, index: int, page: int) -> None:
        row.pages[group][index] = page
        self.tables[b][self.columns[group] + index] = page
        self._changed.add(b)

    def _shared(self, row: PagedRow) -> PagedRow:
        for group in GROUPS:
            self.pools[POOL[group]].share(row.pages[group].values())
        row.ready = 0
        return row.copy()

    def _release(self, row: PagedRow) -> None:
        for group in GROUPS:
            self.pools[POOL[group]].release(row.pages[group].values())

    def _put(self, b: int, row: PagedRow | None) -> None:
        self.rows[b] = row
        table = self.tables[b]
        table[:] = memoryview(array("i", [-1]) * self.width)
        for group in GROUPS:
            if row is None:
                break
            for index, page in row.pages[group].items():
                table[self.columns[group] + index] = page
        self._changed.add(b)
