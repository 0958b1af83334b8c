"""One replicate of one cell, in a process of its own: prove, warm up, time, witness.

Runs inside the child.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

# The optimizer, the profiler and FA-2 import it at first use, seconds in each child: here, once in
# the server.
import torch._dynamo

from nsa import capability, engagement, settings
from nsa.config import ModelConfig
from nsa.routing import Route
from perfbench.matrix import expected_of, held_tokens, layer_calls, route_line, route_of
from perfbench.records import (
    Job,
    LengthProof,
    OtherClocks,
    ParityLine,
    Physics,
    Replicate,
    Status,
    StepProof,
)
from perfbench.roofline import judge_step, step_flops, step_min_bytes
from perfbench.worker import autotuner, memory, operators, profile, sentinels
from perfbench.worker.clock import CheckedClock, Clock
from perfbench.worker.device import allocation_retries, set_threads, synchronize
from perfbench.worker.gemm import gemm_flops_per_s, slowed
from perfbench.worker.loaded import loaded_code
from perfbench.worker.own_measure import measure_own
from perfbench.worker.parity.at_length import prove_at_length, repeat_digest
from perfbench.worker.parity.claim import Claim
from perfbench.worker.parity.proof import prove
from perfbench.worker.parity.sizes import RouteDiffers
from perfbench.worker.peers.call import loaded_peer
from perfbench.worker.ranks.clock import own_clock
from perfbench.worker.ranks.exposed import ranks_line
from perfbench.worker.ranks.world import current
from perfbench.worker.step_proof.prove import prove as prove_step
from perfbench.worker.stop import Stop, without_speed
from perfbench.worker.telemetry import Sampler
from perfbench.worker.timing import TRACE_WARM_STEPS, absent_of, time_samples, warm_up
from perfbench.worker.turn import Alone, Turn
from perfbench.worker.workloads import trained, workload


def measure(job: Job, clock: Clock, sampler: Sampler, turn: Turn | None = None) -> Replicate:
    """Measure ``job``.

    Returns a Replicate with status ok, parity or wrong_path; lets OutOfMemoryError through.

    ``turn`` is taken once, before the first timed step; without one nobody waits or watches. A
    sentinel's job goes to ``sentinels``, which knows no model and no route.
    """
    turn = turn or Alone()
    if job.sentinel is not None:
        return sentinels.measure(job, clock, sampler, turn)
    begin, waiting = time.monotonic(), _Waiting(turn)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        measured = measure_own if job.axes.is_own_step else _measure
        status, reason, facts = Status.OK, "", measured(job, clock, sampler, waiting)
    except Stop as stop:
        status, reason, facts = stop.status, stop.reason, stop.facts
    return Replicate(
        cell_id=job.cell_id,
        replicate=job.replicate,
        axes=job.axes,
        config_sha256=job.config_sha256,
        status=status,
        reason=reason,
        started_utc=started,
        wall_s=time.monotonic() - begin - waiting.waited_s,
        waiting_peers=job.waiting_peers,
        loaded=loaded_code(),
        **facts,
    )


@dataclass(slots=True)
class _Waiting:
    """``turn``, and the seconds for which it let this process wait."""

    turn: Turn
    waited_s: float = 0.0

    def __call__(self) -> None:
        begin = time.monotonic()
        self.turn()
        self.waited_s = time.monotonic() - begin

    def timing(self) -> AbstractContextManager[None]:
        return self.turn.timing()


def _measure(job: Job, clock: Clock, sampler: Sampler, turn: Turn) -> dict[str, Any]:
    set_threads(job)
    model = ModelConfig.from_mapping(job.model)
    route = actual_route(job, model)
    facts: dict[str, Any] = {"route": route_line(route)}
    if job.peer is not None:
        facts["peer"] = loaded_peer(job.peer)
    if job.trace is not None:
        return facts | _trace(job, clock, turn, Path(job.trace))
    facts["phases_s"] = phases = Phases()
    facts["parity"] = _prove(job, model, route, facts)
    facts["length_proof"] = _prove_at_length(job, model, route, facts)
    phases.ends("proof")

    with closing(workload.build(job)) as work:
        return _timed(job, clock, sampler, turn, work, facts)


def _timed(
    job: Job,
    clock: Clock,
    sampler: Sampler,
    turn: Turn,
    work: workload.Workload,
    facts: dict[str, Any],
) -> dict[str, Any]:
    """``facts`` of the proofs before the model was built, and all that its steps show."""
    model = ModelConfig.from_mapping(job.model)
    route, due = actual_route(job, model), layer_calls(job.axes, model)
    phases: Phases = facts["phases_s"]
    cold_start_s, engaged = _first_step(work, route)
    phases.ends("setup")
    facts |= {"cold_start_s": cold_start_s, "engaged": engaged, "engaged_by": work.engaged_by}
    if fault := wrong_path(route, job, engaged, due=due):
        raise Stop(Status.WRONG_PATH, _with_reasons(fault, route), facts)
    if fault := work.differs():
        raise Stop(Status.PARITY, fault, facts)

    facts["step_proof"], peak = _prove_step(job, model, work, facts)
    phases.ends("proof")

    if job.device == "cuda":
        # what waits holds its weights only; the warm-up takes the rest again
        torch.cuda.empty_cache()
    turn()
    phases.begins()  # it has waited for the others

    retries, flush = allocation_retries(job), workload.l2_flush(job)
    warmth = warm_up(work.step, clock, job.measure, flush)
    phases.ends("warmup")
    step = slowed(work.step, warmth.step_s, job, clock)
    timed = time_samples(step, warmth.step_s, job.measure, clock, sampler, flush, turn.timing())
    phases.ends("timing")
    facts |= {
        "steady": warmth.steady,
        "tuned": autotuner.choices(),
        **timed.facts(work.tokens_per_step),
    }
    facts["absent"] |= absent_of(job, warmth)
    facts["absent"]["node"] = "one machine, no fleet"
    facts["absent"]["own_step"] = f"workload={job.axes.workload} is the harness's own"
    if job.peer is None:
        facts["absent"]["peer"] = "nsa serves this path itself"
    if work.loop is None:
        facts["absent"]["loop"] = f"workload={job.axes.workload} has no loader"
    else:
        facts["loop"] = work.loop.line(timed.num_steps)
        if fault := work.loop.why_not_distinct():
            raise Stop(Status.PARITY, fault, without_speed(facts))
    if work.engaged_by != "call" and timed.engaged:
        raise Stop(
            Status.WRONG_PATH,
            f"{sorted(timed.engaged)} ran eagerly next to the {work.engaged_by}",
            without_speed(facts),
        )
    facts["engaged"] = engaged = work.engaged(timed.engaged, timed.num_steps, route)
    if fault := wrong_path(route, job, engaged, due=due * timed.num_steps):
        raise Stop(Status.WRONG_PATH, _with_reasons(fault, route), without_speed(facts))

    if job.waiting_peers and (again := allocation_retries(job) - retries):
        raise torch.OutOfMemoryError(
            f"memory was so scarce next to {job.waiting_peers} waiting processes that {again}"
            " allocations were retried"
        )
    if job.device == "cuda":
        facts["peak_memory_bytes"] = max(peak, torch.cuda.max_memory_allocated())
    if job.profile:
        facts["profile"] = profile.profile(
            step,
            route,
            job.device,
            timed.step_s,
            due,
            flush,
            work.engaged_by != "call",
            work.calls(operators.due(job, model, route)),
        )
        facts["host_bound"] = profile.is_host_bound(facts["profile"])
        if facts["profile"].witness_ok is False:
            raise Stop(Status.WRONG_PATH, facts["profile"].witness, without_speed(facts))
    gemm_clock = CheckedClock(own_clock(clock))
    facts["physics"] = _physics(job, model, timed.step_s, gemm_clock)
    facts["other_clocks"] = OtherClocks(
        raw_s=timed.raw_s,
        between_s=timed.between_s,
        aside_s=timed.aside_s,
        cpu_s=timed.cpu_s,
        threads=None if job.device == "cuda" else torch.get_num_threads(),
        gemm_s=gemm_clock.clock_s,
        gemm_raw_s=gemm_clock.raw_s,
        gemm_aside_s=gemm_clock.aside_s,
    )
    if work.cache is None:
        facts["absent"]["cache"] = f"workload={job.axes.workload} keeps no cache"
    else:
        facts["cache"] = work.cache()
    if current() is None:
        facts["absent"]["ranks"] = "world_size=1: one process"
    else:
        facts["ranks"] = ranks_line(job, clock, work.unsynchronised, timed)
    phases.ends("witness")
    return facts


class Phases(dict[str, float]):
    """Seconds of this process by what they were for, each from the end of the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.begins()

    def begins(self) -> None:
        self._since = time.monotonic()

    def ends(self, name: str) -> None:
        now = time.monotonic()
        self[name] = self.get(name, 0.0) + now - self._since
        self._since = now


def _trace(job: Job, clock: Clock, turn: Turn, chrome: Path) -> dict[str, Any]:
    """One warm step under the profiler.

    Publishes no speed, so it needs no proof; that it shows a wrong path may be its purpose. Of
    several ranks, which take the same steps, the first one's is kept.
    """
    if (ranks := current()) is not None and ranks.rank > 0:
        chrome = ranks.folder / f"rank-{ranks.rank}-{chrome.name}"
    with closing(workload.build(job)) as work:
        return _traced(job, clock, turn, chrome, work)


def _traced(
    job: Job, clock: Clock, turn: Turn, chrome: Path, work: workload.Workload
) -> dict[str, Any]:
    cold_start_s, engaged = _first_step(
        work, actual_route(job, ModelConfig.from_mapping(job.model))
    )
    turn()
    flush = workload.l2_flush(job)
    step_s = clock.time_steps(work.step, TRACE_WARM_STEPS) / TRACE_WARM_STEPS
    step = slowed(work.step, step_s, job, clock)
    held, why_not = memory.profile_memory(step, job.device, flush)
    extra = {"tuned": autotuner.choices(), "memory": held, "memory_absent": why_not}
    profile.capture(step, job.device, flush, extra, chrome)
    return {
        "cold_start_s": cold_start_s,
        "engaged": engaged,
        "absent": {"tok_per_s": "a trace times nothing"},
    }


def actual_route(job: Job, model: ModelConfig) -> Route:
    """What this process will run: the plan is checked against it, not copied from it."""
    here = capability.probe(_indexed(job.device))
    return route_of(job.axes, model, settings.current(), here, job.peer)


def wrong_path(route: Route, job: Job, engaged: dict[str, int], *, due: int) -> str | None:
    """Why what ran is not what was planned or expected; None where it is.

    ``due`` calls are due from every counter.
    """
    routed, planned, ran = (
        sorted(set(route.counters)),
        sorted(set(job.plan.counters)),
        sorted(engaged),
    )
    if routed != planned:
        return f"this process routes to {routed}, the plan said {planned}"
    if (off := route_line(route).off) != job.plan.off:
        return (
            f"this process turns off {off}, the plan said {job.plan.off}: a setting did not reach"
            " it, or one too many did"
        )
    if ran != planned:
        return f"engaged {ran}, the plan said {planned}"
    if odd := {name: count for name, count in engaged.items() if count != due}:
        return (
            f"{due} calls were due from each counter (one a layer and step, or chunk of it), got"
            f" {odd}"
        )
    expect = expected_of(job.axes, job.expect, planned)
    if missing := [name for name in expect.engaged if name not in engaged]:
        return f"expected {', '.join(missing)} to be engaged, what ran is {ran}"
    if present := [name for name in expect.forbidden if name in engaged]:
        return f"{', '.join(present)} is forbidden here, and it ran"
    return None


def _with_reasons(fault: str, route: Route) -> str:
    """The fault, and why the route is what it is: what was rejected, and which setting had a
    say.
    """
    return "; ".join(
        [fault, *(f"not {r.alternative}: {r.reason}" for r in route.rejected), *route.notes]
    )


def _indexed(device: str) -> str:
    return "cuda:0" if device == "cuda" else device


def _claim(job: Job, model: ModelConfig, route: Route, seed: int) -> Claim:
    return Claim(model, route, job.axes, job.device, seed, trained.blocks_of(job), job.peer)


def _prove(job: Job, model: ModelConfig, route: Route, facts: dict[str, Any]) -> ParityLine:
    if job.proof is not None:
        return job.proof
    try:
        line = prove(_claim(job, model, route, job.seed))
    except RouteDiffers as error:
        raise Stop(Status.PARITY, str(error), facts) from error
    if not line.ok:
        raise Stop(
            Status.PARITY, f"differs from the fp64 oracle: {line.worst}", facts | {"parity": line}
        )
    if job.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return line


def _prove_at_length(
    job: Job, model: ModelConfig, route: Route, facts: dict[str, Any]
) -> LengthProof:
    """Replicate 0 proves, the others repeat the digest of its inputs."""
    seed = job.seed if job.proof_seed is None else job.proof_seed
    claim = _claim(job, model, route, seed)
    line = prove_at_length(claim) if job.replicate == 0 else repeat_digest(claim)
    if line.ok is False:
        cell = job.axes
        reason = (
            f"differs from the fp64 oracle at the timed {cell.batch} x {cell.seq_len} tokens:"
            f" {line.worst}"
        )
        raise Stop(Status.PARITY, reason, facts | {"length_proof": line})
    if job.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return line


def _prove_step(
    job: Job, model: ModelConfig, work: workload.Workload, facts: dict[str, Any]
) -> tuple[StepProof, int]:
    """(the proof of the step, the most bytes that the steps before it held); Stop where it fails.

    What the twin takes is not the cell's memory.
    """
    on_gpu = job.device == "cuda"
    peak = torch.cuda.max_memory_allocated() if on_gpu else 0
    try:
        line = prove_step(work, job, model)
    except torch.OutOfMemoryError as error:  # of a rank, without which the others prove nothing
        absent = f"no proof of the step: the twin does not fit into memory next to it: {error}"
        line = StepProof(ok=None, absent=absent)
        raise Stop(Status.PARITY, absent, facts | {"step_proof": line}) from error
    if line.ok is False:
        reason = f"the step differs from its plain twin: {line.worst}"
        raise Stop(Status.PARITY, reason, facts | {"step_proof": line})
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    return line, peak


def _first_step(work: workload.Workload, route: Route) -> tuple[float, dict[str, int]]:
    """Seconds of the first step (compilation, capture, handles, allocator), and what it engaged."""
    begin = time.perf_counter()
    with engagement.collect() as engaged:
        work.step()
    synchronize()
    return time.perf_counter() - begin, work.engaged(engaged.counts, 1, route)


def _physics(job: Job, model: ModelConfig, step_s: float, clock: Clock) -> Physics:
    cell, on_gpu = job.axes, job.device == "cuda"
    tokens = held_tokens(model, cell.seq_len) if cell.workload == "decode" else cell.seq_len
    return judge_step(
        flops=step_flops(
            model,
            workload=cell.workload,
            batch=cell.batch,
            tokens=tokens,
            dense=cell.is_dense,
        ),
        min_bytes=step_min_bytes(
            model,
            workload=cell.workload,
            batch=cell.batch,
            tokens=tokens,
            dtype=cell.dtype,
            dense=cell.is_dense,
        ),
        step_s=step_s,
        gemm_flops_per_s=gemm_flops_per_s(job, clock),
        dtype=cell.dtype,
        device_name=torch.cuda.get_device_name() if on_gpu else "cpu",
        is_gpu=on_gpu,
    )
