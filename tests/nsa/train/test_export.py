"""Export as Hugging Face's files, and back: the same bits, and no foreign or cut file."""

from __future__ import annotations

import json
import os
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nsa.config import ModelConfig, preset
from nsa.model import DenseLM, TinyLM
from nsa.train.errors import TrainError, TrainExit
from nsa.train.export import SavesItself, load_pretrained, save_pretrained

TINY = replace(preset("tiny"), num_layers=2)
# a branch that is off is a buffer that no file holds
TWO_BRANCHES = ModelConfig.from_mapping(
    {"preset": "tiny", "layers": [{"branches": ["win"]}, "nsa"]}
)


def model_of(kind: type[TinyLM] | type[DenseLM], config: ModelConfig) -> TinyLM | DenseLM:
    torch.manual_seed(3)
    return kind(config)


def refused(folder: Path, *wanted: str) -> None:
    with pytest.raises(TrainError) as caught:
        load_pretrained(folder)
    message = str(caught.value)
    assert caught.value.code is TrainExit.CHECKPOINT and "\n" not in message
    for one in wanted:
        assert one in message, message


@pytest.mark.parametrize("kind", [TinyLM, DenseLM])
@pytest.mark.parametrize("config", [TINY, TWO_BRANCHES], ids=["tiny", "two branches"])
def test_the_same_bits(tmp_path: Path, kind: type[TinyLM], config: ModelConfig) -> None:
    model = model_of(kind, config)
    model.blocks[0].to(torch.float64)  # dtypes are each tensor's own
    save_pretrained(model, tmp_path / "deep" / "out")
    assert sorted(one.name for one in (tmp_path / "deep" / "out").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    before = torch.get_rng_state()
    loaded = load_pretrained(tmp_path / "deep" / "out")
    assert torch.get_rng_state().equal(before)
    assert type(loaded) is kind and loaded.config == config
    own, its = model.state_dict(), loaded.state_dict()
    assert own.keys() == its.keys()
    assert all(own[name].dtype == its[name].dtype and own[name].equal(its[name]) for name in own)
    assert all(one.requires_grad for one in loaded.parameters())
    for one in (model, loaded):
        one.float()
    ids = torch.arange(70).unsqueeze(0)
    assert model(ids).equal(loaded(ids))


def test_a_shared_tensor_is_stored_and_loaded_as_one(tmp_path: Path) -> None:
    model = model_of(TinyLM, TINY)
    model.head.weight = model.embedding.weight
    save_pretrained(model, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert "embedding.weight" in stored and "head.weight" not in stored
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is True
    loaded = load_pretrained(tmp_path)
    assert loaded.head.weight is loaded.embedding.weight
    assert loaded.head.weight.equal(model.head.weight)


def test_the_file_may_change_after_it_was_read(tmp_path: Path) -> None:
    model = model_of(TinyLM, TINY)
    save_pretrained(model, tmp_path)
    loaded = load_pretrained(tmp_path)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.write(bytes((tmp_path / "model.safetensors").stat().st_size))
    own = model.state_dict()
    assert all(one.equal(own[name]) for name, one in loaded.state_dict().items())


def test_a_resized_vocabulary_is_the_embeddings(tmp_path: Path) -> None:
    model = model_of(TinyLM, TINY)
    model.embedding = torch.nn.Embedding(300, TINY.dim)
    model.head = torch.nn.Linear(TINY.dim, 300, bias=False)
    save_pretrained(model, tmp_path)
    assert load_pretrained(tmp_path).config.vocab_size == 300


def test_config_is_hugging_faces(tmp_path: Path) -> None:
    save_pretrained(model_of(DenseLM, TINY).bfloat16(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    wanted = {
        "model_type": "nsa_tinylm",
        "architectures": ["TinyLMForCausalLM"],
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "vocab_size": 256,
        "num_hidden_layers": 2,
        "tie_word_embeddings": False,
        "attention": "dense",
    }
    assert {name: config[name] for name in wanted} == wanted
    assert ModelConfig.from_mapping(config["model"]) == TINY
    assert {t.dtype for t in load_pretrained(tmp_path).state_dict().values()} == {torch.bfloat16}


def test_the_tokenizer_saves_itself(tmp_path: Path) -> None:
    class Words:
        def save(self, folder: Path) -> None:
            (folder / "tokenizer.json").write_text("{}")

    save_pretrained(model_of(TinyLM, TINY), tmp_path, Words())
    assert (tmp_path / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
@pytest.mark.parametrize("harm", ["missing", "empty", "cut", "header"])
def test_a_file_that_is_not_whole(tmp_path: Path, name: str, harm: str) -> None:
    save_pretrained(model_of(TinyLM, TINY), tmp_path)
    path = tmp_path / name
    content = path.read_bytes()
    if harm == "missing":
        path.unlink()
    else:
        path.write_bytes(content[: {"empty": 0, "cut": len(content) - 9, "header": 20}[harm]])
    refused(tmp_path, str(path), "export it again")


def test_a_foreign_folder(tmp_path: Path) -> None:
    save_pretrained(model_of(TinyLM, TINY), tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for changed, wanted in [
        ({"model_type": "llama"}, "'llama'"),
        ({"model": {**config["model"], "wings": 2}}, "wings"),
        ({"model": None}, "no model of this version"),
        ({"model": {**config["model"], "vocab_size": 300}}, "embedding.weight of shape [256,"),
        ({"model": {**config["model"], "num_layers": 1}}, "its config has not: blocks.1."),
        ({"model": {**config["model"], "num_layers": 3}}, "no tensor blocks.2."),
    ]:
        path.write_text(json.dumps({**config, **changed}))
        refused(tmp_path, wanted)
    path.write_text("[]")
    refused(tmp_path, "model_type None")


def test_a_wrapped_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"got a Sequential; wanted a TinyLM"):
        save_pretrained(torch.nn.Sequential(), tmp_path)  # type: ignore[arg-type]


def test_without_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "safetensors.torch", None)
    with pytest.raises(TrainError, match=r"safetensors is missing") as caught:
        save_pretrained(model_of(TinyLM, TINY), tmp_path)
    assert caught.value.code is TrainExit.MISSING


def cannot_write(
    model: TinyLM, folder: Path, why: str, tokenizer: SavesItself | None = None
) -> None:
    with pytest.raises(TrainError) as caught:
        save_pretrained(model, folder, tokenizer)
    message = str(caught.value)
    assert caught.value.code is TrainExit.USAGE and "\n" not in message
    assert (
        message
        == f"{folder} cannot be written: {why}; wanted a folder on a disk with room; give another"
    )


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Of the kernel, which refuses a longer one as a full disk does, but for the words."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    model = model_of(TinyLM, TINY)
    (tmp_path / "file").write_text("")
    cannot_write(model, tmp_path / "file", "File exists")
    cannot_write(model, tmp_path / "file" / "sub", "Not a directory")
    cannot_write(model, Path("/proc/nowhere"), "No such file or directory")
    cannot_write(model, tmp_path / "new" / ("n" * 300), "File name too long")
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_a_full_disk_leaves_no_folder(tmp_path: Path) -> None:
    with files_of_at_most(100_000):
        cannot_write(
            model_of(TinyLM, TINY),
            tmp_path / "deep" / "out",
            "Error while serializing: I/O error: File too large (os error 27)",
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("harm", ["weights", "tokenizer"])
def test_a_full_disk_leaves_an_older_export_whole(tmp_path: Path, harm: str) -> None:
    class Full:
        def save(self, folder: Path) -> None:
            (folder / "tokenizer.json").write_text("{")
            raise OSError(28, "No space left on device")

    old = model_of(TinyLM, TINY)
    save_pretrained(old, tmp_path)
    other = TinyLM(TINY)
    if harm == "weights":
        with files_of_at_most(100_000):
            cannot_write(
                other, tmp_path, "Error while serializing: I/O error: File too large (os error 27)"
            )
    else:
        cannot_write(other, tmp_path, "No space left on device", Full())
    assert sorted(one.name for one in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    loaded, own = load_pretrained(tmp_path).state_dict(), old.state_dict()
    assert all(loaded[name].equal(own[name]) for name in own)


def test_what_a_killed_export_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".tmp-export").mkdir()
    (tmp_path / ".tmp-export" / "left").write_text("")
    save_pretrained(model_of(TinyLM, TINY), tmp_path)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


class WithFolder:
    def save(self, folder: Path) -> None:
        (folder / "words").mkdir()
        (folder / "words" / "all.txt").write_text("a b")


class WithoutSave:
    def save(self, folder: Path) -> None:
        raise ValueError("no words")


def test_a_tokenizer_may_write_folders_and_may_fail(tmp_path: Path) -> None:
    save_pretrained(model_of(TinyLM, TINY), tmp_path / "a", WithFolder())
    assert (tmp_path / "a" / "words" / "all.txt").read_text() == "a b"
    with pytest.raises(ValueError, match="no words"):
        save_pretrained(model_of(TinyLM, TINY), tmp_path / "b", WithoutSave())
    assert not (tmp_path / "b").exists()


def test_files_have_the_rights_that_the_umask_leaves(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        save_pretrained(model_of(TinyLM, TINY), tmp_path)
    finally:
        os.umask(before)
    rights = {one.name: stat.S_IMODE(one.stat().st_mode) for one in tmp_path.iterdir()}
    assert rights == {"config.json": 0o640, "model.safetensors": 0o640}
