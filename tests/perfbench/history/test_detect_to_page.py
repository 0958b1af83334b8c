"""From runs to the page: what `detect` reports of a database is what `site` shows, with commits."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from perfbench.commands.app import invoke
from perfbench.errors import Exit
from perfbench.history import writing
from perfbench.history.nouns import MeasuredValue
from perfbench.history.store import History
from tests.perfbench.history.made_runs import made_cell, made_run

STEPPED, DRIFTED, SILENT = (f"path={path},seq_len=512" for path in ("triton", "v2", "dense"))
RUNS, STEP_AT, DRIFT_AT = 100, 70, (30, 80)


def planted(url: Path) -> None:
    """A run a day: one cell loses 6 % at once, one 5 % over 50 days, one nothing; 0.5 % noise."""
    rng = np.random.default_rng(18)
    days = np.arange(RUNS)
    drift = np.clip((days - DRIFT_AT[0]) / (DRIFT_AT[1] - DRIFT_AT[0]), 0, 1)
    levels = {
        STEPPED: 1000 * np.where(days < STEP_AT, 1.0, 0.94),
        DRIFTED: 500 * (1 - 0.05 * drift),
        SILENT: np.full(RUNS, 200.0),
    }
    values = {name: level * np.exp(0.005 * rng.normal(size=RUNS)) for name, level in levels.items()}
    with History.open(url, create=True) as history, history._database.write() as connection:
        for day in range(RUNS):
            cells = [
                made_cell(name, {"tok_per_s": MeasuredValue(float(of_cell[day]), count=3)})
                for name, of_cell in values.items()
            ]
            writing.add(connection, made_run(day, *cells))


def commit_of(day: int) -> str:
    return f"{day:04x}" * 10


def test_a_planted_step_and_drift_are_on_the_page_with_their_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    url, site = str(tmp_path / "h.sqlite"), tmp_path / "site"
    planted(Path(url))
    assert invoke(["detect", "--history", url, "--json"]) == Exit.REGRESSED
    found = json.loads(capsys.readouterr().out)["changes"]
    assert {(one["cell_id"], one["kind"]) for one in found} == {
        (STEPPED, "step"),
        (DRIFTED, "drift"),
    }
    step = next(one for one in found if one["kind"] == "step")
    assert step["run_id"] == f"run-{STEP_AT:03d}" and -6.6 < step["size_pct"] < -5.4

    assert invoke(["site", "--history", url, "--out", str(site)]) == Exit.OK
    overview = (site / "index.html").read_text(encoding="utf-8")
    rows = re.findall(r"<tr\b.*?</tr>", overview, re.DOTALL)
    of_step = [row for row in rows if commit_of(STEP_AT)[:8] in row and "triton" in row]
    assert of_step and commit_of(STEP_AT - 1)[:8] in of_step[0]
    drift = next(one for one in found if one["kind"] == "drift")
    ends = [int(drift[name].removeprefix("run-")) for name in ("before_run_id", "run_id")]
    assert DRIFT_AT[0] - 15 <= ends[0] < ends[1] <= RUNS - 1
    assert any(
        all(commit_of(day)[:8] in row for day in ends) and "drift" in row.lower() for row in rows
    )
    # reported once, and on the page all the same when it is written again
    assert invoke(["detect", "--history", url]) == Exit.OK
