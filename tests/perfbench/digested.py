"""Stored files edited by a test as whoever edits them and computes the digests again would."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from perfbench.records.digests import CONTENT_KEY, chained, content_sha256, unchained
from perfbench.records.rows import Run


def lines_of(data: bytes) -> list[dict[str, Any]]:
    """The records of a run file without their digests."""
    return [json.loads(unchained(line)[0]) for line in data.splitlines()]


def run_bytes(records: list[dict[str, Any]] | list[bytes]) -> bytes:
    """A run file with these lines, each with its digest."""
    found, before = [], ""
    for record in records:
        line = record if isinstance(record, bytes) else json.dumps(record).encode()
        line, before = chained(line, before)
        found.append(line + b"\n")
    return b"".join(found)


def write_run(path: Path, run: Run, tail: bytes = b"") -> None:
    """``run`` as its writer leaves it, then ``tail``."""
    records = [run.manifest, *run.sentinels, *run.replicates]
    path.write_bytes(run_bytes([one.model_dump(mode="json") for one in records]) + tail)


def edit_run(path: Path, change: Callable[[list[dict[str, Any]]], object]) -> None:
    """``change`` the records of a run file in place; its digests are computed again."""
    records = lines_of(path.read_bytes())
    change(records)
    path.write_bytes(run_bytes(records))


def baseline_text(content: dict[str, Any]) -> str:
    """A baseline's file with this content and its digest."""
    return json.dumps({**content, CONTENT_KEY: content_sha256(content)})


def edit_baseline(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """``change`` a baseline in place; its digest is computed again where it has one."""
    content = json.loads(path.read_text(encoding="utf-8"))
    has_digest = CONTENT_KEY in content
    change(content)
    text = baseline_text(content) if has_digest else json.dumps(content)
    path.write_text(text, encoding="utf-8")
