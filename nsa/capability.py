"""Probes the machine: compute capability, FA-2 providers, versions. The only module that does."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import warnings
from collections.abc import Mapping
from functools import lru_cache

from nsa.config import nearest_name
from nsa.routing import Capability

# Marketing names as NVML reports them, for planning without the card.
KNOWN_GPUS: Mapping[str, tuple[str, tuple[int, int]]] = {
    "a100": ("NVIDIA A100-SXM4-80GB", (8, 0)),
    "rtx4090": ("NVIDIA GeForce RTX 4090", (8, 9)),
    "l40s": ("NVIDIA L40S", (8, 9)),
    "h100": ("NVIDIA H100 80GB HBM3", (9, 0)),
    "h200": ("NVIDIA H200", (9, 0)),
}
TORCH_VARLEN_SINCE = (2, 11)
# torch and Triton that the tests passed with, together: on H100 and H200; on a CPU and in Triton's
# interpreter
TRIED: tuple[tuple[str, str], ...] = (("2.11.0", "3.6.0"), ("2.13.0", "3.7.1"))


class UntriedVersionWarning(UserWarning):
    """The installed torch or Triton is none of TRIED; nothing is known to be wrong with it."""


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def torch_version() -> str:
    """Installed torch's version, without importing it; '0' where it is missing."""
    return _version("torch") or "0"


def fa2_provider() -> tuple[str | None, str]:
    """(provider and version, '') or (None, reason): the flash_attn package first, else PyTorch's
    own FA-2 build.
    """
    installed = _version("flash-attn")
    if installed and importlib.util.find_spec("flash_attn"):
        return f"flash_attn {installed}", ""
    version = torch_version()
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    if numbers >= TORCH_VARLEN_SINCE:
        return f"torch.varlen {version}", ""
    return (
        None,
        (
            f"flash_attn is not installed and torch {version} is older than 2.11; pip install"
            " 'nsa-perfbench[flash]'"
        ),
    )


def fa3_provider(sm: tuple[int, int] | None) -> tuple[str | None, str]:
    """(package and version, '') or (None, reason): FA-3's forward, whose kernels are Hopper's."""
    if sm is None or sm[0] != 9:
        return None, "FA-3's kernels are of SM 9.0 alone"
    installed = _version("fa3-fwd")
    if installed and importlib.util.find_spec("fa3_fwd_interface"):
        return f"fa3-fwd {installed}", ""
    return None, "fa3-fwd is not installed; pip install fa3-fwd"


def triton_provider(sm: tuple[int, int] | None) -> tuple[str | None, str]:
    """(package and version, '') or (None, reason).

    Without a GPU only Triton's interpreter runs kernels, slowly: it is for tests.
    """
    installed = _version("triton")
    if not installed or not importlib.util.find_spec("triton"):
        return None, "triton is not installed; pip install triton"
    if sm is None:
        from triton import knobs

        if not knobs.runtime.interpret:
            return (
                None,
                "there is no GPU, and Triton's interpreter is off (TRITON_INTERPRET=1, for tests)",
            )
    return f"triton {installed}", ""


def of_gpu(name: str, sm: tuple[int, int], device: str = "cuda") -> Capability:
    """The capability of a GPU with the software that is installed here; touches no CUDA."""
    return Capability(
        device,
        name,
        sm,
        *fa2_provider(),
        torch_version(),
        *triton_provider(sm),
        *fa3_provider(sm),
    )


def untried(torch: str, triton: str | None) -> str | None:
    """One line where these versions are none of TRIED, else None. What follows a '+' names a
    build, not a version; without Triton, torch's alone counts.
    """
    got = torch.split("+")[0], triton and triton.split("+")[0]
    if any(got[0] == pair[0] and got[1] in (None, pair[1]) for pair in TRIED):
        return None
    installed = f"torch {torch}" + ("" if triton is None else f" with triton {triton}")
    tried = " or ".join(f"torch {a} with triton {b}" for a, b in TRIED)
    return (
        f"got {installed}, which nsa was not tried with; wanted {tried}; run nsa's tests, or ignore"
        " nsa.capability.UntriedVersionWarning"
    )


@lru_cache(maxsize=1)
def warn_of_untried_versions() -> None:
    """Warn once a process, at the first use and never at import."""
    text = untried(torch_version(), _version("triton"))
    if text is not None:
        warnings.warn(text, UntriedVersionWarning, stacklevel=2)


@lru_cache(maxsize=16)
def probe(device: str = "cpu") -> Capability:
    """What the device offers ('cpu', 'cuda', 'cuda:1', 'mps'). Touches CUDA only for a CUDA device.

    An AMD GPU, which PyTorch's ROCm build calls cuda, offers what a CPU does: its compute
    capability is no SM, and the kernels are NVIDIA's.
    """
    provider, reason = fa2_provider()
    if not device.startswith("cuda"):
        software = (torch_version(), *triton_provider(None), *fa3_provider(None))
        return Capability(device, device, None, provider, reason, *software)
    import torch

    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        why = f"{properties.name} is an AMD GPU (ROCm {torch.version.hip}), and it is for NVIDIA's"
        device = f"{device} (ROCm)"
        return Capability(device, properties.name, None, None, why, torch_version(), None, why)
    return of_gpu(properties.name, (properties.major, properties.minor), device)


def this_machine() -> Capability:
    """The first CUDA device's capability where there is one, else the CPU's. Imports torch."""
    import torch

    return probe("cuda" if torch.cuda.is_available() else "cpu")


def assumed(gpu: str) -> Capability:
    """The capability of a machine that is not at hand: 'none' or 'cpu', or one of KNOWN_GPUS (case
    and spaces ignored).

    An unknown name is a ValueError with the nearest one and all that are known.
    """
    provider, reason = fa2_provider()
    name = gpu.lower().replace(" ", "").replace("-", "")
    if name in ("none", "cpu"):
        return Capability(
            "cpu", "cpu", None, provider, reason, torch_version(), None, "there is no GPU"
        )
    if name not in KNOWN_GPUS:
        known = ["none", *KNOWN_GPUS]
        raise ValueError(f"gpu={gpu!r} is not one of {', '.join(known)}{nearest_name(name, known)}")
    marketing, sm = KNOWN_GPUS[name]
    return of_gpu(marketing, sm)
