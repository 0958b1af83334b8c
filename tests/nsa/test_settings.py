"""NSA_* environment variables: read by one function, joined with arguments, contradictions
refused.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import subprocess
import sys
from pathlib import Path as File

import pytest

from nsa import settings as module
from nsa.config import NSAConfig
from nsa.retired import RETIRED
from nsa.routing import PATH_REQUESTS, Capability, Path, Problem, Request, RouteError, route
from nsa.settings import MEANINGS, Settings, load
from nsa.train.config import ParallelConfig
from tests.forked import TorchProcess

ROOT = File(__file__).parents[2]
H100 = Capability("cuda", "NVIDIA H100 80GB HBM3", (9, 0), "torch.varlen 2.13.0", "", "2.13.0")
PROBLEM = Problem(1, 2048, 2048, 12, 2, 64, 64, "bfloat16")

# Every variable of the documents that the project was founded on; "A, _B" is spelled out.
FOUNDING = [
    "NSA_FORCE_SEL_MASK",
    "NSA_USE_FA2",
    "NSA_USE_FA2_WIN",
    "NSA_USE_FA2_CMP",
    "NSA_FA2_MIN_LEN_WIN",
    "NSA_FA2_MIN_LEN_CMP",
    "NSA_FA2_FORCE_DENSE",
    "NSA_DEBUG_FA2",
    "NSA_VARLEN_RESERVE_N",
    "NSA_VARLEN_RESERVE_K",
    "NSA_SEL_PACK_RESERVE_N",
    "NSA_SEL_PACK_RESERVE_L",
    "NSA_SEL_RANGES_V2",
    "NSA_SEL_RANGES_V2_MIN_S",
    "NSA_USE_SEL_PACK",
    "NSA_SEL_VARLEN_V2",
    "NSA_SEL_TRITON_MIN_L",
    "NSA_PREFILL_BATCHED",
    "NSA_P_CMP_MIXED",
    "NSA_GATE_COMPILE",
    "NSA_STRICT_ASSERTS",
    "NSA_DEBUG_LOG",
    "NSA_DDP_COMPRESS",
    "NSA_DDP_BUCKET_MB",
    "NSA_NVTX",
]


def test_nothing_set_changes_nothing() -> None:
    settings = load({"PATH": "/bin", "HOME": "/", "TRANSFORMERS_NSA_FAST": "1"})
    assert settings == load({})
    assert settings.request() == Request()
    assert settings.request("masked", "off") == Request("masked", "off")
    assert settings.force_sel_mask.value is None and settings.force_sel_mask.source == "default"


@pytest.mark.parametrize("name", FOUNDING)
def test_a_prototype_variable_is_known_or_retired(name: str) -> None:
    assert (name in MEANINGS) != (name in RETIRED)


def test_what_is_known_or_retired_is_a_prototype_variable_or_a_step_to_turn_off() -> None:
    steps = {f"NSA_TRITON_{step}" for step in ("COPY", "LISTS", "ROLES", "JOIN", "SPLIT")}
    own = {*steps, "NSA_THRESHOLDS", "NSA_LAUNCH_PLANS"}
    assert {*MEANINGS, *RETIRED} == {*FOUNDING, *own} and not steps & {*RETIRED, *FOUNDING}


def test_every_known_variable_has_a_field_that_it_sets() -> None:
    assert {f"NSA_{field.name.upper()}" for field in dataclasses.fields(Settings)} == set(MEANINGS)
    for name in MEANINGS:
        value = "/1" if name == "NSA_THRESHOLDS" else "1"
        assert load({name: value}) != load({})
        assert load({name: value}).given() == {name: value}


@pytest.mark.parametrize("name", sorted(RETIRED))
@pytest.mark.parametrize("value", ["1", "0", ""])
def test_a_retired_name_is_an_error_that_says_what_to_use(name: str, value: str) -> None:
    with pytest.raises(ValueError) as caught:
        load({"NSA_USE_FA2": "1", name: value})
    for word in (name, "is retired", "unset it", RETIRED[name]):
        assert word in str(caught.value)


def test_what_replaces_a_retired_name_exists() -> None:
    text = " ".join(RETIRED.values())
    variables, paths = re.findall(r"NSA_[A-Z0-9_]+", text), re.findall(r"path='([a-z0-9]+)'", text)
    assert variables and set(variables) <= set(MEANINGS)
    assert paths and set(paths) <= set(PATH_REQUESTS)
    keys = re.findall(r"parallel\.(\w+).*?`python -m nsa\.train`", text)
    assert keys == ["bucket_mb", "compress"]
    ParallelConfig(**{key: {"bucket_mb": 1, "compress": "bf16"}[key] for key in keys})
    (option,) = re.findall(r"NSAConfig\(([a-z_]+)='([a-z0-9]+)'\)", text)
    assert getattr(NSAConfig(**{option[0]: option[1]}), option[0]) == option[1]


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("NSA_FORCE_SEL_MSK", "NSA_FORCE_SEL_MASK"),
        ("NSA_USE_FA3", "NSA_USE_FA2"),
        ("NSA_STRICT_ASSERT", "NSA_STRICT_ASSERTS"),
    ],
)
def test_an_unknown_name_is_an_error_with_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is not known.*{nearest}"):
        load({name: "1"})


@pytest.mark.parametrize("text", ["2", "enabled", "-1", "0.5"])
def test_an_unknown_value_is_an_error_with_the_meaning(text: str) -> None:
    with pytest.raises(ValueError, match="NSA_USE_FA2=.*1 or 0.*fa2=on"):
        load({"NSA_USE_FA2": text})


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), (" TRUE ", True), ("on", True), ("0", False), ("No", False)]
)
def test_values_carry_their_source(text: str, value: bool) -> None:
    setting = load({"NSA_STRICT_ASSERTS": text}).strict_asserts
    assert setting.value is value and setting.source == "environment"


@pytest.mark.parametrize(("text", "value"), [("0", 0), ("1", 1), (" 4096 ", 4096)])
def test_lengths_are_whole_numbers_with_their_source(text: str, value: int) -> None:
    settings = load({"NSA_FA2_MIN_LEN_WIN": text})
    setting = settings.fa2_min_len_win
    assert setting.value == value and setting.value is not True and setting.source == "environment"
    assert settings.given() == {"NSA_FA2_MIN_LEN_WIN": str(value)}
    assert load({}).fa2_min_len_win.source == "default" and load({}).given() == {}


@pytest.mark.parametrize(
    "text", ["-1", "+1", "1.5", "1e3", "1_000", "0x10", "on", "512 tokens", "\u0663", "\u00b2"]
)
@pytest.mark.parametrize("name", ["NSA_FA2_MIN_LEN_WIN", "NSA_FA2_MIN_LEN_CMP"])
def test_a_length_that_is_none_is_an_error_with_the_meaning(name: str, text: str) -> None:
    with pytest.raises(ValueError) as caught:
        load({name: text})
    for word in (name, repr(text), "whole number >= 0", MEANINGS[name]):
        assert word in str(caught.value)


def test_empty_means_unset() -> None:
    assert load({"NSA_FA2_MIN_LEN_WIN": " "}).fa2_min_len_win.value is None
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


def test_the_minimum_length_reaches_the_route() -> None:
    request = load({"NSA_FA2_MIN_LEN_WIN": "4096"}).request()
    assert request.fa2_min_len_win == 4096
    assert route(request, PROBLEM, H100).branch("win").kernel == "sdpa"
    assert (
        route(load({"NSA_FA2_MIN_LEN_WIN": "2048"}).request(), PROBLEM, H100).branch("win").kernel
        == "fa2"
    )
    named = load({"NSA_FA2_MIN_LEN_WIN": "4096"}).request(fa2="on")
    assert route(named, PROBLEM, H100).branch("win").kernel == "fa2"


@pytest.mark.parametrize(
    ("name", "value"), [("NSA_USE_FA2_CMP", "0"), ("NSA_FA2_MIN_LEN_CMP", "512")]
)
def test_what_cannot_change_the_compressed_branch_is_noted(name: str, value: str) -> None:
    found = route(load({name: value}).request(), PROBLEM, H100)
    assert found.branches == route(Request(), PROBLEM, H100).branches
    assert [
        note
        for note in found.notes
        if f"{name}={value}" in note and "changes nothing" in note and "staircase" in note
    ]


def test_fa2_on_for_the_compressed_branch_is_a_route_error() -> None:
    with pytest.raises(RouteError, match="NSA_USE_FA2_CMP=1.*staircase"):
        route(load({"NSA_USE_FA2_CMP": "1"}).request(), PROBLEM, H100)


def test_unknown_arguments_are_route_errors() -> None:
    with pytest.raises(RouteError, match="maskd.*masked"):
        load({}).request("maskd")
    with pytest.raises(RouteError, match="fa2='maybe'"):
        load({}).request(fa2="maybe")


# Every Route that is made under the process's settings, and its log.


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What settings.current() reads in this test."""
    variables: dict[str, str] = {}
    monkeypatch.setattr(module, "current", lambda: load(variables))
    module.log_route.cache_clear()
    return variables


def records(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "nsa"]


def test_decide_joins_arguments_and_settings(environment: dict[str, str]) -> None:
    assert module.decide(PROBLEM, H100) == route(Request(), PROBLEM, H100)
    assert module.decide(PROBLEM, H100, path="v2", fa2="off") == route(
        Request("v2", "off"), PROBLEM, H100
    )
    environment["NSA_SEL_RANGES_V2"] = "0"
    assert module.decide(PROBLEM, H100, path="v2").branch("sel").implementation == "v1"


def test_each_new_route_is_logged_once(
    environment: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    environment["NSA_DEBUG_LOG"] = "1"
    with caplog.at_level(logging.INFO, "nsa"):
        first = module.decide(PROBLEM, H100)
        module.decide(PROBLEM, H100)
        # the same Route
        module.decide(dataclasses.replace(PROBLEM, q_tokens=2047, k_tokens=2047), H100)
        assert len(records(caplog)) == 1
        module.decide(PROBLEM, H100, path="masked")
    assert [record.levelno for record in records(caplog)] == [logging.INFO, logging.INFO]
    assert all(line in records(caplog)[0].getMessage() for line in first.explain())
    assert "sel: masked" in records(caplog)[1].getMessage()


@pytest.mark.parametrize("value", ["", "0"])
def test_nothing_is_logged_unless_asked(
    environment: dict[str, str], caplog: pytest.LogCaptureFixture, value: str
) -> None:
    environment["NSA_DEBUG_LOG"] = value
    with caplog.at_level(logging.DEBUG, "nsa"):
        module.decide(PROBLEM, H100)
    assert records(caplog) == []


LOGGING = """
import logging
{configure}
from nsa import settings
from nsa.routing import Capability, Problem
here = Capability("cpu", "cpu", None, None, "none", "2.13.0")
for _ in range(2):
    settings.decide(Problem(1, 64, 64, 4, 2, 8, 8, "float32"), here)
"""


@pytest.mark.parametrize(
    ("configure", "lines"),
    [
        ("", 1),
        ("logging.basicConfig(format='%(message)s')", 1),
        ("logging.getLogger('nsa').setLevel('ERROR')", 0),
    ],
    ids=["unconfigured", "configured", "silenced"],
)
def test_the_log_is_seen_unless_it_was_silenced(configure: str, lines: int) -> None:
    code = LOGGING.format(configure=configure)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"NSA_DEBUG_LOG": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr.count("sel: masked") == lines and done.stdout == ""


# From the environment of a process to what runs in it.

ATTEND = """
import torch, nsa
from nsa import engagement
q, k = torch.randn(1, 20, 4, 8), torch.randn(1, 20, 2, 8)
blocks = torch.tensor([0, -1, -1], dtype=torch.int32).expand(1, 20, 2, 3){change}
with engagement.collect() as engaged:
    nsa.selected_attention(q, k, k, blocks, sel_block=16, path="{path}")
print(sorted(engaged.counts))
"""


def attend_in_a_process(
    process: TorchProcess, environment: dict[str, str], *, path: str = "auto", change: str = ""
) -> subprocess.CompletedProcess[str]:
    return process.run(ATTEND.format(path=path, change=change), environment)


@pytest.mark.parametrize(
    ("environment", "path", "engaged"),
    [
        ({"NSA_FORCE_SEL_MASK": "1"}, "auto", "['sel.masked', 'sel.sdpa']"),
        ({"NSA_SEL_RANGES_V2": "0"}, "v2", "['sel.sdpa', 'sel.v1']"),
    ],
)
def test_the_environment_decides_what_runs(
    torch_process: TorchProcess, environment: dict[str, str], path: str, engaged: str
) -> None:
    done = attend_in_a_process(torch_process, environment, path=path)
    assert done.returncode == 0 and done.stdout.strip() == engaged, done.stderr


@pytest.mark.parametrize(
    ("environment", "path", "word"),
    [
        ({"NSA_FORCE_SEL_MASK": "1"}, "v2", "NSA_FORCE_SEL_MASK=1"),
        ({"NSA_FORCE_SEL_MSK": "1"}, "auto", "NSA_FORCE_SEL_MASK"),
        ({"NSA_USE_FA2": "1"}, "v2", "not CUDA"),
        ({"NSA_P_CMP_MIXED": "1"}, "auto", "score_dtype"),
    ],
)
def test_the_environment_refuses_loudly(
    torch_process: TorchProcess, environment: dict[str, str], path: str, word: str
) -> None:
    done = attend_in_a_process(torch_process, environment, path=path)
    assert done.returncode == 1 and not done.stdout and word in done.stderr


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (".flip(-1)", "out of order"),
        (" * 0", "repeated"),
        (" * 50", "out of range"),
        (".abs()", "in the future"),
    ],
)
def test_strict_asserts_check_the_blocks(
    torch_process: TorchProcess, change: str, fault: str
) -> None:
    strict = {"NSA_STRICT_ASSERTS": "1"}
    assert attend_in_a_process(torch_process, strict).returncode == 0
    done = attend_in_a_process(torch_process, strict, change=change)
    assert (
        done.returncode == 1
        and "ValueError: blocks" in done.stderr
        and f"an id {fault};" in done.stderr
    ), done.stderr


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("NSA_FOO", f"is not known; valid names: {', '.join(sorted(MEANINGS))}"),
        ("NSA_USE_FA", "is not known; did you mean 'NSA_USE_FA2'?"),
    ],
)
def test_only_a_near_name_is_suggested(name: str, end: str) -> None:
    """What each name begins with made NSA_USE_FA2 near to NSA_FOO."""
    with pytest.raises(ValueError) as caught:
        load({name: "1"})
    assert str(caught.value) == f"environment variable {name} {end}"
