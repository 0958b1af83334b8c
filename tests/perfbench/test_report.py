"""Reports: what a hurried reader must find, in order, in Markdown that renders; pictures exist only where there is data."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from perfbench import compare, report
from perfbench.axes import Cell
from perfbench.gate import BaselineProblem, Judgement, conclude, judge
from perfbench.policy import Alias, GatePolicy, Policies
from perfbench.report import markdown
from perfbench.report.bands import bands
from perfbench.report.beside import Beside
from perfbench.report.markdown import Picture
from perfbench.report.rows import rows_of
from perfbench.report.tables import half
from perfbench.result import Replicate, Run, Source, Status
from perfbench.text import block, cell_code, code, escape, number, plain, ratio
from perfbench.verdict import Exit, PerfbenchError, Verdict
from tests.perfbench import builders as b

POLICY = GatePolicy()
PNG = b"\x89PNG\r\n\x1a\n"
TRAIN = "fa2=on,path=v2,seq_len=2048,workload=train"
FORWARD = "fa2=on,path=v2,seq_len=2048,workload=forward"
DENSE = "path=dense,seq_len=2048,workload=train"
RENDERER = MarkdownIt("commonmark").enable("table")


def written(run: Run, judgement: Judgement, beside: Beside | None = None) -> str:
    """report.md as text, without the second that its pictures take."""
    pictures = [Picture("throughput.png", True, "tok/s against seq_len", ""), Picture("utilisation.png", False, "utilisation", "not drawn")]
    return markdown.text(run, judgement, rows_of(run, judgement), pictures, beside)


def alone(run: Run) -> str:
    return written(run, judge(run, None, POLICY))


def troubled() -> tuple[Run, Judgement]:
    """One of everything: confirmed slower, wrong path, out of memory, blind, new, missing, faster, excluded."""
    whole = run = b.make_run(
        b.h100_cells(), excluded=[{"cell_id": "path=v1,seq_len=8192,workload=train", "reason": "Python | loops:\nhours"}]
    )
    base = b.baseline_of(b.replace_rows(run, TRAIN, host_bound=True))
    cells = {cell.cell_id: cell for cell in run.manifest.cells}
    run = b.scale_rows(run, "fa2=on,path=masked,seq_len=8192,workload=train", 0.9)
    run = b.scale_rows(run, "fa2=on,path=v2,seq_len=8192,workload=forward", 1.2)
    run = b.replace_rows(run, FORWARD, engaged={"cmp.sdpa": 12, "sel.reference": 12, "sel.loop": 12, "win.fa2": 12})
    run = b.replace_rows(b.scale_rows(run, TRAIN, 0.9), TRAIN, host_bound=True)
    lost = cells["fa2=off,path=v2,seq_len=8192,workload=train"]
    run = b.change_rows(
        run, lost.cell_id, lambda row: b.failed(lost, Status.OOM, row.replicate, "out of | memory", stderr_tail="```\nboom")
    )
    gone = "path=dense,seq_len=512,workload=forward"
    planned = [cell for cell in run.manifest.cells if cell.cell_id != gone]
    run = b.with_manifest(b.with_rows(run, [row for row in run.replicates if row.cell_id != gone]), cells=planned)
    base = base.model_copy(update={"cells": {k: v for k, v in base.cells.items() if k != "path=dense,seq_len=512,workload=train"}})
    return run, conclude(judge(run, base, POLICY), whole, run, POLICY)


def test_the_first_line_is_the_verdict_the_exit_code_and_why() -> None:
    run, judgement = troubled()
    first = written(run, judgement).splitlines()[0]
    assert first.startswith("# 🔴 WRONG_PATH, exit 4: 1 of 60 cells: ") and FORWARD in first and "sel.reference ran" in first
    assert "also 1 FAILED, 1 MISSING, 1 REGRESSED, 1 NEW, 1 BLIND" in first


def test_sections_come_in_the_order_of_urgency() -> None:
    run, judgement = troubled()
    headings = re.findall(r"^## (.*)$", written(run, judgement), re.MULTILINE)
    assert headings == [
        "Red",
        "Routing violations",
        "Open: watch, blind, unstable",
        "Environment and sentinels",
        "New, missing and renamed cells",
        "Improvements",
        "The fastest path of each length",
        "Every cell",
        "Pictures",
        "Excluded",
        "How to do it again",
        "Method",
    ]


def test_every_red_has_its_reason_counters_and_the_command_for_this_one_cell() -> None:
    run, judgement = troubled()
    text = written(run, judgement)
    violation = text[text.index("## Routing violations") : text.index("## Open")]
    assert f"### WRONG_PATH (exit 4): `{FORWARD}`" in violation
    assert "planned: `cmp.sdpa sel.v2 sel.fa2 win.fa2`; engaged: `cmp.sdpa=12 sel.loop=12 sel.reference=12 win.fa2=12`" in violation
    assert f"`perfbench run matrices/h100.yaml --only cell={FORWARD}`" in violation
    red = text[text.index("## Red") : text.index("## Routing")]
    assert red.index("FAILED (exit 6)") < red.index("REGRESSED (exit 3)") and "-10.00 %" in red
    # ln(0.9) on three pairs without noise; Holm over the one cell that was confirmed.
    assert re.search(r"\| tok/s \| -10\.00 % \| -10\.0\d % to -9\.9\d % \(alpha 0\.001\) \| \S+ \| \S+ \| 0\.\d % \| 3 pairs \|", red)
    assert "- beside its base: `perfbench ab 4f1c2d3e4f1c . matrices/h100.yaml --only cell=fa2=on,path=masked,seq_len=8192" in red
    assert "````text\n```\nboom\n````" in red  # the fence is longer than the one inside


def test_a_cell_that_is_not_true_has_no_number_anywhere() -> None:
    run, judgement = troubled()
    text = written(run, judgement)
    line = next(line for line in text.splitlines() if line.startswith(f"| `{FORWARD}`"))
    assert line.split(" | ")[1] == "**WRONG_PATH**" and line.split(" | ")[2:14] == ["-"] * 11 + ["0.22"]
    assert f"every number: not published: WRONG_PATH (`{FORWARD}`)" in text


def test_the_matrix_shows_every_cell_once_with_its_ratio_to_dense() -> None:
    run = b.make_run(b.h100_cells())
    text = alone(run)
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) == len({row.split(" | ")[0] for row in rows}) == 60
    by_id = {row.split("`")[1]: row.strip("| ").split(" | ") for row in rows}
    speed = {cell.cell_id: b.speed_of(cell) for cell in run.manifest.cells}
    cells = by_id[TRAIN]
    assert cells[1] == "MEASURED" and cells[2] == f"{speed[TRAIN]:,.0f}"
    assert cells[4] == f"{1e3 * 2048 / speed[TRAIN]:.1f}" and cells[5] == "20"
    assert cells[6] == f"{speed[TRAIN] / speed[DENSE]:.2f}" and by_id[DENSE][6] == "1.00"
    assert cells[3].endswith("% (n 3)") and cells[7:10] == ["8.0", "GPU", "93 %"]
    assert cells[12] == "cmp.sdpa 240, sel.fa2 240, sel.v2 240, win.fa2 240"
    assert float(by_id["fa2=on,path=v1,seq_len=512,workload=train"][6]) > 0  # a tiny ratio is not rounded to 0.00
    assert by_id["fa2=off,path=reference,seq_len=128,workload=train"][6] == "-"


def test_the_fastest_path_of_each_length_is_at_the_top() -> None:
    text = alone(b.make_run(b.h100_cells()))
    top = text[: text.index("## Every cell")]
    assert re.search(r"\| train, 8,192 \| v2, FA-2 on \| [\d,]+ \| [\d,]+ \| 0\.\d\d \| 20 \| 20 \| 1\.00 \|", top)
    assert "**Is it right?** | 60 of 60 cells" in top and "NVIDIA H100 80GB HBM3" in top


def test_null_is_a_dash_with_its_reason_and_never_zero(tmp_path: Path) -> None:
    run = b.make_run(b.cpu_cells(), gpu=False)
    text = report.render(run, judge(run, None, POLICY), tmp_path)[0].read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) == 18 and all(row[5] == "-" and row[7:10] == ["-"] * 3 for row in rows)
    assert "- utilisation: no NVIDIA GPU: NVML was not asked (every cell, 18 of them)" in text
    assert "- % of floor: no floor" in text and "- bound: a CPU has no device" in text
    assert "GPU utilisation for each cell: no picture, because no NVIDIA GPU: NVML was not asked." in text


def test_pictures_are_png_and_named_in_the_report(tmp_path: Path) -> None:
    run = b.make_run(b.h100_cells(), noise=0.02)
    files = report.render(run, judge(run, None, POLICY), tmp_path)
    assert [file.name for file in files] == ["report.md", "throughput.png", "utilisation.png"]
    assert all(file.read_bytes().startswith(PNG) and file.stat().st_size > 10_000 for file in files[1:])
    text = files[0].read_text()
    assert "](throughput.png)" in text and "](utilisation.png)" in text
    before = [file.read_bytes() for file in files]
    assert before == [file.read_bytes() for file in report.render(run, judge(run, None, POLICY), tmp_path)]


def test_no_empty_picture_and_no_stale_one(tmp_path: Path) -> None:
    (tmp_path / "utilisation.png").write_bytes(b"of an earlier rendering")
    run = b.make_run(b.cpu_cells()[:1], gpu=False)
    files = report.render(run, judge(run, None, POLICY), tmp_path)
    assert [file.name for file in files] == ["report.md", "throughput.png"] and not (tmp_path / "utilisation.png").exists()
    nothing = b.with_rows(run, [])
    assert [f.name for f in report.render(nothing, judge(nothing, None, POLICY), tmp_path)] == ["report.md"]
    assert "no picture, because no cell has a speed" in (tmp_path / "report.md").read_text()


def test_injections_are_loud_at_the_top() -> None:
    run = b.small_run(injections=[f"slowdown=10%@{TRAIN}"])
    lines = alone(run).splitlines()
    assert lines[2] == "> [!CAUTION]" and "INJECTED FAULTS: slowdown=10%@" in lines[3]
    assert report.terminal_table(run, judge(run, None, POLICY)).startswith("INJECTED FAULTS")
    assert "INJECTED" not in alone(b.small_run())


def test_the_reproduction_header_is_complete() -> None:
    source = Source(commit=None, dirty_sha256="e" * 64, reason="git is missing")
    environment = b.environment(nsa_settings={"NSA_USE_FA2": "1"})
    run = b.with_manifest(b.small_run(), source=source, environment=environment, argv=["perfbench", "run", "a b.yaml"], only=["path=v2"])
    text = alone(b.resumed(run, environment=environment))
    tail = text[text.index("## How to do it again") :]
    for fact in (
        "perfbench run 'a b.yaml'",
        "git is missing",
        "yes, sha256 `eeeeeeeeeeeeeeee`",
        run.manifest.matrix_sha256,
        "seed 7",
        "path=v2",
        "570.86.10",
        "13.0",
        "2.13.0, 3.7.1, 3.12.3",
        "torch.varlen 2.13.0",
        "NSA_USE_FA2=1",
        "clocks not locked",
        "| resumed | 2026-01-02T03:04:05Z",
        "| injections | none |",
    ):
        assert fact in tail, fact
    assert "**with uncommitted changes**" in text


@pytest.mark.parametrize(
    "source, shown",
    [
        (Source(commit=b.COMMIT, dirty_sha256=None), "commit `4f1c2d3e4f1c` |"),
        (Source(commit=b.COMMIT, dirty_sha256=None, reason="--source-commit"), "commit `4f1c2d3e4f1c`, **given by hand, not proved** |"),
        (Source(commit=None, dirty_sha256=None, reason="no git"), "commit **unknown, not proved (no git)** |"),
    ],
)
def test_the_first_table_says_whether_the_commit_is_proved(source: Source, shown: str) -> None:
    text = alone(b.with_manifest(b.small_run(), source=source))
    assert shown in next(line for line in text.splitlines() if line.startswith("| **What ran?**"))


def test_an_environment_that_differs_is_told_once_with_both_values() -> None:
    run = b.small_run()
    elsewhere = b.with_manifest(run, environment=b.environment(driver="580.1"))
    text = written(elsewhere, judge(elsewhere, b.baseline_of(run), POLICY))
    assert text.splitlines()[0].startswith("# 🔴 INCOMPARABLE, exit 8")
    assert "driver: 570.86.10 -\\> 580.1" in text and text.count("- **INCOMPARABLE** every cell, 4 of them") == 1
    with_baseline = written(elsewhere, judge(elsewhere, b.baseline_of(run), POLICY), Beside.of(b.baseline_of(run)))
    assert "- Not the environment of the baseline (then to now): driver: 570.86.10 -\\> 580.1" in with_baseline


def test_a_missing_baseline_is_the_first_line() -> None:
    run = b.small_run()
    text = written(run, judge(run, BaselineProblem(Verdict.NO_BASELINE, "no baseline at x.json"), POLICY))
    assert text.splitlines()[0] == "# 🔴 NO_BASELINE, exit 9: no baseline at x.json" and "the baseline cannot be used" in text


def test_an_interrupted_run_lists_its_missing_cells_in_one_line() -> None:
    run = b.make_run(b.h100_cells())
    part = b.with_rows(run, run.replicates[:60])
    text = alone(part)
    assert "**MISSING**: 40 cells, listed" in text and "- **MISSING** 40 cells: `" in text and text.count("###") == 2


def test_time_that_does_not_grow_is_a_note() -> None:
    short, long = (b.planned_cell(Cell("train", s, "dense")) for s in (512, 1024))
    run = b.replace_rows(b.make_run([short, long]), long.cell_id, tok_per_s=b.speed_of(short) * 1.99)
    text = alone(run)
    assert "## Physics notes" in text and f"(launch bound): {long.cell_id}" in text
    assert "launch bound)" not in alone(b.make_run([short, long]))


def test_a_folder_that_cannot_be_written_exits_2(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PerfbenchError, match="cannot write the report") as caught:
        report.render(b.small_run(), judge(b.small_run(), None, POLICY), tmp_path / "file")
    assert caught.value.exit_code is Exit.USAGE


# --- open cells, machine, two sides ---------------------------------------------------------------------------------


def noisy(spread: float, factor: float = 1.0) -> tuple[Run, Judgement]:
    """Four GPU-bound cells whose three processes differ by ``spread``; the candidate is ``factor`` times as fast."""
    run = b.small_run()
    cells = run.manifest.cells

    def at(speed: float) -> Run:
        rows = [b.replicate(one, n, tok_per_s=b.speed_of(one) * speed * (1 + spread * (n - 1))) for one in cells for n in range(3)]
        return b.with_rows(run, rows)

    here = at(factor)
    return here, judge(here, b.baseline_of(at(1.0)), POLICY)


def section(text: str, title: str) -> str:
    return text.split(f"## {title}\n")[1].split("\n## ")[0]


def test_an_open_cell_says_what_would_settle_it_and_what_it_could_have_seen() -> None:
    run, judgement = noisy(0.02, 0.96)
    assert judgement.counts == {"WATCH": 4} and judgement.to_confirm
    watch = section(written(run, judgement), "Open: watch, blind, unstable")
    assert "### WATCH: 4 cells" in watch and "`perfbench check` does it by itself" in watch and watch.count(" tok/s | -4.00 % | -") == 4
    assert "perfbench ab 4f1c2d3e4f1c . matrices/h100.yaml --only cell=ID --blocks N" in watch
    row = next(line for line in watch.splitlines() if line.startswith(f"| `{TRAIN}`")).strip("| ").split(" | ")
    cell = next(one for one in judgement.cells if one.cell_id == TRAIN)
    assert cell.mde_pct is not None and row[4] == f"{cell.mde_pct:.1f} %"
    # A paired difference has sqrt(2) times the sd of a process: 2.83 %, and 3 % is known to need 34 pairs.
    assert 31 <= int(row[5]) <= 34
    noise, blind = noisy(0.2)
    assert blind.counts == {"BLIND": 4}
    text = written(noise, blind)
    assert "### BLIND: 4 cells" in text and text.count("| over 400 |") == 4 and "an override with a larger min_effect than 3 %" in text


def test_host_bound_cells_are_folded_and_told_apart_from_noise() -> None:
    run = b.make_run(b.h100_cells())
    run = b.with_rows(run, [row.model_copy(update={"host_bound": True}) for row in run.replicates])
    judgement = judge(run, b.baseline_of(run), POLICY)
    text = written(run, judgement)
    assert "### BLIND: 60 cells" in text and "because wall time follows the CPU" in text and "measure: {profile: every}" in text
    assert "<summary>The 60 cells with their numbers</summary>" in text and text.count("<details>") == text.count("</details>") == 2
    assert "**the host in 60**" in text and "more cells: perfbench explain RUN CELL tells each" in text
    told = [line.count("`") // 2 for line in text.splitlines() if line.startswith("- `") and "host bound: wall" in line]
    assert len(told) == 5 and f"- and {60 - sum(told)} more cells: " in text


def test_sentinels_are_shown_by_block_against_the_baseline_and_its_band() -> None:
    then = b.watched(b.small_run(), {"gemm": [700e12, 704e12], "copy": [2.8e12, 2.8e12]})
    now = b.watched(b.small_run(), {"gemm": [660e12, 660e12], "copy": [2.81e12, 2.82e12]})
    base = b.baseline_of(then)
    judgement = judge(now, base, POLICY)
    assert judgement.exit_code is Exit.ENVIRONMENT
    part = section(written(now, judgement, Beside.of(base)), "Environment and sentinels")
    assert "| sentinel | unit | block 0 | block 1 | median | the baseline | change | band | in band |" in part
    assert "| gemm | TFLOP/s | 660 | 660 | 660 | 702 | -5.98 % | ± 3 % | **no** |" in part  # 660 / 702 = 0.94017
    assert "| copy | GB/s | 2,810 | 2,820 | 2,815 | 2,800 | +0.54 % | ± 3 % | yes |" in part
    assert "method are those of the baseline." in part and "SM clock 1,980 MHz" in part and "none throttled" in part
    many = b.watched(b.small_run(), {"gemm": [700e12 + n * 1e12 for n in range(12)]})
    assert "| gemm | TFLOP/s | 12 | 700 | 711 | 705.5 |" in alone(many)
    assert "No sentinel ran" in alone(b.small_run())


def test_a_sentinel_that_failed_or_throttled_has_no_rate() -> None:
    run = b.with_manifest(b.small_run(), sentinels=["gemm", "copy"])
    lines = [b.sentinel("gemm", 0, telemetry=b.telemetry(throttled=True)), b.sentinel("copy", 0, None, status=Status.OOM, samples_s=[])]
    part = section(alone(run.model_copy(update={"sentinels": lines})), "Environment and sentinels")
    assert "| gemm | TFLOP/s | 700 (throttled) | - | - | - | ± 3 % | - |" in part and "| copy | GB/s | oom | - |" in part


def test_renamed_cells_and_kernel_tables_have_their_place() -> None:
    run, judgement = troubled()
    base = b.baseline_of(run)
    moved = base.model_copy(update={"cells": {("old|name" if k == TRAIN else k): v for k, v in base.cells.items()}})
    aliases = {"old|name": Alias(TRAIN, "a", "b"), "never there": Alias("nor there", "a", "b")}
    beside = Beside.of(moved, Policies(POLICY, aliases=aliases), traces="#### a cell\n\n| kernel | ms |\n| --- | --- |\n")
    text = written(run, judgement, beside)
    assert f"- renamed `old|name` to `{TRAIN}`" in text and "never there" not in text
    order = [text.index(title) for title in ("## Routing violations", "## Kernels of the red cells", "#### a cell", "## Open", "## New, ")]
    assert order == sorted(order)
    assert Beside.of(BaselineProblem(Verdict.CORRUPT, "x")).ground is None


def _slower(run: Run, row: Replicate) -> Replicate:
    cell = next(one for one in run.manifest.cells if one.cell_id == row.cell_id)
    return b.replicate(cell, row.replicate, tok_per_s=0.9 * b.speed_of(cell))


def test_two_sides_are_called_what_the_user_called_them() -> None:
    base = b.with_manifest(b.small_run(), run_id="x-a", source=Source(commit="a" * 40, dirty_sha256=None))
    run = b.with_manifest(b.small_run(), run_id="x-b", argv=["perfbench", "ab", "v1.2", "my branch", "matrices/h100.yaml", "--seed", "7"])
    judgement = compare.judge(base, b.scale_rows(run, TRAIN, 0.9), POLICY, paired=True)
    text = written(run, judgement, Beside.of(base_run=base))
    assert "candidate `my branch` against base `v1.2`, commit `aaaaaaaaaaaa`, run `x-a`" in text and "those of the base." in text
    assert f"- beside its base: `perfbench ab aaaaaaaaaaaa 4f1c2d3e4f1c matrices/h100.yaml --only cell={TRAIN}`" in text  # branches move
    assert "`perfbench ab aaaaaaaaaaaa 4f1c2d3e4f1c matrices/h100.yaml --seed 7`, one cell" in text
    four = compare.judge(base, b.with_rows(run, [_slower(run, row) for row in run.replicates]), POLICY, paired=True)
    assert four.counts == {"REGRESSED": 4}
    red = section(written(run, four), "Red")
    assert (
        red.index("| cell | verdict | change | after Holm | MDE |") < red.index("### REGRESSED")
        and red.count("| REGRESSED | -10.00 % |") == 4
    )
    assert "after Holm | MDE |\n| --- | --- |" not in section(text, "Red")  # one red needs no overview
    two_files = written(b.small_run(), compare.judge(base, b.small_run(), POLICY, paired=False), Beside.of(base_run=base))
    assert "candidate `4f1c2d3e4f1c` against base `aaaaaaaaaaaa`" in two_files


def test_the_commands_of_a_pair_name_its_commits_and_its_faults() -> None:
    """`ab HEAD HEAD` and a planted slowdown: another HEAD without the fault would measure something else."""
    fault = f"slowdown=10%@{TRAIN}"
    argv = ["perfbench", "ab", "HEAD", ".", "matrices/h100.yaml", "--inject", fault, "--seed", "5"]
    base = b.with_manifest(b.small_run(), run_id="x-a", source=Source(commit="a" * 40, dirty_sha256=None))
    run = b.with_manifest(b.scale_rows(b.small_run(), TRAIN, 0.9), run_id="x-b", argv=argv, injections=[fault], seed=5)
    text = written(run, compare.judge(base, run, POLICY, paired=True), Beside.of(base_run=base, paired=True))
    assert f"`perfbench ab aaaaaaaaaaaa 4f1c2d3e4f1c matrices/h100.yaml --only cell={TRAIN} --inject {fault}`" in text
    assert f"`perfbench ab aaaaaaaaaaaa 4f1c2d3e4f1c matrices/h100.yaml --inject {fault} --seed 5`, one cell" in text
    dirty = b.with_manifest(run, source=Source(commit="b" * 40, dirty_sha256="5f" * 32))
    text = written(dirty, compare.judge(base, dirty, POLICY, paired=True), Beside.of(base_run=base, paired=True))
    assert "`perfbench ab aaaaaaaaaaaa . matrices/h100.yaml --inject" in text  # uncommitted changes are in no commit


def test_pairs_need_no_sentinel_and_two_nights_do() -> None:
    base = b.small_run()
    judgement = compare.judge(base, base, POLICY, paired=True)
    paired, apart = (written(base, judgement, Beside.of(base_run=base, paired=paired)) for paired in (True, False))
    assert "both sides share the night" in paired and "is not told from slower code" not in paired
    assert "both sides share the night" not in apart and "is not told from slower code" in apart


def test_a_pair_that_was_cut_short_says_so_at_the_top_and_how_to_go_on() -> None:
    whole = b.small_run(replicates=8, noise=0.05)
    run = b.with_rows(whole, [row for row in whole.replicates if row.replicate < 4])
    base = b.with_rows(run, [_slower(run, row) if row.replicate % 2 else row for row in run.replicates])
    judgement = compare.judge(base, run, POLICY, paired=True, go_on="perfbench ab A B M --resume F")
    text = written(run, judgement, Beside.of(base_run=base, paired=True))
    assert judgement.counts == {"WATCH": 4} and "cut short: 4 of 8 planned pairs" in text.splitlines()[0]
    assert "What would settle it: The other pairs of the plan (4 of 8 planned pairs were measured)" in text
    assert "perfbench ab A B M --resume F" in text


def test_a_run_that_is_its_own_baseline_is_told() -> None:
    run = b.small_run()
    itself = b.baseline_of(run, run_id=run.manifest.run_id)
    assert "it is compared with itself" in written(run, judge(run, itself, POLICY))
    assert "with itself" not in written(run, judge(run, b.baseline_of(run), POLICY))


def test_energy_and_cycles_have_columns_where_they_are_known() -> None:
    run = b.replace_rows(b.small_run(), TRAIN, energy_j_per_token=0.0125, cycles_per_step=2048 * 7000.0)
    lines = {line.split("`")[1]: line for line in alone(run).splitlines() if line.startswith("| `")}
    assert "| 12.5 | 7,000 |" in lines[TRAIN] and "| - | - |" in lines[DENSE]
    assert "| mJ a token | cycles a token |" in alone(run) and "mJ a token |" not in alone(b.small_run())
    assert "- mJ a token: not recorded (every cell, 4 of them)" in alone(b.small_run())


def test_a_band_is_the_t_interval_of_the_logarithms() -> None:
    speeds = (100.0, 104.0, 97.0)
    cell = b.planned_cell(Cell("train", 2048, "dense"))
    rows = [b.replicate(cell, n, tok_per_s=speed) for n, speed in enumerate(speeds)]
    low, high = bands({cell.cell_id: rows})[cell.cell_id]
    logs = [math.log(speed) for speed in speeds]
    middle = sum(logs) / 3
    half = 4.302653 * math.sqrt(sum((x - middle) ** 2 for x in logs) / 2 / 3)  # t of 2 degrees of freedom at 97.5 %, from a table
    assert (low, high) == pytest.approx((math.exp(middle - half), math.exp(middle + half)), rel=1e-6)
    assert bands({cell.cell_id: rows[:1]}) == {} and bands({cell.cell_id: []}) == {}


def test_the_picture_of_changes_leaves_blind_cells_out(tmp_path: Path) -> None:
    run, judgement = troubled()
    names = [file.name for file in report.render(run, judgement, tmp_path)]
    assert names == ["report.md", "throughput.png", "changes.png", "utilisation.png"]
    noise, blind = noisy(0.2)
    assert "changes.png" not in [file.name for file in report.render(noise, blind, tmp_path)] and not (tmp_path / "changes.png").exists()
    assert "no picture, because every compared cell is BLIND" in (tmp_path / "report.md").read_text()


# --- text that cannot break Markdown ----------------------------------------------------------------------------------

NASTY = "a|b\nc\r\x1b[31m `x` ``y`` <script> *b* _i_ [l](u) # \\ $m$ ü 測 \u2028 \ud800"


def test_nasty_values_keep_the_tables_whole() -> None:
    run = b.small_run()
    cell = run.manifest.cells[0]
    run = b.change_rows(run, cell.cell_id, lambda row: b.failed(cell, Status.CRASH, row.replicate, NASTY.replace("\ud800", "")))
    environment = b.environment(device_name=NASTY.replace("\ud800", ""), nsa_settings={"NSA_X": "a|b"})
    run = b.with_manifest(run, environment=environment, excluded=[{"cell_id": "a|`b", "reason": "x|\ny"}], matrix_path="a|b `c`.yaml")
    text = alone(run)
    html = RENDERER.render(text)
    assert "<script>" not in html and "\x1b" not in text
    for table in re.findall(r"<table>.*?</table>", html, re.DOTALL):
        columns = table.count("<th>") + table.count("<th ")
        assert {row.count("<td") for row in table.split("<tr>")[2:]} <= {columns}
    assert html.count("<tr>") == sum(line.startswith("|") for line in text.splitlines()) - html.count("<table>")


@example("_emphasis_ and __strong__ and *a* ~~b~~ but_not_this")
@given(st.text(st.characters(), max_size=40))
def test_escaped_prose_renders_as_itself(text: str) -> None:
    html = RENDERER.render(f"x{escape(text)}x")
    assert html.count("<") == 2 and "\n" not in html.strip()  # one paragraph, no markup
    plain(text).encode("utf-8")


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_a_code_span_in_a_table_stays_one_cell(text: str) -> None:
    html = RENDERER.render(f"| a | b |\n| --- | --- |\n| {cell_code(text)} | z |\n")
    assert html.count("<td>") == 2 and "<td>z</td>" in html
    assert RENDERER.render(code(text)).count("<code>") == (1 if plain(text) else 0)


@given(st.text(st.characters(), max_size=60))
def test_a_block_cannot_be_left(text: str) -> None:
    html = RENDERER.render(f"{block(text)}\n\nafter\n")
    assert html.count("<pre>") == 1 and html.rstrip().endswith("<p>after</p>")


@pytest.mark.parametrize(
    "value, text", [(None, "-"), (0.0123, "0.0123"), (9.876, "9.88"), (99.96, "100"), (123456.7, "123,457"), (1e9, "1,000,000,000")]
)
def test_numbers(value: float | None, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize("value, text", [(None, "-"), (0.0057, "0.0057"), (0.5, "0.50"), (1.0, "1.00"), (12.3, "12.30")])
def test_ratios(value: float | None, text: str) -> None:
    assert ratio(value) == text


# --- json and terminal ------------------------------------------------------------------------------------------------


def test_json_is_plain_and_complete() -> None:
    judgement = troubled()[1]
    data = json.loads(json.dumps(report.to_json(judgement), allow_nan=False))
    assert data["exit_code"] == 4 and data["counts"]["WRONG_PATH"] == 1 and data["policy"]["tolerance_pct"] == 1.0
    assert data["baseline"]["run_id"] == "base-run" and len(data["cells"]) == 60
    wrong = next(cell for cell in data["cells"] if cell["verdict"] == "WRONG_PATH")
    assert wrong["cand_tok_per_s"] is None and wrong["exit_code"] == 4 and wrong["reproduce"].startswith("perfbench run")
    single = report.to_json(judge(b.small_run(), BaselineProblem(Verdict.CORRUPT, "broken"), POLICY))
    assert single["baseline"] is None and single["findings"] == [{"verdict": "CORRUPT", "reason": "broken"}]
    assert {cell["verdict"] for cell in single["cells"]} == {None}


def test_the_terminal_shows_verdict_reds_and_every_cell() -> None:
    run, judgement = troubled()
    text = report.terminal_table(run, judgement, width=130)
    assert text.startswith("WRONG_PATH, exit 4") and "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 130 and f"FAILED {'fa2=off,path=v2,seq_len=8192,workload=train'}: oom" in text
    for cell in judgement.cells:
        assert cell.cell_id in text
    assert "\x1b[" in report.terminal_table(run, judgement, colour=True)
    assert "change" not in report.terminal_table(b.small_run(), judge(b.small_run(), None, POLICY))


@pytest.mark.parametrize(
    ("pct", "text"), [(None, "-"), (0.123, "0.12 %"), (99.4, "99 %"), (99.6, "100 %"), (153.2, "153 %"), (4321.0, "4,321 %")]
)
def test_a_wide_interval_is_no_power_of_ten(pct: float | None, text: str) -> None:
    assert half(pct) == text


def test_the_terminal_and_the_report_show_a_wide_interval_in_whole_per_cent() -> None:
    run = b.small_run(replicates=2)
    cell = next(cell for cell in run.manifest.cells if cell.cell_id == TRAIN)
    run = b.change_rows(run, TRAIN, lambda row: b.replicate(cell, row.replicate, tok_per_s=1e5 * (1 + row.replicate)))
    judgement = judge(run, None, POLICY)
    for text in (report.terminal_table(run, judgement, width=130), alone(run)):
        assert "e+0" not in text


def test_a_narrow_terminal_keeps_what_decides() -> None:
    run = b.small_run()
    text = report.terminal_table(run, judge(run, b.baseline_of(run), POLICY), width=80)
    assert max(map(len, text.splitlines())) <= 80 and text.count("SAME") >= 4 and "% floor" in text and "MDE" in text


def test_the_report_loads_no_torch_and_its_package_nothing_heavy() -> None:
    check = "import sys, perfbench.report; print([m for m in ('torch', 'matplotlib', 'rich', 'jinja2', 'pandas') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    check = "import sys, perfbench.report.files, perfbench.report.terminal; print([m for m in ('torch', 'scipy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True).stdout.strip() == "[]"
