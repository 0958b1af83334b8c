"""A column of dashes is left out with the lines that explain it; what all cells share is said once.

Row of the faults: pictures and tables.
"""

from __future__ import annotations

import re

import pytest

from perfbench import report
from perfbench.gate.judgement import Judgement
from perfbench.gate.judging import judge
from perfbench.matrix.policy import GatePolicy
from perfbench.records.rows import Run, Status
from perfbench.report import tables
from perfbench.report.rows import rows_of
from tests.perfbench import builders as b
from tests.perfbench.report_cases import alone, section, written

POLICY = GatePolicy()
TRAIN = "fa2=on,path=v2,seq_len=2048,workload=train"


def of_tables(text: str) -> list[tuple[list[str], list[list[str]]]]:
    """(header, lines) of every Markdown table with a header."""
    found, lines = [], text.splitlines()
    for place, line in enumerate(lines):
        if re.fullmatch(r"\|( -+:? \|)+", line) and (head := _cells(lines[place - 1])) != ["", ""]:
            rows = []
            for below in lines[place + 1 :]:
                if not below.startswith("|"):
                    break
                rows.append(_cells(below))
            found.append((head, rows))
    return found


def _cells(line: str) -> list[str]:
    return [one.strip() for one in re.split(r"(?<!\\)\|", line)[1:-1]]


@pytest.mark.parametrize("gpu", [False, True])
def test_no_table_has_a_column_of_dashes(gpu: bool) -> None:
    """On a CPU: bound, utilisation, memory and what is of a device; on both, a run without a
    baseline has no change of its sentinels.
    """
    run = b.make_run(b.h100_cells() if gpu else b.cpu_cells(), gpu=gpu)
    text = alone(run)
    assert len(of_tables(text)) >= 3
    for head, lines in of_tables(text):
        for name, column in zip(head, zip(*lines, strict=True), strict=True):
            assert set(column) != {"-"} or name == "sign", (name, head)
    explained = {line.split(":")[0][2:] for line in text.splitlines() if line.startswith("- ")}
    shown = {name for head, _ in of_tables(text) for name in head}
    assert not explained & {"bound", "utilisation", "memory", "mJ a token"} - shown


def test_a_terminal_has_no_column_of_dashes_and_no_line_for_one() -> None:
    run = b.make_run(b.cpu_cells(), gpu=False)
    for width in (60, 100, 200):
        shown = report.terminal_table(run, judge(run, None, POLICY), width=width)
        head = next(line for line in shown.splitlines() if line.startswith("cell "))
        assert not {"util", "dev", "bound", "floor"} & set(head.split()), head
        assert " -: " not in shown


def test_one_value_brings_the_column_and_its_reasons_back() -> None:
    """The other 59 dashes are then explained."""
    run = b.make_run(b.h100_cells())
    lost = b.change_rows(
        run,
        TRAIN,
        lambda row: row.model_copy(update={"telemetry": b.telemetry(False)}),
    )
    text = alone(lost)
    assert "| utilisation |" in text
    assert f"- utilisation: no NVIDIA GPU: NVML was not asked (`{TRAIN}`)" in text


def test_a_run_without_any_number_keeps_why() -> None:
    run = b.small_run()
    cells = {cell.cell_id: cell for cell in run.manifest.cells}
    lost = [b.failed(cells[row.cell_id], Status.OOM, row.replicate) for row in run.replicates]
    run = b.with_rows(run, lost)
    judgement = judge(run, None, POLICY)
    text = written(run, judgement)
    assert "- every number: no speed: FAILED (every cell, 4 of them)" in text
    assert "| tok/s |" not in section(text, "Every cell")
    assert "every number -: no speed: FAILED (4 cells)" in report.terminal_table(run, judgement)


def test_what_all_cells_share_is_said_once_and_in_no_label() -> None:
    """dtype, FA-2 and a workload that does not vary."""
    cells = [one for one in b.cpu_cells() if one.axes.workload == "train"]
    text = alone(b.make_run(cells, gpu=False))
    assert text.count("All of them: `dtype=fp32,fa2=off,workload=train`.") == 1
    head, lines = tables.fastest(rows_of(*_judged(b.make_run(cells, gpu=False))))
    assert head[:2] == ["workload and length", "path"]
    assert [line[:2] for line in lines] == [["128", "masked"], ["256", "masked"], ["512", "masked"]]
    both = b.make_run(b.h100_cells())
    labels = [line[:2] for line in tables.fastest(rows_of(*_judged(both)))[1]]
    assert ["train, 8,192", "v2, FA-2 on"] in labels


def test_an_open_cell_alone_keeps_its_name_and_verdict() -> None:
    head, lines = tables.without_empty(["a", "b", "c"], [["-", "-", "1"], ["-", "-", "-"]], left=1)
    assert head == ["a", "c"] and lines == [["-", "1"], ["-", "-"]]
    assert tables.without_empty(["a", "b"], [], left=1) == (["a"], [])


def _judged(run: Run) -> tuple[Run, Judgement]:
    return run, judge(run, None, POLICY)
