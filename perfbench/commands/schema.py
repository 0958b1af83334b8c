"""`perfbench schema`: the JSON Schema of a matrix file, of one line of a run file, or of
verdict.json.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import typer

from perfbench.commands.console import print_text

Kind = Annotated[
    Literal["matrix", "result", "verdict"],
    typer.Argument(help="A matrix file, one line of a run.jsonl, or a verdict.json."),
]


def schema(kind: Kind) -> None:
    """Print the JSON Schema of a file format."""
    print_text(json.dumps(_schema(kind), indent=2))


def _schema(kind: str) -> dict[str, Any]:
    if kind == "matrix":
        from perfbench.matrix import matrix_schema

        return matrix_schema()
    if kind == "verdict":
        from perfbench.report import verdict_schema

        return verdict_schema()
    from pydantic import TypeAdapter

    from perfbench.records import LINE_KEY, Manifest, Replicate, Resumed, SentinelLine

    kinds = (Manifest, Resumed, Replicate, SentinelLine)
    found = TypeAdapter(Manifest | Resumed | Replicate | SentinelLine).json_schema()
    for record in kinds:  # the writer adds it, so no record has it; files before schema 3 have none
        found["$defs"][record.__name__]["properties"][LINE_KEY] = {
            "type": "string",
            "pattern": "^[0-9a-f]{64}$",
            "description": "sha256 of the digest of the line before and of this line without it",
        }
    return found
