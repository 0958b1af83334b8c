"""What path triton launches is built for GPUs that are not here: the interpreter accepts what the compiler refuses."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import nsa.ops

KERNELS = Path(nsa.ops.__file__).parent / "kernels"
SHARED_BYTES = {80: 166_912, 90: 232_448}  # CUDA C++ Programming Guide: most that a block may have (163 and 227 KB)


def launched() -> set[str]:
    """Every jitted function that is named for the profiler, and so launched; the others are parts of those."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in KERNELS.glob("*.py")]
    return {node.name for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("nsa_")}


@pytest.mark.parametrize(("arch", "shape"), [(90, "A"), (90, "B"), (90, "odd"), (80, "A"), (80, "B")])
def test_everything_launched_is_built_and_fits(arch: int, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    command = [sys.executable, "-m", "tests.nsa.gpu_build", str(arch), shape]
    done = subprocess.run(command, capture_output=True, text=True, cwd=KERNELS.parents[2], timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    built = [line.split() for line in done.stdout.splitlines()]
    assert {name for name, _ in built} == launched()
    too_large = {name: shared for name, shared in built if int(shared) > SHARED_BYTES[arch]}
    assert not too_large, f"more shared memory than an SM {arch / 10} gives a block"
