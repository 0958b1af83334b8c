"""Base and candidate of one cell, reduced to what the rule compares: from rows, or from a stored
baseline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean, median
from typing import TYPE_CHECKING

from perfbench.gate import stats
from perfbench.gate.bimodality import LEAST_GAP, modes
from perfbench.gate.evidence import DEVICE, HOST, WALL
from perfbench.matrix import GatePolicy
from perfbench.records import PlannedCell, Replicate

if TYPE_CHECKING:
    from perfbench.records import BaselineCell

# the longest; a change among them explains a speed, further down it is chance which ones were
# recorded
MAIN_KERNELS = 3


@dataclass(frozen=True, slots=True)
class CellSide:
    """``tok_per_s``, ``device_time_s`` and ``host_time_s``: one value a replicate; the latter two
    only of replicates that profiled a step.
    """

    tok_per_s: tuple[float, ...]
    device_time_s: tuple[float, ...] = ()
    host_time_s: tuple[float, ...] = ()
    host_bound: bool | None = None
    kernel_count: tuple[int, int] | None = None  # least and most over the profiles
    host_syncs: tuple[int, int] | None = None
    counters: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()  # the longest first
    tuned: tuple[tuple[str, str], ...] = ()
    bimodal: str = ""  # what the samples say where most replicates ran at two speeds
    # sd of ln device time between sessions, where a calibration measured it
    device_between_session_sd: float | None = None


def side_of_rows(cell: PlannedCell, good: Sequence[Replicate]) -> CellSide:
    """One side from the usable rows of a cell."""
    profiles = [row.profile for row in good if row.profile is not None]
    bound = [row.host_bound for row in good if row.host_bound is not None]
    return CellSide(
        tok_per_s=tuple(row.tok_per_s for row in good if row.tok_per_s is not None),
        device_time_s=tuple(one.device_time_s for one in profiles if one.device_time_s > 0),
        host_time_s=tuple(one.host_time_s for one in profiles if one.host_time_s),
        host_bound=any(bound) if bound else None,
        kernel_count=_range([one.kernel_count for one in profiles if one.kernel_count > 0]),
        host_syncs=_range([one.host_syncs for one in profiles if one.kernel_count > 0]),
        counters=tuple(sorted(cell.route.counters)),
        kernels=_by_length(good),
        tuned=_tuned(good),
        bimodal=_bimodal(good),
    )


def side_of_baseline(base: BaselineCell) -> CellSide:
    """One side from a stored cell."""
    return CellSide(
        tok_per_s=tuple(base.tok_per_s),
        device_time_s=tuple(base.device_time_s),
        host_time_s=tuple(base.host_time_s),
        host_bound=base.host_bound,
        kernel_count=None if base.kernel_count is None else (base.kernel_count, base.kernel_count),
        host_syncs=None if base.host_syncs is None else (base.host_syncs, base.host_syncs),
        counters=tuple(sorted(base.counters)),
        kernels=tuple(base.kernels),
        tuned=tuple(sorted(base.tuned.items())),
        device_between_session_sd=base.device_night_log_sd,
    )


@dataclass(frozen=True, slots=True)
class CellSides:
    """One cell, ready to be compared.

    ``between_session_sd`` is the sd of ln tok/s between sessions; 0 for pairs of one
    session.
    """

    cell_id: str
    policy: GatePolicy
    base: CellSide
    candidate: CellSide
    between_session_sd: float = 0.0

    @property
    def host_bound(self) -> bool:
        return bool(self.base.host_bound or self.candidate.host_bound)

    @property
    def gates_device(self) -> bool:
        """Device time stands in for wall time where the host bounds it, given enough profiles."""
        least = max(2, self.policy.min_replicates)
        return (
            self.host_bound
            and min(len(self.base.device_time_s), len(self.candidate.device_time_s)) >= least
        )

    @property
    def metrics(self) -> tuple[str, ...]:
        """What the cell is judged by, wall time last: of one that the host binds, its device time
        and its host time too, given enough profiles.
        """
        least = max(2, self.policy.min_replicates)
        timed = min(len(self.base.host_time_s), len(self.candidate.host_time_s)) >= least
        host = (HOST,) if self.host_bound and timed else ()
        return (*((DEVICE,) if self.gates_device else ()), *host, WALL)

    def between_session_sd_of(self, metric: str) -> float:
        """The sd between sessions of ln of this metric.

        The host's noise is not the device's, so neither stands in for the other; of the host alone
        none is measured, and its tolerance is that of its noise.
        """
        if metric == WALL:
            return self.between_session_sd
        if metric == HOST:
            return stats.ASSUMED_BETWEEN_SESSION_SD
        measured = self.base.device_between_session_sd
        return stats.ASSUMED_BETWEEN_SESSION_SD if measured is None else measured

    def values(self, metric: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
        base, candidate = self.base, self.candidate
        return {
            WALL: (base.tok_per_s, candidate.tok_per_s),
            DEVICE: (base.device_time_s, candidate.device_time_s),
            HOST: (base.host_time_s, candidate.host_time_s),
        }[metric]

    def logs(self, metric: str) -> tuple[list[float], list[float]]:
        """ln of speed on both sides; of a time the speed is its inverse."""
        base, candidate = (stats.logs(values) for values in self.values(metric))
        return (
            (base, candidate) if metric == WALL else ([-x for x in base], [-x for x in candidate])
        )

    def too_few(self) -> str:
        """'2 replicates here, ...' where one side has fewer than the policy wants, or than a
        variance needs; else empty.
        """
        base, here, least = (
            len(self.base.tok_per_s),
            len(self.candidate.tok_per_s),
            self.policy.min_replicates,
        )
        if min(base, here) >= least and base + here > 2:
            return ""
        return f"{here} replicates here, {base} in the base, {max(least, 2)} wanted"

    def speeds(self) -> str:
        return (
            f"{geometric_mean(self.candidate.tok_per_s):,.1f} tok/s against"
            f" {geometric_mean(self.base.tok_per_s):,.1f}"
        )

    def more_work(self) -> list[str]:
        """Launches and host syncs of a host-bound cell that are more than the base ever had."""
        if not self.host_bound:
            return []
        pairs = (
            ("kernel launches", self.base.kernel_count, self.candidate.kernel_count),
            ("host syncs", self.base.host_syncs, self.candidate.host_syncs),
        )
        return [
            f"{what} rose from {base[1]} to {here[0]} a step"
            for what, base, here in pairs
            if base and here and here[0] > base[1]
        ]

    def work(self) -> str:
        """Launches and syncs of both sides, for a reader."""
        parts = []
        for what, base, here in (
            ("launches", self.base.kernel_count, self.candidate.kernel_count),
            ("host syncs", self.base.host_syncs, self.candidate.host_syncs),
        ):
            if base is None or here is None:
                parts.append(
                    f"{what} not compared: no profile {'in the base' if base is None else 'here'}"
                )
            else:
                parts.append(f"{what} {_shown(base)} -> {_shown(here)}")
        if self.base.host_time_s and self.candidate.host_time_s:
            then, now = (1e3 * median(side.host_time_s) for side in (self.base, self.candidate))
            parts.append(f"host time {then:.4g} -> {now:.4g} ms a step")
        return ", ".join(parts)

    def no_device(self) -> str:
        counts = (
            f"{len(self.base.device_time_s)} profiles in the base,"
            f" {len(self.candidate.device_time_s)} here"
        )
        return (
            f"device time not gated: {counts}, {max(2, self.policy.min_replicates)} wanted"
            " (measure: {profile: every})"
        )

    def explained(self) -> list[str]:
        """What is known to have changed between the sides apart from the code's speed."""
        base, here, found = self.base, self.candidate, []
        if base.counters != here.counters:
            found.append(
                f"the route changed from {' '.join(base.counters) or 'nothing'} to"
                f" {' '.join(here.counters)}"
            )
        # of a host-bound cell `more_work` judges it
        if not self.host_bound and base.kernel_count and here.kernel_count:
            if here.kernel_count[0] > base.kernel_count[1]:
                found.append(_launches("more", base.kernel_count, here.kernel_count))
            elif here.kernel_count[1] < base.kernel_count[0]:
                found.append(_launches("fewer", base.kernel_count, here.kernel_count))
        then, now = dict(base.tuned), dict(here.tuned)
        for name in sorted(set(then) & set(now)):
            if then[name] != now[name]:
                found.append(f"autotuner {name} chose {now[name]} instead of {then[name]}")
        if base.kernels and here.kernels:
            new = [kernel for kernel in here.kernels[:MAIN_KERNELS] if kernel not in base.kernels]
            gone = [kernel for kernel in base.kernels[:MAIN_KERNELS] if kernel not in here.kernels]
            if new or gone:
                found.append(
                    f"kernels changed: {', '.join(gone) or 'none'} gone,"
                    f" {', '.join(new) or 'none'} new"
                )
        return [f"explained change: {text}" for text in found]


def _launches(word: str, base: tuple[int, int], here: tuple[int, int]) -> str:
    return f"{word} kernel launches a step, {_shown(here)} instead of {_shown(base)}"


def _range(counts: Sequence[int]) -> tuple[int, int] | None:
    return (min(counts), max(counts)) if counts else None


def _shown(counts: tuple[int, int]) -> str:
    return str(counts[0]) if counts[0] == counts[1] else f"{counts[0]} to {counts[1]}"


def _by_length(good: Sequence[Replicate]) -> tuple[str, ...]:
    longest: dict[str, float] = {}
    for row in good:
        for name, seconds in (row.profile.kernels if row.profile is not None else {}).items():
            longest[name] = max(seconds, longest.get(name, 0.0))
    return tuple(sorted(longest, key=lambda name: (-longest[name], name)))


def _tuned(good: Sequence[Replicate]) -> tuple[tuple[str, str], ...]:
    """Every configuration that an autotuner chose; several where the replicates disagree."""
    chosen: dict[str, set[str]] = {}
    for row in good:
        for name, config in row.tuned.items():
            chosen.setdefault(name, set()).add(config)
    return tuple((name, " or ".join(sorted(chosen[name]))) for name in sorted(chosen))


def _bimodal(good: Sequence[Replicate]) -> str:
    """The two speeds of the first replicate that has them, where more than half of the replicates
    do; else empty.
    """
    wide = [
        row
        for row in good
        if row.samples_s and min(row.samples_s) > 0 and _widely_spread(row.samples_s)
    ]
    found = [(row, two) for row in wide if (two := modes(row.samples_s)) is not None]
    if 2 * len(found) <= len(good):
        return ""
    row, two = found[0]
    low, high = (1e3 * seconds / max(row.steps_per_sample, 1) for seconds in (two.low, two.high))
    text = (
        f"two speeds within one process in {len(found)} of {len(good)} replicates, e.g."
        f" #{row.replicate}"
    )
    return (
        f"{text}: {low:.4g} and {high:.4g} ms a step, {100 * two.share_high:.0f} % of the samples"
        " at the slower"
    )


def _widely_spread(samples_s: Sequence[float]) -> bool:
    return max(samples_s) > (1 + LEAST_GAP) * min(samples_s)
