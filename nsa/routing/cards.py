"""What a GPU gives one program, by compute capability; nothing here was timed.

Pure: no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CardClass:
    """``shared_bytes``: most shared memory that one program may take. ``by_descriptors``: whether a
    copy engine (TMA) fetches tiles for multiplies that read them from where it puts them.
    ``has_tensor_memory``: products gather in a memory of their own, not in registers.
    """

    shared_bytes: int
    by_descriptors: bool
    has_tensor_memory: bool = False


_KB = 1024
HOPPER = CardClass(227 * _KB, True)
BLACKWELL = CardClass(227 * _KB, True, True)
# CUDA C++ Programming Guide, technical specifications by compute capability: the most shared memory
# of a thread block. The kernels were measured with 9.0 alone; they are compiled for the others
# (tests/nsa/test_tiles.py). Before 9.0 there is no copy engine, and Triton makes ordinary loads of
# descriptors. 12.0 has one, but its multiplies read registers: with descriptors the gradients of
# keys spill 320 (d 128) to 2,950 bytes a thread (d 64), without them none.
CARDS: Mapping[tuple[int, int], CardClass] = {
    (8, 0): CardClass(163 * _KB, False),  # A100
    (8, 6): CardClass(99 * _KB, False),  # A10, RTX 3090
    (8, 7): CardClass(163 * _KB, False),  # Orin
    (8, 9): CardClass(99 * _KB, False),  # L4, L40S, RTX 4090
    (9, 0): HOPPER,
    (10, 0): BLACKWELL,  # B200
    (10, 3): BLACKWELL,  # B300
    (12, 0): CardClass(99 * _KB, False),  # RTX 5090
    (12, 1): CardClass(99 * _KB, False),  # GB10
}
# from 8.0 on no card gives less
LEAST = CardClass(99 * _KB, False)


def card_class(sm: tuple[int, int] | None) -> CardClass:
    """That of a compute capability: the least of all for one that is not known, and for None (no
    GPU: the interpreter) that with which the kernels were measured.
    """
    return HOPPER if sm is None else CARDS.get(sm, LEAST)


def selected_backward_bytes(
    rows: int, block: int, key_dim: int, value_dim: int, element_bytes: int
) -> int:
    """Shared memory of the selected branch's backward in a tile of ``rows`` query rows, all sizes
    padded to powers of two: it takes more than any other kernel, and grows with the block.

    K and V of one block, the wider of them once more (its transpose), q, dO and the weights of the
    rows. Compiled for SM 8.0 and 8.9 it is exact at dims 64 (+ 2 %), 128, 192/128 and 256.
    """
    widest = max(key_dim, value_dim)
    return element_bytes * (
        block * (key_dim + value_dim + widest) + rows * (key_dim + value_dim + block)
    )
