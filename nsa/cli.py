"""``python -m nsa``: which settings hold, and which route a call would take.

No command imports torch unless it must probe.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer

from nsa import capability, settings
from nsa.config import PRESETS, nearest_name, preset
from nsa.retired import RETIRED
from nsa.routing import FA2_CHOICES, PATH_REQUESTS, Capability, Request, Route, plan

DTYPES: Mapping[str, str] = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "fp64": "float64",
}
USAGE = 2

app = typer.Typer(
    help="Native Sparse Attention: what is set, and which route a call takes and why.",
    add_completion=False,
    rich_markup_mode=None,  # rich costs more than the rest of --help together
    pretty_exceptions_enable=False,
)
Json = Annotated[bool, typer.Option("--json", help="JSON instead of text.")]


@app.command("settings")
def show_settings(
    retired: Annotated[
        bool,
        typer.Option(
            "--retired", help="List the variables that are retired, and what replaces them."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Print every NSA_* variable: its value, where the value is from, and what it means."""
    if retired:
        typer.echo(
            json.dumps(dict(RETIRED), indent=2)
            if as_json
            else _table(["NAME", "USE INSTEAD"], [list(row) for row in RETIRED.items()])
        )
        return
    rows = [
        {
            "name": name,
            "value": setting.text,
            "source": setting.source,
            "meaning": settings.MEANINGS[name],
        }
        for name, setting in settings.current().by_name().items()
    ]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    typer.echo(
        _table(
            ["NAME", "VALUE", "SOURCE", "MEANING"],
            [[text or "unset" for text in row.values()] for row in rows],
        )
    )


@app.command()
def explain(
    seq_len: Annotated[
        int, typer.Option("--seq-len", metavar="TOKENS", help="Tokens of each sequence.")
    ],
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu",
            metavar="NAME",
            help=f"none, {', '.join(capability.KNOWN_GPUS)}; default: this machine.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str, typer.Option("--model", metavar="PRESET", help=f"One of {', '.join(PRESETS)}.")
    ] = "m7c_125m",
    path: Annotated[
        str, typer.Option("--path", metavar="PATH", help=f"One of {', '.join(PATH_REQUESTS)}.")
    ] = "auto",
    fa2: Annotated[
        str, typer.Option("--fa2", metavar="FA2", help=f"One of {', '.join(FA2_CHOICES)}.")
    ] = "auto",
    batch: Annotated[int, typer.Option("--batch", metavar="N", help="Sequences.")] = 1,
    dtype: Annotated[
        str, typer.Option("--dtype", metavar="DTYPE", help=f"One of {', '.join(DTYPES)}.")
    ] = "bf16",
    softcap: Annotated[
        float | None,
        typer.Option(
            "--softcap",
            metavar="C",
            help="As NSAConfig.softcap.",
            show_default=False,
        ),
    ] = None,
    sinks: Annotated[bool, typer.Option("--sinks", help="As NSAConfig.sinks.")] = False,
    return_lse: Annotated[bool, typer.Option("--return-lse", help="As of nsa_attention.")] = False,
    as_json: Json = False,
) -> None:
    """Print the route of one attention layer, with its reasons and what was rejected; nothing
    runs.
    """
    for option, number in (("--seq-len", seq_len), ("--batch", batch)):
        if number < 1:
            raise ValueError(
                f"{option} {number} must be a whole number >= 1; 8192 tokens in 1 sequence are a"
                " usual training step"
            )
    config, request = preset(model), settings.current().request(path, fa2)
    where = capability.this_machine() if gpu is None else capability.assumed(gpu)
    config = replace(config, nsa=replace(config.nsa, softcap=softcap, sinks=sinks))
    decision = plan(
        request,
        config,
        batch=batch,
        tokens=seq_len,
        dtype=_dtype(dtype),
        capability=where,
        return_lse=return_lse,
    )
    if as_json:
        call = {"model": model, "batch": batch, "seq_len": seq_len, "dtype": _dtype(dtype)}
        typer.echo(json.dumps(_as_data(call, request, where, decision), indent=2))
        return
    sm = "" if where.sm is None else f" (SM {where.sm[0]}.{where.sm[1]})"
    typer.echo(f"{model}, {batch} x {seq_len} tokens, {_dtype(dtype)}, on {where.device_name}{sm}")
    if gpu is not None:
        typer.echo("assumed: that device with the torch and the FA-2 that are installed here")
    typer.echo("\n".join(decision.explain()))


def _as_data(
    call: dict[str, Any], request: Request, where: Capability, decision: Route
) -> dict[str, Any]:
    return {
        "call": call,
        "request": asdict(request),
        "capability": asdict(where),
        "route": asdict(decision),
    }


def _dtype(name: str) -> str:
    """torch's name of a dtype given by either name."""
    if name not in DTYPES and name not in DTYPES.values():
        raise ValueError(
            f"--dtype {name!r} is not known{nearest_name(name, [*DTYPES, *DTYPES.values()])}"
        )
    return DTYPES.get(name, name)


def _table(header: list[str], rows: list[list[str]]) -> str:
    """Columns of text, two spaces apart; the last one runs on."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header) - 1)]
    lines = (
        [f"{cell:<{width}}" for cell, width in zip(row[:-1], widths, strict=True)] + [row[-1]]
        for row in [header, *rows]
    )
    return "\n".join("  ".join(line) for line in lines)


def invoke(argv: Sequence[str]) -> int:
    """Run one command line and return its exit code; a user's error is one line on stderr and 2."""
    try:
        code = typer.main.get_command(app).main(
            args=list(argv) or ["--help"], prog_name="python -m nsa", standalone_mode=False
        )
    except (typer.TyperException, ValueError) as error:  # a RouteError is a ValueError
        message = error.format_message() if isinstance(error, typer.TyperException) else str(error)
        typer.echo(f"nsa: {' '.join(message.split())}", err=True)
        return USAGE
    return code if isinstance(code, int) else 0


def main() -> int:
    return invoke(sys.argv[1:])
