"""GPUs as CUDA will see them, found through NVML without touching CUDA; who computes on one; a lock
on one.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfbench.errors import Exit, PerfbenchError
from perfbench.machine import nvml

NVML_LAG_S = 2.0  # NVML may list a process for a moment after it has ended
_INDEX = re.compile(r"\s*([+-]?\d+)")  # CUDA reads the digits and ignores what follows them


UNKNOWN = "unknown GPU"


@dataclass(frozen=True, slots=True)
class GpuHandle:
    """A GPU or MIG slice.

    ``index`` is NVML's (PCI order) and only for people: look it up by ``uuid``.
    """

    uuid: str
    name: str
    index: int

    @property
    def slug(self) -> str:
        return slug(UNKNOWN if self.name.startswith(UNKNOWN) else self.name)

    @property
    def uuid_sha256(self) -> str:
        return uuid_sha256(self.uuid)


@dataclass(frozen=True, slots=True)
class GpuProcess:
    pid: int
    name: str
    memory_bytes: int | None

    def __str__(self) -> str:
        size = "" if self.memory_bytes is None else f", {self.memory_bytes / 2**20:.0f} MiB"
        return f"{self.pid} ({self.name}{size})"


def slug(name: str) -> str:
    """'NVIDIA H100 80GB HBM3' -> 'h100-80gb-hbm3'."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    return "-".join(words[1:] if words[:1] == ["nvidia"] and len(words) > 1 else words) or "gpu"


def uuid_sha256(uuid: str) -> str:
    """Stored in place of the UUID, which names a machine."""
    return hashlib.sha256(uuid.encode()).hexdigest()


def visible(
    listed: str | None, order: str | None, module: Any | None = None
) -> tuple[list[GpuHandle], str]:
    """GPUs in CUDA's order, or ([], reason).

    ``listed`` is CUDA_VISIBLE_DEVICES, ``order`` CUDA_DEVICE_ORDER.
    """
    if listed is not None and not listed.strip():
        return [], "CUDA_VISIBLE_DEVICES is empty, which hides every GPU; unset it"
    try:
        with nvml.nvml_session(module) as opened:
            groups, reason = _enumerate(opened)
    except nvml.NvmlUnavailable as error:
        return [], str(error)
    if not groups:
        return [], reason
    if listed is not None and _INDEX.match(listed.split(",")[0]) is None:
        return _by_uuid(listed, [gpu for group in groups for gpu in group])
    # CUDA offers one MIG slice of a GPU
    devices = [group[1] if len(group) > 1 else group[0] for group in groups]
    if listed is not None:
        devices, reason = _by_index(listed, devices)
    if devices and order != "PCI_BUS_ID" and len({group[0].name for group in groups}) > 1:
        return (
            [],
            (
                "the GPUs differ, and CUDA numbers them fastest first in an order that only CUDA"
                " knows; set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name one by UUID in"
                " CUDA_VISIBLE_DEVICES"
            ),
        )
    return devices, reason


def _enumerate(module: Any) -> tuple[list[list[GpuHandle]], str]:
    """For each GPU itself and then its MIG slices."""
    count, missing = nvml.nvml_query(module, "nvmlDeviceGetCount")
    if missing:
        return [], f"{missing}: NVML counts no GPUs; run `nvidia-smi`"
    groups: list[list[GpuHandle]] = []
    lost = []
    for index in range(count):
        handle, missing = nvml.nvml_query(module, "nvmlDeviceGetHandleByIndex", index)
        if missing:
            lost.append(f"GPU {index}: {missing}")
            continue
        groups.append([_describe(module, handle, index), *_mig_slices(module, handle, index)])
    return groups, "; ".join(lost) or ("" if groups else "NVML finds the driver, but no GPU")


def _describe(module: Any, handle: Any, index: int) -> GpuHandle:
    uuid, _ = nvml.nvml_query(module, "nvmlDeviceGetUUID", handle)
    name, missing = nvml.nvml_query(module, "nvmlDeviceGetName", handle)
    unknown = f"{UNKNOWN} ({missing})" if missing else UNKNOWN
    return GpuHandle(nvml.text(uuid or ""), nvml.text(name or unknown), index)


def _mig_slices(module: Any, handle: Any, index: int) -> list[GpuHandle]:
    mode, missing = nvml.nvml_query(module, "nvmlDeviceGetMigMode", handle)
    if missing or not mode[0]:
        return []
    count, _ = nvml.nvml_query(module, "nvmlDeviceGetMaxMigDeviceCount", handle)
    slices = (
        nvml.nvml_query(module, "nvmlDeviceGetMigDeviceHandleByIndex", handle, i)
        for i in range(count or 0)
    )
    return [_describe(module, mig, index) for mig, missing in slices if not missing]


def _by_index(listed: str, devices: list[GpuHandle]) -> tuple[list[GpuHandle], str]:
    """CUDA stops at the first index that is not a device, and shows nothing at all where one is
    repeated.
    """
    chosen: list[int] = []
    reason = ""
    for entry in listed.split(","):
        found = _INDEX.match(entry)
        index = int(found[1]) if found else -1
        if not 0 <= index < len(devices):
            reason = (
                f"CUDA_VISIBLE_DEVICES={listed!r}: {entry.strip()!r} is none of the {len(devices)}"
                " GPUs; `nvidia-smi -L` lists them"
            )
            break
        chosen.append(index)
    if len(set(chosen)) != len(chosen):
        return (
            [],
            f"CUDA_VISIBLE_DEVICES={listed!r} repeats a GPU, so CUDA shows none; name each once",
        )
    return [devices[index] for index in chosen], "" if chosen else reason


def _by_uuid(listed: str, known: list[GpuHandle]) -> tuple[list[GpuHandle], str]:
    """Full UUIDs or prefixes that fit exactly one device ('GPU-8f3', 'MIG-...')."""
    chosen: list[GpuHandle] = []
    for entry in (part.strip() for part in listed.split(",")):
        fits = [gpu for gpu in known if entry and gpu.uuid.startswith(entry)]
        exact = [gpu for gpu in fits if gpu.uuid == entry]
        if len(exact or fits) != 1 or (exact or fits)[0] in chosen:
            if chosen:
                break
            what = "fits no GPU" if not fits else f"fits {len(fits)} GPUs"
            return (
                [],
                (
                    f"CUDA_VISIBLE_DEVICES={listed!r}: {entry!r} {what}; `nvidia-smi -L` lists the"
                    " UUIDs"
                ),
            )
        chosen.append((exact or fits)[0])
    return chosen, ""


def matches(wanted: str, name: str) -> bool:
    """Whether a matrix's ``gpu`` names this card: whole words, so that A10 is not A100 and L40 is
    not L40S.
    """
    target = "".join(re.findall(r"[a-z0-9]+", wanted.lower()))
    words = re.findall(r"[a-z0-9]+", name.lower())
    runs = ("".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, len(words) + 1))
    return bool(target) and target in runs


def used_memory(uuid: str, module: Any | None = None) -> int | None:
    """Bytes in use on the GPU by anybody; None where NVML cannot say."""
    try:
        with nvml.nvml_session(module) as opened:
            handle, missing = nvml.nvml_query(opened, "nvmlDeviceGetHandleByUUID", uuid)
            info = (
                None if missing else nvml.nvml_query(opened, "nvmlDeviceGetMemoryInfo", handle)[0]
            )
            return None if info is None else int(info.used)
    except nvml.NvmlUnavailable:
        return None


def busy_processes(uuid: str, module: Any | None = None) -> tuple[list[GpuProcess], str]:
    """Processes that compute on the GPU and were not started by this one; ([], reason) where NVML
    cannot say.
    """
    try:
        with nvml.nvml_session(module) as opened:
            handle, missing = nvml.nvml_query(opened, "nvmlDeviceGetHandleByUUID", uuid)
            if missing:
                return [], missing
            found, missing = nvml.nvml_query(opened, "nvmlDeviceGetComputeRunningProcesses", handle)
            if missing:
                return [], missing
            return [_process(opened, entry) for entry in found if not is_ours(entry.pid)], ""
    except nvml.NvmlUnavailable as error:
        return [], str(error)


def is_ours(pid: int, proc: Path = Path("/proc")) -> bool:
    """This process or a descendant.

    The process group says less: a script's other jobs share it, our children have left it.
    """
    seen: set[int] = set()
    while pid > 1 and pid not in seen:
        if pid == os.getpid():
            return True
        seen.add(pid)
        try:
            pid = int(
                (proc / str(pid) / "stat")
                .read_text(encoding="utf-8", errors="replace")
                .rpartition(")")[2]
                .split()[1]
            )
        except (OSError, IndexError, ValueError):
            # it has ended, or belongs to another PID namespace
            return False
    return False


def blindness(gpu: GpuHandle, module: Any | None = None) -> str:
    """A warning where NVML does not list who computes on the GPU, as in many containers; '' where
    it does.
    """
    _, missing = busy_processes(gpu.uuid, module)
    if not missing:
        return ""
    return (
        f"NVML cannot list the processes that compute on {gpu.name} ({missing}), so others would"
        " go unseen; measuring all the same: make sure that nothing else runs there, or measure"
        " outside the container"
    )


def _process(module: Any, entry: Any) -> GpuProcess:
    name, missing = nvml.nvml_query(module, "nvmlSystemGetProcessName", entry.pid)
    memory = entry.usedGpuMemory
    return GpuProcess(
        entry.pid, nvml.text(name or f"? ({missing})"), None if memory is None else int(memory)
    )


def refuse_busy(gpu: GpuHandle, module: Any | None = None, *, patience_s: float = 0.0) -> None:
    """Raise ENVIRONMENT while another process computes on the GPU: it would share our numbers.

    ``patience_s`` is for a process that just ended. Where NVML cannot say, ``blindness`` is the
    warning.
    """
    deadline = time.monotonic() + patience_s
    while (others := busy_processes(gpu.uuid, module)[0]) and time.monotonic() < deadline:
        time.sleep(0.1)
    if others:
        problem = (
            f"{gpu.name} is busy: processes {', '.join(str(p) for p in others)} compute on it, and"
            " a measurement needs it alone"
        )
        raise PerfbenchError(Exit.ENVIRONMENT, f"{problem}. Next: wait for them or stop them")


@contextmanager
def gpu_lock(uuid: str, folder: Path | None = None, *, what: str = "GPU") -> Iterator[None]:
    """Hold the one measurement on this GPU; ENVIRONMENT while another perfbench holds it. ``what``
    else it is, whose name stands for the UUID.

    It ends with the process.
    """
    path = (folder or Path(tempfile.gettempdir())) / f"perfbench-gpu-{uuid_sha256(uuid)[:16]}.lock"
    try:
        fd = _open_lock(path)
    except OSError as error:
        problem = f"the lock of the {what}, {path}, cannot be opened: {error.strerror}"
        raise PerfbenchError(
            Exit.ENVIRONMENT, f"{problem}. Next: remove it, or set TMPDIR"
        ) from None
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PerfbenchError(
                Exit.ENVIRONMENT,
                f"another perfbench measures on this {what} (it holds {path}). Next: wait for it,"
                f" or choose another {what}",
            ) from None
        yield
    finally:
        os.close(fd)


def _open_lock(path: Path) -> int:
    """Another user's file can be locked read-only; only a new one is created (Linux forbids O_CREAT
    on others' in /tmp).
    """
    try:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return os.open(path, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644)
