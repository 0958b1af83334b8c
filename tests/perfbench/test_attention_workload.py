"""Workloads attention and attention_forward: the same function as the layer's, with every gradient,
and nothing else.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa.config import ModelConfig, NSAConfig
from perfbench import roofline
from perfbench.matrix import attention_calls
from perfbench.records.cells import Cell
from perfbench.records.job import Job
from perfbench.records.rows import Status
from perfbench.worker.workloads import attention, workload
from perfbench.worker.workloads.attention import NUM_INPUTS
from perfbench.worker.workloads.workload import Workload
from tests import oracle
from tests.perfbench.jobs import TINY, job
from tests.perfbench.measure_cases import run

pytestmark = pytest.mark.usefixtures("one_thread", "light")
EVERY_PATH = pytest.mark.parametrize("path", ["v2", "masked", "auto", "dense"])
UNEVEN = ModelConfig(
    dim=40,
    num_layers=3,
    num_heads=6,
    num_kv_heads=3,
    head_dim=12,
    v_head_dim=20,
    nsa=replace(TINY.nsa, branches=("cmp", "win"), phi="linear"),
)


def alone(path: str = "v2", kind: str = "attention", seq_len: int = 96, **changes: Any) -> Job:
    return job(path, kind, seq_len, **changes)


def seen(work: Workload, steps: int) -> list[tuple[tuple[Tensor, ...], Tensor]]:
    """(inputs, output) of each call of the module in ``steps`` steps."""
    found: list[tuple[tuple[Tensor, ...], Tensor]] = []
    hook = work.model.register_forward_hook(lambda _, args, o: found.append((args, o)))
    for _ in range(steps):
        work.step()
    hook.remove()
    return found


def gradients(
    monkeypatch: pytest.MonkeyPatch, work: Workload
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """The gradients of one step by the input's name, its output, and the gradient that it was given
    for that.
    """
    taken: list[tuple[Any, ...]] = []
    real = torch.autograd.grad

    def grad(o: Any, wanted: Any, grad_o: Any, **options: Any) -> tuple[Tensor, ...]:
        made = real(o, wanted, grad_o, **options)
        taken.append((wanted, made, o, grad_o))
        return made

    monkeypatch.setattr(torch.autograd, "grad", grad)
    ((args, _),) = seen(work, 1)
    # the step's own ends last: a path's backward may ask for gradients, too
    wanted, made, o, grad_o = taken[-1]
    names = {id(x): name for name, x in zip(work.model.names, args, strict=True)}  # type: ignore[arg-type]
    names |= {id(x): name for name, x in work.model.named_parameters()}
    return {names[id(x)]: g for x, g in zip(wanted, made, strict=True)}, o, grad_o


@EVERY_PATH
def test_a_step_has_every_gradient_and_moves_nothing(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    found, o, grad_o = gradients(monkeypatch, workload.build(alone(path, batch=2)))
    kv = (
        ["k", "v"]
        if path == "dense"
        else ["k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win", "gates"]
    )
    assert set(found) == {"q", *kv}
    assert all(bool(torch.isfinite(g).all()) and float(g.abs().max()) > 0 for g in found.values())
    assert o.shape == grad_o.shape == (2, 96, 4, 16) and grad_o.std() == pytest.approx(1, abs=0.1)


def test_a_branch_that_is_off_has_no_gradient_and_phi_has_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, o, _ = gradients(monkeypatch, workload.build(alone(model=UNEVEN.to_mapping())))
    assert set(found) == {
        "q",
        "k_cmp",
        "v_cmp",
        "k_win",
        "v_win",
        "gates",
        "phi.k.weight",
        "phi.v.weight",
    }
    assert (
        o.shape == (1, 96, 6, 20)
        and found["k_win"].shape == (1, 96, 3, 12)
        and found["v_cmp"].shape == (1, 96, 3, 20)
    )
    no_cmp = replace(TINY, nsa=replace(TINY.nsa, branches=("sel",), phi="linear"))
    found, _, _ = gradients(monkeypatch, workload.build(alone(model=no_cmp.to_mapping())))
    assert set(found) == {
        "q",
        "k_sel",
        "v_sel",
        "gates",
    }, "phi serves the selection, which has no gradient"


def test_dense_is_full_causal_attention_of_the_same_heads() -> None:
    ((q, k, v), o), *_ = seen(workload.build(alone("dense", "attention_forward")), 1)
    assert (
        q.shape == (1, 96, 4, 16) and k.shape == v.shape == (1, 96, 2, 16) and not o.requires_grad
    )
    heads = [x.double()[:, :, [0, 0, 1, 1]] for x in (k, v)]
    logits = torch.einsum("bthd,bshd->bhts", q.double(), heads[0]) / 4
    wanted = torch.einsum(
        "bhts,bshd->bthd",
        logits.masked_fill(~torch.ones(96, 96).tril().bool(), -torch.inf).softmax(-1),
        heads[1],
    )
    torch.testing.assert_close(o.double(), wanted, rtol=1e-4, atol=1e-5)


def test_sparse_is_the_oracles_window_where_only_that_is_on() -> None:
    only = replace(TINY, nsa=replace(TINY.nsa, branches=("win",)))
    ((q, *_, k_win, v_win, gates), o), *_ = seen(
        workload.build(alone("v2", "attention_forward", model=only.to_mapping())), 1
    )
    keep = oracle.kept_window(q, k_win, window=24)
    assert int(keep.sum()) == sum(min(24, t + 1) for t in range(96)) * (keep.numel() // 96**2)
    assert bool(((gates > 0) & (gates < 1)).all()), "gates come activated"
    position = torch.arange(96)
    band = (position[:, None] >= position) & (position[:, None] - position < 24)
    k, v = (x.double()[:, :, [0, 0, 1, 1]] for x in (k_win, v_win))
    p = (
        (torch.einsum("bthd,bshd->bhts", q.double(), k) / 4)
        .masked_fill(~band, -torch.inf)
        .softmax(-1)
    )
    wanted = gates[..., 2, None].double() * torch.einsum("bhts,bshd->bthd", p, v)
    torch.testing.assert_close(o.double(), wanted, rtol=1e-4, atol=1e-5)


def test_every_step_is_fed_other_inputs_and_the_seed_decides() -> None:
    fed = [
        args
        for args, _ in seen(workload.build(alone("masked", "attention_forward")), NUM_INPUTS + 1)
    ]
    assert not any(torch.equal(fed[i][0], fed[j][0]) for i in range(NUM_INPUTS) for j in range(i))
    assert torch.equal(fed[0][0], fed[NUM_INPUTS][0])
    same, other = (
        seen(workload.build(alone("masked", "attention_forward", seed=seed)), 1)[0][0][0]
        for seed in (5, 6)
    )
    assert torch.equal(fed[0][0], same) and not torch.equal(same, other)


@EVERY_PATH
@pytest.mark.parametrize("kind", ["attention", "attention_forward"])
def test_a_row_is_one_layer_proved_and_witnessed(path: str, kind: str) -> None:
    planned_job = alone(path, kind, batch=2, profile=True)
    row = run(planned_job)
    assert (row.status, row.reason, row.engaged_by) == (Status.OK, "", "call")
    assert row.tokens_per_step == 2 * 96 and row.cache is None
    assert row.engaged == dict.fromkeys(
        planned_job.plan.counters, row.steps_per_sample * len(row.samples_s)
    ), "one layer, however many the model has"
    assert row.parity is not None and ("dq" in row.parity.tensors) == (kind == "attention")
    assert row.profile is not None and row.profile.witness_ok is True
    assert attention_calls.layer_calls(Cell(kind, 96, path), TINY) == 1


@pytest.mark.parametrize("dense", [False, True])
def test_the_floor_is_attention_alone(dense: bool) -> None:
    """UNEVEN: 6 heads of 12 and 20 over 3 kv heads; cmp and win on; 2 x 50 tokens."""
    shape: dict[str, Any] = {"batch": 2, "tokens": 50, "dense": dense}
    nsa: NSAConfig = UNEVEN.nsa
    seen_blocks = sum(
        max(0, (t + 1 - nsa.cmp_block) // nsa.cmp_stride + 1)
        for t in range(50)
        if t + 1 >= nsa.cmp_block
    )
    pairs = 50 * 51 // 2 if dense else seen_blocks + sum(min(24, t + 1) for t in range(50))
    forward = 2 * 6 * (12 + 20) * 2 * pairs
    assert roofline.step_flops(UNEVEN, workload="attention_forward", **shape) == forward
    assert roofline.step_flops(UNEVEN, workload="attention", **shape) == 3 * forward
    numbers = 6 * 12 + (1 if dense else 2) * 3 * (12 + 20) + (0 if dense else 6 * 2) + 6 * 20
    assert (
        roofline.step_min_bytes(UNEVEN, workload="attention_forward", dtype="bf16", **shape)
        == 2 * 50 * numbers * 2
    )
    assert (
        roofline.step_min_bytes(UNEVEN, workload="attention", dtype="bf16", **shape)
        == 2 * 2 * 50 * numbers * 2
    )


def test_inputs_are_leaves_only_where_a_gradient_is_wanted() -> None:
    module = attention.module_of(TINY, "v2", "off")
    size: dict[str, Any] = {"batch": 1, "tokens": 8, "dtype": torch.float32, "device": "cpu"}
    assert [x.requires_grad for x in next(attention.inputs(module, backward=True, **size))] == [
        True
    ] * 8 + [False]
    assert [x.requires_grad for x in next(attention.inputs(module, backward=False, **size))] == [
        False
    ] * 8
