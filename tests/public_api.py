"""What `nsa` and `perfbench` promise, as text: `python -m tests.public_api` writes
tests/data/public-api.txt, which tests/test_public_api.py compares with.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import typer

import nsa
import nsa.huggingface
import nsa.parallel
import perfbench
from nsa.cli import app as nsa_app
from nsa.settings import Settings
from perfbench.commands.app import app as perfbench_app
from perfbench.records import EXIT_OF, Verdict

FILE = Path(__file__).parent / "data" / "public-api.txt"
PACKAGES = (nsa, nsa.huggingface, nsa.parallel, perfbench)
RENEW = "python -m tests.public_api"
HEAD = f"""\
# Public names of nsa and perfbench (docs/stability.md). Do not edit: `{RENEW}` writes it.
# A parameter after `*` is given by name.
"""


def text() -> str:
    """The whole file."""
    parts = [
        *(line for package in PACKAGES for line in of_package(package)),
        *of_command("perfbench", typer.main.get_command(perfbench_app)),
        *of_command("python -m nsa", typer.main.get_command(nsa_app)),
        *(f"environment NSA_{name.upper()}" for name in sorted(Settings.__dataclass_fields__)),
        *(f"verdict {one.value} exit {int(EXIT_OF[one])}" for one in Verdict),
    ]
    return HEAD + "\n".join(parts) + "\n"


def of_package(package: ModuleType) -> Iterator[str]:
    for name in package.__all__:
        thing, full = getattr(package, name), f"{package.__name__}.{name}"
        if not inspect.isclass(thing):
            yield f"function {full}{returned(thing)}"
            yield from parameters(thing)
        elif issubclass(thing, enum.Enum):
            yield f"enum {full}"
            yield from (f"    {one.name} = {one.value!r}" for one in thing)
        else:
            yield from of_class(full, thing)


def of_class(full: str, cls: type) -> Iterator[str]:
    """How it is made, its fields where it is a dataclass, and what it and its bases from here
    define.
    """
    bases = [base.__name__ for base in cls.__bases__ if base is not object]
    yield f"class {full}" + (f" is a {', '.join(bases)}" if bases else "")
    yield from parameters(cls.__init__)
    fields = {one.name for one in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else ()
    if fields:
        yield f"    fields: {', '.join(one.name for one in dataclasses.fields(cls))}"
    own = [one for one in cls.__mro__ if one.__module__.split(".")[0] in ("nsa", "perfbench")]
    names = sorted({name for one in own for name in vars(one)} - set(fields))
    for name in names:
        if name.startswith("_"):
            continue
        member = inspect.getattr_static(cls, name)
        if isinstance(member, property):
            yield f"    property {name}{returned(member.fget)}"
        elif callable(getattr(cls, name)):
            yield f"    method {name}{returned(getattr(cls, name))}"
            yield from (f"    {line}" for line in parameters(getattr(cls, name)))
        else:
            yield f"    attribute {name}"


def parameters(function: Any) -> Iterator[str]:
    """One line each, with what is left out when it is omitted."""
    if function in (object.__init__, Exception.__init__, ValueError.__init__):
        return
    stars = {
        inspect.Parameter.KEYWORD_ONLY: "* ",
        inspect.Parameter.VAR_POSITIONAL: "*args ",
        inspect.Parameter.VAR_KEYWORD: "**kwargs ",
    }
    for one in inspect.signature(function).parameters.values():
        if one.name == "self":
            continue
        kind = "" if one.annotation is one.empty else f": {shown(one.annotation)}"
        default = "" if one.default is one.empty else f" = {value(one.default)}"
        yield f"    {stars.get(one.kind, '')}{one.name}{kind}{default}"


def returned(function: Any) -> str:
    found = inspect.signature(function).return_annotation
    return "" if found is inspect.Signature.empty else f" -> {shown(found)}"


def shown(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def value(default: Any) -> str:
    """The same on every machine: a path as text; of an object only that there is one."""
    if isinstance(default, Path):
        return repr(default.as_posix())
    plain = default is None or isinstance(default, str | int | float | tuple)
    return repr(default) if plain else "..."


def of_command(name: str, command: Any) -> Iterator[str]:
    """A command with its arguments and options; a group with its commands."""
    yield f"command {name}"
    for one in command.params:
        words = " ".join([*one.opts, *one.secondary_opts])
        if "completion" in words:
            continue  # typer's own
        if one.param_type_name == "argument":
            words = one.metavar or one.name.upper()
        taken = "" if getattr(one, "is_flag", False) else f" {one.metavar or 'VALUE'}"
        kind = inspect.formatannotation(one.type_descriptor.annotation)
        kind = re.sub(r"\bpathlib\.(_local\.)?", "", kind)
        wanted = ", required" if one.required else ""
        default = "" if one.default in (None, False) else f" = {value(one.default)}"
        names = words if one.param_type_name == "argument" else words + taken
        yield f"    {names}: {kind}{wanted}{default}"
    for sub, inner in sorted(getattr(command, "commands", {}).items()):
        yield from of_command(f"{name} {sub}", inner)


def main() -> int:
    FILE.write_text(text(), encoding="utf-8")
    print(FILE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
