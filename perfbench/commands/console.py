"""What a command prints: data on stdout, progress and warnings on stderr."""

from __future__ import annotations

import sys

import typer


def print_text(text: str) -> None:
    """On stdout; an undecodable byte in a name is a lone surrogate, which no terminal takes."""
    typer.echo(text.rstrip("\n").encode("utf-8", "backslashreplace").decode("utf-8"))


def say(text: str) -> None:
    print(f"perfbench: {text}", file=sys.stderr, flush=True)


def warn(text: str) -> None:
    say(f"warning: {text}")
