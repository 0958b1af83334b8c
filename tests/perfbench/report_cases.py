"""A run troubled in every way with its judgement, and report.md as text without its pictures."""

from __future__ import annotations

from perfbench.gate.judgement import Judgement
from perfbench.gate.judging import judge
from perfbench.matrix.policy import GatePolicy
from perfbench.records.rows import Run, Status
from perfbench.report import markdown
from perfbench.report.context import ReportContext
from perfbench.report.markdown import Picture
from perfbench.report.rows import rows_of
from tests.perfbench import builders as b
from tests.perfbench.edits import conclude

POLICY = GatePolicy()
TRAIN = "fa2=on,path=v2,seq_len=2048,workload=train"
FORWARD = "fa2=on,path=v2,seq_len=2048,workload=forward"
DENSE = "path=dense,seq_len=2048,workload=train"


def written(run: Run, judgement: Judgement, context: ReportContext | None = None) -> str:
    """report.md as text, without the second that its pictures take."""
    pictures = [
        Picture("throughput.png", True, "tok/s against seq_len", ""),
        Picture("utilisation.png", False, "utilisation", "not drawn"),
    ]
    return markdown.text(run, judgement, rows_of(run, judgement), pictures, context)


def alone(run: Run) -> str:
    return written(run, judge(run, None, POLICY))


def troubled() -> tuple[Run, Judgement]:
    """One of everything: confirmed slower, wrong path, out of memory, blind, new, missing, faster,
    excluded.
    """
    whole = run = b.make_run(
        b.h100_cells(),
        excluded=[
            {"cell_id": "path=v1,seq_len=8192,workload=train", "reason": "Python | loops:\nhours"}
        ],
    )
    base = b.baseline_of(b.replace_rows(run, TRAIN, host_bound=True))
    cells = {cell.cell_id: cell for cell in run.manifest.cells}
    run = b.scale_rows(run, "fa2=on,path=masked,seq_len=8192,workload=train", 0.9)
    run = b.scale_rows(run, "fa2=on,path=v2,seq_len=8192,workload=forward", 1.2)
    run = b.replace_rows(
        run, FORWARD, engaged={"cmp.sdpa": 12, "sel.reference": 12, "sel.loop": 12, "win.fa2": 12}
    )
    run = b.replace_rows(b.scale_rows(run, TRAIN, 0.9), TRAIN, host_bound=True)
    lost = cells["fa2=off,path=v2,seq_len=8192,workload=train"]
    run = b.change_rows(
        run,
        lost.cell_id,
        lambda row: b.failed(
            lost, Status.OOM, row.replicate, "out of | memory", stderr_tail="```\nboom"
        ),
    )
    gone = "path=dense,seq_len=512,workload=forward"
    planned = [cell for cell in run.manifest.cells if cell.cell_id != gone]
    run = b.with_manifest(
        b.with_rows(run, [row for row in run.replicates if row.cell_id != gone]), cells=planned
    )
    base = base.model_copy(
        update={
            "cells": {
                k: v for k, v in base.cells.items() if k != "path=dense,seq_len=512,workload=train"
            }
        }
    )
    return run, conclude(judge(run, base, POLICY), whole, run, POLICY)


def section(text: str, title: str) -> str:
    return text.split(f"## {title}\n")[1].split("\n## ")[0]
