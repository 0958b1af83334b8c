"""The operators that a step calls are those that its Route makes due, each exactly so often; what
another implementation did, or what was done once and returned again, costs the cell its speed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from nsa.config import ModelConfig
from nsa.ops import sdpa
from nsa.ops.interval import compressed, sliding
from nsa.ops.selected import PATHS, gathered_rows, masked, reference
from nsa.routing import Path
from perfbench.matrix import SDPA, operator_calls
from perfbench.records import Job, LengthProof, Status, StepProof
from perfbench.worker import measure, operators
from perfbench.worker.workloads import workload
from tests.perfbench.jobs import TINY, cell_of, job, route_of
from tests.perfbench.measure_cases import PROOF, assert_no_speed, run

WORKSPACE = 1 << 30
STEPS = [
    ("v2", "train", 64, {}),
    ("v2", "forward", 200, {"batch": 3}),
    ("masked", "train", 64, {}),
    ("masked", "attention_forward", 40, {}),
    ("masked", "chunked_prefill", 200, {"chunk": 64}),
    ("masked", "selected", 200, {}),
    ("v1", "train", 100, {}),
    ("v1", "chunked_prefill", 200, {"chunk": 64}),
    ("v1", "selected", 200, {}),
    ("v1", "decode", 256, {}),
    ("v2", "decode", 256, {}),
    ("v2", "attention", 64, {}),
    ("reference", "train", 40, {}),
    ("dense", "train", 64, {}),
    ("auto", "train", 200, {}),
]


def step_of(asked: Job) -> tuple[dict[str, int], str]:
    """What the second step of a job calls, and how it differs from what is due."""
    model = ModelConfig.from_mapping(asked.model)
    work, route = workload.build(asked), measure.actual_route(asked, model)
    work.step()
    due = operators.due(asked, model, route)
    assert due is not None
    seen = operators.recorded(work.step)
    return seen, operators.Calls(due).fault(seen)


@pytest.mark.parametrize(("path", "kind", "seq_len", "axes"), STEPS)
def test_a_step_calls_what_is_due(path: str, kind: str, seq_len: int, axes: dict[str, Any]) -> None:
    asked = job(path, kind, seq_len)
    seen, fault = step_of(asked.model_copy(update={"axes": replace(asked.axes, **axes)}))
    assert not fault and seen[SDPA] >= 1
    named = f"nsa::selected_{path}"
    assert any(name.startswith("nsa::selected") for name in seen) == (path != "dense")
    assert path in ("dense", "auto") or seen[named] >= 1


def test_a_profiler_and_an_observer_count_the_same() -> None:
    asked = job("v2", "train", profile=True, proof=PROOF)
    row = run(asked)
    assert row.profile is not None and row.profile.operators == step_of(asked)[0]


def test_chunks_of_the_workspace_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsa.ops.selected.v2.WORKSPACE_BYTES", 1 << 20)
    seen, fault = step_of(job("v2", "train", 200))
    assert not fault
    gathered = seen["nsa::selected_v2 > aten::index_select"]
    assert gathered > 2 * seen["nsa::selected_v2"], "more than one chunk, so that it shows"


def test_a_checkpointed_layer_runs_its_forward_twice() -> None:
    cell, route = cell_of("v2"), route_of(cell_of("v2"))
    plain, again = (
        operator_calls(route, cell, model, workspace_bytes=WORKSPACE).exact
        for model in (TINY, replace(TINY, checkpoint_layers=(0, 1)))
    )
    layers = TINY.num_layers
    assert (plain["nsa::selected_v2"], again["nsa::selected_v2"]) == (layers, layers + 1)
    assert plain["nsa::selected_v2_backward"] == again["nsa::selected_v2_backward"] == layers


def test_a_search_by_regions_leaves_a_count_open() -> None:
    model = replace(TINY, nsa=replace(TINY.nsa, selection="hierarchical"))
    cell = cell_of("v1")
    due = operator_calls(route_of(cell, model), cell, model, workspace_bytes=WORKSPACE)
    more = {name: count + (name in due.at_least) for name, count in due.exact.items()}
    fewer = {name: count - (name in due.at_least) for name, count in due.exact.items()}
    assert due.at_least and not operators.differences(due.exact, more, due.at_least)
    assert operators.differences(due.exact, fewer, due.at_least)


@pytest.mark.parametrize("changed", [+1, -1])
def test_one_call_more_or_less_is_named(changed: int) -> None:
    exact = {"nsa::sliding": 4, SDPA: 8}
    got = {**exact, "nsa::sliding": 4 + changed}
    assert operators.differences(exact, got) == (
        f"nsa::sliding was called {4 + changed} times, 4 are due"
    )
    assert "nsa::other was called 1 times, 0 are due" in operators.differences(
        exact, {**exact, "nsa::other": 1}
    )


# Planted: each passed while SDPA's calls were a lower bound for the step as a whole.


def remembered(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Computes once, and returns that again."""
    kept: list[Any] = []

    def again(*tensors: Tensor, **options: Any) -> Any:
        if not kept:
            kept.append(attend(*tensors, **options))
        return kept[0]

    return again


def twice(attend: Callable[..., Any]) -> Callable[..., Any]:
    def both(*tensors: Tensor, **options: Any) -> Any:
        attend(*tensors, **options)
        return attend(*tensors, **options)

    return both


def full_causal(q: Tensor, k: Tensor, v: Tensor, *_: Tensor, scale: float, **__: Any) -> Any:
    return sdpa.causal(q, k, v, scale=scale, kernel="sdpa"), None


def memoised_selected_branch(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(PATHS, Path.V2, remembered(PATHS[Path.V2]))  # type: ignore[arg-type]


def masked_under_v2(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(PATHS, Path.V2, masked.attend)  # type: ignore[arg-type]


def reference_under_v2(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(PATHS, Path.V2, reference.attend)  # type: ignore[arg-type]


def loop_inside_v2(patch: pytest.MonkeyPatch) -> None:
    """The operator's own name, and another way of doing it inside."""
    patch.setattr("nsa.ops.selected.v2.WORKSPACE_BYTES", 1 << 30)
    whole = gathered_rows.forward

    def by_row(q: Tensor, k: Tensor, v: Tensor, rows: Any, **options: Any) -> Tensor:
        return whole(q, k, v, rows, **{**options, "limit_bytes": 1})

    patch.setattr(gathered_rows, "forward", by_row)


def masked_served_by_dense(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(PATHS, Path.MASKED, full_causal)  # type: ignore[arg-type]


def window_twice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sliding, "attend", twice(sliding.attend))


def window_twice_for_a_memoised_compressed_branch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(compressed, "attend", remembered(compressed.attend))
    patch.setattr(sliding, "attend", twice(sliding.attend))


FAULTS = [
    ("v2", memoised_selected_branch, "nsa::selected_v2 was called 0 times, 2 are due"),
    ("v2", masked_under_v2, "nsa::selected_masked was called 2 times, 0 are due"),
    ("v2", reference_under_v2, "nsa::selected_reference was called 2 times, 0 are due"),
    ("v2", loop_inside_v2, "nsa::selected_v2 > aten::index_select was called"),
    ("masked", masked_served_by_dense, "nsa::selected_masked was called 0 times, 2 are due"),
    ("v2", window_twice, "nsa::sliding was called 4 times, 2 are due"),
    (
        "v2",
        window_twice_for_a_memoised_compressed_branch,
        "nsa::compressed_sdpa was called 0 times, 2 are due",
    ),
]


@pytest.mark.parametrize(("path", "plant", "words"), FAULTS)
def test_what_is_not_what_the_route_names_has_no_speed(
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    plant: Callable[[pytest.MonkeyPatch], None],
    words: str,
) -> None:
    asked = job(path, "forward", profile=True, proof=PROOF)
    assert run(asked).status is Status.OK
    plant(monkeypatch)
    # The step's proof sees some of these first; here the witness is alone.
    unseen = {"prove_step": StepProof, "prove_at_length": LengthProof}
    for name, kind in unseen.items():
        monkeypatch.setattr(measure, name, lambda *_, kind=kind: kind(ok=None, absent="a test"))
    row = run(asked)
    assert row.status is Status.WRONG_PATH and words in row.reason
    assert row.profile is not None and row.profile.operators, "the evidence is in the row"
    assert_no_speed(row)
