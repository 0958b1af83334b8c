"""Path triton at the router: what its kernels serve, every reason why they do not, and where auto
takes them.

The file is not named after the path: `-k triton` would then take tests that need no interpreter.
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from typing import Any

import pytest

from nsa.capability import probe, triton_provider
from nsa.config import BRANCHES, NSAConfig, preset
from nsa.routing import (
    Capability,
    Problem,
    Request,
    RouteError,
    plan,
    route,
    scores_of,
)
from nsa.routing.support import triton_reasons
from tests.nsa.routing_cases import CPU, PROBLEM, TRITON, route_at


def test_triton_serves_every_branch_and_the_choice_of_blocks() -> None:
    found = plan(
        Request("triton"),
        preset("m7c_125m"),
        batch=1,
        tokens=2048,
        dtype="bfloat16",
        capability=TRITON,
    )
    assert found.counters == ("cmp.triton", "score.triton", "sel.triton", "win.triton")
    assert {b.provider for b in found.branches} == {"triton 3.6.0"}
    said = {r.alternative: r.reason for r in found.rejected}
    assert "kernel of its own" in said["fa2 for win"] and "score.triton" not in said
    off = plan(
        Request("triton", "off"),
        preset("m7c_125m"),
        batch=1,
        tokens=2048,
        dtype="bfloat16",
        capability=TRITON,
    )
    assert off.counters == found.counters and "fa2=off was asked for" in [
        r.reason for r in off.rejected
    ]


def test_the_window_alone_can_be_fa2_under_triton() -> None:
    for request in (Request("triton", "on"), Request("triton", fa2_win="on")):
        found = route(request, PROBLEM, TRITON)
        assert {b.branch: b.kernel for b in found.branches} == {
            "cmp": "triton",
            "sel": "triton",
            "win": "fa2",
        }
    with pytest.raises(
        RouteError, match="path triton cannot use it, and there is no window branch"
    ):
        route(
            Request("triton", "on"), dataclasses.replace(PROBLEM, branches=("cmp", "sel")), TRITON
        )


@pytest.mark.parametrize(
    ("changes", "capability", "reason"),
    [
        ({"num_heads": 130}, TRITON, "65 query heads per kv head exceed 64"),
        ({"head_dim": 257}, TRITON, "head_dim 257 exceeds 256"),
        ({"v_head_dim": 300}, TRITON, "v_head_dim 300 exceeds 256"),
        ({"sel_block": 513}, TRITON, "a selection block of 1024 x 64 bfloat16 exceeds 65536 bytes"),
        ({"dtype": "float64"}, TRITON, "dtype float64 is not one of float16, bfloat16, float32"),
        ({}, dataclasses.replace(TRITON, sm=(7, 5)), "SM 7.5 is below 8.0"),
        (
            {},
            dataclasses.replace(
                TRITON, triton_provider=None, triton_reason="triton is not installed"
            ),
            "triton is not installed",
        ),
        (
            {},
            dataclasses.replace(CPU, triton_provider="triton 3.6.0"),
            "Triton's interpreter multiplies bfloat16 wrongly",
        ),
        (
            {"dtype": "float32"},
            dataclasses.replace(CPU, triton_reason="there is no GPU"),
            "there is no GPU",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("branches", [BRANCHES, ("cmp",), ("win",)], ids="+".join)
def test_what_triton_does_not_serve(
    changes: dict[str, object], capability: Capability, reason: str, branches: tuple[str, ...]
) -> None:
    problem = dataclasses.replace(PROBLEM, branches=branches, **changes)
    with pytest.raises(
        RouteError, match=re.escape(f"path=triton cannot be served: {reason}. Next: use path=")
    ):
        route(Request("triton"), problem, capability)
    assert route(Request("auto", "off"), problem, capability).branches, "by no other path's request"


def test_a_refusal_of_triton_lists_every_reason() -> None:
    problem = dataclasses.replace(
        PROBLEM, num_heads=130, head_dim=300, v_head_dim=300, dtype="float64"
    )
    broken = dataclasses.replace(
        TRITON, sm=(7, 0), triton_provider=None, triton_reason="triton is not installed"
    )
    reasons = triton_reasons(problem, broken)
    assert len(reasons) == 6
    with pytest.raises(RouteError) as caught:
        route(Request("triton"), problem, broken)
    assert all(reason in str(caught.value) for reason in reasons)


def test_triton_serves_what_is_at_its_limits() -> None:
    at = dataclasses.replace(PROBLEM, num_heads=128, head_dim=256, v_head_dim=256)
    interpreted = dataclasses.replace(CPU, triton_provider="triton 3.6.0")
    assert (
        route(Request("triton"), dataclasses.replace(PROBLEM, sel_block=512), TRITON)
        .branch("sel")
        .kernel
        == "triton"
    )
    assert (
        route(Request("triton"), at, dataclasses.replace(TRITON, sm=(8, 0))).branch("sel").kernel
        == "triton"
    )
    assert (
        route(Request("triton"), dataclasses.replace(at, dtype="float16", ragged=True), interpreted)
        .branch("win")
        .kernel
        == "triton"
    )


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, ""),
        ({"selection": "hierarchical"}, "selection=hierarchical"),
        ({"score_dtype": "bfloat16"}, "score_dtype=bfloat16"),
        (
            {"sel_block": 48},
            "3 compressed blocks begin in a selection block, which is no power of two",
        ),
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
    assert [r.reason for r in found.rejected if r.alternative == "score.triton"] == (
        [reason] if reason else []
    )


def test_every_reason_of_the_choosing_kernel_is_said_at_once() -> None:
    config = NSAConfig(
        selection="hierarchical", score_dtype="float16", sel_block=48, cmp_block=64, num_selected=70
    )
    assert len(scores_of(config).split("; ")) == 5


def test_on_a_cpu_only_the_interpreter_runs_triton() -> None:
    """In a process of its own: whether the interpreter is on is settled when Triton is imported."""
    code = "from nsa.capability import triton_provider; print(*triton_provider(None))"

    def said(**environment: str) -> str:
        return subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env=environment,
        ).stdout

    assert "there is no GPU, and Triton's interpreter is off (TRITON_INTERPRET=1" in said()
    assert said(TRITON_INTERPRET="1").startswith("triton ")


def test_triton_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    provider, reason = triton_provider((9, 0))
    assert provider is not None and provider.startswith("triton ") and reason == ""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert triton_provider((9, 0)) == (None, "triton is not installed; pip install triton")
    here = probe("cpu")
    assert (here.triton_provider is None) == bool(here.triton_reason)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"sm": (8, 9)}, "not measured on this card, and a branch alone names no sizes"),
        (
            {"triton_provider": None, "triton_reason": "triton is not installed"},
            "triton is not installed",
        ),
        ({"dtype": "float32"}, "in float32 its exact products are for tests"),
        ({"head_dim": 300, "v_head_dim": 300}, "head_dim 300 exceeds 256"),
    ],
)
def test_auto_takes_triton_where_it_was_measured_and_says_why_not(
    change: dict[str, Any], reason: str
) -> None:
    problem = Problem(1, 4096, 4096, 12, 2, 64, 64, "bfloat16", scores="", sel_block=64)
    taken = route(Request(), problem, TRITON)
    assert taken.counters == ("cmp.triton", "score.triton", "sel.triton", "win.triton")
    of_problem = {k: v for k, v in change.items() if k in {"dtype", "head_dim", "v_head_dim"}}
    of_machine = {k: v for k, v in change.items() if k not in of_problem}
    other = route(
        Request(),
        dataclasses.replace(problem, **of_problem),
        dataclasses.replace(TRITON, **of_machine),
    )
    assert other.branch("sel").implementation in ("v2", "masked") and not other.has("score")
    assert [r.reason for r in other.rejected if r.alternative == "triton"] == [
        reason
    ] or reason in str(other.rejected)


@pytest.mark.parametrize(
    "sizes", [{"batch": 65_536}, {"num_heads": 65_536, "num_kv_heads": 32_768}]
)
def test_triton_says_what_no_grid_holds(sizes: dict[str, int]) -> None:
    """FAULTS.md, grid limits: a batch of 65,536 is one more than a grid's third dimension holds."""
    (reason,) = triton_reasons(dataclasses.replace(PROBLEM, **sizes), TRITON)
    assert "65,536" in reason and "65,535" in reason
    fits = {name: size - 2 for name, size in sizes.items()}
    assert triton_reasons(dataclasses.replace(PROBLEM, **fits), TRITON) == []
