"""What `auto` knows of speed: a table, never timing at run time. `perfbench tune` measures them anew.

By compute capability; on a GPU that is not here, `auto` takes no kernel of ours. (9, 0) rests on an H200's sweep, in which attention of
path triton alone passed cuDNN's dense kernel between 8,192 and 16,384 tokens (reports/kernels-log.md). The paths have not been compared
with one another in one run yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tuned:
    """``triton_min_tokens``: keys from which path triton is the fastest, forward and backward; 0 where it always is."""

    triton_min_tokens: int


TUNED: Mapping[tuple[int, int], Tuned] = {(9, 0): Tuned(triton_min_tokens=0)}
