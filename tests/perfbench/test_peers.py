"""Peers of a matrix: what it may declare, what a plan says of one that is absent or does not fit,
and that nothing is imported before it is measured.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from nsa.capability import assumed
from nsa.settings import Settings
from perfbench.commands.own_code import refuse_stored_code
from perfbench.errors import Exit, PerfbenchError
from perfbench.history.site.cells_of_suite import dense_twins
from perfbench.matrix import matrix as matrices
from perfbench.matrix import matrix_schema
from perfbench.matrix import peers as of_matrix
from perfbench.matrix import plan as plans
from perfbench.matrix.named_path import expected_of
from perfbench.records.cells import Cell
from perfbench.records.peers import is_peer, kind_of
from perfbench.records.rows import Expect
from perfbench.runner import run as runner
from tests.perfbench import builders, runner_cases
from tests.perfbench.matrix_text import error_of
from tests.perfbench.runner_cases import FakeExecutor

DECLARED = "{kind: dense, function: 'my_peer:attend', checkout: here}"
TEXT = """\
version: 1
name: peers
target: {gpu: none}
model: tiny
axes:
  workload: [attention, attention_forward]
  seq_len: [96]
  path: [masked, dense_mine]
  dtype: [fp32]
  fa2: [off]
peers:
  dense_mine: DECLARED
measure: {processes: 1}
gate: {min_replicates: 1}
"""


def text_of(declared: str = DECLARED, **changes: str) -> str:
    text = TEXT.replace("DECLARED", declared)
    for old, new in changes.items():
        found = next(line for line in text.splitlines() if line.strip().startswith(f"{old}:"))
        text = text.replace(found, f"{found[: len(found) - len(found.lstrip())]}{old}: {new}")
    return text


def parsed(text: str, folder: Path) -> matrices.Matrix:
    return matrices.parse_matrix(text, str(folder / "m.yaml"))


def planned(
    text: str, folder: Path, gpu: str = "none", only: list[str] | None = None
) -> plans.Plan:
    return plans.build_plan(
        parsed(text, folder), only=only or [], capability=assumed(gpu), settings=Settings()
    )


def excluded(plan: plans.Plan) -> dict[str, str]:
    return {one.cell_id: one.reason for one in plan.excluded}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with a peer that no planner may import."""
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "my_peer.py").write_text("raise SystemExit('imported')\n", encoding="utf-8")
    return folder


def test_a_plan_imports_no_peer(tmp_path: Path, checkout: Path) -> None:
    plan = planned(text_of(), tmp_path)
    assert [cell.axes.path for cell in plan.cells] == ["masked", "dense_mine"] * 2
    route = plan.cells[1].route
    assert route.counters == ["peer.dense_mine"] and plan.excluded == []
    (branch,) = route.branches
    assert branch.provider == f"checkout {checkout}" and "my_peer:attend" in branch.reason
    assert "my_peer" not in sys.modules and str(checkout) not in sys.path
    assert "peer.dense_mine" in plans.plan_text(plan, parsed(text_of(), tmp_path))


def test_the_kind_is_in_the_name() -> None:
    dense = ("dense", "dense_flash", "dense_fa4", "dense_fa3", "flex", "dense_of_mine")
    assert [kind_of(path) for path in dense] == ["dense"] * len(dense)
    assert [kind_of(path) for path in ("flex_window", "window_mine")] == ["window"] * 2
    assert [kind_of(path) for path in ("triton", "auto", "fla", "sfnsa")] == ["nsa"] * 4
    assert not any(map(is_peer, ("triton", "auto", "adaptive", "dense_cudnn")))
    cell = Cell("attention", 96, "dense_of_mine", "on", without="lists")
    assert cell.is_dense and cell.is_peer and (cell.fa2, cell.without) == ("n/a", "none")
    assert cell.cell_id == "path=dense_of_mine,seq_len=96,workload=attention"


MISTAKES = {
    "{kind: dense, function: 'a:b', dtypes: [fp8]}": "no dtype 'fp8'",
    "{kind: dense, function: 'a:b', groups: [0]}": "got 0, wanted a whole number of at least 1",
    "{kind: nsa, function: 'my_peer:attend'}": "a name that begins with dense_ for kind dense",
    "{kind: window, function: 'my_peer:attend'}": "a name that begins with",
    "{kind: dense}": "wanted one of `function: module:function` and `entry_point: NAME`",
    "{kind: dense, function: 'a:b', entry_point: c}": "wanted one of `function: module:function`",
    "{kind: dense, function: my_peer.attend}": "got 'my_peer.attend', wanted module:function",
    "{kind: dense, function: 'my peer:attend'}": "wanted module:function",
    "{kind: dense, function: 'a:b', packages: ['x; rm']}": "wanted a package such as name",
    "{kind: dense, function: 'a:b', kernels: '('}": "wanted a regular expression",
    "{kind: dense, function: 'a:b', kernels: '.*'}": "as names of PyTorch's own kernels",
    "{kind: dense, function: 'a:b', kernels: 'kernel|x'}": "as names of PyTorch's own kernels",
    "{kind: dense, function: 'a:b', sm: hopper}": "wanted '9.0' or '>=8.0'",
    "{kind: dense, function: 'a:b', kv: one}": "belong to kind nsa, not to dense",
    "{kind: dense, function: 'a:b', kernel: x}": "unknown key; did you mean 'kernels'",
    "{kind: full, function: 'a:b'}": "wanted dense, window, nsa",
}


@pytest.mark.parametrize("declared", MISTAKES)
def test_a_wrong_declaration_names_its_line(declared: str) -> None:
    error = error_of(text_of(declared))
    assert MISTAKES[declared] in error and error.startswith("m.yaml:12: peers.dense_mine")


def test_a_peer_is_declared_once_and_used() -> None:
    assert "no cell has path: dense_mine" in error_of(text_of(path="[masked]"))
    assert "m.yaml:8: axes.path[1]: got the text 'dense_min', wanted one of" in (
        wrong := error_of(text_of(path="[masked, dense_min]"))
    )
    assert "did you mean 'dense_mine'" in wrong
    taken = text_of(path="[masked, flex]").replace("  dense_mine:", "  flex:")
    assert "peers.flex: flex is a path already" in error_of(taken)
    on_gpu = text_of(target="{gpu: H200}")
    assert "names no kernels: a regular expression" in error_of(on_gpu)


def test_a_users_own_step_has_no_peer(tmp_path: Path) -> None:
    (tmp_path / "my_step.py").touch()
    text = text_of(declared="").replace("peers:\n  dense_mine: \n", "")
    text = text.replace("[attention, attention_forward]", '["my_step:make"]')
    matrix = parsed(text.replace("[masked, dense_mine]", "[masked, flex]"), tmp_path)
    assert not matrix.peers, "to which the path is a parameter"
    cells = [one for one in matrices.cells_of(matrix) if one.path == "flex"]
    assert cells and not any(cell.is_peer or cell.is_dense for cell in cells)


def test_matches_and_counters_know_declared_names(tmp_path: Path, checkout: Path) -> None:
    more = (
        "expect: [{match: {path: dense_mine}, engaged: [peer.dense_mine], forbidden: [sel.v1]}]\n"
    )
    plan = planned(text_of() + more, tmp_path, only=["path=dense_mine"])
    assert [cell.expect.engaged for cell in plan.cells] == [["peer.dense_mine"]] * 2
    wanted = expected_of(plan.cells[0].axes, Expect(), plan.cells[0].route.counters)
    assert wanted.engaged == ["peer.dense_mine"]
    assert {"sel.triton", "sel.masked", "dense.sdpa"} <= {*wanted.forbidden}
    assert "no counter 'peer.dens_mine'; did you mean 'peer.dense_mine'" in error_of(
        text_of() + more.replace("engaged: [peer.dense_mine", "engaged: [peer.dens_mine")
    )


def test_what_is_absent_is_skipped_with_its_command(tmp_path: Path) -> None:
    declared = "{kind: dense, function: 'my_peer:attend', packages: ['no-such-peer>=2']}"
    plan = planned(text_of(declared), tmp_path)
    assert [cell.axes.path for cell in plan.cells] == ["masked"] * 2
    reason = "skipped, path=dense_mine: package no-such-peer is not installed; pip install 'no-"
    assert len(plan.excluded) == 2 and all(
        text.startswith(reason) for text in excluded(plan).values()
    )
    assert plan.skipped == tuple(dict.fromkeys(excluded(plan).values()))
    old = planned(text_of(declared.replace("no-such-peer>=2", "torch>=1000.1")), tmp_path)
    assert "wanted 1000.1 or newer; pip install 'torch>=1000.1'" in next(
        iter(excluded(old).values())
    )
    bare = planned(text_of("{kind: dense, function: 'no_such_module_here:f'}"), tmp_path)
    assert "no module no_such_module_here is installed" in next(iter(excluded(bare).values()))
    moved = planned(text_of(), tmp_path)  # without the folder
    assert f"the checkout {tmp_path}/here holds no module my_peer" in next(
        iter(excluded(moved).values())
    )


def test_a_run_with_nothing_left_to_measure_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        PerfbenchError, match="nothing is left to measure, 2 cells skipped"
    ) as caught:
        planned(text_of(), tmp_path, only=["path=dense_mine"])
    assert caught.value.exit_code is Exit.USAGE
    assert "holds no module my_peer" in str(caught.value)


GPU_TEXT = """\
version: 1
name: gpu
target: {gpu: H200}
model: MODEL
axes:
  workload: [attention, attention_forward]
  seq_len: [2048]
  path: [dense, dense_fa3, dense_fa4, fla, flex]
  dtype: [bf16, fp32]
"""


def reasons(model: str, gpu: str = "h200", **found: str) -> dict[tuple[str, str, str], str]:
    """(path, workload, dtype) -> why it is skipped."""
    plan = planned(GPU_TEXT.replace("MODEL", model), Path("."), gpu)
    cells = {
        cell.cell_id: cell
        for cell in matrices.cells_of(parsed(GPU_TEXT.replace("MODEL", model), Path(".")))
    }
    return {
        (cell.path, cell.workload, cell.dtype): reason
        for cell_id, reason in excluded(plan).items()
        if (cell := cells[cell_id])
    }


@pytest.fixture
def all_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        of_matrix, "located", lambda peer: of_matrix.Located(peer.function, f"{peer.name} 9")
    )


@pytest.mark.usefixtures("all_installed")
def test_what_does_not_fit_is_skipped_with_every_reason() -> None:
    found = reasons("m7c_125m")
    assert ("flex", "attention", "bf16") not in found
    assert ("dense_fa4", "attention", "bf16") not in found
    assert ("dense_fa3", "attention_forward", "bf16") not in found
    assert found["dense_fa3", "attention", "bf16"].endswith(
        "it has no backward, which workload=attention times; see attention_forward"
    )
    assert found["dense_fa4", "attention", "fp32"].endswith("dtype is fp32, it takes bf16, fp16")
    assert (
        "a group of query heads is 6, it takes 16, 32, 64, 128" in found["fla", "attention", "bf16"]
    )
    on_a100 = reasons("m7c_125m", "a100")
    assert "it needs SM 9.0, this is 8.0" in on_a100["dense_fa3", "attention_forward", "bf16"]
    assert ("dense_fa4", "attention", "bf16") not in on_a100
    wide = "{num_heads: 64, num_kv_heads: 4, head_dim: 300, dim: 512}"
    assert (
        "head_dim is 300, it takes 8 to 256, every 8th"
        in reasons(wide)["dense_fa4", "attention", "bf16"]
    )


@pytest.mark.usefixtures("all_installed")
def test_a_peer_with_options_of_its_own_is_measured_by_them(tmp_path: Path) -> None:
    model = "{num_heads: 64, num_kv_heads: 4, head_dim: 128, dim: 512}"
    matrix = parsed(GPU_TEXT.replace("MODEL", model), tmp_path)
    plan = plans.build_plan(matrix, only=[], capability=assumed("h200"), settings=Settings())
    (cell, _) = [one for one in plan.cells if one.axes.path == "fla"]
    assert any("cmp_block=64, cmp_stride=64" in note for note in cell.route.notes)
    own = of_matrix.model_with(matrix.peers["fla"], matrix.model.to_mapping())
    assert (own["nsa"]["cmp_block"], own["nsa"]["cmp_stride"]) == (64, 64)
    assert own["nsa"]["sel_block"] == matrix.model.nsa.sel_block


def test_peers_are_timed_as_attention_alone(tmp_path: Path, checkout: Path) -> None:
    with pytest.raises(PerfbenchError, match="a peer is timed as attention alone"):
        planned(text_of(workload="[train]"), tmp_path)
    compiled = text_of(seq_len="[96]").replace("  fa2:", "  compile: [on]\n  fa2:")
    with pytest.raises(PerfbenchError, match="a peer runs as its own function compiles it"):
        planned(compiled, tmp_path)


def entry_point(folder: Path, value: str, name: str = "theirs") -> None:
    """An installed distribution of two files, of which only metadata is read."""
    info = folder / "peer_dist-2.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: peer-dist\nVersion: 2.5\n")
    (info / "entry_points.txt").write_text(f"[perfbench.peers]\n{name} = {value}\n")
    (folder / "entry_peer.py").write_text("raise SystemExit('imported')\n")


def test_an_entry_point_is_found_without_an_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "site"
    folder.mkdir()
    entry_point(folder, "entry_peer:attend")
    monkeypatch.syspath_prepend(str(folder))
    plan = planned(text_of("{kind: dense, entry_point: theirs}"), tmp_path)
    (branch,) = plan.cells[1].route.branches
    assert branch.provider == "peer-dist 2.5" and "entry_peer:attend" in branch.reason
    assert "entry_peer" not in sys.modules
    absent = planned(text_of("{kind: dense, entry_point: others}"), tmp_path)
    assert "no installed package has an entry point 'others' of the group perfbench.peers" in next(
        iter(excluded(absent).values())
    )


def test_the_declaration_is_part_of_the_configuration(tmp_path: Path) -> None:
    def hashes(declared: str, folder: Path) -> list[str]:
        matrix = parsed(text_of(declared), folder)
        return [matrices.config_sha256(matrix, cell.cell_id) for cell in matrices.cells_of(matrix)]

    first = hashes(DECLARED, tmp_path)
    assert hashes(DECLARED, tmp_path / "elsewhere") == first
    other = hashes(DECLARED.replace("attend", "other"), tmp_path)
    assert [a == b for a, b in zip(first, other, strict=True)] == [True, False] * 2


def test_a_run_hands_the_peer_to_its_process_and_keeps_it(
    tmp_path: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = parsed(text_of(), tmp_path)
    plan = planned(text_of(), tmp_path)
    monkeypatch.setattr(runner_cases, "PLAN", plan)
    executor = FakeExecutor()
    done = runner_cases.run(tmp_path, executor, plan=plan, matrix=matrix)
    peers = {job.axes.path: job.peer for job in executor.jobs}
    assert peers["masked"] is None and peers["dense_mine"] is not None
    assert peers["dense_mine"].folder == str(checkout)
    assert [one.name for one in done.run.manifest.peers] == ["dense_mine"]
    stored = matrices.stored_matrix(done.run.manifest)
    matrices.check_configs(stored, done.run.manifest.cells, "run.jsonl")
    assert isinstance(done, runner.Finished)


def test_a_window_peer_is_asked_for_the_window_alone(tmp_path: Path, checkout: Path) -> None:
    text = text_of("{kind: window, function: 'my_peer:attend', checkout: here}")
    matrix = parsed(text.replace("dense_mine", "window_mine"), tmp_path)
    assert matrix.peers["window_mine"].nsa == {"branches": ["win"]}


def test_a_stored_matrix_imports_no_peer_that_the_users_own_does_not_declare(
    tmp_path: Path, checkout: Path
) -> None:
    folder, text = tmp_path / "m", text_of().replace("checkout: here", "checkout: ../here")
    folder.mkdir()
    stored = parsed(text, folder)
    refuse_stored_code(stored, [checkout])  # where the user works
    with pytest.raises(PerfbenchError, match="a stored file chooses no code to run"):
        refuse_stored_code(stored, [folder])
    (folder / "m.yaml").write_text(text, encoding="utf-8")
    refuse_stored_code(stored, [folder])
    with pytest.raises(PerfbenchError, match="my_peer:attend in .*here"):
        refuse_stored_code(stored, [tmp_path / "other"])
    other = text_of("{kind: dense, function: 'os:getcwd'}")
    with pytest.raises(PerfbenchError, match="peer dense_mine, os:getcwd"):
        refuse_stored_code(parsed(other, folder), [folder])
    ours = parsed(text_of(path="[masked, flex]").split("peers:\n  ")[0], folder)
    refuse_stored_code(ours, [tmp_path / "other"])


def test_the_schema_takes_declared_peers() -> None:
    schema = matrix_schema()
    path = schema["properties"]["axes"]["properties"]["path"]["items"]
    assert "dense_fa4" in json.dumps(path) and "pattern" in json.dumps(path)
    assert {"kind", "function", "checkout"} <= {*schema["$defs"]["PeerSection"]["properties"]}


def test_the_site_holds_a_cell_against_every_dense_peer() -> None:
    axes: dict[str, Any] = {"seq_len": 512, "workload": "attention"}
    paths = ("triton", "dense_cudnn", "dense_fa4", "flex", "flex_window", "fla")
    cells = {path: {**axes, "path": path} for path in paths}
    assert dense_twins("triton", cells) == ["dense_cudnn", "dense_fa4", "flex"]
    assert dense_twins("fla", cells) == ["dense_cudnn", "dense_fa4", "flex"]
    assert dense_twins("flex", cells) == dense_twins("flex_window", cells) == []
    train = {
        path: {**axes, "workload": "train", "path": path}
        for path in ("auto", "dense", "dense_flash")
    }
    assert dense_twins("auto", train) == ["dense"]


def test_a_cell_of_a_peer_that_went_missing_is_not_green(tmp_path: Path, checkout: Path) -> None:
    """In the baseline, and skipped now: MISSING, with the reason."""
    from perfbench.gate.judging import judge
    from perfbench.matrix.policy import GatePolicy
    from perfbench.records.rows import PlannedCell

    whole = planned(text_of(), tmp_path)
    cells: list[PlannedCell] = whole.cells
    base = builders.baseline_of(builders.make_run(cells, gpu=False))
    (checkout / "my_peer.py").unlink()
    of_matrix._located.cache_clear()
    now = planned(text_of(), tmp_path)
    left = [{"cell_id": one.cell_id, "reason": one.reason} for one in now.excluded]
    run = builders.make_run(now.cells, gpu=False, excluded=left)
    judgement = judge(run, base, GatePolicy(min_replicates=1))
    missing = [one for one in judgement.cells if one.verdict == "MISSING"]
    assert len(missing) == 2 and all("holds no module my_peer" in one.reason for one in missing)
    assert judgement.exit_code is not Exit.OK
