"""Digests that show whether a stored file was edited or damaged after it was written.

They are no signature: whoever edits a file can compute them again (SECURITY.md).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

LINE_KEY = "line_sha256"  # the last key of each line of a run file
CONTENT_KEY = "content_sha256"  # of a baseline
_TAIL = re.compile(rb', "line_sha256": "([0-9a-f]{64})"\}\Z')


def chained(line: bytes, before: str) -> tuple[bytes, str]:
    """``line``, one JSON object without its line end, with the digest of itself and of the line
    ``before`` it, whose digest that is (empty for the first); and this line's digest.
    """
    digest = _digest(line, before)
    return line[:-1] + f', "{LINE_KEY}": "{digest}"}}'.encode(), digest


def unchained(line: bytes) -> tuple[bytes, str | None]:
    """A line as it was before `chained`, and the digest that it carries; None where it has none."""
    found = _TAIL.search(line)
    return (line, None) if found is None else (line[: found.start()] + b"}", found[1].decode())


def is_intact(line: bytes, digest: str, before: str) -> bool:
    """Whether ``digest`` is that of the unchained ``line`` after the one with ``before``."""
    return _digest(line, before) == digest


def content_sha256(content: Mapping[str, Any]) -> str:
    """Of a JSON object without its `CONTENT_KEY`, whatever its spaces and the order of its keys."""
    rest = {key: value for key, value in content.items() if key != CONTENT_KEY}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _digest(line: bytes, before: str) -> str:
    return hashlib.sha256(before.encode() + line).hexdigest()
