"""What a branch leaves out at short lengths: nothing, which auto says, and takes full causal
attention for.
"""

from __future__ import annotations

import dataclasses

import pytest

from nsa.routing import DENSE, PATH_REQUESTS, Capability, Problem, Request, RouteError, route
from tests.nsa.routing_cases import CPU, H100, NO_FA2, PROBLEM, TRITON, V100, route_at

ALL_SELECTED, ALL_IN_WINDOW = (
    "every block is selected at this length",
    "the window covers the whole sequence",
)


def reasons_at(tokens: int, request: Request = Request(), **options: object) -> dict[str, str]:  # noqa: B008
    return {b.branch: b.reason for b in route_at(tokens, request, **options).branches}


@pytest.mark.parametrize("tokens", [1, 64, 511, 512, 513, 768, 1023, 1024, 1025, 1088, 1089, 4096])
def test_auto_says_where_a_branch_leaves_nothing_out(tokens: int) -> None:
    candidates = len({t // 64 for t in range(tokens)})
    furthest_key = max(t - s for t in (tokens - 1,) for s in range(tokens))
    said = reasons_at(tokens)
    assert (ALL_SELECTED in said["sel"]) == (candidates <= 16)
    assert (ALL_IN_WINDOW in said["win"]) == (furthest_key < 512)


def test_only_auto_speaks_of_it() -> None:
    for path in set(PATH_REQUESTS) - {"auto"}:
        found = route_at(256, Request(path), TRITON)
        assert not any(
            ALL_SELECTED in b.reason or ALL_IN_WINDOW in b.reason or b.implementation == DENSE
            for b in found.branches
        )


@pytest.mark.parametrize("capability", [H100, NO_FA2, CPU], ids=lambda c: c.device_name)
@pytest.mark.parametrize("fa2", ["auto", "off"])
@pytest.mark.parametrize(
    ("tokens", "dense"),
    [(1, {"sel", "win"}), (512, {"sel", "win"}), (513, {"sel"}), (1024, {"sel"}), (1025, set())],
)
def test_auto_takes_full_causal_attention_where_nothing_is_left_out(
    tokens: int, dense: set[str], fa2: str, capability: Capability
) -> None:
    found = route_at(tokens, Request(fa2=fa2), capability)
    assert {b.branch for b in found.branches if b.implementation == DENSE} == dense
    said = {r.alternative: r.reason for r in found.rejected}
    for name in dense:
        branch = found.branch(name)
        assert (
            branch.counters == (f"{name}.dense", f"{name}.sdpa")
            and "so the branch is full causal attention" in branch.reason
        )
        assert not branch.syncs and branch.repeatable == (capability is CPU)
        assert ("fa2=off" in said[f"fa2 for {name}"]) == (fa2 == "off")
    assert ({"v2", "masked"} <= set(said)) >= ("sel" in dense) and ("win.sdpa" in said) == (
        "win" in dense
    )


def test_auto_takes_no_full_causal_attention_that_no_fused_kernel_serves() -> None:
    """There SDPA keeps a T x T matrix a head."""
    found = route_at(512, Request(), V100)
    assert DENSE not in {b.implementation for b in found.branches}
    assert "no fused causal kernel serves it: SM 7.0" in next(
        r.reason for r in found.rejected if r.alternative == "sel.dense"
    )


def test_who_asks_for_fa2_gets_it_at_every_length() -> None:
    for request in (Request(fa2="on"), Request(fa2="on", fa2_from_environment=True)):
        found = route_at(256, request)
        assert {b.branch: b.kernel for b in found.branches} == {
            "cmp": "sdpa",
            "sel": "fa2",
            "win": "fa2",
        }
        assert {r.alternative for r in found.rejected if "fa2=on was asked for" in r.reason} == {
            "sel.dense",
            "win.dense",
        }
        with pytest.raises(RouteError, match="fa2=on"):
            route_at(256, request, CPU)
    window_alone = route_at(256, Request(fa2_win="on"))
    assert {b.branch: b.implementation for b in window_alone.branches} == {
        "cmp": "sdpa",
        "sel": DENSE,
        "win": "fa2",
    }
    all_but_window = route_at(256, Request(fa2="on", fa2_win="off"))
    assert {b.branch: b.implementation for b in all_but_window.branches} == {
        "cmp": "sdpa",
        "sel": "v2",
        "win": DENSE,
    }


def test_only_whole_sequences_take_full_causal_attention() -> None:
    geometry = {"select_all_tokens": 1024, "window": 512, "q_tokens": 256, "k_tokens": 256}
    chunk = route(Request(), dataclasses.replace(PROBLEM, **geometry), H100)
    assert DENSE not in {b.implementation for b in chunk.branches}
    assert {r.alternative for r in chunk.rejected if "cache" in r.reason} == {
        "sel.dense",
        "win.dense",
    }
    whole = route(Request(), dataclasses.replace(PROBLEM, **geometry, whole=True), H100)
    assert {b.implementation for b in whole.branches} == {"sdpa", DENSE}


def test_windows_over_sdpa_say_it_too() -> None:
    assert ALL_IN_WINDOW in reasons_at(512, Request(fa2="off"))["win"]
    assert ALL_IN_WINDOW not in reasons_at(513, Request(fa2="off"))["win"]


def test_not_every_block_is_selected_with_fewer_slots() -> None:
    # the adaptive rule leaves 12 slots from 513 to 1,024 tokens: 768 tokens fill them
    assert ALL_SELECTED in reasons_at(768, adaptive_num_selected=True)["sel"]
    assert ALL_SELECTED not in reasons_at(769, adaptive_num_selected=True)["sel"]
    # two of the four blocks of each region: 4 blocks are not all selected
    assert ALL_SELECTED not in reasons_at(256, selection="hierarchical")["sel"]


def test_a_problem_that_does_not_know_its_geometry_says_nothing() -> None:
    text = " ".join(
        route(Request(), dataclasses.replace(PROBLEM, q_tokens=8, k_tokens=8), H100).explain()
    )
    assert ALL_SELECTED not in text and ALL_IN_WINDOW not in text


def test_auto_keeps_dense_kernels_where_nothing_is_left_out() -> None:
    problem = Problem(
        1,
        512,
        512,
        12,
        2,
        64,
        64,
        "bfloat16",
        select_all_tokens=1024,
        window=512,
        whole=True,
        scores="",
        sel_block=64,
    )
    assert route(Request(), problem, TRITON).counters == (
        "cmp.triton",
        "sel.dense",
        "sel.sdpa",
        "win.dense",
        "win.sdpa",
    )
