"""The plan: routes and refusals for every cell, without torch and without the card."""

import json
import pathlib
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from nsa import capability, routing
from nsa.routing import Capability
from nsa.settings import Settings, load
from perfbench.errors import Exit, PerfbenchError
from perfbench.matrix import attention_calls
from perfbench.matrix import matrix as matrices
from perfbench.matrix import plan as plans
from perfbench.matrix.rules import COUNTERS
from perfbench.records import AXES, Cell

ROOT = pathlib.Path(__file__).parents[2]
H100 = Capability(
    "cuda", "NVIDIA H100 80GB HBM3", (9, 0), "torch.varlen 2.13.0", "", "2.13.0", "triton 3.6.0", ""
)
BARE = Capability(
    "cuda", "NVIDIA H100 80GB HBM3", (9, 0), None, "flash_attn is not installed", "2.13.0"
)
CPU = Capability("cpu", "cpu", None, "torch.varlen 2.13.0", "", "2.13.0")
H200 = Capability(
    "cuda", "NVIDIA H200", (9, 0), "torch.varlen 2.13.0", "", "2.13.0", "triton 3.6.0", ""
)
OF_TARGET = {
    "none": CPU,
    "H100": H100,
    "H200": H200,
    "A100": capability.assumed("a100"),
    "RTX 4090": capability.assumed("rtx4090"),
}

TEXT = """\
version: 1
name: t
target: {gpu: H100}
model: m7c_125m
axes:
  workload: [forward]
  seq_len: [512]
  path: [v1, v2, masked, dense]
  fa2: [on, off]
measure: {processes: 3, warmup_s: 1, max_s: 2}
"""


def shipped(name: str) -> matrices.Matrix:
    return matrices.load_matrix(ROOT / "matrices" / f"{name}.yaml")


def build(
    matrix: matrices.Matrix,
    on: Capability = H100,
    only: list[str] | None = None,
    env: dict[str, str] | None = None,
) -> plans.Plan:
    return plans.build_plan(
        matrix, only=only or [], capability=on, settings=load(env) if env else Settings()
    )


def refused(matrix: matrices.Matrix, on: Capability, env: dict[str, str] | None = None) -> str:
    with pytest.raises(PerfbenchError) as caught:
        build(matrix, on, env=env)
    assert caught.value.exit_code is Exit.USAGE
    return str(caught.value)


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "matrices").glob("*.yaml")))
def test_shipped_matrices_plan_without_warnings(name: str) -> None:
    matrix = shipped(name)
    plan = build(matrix, OF_TARGET[matrix.target.gpu])
    assert plan.warnings == []
    assert all(cell.expect.engaged for cell in plan.cells), (
        "a cell without an expectation could fall back unseen"
    )
    for cell in plan.cells:
        assert set(cell.expect.engaged) <= set(cell.route.counters)


def test_h100_is_the_matrix_of_the_issue() -> None:
    plan = build(shipped("h100"))
    cells = {cell.cell_id for cell in plan.cells}
    assert {
        "path=dense,seq_len=8192,workload=train",
        "fa2=off,path=v1,seq_len=1024,workload=forward",
    } <= cells
    assert {
        "fa2=off,path=reference,seq_len=128,workload=train",
        "batch=4,fa2=on,path=masked,seq_len=2048,workload=train",
    } <= cells
    assert not any("path=v1" in c and "seq_len=2048" in c for c in cells)
    assert all(e.reason for e in plan.excluded)
    assert len(plan.excluded) == 16


def minutes(planned: plans.Plan) -> float:
    """Of the estimate, which is a sum of what the matrix asks for."""
    return planned.estimate_s / 60


def test_cpu_fits_ninety_seconds_and_the_demo_four_minutes() -> None:
    assert minutes(build(shipped("cpu"), CPU)) <= 1.5
    assert minutes(build(shipped("h100-demo"))) <= 3


def test_routes_follow_the_axes() -> None:
    counters = {
        cell.cell_id: cell.route.counters
        for cell in build(matrices.parse_matrix(TEXT, "t.yaml")).cells
    }
    assert counters["fa2=on,path=v2,seq_len=512,workload=forward"] == [
        "cmp.sdpa",
        "sel.v2",
        "sel.fa2",
        "win.fa2",
    ]
    assert counters["fa2=off,path=masked,seq_len=512,workload=forward"] == [
        "cmp.sdpa",
        "sel.masked",
        "sel.sdpa",
        "win.sdpa",
    ]
    assert counters["path=dense,seq_len=512,workload=forward"] == ["dense.sdpa"]


@pytest.mark.parametrize(
    ("model", "layers"), [("m7c_125m", 12), ("{preset: m7c_125m, num_layers: 5}", 5)]
)
def test_cells_say_how_many_layers_their_counters_stand_for(model: str, layers: int) -> None:
    plan = build(
        matrices.parse_matrix(TEXT.replace("model: m7c_125m", f"model: {model}"), "t.yaml")
    )
    assert {cell.layers for cell in plan.cells} == {layers}


def test_route_line_keeps_reasons_rejections_and_notes() -> None:
    cell = build(
        matrices.parse_matrix(TEXT, "t.yaml"),
        env={"NSA_SEL_RANGES_V2": "0"},
        only=["path=v2", "fa2=off"],
    ).cells[0]
    assert cell.route.counters[1] == "sel.v1"
    assert cell.route.notes == ["NSA_SEL_RANGES_V2=0 (environment) turns path=v2 into v1"]
    assert {"alternative": "fa2 for win", "reason": "fa2=off was asked for"} in cell.route.rejected
    assert all(branch.reason for branch in cell.route.branches)


def test_dense_ignores_the_settings_of_the_selected_branch() -> None:
    plan = build(
        matrices.parse_matrix(TEXT, "t.yaml"), env={"NSA_SEL_RANGES_V2": "0"}, only=["path=dense"]
    )
    assert plan.cells[0].route.notes == []


def test_every_cell_that_no_route_serves_is_named_with_every_reason() -> None:
    message = refused(matrices.parse_matrix(TEXT, "t.yaml"), CPU)
    for path in ("v1", "v2", "masked"):
        assert f"fa2=on,path={path},seq_len=512,workload=forward" in message
        assert f"fa2=off,path={path}" not in message
    assert "3 cell(s)" in message
    assert "device cpu is not CUDA" in message
    assert "Next: add the cells to `exclude:`" in message
    assert "flash_attn is not installed" in refused(matrices.parse_matrix(TEXT, "t.yaml"), BARE)


def test_reasons_of_different_cells_are_all_given() -> None:
    message = refused(
        matrices.parse_matrix(TEXT.replace("[512]", "[512]\n  dtype: [bf16, fp32]"), "t.yaml"),
        H100,
        {"NSA_FORCE_SEL_MASK": "1"},
    )
    assert "requests path=masked, and the call requests path=v2" in message
    assert "dtype float32 is not one of" in message


def test_only_leaves_unservable_cells_out() -> None:
    assert len(build(matrices.parse_matrix(TEXT, "t.yaml"), CPU, only=["fa2=off"]).cells) == 3


def test_only_is_checked() -> None:
    with pytest.raises(PerfbenchError, match="they have seq_len: 512"):
        build(matrices.parse_matrix(TEXT, "t.yaml"), only=["seq_len=1024"])


def test_expectation_at_odds_with_the_route_is_a_warning() -> None:
    plan = build(shipped("h100-demo"), env={"NSA_FORCE_SEL_MASK": "1"}, only=["path=auto"])
    assert len(plan.warnings) == 1
    assert (
        "batch=8,path=auto,seq_len=4096,workload=forward will be WRONG_PATH: expects sel.triton"
        in plan.warnings[0]
    )


def test_dead_exclusions_are_warned_of() -> None:
    text = TEXT + "exclude: [{path: reference, reason: slow}]\n"
    assert (
        "t.yaml:11: exclude {path: reference} matches no cell"
        in build(matrices.parse_matrix(text, "t.yaml")).warnings[0]
    )


def test_every_counter_of_every_route_is_known_to_expect() -> None:
    model = shipped("h100").model
    with_triton = replace(H100, triton_provider="triton 3.7.1", triton_reason="")
    for on in (with_triton, H100, BARE, CPU):
        for path in routing.PATH_REQUESTS:
            if path == routing.Path.TRITON and on.triton_provider is None:
                continue  # refused there
            route = routing.plan(
                Settings().request(path),
                model,
                batch=1,
                tokens=128,
                dtype="bfloat16",
                capability=on,
            )
            assert set(route.counters) <= set(COUNTERS)
    problem = routing.Problem.of(model, batch=1, tokens=128, dtype="bfloat16")
    assert {
        c for kind in routing.DENSE_KINDS for c in routing.route_dense(kind, problem, H100).counters
    } <= set(COUNTERS)


def test_estimate_counts_starts_proofs_warmups_and_windows() -> None:
    seven = [Cell("train", 2048, "v2", "on", batch) for batch in range(1, 8)]
    matrix = matrices.parse_matrix(TEXT, "t.yaml")
    assert plans.estimate_s(matrix, seven, H100) == pytest.approx(7 * (20 + 3 * (8.0 + 1 + 2 + 1)))
    each = 7 * 3 * (0.9 + 1 + 2)
    assert plans.estimate_s(matrix, seven, CPU) == pytest.approx(each + 3 * 4.2 + 7 * 0.5)
    fixed = matrices.parse_matrix(
        TEXT.replace("max_s: 2", "max_s: 2, samples: 10, min_sample_ms: 50"), "t.yaml"
    )
    assert plans.estimate_s(fixed, seven[:1], H100) == pytest.approx(20 + 3 * (8.0 + 1 + 0.5 + 1))
    shared = matrices.parse_matrix(
        TEXT.replace("max_s: 2", "max_s: 2, prepare_together: 4"), "t.yaml"
    )
    assert plans.estimate_s(shared, seven, H100) == pytest.approx(7 * (20 + 3 * (2.0 + 1 + 2 + 1)))
    compiled = [replace(one, compile="on") for one in seven]
    more = plans.estimate_s(matrix, compiled, H100) - plans.estimate_s(matrix, seven, H100)
    assert more == pytest.approx(7 * 20.0), "once a cell"
    forward = [replace(one, workload="forward") for one in seven]
    assert plans.estimate_s(matrix, forward, H100) == pytest.approx(7 * 3 * (8.0 + 1 + 2 + 1))


def test_a_plan_names_every_axis_in_its_order_whatever_that_of_the_matrix() -> None:
    printed = plans.plan_json(build(matrices.parse_matrix(TEXT, "t.yaml")))["cells"]
    assert {tuple(cell["axes"]) for cell in printed} == {tuple(AXES)}


def test_a_plan_asks_once_for_each_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: dict[str, list[str]] = {"route_of": [], "config_sha256": [], "expect_for": []}

    def count(module: Any, name: str, id_of: Callable[..., str]) -> None:
        real = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *args: calls[name].append(id_of(*args)) or real(*args)
        )

    matrix = shipped("h100")
    count(attention_calls, "route_of", lambda cell, *_: cell.cell_id)
    count(matrices, "config_sha256", lambda _, cell_id: cell_id)
    count(matrices, "expect_for", lambda _, cell: cell.cell_id)
    cells = [cell.cell_id for cell in build(matrix).cells]
    assert all(ids == cells for ids in calls.values()) and len(set(cells)) == len(cells) > 10


def test_text_shows_routes_exclusions_and_minutes() -> None:
    matrix = shipped("h100")
    plan = build(matrix)
    text = plans.plan_text(plan, matrix)
    for cell in plan.cells:
        assert cell.cell_id in text
    for excluded in plan.excluded:
        assert excluded.cell_id in text
        assert excluded.reason in text
    assert "sel.v2(fa2)" in text
    assert "Python loop over rows" in text
    assert f"Estimated: {plan.estimate_s / 60:.1f} minutes" in text
    assert max(map(len, text.splitlines())) < 200


def test_text_without_exclusions_and_with_a_warning() -> None:
    dead = 'exclude:\n  - {path: v2, seq_len: 999, reason: "x"}\nmeasure:'
    text = TEXT.replace("processes: 3", "processes: 1").replace("measure:", dead, 1)
    matrix = matrices.parse_matrix(text, "t.yaml")
    text = plans.plan_text(build(matrix), matrix)
    assert "Excluded: none" in text
    assert "x 1 replicate\n" in text
    assert "exclude {path: v2, seq_len: 999} matches no cell" in text.split("warning: t.yaml:")[1]


def test_json_holds_the_same() -> None:
    matrix = shipped("h100")
    plan = build(matrix)
    data = json.loads(json.dumps(plans.plan_json(plan)))
    assert [c["cell_id"] for c in data["cells"]] == [c.cell_id for c in plan.cells]
    assert data["excluded"][0] == {
        "cell_id": plan.excluded[0].cell_id,
        "reason": plan.excluded[0].reason,
    }
    assert data["estimate_s"] == plan.estimate_s


def test_planning_imports_no_torch() -> None:
    code = """
import sys
from nsa import capability
from nsa.settings import Settings
from perfbench.matrix import build_plan, load_matrix, plan_text
m = load_matrix("matrices/h100.yaml")
built = build_plan(m, only=[], capability=capability.assumed("h100"), settings=Settings())
print(plan_text(built, m))
heavy = {"torch", "pandas", "matplotlib", "scipy", "numpy", "triton", "rich"} & set(sys.modules)
assert not heavy, heavy
rooms = {name.split(".")[1] for name in sys.modules if name.startswith("perfbench.")}
assert rooms == {"errors", "text", "older_nsa", "records", "roofline", "matrix"}, rooms
from perfbench.records import AXES, Cell
from perfbench.records import Manifest, Replicate
assert not (Manifest.__pydantic_complete__ or Replicate.__pydantic_complete__), "built unused"
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stderr
    assert "Estimated:" in done.stdout
