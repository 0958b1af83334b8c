"""`examples/ray_train.py` on a real Ray cluster of two nodes, next to torchrun's two ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

ROOT = Path(__file__).parents[2]
CONFIG = """\
model: {preset: tiny, dim: 32, head_dim: 8, num_layers: 1}
data: {kind: synthetic, workers: 0}
train: {steps: 4, batch: 1, seq_len: 96, precision: fp32, warmup_steps: 0, device: cpu}
log: {every: 1}
"""


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A head that gives no CPU, and two nodes with one each: a rank cannot have both."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for name in ("one", "two"):
        made.add_node(num_cpus=1, node_name=name)
    yield made
    made.shutdown()


def ran(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )


def losses(out: Path, rank: int) -> list[tuple[int, float]]:
    lines = map(json.loads, (out / "log" / f"rank{rank}.jsonl").read_text().splitlines())
    return [(one["step"], one["loss_nats"]) for one in lines if "engaged" in one]


def test_a_cluster_trains_as_torchrun_does(cluster: Cluster, tmp_path: Path) -> None:
    """The same config, the same data a rank, so the same losses but for rounding."""
    config, by_ray, by_torchrun = tmp_path / "c.yaml", tmp_path / "ray", tmp_path / "torchrun"
    config.write_text(CONFIG)
    example = [str(ROOT / "examples" / "ray_train.py"), str(config), "--address", cluster.address]
    done = ran(*example, "--workers", "2", "--out", str(by_ray))
    assert done.returncode == 0, done.stderr[-4000:]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    wanted = ran(*launcher, "-m", "nsa.train", str(config), "--out", str(by_torchrun))
    assert wanted.returncode == 0, wanted.stderr[-4000:]
    for rank in range(2):
        found, expected = losses(by_ray, rank), losses(by_torchrun, rank)
        assert [step for step, _ in found] == [1, 2, 3, 4]
        assert [loss for _, loss in found] == pytest.approx([x for _, x in expected], rel=1e-5)
    assert f"step 4: loss {losses(by_ray, 0)[-1][1]:.4f} nats" in done.stdout
    start = json.loads((by_ray / "log" / "rank0.jsonl").read_text().splitlines()[0])
    assert (start["world_size"], start["parallel"]) == (2, "ddp")

    refused = ran(*example, "--out", str(by_ray), "--set", "train.stepz=4")
    assert refused.returncode != 0 and "ended with exit code 2; wanted 0" in refused.stderr
