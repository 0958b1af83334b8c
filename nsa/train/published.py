"""What this project's matrices measured of training, and the line that compares a run with it.

The data, `published.json`, is of one GPU; `source` of each row is the run that gave it. Needs no
torch.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from nsa.config import preset
from nsa.train.config import RunConfig
from nsa.train.flops import step_flops
from nsa.train.records import StepRecord

_FILE = Path(__file__).with_name("published.json")
# A vocabulary a little larger than the published one of 256 is the same work.
_SAME_WORK = 0.01


@dataclass(frozen=True, slots=True)
class PublishedSpeed:
    """Tokens a second of a training step of ``batch`` x ``seq_len`` tokens on one ``device``, in
    bf16, and the most bytes that its tensors took.
    """

    attention: str
    batch: int
    seq_len: int
    compile: bool
    cuda_graph: bool
    tok_per_s: int
    peak_memory_bytes: int
    source: str
    device: str


@lru_cache(maxsize=1)
def published() -> tuple[PublishedSpeed, ...]:
    """Every row of the data file."""
    data = json.loads(_FILE.read_text(encoding="utf-8"))
    return tuple(PublishedSpeed(**row, device=data["device"]) for row in data["rows"])


def published_speed(
    config: RunConfig, *, device_name: str | None, attention: str | None = None
) -> PublishedSpeed | None:
    """The row of this config's model, length, compiler and graph on ``device_name``, of its batch
    or the nearest one by ratio; None where nobody measured it. ``attention`` instead of the
    config's: of its twin.
    """
    wanted = math.log(config.train.batch)
    rows = _of_length(config, device_name, attention)
    return min(rows, key=lambda one: abs(math.log(one.batch) - wanted), default=None)


def go_no_go(
    record: StepRecord,
    config: RunConfig,
    *,
    memory_total_bytes: int | None,
    device_name: str,
) -> str:
    """The line by which a user goes on or stops, from a record of a rank's log: tok/s of all ranks,
    MFU, time of the steps left, memory of the rank (``memory_total_bytes`` of its device; None:
    a CPU), and what was published of the dense twin.
    """
    parts = [
        "tok/s not measured" if record.tokens_per_s is None else f"{record.tokens_per_s:,.0f} tok/s"
    ]
    if record.mfu_pct is None:
        parts.append(f"MFU not known: no peak of {device_name} is listed")
    else:
        parts.append(f"MFU {record.mfu_pct:.1f} %")
    if record.step_ms is not None:
        left = max(0, config.train.steps - record.step)
        parts.append(f"{left:,} steps left take {duration(left * record.step_ms / 1000)}")
    parts += [_memory(record, memory_total_bytes), _twin(config, device_name)]
    return f"go/no-go after {record.step} steps: {'; '.join(parts)}"


def _memory(record: StepRecord, total_bytes: int | None) -> str:
    used = record.memory_reserved_bytes
    if used is None or not total_bytes:
        return f"memory {record.memory_rss_bytes / 1e9:.1f} GB of the host"
    free = 100 * (1 - used / total_bytes)
    return f"memory {used / 1e9:.1f} of {total_bytes / 1e9:.1f} GB ({free:.0f} % free)"


def duration(seconds: float) -> str:
    """Whole minutes from an hour on, else seconds."""
    minutes = round(seconds / 60)
    if seconds < 60:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes // (24 * 60)} d {minutes // 60 % 24} h"


def _twin(config: RunConfig, device_name: str) -> str:
    """What was published of the other attention at this length; another batch is named."""
    other = "dense" if config.train.attention == "nsa" else "nsa"
    row = published_speed(config, device_name=device_name, attention=other)
    name = "dense twin" if other == "dense" else "NSA twin"
    if row is None:
        return f"{name} not published for this shape on {device_name}"
    return (
        f"{name} published at {row.tok_per_s:,} tok/s ({row.batch} x {row.seq_len:,}, one"
        f" {row.device}, {_how(row)})"
    )


def _how(row: PublishedSpeed) -> str:
    how = "compiled" if row.compile else "eager"
    return f"{how}, in a CUDA graph" if row.cuda_graph else how


def _of_length(
    config: RunConfig, device_name: str | None, attention: str | None
) -> list[PublishedSpeed]:
    """Rows that differ from ``config`` in their batch at most; captured ones alone where both are
    there and the config captures.
    """
    train = config.train
    attention = attention or train.attention
    same = (
        _is_published_model(config)
        and train.precision in ("bf16", "bf16_master")
        and config.data.packing == "rows"
        and (attention == "dense" or train.path in ("auto", "triton"))
    )
    if not same:
        return []
    rows = [
        row
        for row in published()
        if (row.device, row.attention, row.seq_len, row.compile)
        == (device_name, attention, train.seq_len, train.compile)
        and (train.cuda_graph == "auto" or row.cuda_graph == (train.cuda_graph == "on"))
    ]
    captured = {row.batch for row in rows if row.cuda_graph}
    return [row for row in rows if row.cuda_graph or row.batch not in captured]


def _is_published_model(config: RunConfig) -> bool:
    model, base = config.model, preset("m7c_125m")
    if replace(model, vocab_size=base.vocab_size) != base:
        return False
    own, wanted = (
        step_flops(one, batch=1, tokens=config.train.seq_len, attention="dense")
        for one in (model, base)
    )
    return abs(own - wanted) <= _SAME_WORK * wanted
