"""Everything that is printed, rendered from a run and its judgement: Markdown, pictures, JSON, terminal. No clock, no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from perfbench.judgement import Judgement
from perfbench.result import Run

__all__ = ["render", "terminal_table", "to_json"]


def render(run: Run, judgement: Judgement, out_dir: Path) -> list[Path]:
    """Write report.md and its pictures into ``out_dir``; PerfbenchError(Exit.USAGE) where it cannot be written."""
    from perfbench.report.files import write

    return write(run, judgement, out_dir)


def terminal_table(run: Run, judgement: Judgement, *, width: int = 120, colour: bool = False) -> str:
    """The verdict, every red and the table of cells as text of at most ``width`` columns; ANSI only with ``colour``."""
    from perfbench.report.terminal import table

    return table(run, judgement, width=width, colour=colour)


def to_json(judgement: Judgement) -> dict[str, Any]:
    """The judgement as plain JSON values; null where nothing was compared."""
    return {
        "exit_code": int(judgement.exit_code),
        "headline": judgement.headline,
        "strict": judgement.strict,
        "counts": dict(judgement.counts),
        "policy": judgement.policy.model_dump(mode="json"),
        "baseline": _baseline(judgement),
        "findings": [{"verdict": f.verdict.value, "reason": f.reason} for f in judgement.findings],
        "notes": list(judgement.notes),
        "cells": [
            {
                "cell_id": cell.cell_id,
                "axes": dict(cell.axes),
                "verdict": None if cell.verdict is None else cell.verdict.value,
                "exit_code": int(cell.exit_code),
                "reason": cell.reason,
                "base_tok_per_s": cell.base_tok_per_s,
                "cand_tok_per_s": cell.cand_tok_per_s,
                "change_pct": cell.change_pct,
                "replicates": cell.replicates,
                "spread_pct": cell.spread_pct,
                "metric": cell.metric,
                "mde_pct": cell.mde_pct,
                "screened": cell.screened,
                "confirmed": cell.confirmed,
                "notes": list(cell.notes),
                "evidence": [one.to_json() for one in cell.evidence],
                "reproduce": cell.reproduce,
            }
            for cell in judgement.cells
        ],
    }


def _baseline(judgement: Judgement) -> dict[str, Any] | None:
    base = judgement.baseline
    if base is None:
        return None
    return {
        "matrix_name": base.matrix_name,
        "run_id": base.run_id,
        "promoted_utc": base.promoted_utc,
        "commit": base.commit,
        "dirty": base.dirty,
    }
