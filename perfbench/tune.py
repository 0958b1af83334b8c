"""What `perfbench tune` does: measure a matrix of its own, or read such a run, and say from which
lengths which path is the fastest.

It changes no code: a person commits the line for nsa/routing/thresholds.py, with the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import nsa.settings
from nsa.config import preset
from perfbench import session
from perfbench.verdict import Exit, PerfbenchError

if TYPE_CHECKING:
    from perfbench.tuneplan import Machine

DEFAULT_MODEL = "m7c_125m"
DEFAULT_BUDGET = "5m"
DEFAULT_PROCESSES = 3
DEFAULT_OUT = Path("reports/runs")


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """What to measure; None is the default.

    ``processes``: fresh ones of each cell, two at least.
    """

    model: str | None = None
    lengths: str | None = None
    processes: int | None = None


def tune(what: TuneOptions, options: session.RunOptions, as_json: bool) -> tuple[str, Exit]:
    """Measure under ``options.out`` and tell; the text to print, and the exit code.

    The matrix is written to ``options.out`` too, so that `perfbench run` can measure a cell of it
    again.
    """
    return tell(_measure(what, options), None, as_json)


def tell(run_path: Path, out: Path | None, as_json: bool) -> tuple[str, Exit]:
    """Decide from a stored run and write tune.json and tune.md to ``out``, by default beside the
    run file.
    """
    from perfbench import tunedecide, tunetext

    outcome = session.judge(run_path)
    try:
        tuned = tunedecide.tell(outcome.run, outcome.judgement)
    except ValueError as error:
        raise PerfbenchError(
            Exit.USAGE, f"{error}. Next: name the folder of one, or measure without --from"
        ) from None
    texts = {"tune.json": tunetext.to_json(tuned), "tune.md": tunetext.to_markdown(tuned)}
    for name, text in texts.items():
        _write((out or outcome.folder) / name, text)
    return texts["tune.json" if as_json else "tune.md"], tuned.exit_code


def refuse_measuring_options(given: dict[str, object]) -> None:
    """PerfbenchError(USAGE) where an option of measuring comes with --from."""
    if useless := [f"--{name}" for name, value in given.items() if value is not None]:
        raise PerfbenchError(
            Exit.USAGE,
            f"--from measures nothing, so {', '.join(useless)} would do nothing. Next: leave it"
            " away",
        )


def _measure(what: TuneOptions, options: session.RunOptions) -> Path:
    from perfbench import tuneplan

    lengths = (
        tuneplan.DEFAULT_LENGTHS if what.lengths is None else tuneplan.parse_lengths(what.lengths)
    )
    name = what.model or DEFAULT_MODEL
    try:
        model, settings = preset(name), nsa.settings.current()
    except ValueError as error:
        raise PerfbenchError(Exit.USAGE, str(error)) from None
    tuneplan.refuse_settings(settings)
    machine = _machine()
    text = tuneplan.matrix_text(
        machine, name, model, lengths, what.processes or DEFAULT_PROCESSES, settings
    )
    matrix = options.out / f"{machine.matrix_name}.yaml"
    _write(matrix, text)
    folder = session.measure(matrix, options)
    assert folder is not None  # the matrix names this very machine
    return folder


def _machine() -> Machine:
    from perfbench import environment
    from perfbench.matrixfile import Target
    from perfbench.tuneplan import Machine

    gpu, reason = environment.visible_gpu()
    if gpu is None:
        session.warn(f"no GPU ({reason}): path triton and FA-2 cannot be judged here")
    fit = environment.check_target(Target(gpu="none" if gpu is None else gpu.name))
    return Machine(None if gpu is None else gpu.name, session.capability_here(fit))


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        step = "choose a folder that you may write to with --out DIR"
        raise PerfbenchError(
            Exit.USAGE, f"{path} cannot be written: {error.strerror}. Next: {step}"
        ) from None
    session.say(f"wrote {path}")
