"""What was measured: sizes from which one implementation is taken rather than another.

Constants, never timing at run time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

ADAPTIVE_MIN_TOKENS = 1024  # the first implementation's NSA_SEL_RANGES_V2_MIN_S
MASK_LIMIT_ELEMENTS = 2**31  # `auto` builds no boolean mask larger than this (2 GiB)
COPY_MIN_ELEMENTS = (
    12 << 20
    # of q: below this the host is waited for, and a tensor descriptor costs it 16 us; m7c_125m:
    # 16,384 tokens
)
# (b, t, kv head) of a call: below this path triton's selected forward goes query by query, without
# sorted lists
SORT_MIN_ROWS = 8192


@dataclass(frozen=True, slots=True)
class Tuned:
    """``triton_min_tokens``: keys from which path triton is the fastest, forward and backward; 0
    where it always is.
    """

    triton_min_tokens: int


# What `auto` knows of speed, by compute capability; `perfbench tune` measures it anew. On a GPU
# that is neither here nor in the user's own table it estimates (nsa.routing.speed). (9, 0) rests on
# `perfbench tune` on an H200 (reports/evidence/tune-h200/tune.md): forward and backward of
# attention, path triton had the least median at every length from 512 tokens on, proved from 2,048.
# Below that no path is proved to be faster than another there, so the length that would turn `auto`
# to the second best is not written; decode steps of 2,048 keys were fastest with it, too
# (a run of decode-h200 at ecb800e, in git up to 30eb8d7).
TUNED: Mapping[tuple[int, int], Tuned] = {(9, 0): Tuned(triton_min_tokens=0)}
# Where nobody measured a card, `auto` takes path triton from where dense attention has this many
# times as many keys a query: at m7c_125m's sizes 11,300 tokens. Forward and backward crossed with
# the best dense kernel of an H100 and an H200 at 11,000 (captured) to 20,000 (from Python). Paths
# of ours that are the alternative are slower than dense ones, so on those two cards 3 is cautious:
# path triton was the fastest of ours from 512.
ESTIMATE_MARGIN = 3
# programs in the second and the third dimension of a CUDA grid; the first holds 2^31 - 1
GRID_LIMIT = 65_535
# Rows of a decode step whose products of matrices path triton has a kernel for: each program reads
# all rows for few weights, so beyond it a library is as fast. Not measured yet.
STEP_MAX_ROWS = 64
