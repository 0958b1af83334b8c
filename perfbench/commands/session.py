"""What each command does, in the order in which it does it: plan, measure, judge, render.

The glue of `ab` and `compare` is in `versions`, of `report` and `explain` in `reread`, of `trace`
in `tracecommand`.
"""

from __future__ import annotations

import json
import secrets
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any

import nsa
import nsa.settings
from nsa.capability import assumed, of_gpu
from nsa.routing import Capability
from perfbench.errors import Exit, PerfbenchError
from perfbench.matrix import matrix as matrices
from perfbench.matrix import plan as plans

if TYPE_CHECKING:
    from perfbench.gate import Judgement
    from perfbench.machine import TargetFit
    from perfbench.matrix.matrix import Matrix
    from perfbench.matrix.plan import Plan
    from perfbench.matrix.policy import Policies
    from perfbench.records.baseline_file import Baseline, BaselineProblem
    from perfbench.records.rows import Run

BASELINES = Path("reports/baselines")
CHECKOUT = Path(nsa.__file__).parents[1]  # the measured code


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of `run` and `check`; ``argv`` goes into the manifest."""

    argv: list[str]
    only: list[str] = field(default_factory=list)
    resume: Path | None = None
    budget_s: float | None = None
    seed: int | None = None
    out: Path = Path("reports/runs")
    source_commit: str | None = None
    inject: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run, what was judged of it, where it lies, and what it was judged by: a baseline, or the
    base's own run.
    """

    run: Run
    judgement: Judgement
    folder: Path
    baseline: Baseline | BaselineProblem | None = None
    base_run: Run | None = None

    def write_report(self, out: Path | None = None) -> list[Path]:
        """The report, its pictures, and for machines verdict.json and junit.xml."""
        from perfbench import report
        from perfbench.runner.ab import pair as pairs
        from perfbench.tracing import diff

        traces = diff.to_markdown(diff.stored(self.folder))
        paired = self.base_run is not None and pairs.are_paired(self.base_run, self.run)
        context = report.ReportContext.of(
            self.baseline, policy_of(self.run), base_run=self.base_run, paired=paired, traces=traces
        )
        to = out or self.folder
        return report.render(self.run, self.judgement, to, context) + report.write_ci(
            self.run, self.judgement, to
        )

    def table(self) -> str:
        from perfbench import report
        from perfbench.machine import environment

        colour = sys.stdout.isatty() and not environment.no_color()
        return report.terminal_table(
            self.run, self.judgement, width=get_terminal_size((120, 24)).columns, colour=colour
        )

    def to_json(self) -> str:
        from perfbench import report

        return json.dumps(
            {"run_dir": str(self.folder), **report.to_json(self.judgement, self.run)}, indent=2
        )


def plan(path: Path, only: list[str], gpu: str | None, as_json: bool) -> str:
    """The plan of a matrix for its target, or for another GPU that need not be here."""
    matrix = matrices.load(path)
    try:
        capability = assumed(gpu or matrix.target.gpu)
    except ValueError as error:
        raise PerfbenchError(Exit.USAGE, f"{error}. Next: name one of them with --gpu") from None
    built = plans.build(matrix, only=only, capability=capability, settings=_settings())
    return (
        json.dumps(plans.to_json(built), indent=2) if as_json else plans.render_text(built, matrix)
    )


def measure(path: Path, options: RunOptions) -> Path | None:
    """Measure a matrix on this machine and return the run folder; None where the matrix skips this
    machine.
    """
    from perfbench.machine import environment, source_of
    from perfbench.runner import run as runner
    from perfbench.runner.progress import progress_for

    matrix = matrices.load(path)
    fit = environment.check_target(matrix.target)
    if fit.warning:
        warn(fit.warning)
    if fit.skip:
        return None
    plan = _whole_plan(matrix, options.only, capability_here(fit))
    for warning in plan.warnings:
        warn(warning)
    with runner.prepared(fit) as executor:
        finished = runner.run(
            plan,
            matrix,
            executor,
            runs_dir=options.out,
            environment=environment.collect_environment(fit.device),
            source=source_of(CHECKOUT, options.source_commit),
            argv=options.argv,
            seed=secrets.randbelow(2**31) if options.seed is None else options.seed,
            only=options.only,
            injections=options.inject,
            budget_s=options.budget_s,
            resume=options.resume,
            progress=progress_for(no_color=environment.no_color()),
        )
    return finished.folder


def judge(run_path: Path) -> Outcome:
    """Judge a run by itself: the hard gates, without any baseline."""
    from perfbench.gate import judge as judge_run
    from perfbench.records import run_file

    run = warn_where_torn(run_file.read(run_path))
    return Outcome(run, judge_run(run, None, policy_of(run)), folder_of(run_path))


def warn_where_torn(run: Run) -> Run:
    """Say on stderr that the file's last line was cut off, so that a replicate may be missing."""
    if run.torn:
        warn(
            f"the last line of run {run.manifest.run_id} was cut off and is left out; `perfbench"
            " run --resume` repairs the file"
        )
    return run


def judge_against_baseline(run_path: Path, baseline_path: Path | None, strict: bool) -> Outcome:
    """Judge a run by the baseline of its GPU and matrix, or by the one that is named, and by what
    `check` confirmed of it.
    """
    from perfbench.gate import confirm_all
    from perfbench.runner.ab import confirm

    outcome, base = screen(run_path, baseline_path, strict)
    asked, policy = outcome.judgement.to_confirm, policy_of(outcome.run)
    found = (
        confirm.stored(outcome.folder, confirm.base_commits(asked, base, policy)) if asked else None
    )
    if found is None:
        return outcome
    return replace(
        outcome,
        judgement=confirm_all(outcome.judgement, found.measured, policy, found.reasons),
    )


def screen(
    run_path: Path, baseline_path: Path | None, strict: bool
) -> tuple[Outcome, Baseline | BaselineProblem]:
    """The first stage alone: a run judged by the stored baseline, and that baseline."""
    from perfbench.gate import judge as judge_run
    from perfbench.gate import unplanned_sentinels
    from perfbench.records import baseline_file, run_file

    run = warn_where_torn(run_file.read(run_path))
    found, matrix = baseline_file.read(baseline_path or default_baseline(run)), matrix_of(run)
    check_same_matrix(run, found)
    judgement = judge_run(run, found, matrices.policies(matrix), strict=strict)
    if isinstance(found, baseline_file.Baseline):
        judgement = replace(
            judgement, notes=(*judgement.notes, *unplanned_sentinels(run, matrix.sentinels, found))
        )
    return Outcome(run, judgement, folder_of(run_path), found), found


def check_same_matrix(run: Run, found: Baseline | BaselineProblem) -> None:
    """PerfbenchError(Exit.USAGE) for the baseline of another matrix that shares no cell with the
    run: every cell would be MISSING.
    """
    from perfbench.records.baseline_file import BaselineProblem

    if isinstance(found, BaselineProblem) or found.matrix_name == run.manifest.matrix_name:
        return
    if not {cell.cell_id for cell in run.manifest.cells} & {*found.cells}:
        theirs, ours = found.matrix_name, run.manifest.matrix_name
        got = (
            f"got a baseline of matrix {theirs} for a run of matrix {ours}, and they share no cell;"
            f" wanted that of {ours}"
        )
        raise PerfbenchError(
            Exit.USAGE,
            f"{got}. Next: leave --baseline out, or name reports/baselines/<gpu>/{ours}.json",
        )


def warn_of_baseline(matrix_path: Path, baseline_path: Path | None) -> None:
    """Say before the minutes are spent that the baseline cannot judge; the run is kept and can be
    promoted.
    """
    from perfbench.machine import environment
    from perfbench.records import baseline_file
    from perfbench.records.baseline_file import BaselineProblem

    if baseline_path is None:
        matrix = matrices.load(matrix_path)
        fit = environment.check_target(matrix.target)
        baseline_path = baseline_file.path_for(
            BASELINES, "cpu" if fit.gpu is None else fit.gpu.slug, matrix.name
        )
    found = baseline_file.read(baseline_path)
    if isinstance(found, BaselineProblem):
        warn(f"{found.message}. Measuring all the same; the run can be promoted")


def calibrate(
    run_paths: list[Path],
    seed: int,
    out: Path | None,
    *,
    pairs: list[Path] | None = None,
    as_json: bool = False,
) -> str:
    """Certify the gate on stored samples; the report also goes to ``out``, a .md file or the folder
    of calibration.md.

    A name without suffix is a folder, there or not. USAGE for any other suffix: the JSON file goes
    beside, by the same name.
    """
    from perfbench.calibration import calibrate as run_calibration
    from perfbench.calibration import calibration_json, render_calibration
    from perfbench.matrix.policy import GatePolicy
    from perfbench.records import run_file

    to = out
    if out is not None and (out.is_dir() or not out.suffix):
        to = out / "calibration.md"
    elif out is not None and out.suffix != ".md":
        raise PerfbenchError(
            Exit.USAGE,
            f"--out got {out}, wanted a folder or a .md file. Next: --out {out.with_suffix('')}",
        )
    files = [run_file.file_of(path) for path in run_paths]
    policy = policy_of(run_file.read(files[0])).whole if files else GatePolicy()
    found = run_calibration(files, seed=seed, policy=policy, pair_folders=pairs or (), out=to)
    return calibration_json(found) if as_json else render_calibration(found)


def promote(
    run_path: Path, to: Path | None, allow_dirty: bool, calibration: Path | None = None
) -> str:
    """Make a green run the baseline of its GPU and matrix; ``calibration``: a calibration.json of
    that GPU.
    """
    from perfbench.gate import promote as promote_run
    from perfbench.records import run_file

    run = run_file.read(run_path)
    return str(
        promote_run(
            run, to or default_baseline(run), allow_dirty=allow_dirty, calibration=calibration
        )
    )


def show_baseline(path: Path, as_json: bool) -> str:
    from perfbench.records import baseline_file

    found = baseline_file.load(path)
    return found.model_dump_json(indent=2) if as_json else baseline_file.show(found)


def schema(kind: str) -> dict[str, Any]:
    """JSON Schema of a matrix file, of one line of a run file, or of verdict.json."""
    if kind == "matrix":
        return matrices.json_schema()
    if kind == "verdict":
        from perfbench import report

        return report.verdict_schema()
    from pydantic import TypeAdapter

    from perfbench.records.rows import Manifest, Replicate, Resumed, SentinelLine

    return TypeAdapter(Manifest | Resumed | Replicate | SentinelLine).json_schema()


def doctor(as_json: bool, log: Path | None = None, gpu: str | None = None) -> tuple[str, Exit]:
    """What a run would find here (and what ``log`` tells of one that was), and ENVIRONMENT where
    something is bad.
    """
    from perfbench.machine import doctor as doctors

    lines = doctors.diagnose(CHECKOUT, log=log, gpu=gpu)
    text = (
        json.dumps([asdict(line) for line in lines], indent=2)
        if as_json
        else doctors.render_text(lines)
    )
    return text, doctors.exit_code(lines)


def _settings() -> nsa.settings.Settings:
    try:
        return nsa.settings.current()
    except ValueError as error:
        raise PerfbenchError(Exit.USAGE, str(error)) from None


def _whole_plan(matrix: Matrix, only: list[str], capability: Capability) -> Plan:
    """Every cell, so that a later slice can join the run; or the selected ones, where others cannot
    be routed here.
    """
    try:
        return plans.build(matrix, only=[], capability=capability, settings=_settings())
    except PerfbenchError:
        if not only:
            raise
        return plans.build(matrix, only=only, capability=capability, settings=_settings())


def capability_here(fit: TargetFit) -> Capability:
    """The machine as routing sees it, asked of NVML: the parent imports no torch and touches no
    CUDA.
    """
    if fit.gpu is None:
        return assumed("none")
    from perfbench.machine import nvml_query, nvml_session

    with nvml_session() as opened:
        handle, missing = nvml_query(opened, "nvmlDeviceGetHandleByUUID", fit.gpu.uuid)
        sm, missing = (
            (None, missing)
            if missing
            else nvml_query(opened, "nvmlDeviceGetCudaComputeCapability", handle)
        )
    if missing or sm is None:
        raise PerfbenchError(
            Exit.ENVIRONMENT,
            f"NVML cannot tell the compute capability of {fit.gpu.name}: {missing}. Next:"
            " `perfbench doctor`",
        )
    return of_gpu(fit.gpu.name, (int(sm[0]), int(sm[1])))


def matrix_of(run: Run) -> Matrix:
    """The matrix that the run was made with, as its manifest keeps it."""
    return matrices.parse(run.manifest.matrix_text, run.manifest.matrix_path)


def policy_of(run: Run) -> Policies:
    """What the run's own matrix demands of its cells."""
    return matrices.policies(matrix_of(run))


def default_baseline(run: Run) -> Path:
    """Where the baseline of the run's GPU and matrix lies."""
    from perfbench.records import baseline_file

    return baseline_file.path_for(
        BASELINES, run.manifest.environment.gpu_slug, run.manifest.matrix_name
    )


def folder_of(run_path: Path) -> Path:
    return run_path if run_path.is_dir() else run_path.parent


def say(text: str) -> None:
    print(f"perfbench: {text}", file=sys.stderr, flush=True)


def warn(text: str) -> None:
    print(f"perfbench: warning: {text}", file=sys.stderr, flush=True)
