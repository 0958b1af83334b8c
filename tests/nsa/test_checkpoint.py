"""Selective checkpointing by layer range: the same bits, fewer kept activations, and one count a
layer.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nsa import engagement
from nsa.attention import NSAAttention
from nsa.config import ModelConfig, preset
from nsa.model import TinyLM

TINY = replace(preset("tiny"), num_layers=3)


def trained(layers: tuple[int, int] | None) -> tuple[list[torch.Tensor], list[int], dict[str, int]]:
    """(gradients, forwards of each layer in one training step, engagement)."""
    torch.manual_seed(0)
    model = TinyLM(replace(TINY, checkpoint_layers=layers), fa2="off")
    forwards = [0] * TINY.num_layers
    for number, block in enumerate(model.blocks):
        attention = block.attention
        assert isinstance(attention, NSAAttention)

        def count(*_: object, number: int = number) -> None:
            forwards[number] += 1

        attention.register_forward_pre_hook(count)
    ids = torch.randint(256, (2, 100), generator=torch.Generator().manual_seed(1))
    with engagement.collect() as seen:
        model(ids).float().square().mean().backward()
    return [p.grad for p in model.parameters() if p.grad is not None], forwards, seen.counts


@pytest.mark.parametrize("layers", [(0, 1), (1, 3), (0, 3)])
def test_the_same_bits_and_a_second_forward_of_those_layers_alone(layers: tuple[int, int]) -> None:
    plain, once, counts = trained(None)
    checkpointed, forwards, same_counts = trained(layers)
    assert all(torch.equal(a, b) for a, b in zip(plain, checkpointed, strict=True)) and len(
        plain
    ) == len(checkpointed)
    assert once == [1, 1, 1] and forwards == [
        2 if layers[0] <= n < layers[1] else 1 for n in range(3)
    ]
    assert same_counts == counts and set(counts.values()) == {3}, (
        "a recomputation is no call of its own"
    )


def test_without_gradients_nothing_is_recomputed() -> None:
    torch.manual_seed(0)
    model = TinyLM(replace(TINY, checkpoint_layers=(0, 3)), fa2="off")
    with torch.no_grad(), engagement.collect() as seen:
        model(torch.zeros(1, 20, dtype=torch.int64))
    assert set(seen.counts.values()) == {3}


@pytest.mark.parametrize("layers", [(0, 0), (2, 1), (-1, 2), (0, 4)])
def test_a_range_that_is_none_is_refused(layers: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"checkpoint_layers.*num_layers=3"):
        replace(TINY, checkpoint_layers=layers)
    assert ModelConfig.from_mapping(TINY.to_mapping()).checkpoint_layers is None
