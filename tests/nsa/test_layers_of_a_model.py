"""Models whose layers differ: window only, without RoPE, full attention, NSA of other sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nsa import ModelConfig, NSAConfig, TinyLM
from nsa.config import preset
from nsa.decode import Steps
from nsa.dense import DenseAttention
from nsa.model import DenseLM
from tests import oracle
from tests.cases import SMALL, assert_parity, randn

TINY = preset("tiny")
LAYERS = ("nsa", {"branches": ["win"], "window": 20}, {"rope": "none", "qk_norm": True}, "dense")
MIXED = ModelConfig.from_mapping({"preset": "tiny", "num_layers": 4, "layers": LAYERS})
WIDE = ModelConfig.from_mapping(
    {
        "preset": "tiny",
        "num_layers": 4,
        "layers": ["nsa", {"l": 16, "d": 8, "l_sel": 32, "rope_base": 500.0}],
    }
)


def mixed(model: ModelConfig = MIXED, dtype: torch.dtype = torch.float64) -> TinyLM:
    torch.manual_seed(0)
    return TinyLM(model, path="masked", fa2="off").to(dtype)


def ids_of(*shape: int) -> Tensor:
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(1))


def test_each_layer_has_what_its_entry_says() -> None:
    """FAULTS.md has no row of it: attention as models have it today."""
    own = [block.attention.config for block in mixed().blocks]
    assert own[0] == TINY.nsa
    assert own[1] == replace(TINY.nsa, branches=("win",), window=20)
    assert own[2] == replace(TINY.nsa, rope="none", qk_norm=True)
    assert own[3] == TINY.nsa.full_attention()
    assert [block.attention.config for block in mixed(WIDE).blocks] == list(WIDE.layers or ()) != []


def test_full_attention_is_full_attention() -> None:
    """With the weights of a dense layer the result is that of the dense layer, and the oracle's."""
    torch.manual_seed(0)
    config = SMALL.full_attention()
    model = replace(TINY, num_layers=1, layers=(config,))
    layer = TinyLM(model, path="masked", fa2="off").double().blocks[0].attention
    dense = DenseAttention(model).double()
    assert not layer.load_state_dict(dense.state_dict(), strict=False).unexpected_keys
    assert set(dict(layer.named_parameters())) == set(dict(dense.named_parameters()))
    x = randn(2, 150, model.dim, seed=2, dtype=torch.float64)
    assert_parity(layer(x), dense(x), "full")
    at = torch.arange(150)
    q, k = (
        oracle.rope(
            (x @ p.weight.T).unflatten(-1, (-1, model.head_dim)),
            at,
            base=config.rope_base,
            scale=config.rope_scale,
            kind=config.rope,
        )
        for p in (dense.q_proj, dense.k_proj)
    )
    v = (x @ dense.v_proj.weight.T).unflatten(-1, (-1, model.value_dim))
    assert_parity(layer(x), oracle.causal(q, k, v).flatten(2) @ dense.o_proj.weight.T, "oracle")


@pytest.mark.parametrize("model", [MIXED, WIDE], ids=["mixed", "wide"])
def test_a_mixed_model_decodes_as_it_prefills(model: ModelConfig) -> None:
    lm, ids = mixed(model), ids_of(2, 90)
    with torch.no_grad():
        whole = lm(ids)
        cache = lm.new_cache(2, 90)
        parts = [lm(ids[:, :50], cache=cache), lm(ids[:, 50:71], cache=cache)]
        parts += [lm(ids[:, t : t + 1], cache=cache) for t in range(71, 80)]
        steps = Steps(cache)
        parts += [lm(ids[:, t : t + 1], cache=cache) for t in range(80, 90)]
        steps.end()
    assert_parity(torch.cat(parts, 1), whole, "decode")


@pytest.mark.parametrize("model", [MIXED, WIDE], ids=["mixed", "wide"])
def test_a_mixed_model_packs_and_pads(model: ModelConfig) -> None:
    lm, ids = mixed(model), ids_of(1, 130)
    with torch.no_grad():
        alone = torch.cat([lm(ids[:, :61]), lm(ids[:, 61:])], 1)
        assert_parity(lm(ids, cu_seqlens=[0, 61, 130]), alone, "packed")
        rows = torch.nn.functional.pad(ids[:, :61], (69, 0))
        mask = torch.arange(130)[None] >= 69
        assert_parity(lm(rows, attention_mask=mask)[:, 69:], alone[:, :61], "padded")


def test_a_mixed_model_learns_everywhere() -> None:
    lm, ids = mixed(), ids_of(2, 90)
    lm(ids).logsumexp(-1).sum().backward()
    missing = [name for name, p in lm.named_parameters() if p.grad is None]
    assert not missing
    norms = [block.attention for block in lm.blocks if block.attention.config.qk_norm]
    assert len(norms) == 1 and norms[0].q_norm.weight.grad.any()  # type: ignore[union-attr]


def test_its_dense_twin_has_the_same_norms_and_rope() -> None:
    twin = DenseLM(MIXED).double()
    assert [block.attention.config for block in twin.blocks] == list(MIXED.layers or ())
    ids = ids_of(1, 40)
    moved = torch.cat([ids[:, :1], ids], 1)[:, :40]
    assert not torch.equal(twin(ids), twin(moved))


def test_a_mapping_comes_back_and_its_hash_tells_layers_apart() -> None:
    assert ModelConfig.from_mapping(MIXED.to_mapping()) == MIXED
    assert MIXED.sha256() != replace(MIXED, layers=None).sha256()
    plain = replace(TINY, nsa=replace(TINY.nsa, qk_norm=True))
    assert plain.sha256() != TINY.sha256()


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (["nsa", "nsa", "nsa"], "whose length divides num_layers=4"),
        ([], "whose length divides num_layers=4"),
        ("dense", "must be a list"),
        (["sparse"], "wanted nsa, dense, or a mapping"),
        ([{"windw": 3}], "did you mean 'window'"),
        ([{"window": 0}], "window=0 must be a whole number >= 1"),
    ],
)
def test_layers_that_do_not_fit_are_refused(layers: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_mapping({"preset": "tiny", "num_layers": 4, "layers": layers})


@pytest.mark.parametrize("layers", [(SMALL,), (SMALL, "dense"), 3, (None, None)])
def test_layers_of_a_config_are_configs(layers: object) -> None:
    with pytest.raises(ValueError, match="must be 2 NSAConfigs, one a layer, or None"):
        replace(TINY, layers=layers)


def test_kinds_that_nobody_knows_are_refused() -> None:
    with pytest.raises(ValueError, match="choose one of interleaved, half, none"):
        NSAConfig(rope="yarn")
    with pytest.raises(ValueError, match="choose one of sigmoid, softmax, none"):
        NSAConfig(gate="off")
    with pytest.raises(ValueError, match="qk_norm=1 must be True or False"):
        NSAConfig(qk_norm=1)  # type: ignore[arg-type]
