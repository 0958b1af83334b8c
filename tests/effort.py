"""How much work a call is, as ratios that neither the machine's speed nor its load changes.

Both sides of a ratio are CPU seconds of this process, taken turn by turn in the same test.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LOOP_TURNS = 200_000  # about 10 ms


@contextmanager
def _no_collection() -> Iterator[None]:
    """The garbage collector would look at all that other tests of this process left behind."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _cpu_s(work: Callable[[], object]) -> float:
    with _no_collection():
        begin = time.process_time()
        work()
        return time.process_time() - begin


def _loop() -> int:
    total = 0
    for number in range(LOOP_TURNS):
        total += number & 7
    return total


def loops(work: Callable[[], object]) -> float:
    """The CPU time of ``work``, counted in plain loops of LOOP_TURNS turns.

    The loop runs before and after, and the slower of the two counts.
    """
    before = _cpu_s(_loop)
    worked = _cpu_s(work)
    return worked / max(before, _cpu_s(_loop))


def growth(work: Callable[[int], Callable[[], object]], size: int, *, rounds: int = 5) -> float:
    """CPU time at 4 ``size`` over that at ``size``: 4 for linear work, 16 for quadratic.

    ``work(n)`` prepares, unmeasured, and returns the call that is measured. Of each size the
    fastest of the rounds counts, since load only adds; none follows once the ratio is clear.
    """
    small, large = [], []
    for _ in range(rounds):
        small.append(_cpu_s(work(size)))
        large.append(_cpu_s(work(4 * size)))
        if min(large) < 5 * min(small):
            break
    return min(large) / min(small)
