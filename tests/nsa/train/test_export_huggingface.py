"""What is exported is a model of transformers, with the same logits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from nsa.config import ModelConfig, preset
from nsa.huggingface.tinylm import register_tinylm
from nsa.model import DenseLM, TinyLM
from nsa.train import export
from nsa.train.export import load_pretrained, save_pretrained

TINY = replace(preset("tiny"), num_layers=2)
# the softmax gate of a layer without all branches has a buffer that no file holds
TWO_BRANCHES = ModelConfig.from_mapping(
    {
        "preset": "tiny",
        "num_layers": 2,
        "nsa": {"gate": "softmax"},
        "layers": [{"branches": ["win", "sel"]}, "nsa"],
    }
)
IDS = torch.arange(140).view(2, 70)


def exported(folder: Path, kind: type[TinyLM] | type[DenseLM], config: ModelConfig) -> torch.Tensor:
    torch.manual_seed(5)
    model = kind(config)
    save_pretrained(model, folder)
    logits: torch.Tensor = model(IDS)
    return logits


@pytest.mark.parametrize("kind", [TinyLM, DenseLM])
@pytest.mark.parametrize("config", [TINY, TWO_BRANCHES], ids=["tiny", "two branches"])
def test_transformers_loads_it_and_saves_it_back(
    tmp_path: Path, kind: type[TinyLM] | type[DenseLM], config: ModelConfig
) -> None:
    register_tinylm()
    register_tinylm()
    logits = exported(tmp_path / "ours", kind, config)
    read = AutoConfig.from_pretrained(tmp_path / "ours")
    assert read.vocab_size == 256 and ModelConfig.from_mapping(read.model) == config
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info.values())
    assert not model.training and model(IDS).logits.equal(logits)
    model.save_pretrained(tmp_path / "theirs")
    back = load_pretrained(tmp_path / "theirs")
    assert type(back) is kind and back(IDS).equal(logits)


def test_dtype_loss_and_mask(tmp_path: Path) -> None:
    register_tinylm()
    logits = exported(tmp_path, TinyLM, TINY)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert {one.dtype for one in model.parameters()} == {torch.float64}
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    labels = IDS.clone()
    labels[:, :5] = -100
    surprise = -logits.log_softmax(-1)[:, :-1].gather(-1, IDS[:, 1:, None])
    torch.testing.assert_close(model(IDS, labels=labels).loss, surprise[:, 4:].mean())
    mask = torch.ones_like(IDS)
    assert model(IDS, attention_mask=mask).logits.equal(logits)
    mask[:, :3] = 0
    padded = model(IDS, attention_mask=mask).logits[:, 3:]
    torch.testing.assert_close(padded, model(IDS[:, 3:]).logits)


def test_the_dense_twin_refuses_padding(tmp_path: Path) -> None:
    register_tinylm()
    exported(tmp_path, DenseLM, TINY)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    mask = torch.ones_like(IDS)
    mask[0, 0] = 0
    with pytest.raises(ValueError, match="for the dense twin"):
        model(IDS, attention_mask=mask)


def test_a_tied_vocabulary_stays_tied(tmp_path: Path) -> None:
    register_tinylm()
    model = TinyLM(TINY)
    model.head.weight = model.embedding.weight
    save_pretrained(model, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.head.weight is loaded.embedding.weight
    assert loaded(IDS).logits.equal(model(IDS))


def test_one_name() -> None:
    from nsa.huggingface import tinylm

    assert tinylm.MODEL_TYPE == export.MODEL_TYPE
    assert tinylm.TinyLMForCausalLM.__name__ == export.ARCHITECTURE
