"""Calls that are shares of one: the chunks of a sequence that several ranks hold.

Which kernel serves a call goes by its size, and two kernels round differently. Compressed attention
and the scores of a share, forward, are served by the kernels that would serve the whole, so that of
equal queries and keys it chooses the same blocks. What follows the choice goes by the share's size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_number: ContextVar[int] = ContextVar("number of shares", default=1)


@contextmanager
def one_of(number: int) -> Iterator[None]:
    """Calls within are each one of ``number`` equal shares."""
    before = _number.set(number)
    try:
        yield
    finally:
        _number.reset(before)


def of_all(size: int) -> int:
    """What ``size`` of a call, its queries or elements, is of all shares."""
    return size * _number.get()


def number_of_shares() -> int:
    """1 where the call is no share."""
    return _number.get()
