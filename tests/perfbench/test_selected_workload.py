"""Workloads selected and selected_forward: planned, proved over their own kind of blocks, timed,
and reported against their floor.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa.config import NSAConfig, preset
from nsa.routing import Capability, Problem
from nsa.settings import Settings
from perfbench import roofline
from perfbench.errors import PerfbenchError
from perfbench.gate.hard_rules import WHOLE
from perfbench.matrix import attention_calls, matrix, plan
from perfbench.records.cells import SELECTED, SELECTIONS, TRAINED, Cell, proof_key
from perfbench.records.job import Job
from perfbench.records.rows import Status
from perfbench.worker.parity import proof
from perfbench.worker.workloads import workload
from perfbench.worker.workloads.attention import NUM_INPUTS
from tests.perfbench import builders as b
from tests.perfbench.jobs import TINY, cell_of, job
from tests.perfbench.measure_cases import run
from tests.perfbench.test_attention_workload import seen
from tools.studies import floors
from tools.studies.floors import Rates

pytestmark = pytest.mark.usefixtures("one_thread", "light")
CPU = Capability("cpu", "cpu", None, None, "no GPU", "2.13.0")
# what a trained model chose is in tests/perfbench/test_trained_selection.py
KINDS = pytest.mark.parametrize("kind", [kind for kind in SELECTIONS if kind != TRAINED])


def alone(
    path: str = "masked",
    kind: str = "random",
    name: str = "selected",
    seq_len: int = 144,
    **changes: Any,
) -> Job:
    cell = cell_of(
        path,
        name,
        seq_len,
        selection=kind,
        **{axis: changes.pop(axis) for axis in ("batch", "compile") if axis in changes},
    )
    planned = {
        "axes": cell,
        "cell_id": cell.cell_id,
        "plan": b.route_line(attention_calls.route_of(cell, TINY, Settings(), CPU)),
    }
    return job(path, name, seq_len, **{**planned, **changes})


# --- the matrix and its plan


def text(axes: str, model: str = "tiny", more: str = "") -> str:
    return (
        f"version: 1\nname: m\ntarget: {{gpu: none}}\nmodel: {model}\naxes: {{{axes}, seq_len:"
        f" [64], dtype: [fp32]}}\n{more}"
    )


def planned(axes: str, model: str = "tiny", more: str = "") -> plan.Plan:
    return plan.build_plan(
        matrix.parse_matrix(text(axes, model, more), "m.yaml"),
        only=[],
        capability=CPU,
        settings=Settings(),
    )


def test_a_cell_is_named_by_its_selection_unless_it_is_the_default() -> None:
    ids = [
        cell.cell_id
        for cell in planned(
            "workload: [selected], path: [v2], fa2: [off], selection: [own, hot]"
        ).cells
    ]
    start = "dtype=fp32,fa2=off,path=v2"
    assert ids == [
        f"{start},seq_len=64,workload=selected",
        f"{start},selection=hot,seq_len=64,workload=selected",
    ]


def test_the_axis_means_nothing_elsewhere() -> None:
    cells = planned(
        "workload: [attention, forward], path: [v2], fa2: [off], selection: [random, hot]"
    ).cells
    assert [(cell.axes.workload, cell.axes.selection) for cell in cells] == [
        ("attention", "own"),
        ("forward", "own"),
    ]
    assert Cell("train", 64, "v2", selection="hot") == Cell("train", 64, "v2")


@pytest.mark.parametrize("path", ["reference", "v1", "v2", "masked", "auto", "adaptive"])
def test_a_route_is_the_selected_branch_alone(path: str) -> None:
    (cell,) = planned(f"workload: [selected], path: [{path}], fa2: [off]").cells
    taken = {"auto": "masked", "adaptive": "v1"}.get(path, path)
    assert cell.route.counters[0] == f"sel.{taken}" and cell.layers == 1
    assert all(counter.startswith("sel.") for counter in cell.route.counters)


@pytest.mark.parametrize(
    ("axes", "model", "said"),
    [
        (
            "workload: [selected], path: [masked], selection: [randon]",
            "tiny",
            "got the text 'randon', wanted one of own, random, local",
        ),
        (
            "workload: [selected], path: [dense]",
            "tiny",
            "workload=selected with path=dense: full attention selects nothing",
        ),
        (
            "workload: [selected_forward], path: [dense_flash]",
            "tiny",
            "workload=selected_forward with path=dense_flash: full",
        ),
        (
            "workload: [selected], path: [masked]",
            "{preset: tiny, nsa: {branches: [cmp, win]}}",
            "wanted sel among them",
        ),
        (
            "workload: [selected], path: [masked]",
            "{preset: tiny, nsa: {selection: hierarchical}}",
            "its search may leave slots empty",
        ),
        ("workload: [selected], path: [masked], fa2: [on]", "tiny", "path masked cannot use it"),
        (
            "workload: [selected], path: [reference], compile: [on]",
            "tiny",
            "its loop runs on the host, which no graph holds",
        ),
    ],
)
def test_what_no_machine_can_time_is_refused_with_the_reason(
    axes: str, model: str, said: str
) -> None:
    with pytest.raises(PerfbenchError) as refused:
        planned(axes, model)
    assert said in str(refused.value)


def test_dense_is_excluded_with_a_reason_and_a_search_has_the_other_kinds() -> None:
    why = "exclude: [{path: dense, reason: it selects nothing}]\n"
    found = planned("workload: [selected], path: [masked, dense], fa2: [off]", more=why)
    assert len(found.cells) == 1 and [one.reason for one in found.excluded] == [
        "it selects nothing"
    ]
    search = "{preset: tiny, nsa: {selection: hierarchical}}"
    assert (
        len(
            planned(
                "workload: [selected], path: [masked], fa2: [off], selection: [random, local, hot]",
                search,
            ).cells
        )
        == 3
    )


def test_a_rule_for_the_axis_elsewhere_is_dead() -> None:
    more = "expect: [{match: {workload: forward, selection: hot}, engaged: [sel.masked]}]\n"
    with pytest.raises(PerfbenchError, match="dead rule"):
        planned("workload: [forward], path: [masked], selection: [hot]", more=more)


def test_a_proof_is_for_one_kind_alone() -> None:
    keys = {
        proof_key(cell_of("v2", "selected", tokens, selection=kind), ["sel.v2"], own_length=False)
        for kind in SELECTIONS
        for tokens in (64, 128)
    }
    assert len(keys) == len(SELECTIONS)


def test_a_forward_is_held_against_the_step_that_has_it() -> None:
    assert WHOLE["selected_forward"] == "selected"


# --- the step


@KINDS
def test_a_step_has_the_gradients_of_q_k_and_v(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    taken: list[Any] = []
    real = torch.autograd.grad

    def grad(o: Tensor, wanted: list[Tensor], given: Tensor) -> tuple[Tensor, ...]:
        taken.append((wanted, real(o, wanted, given), given))
        return taken[-1][1]  # type: ignore[no-any-return]

    work = workload.build(alone(kind=kind, batch=2))
    monkeypatch.setattr(torch.autograd, "grad", grad)
    ((args, o),) = seen(work, 1)
    ((wanted, made, given),) = taken
    assert [id(x) for x in wanted] == [id(x) for x in args[:3]] and not args[3].is_floating_point()
    assert all(bool(torch.isfinite(g).all()) and float(g.abs().max()) > 0 for g in made)
    assert (
        o.shape == given.shape == (2, 144, 4, 16)
        and work.tokens_per_step == 288
        and not list(work.model.parameters())
    )


@KINDS
def test_a_forward_is_attention_over_the_given_blocks(kind: str) -> None:
    """By hand in fp64, a query and head at a time: the keys of its blocks up to itself."""
    ((args, o),) = seen(workload.build(alone("v2", kind, "selected_forward")), 1)
    q, k, v = (x[0].double() for x in args[:3])
    assert not o.requires_grad and args[3].shape == (1, 144, 2, 5)
    for t in (0, 15, 16, 79, 80, 100, 143):
        for head in range(4):
            held = [j for j in args[3][0, t, head // 2].tolist() if j >= 0]
            keys = [s for j in held for s in range(16 * j, min(16 * j + 16, t + 1))]
            p = (k[keys, head // 2] @ q[t, head] / 4).softmax(0)
            torch.testing.assert_close(
                o[0, t, head].double(), p @ v[keys, head // 2], rtol=1e-4, atol=1e-5
            )


def test_every_step_is_fed_other_inputs_and_blocks_and_the_seed_decides() -> None:
    args = [
        given for given, _ in seen(workload.build(alone(name="selected_forward")), NUM_INPUTS + 1)
    ]
    for which in (0, 3):
        assert not any(
            torch.equal(args[i][which], args[j][which]) for i in range(NUM_INPUTS) for j in range(i)
        )
        assert torch.equal(args[0][which], args[NUM_INPUTS][which])
        same, other = (
            seen(workload.build(alone(name="selected_forward", seed=seed)), 1)[0][0][which]
            for seed in (5, 6)
        )
        assert torch.equal(args[0][which], same) and not torch.equal(same, other)


@pytest.mark.parametrize("path", ["reference", "v1", "v2", "masked", "auto"])
@pytest.mark.parametrize("name", SELECTED)
def test_a_row_is_one_branch_proved_and_witnessed(path: str, name: str) -> None:
    asked = alone(path, "local", name, 96, profile=True)
    row = run(asked)
    assert (row.status, row.reason) == (Status.OK, "")
    assert row.engaged == dict.fromkeys(
        asked.plan.counters, row.steps_per_sample * len(row.samples_s)
    )
    assert row.parity is not None and set(row.parity.tensors) == {"blocks", "o"} | (
        {"dq", "dk_sel", "dv_sel"} if name == "selected" else set()
    )
    assert row.parity.tokens == (5 + 4) * 16 + 1 and not row.parity.own_length
    assert row.profile is not None and row.profile.witness_ok is True and row.cache is None
    assert row.physics is not None and row.physics.flops == roofline.step_flops(
        TINY, workload=name, batch=1, tokens=96, dense=False
    )


@KINDS
def test_the_proof_is_over_blocks_of_the_cells_kind(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    seen: list[Tensor] = []
    real = proof.selected_attention
    monkeypatch.setattr(
        proof,
        "selected_attention",
        lambda q, k, v, blocks, **o: seen.append(blocks) or real(q, k, v, blocks, **o),
    )
    row = run(alone(kind=kind))
    assert row.status is Status.OK and row.parity is not None and row.parity.tensors["blocks"] == 0
    free = {
        tuple(j for j in line if 1 <= j <= 6) for line in seen[0][:, -17:].flatten(0, 2).tolist()
    }
    assert (len(free) == 1) == (kind == "hot")
    small = [blocks for blocks in seen if blocks.shape == seen[0].shape]
    assert all(blocks is seen[0] for blocks in small) and len(small) < len(seen)


@pytest.mark.parametrize(
    ("what", "change", "worst"),
    [
        (
            "selected_attention",
            lambda real: (
                lambda q, k, v, blocks, **o: real(q, k, v, blocks.roll(1, 1).clamp(min=0), **o)
            ),
            "o|dq|dk|dv",
        ),
        (
            "selected_attention",
            lambda real: lambda q, k, v, blocks, **o: real(q, k.detach(), v, blocks, **o),
            "dk_sel",
        ),
        ("selected_blocks", lambda real: lambda *a: real(*a).flip(-1), "blocks"),
        ("selected_blocks", lambda real: lambda *a: real(*a)[..., :-1].contiguous(), "blocks"),
    ],
)
def test_a_branch_or_blocks_that_are_wrong_are_never_timed(
    monkeypatch: pytest.MonkeyPatch, what: str, change: Any, worst: str
) -> None:
    monkeypatch.setattr(proof, what, change(getattr(proof, what)))
    row = run(alone())
    assert row.status is Status.PARITY and row.tok_per_s is None
    assert any(
        row.reason.startswith(f"differs from the fp64 oracle: {name}") for name in worst.split("|")
    )


# --- physics and floors


def keys_by_loop(config: NSAConfig, tokens: int) -> tuple[int, int]:
    """(pairs, filled slots) of one query head, by looking at every query."""
    pairs = slots = 0
    for t in range(tokens):
        held = min(config.num_selected, t // config.sel_block + 1)
        slots += held
        pairs += (held - 1) * config.sel_block + t % config.sel_block + 1
    return pairs, slots


@pytest.mark.parametrize("tokens", [1, 80, 131, 600])
@pytest.mark.parametrize("adaptive", [False, True])
def test_work_is_counted_by_the_keys_of_the_filled_slots(tokens: int, adaptive: bool) -> None:
    """4 heads of 16 and 20 over 2 KV heads; the adaptive rule leaves 8 of 16 slots up to 512 keys,
    and 12 up to 1,024.
    """
    nsa = replace(TINY.nsa, num_selected=16, adaptive_num_selected=adaptive)
    model = replace(TINY, v_head_dim=20, nsa=nsa)
    slots = (8 if tokens <= 512 else 12) if adaptive else 16
    pairs, filled = keys_by_loop(replace(nsa, num_selected=slots), tokens)
    at: dict[str, Any] = {"batch": 3, "tokens": tokens, "dense": False}
    flops = 3 * 4 * pairs * 2 * (16 + 20)
    assert [roofline.step_flops(model, workload=name, **at) for name in SELECTED] == [
        3 * flops,
        flops,
    ]
    numbers, blocks = 3 * tokens * (4 + 2) * (16 + 20), 3 * 2 * filled * 4
    moved = [roofline.step_min_bytes(model, workload=name, dtype="bf16", **at) for name in SELECTED]
    assert moved == [2 * 2 * numbers + blocks, 2 * numbers + blocks]


def test_floors_are_one_part_and_the_traffic() -> None:
    """At 1 GFLOP/s, 1 Gexp/s and 1 GB/s, so that products bind: 64 FLOP a pair forward, 160
    backward, of heads of 16.
    """
    pairs, filled = keys_by_loop(TINY.nsa, 131)
    forward, backward = floors.selected(
        TINY, batch=2, tokens=131, dtype="bf16", rates=Rates(1e9, 1e9, 1e9)
    )
    assert forward.parts_ms == pytest.approx({"sel": 2 * 4 * pairs * 64 / 1e6})
    assert backward.parts_ms == pytest.approx({"sel": 2 * 4 * pairs * 160 / 1e6})
    q = o = 2 * 131 * 4 * 16 * 2
    kv, blocks = 2 * 131 * 2 * 32 * 2, 2 * 2 * filled * 4
    assert forward.traffic_ms == pytest.approx((q + kv + blocks + o) / 1e6)
    assert backward.traffic_ms == pytest.approx((2 * q + 2 * kv + blocks + o) / 1e6)


def test_the_floor_is_that_of_the_branch_within_the_whole() -> None:
    at: dict[str, Any] = {
        "batch": 1,
        "tokens": 65536,
        "dtype": "bf16",
        "rates": Rates(742e12, 3.9e12, 3.02e12),
    }
    model = preset("m7c_125m")
    whole = [way(model, dense=False, **at) for way in (floors.forward, floors.backward)]
    assert [one.parts_ms["sel"] for one in floors.selected(model, **at)] == [
        one.parts_ms["sel"] for one in whole
    ]


def test_a_call_is_routed_as_the_public_function_routes_it() -> None:
    whole = Problem.of(TINY, batch=2, tokens=64, dtype="float32")
    assert (whole.scores, whole.whole) == ("", True)
    planned = attention_calls.of_selected(whole)
    assert (
        planned.branches,
        planned.scores,
        planned.whole,
        planned.select_all_tokens,
        planned.sel_block,
    ) == (
        ("sel",),
        None,
        False,
        None,
        16,
    )
