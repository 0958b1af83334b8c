"""How a layer's chosen blocks lie: how far back, how alike from query to query and from head to
head, how crowded. Pure numpy.

T queries at positions 0 on, G kv heads, N slots, J blocks, R rows of queries that choose.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

HOTTEST_PCT = 1.0  # of the blocks that may be chosen


def block_statistics(
    blocks: NDArray[np.integer[Any]], *, sel_block: int, num_initial: int, num_local: int
) -> dict[str, Any]:
    """JSON data of ``blocks`` [T, G, N], ascending, -1 padded at the end.

    A query chooses where it sees more blocks than it has slots; the others take all, and count for
    nothing here. A free block is a chosen one that is not forced: behind the initial and before the
    local blocks. Shares are fractions of 1, None where there is nothing to take a share of.

    ``distance_share``: of the free blocks, by the distance in blocks from the query's own, in
    octaves ("4-7" is 4 to 7 blocks back). ``shared_with_previous_share``: of the free blocks whose
    previous query chooses, too, those in that query's set of the same head.
    ``equal_in_all_heads_share``: of the queries that choose, those whose set is the same in every
    kv head; None for one head.
    ``hottest_block_share``: of the free blocks of a head, those that are its most chosen one, the
    mean over heads; ``hottest_1pct_share`` the same of the most chosen hundredth of the blocks that
    it may choose, one at least.
    """
    T, G, N = blocks.shape
    ids = blocks.astype(np.int64)
    current_T = np.arange(T) // sel_block
    chooses_T = current_T + 1 > N
    free = (ids >= num_initial) & (ids <= (current_T - num_local)[:, None, None])
    free &= chooses_T[:, None, None]
    num_free = int(free.sum())
    found: dict[str, Any] = {
        "queries": T,
        "queries_that_choose": int(chooses_T.sum()),
        "kv_heads": G,
        "free_blocks": num_free,
    }
    distances = (current_T[:, None, None] - ids)[free]
    found["distance_share"] = _by_octaves(distances)
    found["shared_with_previous_share"] = _shared_with_previous(ids, free, chooses_T)
    alike_T = (ids == ids[:, :1]).all((1, 2))
    found["equal_in_all_heads_share"] = (
        _ratio(int((alike_T & chooses_T).sum()), int(chooses_T.sum())) if G > 1 else None
    )
    num_choosable = int(current_T[-1]) - num_local - num_initial + 1 if T else 0
    found |= _hottest(ids, free, num_choosable)
    return found


def _by_octaves(distances: NDArray[np.int64]) -> dict[str, float]:
    """Distances are at least 1; the octaves from 1 to that of the farthest."""
    if not distances.size:
        return {}
    octave = np.frexp(distances.astype(np.float64))[1] - 1  # exact: floor(log2)
    counts = np.bincount(octave)
    names = ["1", *(f"{2**one}-{2 ** (one + 1) - 1}" for one in range(1, counts.size))]
    return {name: int(count) / distances.size for name, count in zip(names, counts, strict=True)}


def _shared_with_previous(
    ids: NDArray[np.int64], free: NDArray[np.bool_], chooses_T: NDArray[np.bool_]
) -> float | None:
    asked = free[1:] & chooses_T[:-1, None, None]
    shared = np.zeros(asked.shape, np.bool_)
    for slot in range(ids.shape[2]):
        shared |= ids[1:] == ids[:-1, :, slot, None]
    return _ratio(int((shared & asked).sum()), int(asked.sum()))


def _hottest(
    ids: NDArray[np.int64], free: NDArray[np.bool_], num_choosable: int
) -> dict[str, float | None]:
    top = max(1, int(num_choosable * HOTTEST_PCT / 100))
    shares = []
    for head in range(ids.shape[1]):
        counts = np.sort(np.bincount(ids[:, head][free[:, head]]))[::-1]
        if counts.size:
            shares.append((counts[0] / counts.sum(), counts[:top].sum() / counts.sum()))
    one, many = (
        (float(np.mean(column)) for column in zip(*shares, strict=True)) if shares else (None, None)
    )
    return {"hottest_block_share": one, "hottest_1pct_share": many}


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
