"""The committed baseline of machine code: every kernel that nsa launches is in it, and what it
holds can be launched.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

import pytest

from nsa.ops.kernels.tiles import card_class
from perfbench.codegen.baseline import read_baseline_file
from perfbench.codegen.judging import resident
from perfbench.codegen.nouns import KernelVariant, MachineCode
from perfbench.worker.codegen import ARCHITECTURES, BUILDS

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "reports" / "baselines" / "codegen").glob("*.txt"))
# warp roles, of rows that a 128-byte swizzle holds
HOPPER_ONLY = {
    "nsa_interval_backward_kv_roles",
    "nsa_interval_forward_roles",
    "nsa_scores_roles",
    "nsa_selected_backward_roles",
    "nsa_selected_forward_roles",
}


def kernels_of(trees: Iterable[ast.Module]) -> set[str]:
    """Jitted functions, of Triton or Gluon, that no jitted function mentions: the host alone can
    launch them. Those that `launch(...)` is given are among them, whatever mentions them.
    """
    jitted: list[ast.FunctionDef] = []  # helpers of different files share names
    launched: set[str] = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and any(
                ast.unparse(one).partition("(")[0].endswith(".jit") for one in node.decorator_list
            ):
                jitted.append(node)
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("launch"):
                names = (part for word in node.args[:1] for part in ast.walk(word))
                launched |= {
                    part.attr if isinstance(part, ast.Attribute) else part.id
                    for part in names
                    if isinstance(part, ast.Attribute | ast.Name)
                }
    mentioned = {
        part.id if isinstance(part, ast.Name) else part.attr
        for node in jitted
        for statement in node.body
        for part in ast.walk(statement)
        if isinstance(part, ast.Name | ast.Attribute)
        if (part.id if isinstance(part, ast.Name) else part.attr) != node.name
    }
    names = {node.name for node in jitted}
    return (names - mentioned) | (launched & names)


def of_file(path: Path) -> dict[KernelVariant, MachineCode]:
    return dict(read_baseline_file(path).code)


def test_kernels_are_found_by_what_is_launched() -> None:
    text = """
@triton.jit
def part(x): ...
@triton.jit(repr=name)
def one(x): part(x)
@gluon.jit
def two(x): gl.warp_specialize([(helper, (x,))])
@gluon.jit
def helper(x): ...
@triton.jit
def three(x): ...
@triton.jit
def four(x): three(x)
def forward(): launch(module.three, (1,), x)
"""
    assert kernels_of([ast.parse(text)]) == {"one", "two", "three", "four"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_kernel_that_is_launched_has_a_line_on_every_card(path: Path) -> None:
    trees = [ast.parse(one.read_text(encoding="utf-8")) for one in ROOT.glob("nsa/**/*.py")]
    wanted = kernels_of(trees)
    assert len(wanted) >= 36 and wanted > HOPPER_ONLY
    found = of_file(path)
    for sm in ARCHITECTURES:
        names = {one.kernel for one in found if one.sm == sm}
        lost = wanted - names - (set() if sm == "9.0" else HOPPER_ONLY)
        assert not lost, f"perfbench/worker/codegen/cases.py does not launch {lost} on SM {sm}"
        assert not names - wanted, "perfbench codegen --update"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_it_holds_can_be_launched(path: Path) -> None:
    """On every card, in every shape, and with tensor cores where the products are."""
    found = of_file(path)
    assert {(one.sm, shape) for one in found for shape in _shapes(one)} == set(BUILDS)
    for one, code in found.items():
        major, minor = map(int, one.sm.split("."))
        assert code.shared <= card_class((major, minor)).shared_bytes, one
        assert 16 <= code.registers <= 255 and resident(one.sm, code) >= 1, one
        multiplies = code.mma + code.wgmma + code.tcgen05
        assert multiplies or not _multiplies(one.kernel), one
        assert not code.wgmma or major == 9, one
        assert not code.tcgen05 or major == 10, one


def _shapes(one: KernelVariant) -> list[str]:
    """The longest name of a shape that the variant's begins with."""
    return sorted((s for _, s in BUILDS if one.name.startswith(f"{s}.")), key=len)[-1:]


def _multiplies(kernel: str) -> bool:
    words = ("forward", "backward_q", "backward_kv", "scores", "backward_tiles")
    return any(word in kernel for word in words)


def test_the_pinned_triton_has_a_baseline() -> None:
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    (version,) = (
        line.split("==")[1].split(" ")[0]
        for line in pins.splitlines()
        if line.startswith("triton==")
    )
    assert f"triton-{version}.txt" in {path.name for path in FILES}
