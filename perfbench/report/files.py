"""Writes report.md and its pictures."""

from __future__ import annotations

from pathlib import Path

from perfbench.judgement import Judgement
from perfbench.report import markdown, plots
from perfbench.report.rows import Row, rows_of
from perfbench.report.text import plain
from perfbench.result import Run
from perfbench.verdict import Exit, PerfbenchError

REPORT, THROUGHPUT, UTILISATION = "report.md", "throughput.png", "utilisation.png"


def write(run: Run, judgement: Judgement, out_dir: Path) -> list[Path]:
    """Return the files written; a picture that would be empty is removed, and the report says why it is absent."""
    rows = rows_of(run, judgement)
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        pictures = _pictures(run, rows, out_dir)
        report = out_dir / REPORT
        report.write_text(markdown.text(run, judgement, rows, pictures), encoding="utf-8", newline="\n")
    except OSError as error:
        text = f"cannot write the report into {out_dir}: {error.strerror or error}; wanted a writable folder: change rights, or give --out"
        raise PerfbenchError(Exit.USAGE, text) from error
    return [report, *(out_dir / picture.name for picture in pictures if picture.drawn)]


def _pictures(run: Run, rows: list[Row], out_dir: Path) -> list[markdown.Picture]:
    machine = f"{plain(run.manifest.environment.device_name)} ({plain(run.manifest.matrix_name)})"
    if run.manifest.injections:
        machine += "  INJECTED FAULTS"
    drawn = plots.throughput(rows, out_dir / THROUGHPUT, f"Tokens per second, {machine}")
    found = [markdown.Picture(THROUGHPUT, drawn, "tok/s against seq_len for each path", "" if drawn else "no cell has a speed")]
    bars = plots.utilisation(rows, out_dir / UTILISATION, f"GPU utilisation, {machine}")
    lacking = dict.fromkeys(row.nulls["utilisation"] for row in rows if "utilisation" in row.nulls)
    why = "" if bars else "; ".join(lacking) or "no cell has a speed"
    measured = sum(row.utilisation_pct is not None for row in rows)
    what = "GPU utilisation for each cell" if bars == measured else f"GPU utilisation of the first {bars} of {measured} cells"
    found.append(markdown.Picture(UTILISATION, bars > 0, what, why))
    for picture in found:
        if not picture.drawn:  # a stale one of an earlier rendering would contradict the report
            (out_dir / picture.name).unlink(missing_ok=True)
    return found
