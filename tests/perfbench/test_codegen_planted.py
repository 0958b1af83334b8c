"""Faults that are planted in a copy of nsa, compiled for SM 9.0 on this CPU, are found by name."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from nsa.routing.cards import CARDS
from perfbench.codegen.baseline import CodeBaseline
from perfbench.codegen.building import build_all
from perfbench.codegen.judging import CodeFinding, judge_code
from perfbench.codegen.nouns import CompiledKernels
from perfbench.codegen.pages import code_markdown, code_text
from perfbench.commands.codegen_annotations import code_annotations
from perfbench.errors import Exit

ROOT = Path(__file__).parents[2]
BUILDS = (("9.0", "A"),)
# kernel -> (file, what is there, what is planted): registers that do not suffice, a tile of fewer
# rows than a wgmma multiplies, and rows twice as wide for each thread
PLANTS = {
    "nsa_selected_forward": (
        "nsa/ops/selected/triton/tile_sizes.py",
        "FORWARD = (Tiles(64, 4, 3),",
        "FORWARD = (Tiles(64, 4, 3, max_registers=64),",
    ),
    "nsa_scores": (
        "nsa/ops/scores/kernels.py",
        '{"BM": 64, "BC": 128, "num_warps": 4, "num_stages": 4}',
        '{"BM": 32, "BC": 128, "num_warps": 4, "num_stages": 4}',
    ),
    "nsa_gated_sum": ("nsa/ops/gated_sum/kernels.py", "R, BDV, num_warps=4", "R, BDV, num_warps=2"),
}
# where the kernel is defined, which its finding names, if that is another file
DEFINED = {"nsa_selected_forward": "nsa/ops/selected/triton/forward_kernels.py"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[CompiledKernels, CompiledKernels]:
    """Those three kernels of this nsa, and of the copy."""
    copy = tmp_path_factory.mktemp("planted")
    shutil.copytree(ROOT / "nsa", copy / "nsa", ignore=shutil.ignore_patterns("__pycache__"))
    for name, old, new in PLANTS.values():
        text = (copy / name).read_text(encoding="utf-8")
        assert text.count(old) == 1, f"{name}: plant the fault anew"
        (copy / name).write_text(text.replace(old, new), encoding="utf-8")
    kernels = tuple(PLANTS)
    with pytest.MonkeyPatch().context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.chdir(ROOT)  # `python -m` takes nsa from the folder that it is started in
        clean = build_all(BUILDS, kernels=kernels, jobs=1)
        patch.chdir(copy)
        planted = build_all(BUILDS, kernels=kernels, jobs=1)
    assert not clean.failed and not planted.failed
    return clean, planted


@pytest.fixture(scope="module")
def found(built: tuple[CompiledKernels, CompiledKernels]) -> dict[str, CodeFinding]:
    clean, planted = built
    baseline = CodeBaseline(Path("triton-x.txt"), clean.toolchain, clean.code)
    assert judge_code(clean, baseline).exit_code is Exit.OK
    judged = judge_code(planted, baseline)
    assert judged.exit_code is Exit.REGRESSED
    for page in (code_text, code_markdown):
        assert all(
            name.replace("_", r"\_") in page(judged, planted.toolchain)
            or name in page(judged, planted.toolchain)
            for name in PLANTS
        )
    lines = code_annotations(judged)
    for name, (file, _, _) in PLANTS.items():
        defined = DEFINED.get(name, file)
        assert any(f"file={defined},line=" in line and name in line for line in lines), lines
    return {str(one.variant).split()[0]: one for one in judged.findings if one.variant}


@pytest.mark.parametrize(
    ("kernel", "variant", "word"),
    [
        ("nsa_selected_forward", "A.lists", "a spill: 0 -> "),
        ("nsa_scores", "A.choice", "lost wgmma: "),
        ("nsa_gated_sum", "A.gates", "registers "),
    ],
)
def test_a_planted_fault_is_red_by_the_kernels_name(
    kernel: str, variant: str, word: str, found: dict[str, CodeFinding]
) -> None:
    finding = found[kernel]
    assert finding.variant is not None
    assert finding.variant.name.startswith(variant) and finding.variant.sm == "9.0"
    assert word in finding.reason and finding.changes
    assert set(found) == set(PLANTS)


def test_every_architecture_that_is_compiled_is_a_known_card() -> None:
    from perfbench.worker.codegen import ARCHITECTURES

    assert all(tuple(map(int, one.split("."))) in CARDS for one in ARCHITECTURES)
