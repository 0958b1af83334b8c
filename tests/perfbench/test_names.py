"""What people type and read for a cell and a run: any axes that tell it from the others, in any
order; `latest`; no axis that all cells share; and what a shell completes.

Row of the faults: names are a tax.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from pathlib import Path

import pytest

from perfbench.commands import app, names
from perfbench.errors import PerfbenchError
from perfbench.records import Cell, find_cell, shared_axes, short_ids
from tests.perfbench.test_cli import V2, FakeExecutor, executor, promote, run_folder

__all__ = ["executor"]
CELLS = [
    Cell(workload, seq_len, path, "off" if path == "v2" else "auto", batch, "fp32")
    for workload in ("train", "forward")
    for seq_len in (128, 256)
    for path in ("v2", "dense")
    for batch in (1, 8)
]


def test_any_unique_axes_in_any_order_name_a_cell() -> None:
    """Every subset of the axes of every cell: the one cell that has them, or a refusal."""
    for cell in CELLS:
        parts = [*cell.cell_id.split(","), f"batch={cell.batch}", "l2=warm"]
        for size in range(1, len(parts) + 1):
            for chosen in itertools.combinations(parts, size):
                typed = list(chosen)
                random.Random(size).shuffle(typed)
                wanted = dict(one.split("=") for one in typed)
                same = [
                    one
                    for one in CELLS
                    if all(str(one.value(name)) == value for name, value in wanted.items())
                ]
                try:
                    found = find_cell(",".join(typed), CELLS)
                except ValueError as error:
                    assert len(same) > 1 and f"names {len(same)} cells" in str(error)
                else:
                    assert found in same and (len(same) == 1 or found.batch == 1)


def test_a_shown_name_is_a_name() -> None:
    short = short_ids(CELLS)
    assert shared_axes(CELLS) == "dtype=fp32,fa2=off"
    for cell in CELLS:
        assert "dtype" not in short[cell.cell_id]
        assert find_cell(short[cell.cell_id], CELLS) == cell
        assert find_cell(cell.cell_id, CELLS) == cell
    assert short_ids(CELLS[:1]) == {CELLS[0].cell_id: CELLS[0].cell_id}
    assert shared_axes([]) == "" and short_ids([]) == {}


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("", "no cell ''"),
        ("path", "is not AXIS=VALUE"),
        ("path=v3,seq_len=128", "no cell 'path=v3"),
        ("path=v2,seq_len=128,batch=1", "names 2 cells: .*; add workload="),
    ],
)
def test_what_names_no_cell_says_why(typed: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        find_cell(typed, CELLS)


def test_explain_takes_some_axes_of_the_newest_run(
    executor: FakeExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    promote()
    assert app.invoke(["check", "small.yaml"]) == 0
    capsys.readouterr()
    assert app.invoke(["explain", str(run_folder()), V2]) == 0
    whole = capsys.readouterr().out
    assert app.invoke(["explain", "latest", "seq_len=256,path=v2"]) == 0
    assert capsys.readouterr().out == whole
    assert app.invoke(["explain", "reports/runs/latest", "path=v2,seq_len=256"]) == 0
    assert capsys.readouterr().out == whole
    assert app.invoke(["explain", "latest", "path=v2"]) == 2
    assert "names 2 cells" in (said := capsys.readouterr().err) and "add seq_len=" in said


@pytest.mark.parametrize(
    "option", [["--only", "cell=seq_len=256,path=v2"], ["--only", f"cell={V2}"]]
)
def test_only_takes_a_cell_in_any_order(executor: FakeExecutor, option: list[str]) -> None:
    """The manifest keeps the whole id, so that a later axis changes no selection."""
    assert app.invoke(["run", "small.yaml", *option]) == 0
    assert {job.cell_id for job in executor.jobs} == {V2}
    first = (run_folder() / "run.jsonl").read_text(encoding="utf-8").splitlines()[0]
    assert json.loads(first)["only"] == [f"cell={V2}"]


def test_a_fault_is_planted_in_a_cell_by_some_axes(executor: FakeExecutor) -> None:
    argv = ["run", "small.yaml", "--inject", "slowdown=10%@path=v2,seq_len=256"]
    assert app.invoke(argv) == 0
    assert {job.cell_id for job in executor.jobs if job.injection} == {V2}


def test_plan_takes_some_axes(executor: FakeExecutor, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.invoke(["plan", "small.yaml", "--only", "cell=seq_len=256,path=v2"]) == 0
    assert V2 in (out := capsys.readouterr().out) and "path=dense" not in out


def test_tables_and_headlines_leave_out_what_all_cells_share(
    executor: FakeExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    promote()
    capsys.readouterr()
    executor.speed[V2] = 600.0
    assert app.invoke(["check", "small.yaml"]) == 7
    out = capsys.readouterr().out
    assert out.startswith("v2 256 forward -40.0 % (1,000 -> 600 tok/s)")
    assert "every cell: dtype=fp32,fa2=off,workload=forward" in out
    table = out[out.index("\ncell ") :]
    assert "dtype=" not in table.split("note:")[0]
    text = (run_folder() / "report.md").read_text(encoding="utf-8")
    assert "All of them: `dtype=fp32,fa2=off,workload=forward`." in text
    assert "| `path=v2,seq_len=256` |" in text


def test_latest_is_the_newest_folder_or_refused(tmp_path: Path) -> None:
    for name in ("20260101T000000Z-cpu-a-b", "20260102T000000Z-cpu-a-a", "30000101T000000Z-none"):
        (tmp_path / name).mkdir()
        if "none" not in name:
            (tmp_path / name / "run.jsonl").touch()
    assert names.newest_run(tmp_path / "latest") == tmp_path / "20260102T000000Z-cpu-a-a"
    assert names.newest_run(tmp_path) == tmp_path and names.newest_run(None) is None
    with pytest.raises(PerfbenchError, match="holds no run"):
        names.newest_run(tmp_path / "elsewhere" / "latest")
    (tmp_path / "latest").mkdir()  # a folder of that name is meant
    assert names.newest_run(tmp_path / "latest") == tmp_path / "latest"


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("perfbench explain la", {"latest"}),
        ("perfbench explain latest path=v2", {"path=v2,seq_len=128", "path=v2,seq_len=256"}),
        ("perfbench plan small.yaml --only seq", {"seq_len="}),
        ("perfbench plan small.yaml --only path=", {"path=v2", "path=dense"}),
        ("perfbench run small.yaml --inject oom@path=d", None),
        ("perfbench plan missing.yaml --only path=", set()),
        ("perfbench explain nowhere path", set()),
    ],
)
def test_a_shell_completes(
    executor: FakeExecutor,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    line: str,
    wanted: set[str] | None,
) -> None:
    assert app.invoke(["run", "small.yaml"]) == 0
    capsys.readouterr()
    monkeypatch.setenv("_PERFBENCH_COMPLETE", "complete_zsh")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", line)
    app.invoke([])
    out = capsys.readouterr().out
    found = set(re.findall(r'"([^"]+)"', out))
    if wanted is None:
        wanted = {"oom@path=dense,seq_len=128", "oom@path=dense,seq_len=256"}
    assert found == wanted, out
