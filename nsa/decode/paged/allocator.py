"""Which pages of a pool are free, and how many rows hold each of the others."""

from __future__ import annotations

from collections.abc import Iterable


class OutOfPages(RuntimeError):
    """A pool has fewer free pages than a step wants; nothing was allocated."""


class PageAllocator:
    """Pages 0 .. ``num_pages`` - 1 of one pool, each free or held ``count`` times.

    Host only. A page is held once by whoever allocates it, once more by each `share`, and is free
    again after as many `release`. ValueError for a number of pages below 1, and for a page that
    nobody holds.
    """

    def __init__(self, num_pages: int, name: str = "pages") -> None:
        if isinstance(num_pages, bool) or not isinstance(num_pages, int) or num_pages < 1:
            raise ValueError(
                f"got num_pages={num_pages!r} of {name}; wanted a whole number of at least 1; give"
                " how many pages the pool holds"
            )
        self.name, self.num_pages = name, num_pages
        # the lowest page is taken first, and what was released last is taken again first
        self._free = list(range(num_pages - 1, -1, -1))
        self._count = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def count(self, page: int) -> int:
        """How often ``page`` is held; 0: it is free."""
        return self._count[page]

    def check(self, wanted: int) -> None:
        """OutOfPages where fewer than ``wanted`` pages are free."""
        if wanted > len(self._free):
            raise OutOfPages(
                f"wanted {wanted} pages of {self.name}, of whose {self.num_pages}"
                f" {len(self._free)} are free; let rows leave or drop held prefixes, or make the"
                f" cache with at least num_pages={{{self.name!r}:"
                f" {self.num_pages + wanted - len(self._free)}}}"
            )

    def allocate(self) -> int:
        """A free page, held once from now on. OutOfPages where none is."""
        self.check(1)
        page = self._free.pop()
        self._count[page] = 1
        return page

    def share(self, pages: Iterable[int]) -> None:
        """Hold each of ``pages`` once more."""
        for page in pages:
            self._held(page)
            self._count[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Hold each of ``pages`` once less; free those that nobody holds any more."""
        for page in pages:
            self._held(page)
            self._count[page] -= 1
            if not self._count[page]:
                self._free.append(page)

    def _held(self, page: int) -> None:
        if not 0 <= page < self.num_pages or not self._count[page]:
            raise ValueError(
                f"got page {page} of {self.name}; wanted one that is held; a page is released as"
                " often as it was allocated or shared, and no oftener"
            )
