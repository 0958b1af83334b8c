"""A run's config from strict YAML 1.2, with the file and the line of what is wrong.

ruamel.yaml's nodes are read, not its values: its constructors take what a config must not have
(tags, aliases) and numbers that readers take for another kind. In YAML 1.1 1e6 is a text, 010 is 8,
and on is true.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, get_type_hints

from nsa.config import MODEL_ALIASES, NSA_ALIASES, nearest_name
from nsa.installing import pip_install
from nsa.train.config import FOUNDING_NAMES, RunConfig
from nsa.train.errors import TrainError, TrainExit

if TYPE_CHECKING:
    from ruamel.yaml.events import Event
    from ruamel.yaml.nodes import MappingNode, Node, ScalarNode

MARK = "@"
# The build puts the checkout's configs/ into the wheel as nsa/train/configs (setup.py).
_HOMES = (Path(__file__).with_name("configs"), Path(__file__).parents[2] / "configs")
MAX_BYTES = 2**20
MAX_DEPTH = 16
_NULL = ("", "~", "null", "Null", "NULL")
_TRUE, _FALSE = ("true", "True", "TRUE"), ("false", "False", "FALSE")
_INT = re.compile(r"-?(0|[1-9][0-9]{0,17})")
_FLOAT = re.compile(r"-?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_MISLEADING = re.compile(
    r"\+[0-9.].*|-?0[0-9_]+|-?0[oxb][0-9a-f_]+|-?[0-9][0-9_]*_[0-9_.]*|-?[0-9]+(:[0-9]{1,2})+"
    r"|[-+]?\.(inf|nan)",
    re.IGNORECASE,
)
_Loc = tuple[str, ...]
# How errors of configs begin, and the section of the key that they name.
_NAMED: dict[str, _Loc] = {
    r"ModelConfig\.(\w+)": ("model",),
    r"NSAConfig\.(\w+)": ("model", "nsa"),
    r"model has no key '([^']*)'": ("model",),
    r"nsa has no key '([^']*)'": ("model", "nsa"),
    r"(layers) has no key": ("model",),
    r"no model (preset)": ("model",),
    r"(num_heads|head_dim)=": ("model",),
    r"(\w+\.\w+)\b": (),
    r"(\w+) is no section": (),
    r"(\w+)=": (),
}


@dataclass(frozen=True, slots=True)
class _Read:
    """Plain values, and where (file:line, or the option) each key stands."""

    values: dict[str, Any]
    places: dict[_Loc, str]

    def place(self, loc: _Loc) -> str:
        while loc and loc not in self.places:
            loc = loc[:-1]
        return self.places.get(loc, self.places[()])


def read_config(path: str, sets: Sequence[str] = ()) -> RunConfig:
    """The config of the file ``path``, or of a shipped one for @NAME, with ``sets``
    ("section.key=value", the value in YAML) in the place of what it has.

    TrainError USAGE, in one line with file and line: a file that cannot be read, what is no strict
    YAML, a name that is not known (with the nearest), a value that does not fit.
    """
    read = _parse(_text(path), path)
    for text in sets:
        _set(read, text)
    _check_texts(read)
    try:
        return RunConfig.from_mapping(read.values)
    except ValueError as error:
        message = str(error)
        raise _usage(f"{read.place(_location_of(message, read))}: {message}") from None


def _usage(message: str) -> TrainError:
    return TrainError(TrainExit.USAGE, message)


def _check_texts(read: _Read) -> None:
    """A text is a text: what the sections' own checks take as it is."""
    for section, kind in get_type_hints(RunConfig).items():
        values = read.values.get(section)
        if section == "out" and not isinstance(read.values.get("out", ""), str):
            raise _usage(f"{read.place(('out',))}: out={read.values['out']!r} must be a path")
        if not is_dataclass(kind) or not isinstance(values, dict):
            continue
        for name, hint in get_type_hints(kind).items():
            given = values.get(name, "")
            is_text = isinstance(given, str) or (given is None and hint == str | None)
            if hint in (str, str | None) and not is_text:
                raise _usage(
                    f"{read.place((section, name))}: {section}.{name}={given!r} must be a"
                    " text; quote it"
                )


def _location_of(message: str, read: _Read) -> _Loc:
    """Where the key stands that an error of a config names."""
    for pattern, section in _NAMED.items():
        if found := re.match(pattern, message):
            loc = (*section, *found[1].split("."))
            written = [old for old, new in _other_names().items() if new == ".".join(loc)]
            locs = [loc, *(tuple(one.split(".")) for one in written)]
            return next((one for one in locs if one in read.places), loc)
    return ()


def _other_names() -> dict[str, str]:
    """Founding names and the paper's letters, and what each is here."""
    names = dict(FOUNDING_NAMES)
    names.update({f"model.{old}": f"model.{new}" for old, new in MODEL_ALIASES.items()})
    names.update({f"model.nsa.{old}": f"model.nsa.{new}" for old, new in NSA_ALIASES.items()})
    return names


def _shipped(path: str) -> Path:
    """The file that ``path`` names: one of the configs that come with nsa for @NAME."""
    if not path.startswith(MARK):
        return Path(path)
    home = next((one for one in _HOMES if one.is_dir()), _HOMES[0])
    known = sorted(one.stem for one in home.glob("*.yaml"))
    if path[1:] not in known:
        raise _usage(
            f"{path[:100]!r} names no config that nsa ships{nearest_name(path[1:], known)}"
        )
    return home / f"{path[1:]}.yaml"


def _text(path: str) -> str:
    file = _shipped(path)
    try:
        if file.is_dir():
            raise _usage(f"{path} is a folder; wanted a config, a YAML file; give one of its files")
        if file.exists() and not file.is_file():
            raise _usage(f"{path} is no regular file; wanted a config, a YAML file")
        size = file.stat().st_size
        if size > MAX_BYTES:
            raise _usage(
                f"{path} has {size:,} bytes, which no config has; wanted at most {MAX_BYTES:,};"
                " check that it is the right file"
            )
        raw = file.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or str(error)
        raise _usage(
            f"cannot read {path!r}: {reason}; give the path of a config, or"
            " @NAME of a shipped one, such as @tiny-cpu"
        ) from None
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise _usage(
            f"{path}:{line}: byte 0x{raw[error.start]:02x} is not UTF-8; save the file as UTF-8"
        ) from None


def _parse(text: str, path: str) -> _Read:
    def at(line: int) -> str:
        return f"{path}:{line + 1}"

    node = _compose(text, at, f"{path}: ")
    reader = _Reader(at)
    if node is None:
        raise _usage(f"{path}:1: the file is empty; wanted sections such as model, data and train")
    values = reader.value(node, ())
    if not isinstance(values, dict):
        raise _usage(
            f"{at(node.start_mark.line)}: the top is no mapping; wanted sections such as model,"
            " data and train"
        )
    return _Read(values, reader.places)


def _set(read: _Read, text: str) -> None:
    """Put ``section.key=value`` into ``read``."""
    name, equals, value = text.partition("=")
    option = f"--set {text}"
    name = name.strip()
    if not equals or not name:
        raise _usage(f"{option}: wanted section.key=value, such as --set train.seq_len=2048")
    loc = tuple(name.split("."))
    node = _compose(value, lambda line: option, f"{option}: ")
    reader = _Reader(lambda line: option)
    given = None if node is None else reader.value(node, loc)
    _forget_other_name(read, loc)
    target = read.values
    for part in loc[:-1]:
        inner = target.setdefault(part, {})
        if inner is None:
            inner = target[part] = {}
        if not isinstance(inner, dict):
            raise _usage(
                f"{option}: {part} is {inner!r}, which has no keys; wanted the name of a section"
            )
        target = inner
    target[loc[-1]] = given
    for known in [one for one in read.places if one[: len(loc)] == loc]:
        del read.places[known]
    read.places.update(reader.places)
    read.places[loc] = option


def _forget_other_name(read: _Read, loc: _Loc) -> None:
    """Drop what the file has under another name of ``loc``: the option is meant instead of it."""
    names = _other_names()
    own = ".".join(loc)
    meant = names.get(own, own)
    same = [name for name in {*names, *names.values()} if names.get(name, name) == meant]
    for name in same:
        *sections, key = name.split(".")
        inner: Any = read.values
        for part in sections:
            inner = inner.get(part) if isinstance(inner, dict) else None
        if name != own and isinstance(inner, dict):
            inner.pop(key, None)


def _compose(text: str, at: Callable[[int], str], prefix: str) -> Node | None:
    try:
        from ruamel.yaml import YAML
        from ruamel.yaml.error import MarkedYAMLError, YAMLError
    except ModuleNotFoundError:
        raise TrainError(
            TrainExit.MISSING,
            f"the package ruamel.yaml is missing, which a config needs; {pip_install('train')}",
        ) from None
    if re.search(r"^%", text, re.MULTILINE):
        line = next(i for i, one in enumerate(text.split("\n")) if one.startswith("%"))
        raise _usage(f"{at(line)}: a YAML directive; remove it, configs are YAML 1.2")
    try:
        depth = 0
        for event in YAML(typ="safe", pure=True).parse(text):
            depth = _refuse(event, at, depth)
        node: Node | None = YAML(typ="safe", pure=True).compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = at(mark.line) if mark else prefix.rstrip(": ")
        what = ", ".join(str(one) for one in (error.context, error.problem) if one)
        what = "a TAB; use spaces" if r"'\t'" in what else f"{what}; fix the syntax here"
        raise _usage(f"{where}: not valid YAML: {what}") from None
    except (YAMLError, ValueError, OverflowError) as error:  # a character or an escape
        reason = getattr(error, "reason", None) or error
        raise _usage(f"{prefix}not valid YAML: {reason}; remove the character") from None
    return node


def _refuse(event: Event, at: Callable[[int], str], depth: int) -> int:
    """The depth behind ``event``, at which the next one stands; TrainError for what a strict file
    does not need. (A node has the tag that its text resolves to; an event, that of the file alone.)
    """
    from ruamel.yaml.events import (
        AliasEvent,
        MappingEndEvent,
        MappingStartEvent,
        SequenceEndEvent,
        SequenceStartEvent,
    )

    where = at(event.start_mark.line)
    if isinstance(event, AliasEvent) or getattr(event, "anchor", None):
        raise _usage(
            f"{where}: anchors (&) and aliases (*) are not used in a config; write the value out,"
            " or quote the text"
        )
    if tag := getattr(event, "tag", None):
        raise _usage(
            f"{where}: the tag {str(tag)[:60]!r} is not used in a config; remove it, or quote the"
            " text"
        )
    if isinstance(event, MappingEndEvent | SequenceEndEvent):
        return depth - 1
    if not isinstance(event, MappingStartEvent | SequenceStartEvent):
        return depth
    if depth == MAX_DEPTH:  # before the parser has read it all, whose time grows with its square
        raise _usage(f"{where}: nested deeper than {MAX_DEPTH} levels; look for a missing bracket")
    return depth + 1


class _Reader:
    """Nodes to plain values; refuses what a strict file does not need."""

    def __init__(self, at: Callable[[int], str]) -> None:
        self._at = at
        self.places: dict[_Loc, str] = {(): at(0)}

    def value(self, node: Node, loc: _Loc) -> Any:
        from ruamel.yaml.nodes import MappingNode, ScalarNode, SequenceNode

        if isinstance(node, MappingNode):
            return self._mapping(node, loc)
        if isinstance(node, SequenceNode):
            return [self.value(one, (*loc, str(i))) for i, one in enumerate(node.value)]
        assert isinstance(node, ScalarNode)
        return self._scalar(node)

    def _mapping(self, node: MappingNode, loc: _Loc) -> dict[str, Any]:
        from ruamel.yaml.nodes import ScalarNode

        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self._scalar(key_node) if isinstance(key_node, ScalarNode) else None
            if not isinstance(key, str):
                self._fail(key_node, "a key must be text; quote it, or remove it")
            at = (*loc, key)
            if key in found:
                self._fail(
                    key_node,
                    f"{'.'.join(at)} is given twice, first at {self.places[at]}; keep one",
                )
            self.places[at] = self._at(key_node.start_mark.line)
            found[key] = self.value(value_node, at)
        return found

    def _scalar(self, node: ScalarNode) -> Any:
        text = str(node.value)
        if node.style is not None:  # quoted or a block
            return text
        if text in _NULL:
            return None
        if text in _TRUE or text in _FALSE:
            return text in _TRUE
        if _INT.fullmatch(text):
            return int(text)
        if _MISLEADING.fullmatch(text):
            self._fail(
                node,
                f"{text[:60]} is a number that readers take for another one; write plain decimal"
                " digits without + and leading zeros, or quote it as text",
            )
        if _FLOAT.fullmatch(text):
            if not math.isfinite(float(text)):
                self._fail(node, f"{text[:60]} is beyond the range of numbers")
            return float(text)
        return text

    def _fail(self, node: Node, message: str) -> NoReturn:
        raise _usage(f"{self._at(node.start_mark.line)}: {message}")
