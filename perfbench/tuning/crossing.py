"""From which length one implementation is proved faster than another: the rule of `perfbench tune`.

Pure arithmetic.

The rule. At one length A is proved faster than B when the median of B's processes is above the
median of A's by more than the margin: `MARGIN_PCT`, or the spread of either side's processes
(slowest over fastest) where that is wider. Each side needs
`MIN_PROCESSES` processes; with fewer, its noise is not known. A tie is no proof, so it leaves
things as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

# three times the largest sd between processes of one GPU-bound cell on an idle H100 (1.0 %)
MARGIN_PCT = 3.0
MIN_PROCESSES = 2
Times = Sequence[float]  # one for each process, in any unit


def slowest_over_fastest_pct(times: Times) -> float:
    """Slowest over fastest, in per cent above it."""
    return 100 * (max(times) / min(times) - 1)


def margin_pct(times_a: Times, times_b: Times) -> float:
    """By how much the medians must differ to prove anything."""
    return max(MARGIN_PCT, slowest_over_fastest_pct(times_a), slowest_over_fastest_pct(times_b))


def gain_pct(times_a: Times, times_b: Times) -> float:
    """How much longer B takes than A, by medians; negative where B is the faster one."""
    return 100 * (median(times_b) / median(times_a) - 1)


def enough(times: Times | None) -> bool:
    """Whether there are enough processes to know their noise."""
    return times is not None and len(times) >= MIN_PROCESSES


def proved_faster(times_a: Times, times_b: Times) -> bool:
    """Whether A is proved faster than B at one length; both sides must have `enough` processes."""
    return gain_pct(times_a, times_b) > margin_pct(times_a, times_b)


def crossing(
    lengths: Sequence[int], times_a: Sequence[Times | None], times_b: Sequence[Times | None]
) -> int | None:
    """The shortest of ``lengths`` from which A is proved faster at it and at every longer one; None
    where there is none.

    ``times_a[i]`` and ``times_b[i]`` are the processes' times at ``lengths[i]``; None, or too few,
    where they are not known. An A that is not known proves nothing: the crossing is beyond that
    length. A B that is not known neither proves nor refutes (it may not fit there): that length is
    passed over, and is never the crossing itself. ValueError: lengths that do not ascend, lists
    that are not as long, or a time that is not a positive number.
    """
    _check(lengths, times_a, times_b)
    found = None
    for length, a, b in zip(reversed(lengths), reversed(times_a), reversed(times_b), strict=True):
        if a is None or not enough(a):
            break
        if b is None or not enough(b):
            continue
        if not proved_faster(a, b):
            break
        found = length
    return found


def _check(
    lengths: Sequence[int], times_a: Sequence[Times | None], times_b: Sequence[Times | None]
) -> None:
    if not len(lengths) == len(times_a) == len(times_b):
        raise ValueError(
            f"got {len(lengths)} lengths with {len(times_a)} and {len(times_b)} times, wanted as"
            " many of each; pass None for a gap"
        )
    if any(longer <= shorter for shorter, longer in pairwise(lengths)):
        raise ValueError(
            f"got lengths {list(lengths)}, wanted ascending ones, each once; sort them with their"
            " times"
        )
    for time in (time for side in (times_a, times_b) for times in side for time in times or ()):
        if not (math.isfinite(time) and time > 0):
            raise ValueError(
                f"got a time of {time!r}, wanted a positive number; leave out what was not measured"
            )
