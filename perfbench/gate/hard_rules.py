"""What must hold before any speed is believed, rechecked from the rows: finished, right, on the
planned path, possible.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Self

from perfbench.gate import repeats
from perfbench.gate.clocks import clock_faults
from perfbench.gate.judgement import Finding, severity
from perfbench.gate.loaded_peers import peer_findings
from perfbench.gate.own_steps import files_of, own_findings, own_path_problems
from perfbench.gate.several_ranks import proof_findings, rank_findings
from perfbench.matrix import expected_of
from perfbench.records import (
    EVERYTHING,
    BranchLine,
    Environment,
    PlannedCell,
    ProofKey,
    Replicate,
    Run,
    Status,
    Verdict,
    proof_key,
)
from perfbench.roofline import IMPOSSIBLE_FLOP_FACTOR

# Stored tok/s against its own samples; the largest in every committed run is below 1e-12.
MAX_RATE_MISMATCH = 1e-6
REASON_CHARS = 300
# workload of forwards alone -> the one whose step has the backward too
WHOLE: Mapping[str, str] = {
    "forward": "train",
    "attention_forward": "attention",
    "selected_forward": "selected",
}
Proven = tuple[ProofKey, str | None]  # and the card


@dataclass(frozen=True, slots=True)
class ProofIndex:
    """What the rows of a run may lean on: its cards, and the parity proofs that one row made for
    others.
    """

    on_gpu: bool
    cards: frozenset[str]
    proofs: Mapping[str, frozenset[Proven]]  # 'CELL #REPLICATE' -> what it proved
    environment: Environment
    nsa_sha256: str | None = None  # of the measured code; None: not recorded
    resumed_utc: tuple[str, ...] = ()
    own_files: Mapping[str, str] = field(default_factory=dict)  # of the user's own steps

    @classmethod
    def of(cls, run: Run) -> Self:
        environments = [run.manifest.environment, *(resumed.environment for resumed in run.resumed)]
        joined = [*run.manifest.cards, *(card for resumed in run.resumed for card in resumed.cards)]
        environments += [card.environment for card in joined]
        cells = {cell.cell_id: cell for cell in run.manifest.cells}
        proofs: dict[str, frozenset[Proven]] = {}
        for row in run.replicates:
            if (
                row.parity is not None
                and row.parity.ok
                and row.parity.proved_in is None
                and row.cell_id in cells
            ):
                name = f"{row.cell_id} #{row.replicate}"
                proofs[name] = proofs.get(name, frozenset()) | {_proven(cells[row.cell_id], row)}
        cards = frozenset(one.gpu_uuid_sha256 for one in environments if one.gpu_uuid_sha256)
        environment = run.manifest.environment
        return cls(
            environment.gpu_slug != "cpu",
            cards,
            proofs,
            environment,
            run.manifest.source.nsa_sha256,
            tuple(resumed.resumed_utc for resumed in run.resumed),
            files_of(run),
        )


def _proven(cell: PlannedCell, row: Replicate) -> Proven:
    own_length = row.parity is not None and row.parity.own_length
    return proof_key(cell.axes, cell.route.counters, own_length=own_length), row.device_uuid_sha256


def cell_findings(
    cell: PlannedCell, rows: Sequence[Replicate], whole_tok_per_s: float | None, proofs: ProofIndex
) -> list[Finding]:
    """Return what is wrong with one planned cell, worst first; empty means that its speed may be
    read.

    ``whole_tok_per_s`` is, for a cell of forwards, the slowest replicate of the step that has the
    backward too (`WHOLE`): a forward that is slower even at its best cannot be true, while two
    medians may cross by noise.
    """
    if not rows:
        text = (
            "planned, but no replicate was recorded (interrupted, or its --budget was spent);"
            " resume with --resume RUN"
        )
        return [Finding(Verdict.MISSING, "no row", text)]
    found = [finding for row in rows for finding in _row_findings(cell, row, proofs)]
    merged = _merge(found, len(rows)) + _second_witness(cell, rows, proofs)
    merged += repeats.findings(rows, proofs.resumed_utc)
    merged += peer_findings(cell, rows)
    merged += proof_findings(cell, rows)
    speeds = [
        row.tok_per_s for row in rows if row.status is Status.OK and row.tok_per_s is not None
    ]
    if speeds and whole_tok_per_s is not None and max(speeds) < whole_tok_per_s:
        reason = (
            f"forward alone at {max(speeds):,.1f} tok/s is slower than its whole step, backward"
            f" included, at {whole_tok_per_s:,.1f}"
        )
        merged.append(Finding(Verdict.IMPOSSIBLE, "forward slower", reason))
    return sorted(merged, key=lambda finding: severity(finding.verdict))


def path_problems(cell: PlannedCell, row: Replicate) -> list[str]:
    """Return every way in which what ran differs from the plan, or from what the matrix expects."""
    engaged = {name for name, count in row.engaged.items() if count > 0}
    planned = set(cell.route.counters)
    problems = []
    if absent := sorted(planned - engaged):
        problems.append(f"planned {', '.join(absent)} never ran")
    if unplanned := sorted(engaged - planned):
        problems.append(f"{', '.join(unplanned)} ran, which the plan has not")
    problems += _miscounted(cell, row)
    expect = expected_of(cell.axes, cell.expect, cell.route.counters)
    problems += [f"expected {name} never ran" for name in expect.engaged if name not in engaged]
    problems += [
        f"{name} ran, which is forbidden here" for name in expect.forbidden if name in engaged
    ]
    if row.route is None:
        problems.append("the row carries no route")
    elif (ran := _served_by(row.route.branches)) != (wanted := _served_by(cell.route.branches)):
        problems.append(f"routed to {'; '.join(ran)} instead of {'; '.join(wanted)}")
    problems += _steps_off(cell, row)
    if row.config_sha256 != cell.config_sha256:
        problems.append(
            f"measured config {row.config_sha256[:12]}, planned {cell.config_sha256[:12]}"
        )
    return problems


def _miscounted(cell: PlannedCell, row: Replicate) -> list[str]:
    """Counters that ran, but not once for each layer call of each timed step: some layers, chunks
    or steps took another way.
    """
    wanted = (cell.layers or 0) * row.steps_per_sample * len(row.samples_s)
    if wanted <= 0:  # an older file, or no samples, which is IMPOSSIBLE by itself
        return []
    how = (
        f"{cell.layers} layer calls a step x {row.steps_per_sample} steps x {len(row.samples_s)}"
        " samples"
    )
    counts = {name: row.engaged.get(name, 0) for name in dict.fromkeys(cell.route.counters)}
    return [
        f"{name} ran {got} times, wanted {wanted} ({how})"
        for name, got in counts.items()
        if got > 0 and got != wanted
    ]


def _steps_off(cell: PlannedCell, row: Replicate) -> list[str]:
    """A step of path triton that was to be off and was not, or the reverse: the setting did not
    reach the process.
    """
    asked, planned = cell.axes.without, set(cell.route.off)
    problems = []
    if planned != {asked} - {EVERYTHING}:
        turned = ", ".join(sorted(planned)) or "nothing"
        problems.append(
            f"the cell is without {asked}, and its plan turns off {turned}: unset NSA_TRITON_* for"
            " the run"
        )
    if row.route is not None and (ran := set(row.route.off)) != planned:
        names = [", ".join(sorted(steps)) or "nothing" for steps in (ran, planned)]
        problems.append(f"its process turned off {names[0]}, the plan says {names[1]}")
    return problems


def _served_by(branches: Sequence[BranchLine]) -> list[str]:
    # Reason and provider may say more on the measuring machine than in the plan; the environment
    # records both.
    return sorted(f"{b.branch}={b.implementation}/{b.kernel}" for b in branches)


def _second_witness(
    cell: PlannedCell, rows: Sequence[Replicate], proofs: ProofIndex
) -> list[Finding]:
    """The profiler's word, due once a cell; a cell that did not finish is red by itself and may
    have died before it. Of an own step that declares nothing to see it has none.
    """
    if any(row.status is not Status.OK for row in rows):
        return []
    profiles = [row.profile for row in rows if row.profile is not None]
    if not profiles:
        return [
            Finding(
                Verdict.WRONG_PATH,
                "no witness",
                "no second witness: no replicate has a profiled step; measure again",
            )
        ]
    # False is reported with its row
    declares_none = cell.axes.is_own_step
    if not proofs.on_gpu or declares_none or any(one.witness_ok is not None for one in profiles):
        return []
    text = (
        "no second witness: the profiler could not determine which kernels ran"
        f" ({profiles[0].witness or 'no reason was recorded'})"
    )
    return [Finding(Verdict.WRONG_PATH, "no witness", text)]


def _row_findings(cell: PlannedCell, row: Replicate, proofs: ProofIndex) -> Iterator[Finding]:
    own = cell.axes.is_own_step
    yield from _ended(cell, row)
    yield from own_findings(cell, row, proofs.own_files) if own else _parity(row)
    if row.profile is not None and row.profile.witness_ok is False:
        yield Finding(
            Verdict.WRONG_PATH, "witness", f"the profiler saw other kernels: {row.profile.witness}"
        )
    if row.status is Status.OK:
        if problems := own_path_problems(cell, row) if own else path_problems(cell, row):
            yield Finding(Verdict.WRONG_PATH, "path", "; ".join(problems))
        yield from rank_findings(cell, row)
        yield from _borrowed_proof(cell, row, proofs)
        yield from _incomplete(row, proofs, needs_physics=not own)
        yield from _card(row, proofs)
        yield from _loaded(row, proofs)
        yield from _arithmetic(row)
        yield from _clock(row)
        yield from _physics(row)


def _ended(cell: PlannedCell, row: Replicate) -> Iterator[Finding]:
    if row.status is Status.OK or (row.status is Status.PARITY and not cell.axes.is_own_step):
        return
    # A reason begins with what happened; of a traceback the last line names the error.
    reason = (row.reason or (row.stderr_tail.strip().splitlines() or [""])[-1]).strip()[
        :REASON_CHARS
    ]
    if row.status is Status.PARITY:
        yield Finding(Verdict.PARITY, "parity", reason or "differs from the step's own reference")
    elif row.status is Status.WRONG_PATH:
        yield Finding(Verdict.WRONG_PATH, "path", reason or "; ".join(path_problems(cell, row)))
    else:
        yield Finding(
            Verdict.FAILED,
            row.status.value,
            f"{row.status.value}: {reason or 'no reason was recorded'}",
        )


def _parity(row: Replicate) -> Iterator[Finding]:
    parity, step, length = row.parity, row.step_proof, row.length_proof
    if step is not None and (step.ok is False or any(ratio > 1 for ratio in step.tensors.values())):
        sentence = f"the step differs from its plain twin: {step.worst}"
        yield Finding(Verdict.PARITY, "step", sentence[:REASON_CHARS])
        return
    if length is not None and (
        length.ok is False or any(ratio > 1 for ratio in length.tensors.values())
    ):
        sentence = (
            f"differs from the oracle at the timed {length.batch} x {length.tokens} tokens:"
            f" {length.worst}"
        )
        yield Finding(Verdict.PARITY, "length", sentence[:REASON_CHARS])
        return
    if parity is None:
        if row.status is Status.PARITY:
            yield Finding(
                Verdict.PARITY,
                "parity",
                row.reason[:REASON_CHARS] or "differs from the oracle; no detail was recorded",
            )
        elif row.status is Status.OK:
            yield Finding(
                Verdict.PARITY,
                "no proof",
                "timed without a parity check: a number without proof is not a result",
            )
        return
    over = {name: ratio for name, ratio in parity.tensors.items() if ratio > 1}
    if parity.ok and not over and row.status is Status.PARITY and row.reason:
        yield Finding(Verdict.PARITY, "parity", row.reason[:REASON_CHARS])
    elif not parity.ok or over or row.status is Status.PARITY:
        worst_at = (
            f"worst at {parity.worst}, error {parity.max_error:.3g} against tolerance"
            f" {parity.tolerance:.3g}"
        )
        ratios = "; ".join(
            f"{name} {ratio:.3g} x tolerance" for name, ratio in sorted(over.items())
        )
        yield Finding(
            Verdict.PARITY,
            "parity",
            f"differs from the oracle: {worst_at}{'; ' + ratios if ratios else ''}",
        )
    elif parity.rows < 1:
        yield Finding(Verdict.PARITY, "no proof", "the parity check compared 0 rows")
    elif not parity.tensors:
        yield Finding(
            Verdict.PARITY, "no proof", "the parity check names no tensor that it compared"
        )


def _borrowed_proof(cell: PlannedCell, row: Replicate, proofs: ProofIndex) -> Iterator[Finding]:
    name = row.parity.proved_in if row.parity is not None else None
    if name is None:
        return
    if (made := proofs.proofs.get(name)) is None:
        yield Finding(
            Verdict.PARITY,
            "borrowed",
            f"its proof is not in this run: no row {name} that passed a parity check of its own",
        )
    elif _proven(cell, row) not in made:
        yield Finding(
            Verdict.PARITY,
            "borrowed",
            f"its proof is not in this run: {name} proved another route, or on another card",
        )


def _incomplete(row: Replicate, proofs: ProofIndex, *, needs_physics: bool) -> Iterator[Finding]:
    absent = ["physics (could it be true?)"] if row.physics is None and needs_physics else []
    if proofs.on_gpu and row.telemetry is None:
        absent.append("telemetry (was the card throttled?)")
    if absent:
        yield Finding(
            Verdict.FAILED,
            "incomplete",
            f"no proof: finished without {' and '.join(absent)}; measure again",
        )


def _card(row: Replicate, proofs: ProofIndex) -> Iterator[Finding]:
    if not proofs.on_gpu or row.device_uuid_sha256 in proofs.cards:
        return
    got = (
        f"card {row.device_uuid_sha256[:16]}"
        if row.device_uuid_sha256
        else "an unknown card (device_uuid_sha256 is null)"
    )
    wanted = (
        ", ".join(card[:16] for card in sorted(proofs.cards))
        or "none, its environment names no card"
    )
    yield Finding(
        Verdict.ENV,
        "card",
        f"measured on {got}, the run's cards are: {wanted}; measure again on one of them",
    )


def _loaded(row: Replicate, proofs: ProofIndex) -> Iterator[Finding]:
    """What the process had imported, against what the manifest says of the machine."""
    if row.loaded is None:  # an older file
        return
    loaded, said = row.loaded, proofs.environment
    pairs = [("torch", loaded.torch, said.torch), ("triton", loaded.triton, said.triton)]
    pairs += [("CUDA", loaded.cuda, said.cuda)] if proofs.on_gpu else []
    odd = [
        f"{name} {got} was imported, the manifest says {wanted}"
        for name, got, wanted in pairs
        if got is not None and wanted is not None and _public(got) != _public(wanted)
    ]
    if proofs.nsa_sha256 is not None and loaded.nsa_sha256 != proofs.nsa_sha256:
        odd.append(
            f"the nsa of {loaded.nsa_folder} has other files ({loaded.nsa_sha256[:12]}) than the"
            f" manifest's ({proofs.nsa_sha256[:12]})"
        )
    if odd:
        yield Finding(
            Verdict.ENV,
            "loaded",
            f"{'; '.join(odd)}: find what comes first on the search path, and measure again",
        )


def _public(version: str) -> str:
    """Without '+cu130', which metadata may leave out."""
    return version.partition("+")[0]


def _arithmetic(row: Replicate) -> Iterator[Finding]:
    if row.tok_per_s is None:
        yield Finding(Verdict.FAILED, "no speed", "finished without a speed: tok_per_s is null")
        return
    if (
        not row.samples_s
        or min(row.samples_s) <= 0
        or row.steps_per_sample < 1
        or row.tokens_per_step < 1
    ):
        steps = f"{row.steps_per_sample} steps per sample, {row.tokens_per_step} tokens per step"
        samples = (
            f"{len(row.samples_s)} samples (least {min(row.samples_s, default=0.0):.3g} s), {steps}"
        )
        yield Finding(
            Verdict.IMPOSSIBLE, "samples", f"{row.tok_per_s:,.1f} tok/s cannot come from {samples}"
        )
        return
    from_samples = row.tokens_per_step * row.steps_per_sample / median(row.samples_s)
    if abs(row.tok_per_s / from_samples - 1) > MAX_RATE_MISMATCH:
        text = (
            f"stored {row.tok_per_s:,.1f} tok/s, but its samples give {from_samples:,.1f}: edited"
            " or miscomputed"
        )
        yield Finding(Verdict.IMPOSSIBLE, "samples", text)


def _clock(row: Replicate) -> Iterator[Finding]:
    if row.other_clocks is not None and (odd := clock_faults(row.samples_s, row.other_clocks)):
        yield Finding(Verdict.IMPOSSIBLE, "clock", "; ".join(odd))


def _physics(row: Replicate) -> Iterator[Finding]:
    physics = row.physics
    if physics is None:
        return
    step_s = (
        median(row.samples_s) / row.steps_per_sample
        if row.samples_s and row.steps_per_sample > 0
        else 0.0
    )
    # Both the stored rates and those that the samples give: an edited rate must not hide
    # what the samples say.
    flop_rate = max(physics.flops_per_s, physics.flops / step_s if step_s > 0 else 0.0)
    byte_rate = max(physics.bytes_per_s, physics.min_bytes / step_s if step_s > 0 else 0.0)
    gemm = physics.gemm_flops_per_s
    if gemm is not None and flop_rate > IMPOSSIBLE_FLOP_FACTOR * gemm:
        text = (
            f"{flop_rate / 1e12:,.4g} TFLOP/s, but a large GEMM in this process reached"
            f" {gemm / 1e12:,.4g}"
        )
        yield Finding(Verdict.IMPOSSIBLE, "flops", f"{text} (limit {IMPOSSIBLE_FLOP_FACTOR} x)")
    # A wrong clock moves the step and the GEMM alike; the datasheet does not share it.
    fastest, peak = max(flop_rate, gemm or 0.0), physics.datasheet_flops_per_s
    if peak is not None and fastest > IMPOSSIBLE_FLOP_FACTOR * peak:
        text = (
            f"{fastest / 1e12:,.4g} TFLOP/s, but the card's datasheet says {peak / 1e12:,.4g}: the"
            " clock is wrong"
        )
        yield Finding(Verdict.IMPOSSIBLE, "datasheet", f"{text} (limit {IMPOSSIBLE_FLOP_FACTOR} x)")
    ceiling, cached = physics.datasheet_bytes_per_s, physics.l2_bytes or 0
    if ceiling is None or physics.min_bytes <= cached:
        return
    # What fits the L2 may never touch memory; only the rest must pass through it.
    beyond_rate = byte_rate * (1 - cached / physics.min_bytes)
    if beyond_rate > ceiling:
        text = (
            f"{beyond_rate / 1e9:,.4g} GB/s beyond the L2's {cached / 2**20:,.0f} MiB, the card's"
            f" datasheet says {ceiling / 1e9:,.4g}"
        )
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
