"""`perfbench calibrate`: the gate certified on stored runs, and the variance between sessions."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from perfbench.commands import options as opt
from perfbench.commands.console import print_first
from perfbench.errors import Exit, PerfbenchError

Runs = Annotated[
    list[Path],
    typer.Argument(metavar="RUN...", help="Run folders of one matrix and one machine."),
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of the permutations.")]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="PATH",
        help="Where the report is written as well: a folder or a .md file.",
        show_default=False,
    ),
]
Pairs = Annotated[
    list[Path] | None,
    typer.Option(
        "--pair",
        metavar="PAIR",
        help="A folder of `ab` of one commit with itself, with planted faults or without.",
        show_default=False,
    ),
]


def calibrate(
    runs: Runs,
    seed: Seed = 0,
    out: Out = None,
    pairs: Pairs = None,
    as_json: opt.Json = False,
) -> None:
    """Certify the gate on stored runs."""
    certify(runs, seed, out, pairs=pairs, as_json=as_json)


def certify(
    run_paths: list[Path],
    seed: int,
    out: Path | None,
    *,
    pairs: list[Path] | None = None,
    as_json: bool = False,
) -> None:
    """Print the report, then write it to ``out``, a .md file or the folder of calibration.md.

    A name without suffix is a folder, whether it exists or not. USAGE for any other suffix: the
    JSON file goes next to it, by the same name; and where it cannot be written.
    """
    from perfbench import calibration
    from perfbench.commands.outcome import policy_of
    from perfbench.matrix import GatePolicy
    from perfbench.records import read_run

    to = out
    if out is not None and (out.is_dir() or not out.suffix):
        to = out / "calibration.md"
    elif out is not None and out.suffix != ".md":
        raise PerfbenchError(
            Exit.USAGE,
            f"--out got {out}, wanted a folder or a .md file. Next: --out {out.with_suffix('')}",
        )
    policy = policy_of(read_run(run_paths[0])).whole if run_paths else GatePolicy()
    found = calibration.calibrate(run_paths, seed=seed, policy=policy, pair_folders=pairs or ())
    text = calibration.calibration_json(found) if as_json else calibration.render_calibration(found)
    print_first(text, *([] if to is None else [partial(calibration.write_calibration, to, found)]))
