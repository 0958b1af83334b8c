"""Autocast, where a result must not depend on it: the only file that asks PyTorch about it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype that autocast multiplies in on ``device``; None where it is off, as on meta, for
    which PyTorch has none.
    """
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A context in which tensors on ``device`` keep their dtype."""
    if device.type == "meta":
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
