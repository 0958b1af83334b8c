"""`perfbench calibrate`: how noisy this machine is, what that leaves to judge, and the certificate of the rule.

Reads A/A runs: the same commit, measured again and again. A machine start is one card (or processor) in one run file; going
on with a run on the same card is the same start, because nothing proves another.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfbench import runfile, stats
from perfbench.certify import Certificate, Effort, Rate, certify
from perfbench.coverage import usable
from perfbench.policy import GatePolicy
from perfbench.result import Replicate, Run
from perfbench.verdict import Exit, PerfbenchError


@dataclass(frozen=True, slots=True)
class CellNoise:
    """One cell on this machine; sd of ln speed in per cent, null where too few replicates tell it.

    ``within_sd_pct``: between processes of one start, ``within_df`` its degrees of freedom; ``moderated_sd_pct``: shrunk to
    the cells that are bound like it. ``blocks``: pairs that confirm min_effect with the policy's power; null: BLIND.
    ``judged_drop_pct``: the smallest drop that `stats.MAX_BLOCKS` pairs confirm, min_effect where the cell is not BLIND.
    """

    cell_id: str
    host_bound: bool | None
    starts: int
    replicates: int
    within_sd_pct: float | None
    within_df: int
    moderated_sd_pct: float | None
    night_sd_pct: float | None
    device_sd_pct: float | None
    blocks: int | None
    judged_drop_pct: float | None
    tolerance_pct: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """``screened`` and ``red``: what the rule made of real A/A pairs of starts, and of pairs of processes within starts."""

    runs: list[str]
    commit: str | None
    gpu_slug: str
    starts: int
    seed: int
    policy: GatePolicy
    cells: list[CellNoise]
    night_sd_pct: dict[str, float | None]  # pooled over the cells that are bound alike: 'GPU bound', 'host bound'
    screened: Rate
    significant: Rate
    red: Rate
    certificate: Certificate


def calibrate(
    run_files: Sequence[Path], *, seed: int, policy: GatePolicy, out: Path | None = None, effort: Effort | None = None
) -> Calibration:
    """Estimate the noise from A/A runs, certify the rule; writes ``out`` (Markdown) and a JSON file beside it.

    PerfbenchError(USAGE): no run, another commit or environment among them, injected slowness, or no cell with two
    replicates in one start.
    """
    runs = [runfile.read(path) for path in run_files]
    _same_code(runs)
    starts = _starts(runs)
    cells, nights = _cells(starts, policy)
    stored = [stats.logs([1 / s for s in row.samples_s]) for rows in starts.values() for row in rows if len(row.samples_s) > 1]
    screened, significant = _across(starts, policy, nights)
    first = runs[0].manifest
    found = Calibration(
        runs=[run.manifest.run_id for run in runs],
        commit=first.source.commit,
        gpu_slug=first.environment.gpu_slug,
        starts=len({start for start, _ in starts}),
        seed=seed,
        policy=policy,
        cells=cells,
        night_sd_pct={name: None if variance is None else 100 * math.sqrt(variance) for name, variance in nights.items()},
        screened=screened,
        significant=significant,
        red=_within(starts, policy),
        certificate=certify(policy, seed=seed, stored=stored, effort=effort),
    )
    if out is not None:
        _write(out, found)
    return found


def render(calibration: Calibration) -> str:
    """The report in Markdown; everything in it comes from ``calibration``."""
    from perfbench.report.calibration import markdown

    return markdown(calibration)


def as_json(calibration: Calibration) -> str:
    """The same as data; bounds and shares beside the counts."""
    return json.dumps(_plain(calibration), indent=1, allow_nan=False) + "\n"


Start = tuple[str, str]  # run id, hash of the card's UUID ('' on a processor)
Rows = Mapping[tuple[Start, str], list[Replicate]]  # by start and cell id, in the order of time


def _same_code(runs: Sequence[Run]) -> None:
    if not runs:
        raise PerfbenchError(Exit.USAGE, "got no run to calibrate from, wanted A/A runs of one commit; name run folders")
    first = runs[0].manifest
    for run in runs:
        manifest = run.manifest
        if manifest.injections:
            raise PerfbenchError(Exit.USAGE, f"{manifest.run_id} has injections {manifest.injections}; measure without --inject")
        if (manifest.source.commit, manifest.source.dirty_sha256) != (first.source.commit, first.source.dirty_sha256):
            text = f"{manifest.run_id} measured {_code(run)}, {first.run_id} {_code(runs[0])}; A/A needs the same code"
            raise PerfbenchError(Exit.USAGE, f"{text}: measure again, or name runs of one commit")
        if manifest.environment.fingerprint() != first.environment.fingerprint():
            text = f"{manifest.run_id} was made in another environment than {first.run_id}"
            raise PerfbenchError(Exit.USAGE, f"{text}; calibrate each environment by itself")
    if len({run.manifest.run_id for run in runs}) < len(runs):
        raise PerfbenchError(Exit.USAGE, "the same run was named twice, and would count as two machine starts; name each once")


def _code(run: Run) -> str:
    source = run.manifest.source
    return f"{(source.commit or 'an unknown commit')[:12]}{' with changes' if source.dirty_sha256 else ''}"


def _starts(runs: Sequence[Run]) -> Rows:
    rows: dict[tuple[Start, str], list[Replicate]] = {}
    for run in runs:
        for cell_id in sorted({row.cell_id for row in run.replicates}):
            for row in sorted(usable(run.of_cell(cell_id)), key=lambda one: (one.started_utc, one.replicate)):
                rows.setdefault(((run.manifest.run_id, row.device_uuid_sha256 or ""), cell_id), []).append(row)
    most = max((len(found) for found in rows.values()), default=0)
    if most < 2:
        ids = ", ".join(run.manifest.run_id for run in runs)
        text = f"{ids}: at most {most} usable replicates of a cell in one machine start, wanted two or more"
        raise PerfbenchError(Exit.USAGE, f"{text}; measure with processes: 5")
    return rows


def _speeds(rows: Sequence[Replicate]) -> list[float]:
    return stats.logs([row.tok_per_s for row in rows if row.tok_per_s is not None])


def _bound(rows: Sequence[Replicate]) -> bool | None:
    known = [row.host_bound for row in rows if row.host_bound is not None]
    return any(known) if known else None


def _family(host_bound: bool | None) -> str:
    return {True: "host bound", False: "GPU bound", None: "not known what binds it"}[host_bound]


@dataclass(frozen=True, slots=True)
class _Spread:
    """One-way analysis of variance of one cell over its starts; ``night`` may be negative, null with one start."""

    host_bound: bool | None
    starts: int
    replicates: int
    within: float
    df: int
    night: float | None


def _spread(groups: Sequence[Sequence[Replicate]]) -> _Spread:
    speeds = [_speeds(group) for group in groups]
    n, df = sum(map(len, speeds)), sum(len(one) - 1 for one in speeds)
    within = math.fsum(stats.variance_of(one) * (len(one) - 1) for one in speeds) / df if df else 0.0
    night = None
    if len(speeds) > 1 and df:
        grand = math.fsum(map(math.fsum, speeds)) / n
        between = math.fsum(len(one) * (math.fsum(one) / len(one) - grand) ** 2 for one in speeds) / (len(speeds) - 1)
        size = (n - sum(len(one) ** 2 for one in speeds) / n) / (len(speeds) - 1)
        night = (between - within) / size
    return _Spread(_bound([row for group in groups for row in group]), len(speeds), n, within, df, night)


def _cells(starts: Rows, policy: GatePolicy) -> tuple[list[CellNoise], dict[str, float | None]]:
    """Every cell's noise, and the variance between starts pooled over the cells that are bound alike."""
    groups: dict[str, list[list[Replicate]]] = {}
    for (_, cell_id), rows in starts.items():
        groups.setdefault(cell_id, []).append(rows)
    spreads = {cell_id: _spread(found) for cell_id, found in sorted(groups.items())}
    cells, nights = [], {}
    for family in sorted({_family(spread.host_bound) for spread in spreads.values()}):
        members = {cell_id: spread for cell_id, spread in spreads.items() if _family(spread.host_bound) == family}
        told = [(spread.within, float(spread.df)) for spread in members.values()]
        prior = stats.prior_of([variance for variance, _ in told], [df for _, df in told])
        seen = [spread.night for spread in members.values() if spread.night is not None]
        nights[family] = max(0.0, math.fsum(seen) / len(seen)) if seen else None
        cells += [_cell(cell_id, spread, groups[cell_id], prior, policy) for cell_id, spread in members.items()]
    return sorted(cells, key=lambda cell: cell.cell_id), nights


def _cell(cell_id: str, spread: _Spread, groups: list[list[Replicate]], prior: stats.Prior | None, policy: GatePolicy) -> CellNoise:
    variance, df = stats.moderated(spread.within, spread.df, prior)
    sd = math.sqrt(2 * variance)  # of the difference of a pair
    drop, alpha, power = -math.log1p(-policy.min_effect_pct / 100), policy.alpha_confirm, stats.confirm_power(policy)
    blocks = stats.blocks_for(sd, drop=drop, alpha=alpha, power=power, most=stats.MAX_BLOCKS) if df > 0 and sd > 0 else None
    judged = None
    if df > 0:
        least = stats.noncentrality(stats.MAX_BLOCKS - 1, alpha, power) * sd / math.sqrt(stats.MAX_BLOCKS)
        judged = policy.min_effect_pct if blocks is not None else -100 * math.expm1(-least)
    blind = judged is not None and blocks is None
    tolerance = policy.tolerance_pct * (judged / policy.min_effect_pct if blind and judged is not None else 1)
    night = None if spread.night is None else 100 * math.sqrt(max(0.0, spread.night))
    return CellNoise(
        cell_id, spread.host_bound, spread.starts, spread.replicates, 100 * math.sqrt(spread.within) if spread.df else None,
        spread.df, 100 * math.sqrt(variance) if df > 0 else None, night, _device_sd_pct(groups), blocks, judged, tolerance,
    )  # fmt: skip


def _device_sd_pct(groups: Sequence[Sequence[Replicate]]) -> float | None:
    """Of the device time of a step; null where fewer than two replicates of a start were profiled."""
    times = [stats.logs([row.profile.device_time_s for row in group if row.profile and row.profile.device_time_s > 0]) for group in groups]
    df = sum(len(one) - 1 for one in times if one)
    return 100 * math.sqrt(math.fsum(stats.variance_of(one) * (len(one) - 1) for one in times if one) / df) if df else None


def _across(starts: Rows, policy: GatePolicy, nights: Mapping[str, float | None]) -> tuple[Rate, Rate]:
    """The screen on real nights: every later start of a cell against its first, two replicates and more on each side."""
    firsts: dict[str, list[Replicate]] = {}
    pairs = []
    for (_, cell_id), rows in starts.items():
        if len(rows) >= 2 and cell_id in firsts:
            pairs.append((_speeds(firsts[cell_id]), _speeds(rows), nights[_family(_bound([*firsts[cell_id], *rows]))] or 0.0))
        elif len(rows) >= 2:
            firsts[cell_id] = rows
    told = [stats.pooled(base, candidate) for base, candidate, _ in pairs]
    prior = stats.prior_of([variance for variance, _ in told], [df for _, df in told])
    alpha = stats.screen_alpha(policy)
    found = [stats.unpaired(b, c, prior=prior, night_variance=night, alpha=alpha, power=policy.power) for b, c, night in pairs]
    screened, significant = sum(stats.screened(one, policy) for one in found), sum(one.p_slower < policy.alpha_screen for one in found)
    return Rate(screened, len(found)), Rate(significant, len(found))


def _within(starts: Rows, policy: GatePolicy) -> Rate:
    """The confirmation on real pairs: neighbours in time of one start, ABBA, all cells of a start one family."""
    red = trials = 0
    for start in sorted({start for start, _ in starts}):
        pairs = []
        for (where, _), rows in starts.items():
            speeds = _speeds(rows)
            if where == start and len(speeds) >= 4:
                turns = [(2 * i + i % 2, 2 * i + 1 - i % 2) for i in range(len(speeds) // 2)]
                pairs.append(([speeds[a] for a, _ in turns], [speeds[b] for _, b in turns]))
        told = [stats.variance_of(stats.differences(b, c)) for b, c in pairs]
        prior = stats.prior_of(told, [len(b) - 1.0 for b, _ in pairs])
        found = [stats.paired(b, c, prior=prior, alpha=policy.alpha_confirm, power=policy.power) for b, c in pairs]
        adjusted = stats.holm([one.p_slower for one in found])
        red += sum(stats.regressed(one, p, policy) for one, p in zip(found, adjusted, strict=True))
        trials += len(found)
    return Rate(red, trials)


def _write(out: Path, calibration: Calibration) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(render(calibration), encoding="utf-8")
        out.with_suffix(".json").write_text(as_json(calibration), encoding="utf-8")
    except OSError as error:
        text = f"{out} cannot be written: {error.strerror}. Next: name another file, in a folder that you may write to"
        raise PerfbenchError(Exit.USAGE, text) from None


def _plain(value: Any) -> Any:
    if isinstance(value, Rate):
        share = value.share if value.trials else None
        return {"hits": value.hits, "trials": value.trials, "share": share, "lower": value.lower, "upper": value.upper}
    if isinstance(value, GatePolicy):
        return value.model_dump()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value
