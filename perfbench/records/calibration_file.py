"""calibration.json, read back for a baseline: the between-session variance of each cell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from perfbench.errors import Exit, PerfbenchError
from perfbench.records.regular_file import read_regular_file
from perfbench.records.rows import NOT_IN_OLDER
from perfbench.text import plain

# Of ln speed that a baseline takes: beyond it a session says nothing, so the file is wrong.
MAX_GATE_SD = 0.5
MAX_BYTES = 2**26


class _StoredVariance(BaseModel):
    starts: int = Field(ge=2)
    gate_sd: float = Field(gt=0, le=MAX_GATE_SD, allow_inf_nan=False)


class _StoredCell(BaseModel):
    cell_id: str
    config_sha256: str | None = None  # null: written before a calibration recorded whose work it is
    night: _StoredVariance | None
    device_night: _StoredVariance | None


class _Stored(BaseModel):
    """What the gate needs of calibration.json; the rest of it is for readers."""

    gpu_slug: str
    environment: dict[str, str | None] = {}
    cells: list[_StoredCell]


@dataclass(frozen=True, slots=True)
class Known:
    """A calibration.json, read but not yet matched to a run: see `variance_of_cells`."""

    path: Path
    environment: Mapping[str, str | None]
    cells: Mapping[str, _StoredCell]  # those that were seen in two starts or more


def read_calibration(path: Path, gpu_slug: str) -> Known:
    """The calibration at ``path`` (calibration.json).

    PerfbenchError(USAGE): not such a file, a cell that is named twice or varies more than any
    machine does, a calibration of another GPU than ``gpu_slug``, or of one start only.
    """
    try:
        stored = _Stored.model_validate_json(read_regular_file(path, MAX_BYTES))
    except OSError as error:
        raise _refused(path, f"cannot be read: {error.strerror or error}") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise _refused(
            path, f"is no calibration: {'.'.join(map(str, first['loc']))}: {first['msg']}"
        ) from None
    if stored.gpu_slug != gpu_slug:
        raise _refused(path, f"got a calibration of {stored.gpu_slug}, wanted one of {gpu_slug}")
    if twice := [
        cell_id for cell_id, n in Counter(cell.cell_id for cell in stored.cells).items() if n > 1
    ]:
        raise _refused(
            path, f"is no calibration: got cell {twice[0][:200]!r} twice, wanted each once"
        )
    found = {cell.cell_id: cell for cell in stored.cells if _fields(cell)}
    if not found:
        raise _refused(
            path, "states no variance between sessions: got one machine start, wanted two or more"
        )
    return Known(path, stored.environment, found)


def variance_of_cells(
    known: Known, environment: Mapping[str, str | None], configs: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """By cell of ``configs`` (its id to the hash of its work), the fields of a baseline's cell that
    the calibration states.

    ``environment``: the fingerprint of the run. Its driver alone may differ: torch and triton
    choose the kernels, not the driver, what differs between starts is mostly the card and its host,
    and an update of the driver must not cost days of new starts. PerfbenchError(USAGE): another
    environment, another work under the same id, or no cell in common.
    """
    for name in sorted(set(environment) - {"driver"}):
        got, wanted = known.environment.get(name), environment[name]
        if got is None and name in NOT_IN_OLDER:
            continue
        if got != wanted:
            raise _refused(
                known.path,
                f"got a calibration with {name} {got or 'unknown'}, wanted {wanted or 'none'} as in"
                " the run",
            )
    common = sorted(set(known.cells) & set(configs))
    if not common:
        raise _refused(
            known.path,
            f"knows no cell of the run: got {len(known.cells)} others, wanted runs of the same"
            " matrix",
        )
    for cell_id in common:
        got, wanted = known.cells[cell_id].config_sha256, configs[cell_id]
        if got != wanted:
            which = (
                "no config (an earlier perfbench wrote it)" if got is None else f"config {got[:12]}"
            )
            raise _refused(
                known.path,
                f"got {which} of {cell_id}, wanted {wanted[:12]}, the work that the run measured",
            )
    return {cell_id: _fields(known.cells[cell_id]) for cell_id in common}


def _fields(cell: _StoredCell) -> dict[str, Any]:
    """All three where the calibration states any, so that no field of an earlier one stays next to
    them.
    """
    both = {"night_log_sd": cell.night, "device_night_log_sd": cell.device_night}
    starts = [variance.starts for variance in both.values() if variance is not None]
    if not starts:
        return {}
    return {
        **{name: None if variance is None else variance.gate_sd for name, variance in both.items()},
        "night_starts": min(starts),
    }


def _refused(path: Path, why: str) -> PerfbenchError:
    next_ = (
        "perfbench calibrate RUN RUN RUN --out reports, with a run of each machine start,"
        " writes one"
    )
    return PerfbenchError(Exit.USAGE, plain(f"{path} {why}. Next: {next_}"))
