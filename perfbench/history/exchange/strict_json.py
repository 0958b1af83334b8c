"""JSON of other tools: a key that stands twice is an error, NaN and Infinity are numbers that no
reader takes for a measurement.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from perfbench.history.exchange.source import SourceFile, refuse, short

WRITE_AGAIN = "have the tool write the file again"
WRONG_FORMAT = "check that FORMAT is the tool that wrote it"
Model = TypeVar("Model", bound="Schema")
_WANTED = {  # by pydantic's name of what is wrong
    "bool_type": "true or false",
    "dict_type": "an object",
    "float_type": "a number",
    "int_from_float": "a whole number",
    "int_type": "a whole number",
    "list_type": "a list",
    "model_type": "an object",
    "string_too_short": "text that is not empty",
    "string_type": "text",
}


class Schema(BaseModel):
    """The part of a format that a reader uses; a number is not read from text or from a bool."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=True)


class _Doubled(dict[str, Any]):
    """An object that names a key twice."""

    key = ""


def parse(source: SourceFile) -> Any:
    """The whole file as one document; USAGE with line and column, or with the place of a doubled
    key.
    """
    return parse_text(text_of(source), source.name)


def parse_text(text: str, name: str, first_line: int = 1) -> Any:
    """The same for a text that begins in line ``first_line`` of the file ``name``."""
    try:
        whole = json.loads(text, object_pairs_hook=_object, parse_int=_whole)
    except json.JSONDecodeError as error:
        place = f"{name}:{first_line + error.lineno - 1}:{error.colno}"
        refuse(place, f"not JSON ({error.msg})", WRITE_AGAIN)
    except RecursionError:
        refuse(f"{name}:{first_line}", "not JSON that is read (nested too deep)", WRITE_AGAIN)
    for path, value in _objects(whole):
        if isinstance(value, _Doubled):
            problem = f"got the key {short(value.key)!r} twice in one object, wanted it once"
            refuse(_place(name, path), problem, WRITE_AGAIN)
    return whole


def text_of(source: SourceFile) -> str:
    """The file's text without its byte order mark; USAGE where it is not UTF-8."""
    try:
        return source.data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        refuse(source.name, f"not UTF-8 at byte {error.start}", WRITE_AGAIN)


def checked(model: type[Model], value: object, place: str) -> Model:
    """``value`` as ``model``; USAGE with the first field that is not as the format has it."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = _place(place, first["loc"])
        if first["type"] == "missing":
            refuse(where, "it is missing", WRONG_FORMAT)
        wanted = _WANTED.get(first["type"], "another value")
        if first["type"] == "greater_than_equal":
            wanted = f"at least {first['ctx']['ge']}"
        elif first["type"] == "literal_error":
            wanted = str(first["ctx"]["expected"])
        refuse(where, f"got {short(repr(first['input']))}, wanted {wanted}", WRONG_FORMAT)


def _place(name: str, path: tuple[str | int, ...]) -> str:
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    inner = "".join(steps).lstrip(".")
    return f"{name}: {short(inner)}" if inner else name


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) == len(pairs):
        return made
    doubled, seen = _Doubled(made), set[str]()
    for key, _ in pairs:
        if key in seen:
            doubled.key = key
            break
        seen.add(key)
    return doubled


def _whole(text: str) -> int | float:
    """Beyond 64 bits a float, which may be infinite: Python refuses to read 4,300 digits."""
    if len(text) <= 20 and -(2**63) <= (value := int(text)) < 2**63:
        return value
    return float(text)


def _objects(whole: Any) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Every object and list with the way to it, outer ones first."""
    stack: list[tuple[tuple[str | int, ...], Any]] = [((), whole)]
    while stack:
        path, value = stack.pop()
        if isinstance(value, dict):
            yield path, value
            below: Iterator[tuple[str | int, Any]] = iter(value.items())
        elif isinstance(value, list):
            below = enumerate(value)
        else:
            continue
        stack.extend(((*path, key), one) for key, one in below if isinstance(one, dict | list))


def unknown_shape(name: str, wanted: str) -> NoReturn:
    """USAGE: the document is not of the format at all."""
    refuse(name, f"wanted {wanted}", WRONG_FORMAT)
