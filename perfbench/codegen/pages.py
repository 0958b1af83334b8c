"""A judgement of machine code as text, Markdown and JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from perfbench.codegen.judging import CodeFinding, CodeJudgement
from perfbench.codegen.nouns import CompiledKernels, Toolchain
from perfbench.errors import Exit
from perfbench.records import EXIT_OF
from perfbench.text import cell_code, escape

_MOST = 20  # lines of one verdict in the terminal


def code_text(judgement: CodeJudgement, toolchain: Toolchain) -> str:
    """For a terminal: the verdict, then what it is of, the worst first."""
    lines = [headline(judgement, toolchain)]
    for verdict in dict.fromkeys(one.verdict for one in judgement.findings):
        found = judgement.of(verdict)
        for finding in found[:_MOST]:
            of = f"{finding.variant}: " if finding.variant else ""
            lines.append(f"{verdict.value:<12} {of}{finding.reason}")
            if finding.changes:
                lines.append(f"{'':<12} {', '.join(finding.changes)}")
        if len(found) > _MOST:
            lines.append(f"{verdict.value:<12} and {len(found) - _MOST} more; --out DIR has all")
    return "\n".join(lines)


def code_markdown(judgement: CodeJudgement, toolchain: Toolchain) -> str:
    """The same for a pull request's page: what is red in a table, the rest folded."""
    lines = ["## Machine code", "", escape(headline(judgement, toolchain)), ""]
    red = [one for one in judgement.findings if EXIT_OF[one.verdict] is not Exit.OK]
    rest = [one for one in judgement.findings if EXIT_OF[one.verdict] is Exit.OK]
    if red:
        lines += [*_table(red), ""]
    if rest:
        lines += [f"<details><summary>{len(rest)} more</summary>", "", *_table(rest), ""]
        lines += ["</details>", ""]
    return "\n".join(lines)


def code_json(judgement: CodeJudgement, built: CompiledKernels) -> dict[str, Any]:
    """For programs: the verdict, its findings, and every number that was built."""
    return {
        "verdict": judgement.verdict.value,
        "exit_code": int(judgement.exit_code),
        "triton": built.toolchain.triton,
        "ptxas": dict(built.toolchain.ptxas),
        "num_built": judgement.num_built,
        "num_same": judgement.num_same,
        "findings": [_finding(one) for one in judgement.findings],
        "code": [
            {"kernel": one.kernel, "variant": one.name, "sm": one.sm, **asdict(code)}
            for one, code in sorted(built.code.items(), key=lambda pair: pair[0].order)
        ],
    }


def headline(judgement: CodeJudgement, toolchain: Toolchain) -> str:
    """'REGRESSED (exit 3): 1 of 412 variants; 410 as in the baseline; triton 3.7.1, ptxas ...'."""
    code = judgement.exit_code
    red = [one for one in judgement.findings if EXIT_OF[one.verdict] is not Exit.OK]
    news = len(judgement.findings) - len(red)
    verdict = f"{judgement.verdict.value} (exit {int(code)})"
    said = f"{judgement.num_same} of {judgement.num_built} variants are as in the baseline"
    counts = [said, *([f"{len(red)} red"] if red else []), *([f"{news} other"] if news else [])]
    ptxas = ", ".join(
        f"ptxas {version} for SM {', '.join(sms)}" for version, sms in _by_version(toolchain)
    )
    return f"{verdict}: {', '.join(counts)}; triton {toolchain.triton}, {ptxas}"


def _by_version(toolchain: Toolchain) -> Iterator[tuple[str, list[str]]]:
    for version in dict.fromkeys(toolchain.ptxas[sm] for sm in sorted(toolchain.ptxas, key=float)):
        of = [sm for sm, one in toolchain.ptxas.items() if one == version]
        yield version, sorted(of, key=float)


def _table(findings: list[CodeFinding]) -> list[str]:
    lines = [
        "| verdict | kernel | variant | SM | what | numbers |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for one in findings:
        of = one.variant
        where = [cell_code(of.kernel), cell_code(of.name), of.sm] if of else ["", "", ""]
        words = [one.verdict.value, *where, escape(one.reason), escape(", ".join(one.changes))]
        lines.append(f"| {' | '.join(words)} |")
    return lines


def _finding(one: CodeFinding) -> dict[str, Any]:
    return {
        "verdict": one.verdict.value,
        "reason": one.reason,
        "kernel": one.variant.kernel if one.variant else None,
        "variant": one.variant.name if one.variant else None,
        "sm": one.variant.sm if one.variant else None,
        "source": one.source,
        "before": asdict(one.before) if one.before else None,
        "after": asdict(one.after) if one.after else None,
    }
