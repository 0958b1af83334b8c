"""The child's part of a trace: one step under the profiler, as a timeline and as a table of what
ran.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from perfbench.records import Kernels, own_times, table_beside, totalled
from perfbench.worker import profile

# Some 400 bytes of JSON each: the slow loop makes millions in one step, which no viewer opens.
MAX_EVENTS = 300_000


def capture(
    step: Callable[[], None],
    device: str,
    before: Callable[[], None] | None,
    tuned: dict[str, str],
    chrome: Path,
) -> Kernels:
    """Profile one step; write ``chrome`` (gzip) and the table beside it, each complete or not at
    all. Returns the table.
    """
    recorded, _ = profile.record(step, device, before)
    events = recorded.profiler.kineto_results.events()
    many = (
        f"{len(events):,} events in one step, and a timeline is written up to {MAX_EVENTS:,}"
        if len(events) > MAX_EVENTS
        else ""
    )
    table = tabulate(events, device, tuned).model_copy(update={"chrome_absent": many})
    partial = chrome.with_name(
        f"{chrome.name.removesuffix('.json.gz')}.partial.json.gz"
    )  # torch compresses by the ending
    if not many:
        recorded.export_chrome_trace(str(partial))
        partial.rename(chrome)
    partial.write_text(table.model_dump_json(), encoding="utf-8")
    partial.rename(table_beside(chrome))
    return table


def tabulate(events: list[Any], device: str, tuned: dict[str, str]) -> Kernels:
    """Kineto's events as a table: device kernels where there is a device, else operators without
    what they called.
    """
    host = [event for event in events if event.device_type() != torch.autograd.DeviceType.CUDA]
    if device != "cuda":
        calls = own_times(
            (event.name(), event.start_thread_id(), event.start_ns(), event.duration_ns())
            for event in host
        )
        return Kernels(device="cpu", rows=totalled(calls), tuned=tuned)
    on_device = [
        event
        for event in events
        if event.device_type() == torch.autograd.DeviceType.CUDA and not event.is_user_annotation()
    ]
    syncs = sum(event.name() in profile.SYNC_CALLS for event in host)
    return Kernels(
        device="cuda",
        rows=totalled((event.name(), event.duration_ns()) for event in on_device),
        host_syncs=syncs,
        tuned=tuned,
    )
