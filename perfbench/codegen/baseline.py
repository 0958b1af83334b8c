"""The baseline in git: a text file for each version of Triton, one line a variant, so that a pull
request shows what changed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path

from perfbench.codegen.nouns import (
    NUMBERS,
    CompiledKernels,
    KernelVariant,
    MachineCode,
    Toolchain,
)
from perfbench.errors import Exit, PerfbenchError, unwritable
from perfbench.records import whole_file

UPDATE = "perfbench codegen --update"
_TITLE = "# What Triton and ptxas make of nsa's kernels (docs/codegen.md); written by"
_COLUMNS = ("kernel", "variant", "sm", *NUMBERS)
_SAFE = re.compile(r"[^0-9A-Za-z.+-]")


@dataclass(frozen=True, slots=True)
class CodeBaseline:
    """``path`` is where it lies, whether or not it was read from there."""

    path: Path
    toolchain: Toolchain
    code: Mapping[KernelVariant, MachineCode]


def find_baseline(folder: Path, triton: str) -> CodeBaseline | None:
    """That of this version of Triton; of another one where only those are there; None where there
    is none. BASELINE where a file is damaged.
    """
    wanted = folder / _name(triton)
    if wanted.is_file():
        return read_baseline_file(wanted)
    others = sorted(folder.glob("triton-*.txt"))
    return read_baseline_file(others[-1]) if others else None


def read_baseline_file(path: Path) -> CodeBaseline:
    """BASELINE where a line is not as `write_baseline_file` writes it."""
    triton, ptxas, code = "", dict[str, str](), dict[KernelVariant, MachineCode]()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PerfbenchError(
            Exit.BASELINE, f"{path} cannot be read: {error}. Next: {UPDATE}"
        ) from None
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or line.startswith("#") or tuple(words) == _COLUMNS:
            continue
        if words[0] == "triton" and len(words) == 2:
            triton = words[1]
        elif words[0] == "ptxas" and all(word.count("=") == 1 for word in words[1:]):
            ptxas = dict(word.split("=") for word in words[1:])
        elif len(words) == len(_COLUMNS) and all(word.isdecimal() for word in words[3:]):
            variant = KernelVariant(*words[:3])
            if variant in code or not re.fullmatch(r"\d+\.\d", variant.sm):
                raise _damaged(path, number, line, "each variant once, its sm as 9.0")
            code[variant] = MachineCode(*map(int, words[3:]))
        else:
            raise _damaged(path, number, line, f"{len(_COLUMNS)} columns, the last ones numbers")
    if not triton or {variant.sm for variant in code} - {*ptxas}:
        named = f"triton {triton or 'nowhere'} and ptxas for {', '.join(ptxas) or 'none'}"
        raise PerfbenchError(
            Exit.BASELINE, f"{path} names {named}, wanted both for every line. Next: {UPDATE}"
        )
    return CodeBaseline(path, Toolchain(triton, ptxas), code)


def write_baseline_file(baseline: CodeBaseline) -> None:
    """Write it whole or not at all; USAGE where it cannot be written."""
    try:
        baseline.path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(baseline.path) as partial:
            partial.write_text(_text(baseline), encoding="utf-8", newline="\n")
    except OSError as error:
        raise unwritable(baseline.path, error, "choose another folder with --baseline") from None


def merged(
    built: CompiledKernels,
    before: CodeBaseline | None,
    folder: Path,
    *,
    part: bool = False,
) -> CodeBaseline:
    """``built`` as a baseline, with the lines of architectures that were not built; ``part``: only
    some kernels were, and the lines of others stay, too.

    USAGE where lines that stay were compiled by another Triton or ptxas.
    """
    path, toolchain = folder / _name(built.toolchain.triton), built.toolchain
    if before is None or before.toolchain.triton != toolchain.triton:
        if part:
            raise _mixture(path, f"triton {toolchain.triton}")
        return CodeBaseline(path, toolchain, built.code)
    for sm, version in toolchain.ptxas.items() if part else ():
        if before.toolchain.ptxas.get(sm) != version:
            raise _mixture(path, f"ptxas {version} for SM {sm}")
    kernels = {variant.kernel for variant in built.code}
    stays = {
        variant: code
        for variant, code in before.code.items()
        if variant.sm not in toolchain.ptxas or (part and variant.kernel not in kernels)
    }
    ptxas = {**before.toolchain.ptxas, **toolchain.ptxas}
    return CodeBaseline(path, Toolchain(toolchain.triton, ptxas), {**stays, **built.code})


def _mixture(path: Path, what: str) -> PerfbenchError:
    return PerfbenchError(
        Exit.USAGE,
        f"{path} has no line of {what} yet, and --kernel would leave it with a few. Next: {UPDATE}",
    )


def _damaged(path: Path, number: int, line: str, wanted: str) -> PerfbenchError:
    return PerfbenchError(
        Exit.BASELINE, f"{path}:{number}: got {line[:80]!r}, wanted {wanted}. Next: {UPDATE}"
    )


def _name(triton: str) -> str:
    return f"triton-{_SAFE.sub('_', triton)}.txt"


def _text(baseline: CodeBaseline) -> str:
    versions = baseline.toolchain
    ptxas = (f"{sm}={versions.ptxas[sm]}" for sm in sorted(versions.ptxas, key=float))
    lines = [f"{_TITLE} `{UPDATE}`.", f"triton {versions.triton}", " ".join(("ptxas", *ptxas))]
    lines.append(" ".join(_COLUMNS))
    for variant in sorted(baseline.code, key=lambda one: one.order):
        numbers = map(str, astuple(baseline.code[variant]))
        lines.append(" ".join((variant.kernel, variant.name, variant.sm, *numbers)))
    return "\n".join(lines) + "\n"
