"""The 2-norm of gradients of which each rank may hold a part."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

EPS = 1e-6  # that of torch.nn.utils.clip_grad_norm_


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale the gradients of ``parameters`` in place to a 2-norm of at most ``max_norm``; return
    the norm before, 0-dim, in fp32 (fp64 where a gradient is), the same on all ranks.

    As torch.nn.utils.clip_grad_norm_, for parameters of several meshes at once, and plain ones
    among them: a tensor-parallel model has plain weights next to DTensors, and under FSDP2 DTensors
    of one and of two dimensions. A plain gradient must be the same on all ranks. All ranks must
    call it. ValueError for a gradient that is not reduced yet, where there is none, and for a
    ``max_norm`` that is not above 0.
    """
    if not max_norm > 0:  # below 0 would turn every gradient round
        raise ValueError(
            f"got max_norm={max_norm!r}; wanted a number above 0; to clip nothing, do not call it"
        )
    gradients = [one.grad for one in parameters if one.grad is not None]
    if not gradients:
        raise ValueError("got no gradient; wanted those of a backward; clip after it")
    norm = squared_norm(gradients).sqrt()
    scale = (max_norm / (norm + EPS)).clamp(max=1.0)
    torch._foreach_mul_([local_of(one) for one in gradients], scale)
    return norm


def squared_norm(gradients: Iterable[Tensor]) -> Tensor:
    """The square of the 2-norm of all ``gradients``, all shards of a DTensor included: 0-dim, fp32,
    or fp64 where one is. At least one; all ranks must call it. ValueError for a partial one.
    """
    groups: dict[Any, list[Tensor]] = {}
    for one in gradients:
        groups.setdefault(_mesh_dims(one), []).append(local_of(one))
    squares = [_square_of_all_shards(group, mesh_dims) for mesh_dims, group in groups.items()]
    return torch.stack(squares).sum()


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _mesh_dims(gradient: Tensor) -> Any:
    """(mesh, the dimensions along which ranks hold different parts), or None."""
    if not isinstance(gradient, DTensor):
        return None
    if any(one.is_partial() for one in gradient.placements):
        raise ValueError(
            f"got a gradient placed {gradient.placements}; wanted a reduced one; let the last"
            " backward of a step reduce it"
        )
    dims = [dim for dim, one in enumerate(gradient.placements) if not one.is_replicate()]
    return gradient.device_mesh, tuple(dims)


def _square_of_all_shards(gradients: list[Tensor], mesh_dims: Any) -> Tensor:
    is_wide = any(one.dtype == torch.float64 for one in gradients)
    dtype = torch.float64 if is_wide else torch.float32
    square = torch.stack(torch._foreach_norm(gradients, 2, dtype=dtype)).square().sum()
    if mesh_dims is not None:
        mesh, dims = mesh_dims
        for dim in dims:
            dist.all_reduce(square, group=mesh.get_group(dim))
    return square
