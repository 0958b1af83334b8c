"""The second witness: names of kernels and operators against the Route."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nsa.model import TinyLM
from nsa.routing import TRITON_STEPS, BranchRoute, Problem, Request, Route, route, route_dense
from perfbench.worker import profile
from perfbench.worker.profile import SDPA_OPERATOR
from perfbench.worker.workloads import workload
from tests.perfbench import builders
from tests.perfbench.jobs import TINY, cell_of, job, route_of

pytestmark = pytest.mark.usefixtures("one_thread")

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
LAYERS = 12
Seen = dict[str, int]


def seen(*names: str, each: int = LAYERS) -> Seen:
    return dict.fromkeys(names, each)


def sdpa(branches: int) -> Seen:
    """As often as ``branches`` branches of every layer call it."""
    return {SDPA_OPERATOR: branches * LAYERS, "aten::mm": 99}


@pytest.mark.parametrize(
    ("chosen", "kernels", "operators", "ok", "words"),
    [
        pytest.param(
            cuda("v2", "on"),
            seen(FA2, EFFICIENT, each=24),
            sdpa(1),
            True,
            "agree with the Route (fa2, sdpa)",
            id="fa2",
        ),
        pytest.param(
            cuda("v2", "on"),
            seen(FA2, FA2 + "2"),
            sdpa(1),
            True,
            "(fa2, sdpa)",
            id="fa2-under-two-names",
        ),
        pytest.param(
            cuda("v2", "on"),
            seen(EFFICIENT, GEMM),
            sdpa(1),
            False,
            "names fa2 for 24 launches, and 0",
            id="fa2-silent",
        ),
        pytest.param(
            cuda("v2", "on"),
            seen(CUDNN, EFFICIENT, each=24),
            sdpa(1),
            False,
            "names fa2 for 24",
            id="cudnn-is-not-fa2",
        ),
        pytest.param(cuda("v2", "on"), {}, sdpa(1), False, "names fa2", id="fa2-nothing-ran"),
        pytest.param(
            cuda("v2", "on"),
            seen(FA2),
            sdpa(1),
            False,
            "24 launches, and 12",
            id="one-branch-does-not-vouch-for-another",
        ),
        pytest.param(
            cuda("v2", "on"),
            seen(FA2, each=23),
            sdpa(1),
            False,
            "24 launches, and 23",
            id="one-layer-without-fa2",
        ),
        pytest.param(
            cuda("v2", "on"),
            seen(FA2, each=24),
            sdpa(0),
            False,
            f"saw 0 of {SDPA_OPERATOR}",
            id="cmp-without-sdpa",
        ),
        pytest.param(cuda("v2", "off"), seen(EFFICIENT), sdpa(3), True, "(sdpa)", id="sdpa"),
        pytest.param(
            cuda("v2", "off"),
            seen(EFFICIENT),
            sdpa(2),
            False,
            "36 calls, and the profiler saw 24",
            id="a-branch-without-sdpa",
        ),
        pytest.param(
            cuda("v2", "off"),
            seen(EFFICIENT, FA2),
            sdpa(3),
            False,
            "names no FA-2, and an FA-2 kernel ran",
            id="fa2-unasked",
        ),
        pytest.param(
            cuda("masked", "off"), seen(CUDNN), sdpa(3), True, "(sdpa)", id="sdpa-may-choose-cudnn"
        ),
        pytest.param(
            cuda("masked", "on"), seen(FA2), sdpa(2), True, "(fa2, sdpa)", id="fa2-for-the-window"
        ),
        pytest.param(
            cuda("masked", "on"),
            seen(EFFICIENT),
            sdpa(2),
            False,
            "names fa2 for 12",
            id="window-without-fa2",
        ),
        pytest.param(
            cuda("reference", "off"), seen(GEMM), sdpa(2), True, "(loop, sdpa)", id="loop"
        ),
        pytest.param(
            dense("dense"), seen(FA2), sdpa(1), True, "(sdpa)", id="dense-may-choose-flash"
        ),
        pytest.param(
            dense("dense"), seen(CUDNN), sdpa(1), True, "(sdpa)", id="dense-may-choose-cudnn"
        ),
        pytest.param(
            dense("dense"),
            seen(FA2),
            {},
            False,
            f"saw 0 of {SDPA_OPERATOR}",
            id="dense-without-sdpa",
        ),
        pytest.param(dense("dense_flash"), seen(FA2), sdpa(1), True, "(flash)", id="flash"),
        pytest.param(
            dense("dense_flash"),
            seen(CUDNN),
            sdpa(1),
            False,
            "names flash for 12 launches, and 0",
            id="cudnn-is-not-flash",
        ),
        pytest.param(dense("dense_cudnn"), seen(CUDNN), sdpa(1), True, "(cudnn)", id="cudnn"),
        pytest.param(
            dense("dense_cudnn"),
            seen(FA2),
            sdpa(1),
            False,
            "names cudnn for 12 launches, and 0",
            id="flash-is-not-cudnn",
        ),
        pytest.param(
            dense("dense_cudnn"),
            seen("CUDNN_Generated_Fort"),
            sdpa(1),
            True,
            "(cudnn)",
            id="case-does-not-matter",
        ),
    ],
)
def test_testify_on_a_gpu(
    chosen: Route, kernels: Seen, operators: Seen, ok: bool, words: str
) -> None:
    said, sentence = profile.testify(chosen, kernels, operators, True, LAYERS)
    assert said is ok and words in sentence


@pytest.mark.parametrize(
    ("chosen", "operators", "ok"),
    [
        (route_of(cell_of("v2")), sdpa(3), True),
        (route_of(cell_of("v2")), sdpa(2), False),
        (route_of(cell_of("v2")), {"aten::mm": 99, "aten::softmax": 99}, False),
        (route_of(cell_of("dense")), sdpa(1), True),
        (route_of(cell_of("dense")), {}, False),
        (ONLY_LOOP, {"aten::mm": 99}, True),
    ],
)
def test_testify_on_a_cpu(chosen: Route, operators: Seen, ok: bool) -> None:
    said, sentence = profile.testify(chosen, {}, operators, False, LAYERS)
    assert said is ok and ("CPU" in sentence if ok else SDPA_OPERATOR in sentence)


@pytest.mark.parametrize(
    ("busy", "bound"),
    [(None, None), (0.0, True), (0.84, True), (0.85, False), (0.99, False), (1.1, False)],
)
def test_host_bound(busy: float | None, bound: bool | None) -> None:
    assert profile.is_host_bound(builders.profile(busy_fraction=busy)) is bound


def test_a_collective_that_waits_is_no_device_time() -> None:
    """FSDP2 on two H200s: 245 ms of kernels in a step of 130 ms, since NCCL's spin meanwhile."""
    kernels = {
        "nsa_selected_forward": (0.04, 12),
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": (0.2, 14),
    }
    seen = profile.Observed(kernels, {}, {}, 0.15, 0.1, 0.13, True).profile(True, "")
    assert seen.device_time_s == pytest.approx(0.04) and seen.kernel_count == 26
    assert profile.is_host_bound(seen) is True and len(seen.kernels) == 2


@pytest.mark.parametrize(
    ("path", "kind"),
    [("v2", "forward"), ("masked", "train"), ("dense", "train"), ("dense", "forward")],
)
def test_a_real_step_on_a_cpu(path: str, kind: str) -> None:
    work = workload.build(job(path, kind))
    chosen = route_of(cell_of(path, kind))
    seen_step = profile.profile(work.step, chosen, "cpu", 0.01, TINY.num_layers)
    assert seen_step.witness_ok is True and seen_step.wall_s > 0
    assert (seen_step.kernels, seen_step.kernel_count, seen_step.device_time_s) == ({}, 0, 0.0)
    assert seen_step.busy_fraction is None and profile.is_host_bound(seen_step) is None, (
        "null, not 0"
    )


def test_a_real_step_that_does_no_attention_is_caught() -> None:
    a = torch.randn(8, 8)
    seen_step = profile.profile(lambda: a @ a, route_of(cell_of("v2")), "cpu", 0.01, 1)
    assert seen_step.witness_ok is False and SDPA_OPERATOR in seen_step.witness


def test_a_real_step_with_layers_too_few_is_caught() -> None:
    work = workload.build(job("masked", "forward"))
    seen_step = profile.profile(
        work.step, route_of(cell_of("masked")), "cpu", 0.01, 2 * TINY.num_layers
    )
    assert seen_step.witness_ok is False and "12 calls, and the profiler saw 8" in seen_step.witness


def test_the_profiled_step_runs_once_and_a_loop_needs_no_sdpa() -> None:
    model = TinyLM(
        replace(TINY, num_layers=1, nsa=replace(TINY.nsa, branches=("sel",))), "reference"
    )
    calls = []

    def step() -> None:
        calls.append(model(torch.zeros(1, 20, dtype=torch.int64)))

    seen_step = profile.profile(step, ONLY_LOOP, "cpu", 0.01, 1)
    assert seen_step.witness_ok is True and len(calls) == 1
    assert seen_step.host_time_s == 0.01, "a CPU computes in the call"


class Recorded:
    """Stands in for torch.profiler.profile: a context with the events that a GPU would have
    left.
    """

    def __init__(self, events: list[Any]) -> None:
        self.profiler = SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: events))

    def __enter__(self) -> Recorded:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def device(name: str, microseconds: float, annotation: bool = False) -> Any:
    return event(name, torch.autograd.DeviceType.CUDA, microseconds, annotation)


def host(name: str) -> Any:
    return event(name, torch.autograd.DeviceType.CPU, 7.0, False)


def event(name: str, kind: torch.autograd.DeviceType, microseconds: float, annotation: bool) -> Any:
    nanoseconds = round(1e3 * microseconds)
    return SimpleNamespace(
        name=lambda: name,
        device_type=lambda: kind,
        start_ns=lambda: 0,
        start_thread_id=lambda: 1,
        duration_ns=lambda: nanoseconds,
        is_user_annotation=lambda: annotation,
    )


def test_device_time_kernels_and_syncs_of_a_gpu_step(monkeypatch: pytest.MonkeyPatch) -> None:
    events = [device(FA2, 100.0), device(FA2, 300.0), device(EFFICIENT + "x" * 200, 1000.0)]
    # a range over kernels that are counted already
    events += [device("Optimizer.step#AdamW.step", 5000.0, annotation=True)]
    events += [device(f"small_{i}", 1.0) for i in range(20)]
    events += [
        host(SDPA_OPERATOR),
        host("cudaStreamSynchronize"),
        host("cudaEventSynchronize"),
        host("cudaStreamSynchronize"),
    ]
    # the last one is the profiler's own
    events += [host("cudaLaunchKernel"), host("cudaDeviceSynchronize")]
    synchronised: list[bool] = []
    monkeypatch.setattr(torch.profiler, "profile", lambda **_: Recorded(events))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: synchronised.append(True))
    seen_step = profile.profile(lambda: None, cuda("v2", "on"), "cuda", 0.002, 1)
    assert seen_step.device_time_s == pytest.approx(1420e-6) and seen_step.kernel_count == 23
    assert (
        seen_step.busy_fraction == pytest.approx(0.71) and profile.is_host_bound(seen_step) is True
    )
    assert seen_step.host_syncs == 3 and seen_step.witness_ok is True and synchronised
    assert seen_step.host_time_s is not None and seen_step.host_time_s > 0
    assert len(seen_step.kernels) == 12 and max(map(len, seen_step.kernels)) <= 160
    longest, second, *rest = seen_step.kernels.items()
    assert longest[0].startswith(EFFICIENT) and longest[1] == pytest.approx(1e-3)
    assert second == (FA2, pytest.approx(400e-6)), "calls of one kernel are added up"
    assert all(seconds == pytest.approx(1e-6) for _, seconds in rest)


KERNELS = (
    "nsa_interval_forward",
    "nsa_interval_forward_band",
    "nsa_choose",
    "nsa_selected_forward",
)


@pytest.mark.parametrize(
    ("step", "kernel"),
    [
        ("copy", "nsa_interval_backward_kv_band_copy"),
        ("copy", "nsa_scores_copy"),
        ("lists", "nsa_selected_sum"),
        ("roles", "nsa_scores_roles"),
        ("join", "nsa_gate_products"),
        ("split", "nsa_interval_forward_band_split"),
        ("split", "nsa_selected_forward_split"),
    ],
)
def test_a_step_that_is_off_launches_nothing(step: str, kernel: str) -> None:
    here = replace(builders.H100, triton_provider="triton 3.7.1")
    whole, without = (route(Request("triton", off=off), PROBLEM, here) for off in ((), (step,)))
    for chosen, kernels, ok in (
        (whole, (*KERNELS, kernel), True),
        (without, KERNELS, True),
        (without, (*KERNELS, kernel), False),
    ):
        found, words = profile.testify(chosen, seen(*kernels), {}, True, LAYERS)
        assert found is ok and (
            ok or words == f"the Route says that {step} is off, and {kernel} ran"
        )


def test_without_lists_gradients_are_still_summed_over_them() -> None:
    here = replace(builders.H100, triton_provider="triton 3.7.1")
    kernels = seen(
        *KERNELS,
        "nsa_selected_sum_q",
        "nsa_selected_sum_kv",
        "nsa_selected_sum_splits",
        "void copy_kernel_split",
    )
    assert profile.testify(
        route(Request("triton", off=("lists",)), PROBLEM, here), kernels, {}, True, LAYERS
    )[0]


def test_every_step_has_its_mark_in_a_kernel() -> None:
    sources = "".join(
        file.read_text(encoding="utf-8")
        for file in (Path(__file__).parents[2] / "nsa" / "ops").glob("**/*.py")
    )
    assert set(profile.STEP_MARKS) == set(TRITON_STEPS) and all(
        mark in sources for mark in profile.STEP_MARKS.values()
    )


def test_every_forward_kernel_of_a_branch_bears_the_mark_that_the_witness_looks_for() -> None:
    """A decode cell was WRONG_PATH once: its few rows take another kernel than a whole sequence."""
    sources = {
        f"{file.parent.name}/{file.stem}": file.read_text(encoding="utf-8")
        for file in (Path(__file__).parents[2] / "nsa" / "ops").glob("**/*.py")
    }
    kernels = {
        stem: set(re.findall(r"^def (nsa_\w+)\(", text, re.MULTILINE))
        for stem, text in sources.items()
    }
    forwards = [name for names in kernels.values() for name in names if "forward" in name]
    marks = (profile.TRITON_MARKS["cmp"], profile.TRITON_MARKS["sel"])
    assert sorted(sum(mark in name for name in forwards) for mark in marks) == [5, 6]
    assert all(any(mark in name for mark in marks) for name in forwards)
    assert (
        profile.TRITON_MARKS["win"] == profile.TRITON_MARKS["cmp"]
        and profile.TRITON_MARKS["score"] in kernels["scores/kernels"]
    )
