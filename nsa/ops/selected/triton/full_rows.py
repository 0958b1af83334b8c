"""The first rows of a sequence, which chose every block: where they are many of it, they are full
causal attention without lists.
"""

from __future__ import annotations

from typing import Any

# every key up to the query
FULL: dict[str, Any] = {"block": 1, "stride": 1, "width": None, "q_start": 0, "first": None}
# times as many rows as choose every block, up to which those are better off without lists
FULL_WORTH = 8


def rows_in_full(full: int, T: int) -> int:
    """How many of the ``full`` first rows of a sequence, which chose every block, are computed
    without lists: none where they are few of T.
    """
    return full if 0 < full < T <= FULL_WORTH * full else 0
