"""`perfbench baseline show`, `promote` and `retire`: baselines are files in git."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from perfbench.commands import options as opt
from perfbench.commands.console import print_text

app = typer.Typer(
    help="Show or replace a baseline, which is a file in git.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
BaselineArg = Annotated[Path, typer.Argument(metavar="PATH")]
To = Annotated[
    Path | None,
    typer.Option("--to", metavar="PATH", help="Default: reports/baselines/<gpu>/<matrix>.json."),
]
AllowDirty = Annotated[
    bool,
    typer.Option(
        "--allow-dirty",
        help="Accept a run of uncommitted or unproved code; the file records it.",
    ),
]
CalibrationFile = Annotated[
    Path | None,
    typer.Option(
        "--calibration",
        metavar="FILE",
        help="calibration.json: the variance between sessions of each cell.",
        show_default=False,
    ),
]


@app.command()
def show(baseline: BaselineArg, as_json: opt.Json = False) -> None:
    """Print what a baseline file holds."""
    from perfbench.records import load_baseline, show_baseline

    found = load_baseline(baseline)
    print_text(found.model_dump_json(indent=2) if as_json else show_baseline(found))


@app.command()
def promote(
    run: opt.RunArg,
    to: To = None,
    allow_dirty: AllowDirty = False,
    calibration: CalibrationFile = None,
    history: opt.HistoryUrl = None,
) -> None:
    """Make a green run the baseline; in a configured history its cells' changes are accepted."""
    from perfbench.commands.outcome import default_baseline, matrix_of
    from perfbench.commands.triage import accept_promoted
    from perfbench.gate import promote as promote_run
    from perfbench.matrix import JudgeRules
    from perfbench.records import read_run

    found = read_run(run)
    promotion = promote_run(
        found,
        to or default_baseline(found),
        allow_dirty=allow_dirty,
        calibration=calibration,
        rules=JudgeRules.of(matrix_of(found)),
    )
    print_text(str(promotion))
    manifest = found.manifest
    cell_ids = [cell.cell_id for cell in manifest.cells]
    slug = manifest.environment.gpu_slug
    accept_promoted(manifest.run_id, manifest.matrix_name, slug, cell_ids, history)


@app.command()
def retire(
    baseline: BaselineArg,
    reason: Annotated[
        str, typer.Option("--reason", metavar="TEXT", help="Why it cannot be measured again.")
    ],
) -> None:
    """Keep a baseline that cannot be measured again for the record: it judges nothing."""
    from perfbench.records import retire_baseline

    found = retire_baseline(baseline, reason)
    print_text(f"retired {baseline}: {found.retired}")
