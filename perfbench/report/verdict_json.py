"""verdict.json: the judgement as data for other programs, with a JSON Schema (`perfbench schema
verdict`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from perfbench.gate import CellVerdict, Judgement
from perfbench.matrix import GatePolicy
from perfbench.records import Run, StoredCell, Verdict, read_regular_file
from perfbench.text import shorten

SCHEMA_VERSION: Literal[1] = 1
MAX_BYTES = 2**26


class _Part(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        json_schema_serialization_defaults_required=True,
    )


class Numbers(_Part):
    """The comparison in ln speed; null where nothing bounds it."""

    estimate: float | None
    standard_error: float | None
    df: float | None
    lower: float | None
    upper: float | None
    p_slower: float | None
    mde: float | None
    n_base: int
    n_candidate: int


class EvidenceLine(_Part):
    """One comparison; ``sd``, ``moderated_sd`` and ``night_sd`` (between sessions) are of ln
    speed.
    """

    metric: str
    paired: bool
    alpha: float
    adjusted_p: float | None
    change_pct: float | None
    lower_pct: float | None
    upper_pct: float | None
    mde_pct: float | None
    tolerance_pct: float
    sd: float
    moderated_sd: float
    night_sd: float | None
    ln: Numbers


class CellLine(_Part):
    """One cell. ``verdict`` is null where nothing was compared and nothing is wrong."""

    cell_id: str
    axes: StoredCell
    verdict: Verdict | None
    exit_code: int
    reason: str
    base_tok_per_s: float | None
    cand_tok_per_s: float | None
    change_pct: float | None
    change: str = ""  # '-81.9 % (2,711 -> 491 tok/s), 11 pairs'; none in older files
    replicates: int
    spread_pct: float | None
    device_ms: float | None  # of a step, as the next two: null where no profiled step shows it
    host_ms: float | None
    launches: float | None
    proved: list[str] | None  # of a user's own step, as the next; null in other workloads
    not_proved: list[str] | None
    metric: str
    mde_pct: float | None
    screened: bool
    confirmed: bool
    notes: list[str]
    evidence: list[EvidenceLine]
    reproduce: str


class FindingLine(_Part):
    verdict: Verdict
    reason: str


class BaselineLine(_Part):
    matrix_name: str
    run_id: str
    promoted_utc: str
    commit: str | None
    dirty: bool


class RunLine(_Part):
    """Which run was judged. A run with ``injections`` is a demonstration."""

    run_id: str
    created_utc: str
    matrix_name: str
    matrix_sha256: str
    gpu_slug: str
    commit: str | None
    dirty: bool
    injections: list[str]


class VerdictFile(_Part):
    """Everything that decided the exit code; ``run`` is null where only the judgement was asked
    for.
    """

    kind: Literal["verdict"] = "verdict"
    schema_version: Literal[1] = SCHEMA_VERSION
    exit_code: int
    headline: str
    strict: bool
    counts: dict[str, int]
    policy: GatePolicy
    run: RunLine | None
    baseline: BaselineLine | None
    findings: list[FindingLine]
    notes: list[str]
    cells: list[CellLine]


def verdict_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of verdict.json as it is written: every key is there."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **VerdictFile.model_json_schema(mode="serialization"),
    }


def text(run: Run | None, judgement: Judgement) -> str:
    """The file's content; the same judgement, the same bytes."""
    return json.dumps(to_json(judgement, run), indent=1, allow_nan=False) + "\n"


def to_json(judgement: Judgement, run: Run | None = None) -> dict[str, Any]:
    """The judgement as plain JSON values."""
    return verdict_file(judgement, run).model_dump(mode="json")


def read_verdict(path: Path) -> VerdictFile:
    """A stored verdict.json; ValueError says why it is none, without a word of what it holds."""
    try:
        return VerdictFile.model_validate_json(read_regular_file(path, MAX_BYTES))
    except OSError as error:
        raise ValueError(f"it cannot be read: {error.strerror or error}") from None
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"]) or "the whole"
        text = f"it is no verdict of this perfbench: {shorten(where, 60)} is not as it writes it"
        raise ValueError(text) from None


def verdict_file(judgement: Judgement, run: Run | None = None) -> VerdictFile:
    """The judgement as verdict.json holds it."""
    return VerdictFile(
        exit_code=int(judgement.exit_code),
        headline=judgement.headline,
        strict=judgement.strict,
        counts=dict(judgement.counts),
        policy=judgement.policy,
        run=None if run is None else _run(run),
        baseline=_baseline(judgement),
        findings=[FindingLine(verdict=f.verdict, reason=f.reason) for f in judgement.findings],
        notes=list(judgement.notes),
        cells=[_cell(cell) for cell in judgement.cells],
    )


def _cell(cell: CellVerdict) -> CellLine:
    return CellLine(
        cell_id=cell.cell_id,
        axes=cell.axes,
        verdict=cell.verdict,
        exit_code=int(cell.exit_code),
        reason=cell.reason,
        base_tok_per_s=cell.base_tok_per_s,
        cand_tok_per_s=cell.cand_tok_per_s,
        change_pct=cell.change_pct,
        change=cell.change,
        replicates=cell.replicates,
        spread_pct=cell.spread_pct,
        device_ms=cell.step.device_ms,
        host_ms=cell.step.host_ms,
        launches=cell.step.launches,
        proved=None if cell.own is None else cell.own.proved,
        not_proved=None if cell.own is None else cell.own.not_proved,
        metric=cell.metric,
        mde_pct=cell.mde_pct,
        screened=cell.screened,
        confirmed=cell.confirmed,
        notes=list(cell.notes),
        evidence=[EvidenceLine.model_validate(one.to_json()) for one in cell.evidence],
        reproduce=cell.reproduce,
    )


def _run(run: Run) -> RunLine:
    manifest = run.manifest
    return RunLine(
        run_id=manifest.run_id,
        created_utc=manifest.created_utc,
        matrix_name=manifest.matrix_name,
        matrix_sha256=manifest.matrix_sha256,
        gpu_slug=manifest.environment.gpu_slug,
        commit=manifest.source.commit,
        dirty=manifest.source.dirty_sha256 is not None,
        injections=list(manifest.injections),
    )


def _baseline(judgement: Judgement) -> BaselineLine | None:
    base = judgement.baseline
    if base is None:
        return None
    return BaselineLine(
        matrix_name=base.matrix_name,
        run_id=base.run_id,
        promoted_utc=base.promoted_utc,
        commit=base.commit,
        dirty=base.dirty,
    )
