"""`perfbench calibrate`: how noisy this machine is, what that leaves to judge, and the certificate
of the rule.

Reads A/A runs: the same commit, measured again and again. A machine start is one card (or
processor) in one run file; resuming a run on the same card is the same start, because nothing
proves another. The JSON file gives `baseline promote` the variance of each cell between starts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from perfbench.calibration import aa_pairs, aa_runs
from perfbench.calibration.aa_runs import Rows, Start
from perfbench.calibration.between_starts import (
    StartVariance,
    estimate,
    pooled_sd,
    variance_within,
)
from perfbench.calibration.calibration import Calibration, CellNoise, calibration_json
from perfbench.calibration.certify import Effort, Rate, certify
from perfbench.calibration.report import render_calibration
from perfbench.errors import unwritable
from perfbench.gate import stats
from perfbench.matrix import GatePolicy
from perfbench.records import PlannedCell, Replicate, read_run, whole_file


def calibrate(
    run_files: Sequence[Path],
    *,
    seed: int,
    policy: GatePolicy,
    pair_folders: Sequence[Path] = (),
    effort: Effort | None = None,
) -> Calibration:
    """Estimate the noise from A/A runs, certify the rule.

    ``pair_folders``: those of `perfbench ab` of one commit with itself. PerfbenchError(USAGE): what
    `aa_runs.read` and `aa_pairs.read` refuse.
    """
    # in any order, the same bytes
    runs = sorted((read_run(path) for path in run_files), key=lambda run: run.manifest.run_id)
    rows = aa_runs.read(runs)
    cells, pooled = _cells(
        rows, {cell.cell_id: cell for run in runs for cell in run.manifest.cells}, policy
    )
    stored = [
        stats.logs([1 / s for s in row.samples_s])
        for found in rows.values()
        for row in found
        if len(row.samples_s) > 1
    ]
    screened, significant = _across(
        rows, policy, {cell.cell_id: cell.between_starts for cell in cells}
    )
    first = runs[0].manifest
    pairs = aa_pairs.read(pair_folders, first.environment.gpu_slug)
    return Calibration(
        runs=[run.manifest.run_id for run in runs],
        commit=first.source.commit,
        gpu_slug=first.environment.gpu_slug,
        gpu_name=first.environment.device_name,
        environment=first.environment.fingerprint(),
        starts=aa_runs.counts(rows),
        most_replicates=max(map(len, rows.values())),
        seed=seed,
        policy=policy,
        cells=cells,
        between_start_sd_pct={
            name: None if sd is None else 100 * sd for name, sd in pooled.items()
        },
        screened=screened,
        significant=significant,
        red=_within(rows, policy),
        pairs=pairs,
        pairs_red=aa_pairs.false_alarms(pairs),
        certificate=certify(policy, seed=seed, stored=stored, effort=effort),
    )


def write_calibration(out: Path, calibration: Calibration) -> None:
    """Write ``out`` (Markdown) and a JSON file next to it, each whole or not at all; USAGE where
    that cannot be.
    """
    texts = {
        out: render_calibration(calibration),
        out.with_suffix(".json"): calibration_json(calibration),
    }
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            with whole_file(path) as partial:
                partial.write_text(text, encoding="utf-8")
    except OSError as error:
        step = "name another file, in a folder that you may write to"
        raise unwritable(out, error, step) from None


def _speeds(rows: Sequence[Replicate]) -> list[float]:
    return stats.logs([row.tok_per_s for row in rows if row.tok_per_s is not None])


def _bound(rows: Sequence[Replicate]) -> bool | None:
    known = [row.host_bound for row in rows if row.host_bound is not None]
    return any(known) if known else None


def _family(host_bound: bool | None) -> str:
    return {True: "host bound", False: "GPU bound", None: "not known what binds it"}[host_bound]


Groups = Mapping[Start, list[Replicate]]  # the starts of one cell


def _cells(
    of_start: Rows, planned: Mapping[str, PlannedCell], policy: GatePolicy
) -> tuple[list[CellNoise], dict[str, float | None]]:
    """Every cell's noise, and the sd of ln tok/s between starts pooled over the cells that are
    bound alike.
    """
    groups: dict[str, dict[Start, list[Replicate]]] = {}
    for (start, cell_id), rows in of_start.items():
        groups.setdefault(cell_id, {})[start] = rows
    families: dict[str, list[str]] = {}
    for cell_id, found in sorted(groups.items()):
        families.setdefault(_family(_bound_of(found)), []).append(cell_id)
    cells, pooled = [], {}
    for family, members in sorted(families.items()):
        speeds = {
            cell_id: {start: _speeds(rows) for start, rows in groups[cell_id].items()}
            for cell_id in members
        }
        times = {
            cell_id: {start: ln for start, rows in groups[cell_id].items() if (ln := _device(rows))}
            for cell_id in members
        }
        within = {cell_id: variance_within(of_cell) for cell_id, of_cell in speeds.items()}
        prior = stats.prior_of(
            [variance for variance, _ in within.values()], [df for _, df in within.values()]
        )
        of_speed, of_time = estimate(speeds), estimate(times)
        pooled[family] = pooled_sd(of_speed)
        for cell_id in members:
            two = of_speed.get(cell_id), of_time.get(cell_id)
            cells.append(
                _cell(
                    planned[cell_id],
                    groups[cell_id],
                    within[cell_id],
                    variance_within(times[cell_id]),
                    two,
                    prior,
                    policy,
                )
            )
    return sorted(cells, key=lambda cell: cell.cell_id), pooled


def _bound_of(groups: Groups) -> bool | None:
    return _bound([row for rows in groups.values() for row in rows])


def _device(rows: Sequence[Replicate]) -> list[float]:
    """ln of the device time of a step, of the replicates that profiled one."""
    return stats.logs(
        [row.profile.device_time_s for row in rows if row.profile and row.profile.device_time_s > 0]
    )


def _cell(
    planned: PlannedCell,
    groups: Groups,
    within: tuple[float, float],
    device_within: tuple[float, float],
    between_starts: tuple[StartVariance | None, StartVariance | None],
    prior: stats.Prior | None,
    policy: GatePolicy,
) -> CellNoise:
    variance, df = stats.moderated(*within, prior)
    sd = math.sqrt(2 * variance)  # of the difference of a pair
    drop, alpha, power = (
        -math.log1p(-policy.min_effect_pct / 100),
        policy.alpha_confirm,
        stats.confirm_power(policy),
    )
    blocks = (
        stats.pairs_for(sd, drop=drop, alpha=alpha, power=power, most=stats.MAX_PAIRS)
        if df > 0 and sd > 0
        else None
    )
    judged = None
    if df > 0:
        least = (
            stats.noncentrality(stats.MAX_PAIRS - 1, alpha, power) * sd / math.sqrt(stats.MAX_PAIRS)
        )
        judged = policy.min_effect_pct if blocks is not None else -100 * math.expm1(-least)
    blind = judged is not None and blocks is None
    return CellNoise(
        cell_id=planned.cell_id,
        config_sha256=planned.config_sha256,
        axes=planned.axes,
        host_bound=_bound_of(groups),
        starts=len(groups),
        replicates=sum(map(len, groups.values())),
        within_sd_pct=_sd_pct(*within),
        within_df=round(within[1]),
        moderated_sd_pct=_sd_pct(variance, df),
        between_starts=between_starts[0],
        device_sd_pct=_sd_pct(*device_within),
        device_between_starts=between_starts[1],
        blocks=blocks,
        judged_drop_pct=judged,
        tolerance_pct=policy.tolerance_pct
        * (judged / policy.min_effect_pct if blind and judged is not None else 1),
    )


def _sd_pct(variance: float, df: float) -> float | None:
    return 100 * math.sqrt(variance) if df > 0 else None


def _across(
    of_start: Rows, policy: GatePolicy, between_starts: Mapping[str, StartVariance | None]
) -> tuple[Rate, Rate]:
    """The screen on real starts, as the gate would do it with ``between_starts``: every later start
    of a cell against its first.

    Two replicates and more on each side.
    """
    firsts: dict[str, list[Replicate]] = {}
    pairs = []
    for (_, cell_id), rows in of_start.items():
        if len(rows) >= 2 and cell_id in firsts:
            known = between_starts[cell_id]
            pairs.append(
                (
                    _speeds(firsts[cell_id]),
                    _speeds(rows),
                    stats.ASSUMED_BETWEEN_SESSION_SD if known is None else known.gate_sd,
                )
            )
        elif len(rows) >= 2:
            firsts[cell_id] = rows
    pooled = [stats.pooled(base, candidate) for base, candidate, _ in pairs]
    prior = stats.prior_of([variance for variance, _ in pooled], [df for _, df in pooled])
    alpha = stats.screen_alpha(policy)
    found = [
        stats.unpaired(
            b, c, prior=prior, between_session_variance=sd**2, alpha=alpha, power=policy.power
        )
        for b, c, sd in pairs
    ]
    screened, significant = (
        sum(stats.screened(one, policy) for one in found),
        sum(one.p_slower < policy.alpha_screen for one in found),
    )
    return Rate(screened, len(found)), Rate(significant, len(found))


def _within(of_start: Rows, policy: GatePolicy) -> Rate:
    """The confirmation on real pairs: neighbours in time of one start, ABBA, all cells of a start
    one family.
    """
    red = trials = 0
    for start in sorted({start for start, _ in of_start}):
        pairs = []
        for (where, _), rows in of_start.items():
            speeds = _speeds(rows)
            if where == start and len(speeds) >= 4:
                turns = [(2 * i + i % 2, 2 * i + 1 - i % 2) for i in range(len(speeds) // 2)]
                pairs.append(([speeds[a] for a, _ in turns], [speeds[b] for _, b in turns]))
        pooled = [stats.variance_of(stats.differences(b, c)) for b, c in pairs]
        prior = stats.prior_of(pooled, [len(b) - 1.0 for b, _ in pairs])
        found = [
            stats.paired(b, c, prior=prior, alpha=policy.alpha_confirm, power=policy.power)
            for b, c in pairs
        ]
        adjusted = stats.holm([one.p_slower for one in found])
        red += sum(stats.regressed(one, p, policy) for one, p in zip(found, adjusted, strict=True))
        trials += len(found)
    return Rate(red, trials)
