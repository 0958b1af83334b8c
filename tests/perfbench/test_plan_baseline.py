"""`perfbench plan --baseline`: what changed is known before a GPU is touched."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import nsa.routing
from nsa.routing import Capability, Problem, Request, Route
from perfbench.commands import app
from perfbench.records import load_baseline, write_baseline
from perfbench.records.baseline_file import Baseline

ROOT = Path(__file__).parents[2]
MATRIX = ROOT / "matrices" / "nightly-gate-h200.yaml"
BASELINE = ROOT / "reports" / "baselines" / "h200" / "nightly-gate-h200.json"
AUTO = "batch=4,cuda_graph=on,path=auto,seq_len=8192,workload=train"
Texts = pytest.CaptureFixture[str]


def planned(*argv: object) -> int:
    return app.invoke(["plan", *map(str, argv)])


def edited(folder: Path, change: Callable[[Baseline], dict[str, object]]) -> Path:
    """The committed baseline with ``change``, written as `promote` would."""
    found = load_baseline(BASELINE)
    write_baseline(folder / "b.json", found.model_copy(update=change(found)))
    return folder / "b.json"


def with_cell(folder: Path, **changes: object) -> Path:
    def change(found: Baseline) -> dict[str, object]:
        cell = found.cells[AUTO].model_copy(update=changes)
        return {"cells": {**found.cells, AUTO: cell}}

    return edited(folder, change)


def test_the_plan_of_today_is_that_of_the_baseline(capsys: Texts) -> None:
    """Without a GPU, whatever torch and Triton are installed here."""
    assert planned(MATRIX, "--baseline", BASELINE) == 0
    said = capsys.readouterr().out
    assert "PLANNED, exit 0: 9 of 9 cells as in the baseline" in said
    assert "minutes on an idle machine" in said  # the plan itself stands before it


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        ({"counters": ["cmp.sdpa", "sel.v2"]}, 4, "the baseline's Route is cmp.sdpa sel.v2"),
        ({"config_sha256": "c" * 64}, 8, "another config under the same name"),
    ],
)
def test_another_route_or_config_is_red(
    changes: dict[str, object], code: int, said: str, tmp_path: Path, capsys: Texts
) -> None:
    assert planned(MATRIX, "--baseline", with_cell(tmp_path, **changes)) == code
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("  ") and said in x]
    assert AUTO in line and "promote a new baseline if the change was meant" in line


def test_a_route_that_the_code_changes_is_red(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Texts
) -> None:
    """The regression that it is for: `auto` no longer takes path triton."""
    real = nsa.routing.route

    def slower(request: Request, problem: Problem, capability: Capability) -> Route:
        without = replace(capability, triton_provider=None, triton_reason="planted")
        return real(request, problem, without)

    monkeypatch.setattr("nsa.routing.route", slower)
    assert planned(MATRIX, "--baseline", BASELINE, "--only", "path=auto") == 4
    assert "the baseline's Route is cmp.triton" in capsys.readouterr().out


def test_a_cell_that_is_gone_is_red_and_a_new_one_is_said(tmp_path: Path, capsys: Texts) -> None:
    """What --only leaves out is not gone."""
    gone = "path=v1,seq_len=64,workload=train"
    fewer = edited(
        tmp_path, lambda found: {"cells": {k: v for k, v in found.cells.items() if k != AUTO}}
    )
    assert planned(MATRIX, "--baseline", fewer) == 0
    assert f"NEW {AUTO}: the baseline has no such cell" in capsys.readouterr().out
    more = edited(
        tmp_path,
        lambda found: {
            "cells": {**found.cells, "path=v1,seq_len=64,workload=train": found.cells[AUTO]}
        },
    )
    assert planned(MATRIX, "--baseline", more) == 6
    assert f"MISSING {gone}: in the baseline, but not in the plan" in capsys.readouterr().out
    assert planned(MATRIX, "--baseline", more, "--only", "path=auto") == 0
    capsys.readouterr()
    moved = edited(
        tmp_path,
        lambda found: {"cells": {gone if k == AUTO else k: v for k, v in found.cells.items()}},
    )
    assert planned(MATRIX, "--baseline", moved) == 6
    said = capsys.readouterr().out
    assert said.index(f"  MISSING {gone}") < said.index(f"  NEW {AUTO}"), "red first"


def test_looser_rules_are_red(tmp_path: Path, capsys: Texts) -> None:
    def stricter(found: Baseline) -> dict[str, object]:
        assert found.rules is not None
        return {"rules": {**found.rules, "gate": {**found.rules["gate"], "min_effect_pct": 0.5}}}

    assert planned(MATRIX, "--baseline", edited(tmp_path, stricter)) == 2
    assert "LOOSENED: the matrix loosens what judges it: gate.min_effect_pct" in (
        capsys.readouterr().out
    )


def test_a_baseline_of_another_matrix_judges_nothing(capsys: Texts) -> None:
    other = BASELINE.with_name("nightly-train-h200.json")
    assert planned(MATRIX, "--baseline", other) != 0
    assert "is it that of this matrix?" in capsys.readouterr().out
    assert planned(MATRIX, "--baseline", "nowhere.json") == 9


def test_a_program_and_github_read_it(
    tmp_path: Path, capsys: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    wrong = with_cell(tmp_path, counters=["sel.v1"])
    assert planned(MATRIX, "--baseline", wrong, "--json") == 4
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert found["judged"]["exit_code"] == 4 and len(found["cells"]) == 9
    (cell,) = [one for one in found["judged"]["cells"] if one["verdict"]]
    assert cell["cell_id"] == AUTO and cell["verdict"] == "WRONG_PATH"
    (line,) = [one for one in said.err.splitlines() if one.startswith("::")]
    assert line.startswith("::error title=perfbench%3A WRONG_PATH batch=4%2C")
