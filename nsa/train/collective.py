"""What a collective raises where another rank is gone."""

from __future__ import annotations

import torch


def is_of_a_collective(error: BaseException) -> bool:
    """Whether ``error`` is that of an exchange between ranks; gloo raises plain RuntimeErrors that
    name its source files, also within other errors.
    """
    return isinstance(error, torch.distributed.DistError) or "gloo/" in str(error)
