"""A kernel variant and what its machine code takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields


@dataclass(frozen=True, slots=True)
class KernelVariant:
    """``name``: shape and case, such as 'A.window.copy'. ``sm``: '9.0'."""

    kernel: str
    name: str
    sm: str

    @property
    def order(self) -> tuple[str, str, float]:
        """Where its line stands in a baseline."""
        return self.kernel, self.name, float(self.sm)

    def __str__(self) -> str:
        return f"{self.kernel} {self.name} SM {self.sm}"


@dataclass(frozen=True, slots=True)
class MachineCode:
    """What one compiled variant takes. Of a thread: ``registers``, ``stack`` (bytes of local
    memory), and the instructions that store to it and load from it; of a program: ``warps`` and
    ``shared`` (bytes). ``tcgen05``, ``wgmma`` and ``mma`` count tensor-core instructions, ``code``
    the bytes of all.
    """

    warps: int
    registers: int
    stores: int
    loads: int
    stack: int
    shared: int
    tcgen05: int
    wgmma: int
    mma: int
    code: int


NUMBERS = tuple(one.name for one in fields(MachineCode))


@dataclass(frozen=True, slots=True)
class Toolchain:
    """Triton's version, and of ptxas that for each architecture."""

    triton: str
    ptxas: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class CompiledKernels:
    """What was built: numbers, or in one line why there are none. ``sources``: where each kernel is
    defined, 'nsa/ops/means/kernels.py:21'.
    """

    toolchain: Toolchain
    code: Mapping[KernelVariant, MachineCode]
    failed: Mapping[KernelVariant, str] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
