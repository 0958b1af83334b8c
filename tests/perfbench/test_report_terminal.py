"""The judgement as JSON and on the terminal, whatever its width."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from perfbench import report
from perfbench.gate.judging import judge
from perfbench.records import BaselineProblem
from perfbench.records.cells import Cell
from perfbench.records.verdict import Verdict
from perfbench.report.tables import half
from tests.perfbench import builders as b
from tests.perfbench.report_cases import POLICY, TRAIN, alone, troubled


def test_json_is_plain_and_complete() -> None:
    judgement = troubled()[1]
    data = json.loads(json.dumps(report.to_json(judgement), allow_nan=False))
    assert (
        data["exit_code"] == 4
        and data["counts"]["WRONG_PATH"] == 1
        and data["policy"]["tolerance_pct"] == 1.0
    )
    assert data["baseline"]["run_id"] == "base-run" and len(data["cells"]) == 60
    wrong = next(cell for cell in data["cells"] if cell["verdict"] == "WRONG_PATH")
    assert (
        wrong["cand_tok_per_s"] is None
        and wrong["exit_code"] == 4
        and wrong["reproduce"].startswith("perfbench run")
    )
    single = report.to_json(
        judge(b.small_run(), BaselineProblem(Verdict.CORRUPT, "broken"), POLICY)
    )
    assert single["baseline"] is None and single["findings"] == [
        {"verdict": "CORRUPT", "reason": "broken"}
    ]
    assert {cell["verdict"] for cell in single["cells"]} == {None}


def test_the_terminal_shows_verdict_reds_and_every_cell() -> None:
    run, judgement = troubled()
    text = report.terminal_table(run, judgement, width=130)
    assert text.startswith("WRONG_PATH, exit 4") and "\x1b" not in text
    assert (
        max(map(len, text.splitlines())) <= 130
        and f"FAILED {'fa2=off,path=v2,seq_len=8192,workload=train'}: oom" in text
    )
    for cell in judgement.cells:
        assert cell.cell_id in text
    assert "\x1b[" in report.terminal_table(run, judgement, colour=True)
    assert "change" not in report.terminal_table(b.small_run(), judge(b.small_run(), None, POLICY))


@pytest.mark.parametrize(
    ("pct", "text"),
    [
        (None, "-"),
        (0.123, "0.12 %"),
        (99.4, "99 %"),
        (99.6, "100 %"),
        (153.2, "153 %"),
        (4321.0, "4,321 %"),
    ],
)
def test_a_wide_interval_is_no_power_of_ten(pct: float | None, text: str) -> None:
    assert half(pct) == text


def test_the_terminal_and_the_report_show_a_wide_interval_in_whole_per_cent() -> None:
    run = b.small_run(replicates=2)
    cell = next(cell for cell in run.manifest.cells if cell.cell_id == TRAIN)
    run = b.change_rows(
        run,
        TRAIN,
        lambda row: b.replicate(cell, row.replicate, tok_per_s=1e5 * (1 + row.replicate)),
    )
    judgement = judge(run, None, POLICY)
    for text in (report.terminal_table(run, judgement, width=130), alone(run)):
        assert "e+0" not in text


def test_the_table_of_300_cells_takes_as_many_calls_a_row_as_that_of_75() -> None:
    """Rich's own Table made 4,000 calls a row; the whole line is made in a tenth of that."""
    one = b.planned_cell(Cell("train", 2048, "v2", "on"))

    def calls_for(cells: int) -> int:
        ids = [f"{one.cell_id},batch={n}" for n in range(cells)]
        named = [one.model_copy(update={"cell_id": cell_id}) for cell_id in ids]
        run = b.make_run(named, replicates=2)
        judgement = judge(run, b.baseline_of(run), POLICY)
        calls = 0

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal calls
            calls += event == "call"

        sys.setprofile(count)
        try:
            report.terminal_table(run, judgement, colour=True)
        finally:
            sys.setprofile(None)
        return calls

    few, many = calls_for(75), calls_for(300)
    assert (many - few) / 225 < 400
    assert many < 4.4 * few


def test_a_terminal_that_is_too_narrow_folds_the_name_and_keeps_the_row() -> None:
    run = b.small_run()
    text = report.terminal_table(run, judge(run, b.baseline_of(run), POLICY), width=40)
    lines = text.splitlines()
    first = next(place for place, line in enumerate(lines) if line.startswith("cell  "))
    assert "verdict" in lines[first] and "SAME" in lines[first + 1]
    folded = "".join(line[:16].strip() for line in lines[first + 1 : first + 3])
    assert folded == "path=v2,workload=train"


def test_a_narrow_terminal_keeps_what_decides() -> None:
    run = b.small_run()
    text = report.terminal_table(run, judge(run, b.baseline_of(run), POLICY), width=80)
    assert (
        max(map(len, text.splitlines())) <= 80
        and text.count("SAME") >= 4
        and "% floor" in text
        and "MDE" in text
    )


def test_the_report_loads_no_torch_and_its_package_nothing_heavy() -> None:
    check = (
        "import sys, perfbench.report; print([m for m in ('torch', 'matplotlib', 'rich', 'jinja2',"
        " 'pandas') if m in sys.modules])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", check], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )
    check = (
        "import sys, perfbench.report.files, perfbench.report.terminal; print([m for m in ('torch',"
        " 'scipy') if m in sys.modules])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", check], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )
