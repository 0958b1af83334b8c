"""The router: explicit requests are that path or a RouteError with every reason; auto is never slow, nor v1."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa.capability import probe, triton_provider
from nsa.config import BRANCHES, NSAConfig, preset
from nsa.routing import (
    ADAPTIVE_MIN_TOKENS,
    DENSE,
    DENSE_KINDS,
    MASK_LIMIT_ELEMENTS,
    PATH_REQUESTS,
    SPECS,
    Capability,
    Path,
    Problem,
    Request,
    Route,
    RouteError,
    fa2_reasons,
    plan,
    route,
    route_dense,
    scores_of,
    triton_reasons,
)

H100 = Capability("cuda", "NVIDIA H100 80GB HBM3", (9, 0), "torch.varlen 2.13.0", "", "2.13.0")
TRITON = dataclasses.replace(H100, triton_provider="triton 3.6.0", triton_reason="")
NO_FA2 = dataclasses.replace(H100, fa2_provider=None, fa2_reason="flash_attn is not installed and torch 2.5 is older than 2.11")
V100 = dataclasses.replace(H100, device_name="Tesla V100", sm=(7, 0))
CPU = Capability("cpu", "cpu", None, "torch.varlen 2.13.0", "", "2.13.0")
PROBLEM = Problem(1, 2048, 2048, 12, 2, 64, 64, "bfloat16")

capabilities = st.builds(
    Capability,
    device=st.sampled_from(["cpu", "cuda"]),
    device_name=st.just("any"),
    sm=st.sampled_from([None, (7, 0), (7, 5), (8, 0), (8, 9), (9, 0), (10, 0)]),
    fa2_provider=st.sampled_from([None, "flash_attn 2.8.3", "torch.varlen 2.11.0"]),
    fa2_reason=st.just("no provider here"),
    torch_version=st.just("2.13.0"),
    triton_provider=st.sampled_from([None, "triton 3.6.0"]),
    triton_reason=st.just("no Triton here"),
)
problems = st.builds(
    lambda groups, heads, **rest: Problem(num_heads=groups * heads, num_kv_heads=groups, **rest),
    groups=st.sampled_from([1, 2, 4, 8]),
    heads=st.sampled_from([1, 3, 6, 16, 65]),
    batch=st.sampled_from([1, 3, 8]),
    q_tokens=st.sampled_from([1, 64, 2048, 65536]),
    k_tokens=st.sampled_from([64, 2048, 65536, 131072]),
    head_dim=st.sampled_from([16, 60, 64, 192, 300]),
    v_head_dim=st.sampled_from([16, 60, 64, 100, 128]),
    dtype=st.sampled_from(["bfloat16", "float16", "float32", "float64"]),
    branches=st.sampled_from([BRANCHES, ("sel",), ("cmp", "win"), ("win",), ("sel", "win")]),
    ragged=st.booleans(),
    select_all_tokens=st.sampled_from([None, 64, 65536]),
    window=st.sampled_from([None, 64, 65536]),
    whole=st.booleans(),
    scores=st.sampled_from([None, "", "selection=hierarchical"]),
)
fa2s = st.sampled_from(["on", "off", "auto"])


def test_registry_specs_and_paths_are_one_set() -> None:
    from nsa.ops.selected import PATHS

    assert set(PATHS) == set(SPECS) == set(Path)
    assert all(callable(attend) for attend in PATHS.values())


def test_path_names_what_runs_only() -> None:
    assert not {"auto", "dense", "adaptive"} & {path.value for path in Path}


@given(problem=problems, capability=capabilities, fa2=fa2s, v2_allowed=st.booleans())
def test_auto_is_never_slow_nor_v1(problem: Problem, capability: Capability, fa2: str, v2_allowed: bool) -> None:
    try:
        found = route(Request("auto", fa2, v2_allowed=v2_allowed), problem, capability)
    except RouteError as refused:
        assert fa2 == "on" or not v2_allowed, f"auto may refuse only what was asked for: {refused}"
        return
    assert tuple(b.branch for b in found.branches) == problem.branches
    if "sel" not in problem.branches:
        return
    if found.branch("sel").implementation == DENSE:
        assert problem.whole and problem.selects_all and fa2 != "on"
        return
    path = Path(found.branch("sel").implementation)
    assert not SPECS[path].slow and path is not Path.V1
    assert v2_allowed or path is not Path.V2
    if path is Path.MASKED:
        assert problem.mask_elements <= MASK_LIMIT_ELEMENTS
        assert any(r.alternative == "v2" for r in found.rejected), "says why not the other fast path"


@given(problem=problems, capability=capabilities, fa2=fa2s, path=st.sampled_from(list(Path)))
def test_an_explicit_request_is_that_path_or_an_error(problem: Problem, capability: Capability, fa2: str, path: Path) -> None:
    try:
        found = route(Request(path, fa2), problem, capability)
    except RouteError as refused:
        unserved = triton_reasons(problem, capability) if path is Path.TRITON else []
        assert fa2 == "on" or unserved, f"only fa2=on and what triton lacks can be refused here: {refused}"
        assert all(reason in str(refused) for reason in unserved)
        return
    for branch in found.branches:
        assert branch.reason and branch.provider
        assert branch.kernel != "fa2" or (fa2 != "off" and not fa2_reasons(problem, capability))
    if "sel" in problem.branches:
        assert found.branch("sel").implementation == path.value
    if "cmp" in problem.branches:
        assert found.branch("cmp").kernel == ("triton" if path is Path.TRITON else "sdpa") and "staircase" in found.branch("cmp").reason
    chosen_by_a_kernel = path is Path.TRITON and "sel" in problem.branches and problem.scores == ""
    assert tuple(b.branch for b in found.branches if b.branch != "score") == problem.branches and found.has("score") == chosen_by_a_kernel


@given(problem=problems, capability=capabilities)
def test_fa2_on_is_served_by_fa2_wherever_it_can_be_or_refused(problem: Problem, capability: Capability) -> None:
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
def test_fa2_on_is_never_dropped_silently(path: str, branches: tuple[str, ...], capability: Capability) -> None:
    with pytest.raises(RouteError, match="fa2=on"):
        route(Request(path, "on"), dataclasses.replace(PROBLEM, branches=branches), capability)


def test_a_refusal_lists_every_reason() -> None:
    problem = dataclasses.replace(PROBLEM, head_dim=60, v_head_dim=300, dtype="float32")
    broken = dataclasses.replace(NO_FA2, sm=(7, 0))
    with pytest.raises(RouteError) as caught:
        route(Request("v2", "on"), problem, broken)
    for word in ("not installed", "SM 7.0 is below 8.0", "float32", "differ (60 and 300)", "head_dim 60", "v_head_dim 300", "fa2=off"):
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


@pytest.mark.parametrize(
    ("path", "fa2", "capability", "tokens", "counters"),
    [
        ("auto", "auto", H100, 2048, {"cmp.sdpa", "sel.v2", "sel.fa2", "win.fa2"}),
        ("auto", "off", H100, 2048, {"cmp.sdpa", "sel.masked", "sel.sdpa", "win.sdpa"}),
        ("auto", "auto", CPU, 2048, {"cmp.sdpa", "sel.masked", "sel.sdpa", "win.sdpa"}),
        ("auto", "auto", CPU, 65536, {"cmp.sdpa", "sel.v2", "sel.sdpa", "win.sdpa"}),
        ("adaptive", "off", H100, 1023, {"cmp.sdpa", "sel.v1", "sel.sdpa", "win.sdpa"}),
        ("adaptive", "off", H100, 1024, {"cmp.sdpa", "sel.v2", "sel.sdpa", "win.sdpa"}),
        ("reference", "off", CPU, 128, {"cmp.sdpa", "sel.reference", "sel.loop", "win.sdpa"}),
        ("masked", "on", H100, 2048, {"cmp.sdpa", "sel.masked", "sel.sdpa", "win.fa2"}),
        ("triton", "auto", TRITON, 2048, {"cmp.triton", "sel.triton", "win.triton"}),  # this problem chooses no blocks
        ("triton", "off", TRITON, 2048, {"cmp.triton", "sel.triton", "win.triton"}),
        ("triton", "on", TRITON, 2048, {"cmp.triton", "sel.triton", "win.fa2"}),
    ],
)
def test_the_table(path: str, fa2: str, capability: Capability, tokens: int, counters: set[str]) -> None:
    problem = dataclasses.replace(PROBLEM, q_tokens=tokens, k_tokens=tokens)
    assert set(route(Request(path, fa2), problem, capability).counters) == counters


@pytest.mark.parametrize(("tokens", "path", "side"), [(1023, "v1", "fewer"), (1024, "v2", "at least as many")])
def test_adaptive_names_its_rule_and_the_side(tokens: int, path: str, side: str) -> None:
    assert ADAPTIVE_MIN_TOKENS == 1024
    found = route(Request("adaptive", "off"), dataclasses.replace(PROBLEM, q_tokens=tokens, k_tokens=tokens), H100).branch("sel")
    assert found.implementation == path
    assert found.reason.startswith("adaptive: v1 below 1024 query tokens, v2 from there") and side in found.reason


def test_adaptive_without_v2_is_v1_and_says_why() -> None:
    found = route(Request("adaptive", "off", v2_allowed=False), PROBLEM, H100).branch("sel")
    assert found.implementation == "v1" and "NSA_SEL_RANGES_V2=0" in found.reason


# Minimum lengths and branches of FA-2.


@pytest.mark.parametrize(("keys", "kernel"), [(767, "sdpa"), (768, "fa2"), (769, "fa2")])
def test_fa2_auto_leaves_a_short_window_to_sdpa(keys: int, kernel: str) -> None:
    found = route(Request(fa2_min_len_win=768), dataclasses.replace(PROBLEM, q_tokens=1, k_tokens=keys), H100)
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
    with pytest.raises(RouteError, match="NSA_USE_FA2_CMP=1 cannot be served.*staircase.*Next: unset NSA_USE_FA2_CMP"):
        route(Request(fa2_cmp="on"), PROBLEM, H100)
    without = dataclasses.replace(PROBLEM, branches=("sel", "win"))
    assert route(Request(fa2_cmp="on"), without, H100) == route(Request(), without, H100)


# What a branch leaves out: nothing, at short lengths.

ALL_SELECTED, ALL_IN_WINDOW = "every block is selected at this length", "the window covers the whole sequence"


def route_at(tokens: int, request: Request = Request(), capability: Capability = H100, **options: object) -> Route:  # noqa: B008
    model = preset("m7c_125m")
    model = dataclasses.replace(model, nsa=dataclasses.replace(model.nsa, **options))
    return plan(request, model, batch=1, tokens=tokens, dtype="bfloat16", capability=capability)


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
        assert not any(ALL_SELECTED in b.reason or ALL_IN_WINDOW in b.reason or b.implementation == DENSE for b in found.branches)


@pytest.mark.parametrize("capability", [H100, NO_FA2, CPU], ids=lambda c: c.device_name)
@pytest.mark.parametrize("fa2", ["auto", "off"])
@pytest.mark.parametrize(("tokens", "dense"), [(1, {"sel", "win"}), (512, {"sel", "win"}), (513, {"sel"}), (1024, {"sel"}), (1025, set())])
def test_auto_takes_full_causal_attention_where_nothing_is_left_out(tokens: int, dense: set[str], fa2: str, capability: Capability) -> None:
    found = route_at(tokens, Request(fa2=fa2), capability)
    assert {b.branch for b in found.branches if b.implementation == DENSE} == dense
    said = {r.alternative: r.reason for r in found.rejected}
    for name in dense:
        branch = found.branch(name)
        assert branch.counters == (f"{name}.dense", f"{name}.sdpa") and "so the branch is full causal attention" in branch.reason
        assert not branch.syncs and branch.repeatable == (capability is CPU)
        assert ("fa2=off" in said[f"fa2 for {name}"]) == (fa2 == "off")
    assert ({"v2", "masked"} <= set(said)) >= ("sel" in dense) and ("win.sdpa" in said) == ("win" in dense)


def test_auto_takes_no_full_causal_attention_that_no_fused_kernel_serves() -> None:
    """There SDPA keeps a T x T matrix a head."""
    found = route_at(512, Request(), V100)
    assert DENSE not in {b.implementation for b in found.branches}
    assert "no fused causal kernel serves it: SM 7.0" in next(r.reason for r in found.rejected if r.alternative == "sel.dense")


def test_who_asks_for_fa2_gets_it_at_every_length() -> None:
    for request in (Request(fa2="on"), Request(fa2="on", fa2_from_environment=True)):
        found = route_at(256, request)
        assert {b.branch: b.kernel for b in found.branches} == {"cmp": "sdpa", "sel": "fa2", "win": "fa2"}
        assert {r.alternative for r in found.rejected if "fa2=on was asked for" in r.reason} == {"sel.dense", "win.dense"}
        with pytest.raises(RouteError, match="fa2=on"):
            route_at(256, request, CPU)
    window_alone = route_at(256, Request(fa2_win="on"))
    assert {b.branch: b.implementation for b in window_alone.branches} == {"cmp": "sdpa", "sel": DENSE, "win": "fa2"}
    all_but_window = route_at(256, Request(fa2="on", fa2_win="off"))
    assert {b.branch: b.implementation for b in all_but_window.branches} == {"cmp": "sdpa", "sel": "v2", "win": DENSE}


def test_only_whole_sequences_take_full_causal_attention() -> None:
    geometry = {"select_all_tokens": 1024, "window": 512, "q_tokens": 256, "k_tokens": 256}
    chunk = route(Request(), dataclasses.replace(PROBLEM, **geometry), H100)
    assert DENSE not in {b.implementation for b in chunk.branches}
    assert {r.alternative for r in chunk.rejected if "cache" in r.reason} == {"sel.dense", "win.dense"}
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
    text = " ".join(route(Request(), dataclasses.replace(PROBLEM, q_tokens=8, k_tokens=8), H100).explain())
    assert ALL_SELECTED not in text and ALL_IN_WINDOW not in text


def said_by(request: Request, tokens: int, capability: Capability) -> str:
    """What the Route, or the refusal, says."""
    try:
        return " ".join(plan(request, preset("m7c_125m"), batch=1, tokens=tokens, dtype="bfloat16", capability=capability).explain())
    except RouteError as refused:
        return str(refused)


@pytest.mark.parametrize("capability", [H100, TRITON, CPU], ids=["H100", "H100 and Triton", "CPU"])
@pytest.mark.parametrize("path", PATH_REQUESTS)
@pytest.mark.parametrize(("tokens", "others"), [(2039, 3571), (601, 907), (131071, 262139)])
def test_no_reason_names_the_length(path: str, capability: Capability, tokens: int, others: int) -> None:
    """Under torch.compile a string formatted with the length compiles every length anew (NSA.md, property 11)."""
    request = Request(path, fa2_min_len_win=10**6)
    one, other = (said_by(request, n, capability) for n in (tokens, others))
    assert one == other
    numbers = {int(n) for n in re.findall(r"[0-9]+", one)}
    assert not numbers & {tokens, 2 * tokens, 2 * tokens**2}


def test_mask_limit_is_where_design_says() -> None:
    at = Problem(1, 2**15, 2**15, 12, 2, 64, 64, "float32")
    assert at.mask_elements == MASK_LIMIT_ELEMENTS == 2**31
    assert route(Request(), at, CPU).branch("sel").implementation == "masked"
    over = dataclasses.replace(at, q_tokens=2**15 + 1)
    assert route(Request(), over, CPU).branch("sel").implementation == "v2"


def test_ranges_v2_forbidden_and_mask_too_large_refuses_with_both_reasons() -> None:
    problem = Problem(1, 2**16, 2**16, 12, 2, 64, 64, "bfloat16")
    with pytest.raises(RouteError, match="NSA_SEL_RANGES_V2=0 forbids v2.*exceeds"):
        route(Request(v2_allowed=False), problem, H100)


def test_syncs_and_repeatability_are_stated() -> None:
    for path in (Path.REFERENCE, Path.V1):
        assert route(Request(path, "off"), PROBLEM, H100).branch("sel").syncs
    for path in (Path.MASKED, Path.V2, Path.TRITON):
        assert not route(Request(path, "off"), PROBLEM, TRITON).branch("sel").syncs
    assert route(Request("reference", "off"), PROBLEM, H100).branch("sel").repeatable
    for branch in ("cmp", "sel", "win"):  # SDPA under a mask: dQ by atomics on CUDA
        assert not route(Request("masked", "off"), PROBLEM, H100).branch(branch).repeatable
        assert route(Request("masked", "off"), PROBLEM, CPU).branch(branch).repeatable
    assert route(Request("v2", "off"), PROBLEM, CPU).branch("sel").repeatable
    assert all(b.repeatable for b in route(Request("triton", "off"), PROBLEM, TRITON).branches), "no atomics in any of its kernels"


def test_explain_answers_why_not_the_fast_one() -> None:
    text = "\n".join(route(Request("auto", "auto", notes=("a note",)), PROBLEM, NO_FA2).explain())
    for word in ("sel: masked", "not v2: flash_attn is not installed", "win: sdpa", "note: a note"):
        assert word in text


@pytest.mark.parametrize("kind", DENSE_KINDS)
def test_dense_is_asked_for_by_name(kind: str) -> None:
    found = route_dense(kind, PROBLEM, H100)
    assert found.branch("dense").counters[0].startswith("dense.")
    if kind != "dense":
        with pytest.raises(RouteError, match=f"path={kind} cannot be served.*not CUDA"):
            route_dense(kind, PROBLEM, CPU)


def test_unknown_names_get_the_nearest() -> None:
    with pytest.raises(RouteError, match="'v3'"):
        Request("v3")
    with pytest.raises(RouteError, match="dense_cudn.*dense_cudnn"):
        route_dense("dense_cudn", PROBLEM, H100)
    with pytest.raises(RouteError, match="no branch 'sel'"):
        route(Request(), dataclasses.replace(PROBLEM, branches=("win",)), CPU).branch("sel")


def test_plan_of_a_model() -> None:
    found = plan(Request("masked", "on"), preset("m7c_125m"), batch=1, tokens=2048, dtype="bfloat16", capability=H100)
    assert found == route(Request("masked", "on"), PROBLEM, H100)


# Path triton.


def test_triton_serves_every_branch_and_the_choice_of_blocks() -> None:
    found = plan(Request("triton"), preset("m7c_125m"), batch=1, tokens=2048, dtype="bfloat16", capability=TRITON)
    assert found.counters == ("cmp.triton", "score.triton", "sel.triton", "win.triton")
    assert {b.provider for b in found.branches} == {"triton 3.6.0"}
    said = {r.alternative: r.reason for r in found.rejected}
    assert "kernel of its own" in said["fa2 for win"] and "score.triton" not in said
    off = plan(Request("triton", "off"), preset("m7c_125m"), batch=1, tokens=2048, dtype="bfloat16", capability=TRITON)
    assert off.counters == found.counters and "fa2=off was asked for" in [r.reason for r in off.rejected]


def test_the_window_alone_can_be_fa2_under_triton() -> None:
    for request in (Request("triton", "on"), Request("triton", fa2_win="on")):
        found = route(request, PROBLEM, TRITON)
        assert {b.branch: b.kernel for b in found.branches} == {"cmp": "triton", "sel": "triton", "win": "fa2"}
    with pytest.raises(RouteError, match="path triton cannot use it, and there is no window branch"):
        route(Request("triton", "on"), dataclasses.replace(PROBLEM, branches=("cmp", "sel")), TRITON)


@pytest.mark.parametrize(
    ("changes", "capability", "reason"),
    [
        ({"num_heads": 130}, TRITON, "65 query heads per kv head exceed 64"),
        ({"head_dim": 257}, TRITON, "head_dim 257 exceeds 256"),
        ({"v_head_dim": 300}, TRITON, "v_head_dim 300 exceeds 256"),
        ({"sel_block": 513}, TRITON, "a selection block of 1024 x 64 bfloat16 exceeds 65536 bytes"),
        ({"dtype": "float64"}, TRITON, "dtype float64 is not one of float16, bfloat16, float32"),
        ({}, dataclasses.replace(TRITON, sm=(7, 5)), "SM 7.5 is below 8.0"),
        ({}, dataclasses.replace(TRITON, triton_provider=None, triton_reason="triton is not installed"), "triton is not installed"),
        ({}, dataclasses.replace(CPU, triton_provider="triton 3.6.0"), "Triton's interpreter multiplies bfloat16 wrongly"),
        ({"dtype": "float32"}, dataclasses.replace(CPU, triton_reason="there is no GPU"), "there is no GPU"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("branches", [BRANCHES, ("cmp",), ("win",)], ids="+".join)
def test_what_triton_does_not_serve(changes: dict[str, object], capability: Capability, reason: str, branches: tuple[str, ...]) -> None:
    problem = dataclasses.replace(PROBLEM, branches=branches, **changes)
    with pytest.raises(RouteError, match=re.escape(f"path=triton cannot be served: {reason}. Next: use path=")):
        route(Request("triton"), problem, capability)
    assert route(Request("auto", "off"), problem, capability).branches, "by no other path's request"


def test_a_refusal_of_triton_lists_every_reason() -> None:
    problem = dataclasses.replace(PROBLEM, num_heads=130, head_dim=300, v_head_dim=300, dtype="float64")
    broken = dataclasses.replace(TRITON, sm=(7, 0), triton_provider=None, triton_reason="triton is not installed")
    reasons = triton_reasons(problem, broken)
    assert len(reasons) == 6
    with pytest.raises(RouteError) as caught:
        route(Request("triton"), problem, broken)
    assert all(reason in str(caught.value) for reason in reasons)


def test_triton_serves_what_is_at_its_limits() -> None:
    at = dataclasses.replace(PROBLEM, num_heads=128, head_dim=256, v_head_dim=256)
    interpreted = dataclasses.replace(CPU, triton_provider="triton 3.6.0")
    assert route(Request("triton"), dataclasses.replace(PROBLEM, sel_block=512), TRITON).branch("sel").kernel == "triton"
    assert route(Request("triton"), at, dataclasses.replace(TRITON, sm=(8, 0))).branch("sel").kernel == "triton"
    assert route(Request("triton"), dataclasses.replace(at, dtype="float16", ragged=True), interpreted).branch("win").kernel == "triton"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, ""),
        ({"selection": "hierarchical"}, "selection=hierarchical"),
        ({"score_dtype": "bfloat16"}, "score_dtype=bfloat16"),
        ({"sel_block": 48}, "3 compressed blocks begin in a selection block, which is no power of two"),
        ({"cmp_block": 128}, "a compressed block (128) is longer than a selection block (64)"),
        ({"num_selected": 65}, "num_selected 65 exceeds 64"),
        ({"num_selected": 64}, ""),
        ({"cmp_block": 64}, ""),
    ],
    ids=str,
)
def test_what_the_choosing_kernel_leaves_to_torch(options: dict[str, object], reason: str) -> None:
    """The other branches are Triton's still, and the Route says why this one is not."""
    assert scores_of(dataclasses.replace(NSAConfig(), **options)) == reason
    found = route_at(2048, Request("triton"), TRITON, **options)
    assert found.has("score") == (reason == "")
    assert {b.kernel for b in found.branches} == {"triton"}
    assert [r.reason for r in found.rejected if r.alternative == "score.triton"] == ([reason] if reason else [])


def test_every_reason_of_the_choosing_kernel_is_said_at_once() -> None:
    config = NSAConfig(selection="hierarchical", score_dtype="float16", sel_block=48, cmp_block=64, num_selected=70)
    assert len(scores_of(config).split("; ")) == 5


def test_on_a_cpu_only_the_interpreter_runs_triton() -> None:
    """In a process of its own: whether the interpreter is on is settled when Triton is imported."""
    code = "from nsa.capability import triton_provider; print(*triton_provider(None))"

    def said(**environment: str) -> str:
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment).stdout

    assert "there is no GPU, and Triton's interpreter is off (TRITON_INTERPRET=1" in said()
    assert said(TRITON_INTERPRET="1").startswith("triton ")


def test_triton_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    provider, reason = triton_provider((9, 0))
    assert provider is not None and provider.startswith("triton ") and reason == ""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert triton_provider((9, 0)) == (None, "triton is not installed; pip install triton")
    here = probe("cpu")
    assert (here.triton_provider is None) == bool(here.triton_reason)


def test_routing_imports_no_torch() -> None:
    code = "import sys, nsa.routing, nsa.settings, nsa.blocks, nsa.config; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"sm": (8, 9)}, "nobody has measured whether it is the fastest on SM 8.9"),
        ({"triton_provider": None, "triton_reason": "triton is not installed"}, "triton is not installed"),
        ({"dtype": "float32"}, "in float32 its exact products are for tests"),
        ({"head_dim": 300, "v_head_dim": 300}, "head_dim 300 exceeds 256"),
    ],
)
def test_auto_takes_triton_where_it_was_measured_and_says_why_not(change: dict[str, Any], reason: str) -> None:
    problem = Problem(1, 4096, 4096, 12, 2, 64, 64, "bfloat16", scores="", sel_block=64)
    taken = route(Request(), problem, TRITON)
    assert taken.counters == ("cmp.triton", "score.triton", "sel.triton", "win.triton")
    of_problem = {k: v for k, v in change.items() if k in {"dtype", "head_dim", "v_head_dim"}}
    of_machine = {k: v for k, v in change.items() if k not in of_problem}
    other = route(Request(), dataclasses.replace(problem, **of_problem), dataclasses.replace(TRITON, **of_machine))
    assert other.branch("sel").implementation in ("v2", "masked") and not other.has("score")
    assert [r.reason for r in other.rejected if r.alternative == "triton"] == [reason] or reason in str(other.rejected)


def test_auto_keeps_dense_kernels_where_nothing_is_left_out() -> None:
    problem = Problem(1, 512, 512, 12, 2, 64, 64, "bfloat16", select_all_tokens=1024, window=512, whole=True, scores="", sel_block=64)
    assert route(Request(), problem, TRITON).counters == ("cmp.triton", "sel.dense", "sel.sdpa", "win.dense", "win.sdpa")


def test_fa2_asked_for_by_auto_serves_the_window_and_without_a_window_takes_v2() -> None:
    problem = Problem(1, 4096, 4096, 12, 2, 64, 64, "bfloat16", scores="", sel_block=64)
    assert route(Request(fa2="on"), problem, TRITON).counters == ("cmp.triton", "score.triton", "sel.triton", "win.fa2")
    assert route(Request(fa2="on"), dataclasses.replace(problem, branches=("sel",)), TRITON).counters == ("sel.v2", "sel.fa2")
