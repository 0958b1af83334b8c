"""A GPU that is not here: Triton's own `JITFunction.run`, specialisation and `CudaLauncher` run,
with a driver that names a GPU and a compiled kernel that writes down what it is given. Tensors of
the CPU are on device -1, and so is the driver.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

# what the compiler says of a tensor map
MAPS: dict[str, Any] = {
    "swizzle": 2,
    "elem_size": 2,
    "elem_type": 6,
    "block_size": [16, 16],
    "fp4_padded": False,
}


class Gpu:
    """Triton's driver of an H100 that is not here. ``records``: (compiled kernel, what its C
    function was given).
    """

    def __init__(self) -> None:
        self.device, self.stream, self.scratch = -1, 7, 0
        self.records: list[tuple[Any, tuple[Any, ...]]] = []
        self.descriptors: dict[int, str] = {}
        fill = {"fill_tma_descriptor": self._fill, "fill_tma_descriptor_tiled": self._fill}
        self.utils = SimpleNamespace(**fill)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return self.stream

    def _fill(self, address: int, *rest: Any) -> tuple[Any, ...]:
        return ("map", address, *(tuple(x) if isinstance(x, list | tuple) else x for x in rest))

    def compiled(self, function: Any, signature: dict[str, str]) -> Any:
        """What Triton's compiler would have left, up to the machine code."""
        made: Any = object.__new__(CompiledKernel)
        launcher: Any = object.__new__(nvidia.CudaLauncher)

        def write_down(*given: Any) -> None:
            self.records.append((made, given))

        described = [s for s in signature.values() if str(s).startswith("tensordesc")]
        launcher.launch = nvidia.wrap_handle_tensordesc(
            write_down, signature, [MAPS for _ in described]
        )
        launcher.num_ctas, launcher.launch_cooperative_grid, launcher.launch_pdl = 1, False, False
        launcher.global_scratch_size = launcher.profile_scratch_size = self.scratch
        launcher.global_scratch_align = launcher.profile_scratch_align = 1
        launcher.arg_annotations, launcher.kernel_signature = [id(made)], b"signature"
        made.module, made.function, made.src, made.name = 1, id(made), None, function.__name__
        made.packed_metadata, made._run = (4, 1, 0), launcher
        return made

    def last(self) -> tuple[Any, ...]:
        """The last record, with addresses for tensors and nothing for hooks that have no calls."""
        made, given = self.records[-1]
        return made, _plain(given)


def _plain(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x.data_ptr()
    if isinstance(x, list | tuple):
        return tuple(map(_plain, x))
    return None if type(x).__name__ in ("LazyDict", "HookChain") else x


def installed(monkeypatch: pytest.MonkeyPatch, made: Gpu | None = None) -> Gpu:
    """A GPU that Triton launches on, and compiles for."""
    made = made or Gpu()

    def compiles(self: Any, key: Any, signature: Any, device: int, *_: Any) -> Any:
        built = made.compiled(self.fn, signature)
        self.device_caches[device][0][key] = built
        return built

    monkeypatch.setattr(driver, "_active", made)
    monkeypatch.setattr(JITFunction, "_do_compile", compiles)
    return made
