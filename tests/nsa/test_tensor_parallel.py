"""Two processes over gloo, each with half of the heads, against one with all of them, in fp64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nsa.parallel import clip_grad_norm_
from tests.nsa.tensor_ranks import LAYERS
from tests.nsa.torchrun import found_by_forks, found_by_ranks

SCRIPT = Path(__file__).with_name("tensor_ranks.py")
MESH_SCRIPT = Path(__file__).with_name("tensor_mesh.py")
BOUND = 1e-12  # of the largest value: sums of 2 x 64 products in fp64, in another order


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found."""
    out = tmp_path_factory.mktemp("ranks") / "found.json"
    loaded: list[dict[str, Any]] = found_by_ranks(SCRIPT, 2, out)
    return loaded


@pytest.mark.parametrize("name", LAYERS)
def test_half_of_the_heads_each_is_the_whole_layer(ranks: list[dict[str, Any]], name: str) -> None:
    """y, x's gradient and every parameter's, of a call, of one with a mask, and of a cache."""
    heads, kv_heads, *_ = LAYERS[name]
    for found in ranks:
        assert found[name]["heads"] == [heads // 2, kv_heads // 2]
        for what in ("whole", "masked", "cache", "gradients"):
            assert found[name][what] < BOUND, (what, found[name])


@pytest.mark.parametrize("name", LAYERS)
def test_the_gathered_state_is_the_whole_layer_s(ranks: list[dict[str, Any]], name: str) -> None:
    assert all(found[name]["state"] for found in ranks)


def test_a_whole_model_has_the_same_loss_and_gradients(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["model"]["loss"] < BOUND and found["model"]["gradients"] < BOUND
        assert found["model"]["share"] == 0.5


def test_what_does_not_fit_is_refused(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert "num_kv_heads=3 over 2 ranks; wanted a multiple" in found["refused"]["heads"]
        assert "a Linear; wanted an NSAAttention or a TinyLM" in found["refused"]["kind"]


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of four ranks found."""
    out = tmp_path_factory.mktemp("mesh") / "found.json"
    loaded: list[dict[str, Any]] = found_by_forks(MESH_SCRIPT, out)
    return loaded


@pytest.mark.parametrize(
    "what",
    ["tp norm", "tp gradients", "dp x tp norm", "dp x tp weights", "loaded by 4", "loaded by 1"],
)
def test_clipping_a_mesh_and_a_checkpoint_are_those_of_one_process(
    mesh: list[dict[str, Any]], what: str
) -> None:
    """The norm before clipping and the clipped gradients, by torch on the whole model; the weights
    after a step of FSDP2 over 2 x 2 ranks, and as 4 ranks and each one alone load them.
    """
    for found in mesh:
        assert found["clipped"] and found[what] < BOUND, (what, found)


@pytest.mark.parametrize("max_norm", [0.0, -1.0, float("nan")])
def test_clipping_to_no_norm_changes_nothing(max_norm: float) -> None:
    weight = torch.ones(2, requires_grad=True)
    weight.grad = torch.full((2,), 3.0)
    with pytest.raises(ValueError, match=f"got max_norm={max_norm}; wanted a number above 0"):
        clip_grad_norm_([weight], max_norm)
    assert weight.grad.tolist() == [3.0, 3.0]
