"""Systems that this project is not tried on: what needs no CUDA runs, the rest is refused by
name.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nsa import capability
from nsa.config import preset
from nsa.routing import Capability, Request, RouteError, plan
from nsa.routing import Path as Route
from perfbench import __main__ as program

WITHOUT_TRITON = """
import sys

sys.modules["triton"] = None  # as where it is not installed
import torch
import nsa

layer = nsa.NSAAttention(32, 4, 2, 16)
x = torch.randn(1, 100, 32)
layer(x).sum().backward()
with torch.no_grad():
    cache = layer.new_cache(1, 120)
    layer(x, cache=cache)
    layer(x[:, :1], cache=cache)
try:
    nsa.NSAAttention(32, 4, 2, 16, path="triton")(x)
except nsa.RouteError as error:
    print(error)
"""


def test_nsa_runs_where_triton_is_not_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS and Windows have no Triton."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "path=triton cannot be served: triton is not installed" in done.stdout


@pytest.fixture
def amd(monkeypatch: pytest.MonkeyPatch) -> Iterator[Capability]:
    """What a ROCm build of PyTorch says of its first GPU: 9.4 would pass for newer than Hopper."""
    monkeypatch.setattr(torch.version, "hip", "6.4.2")
    card = SimpleNamespace(name="AMD Instinct MI300X", major=9, minor=4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    capability.probe.cache_clear()
    yield capability.probe("cuda")
    capability.probe.cache_clear()


def test_an_amd_gpu_is_no_nvidia_gpu(amd: Capability) -> None:
    model, call = preset("m7c_125m"), {"batch": 1, "tokens": 4096, "dtype": "bfloat16"}
    route = plan(Request(), model, **call, capability=amd)  # type: ignore[arg-type]
    assert route.branch("sel").implementation in (Route.MASKED, Route.V2)
    assert {branch.kernel for branch in route.branches} == {"sdpa"}
    for request in (Request("triton"), Request("v2", fa2="on")):
        with pytest.raises(RouteError, match=r"AMD Instinct MI300X is an AMD GPU \(ROCm 6\.4\.2\)"):
            plan(request, model, **call, capability=amd)  # type: ignore[arg-type]


def test_the_harness_names_the_system_that_it_cannot_run_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "os", SimpleNamespace(name="nt"))
    monkeypatch.setattr(sys, "platform", "win32")
    assert program.main() == 2
    assert capsys.readouterr().err == (
        "perfbench: got the system win32, wanted Linux or macOS, which can fork. Next: run it in"
        " WSL 2; nsa itself runs here\n"
    )
