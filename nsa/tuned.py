"""What `auto` knows of speed: crossings that were measured, never timed at run time. `perfbench tune` measures them anew.

By compute capability; on a GPU that is not here, `auto` takes no kernel of ours. (9, 0), an H200, eager training of the 12-layer model:
153,000 tok/s at 2 x 8,192 by path triton (reports/kernels-log.md), 89,000 at 4 x 8,192 by masked, the next best
(reports/evidence/h200-gate). Short calls are bound by the host on every path and have not been compared in one run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tuned:
    """``triton_min_tokens``: keys from which path triton is the fastest, forward and backward; 0 where it always is."""

    triton_min_tokens: int


TUNED: Mapping[tuple[int, int], Tuned] = {(9, 0): Tuned(triton_min_tokens=0)}
