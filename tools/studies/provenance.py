"""What generated pages share: where their numbers come from (machine, software, commit, matrix),
what has none, and the file.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from nsa.config import ModelConfig
from perfbench.errors import Exit, PerfbenchError
from perfbench.gate import CellVerdict, Judgement, rows_by_cell
from perfbench.matrix import stored_matrix
from perfbench.records import Run
from perfbench.text import NULL, cell_code, code, escape
from tools.studies.kerneltext import table


def model_of(run: Run) -> ModelConfig | None:
    """The model of the run's matrix; None where this perfbench cannot read that matrix."""
    try:
        return stored_matrix(run.manifest).model
    except PerfbenchError:
        return None


def title(run: Run, model: ModelConfig | None) -> str:
    """'NVIDIA H200, 12 heads over 2 of 64: run ID'."""
    return (
        f"{escape(run.manifest.environment.device_name)}, {_heads(model)}: run"
        f" {escape(run.manifest.run_id)}"
    )


def facts(run: Run) -> list[str]:
    """The machine's line, the code's line, and a line each for settings and planted faults, where
    there are any.
    """
    manifest, env = run.manifest, run.manifest.environment
    source = manifest.source
    commit = escape(source.commit or f"unknown ({source.reason or 'no reason recorded'})")
    dirty = (
        ""
        if source.dirty_sha256 is None
        else f", **with uncommitted changes** ({escape(source.dirty_sha256[:12])})"
    )
    software = {
        "driver": env.driver,
        "CUDA": env.cuda,
        "torch": env.torch,
        "Triton": env.triton,
        "FA-2": env.flash_provider,
    }
    found = [
        f"GPU {escape(env.device_name)}, clocks {escape(env.clock_policy)}; "
        + ", ".join(f"{name} {escape(value)}" for name, value in software.items() if value),
        (
            f"Commit {commit}{dirty}; measured {escape(manifest.created_utc)}; matrix"
            f" {code(manifest.matrix_path)}, {_processes(run)} a cell"
        ),
    ]
    if env.nsa_settings:
        given = ", ".join(f"{name}={value}" for name, value in env.nsa_settings.items())
        found.append(f"**Settings of the whole run: {escape(given)}**")
    if manifest.injections:
        found.append(
            f"**INJECTED FAULTS, a demonstration: {escape(', '.join(manifest.injections))}**"
        )
    return found


def _processes(run: Run) -> str:
    """'3 processes', or '1 to 2 of 3 processes' where a budget ended or a run was cut off."""
    planned = run.manifest.replicates
    counts = {len({row.replicate for row in rows}) for rows in rows_by_cell(run).values()} or {0}
    of = f" of {planned}" if counts != {planned} else ""
    return f"{_span(counts)}{of} {'process' if planned == 1 else 'processes'}"


def _span(counts: Collection[int]) -> str:
    """'2', or '1 to 2'."""
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} to {high}"


def troubles(judgement: Judgement) -> list[str]:
    """What a gate found about the whole run."""
    return [
        f"**{finding.verdict.value}**: {escape(finding.reason)}" for finding in judgement.findings
    ]


def not_published(cells: Sequence[CellVerdict]) -> list[str]:
    """A section that names each of ``cells`` with the reason why it has no number; nothing for
    none.
    """
    rows = [
        [cell_code(cell.cell_id), cell.verdict.value if cell.verdict else NULL, escape(cell.reason)]
        for cell in cells
    ]
    return ["### Not published", "", *table(["cell", "verdict", "why"], rows), ""] if rows else []


def save(out: Path, text: str) -> Path:
    """Write a page and return where it is; PerfbenchError(Exit.USAGE) where it cannot be
    written.
    """
    try:
        out.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise PerfbenchError(
            Exit.USAGE,
            f"{out} cannot be written ({error.strerror}); wanted a writable file: give another"
            " --out",
        ) from error
    return out


def _heads(model: ModelConfig | None) -> str:
    if model is None:
        return "heads unknown"
    dims = (
        f"{model.head_dim}"
        if model.head_dim == model.value_dim
        else f"{model.head_dim} and {model.value_dim}"
    )
    return f"{model.num_heads} heads over {model.num_kv_heads} of {dims}"
