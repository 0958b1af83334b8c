"""The report's table of cells on several ranks: how they scale, which rank is the slowest, and what
their communication costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from perfbench.gate import usable
from perfbench.records import RankLine, Replicate, Run
from perfbench.report.rows import GIB, Row, without
from perfbench.report.workloads import NO_NUMBER, Table
from perfbench.text import NULL, cell_code

TITLE = "Several ranks"
AXES_OF_RANKS = ("world_size", "parallel")
NOISE_SHARE = 0.02  # of the step, within which a negative difference is noise
NOTE = (
    "tok/s is of all ranks, by the slowest rank of each sample. Efficiency: that over world_size x"
    " the tok/s of the same cell on one, where this run has it. Exposed: the step's time minus that"
    " of the same step without collectives (ddp: no_sync; fsdp: weights gathered before, gradients"
    " left as they are), median of 5 samples after the timed ones in the same processes."
    f" {NO_NUMBER}"
)


def table(run: Run, rows: Sequence[Row]) -> Table | None:
    """None where no cell has several ranks."""
    alone = {
        without(row.cell.axes, *AXES_OF_RANKS): row.tok_per_s
        for row in rows
        if row.cell.axes.world_size == 1
    }
    lines = []
    for row in rows:
        axes = row.cell.axes
        if axes.world_size == 1:
            continue
        good = usable(run.of_cell(row.cell.cell_id)) if row.tok_per_s is not None else []
        lines.append(
            [
                cell_code(row.name),
                str(axes.world_size),
                axes.parallel,
                NULL if row.tok_per_s is None else f"{row.tok_per_s:,.0f}",
                _percent(
                    efficiency(
                        row.tok_per_s, alone.get(without(axes, *AXES_OF_RANKS)), axes.world_size
                    )
                ),
                *_exposed(good),
                _slowest(good),
                _memory(good),
            ]
        )
    head = [
        "cell",
        "ranks",
        "parallel",
        "tok/s",
        "efficiency",
        "exposed ms",
        "of the step",
        "slowest rank",
        "GiB a rank",
    ]
    return Table(TITLE, head, lines, NOTE, left=1) if lines else None


def efficiency(several: float | None, alone: float | None, size: int) -> float | None:
    """tok/s of ``size`` ranks over ``size`` times the tok/s of one; None where either is not
    known.
    """
    return None if several is None or not alone else several / (size * alone)


def slowest_rank(ranks: Sequence[RankLine]) -> int | None:
    """The rank with the largest median sample; None where no rank has one."""
    timed = [one for one in ranks if one.samples_s]
    return max(timed, key=lambda one: median(one.samples_s)).rank if timed else None


def _exposed(good: Sequence[Replicate]) -> tuple[str, str]:
    """Median over replicates, in ms and of the step with synchronisation."""
    known = [
        (one.ranks.exposed_s, one.ranks.unsynchronised_step_s)
        for one in good
        if one.ranks is not None
        and one.ranks.exposed_s is not None
        and one.ranks.unsynchronised_step_s is not None
    ]
    if not known:
        return NULL, NULL
    exposed_s = median(exposed for exposed, _ in known)
    share = median(exposed / (exposed + alone) for exposed, alone in known)
    if share < -NOISE_SHARE:
        return "not seen", f"without collectives {-100 * share:.1f} % longer: not what binds"
    return f"{1e3 * exposed_s:,.2f}", f"{100 * share:.1f} %"


def _slowest(good: Sequence[Replicate]) -> str:
    found = [slowest_rank(one.ranks.ranks) for one in good if one.ranks is not None]
    return ", ".join(str(one) for one in dict.fromkeys(found) if one is not None) or NULL


def _memory(good: Sequence[Replicate]) -> str:
    """The most that any rank held."""
    held = [
        rank.peak_memory_bytes
        for one in good
        if one.ranks is not None
        for rank in one.ranks.ranks
        if rank.peak_memory_bytes is not None
    ]
    return f"{max(held) / GIB:,.1f}" if held else NULL


def _percent(value: float | None) -> str:
    return NULL if value is None else f"{100 * value:.1f} %"
