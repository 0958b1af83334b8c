"""`perfbench bisect`: which commit made a cell slower."""

from __future__ import annotations

import json
import shlex
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perfbench.commands import names
from perfbench.commands import options as opt
from perfbench.commands.console import print_first, print_text, say
from perfbench.errors import Exit, PerfbenchError, unwritable

if TYPE_CHECKING:
    from perfbench.matrix import Matrix
    from perfbench.runner import BisectFile, BisectResult, CommitRange, MeasuringContext
    from perfbench.tracing import TraceDiff

Cell = Annotated[
    str | None,
    typer.Argument(
        metavar="CELL",
        help="A cell's id, or AXIS=V,... of any axes that name one cell, in any order.",
        autocompletion=names.complete_cell_of_matrix,
        show_default=False,
    ),
]
Good = Annotated[
    str | None,
    typer.Option(
        "--good", metavar="A", help="The last commit known to be fast.", show_default=False
    ),
]
Bad = Annotated[
    str | None,
    typer.Option("--bad", metavar="B", help="A later commit that is slow.", show_default=False),
]
MatrixOption = Annotated[
    Path | None,
    typer.Option(
        "--matrix",
        metavar="MATRIX",
        help="The matrix that has the cell: a file, or @NAME of a shipped one.",
        show_default=False,
    ),
]
EveryParent = Annotated[
    bool,
    typer.Option(
        "--all-commits", help="Search merged branches, too; by default only first parents."
    ),
]
Resume = Annotated[
    Path | None,
    typer.Option(
        "--resume",
        metavar="FOLDER",
        help="Resume this bisect, whose folder holds all the rest; its finished pairs stay.",
        show_default=False,
    ),
]
Out = Annotated[
    Path, typer.Option("--out", metavar="DIR", help="Where the bisect's folder is made.")
]
RESULT, REPORT = "result.json", "report.md"


def bisect(
    cell: Cell = None,
    good: Good = None,
    bad: Bad = None,
    matrix: MatrixOption = None,
    every_parent: EveryParent = False,
    resume: Resume = None,
    budget: opt.Budget = None,
    seed: opt.Seed = None,
    out: Out = opt.RUNS,
    as_json: opt.Json = False,
) -> None:
    """Find the commit that made a cell slower.

    Exits with 3 where one was found, with 0 where B is not confirmed slower than A, and with 6
    where no single commit is left or confirmed.
    """
    from perfbench.commands.measuring import measuring_context
    from perfbench.commands.outcome import CHECKOUT
    from perfbench.commands.own_code import refuse_stored_code
    from perfbench.matrix import parse_matrix, policies
    from perfbench.runner import (
        PairMeasurer,
        commits_between,
        find_first_bad,
        held_cards,
        interrupted,
        pairs_ahead,
        read_bisect,
    )

    budget_s = opt.seconds(budget)
    request = BisectRequest(cell, good, bad, matrix, seed, every_parent)
    settings = request.as_file() if resume is None else request.resumed(read_bisect(resume), resume)
    found = commits_between(
        settings.good, settings.bad, CHECKOUT, every_parent=settings.every_parent
    )
    if found.good.tree == found.bad.tree:
        _end_without_pairs(found, settings, as_json)
    settings = settings.model_copy(update={"good": found.good.sha, "bad": found.bad.sha})
    loaded = parse_matrix(
        settings.matrix_text, settings.matrix_path, trained=settings.trained_blocks
    )
    if resume is not None:
        refuse_stored_code(loaded, [CHECKOUT, Path.cwd()])
    context = measuring_context(loaded.target)
    if context is None:
        raise typer.Exit(Exit.OK)
    _say_uncommitted(found.bad.sha, CHECKOUT)
    say(pairs_ahead(found, _pair_s(loaded, settings.cell_id, context)))
    folder = resume or _new_folder(out, settings, context)
    deadline = None if budget_s is None else time.monotonic() + budget_s
    policy = policies(loaded).of(settings.cell_id)
    with held_cards(context.fit) as fit:
        context = replace(context, fit=fit)
        measurer = PairMeasurer(settings, loaded, folder, context, deadline)
        try:
            result = find_first_bad(found, measurer, policy, context.say)
        except KeyboardInterrupt:
            raise interrupted(folder) from None
        diff = _kernels(result, settings, loaded, context, folder)
    _finish(result, settings, folder, diff, as_json)


@dataclass(frozen=True, slots=True)
class BisectRequest:
    """What was typed of it."""

    cell: str | None
    good: str | None
    bad: str | None
    matrix: Path | None
    seed: int | None
    every_parent: bool

    def as_file(self) -> BisectFile:
        """A new bisect; USAGE where something is missing or the matrix has no such cell."""
        from perfbench.commands.measuring import new_seed
        from perfbench.matrix import cells_of, load_matrix
        from perfbench.runner import BisectFile

        named = {"CELL": self.cell, "--good": self.good, "--bad": self.bad, "--matrix": self.matrix}
        if missing := [name for name, value in named.items() if value is None]:
            raise PerfbenchError(
                Exit.USAGE,
                f"got no {', '.join(missing)}, wanted the cell, its matrix and both commits. Next:"
                " perfbench bisect --good A --bad B --matrix MATRIX CELL",
            )
        assert self.cell is not None
        assert self.good is not None and self.bad is not None and self.matrix is not None
        loaded = load_matrix(self.matrix)
        return BisectFile(
            good=self.good,
            bad=self.bad,
            every_parent=self.every_parent,
            cell_id=names.named_cell(self.cell, cells_of(loaded), str(self.matrix)),
            matrix_path=loaded.path,
            matrix_text=loaded.text,
            trained_blocks=loaded.trained,
            seed=new_seed() if self.seed is None else self.seed,
            argv=opt.argv(),
        )

    def resumed(self, stored: BisectFile, folder: Path) -> BisectFile:
        """``stored``; USAGE where something else was typed: a bisect keeps what it began with."""
        typed = {
            "CELL": (self.cell, stored.cell_id),
            "--good": (self.good, stored.good),
            "--bad": (self.bad, stored.bad),
            "--matrix": (self.matrix and str(self.matrix), stored.matrix_path),
            "--seed": (self.seed, stored.seed),
            "--all-commits": (self.every_parent or None, stored.every_parent),
        }
        if other := [name for name, (got, own) in typed.items() if got not in (None, own)]:
            raise PerfbenchError(
                Exit.USAGE,
                f"got {', '.join(other)} with --resume {folder}, which holds its own. Next:"
                f" {shlex.join(['perfbench', 'bisect', '--resume', str(folder)])}",
            )
        return stored


def _end_without_pairs(found: CommitRange, settings: BisectFile, as_json: bool) -> None:
    """Both ends have the same package: one line, and no folder is made."""
    from perfbench.machine import PACKAGE
    from perfbench.report import bisect_exit, bisect_json
    from perfbench.runner import SHORT, BisectResult, Ending

    names = " and ".join(
        f"{typed} ({one.sha[:SHORT]})"
        for typed, one in ((settings.good, found.good), (settings.bad, found.bad))
    )
    reason = f"`{PACKAGE}/` is the same at {names}"
    result = BisectResult(Ending.SAME_CODE, found, reason)
    content = bisect_json(result, settings.cell_id, "") | {"folder": None, "kernels": []}
    print_text(json.dumps(content, indent=2) if as_json else f"Nothing to bisect: {reason}")
    raise typer.Exit(bisect_exit(result))


def _say_uncommitted(bad: str, checkout: Path) -> None:
    """A line where the bad end is this checkout's commit, and its tree has more than that."""
    from perfbench.machine import source_of
    from perfbench.runner import SHORT

    source = source_of(checkout)
    if source.commit == bad and source.dirty_sha256 is not None:
        say(
            f"--bad is {bad[:SHORT]} as it was committed: the uncommitted changes of {checkout} are"
            " not measured"
        )


def _new_folder(out: Path, settings: BisectFile, context: MeasuringContext) -> Path:
    from perfbench.runner import new_pair_folder, write_bisect

    made = new_pair_folder(out, context.environment, settings.bad)
    folder = made.with_name(f"{made.name}-bisect")
    write_bisect(folder, settings)
    return folder


def _pair_s(matrix: Matrix, cell_id: str, context: MeasuringContext) -> float:
    """Seconds of a pair as the plan of this checkout estimates them."""
    from perfbench.matrix import build_plan

    only, nsa_settings = [f"cell={cell_id}"], opt.nsa_settings()
    plan = build_plan(matrix, only=only, capability=context.capability, settings=nsa_settings)
    return 2 * plan.estimate_s / plan.replicates


def _kernels(
    result: BisectResult,
    settings: BisectFile,
    matrix: Matrix,
    context: MeasuringContext,
    folder: Path,
) -> TraceDiff | None:
    """The first bad commit traced next to its parent, one step each; None without one."""
    from perfbench.runner import SHORT, checked_out
    from perfbench.tracing import TRACE_FOLDER, TraceDiff, Tracing, Version, trace_side

    if result.first_bad is None:
        return None
    home = folder / TRACE_FOLDER
    tracing = Tracing(matrix, context, settings.seed, home, home)
    found = {
        side: trace_side(
            Version(side, sha[:SHORT], partial(checked_out, sha, context.repository)),
            [settings.cell_id],
            tracing,
        )[settings.cell_id]
        for side, sha in (("a", result.parent), ("b", result.first_bad.sha))
    }
    return TraceDiff(cell_id=settings.cell_id, base=found["a"], candidate=found["b"])


def _finish(
    result: BisectResult,
    settings: BisectFile,
    folder: Path,
    diff: TraceDiff | None,
    as_json: bool,
) -> None:
    """Print it, write it next to the pairs, and exit."""
    from perfbench.report import bisect_exit, bisect_json, bisect_markdown
    from perfbench.runner import resume_command

    resume = resume_command(folder)
    markdown = bisect_markdown(result, settings.cell_id, resume, _template(settings))
    content = bisect_json(result, settings.cell_id, resume)
    changes = [] if diff is None else [one.model_dump(mode="json") for one in diff.changes]
    content |= {"folder": str(folder), "kernels": changes}
    if diff is not None:
        markdown += f"\n{diff.to_markdown()}"
    text = json.dumps(content, indent=2) + "\n"
    files = {folder / RESULT: text, folder / REPORT: markdown}
    print_first(
        text if as_json else markdown,
        *(partial(_write, path, content) for path, content in files.items()),
    )
    raise typer.Exit(bisect_exit(result))


def _template(settings: BisectFile) -> str:
    """The command of a new bisect, with {good} and {bad} to be filled in."""
    every = ["--all-commits"] if settings.every_parent else []
    words = ["--matrix", settings.matrix_path, *every, settings.cell_id]
    quoted = shlex.join(words).replace("{", "{{").replace("}", "}}")
    return f"perfbench bisect --good {{good}} --bad {{bad}} {quoted}"


def _write(path: Path, text: str) -> None:
    from perfbench.records import whole_file

    try:
        with whole_file(path) as partial_file:
            partial_file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise unwritable(path, error, "free some space, and resume") from None
    say(f"wrote {path}")
