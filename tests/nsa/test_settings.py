"""NSA_* environment variables: read by one function, joined with arguments, contradictions refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path as File

import pytest

from nsa.routing import Path, Request, RouteError
from nsa.settings import MEANINGS, load

ROOT = File(__file__).parents[2]


def test_nothing_set_changes_nothing() -> None:
    settings = load({"PATH": "/bin", "HOME": "/", "TRANSFORMERS_NSA_FAST": "1"})
    assert settings == load({})
    assert settings.request() == Request()
    assert settings.request("masked", "off") == Request("masked", "off")
    assert settings.force_sel_mask.value is None and settings.force_sel_mask.source == "default"


def test_the_founding_variables_are_known() -> None:
    assert set(MEANINGS) == {"NSA_FORCE_SEL_MASK", "NSA_USE_FA2", "NSA_USE_FA2_WIN", "NSA_SEL_RANGES_V2", "NSA_STRICT_ASSERTS"}


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("NSA_FORCE_SEL_MSK", "NSA_FORCE_SEL_MASK"), ("NSA_USE_FA3", "NSA_USE_FA2"), ("NSA_STRICT_ASSERT", "NSA_STRICT_ASSERTS")],
)
def test_an_unknown_name_is_an_error_with_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is not known.*{nearest}"):
        load({name: "1"})


@pytest.mark.parametrize("text", ["2", "enabled", "-1", "0.5"])
def test_an_unknown_value_is_an_error_with_the_meaning(text: str) -> None:
    with pytest.raises(ValueError, match="NSA_USE_FA2=.*1 or 0.*fa2=on"):
        load({"NSA_USE_FA2": text})


@pytest.mark.parametrize(("text", "value"), [("1", True), (" TRUE ", True), ("on", True), ("0", False), ("No", False)])
def test_values_carry_their_source(text: str, value: bool) -> None:
    setting = load({"NSA_STRICT_ASSERTS": text}).strict_asserts
    assert setting.value is value and setting.source == "environment"


def test_empty_means_unset() -> None:
    assert load({"NSA_FORCE_SEL_MASK": ""}).force_sel_mask.value is None


def test_force_sel_mask_is_the_explicit_request() -> None:
    request = load({"NSA_FORCE_SEL_MASK": "1"}).request()
    assert request.path == Path.MASKED and "NSA_FORCE_SEL_MASK" in " ".join(request.notes)
    assert load({"NSA_FORCE_SEL_MASK": "0"}).request("v2").path == "v2"
    assert load({"NSA_FORCE_SEL_MASK": "1"}).request("masked").path == "masked"


@pytest.mark.parametrize("path", ["v1", "v2", "reference", "adaptive"])
def test_force_sel_mask_against_another_path_is_a_contradiction(path: str) -> None:
    with pytest.raises(RouteError) as caught:
        load({"NSA_FORCE_SEL_MASK": "1"}).request(path)
    for word in ("NSA_FORCE_SEL_MASK=1", f"path={path}", "unset"):
        assert word in str(caught.value)


def test_ranges_v2_off_turns_v2_into_an_explicit_v1() -> None:
    settings = load({"NSA_SEL_RANGES_V2": "0"})
    assert settings.request("v2").path == Path.V1
    assert settings.request("masked").path == Path.MASKED
    auto = settings.request()
    assert auto.path == "auto" and not auto.v2_allowed, "auto must not become v1"
    assert load({"NSA_SEL_RANGES_V2": "1"}).request("v2").path == Path.V2


def test_use_fa2() -> None:
    assert load({"NSA_USE_FA2": "1"}).request().fa2 == "on"
    assert load({"NSA_USE_FA2": "0"}).request().fa2 == "off"
    for variable, argument in (("1", "off"), ("0", "on")):
        with pytest.raises(RouteError, match="NSA_USE_FA2=.*fa2="):
            load({"NSA_USE_FA2": variable}).request(fa2=argument)


def test_the_window_variable_outranks_the_general_one() -> None:
    request = load({"NSA_USE_FA2": "1", "NSA_USE_FA2_WIN": "0"}).request()
    assert (request.fa2, request.fa2_win) == ("on", "off")
    with pytest.raises(RouteError, match="NSA_USE_FA2_WIN=1"):
        load({"NSA_USE_FA2_WIN": "1"}).request(fa2="off")


def test_unknown_arguments_are_route_errors() -> None:
    with pytest.raises(RouteError, match="maskd.*masked"):
        load({}).request("maskd")
    with pytest.raises(RouteError, match="fa2='maybe'"):
        load({}).request(fa2="maybe")


# From the environment of a process to what runs in it.

ATTEND = """
import torch, nsa
from nsa import engagement
q, k = torch.randn(1, 20, 4, 8), torch.randn(1, 20, 2, 8)
blocks = torch.tensor([0, 1, -1], dtype=torch.int32).expand(1, 20, 2, 3){change}
with engagement.collect() as engaged:
    nsa.selected_attention(q, k, k, blocks, sel_block=16, path="{path}")
print(sorted(engaged.counts))
"""


def attend_in_a_process(environment: dict[str, str], *, path: str = "auto", change: str = "") -> subprocess.CompletedProcess[str]:
    code = ATTEND.format(path=path, change=change)
    return subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("environment", "path", "engaged"),
    [
        ({"NSA_FORCE_SEL_MASK": "1"}, "auto", "['sel.masked', 'sel.sdpa']"),
        ({"NSA_SEL_RANGES_V2": "0"}, "v2", "['sel.sdpa', 'sel.v1']"),
    ],
)
def test_the_environment_decides_what_runs(environment: dict[str, str], path: str, engaged: str) -> None:
    done = attend_in_a_process(environment, path=path)
    assert done.returncode == 0 and done.stdout.strip() == engaged, done.stderr


@pytest.mark.parametrize(
    ("environment", "path", "word"),
    [
        ({"NSA_FORCE_SEL_MASK": "1"}, "v2", "NSA_FORCE_SEL_MASK=1"),
        ({"NSA_FORCE_SEL_MSK": "1"}, "auto", "NSA_FORCE_SEL_MASK"),
        ({"NSA_USE_FA2": "1"}, "v2", "not CUDA"),
    ],
)
def test_the_environment_refuses_loudly(environment: dict[str, str], path: str, word: str) -> None:
    done = attend_in_a_process(environment, path=path)
    assert done.returncode == 1 and not done.stdout and word in done.stderr


@pytest.mark.parametrize("change", [".flip(-1)", " * 0", " + 1", " * 50"], ids=["descending", "doubled", "unpadded", "out of range"])
def test_strict_asserts_check_the_blocks(change: str) -> None:
    done = attend_in_a_process({"NSA_STRICT_ASSERTS": "1"}, change=change)
    assert done.returncode == 1 and "ValueError" in done.stderr and "blocks" in done.stderr, done.stderr
