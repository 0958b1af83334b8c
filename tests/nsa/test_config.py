"""Configs are frozen, validated at birth, and say got, want and what to do next."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable

import pytest

from nsa.config import PRESETS, ModelConfig, NSAConfig, check_heads, preset


def test_defaults_are_the_papers() -> None:
    config = NSAConfig()
    assert (
        config.cmp_block,
        config.cmp_stride,
        config.sel_block,
        config.num_selected,
        config.window,
    ) == (32, 16, 64, 16, 512)
    assert (config.num_initial, config.num_local, config.phi, config.gate, config.rope) == (
        1,
        2,
        "mean",
        "sigmoid",
        "interleaved",
    )
    assert config.rotates_before_compression


def test_the_prototype_preset() -> None:
    model = preset("m7c_125m")
    assert (model.dim, model.num_layers, model.num_heads, model.num_kv_heads, model.head_dim) == (
        768,
        12,
        12,
        2,
        64,
    )
    assert model.nsa.gate == "softmax" and model.nsa.window == 512


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        NSAConfig().window = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"num_selected": 2}, ("num_selected=2", "num_initial + num_local = 3", "at least 3")),
        ({"num_selected": 5, "num_initial": 2, "num_local": 4}, ("num_selected=5", "= 6")),
        ({"cmp_block": 24}, ("cmp_block=24", "multiple of cmp_stride=16", "try 32")),
        ({"sel_block": 70}, ("sel_block=70", "multiple of cmp_stride=16", "try 64")),
        ({"window": 0}, ("window=0", ">= 1")),
        ({"window": True}, ("window=True",)),
        ({"cmp_stride": 2.0}, ("cmp_stride=2.0", "whole number")),
        ({"num_local": 0}, ("num_local=0",)),
        ({"num_initial": -1}, ("num_initial=-1",)),
        ({"phi": "meen"}, ("phi='meen'", "mean")),
        ({"gate": "tanh"}, ("gate='tanh'", "sigmoid", "softmax")),
        ({"rope": "neox"}, ("rope='neox'", "half")),
        ({"cmp_rope": "never"}, ("cmp_rope='never'", "before")),
        ({"gate_temperature": 0.0}, ("gate_temperature=0.0", "> 0")),
        ({"rope_base": float("nan")}, ("rope_base=nan",)),
        ({"branches": ()}, ("branches=()",)),
        ({"branches": ("cmp", "cmp")}, ("once",)),
        ({"branches": ("cmp", "slide")}, ("'slide'", "win")),
    ],
)
def test_bad_geometry_is_a_clear_error(kwargs: dict[str, object], words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as caught:
        NSAConfig(**kwargs)  # type: ignore[arg-type]
    for word in words:
        assert word in str(caught.value)


NEARLY: list[tuple[dict[str, object], str]] = [
    ({"num_initial": 1.5}, "num_initial=1.5 must be a whole number >= 0"),
    ({"num_initial": True}, "num_initial=True must be a whole number >= 0"),
    ({"share_kv": "no"}, "share_kv='no' must be True or False"),
    ({"share_kv": 0}, "share_kv=0 must be True or False"),
    ({"adaptive_num_selected": 1.0}, "adaptive_num_selected=1.0 must be True or False"),
    ({"rope_scale": float("inf")}, "rope_scale=inf must be > 0 and a finite number"),
    ({"rope_scale": 1e39}, "rope_scale=1e+39 must be > 0 and a finite number that float32 holds"),
    ({"rope_base": "1e4"}, "rope_base='1e4' must be > 0"),
    ({"rope_base": 10**400}, "must be > 0 and a finite number that float32 holds"),
    ({"gate_temperature": float("nan")}, "gate_temperature=nan must be > 0"),
    ({"gate_temperature": 1e-320}, "gate_temperature=1e-320 must be > 0"),
    ({"gate_temperature": True}, "gate_temperature=True must be > 0"),
    ({"branches": "cmp"}, "branches='cmp' must be a tuple of branches; write branches=('cmp',)"),
    ({"branches": "win, sel"}, "write branches=('win', 'sel')"),
    ({"branches": "all"}, "write branches=('cmp', 'sel', 'win')"),
    ({"branches": None}, "branches=None must be a tuple of branches"),
    ({"branches": (["cmp"],)}, "branches=['cmp'] is not known"),
]


@pytest.mark.parametrize(("kwargs", "words"), NEARLY, ids=lambda x: str(x)[:30])
def test_values_that_are_nearly_valid_are_refused(kwargs: dict[str, object], words: str) -> None:
    """FAULTS "values that are nearly valid": the field, what was got and what fits."""
    with pytest.raises(ValueError) as caught:
        NSAConfig(**kwargs)  # type: ignore[arg-type]
    assert f"NSAConfig.{next(iter(kwargs))}=" in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: NSAConfig(windw=3), "NSAConfig has no field 'windw'; did you mean 'window'?"),  # type: ignore[call-arg]
        (lambda: NSAConfig(l_sel=64), "NSAConfig has no field 'l_sel'; did you mean 'sel_block'?"),  # type: ignore[call-arg]
        (lambda: ModelConfig(n_layers=2), "has no field 'n_layers'; did you mean 'num_layers'?"),  # type: ignore[call-arg]
        (lambda: ModelConfig(zzz=2), "ModelConfig has no field 'zzz'; valid names: checkpoint_"),  # type: ignore[call-arg]
        (lambda: dataclasses.replace(NSAConfig(), shar_kv=True), "did you mean 'share_kv'?"),
    ],
)
def test_an_unknown_keyword_names_the_nearest_field(make: Callable[[], object], words: str) -> None:
    """FAULTS "`NSAConfig(windw=3)`"."""
    with pytest.raises(TypeError) as caught:
        make()
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"nsa": {"l": 8}},
        {"checkpoint_layers": (0, 1.5)},
        {"checkpoint_layers": 2},
        {"checkpoint_layers": (0, 1, 2)},
    ],
)
def test_values_of_a_model_that_are_nearly_valid_are_refused(kwargs: dict[str, object]) -> None:
    """FAULTS "values that are nearly valid", of ModelConfig."""
    with pytest.raises(ValueError, match=f"ModelConfig.{next(iter(kwargs))}=.* must be"):
        ModelConfig(**kwargs)  # type: ignore[arg-type]


def test_a_config_survives_pickle_and_replace() -> None:
    config = NSAConfig(window=3, branches=["sel", "win"])  # type: ignore[arg-type]
    assert pickle.loads(pickle.dumps(config)) == config == dataclasses.replace(config)
    assert config.branches == ("sel", "win")


@pytest.mark.parametrize("heads", [(33, 2), (1, 2), (7, 3)])
def test_heads_must_form_whole_groups(heads: tuple[int, int]) -> None:
    """33 query heads over 2 KV heads: elsewhere accepted, with the last head never written."""
    with pytest.raises(
        ValueError, match=f"num_heads={heads[0]} must be a multiple of num_kv_heads={heads[1]}"
    ):
        ModelConfig(num_heads=heads[0], num_kv_heads=heads[1])


def test_head_dim_must_pair_up_for_rope() -> None:
    with pytest.raises(ValueError, match="head_dim=5 must be even.*try 6"):
        check_heads(2, 2, 5, 5)
    check_heads(2, 2, 6, 5)


def test_paper_letters_and_prototype_names() -> None:
    config = NSAConfig.from_mapping({"l": 8, "d": 4, "l_sel": 16, "n_sel": 5, "w": 24})
    assert config == NSAConfig(cmp_block=8, cmp_stride=4, sel_block=16, num_selected=5, window=24)
    model = ModelConfig.from_mapping(
        {"n_layers": 1, "n_heads": 6, "n_kv_groups": 3, "d_k": 10, "d_v": 4, "nsa": {"w": 7}}
    )
    assert (
        model.num_layers,
        model.num_heads,
        model.num_kv_heads,
        model.head_dim,
        model.value_dim,
    ) == (1, 6, 3, 10, 4)
    assert model.nsa.window == 7


def test_phi_avg_is_the_prototypes_name_of_mean() -> None:
    assert NSAConfig.from_mapping({"phi": "avg"}) == NSAConfig(phi="mean")
    mapping = {"nsa": {"phi": "avg"}, "layers": ["nsa", {"phi": "linear"}, {"phi": "avg"}]}
    model = ModelConfig.from_mapping({**mapping, "num_layers": 3})
    assert model.nsa.phi == "mean" and model.layers is not None
    assert [one.phi for one in model.layers] == ["mean", "linear", "mean"]
    with pytest.raises(ValueError, match="NSAConfig.phi='average' is not known"):
        NSAConfig.from_mapping({"phi": "average"})
    with pytest.raises(ValueError, match=r"NSAConfig.phi=\['avg'\] is not known"):
        NSAConfig.from_mapping({"phi": ["avg"]})


def test_a_preset_is_a_base_that_keys_override() -> None:
    model = ModelConfig.from_mapping({"preset": "tiny", "num_layers": 5, "nsa": {"window": 9}})
    assert model.num_layers == 5 and model.dim == PRESETS["tiny"].dim
    assert model.nsa == dataclasses.replace(PRESETS["tiny"].nsa, window=9)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"num_head": 4}, ("'num_head'", "num_heads")),
        ({"nsa": {"windw": 4}}, ("'windw'", "window")),
        ({"nsa": {"w": 4, "window": 5}}, ("window", "twice")),
        ({"nsa": 5}, ("nsa=5", "mapping")),
        ({"preset": "tinny"}, ("'tinny'", "'tiny'")),
    ],
)
def test_unknown_and_doubled_keys(data: dict[str, object], words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as caught:
        ModelConfig.from_mapping(data)
    for word in words:
        assert word in str(caught.value)


def test_the_hash_covers_every_value() -> None:
    base = preset("tiny")
    assert base.sha256() == preset("tiny").sha256()
    variants = [
        dataclasses.replace(base, dim=65),
        dataclasses.replace(base, v_head_dim=16),
        dataclasses.replace(base, nsa=dataclasses.replace(base.nsa, window=25)),
        dataclasses.replace(base, nsa=dataclasses.replace(base.nsa, branches=("cmp", "sel"))),
    ]
    assert len({m.sha256() for m in [base, *variants]}) == 5
