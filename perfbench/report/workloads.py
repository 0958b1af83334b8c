"""Tables of what some workloads add: what the loop of nsa.train waits for, caches of decode and
prefill, forward and backward of attention, or of its selected branch, alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nsa.blocks import BlockGrid
from nsa.config import BRANCHES, ModelConfig
from perfbench.errors import PerfbenchError
from perfbench.matrix import stored_matrix
from perfbench.records import ATTENTION, AXES, CACHED, SELECTED, SELECTIONS, Run
from perfbench.report.rows import Row, is_twin, without
from perfbench.roofline import keys_of_query
from perfbench.text import NULL, escape, fixed, number, ratio

MIB = 2**20
NO_NUMBER = "A dash: not measured, or not proved."
# axes with a column or a title of their own
SHOWN = ("workload", "seq_len", "batch", "chunk", "path", "selection")
# counted keys are means over queries and layers: beyond this they differ, not their rounding
SAME_KEYS = 1e-6


@dataclass(frozen=True, slots=True)
class Table:
    """``lines`` of Markdown cells; the first ``left`` columns are text."""

    title: str
    head: Sequence[str]
    lines: Sequence[Sequence[str]]
    note: str
    left: int = 1


def tables(run: Run, rows: Sequence[Row]) -> list[Table]:
    """Those that this run has cells for."""
    found = [_cached(name, mine, model_of(run)) for name in CACHED if (mine := _of(rows, name))]
    alone = [row for name in ATTENTION for row in _of(rows, name)]
    branch = [row for name in SELECTED for row in _of(rows, name)]
    loop = _of(rows, "train_loop")
    return [
        *([_loop(loop, _of(rows, "train"))] if loop else []),
        *found,
        *([_attention(alone)] if alone else []),
        *([_selected(branch)] if branch else []),
    ]


def _of(rows: Sequence[Row], workload: str) -> list[Row]:
    return [row for row in rows if row.cell.axes.workload == workload]


def model_of(run: Run) -> ModelConfig | None:
    """The model of the run's matrix; None where this perfbench cannot read that matrix."""
    try:
        return stored_matrix(run.manifest).model
    except PerfbenchError:
        return None


def closed_form(
    model: ModelConfig, workload: str, tokens: int, *, dense: bool = False
) -> Mapping[str, float]:
    """Keys a query and kv head for each branch: of the token that a decode step adds to ``tokens``,
    or the mean of a prefill's.
    """
    if workload == "decode":
        return keys_of_query(model, tokens, dense=dense)
    if dense:
        return {"dense": (tokens + 1) / 2}
    pairs = BlockGrid.of(model.nsa).pairs(tokens)
    return {branch: pairs[branch] / tokens for branch in model.nsa.branches}


def _loop(rows: list[Row], trained: list[Row]) -> Table:
    """One line a cell, next to the ``trained`` cell of the same axes."""
    steps = {without(row.cell.axes, "workload"): row for row in trained}
    several = _varying(rows)
    lines = []
    for row in rows:
        alone = steps.get(without(row.cell.axes, "workload"))
        of_step = None
        if alone is not None and alone.tok_per_s and row.tok_per_s:
            of_step = 100 * row.tok_per_s / alone.tok_per_s
        seconds = (
            (None, None, None)
            if row.loop is None
            else (row.loop.wait_p50_s, row.loop.wait_p95_s, row.loop.fetch_p50_s)
        )
        lines.append(
            [
                _path(row, several),
                f"{row.cell.axes.batch:,}",
                f"{row.cell.axes.seq_len:,}",
                number(row.step_ms),
                number(row.tok_per_s),
                fixed(of_step, 1),
                *(number(None if one is None else 1e3 * one) for one in seconds),
            ]
        )
    note = (
        "A step takes its batches from the loader and trains on them as `python -m nsa.train` does:"
        " AdamW over fp32 masters, clipping, a new learning rate. % of train: its tok/s over those"
        " of workload train, which has random batches on the device and bf16 moments. wait: a step"
        f" waited so long for its batches; fetch: making one took so long. {NO_NUMBER}"
    )
    head = [
        "path",
        "batch",
        "seq_len",
        "ms a step",
        "tok/s",
        "% of train",
        "wait p50 ms",
        "wait p95 ms",
        "fetch p50 ms",
    ]
    return Table("train_loop", head, lines, note)


def _cached(workload: str, rows: list[Row], model: ModelConfig | None) -> Table:
    decodes = workload == "decode"
    size = ["batch", "context"] if decodes else ["batch", "prompt", "chunk"]
    branches = (*BRANCHES, *(["dense"] if any(row.is_dense for row in rows) else []))
    head = [
        "path",
        *size,
        "ms a step",
        "tok/s",
        "x dense",
        *(f"{branch}: keys a query" for branch in branches),
        "caches, MiB",
    ]
    several = _varying(rows)
    lines = []
    for row in sorted(rows, key=lambda row: (row.cell.axes.batch, row.cell.axes.seq_len)):
        held = row.cache.tokens if row.cache is not None else None
        sizes = (
            [f"{row.cell.axes.batch}", f"{held or row.cell.axes.seq_len:,}"]
            if decodes
            else [
                f"{n:,}" for n in (row.cell.axes.batch, row.cell.axes.seq_len, row.cell.axes.chunk)
            ]
        )
        formula: Mapping[str, float] = {}
        if model is not None and held is not None:
            formula = closed_form(model, workload, held, dense=row.is_dense)
        keys = [_keys(row, branch, formula.get(branch)) for branch in branches]
        mib = None if row.cache is None else row.cache.memory_bytes / MIB
        lines.append(
            [
                _path(row, several),
                *sizes,
                number(row.step_ms),
                number(row.tok_per_s),
                ratio(row.x_dense),
                *keys,
                fixed(mib, 1),
            ]
        )
    what = (
        "A step is one token for each sequence."
        if decodes
        else "A step is a whole prompt; keys are the mean over its queries."
    )
    source = (
        "in brackets the closed form"
        if model is not None
        else "this perfbench cannot read the run's matrix, so no closed form"
    )
    keys_note = (
        "Keys are those that a query attends to for each KV head, counted in one untimed step,"
        f" {source}; bold where they differ."
    )
    return Table(workload, head, lines, f"{what} {keys_note} Caches are of all layers. {NO_NUMBER}")


def _keys(row: Row, branch: str, formula: float | None) -> str:
    read = None if row.cache is None else row.cache.keys_read.get(branch)
    if read is None or formula is None:
        return _count(read)
    same = math.isclose(read, formula, rel_tol=SAME_KEYS)
    return f"{_count(read) if same else f'**{_count(read)}**'} ({_count(formula)})"


def _count(keys: float | None) -> str:
    return NULL if keys is None else f"{keys:,.0f}" if keys == int(keys) else f"{keys:,.1f}"


def _attention(rows: list[Row]) -> Table:
    """One line for each path and shape, over both workloads."""
    whole, forward = (
        {without(row.cell.axes, "workload"): row for row in _of(rows, name)} for name in ATTENTION
    )
    several = _varying(rows)
    head = [
        "path",
        "batch",
        "seq_len",
        "forward ms",
        "backward ms",
        "both ms",
        "x dense, forward",
        "x dense, both",
        "best dense",
        "bound",
    ]
    lines = []
    for key in dict.fromkeys(without(row.cell.axes, "workload") for row in rows):
        one = whole.get(key) or forward[key]
        mine = [found.get(key) for found in (forward, whole)]
        best = [_best_dense(found.values(), one) for found in (forward, whole)]
        times = [None if row is None else row.step_ms for row in mine]
        ratios = [
            ratio(row.step_ms / time if row and row.step_ms and time else None)
            for row, time in zip(best, times, strict=True)
        ]
        names = dict.fromkeys(row.cell.axes.path for row in best if row)
        bounds = dict.fromkeys(row.bound for row in mine if row and row.bound)
        sizes = [f"{one.cell.axes.batch:,}", f"{one.cell.axes.seq_len:,}"]
        shown = [number(times[0]), number(backward_ms(*mine)), number(times[1])]
        lines.append(
            [
                _path(one, several),
                *sizes,
                *shown,
                *ratios,
                escape(", ".join(names)) or NULL,
                " / ".join(bounds) or NULL,
            ]
        )
    note = (
        "Attention alone, no projections. Backward is both less the forward of the same shape,"
        " each timed on its own. x dense is against the fastest dense kernel measured at that"
        f" shape, above 1 being faster. {NO_NUMBER}"
    )
    return Table("attention", head, lines, note)


def _selected(rows: list[Row]) -> Table:
    """One line for each path, shape and kind of selection, over both workloads; the kinds in their
    order.
    """
    whole, forward = (
        {without(row.cell.axes, "workload"): row for row in _of(rows, name)} for name in SELECTED
    )
    several = _varying(rows)
    lines = []
    for key in dict.fromkeys(
        without(row.cell.axes, "workload") for row in sorted(rows, key=_by_kind)
    ):
        one = whole.get(key) or forward[key]
        mine = [found.get(key) for found in (forward, whole)]
        times = [None if row is None else row.step_ms for row in mine]
        bounds = dict.fromkeys(row.bound for row in mine if row and row.bound)
        sizes = [
            one.cell.axes.selection,
            f"{one.cell.axes.batch:,}",
            f"{one.cell.axes.seq_len:,}",
        ]
        shown = [number(times[0]), number(backward_ms(*mine)), number(times[1])]
        lines.append([_path(one, several), *sizes, *shown, " / ".join(bounds) or NULL])
    note = (
        "The selected branch alone, on blocks that it is given. Every kind of selection reads the"
        " same number of keys. Backward is both less the forward of the same shape, each timed on"
        f" its own. {NO_NUMBER}"
    )
    return Table(
        "selected",
        ["path", "selection", "batch", "seq_len", "forward ms", "backward ms", "both ms", "bound"],
        lines,
        note,
        left=2,
    )


def _by_kind(row: Row) -> tuple[int, int, int, str]:
    axes = row.cell.axes
    return axes.batch, axes.seq_len, SELECTIONS.index(axes.selection), axes.path


def backward_ms(forward: Row | None, whole: Row | None) -> float | None:
    """What the backward adds to the forward; null unless both have a proved speed and the
    difference is a time.
    """
    if forward is None or whole is None or forward.step_ms is None or whole.step_ms is None:
        return None
    return whole.step_ms - forward.step_ms if whole.step_ms > forward.step_ms else None


def _best_dense(rows: Iterable[Row], like: Row) -> Row | None:
    same = without(like.cell.axes, "workload", "path", "fa2")
    twins = [
        row
        for row in rows
        if is_twin(row.cell.axes) and without(row.cell.axes, "workload", "path", "fa2") == same
    ]
    return min(
        (row for row in twins if row.step_ms is not None),
        key=lambda row: row.step_ms or 0.0,
        default=None,
    )


def _varying(rows: Sequence[Row]) -> list[str]:
    """Axes, in their order, in which these cells differ and which have no column."""
    return [
        name
        for name in AXES
        if name not in SHOWN
        and len({row.cell.axes.value(name) for row in rows if not _unnamed(row, name)}) > 1
    ]


def _unnamed(row: Row, name: str) -> bool:
    return row.cell.axes.value(name) in (None, "n/a")


def _path(row: Row, several: Sequence[str]) -> str:
    rest = [
        f"{'FA-2' if name == 'fa2' else name} {row.cell.axes.value(name)}"
        for name in several
        if not _unnamed(row, name)
    ]
    return escape(", ".join([row.cell.axes.path, *rest]))
