"""On CUDA: a learned phi by its kernels, at the paper's geometry."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nsa import NSAConfig, compress
from tests.cases import assert_bf16_rule, run
from tests.gpu.test_parity import (
    DEVICE,
    DTYPES,
    full_precision_matmuls,  # noqa: F401
)
from tests.nsa.phi_cases import LEARNED, NAMES, Shape, both, by_kernel, by_oracle, tensors_of

BLOCK, STRIDE = 32, 16
# with the largest tiles, with few rows, and of widths that fit no tile
SHAPES = [
    (1, 40_000, 2, 64, 64),
    (2, 20_000, 4, 128, 128),
    (1, 79, 1, 192, 128),
    (3, 300, 2, 60, 100),
]


@DTYPES
@pytest.mark.parametrize("phi", LEARNED)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_oracle(phi: str, shape: Shape, dtype: torch.dtype) -> None:
    """And repeats its bits."""
    tensors = tensors_of(phi, shape, BLOCK, dtype=dtype, device=DEVICE)
    config, names = NSAConfig(phi=phi), {"linear": ("weight",), "mlp": ("up", "position", "down")}

    def formula(k: Tensor, v: Tensor, *params: Tensor) -> tuple[Tensor, Tensor]:
        of_k, of_v = (dict(zip(names[phi], params[i::2], strict=True)) for i in (0, 1))
        return compress(k, config=config, params=of_k), compress(v, config=config, params=of_v)

    kernels = both(by_kernel(phi, BLOCK, STRIDE))
    assert_bf16_rule(
        kernels, both(by_oracle(phi, BLOCK, STRIDE)), both(formula), tensors, NAMES[phi]
    )
    (o, grads), (again, grads_again) = (run(kernels, tensors) for _ in range(2))
    pairs = zip((o, *grads), (again, *grads_again), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
