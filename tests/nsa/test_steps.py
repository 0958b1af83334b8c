"""Steps of path triton that a setting turns off: what says so, and that no kernel of the step is
asked for then.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path as File

import pytest
import torch

from nsa import cli, settings
from nsa.ops.kernels import common
from nsa.routing import TRITON_STEPS, Capability, Problem, Request, RouteError, route
from nsa.settings import MEANINGS, load

ROOT = File(__file__).parents[2]
H100 = Capability(
    "cuda", "NVIDIA H100 80GB HBM3", (9, 0), "torch.varlen 2.13.0", "", "2.13.0", "triton 3.7.1", ""
)
PROBLEM = Problem(1, 2048, 2048, 12, 2, 64, 64, "bfloat16", scores="", sel_block=64)
EVERY_STEP = pytest.mark.parametrize("step", ["copy", "lists", "join", "split"])


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What settings.current() reads in this test."""
    variables: dict[str, str] = {}
    monkeypatch.setattr(settings, "current", lambda: load(variables))
    return variables


@EVERY_STEP
def test_zero_turns_one_step_off_and_anything_else_none(
    environment: dict[str, str], step: str
) -> None:
    name = f"NSA_TRITON_{step.upper()}"
    assert name in MEANINGS and MEANINGS[name].startswith(
        "0, for measurements: path triton without "
    )
    for text in ("", "1", "on"):
        environment[name] = text
        assert [one for one in TRITON_STEPS if settings.is_off(one)] == []
    environment[name] = "0"
    assert [one for one in TRITON_STEPS if settings.is_off(one)] == [step]


def test_a_step_that_does_not_exist_is_an_error(environment: dict[str, str]) -> None:
    with pytest.raises(AttributeError, match="triton_lsts"):
        settings.is_off("lsts")


@EVERY_STEP
def test_the_route_says_which_step_is_off(step: str) -> None:
    request = load({f"NSA_TRITON_{step.upper()}": "0"}).request("triton")
    found = route(request, PROBLEM, H100)
    assert (
        found.off == (step,) and found.branches == route(Request("triton"), PROBLEM, H100).branches
    )
    assert (
        f"note: NSA_TRITON_{step.upper()}=0 (environment) turns off {TRITON_STEPS[step]}"
        in found.explain()
    )
    assert route(Request("triton"), PROBLEM, H100).off == ()


def test_several_steps_are_listed_in_their_order() -> None:
    request = load({"NSA_TRITON_SPLIT": "0", "NSA_TRITON_COPY": "0"}).request("auto")
    assert route(request, PROBLEM, H100).off == ("copy", "split"), "auto takes path triton here"


@pytest.mark.parametrize("path", ["v2", "masked", "v1"])
def test_a_route_without_path_triton_has_no_step_to_turn_off(path: str) -> None:
    found = route(load({"NSA_TRITON_LISTS": "0"}).request(path), PROBLEM, H100)
    assert found == route(Request(path), PROBLEM, H100) and found.off == ()


def test_a_branch_that_is_full_attention_has_no_step_either() -> None:
    alone = dataclasses.replace(
        PROBLEM, branches=("sel",), select_all_tokens=4096, whole=True, scores=None
    )
    found = route(load({"NSA_TRITON_LISTS": "0"}).request(), alone, H100)
    assert found.branch("sel").implementation == "dense" and found.off == ()


def test_a_step_off_is_no_way_round_a_refusal() -> None:
    with pytest.raises(RouteError, match="head_dim 300 exceeds"):
        route(
            load({"NSA_TRITON_COPY": "0"}).request("triton"),
            dataclasses.replace(PROBLEM, head_dim=300),
            H100,
        )


def test_explain_and_settings_tell_it(
    environment: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    environment["NSA_TRITON_LISTS"] = "0"
    assert (
        cli.invoke(["explain", "--seq-len", "8192", "--gpu", "h100", "--path", "triton", "--json"])
        == 0
    )
    assert json.loads(capsys.readouterr().out)["route"]["off"] == ["lists"]
    assert cli.invoke(["settings"]) == 0
    (line,) = [
        line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("NSA_TRITON_LISTS ")
    ]
    assert line.split()[:3] == ["NSA_TRITON_LISTS", "0", "environment"]


def test_without_the_copy_engine_tiles_are_plain_tensors(environment: dict[str, str]) -> None:
    x, large = torch.zeros(1, 32, 2, 16), common.COPY_MIN_ELEMENTS
    assert common.described(16, x, work=large)[1] and not common.described(16, x, work=large - 1)[1]
    environment["NSA_TRITON_COPY"] = "0"
    found, copied = common.described(16, x, work=large)
    assert not copied and found[0] is x


SAME = """
import torch
from nsa import settings
from nsa.ops.interval import forward_kernels
from nsa.ops.selected.triton import list_calls
from nsa.ops.selected.triton.block_lists import Lists
from nsa.ops.selected.triton.forward import forward as selected_forward
from tests.cases import Case, SMALL, qkv, random_blocks
from tests.interpreter import patch_language_once
patch_language_once()
torch.set_num_threads(1)
case = Case(70, 2, 16, 16, 1)
q, k, v = qkv(case)
blocks = random_blocks(case, SMALL, seed=3)
list_calls.SORT_MIN_ROWS = 0  # so few queries would not be sorted
sorted_, of = [], Lists.of
window = {"first": None, "block": 1, "stride": 1, "width": 24, "q_start": 0, "scale": 0.25}
Lists.of = lambda *given, **full: sorted_.append(given) or of(*given, **full)

def both(**variables):
    settings.current = lambda: settings.load(variables)
    sel = selected_forward(q, k, v, blocks, sel_block=SMALL.sel_block, q_start=0, scale=0.25)
    return [*sel, *forward_kernels.forward(q, k, v, **window)]

whole, count = both(), len(sorted_)
off = both(NSA_TRITON_LISTS="0", NSA_TRITON_COPY="0")
assert count == 1 and len(sorted_) == 1, (count, len(sorted_))
for one, other in zip(whole, off, strict=True):
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert one.isfinite().any()
print("same")
"""


def test_what_is_computed_without_a_step_is_the_same() -> None:
    """In Triton's interpreter: with its lists the selected forward sorts once, without them
    never.
    """
    process = {"TRITON_INTERPRET": "1", "PATH": "/usr/bin:/bin", "HOME": str(File.home())}
    done = subprocess.run(
        [sys.executable, "-c", SAME],
        env=process,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=7200,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "same"), done.stderr[-3000:]
