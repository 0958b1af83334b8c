"""On CUDA: a step of training as one graph is the eager step, and a run that resumes is one that
was never interrupted.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa.config import ModelConfig
from nsa.model import TinyLM, next_token_labels
from nsa.train.config import RunConfig
from nsa.train.errors import TrainError, TrainExit
from nsa.train.loop import Trainer
from nsa.train.optimizer import build_optimizer
from nsa.train.parallel import TrainWorld
from nsa.train.records import Batch
from nsa.train.step import EAGER_STEPS, TrainStep

MODEL = ModelConfig(dim=256, num_layers=2, num_heads=8, num_kv_heads=2, head_dim=64, vocab_size=512)
ALONE = TrainWorld(0, 1, torch.device("cuda", 0), "none")
NUM_STEPS = EAGER_STEPS + 4
PRECISIONS = ("bf16_master", "autocast", "bf16", "fp32")


def config_of(**train: Any) -> RunConfig:
    # the path whose backward gives the same bits each time
    values = {"path": "triton", "batch": 2, "seq_len": 1536, "accumulate": 2, "clip": 0.5, **train}
    return replace(RunConfig.from_mapping({"train": values}), model=MODEL)


def batch_of(seed: int, batch: int = 2, tokens: int = 1536) -> Batch:
    ids = torch.randint(512, (batch, tokens), generator=torch.Generator().manual_seed(seed))
    labels = next_token_labels(ids)
    count = batch * (tokens - 1)
    return Batch(ids.pin_memory(), labels.pin_memory(), None, count, count, 0.0)


def step_of(config: RunConfig) -> tuple[TinyLM, TrainStep]:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if config.train.precision.startswith("bf16") else torch.float32
    model = TinyLM(config.model).to("cuda", dtype)
    return model, TrainStep(model, build_optimizer(model, config.train), config, ALONE)


def trained(config: RunConfig) -> tuple[TinyLM, TrainStep, list[float | None]]:
    model, step = step_of(config)
    seen = []
    for i in range(NUM_STEPS):
        step([batch_of(2 * i), batch_of(2 * i + 1)], 1e-3 * (i + 1))
        seen.append(step.read().loss_nats)
    return model, step, seen


@pytest.mark.parametrize("precision", PRECISIONS)
def test_replays_are_eager_steps(precision: str) -> None:
    """Weights, moments and losses bit for bit, each step with a learning rate of its own; in fp32,
    where SDPA's backward adds in no fixed order, two eager runs differ by 1e-6 too.
    """
    model, step, losses = trained(config_of(precision=precision, cuda_graph="on"))
    twin, eager, wanted = trained(config_of(precision=precision, cuda_graph="off"))
    assert step.is_captured and not eager.is_captured
    within = {"rtol": 1e-4, "atol": 1e-5} if precision == "fp32" else {"rtol": 0.0, "atol": 0.0}
    torch.testing.assert_close(losses, wanted, **within)
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), **within)
    torch.testing.assert_close(step.optimizer.state_dict(), eager.optimizer.state_dict(), **within)


def test_a_replay_that_is_not_finite_changes_nothing() -> None:
    model, step, _ = trained(config_of(cuda_graph="on"))
    with torch.no_grad():
        model.norm.weight[0] = torch.nan
    weights = copy.deepcopy(model.state_dict())
    state = copy.deepcopy(step.optimizer.state_dict())
    step([batch_of(1), batch_of(2)], 1e-3)
    totals = step.read()
    assert (totals.bad_steps, totals.bad_run, totals.loss_nats) == (1, 1, None)
    torch.testing.assert_close(step.optimizer.state_dict(), state, rtol=0, atol=0, equal_nan=True)
    for name, weight in model.state_dict().items():
        if name != "norm.weight":  # its master still has the finite value
            assert torch.equal(weight, weights[name]), name


@pytest.mark.parametrize("cuda_graph", ["on", "off"])
def test_a_step_never_waits_for_the_device(cuda_graph: str) -> None:
    _, step, _ = trained(config_of(cuda_graph=cuda_graph))
    batches = [batch_of(1), batch_of(2)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(batches, 1e-3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert step.read().loss_nats is not None


def run_config(**train: Any) -> RunConfig:
    values = {"path": "triton", "batch": 2, "seq_len": 1024, "steps": 12, **train}
    values.setdefault("warmup_steps", 2)
    mapping = {
        "train": values,
        "data": {"kind": "synthetic", "workers": 0},
        "checkpoint": {"every": 6},
        "log": {"every": 3, "probe_every": 6},
    }
    return replace(RunConfig.from_mapping(mapping), model=MODEL)


def run(config: RunConfig, out: Path, resume: Path | None = None) -> Trainer:
    out.mkdir(exist_ok=True)
    trainer = Trainer(config, out, resume=resume)
    assert trainer.run() is TrainExit.OK
    return trainer


def test_a_run_that_resumes_is_one_that_was_never_interrupted(tmp_path: Path) -> None:
    whole = run(run_config(), tmp_path / "whole")
    (tmp_path / "halves").mkdir()
    half = Trainer(run_config(), tmp_path / "halves")
    stopping = half._is_due

    def stop_after_seven(every: int) -> bool:
        if half.step_count == 7:
            half._stopped_by = 15
        return stopping(every)

    half._is_due = stop_after_seven  # type: ignore[method-assign]
    assert half.run() is TrainExit.INTERRUPTED
    resumed = run(run_config(), tmp_path / "halves", tmp_path / "halves/checkpoints/step-00000007")
    torch.testing.assert_close(
        resumed.plain_model.state_dict(), whole.plain_model.state_dict(), rtol=0, atol=0
    )
    torch.testing.assert_close(
        resumed.optimizer.state_dict(), whole.optimizer.state_dict(), rtol=0, atol=0
    )


def test_lines_hold_memory_speed_and_what_ran(tmp_path: Path) -> None:
    run(run_config(), tmp_path / "run")
    lines = [
        json.loads(line) for line in (tmp_path / "run/log/rank0.jsonl").read_text().splitlines()
    ]
    last = [line for line in lines if line.get("loss_nats") is not None][-1]
    assert last["step"] == 12 and last["engaged"]["sel.triton"] == MODEL.num_layers
    assert lines[0]["not_repeatable"] == []
    assert 0 < last["memory_allocated_bytes"] <= last["memory_reserved_bytes"]
    assert 0 < last["mfu_pct"] < 100


@pytest.fixture
def little_memory() -> Iterator[None]:
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.03)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.usefixtures("little_memory")
def test_out_of_memory_in_the_first_step_names_the_largest_batch_that_fits(tmp_path: Path) -> None:
    config = run_config(batch=512, seq_len=2048, steps=1)
    (tmp_path / "run").mkdir()
    with pytest.raises(TrainError, match="the largest batch that fits is") as caught:
        Trainer(config, tmp_path / "run").run()
    assert caught.value.code is TrainExit.MEMORY
    found = int(str(caught.value).split("the largest batch that fits is ")[1].split(";")[0])
    assert 1 <= found < 512
    torch.cuda.empty_cache()
    run(run_config(batch=found, seq_len=2048, steps=1, cuda_graph="off"), tmp_path / "fits")
