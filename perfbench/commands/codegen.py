"""`perfbench codegen`: what the compilers make of nsa's kernels, by a baseline in git."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perfbench.commands import options as opt
from perfbench.commands.console import print_commands, print_first, say
from perfbench.errors import Exit, unwritable

if TYPE_CHECKING:
    from perfbench.codegen import CodeJudgement

Update = Annotated[
    bool,
    typer.Option("--update/--check", help="Write the baseline, or judge by it (the default)."),
]
Arch = Annotated[
    list[str] | None,
    typer.Option("--arch", metavar="SM", help="8.0, 8.9, 9.0 or 10.0; all by default."),
]
KernelGlob = Annotated[
    list[str] | None,
    typer.Option("--kernel", metavar="GLOB", help="Kernels to compile, e.g. 'nsa_means*'."),
]
Jobs = Annotated[
    int | None,
    typer.Option("--jobs", min=1, help="Compilers side by side; one a CPU core by default."),
]
CodeOut = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="Write codegen.md and codegen.json there."),
]
CodeBaselines = Annotated[
    Path,
    typer.Option("--baseline", metavar="DIR", help="The folder of the baseline files."),
]
CodeStrict = Annotated[
    bool, typer.Option("--strict", help="What is new or changed within the limits fails with 7.")
]


def codegen(
    update: Update = False,
    arch: Arch = None,
    kernel: KernelGlob = None,
    jobs: Jobs = None,
    baseline: CodeBaselines = Path("reports/baselines/codegen"),
    out: CodeOut = None,
    strict: CodeStrict = False,
    as_json: opt.Json = False,
) -> None:
    """Compile nsa's kernels and judge their machine code; needs no GPU.

    Exit 3 for code that got worse, 6 for a kernel that no longer compiles, fits no card or is gone,
    8 for a baseline of other compilers, 9 where there is none.
    """
    from perfbench.codegen import (
        build_all,
        chosen_builds,
        chosen_kernels,
        code_json,
        code_markdown,
        code_text,
        find_baseline,
        judge_code,
        merged,
        write_baseline_file,
    )

    builds = chosen_builds(arch)
    kernels = chosen_kernels(kernel)
    built = build_all(builds, kernels=kernels, jobs=jobs or _cores(), progress=say)
    # a whole update wants nothing of what is there, which may be damaged
    whole = update and kernel is None and arch is None
    before = None if whole else find_baseline(baseline, built.toolchain.triton)
    if update and not built.failed:
        made = merged(built, before, baseline, part=kernel is not None)
        write_baseline_file(made)
        say(f"wrote {made.path}: {len(made.code)} variants. Next: git diff {made.path}")
        raise typer.Exit(Exit.OK)
    judged = judge_code(built, before, kernels=kernels, strict=strict, folder=baseline)
    content = json.dumps(code_json(judged, built), indent=2)
    markdown = code_markdown(judged, built.toolchain)
    files = {"codegen.md": markdown, "codegen.json": f"{content}\n"}
    try:
        print_first(
            content if as_json else code_text(judged, built.toolchain),
            *(partial(_write, out / name, files[name]) for name in files if out is not None),
        )
    finally:
        print_commands(_announced(judged, markdown))
    if update:
        say("the baseline stays as it was: a variant that does not compile has no numbers")
    raise typer.Exit(judged.exit_code)


def _announced(judged: CodeJudgement, markdown: str) -> Iterator[str]:
    """On GitHub: annotations, and the page in the step's summary."""
    from perfbench.commands.codegen_annotations import code_annotations
    from perfbench.machine import environment_variable, step_summary
    from perfbench.report import append_summary

    if environment_variable("GITHUB_ACTIONS") != "true":
        return
    yield from code_annotations(judged)
    summary = step_summary()
    if summary is not None and (problem := append_summary(summary, markdown)):
        yield f"perfbench: warning: {problem}"


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise unwritable(path, error, "choose another folder with --out") from None
    say(f"wrote {path}")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
