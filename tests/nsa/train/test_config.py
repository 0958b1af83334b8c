"""The configuration of a run: what it takes, refuses and hashes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nsa.train.config import FOUNDING_NAMES, RunConfig, WatchdogConfig
from nsa.train.yaml_file import read_config

ROOT = Path(__file__).parents[3]


def test_what_is_written_is_read_back() -> None:
    config = RunConfig.from_mapping(
        {
            "model": {"preset": "tiny", "layers": ["nsa", "dense"], "checkpoint_layers": [0, 1]},
            "data": {"kind": "text", "paths": ["a", "b"]},
            "train": {"lr": 1e-3, "schedule": "wsd", "decay_steps": 10},
            "watchdog": {"webhook": "http://localhost"},
            "out": "x",
        }
    )
    again = RunConfig.from_mapping(json.loads(json.dumps(config.to_mapping())))
    assert again == config and again.sha256() == config.sha256()


FOUNDING: dict[str, dict[str, Any]] = {
    "train": {
        "batch_size": 3,
        "accumulate_grad_batches": 4,
        "lr_schedule": "constant",
        "grad_clip": 0.5,
        "max_steps": 6,
        "save_every": 7,
        "log_every": 8,
        "eval_interval": 9,
    },
    "runtime": {"precision": "fp32", "device": "cpu", "path": "v2"},
}


def test_founding_names_are_fields() -> None:
    config = RunConfig.from_mapping(FOUNDING)
    train = config.train
    assert (train.batch, train.accumulate, train.schedule) == (3, 4, "constant")
    assert (train.clip, train.steps, train.eval_every) == (0.5, 6, 9)
    assert (config.checkpoint.every, config.log.every) == (7, 8)
    assert (train.precision, train.device, train.path) == ("fp32", "cpu", "v2")
    given = {f"{section}.{key}" for section, keys in FOUNDING.items() for key in keys}
    assert given == set(FOUNDING_NAMES)


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"trian": {}}, "trian is no section; did you mean 'train'?"),
        ({"train": {"sqe_len": 1}}, "train.sqe_len is not known; did you mean 'seq_len'?"),
        ({"train": 5}, "train=5 must be a mapping"),
        ({"train": 5, "runtime": {"precision": "fp32"}}, "train=5 must be a mapping"),
        ({"runtime": {"speed": 1}}, "runtime is no section"),
        ({"train": {"steps": True}}, "train.steps=True must be a whole number >= 1"),
        ({"train": {"lr": "1e-3"}}, "train.lr='1e-3' must be a number >= 0"),
        ({"train": {"lr": float("nan")}}, "train.lr=nan must be a number >= 0"),
        ({"train": {"batch": 1, "batch_size": 1}}, "train.batch is given twice"),
        ({"data": {"kind": "text"}}, "data.paths is empty"),
        ({"data": {"kind": "synthetic", "paths": [1]}}, "must be a list of paths"),
        ({"data": {"kind": "synthetic", "tokenizer": "file"}}, "needs data.tokenizer_path"),
        ({"train": {"schedule": "wsd"}}, "train.schedule=wsd with train.decay_steps=0"),
        ({"parallel": {"kind": "dpp"}}, "parallel.kind='dpp' is not known; did you mean 'ddp'?"),
        ({"watchdog": {"step_s": -1}}, "watchdog.step_s=-1 must be a number >= 0"),
    ],
)
def test_what_cannot_be_is_refused(mapping: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        RunConfig.from_mapping(mapping)
    assert message in str(caught.value)


def shipped(name: str) -> RunConfig:
    return read_config(str(ROOT / f"configs/{name}.yaml"), [])


def test_runs_that_the_pages_begin_can_be_resumed() -> None:
    """A checkpoint within a minute on shared cores; a leg of 1,500 steps at 500, as its report."""
    assert shipped("text-cpu").checkpoint.every == 25
    assert shipped("learning-h200").checkpoint.every == 500


def test_the_first_text_is_this_projects_own() -> None:
    data = shipped("text-cpu").data
    assert all(any(ROOT.glob(path)) for path in data.paths)


def test_empty_section_beside_a_founding_name() -> None:
    config = RunConfig.from_mapping({"train": None, "runtime": {"precision": "fp32"}})
    assert config.train.precision == "fp32"


BASE = RunConfig()


@pytest.mark.parametrize(
    "same",
    [
        replace(BASE, out="elsewhere"),
        replace(BASE, log=replace(BASE.log, every=1)),
        replace(BASE, watchdog=replace(BASE.watchdog, enabled=False)),
        replace(BASE, checkpoint=replace(BASE.checkpoint, every=7)),
        replace(BASE, data=replace(BASE.data, workers=0, prefetch=9)),
        replace(BASE, train=replace(BASE.train, eval_every=3, sample_prompt="x")),
    ],
)
def test_what_computes_the_same_has_the_same_hash(same: RunConfig) -> None:
    assert same != BASE and same.sha256() == BASE.sha256()


@pytest.mark.parametrize(
    "other",
    [
        replace(BASE, model=replace(BASE.model, num_layers=11)),
        replace(BASE, data=replace(BASE.data, seed=1)),
        replace(BASE, train=replace(BASE.train, lr=1e-4)),
        replace(BASE, train=replace(BASE.train, batch=9)),
        replace(BASE, parallel=replace(BASE.parallel, compress="bf16")),
    ],
)
def test_what_computes_something_else_has_another_hash(other: RunConfig) -> None:
    assert other.sha256() != BASE.sha256()


def test_a_whole_number_has_the_hash_of_the_same_float() -> None:
    """--set train.clip=1 resumes a run of clip 1.0."""
    whole, real = (
        RunConfig.from_mapping({"train": {"clip": clip}, "data": {"held_out_pct": pct}})
        for clip, pct in ((1, 2), (1.0, 2.0))
    )
    assert whole.sha256() == real.sha256()


@pytest.mark.parametrize("webhook", ["hooks.example/x", "", 3])
def test_a_webhook_that_could_not_be_sent_to_is_refused_before_the_run(webhook: object) -> None:
    with pytest.raises(ValueError, match=r"watchdog\.webhook=.* http:// or https://"):
        WatchdogConfig(webhook=webhook)  # type: ignore[arg-type]
