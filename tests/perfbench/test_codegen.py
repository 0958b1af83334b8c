"""`perfbench codegen`: its rules, its file, its pages, and what it makes of compilers that fail."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from perfbench.codegen import building
from perfbench.codegen.baseline import (
    CodeBaseline,
    find_baseline,
    merged,
    read_baseline_file,
    write_baseline_file,
)
from perfbench.codegen.building import chosen_kernels
from perfbench.codegen.judging import judge_code, resident
from perfbench.codegen.nouns import CompiledKernels, KernelVariant, MachineCode, Toolchain
from perfbench.codegen.pages import code_markdown, code_text
from perfbench.commands import app
from perfbench.commands.codegen_annotations import code_annotations
from perfbench.errors import Exit, PerfbenchError
from perfbench.records import Verdict
from tests.perfbench import stub_compiler

STUB = "tests.perfbench.stub_compiler"
BASELINES = Path(__file__).parents[2] / "reports" / "baselines" / "codegen"
ONE = KernelVariant("nsa_one", "A.case", "9.0")
TWO = KernelVariant("nsa_two", "A.case", "8.0")
CODE = MachineCode(
    warps=8,
    registers=120,
    stores=2,
    loads=3,
    stack=16,
    shared=4096,
    tcgen05=0,
    wgmma=24,
    mma=4,
    code=640,
)
TOOLS = Toolchain("3.7.1", {"8.0": "12.9.86", "9.0": "12.9.86"})
BEFORE = CodeBaseline(Path("triton-3.7.1.txt"), TOOLS, {ONE: CODE, TWO: CODE})


def built(one: MachineCode = CODE, tools: Toolchain = TOOLS) -> CompiledKernels:
    return CompiledKernels(tools, {ONE: one, TWO: CODE}, {}, {"nsa_one": "nsa/one.py:7"})


@pytest.mark.parametrize(
    ("change", "verdict", "word"),
    [
        ({"stack": 24}, Verdict.REGRESSED, "a larger spill: 16 -> 24 bytes"),
        ({"loads": 4}, Verdict.REGRESSED, "3 -> 4 loads"),
        ({"wgmma": 20, "mma": 8}, Verdict.REGRESSED, "lost wgmma: 24 -> 20"),
        ({"mma": 3}, Verdict.REGRESSED, "lost mma: 4 -> 3"),
        ({"wgmma": 32, "mma": 0}, Verdict.WATCH, "within the limits"),
        ({"registers": 132}, Verdict.REGRESSED, "registers 120 -> 132 (+10 %)"),
        # 8 warps of 128 registers are half of a multiprocessor's, of 136 more than half
        ({"registers": 128}, Verdict.WATCH, "within the limits"),
        ({"registers": 129}, Verdict.REGRESSED, "2 -> 1 programs on a multiprocessor"),
        ({"shared": 120 * 1024}, Verdict.REGRESSED, "2 -> 1 programs on a multiprocessor"),
        ({"shared": 227 * 1024 + 1}, Verdict.FAILED, "it cannot be launched"),
        ({"registers": 96, "stack": 0}, Verdict.WATCH, "within the limits"),
        ({"code": 1280}, Verdict.WATCH, "within the limits"),
    ],
)
def test_what_got_worse_is_red_with_its_numbers(
    change: dict[str, int], verdict: Verdict, word: str
) -> None:
    judged = judge_code(built(replace(CODE, **change)), BEFORE)
    finding = judged.findings[0]
    assert (finding.verdict, finding.variant) == (verdict, ONE) and word in finding.reason
    assert judged.verdict is verdict
    assert judged.num_same == 1
    name, number = next(iter(change.items()))
    if finding.before is not None:
        assert f"{name} {getattr(CODE, name)} -> {number}" in finding.changes


def test_the_first_spill_is_said_to_be_one() -> None:
    dry = replace(CODE, stores=0, loads=0, stack=0)
    judged = judge_code(built(CODE), replace(BEFORE, code={ONE: dry, TWO: CODE}))
    assert judged.findings[0].reason.startswith("a spill: 0 -> 16 bytes a thread, 0 -> 2 stores")


def test_nothing_changed_is_green_and_counted() -> None:
    judged = judge_code(built(), BEFORE, strict=True)
    assert (judged.exit_code, judged.findings, judged.num_same) == (Exit.OK, (), 2)


def test_a_kernel_that_is_gone_is_missing_and_one_that_is_new_is_news() -> None:
    gone = judge_code(CompiledKernels(TOOLS, {TWO: CODE}), BEFORE)
    assert gone.exit_code is Exit.FAILED
    assert [(one.verdict, one.variant) for one in gone.findings] == [(Verdict.MISSING, ONE)]
    assert "--update" in gone.findings[0].reason
    one_sm = Toolchain("3.7.1", {"8.0": "12.9.86"})
    for tools, kernels in ((TOOLS, ("nsa_tw*",)), (one_sm, ("*",))):
        judged = judge_code(CompiledKernels(tools, {TWO: CODE}), BEFORE, kernels=kernels)
        assert not judged.findings, "nobody asked for the other one"
    few = replace(BEFORE, code={TWO: CODE})
    for strict, code in ((False, Exit.OK), (True, Exit.STRICT)):
        judged = judge_code(built(), few, strict=strict)
        assert [(one.verdict, one.variant) for one in judged.findings] == [(Verdict.NEW, ONE)]
        assert judged.exit_code is code


def test_other_compilers_are_not_compared() -> None:
    worse = replace(CODE, registers=255)
    newer = Toolchain("3.8.0", TOOLS.ptxas)
    judged = judge_code(built(worse, newer), BEFORE)
    (only,) = judged.findings
    assert only.verdict is Verdict.INCOMPARABLE and judged.exit_code is Exit.ENVIRONMENT
    assert "triton 3.8.0 here, 3.7.1 in" in only.reason and "--update" in only.reason
    other = Toolchain("3.7.1", {"8.0": "12.9.86", "9.0": "13.1.80"})
    judged = judge_code(built(worse, other), BEFORE)
    (only,) = judged.findings
    assert "SM 9.0: ptxas 13.1.80 here, 12.9.86 in" in only.reason and judged.num_same == 1
    judged = judge_code(built(), None)
    assert judged.exit_code is Exit.BASELINE and "--update" in judged.findings[0].reason


def test_programs_of_a_multiprocessor() -> None:
    """CUDA's occupancy calculator: 128 registers of 128 threads leave room for 4, of 1 KB of shared
    memory and 32 registers only the warps (or 24 programs) count.
    """
    small = replace(CODE, warps=4, registers=128, shared=0)
    assert resident("9.0", small) == 4
    assert resident("8.9", replace(small, registers=32)) == 12
    assert resident("9.0", replace(small, registers=32)) == 16
    assert resident("8.9", replace(small, warps=1, registers=16)) == 24
    assert resident("8.0", replace(small, shared=81 * 1024)) == 2


def test_the_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "codegen" / "triton-3.7.1.txt"
    write_baseline_file(replace(BEFORE, path=path))
    assert read_baseline_file(path) == replace(BEFORE, path=path)
    assert find_baseline(path.parent, "3.7.1") == replace(BEFORE, path=path)
    other = find_baseline(path.parent, "3.6.0")
    assert other is not None and other.toolchain.triton == "3.7.1"
    assert find_baseline(tmp_path, "3.7.1") is None
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[-2:] == [
        "nsa_one A.case 9.0 8 120 2 3 16 4096 0 24 4 640",
        "nsa_two A.case 8.0 8 120 2 3 16 4096 0 24 4 640",
    ]


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text.replace(" 640", ""),
        lambda text: text.replace("120", "-1"),
        lambda text: text + text.splitlines()[-1] + "\n",
        lambda text: text.replace("triton 3.7.1", ""),
        lambda text: text.replace("9.0=12.9.86", ""),
        lambda text: text + "<<<<<<< HEAD\n",
    ],
)
def test_a_damaged_file_is_refused_with_the_next_step(
    damage: Callable[[str], str], tmp_path: Path
) -> None:
    path = tmp_path / "triton-3.7.1.txt"
    write_baseline_file(replace(BEFORE, path=path))
    path.write_text(damage(path.read_text(encoding="utf-8")), encoding="utf-8")
    with pytest.raises(PerfbenchError, match=r"triton-3\.7\.1\.txt.*wanted.*--update") as refused:
        read_baseline_file(path)
    assert refused.value.exit_code is Exit.BASELINE


def test_an_update_of_a_part_keeps_the_rest() -> None:
    worse = replace(CODE, registers=255)
    half = CompiledKernels(Toolchain("3.7.1", {"9.0": "12.9.86"}), {ONE: worse})
    made = merged(half, BEFORE, Path("."))
    assert made.code == {ONE: worse, TWO: CODE} and made.toolchain.ptxas == TOOLS.ptxas
    assert merged(half, BEFORE, Path("."), part=True).code == made.code
    whole = CompiledKernels(TOOLS, {ONE: worse})
    assert merged(whole, BEFORE, Path(".")).code == {ONE: worse}, "the other one is gone"
    assert merged(whole, BEFORE, Path("."), part=True).code == made.code
    for tools in (Toolchain("3.8.0", TOOLS.ptxas), Toolchain("3.7.1", {"9.0": "13.1.80"})):
        with pytest.raises(PerfbenchError, match="--kernel would leave it with a few"):
            merged(replace(half, toolchain=tools), BEFORE, Path("."), part=True)


def test_pages_name_the_kernel_and_break_nowhere() -> None:
    judged = judge_code(built(replace(CODE, registers=255, code=1)), BEFORE)
    text, page = code_text(judged, TOOLS), code_markdown(judged, TOOLS)
    assert "REGRESSED (exit 3): 1 of 2 variants are as in the baseline, 1 red" in text
    assert "REGRESSED    nsa_one A.case SM 9.0: registers 120 -> 255 (+112 %)" in text
    assert "triton 3.7.1, ptxas 12.9.86 for SM 8.0, 9.0" in text
    assert "| REGRESSED | `nsa_one` | `A.case` | 9.0 |" in page
    (line,) = code_annotations(judged)
    assert line.startswith("::error file=nsa/one.py,line=7,title=perfbench codegen%3A REGRESSED")
    many = {KernelVariant("nsa_one", f"A.{n}", "9.0"): CODE for n in range(30)}
    worse = {one: replace(CODE, stack=99) for one in many}
    judged = judge_code(CompiledKernels(TOOLS, worse), replace(BEFORE, code=many))
    assert len(code_annotations(judged)) == 10
    assert "and 10 more" in code_text(judged, TOOLS)
    assert code_markdown(judged, TOOLS).count("| REGRESSED |") == 30


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, ...]]:
    """`perfbench codegen` with the stub as its compiler."""

    def invoke(what: str, *words: str) -> int:
        given = building.build_all.__kwdefaults__
        monkeypatch.setitem(given, "compiler", (STUB, what))
        return app.invoke(["codegen", "--arch", "9.0", "--jobs", "2", *words])

    return invoke  # type: ignore[return-value]


def test_update_then_check(
    stub: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("--baseline", str(tmp_path / "b"))
    assert stub("", *where) == Exit.BASELINE
    assert f"got no triton-*.txt in {tmp_path / 'b'}, wanted" in capsys.readouterr().out
    assert stub("", "--update", *where) == Exit.OK
    (path,) = (tmp_path / "b").iterdir()
    assert path.name == "triton-9.9.9.txt" and len(read_baseline_file(path).code) == 10
    capsys.readouterr()
    assert stub("", "--check", "--strict", *where) == Exit.OK
    assert capsys.readouterr().out.startswith(
        "SAME (exit 0): 10 of 10 variants are as in the baseline"
    )
    path.write_text(path.read_text(encoding="utf-8").replace(" 96 ", " 80 "), encoding="utf-8")
    folder = tmp_path / "out"
    assert stub("", "--json", "--out", str(folder), *where) == Exit.REGRESSED
    said = json.loads(capsys.readouterr().out)
    assert said == json.loads((folder / "codegen.json").read_text(encoding="utf-8"))
    assert (said["verdict"], said["exit_code"], said["triton"]) == ("REGRESSED", 3, "9.9.9")
    assert said["findings"][0]["before"]["registers"] == 80
    assert said["code"][0]["wgmma"] == stub_compiler.NUMBERS["wgmma"]
    assert "nsa_one" in (folder / "codegen.md").read_text(encoding="utf-8")
    path.write_text("<<<<<<< HEAD\n", encoding="utf-8")
    assert stub("", *where) == Exit.BASELINE
    assert app.invoke(["codegen", "--update", *where]) == Exit.OK
    assert len(read_baseline_file(path).code) == 22, "of every architecture"


def test_on_github_it_annotates_and_writes_the_summary(
    stub: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    summary = tmp_path / "summary.md"
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    assert stub("refused", "--baseline", str(tmp_path)) == Exit.FAILED
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("::")]
    assert "file=nsa/one.py,line=7" in lines[0] and "no such register" in lines[0]
    assert "no such register" in summary.read_text(encoding="utf-8")


def test_a_glob_that_fits_no_kernel_compiles_nothing(
    stub: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two shapes were built before it was said."""
    assert stub("", "--kernel", "nope*", "--baseline", str(tmp_path)) == Exit.USAGE
    (said,) = capsys.readouterr().err.splitlines()
    assert "--kernel 'nope*' fits no kernel that is launched. Next: a glob such as" in said
    assert stub("", "--kernel", "nsa_means*", "--baseline", str(tmp_path)) != Exit.USAGE
    assert "built" in capsys.readouterr().err


def test_every_kernel_of_the_baseline_can_be_named() -> None:
    path = max(BASELINES.glob("triton-*.txt"))
    kernels = {variant.kernel for variant in read_baseline_file(path).code}
    assert len(kernels) > 20
    for name in kernels:
        assert chosen_kernels([name]) == (name,)


def test_what_does_not_compile_is_failed_and_updates_nothing(
    stub: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that ptxas refuses, and one at which the compiler crashes: the others are built."""
    assert stub("refused", "--update", "--baseline", str(tmp_path)) == Exit.FAILED
    assert "error : no such register" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    assert stub("crash", "--json", "--baseline", str(tmp_path)) == Exit.FAILED
    said = json.loads(capsys.readouterr().out)
    failed = [one for one in said["findings"] if one["verdict"] == "FAILED"]
    assert [(one["kernel"], one["variant"]) for one in failed] == [("nsa_one", "A.case")]
    assert "SIGABRT: LLVM ERROR: out of registers" in failed[0]["reason"]
    assert len(said["code"]) == 9


def test_a_compiler_that_was_killed_is_started_again(
    stub: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once is nobody's fault; it shows in no variant."""
    once = tmp_path / "once.killed"
    assert stub(str(once), "--update", "--baseline", str(tmp_path)) == Exit.OK
    assert once.exists() and len(read_baseline_file(tmp_path / "triton-9.9.9.txt").code) == 10


def test_a_compiler_that_cannot_start_is_this_machines_problem(
    stub: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stub("broken", "--baseline", str(tmp_path)) == Exit.ENVIRONMENT
    assert "No module named 'triton'" in capsys.readouterr().err
    assert app.invoke(["codegen", "--arch", "7.0"]) == Exit.USAGE
    assert "one of 8.0, 8.9, 9.0, 10.0" in capsys.readouterr().err
