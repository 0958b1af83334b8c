"""One row of the matrix for each judged cell: its speed with its band, ratios to the dense twin,
and a reason for each null.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median

from perfbench.gate import Band, CellVerdict, Judgement, bands, usable
from perfbench.records import (
    ATTENTION,
    AXES,
    CACHED,
    SELECTED,
    TRAINING,
    CacheLine,
    Cell,
    LoopLine,
    PlannedCell,
    Profile,
    Replicate,
    Run,
    Telemetry,
    Verdict,
    kind_of,
    short_ids,
)

UNTRUE = (Verdict.PARITY, Verdict.IMPOSSIBLE, Verdict.WRONG_PATH)
PATH_ORDER = (
    "reference",
    "v1",
    "v2",
    "masked",
    "triton",
    "auto",
    "adaptive",
    "fla",
    "dense",
    "dense_flash",
    "dense_cudnn",
    "dense_triton",
    "dense_fa3",
    "dense_fa4",
    "flex",
    "flex_window",
)
GIB = 2**30
# twice the tokens in less than 5 % more time: not the tokens are paid for
LAUNCH_BOUND_GROWTH = 1.05
# axes that are named only where they are not at their default
SWITCHES = (
    "l2",
    "chunk",
    "compile",
    "cuda_graph",
    "selection",
    "without",
    "world_size",
    "parallel",
    "cache",
)
Key = tuple[tuple[str, str | int], ...]
EVERY_NUMBER = "every number"  # the reason of a whole row of dashes


@dataclass(frozen=True, slots=True)
class Row:
    """What the report says about one cell; ``low`` and ``high`` are the 95 % band of its speed.

    ``device_ms``: kernels of one profiled step, summed. ``host_ms``: to enqueue one step.
    ``launches``: kernels of a step. ``nulls`` maps a column's name to why it is
    empty.
    """

    cell: CellVerdict
    planned: PlannedCell | None
    statuses: dict[str, int]
    name: str = ""  # the cell's id without the axes that all cells share
    tok_per_s: float | None = None
    tokens_per_step: int | None = None
    low: float | None = None
    high: float | None = None
    x_dense: float | None = None
    device_ms: float | None = None
    host_ms: float | None = None
    launches: float | None = None
    mj_per_token: float | None = None
    cycles_per_token: float | None = None
    floor_pct: float | None = None
    bound: str | None = None
    utilisation_pct: float | None = None
    busy_pct: float | None = None
    memory_gib: float | None = None
    parity_ratio: float | None = None
    step_ratio: float | None = None  # of the whole step against its twin
    engaged: dict[str, int] = field(default_factory=dict)
    engaged_by: str = "call"
    cache: CacheLine | None = None
    loop: LoopLine | None = None  # of the process whose steps waited longest for their batches
    physics_notes: list[str] = field(default_factory=list)
    stderr_tail: str = ""
    nulls: dict[str, str] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        return "MEASURED" if self.cell.verdict is None else self.cell.verdict.value

    @property
    def step_s(self) -> float | None:
        return (
            None
            if self.tok_per_s is None or self.tokens_per_step is None
            else self.tokens_per_step / self.tok_per_s
        )

    @property
    def step_ms(self) -> float | None:
        return None if self.step_s is None else 1e3 * self.step_s

    @property
    def half_pct(self) -> float | None:
        """Half the band in per cent of the speed, its upper and larger half."""
        return (
            None
            if self.high is None or self.tok_per_s is None
            else 100 * (self.high / self.tok_per_s - 1)
        )

    @property
    def is_dense(self) -> bool:
        return self.cell.axes.is_dense


def rows_of(run: Run, judgement: Judgement) -> list[Row]:
    """Rows in reading order: workload, length, batch, switches, path, FA-2."""
    by_cell: dict[str, list[Replicate]] = {}
    # By number, whatever order they were measured in; of one number the last line still counts.
    for replicate in sorted(run.replicates, key=lambda one: one.replicate):
        by_cell.setdefault(replicate.cell_id, []).append(replicate)
    planned = {cell.cell_id: cell for cell in run.manifest.cells}
    dense = _dense_speeds(judgement.cells)
    on_cpu = run.manifest.environment.gpu_slug == "cpu"
    known = bands(by_cell)
    rows = []
    for cell in judgement.cells:
        mine = by_cell.get(cell.cell_id, [])
        rows.append(
            _row(cell, planned.get(cell.cell_id), mine, dense, known.get(cell.cell_id), on_cpu)
        )
    if judgement.baseline is not None:
        for row in rows:
            if row.tok_per_s is not None and row.cell.change_pct is None:
                row.nulls["change"] = row.cell.reason
    short = short_ids(row.cell.axes for row in rows)
    named = [replace(row, name=short.get(row.cell.cell_id, row.cell.cell_id)) for row in rows]
    return sorted(named, key=_reading_order)


def null_reasons(rows: Iterable[Row], shown: Collection[str]) -> list[tuple[str, str, list[str]]]:
    """Every (column, reason) of the empty fields, with the cells that it holds for; the commonest
    first. Of a column that is not ``shown``, none: a column of dashes is left out, and what would
    explain it, too.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for column, reason in row.nulls.items():
            if column not in shown and column != EVERY_NUMBER:
                continue
            groups.setdefault((column, reason), []).append(row.cell.cell_id)
    return sorted(
        ((c, r, ids) for (c, r), ids in groups.items()),
        key=lambda item: (-len(item[2]), item[0], item[1]),
    )


def launch_bound(rows: Iterable[Row]) -> list[str]:
    """Cells whose time hardly grows although their length doubles: they pay for launches, not for
    tokens.

    Not of decode, whose step is one token whatever the length.
    """
    series: dict[Key, list[Row]] = {}
    for row in rows:
        if row.step_s is not None and row.cell.axes.workload != "decode":
            series.setdefault(without(row.cell.axes, "seq_len"), []).append(row)
    found = []
    for same in series.values():
        same.sort(key=lambda row: row.cell.axes.seq_len)
        for short, long in pairwise(same):
            assert short.step_s is not None and long.step_s is not None
            doubled = long.cell.axes.seq_len >= 2 * short.cell.axes.seq_len
            if doubled and long.step_s < LAUNCH_BOUND_GROWTH * short.step_s:
                times = (
                    f"{long.step_s * 1e3:.3g} ms a step against {short.step_s * 1e3:.3g} ms at"
                    f" seq_len={short.cell.axes.seq_len}"
                )
                found.append(f"{long.cell.cell_id}: {times}")
    return found


def is_twin(axes: Cell) -> bool:
    """Whether a cell is what others are held against: path dense; of attention alone, and with a
    cache, every dense kernel, those of peers included. A user's own step is none: what it computes
    nobody knows.
    """
    if axes.is_own_step:
        return False
    every = axes.workload in (*ATTENTION, *CACHED)
    return axes.is_dense if every else axes.path == "dense"


def is_window(axes: Cell) -> bool:
    """Whether a cell computes the window alone, which no whole attention is held against."""
    return kind_of(axes.path) == "window" and not axes.is_own_step


def without(axes: Cell, *names: str) -> Key:
    """The other axes, as a key."""
    return tuple(
        sorted((name, value) for name, value in axes.to_mapping().items() if name not in names)
    )


def key_of_twin(axes: Cell) -> Key:
    """What a cell shares with its dense twin, which keeps no pages."""
    return without(axes, "path", "fa2", "cache")


def unmarked(axes: Cell, name: str) -> bool:
    """Whether a report omits this axis of a cell: a switch that nobody turned."""
    return name in SWITCHES and axes.value(name) == AXES[name].default


def _dense_speeds(cells: Iterable[CellVerdict]) -> dict[Key, float]:
    """The fastest twin's tok/s."""
    found: dict[Key, float] = {}
    for cell in cells:
        if is_twin(cell.axes) and cell.cand_tok_per_s is not None:
            key = key_of_twin(cell.axes)
            found[key] = max(cell.cand_tok_per_s, found.get(key, 0.0))
    return found


def _reading_order(row: Row) -> tuple[int, str, int, int, int, int, str, int, str]:
    axes = row.cell.axes
    path = axes.path
    rank = PATH_ORDER.index(path) if path in PATH_ORDER else len(PATH_ORDER)
    workload = axes.workload
    fa2_off = 1 if axes.fa2 == "off" else 0
    turned = sum(not unmarked(axes, name) for name in SWITCHES)
    sizes = axes.seq_len, axes.batch, turned
    return (
        0 if workload in TRAINING else 1,
        workload,
        *sizes,
        rank,
        path,
        fa2_off,
        row.cell.cell_id,
    )


def _row(
    cell: CellVerdict,
    planned: PlannedCell | None,
    rows: list[Replicate],
    dense: Mapping[Key, float],
    band: Band | None,
    on_cpu: bool,
) -> Row:
    statuses: dict[str, int] = {}
    for one in rows:
        statuses[one.status.value] = statuses.get(one.status.value, 0) + 1
    parity = next((one.parity for one in rows if one.parity is not None), None)
    ratios = [ratio for one in rows if one.parity for ratio in one.parity.tensors.values()]
    if parity is not None and not ratios and parity.tolerance > 0:
        ratios = [parity.max_error / parity.tolerance]
    engaged, how = next(
        ((dict(one.engaged), one.engaged_by) for one in rows if one.engaged), ({}, "call")
    )
    tail = next((one.stderr_tail for one in rows if one.stderr_tail), "")
    no_parity = "no parity check was recorded"
    if cell.axes.is_own_step:
        no_parity = "a user's own step is compared with its own reference, as far as it declares"
    nulls = {} if ratios else {"parity": no_parity}
    step_ratio, no_step = _step_ratio(rows)
    if no_step:
        nulls["step"] = no_step
    good = usable(rows)
    if cell.cand_tok_per_s is None or not good:
        nulls[EVERY_NUMBER] = (
            f"{'not published' if cell.verdict in UNTRUE else 'no speed'}: {cell.verdict}"
        )
        proof = max(ratios, default=None)
        return Row(
            cell,
            planned,
            statuses,
            parity_ratio=proof,
            step_ratio=step_ratio,
            engaged=engaged,
            engaged_by=how,
            stderr_tail=tail,
            nulls=nulls,
        )
    twin = None if is_window(cell.axes) else dense.get(key_of_twin(cell.axes))
    utilisation = _median(
        good, lambda one: one.telemetry.utilisation_pct if one.telemetry else None
    )
    floor = _median(good, lambda one: one.physics.floor_fraction if one.physics else None)
    memory = [one.peak_memory_bytes for one in good if one.peak_memory_bytes is not None]
    profiles = [one.profile for one in good if one.profile is not None]
    busy = next((one.busy_fraction for one in profiles if one.busy_fraction is not None), None)
    host_bound = [one.host_bound for one in good if one.host_bound is not None]
    bound = None if not host_bound else "host" if any(host_bound) else "GPU"
    device = _median(
        good,
        lambda one: (
            one.profile.device_time_s if one.profile and one.profile.device_time_s > 0 else None
        ),
    )
    host = _median(good, lambda one: one.profile.host_time_s if one.profile else None)
    launches = _median(
        good, lambda one: (one.profile.kernel_count or None) if one.profile else None
    )
    energy = _median(good, lambda one: one.energy_j_per_token)
    cycles = _median(
        good, lambda one: one.cycles_per_step / one.tokens_per_step if one.cycles_per_step else None
    )
    notes = dict.fromkeys(note for one in good if one.physics for note in one.physics.notes)
    nulls |= _nulls(good, twin, floor, bound, utilisation, memory, on_cpu, profiles)
    if is_window(cell.axes):
        nulls["x dense"] = "the window alone has no dense twin: full attention computes more"
    if cell.axes.workload in SELECTED:
        nulls["x dense"] = (
            "the selected branch alone has no dense twin: full attention selects nothing"
        )
    nulls |= _absent_costs(good, device, energy, cycles, on_cpu)
    if band is None:
        nulls["± (95 %)"] = "one process, and no other cell to estimate its noise from"
    return Row(
        cell=cell,
        planned=planned,
        statuses=statuses,
        tok_per_s=cell.cand_tok_per_s,
        tokens_per_step=good[0].tokens_per_step,
        low=None if band is None else band[0],
        high=None if band is None else band[1],
        x_dense=None if twin is None else cell.cand_tok_per_s / twin,
        device_ms=None if device is None else 1e3 * device,
        host_ms=None if host is None else 1e3 * host,
        launches=launches,
        mj_per_token=None if energy is None else 1e3 * energy,
        cycles_per_token=cycles,
        floor_pct=None if floor is None else 100 * floor,
        bound=bound,
        utilisation_pct=utilisation,
        busy_pct=None if busy is None else 100 * busy,
        memory_gib=max(memory) / GIB if memory else None,
        parity_ratio=max(ratios, default=None),
        step_ratio=step_ratio,
        engaged=engaged,
        engaged_by=how,
        cache=next((one.cache for one in good if one.cache is not None), None),
        loop=max(
            (one.loop for one in good if one.loop is not None),
            key=lambda one: one.wait_p95_s,
            default=None,
        ),
        physics_notes=list(notes),
        stderr_tail=tail,
        nulls=nulls,
    )


def _nulls(
    good: list[Replicate],
    twin: float | None,
    floor: float | None,
    bound: str | None,
    utilisation: float | None,
    memory: list[int],
    on_cpu: bool,
    profiles: list[Profile],
) -> dict[str, str]:
    found = {}
    if twin is None:
        found["x dense"] = "no measured dense cell with the same other axes"
    if floor is None:
        notes = [note for one in good if one.physics for note in one.physics.notes]
        found["% of floor"] = notes[0] if notes else "no floor was computed"
    if bound is None:
        unprofiled = "the profile has no busy fraction" if profiles else "no profiled step"
        found["bound"] = "a CPU has no device to wait for" if on_cpu else unprofiled
    if utilisation is None:
        found["utilisation"] = _absent(good)
    if not memory:
        found["memory"] = "a CPU run records no device memory" if on_cpu else "no peak was recorded"
    return found


def _absent_costs(
    good: list[Replicate],
    device: float | None,
    energy: float | None,
    cycles: float | None,
    on_cpu: bool,
) -> dict[str, str]:
    found = {}
    if device is None:
        found["device ms a step"] = (
            "a CPU has no device" if on_cpu else "no profiled step saw a kernel"
        )
    for column, value, field_ in (
        ("mJ a token", energy, "energy_j_per_token"),
        ("cycles a token", cycles, "cycles_per_step"),
    ):
        if value is None:
            found[column] = next(
                (one.absent[field_] for one in good if one.absent.get(field_)), "not recorded"
            )
    return found


def _absent(good: list[Replicate]) -> str:
    samples: list[Telemetry] = [one.telemetry for one in good if one.telemetry is not None]
    reasons = [
        one.absent["utilisation_pct"] for one in samples if one.absent.get("utilisation_pct")
    ]
    return reasons[0] if reasons else "no telemetry was recorded"


def _step_ratio(rows: list[Replicate]) -> tuple[float | None, str]:
    """(the worst error over tolerance of the steps that were proved, why none was); both empty
    where nothing was recorded.
    """
    lines = [one.step_proof for one in rows if one.step_proof is not None]
    ratios = [ratio for line in lines for ratio in line.tensors.values()]
    why = next((f"the step was not proved: {line.absent}" for line in lines if line.absent), "")
    return (max(ratios), "") if ratios else (None, why)


def _median(rows: Iterable[Replicate], get: Callable[[Replicate], float | None]) -> float | None:
    values = [value for value in map(get, rows) if value is not None]
    return median(values) if values else None
