"""Which keys a query sees: those that end within the tokens up to it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def ends(seen, block, stride):
    """Keys that end within ``seen`` tokens."""
    return tl.where(seen < block, 0, (seen - block) // stride + 1)
