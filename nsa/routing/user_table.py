"""The user's own table of lengths from which paths pay: what its file says, as `auto` reads it.

Pure: `nsa.thresholds_file` reads the file, `perfbench tune --apply` writes it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CardEntry:
    """What was measured on one card, with one dtype and one shape.

    ``triton_min_tokens``: keys from which path triton is the fastest, 0 where it always is;
    ``fa2_min_len_win``: keys from which FA-2 is faster than SDPA for the window, None where it was
    not judged. ``longest_tokens`` is the longest length that was measured. ``run_id``, ``commit``,
    ``nsa_sha256``, ``torch``, ``triton`` and ``date`` (of its start, ISO 8601) name the run;
    ``kernels_sha256`` is that of `nsa.ops` then.
    """

    device_name: str
    sm: tuple[int, int]
    dtype: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    triton_min_tokens: int
    fa2_min_len_win: int | None
    longest_tokens: int
    run_id: str
    commit: str | None
    nsa_sha256: str
    kernels_sha256: str
    torch: str
    triton: str
    date: str

    # no property: a compiler that traces a call's routing follows none of a frozen dataclass
    def shape(self) -> tuple[int, int]:
        """As `shape_class`."""
        return shape_class(self.num_heads, self.num_kv_heads, self.head_dim, self.v_head_dim)

    @property
    def key(self) -> tuple[object, ...]:
        """One entry of a table for each: a later run replaces it."""
        return self.device_name, self.sm, self.dtype, self.shape()


# by identity: a Request holds it, and every call hashes a Request
@dataclass(frozen=True, slots=True, eq=False)
class UserTable:
    """A file's entries. ``kernels_sha256``: of the `nsa.ops` that is here."""

    path: str
    sha256: str
    entries: tuple[CardEntry, ...]
    kernels_sha256: str

    def of_card(self, device_name: str, sm: tuple[int, int]) -> list[CardEntry]:
        return [one for one in self.entries if one.device_name == device_name and one.sm == sm]


def shape_class(
    num_heads: int, num_kv_heads: int, head_dim: int, v_head_dim: int
) -> tuple[int, int]:
    """(query heads of a kv head, the wider head dim), each padded to a power of two of at least 16:
    what the kernels' tiles are made of.
    """
    group, wide = num_heads // num_kv_heads, max(head_dim, v_head_dim)
    return max(16, 1 << (group - 1).bit_length()), max(16, 1 << (wide - 1).bit_length())
