"""The file of a baseline: what it holds, where it lies, how it is read and written.

Reading names what is wrong with any bytes; writing is complete or does not happen.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import geometric_mean
from typing import Annotated, Any
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from perfbench.errors import Exit, PerfbenchError
from perfbench.records.atomic_write import check_replaceable
from perfbench.records.digests import CONTENT_KEY, content_sha256
from perfbench.records.regular_file import read_regular_file
from perfbench.records.rows import LoadedPeer, Source, StoredCell
from perfbench.records.run_file import whole
from perfbench.records.verdict import Verdict
from perfbench.text import plain, shorten

# 2: what host-bound cells and the sentinels are judged by; 3: its digest, its run's, and the rules
# that it was promoted with
SCHEMA_VERSION = 3
DIGESTS_SINCE = 3
MAKE_ONE = "; make one from a green run: "
PROMOTE = "perfbench baseline promote RUN"
MAX_BYTES = 2**26
# A rate, or seconds. The bounds are beyond any machine, and keep the ratio of two such values
# within what a float holds.
Speed = Annotated[float, Field(gt=1e-12, lt=1e24, allow_inf_nan=False, strict=True)]


class BaselineCell(BaseModel):
    """One cell's speeds, and the run that measured it (a slice may be older than the rest).

    ``kernel_count`` and ``host_syncs`` are the most that a profile saw, ``kernels`` the longest
    first. ``night_log_sd`` and ``device_night_log_sd`` are the sd of ln tok/s and of ln device time
    between sessions, where a calibration states them, from ``night_starts`` machine starts.
    """

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, frozen=True, defer_build=True)
    axes: StoredCell
    config_sha256: str
    tok_per_s: list[Speed] = Field(min_length=1)  # one median for each replicate
    host_bound: bool | None
    counters: list[str]
    run_id: str
    commit: str | None
    night_log_sd: float | None = Field(default=None, ge=0, lt=10)
    device_night_log_sd: float | None = Field(default=None, ge=0, lt=10)
    night_starts: int | None = Field(default=None, ge=2)
    device_time_s: list[Speed] = []  # of one step, one for each replicate that profiled it
    host_time_s: list[Speed] = []  # to enqueue one step; none in older files
    kernel_count: int | None = Field(default=None, ge=0)
    host_syncs: int | None = Field(default=None, ge=0)
    kernels: list[str] = []
    tuned: dict[str, str] = {}
    own_step_sha256: str | None = None  # of the file of a user's own step
    peer: LoadedPeer | None = None  # of a cell whose path is one
    # that measured it, as the rows name them; none in older files, and of a CPU of no fleet
    cards: list[str] = []

    @property
    def speed(self) -> float:
        """tok/s: the geometric mean over the replicates, as the comparison takes it."""
        return geometric_mean(self.tok_per_s)


class Baseline(BaseModel):
    """A promoted run, reduced to what the gate reads.

    ``environment`` is ``Environment.fingerprint()``, ``settings`` is ``Environment.settings()``.
    ``rules`` is what the run's matrix demanded (`perfbench.matrix.JudgeRules`): null in files older
    than schema 3. ``run_sha256`` is the digest of the run's last line, null for a run that had
    none; ``content_sha256`` that of this file. A ``retired`` one judges only where it is named;
    ``retired_utc`` is since when.
    """

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, frozen=True, defer_build=True)
    schema_version: int = SCHEMA_VERSION
    method_version: int
    matrix_name: str
    matrix_sha256: str
    run_id: str
    promoted_utc: str
    source: Source
    allow_dirty: bool = False
    environment: dict[str, str | None]
    settings: dict[str, str] | None = None  # null in older files: not recorded
    # rates, one for each block; none in files older than schema 2
    sentinels: dict[str, list[Speed]] = {}
    cells: dict[str, BaselineCell] = Field(min_length=1)
    rules: dict[str, Any] | None = None
    run_sha256: str | None = None
    content_sha256: str | None = None
    retired: str | None = None  # why nobody can measure it again: kept for the record
    retired_utc: str | None = None

    @property
    def is_verified(self) -> bool:
        """Whether a digest shows that the file is as it was written."""
        return self.schema_version >= DIGESTS_SINCE


def baseline_path(root: Path, gpu_slug: str, matrix_name: str) -> Path:
    """``root/<gpu_slug>/<matrix>.json``, where ``root`` is usually ``reports/baselines``; odd
    characters are percent-encoded.
    """
    for what, name in (("GPU slug", gpu_slug), ("matrix name", matrix_name)):
        if not name or name in (".", ".."):
            raise PerfbenchError(
                Exit.USAGE,
                f"{what} {name!r} cannot name a baseline file; give it a name of letters, digits"
                " and dashes",
            )
    return root / quote(gpu_slug, safe="") / f"{quote(matrix_name, safe='')}.json"


def load_baseline(path: Path) -> Baseline:
    """Return the baseline; PerfbenchError(Exit.BASELINE) says what is wrong with it, whatever its
    bytes.
    """
    found = read_baseline(path)
    if isinstance(found, BaselineProblem):
        raise PerfbenchError(Exit.BASELINE, found.message)
    return found


def read_baseline(path: Path) -> Baseline | BaselineProblem:
    """Like ``load``, but the problem is a value: what ``judge`` takes."""
    try:
        data = read_regular_file(path, MAX_BYTES)
    except FileNotFoundError:
        text = f"no baseline at {path}{MAKE_ONE}{PROMOTE} --to {path}"
        return BaselineProblem(Verdict.NO_BASELINE, text)
    except (OSError, ValueError) as error:  # a folder, no permission, a NUL in the name
        return BaselineProblem(
            Verdict.CORRUPT, f"baseline {path} cannot be read: {error}; wanted a readable file"
        )
    return parse_baseline(data, f"baseline {path}")


def show_baseline(baseline: Baseline) -> str:
    """A text table of what the baseline holds."""
    commit = ", ".join(
        part for part in ((baseline.source.commit or "")[:40], baseline.source.unproved) if part
    )
    dirty = " with uncommitted changes" if baseline.source.dirty_sha256 else ""
    lines = []
    if baseline.retired is not None:
        since = plain(baseline.retired_utc or "a day that it does not say")
        lines = [f"retired: {plain(baseline.retired)} (since {since})"]
    lines += [
        (
            f"matrix {baseline.matrix_name} ({baseline.matrix_sha256[:12]}), promoted"
            f" {baseline.promoted_utc}"
        ),
        f"run {baseline.run_id}, commit {commit}{dirty}, method version {baseline.method_version}",
        "; ".join(
            f"{key} {value if value is not None else '-'}"
            for key, value in sorted(baseline.environment.items())
        ),
        *_about_file(baseline),
        "",
    ]
    width = max(len(cell_id) for cell_id in baseline.cells)
    lines.append(f"{'cell':<{width}} {'tok/s':>14} {'n':>3} {'spread':>8}  bound  between sessions")
    for cell_id, cell in sorted(baseline.cells.items()):
        speeds = cell.tok_per_s
        spread = (
            f"{100 * (max(speeds) - min(speeds)) / cell.speed:.2f} %" if len(speeds) > 1 else "-"
        )
        bound = {True: "host", False: "GPU", None: "-"}[cell.host_bound]
        between = "assumed" if cell.night_log_sd is None else f"{100 * cell.night_log_sd:.2f} %"
        lines.append(
            f"{cell_id:<{width}} {cell.speed:>14,.1f} {len(speeds):>3} {spread:>8}  {bound:<5} "
            f" {between}"
        )
    return "\n".join(lines)


def _about_file(baseline: Baseline) -> list[str]:
    lines = [] if baseline.is_verified else ["unverified: written without a digest"]
    if baseline.rules is None:
        return [*lines, "unverified policy: it holds none"]
    gate = baseline.rules.get("gate")
    if not isinstance(gate, dict):
        return [*lines, "policy: it cannot be read"]
    return [*lines, f"policy: {', '.join(f'{key} {value}' for key, value in gate.items())}"]


def parse_baseline(data: bytes, what: str) -> Baseline | BaselineProblem:
    """The baseline in ``data``; ``what`` stands for the file in messages."""

    def corrupt(text: str, *, newer: bool = False) -> BaselineProblem:
        return BaselineProblem(Verdict.CORRUPT, f"{what} {text}", newer)

    try:
        raw: Any = json.loads(data.decode("utf-8"), parse_int=whole)
        # an escaped lone surrogate parses, and could never be printed
        json.dumps(raw, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        return corrupt(
            f"is not JSON (truncated?): {shorten(str(error))}; restore it from git, or promote a"
            " run again"
        )
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        return corrupt(
            "has the wrong shape: wanted an object with a schema_version; restore it from git, or"
            " promote a run again"
        )
    if version > SCHEMA_VERSION:
        text = (
            f"has the newer schema {shorten(str(version), 20)}, this perfbench reads up to"
            f" {SCHEMA_VERSION}; update perfbench"
        )
        return corrupt(text, newer=True)
    try:
        found = Baseline.model_validate(raw)
        if problem := _digest_problem(raw, version):
            return corrupt(f"{problem}; restore it from git, or promote a run again")
        return found
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)
    speeds = [one for one in first if "tok_per_s" in one["loc"]]
    where = ".".join(str(part) for part in (speeds or first)[0]["loc"])
    message = shorten(f"{where}: {(speeds or first)[0]['msg']}", 300)
    if speeds:
        return corrupt(
            f"holds a speed that is none (zero, negative, NaN, text or empty): {message}; a red run"
            " was promoted by hand?"
        )
    return corrupt(f"has the wrong shape: {message}; restore it from git, or promote a run again")


def _digest_problem(raw: dict[str, Any], version: int) -> str:
    """What its digest says of the file; empty where it matches, or an older file has none."""
    digest = raw.get(CONTENT_KEY)
    if version < DIGESTS_SINCE:
        return f"is of schema {version} and has a digest: it was edited" if digest else ""
    if digest is None:
        return f"has no {CONTENT_KEY}, which every baseline of schema {version} has: it was edited"
    try:
        intact = content_sha256(raw) == digest
    except ValueError:  # a NaN
        intact = False
    return "" if intact else f"does not match its {CONTENT_KEY}: it was edited after `promote`"


def write_baseline(path: Path, baseline: Baseline) -> Baseline:
    """Write the file complete or not at all, and return it with its digest; PerfbenchError(USAGE)
    where it cannot be written.
    """
    content = baseline.model_dump(mode="json")
    digest = content_sha256(content)
    _write(path, {**content, CONTENT_KEY: digest})
    return baseline.model_copy(update={CONTENT_KEY: digest})


def _write(path: Path, content: dict[str, Any]) -> None:
    text = (
        json.dumps(
            content,
            indent=1,
            sort_keys=True,
            allow_nan=False,
            ensure_ascii=False,
        )
        + "\n"
    )
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        check_replaceable(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("x", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        with suppress(OSError):
            draft.unlink()
        text = (
            f"cannot write the baseline {path}: {error.strerror or error}; wanted a writable"
            " folder: change its rights, or give --to"
        )
        raise PerfbenchError(Exit.USAGE, text) from error


def retire_baseline(path: Path, reason: str) -> Baseline:
    """Mark the baseline at ``path`` as one that nobody can measure again, and return it. Retired
    once more, it keeps its date.

    PerfbenchError: BASELINE where the file is none, USAGE for an empty reason or where it cannot be
    written.
    """
    if not reason.strip():
        raise PerfbenchError(
            Exit.USAGE, "got an empty reason, wanted why this baseline cannot be measured again"
        )
    found = _content(path)
    since = found.get("retired_utc") or datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    content = {**found, "retired": plain(reason), "retired_utc": since}
    if CONTENT_KEY in content:  # an older file has none
        content[CONTENT_KEY] = content_sha256(content)
    _write(path, content)
    return load_baseline(path)


def _content(path: Path) -> dict[str, Any]:
    """What the file at ``path`` holds, as it is, of a baseline that can be read."""
    load_baseline(path)
    found: dict[str, Any] = json.loads(read_regular_file(path, MAX_BYTES))
    return found


@dataclass(frozen=True, slots=True)
class BaselineProblem:
    """A baseline that cannot judge: NO_BASELINE (absent) or CORRUPT (damaged, zero speeds, newer
    schema).
    """

    verdict: Verdict
    message: str
    newer_schema: bool = False
