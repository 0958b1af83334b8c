"""`python -m nsa` from outside: what it prints, that it needs neither GPU nor torch, and that a
mistake is one line and 2.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nsa import capability, cli, settings
from nsa.retired import RETIRED
from nsa.routing import Capability

ROOT = Path(__file__).parents[2]
H100 = Capability("cuda", "NVIDIA H100 80GB HBM3", (9, 0), "torch.varlen 2.13.0", "", "2.13.0")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The NSA_* variables of this test; no package of FA-2 or torch decides what it sees."""
    variables: dict[str, str] = {}
    monkeypatch.setattr(settings, "current", lambda: settings.load(variables))
    monkeypatch.setattr(capability, "fa2_provider", lambda: (H100.fa2_provider, ""))
    return variables


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert cli.invoke(argv) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert cli.invoke(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("nsa: ") and err.count("\n") == 1
    return err


def test_settings_print_value_source_and_meaning(
    environment: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    environment |= {"NSA_USE_FA2": "off", "NSA_FA2_MIN_LEN_WIN": "512"}
    lines = {
        line.split()[0]: line.split(maxsplit=3)
        for line in said(capsys, "settings").splitlines()[1:]
    }
    assert set(lines) == set(settings.MEANINGS)
    assert lines["NSA_USE_FA2"][1:] == ["0", "environment", settings.MEANINGS["NSA_USE_FA2"]]
    assert lines["NSA_FA2_MIN_LEN_WIN"][1:3] == ["512", "environment"]
    assert lines["NSA_DEBUG_LOG"][1:] == ["unset", "default", settings.MEANINGS["NSA_DEBUG_LOG"]]


def test_settings_as_json(environment: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    environment["NSA_STRICT_ASSERTS"] = "1"
    rows = {row["name"]: row for row in json.loads(said(capsys, "settings", "--json"))}
    assert rows["NSA_STRICT_ASSERTS"] | {"meaning": ""} == {
        "name": "NSA_STRICT_ASSERTS",
        "value": "1",
        "source": "environment",
        "meaning": "",
    }
    assert rows["NSA_USE_FA2"]["value"] is None


def test_retired_names_are_listed_with_what_replaces_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = [
        line.split(maxsplit=1) for line in said(capsys, "settings", "--retired").splitlines()[1:]
    ]
    assert dict(lines) == dict(RETIRED)
    assert json.loads(said(capsys, "settings", "--retired", "--json")) == dict(RETIRED)


def test_explain_prints_the_route_its_reasons_and_what_was_rejected(
    environment: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(capsys, "explain", "--seq-len", "8192", "--gpu", "h100")
    assert text.startswith(
        "m7c_125m, 1 x 8192 tokens, bfloat16, on NVIDIA H100 80GB HBM3 (SM 9.0)\nassumed: "
    )
    for line in (
        "cmp: triton (triton, ",
        "score: triton (triton, ",
        "sel: triton (triton, triton ",
        "win: triton (triton, ",
    ):
        assert f"\n{line}" in text
    text = said(capsys, "explain", "--seq-len", "8192", "--gpu", "rtx4090")
    for line in (
        "cmp: sdpa (sdpa, ",
        "sel: v2 (fa2, torch.varlen 2.13.0): auto: ",
        "win: fa2 (fa2, ",
        "not triton: not measured on this card, and estimated not to pay",
    ):
        assert f"\n{line}" in text
    environment |= {"NSA_USE_FA2": "0", "NSA_USE_FA2_CMP": "0"}
    text = said(
        capsys,
        "explain",
        "--seq-len",
        "512",
        "--gpu",
        "RTX 4090",
        "--model",
        "tiny",
        "--batch",
        "3",
        "--dtype",
        "float16",
    )
    assert text.startswith("tiny, 3 x 512 tokens, float16, on")
    for line in (
        "sel: masked (",
        "not v2: fa2=off",
        "not fa2 for win: fa2=off",
        "note: NSA_USE_FA2 (",
        "note: NSA_USE_FA2_CMP=0",
    ):
        assert f"\n{line}" in text


@pytest.mark.parametrize(
    ("gpu", "path"), [("h100", "triton"), ("none", "masked"), ("rtx4090", "v2")]
)
def test_explain_depends_on_the_gpu(
    capsys: pytest.CaptureFixture[str], gpu: str, path: str
) -> None:
    found = json.loads(said(capsys, "explain", "--seq-len", "2048", "--gpu", gpu, "--json"))
    assert [b["implementation"] for b in found["route"]["branches"] if b["branch"] == "sel"] == [
        path
    ]
    assert found["call"] == {"model": "m7c_125m", "batch": 1, "seq_len": 2048, "dtype": "bfloat16"}
    assert found["request"]["path"] == "auto"
    assert found["capability"]["sm"] == {"h100": [9, 0], "none": None, "rtx4090": [8, 9]}[gpu]


@pytest.mark.parametrize(
    ("option", "value", "kernel"),
    [("--path", "v1", "sdpa"), ("--path", "v2", "fa2"), ("--dtype", "fp32", "sdpa")],
)
def test_explain_takes_every_option(
    capsys: pytest.CaptureFixture[str], option: str, value: str, kernel: str
) -> None:
    argv = ["explain", "--seq-len", "4096", "--gpu", "h100", "--json"]
    with_option, without = (
        json.loads(said(capsys, *argv, *more)) for more in ([option, value], [])
    )
    sel = {b["branch"]: b for b in with_option["route"]["branches"]}["sel"]
    assert sel["kernel"] == kernel and with_option["route"] != without["route"]


def test_explain_says_what_softcap_sinks_and_the_lse_take(
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ("explain", "--seq-len", "4096", "--gpu", "h100")
    for options, words in (
        (("--softcap", "30"), "path=auto with softcap cannot be served: SDPA and"),
        (("--sinks", "--path", "v2"), "path=v2 with sinks cannot be served: SDPA and"),
        (("--softcap", "0"), "softcap=0.0 must be > 0"),
    ):
        assert words in refused(capsys, *argv, *options)
    both = said(capsys, *argv, "--path", "reference", "--softcap", "30", "--sinks")
    assert "\nwin: explicit (explicit, torch " in both and "with softcap and sinks: an" in both
    short = ("explain", "--seq-len", "512", "--gpu", "h100", "--return-lse")
    assert "\nnot win.dense: the window covers the whole sequence, but NSA's" in said(
        capsys, *short
    )


@pytest.mark.parametrize(("batch", "path"), [("4", "masked"), ("5", "v2")])
def test_the_batch_counts_towards_the_mask_limit(
    capsys: pytest.CaptureFixture[str], batch: str, path: str
) -> None:
    """2 kv heads x 16,384 x 16,384 are 2^29 elements a sequence, and auto builds no mask beyond
    2^31.
    """
    text = said(capsys, "explain", "--seq-len", "16384", "--gpu", "none", "--batch", batch)
    assert f"\nsel: {path} (" in text


def test_without_gpu_it_is_this_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(capability, "this_machine", lambda: H100)
    text = said(capsys, "explain", "--seq-len", "8192")
    assert "on NVIDIA H100 80GB HBM3 (SM 9.0)" in text and "assumed" not in text


def test_this_machine_is_probed() -> None:
    import torch

    assert capability.this_machine() is capability.probe(
        "cuda" if torch.cuda.is_available() else "cpu"
    )


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("explain --seq-len 8192 --gpu b200", ["'b200'", "'h200'", *capability.KNOWN_GPUS, "none"]),
        ("explain --seq-len 8192 --gpu none --fa2 on", ["fa2=on", "not CUDA", "Next:"]),
        ("explain --seq-len 8192 --gpu none --fa2 maybe", ["'maybe'", "on, off, auto"]),
        ("explain --seq-len 8192 --gpu none --path maskd", ["'maskd'", "'masked'"]),
        ("explain --seq-len 8192 --gpu none --dtype bf61", ["'bf61'", "'bf16'"]),
        ("explain --seq-len 8192 --gpu none --model m7c", ["'m7c'", "m7c_125m"]),
        ("explain --seq-len 0 --gpu none", ["--seq-len 0", ">= 1"]),
        ("explain --seq-len 8 --gpu none --batch -1", ["--batch -1", ">= 1"]),
        ("explain --seq-len 8k --gpu none", ["--seq-len"]),
        ("explain", ["--seq-len"]),
        ("settings --retird", ["--retired"]),
        ("setings", ["settings"]),
    ],
)
def test_a_mistake_is_one_line_and_2(
    capsys: pytest.CaptureFixture[str], argv: str, words: list[str]
) -> None:
    line = refused(capsys, *argv.split())
    assert all(word in line for word in words), line


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("NSA_P_CMP_MIXED", "1", ["retired", "score_dtype"]),
        ("NSA_USE_FA3", "1", ["NSA_USE_FA2"]),
        ("NSA_FA2_MIN_LEN_WIN", "long", ["'long'", "whole number"]),
        ("NSA_USE_FA2_CMP", "1", ["staircase"]),
    ],
)
def test_a_wrong_environment_is_one_line_and_2(
    environment: dict[str, str],
    capsys: pytest.CaptureFixture[str],
    name: str,
    value: str,
    words: list[str],
) -> None:
    environment[name] = value
    line = refused(capsys, "explain", "--seq-len", "8192", "--gpu", "h100")
    assert name in line and all(word in line for word in words), line


def test_no_command_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys)
    assert "settings" in text and "explain" in text


def run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *code.split("|")], env=variables, cwd=ROOT, capture_output=True, text=True
    )


def test_the_module_reads_the_process_environment_and_exits_with_the_code() -> None:
    done = run("-m|nsa|settings", NSA_FA2_MIN_LEN_WIN="768", FORCE_COLOR="1", NO_COLOR="1")
    assert done.returncode == 0 and done.stderr == "" and "\x1b" not in done.stdout
    assert "NSA_FA2_MIN_LEN_WIN  768" in done.stdout
    assert any(
        line.startswith("NSA_NVTX") and "CUDA only" in line for line in done.stdout.splitlines()
    )
    done = run("-m|nsa|settings", NSA_GATE_COMPILE="1")
    assert (
        done.returncode == 2
        and done.stdout == ""
        and "torch.compile" in done.stderr
        and done.stderr.count("\n") == 1
    )


@pytest.mark.parametrize(
    "argv",
    [
        ["settings"],
        ["settings", "--retired"],
        ["explain", "--seq-len", "8192", "--gpu", "h100"],
        ["--help"],
    ],
)
def test_neither_torch_nor_anything_heavy_is_loaded(argv: list[str]) -> None:
    """What keeps start-up under half a second, without a stopwatch."""
    done = run(
        f"-c|import sys, nsa.cli; code = nsa.cli.invoke({argv}); print(*sys.modules,"
        " file=sys.stderr); sys.exit(code)"
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stderr.split()) & {"torch", "numpy", "pandas", "rich"} == set()
