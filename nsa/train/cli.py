"""``python -m nsa.train``: train by a config, look at a run, sample from it, export it.

``python -m nsa.train CONFIG`` is ``python -m nsa.train train CONFIG``. This process imports no
torch: the trainer is its child.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nsa.train.errors import TrainError, TrainExit

if TYPE_CHECKING:
    from nsa.routing import Route
    from nsa.train.config import RunConfig
    from nsa.train.estimate import Estimate
    from nsa.train.machine import TrainMachine

app = typer.Typer(
    help="Train TinyLM or its dense twin by a config, and look at, sample from and export a run.",
    add_completion=False,
    rich_markup_mode=None,  # rich costs more than the rest of --help together
    pretty_exceptions_enable=False,
)
RunDir = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a run.")]


@app.command()
def train(
    config: Annotated[
        str, typer.Argument(metavar="CONFIG", help="A YAML file, or @NAME of a shipped one.")
    ],
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="SECTION.KEY=VALUE", help="Instead of what the file has; repeat."
        ),
    ] = None,
    out: Annotated[
        str | None, typer.Option("--out", metavar="DIR", help="The run's folder: `out` otherwise.")
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume", metavar="[PATH]", help="Go on from a checkpoint; the last good one: auto."
        ),
    ] = None,
    estimate: Annotated[
        bool,
        typer.Option("--estimate", help="Print parameters, memory and time; train nothing."),
    ] = False,
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu", metavar="NAME", help="With --estimate: a GPU that is not at hand, or none."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of text.")] = False,
    no_watchdog: Annotated[
        bool, typer.Option("--no-watchdog", help="Halt for nothing but errors.")
    ] = False,
    job: Annotated[
        str | None,
        typer.Option(
            "--job",
            metavar="ID",
            help="Of ranks that torchrun did not start: each run has its own.",
        ),
    ] = None,
) -> int:
    """Train; `train` may be left out."""
    from nsa import settings
    from nsa.train import preflight
    from nsa.train.launch import launch, without_watchdog
    from nsa.train.machine import machine_of
    from nsa.train.yaml_file import read_config

    run = read_config(config, sets or [])
    if out is not None:
        run = replace(run, out=out)
    if no_watchdog:
        run = without_watchdog(run)
    if gpu is not None and not estimate:
        raise TrainError(
            TrainExit.USAGE, f"--gpu {gpu} is for --estimate; a run takes the GPU that is here"
        )
    place = settings.launched_place()
    rank = 0 if place is None else place.rank
    if estimate or rank == 0:
        machine = machine_of(run.train.device, gpu)
        if estimate:
            return _show_estimate(run, machine, as_json=as_json)
        _show_head(run, machine, as_json=as_json)
        preflight.check(run, machine.capability)
    return launch(run, rank, resume=resume, job=job)


@app.command()
def watch(
    out: RunDir,
    once: Annotated[bool, typer.Option("--once", help="Look once, and end.")] = False,
    halt: Annotated[bool, typer.Option("--halt", help="Halt the run for what is found.")] = False,
) -> int:
    """Watch a run from outside: what it does, and whether it still does."""
    from nsa.train.config import RunConfig
    from nsa.train.run_folder import read_resolved
    from nsa.train.watchdog import watch as look

    config = RunConfig.from_mapping(read_resolved(out)["config"])
    code: int = look(out, once=once, halt=halt, config=config.watchdog)
    return code


@app.command()
def sample(
    out: RunDir,
    prompt: Annotated[str, typer.Option("--prompt", metavar="TEXT", help="How it begins.")],
    tokens: Annotated[int, typer.Option("--tokens", metavar="N", help="At most so many.")] = 64,
    temperature: Annotated[
        float, typer.Option("--temperature", metavar="X", help="0: the most likely.")
    ] = 0.8,
    top_p: Annotated[
        float, typer.Option("--top-p", metavar="P", help="Of the likeliest with this share.")
    ] = 0.95,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Of what is drawn.")] = 0,
    checkpoint: Annotated[
        str, typer.Option("--checkpoint", metavar="PATH", help="The last good one: auto.")
    ] = "auto",
) -> int:
    """Continue a text by a trained model."""
    from nsa.train.run_folder import checkpoint_of, read_resolved

    _at_least("--tokens", tokens, 1)
    _at_least("--temperature", temperature, 0)
    _at_least("--seed", seed, 0)
    if not 0 < top_p <= 1:
        raise TrainError(TrainExit.USAGE, f"--top-p {top_p} must be above 0 and at most 1")
    read_resolved(out)
    path = checkpoint_of(out, checkpoint, "--checkpoint")
    from nsa.train.finished import sample_text

    text = sample_text(
        out, path, prompt, tokens=tokens, temperature=temperature, top_p=top_p, seed=seed
    )
    typer.echo(text)
    return TrainExit.OK


@app.command()
def export(
    out: RunDir,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="What is written; not there.")],
    checkpoint: Annotated[
        str, typer.Option("--checkpoint", metavar="PATH", help="The last good one: auto.")
    ] = "auto",
) -> int:
    """Write a trained model as safetensors with a Hugging Face config and its tokenizer."""
    from nsa.train.run_folder import checkpoint_of, read_resolved

    read_resolved(out)
    path = checkpoint_of(out, checkpoint, "--checkpoint")
    try:
        is_taken = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    except OSError as error:
        raise TrainError(
            TrainExit.USAGE,
            f"{folder} cannot be read: {error.strerror}; wanted a new or empty folder",
        ) from None
    if is_taken:
        raise TrainError(
            TrainExit.USAGE, f"{folder} is there already; wanted a new or empty folder"
        )
    from nsa.train.finished import export_run

    export_run(out, path, folder)
    typer.echo(f"wrote {folder}")
    return TrainExit.OK


@app.command()
def blocks(
    run: RunDir,
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE.npz", help="What is written; not there.")
    ],
    tokens: Annotated[
        int, typer.Option("--tokens", metavar="N", help="Of text, in one row.")
    ] = 16384,
    layers: Annotated[
        str | None,
        typer.Option("--layers", metavar="I,J,K", help="First, middle and last by default."),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option("--text", metavar="FILE", help="In place of the run's held-out text."),
    ] = None,
    checkpoint: Annotated[
        str, typer.Option("--checkpoint", metavar="PATH", help="The last good one: auto.")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of text.")] = False,
) -> int:
    """Keep the blocks that a trained model chooses, for perfbench's `selection: trained`."""
    from nsa.train.run_folder import checkpoint_of, read_resolved

    _at_least("--tokens", tokens, 2)
    wanted = None if layers is None else _layers(layers)
    read_resolved(run)
    path = checkpoint_of(run, checkpoint, "--checkpoint")
    if out.exists():
        raise TrainError(TrainExit.USAGE, f"{out} is there already; wanted a new file")
    from nsa.train.blocks_text import blocks_lines
    from nsa.train.run_blocks import keep_blocks

    about = keep_blocks(run, path, out, tokens=tokens, layers=wanted, text=text)
    for layer in about["attend_to_everything"]:
        typer.echo(f"layer {layer} attends to everything, so it has no blocks", err=True)
    typer.echo(json.dumps(about, indent=2) if as_json else "\n".join(blocks_lines(about)))
    typer.echo(f"wrote {out}", err=True)
    return TrainExit.OK


def _layers(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and len(word) < 6 for word in words):
        raise TrainError(
            TrainExit.USAGE, f"--layers {text!r}: wanted numbers of layers, such as 0,5,11"
        )
    return [int(word) for word in words]


def _at_least(option: str, value: float, least: int) -> None:
    if not value >= least or value == float("inf"):
        raise TrainError(TrainExit.USAGE, f"{option} {value} must be a number >= {least}")


def _show_estimate(run: RunConfig, machine: TrainMachine, *, as_json: bool) -> int:
    from nsa.train.data import vocabulary_size
    from nsa.train.estimate import estimate

    run = run.with_vocab(vocabulary_size(run))
    found = estimate(run, machine.capability, card_bytes=machine.memory_bytes)
    if as_json:
        head = {"sha256": run.sha256(), "config": run.to_mapping()}
        typer.echo(json.dumps({**head, "estimate": found.to_mapping()}, indent=2))
    else:
        typer.echo(_table(found))
    return TrainExit.OK


def _table(found: Estimate) -> str:
    rows = found.rows()
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}" for name, value in rows]
    return "\n".join([*lines, *(f"note: {note}" for note in found.notes)])


def _show_head(run: RunConfig, machine: TrainMachine, *, as_json: bool) -> None:
    """The resolved config, and the route of the attention with its reasons."""
    from nsa.train.estimate import routes_of

    routes = routes_of(run, machine.capability)
    if as_json:
        found = [asdict(one) for one in dict.fromkeys(routes)]
        typer.echo(
            json.dumps({"sha256": run.sha256(), "config": run.to_mapping(), "routes": found})
        )
        return
    typer.echo("\n".join(_config_lines(run)))
    typer.echo("\n".join(_route_lines(routes)))
    sys.stdout.flush()  # the child writes to the same place


def _config_lines(run: RunConfig) -> list[str]:
    """YAML, a line a section, in the order of RunConfig."""
    lines = [f"# sha256 {run.sha256()}"]
    return lines + [f"{name}: {_flow(value)}" for name, value in run.to_mapping().items()]


def _flow(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_flow(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_flow(one) for one in value) + "]"
    return json.dumps(value, ensure_ascii=False)


def _route_lines(routes: Sequence[Route]) -> list[str]:
    lines = []
    for one in dict.fromkeys(routes):
        layers = [i for i, other in enumerate(routes) if other == one]
        name = "all layers" if len(layers) == len(routes) else f"layers {layers}"
        lines += [f"route of {name}: {line}" for line in one.explain()]
    return lines


def completed(argv: Sequence[str]) -> list[str]:
    """``argv`` with `train` where it was left out, and with what a bare --resume means."""
    words = list(argv) or ["--help"]
    commands = {command.name or str(command.callback.__name__) for command in _commands()}
    if words[0] not in commands and words[0] != "--help":
        words.insert(0, "train")
    found = []
    for i, word in enumerate(words):
        after = words[i + 1] if i + 1 < len(words) else "-"
        bare = after.startswith("-") or after.endswith((".yaml", ".yml"))
        found.append("--resume=auto" if word == "--resume" and bare else word)
    return found


def _commands() -> list[Any]:
    return list(app.registered_commands)


def invoke(argv: Sequence[str]) -> int:
    """Run one command line and return its exit code; an error is one line on stderr. Ctrl-C is
    typer's: 130, and nothing is shown.
    """
    from nsa.routing import RouteError

    try:
        code = typer.main.get_command(app).main(
            args=completed(argv), prog_name="python -m nsa.train", standalone_mode=False
        )
    except TrainError as error:
        return _fail(error.code, str(error))
    except typer.TyperException as error:
        return _fail(TrainExit.USAGE, error.format_message())
    except (RouteError, ValueError) as error:
        return _fail(TrainExit.USAGE, str(error))
    return code if isinstance(code, int) else TrainExit.OK


def _fail(code: TrainExit, message: str) -> int:
    typer.echo(f"nsa.train: {' '.join(message.split())}", err=True)
    return int(code)


def main() -> int:
    return invoke(sys.argv[1:])
