"""Compiles the chosen variants in child processes, several side by side."""

from __future__ import annotations

import ast
import json
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from threading import Lock
from typing import IO, Any

import nsa
from perfbench.codegen.nouns import NUMBERS, CompiledKernels, KernelVariant, MachineCode, Toolchain
from perfbench.errors import Exit, PerfbenchError
from perfbench.machine import compiling_environment
from perfbench.text import shorten
from perfbench.worker.codegen import ARCHITECTURES, BUILDS, COMPILER

SmAndShape = tuple[str, str]
BuildProgress = Callable[[str], None]
MAX_DEATHS = 5  # of compilers in one build, after which it is given up
_TAIL_BYTES = 4096


def chosen_builds(architectures: Sequence[str] | None) -> tuple[SmAndShape, ...]:
    """The builds of these architectures, all by default; USAGE for one that none is for."""
    chosen = tuple(one.removeprefix("sm_") for one in architectures or ARCHITECTURES)
    for one in chosen:
        if one not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise PerfbenchError(
                Exit.USAGE, f"--arch {one!r} is not compiled for. Next: one of {known}"
            )
    return tuple(one for one in BUILDS if one[0] in chosen)


def chosen_kernels(globs: Sequence[str] | None) -> tuple[str, ...]:
    """``globs``, all by default; USAGE, before anything is compiled, where none of them fits a
    kernel of nsa by its source. One that fits may still be launched nowhere.
    """
    chosen = tuple(globs or ("*",))
    if globs and not any(fnmatchcase(name, one) for name in _kernel_names() for one in chosen):
        raise _fits_none(chosen)
    return chosen


def _kernel_names() -> Iterator[str]:
    """Every function of nsa that Triton compiles; read, not imported."""
    (home,) = nsa.__path__
    for path in sorted(Path(home).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if ".jit" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and any(map(_is_jit, node.decorator_list)):
                yield node.name


def _is_jit(decorator: ast.expr) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return isinstance(called, ast.Attribute) and called.attr == "jit"


def _fits_none(kernels: Sequence[str]) -> PerfbenchError:
    return PerfbenchError(
        Exit.USAGE,
        f"--kernel {' '.join(kernels)!r} fits no kernel that is launched. Next: a glob such as"
        " 'nsa_interval_*'",
    )


def build_all(
    builds: Sequence[SmAndShape],
    *,
    kernels: Sequence[str] = ("*",),
    jobs: int = 2,
    progress: BuildProgress | None = None,
    compiler: Sequence[str] = (COMPILER,),
) -> CompiledKernels:
    """Compile every variant of ``builds`` whose kernel fits one of the globs ``kernels``, in
    ``jobs`` processes, each the module ``compiler`` with its arguments. What does not compile is in
    ``failed``.

    USAGE where no kernel fits. ENVIRONMENT where the compiler's process cannot start, e.g. because
    Triton is not installed.
    """
    work = _Work(deque(builds), kernels, progress or (lambda text: None), compiler)
    with ThreadPoolExecutor(min(max(1, jobs), len(builds))) as pool:
        running = [pool.submit(work.run) for _ in range(min(max(1, jobs), len(builds)))]
        try:
            for one in running:
                one.result()
        finally:  # after Ctrl-C the others would go on to the end
            work.stop()
    if work.problem is not None:
        raise work.problem
    if not work.code and not work.failed:
        raise _fits_none(kernels)
    return CompiledKernels(Toolchain(work.triton, work.ptxas), work.code, work.failed, work.sources)


@dataclass
class _Work:
    """What is left to build, and what was found; shared by threads, each with its process."""

    waiting: deque[SmAndShape]
    kernels: Sequence[str]
    progress: BuildProgress
    compiler: Sequence[str]
    triton: str = ""
    ptxas: dict[str, str] = field(default_factory=dict)
    code: dict[KernelVariant, MachineCode] = field(default_factory=dict)
    failed: dict[KernelVariant, str] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    problem: PerfbenchError | None = None
    stopped: bool = False
    deaths: int = 0
    _lock: Lock = field(default_factory=Lock)
    _processes: set[subprocess.Popen[str]] = field(default_factory=set)

    def run(self) -> None:
        """Build until nothing is left, in a process that is started again where it dies."""
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
            process: subprocess.Popen[str] | None = None
            while (build := self._next()) is not None:
                died: list[KernelVariant] = []
                while self.problem is None and not self.stopped:
                    process = process or self._start(errors)
                    at = self._build(process, build, died)
                    if at is None:
                        break
                    self._died(process, errors, at)
                    process = None
                    died += [at] if isinstance(at, KernelVariant) and at in self.failed else []
            if process is not None:
                self._end(process)

    def stop(self) -> None:
        """End every process; what is waiting is dropped."""
        with self._lock:
            self.stopped = True
            self.waiting.clear()
            for process in self._processes:
                process.kill()

    def _next(self) -> SmAndShape | None:
        with self._lock:
            return self.waiting.popleft() if self.waiting and self.problem is None else None

    def _start(self, errors: IO[str]) -> subprocess.Popen[str]:
        errors.seek(0)
        errors.truncate()
        process = subprocess.Popen(
            [sys.executable, "-m", *self.compiler],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=compiling_environment(),
        )
        with self._lock:
            self._processes.add(process)
        return process

    def _end(self, process: subprocess.Popen[str]) -> int:
        assert process.stdin is not None and process.stdout is not None
        for pipe in (process.stdin, process.stdout):
            try:
                pipe.close()
            except BrokenPipeError:
                continue
        status = process.wait()
        with self._lock:
            self._processes.discard(process)
        return status

    def _build(
        self, process: subprocess.Popen[str], build: SmAndShape, skip: Sequence[KernelVariant]
    ) -> KernelVariant | str | None:
        """None when it is done; where the process ended, the variant at which it did, or ''."""
        assert process.stdin is not None and process.stdout is not None
        sm, shape = build
        names = [f"{one.kernel} {one.name}" for one in skip]
        job = {"sm": sm, "shape": shape, "kernels": [*self.kernels], "skip": names}
        try:
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            return ""
        at: KernelVariant | None = None
        for line in process.stdout:
            answer = json.loads(line)
            if answer["event"] == "done":
                self.progress(f"SM {sm}, shape {shape}: built")
                return None
            at = self._note(answer, sm)
        return at or ""

    def _note(self, answer: dict[str, Any], sm: str) -> KernelVariant | None:
        """Keep an answer; the variant that is being compiled, if one is."""
        with self._lock:
            if answer["event"] == "versions":
                self.triton, self.ptxas[sm] = answer["triton"], answer["ptxas"]
                return None
            variant = KernelVariant(answer["kernel"], answer["variant"], sm)
            self.sources[variant.kernel] = answer["source"]
            if answer["event"] == "failed":
                self.failed[variant] = shorten(answer["reason"], 300)
            elif answer["event"] == "built":
                self.code[variant] = MachineCode(*(answer[name] for name in NUMBERS))
            return variant if answer["event"] == "begin" else None

    def _died(
        self, process: subprocess.Popen[str], errors: IO[str], at: KernelVariant | str
    ) -> None:
        """A compiler that crashes fails the variant; one that never began one is a problem of this
        machine. One that was killed, as where memory runs out, is started again for the same.
        """
        status = self._end(process)
        killed = status == -signal.SIGKILL
        how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        errors.seek(max(0, errors.seek(0, 2) - _TAIL_BYTES))
        said = [line.strip() for line in errors.read().splitlines() if line.strip()]
        last = shorten(said[-1], 200) if said else "it said nothing"
        with self._lock:
            self.deaths += 1
            began = isinstance(at, KernelVariant) and self.deaths <= MAX_DEATHS
            if isinstance(at, KernelVariant) and began and not killed:
                self.failed[at] = f"the compiler ended with {how}: {last}"
            elif self.problem is None and not began and not self.stopped:
                again = f"{sys.executable} -m {self.compiler[0]} < /dev/null"
                self.problem = PerfbenchError(
                    Exit.ENVIRONMENT,
                    f"the process that compiles ended with {how}: {last}. Next:"
                    f" {'perfbench codegen --jobs 1' if killed else again}",
                )
