"""Writes report.md and its pictures; and what CI reads, next to the run."""

from __future__ import annotations

import errno
from pathlib import Path

from perfbench.errors import Exit, PerfbenchError
from perfbench.gate import Judgement
from perfbench.records import Run, whole_file
from perfbench.report import (
    badge,
    changes,
    junit,
    markdown,
    plots,
    speeds,
    utilisation,
    verdict_json,
)
from perfbench.report.context import ReportContext
from perfbench.report.rows import Row, rows_of
from perfbench.text import plain

REPORT, THROUGHPUT, CHANGES, UTILISATION = (
    "report.md",
    "throughput.png",
    "changes.png",
    "utilisation.png",
)
VERDICT, JUNIT, BADGE, BADGE_PICTURE = "verdict.json", "junit.xml", "badge.json", "badge.svg"


def render(
    run: Run, judgement: Judgement, out_dir: Path, context: ReportContext | None = None
) -> list[Path]:
    """Return the files written; a picture that would be empty is removed, and the report says why
    it is absent.
    """
    rows = rows_of(run, judgement)
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        pictures = _drawn(run, judgement, rows, out_dir)
        report = out_dir / REPORT
        text = markdown.text(run, judgement, rows, pictures, context)
        _write_whole(report, text)
    except OSError as error:
        raise _unwritable(out_dir, error) from error
    return [report, *(out_dir / picture.name for picture in pictures if picture.drawn)]


def report_text(run: Run, judgement: Judgement, context: ReportContext | None = None) -> str:
    """report.md as `render` writes it, without its pictures."""
    return markdown.text(run, judgement, rows_of(run, judgement), [], context)


def write_ci(run: Run, judgement: Judgement, out_dir: Path) -> list[Path]:
    """Write verdict.json, junit.xml and the badge into ``out_dir``; PerfbenchError(Exit.USAGE)
    where they cannot be written.
    """
    name = run.manifest.matrix_name
    found = {
        VERDICT: verdict_json.text(run, judgement),
        JUNIT: junit.text(run, judgement),
        BADGE: badge.badge_json(name, judgement),
        BADGE_PICTURE: badge.badge_svg(name, judgement),
    }
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        for name, content in found.items():
            _write_whole(out_dir / name, content)
    except OSError as error:
        raise _unwritable(out_dir, error) from error
    return [out_dir / name for name in found]


def _write_whole(path: Path, content: str) -> None:
    with whole_file(path) as partial:
        partial.write_text(content, encoding="utf-8", newline="\n")


def _unwritable(out_dir: Path, error: OSError) -> PerfbenchError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    step = "make room there" if full else "make it a folder that you may write to"
    text = f"cannot write the report into {out_dir}: {error.strerror or error}. Next: {step}"
    return PerfbenchError(Exit.USAGE, text)


def _drawn(
    run: Run, judgement: Judgement, rows: list[Row], out_dir: Path
) -> list[markdown.Picture]:
    """The pictures; each with the reason in its place where this process can draw none."""
    try:
        with plots.as_shipped():
            return _pictures(run, judgement, rows, out_dir)
    except plots.CannotDraw as error:
        for name in (THROUGHPUT, CHANGES, UTILISATION):
            (out_dir / name).unlink(missing_ok=True)
        why = f"no picture can be drawn here: {error}"
        return [markdown.Picture(name, False, "", why) for name in (THROUGHPUT, UTILISATION)]


def _pictures(
    run: Run, judgement: Judgement, rows: list[Row], out_dir: Path
) -> list[markdown.Picture]:
    machine = f"{plain(run.manifest.environment.device_name)} ({plain(run.manifest.matrix_name)})"
    if run.manifest.injections:
        machine += "\nINJECTED FAULTS: a demonstration"
    speed = speeds.draw(
        rows, out_dir / THROUGHPUT, f"Tokens per second, {machine}{_host_bound(rows)}"
    )
    what = "tok/s against seq_len for each path"
    if speed.shown < speed.cells:
        what += f": {speed.shown} of {speed.cells} cells, the table has the others"
    found = [
        markdown.Picture(
            THROUGHPUT, speed.shown > 0, what, "" if speed.shown else "no cell has a speed"
        )
    ]
    drawn = changes.draw(
        rows,
        out_dir / CHANGES,
        f"Change of speed, {machine}",
        min_effect_pct=judgement.policy.min_effect_pct,
    )
    compared = sum(bool(row.cell.evidence) for row in rows)
    what = (
        "Change of each cell with its bounds"
        if drawn == compared
        else f"Change of {drawn} of the {compared} compared cells"
    )
    if judgement.baseline is not None:
        why = (
            "" if drawn else "every compared cell is BLIND" if compared else "no cell was compared"
        )
        found.append(markdown.Picture(CHANGES, drawn > 0, what, why))
    bars = utilisation.draw(rows, out_dir / UTILISATION, f"GPU utilisation, {machine}")
    lacking = dict.fromkeys(row.nulls["utilisation"] for row in rows if "utilisation" in row.nulls)
    why = "" if bars else "; ".join(lacking) or "no cell has a speed"
    measured = sum(row.utilisation_pct is not None for row in rows)
    what = (
        "GPU utilisation for each cell"
        if bars == measured
        else f"GPU utilisation of the first {bars} of {measured} cells"
    )
    found.append(markdown.Picture(UTILISATION, bars > 0, what, why))
    for name in {THROUGHPUT, CHANGES, UTILISATION} - {
        picture.name for picture in found if picture.drawn
    }:
        # a stale one of an earlier rendering would contradict the report
        (out_dir / name).unlink(missing_ok=True)
    return found


def _host_bound(rows: list[Row]) -> str:
    known = [row.bound for row in rows if row.bound is not None]
    host = known.count("host")
    return (
        f"\n{host} of {len(known)} cells {'is' if host == 1 else 'are'} host bound:"
        f" {'its' if host == 1 else 'their'} wall time follows the CPU, not the card"
        if host
        else ""
    )
