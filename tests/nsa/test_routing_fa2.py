"""FA-2 at the router: `on` is FA-2 or a RouteError with every reason, `auto` without it says why,
and what its minimum length outranks.
"""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given

from nsa.routing import Capability, Problem, Request, RouteError, route
from nsa.routing.support import fa2_reasons
from tests.nsa.routing_cases import CPU, H100, NO_FA2, PROBLEM, TRITON, V100, capabilities, problems


@given(problem=problems, capability=capabilities)
def test_fa2_on_is_served_by_fa2_wherever_it_can_be_or_refused(
    problem: Problem, capability: Capability
) -> None:
    reasons = fa2_reasons(problem, capability)
    try:
        found = route(Request("v2", "on"), problem, capability)
    except RouteError as refused:
        for reason in reasons if {"sel", "win"} & set(problem.branches) else []:
            assert reason in str(refused)
        assert reasons or problem.ragged
        assert "Next:" in str(refused)
        return
    assert all(b.kernel == "fa2" for b in found.branches if b.branch != "cmp")


@pytest.mark.parametrize("path", ["auto", "v2"])
@pytest.mark.parametrize("branches", [("sel",), ("cmp", "sel"), ("sel", "win")])
@pytest.mark.parametrize("capability", [CPU, NO_FA2, V100], ids=lambda c: c.device_name)
def test_fa2_on_is_never_dropped_silently(
    path: str, branches: tuple[str, ...], capability: Capability
) -> None:
    with pytest.raises(RouteError, match="fa2=on"):
        route(Request(path, "on"), dataclasses.replace(PROBLEM, branches=branches), capability)


def test_a_refusal_lists_every_reason() -> None:
    problem = dataclasses.replace(PROBLEM, head_dim=60, v_head_dim=300, dtype="float32")
    broken = dataclasses.replace(NO_FA2, sm=(7, 0))
    with pytest.raises(RouteError) as caught:
        route(Request("v2", "on"), problem, broken)
    for word in (
        "not installed",
        "SM 7.0 is below 8.0",
        "float32",
        "differ (60 and 300)",
        "head_dim 60",
        "v_head_dim 300",
        "fa2=off",
    ):
        assert word in str(caught.value)


def test_fa2_on_for_the_compressed_branch_is_refused() -> None:
    with pytest.raises(RouteError, match="compressed branch.*staircase"):
        route(Request("auto", "on"), dataclasses.replace(PROBLEM, branches=("cmp",)), H100)


@pytest.mark.parametrize("capability", [NO_FA2, V100, CPU], ids=lambda c: c.device_name)
def test_fa2_auto_without_fa2_is_off_with_the_reason(capability: Capability) -> None:
    found = route(Request("v2", "auto"), PROBLEM, capability)
    assert {b.kernel for b in found.branches} == {"sdpa"}
    said = {r.alternative: r.reason for r in found.rejected}
    assert said["fa2 for sel.v2"] and said["fa2 for win"]


def test_unequal_or_odd_head_dims_are_refused_to_fa2() -> None:
    for change in ({"v_head_dim": 128}, {"head_dim": 60, "v_head_dim": 60}):
        with pytest.raises(RouteError, match="head"):
            route(Request("v2", "on"), dataclasses.replace(PROBLEM, **change), H100)


# Minimum lengths and branches of FA-2.


@pytest.mark.parametrize(("keys", "kernel"), [(767, "sdpa"), (768, "fa2"), (769, "fa2")])
def test_fa2_auto_leaves_a_short_window_to_sdpa(keys: int, kernel: str) -> None:
    found = route(
        Request(fa2_min_len_win=768), dataclasses.replace(PROBLEM, q_tokens=1, k_tokens=keys), H100
    )
    assert found.branch("win").kernel == kernel
    assert found.branch("sel").kernel == "fa2", "the minimum is the window's alone"
    said = {r.alternative: r.reason for r in found.rejected}.get("fa2 for win", "")
    assert ("NSA_FA2_MIN_LEN_WIN=768" in said) == (kernel == "sdpa")


@pytest.mark.parametrize("asked", [{"fa2": "on"}, {"fa2_win": "on"}])
def test_an_explicit_fa2_outranks_the_minimum_and_the_route_notes_it(asked: dict[str, str]) -> None:
    short = route(Request(**asked, fa2_min_len_win=4096, notes=("first",)), PROBLEM, H100)
    assert short.branch("win").kernel == "fa2"
    assert short.notes[0] == "first" and "outranks NSA_FA2_MIN_LEN_WIN=4096" in short.notes[1]
    assert route(Request(**asked, fa2_min_len_win=2048), PROBLEM, H100).notes == ()


def test_the_minimum_is_one_more_reason_where_fa2_is_missing_anyway() -> None:
    found = route(Request(fa2_min_len_win=4096), PROBLEM, V100)
    reason = next(r.reason for r in found.rejected if r.alternative == "fa2 for win")
    assert "SM 7.0" in reason and "NSA_FA2_MIN_LEN_WIN=4096" in reason


def test_fa2_for_the_compressed_branch_is_refused_with_the_reason() -> None:
    with pytest.raises(
        RouteError,
        match="NSA_USE_FA2_CMP=1 cannot be served.*staircase.*Next: unset NSA_USE_FA2_CMP",
    ):
        route(Request(fa2_cmp="on"), PROBLEM, H100)
    without = dataclasses.replace(PROBLEM, branches=("sel", "win"))
    assert route(Request(fa2_cmp="on"), without, H100) == route(Request(), without, H100)


# Where path triton serves, too.


def test_fa2_asked_for_by_auto_serves_the_window_and_without_a_window_takes_v2() -> None:
    problem = Problem(1, 4096, 4096, 12, 2, 64, 64, "bfloat16", scores="", sel_block=64)
    assert route(Request(fa2="on"), problem, TRITON).counters == (
        "cmp.triton",
        "score.triton",
        "sel.triton",
        "win.fa2",
    )
    assert route(
        Request(fa2="on"), dataclasses.replace(problem, branches=("sel",)), TRITON
    ).counters == ("sel.v2", "sel.fa2")
