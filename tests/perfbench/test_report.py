"""Reports: what a hurried reader must find, in order; pictures exist only where there is data."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from perfbench import report
from perfbench.errors import Exit, PerfbenchError
from perfbench.gate.judging import judge
from perfbench.records import BaselineProblem
from perfbench.records.cells import Cell
from perfbench.records.rows import LengthProof, Source, StepProof
from perfbench.records.verdict import Verdict
from perfbench.report import plots
from perfbench.report.context import ReportContext
from tests.perfbench import builders as b
from tests.perfbench.report_cases import DENSE, FORWARD, POLICY, TRAIN, alone, troubled, written

PNG = b"\x89PNG\r\n\x1a\n"


def test_the_first_line_is_the_verdict_the_exit_code_and_why() -> None:
    run, judgement = troubled()
    first = written(run, judgement).splitlines()[0]
    assert (
        first.startswith("# 🔴 WRONG_PATH, exit 4: 1 of 60 cells: ")
        and FORWARD in first
        and "sel.reference ran" in first
    )
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
        "The fastest path of NSA at each length",
        "Growth with the length",
        "Expected and measured",
        "Every cell",
        "Pictures",
        "Excluded",
        "Costs",
        "How to do it again",
        "Method",
    ]


def method(text: str) -> str:
    return text[text.index("## Method") :]


def test_the_method_names_the_proofs_that_the_rows_record() -> None:
    """And says where they record none, as those of an older run."""
    older = b.small_run(replicates=2)
    said = method(alone(older))
    assert "the rows of this run record no proof of the whole step" in said
    assert "the rows of this run record no proof at the timed length" in said
    proofs = {
        "step_proof": StepProof(ok=True, tensors={"logits": 0.2}),
        "length_proof": LengthProof(ok=None, absent="the step through a cache is proved"),
    }
    rows = [row.model_copy(update=proofs) for row in older.replicates]
    said = method(alone(older.model_copy(update={"replicates": rows})))
    assert "plain PyTorch" in said and "optimizer's update" in said
    assert "fp64 oracle at the timed length and batch" in said and "keep sums" in said
    assert "the rows of this run record no proof" not in said


def test_every_red_has_its_reason_counters_and_the_command_for_this_one_cell() -> None:
    run, judgement = troubled()
    text = written(run, judgement)
    violation = text[text.index("## Routing violations") : text.index("## Open")]
    assert f"### WRONG_PATH (exit 4): `{FORWARD}`" in violation
    assert (
        "planned: `cmp.sdpa sel.v2 sel.fa2 win.fa2`; engaged: `cmp.sdpa=12 sel.loop=12"
        " sel.reference=12 win.fa2=12`" in violation
    )
    assert f"`perfbench run matrices/h100.yaml --only cell={FORWARD}`" in violation
    red = text[text.index("## Red") : text.index("## Routing")]
    assert red.index("FAILED (exit 6)") < red.index("REGRESSED (exit 3)") and "-10.00 %" in red
    # ln(0.9) on three pairs without noise; Holm over the one cell that was confirmed.
    assert re.search(
        r"\| tok/s \| -10\.00 % \| -10\.0\d % to -9\.9\d % \(alpha 0\.001\) \| \S+ \| \S+ \| 0\.\d"
        r" % \| 3 pairs \|",
        red,
    )
    assert (
        "- against its base, in turns: `perfbench ab 4f1c2d3e4f1c . matrices/h100.yaml --only"
        " cell=fa2=on,path=masked,seq_len=8192" in red
    )
    assert "````text\n```\nboom\n````" in red  # the fence is longer than the one inside


def test_a_cell_that_is_not_true_has_no_number_anywhere() -> None:
    run, judgement = troubled()
    text = written(run, judgement)
    line = next(line for line in text.splitlines() if line.startswith(f"| `{FORWARD}`"))
    assert line.split(" | ")[1] == "**WRONG_PATH**" and line.split(" | ")[2:15] == ["-"] * 12 + [
        "0.22"
    ]
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
    assert cells[6] == "420", "launches of a step"
    assert cells[7] == f"{speed[TRAIN] / speed[DENSE]:.2f}" and by_id[DENSE][7] == "1.00"
    assert cells[3].endswith("% (n 3)") and cells[8:11] == ["8.0", "GPU", "93 %"]
    assert cells[13] == "cmp.sdpa 240, sel.fa2 240, sel.v2 240, win.fa2 240"
    # a tiny ratio is not rounded to 0.00
    assert float(by_id["fa2=on,path=v1,seq_len=512,workload=train"][7]) > 0
    assert by_id["fa2=off,path=reference,seq_len=128,workload=train"][7] == "-"


def test_device_time_host_time_and_launches_are_shown_where_they_are_known() -> None:
    shown = "| device ms a step | host ms a step | launches a step |"
    timed = b.replace_rows(b.small_run(), TRAIN, profile=b.profile(host_time_s=0.00125))
    line = next(
        line for line in alone(timed).splitlines() if line.startswith("| `path=v2,workload=train`")
    )
    assert shown in alone(timed) and "| 20 | 1.25 | 420 |" in line
    assert "host ms a step |" not in alone(b.small_run()), "no row has it"
    on_cpu = alone(b.make_run(b.cpu_cells(), gpu=False))
    assert not any(f"| {name} a step |" in on_cpu for name in ("device ms", "host ms", "launches"))


def test_the_fastest_path_of_each_length_is_at_the_top() -> None:
    text = alone(b.make_run(b.h100_cells()))
    top = text[: text.index("## Every cell")]
    assert re.search(
        r"\| train, 8,192 \| v2, FA-2 on \| [\d,]+ \| [\d,]+ \| 0\.\d\d \| 20 \| 20 \| 1\.00 \|",
        top,
    )
    assert "**Is it right?** | 60 of 60 cells" in top and "NVIDIA H100 80GB HBM3" in top


def test_null_is_no_number_and_never_zero(tmp_path: Path) -> None:
    run = b.make_run(b.cpu_cells(), gpu=False)
    text = report.render(run, judge(run, None, POLICY), tmp_path)[0].read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) == 18 and all("-" not in row for row in rows), "no column of dashes alone"
    assert (
        "GPU utilisation for each cell: no picture, because no NVIDIA GPU: NVML was not asked."
        in text
    )
    run = b.make_run(b.h100_cells())
    run = b.change_rows(
        run, TRAIN, lambda row: row.model_copy(update={"telemetry": b.telemetry(False)})
    )
    line = next(one for one in alone(run).splitlines() if one.startswith(f"| `{TRAIN}` |"))
    assert "| GPU | - |" in line
    assert f"- utilisation: no NVIDIA GPU: NVML was not asked (`{TRAIN}`)" in alone(run)


def test_pictures_are_png_and_named_in_the_report(tmp_path: Path) -> None:
    run = b.make_run(b.h100_cells(), noise=0.02)
    files = report.render(run, judge(run, None, POLICY), tmp_path)
    assert [file.name for file in files] == ["report.md", "throughput.png", "utilisation.png"]
    assert all(
        file.read_bytes().startswith(PNG) and file.stat().st_size > 10_000 for file in files[1:]
    )
    text = files[0].read_text()
    assert "](throughput.png)" in text and "](utilisation.png)" in text
    before = [file.read_bytes() for file in files]
    assert before == [
        file.read_bytes() for file in report.render(run, judge(run, None, POLICY), tmp_path)
    ]


def test_fewer_colours_look_alike(tmp_path: Path) -> None:
    """A thin line keeps its series' colour: no pixel is far from the full rendering."""
    drawn = plots.figure(6.0, 4.0)
    axes = drawn.subplots()
    for number, colour in enumerate([*plots.COLOURS.values(), plots.OTHER_COLOUR, "#000000"]):
        axes.plot([0, 1, 2], [number, number + 1, number], color=colour, marker="o")
        axes.fill_between([0, 1, 2], number, number + 0.5, color=colour, alpha=0.2)
        axes.plot([0, 2], [number, 0], color=colour, linestyle=":", linewidth=0.7)
    plots.save(drawn, tmp_path / "few.png")
    drawn.savefig(tmp_path / "full.png", dpi=plots.DPI)
    with Image.open(tmp_path / "few.png") as few, Image.open(tmp_path / "full.png") as full:
        assert few.mode == "P" and len(few.getcolors() or ()) <= plots.NUM_COLOURS
        difference = np.asarray(few.convert("RGB"), int) - np.asarray(full.convert("RGB"), int)
    assert np.abs(difference).max() < 32
    assert (tmp_path / "few.png").stat().st_size < 0.5 * (tmp_path / "full.png").stat().st_size


def test_no_empty_picture_and_no_stale_one(tmp_path: Path) -> None:
    (tmp_path / "utilisation.png").write_bytes(b"of an earlier rendering")
    run = b.make_run(b.cpu_cells()[:1], gpu=False)
    files = report.render(run, judge(run, None, POLICY), tmp_path)
    assert [file.name for file in files] == ["report.md", "throughput.png"] and not (
        tmp_path / "utilisation.png"
    ).exists()
    nothing = b.with_rows(run, [])
    assert [f.name for f in report.render(nothing, judge(nothing, None, POLICY), tmp_path)] == [
        "report.md"
    ]
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
    run = b.with_manifest(
        b.small_run(),
        source=source,
        environment=environment,
        argv=["perfbench", "run", "a b.yaml"],
        only=["path=v2"],
    )
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
        (
            Source(commit=b.COMMIT, dirty_sha256=None, reason="--source-commit"),
            "commit `4f1c2d3e4f1c`, **given by hand, not proved** |",
        ),
        (
            Source(commit=None, dirty_sha256=None, reason="no git"),
            "commit **unknown, not proved (no git)** |",
        ),
    ],
)
def test_the_first_table_says_whether_the_commit_is_proved(source: Source, shown: str) -> None:
    text = alone(b.with_manifest(b.small_run(), source=source))
    assert shown in next(line for line in text.splitlines() if line.startswith("| **What ran?**"))


def test_an_environment_that_differs_is_reported_once_with_both_values() -> None:
    run = b.small_run()
    elsewhere = b.with_manifest(run, environment=b.environment(driver="580.1"))
    text = written(elsewhere, judge(elsewhere, b.baseline_of(run), POLICY))
    assert text.splitlines()[0].startswith("# 🔴 INCOMPARABLE, exit 8")
    assert (
        "driver: 570.86.10 -\\> 580.1" in text
        and text.count("- **INCOMPARABLE** every cell, 4 of them") == 1
    )
    with_baseline = written(
        elsewhere,
        judge(elsewhere, b.baseline_of(run), POLICY),
        ReportContext.of(b.baseline_of(run)),
    )
    assert (
        "- Not the environment of the baseline (then to now): driver: 570.86.10 -\\> 580.1"
        in with_baseline
    )


def test_a_missing_baseline_is_the_first_line() -> None:
    run = b.small_run()
    text = written(
        run, judge(run, BaselineProblem(Verdict.NO_BASELINE, "no baseline at x.json"), POLICY)
    )
    assert (
        text.splitlines()[0] == "# 🔴 NO_BASELINE, exit 9: no baseline at x.json"
        and "the baseline cannot be used" in text
    )


def test_an_interrupted_run_lists_its_missing_cells_in_one_line() -> None:
    run = b.make_run(b.h100_cells())
    part = b.with_rows(run, run.replicates[:60])
    text = alone(part)
    assert (
        "**MISSING**: 40 cells, listed" in text
        and "- **MISSING** 40 cells: `" in text
        and text.count("###") == 2
    )


def test_time_that_does_not_grow_is_a_note() -> None:
    short, long = (b.planned_cell(Cell("train", s, "dense")) for s in (512, 1024))
    run = b.replace_rows(
        b.make_run([short, long]), long.cell_id, tok_per_s=b.speed_of(short) * 1.99
    )
    text = alone(run)
    assert "## Physics notes" in text and f"(launch bound): {long.cell_id}" in text
    assert "launch bound)" not in alone(b.make_run([short, long]))


def test_a_folder_that_cannot_be_written_exits_2(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PerfbenchError, match="cannot write the report") as caught:
        report.render(b.small_run(), judge(b.small_run(), None, POLICY), tmp_path / "file")
    assert caught.value.exit_code is Exit.USAGE
