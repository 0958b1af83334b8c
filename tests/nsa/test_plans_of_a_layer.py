"""Every operator of a layer's attention both ways, as an H200 has them, is repeated by a plan."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

import nsa.ops
from nsa.ops import operator
from nsa.ops.interval import roles
from nsa.ops.kernels import common, plans, tiles
from nsa.ops.kernels.launch_plan import LaunchPlan
from nsa.ops.kernels.plans import Plans
from nsa.ops.scores import kernels as scores
from tests.cases import randn
from tests.nsa.planned_calls import (
    Computing,
    Zeroed,
    by_body,
    by_plan,
    computing_gpu,
    copied,
    same,
)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Computing]:
    yield from computing_gpu(monkeypatch)


@pytest.fixture
def hopper(gpu: Computing, monkeypatch: pytest.MonkeyPatch) -> Computing:
    """Path triton takes all that an H200 has, of few tokens, on the GPU that is not here."""
    for found in pkgutil.walk_packages(nsa.ops.__path__, "nsa.ops."):
        importlib.import_module(found.name)  # before one does in the midst of a call
    for module in [*sys.modules.values()]:
        for name, value in [*vars(module).items()] if module.__name__.startswith("nsa.ops") else ():
            if isinstance(value, InterpretedFunction):  # what the session may have asked for
                monkeypatch.setattr(module, name, JITFunction(value.fn, **value.kwargs))
    for module in (tiles, roles, scores):
        monkeypatch.setattr(module, "sm_of", lambda device: (9, 0))
    monkeypatch.setattr(common, "COPY_MIN_ELEMENTS", COPY_MIN)
    return gpu


COPY_MIN = 1 << 20  # elements of q


def of_a_layer(tokens: int, batch: int = 1, documents: int = 0, start: str = "") -> list[Any]:
    """(name, inputs) of the operators of a call both ways; each saw what those before returned."""
    B, T, scale, calls = batch, tokens, 0.125, list[Any]()
    q, do = (randn(B, T, 12, 64, seed=seed, dtype=torch.bfloat16) for seed in (1, 2))
    of_keys = [randn(B, T, 2, 64, seed=3 + i, dtype=torch.bfloat16) for i in range(6)]
    gates = randn(B, T, 12, 3, seed=9, dtype=torch.bfloat16).sigmoid()
    first = None
    if documents:
        first = torch.arange(T) // documents * documents
    starts = torch.zeros(B, dtype=torch.int64) if start else None

    def call(name: str, *given: Any) -> Any:
        calls.append((name, [list(x) if isinstance(x, tuple) else x for x in given]))
        with Zeroed():
            return operator.run_by_itself(name, *copied(calls[-1][1]))

    kc, vc, *others = of_keys
    full = 0 if documents or start else 1024
    k, v = call("means", kc, vc, 32, 16)
    oc, lc = call("interval", q, k, v, starts, first, 0, 32, 16, None, scale)
    blocks = call("choose", q, k, lc, starts, first, 0, T, 32, 16, 64, 16, 1, 2, scale)
    options = (starts, 0, 64, full, scale, True)
    os_, ls, lists = call("selected_triton", q, *others[:2], blocks, *options)
    ow, lw = call("interval", q, *others[2:], starts, first, 0, 1, 1, 512, scale)
    kv, saved = [k, v, *others], [oc, os_, ow, lc, ls, lw]
    sizes = [0, 32, 16, 64, 512, full, 0]
    call("joined", gates, q, kv, blocks, [*saved, lists], starts, first, sizes, scale)
    delta, lse, _ = call("gate_products", do, gates, saved)
    rest = (blocks, delta, lse, lists, starts, first, sizes, scale)
    _, dk, dv, *_ = call("joined_backward", do, q, kv, *rest)
    call("means_backward", dk, dv, T, 32, 16)
    call("selected_triton_backward", do, os_, ls, lists, q, *others[:2], blocks, *options)
    call("interval_backward", do, oc, lc, q, k, v, starts, first, 0, 32, 16, None, scale)
    call("gated_sum", gates, oc, os_, ow)
    call("gated_sum_backward", do, gates, oc, os_, ow)
    return calls


@pytest.mark.parametrize(
    "sizes",
    [
        {"tokens": 700},
        {"tokens": 2048},
        {"tokens": 2048, "batch": 3},
        {"tokens": 4096, "documents": 512},
        {"tokens": 2048, "start": "of each row"},
        {"tokens": 8192},
    ],
    ids=str,
)
def test_every_operator_of_a_layer_is_repeated(sizes: dict[str, Any], hopper: Computing) -> None:
    described = 0
    for name, given in of_a_layer(**sizes):
        run = operator._RUNS[name].__wrapped__  # type: ignore[attr-defined]
        one = Plans(run)
        for _ in range(plans.MOST_TRIES):
            one.call(copied(given))
        ((plan),) = one.plans.values()
        assert type(plan) is LaunchPlan, (name, plan)
        want = by_body(run, given)
        one.run = None  # type: ignore[assignment]
        assert same(by_plan(one, given), want), name
        described += any(step.maps for step in plan.steps)
    assert (described > 0) == (sizes["tokens"] * sizes.get("batch", 1) * 768 >= COPY_MIN)
