"""What a run of `perfbench tune` decides, by the rule of `crossing`, and what it cannot.

Pure: same run, same decisions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from perfbench.errors import Exit, worst
from perfbench.gate import Judgement, rows_by_cell, usable
from perfbench.records import Replicate, Run, Value
from perfbench.text import plain
from perfbench.tuning import crossing
from perfbench.tuning.matrix import WORKLOAD, sm_of

Key = tuple[str, str]  # path, fa2
KEYS: tuple[Key, ...] = (
    ("triton", "off"),
    ("v2", "on"),
    ("v2", "off"),
    ("masked", "on"),
    ("masked", "off"),
)
# What is decided -> its two sides. Of several keys the fastest at each length stands for the side;
# a tie goes to the second side.
CONTESTS: Mapping[str, tuple[tuple[Key, ...], tuple[Key, ...]]] = {
    "triton_min_tokens": (KEYS[:1], KEYS[1:]),
    "fa2_min_len_win": (KEYS[3:4], KEYS[4:]),
    "v2_min_tokens": (KEYS[1:3], KEYS[3:]),
}
MEANS: Mapping[str, str] = {
    "triton_min_tokens": "keys from which path triton is the fastest",
    "fa2_min_len_win": (
        "keys from which FA-2 is faster than SDPA for the window branch (path masked, alike but for"
        " the window's kernel)"
    ),
    "v2_min_tokens": (
        "tokens from which v2 is faster than masked; for the reader, since `auto` reads no such"
        " length"
    ),
}
Cells = Mapping[tuple[Key, int], "TimedCell"]


@dataclass(frozen=True, slots=True)
class TimedCell:
    """One path at one length.

    ``step_ms``: the median step of each process; None with ``why_not`` where the cell does not
    count.
    """

    step_ms: tuple[float, ...] | None
    why_not: str = ""
    planned: bool = True  # False: the matrix excludes it

    @property
    def median_ms(self) -> float | None:
        return median(self.step_ms) if self.step_ms else None


@dataclass(frozen=True, slots=True)
class Decision:
    """``min_tokens``: from there on the first side is proved faster; None where it never is, or
    where nothing was ``judged``.
    """

    name: str
    means: str
    judged: bool
    min_tokens: int | None
    reason: str
    lengths: tuple[int, ...]  # where both sides were measured
    incomplete: bool  # planned, but too little was measured to judge it


@dataclass(frozen=True, slots=True)
class TunedRun:
    """A run with what it decides."""

    run: Run
    judgement: Judgement
    lengths: tuple[int, ...]
    cells: Cells
    decisions: tuple[Decision, ...]

    @property
    def sm(self) -> tuple[int, int] | None:
        return sm_of(self.run.manifest.matrix_name)

    @property
    def exit_code(self) -> Exit:
        """OK where all that this machine can serve is decided; what a cell failed by, else FAILED
        where a decision lacks cells.
        """
        return worst(
            [self.judgement.exit_code, *(Exit.FAILED for one in self.decisions if one.incomplete)]
        )


def decide_run(run: Run, judgement: Judgement) -> TunedRun:
    """Decide from a run and its hard gates (no baseline).

    ValueError: of another matrix than `tune`'s, by its name or by its cells, or a demonstration.
    """
    sm_of(run.manifest.matrix_name)
    if run.manifest.injections:
        raise ValueError(
            f"got a run with injected faults ({', '.join(run.manifest.injections)}), wanted one"
            " that nothing was planted in"
        )
    _refuse_cells(run)
    cells = dict(_cells(run, judgement))
    lengths = tuple(sorted({length for _, length in cells}))
    return TunedRun(
        run, judgement, lengths, cells, tuple(_decide(name, lengths, cells) for name in CONTESTS)
    )


def _refuse_cells(run: Run) -> None:
    """ValueError where a planned cell is none of tune's, two stand at one place, or there is none:
    the name proves nothing.
    """
    name, seen = run.manifest.matrix_name, dict[tuple[Key, int], str]()
    for cell in run.manifest.cells:
        place = _place(cell.axes.to_mapping())
        if place is None or place[0] not in KEYS or cell.axes.workload != WORKLOAD:
            paths = " or ".join(dict.fromkeys(path for path, _ in KEYS))
            wanted = f"workload {WORKLOAD}, path {paths}, fa2 on or off"
            raise ValueError(
                plain(f"got a run of matrix {name!r} with cell {cell.cell_id}, wanted {wanted}")
            )
        if place in seen:
            text = (
                f"got a run of matrix {name!r} with both {seen[place]} and {cell.cell_id}, wanted"
                " one cell of a path, fa2 and length"
            )
            raise ValueError(plain(text))
        seen[place] = cell.cell_id
    if not seen:
        raise ValueError(
            f"got a run of matrix {name!r} without any cell, wanted those of `perfbench tune`"
        )


def _cells(run: Run, judgement: Judgement) -> Iterator[tuple[tuple[Key, int], TimedCell]]:
    rows, verdicts = rows_by_cell(run), {cell.cell_id: cell for cell in judgement.cells}
    for one in run.manifest.excluded:
        place = _place(
            dict(part.partition("=")[::2] for part in str(one.get("cell_id")).split(","))
        )
        if place is not None and place[0] in KEYS:
            yield place, TimedCell(None, str(one.get("reason")), planned=False)
    for cell in run.manifest.cells:
        place = _place(cell.axes.to_mapping())
        assert place is not None  # `_refuse_cells` saw to it
        verdict, good = verdicts.get(cell.cell_id), usable(rows.get(cell.cell_id, []))
        if verdict is None or verdict.verdict is not None:
            yield (
                place,
                TimedCell(
                    None,
                    (
                        f"{verdict.verdict}: {verdict.reason}"
                        if verdict is not None
                        else "it was left out with --only"
                    ),
                ),
            )
        elif len(good) < crossing.MIN_PROCESSES:
            yield (
                place,
                TimedCell(
                    None,
                    f"{len(good)} of {crossing.MIN_PROCESSES} processes, too few to know the noise",
                ),
            )
        else:
            yield place, TimedCell(tuple(map(_step_ms, good)))


def _place(axes: Mapping[str, Value]) -> tuple[Key, int] | None:
    """Path, fa2 and length; None where a cell (or the id of an excluded one, which leaves defaults
    out) does not name all three.
    """
    path, fa2, length = axes.get("path"), axes.get("fa2"), str(axes.get("seq_len"))
    if path is None or fa2 is None or not (length.isascii() and length.isdigit()):
        return None
    return (str(path), str(fa2)), int(length)


def _step_ms(row: Replicate) -> float:
    return 1000 * median(row.samples_s) / row.steps_per_sample


def _decide(name: str, lengths: Sequence[int], cells: Cells) -> Decision:
    keys_a, keys_b = CONTESTS[name]
    sides = [[_fastest(cells, keys, length) for length in lengths] for keys in (keys_a, keys_b)]
    times_a, times_b = (
        [
            None if key is None else cells[key, length].step_ms
            for key, length in zip(side, lengths, strict=True)
        ]
        for side in sides
    )
    both = tuple(
        length
        for length, a, b in zip(lengths, times_a, times_b, strict=True)
        if a is not None and b is not None
    )
    if not both:
        planned = all(
            any(cells[key, n].planned for key in keys for n in lengths if (key, n) in cells)
            for keys in (keys_a, keys_b)
        )
        return Decision(
            name, MEANS[name], False, None, _why_not(cells, keys_a, keys_b), (), planned
        )
    found = crossing.crossing(lengths, times_a, times_b)
    return Decision(
        name, MEANS[name], True, found, _because(found, lengths, times_a, times_b), both, False
    )


def _fastest(cells: Cells, keys: Sequence[Key], length: int) -> Key | None:
    known = [
        (median_ms, key)
        for key in keys
        if (key, length) in cells and (median_ms := cells[key, length].median_ms) is not None
    ]
    return min(known)[1] if known else None


def _why_not(cells: Cells, keys_a: Sequence[Key], keys_b: Sequence[Key]) -> str:
    for keys in (keys_a, keys_b):
        of_side = [cell for (key, _), cell in sorted(cells.items()) if key in keys]
        if all(cell.step_ms is None for cell in of_side):
            return "; ".join(dict.fromkeys(cell.why_not for cell in of_side))
    return "no length has both sides"


def _because(
    found: int | None,
    lengths: Sequence[int],
    times_a: Sequence[crossing.Times | None],
    times_b: Sequence[crossing.Times | None],
) -> str:
    """What holds at the crossing, and what keeps it from being shorter."""
    by_length = {length: (a, b) for length, a, b in zip(lengths, times_a, times_b, strict=True)}
    parts = []
    if found is not None:
        a, b = by_length[found]
        assert a is not None and b is not None
        parts.append(f"at {found}: {compared(a, b)}")
    for length in reversed([n for n in lengths if found is None or n < found]):
        a, b = by_length[length]
        if a is None:
            parts.append(f"at {length}: the first side has no time that counts")
        elif b is None:
            continue
        else:
            parts.append(f"at {length}: {compared(a, b)}")
        break
    return "; ".join(parts)


def compared(a: crossing.Times, b: crossing.Times) -> str:
    """How much longer B takes than A, and whether that is proved."""
    gain, margin = crossing.gain_pct(a, b), crossing.margin_pct(a, b)
    return (
        f"{gain:+.1f} %, {'proved' if crossing.proved_faster(a, b) else 'not proved'} (margin"
        f" {margin:.1f} %)"
    )


def lines(tuned: TunedRun) -> list[str]:
    """What to write into nsa/routing/thresholds.py; empty where path triton was not judged."""
    decision = next(one for one in tuned.decisions if one.name == "triton_min_tokens")
    if tuned.sm is None or not decision.judged:
        return []
    return [f"{tuned.sm}: Tuned(triton_min_tokens={_threshold(decision, tuned.lengths)}),"]


def thresholds(tuned: TunedRun) -> tuple[int, int | None] | None:
    """(keys from which path triton is taken, and FA-2 for the window: None where that was not
    judged), as the user's table holds them; None where path triton was not judged.
    """
    found = {one.name: one for one in tuned.decisions if one.judged}
    if "triton_min_tokens" not in found:
        return None
    window = found.get("fa2_min_len_win")
    return (
        _threshold(found["triton_min_tokens"], tuned.lengths),
        None if window is None else _threshold(window, tuned.lengths),
    )


def settings(tuned: TunedRun) -> dict[str, int]:
    """Environment variables that have the same effect at once; for path triton there is none but
    NSA_THRESHOLDS, which names a table.
    """
    decision = next(one for one in tuned.decisions if one.name == "fa2_min_len_win")
    return {"NSA_FA2_MIN_LEN_WIN": _threshold(decision, tuned.lengths)} if decision.judged else {}


def _threshold(decision: Decision, lengths: Sequence[int]) -> int:
    """0 where it is the fastest at every length; beyond the longest where at none: what was not
    measured is not forbidden.
    """
    if decision.min_tokens is None:
        return lengths[-1] + 1
    return 0 if decision.min_tokens == lengths[0] else decision.min_tokens
