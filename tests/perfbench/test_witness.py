"""The second witness: names of kernels and operators against the Route."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nsa.model import TinyLM
from nsa.routing import BranchRoute, Problem, Request, Route, route, route_dense
from perfbench import witness, workload
from perfbench.witness import SDPA_OPERATOR
from tests.perfbench import builders
from tests.perfbench.jobs import TINY, cell_of, job, route_of

PROBLEM = Problem.of(builders.MODEL, batch=1, tokens=2048, dtype="bfloat16")
FA2 = "void pytorch_flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<64, 64, 256, 4> >"
CUDNN = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128"
EFFICIENT = "fmha_cutlassF_bf16_aligned_64x64_rf_sm80"
GEMM = "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT"


def cuda(path: str, fa2: str) -> Route:
    return route(Request(path, fa2), PROBLEM, builders.H100)


def dense(kind: str) -> Route:
    return route_dense(kind, PROBLEM, builders.H100)


ONLY_LOOP = Route((BranchRoute("sel", "reference", "loop", "torch 2.13.0", "asked for"),))
OPERATORS = {SDPA_OPERATOR, "aten::mm"}


@pytest.mark.parametrize(
    ("chosen", "kernels", "operators", "ok", "words"),
    [
        pytest.param(cuda("v2", "on"), {FA2, EFFICIENT}, OPERATORS, True, "agree with the Route (fa2, sdpa)", id="fa2"),
        pytest.param(cuda("v2", "on"), {EFFICIENT, GEMM}, OPERATORS, False, "names fa2, and no device kernel", id="fa2-silent"),
        pytest.param(cuda("v2", "on"), {CUDNN, EFFICIENT}, OPERATORS, False, "names fa2, and no device kernel", id="cudnn-is-not-fa2"),
        pytest.param(cuda("v2", "on"), set(), OPERATORS, False, "names fa2", id="fa2-nothing-ran"),
        pytest.param(cuda("v2", "on"), {FA2}, {"aten::mm"}, False, f"saw no {SDPA_OPERATOR}", id="cmp-without-sdpa"),
        pytest.param(cuda("v2", "off"), {EFFICIENT}, OPERATORS, True, "(sdpa)", id="sdpa"),
        pytest.param(cuda("v2", "off"), {EFFICIENT, FA2}, OPERATORS, False, "names no FA-2, and an FA-2 kernel ran", id="fa2-unasked"),
        pytest.param(cuda("masked", "off"), {CUDNN}, OPERATORS, True, "(sdpa)", id="sdpa-may-choose-cudnn"),
        pytest.param(cuda("masked", "off"), {EFFICIENT}, {"aten::mm"}, False, f"saw no {SDPA_OPERATOR}", id="masked-without-sdpa"),
        pytest.param(cuda("masked", "on"), {EFFICIENT}, OPERATORS, False, "names fa2", id="window-without-fa2"),
        pytest.param(cuda("reference", "off"), {GEMM}, OPERATORS, True, "(loop, sdpa)", id="loop"),
        pytest.param(dense("dense"), {FA2}, OPERATORS, True, "(sdpa)", id="dense-may-choose-flash"),
        pytest.param(dense("dense"), {CUDNN}, OPERATORS, True, "(sdpa)", id="dense-may-choose-cudnn"),
        pytest.param(dense("dense"), {FA2}, set(), False, f"saw no {SDPA_OPERATOR}", id="dense-without-sdpa"),
        pytest.param(dense("dense_flash"), {FA2}, OPERATORS, True, "(flash)", id="flash"),
        pytest.param(dense("dense_flash"), {CUDNN}, OPERATORS, False, "names flash, and no", id="cudnn-is-not-flash"),
        pytest.param(dense("dense_cudnn"), {CUDNN}, OPERATORS, True, "(cudnn)", id="cudnn"),
        pytest.param(dense("dense_cudnn"), {FA2}, OPERATORS, False, "names cudnn, and no", id="flash-is-not-cudnn"),
        pytest.param(dense("dense_cudnn"), {"CUDNN_Generated_Fort"}, OPERATORS, True, "(cudnn)", id="case-does-not-matter"),
    ],
)
def test_testify_on_a_gpu(chosen: Route, kernels: set[str], operators: set[str], ok: bool, words: str) -> None:
    said, sentence = witness.testify(chosen, kernels, operators, True)
    assert said is ok and words in sentence


@pytest.mark.parametrize(
    ("chosen", "operators", "ok"),
    [
        (route_of(cell_of("v2")), OPERATORS, True),
        (route_of(cell_of("v2")), {"aten::mm", "aten::bmm", "aten::softmax"}, False),
        (route_of(cell_of("dense")), OPERATORS, True),
        (route_of(cell_of("dense")), set(), False),
        (ONLY_LOOP, {"aten::mm"}, True),
    ],
)
def test_testify_on_a_cpu(chosen: Route, operators: set[str], ok: bool) -> None:
    said, sentence = witness.testify(chosen, set(), operators, False)
    assert said is ok and ("CPU" in sentence if ok else SDPA_OPERATOR in sentence)


@pytest.mark.parametrize(("busy", "bound"), [(None, None), (0.0, True), (0.84, True), (0.85, False), (0.99, False), (1.1, False)])
def test_host_bound(busy: float | None, bound: bool | None) -> None:
    assert witness.is_host_bound(builders.profile(busy_fraction=busy)) is bound


@pytest.mark.parametrize("path", ["v2", "masked", "dense"])
@pytest.mark.parametrize("kind", ["train", "forward"])
def test_a_real_step_on_a_cpu(path: str, kind: str) -> None:
    work = workload.build(job(path, kind))
    profile = witness.profile(work.step, route_of(cell_of(path, kind)), "cpu", 0.01)
    assert profile.witness_ok is True and profile.wall_s > 0
    assert (profile.kernels, profile.kernel_count, profile.device_time_s) == ({}, 0, 0.0)
    assert profile.busy_fraction is None and witness.is_host_bound(profile) is None, "null, not 0"


def test_a_real_step_that_does_no_attention_is_caught() -> None:
    a = torch.randn(8, 8)
    profile = witness.profile(lambda: a @ a, route_of(cell_of("v2")), "cpu", 0.01)
    assert profile.witness_ok is False and SDPA_OPERATOR in profile.witness


def test_the_profiled_step_runs_once_and_a_loop_needs_no_sdpa() -> None:
    model = TinyLM(replace(TINY, num_layers=1, nsa=replace(TINY.nsa, branches=("sel",))), "reference")
    calls = []

    def step() -> None:
        calls.append(model(torch.zeros(1, 20, dtype=torch.int64)))

    assert witness.profile(step, ONLY_LOOP, "cpu", 0.01).witness_ok is True and len(calls) == 1


class Recorded:
    """Stands in for torch.profiler.profile: a context with the events that a GPU would have left."""

    def __init__(self, events: list[Any]) -> None:
        self._events = events

    def __enter__(self) -> Recorded:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def events(self) -> list[Any]:
        return self._events


def device(name: str, microseconds: float) -> Any:
    return SimpleNamespace(name=name, device_type=torch.autograd.DeviceType.CUDA, device_time=microseconds)


def host(name: str) -> Any:
    return SimpleNamespace(name=name, device_type=torch.autograd.DeviceType.CPU, device_time=7.0)


def test_device_time_kernels_and_syncs_of_a_gpu_step(monkeypatch: pytest.MonkeyPatch) -> None:
    events = [device(FA2, 100.0), device(FA2, 300.0), device(EFFICIENT + "x" * 200, 1000.0)]
    events += [device(f"small_{i}", 1.0) for i in range(20)]
    events += [host(SDPA_OPERATOR), host("cudaStreamSynchronize"), host("cudaEventSynchronize"), host("cudaStreamSynchronize")]
    events += [host("cudaLaunchKernel"), host("cudaDeviceSynchronize")]  # the last one is the profiler's own
    synchronised: list[bool] = []
    monkeypatch.setattr(torch.profiler, "profile", lambda **_: Recorded(events))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: synchronised.append(True))
    profile = witness.profile(lambda: None, cuda("v2", "on"), "cuda", 0.002)
    assert profile.device_time_s == pytest.approx(1420e-6) and profile.kernel_count == 23
    assert profile.busy_fraction == pytest.approx(0.71) and witness.is_host_bound(profile) is True
    assert profile.host_syncs == 3 and profile.witness_ok is True and synchronised
    assert len(profile.kernels) == 12 and max(map(len, profile.kernels)) <= 160
    longest, second, *rest = profile.kernels.items()
    assert longest[0].startswith(EFFICIENT) and longest[1] == pytest.approx(1e-3)
    assert second == (FA2, pytest.approx(400e-6)), "calls of one kernel are added up"
    assert all(seconds == pytest.approx(1e-6) for _, seconds in rest)
