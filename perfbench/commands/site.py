"""`perfbench site`: the history as a static folder."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from perfbench.commands import options as opt
from perfbench.errors import Exit, PerfbenchError

Out = Annotated[
    Path,
    typer.Option("--out", metavar="DIR", help="The folder: new, empty, or a site to write again."),
]
Title = Annotated[str, typer.Option("--title", metavar="TEXT", help="Of every page.")]
Since = Annotated[
    str | None,
    typer.Option(
        "--since",
        metavar="DATE",
        help="Runs from then on: 2026-11-23, 90d, 12w; all by default.",
        show_default=False,
    ),
]
Baselines = Annotated[
    Path,
    typer.Option("--baselines", metavar="DIR", help="Where baselines lie: <gpu>/<matrix>.json."),
]
Repository = Annotated[
    str | None,
    typer.Option(
        "--repository",
        metavar="URL",
        help="Commits link there, e.g. https://github.com/OWNER/NAME. Default: the one of GitHub's"
        " runner.",
        show_default=False,
    ),
]


def site(
    history: opt.HistoryUrl = None,
    out: Out = Path("site"),
    title: Title = "perfbench",
    since: Since = None,
    baselines: Baselines = Path("reports/baselines"),
    repository: Repository = None,
) -> None:
    """Write the history as a folder of pages that needs no server: cells, runs, comparisons."""
    from perfbench.commands.console import print_text, say, warn
    from perfbench.commands.dates import moment_of
    from perfbench.history import open_history
    from perfbench.history.site import SiteOptions, write_site

    begin = None if since is None else moment_of(since, "--since", datetime.now(UTC))
    options = SiteOptions(title, begin, baselines, _repository(repository))
    with open_history(history) as opened:
        made = write_site(opened, out, options, progress=say)
    for problem in made.problems:
        warn(problem)
    if not made.num_runs:
        say("the history has no run to show. Next: perfbench history add RUN...")
    size = made.num_bytes / 1e6
    print_text(
        f"{made.index}: {made.num_cells} cells, {made.num_runs} runs; {made.num_files} files of"
        f" {size:,.1f} MB"
    )


def _repository(given: str | None) -> str:
    """Its address; that of GitHub's runner by default, empty elsewhere."""
    from perfbench.machine import environment_variable

    name = environment_variable("GITHUB_REPOSITORY")
    server = environment_variable("GITHUB_SERVER_URL") or "https://github.com"
    found = given if given is not None else f"{server}/{name}" if name else ""
    if found and not found.startswith(("https://", "http://")):
        raise PerfbenchError(
            Exit.USAGE,
            f"--repository: got {found[:80]!r}, wanted an address. Next: write e.g."
            " https://github.com/OWNER/NAME",
        )
    return found.rstrip("/")
