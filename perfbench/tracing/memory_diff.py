"""What a step allocated, on one side or on both: pure, from two tables."""

from __future__ import annotations

from collections.abc import Sequence

from perfbench.records import Kernels, Memory, MemoryRow
from perfbench.text import NULL, cell_code, escape, number

MIB = 2**20


def summary(base: Kernels | None, candidate: Kernels | None) -> list[str]:
    """A sentence for each side that was traced; none of a trace of an older version."""
    found = []
    for side, one in (("base", base), ("candidate", candidate)):
        if one is None:
            continue
        if one.memory is not None:
            kept = f", {_mib(one.memory.kept_bytes)} kept" if one.memory.kept_bytes else ""
            found.append(
                f"memory of the {side}'s step: peak {_mib(one.memory.peak_bytes)} above its"
                f" start{kept}"
            )
        elif one.memory_absent:
            found.append(f"memory of the {side}'s step: not recorded, {one.memory_absent}")
    return found


def render_markdown(base: Memory | None, candidate: Memory | None, top: int = 10) -> str:
    """The ``top`` operators by bytes alive at the peak of either side, then by bytes allocated;
    empty without memory.
    """
    sides = [one for one in (base, candidate) if one is not None]
    if not sides:
        return ""
    names = dict.fromkeys(name for one in sides for name in one.rows)

    def size(name: str) -> tuple[int, int, str]:
        rows = [one.rows[name] for one in sides if name in one.rows]
        alive = max(row.at_peak_bytes for row in rows)
        return -alive, -max(row.allocated_bytes for row in rows), name

    shown = sorted(names, key=size)[:top]
    titles = ["operator"]
    for prefix in ("base ", "candidate ") if len(sides) == 2 else ("",):
        titles += [f"{prefix}alive at the peak, MiB", f"{prefix}allocated, MiB", f"{prefix}times"]
    lines = [titles, ["---", *["---:"] * (len(titles) - 1)]]
    lines += [[cell_code(name), *_cells(sides, name)] for name in shown]
    rest = len(names) - len(shown)
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return text + (f"\n\n{rest} more operators allocated less." if rest else "")


def _cells(sides: Sequence[Memory], name: str) -> list[str]:
    cells = []
    for one in sides:
        row: MemoryRow | None = one.rows.get(name)
        cells += (
            [NULL] * 3
            if row is None
            else [
                number(row.at_peak_bytes / MIB),
                number(row.allocated_bytes / MIB),
                f"{row.count:,}",
            ]
        )
    return cells


def _mib(size_bytes: int) -> str:
    return escape(f"{number(size_bytes / MIB)} MiB")
