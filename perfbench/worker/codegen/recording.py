"""Triton without a GPU: each launch compiles its kernel down to machine code and launches nothing.

Triton keeps what it compiled under a hash of the kernel's source, all that it calls, its arguments,
the options, Triton itself and ptxas (TRITON_CACHE_DIR). All numbers are read from the machine code,
so they are those of the code that a launch on the card would take.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas_version
from triton.errors import TritonError
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from perfbench.worker.codegen.cubin import read_cubin

Emit = Callable[[dict[str, Any]], None]
_RELEASE = re.compile(r"V(\d+(?:\.\d+)+)")


class AbsentGpu:
    """Triton's driver of a GPU that is not here. Its number is the architecture's, so that what was
    compiled for another one is not taken for it.
    """

    def __init__(self, sm: str) -> None:
        self._capability = int(sm.replace(".", ""))

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability

    def get_current_stream(self, device: int) -> int:
        return 0


class CodeRecorder:
    """What is launched between `start` and the next one, each variant once.

    A variant is a kernel in a case of a shape; another of the same case gets #2. What differs from
    none before in what Triton hashes is no variant.
    """

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._run: Any = JITFunction.run
        self._prefix = self._case = ""
        self._kernels, self._skip = list[str](), frozenset[str]()
        self._hashes: set[str] = set()
        self._names: set[tuple[str, str]] = set()
        recorder = self

        def build(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
            recorder.compile(kernel, args, grid, options)

        JITFunction.run = build

    def start(self, sm: str, prefix: str, kernels: list[str], skip: frozenset[str]) -> None:
        """From now on ``kernels``, globs, are compiled for ``sm`` as variants of ``prefix``, but
        not those of ``skip``, 'kernel variant'.
        """
        driver.set_active(AbsentGpu(sm))
        self._prefix, self._kernels, self._skip = prefix, kernels, skip
        self._hashes.clear()
        self._names.clear()

    def at(self, case: str) -> None:
        """What is launched from now on is a variant of ``case``."""
        self._case = case

    def compile(
        self, kernel: Any, args: tuple[Any, ...], grid: Any, options: dict[str, Any]
    ) -> None:
        """Compile one launch and emit its numbers, or why it does not compile."""
        name = kernel.fn.__name__
        if not any(fnmatchcase(name, one) for one in self._kernels):
            return
        variant = self._named(name)
        if f"{name} {variant}" in self._skip:
            self._names.add((name, variant))
            return
        known = {"kernel": name, "variant": variant, "source": _source(kernel.fn)}
        self._emit({"event": "begin", **known})
        try:
            built = self._run(kernel, *args, grid=grid, warmup=True, **options)
        except (TritonError, RuntimeError) as error:
            self._names.add((name, variant))
            self._emit({"event": "failed", **known, "reason": one_line(str(error))})
            return
        if built.hash in self._hashes:
            return
        self._hashes.add(built.hash)
        self._names.add((name, variant))
        numbers = read_cubin(built.asm["cubin"])
        self._emit(
            {
                "event": "built",
                **known,
                "warps": built.metadata.num_warps,
                "registers": numbers.registers,
                "stack": numbers.stack,
                "shared": built.metadata.shared,
                "code": numbers.code,
                **numbers.counts,
            }
        )

    def _named(self, kernel: str) -> str:
        name = base = f"{self._prefix}.{self._case}"
        number = 1
        while (kernel, name) in self._names:
            number += 1
            name = f"{base}#{number}"
        return name


def versions(sm: str) -> dict[str, str]:
    """Of Triton, and of the ptxas that it takes for ``sm``."""
    text = get_ptxas_version(int(sm.replace(".", "")))
    found = _RELEASE.search(text)
    return {"triton": triton.__version__, "ptxas": found[1] if found else text.split()[-1]}


def one_line(message: str) -> str:
    """What a compiler said, in one line: ptxas' first error, of its crash the first words, else
    the last.
    """
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    for line in lines:
        if re.match(r"ptxas .*(error|fatal)", line):
            return re.sub(r"\S*/(?=[^/\s]*\.ptx)", "", line)
    if any(line.startswith("Repro command") for line in lines):
        return lines[0]
    return lines[-1] if lines else "it failed without a word"


def _source(function: Any) -> str:
    """'nsa/ops/means/kernels.py:21', relative to where the package lies; the first line is that of
    the decorator.
    """
    root = Path(sys.modules[function.__module__.partition(".")[0]].__file__ or "").parents[1]
    path = Path(inspect.getfile(function))
    shown = path.relative_to(root) if path.is_relative_to(root) else path
    return f"{shown.as_posix()}:{function.__code__.co_firstlineno}"
