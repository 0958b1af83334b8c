"""Files that commit 0a70f94 wrote or read are read unchanged: runs, pairs, baselines, matrices.

expected.json holds what that commit's own code said of them; it is never made anew.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from perfbench.commands import app
from perfbench.records import run_file

HOME = Path(__file__).parents[1] / "data" / "written-by-0a70f94"
EXPECTED = json.loads((HOME / "expected.json").read_text(encoding="utf-8"))
GATED = {  # run -> its baseline
    "small": "small",  # made by 0a70f94 itself, in two invocations: --only, then --resume
    "h100-demo-green": "h100-demo",
    "h100-demo-oom": "h100-demo",
    "h100-gate": "h100-gate",
    "h100": "h100",  # resumed four times
}
PAIRS = ("small-ab", "h200-levels")


def printed(*argv: str) -> tuple[int, Any]:
    """Exit code and the JSON on stdout of one command."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        code = app.invoke(argv)
    return code, json.loads(out.getvalue())


def as_written(name: str, to: Path) -> Path:
    """The run or pair ``name`` with run.jsonl as it was written; larger ones are stored
    compressed.
    """
    home = to / name
    shutil.copytree(HOME / "runs" / name, home)
    for packed in home.rglob("*.gz"):
        packed.with_suffix("").write_bytes(gzip.decompress(packed.read_bytes()))
        packed.unlink()
    return home


def run_read(folder: Path) -> dict[str, Any]:
    run = run_file.read_run(folder)
    return {
        "run_id": run.manifest.run_id,
        "commit": run.manifest.source.commit,
        "cells": [cell.cell_id for cell in run.manifest.cells],
        "resumed_utc": [one.resumed_utc for one in run.resumed],
        "sentinels": [[one.name, one.block, one.rate_per_s] for one in run.sentinels],
        "replicates": [
            [row.cell_id, row.replicate, row.status, row.tok_per_s, row.samples_s]
            for row in run.replicates
        ],
    }


def verdicts(code: int, said: Any) -> dict[str, Any]:
    cells = {
        cell["cell_id"]: [
            cell["verdict"],
            cell["base_tok_per_s"],
            cell["cand_tok_per_s"],
            cell["change_pct"],
        ]
        for cell in said["cells"]
    }
    return {"exit": code, "counts": said["counts"], "cells": cells}


def gated(name: str, to: Path) -> dict[str, Any]:
    baseline = HOME / "baselines" / f"{GATED[name]}.json"
    return verdicts(
        *printed("gate", str(as_written(name, to)), "--baseline", str(baseline), "--json")
    )


def compared(name: str, to: Path) -> dict[str, Any]:
    return verdicts(*printed("compare", str(as_written(name, to)), "--json"))


def baseline_read(path: Path) -> dict[str, Any]:
    code, said = printed("baseline", "show", str(path), "--json")
    speeds = {cell_id: cell["tok_per_s"] for cell_id, cell in said["cells"].items()}
    return {"exit": code, "matrix_name": said["matrix_name"], "tok_per_s": speeds}


def matrix_read(path: Path) -> dict[str, Any]:
    """Every cell, also those that the routing of the day excludes; hashes of the others."""
    code, said = printed("plan", str(path), "--json")
    ids = {one["cell_id"] for one in [*said["cells"], *said["excluded"]]}
    hashes = {cell["cell_id"]: cell["config_sha256"] for cell in said["cells"]}
    return {"exit": code, "cells": {one: hashes.get(one) for one in sorted(ids)}}


def close(found: Any, wanted: Any) -> bool:
    """Equal, but for the last digits of a number that was computed."""
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(close(found[k], wanted[k]) for k in wanted)
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(close, found, wanted))
    if isinstance(wanted, float):
        return bool(found == pytest.approx(wanted, rel=1e-9, abs=1e-9))
    return bool(found == wanted)


@pytest.mark.parametrize("name", [*GATED, *(f"{pair}/{side}" for pair in PAIRS for side in "ab")])
def test_a_run_is_read_unchanged(name: str, tmp_path: Path) -> None:
    wanted = EXPECTED["runs"][name]
    assert run_read(as_written(name, tmp_path)) == wanted and wanted["replicates"]


@pytest.mark.parametrize("name", GATED)
def test_a_run_is_judged_by_its_baseline_as_then(name: str, tmp_path: Path) -> None:
    assert close(gated(name, tmp_path), EXPECTED["gate"][name])


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_is_judged_as_then(name: str, tmp_path: Path) -> None:
    assert close(compared(name, tmp_path), EXPECTED["compare"][name])


@pytest.mark.parametrize("path", sorted(HOME.glob("baselines/*.json")), ids=lambda path: path.stem)
def test_a_baseline_is_read_unchanged(path: Path) -> None:
    wanted = EXPECTED["baselines"][path.stem]
    assert baseline_read(path) == wanted and wanted["tok_per_s"]


@pytest.mark.parametrize("path", sorted(HOME.glob("matrices/*.yaml")), ids=lambda path: path.stem)
def test_a_matrix_spans_the_same_cells(path: Path) -> None:
    found, wanted = matrix_read(path), EXPECTED["matrices"][path.stem]
    assert found["exit"] == wanted["exit"] == 0 and found["cells"].keys() == wanted["cells"].keys()
    for cell_id, config in wanted["cells"].items():
        assert config is None or found["cells"][cell_id] in (config, None), cell_id


def test_every_kind_of_file_is_there() -> None:
    assert {path.stem for path in HOME.glob("matrices/*.yaml")} == EXPECTED["matrices"].keys()
    assert {path.stem for path in HOME.glob("baselines/*.json")} == EXPECTED["baselines"].keys()
    runs = EXPECTED["runs"].values()
    assert {bool(run["resumed_utc"]) for run in runs} == {True, False}
    assert {row[2] for run in runs for row in run["replicates"]} == {"ok", "oom", "crash"}
    assert any(run["sentinels"] for run in runs) and len(EXPECTED["matrices"]) >= 15
    assert {cell[0] for pair in EXPECTED["compare"].values() for cell in pair["cells"].values()} > {
        "REGRESSED"
    }
