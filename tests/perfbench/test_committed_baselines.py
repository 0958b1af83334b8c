"""Every committed baseline can be used: it is read, its matrix plans its cells, its commit can be
built and driven by this harness, and its constraint file gives the versions that it was measured
with. A retired one says since when and why.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from nsa.capability import assumed
from nsa.routing import Capability
from nsa.settings import Settings
from perfbench.commands import app
from perfbench.matrix import Plan, build_plan, load_matrix, parse_matrix
from perfbench.records import (
    Baseline,
    BaselineCell,
    Job,
    Replicate,
    Status,
    load_baseline,
    show_baseline,
)
from perfbench.records.baseline_file import SCHEMA_VERSION
from perfbench.runner import CannotBuild, checked_out, plan_of_version
from perfbench.runner.ab.version_executor import VersionExecutor
from tests.perfbench import repositories
from tests.perfbench.repositories import ROOT, git

HOME = ROOT / "reports" / "baselines"
FLEET = ROOT / ".github" / "fleet.json"
FOUND = {path: load_baseline(path) for path in sorted(HOME.glob("*/*.json"))}
USED = [path for path, found in FOUND.items() if found.retired is None]
RETIRED = [path for path, found in FOUND.items() if found.retired is not None]
PIN = re.compile(r"^([A-Za-z0-9_.-]+)==([^\s;+]+)", re.MULTILINE)
DATE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(Z|\+00:00)")
# A small cell of everything that a training step has, and one that decodes from a cache.
SMALL = """\
version: 1
name: small
target: {gpu: none}
model: tiny
axes: {workload: [train, decode], seq_len: [64], path: [v2], fa2: [off], dtype: [fp32]}
measure: {processes: 1, warmup_s: 0.02, samples: 3, min_sample_ms: 5}
"""


def name_of(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


def nightly_files() -> tuple[dict[str, Path], set[str]]:
    """The baseline of each matrix that the nightly runs, and the matrices whose first baseline the
    fleet's file calls due.
    """
    fleet = json.loads(FLEET.read_text(encoding="utf-8"))
    due = {Path(one["matrix"]).stem for one in fleet if one.get("first_baseline_due")}
    return {Path(one["matrix"]).stem: ROOT / one["baseline"] for one in fleet}, due


RUN_NIGHTLY, FIRST_DUE = nightly_files()


def where_measured(found: Baseline) -> Capability:
    """The machine of a baseline, with the software that it had."""
    gpu = load_matrix(matrix_of(found)).target.gpu
    env = found.environment
    return replace(
        assumed(gpu),
        fa2_provider=env["flash_provider"],
        fa2_reason="" if env["flash_provider"] else "the baseline had none",
        torch_version=env["torch"] or "0",
        triton_provider=f"triton {env['triton']}" if env["triton"] else None,
        triton_reason="" if env["triton"] else "the baseline had none",
    )


def matrix_of(found: Baseline) -> Path:
    return ROOT / "matrices" / f"{found.matrix_name}.yaml"


def commits_of(found: Baseline) -> set[str]:
    return {str(cell.commit) for cell in found.cells.values()}


def schema_faults(found: Baseline, *, is_nightly: bool) -> list[str]:
    """An older schema is said wherever the baseline is shown; the nightly's own are of today's."""
    if found.schema_version == SCHEMA_VERSION:
        return [] if found.rules is not None else ["it holds no policy: promote it again"]
    if is_nightly:
        return [f"schema {found.schema_version}, wanted {SCHEMA_VERSION}: promote it again"]
    said = show_baseline(found)
    return [] if "unverified: written without a digest" in said else ["its old schema is not said"]


def measured_faults(found: Baseline, *, is_nightly: bool) -> list[str]:
    """What the gate judges a GPU's cell by, beside its tok/s."""
    if found.environment.get("device_name") is None:
        return []
    faults = []
    for cell_id, cell in found.cells.items():
        wanted = {
            "device_time_s": bool(cell.device_time_s),
            "kernel_count": cell.kernel_count is not None,
            "host_bound": cell.host_bound is not None,
            # recorded since the files of schema 3
            "host_time_s": bool(cell.host_time_s) or not is_nightly,
        }
        faults += [f"{cell_id} has no {key}" for key, is_there in wanted.items() if not is_there]
    return faults


def constraint_faults(found: Baseline, constraints: Path) -> list[str]:
    """The nightly installs this file: other versions than the baseline's are INCOMPARABLE."""
    if not constraints.exists():
        return [f"no {constraints.name} beside it, which the nightly installs"]
    pinned = dict(PIN.findall(constraints.read_text(encoding="utf-8")))
    faults = []
    for name in ("torch", "triton"):
        theirs = found.environment[name]
        # without the build (+cu130), which the index decides
        if theirs is not None and pinned.get(name) != theirs.partition("+")[0]:
            faults.append(f"{name} {theirs} in the baseline, {pinned.get(name)} in {constraints}")
    return faults


def plan_faults(found: Baseline, plan: Plan, commit: str | None = None) -> list[str]:
    """What ``plan`` says otherwise: of all cells, or of those that ``commit`` measured, whose own
    counters it must have.
    """
    planned = {cell.cell_id: cell for cell in plan.cells}
    cells = {k: cell for k, cell in found.cells.items() if commit in (None, cell.commit)}
    faults = [f"{cell_id} is not in the plan" for cell_id in cells.keys() - planned.keys()]
    if commit is None:
        new = planned.keys() - cells.keys()
        faults += [f"{cell_id} is planned and not in the baseline" for cell_id in new]
    for cell_id in cells.keys() & planned.keys():
        if planned[cell_id].config_sha256 != cells[cell_id].config_sha256:
            faults.append(f"{cell_id} has another config_sha256 in the plan")
        counters = sorted(planned[cell_id].route.counters)
        if commit is not None and counters != sorted(cells[cell_id].counters):
            faults.append(f"{cell_id} counted {cells[cell_id].counters}, the plan says {counters}")
    return faults


def commit_faults(found: Baseline, commit: str, repository: Path = ROOT) -> list[str]:
    """Whether ``commit`` is part of this history, and plans the cells that it measured."""
    matrix = load_matrix(matrix_of(found))
    try:
        with checked_out(commit, repository) as one:
            if not is_in_history(commit, repository):
                return [f"{commit} is not an ancestor of HEAD, so a clone need not have it"]
            version = plan_of_version(one, matrix, [], where_measured(found))
    except CannotBuild as error:
        return [str(error)]
    return plan_faults(found, version.plan, commit)


def is_in_history(commit: str, repository: Path) -> bool:
    command = ["git", "-C", str(repository), "merge-base", "--is-ancestor", commit, "HEAD"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def drive(commit: str) -> list[Replicate]:
    """The rows of the small cells: HEAD's harness, the commit's `nsa`, this CPU."""
    matrix = parse_matrix(SMALL, "small.yaml")
    with checked_out(commit, ROOT) as one, VersionExecutor(one) as executor:
        version = plan_of_version(one, matrix, [], assumed("none"))
        return [
            executor.execute(
                Job(
                    cell_id=cell.cell_id,
                    replicate=0,
                    axes=cell.axes,
                    config_sha256=cell.config_sha256,
                    model=version.model,
                    measure=matrix.measure,
                    timeout_s=300,
                    plan=cell.route,
                    expect=cell.expect,
                    device="cpu",
                    seed=5,
                    profile=True,
                )
            )
            for cell in version.plan.cells
        ]


def test_there_are_baselines_and_some_are_in_use() -> None:
    assert USED and set(USED) | set(RETIRED) == set(FOUND)


@pytest.mark.parametrize("path", FOUND, ids=name_of)
def test_a_baseline_lies_where_the_gate_looks_for_it(path: Path) -> None:
    found = FOUND[path]
    assert (found.environment["gpu_slug"], found.matrix_name) == (path.parent.name, path.stem)


@pytest.mark.parametrize("path", RETIRED, ids=name_of)
def test_a_retired_baseline_says_since_when_and_why_and_no_night_needs_it(path: Path) -> None:
    found = FOUND[path]
    assert found.retired and DATE.fullmatch(found.retired_utc or "")
    assert f"retired: {found.retired} (since {found.retired_utc})" in show_baseline(found)
    assert path not in RUN_NIGHTLY.values()


@pytest.mark.parametrize("path", USED, ids=name_of)
def test_a_baseline_in_use_holds_what_the_gate_needs(path: Path) -> None:
    found, is_nightly = FOUND[path], path in RUN_NIGHTLY.values()
    assert schema_faults(found, is_nightly=is_nightly) == []
    assert measured_faults(found, is_nightly=is_nightly) == []
    assert constraint_faults(found, path.parent / "constraints.txt") == []


@pytest.mark.parametrize("path", USED, ids=name_of)
def test_its_matrix_plans_exactly_its_cells(path: Path) -> None:
    matrix = load_matrix(matrix_of(FOUND[path]))
    capability = where_measured(FOUND[path])
    plan = build_plan(matrix, only=[], capability=capability, settings=Settings())
    assert plan_faults(FOUND[path], plan) == []


@pytest.mark.parametrize("path", USED, ids=name_of)
def test_its_commit_plans_what_it_measured(path: Path) -> None:
    for commit in commits_of(FOUND[path]):
        assert commit_faults(FOUND[path], commit) == []


@pytest.mark.parametrize("commit", sorted({c for path in USED for c in commits_of(FOUND[path])}))
def test_its_commit_is_driven_by_this_harness(commit: str) -> None:
    rows = drive(commit)
    assert {row.axes.workload for row in rows} == {"train", "decode"}
    for row in rows:
        assert row.status is Status.OK, f"{row.reason}\n{row.stderr_tail}"
        assert row.parity is not None and row.parity.ok
        assert row.tok_per_s and row.profile is not None


@pytest.mark.parametrize(("matrix", "path"), RUN_NIGHTLY.items(), ids=RUN_NIGHTLY)
def test_each_night_has_its_baseline_or_says_that_the_first_is_due(matrix: str, path: Path) -> None:
    assert (matrix in FIRST_DUE) != path.exists(), (
        f"got {path} {'and' if path.exists() else 'missing, not'} 'first_baseline_due' in"
        f" {FLEET.name}, wanted one of the two. Next: promote it and take the key from its entry,"
        " or write it there"
    )
    assert path.parent.parent == HOME and path.stem == matrix  # where `check` looks for it


@pytest.mark.parametrize("path", USED, ids=name_of)
def test_what_it_ran_is_planned_today(path: Path) -> None:
    """The job `routes` of ci.yml: a route that changes on purpose changes its baseline with it."""
    assert app.invoke(["plan", str(matrix_of(FOUND[path])), "--baseline", str(path)]) == 0


def plan_of(found: Baseline) -> Plan:
    matrix = load_matrix(matrix_of(found))
    return build_plan(matrix, only=[], capability=assumed("h200"), settings=Settings())


@pytest.fixture
def sound() -> Baseline:
    """As `promote` would write it, of a set of the nightly: no rule finds a fault."""
    environment = {"gpu_slug": "h200", "device_name": "NVIDIA H200", "flash_provider": "fa2 1.0"}
    empty = Baseline.model_construct(
        matrix_name="nightly-train-h200",
        environment={**environment, "torch": "2.11.0+cu130", "triton": "3.6.0"},
        schema_version=SCHEMA_VERSION,
        rules={},
    )
    cells = {
        cell.cell_id: BaselineCell(
            axes=cell.axes,
            config_sha256=cell.config_sha256,
            tok_per_s=[1.0],
            host_bound=False,
            counters=cell.route.counters,
            run_id="run",
            commit="b" * 40,
            device_time_s=[1.0],
            host_time_s=[1.0],
            kernel_count=7,
        )
        for cell in plan_of(empty).cells
    }
    return empty.model_copy(update={"cells": cells})


def with_cell(found: Baseline, **changes: object) -> Baseline:
    """``found``, whose first cell is changed."""
    cell_id = min(found.cells)
    cell = found.cells[cell_id].model_copy(update=changes)
    return found.model_copy(update={"cells": {**found.cells, cell_id: cell}})


def test_a_sound_baseline_has_no_fault(sound: Baseline, tmp_path: Path) -> None:
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("torch==2.11.0\ntriton==3.6.0 ; platform_system == 'Linux'\n")
    assert schema_faults(sound, is_nightly=True) == []
    assert measured_faults(sound, is_nightly=True) == []
    assert constraint_faults(sound, constraints) == []
    assert plan_faults(sound, plan_of(sound)) == []
    assert plan_faults(sound, plan_of(sound), "b" * 40) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"schema_version": 2}, "schema 2, wanted 3"),
        ({"rules": None}, "it holds no policy"),
    ],
)
def test_the_nightly_takes_no_older_schema(
    sound: Baseline, changes: dict[str, object], said: str
) -> None:
    (fault,) = schema_faults(sound.model_copy(update=changes), is_nightly=True)
    assert fault.startswith(said)


@pytest.mark.parametrize(
    ("key", "value"),
    [("device_time_s", []), ("kernel_count", None), ("host_bound", None), ("host_time_s", [])],
)
def test_a_cell_without_what_it_is_judged_by_is_a_fault(
    sound: Baseline, key: str, value: object
) -> None:
    (fault,) = measured_faults(with_cell(sound, **{key: value}), is_nightly=True)
    assert fault == f"{min(sound.cells)} has no {key}"


@pytest.mark.parametrize("text", [None, "torch==2.13.0\ntriton==3.6.0\n", "torch==2.11.0\n"])
def test_constraints_of_other_versions_are_a_fault(
    sound: Baseline, text: str | None, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "constraints.txt").write_text(text, encoding="utf-8")
    assert len(constraint_faults(sound, tmp_path / "constraints.txt")) == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda found: with_cell(found, config_sha256="c" * 64), "another config_sha256"),
        (lambda found: with_cell(found, counters=["sel.v1"]), "counted ['sel.v1']"),
        (
            lambda found: found.model_copy(
                update={"cells": {**found.cells, "gone": found.cells[min(found.cells)]}}
            ),
            "gone is not in the plan",
        ),
    ],
)
def test_a_plan_of_other_cells_is_a_fault(
    sound: Baseline, change: Callable[[Baseline], Baseline], said: str
) -> None:
    (fault,) = plan_faults(change(sound), plan_of(sound), "b" * 40)
    assert said in fault


def test_a_cell_that_no_baseline_holds_is_a_fault(sound: Baseline) -> None:
    first = min(sound.cells)
    fewer = {cell_id: cell for cell_id, cell in sound.cells.items() if cell_id != first}
    (fault,) = plan_faults(sound.model_copy(update={"cells": fewer}), plan_of(sound))
    assert fault == f"{first} is planned and not in the baseline"


def test_a_commit_outside_this_history_is_a_fault(sound: Baseline, tmp_path: Path) -> None:
    """Lost with its branch, or beyond a shallow clone, which says how to get it."""
    whole = tmp_path / "whole"
    (whole / "nsa").mkdir(parents=True)
    (whole / "nsa" / "__init__.py").touch()
    git(whole, "init", "-q")
    first = repositories.commit(whole, "one")
    (whole / "nsa" / "more.py").touch()
    repositories.commit(whole, "two")
    git(whole, "checkout", "-q", "-b", "aside", first)
    (whole / "nsa" / "aside.py").touch()
    aside = repositories.commit(whole, "aside")
    git(whole, "checkout", "-q", "-")
    (fault,) = commit_faults(sound, aside, whole)
    assert "is not an ancestor of HEAD" in fault
    git(tmp_path, "clone", "-q", "--depth", "1", whole.as_uri(), "shallow")
    (fault,) = commit_faults(sound, first, tmp_path / "shallow")
    assert "git fetch --unshallow" in fault
