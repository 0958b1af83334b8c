"""The file of the user's own table: where it lies, and what of it `auto` may use.

`perfbench tune --apply` writes it. A file that cannot be used is said in one warning and ignored.
"""

from __future__ import annotations

import errno
import hashlib
import json
import stat
import warnings
from collections.abc import Mapping
from dataclasses import asdict, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from nsa.routing import CardEntry, UserTable

SCHEMA = 1
AGAIN = "`perfbench tune --apply` writes it anew"
_KINDS: Mapping[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "str | None": (str, type(None)),
    "int | None": (int, type(None)),
}


class UserTableWarning(UserWarning):
    """The user's table cannot be used; `auto` decides without it."""


def default_file(environ: Mapping[str, str]) -> Path | None:
    """$XDG_CONFIG_HOME/nsa/thresholds.json, by default below ~/.config; None without a home."""
    config = environ.get("XDG_CONFIG_HOME", "")
    if Path(config).is_absolute():  # the standard ignores a relative one
        return Path(config) / "nsa" / "thresholds.json"
    home = environ.get("HOME") or environ.get("USERPROFILE")
    return Path(home) / ".config" / "nsa" / "thresholds.json" if home else None


def parse(content: bytes, path: str) -> UserTable:
    """The table of a file's bytes; ValueError says what is wrong with it, and what to do."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:  # not UTF-8 is a ValueError, too
        raise ValueError(
            f"{path}: got no JSON ({' '.join(str(error).split())[:100]}), wanted a table; {AGAIN}"
        ) from None
    schema = found.get("schema") if isinstance(found, dict) else None
    if isinstance(schema, bool) or not isinstance(schema, int):
        raise ValueError(f"{path}: got no schema, wanted schema {SCHEMA}; {AGAIN}")
    if schema != SCHEMA:
        step = "update nsa" if schema > SCHEMA else AGAIN
        raise ValueError(f"{path}: got schema {schema}, wanted {SCHEMA}; {step}")
    cards = found.get("cards")
    if not isinstance(cards, list):
        raise ValueError(f"{path}: got no list of cards, wanted one; {AGAIN}")
    entries = tuple(_entry(card, f"{path}: card {number}") for number, card in enumerate(cards, 1))
    if len({one.key for one in entries}) < len(entries):
        raise ValueError(
            f"{path}: got two entries of one card, dtype and shape, wanted one; {AGAIN}"
        )
    return UserTable(path, hashlib.sha256(content).hexdigest(), entries, kernels_sha256())


def _entry(card: object, where: str) -> CardEntry:
    names = [field.name for field in fields(CardEntry)]
    if not isinstance(card, dict) or sorted(card) != sorted(names):
        got = sorted(card) if isinstance(card, dict) else type(card).__name__
        raise ValueError(f"{where}: got {got}, wanted {', '.join(names)}; {AGAIN}")
    values: dict[str, Any] = dict(card)
    sm = values["sm"]
    if not (isinstance(sm, list) and len(sm) == 2 and all(map(_is_size, sm))):
        raise ValueError(f"{where}: got sm {sm!r}, wanted two whole numbers; {AGAIN}")
    values["sm"] = tuple(sm)
    for field in fields(CardEntry):
        kinds, value = _KINDS.get(str(field.type)), values[field.name]
        if kinds is None:  # sm
            continue
        if not isinstance(value, kinds) or (isinstance(value, int) and not _is_size(value)):
            raise ValueError(
                f"{where}: got {field.name} {value!r}, wanted {field.type} of at least 0; {AGAIN}"
            )
    entry = CardEntry(**values)
    heads = (entry.num_heads, entry.num_kv_heads, entry.head_dim, entry.v_head_dim)
    if min(heads) < 1 or entry.num_heads % entry.num_kv_heads:
        raise ValueError(f"{where}: got heads and dims {heads}, which are no model's; {AGAIN}")
    return entry


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def table_text(entries: tuple[CardEntry, ...]) -> str:
    """The content of a file with these entries; `parse` gives them again."""
    cards = [asdict(one) for one in sorted(entries, key=lambda one: repr(one.key))]
    return json.dumps({"schema": SCHEMA, "cards": cards}, indent=2) + "\n"


def bytes_of(path: str | Path) -> bytes:
    """What the table's file holds. OSError for none, and for a pipe or a device, of which a read
    may never end.
    """
    mode = Path(path).stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError(errno.EINVAL, "a pipe or a device", str(path))
    return Path(path).read_bytes()


@lru_cache(maxsize=8)
def read(path: str) -> UserTable | None:
    """The table of a file, read once a process; None, with one warning, where it cannot be used."""
    try:
        return parse(bytes_of(path), path)
    except OSError as error:
        problem = f"{path}: got {error.strerror or error}, wanted a file; {AGAIN}"
    except ValueError as error:
        problem = str(error)
    warnings.warn(
        f"the user's table is ignored: {problem}, or set NSA_THRESHOLDS=off",
        UserTableWarning,
        stacklevel=2,
    )
    return None


@lru_cache(maxsize=32)
def warn_of_other_cards(table: UserTable, device_name: str, sm: tuple[int, int]) -> None:
    """One warning a process where the table holds nothing of this card, which ignores it."""
    if not table.of_card(device_name, sm):
        held = ", ".join(sorted({one.device_name for one in table.entries})) or "no card"
        warnings.warn(
            f"the user's table is ignored: {table.path}: got {held}, wanted {device_name}; run"
            " `perfbench tune --apply` on it, or set NSA_THRESHOLDS=off",
            UserTableWarning,
            stacklevel=3,
        )


@lru_cache(maxsize=1)
def kernels_sha256() -> str:
    """Of the files of `nsa.ops`, names included: other kernels may have other crossings."""
    folder, digest = Path(__file__).parent / "ops", hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(folder).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()
