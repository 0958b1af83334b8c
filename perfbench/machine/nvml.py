"""NVML, opened lazily: every failure is a name, a reason and a next step, never a zero."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import Any

# code -> (name, what it means, what to do). The numbers are NVML's ABI.
ERRORS: Mapping[int, tuple[str, str, str]] = MappingProxyType(
    {
        1: (
            "NVML_ERROR_UNINITIALIZED",
            "NVML was not initialised",
            "report this as a bug of perfbench",
        ),
        2: (
            "NVML_ERROR_INVALID_ARGUMENT",
            "NVML does not know this device",
            "compare CUDA_VISIBLE_DEVICES with `nvidia-smi -L`",
        ),
        3: (
            "NVML_ERROR_NOT_SUPPORTED",
            "this device does not offer the value",
            "nothing: MIG slices and some cards lack it",
        ),
        4: (
            "NVML_ERROR_NO_PERMISSION",
            "this user may not ask",
            "run as a user that may open /dev/nvidiactl",
        ),
        6: (
            "NVML_ERROR_NOT_FOUND",
            "no such device",
            "compare CUDA_VISIBLE_DEVICES with `nvidia-smi -L`",
        ),
        9: (
            "NVML_ERROR_DRIVER_NOT_LOADED",
            "the NVIDIA driver is not loaded",
            "`modprobe nvidia`, or a matrix with `gpu: none`",
        ),
        12: (
            "NVML_ERROR_LIBRARY_NOT_FOUND",
            "libnvidia-ml.so is missing",
            (
                "install the NVIDIA driver or pass it into the container (`--gpus all`); for a CPU,"
                " a matrix with `gpu: none`"
            ),
        ),
        13: (
            "NVML_ERROR_FUNCTION_NOT_FOUND",
            "the driver is older than this call",
            "upgrade the driver",
        ),
        15: ("NVML_ERROR_GPU_IS_LOST", "the GPU fell off the bus", "reboot the machine"),
        18: (
            "NVML_ERROR_LIB_RM_VERSION_MISMATCH",
            "the driver was upgraded while its old kernel module stayed loaded",
            "reboot, or unload and reload the nvidia modules",
        ),
        999: ("NVML_ERROR_UNKNOWN", "the driver gave no reason", "look into `dmesg`"),
    }
)


class NvmlUnavailable(Exception):
    """NVML cannot be opened; ``code`` is None where the Python package itself is missing."""

    def __init__(self, code: int | None, name: str, meaning: str, advice: str) -> None:
        super().__init__(f"{name}: {meaning}; {advice}")
        self.code, self.name, self.meaning, self.advice = code, name, meaning, advice


def error_name(code: int) -> str:
    return ERRORS[code][0] if code in ERRORS else f"NVML_ERROR_{code}"


def unavailable(code: int) -> NvmlUnavailable:
    """What NVML's error ``code`` means, as an exception that carries name, meaning and next
    step.
    """
    name, meaning, advice = ERRORS.get(
        code, (error_name(code), "unknown to perfbench", "see NVML's reference")
    )
    return NvmlUnavailable(code, name, meaning, advice)


@contextmanager
def nvml_session(module: Any | None = None) -> Iterator[Any]:
    """Initialise NVML, yield the ``pynvml`` module (or the stand-in given), shut down; raises
    NvmlUnavailable.
    """
    opened = _load() if module is None else module
    try:
        opened.nvmlInit()
    except opened.NVMLError as error:
        raise unavailable(int(error.value)) from error
    try:
        yield opened
    finally:
        # the driver went away while we read: what was read stays valid
        with suppress(opened.NVMLError):
            opened.nvmlShutdown()


def _load() -> Any:
    try:
        return importlib.import_module("pynvml")
    except ImportError as error:
        advice = "pip install nvidia-ml-py (not the distribution called pynvml)"
        raise NvmlUnavailable(None, "pynvml is not importable", str(error), advice) from error


def nvml_query(module: Any, name: str, *args: Any) -> tuple[Any, str]:
    """(value, '') or (None, why): NVML's error name, FUNCTION_NOT_FOUND for a call that this
    binding lacks, or that a text is not UTF-8.
    """
    function: Callable[..., Any] | None = getattr(module, name, None)
    if function is None:
        return None, error_name(13)
    try:
        value = function(*args)
        return (value.decode("utf-8") if isinstance(value, bytes) else value), ""
    except module.NVMLError as error:
        return None, error_name(int(error.value))
    except UnicodeDecodeError as error:  # of the binding, or of an older one's bytes
        seen = error.object.decode("utf-8", "backslashreplace")[:80]
        return None, f"what {name} answered is not UTF-8: {seen!r}"


def text(value: str | bytes) -> str:
    """Older bindings return bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
