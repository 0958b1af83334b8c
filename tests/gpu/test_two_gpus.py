"""On two GPUs of one host, over NCCL: `--require two-gpus` collects this file, and it fails where
there are fewer.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from perfbench.records import Replicate, Status, read_run
from tests.gpu.context_ranks import FP64
from tests.nsa.torchrun import ROOT, found_by_ranks

SCRIPT = Path(__file__).with_name("context_ranks.py")
COMPRESSED = Path(__file__).with_name("compressed_ranks.py")
BF16_BOUND = 2.0**-8  # NSA.md, of the largest true value, beyond twice the error of one GPU
MATRIX = """\
version: 1
name: two-gpus
target: {{gpu: "{gpu}", count: 2}}
model: m7c_125m
axes:
  workload: [train]
  seq_len: [2048]
  path: [triton]
  dtype: [bf16]
  world_size: [2]
  parallel: [{parallel}]
  compile: [{compiled}]
  cuda_graph: [{captured}]
measure: {{processes: 1, warmup_s: 0.2, samples: 5, min_sample_ms: 50}}
limits: {{timeout_s: 240}}
gate: {{min_replicates: 1}}
"""


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = found_by_ranks(
        SCRIPT, 2, tmp_path_factory.mktemp("context") / "found.json"
    )
    return found


@pytest.mark.parametrize("case", FP64)
def test_context_parallelism_is_one_gpu_in_fp64(context: dict[str, Any], case: str) -> None:
    """Outputs, gradients, and the blocks, of which none differs."""
    assert max(context[case].values()) <= 1e-13, context[case]


def test_context_parallelism_by_kernels_is_within_the_bound_of_bf16(
    context: dict[str, Any],
) -> None:
    assert max(context["bf16"].values()) <= BF16_BOUND, context["bf16"]


def test_equal_q_and_k_choose_the_blocks_of_one_gpu(context: dict[str, Any]) -> None:
    assert context["bits"] == {"compressed": 0, "blocks": 0}


def test_the_trainer_exchanges_gradients_in_bf16(tmp_path: Path) -> None:
    """Eight steps of two micro-steps: losses stay close to those of whole gradients."""
    found = found_by_ranks(COMPRESSED, 2, tmp_path / "found.json")
    whole, compressed = found["off"], found["bf16"]
    assert compressed["in_bf16"] == 1 and whole["in_bf16"] < 0.5  # rows of bytes that never occur
    assert len(compressed["losses"]) == 8
    assert compressed["losses"][0] == pytest.approx(whole["losses"][0], rel=1e-5)
    assert compressed["losses"] == pytest.approx(whole["losses"], rel=1e-3)
    assert compressed["losses"][-1] < compressed["losses"][0] - 0.1
    for one in (whole, compressed):
        assert one["weights"][0] == one["weights"][1]


@pytest.mark.parametrize(
    ("parallel", "compiled", "captured"),
    [
        ("ddp", "off", "off"),
        ("fsdp", "off", "off"),
        ("ddp", "on", "off"),
        ("fsdp", "on", "off"),
        ("ddp", "off", "on"),
        ("ddp", "on", "on"),
    ],
)
def test_the_harness_measures_and_proves_two_ranks(
    parallel: str, compiled: str, captured: str, tmp_path: Path
) -> None:
    matrix, out = tmp_path / "two-gpus.yaml", tmp_path / "runs"
    text = MATRIX.format(
        gpu=torch.cuda.get_device_name(0),
        parallel=parallel,
        compiled=compiled,
        captured=captured,
    )
    matrix.write_text(text, encoding="utf-8")
    row = measured(matrix, out)
    assert row.status is Status.OK and row.ranks is not None, row.reason + row.stderr_tail
    assert row.ranks.backend == "nccl" and [one.rank for one in row.ranks.ranks] == [0, 1]
    assert len({one.device_uuid_sha256 for one in row.ranks.ranks}) == 2
    assert row.step_proof is not None and row.step_proof.ok
    assert row.ranks.exposed_s is not None, row.ranks.absent


def measured(matrix: Path, out: Path) -> Replicate:
    """The row of a run of one cell, which the gate takes."""
    command = [sys.executable, "-m", "perfbench", "run", str(matrix), "--out", str(out)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (row,) = read_run(next(out.iterdir())).replicates
    return row
