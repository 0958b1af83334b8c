"""How much of this machine other processes use, looked at before anything is measured."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfbench.machine import nvml
from perfbench.machine.gpu import is_ours

WINDOW_S = 0.3  # between two readings; the clock of /proc ticks 100 times a second
PROC = Path("/proc")
# of all CPUs, and of the GPU: from here on intervals grow visibly
BUSY_CPU_SHARE, BUSY_GPU_PCT = 0.1, 5.0
_IDLE = (3, 4)  # fields of /proc/stat: idle and waiting for a disk


@dataclass(frozen=True, slots=True)
class Load:
    """``cpus``: CPUs' worth of work by other processes and, on a virtual machine, by its
    neighbours; ``most``: who does the most of it, 'python 4711'. ``gpu_pct``: its utilisation
    while nothing of ours runs. Null where this machine does not say.
    """

    cpus: float | None
    of_cpus: int
    most: str = ""
    gpu_pct: float | None = None

    @property
    def is_busy(self) -> bool:
        cpu = self.cpus is not None and self.cpus > BUSY_CPU_SHARE * self.of_cpus
        return cpu or (self.gpu_pct or 0.0) > BUSY_GPU_PCT

    def __str__(self) -> str:
        """One line."""
        parts = []
        if self.cpus is not None:
            most = f", most of it {self.most}" if self.most and self.is_busy else ""
            parts.append(f"other processes use {self.cpus:.1f} of {self.of_cpus} CPUs{most}")
        if self.gpu_pct is not None:
            parts.append(f"the GPU is {self.gpu_pct:.0f} % busy without us")
        if not parts:
            return "how busy this machine is cannot be read here"
        text = "; ".join(parts)
        advice = ". Next: close what runs, or expect intervals too wide to use"
        return f"this machine is busy: {text}{advice}" if self.is_busy else text


def load_now(gpu_uuid: str | None = None, module: Any | None = None) -> Load:
    """Look for ``WINDOW_S``; ``module`` stands in for pynvml."""
    before = _reading()
    time.sleep(WINDOW_S)
    return load_between(before, _reading(), _gpu_pct(gpu_uuid, module))


@dataclass(frozen=True, slots=True)
class Reading:
    """Ticks since the machine started: of all CPUs, busy or not, and of each process that is not
    ours, by 'name pid'.
    """

    total: int
    busy: int
    ours: int
    others: dict[str, int]


def load_between(before: Reading | None, after: Reading | None, gpu_pct: float | None) -> Load:
    """From two readings; no number of CPUs where either is missing or no tick lies between."""
    count = os.cpu_count() or 1
    if before is None or after is None or after.total <= before.total:
        return Load(None, count, gpu_pct=gpu_pct)
    busy = (after.busy - before.busy) - (after.ours - before.ours)
    share = min(max(busy / (after.total - before.total), 0.0), 1.0)
    spent = {name: ticks - before.others.get(name, ticks) for name, ticks in after.others.items()}
    most = max(spent, key=lambda name: (spent[name], name), default="")
    return Load(share * count, count, most if spent.get(most) else "", gpu_pct)


def _reading() -> Reading | None:
    """None where there is no /proc, as on macOS."""
    try:
        first = (PROC / "stat").read_text(encoding="utf-8").splitlines()[0].split()
        ticks = [int(one) for one in first[1:9]]  # guests' time is in the user's already
    except (OSError, IndexError, ValueError):
        return None
    ours, others = 0, dict[str, int]()
    for folder in PROC.iterdir():
        if not folder.name.isdigit() or (found := _process(folder)) is None:
            continue
        name, spent = found
        if is_ours(int(folder.name)):
            ours += spent
        else:
            others[f"{name} {folder.name}"] = spent
    idle = sum(ticks[place] for place in _IDLE)
    return Reading(sum(ticks), sum(ticks) - idle, ours, others)


def _process(folder: Path) -> tuple[str, int] | None:
    """(its name, its ticks); None where it has ended."""
    try:
        text = (folder / "stat").read_text(encoding="utf-8", errors="replace")
        name = text[text.index("(") + 1 : text.rindex(")")]
        fields = text[text.rindex(")") + 1 :].split()
        return name, int(fields[11]) + int(fields[12])
    except (OSError, IndexError, ValueError):
        return None


def _gpu_pct(uuid: str | None, module: Any | None) -> float | None:
    if uuid is None:
        return None
    try:
        with nvml.nvml_session(module) as opened:
            handle, missing = nvml.nvml_query(opened, "nvmlDeviceGetHandleByUUID", uuid)
            rates = (
                None
                if missing
                else nvml.nvml_query(opened, "nvmlDeviceGetUtilizationRates", handle)[0]
            )
            return None if rates is None else float(rates.gpu)
    except nvml.NvmlUnavailable:
        return None
