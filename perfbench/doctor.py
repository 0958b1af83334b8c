"""What a run would find on this machine: a dozen lines, each with what to do where it is bad. Needs no GPU, imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfbench import environment, gpu, nvml
from perfbench.gpu import GpuHandle
from perfbench.verdict import Exit, PerfbenchError


@dataclass(frozen=True, slots=True)
class Line:
    """``ok`` None: neither good nor bad here, e.g. no GPU on a laptop."""

    ok: bool | None
    what: str
    value: str
    advice: str = ""


def diagnose(*, module: Any | None = None, environ: Mapping[str, str] | None = None, root: Path = Path()) -> list[Line]:
    """Every line, in the order in which a fault hides the next one; ``module`` stands in for pynvml."""
    found, reason = environment.visible_gpu(module=module, environ=environ)
    return [
        *_nvml_lines(module),
        _gpu_line(found, reason),
        _visible_line(environ),
        *_state_lines(found, module),
        *_torch_lines(found),
        *_provider_lines(found),
        _settings_line(),
        Line(None, "processor", f"{environment.cpu_name()}, {environment.cpu_count()} usable"),
        _source_line(root),
    ]


def exit_code(lines: list[Line]) -> Exit:
    """ENVIRONMENT where any line is bad."""
    return Exit.ENVIRONMENT if any(line.ok is False for line in lines) else Exit.OK


def render_text(lines: list[Line]) -> str:
    """For a terminal: a mark, what, value, and below it what to do."""
    width = max(len(line.what) for line in lines)
    rows = []
    for line in lines:
        mark = {True: "ok", False: "BAD", None: "--"}[line.ok]
        rows.append(f"{mark:<4}{line.what:<{width}}  {line.value}")
        if line.advice:
            rows.append(f"{'':<{width + 4}}  -> {line.advice}")
    return "\n".join(rows) + "\n"


def _nvml_lines(module: Any | None) -> Iterator[Line]:
    """NVML's state, then the driver."""
    try:
        with nvml.session(module) as opened:
            driver, missing = nvml.query(opened, "nvmlSystemGetDriverVersion")
            newest, _ = nvml.query(opened, "nvmlSystemGetCudaDriverVersion")
    except nvml.NvmlUnavailable as error:
        # No driver at all is a machine without a GPU; a driver that cannot be asked is a fault.
        absent = error.code in (9, 12)
        code = f" (code {error.code})" if error.code is not None else ""
        yield Line(None if absent else False, "NVML", f"{error.name}{code}: {error.meaning}", error.advice)
        yield Line(None if absent else False, "driver", "not known", "see NVML above")
        return
    yield Line(True, "NVML", "answers")
    cuda = f", CUDA up to {newest // 1000}.{newest % 1000 // 10}" if newest else ""
    yield Line(not missing, "driver", missing or f"{nvml.text(driver)}{cuda}", "reinstall the driver" if missing else "")


def _gpu_line(found: GpuHandle | None, reason: str) -> Line:
    if found is None:
        advice = "only matrices with `gpu: none` can run here"
        return Line(None, "GPU", "none" if reason.startswith("NVML_") else f"none: {reason}", advice)
    return Line(True, "GPU", f"{found.name} (NVML index {found.index}, UUID {found.uuid[:12]}...), reports/baselines/{found.slug}")


def _visible_line(environ: Mapping[str, str] | None) -> Line:
    listed = environment.variable("CUDA_VISIBLE_DEVICES", environ)
    order = environment.variable("CUDA_DEVICE_ORDER", environ) or "FASTEST_FIRST (default)"
    value = "unset: every GPU" if listed is None else repr(listed)
    hides = listed is not None and (not listed.strip() or listed.strip().startswith("-"))
    advice = "this hides every GPU; unset it" if hides else ""
    return Line(None if hides else True, "CUDA_VISIBLE_DEVICES", f"{value}, order {order}", advice)


def _state_lines(found: GpuHandle | None, module: Any | None) -> Iterator[Line]:
    """Other processes, then persistence mode."""
    if found is None:
        yield Line(None, "other processes", "no GPU to look at")
        yield Line(None, "persistence mode", "no GPU to look at")
        return
    others, missing = gpu.busy_processes(found.uuid, module)
    listed = missing or ", ".join(str(process) for process in others) or "none"
    advice = "a run refuses (8) while they compute on the GPU; wait for them or stop them" if others else ""
    yield Line(None if missing else not others, "other processes", listed, advice)
    yield _persistence_line(found, module)


def _persistence_line(found: GpuHandle, module: Any | None) -> Line:
    with nvml.session(module) as opened:
        handle, missing = nvml.query(opened, "nvmlDeviceGetHandleByUUID", found.uuid)
        mode, missing = (None, missing) if missing else nvml.query(opened, "nvmlDeviceGetPersistenceMode", handle)
    if missing:
        return Line(None, "persistence mode", missing)
    advice = "" if mode else "`sudo nvidia-smi -pm 1`: without it the driver starts anew for each process"
    return Line(True if mode else None, "persistence mode", "on" if mode else "off", advice)


def _torch_lines(found: GpuHandle | None) -> Iterator[Line]:
    """torch, then the CUDA that it was built for."""
    torch = environment.version("torch")
    yield Line(torch is not None, "torch", torch or "not installed", "" if torch else "pip install -c constraints.txt -e .")
    cuda = environment.torch_cuda()
    if cuda is not None:
        yield Line(True, "CUDA of torch", cuda)
    elif found is None:
        yield Line(None, "CUDA of torch", "none: a CPU build")
    else:
        yield Line(False, "CUDA of torch", "none: a CPU build, beside a GPU", "install torch from PyPI or download.pytorch.org/whl/cuXXX")


def _provider_lines(found: GpuHandle | None) -> Iterator[Line]:
    """triton, then who serves FA-2, then the NVML binding."""
    from nsa.capability import fa2_provider

    triton = environment.version("triton") or environment.version("pytorch-triton")
    missing = "" if triton or found is None else "pip install -c constraints.txt triton"
    yield Line(True if triton else None if found is None else False, "triton", triton or "not installed", missing)
    provider, reason = fa2_provider()
    value = provider if provider and found else f"{provider}, which needs a GPU" if provider else reason
    advice = "" if provider else "cells with fa2: on cannot run here"
    yield Line(None if found is None else provider is not None, "FA-2 provider", value, advice)
    wrong = environment.version("pynvml")
    advice = "pip uninstall pynvml: it shadows nvidia-ml-py, whose module has the same name" if wrong else ""
    binding = environment.version("nvidia-ml-py")
    value = f"nvidia-ml-py {binding}" if binding else "nvidia-ml-py is not installed"
    yield Line(binding is not None and not wrong, "NVML binding", value + (f", and pynvml {wrong}" if wrong else ""), advice)


def _settings_line() -> Line:
    try:
        given = environment.nsa_settings()
    except PerfbenchError as error:
        return Line(False, "NSA_* settings", "refused", str(error))
    listed = ", ".join(f"{name}={value}" for name, value in given.items())
    advice = "they change routes; `perfbench plan` shows how" if given else ""
    return Line(None if given else True, "NSA_* settings", listed or "none set", advice)


def _source_line(root: Path) -> Line:
    found = environment.source(root)
    if found.commit is None:
        return Line(None, "measured code", found.reason or "not known", "runs need --source-commit SHA to be comparable")
    return Line(True, "measured code", f"{found.commit[:12]}{' with uncommitted changes' if found.dirty_sha256 else ''}")
