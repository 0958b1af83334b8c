"""The largest batch that fits, for the message of a step that ran out of memory."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from torch import nn

from nsa.train.config import RunConfig


def largest(fits: Callable[[int], bool], too_many: int) -> int:
    """The most sequences below ``too_many`` for which ``fits`` is true, where it is true up to some
    number and false beyond; 0 where it is true for none.
    """
    least, beyond = 0, too_many
    while beyond - least > 1:
        middle = (least + beyond) // 2
        if fits(middle):
            least = middle
        else:
            beyond = middle
    return least


def fits_on(model: nn.Module, config: RunConfig, device: torch.device) -> Callable[[int], bool]:
    """Whether a forward and a backward of ``batch`` sequences fit next to what is allocated now,
    the gradients included; the weights stay as they are.
    """

    def fits(batch: int) -> bool:
        train = config.train
        shape = (batch, train.seq_len)
        if config.data.packing == "documents":
            shape = (1, batch * train.seq_len)
        try:
            ids = torch.zeros(shape, dtype=torch.int64, device=device)
            casts = train.precision == "autocast"
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=casts):
                logits = model(ids)
            nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten()).backward()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except torch.OutOfMemoryError:
            return False
        finally:
            for p in model.parameters():
                p.grad = None
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        return True

    return fits
