"""`perfbench init`: what a repository needs to be measured, written into this folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from perfbench.commands import names
from perfbench.commands.console import print_text, say
from perfbench.errors import Exit, PerfbenchError, unwritable

NameArg = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="A shipped matrix, e.g. cpu, or a card, e.g. h200.",
        autocompletion=names.complete_shipped,
    ),
]


def init(name: NameArg = "cpu") -> None:
    """Write a matrix, a GitHub workflow and a README into this folder; overwrites nothing."""
    from perfbench.matrix import load_matrix, shipped_file, shipped_name

    matrix = shipped_name(name)
    file = shipped_file(matrix)
    gpu = load_matrix(file).target.gpu
    values = {"matrix": matrix, "gpu": "" if gpu == "none" else gpu.lower(), "version": _version()}
    readme = Path("matrices/README.md")  # of all matrices: the first one's stays, edited or not
    written = _write(
        {
            Path("matrices", file.name): file.read_text(encoding="utf-8"),
            Path(".github/workflows", f"perfbench-{matrix}.yml"): _filled("workflow", values),
            **({} if readme.exists() else {readme: _filled("readme", values)}),
        }
    )
    for path in written:
        say(f"wrote {path}")
    print_text(_next(matrix))


def _write(files: Mapping[Path, str]) -> list[Path]:
    """Write all ``files`` that are not there yet with these very lines, and return them; USAGE
    where one is there with others, before any is written.
    """
    missing = [path for path in files if not path.exists() and not path.is_symlink()]
    for path in files:
        if path not in missing and not _holds(path, files[path]):
            raise PerfbenchError(
                Exit.USAGE,
                f"got {path}, which is there already with other content, wanted to write it;"
                " nothing was written. Next: move or delete it, or run `perfbench init` in another"
                " folder",
            )
    for path in missing:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8", newline="\n") as file:
                file.write(files[path])
        except OSError as error:
            raise unwritable(path, error, "run `perfbench init` in a folder of yours") from None
    return missing


def _holds(path: Path, text: str) -> bool:
    try:
        return path.read_text(encoding="utf-8") == text
    except (OSError, UnicodeDecodeError):
        return False


def _filled(template: str, values: Mapping[str, str]) -> str:
    """A template of perfbench/commands; its marks are not those of GitHub's expressions."""
    import jinja2

    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        variable_start_string="<<",
        variable_end_string=">>",
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    source = Path(__file__).with_name(f"{template}.j2").read_text(encoding="utf-8")
    return environment.from_string(source).render(values)


def _next(matrix: str) -> str:
    """The commands that lead to a first verdict."""
    from perfbench.commands.outcome import CHECKOUT
    from perfbench.machine import source_of

    source = source_of(CHECKOUT)
    allow = " --allow-dirty" if source.commit is None or source.dirty_sha256 else ""
    why = "; an installed copy of nsa has no commit to prove" if source.commit is None else ""
    return f"""\
Next:
  perfbench plan matrices/{matrix}.yaml
  perfbench run matrices/{matrix}.yaml
  perfbench baseline promote latest{allow}
  perfbench check matrices/{matrix}.yaml
`promote` writes reports/baselines{why}. Commit it with what was written here."""


def _version() -> str:
    from importlib.metadata import version

    return version("nsa-perfbench")
