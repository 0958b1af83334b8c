from __future__ import annotations

import pytest
import torch

from nsa.model import TinyLM
from nsa.train.config import RunConfig
from nsa.train.largest_batch import fits_on, largest


@pytest.mark.parametrize("capacity", [0, 1, 5, 6, 7])
def test_the_largest_that_fits(capacity: int) -> None:
    tried = []

    def fits(batch: int) -> bool:
        tried.append(batch)
        return batch <= capacity

    assert largest(fits, 8) == capacity
    assert len(tried) == 3  # by halves


def test_out_of_memory_is_no_fit_and_leaves_the_model_as_it_was() -> None:
    config = RunConfig.from_mapping({"model": {"preset": "tiny"}, "train": {"seq_len": 16}})
    model = TinyLM(config.model, "masked")
    model.register_forward_pre_hook(_refuse_three)
    before = {name: p.clone() for name, p in model.named_parameters()}
    fits = fits_on(model, config, torch.device("cpu"))
    assert [fits(batch) for batch in (1, 2, 3, 4)] == [True, True, False, False]
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) and p.grad is None


def _refuse_three(module: torch.nn.Module, inputs: tuple[torch.Tensor]) -> None:
    if inputs[0].shape[0] >= 3:
        raise torch.OutOfMemoryError("planted")
