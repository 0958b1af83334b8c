"""What was measured is what the measuring process held: its libraries, its nsa, the commit that
tracks it, its settings, and the path that the cell names.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from perfbench.errors import Exit
from perfbench.gate import judge, promote
from perfbench.gate.hard_rules import path_problems
from perfbench.machine import collect_environment, package_sha256, source_of
from perfbench.machine.environment import speed_variables
from perfbench.matrix import GatePolicy, expected_of
from perfbench.records import Baseline, Cell, Expect, LoadedCode, Run, Verdict, read_baseline
from perfbench.worker.loaded import loaded_code
from tests.perfbench import builders as b
from tests.perfbench import repositories
from tests.perfbench.jobs import job
from tests.perfbench.measure_cases import PROOF, run

POLICY = GatePolicy(min_replicates=3)
LOADED = LoadedCode(
    torch="2.13.0+cu130", triton="3.7.1", cuda="13.0", nsa_folder="/code/nsa", nsa_sha256="a" * 64
)


def loaded_run(**changes: Any) -> Run:
    found = b.small_run()
    loaded = LOADED.model_copy(update=changes)
    source = found.manifest.source.model_copy(update={"nsa_sha256": "a" * 64})
    return b.with_rows(
        found.model_copy(update={"manifest": found.manifest.model_copy(update={"source": source})}),
        [row.model_copy(update={"loaded": loaded}) for row in found.replicates],
    )


def test_a_row_holds_what_its_process_imported() -> None:
    row = run(job("v2", "forward", proof=PROOF))
    assert row.loaded is not None and row.loaded == loaded_code()
    assert row.loaded.torch == str(torch.__version__)
    assert row.loaded.nsa_sha256 == package_sha256(Path(row.loaded.nsa_folder))


def test_metadata_of_another_installation_is_not_believed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    foreign = tmp_path / "torch-9.9.9.dist-info"
    foreign.mkdir()
    (foreign / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9.9\n")
    monkeypatch.syspath_prepend(tmp_path)
    said = collect_environment("cpu")
    assert said.torch == "9.9.9", "the fault is planted"
    row = run(job("v2", "forward", proof=PROOF))
    found = b.make_run([b.planned_cell(row.axes, gpu=False)], gpu=False, environment=said)
    rows = [one.model_copy(update={"loaded": row.loaded}) for one in found.replicates]
    judgement = judge(b.with_rows(found, rows), None, POLICY)
    [cell] = judgement.cells
    assert cell.verdict is Verdict.ENV and judgement.exit_code is Exit.ENVIRONMENT
    assert "was imported, the manifest says 9.9.9" in cell.reason and "\n" not in cell.reason


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"torch": "2.12.0"}, "torch 2.12.0 was imported, the manifest says 2.13.0"),
        ({"triton": "3.6.0"}, "triton 3.6.0 was imported, the manifest says 3.7.1"),
        ({"cuda": "12.8"}, "CUDA 12.8 was imported, the manifest says 13.0"),
        ({"nsa_sha256": "b" * 64}, "the nsa of /code/nsa has other files (bbbbbbbbbbbb)"),
        ({"triton": None}, ""),
        ({}, ""),
    ],
)
def test_what_was_imported_is_held_against_the_manifest(
    changes: dict[str, Any], words: str
) -> None:
    judgement = judge(loaded_run(**changes), None, POLICY)
    if not words:
        assert judgement.exit_code is Exit.OK
        return
    assert judgement.exit_code is Exit.ENVIRONMENT
    assert all(words in cell.reason for cell in judgement.cells)


def test_every_file_of_the_package_is_in_its_hash(tmp_path: Path) -> None:
    seen = {package_sha256(tmp_path)}
    for name, text in (("a.py", "1"), ("a.py", "2"), ("sub/b.py", "2"), ("sub/c.py", "")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        seen.add(package_sha256(tmp_path))
    assert len(seen) == 5 and package_sha256(tmp_path) in seen


# The commit is that of the repository which tracks what is measured.


def test_a_copy_inside_another_repository_has_no_commit(tmp_path: Path) -> None:
    other = tmp_path / "other"
    repositories.make(other, 1.0)
    copy = other / "vendored"
    shutil.copytree(other / "nsa", copy / "nsa")
    found = source_of(copy)
    assert found.commit is None and found.nsa_sha256 is not None
    assert "no git tracks" in (found.reason or "")
    assert "--source-commit" in (found.reason or "")
    given = source_of(copy, "abc123")
    assert given.commit == "abc123" and given.unproved is not None
    repositories.git(other, "add", "-A")
    repositories.git(other, "commit", "-q", "-m", "vendored, and tracked from now on")
    assert source_of(copy).commit == repositories.git(other, "rev-parse", "HEAD")


# Settings.


def test_variables_that_change_speed_are_recorded() -> None:
    environ = {
        "OMP_NUM_THREADS": "2",
        "MKL_DYNAMIC": "FALSE",
        "CUDA_LAUNCH_BLOCKING": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "TORCHINDUCTOR_MAX_AUTOTUNE": "1",
        "TRITON_INTERPRET": "1",
        "NVIDIA_TF32_OVERRIDE": "0",
    }
    others = {"HOME": "/root", "TRITON_CACHE_DIR": "/x", "CUDA_VISIBLE_DEVICES": "0", "OMPI": "1"}
    assert speed_variables({**environ, **others}) == dict(sorted(environ.items()))
    here = collect_environment("cpu")
    assert here.settings() == {**(here.speed_variables or {}), **here.nsa_settings}


def with_settings(found: Run, nsa: dict[str, str], other: dict[str, str] | None) -> Run:
    environment = found.manifest.environment.model_copy(
        update={"nsa_settings": nsa, "speed_variables": other}
    )
    manifest = found.manifest.model_copy(update={"environment": environment})
    return found.model_copy(update={"manifest": manifest})


@pytest.mark.parametrize(
    ("nsa", "other", "words"),
    [
        ({"NSA_TRITON_JOIN": "0"}, {}, "NSA_TRITON_JOIN: None -> 0"),
        ({}, {"CUDA_LAUNCH_BLOCKING": "1"}, "CUDA_LAUNCH_BLOCKING: None -> 1"),
    ],
)
def test_another_setting_than_the_baseline_s_is_incomparable(
    nsa: dict[str, str], other: dict[str, str], words: str
) -> None:
    plain = with_settings(b.small_run(), {}, {})
    base = b.baseline_of(plain, settings=plain.manifest.environment.settings())
    assert judge(plain, base, POLICY).exit_code is Exit.OK
    judgement = judge(with_settings(plain, nsa, other), base, POLICY)
    assert judgement.exit_code is Exit.ENVIRONMENT and words in judgement.headline
    assert {cell.verdict for cell in judgement.cells} == {Verdict.INCOMPARABLE}


def test_promote_stores_the_settings_that_a_later_run_is_compared_with(tmp_path: Path) -> None:
    found = with_settings(b.small_run(), {"NSA_TRITON_JOIN": "0"}, {"OMP_NUM_THREADS": "1"})
    promote(found, tmp_path / "baseline.json")
    stored = read_baseline(tmp_path / "baseline.json")
    assert isinstance(stored, Baseline)
    assert stored.settings == {"NSA_TRITON_JOIN": "0", "OMP_NUM_THREADS": "1"}
    assert judge(found, stored, POLICY).exit_code is Exit.OK
    judgement = judge(with_settings(found, {}, {"OMP_NUM_THREADS": "1"}), stored, POLICY)
    assert judgement.exit_code is Exit.ENVIRONMENT
    assert "NSA_TRITON_JOIN: 0 -> None" in judgement.headline


def test_an_older_baseline_recorded_no_settings_and_a_note_says_so() -> None:
    found = with_settings(b.small_run(), {"NSA_TRITON_JOIN": "0"}, {})
    judgement = judge(found, b.baseline_of(found), POLICY)
    assert judgement.exit_code is Exit.OK
    assert any("recorded no NSA_* settings" in note for note in judgement.notes)
    older = with_settings(found, {}, None)
    assert judge(older, b.baseline_of(older), POLICY).notes == ()


# The path that a cell names.


@pytest.mark.parametrize("path", ["v1", "v2", "masked", "triton", "reference"])
def test_a_named_path_must_run_and_no_other_may(path: str) -> None:
    implied = expected_of(Cell("train", 64, path), Expect(), [f"sel.{path}", "cmp.sdpa"])
    assert implied.engaged == [f"sel.{path}"]
    others = {f"sel.{name}" for name in ("v1", "v2", "masked", "triton", "reference", "dense")}
    assert others - set(implied.forbidden) == {f"sel.{path}"}
    assert "dense.sdpa" in implied.forbidden
    without = expected_of(Cell("train", 64, path), Expect(), ["cmp.sdpa"])
    assert without.engaged == [], "a model without the selected branch"


def test_dense_adaptive_and_auto() -> None:
    assert expected_of(Cell("train", 64, "dense_flash"), Expect(), []).engaged == ["dense.flash"]
    assert "sel.v2" in expected_of(Cell("train", 64, "dense"), Expect(), []).forbidden
    adaptive = expected_of(Cell("train", 64, "adaptive"), Expect(), ["sel.v1"])
    assert adaptive.engaged == [] and not {"sel.v1", "sel.v2"} & set(adaptive.forbidden)
    stated = Expect(engaged=["sel.triton"], forbidden=["sel.v1"])
    assert expected_of(Cell("train", 64, "auto"), stated, ["sel.triton"]) == stated
    both = expected_of(Cell("train", 64, "v2"), stated, ["sel.v2"])
    assert both.engaged == ["sel.triton", "sel.v2"]


def test_a_plan_that_takes_another_path_than_the_cell_names() -> None:
    found = b.small_run()
    cell = next(one for one in found.manifest.cells if one.axes.path == "v2")
    row = next(one for one in found.replicates if one.cell_id == cell.cell_id)
    assert path_problems(cell, row) == []
    assert row.route is not None
    counters = [name.replace("sel.v2", "sel.masked") for name in cell.route.counters]
    route = cell.route.model_copy(update={"counters": counters})
    engaged = {name.replace("sel.v2", "sel.masked"): n for name, n in row.engaged.items()}
    problems = path_problems(
        cell.model_copy(update={"route": route, "expect": Expect()}),
        row.model_copy(update={"engaged": engaged}),
    )
    assert problems == ["expected sel.v2 never ran", "sel.masked ran, which is forbidden here"]
