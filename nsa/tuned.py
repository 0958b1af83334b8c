"""What `auto` knows of speed: crossings that were measured, never timed at run time. `perfbench tune` measures them anew.

By compute capability; measured on an NVIDIA H200 (reports/kernels.md). On a GPU that is not here, `auto` takes no kernel of ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tuned:
    """``triton_min_tokens``: keys from which path triton is the fastest, forward and backward; 0 where it always is."""

    triton_min_tokens: int


TUNED: Mapping[tuple[int, int], Tuned] = {(9, 0): Tuned(triton_min_tokens=0)}
