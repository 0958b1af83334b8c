"""Published speeds are those of the evidence, and the go/no-go line is made of them."""

from __future__ import annotations

import gzip
import json
import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nsa.config import preset
from nsa.train.config import LoopConfig, RunConfig
from nsa.train.published import duration, go_no_go, published, published_speed
from nsa.train.records import StepRecord

ROOT = Path(__file__).parents[3]
H200 = "NVIDIA H200"
SHAPE = RunConfig(
    model=preset("m7c_125m"),
    train=LoopConfig(steps=1050, seq_len=2048, batch=8, compile=True),
)


def measured(source: str) -> dict[tuple[object, ...], tuple[float, int, str]]:
    """(tok/s as a geometric mean over processes, most memory, device) of each cell of a run."""
    cells: dict[tuple[object, ...], list[dict[str, Any]]] = defaultdict(list)
    device = ""
    with gzip.open(ROOT / source, "rt", encoding="utf-8") as file:
        for line in map(json.loads, file):
            if line["kind"] == "manifest":
                device = line["environment"]["device_name"]
            if line["kind"] == "replicate":
                axes = line["axes"]
                key = tuple(axes[n] for n in ("path", "batch", "seq_len", "compile", "cuda_graph"))
                cells[key].append(line)
    return {
        key: (
            math.exp(sum(math.log(one["tok_per_s"]) for one in runs) / len(runs)),
            max(one["peak_memory_bytes"] for one in runs),
            device,
        )
        for key, runs in cells.items()
    }


def test_rows_are_those_of_the_evidence() -> None:
    rows = published()
    sources = {row.source for row in rows}
    assert {Path(source).parent.name for source in sources} == {"train-h200", "train-eager-h200"}
    for source in sources:
        found = measured(source)
        own = [row for row in rows if row.source == source]
        assert len(own) == len(found) == 16
        for row in own:
            on_off = {True: "on", False: "off"}
            path = "dense" if row.attention == "dense" else "triton"
            flags = on_off[row.compile], on_off[row.cuda_graph]
            tok_per_s, memory, device = found[(path, row.batch, row.seq_len, *flags)]
            assert row.tok_per_s == round(tok_per_s)
            assert row.peak_memory_bytes == memory
            assert row.device == device


def test_training_page_has_the_same_speeds() -> None:
    page = (ROOT / "docs/training.md").read_text(encoding="utf-8")
    row = published_speed(SHAPE, device_name=H200)
    assert row is not None and row.cuda_graph
    assert f"| 8 x 2,048 | {row.tok_per_s:,} |" in page


@pytest.mark.parametrize(
    "other",
    [
        replace(SHAPE, model=preset("tiny")),
        replace(SHAPE, model=replace(SHAPE.model, checkpoint_layers=(0, 12))),
        SHAPE.with_vocab(32_768),
        replace(SHAPE, train=replace(SHAPE.train, seq_len=4096)),
        replace(SHAPE, train=replace(SHAPE.train, precision="fp32")),
        replace(SHAPE, train=replace(SHAPE.train, path="v2")),
        replace(SHAPE, data=replace(SHAPE.data, packing="documents")),
    ],
)
def test_another_shape_has_no_speed(other: RunConfig) -> None:
    assert published_speed(other, device_name=H200) is None


@pytest.mark.parametrize(("batch", "nearest"), [(1, 1), (2, 1), (3, 8), (8, 8), (64, 8)])
def test_another_batch_has_the_nearest_ones_speed(batch: int, nearest: int) -> None:
    config = replace(SHAPE, train=replace(SHAPE.train, batch=batch))
    row = published_speed(config, device_name=H200)
    assert row is not None and (row.batch, row.seq_len) == (nearest, SHAPE.train.seq_len)


def test_another_card_has_no_speed() -> None:
    assert published_speed(SHAPE, device_name="NVIDIA H100 80GB HBM3") is None
    assert published_speed(SHAPE, device_name=None) is None


def test_graph_is_as_the_config_has_it() -> None:
    speeds = {}
    for cuda_graph in ("auto", "on", "off"):
        config = replace(SHAPE, train=replace(SHAPE.train, cuda_graph=cuda_graph))
        row = published_speed(config, device_name=H200)
        assert row is not None
        speeds[cuda_graph] = row.tok_per_s
    assert speeds == {"auto": 438_771, "on": 438_771, "off": 219_769}
    byte = published_speed(SHAPE.with_vocab(257), device_name=H200)
    assert byte is not None and byte.tok_per_s == 438_771


RECORD = StepRecord(
    time_utc="2026-11-29T00:00:00+00:00",
    rank=0,
    step=50,
    loss_nats=2.0,
    bits_per_byte=None,
    gradient_norm=1.0,
    learning_rate=1e-4,
    tokens_per_s=400_000.0,
    mfu_pct=31.25,
    step_ms=3600.0,
    wait_p50_ms=None,
    wait_p95_ms=None,
    fetch_p50_ms=None,
    fetch_p95_ms=None,
    bad_steps=0,
    memory_allocated_bytes=None,
    memory_reserved_bytes=14_100_000_000,
    memory_rss_bytes=2_000_000_000,
    engaged=None,
    statistics=None,
    config_sha256="0" * 64,
)


def test_line_has_speed_time_memory_and_the_twin() -> None:
    line = go_no_go(RECORD, SHAPE, memory_total_bytes=141_000_000_000, device_name=H200)
    assert line == (
        "go/no-go after 50 steps: 400,000 tok/s; MFU 31.2 %; 1,000 steps left take 1 h 00 min;"
        " memory 14.1 of 141.0 GB (90 % free); dense twin published at 698,433 tok/s (8 x 2,048,"
        " one NVIDIA H200, compiled, in a CUDA graph)"
    )


def test_line_invents_nothing() -> None:
    cpu = replace(RECORD, mfu_pct=None, memory_reserved_bytes=None, step_ms=None)
    line = go_no_go(cpu, SHAPE, memory_total_bytes=None, device_name="cpu")
    assert line == (
        "go/no-go after 50 steps: 400,000 tok/s; MFU not known: no peak of cpu is listed; memory"
        " 2.0 GB of the host; dense twin not published for this shape on cpu"
    )


def test_twin_of_another_batch_is_named_with_its_own() -> None:
    config = replace(SHAPE, train=replace(SHAPE.train, seq_len=8192, batch=32))
    line = go_no_go(RECORD, config, memory_total_bytes=None, device_name=H200)
    assert line.endswith("424,223 tok/s (2 x 8,192, one NVIDIA H200, compiled, in a CUDA graph)")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59.4, "59 s"), (90, "2 min"), (3600, "1 h 00 min"), (200_000, "2 d 7 h")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text
