"""What the doctor reads of the installation: versions that fit one another, settings, the checkout,
the disk. Imports no torch.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from perfbench.errors import PerfbenchError
from perfbench.machine import environment
from perfbench.machine.doctor.findings import DoctorLine, Level
from perfbench.machine.source import source_of

# each costs every step time
_SLOW_SETTINGS = {"NSA_STRICT_ASSERTS": "1", "NSA_SEL_RANGES_V2": "0", "NSA_LAUNCH_PLANS": "0"}
_BAD_FREE_BYTES, _WARN_FREE_BYTES = 100 * 2**20, 2 * 2**30
_INSTALL = "pip install -c constraints.txt -e '.[perfbench]'"


def lines(
    root: Path,
    *,
    has_gpu: bool,
    driver_cuda: tuple[int, int] | None,
    environ: Mapping[str, str] | None,
) -> Iterator[DoctorLine]:
    """torch and what must fit it, the NVML binding, NSA_* settings, processor, measured code,
    disk.
    """
    torch = environment.version("torch")
    yield DoctorLine(
        Level.GOOD if torch else Level.BAD,
        "torch",
        torch or "not installed",
        "" if torch else _INSTALL,
    )
    yield _cuda_line(has_gpu, driver_cuda)
    yield _triton_line(torch, root, has_gpu)
    yield _fa2_line(torch, has_gpu)
    yield _binding_line()
    yield from _settings_lines(environ)
    yield DoctorLine(
        Level.INFO, "processor", f"{environment.cpu_name()}, {environment.cpu_count()} usable"
    )
    yield _source_line(root)
    yield _disk_line(Path.cwd())


def _cuda_line(has_gpu: bool, driver_cuda: tuple[int, int] | None) -> DoctorLine:
    """The CUDA that torch was built for: a driver serves older ones, and newer ones of its own
    major version in part.
    """
    what, built = "CUDA of torch", environment.torch_cuda()
    if built is None:
        advice = "install torch from PyPI or download.pytorch.org/whl/cuXXX" if has_gpu else ""
        return DoctorLine(
            Level.BAD if has_gpu else Level.INFO,
            what,
            f"none: a CPU build{', next to a GPU' if has_gpu else ''}",
            advice,
        )
    numbers = re.match(r"(\d+)\.(\d+)", built)
    wanted = (int(numbers[1]), int(numbers[2])) if numbers else None
    if wanted is None or driver_cuda is None or wanted <= driver_cuda:
        return DoctorLine(Level.GOOD, what, built)
    value = f"{built}, and the driver serves CUDA up to {driver_cuda[0]}.{driver_cuda[1]}"
    step = (
        f"upgrade the driver, or install a torch built for CUDA {driver_cuda[0]}.{driver_cuda[1]}"
        " or older"
    )
    if wanted[0] > driver_cuda[0]:
        return DoctorLine(Level.BAD, what, value, f"torch will not find the GPU: {step}")
    return DoctorLine(
        Level.WARN, what, value, f"most of it works, what is compiled on the spot may not: {step}"
    )


def _triton_line(torch: str | None, root: Path, has_gpu: bool) -> DoctorLine:
    """torch's CUDA wheel pins its triton; where it pins none (a CPU build), constraints.txt holds a
    pair that was tried.
    """
    found = environment.version("triton") or environment.version("pytorch-triton")
    if found is None:
        advice = "pip install -c constraints.txt triton" if has_gpu else ""
        return DoctorLine(Level.BAD if has_gpu else Level.INFO, "triton", "not installed", advice)
    pinned = pinned_triton(importlib.metadata.requires("torch") or [] if torch else [])
    if pinned and _base(pinned) != _base(found):
        advice = (
            "they are built as a pair, and kernels may fail or be slow: pip install"
            f" 'triton=={pinned}'"
        )
        return DoctorLine(
            Level.BAD if has_gpu else Level.WARN,
            "triton",
            f"{found}, and torch {torch} wants {pinned}",
            advice,
        )
    if pinned:
        return DoctorLine(Level.GOOD, "triton", f"{found}, as torch {torch} wants")
    tried = _constraints(root)
    if (
        torch
        and _base(torch) == tried.get("torch")
        and _base(found) != tried.get("triton", _base(found))
    ):
        advice = (
            "constraints.txt holds the pair that was tried: pip install"
            f" 'triton=={tried['triton']}'"
        )
        return DoctorLine(
            Level.WARN,
            "triton",
            f"{found}, and torch {torch} was tried with {tried['triton']}",
            advice,
        )
    return DoctorLine(Level.GOOD, "triton", f"{found} (torch {torch} names no version of its own)")


def pinned_triton(requirements: list[str]) -> str | None:
    """The triton that a torch's metadata pins ('triton==3.7.1; platform_system == "Linux"'); None
    where it pins none.
    """
    found = (re.match(r"(?:pytorch-)?triton\s*\(?==\s*([^\s;)]+)", one) for one in requirements)
    return next((match[1] for match in found if match), None)


def _constraints(root: Path) -> dict[str, str]:
    try:
        text = (root / "constraints.txt").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    return dict(re.findall(r"^([A-Za-z0-9._-]+)==([^\s;]+)", text, re.MULTILINE))


def _base(version: str) -> str:
    """Without the local part: '2.13.0+cu130' -> '2.13.0'."""
    return version.partition("+")[0]


def _fa2_line(torch: str | None, has_gpu: bool) -> DoctorLine:
    from nsa.capability import fa2_provider

    what, flash = "FA-2 provider", environment.version("flash-attn")
    if flash:
        if importlib.util.find_spec("flash_attn_2_cuda") is None:
            advice = (
                "its CUDA extension was never built: pip install --no-build-isolation"
                " --force-reinstall flash-attn, or uninstall it"
            )
            return DoctorLine(
                Level.BAD, what, f"flash_attn {flash} without flash_attn_2_cuda", advice
            )
        built_for = torch_of_wheel(flash, _direct_url("flash-attn"))
        if built_for and torch and ".".join(_base(torch).split(".")[:2]) != built_for:
            advice = (
                "it will not load, or crash: install the wheel of flash_attn that is built for"
                f" torch {_base(torch)}"
            )
            return DoctorLine(
                Level.BAD,
                what,
                f"flash_attn {flash}, built for torch {built_for}, next to torch {torch}",
                advice,
            )
    provider, reason = fa2_provider()
    if provider is None:
        return DoctorLine(
            Level.WARN if has_gpu else Level.INFO,
            what,
            reason,
            "cells with fa2: on cannot run here",
        )
    return DoctorLine(
        Level.GOOD if has_gpu else Level.INFO,
        what,
        provider if has_gpu else f"{provider}, which needs a GPU",
    )


def torch_of_wheel(version: str, url: str) -> str | None:
    """'2.8' of '...+cu12torch2.8cxx11abiTRUE': prebuilt wheels of flash_attn name their torch; None
    where nothing does.
    """
    found = re.search(r"(?:\+|%2B)\w*?torch(\d+\.\d+)", f"{version} {url}")
    return found[1] if found else None


def _direct_url(distribution: str) -> str:
    """What pip was given when it was no package index: a URL or a file, as JSON text; else
    empty.
    """
    try:
        return importlib.metadata.distribution(distribution).read_text("direct_url.json") or ""
    except importlib.metadata.PackageNotFoundError:
        return ""


def _binding_line() -> DoctorLine:
    """Two distributions serve `import pynvml`: nvidia-ml-py with a file, the deprecated pynvml
    (before 12) with a folder that wins.
    """
    what, binding, wrong = (
        "NVML binding",
        environment.version("nvidia-ml-py"),
        environment.version("pynvml"),
    )
    value = (f"nvidia-ml-py {binding}" if binding else "nvidia-ml-py is not installed") + (
        f", and pynvml {wrong}" if wrong else ""
    )
    again = "pip uninstall -y pynvml && pip install --force-reinstall nvidia-ml-py"
    if module_file("pynvml").endswith("__init__.py"):
        return DoctorLine(
            Level.BAD,
            what,
            f"{value}; `import pynvml` finds the deprecated one's folder",
            f"it shadows nvidia-ml-py: {again}",
        )
    if binding is None:
        return DoctorLine(
            Level.BAD, what, value, "pip install nvidia-ml-py" if not wrong else again
        )
    if wrong:
        return DoctorLine(
            Level.WARN,
            what,
            value,
            "the deprecated one leaves the module alone (it does since 12), but is not needed:"
            f" {again}",
        )
    return DoctorLine(Level.GOOD, what, value)


def module_file(name: str) -> str:
    """Where `import` would find a module, without importing it; empty where it would not."""
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return ""
    return (found.origin or "") if found else ""


def _settings_lines(environ: Mapping[str, str] | None) -> Iterator[DoctorLine]:
    """One line for each NSA_* variable that is set, with its meaning; one for none, or for what is
    refused.
    """
    from nsa.settings import MEANINGS

    try:
        given = environment.nsa_settings() if environ is None else _given(environ)
    except (PerfbenchError, ValueError) as error:
        yield DoctorLine(Level.BAD, "NSA_* settings", "refused", str(error))
        return
    if not given:
        yield DoctorLine(Level.GOOD, "NSA_* settings", "none set")
    for name, value in given.items():
        slow = _SLOW_SETTINGS.get(name) == value
        step = (
            "; this costs every step time: unset it to measure"
            if slow
            else "; `perfbench plan` shows the routes under it"
        )
        yield DoctorLine(Level.WARN if slow else Level.INFO, name, value, MEANINGS[name] + step)


def _given(environ: Mapping[str, str]) -> dict[str, str]:
    from nsa import settings

    return settings.load(environ).given()


def _source_line(root: Path) -> DoctorLine:
    what, found = "measured code", source_of(root)
    if found.commit is None:
        return DoctorLine(
            Level.WARN,
            what,
            found.reason or "not known",
            "such a run cannot become a baseline: measure in a git checkout",
        )
    value = f"{found.commit[:12]}{' with uncommitted changes' if found.dirty_sha256 else ''}"
    if _is_shallow(root):
        advice = (
            "a baseline's commit may be missing, and then nothing can be confirmed: `git fetch"
            " --unshallow`, in CI `fetch-depth: 0`"
        )
        return DoctorLine(Level.WARN, what, f"{value}, of a shallow clone", advice)
    return DoctorLine(
        Level.GOOD,
        what,
        value,
        "commit them before a run that shall become a baseline" if found.dirty_sha256 else "",
    )


def _is_shallow(root: Path) -> bool:
    command = ["git", "-C", str(root), "rev-parse", "--is-shallow-repository"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    return done.stdout.strip() == "true"


def _disk_line(working: Path) -> DoctorLine:
    """Free space where `perfbench run` makes run folders, or would: below the working directory."""
    runs = working.resolve() / "reports" / "runs"
    place = next((one for one in (runs, *runs.parents) if one.is_dir()), Path("/"))
    try:
        free = shutil.disk_usage(place).free
    except OSError as error:
        return DoctorLine(
            Level.WARN,
            "disk",
            f"{place}: {error.strerror}",
            "run folders go there: choose another with --out DIR",
        )
    value = f"{free / 2**30:,.1f} GiB free for run folders ({place})"
    if free >= _WARN_FREE_BYTES:
        return DoctorLine(Level.GOOD, "disk", value)
    full = free < _BAD_FREE_BYTES
    advice = (
        "a full disk stops a run, which --resume then continues: free space, or choose another"
        " place with --out DIR"
    )
    return DoctorLine(Level.BAD if full else Level.WARN, "disk", value, advice)
