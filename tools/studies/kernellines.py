"""What stored runs of attention alone say of each path and length: times, floors, memory and
kernels; only of cells that are proved.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from nsa.config import ModelConfig
from perfbench.errors import Exit
from perfbench.gate import CellVerdict, Judgement, rows_by_cell, sentinel_rates, usable
from perfbench.records import ATTENTION, SELECTED, Profile, Replicate, Run, kind_of
from perfbench.roofline import BYTES_OF, step_min_bytes
from perfbench.text import NULL
from tools.studies import floors
from tools.studies.floors import Floor, Rates

HELD_INPUTS = 4  # distinct inputs that a measuring process holds: workloads/attention.NUM_INPUTS
GIB = 2**30
# the buffer that empties the L2, in sizes of it: workloads/workload.L2_FLUSH_FACTOR
FLUSHED_L2S = 2
Key = tuple[tuple[str, str | int], ...]


@dataclass(frozen=True, slots=True)
class KernelTiming:
    """One proved cell: a step's milliseconds in each process, its profiles, and the least bytes
    beyond what the process holds.
    """

    times_ms: tuple[float, ...]
    profiles: tuple[Profile, ...]
    extra_bytes: int | None
    host_bound: bool

    @property
    def ms(self) -> float:
        return median(self.times_ms)


@dataclass(frozen=True, slots=True)
class Line:
    """One path at one shape.

    ``whole`` is forward and backward in one step; either is None where no proved cell timed it.
    """

    axes: Mapping[str, str | int]
    forward: KernelTiming | None
    whole: KernelTiming | None
    forward_floor: Floor | None = None
    backward_floor: Floor | None = None

    @property
    def path(self) -> str:
        return str(self.axes["path"])

    @property
    def tokens(self) -> int:
        return int(self.axes["seq_len"])

    @property
    def is_dense(self) -> bool:
        return kind_of(self.path) == "dense"

    @property
    def forward_ms(self) -> float | None:
        return None if self.forward is None else self.forward.ms

    @property
    def both_ms(self) -> float | None:
        return None if self.whole is None else self.whole.ms

    @property
    def backward_ms(self) -> float | None:
        """The difference of both medians; None unless it is a time."""
        if self.forward is None or self.whole is None or self.whole.ms <= self.forward.ms:
            return None
        return self.whole.ms - self.forward.ms

    @property
    def backward_range_ms(self) -> tuple[float, float] | None:
        """The least and the most that any two processes, one of each workload, would have given."""
        if self.forward is None or self.whole is None or self.backward_ms is None:
            return None
        return min(self.whole.times_ms) - max(self.forward.times_ms), max(
            self.whole.times_ms
        ) - min(self.forward.times_ms)


def lines_of(
    run: Run,
    judgement: Judgement,
    model: ModelConfig | None,
    workloads: tuple[str, str] = ATTENTION,
) -> list[Line]:
    """Lines by shape, paths of NSA first; without ``model`` there are no floors and no extra
    memory.

    ``workloads`` are `ATTENTION` or `SELECTED`: that of both ways, then that of the forward alone.
    """
    whole, forward = workloads
    rows = rows_by_cell(run)
    found: dict[Key, dict[str, KernelTiming]] = defaultdict(dict)
    for cell in judgement.cells:
        if (
            cell.axes.workload in workloads
            and is_proved(cell)
            and (good := usable(rows.get(cell.cell_id, [])))
        ):
            axes = cell.axes.to_mapping()
            found[_without(axes, "workload")][cell.axes.workload] = _timed(good, axes, model)
    lines = []
    for key, by_workload in found.items():
        axes = dict(key)
        rates = rates_of(run, str(axes["dtype"]))
        pair = (
            (None, None) if model is None or rates is None else _floors(model, axes, rates, forward)
        )
        lines.append(Line(axes, by_workload.get(forward), by_workload.get(whole), *pair))
    return sorted(
        lines,
        key=lambda line: (
            line.tokens,
            int(line.axes["batch"]),
            line.is_dense,
            line.path,
            repr(line.axes),
        ),
    )


def is_proved(cell: CellVerdict) -> bool:
    """Whether every hard gate let the cell pass, and it has a speed."""
    return cell.exit_code is Exit.OK and cell.cand_tok_per_s is not None


def rates_of(run: Run, dtype: str) -> Rates | None:
    """The card's rates: matrix products as the cells' own processes measured them, copies as the
    run's sentinel did, else datasheet.
    """
    good = [
        row
        for rows in rows_by_cell(run).values()
        for row in usable(rows)
        if row.axes.dtype == dtype
    ]
    gemms = [
        row.physics.gemm_flops_per_s
        for row in good
        if row.physics is not None and row.physics.gemm_flops_per_s
    ]
    copies = sentinel_rates(run).get("copy", [])
    return Rates.of(
        run.manifest.environment.device_name,
        dtype,
        gemm_flops_per_s=median(gemms) if gemms else None,
        copy_bytes_per_s=median(copies) if copies else None,
    )


def best_dense(lines: Iterable[Line], line: Line, what: str) -> float | None:
    """The least ``what`` ('forward_ms', 'backward_ms' or 'both_ms') of the dense kernels at the
    line's shape, in the same run.
    """
    same = _without(line.axes, "path", "fa2")
    times = [
        getattr(one, what)
        for one in lines
        if one.is_dense and _without(one.axes, "path", "fa2") == same
    ]
    return min((time for time in times if time is not None), default=None)


def speedup(lines: Iterable[Line], line: Line, what: str) -> float | None:
    """The best dense kernel's time over the line's own: above 1 it is faster."""
    mine, dense = getattr(line, what), best_dense(lines, line, what)
    return dense / mine if mine and dense else None


def reached(floor: Floor | None, got_ms: float | None) -> str:
    """The floor as a share of the time, as text."""
    return f"{100 * floor.total_ms / got_ms:.0f} %" if floor and got_ms else NULL


def kernel_ms(profiles: Sequence[Profile]) -> dict[str, float]:
    """Device milliseconds of each kernel of one step, the longest first: medians over the profiles
    that name it.
    """
    found: dict[str, list[float]] = defaultdict(list)
    for profile in profiles:
        for name, seconds in profile.kernels.items():
            found[name].append(1e3 * seconds)
    return dict(
        sorted(((name, median(times)) for name, times in found.items()), key=lambda item: -item[1])
    )


def device_ms(profiles: Sequence[Profile]) -> float | None:
    times = [1e3 * profile.device_time_s for profile in profiles if profile.device_time_s > 0]
    return median(times) if times else None


def _timed(
    good: list[Replicate], axes: Mapping[str, str | int], model: ModelConfig | None
) -> KernelTiming:
    return KernelTiming(
        times_ms=tuple(
            1e3 * row.tokens_per_step / row.tok_per_s for row in good if row.tok_per_s is not None
        ),
        profiles=tuple(row.profile for row in good if row.profile is not None),
        extra_bytes=None if model is None else _extra_bytes(good, axes, model),
        host_bound=any(row.host_bound for row in good),
    )


def _extra_bytes(
    good: list[Replicate], axes: Mapping[str, str | int], model: ModelConfig
) -> int | None:
    """The peak less the inputs that the process holds (and dO, for a backward) and the buffer that
    empties the L2.

    The result and the gradients are in it: they are made by the call.
    """
    peaks = [row.peak_memory_bytes for row in good if row.peak_memory_bytes is not None]
    if not peaks:
        return None
    batch, tokens, dtype = int(axes["batch"]), int(axes["seq_len"]), str(axes["dtype"])
    dense, width = kind_of(str(axes["path"])) == "dense", BYTES_OF[dtype]
    # a forward moves the inputs of the branches that are on, and o, which is as large as dO
    forward = (SELECTED if axes["workload"] in SELECTED else ATTENTION)[1]
    one = step_min_bytes(
        model, workload=forward, batch=batch, tokens=tokens, dtype=dtype, dense=dense
    )
    if axes["workload"] == forward:
        one -= batch * tokens * model.num_heads * model.value_dim * width
    l2_bytes = next(
        (row.physics.l2_bytes for row in good if row.physics is not None and row.physics.l2_bytes),
        0,
    )
    held = HELD_INPUTS * one + (FLUSHED_L2S * l2_bytes if axes.get("l2") == "cold" else 0)
    return max(0, round(max(peaks) - held))


def _floors(
    model: ModelConfig, axes: Mapping[str, str | int], rates: Rates, workload: str
) -> tuple[Floor, Floor]:
    batch, tokens, dtype = int(axes["batch"]), int(axes["seq_len"]), str(axes["dtype"])
    if workload in SELECTED:
        return floors.selected(model, batch=batch, tokens=tokens, dtype=dtype, rates=rates)
    dense = kind_of(str(axes["path"])) == "dense"
    forward, backward = (
        way(model, batch=batch, tokens=tokens, dtype=dtype, dense=dense, rates=rates)
        for way in (floors.forward, floors.backward)
    )
    return forward, backward


def _without(axes: Mapping[str, str | int], *names: str) -> Key:
    return tuple(sorted((name, value) for name, value in axes.items() if name not in names))
