"""One layer or model on several GPUs at once."""

from __future__ import annotations

from nsa.parallel.context import ContextParallel
from nsa.parallel.norm import clip_grad_norm_
from nsa.parallel.tensor import HeadParallel, tensor_parallel_plan, whole_state_dict

__all__ = [
    "ContextParallel",
    "HeadParallel",
    "clip_grad_norm_",
    "tensor_parallel_plan",
    "whole_state_dict",
]
