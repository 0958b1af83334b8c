"""train.init_from: a run that begins with the weights of another, or of an export."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from nsa.config import preset
from nsa.train import cli
from nsa.train.config import RunConfig
from nsa.train.errors import TrainError, TrainExit
from nsa.train.export import save_pretrained
from nsa.train.loop import Trainer
from nsa.train.run_folder import checkpoint_of, source_of, write_resolved

MODEL = replace(preset("tiny"), dim=32, head_dim=8, num_layers=1)


def config_of(**train: object) -> RunConfig:
    values = {
        "steps": 3,
        "batch": 2,
        "seq_len": 96,
        "precision": "fp32",
        "path": "masked",
        "warmup_steps": 0,
        **train,
    }
    mapping = {"data": {"kind": "synthetic", "workers": 0}, "train": values}
    mapping["checkpoint"] = {"every": 0}
    return replace(RunConfig.from_mapping(mapping), model=MODEL)


def trained(config: RunConfig, out: Path, resume: Path | None = None) -> Trainer:
    out.mkdir(parents=True, exist_ok=True)
    write_resolved(out, config)
    trainer = Trainer(config, out, resume=resume)
    assert trainer.run() is TrainExit.OK
    return trainer


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, Path]:
    out = tmp_path_factory.mktemp("first") / "run"
    return trained(config_of(), out), out


@pytest.mark.parametrize("named", ["run", "checkpoint", "export"])
def test_the_weights_are_the_others_before_the_first_step(
    first: tuple[Trainer, Path], tmp_path: Path, named: str
) -> None:
    trainer, folder = first
    source = {
        "run": folder,
        "checkpoint": checkpoint_of(folder, "auto"),
        "export": tmp_path / "export",
    }[named]
    if named == "export":
        save_pretrained(trainer.plain_model, source, trainer.tokenizer)
    # a rate of 0 leaves the weights as they began; another length is what init_from is for
    still = config_of(init_from=str(source), lr=0.0, seq_len=160, seed=5)
    other = trained(still, tmp_path / "long")
    torch.testing.assert_close(
        other.plain_model.state_dict(), trainer.plain_model.state_dict(), rtol=0, atol=0
    )


def test_the_optimizer_and_the_steps_begin_anew(
    first: tuple[Trainer, Path], tmp_path: Path
) -> None:
    other = trained(config_of(init_from=str(first[1]), steps=1), tmp_path / "long")
    assert other.step_count == 1
    steps = other.optimizer.state_dict()["step"]
    assert {float(one) for one in steps.values()} == {1.0}


def test_a_resumed_run_reads_its_own_checkpoint(
    first: tuple[Trainer, Path], tmp_path: Path
) -> None:
    config = config_of(init_from=str(first[1]), schedule="constant")
    whole = trained(replace(config, train=replace(config.train, steps=4)), tmp_path / "whole")
    out = tmp_path / "parts"
    trained(replace(config, train=replace(config.train, steps=2)), out)
    rest = replace(config, train=replace(config.train, steps=4))
    resumed = trained(rest, out, resume=checkpoint_of(out, "auto"))
    assert resumed.step_count == 4
    torch.testing.assert_close(
        resumed.plain_model.state_dict(), whole.plain_model.state_dict(), rtol=0, atol=0
    )


def test_another_model_is_named(first: tuple[Trainer, Path], tmp_path: Path) -> None:
    wide = replace(config_of(init_from=str(first[1])), model=replace(MODEL, dim=64))
    (tmp_path / "wide").mkdir()
    with pytest.raises(TrainError, match=r"blocks\.0\.\S+ \[.*32.*\], and this run's model b"):
        Trainer(wide, tmp_path / "wide").run()
    dense = config_of(init_from=str(first[1]), attention="dense")
    (tmp_path / "dense").mkdir()
    with pytest.raises(TrainError, match=r"has blocks\.\S+ \[.*\], and this run's model no bl"):
        Trainer(dense, tmp_path / "dense").run()


def test_another_tokenizer_is_refused(first: tuple[Trainer, Path], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a line of text\n" * 400)
    config = config_of(init_from=str(first[1]))
    mapping = {**config.to_mapping(), "data": {"paths": [str(text)], "workers": 0}}
    read = replace(RunConfig.from_mapping(mapping), model=MODEL)
    out = tmp_path / "read"
    out.mkdir()
    with pytest.raises(TrainError, match="has another tokenizer than this run") as caught:
        Trainer(read, out).run()
    assert caught.value.code is TrainExit.DATA
    save_pretrained(first[0].plain_model, tmp_path / "export", first[0].tokenizer)
    exported = replace(read, train=replace(read.train, init_from=str(tmp_path / "export")))
    with pytest.raises(TrainError, match="has another tokenizer than this run"):
        Trainer(exported, out).run()


def test_no_source_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="is no run with a checkpoint, no checkpoint and no exp"):
        source_of(str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match=r"train\.init_from='' must be the path of a folder"):
        config_of(init_from="")


def test_a_run_that_would_archive_its_source_is_refused(
    first: tuple[Trainer, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def never(*_: object) -> int:
        raise AssertionError("the run was started")

    fake = ModuleType("nsa.train.watchdog")
    vars(fake).update(supervise=never)
    monkeypatch.setitem(sys.modules, "nsa.train.watchdog", fake)
    tiny = str(Path(__file__).parents[3] / "configs/tiny-cpu.yaml")
    folder = first[1]
    code = cli.invoke([tiny, "--set", f"train.init_from={folder}", "--out", str(folder)])
    assert code == TrainExit.USAGE
    assert "which this run would archive" in capsys.readouterr().err
    assert (folder / "checkpoints" / "last-good").is_file()


def test_without_it_the_hash_of_a_config_is_as_before() -> None:
    assert "init_from" not in config_of().identity()["train"]
    assert config_of(init_from="a").sha256() != config_of(init_from="b").sha256()
