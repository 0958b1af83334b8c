"""One untimed step under torch.profiler: the second witness, which must show the kernels that the
Route names; and for a trace, that step as a timeline and as a table of what ran.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from nsa.routing import BranchRoute, Route
from perfbench.older_nsa import steps_off
from perfbench.records import Kernels, Profile, own_times, table_path, totalled, whole_file
from perfbench.worker import callers, operators
from perfbench.worker.peers.witness import witness_of
from perfbench.worker.ranks.world import current

HOST_BOUND_BELOW = 0.85  # device time over step time: below it the GPU waits for the host
HOST_STEPS, HOST_BUDGET_S = 15, 0.5  # whose enqueueing is timed: fewer where they take that long
COLLECTIVE = "nccl"  # begins the name of a kernel of NCCL, small letters
NUM_LONGEST = 12
NAME_CHARS = 160  # template arguments can take kilobytes
# What must appear among the names of device kernels for each kernel that a Route can name on CUDA.
# (cuDNN's own say "flash_fprop", so plain "flash" would not distinguish them.)
KERNEL_MARKS: Mapping[str, str] = {
    "fa2": "flash_fwd",
    "flash": "flash_fwd",
    "cudnn": "cudnn",
    "fa3": "flashattnfwdsm90",
}
# The forward kernels of nsa/ops, by the branch that they serve.
TRITON_MARKS: Mapping[str, str] = {
    "cmp": "nsa_interval_forward",
    "win": "nsa_interval_forward",
    "score": "nsa_choose",
    "sel": "nsa_selected_forward",
    "dense": "nsa_interval_forward",  # of every key up to the query
}
# A launch of this name serves the compressed branch and the window.
BOTH = "nsa_interval_forward_both"
# What a launch of each step of path triton that may be turned off (NSA_TRITON_<STEP>=0) has in its
# name.
STEP_MARKS: Mapping[str, str] = {
    "copy": "_copy",
    "lists": "nsa_selected_sum",
    "roles": "_roles",
    "join": "nsa_gate_products",
    "split": "_split",
}
# Every route that goes through SDPA calls this operator, on any device.
SDPA_OPERATOR = "aten::scaled_dot_product_attention"
# What SDPA becomes in a graph: one of its fused kernels, or on a CPU the operator of one. Its
# unfused kernel has no name of its own and is seen as none, which fails the cell. Only forwards are
# named, so that a backward cannot vouch for one.
FUSED_MARKS = ("fmha_cutlassf", "flash_fwd", "fprop")
FUSED_OPERATOR = "aten::_scaled_dot_product"
# Events of a timeline, some 400 bytes of JSON each: the slow loop makes millions in one step, which
# no viewer opens.
MAX_EVENTS = 300_000
SYNC_CALLS = ("cudaStreamSynchronize", "cudaEventSynchronize")


def profile(
    step: Callable[[], None],
    route: Route,
    device: str,
    step_s: float,
    layers: int,
    before: Callable[[], None] | None = None,
    replayed: bool = False,
    calls: operators.Calls | None = None,
) -> Profile:
    """Profile one step of ``layers`` layers; ``step_s`` is its unprofiled time, against which the
    device is busy or waits.

    ``before`` runs first and is not in the profile: it leaves the L2 as the timed steps found it.
    ``replayed``: the step is a compiled or a CUDA graph, which calls no operators by their public
    names. ``calls``: the operators that are due, None where they bear no names; a peer's kernels
    bear the name that it declares.
    """
    seen = observe(step, device, step_s, before)
    launches, called = seen.launches, seen.called
    shown = _fused_as_operator(route, launches, called, seen.on_gpu, layers) if replayed else called
    ok, sentence = (
        testify(route, launches, shown, seen.on_gpu, layers)
        if calls is None or calls.peer is None
        else witness_of(calls.peer, launches, on_gpu=seen.on_gpu)
    )
    if calls is not None and (fault := calls.fault(seen.by_name)):
        ok, sentence = False, fault
    by_name = seen.by_name if calls is None else calls.seen(seen.by_name)
    return seen.profile(ok, sentence).model_copy(update={"operators": dict(by_name)})


@dataclass(frozen=True, slots=True)
class Observed:
    """What the profiler saw of one step. ``kernels``: name -> device seconds, count. ``called``:
    host-side events; ``by_name``: of those the operators of nsa, as `operators.counted`.
    """

    kernels: Mapping[str, tuple[float, int]]
    called: Mapping[str, int]
    by_name: Mapping[str, int]
    wall_s: float
    host_time_s: float
    step_s: float
    on_gpu: bool

    @property
    def launches(self) -> dict[str, int]:
        """Kernel -> how often."""
        return {name: count for name, (_, count) in self.kernels.items()}

    def profile(self, ok: bool | None, sentence: str) -> Profile:
        """With what the second witness says; no operators.

        NCCL's kernels are no device time: they run next to others, and wait for other ranks.
        """
        device_time_s = sum(
            seconds
            for name, (seconds, _) in self.kernels.items()
            if not name.lower().startswith(COLLECTIVE)
        )
        longest = sorted(self.kernels.items(), key=lambda item: -item[1][0])[:NUM_LONGEST]
        return Profile(
            kernels={name: seconds for name, (seconds, _) in longest},
            kernel_count=sum(self.launches.values()),
            device_time_s=device_time_s,
            wall_s=self.wall_s,
            busy_fraction=device_time_s / self.step_s if self.on_gpu else None,
            host_syncs=sum(self.called.get(name, 0) for name in SYNC_CALLS),
            host_time_s=self.host_time_s,
            witness_ok=ok,
            witness=sentence,
        )


def observe(
    step: Callable[[], None],
    device: str,
    step_s: float,
    before: Callable[[], None] | None = None,
) -> Observed:
    """Profile one step, and time how long the host takes for it; arguments as of `profile`."""
    on_gpu = device == "cuda"
    # A CPU computes in the call: it returns when the step is over.
    host_time_s = _host_time_s(step, before, _host_steps(step_s)) if on_gpu else step_s
    recorded, wall_s = record(step, device, before)
    kernels, called, by_name = _split(recorded)
    return Observed(kernels, called, by_name, wall_s, host_time_s, step_s, on_gpu)


def _host_steps(step_s: float) -> int:
    """As many as fit the budget: by the step's known time, the same on each of several ranks, whose
    steps wait for one another.
    """
    return max(1, min(HOST_STEPS, int(HOST_BUDGET_S / step_s) if step_s > 0 else HOST_STEPS))


def _host_time_s(
    step: Callable[[], None], before: Callable[[], None] | None, steps: int = HOST_STEPS
) -> float:
    """Median seconds until ``step`` returns, on an idle device each of ``steps`` times.

    Steps that follow one another would wait for a full queue, and their time would be the device's.
    """
    times_s: list[float] = []
    for _ in range(steps):
        if before is not None:
            before()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        times_s.append(time.perf_counter() - begin)
    torch.cuda.synchronize()
    return statistics.median(times_s)


def record(
    step: Callable[[], None], device: str, before: Callable[[], None] | None = None
) -> tuple[Any, float]:
    """Run ``step`` once under the profiler; what it recorded, and the seconds that this took.

    ``before`` is not recorded.
    """
    on_gpu = device == "cuda"
    if before is not None:
        before()
        torch.cuda.synchronize()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    begin = time.perf_counter()
    with torch.profiler.profile(activities=activities) as recorded:
        step()
        if on_gpu:
            torch.cuda.synchronize()
    return recorded, time.perf_counter() - begin


def is_host_bound(profiled: Profile) -> bool | None:
    """True where the device waits for the host; None on a CPU."""
    return None if profiled.busy_fraction is None else profiled.busy_fraction < HOST_BOUND_BELOW


def testify(
    route: Route,
    kernels: Mapping[str, int],
    operators: Mapping[str, int],
    on_gpu: bool,
    layers: int,
) -> tuple[bool | None, str]:
    """Whether the names seen, with how often, agree with the Route, and the sentence that says so.

    Each branch of each layer calls its kernel at least once, so one branch cannot vouch for
    another.
    """
    branches = Counter(branch.kernel for branch in route.branches)
    due = branches["sdpa"] * layers
    seen = operators.get(SDPA_OPERATOR, 0)
    if seen < due:
        return (
            False,
            f"the Route names sdpa for {due} calls, and the profiler saw {seen} of {SDPA_OPERATOR}",
        )
    if not on_gpu:
        return True, "operators agree with the Route (CPU: no kernel names)"
    marks = Counter(
        (one.kernel, mark) for one in route.branches if (mark := _mark_of(one)) is not None
    )
    for (kernel, mark), calls in sorted(marks.items()):
        due = calls * layers
        seen = sum(
            count * (2 if BOTH in name.lower() else 1)
            for name, count in kernels.items()
            if mark in name.lower()
        )
        if seen < due:
            return (
                False,
                (
                    f"the Route names {kernel} for {due} launches, and {seen} device kernels are"
                    f" called *{mark}*"
                ),
            )
    for step in steps_off(route):
        if at := next((name for name in kernels if _shows(step, name.lower())), None):
            return False, f"the Route says that {step} is off, and {at[:NAME_CHARS]} ran"
    dense = any("dense" in (branch.branch, branch.implementation) for branch in route.branches)
    if (
        not dense
        and not branches["fa2"]
        and any(KERNEL_MARKS["fa2"] in name.lower() for name in kernels)
    ):
        # SDPA cannot use it under a mask
        return (
            False,
            "the Route names no FA-2, and an FA-2 kernel ran",
        )
    return True, f"kernel names agree with the Route ({', '.join(sorted(branches))})"


def _shows(step: str, kernel: str) -> bool:
    mark = STEP_MARKS[step]
    if step == "lists":
        return kernel in (mark, "nsa_selected_forward_tiles")
    return "nsa_" in kernel and mark in kernel


def _mark_of(branch: BranchRoute) -> str | None:
    return (
        TRITON_MARKS[branch.branch]
        if branch.kernel == "triton"
        else KERNEL_MARKS.get(branch.kernel)
    )


def _fused_as_operator(
    route: Route,
    kernels: Mapping[str, int],
    operators: Mapping[str, int],
    on_gpu: bool,
    layers: int,
) -> dict[str, int]:
    """The operators, with SDPA's as often as a graph shows it: by its fused kernels, or on a CPU by
    the operators below it.

    FA-2's launches that the Route names by themselves bear one of the same marks, and are not
    SDPA's.
    """
    if on_gpu:
        seen = sum(
            count
            for name, count in kernels.items()
            if any(mark in name.lower() for mark in FUSED_MARKS)
        )
        seen -= layers * sum(branch.kernel in KERNEL_MARKS for branch in route.branches)
    else:
        seen = sum(
            count
            for name, count in operators.items()
            if name.startswith(FUSED_OPERATOR) and not name.endswith("backward")
        )
    return {**operators, SDPA_OPERATOR: max(0, seen)}


def _split(
    recorded: Any,
) -> tuple[dict[str, tuple[float, int]], dict[str, int], dict[str, int]]:
    """Device kernels (name -> seconds, count), host-side events (name -> count), and of those the
    operators of nsa, as `operators.counted`.
    """
    kernels: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    called: dict[str, int] = defaultdict(int)
    ours = []
    # Kineto's own list: torch's tree of Python objects took 73 s for one step of the slow loop
    # (reports/evidence/h100).
    for event in recorded.profiler.kineto_results.events():
        if event.device_type() == torch.autograd.DeviceType.CUDA:
            if event.is_user_annotation():  # a range such as Optimizer.step, not a kernel
                continue
            name = event.name()[:NAME_CHARS]
            seconds, count = kernels[name]
            kernels[name] = (seconds + event.duration_ns() * 1e-9, count + 1)
        else:
            name = event.name()
            called[name] += 1
            if operators.is_counted(name):
                ours.append(event)
    return dict(kernels), dict(called), operators.counted(ours)


def capture(
    step: Callable[[], None],
    device: str,
    before: Callable[[], None] | None,
    extra: Mapping[str, object],
    chrome: Path,
) -> Kernels:
    """Profile one step; write ``chrome`` (gzip) and the table next to it, each complete or not at
    all. Returns the table, with the fields of ``extra``.
    """
    recorded, _ = record(step, device, before)
    events = recorded.profiler.kineto_results.events()
    many = (
        f"{len(events):,} events in one step, and a timeline is written up to {MAX_EVENTS:,}"
        if len(events) > MAX_EVENTS
        else ""
    )
    ranks = current()  # each takes one more step, or none does
    most = len(events) if ranks is None else ranks.agree(len(events))
    few = device == "cpu" and most <= callers.MAX_EVENTS
    seen = {"called_from": callers.callers(step) if few else {}}
    table = tabulate(events, device).model_copy(update={"chrome_absent": many, **seen, **extra})
    if not many:
        with whole_file(chrome) as partial:
            recorded.export_chrome_trace(str(partial))  # torch compresses by the ending
    with whole_file(table_path(chrome)) as partial:
        partial.write_text(table.model_dump_json(), encoding="utf-8")
    return table


def tabulate(events: list[Any], device: str) -> Kernels:
    """Kineto's events as a table: device kernels where there is a device, else operators without
    what they called.
    """
    host = [event for event in events if event.device_type() != torch.autograd.DeviceType.CUDA]
    if device != "cuda":
        calls = own_times(
            (event.name(), event.start_thread_id(), event.start_ns(), event.duration_ns())
            for event in host
        )
        return Kernels(device="cpu", rows=totalled(calls))
    on_device = [
        event
        for event in events
        if event.device_type() == torch.autograd.DeviceType.CUDA and not event.is_user_annotation()
    ]
    syncs = sum(event.name() in SYNC_CALLS for event in host)
    return Kernels(
        device="cuda",
        rows=totalled((event.name(), event.duration_ns()) for event in on_device),
        host_syncs=syncs,
    )
