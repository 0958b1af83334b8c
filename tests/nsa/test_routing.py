"""The router: explicit requests are that path or a RouteError with every reason; auto is never
slow, nor v1.
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa.config import preset
from nsa.routing import (
    DENSE,
    DENSE_KINDS,
    MASK_LIMIT_ELEMENTS,
    PATH_REQUESTS,
    SPECS,
    Capability,
    Path,
    Problem,
    Request,
    RouteError,
    plan,
    route,
    route_dense,
)
from nsa.routing.support import fa2_reasons, triton_reasons
from nsa.routing.thresholds import ADAPTIVE_MIN_TOKENS
from tests.nsa.routing_cases import CPU, H100, NO_FA2, PROBLEM, TRITON, capabilities, fa2s, problems


def test_registry_specs_and_paths_are_one_set() -> None:
    from nsa.ops.selected import PATHS

    assert set(PATHS) == set(SPECS) == set(Path)
    assert all(callable(attend) for attend in PATHS.values())


def test_path_names_what_runs_only() -> None:
    assert not {"auto", "dense", "adaptive"} & {path.value for path in Path}


@given(problem=problems, capability=capabilities, fa2=fa2s, v2_allowed=st.booleans())
def test_auto_is_never_slow_nor_v1(
    problem: Problem, capability: Capability, fa2: str, v2_allowed: bool
) -> None:
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
        assert any(r.alternative == "v2" for r in found.rejected), (
            "says why not the other fast path"
        )


@given(problem=problems, capability=capabilities, fa2=fa2s, path=st.sampled_from(list(Path)))
def test_an_explicit_request_is_that_path_or_an_error(
    problem: Problem, capability: Capability, fa2: str, path: Path
) -> None:
    try:
        found = route(Request(path, fa2), problem, capability)
    except RouteError as refused:
        unserved = triton_reasons(problem, capability) if path is Path.TRITON else []
        assert fa2 == "on" or unserved, (
            f"only fa2=on and what triton lacks can be refused here: {refused}"
        )
        assert all(reason in str(refused) for reason in unserved)
        return
    for branch in found.branches:
        assert branch.reason and branch.provider
        assert branch.kernel != "fa2" or (fa2 != "off" and not fa2_reasons(problem, capability))
    if "sel" in problem.branches:
        assert found.branch("sel").implementation == path.value
    if "cmp" in problem.branches:
        assert (
            found.branch("cmp").kernel == ("triton" if path is Path.TRITON else "sdpa")
            and "staircase" in found.branch("cmp").reason
        )
    chosen_by_a_kernel = path is Path.TRITON and "sel" in problem.branches and problem.scores == ""
    assert (
        tuple(b.branch for b in found.branches if b.branch != "score") == problem.branches
        and found.has("score") == chosen_by_a_kernel
    )


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
        # this problem chooses no blocks
        ("triton", "auto", TRITON, 2048, {"cmp.triton", "sel.triton", "win.triton"}),
        ("triton", "off", TRITON, 2048, {"cmp.triton", "sel.triton", "win.triton"}),
        ("triton", "on", TRITON, 2048, {"cmp.triton", "sel.triton", "win.fa2"}),
    ],
)
def test_the_table(
    path: str, fa2: str, capability: Capability, tokens: int, counters: set[str]
) -> None:
    problem = dataclasses.replace(PROBLEM, q_tokens=tokens, k_tokens=tokens)
    assert set(route(Request(path, fa2), problem, capability).counters) == counters


@pytest.mark.parametrize(
    ("tokens", "path", "side"), [(1023, "v1", "fewer"), (1024, "v2", "at least as many")]
)
def test_adaptive_names_its_rule_and_the_side(tokens: int, path: str, side: str) -> None:
    assert ADAPTIVE_MIN_TOKENS == 1024
    found = route(
        Request("adaptive", "off"),
        dataclasses.replace(PROBLEM, q_tokens=tokens, k_tokens=tokens),
        H100,
    ).branch("sel")
    assert found.implementation == path
    assert (
        found.reason.startswith("adaptive: v1 below 1024 query tokens, v2 from there")
        and side in found.reason
    )


def test_adaptive_without_v2_is_v1_and_says_why() -> None:
    found = route(Request("adaptive", "off", v2_allowed=False), PROBLEM, H100).branch("sel")
    assert found.implementation == "v1" and "NSA_SEL_RANGES_V2=0" in found.reason


def said_by(request: Request, tokens: int, capability: Capability) -> str:
    """What the Route, or the refusal, says."""
    try:
        return " ".join(
            plan(
                request,
                preset("m7c_125m"),
                batch=1,
                tokens=tokens,
                dtype="bfloat16",
                capability=capability,
            ).explain()
        )
    except RouteError as refused:
        return str(refused)


@pytest.mark.parametrize("capability", [H100, TRITON, CPU], ids=["H100", "H100 and Triton", "CPU"])
@pytest.mark.parametrize("path", PATH_REQUESTS)
@pytest.mark.parametrize(("tokens", "others"), [(2039, 3571), (601, 907), (131071, 262139)])
def test_no_reason_names_the_length(
    path: str, capability: Capability, tokens: int, others: int
) -> None:
    """Under torch.compile a string formatted with the length compiles every length anew (NSA.md,
    property 11).
    """
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
    assert all(b.repeatable for b in route(Request("triton", "off"), PROBLEM, TRITON).branches), (
        "no atomics in any of its kernels"
    )


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
    found = plan(
        Request("masked", "on"),
        preset("m7c_125m"),
        batch=1,
        tokens=2048,
        dtype="bfloat16",
        capability=H100,
    )
    assert found == route(Request("masked", "on"), PROBLEM, H100)


def test_routing_imports_no_torch() -> None:
    code = (
        "import sys, nsa.routing, nsa.settings, nsa.blocks, nsa.config; assert 'torch' not in"
        " sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
