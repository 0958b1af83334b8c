"""What of a kernel's machine code got worse, by its baseline: no file, clock or torch.

The same source, Triton and ptxas give the same code, so nothing is noise: a change is the commit's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from nsa.routing.cards import card_class
from perfbench.codegen.baseline import UPDATE, CodeBaseline
from perfbench.codegen.nouns import NUMBERS, CompiledKernels, KernelVariant, MachineCode
from perfbench.errors import Exit, worst
from perfbench.records import EXIT_OF, Verdict

GROWTH_PERCENT = 10  # of registers, and of programs lost, that is red
_KB = 1024
# CUDA C++ Programming Guide, technical specifications by compute capability: of a multiprocessor,
# bytes of shared memory, warps, programs. All have 65,536 registers, which a warp takes by 256, and
# a program takes 1 KB of shared memory for itself.
_MULTIPROCESSOR = {
    "8.0": (164 * _KB, 64, 32),
    "8.9": (100 * _KB, 48, 24),
    "9.0": (228 * _KB, 64, 32),
    "10.0": (228 * _KB, 64, 32),
}
_REGISTERS, _UNIT, _RESERVED = 65_536, 256, _KB
# by the severity of their exit codes, then news
_ORDER = (
    Verdict.FAILED,
    Verdict.MISSING,
    Verdict.NO_BASELINE,
    Verdict.REGRESSED,
    Verdict.INCOMPARABLE,
    Verdict.NEW,
    Verdict.WATCH,
)


@dataclass(frozen=True, slots=True)
class CodeFinding:
    """``reason``: what changed and by how much, in words. ``variant`` is None where it is no
    variant's.
    """

    verdict: Verdict
    reason: str
    variant: KernelVariant | None = None
    before: MachineCode | None = None
    after: MachineCode | None = None
    source: str | None = None

    @property
    def changes(self) -> tuple[str, ...]:
        """'registers 96 -> 112' of each number that is another."""
        if self.before is None or self.after is None:
            return ()
        pairs = ((name, getattr(self.before, name), getattr(self.after, name)) for name in NUMBERS)
        return tuple(f"{name} {old} -> {new}" for name, old, new in pairs if old != new)


@dataclass(frozen=True, slots=True)
class CodeJudgement:
    """``findings``, the worst first; what is the same as in the baseline is only counted."""

    findings: tuple[CodeFinding, ...]
    num_built: int
    num_same: int
    strict: bool = False

    @property
    def exit_code(self) -> Exit:
        code = worst(EXIT_OF[one.verdict] for one in self.findings)
        open_ = any(EXIT_OF[one.verdict] is Exit.OK for one in self.findings)
        return Exit.STRICT if code is Exit.OK and open_ and self.strict else code

    @property
    def verdict(self) -> Verdict:
        """The worst."""
        return self.findings[0].verdict if self.findings else Verdict.SAME

    def of(self, verdict: Verdict) -> tuple[CodeFinding, ...]:
        return tuple(one for one in self.findings if one.verdict is verdict)


def judge_code(
    built: CompiledKernels,
    baseline: CodeBaseline | None,
    *,
    kernels: Sequence[str] = ("*",),
    strict: bool = False,
    folder: Path | None = None,
) -> CodeJudgement:
    """``built`` against ``baseline``, of ``kernels`` (globs) alone, and of the architectures that
    were built. ``folder`` is where the baseline was looked for.
    """
    sources = built.sources
    found = [
        CodeFinding(Verdict.FAILED, why, one, source=sources.get(one.kernel))
        for one, why in built.failed.items()
    ]
    found += _beyond_the_card(built)
    comparable, others = _comparable(built, baseline, folder)
    found += others
    before = {} if baseline is None else baseline.code
    same = 0
    for one, code in built.code.items():
        if one.sm not in comparable:
            continue
        old, source = before.get(one), sources.get(one.kernel)
        if old is None:
            why = f"no line in the baseline. Next: {UPDATE}"
            found.append(CodeFinding(Verdict.NEW, why, one, after=code, source=source))
            continue
        reasons = tuple(_worse(one.sm, old, code))
        same += old == code
        if old != code:
            verdict = Verdict.REGRESSED if reasons else Verdict.WATCH
            why = "; ".join(reasons) or "within the limits"
            found.append(CodeFinding(verdict, why, one, old, code, source))
    known = {*built.code, *built.failed}
    for one in before:
        chosen = any(fnmatchcase(one.kernel, glob) for glob in kernels)
        if chosen and one.sm in comparable and one not in known:
            why = f"in the baseline, and nothing launches it. Next: {UPDATE}"
            source = sources.get(one.kernel)
            found.append(CodeFinding(Verdict.MISSING, why, one, before=before[one], source=source))
    found.sort(key=_rank)
    return CodeJudgement(tuple(found), len(built.code), same, strict)


def resident(sm: str, code: MachineCode) -> int:
    """Programs that a multiprocessor holds at once, by its registers, shared memory and warps; a
    card that is not known is taken for SM 9.0.
    """
    shared, warps, programs = _MULTIPROCESSOR.get(sm, _MULTIPROCESSOR["9.0"])
    of_warp = -(-code.registers * 32 // _UNIT) * _UNIT
    return min(
        programs,
        warps // max(1, code.warps),
        _REGISTERS // max(_UNIT, of_warp) // max(1, code.warps),
        shared // (code.shared + _RESERVED),
    )


def _beyond_the_card(built: CompiledKernels) -> Iterator[CodeFinding]:
    for one, code in built.code.items():
        major, minor = map(int, one.sm.split("."))
        most = card_class((major, minor)).shared_bytes
        if code.shared > most:
            why = (
                f"takes {code.shared:,} bytes of shared memory, the card gives a program {most:,}:"
                " it cannot be launched"
            )
            source = built.sources.get(one.kernel)
            yield CodeFinding(Verdict.FAILED, why, one, after=code, source=source)


def _comparable(
    built: CompiledKernels, baseline: CodeBaseline | None, folder: Path | None
) -> tuple[set[str], list[CodeFinding]]:
    """The architectures that the same compilers made on both sides, and why others were not."""
    if baseline is None:
        where = "" if folder is None else f" in {folder.as_posix()}"
        why = f"got no triton-*.txt{where}, wanted a baseline. Next: {UPDATE}"
        return set(), [CodeFinding(Verdict.NO_BASELINE, why)]
    mine, theirs = built.toolchain, baseline.toolchain
    if mine.triton != theirs.triton:
        why = (
            f"triton {mine.triton} here, {theirs.triton} in {baseline.path}. Next: {UPDATE}, or"
            f" install triton {theirs.triton}"
        )
        return set(), [CodeFinding(Verdict.INCOMPARABLE, why)]
    same, found = set[str](), []
    for sm in sorted(mine.ptxas, key=float):
        here, there = mine.ptxas[sm], theirs.ptxas.get(sm)
        if here == there:
            same.add(sm)
        else:
            why = (
                f"SM {sm}: ptxas {here} here, {there or 'none'} in {baseline.path}. Next: {UPDATE}"
            )
            found.append(CodeFinding(Verdict.INCOMPARABLE, why))
    return same, found


def _worse(sm: str, old: MachineCode, new: MachineCode) -> Iterator[str]:
    if new.stores + new.loads > old.stores + old.loads or new.stack > old.stack:
        what = "a spill" if not old.stack + old.stores + old.loads else "a larger spill"
        yield (
            f"{what}: {old.stack} -> {new.stack} bytes a thread, {old.stores} -> {new.stores}"
            f" stores and {old.loads} -> {new.loads} loads"
        )
    for kind in ("tcgen05", "wgmma", "mma"):  # the wider first: fewer of a narrower one is no loss
        had, has = getattr(old, kind), getattr(new, kind)
        if has < had:
            yield f"lost {kind}: {had} -> {has} instructions"
        if has > had:
            break
    if 100 * (new.registers - old.registers) >= GROWTH_PERCENT * old.registers:
        growth = 100 * (new.registers - old.registers) / max(1, old.registers)
        yield f"registers {old.registers} -> {new.registers} (+{growth:.0f} %)"
    held, holds = resident(sm, old), resident(sm, new)
    if holds < held and 100 * (held - holds) >= GROWTH_PERCENT * held:
        took = f"registers {old.registers} -> {new.registers}, shared {old.shared} -> {new.shared}"
        yield f"{held} -> {holds} programs on a multiprocessor ({took})"


def _rank(finding: CodeFinding) -> tuple[int, tuple[str, str, float]]:
    variant = finding.variant
    return _ORDER.index(finding.verdict), ("", "", 0.0) if variant is None else variant.order
