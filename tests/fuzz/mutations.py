"""Damage that keeps a document's shape, so that it comes past the parser and reaches the checks
behind it.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from random import Random
from typing import Any

Mutate = Callable[[bytes, Random], bytes]

VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    7,
    2**31,
    2**63,
    10**18,
    -(10**30),
    10**400,
    int("9" * 4300),
    0.0,
    -0.0,
    0.5,
    1e308,
    1e-308,
    5e-324,
    -1.5,
    "",
    " ",
    "x",
    "1",
    "NaN",
    "\ud800",
    "\x00",
    "\x1b[31m",
    "a\nb",
    "\u2028",
    "\ufeff",
    "é" * 300,
    "n/a",
    "ok",
    "tune-cpu",
    "tune-sm9.0",
    "tune-sm²." + "9" * 5000,
    "2026-01-01T00:00:00Z",
    [],
    {},
    [None],
    [[]],
    [0.0, 0.0],
    [1e308] * 3,
    [5e-324] * 3,
    {"": None},
    {"cell_id": 1},
    {"path": "v2"},
    {"\ud800": "\ud800"},
    float("nan"),
    float("inf"),
)
WORDS = (
    "&a ",
    "*a",
    "<<: ",
    "!!int ",
    "!x ",
    "%YAML 1.1\n",
    "---\n",
    "...\n",
    "? ",
    "- ",
    ": ",
    "{",
    "}",
    "[",
    "]",
    ", ",
    "|\n",
    ">-\n",
    "#",
    '"',
    "'",
    '"\\ud800"',
    '"\\UFFFFFFFF"',
    '"\\x00"',
    "~",
    "null",
    "true",
    "on",
    "off",
    "0",
    "-1",
    "1.5",
    "010",
    "0x1F",
    "1_000",
    "1e5",
    "1e999",
    ".nan",
    "9" * 5000,
    "2**31",
    "'>=128'",
    ">0",
    "128",
    "999999999",
    "100000000000000000",
    "\t",
    "\r\n",
    "\x00",
    "\ufeff",
    "\u0085",
    "\u2028",
    "v1",
    "v2",
    "masked",
    "dense",
    "triton",
    "train",
    "train_loop",
    "decode",
    "chunked_prefill",
    "attention",
    "bf16",
    "fp32",
    "tiny",
    "m7c_125m",
    "preset: tiny",
    "match: {}",
    "reason: x",
    "{l: 16, d: 16}",
    "n_sel: 0",
    "num_layers: 0",
    "gemm",
    "sel.v2",
)


def of_json(data: bytes, random: Random) -> bytes:
    """A JSON document with one to three of its values replaced, lost, doubled or exchanged; other
    bytes as they are.
    """
    try:
        whole = [json.loads(data)]
    except (ValueError, RecursionError):
        return data
    for _ in range(random.randint(1, 3)):
        _damage(whole, random)
    return json.dumps(whole[0]).encode() if whole else b""


def of_json_lines(data: bytes, random: Random) -> bytes:
    """The same for one line in a file of many; sometimes a line is lost, doubled or moved."""
    lines = data.split(b"\n")
    at = random.randrange(len(lines))
    kind = random.randrange(8)
    if kind == 0:
        del lines[at]
    elif kind == 1:
        lines.insert(at, random.choice(lines))
    else:
        lines[at] = of_json(lines[at], random)
    return b"\n".join(lines)


def of_gzip(data: bytes, random: Random) -> bytes:
    """Damage inside the lines, compressed again; or to the compressed bytes: one changed, or an end
    cut off.
    """
    if random.random() < 0.5:
        return gzip.compress(of_json_lines(gzip.decompress(data), random), compresslevel=1)
    place = random.randrange(len(data))
    if random.random() < 0.5:
        return data[:place]
    return data[:place] + bytes([data[place] ^ 1 << random.randrange(8)]) + data[place + 1 :]


def of_yaml(data: bytes, random: Random) -> bytes:
    """Up to three of: a word replaced by another of a matrix or a hostile one, a line lost,
    doubled, moved or indented.
    """
    lines = data.decode("utf-8", "replace").split("\n")
    for _ in range(random.randint(1, 3)):
        at = random.randrange(len(lines))
        kind = random.randrange(8)
        if kind == 0 and len(lines) > 1:
            del lines[at]
        elif kind == 1:
            lines.insert(at, random.choice(lines))
        elif kind == 2:
            lines[at] = " " * random.choice((1, 2, 4)) + lines[at]
        else:
            lines[at] = _other_word(lines[at], lines, random)
    return "\n".join(lines).encode("utf-8", "replace")


def _other_word(line: str, lines: list[str], random: Random) -> str:
    found = list(re.finditer(r"[\w.>=<+-]+|\S", line))
    if not found:
        return random.choice(WORDS)
    gone = random.choice(found)
    near = re.findall(r"[\w.>=<+-]+", random.choice(lines)) or [""]
    new = random.choice((random.choice(WORDS), random.choice(near)))
    return (
        line[: gone.start()] + new + line[gone.end() if random.random() < 0.8 else gone.start() :]
    )


def _damage(whole: Any, random: Random) -> None:
    """Change one value inside ``whole``, a list or an object, in place."""
    holder, key = random.choice(list(_places(whole)) or [(None, None)])
    if holder is None:
        return
    kind = random.randrange(8)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, list):
        holder.append(deepcopy(holder[key]))
    elif kind == 2:
        other, at = random.choice(list(_places(whole)))
        holder[key] = deepcopy(other[at])
    elif kind == 3 and isinstance(holder, dict):
        holder[random.choice(("", "x", "kind", "\ud800", "a\nb", *map(str, holder)))] = holder.pop(
            key
        )
    # Python writes no more than 4,300 digits
    elif kind == 4 and isinstance(holder[key], int | float) and abs(holder[key]) < 10**400:
        with suppress(OverflowError):
            holder[key] = random.choice((-1, 1000, 10**9, 0.5, 1e300)) * holder[key]
    else:
        holder[key] = deepcopy(random.choice(VALUES))


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(holder, key) of every value inside, the outer ones first."""
    stack = [value]
    while stack:
        holder = stack.pop()
        for key, below in holder.items() if isinstance(holder, dict) else enumerate(holder):
            yield holder, key
            if isinstance(below, dict | list):
                stack.append(below)
