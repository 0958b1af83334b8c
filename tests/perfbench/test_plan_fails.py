"""`plan` fails where a run would: a Route that the matrix forbids, a length that no memory holds.

Row of the faults: `plan` never fails.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nsa.capability import KNOWN_GPUS, assumed
from nsa.config import preset
from nsa.settings import Settings
from perfbench.commands import app
from perfbench.matrix import build_plan, load_matrix
from perfbench.matrix.memory import CARD_BYTES, GIB, gib, least_bytes
from perfbench.records import Cell

ROOT = Path(__file__).parents[2]
TEXT = """\
version: 1
name: small
target: {gpu: none}
model: tiny
axes: {workload: [WORKLOAD], seq_len: [LENGTH], path: [v2], fa2: [off], dtype: [fp32]}
"""
EXPECT = """\
expect:
  - {match: {path: v2}, KEY}
"""


def matrix(folder: Path, *, workload: str = "forward", length: int = 256, more: str = "") -> str:
    file = folder / "m.yaml"
    text = TEXT.replace("WORKLOAD", workload).replace("LENGTH", str(length)) + more
    file.write_text(text, encoding="utf-8")
    return str(file)


@pytest.mark.parametrize(
    ("key", "code"),
    [("forbidden: [sel.v2]", 4), ("engaged: [sel.triton]", 4), ("engaged: [sel.v2]", 0)],
)
def test_strict_fails_where_the_route_violates_what_is_expected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, code: int
) -> None:
    file = matrix(tmp_path, more=EXPECT.replace("KEY", key))
    assert app.invoke(["plan", file]) == 0  # a warning, as before
    capsys.readouterr()
    assert app.invoke(["plan", file, "--strict"]) == code
    out, err = capsys.readouterr()
    assert "Estimated:" in out and ("will be WRONG_PATH" in err) == (code == 4)


@pytest.mark.parametrize("workload", ["forward", "train", "decode", "attention"])
@pytest.mark.parametrize("gpu", ["none", "h100", "rtx4090"])
def test_a_length_that_no_memory_holds_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], workload: str, gpu: str
) -> None:
    file = matrix(tmp_path, workload=workload, length=10**11)
    assert app.invoke(["plan", file, "--gpu", gpu]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "GiB of memory at least" in err and "Next:" in err


def test_the_memory_of_the_largest_cell_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = matrix(tmp_path, length=2**20)
    assert app.invoke(["plan", file, "--gpu", "h100"]) == 0
    size = 2**20 * 4 * preset("tiny").dim
    assert f"Memory: {size / GIB:,.1f} GiB at least" in capsys.readouterr().out
    assert app.invoke(["plan", file, "--gpu", "h100", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["least_memory_bytes"] == size


@pytest.mark.parametrize(
    ("size", "shown"),
    [(2**14, "16.0 KiB"), (2**20, "1.0 MiB"), (500_000, "0.5 MiB"), (2**30, "1.0 GiB")],
)
def test_a_small_memory_is_not_0(size: int, shown: str) -> None:
    assert gib(size) == shown


def test_training_keeps_a_layer_and_a_cache_its_keys() -> None:
    model = preset("tiny")
    one = least_bytes(Cell("forward", 1024, "v2", "off", dtype="fp32"), model)
    assert least_bytes(Cell("train", 1024, "v2", "off", dtype="fp32"), model) == (
        one * model.num_layers
    )
    assert least_bytes(Cell("forward", 1024, "v2", "off", 8), model) == 4 * one
    keys = 2 * model.num_kv_heads * model.head_dim * model.num_layers
    assert least_bytes(Cell("decode", 1024, "v2", "off"), model) == 1024 * 2 * keys


def test_every_card_that_can_be_planned_has_its_memory() -> None:
    assert {name for name, _ in KNOWN_GPUS.values()} <= set(CARD_BYTES)


@pytest.mark.parametrize("path", sorted((ROOT / "matrices").glob("*.yaml")), ids=lambda p: p.stem)
def test_no_shipped_matrix_is_refused(path: Path) -> None:
    loaded = load_matrix(path)
    gpu = assumed(loaded.target.gpu)
    assert build_plan(loaded, only=[], capability=gpu, settings=Settings()).least_bytes > 0
