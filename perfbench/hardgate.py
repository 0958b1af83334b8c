"""What must hold before any speed is believed, rechecked from the rows: finished, right, on the planned path, possible."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from perfbench.judgement import Finding, severity
from perfbench.physics import IMPOSSIBLE_FLOP_FACTOR
from perfbench.result import BranchLine, PlannedCell, Replicate, Status
from perfbench.verdict import Verdict

MAX_RATE_MISMATCH = 0.01  # stored tok/s against its own samples
REASON_CHARS = 300


def cell_findings(cell: PlannedCell, rows: Sequence[Replicate], train_tok_per_s: float | None) -> list[Finding]:
    """Return what is wrong with one planned cell, worst first; empty means that its speed may be read.

    ``train_tok_per_s`` is the slowest replicate of the whole training step of the same cell, for a ``forward`` cell: a
    forward that is slower even at its best cannot be true, while two medians may cross by noise.
    """
    if not rows:
        return [Finding(Verdict.MISSING, "no row", "planned, but no replicate was recorded: the run was interrupted; go on with --resume")]
    found = [finding for row in rows for finding in _row_findings(cell, row)]
    merged = _merge(found, len(rows))
    speeds = [row.tok_per_s for row in rows if row.status is Status.OK and row.tok_per_s is not None]
    if speeds and train_tok_per_s is not None and max(speeds) < train_tok_per_s:
        reason = f"forward alone at {max(speeds):,.1f} tok/s is slower than its whole training step at {train_tok_per_s:,.1f}"
        merged.append(Finding(Verdict.IMPOSSIBLE, "forward slower", reason))
    return sorted(merged, key=lambda finding: severity(finding.verdict))


def path_problems(cell: PlannedCell, row: Replicate) -> list[str]:
    """Return every way in which what ran differs from the plan, or from what the matrix expects."""
    engaged = {name for name, count in row.engaged.items() if count > 0}
    planned = set(cell.route.counters)
    problems = []
    if absent := sorted(planned - engaged):
        problems.append(f"planned {', '.join(absent)} never ran")
    if strangers := sorted(engaged - planned):
        problems.append(f"{', '.join(strangers)} ran, which the plan has not")
    problems += [f"expected {name} never ran" for name in cell.expect.engaged if name not in engaged]
    problems += [f"{name} ran, which is forbidden here" for name in cell.expect.forbidden if name in engaged]
    if row.route is None:
        problems.append("the row carries no route")
    elif (ran := _served_by(row.route.branches)) != (wanted := _served_by(cell.route.branches)):
        problems.append(f"routed to {'; '.join(ran)} instead of {'; '.join(wanted)}")
    if row.config_sha256 != cell.config_sha256:
        problems.append(f"measured config {row.config_sha256[:12]}, planned {cell.config_sha256[:12]}")
    return problems


def _served_by(branches: Sequence[BranchLine]) -> list[str]:
    # Reason and provider may say more on the measuring machine than in the plan; the environment records both.
    return sorted(f"{b.branch}={b.implementation}/{b.kernel}" for b in branches)


def _row_findings(cell: PlannedCell, row: Replicate) -> Iterator[Finding]:
    yield from _ended(cell, row)
    yield from _parity(row)
    if row.profile is not None and row.profile.witness_ok is False:
        yield Finding(Verdict.WRONG_PATH, "witness", f"the profiler saw other kernels: {row.profile.witness}")
    if row.status is Status.OK:
        if problems := path_problems(cell, row):
            yield Finding(Verdict.WRONG_PATH, "path", "; ".join(problems))
        yield from _arithmetic(row)
        yield from _physics(row)


def _ended(cell: PlannedCell, row: Replicate) -> Iterator[Finding]:
    if row.status in (Status.OK, Status.PARITY):
        return
    # A reason begins with what happened; of a traceback the last line names the error.
    reason = (row.reason or (row.stderr_tail.strip().splitlines() or [""])[-1]).strip()[:REASON_CHARS]
    if row.status is Status.WRONG_PATH:
        yield Finding(Verdict.WRONG_PATH, "path", reason or "; ".join(path_problems(cell, row)))
    else:
        yield Finding(Verdict.FAILED, row.status.value, f"{row.status.value}: {reason or 'no reason was recorded'}")


def _parity(row: Replicate) -> Iterator[Finding]:
    parity = row.parity
    if parity is None:
        if row.status is Status.PARITY:
            yield Finding(Verdict.PARITY, "parity", row.reason[:REASON_CHARS] or "differs from the oracle; no detail was recorded")
        elif row.status is Status.OK:
            yield Finding(Verdict.PARITY, "no proof", "timed without a parity check: a number without proof is not a result")
        return
    over = {name: ratio for name, ratio in parity.tensors.items() if ratio > 1}
    if not parity.ok or over or row.status is Status.PARITY:
        worst_at = f"worst at {parity.worst}, error {parity.max_error:.3g} against tolerance {parity.tolerance:.3g}"
        ratios = "; ".join(f"{name} {ratio:.3g} x tolerance" for name, ratio in sorted(over.items()))
        yield Finding(Verdict.PARITY, "parity", f"differs from the oracle: {worst_at}{'; ' + ratios if ratios else ''}")
    elif parity.rows < 1:
        yield Finding(Verdict.PARITY, "no proof", "the parity check compared 0 rows")


def _arithmetic(row: Replicate) -> Iterator[Finding]:
    if row.tok_per_s is None:
        yield Finding(Verdict.FAILED, "no speed", "finished without a speed: tok_per_s is null")
        return
    if not row.samples_s or min(row.samples_s) <= 0 or row.steps_per_sample < 1 or row.tokens_per_step < 1:
        steps = f"{row.steps_per_sample} steps per sample, {row.tokens_per_step} tokens per step"
        samples = f"{len(row.samples_s)} samples (least {min(row.samples_s, default=0.0):.3g} s), {steps}"
        yield Finding(Verdict.IMPOSSIBLE, "samples", f"{row.tok_per_s:,.1f} tok/s cannot come from {samples}")
        return
    from_samples = row.tokens_per_step * row.steps_per_sample / median(row.samples_s)
    if abs(row.tok_per_s / from_samples - 1) > MAX_RATE_MISMATCH:
        text = f"stored {row.tok_per_s:,.1f} tok/s, but its samples give {from_samples:,.1f}: edited or miscomputed"
        yield Finding(Verdict.IMPOSSIBLE, "samples", text)


def _physics(row: Replicate) -> Iterator[Finding]:
    physics = row.physics
    if physics is None:
        return
    step_s = median(row.samples_s) / row.steps_per_sample if row.samples_s and row.steps_per_sample > 0 else 0.0
    # Both the stored rates and those that the samples give: an edited rate must not hide the truth.
    flop_rate = max(physics.flops_per_s, physics.flops / step_s if step_s > 0 else 0.0)
    byte_rate = max(physics.bytes_per_s, physics.min_bytes / step_s if step_s > 0 else 0.0)
    gemm = physics.gemm_flops_per_s
    if gemm is not None and flop_rate > IMPOSSIBLE_FLOP_FACTOR * gemm:
        text = f"{flop_rate / 1e12:,.4g} TFLOP/s, but a large GEMM in this process reached {gemm / 1e12:,.4g}"
        yield Finding(Verdict.IMPOSSIBLE, "flops", f"{text} (limit {IMPOSSIBLE_FLOP_FACTOR} x)")
    ceiling, cached = physics.datasheet_bytes_per_s, physics.l2_bytes or 0
    if ceiling is None or physics.min_bytes <= cached:
        return
    # What fits the L2 may never touch memory; only the rest must pass through it.
    beyond_rate = byte_rate * (1 - cached / physics.min_bytes)
    if beyond_rate > ceiling:
        text = f"{beyond_rate / 1e9:,.4g} GB/s beyond the L2's {cached / 2**20:,.0f} MiB, the card's datasheet says {ceiling / 1e9:,.4g}"
        yield Finding(Verdict.IMPOSSIBLE, "bytes", text)


def _merge(found: list[Finding], total: int) -> list[Finding]:
    """Say the same trouble of several replicates once, with its count."""
    groups: dict[tuple[Verdict, str], list[Finding]] = {}
    for finding in found:
        groups.setdefault((finding.verdict, finding.rule), []).append(finding)
    merged = []
    for (verdict, rule), same in groups.items():
        count = f" ({len(same)} of {total} replicates)" if total > 1 else ""
        merged.append(Finding(verdict, rule, f"{same[0].reason}{count}"))
    return merged
