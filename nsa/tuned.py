"""What `auto` knows of speed: a table, never timing at run time.

`perfbench tune` measures them anew.

By compute capability; on a GPU that is not here, `auto` takes no kernel of ours. (9, 0) rests on
`perfbench tune` on an H200 (reports/evidence/tune-h200/tune.md): forward and backward of attention,
path triton had the least median at every length from 512 tokens on, proved from 2,048. Below that
no path is proved to be faster than another there, so the length that would turn `auto` to the
second best is not written; decode steps of 2,048 keys were fastest with it, too
(reports/evidence/decode-graph-h200).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tuned:
    """``triton_min_tokens``: keys from which path triton is the fastest, forward and backward; 0
    where it always is.
    """

    triton_min_tokens: int


TUNED: Mapping[tuple[int, int], Tuned] = {(9, 0): Tuned(triton_min_tokens=0)}
