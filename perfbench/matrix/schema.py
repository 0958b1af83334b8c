"""The sections of a matrix file as pydantic models, and their errors with file, line and the
nearest name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nsa.config import (
    MODEL_ALIASES,
    NSA_ALIASES,
    PRESETS,
    ModelConfig,
    NSAConfig,
    nearest_name,
    preset,
)
from perfbench.errors import Exit, PerfbenchError
from perfbench.matrix.policy import GatePolicy
from perfbench.matrix.strict_yaml import Document, Loc
from perfbench.records import AXES, SENTINEL_UNITS, Axis, Kind, MeasureOptions, show_value

MATRIX_VERSION = 1
NO_MODEL = "of the step's own"
_PEER_NAME = "^[a-z][a-z0-9_]{0,39}$"
MAX_MISTAKES = 20  # shown at once: a screenful


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class Target(_Section):
    """The machine that the numbers are about; ``gpu`` is part of the card's name, or none for a
    CPU.
    """

    gpu: str = Field(min_length=1)
    count: int = Field(default=1, ge=1)
    on_mismatch: Literal["refuse", "warn", "skip"] = "refuse"

    @property
    def is_cpu(self) -> bool:
        return self.gpu.lower() in ("none", "cpu")


class Limits(_Section):
    """``oom``, what a cell that runs out of memory means: a failed cell, after which longer or
    larger ones of the same path are not tried (or are: record); find_boundary: batches are tried
    from the smallest, and what does not fit is no failure, as long as a smaller batch does.
    """

    timeout_s: float = Field(default=300.0, gt=0)
    oom: Literal["record_and_skip_larger", "record", "find_boundary"] = "record_and_skip_larger"


class ExpectSection(_Section):
    """Routing that cells must show, and the most that a step of them may cost; ``match: {}`` means
    every cell.

    ``max_launches``: kernels of a step. ``max_host_ms``: to enqueue a step on an idle device.
    ``max_device_ms``: its kernels, summed.
    """

    match: dict[str, Any]
    engaged: list[str] = []
    forbidden: list[str] = []
    max_launches: int | None = Field(default=None, ge=1)
    max_host_ms: float | None = Field(default=None, gt=0)
    max_device_ms: float | None = Field(default=None, gt=0)


class OverrideSection(_Section):
    """Keys of ``gate:`` that some cells change, and why; ``match: {}`` would be every cell, which
    is ``gate:`` itself.
    """

    match: dict[str, Any]
    gate: dict[str, Any]
    reason: str


class PeerSection(_Section):
    """A peer as a matrix declares it; perfbench.records.peers says what each key means."""

    kind: Kind
    function: str = ""
    entry_point: str = ""
    checkout: str = ""  # a folder, relative to that of the matrix
    options: dict[str, Any] = {}
    packages: list[str] = []
    kernels: str = ""
    backward: bool = True
    gpu_backward: bool = False
    repeatable: bool = False
    sm: str = ""
    dtypes: list[str] = []
    head_dims: list[int] = []
    groups: list[int] = []
    equal_dims: bool = False
    kv: Literal["one", "three"] = "three"
    wants: dict[str, Any] = {}
    nsa: dict[str, Any] = {}


class MatrixFile(_Section):
    """A matrix as written: the product of ``axes``, minus ``exclude``, plus ``include``."""

    version: Literal[1]
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")  # names files of baselines
    target: Target
    model: Any = None  # none where every workload is a user's own step
    axes: dict[str, list[Any]]
    exclude: list[dict[str, Any]] = []
    include: list[dict[str, Any]] = []
    expect: list[ExpectSection] = []
    measure: MeasureOptions = MeasureOptions()
    limits: Limits = Limits()
    gate: GatePolicy = GatePolicy()
    overrides: list[OverrideSection] = []
    aliases: dict[str, str] = {}  # a cell's former id -> its id now
    sentinels: list[str] = []
    trained_blocks: Any = None  # the file of selection=trained
    peers: dict[str, PeerSection] = {}  # name on the axis path -> what serves it


_SECTIONS: Mapping[str, type[BaseModel]] = {
    "target": Target,
    "expect": ExpectSection,
    "measure": MeasureOptions,
    "limits": Limits,
    "gate": GatePolicy,
    "overrides": OverrideSection,
    "peers": PeerSection,
}
SENTINELS = tuple(SENTINEL_UNITS)
# keys of `gate:` that no single cell has
WHOLE_RUN = ("metric", "alpha_confirm", "confirm_pairs", "sentinel_band_pct")


def validate(document: Document) -> MatrixFile:
    """Check every section; all errors are reported at once, each with its line."""
    version = document.data.get("version")
    if isinstance(version, bool):  # pydantic takes true for Literal[1]
        document.fail(("version",), f"got {show_value(version)}, wanted {MATRIX_VERSION}")
    if isinstance(version, int) and version > MATRIX_VERSION:
        document.fail(
            ("version",),
            f"version {version} is newer than {MATRIX_VERSION}, which this perfbench reads; upgrade"
            " perfbench",
        )
    try:
        return MatrixFile.model_validate(document.data, strict=True)
    except ValidationError as error:
        found = sorted(error.errors(include_url=False), key=lambda e: document.line(error_loc(e)))
    lines = [_located(document, error_loc(e), _explain(e)) for e in found[:MAX_MISTAKES]]
    if more := len(found) - len(lines):
        at = document.line(error_loc(found[MAX_MISTAKES]))
        lines.append(
            _located(document, (), f"{more} more mistakes, from line {at} on; correct these first")
        )
    raise PerfbenchError(Exit.USAGE, "\n".join(lines))


def policy_with(
    document: Document, loc: Loc, base: GatePolicy, changes: Mapping[str, Any]
) -> GatePolicy:
    """``base`` with the keys that the `gate:` at ``loc`` changes; PerfbenchError(USAGE) names the
    line of a wrong one.
    """
    for key in changes:
        if key in WHOLE_RUN:
            document.fail(
                (*loc, key),
                "holds for the whole run, not for some cells; set it in the top-level `gate:`",
            )
    try:
        return GatePolicy.model_validate({**base.model_dump(), **changes}, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        at = error_loc(first)
        if first["type"] == "extra_forbidden":
            document.fail(
                (*loc, *at),
                f"unknown key{nearest_name(str(at[-1]), list(GatePolicy.model_fields))}",
            )
        document.fail((*loc, *at), _explain(first))


def error_loc(error: Mapping[str, Any]) -> Loc:
    return tuple(part for part in error["loc"] if part != "[key]")


def _located(document: Document, loc: Loc, message: str) -> str:
    try:
        document.fail(loc, message)
    except PerfbenchError as error:
        return str(error)


def _explain(error: Mapping[str, Any]) -> str:
    loc, kind = error["loc"], error["type"]
    if kind == "extra_forbidden":
        owner = MatrixFile if len(loc) == 1 else _SECTIONS[loc[0]]
        return f"unknown key{nearest_name(str(loc[-1]), list(owner.model_fields))}"
    if kind == "missing":
        return f"missing; add `{loc[-1]}:` (`perfbench init cpu` writes an example)"
    got = show_value(error["input"])
    if kind == "literal_error":
        wanted = str(error["ctx"]["expected"]).replace("'", "").replace(" or ", ", ")
        near = (
            nearest_name(error["input"], wanted.split(", "))
            if isinstance(error["input"], str)
            else ""
        )
        return f"got {got}, wanted {wanted}{near}"
    if kind == "string_pattern_mismatch":
        return f"got {got}, wanted letters, digits, '.', '_' and '-' only (it names files)"
    if kind == "value_error":
        return str(error["ctx"]["error"])
    if kind == "list_type" and isinstance(error["input"], str | int | float):
        return f"got {got}, wanted a list; write [{error['input']}]"
    if kind in ("float_type", "int_type") and (mend := _in_unit(str(loc[-1]), error["input"])):
        return f"got {got}, wanted a number; write {mend}"
    return f"got {got}: {str(error['msg'])[:1].lower()}{error['msg'][1:]}"


def _in_unit(key: str, value: object) -> str:
    """'1m' of a key that ends in _s is '60', of one in _ms '60000'; a quoted number without
    quotes; empty where it is neither.
    """
    found = _WITH_UNIT.fullmatch(value.strip()) if isinstance(value, str) else None
    if found is None:
        return ""
    number, unit = float(found[1]), found[2]
    if not unit:
        return f"{number:.15g}"
    of_key = next((one for one in ("ms", "s") if key.endswith(f"_{one}")), "")
    return f"{number * _SECONDS[unit] / _SECONDS[of_key]:.15g}" if of_key else ""


_SECONDS = {"ms": 1e-3, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_WITH_UNIT = re.compile(rf"([0-9]{{1,9}}(?:\.[0-9]{{1,9}})?)\s*({'|'.join(_SECONDS)})?")


def resolve_model(document: Document, spec: object) -> tuple[ModelConfig, str]:
    """The model's configuration and its name: a preset's, or 'inline-<hash>' for a mapping.

    A matrix of the user's own steps alone needs none: NO_MODEL, whose configuration nothing reads.
    """
    loc: Loc = ("model",)
    if spec is None and "model" not in document.data:
        # a slip in its form is named where the axes are read
        if all(isinstance(one, str) and ":" in one for one in _workloads(document)):
            return ModelConfig(), NO_MODEL
        document.fail((), "missing; add `model:` (`perfbench init cpu` writes an example)")
    try:
        if isinstance(spec, str):
            return preset(spec), spec
        if not isinstance(spec, dict):
            wanted = (
                f"a preset ({', '.join(PRESETS)}) or a mapping such as {{preset: tiny,"
                " num_layers: 4}"
            )
            document.fail(loc, f"got {show_value(spec)}, wanted {wanted}")
        _check_kinds(document, loc, spec, ModelConfig(), MODEL_ALIASES)
        model = ModelConfig.from_mapping(spec)
    except ValueError as error:
        document.fail(_blamed(spec, str(error)), str(error))
    return model, f"inline-{model.sha256()[:8]}"


def _workloads(document: Document) -> list[object]:
    """Those that the axes and the inclusions name, as written."""
    axes, include = document.data.get("axes"), document.data.get("include") or []
    named = [one.get("workload") for one in (axes, *include) if isinstance(one, dict)]
    found = [value for one in named for value in (one if isinstance(one, list) else [one])]
    return [one for one in found if one is not None] or [None]


def _check_kinds(
    document: Document,
    loc: Loc,
    spec: dict[str, Any],
    defaults: ModelConfig | NSAConfig,
    aliases: Mapping[str, str],
) -> None:
    """Refuse values of another kind than the field's default, which `from_mapping` takes for
    granted.
    """
    names = {f.name for f in fields(defaults)}
    for key, value in spec.items():
        name = aliases.get(key, key)
        if name == "layers" and isinstance(defaults, ModelConfig):
            document.fail(
                (*loc, key),
                "got layers of several kinds, wanted one kind, whose Route is the cell's; measure"
                " each kind by a matrix of its own, with its options under nsa:",
            )
        if name in ("softcap", "sinks") and isinstance(defaults, NSAConfig):
            document.fail(
                (*loc, key),
                f"got {name}, which the harness's own oracle and twin do not compute; wanted none;"
                f" leave {name} out",
            )
        if key == "preset" and isinstance(defaults, ModelConfig):
            kind: type = str
        elif name in names:
            default = getattr(defaults, name)
            kind = int if default is None else type(default)
        else:
            continue  # from_mapping names the nearest key
        if name == "checkpoint_layers":
            continue  # from_mapping wants two whole numbers
        if kind is NSAConfig:
            if isinstance(value, dict):
                _check_kinds(document, (*loc, key), value, NSAConfig(), NSA_ALIASES)
                continue
        elif kind is tuple:
            if isinstance(value, list) and all(isinstance(item, str) for item in value):
                continue
        elif kind is float:
            if isinstance(value, int | float) and not isinstance(value, bool):
                continue
        elif type(value) is kind:
            continue
        document.fail((*loc, key), f"got {show_value(value)}, wanted {_KINDS[kind]}")


_KINDS: Mapping[type, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    tuple: "a list such as [cmp, sel, win]",
    NSAConfig: "a mapping such as {l: 32, d: 16}",
}


def _blamed(spec: object, message: str) -> Loc:
    """The key that a ValueError of nsa.config is about, so that its line can be named."""
    loc: Loc = ("model",)
    if not isinstance(spec, dict):
        return loc
    nested = spec.get("nsa")
    candidates = [(*loc, key) for key in spec] + [
        (*loc, "nsa", key) for key in (nested if isinstance(nested, dict) else ())
    ]
    for candidate in candidates:
        key = str(candidate[-1])
        name = MODEL_ALIASES.get(key, NSA_ALIASES.get(key, key))
        owned = tuple(f"{owner}{name}=" for owner in ("", "ModelConfig.", "NSAConfig.", "model."))
        if f"key {key!r}" in message or f"({key!r} is" in message or message.startswith(owned):
            return candidate
    return loc


def matrix_schema() -> dict[str, Any]:
    """JSON Schema of a matrix file, for editors: what `perfbench schema matrix` prints."""
    schema = MatrixFile.model_json_schema()
    values = {name: _value_schema(axis) for name, axis in AXES.items()}
    # a peer that the matrix itself declares
    values["path"] = {"anyOf": [values["path"], {"type": "string", "pattern": _PEER_NAME}]}
    matched = {name: _one_or_many(_match_schema(axis)) for name, axis in AXES.items()}
    matched["path"] = _one_or_many(values["path"])
    properties = schema["properties"]
    properties["model"] = {"anyOf": [{"enum": list(PRESETS)}, {"type": "object"}]}
    properties["trained_blocks"] = {
        "anyOf": [
            {"type": "string", "minLength": 1},
            _closed(
                {
                    "file": {"type": "string", "minLength": 1},
                    "layer": {"type": "integer", "minimum": 0},
                },
                required=["file"],
            ),
        ]
    }
    properties["axes"] = _closed(
        {
            name: {"type": "array", "minItems": 1, "uniqueItems": True, "items": value}
            for name, value in values.items()
        },
        # a matrix of own steps alone states no path
        required=[name for name, axis in AXES.items() if axis.default is None and name != "path"],
    )
    properties["exclude"]["items"] = _closed(
        {**matched, "reason": {"type": "string", "minLength": 1}}, required=["reason"]
    )
    properties["include"]["items"] = _closed(
        {name: _one_or_many(value) for name, value in values.items()}
    )
    properties["aliases"]["additionalProperties"] = {"type": "string", "minLength": 1}
    properties["sentinels"] |= {"items": {"enum": list(SENTINELS)}, "uniqueItems": True}
    defined = schema["$defs"]
    defined["ExpectSection"]["properties"]["match"] = _closed(matched)
    changeable = {
        name: one
        for name, one in defined["GatePolicy"]["properties"].items()
        if name not in WHOLE_RUN
    }
    changes = _closed(
        {name: {k: v for k, v in one.items() if k != "default"} for name, one in changeable.items()}
    )
    defined["OverrideSection"]["properties"] = {
        "match": {**_closed(matched), "minProperties": 1},
        "gate": {**changes, "minProperties": 1},
        "reason": {"type": "string", "minLength": 1},
    }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _closed(properties: dict[str, Any], required: list[str] | None = None) -> dict[str, Any]:
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        "required": required or [],
    }


def _value_schema(axis: Axis) -> dict[str, Any]:
    if axis.pattern:
        return {
            "anyOf": [{"enum": list(axis.choices)}, {"type": "string", "pattern": axis.pattern}]
        }
    return {"enum": list(axis.choices)} if axis.choices else {"type": "integer", "minimum": 1}


def _match_schema(axis: Axis) -> dict[str, Any]:
    if axis.pattern:
        return _value_schema(axis)
    if axis.choices:
        return {"enum": [*axis.choices, *axis.recorded]}
    return {
        "anyOf": [
            _value_schema(axis),
            {"type": "string", "pattern": r"^(>=|<=|>|<)\s*[1-9][0-9]*$"},
        ]
    }


def _one_or_many(value: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [value, {"type": "array", "minItems": 1, "items": value}]}
