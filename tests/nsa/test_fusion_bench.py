"""bench_fusion rejects a wrong result, and records why its budget skipped a part."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import torch

from tests.benchmarks import bench_fusion as bench


def test_parity_allows_twice_the_eager_error_and_no_nan() -> None:
    true = torch.ones(100, dtype=torch.float64)
    eager = true + 1e-3
    assert bench.parity([eager], [true - 2e-3], [true], 1e-5)["ok"]
    judged = bench.parity([eager, true], [true, true + 2e-5], [true, true], 1e-5)
    assert not judged["ok"] and judged["compiled_error"] > judged["limit"], (
        "the second tensor is wrong, the first has room"
    )
    assert not bench.parity([eager], [true * torch.nan], [true], 1e-5)["ok"]


def test_small_parts_come_first_and_v2_last() -> None:
    names = ["a+b", "layer v2", "layer masked"]
    assert list(bench.order(names, [(1, 2), (3, 4)])) == [
        ("a+b", (1, 2)),
        ("a+b", (3, 4)),
        ("layer masked", (1, 2)),
        ("layer masked", (3, 4)),
        ("layer v2", (1, 2)),
        ("layer v2", (3, 4)),
    ]


def test_a_spent_budget_is_a_reason_and_not_a_number(tmp_path: Path) -> None:
    sizes = {"shapes": [(1, 40)], "samples": 2, "sample_ms": 1.0, "budget_s": 0.0}
    report = bench.run(
        Namespace(
            device="cpu",
            preset="tiny",
            dtype="float32",
            backend="eager",
            out=tmp_path / "report.json",
            **sizes,
        )
    )
    assert json.loads((tmp_path / "report.json").read_text()) == report
    assert len(report["rows"]) == 6 and all(
        "--budget-s 0" in row["skipped"] and "median_ms" not in row for row in report["rows"]
    )
    assert sum("skipped" in line for line in bench.table(report)) == 6


def test_a_row_holds_its_raw_samples_and_its_proof() -> None:
    torch.manual_seed(0)
    options = Namespace(device="cpu", samples=3, sample_ms=0.1, backend="eager")
    part = bench.parts(bench.preset("tiny"), torch.float32, "cpu")["gate+combine softmax"]
    row = bench.measure(part, (1, 20), torch.float32, options)
    assert [len(samples) for samples in row["samples_ms"].values()] == [3, 3] and min(
        min(s) for s in row["samples_ms"].values()
    ) > 0
    assert (
        row["parity"]["ok"]
        and row["parity"]["truth"] == "torch.float64"
        and row["kernels"] == {"eager": None, "compiled": None}
    )
    torch._dynamo.reset()
