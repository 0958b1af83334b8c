"""What path triton launches is built for GPUs that are not here: the interpreter accepts what the
compiler refuses.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import nsa.ops

OPS = Path(nsa.ops.__file__).parent
# CUDA C++ Programming Guide: most that a block may have (163, 99 and 227 KB)
SHARED_BYTES = {80: 166_912, 89: 101_376, 90: 232_448}
# warp roles, of rows that a 128-byte swizzle holds
HOPPER_ONLY = {"nsa_selected_forward_roles", "nsa_selected_backward_roles"}


def launched() -> set[str]:
    """Every jitted function that is named for the profiler, and so launched; the others are parts
    of those.
    """
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in OPS.glob("**/*.py")]
    return {
        node.name
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("nsa_")
    }


# where the best tiles of the compressed branch's dQ are not the window's, dQ takes two launches
TWO_OF_DQ = {(90, "B"), (90, "odd")}
Built = subprocess.CompletedProcess[str]
BUILDS = [(90, "A"), (90, "B"), (90, "odd"), (80, "A"), (80, "B"), (89, "B")]


def build(arch: int, shape: str) -> Built:
    command = [
        "env",
        "-u",
        "TRITON_INTERPRET",
        sys.executable,
        "-m",
        "tests.nsa.gpu_build",
        str(arch),
        shape,
    ]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=OPS.parents[1], timeout=7200, check=False
    )


@pytest.fixture(scope="module")
def built(request: pytest.FixtureRequest) -> Iterator[Callable[[int, str], Built]]:
    """Two at a time, since a build takes half a minute of one core; pytest-xdist has two workers of
    its own.
    """
    if hasattr(request.config, "workerinput"):
        yield build
        return
    with ThreadPoolExecutor(2) as pool:
        found = {one: pool.submit(build, *one) for one in BUILDS}
        yield lambda *one: found[one].result()


@pytest.mark.parametrize(("arch", "shape"), BUILDS)
def test_everything_launched_is_built_and_fits(
    arch: int, shape: str, built: Callable[[int, str], Built]
) -> None:
    done = built(arch, shape)
    assert done.returncode == 0, done.stderr[-3000:]
    built = [line.split() for line in done.stdout.splitlines()]
    served = arch == 90 and shape in ("A", "B")
    not_launched = set() if served else HOPPER_ONLY
    if (arch, shape) in TWO_OF_DQ:
        not_launched = not_launched | {"nsa_interval_backward_q_both"}
    assert {name for name, _ in built} == launched() - not_launched
    too_large = {name: shared for name, shared in built if int(shared) > SHARED_BYTES[arch]}
    assert not too_large, f"more shared memory than an SM {arch / 10} gives a block"
