"""What the report says of open cells, of the machine, and of the noise that leaves a picture
out.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from perfbench import report
from perfbench.errors import Exit
from perfbench.gate.judgement import Judgement
from perfbench.gate.judging import judge
from perfbench.matrix.policy import Alias, Policies
from perfbench.records import BaselineProblem
from perfbench.records.cells import Cell
from perfbench.records.rows import Run, Status
from perfbench.records.verdict import Verdict
from perfbench.report.context import ReportContext
from perfbench.report.rows import bands
from tests.perfbench import builders as b
from tests.perfbench.report_cases import POLICY, TRAIN, alone, section, troubled, written


def noisy(spread: float, factor: float = 1.0) -> tuple[Run, Judgement]:
    """Four GPU-bound cells whose three processes differ by ``spread``; the candidate is ``factor``
    times as fast.
    """
    run = b.small_run()
    cells = run.manifest.cells

    def at(speed: float) -> Run:
        rows = [
            b.replicate(one, n, tok_per_s=b.speed_of(one) * speed * (1 + spread * (n - 1)))
            for one in cells
            for n in range(3)
        ]
        return b.with_rows(run, rows)

    here = at(factor)
    return here, judge(here, b.baseline_of(at(1.0)), POLICY)


def test_an_open_cell_says_what_would_settle_it_and_what_it_could_have_seen() -> None:
    run, judgement = noisy(0.02, 0.96)
    assert judgement.counts == {"WATCH": 4} and judgement.to_confirm
    watch = section(written(run, judgement), "Open: watch, blind, unstable")
    assert (
        "### WATCH: 4 cells" in watch
        and "`perfbench check` does it by itself" in watch
        and watch.count(" tok/s | -4.00 % | -") == 4
    )
    assert "perfbench ab 4f1c2d3e4f1c . matrices/h100.yaml --only cell=ID --pairs N" in watch
    row = (
        next(line for line in watch.splitlines() if line.startswith(f"| `{TRAIN}`"))
        .strip("| ")
        .split(" | ")
    )
    cell = next(one for one in judgement.cells if one.cell_id == TRAIN)
    assert cell.mde_pct is not None and row[4] == f"{cell.mde_pct:.1f} %"
    # A paired difference has sqrt(2) times the sd of a process: 2.83 %, and 3 % is known to need 34
    # pairs, 36 in whole blocks.
    assert int(row[5]) in (32, 36)
    noise, blind = noisy(0.2)
    assert blind.counts == {"BLIND": 4}
    text = written(noise, blind)
    assert (
        "### BLIND: 4 cells" in text
        and text.count("| over 400 |") == 4
        and "an override with a larger min_effect than 3 %" in text
    )


def test_host_bound_cells_are_folded_and_separated_from_noise() -> None:
    run = b.make_run(b.h100_cells())
    run = b.with_rows(run, [row.model_copy(update={"host_bound": True}) for row in run.replicates])
    judgement = judge(run, b.baseline_of(run), POLICY)
    text = written(run, judgement)
    assert (
        "### BLIND: 60 cells" in text
        and "because wall time follows the CPU" in text
        and "measure: {profile: every}" in text
    )
    assert (
        "<summary>The 60 cells with their numbers</summary>" in text
        and text.count("<details>") == text.count("</details>") == 2
    )
    assert (
        "**the host in 60**" in text
        and "more cells: perfbench explain RUN CELL explains each" in text
    )
    counts = [
        line.count("`") // 2
        for line in text.splitlines()
        if line.startswith("- `") and "host bound: wall" in line
    ]
    assert len(counts) == 5 and f"- and {60 - sum(counts)} more cells: " in text


def test_sentinels_are_shown_by_block_against_the_baseline_and_its_band() -> None:
    then = b.watched(b.small_run(), {"gemm": [700e12, 704e12], "copy": [2.8e12, 2.8e12]})
    now = b.watched(b.small_run(), {"gemm": [660e12, 660e12], "copy": [2.81e12, 2.82e12]})
    base = b.baseline_of(then)
    judgement = judge(now, base, POLICY)
    assert judgement.exit_code is Exit.ENVIRONMENT
    part = section(written(now, judgement, ReportContext.of(base)), "Environment and sentinels")
    assert (
        "| sentinel | unit | block 0 | block 1 | median | the baseline | change | band | in band |"
        in part
    )
    # 660 / 702 = 0.94017
    assert "| gemm | TFLOP/s | 660 | 660 | 660 | 702 | -5.98 % | ± 3 % | **no** |" in part
    assert "| copy | GB/s | 2,810 | 2,820 | 2,815 | 2,800 | +0.54 % | ± 3 % | yes |" in part
    assert (
        "method are those of the baseline." in part
        and "SM clock 1,980 MHz" in part
        and "none throttled" in part
    )
    many = b.watched(b.small_run(), {"gemm": [700e12 + n * 1e12 for n in range(12)]})
    assert "| gemm | TFLOP/s | 12 | 700 | 711 | 705.5 |" in alone(many)
    assert "No sentinel ran" in alone(b.small_run())


def test_a_sentinel_that_failed_or_throttled_has_no_rate() -> None:
    run = b.with_manifest(b.small_run(), sentinels=["gemm", "copy"])
    lines = [
        b.sentinel("gemm", 0, telemetry=b.telemetry(throttled=True)),
        b.sentinel("copy", 0, None, status=Status.OOM, samples_s=[]),
    ]
    part = section(alone(run.model_copy(update={"sentinels": lines})), "Environment and sentinels")
    assert (
        "| gemm | TFLOP/s | 700 (throttled) | ± 3 % |" in part
        and "| copy | GB/s | oom | ± 3 % |" in part
    )


def test_renamed_cells_and_kernel_tables_have_their_place() -> None:
    run, judgement = troubled()
    base = b.baseline_of(run)
    moved = base.model_copy(
        update={"cells": {("old|name" if k == TRAIN else k): v for k, v in base.cells.items()}}
    )
    aliases = {"old|name": Alias(TRAIN, "a", "b"), "never there": Alias("nor there", "a", "b")}
    context = ReportContext.of(
        moved,
        Policies(POLICY, aliases=aliases),
        traces="#### a cell\n\n| kernel | ms |\n| --- | --- |\n",
    )
    text = written(run, judgement, context)
    assert f"- renamed `old|name` to `{TRAIN}`" in text and "never there" not in text
    order = [
        text.index(title)
        for title in (
            "## Routing violations",
            "## Kernels of the red cells",
            "#### a cell",
            "## Open",
            "## New, ",
        )
    ]
    assert order == sorted(order)
    assert ReportContext.of(BaselineProblem(Verdict.CORRUPT, "x")).comparability_key is None


def test_energy_and_cycles_have_columns_where_they_are_known() -> None:
    run = b.replace_rows(
        b.small_run(), TRAIN, energy_j_per_token=0.0125, cycles_per_step=2048 * 7000.0
    )
    lines = {line.split("`")[1]: line for line in alone(run).splitlines() if line.startswith("| `")}
    assert "| 12.5 | 7,000 |" in lines["path=v2,workload=train"]
    assert "| - | - |" in lines["path=dense,workload=train"]
    assert "| mJ a token | cycles a token |" in alone(run) and "mJ a token |" not in alone(
        b.small_run()
    )
    assert "- mJ a token: not recorded (`" in alone(run), "the other three"
    assert "mJ a token" not in alone(b.small_run())


def test_a_band_is_the_t_interval_of_the_logarithms() -> None:
    speeds = (100.0, 104.0, 97.0)
    cell = b.planned_cell(Cell("train", 2048, "dense"))
    rows = [b.replicate(cell, n, tok_per_s=speed) for n, speed in enumerate(speeds)]
    low, high = bands({cell.cell_id: rows})[cell.cell_id]
    logs = [math.log(speed) for speed in speeds]
    middle = sum(logs) / 3
    # t of 2 degrees of freedom at 97.5 %, from a table
    half = 4.302653 * math.sqrt(sum((x - middle) ** 2 for x in logs) / 2 / 3)
    assert (low, high) == pytest.approx(
        (math.exp(middle - half), math.exp(middle + half)), rel=1e-6
    )
    assert bands({cell.cell_id: rows[:1]}) == {} and bands({cell.cell_id: []}) == {}


def test_the_noisiest_numbers_have_a_band_and_are_too_noisy() -> None:
    """They had none, and a clean headline."""
    cell = b.planned_cell(Cell("train", 2048, "dense"))
    rows = [b.replicate(cell, n, tok_per_s=speed) for n, speed in enumerate((1.0, 1e9))]
    low, high = bands({cell.cell_id: rows})[cell.cell_id]
    assert 0 < low < 31_622.8 < high < math.inf and high / low > 1e6


def test_the_picture_of_changes_leaves_blind_cells_out(tmp_path: Path) -> None:
    run, judgement = troubled()
    names = [file.name for file in report.render(run, judgement, tmp_path)]
    assert names == ["report.md", "throughput.png", "changes.png", "utilisation.png"]
    noise, blind = noisy(0.2)
    assert (
        "changes.png" not in [file.name for file in report.render(noise, blind, tmp_path)]
        and not (tmp_path / "changes.png").exists()
    )
    assert (
        "no picture, because every compared cell is BLIND" in (tmp_path / "report.md").read_text()
    )
