"""The public door of context parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

from nsa.attention import NSAAttention
from nsa.dense import DenseAttention
from nsa.parallel.attention import ShardedAttention
from nsa.parallel.gather import gather, sum_over_ranks
from nsa.parallel.zigzag import Zigzag

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

M = TypeVar("M", bound=nn.Module)


class ContextParallel:
    """One sequence over the P ranks of a 1-D ``mesh`` (or of a dimension of one: ``mesh["cp"]``).

    Of 2P equal chunks rank r holds r and 2P - 1 - r. ValueError for a mesh of more dimensions.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        if mesh.ndim != 1:
            raise ValueError(
                f"got a mesh of {mesh.ndim} dimensions {mesh.mesh_dim_names}; wanted one; pass"
                ' mesh["NAME"], the dimension that shares a sequence'
            )
        self.group = mesh.get_group()
        self.place = Zigzag(mesh.get_local_rank(), mesh.size())

    def wrap(self, module: M) -> M:
        """``module`` itself, each NSAAttention in it from now on a `ShardedAttention`, which takes
        this rank's tokens. Parameters and their names stay.

        All else in it must treat each token by itself, as TinyLM does. ValueError for a module
        without an NSAAttention, one that is wrapped already, and one with the dense twin's layer.
        """
        layers = [x for x in module.modules() if isinstance(x, NSAAttention)]
        others = sorted({type(x).__name__ for x in layers if type(x) is not NSAAttention})
        others += ["DenseAttention"] * any(isinstance(x, DenseAttention) for x in module.modules())
        if others or not layers:
            raise ValueError(
                f"got a {type(module).__name__} with {', '.join(others) or 'no NSAAttention'};"
                " wanted NSAAttention alone, not wrapped yet; other attention would see this"
                " rank's tokens only"
            )
        for layer in layers:
            # as FSDP2 does: parameters, hooks and isinstance stay as they are
            layer.__class__ = ShardedAttention
            assert isinstance(layer, ShardedAttention)
            layer.place, layer.group = self.place, self.group
        return module

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's tokens of ``x``, which every rank holds whole: ids, labels, states.

        ValueError unless dimension ``dim`` is a multiple of 2P; a layer also wants chunks of a
        multiple of its sel_block.
        """
        return self.place.shard(x, dim)

    def unshard(self, x: Tensor, dim: int = 1) -> Tensor:
        """All tokens in order, of what each rank holds of them. Every rank must call it.

        Its gradient is that of the sum of all ranks' losses: where every rank computes the same
        loss from the whole, divide it by P.
        """
        moved = x.movedim(dim, 0)[None]
        (every,) = gather(moved, [(0, self.place.size * x.shape[dim])], self.group)
        return every[0].movedim(0, dim)

    def positions(self, tokens: int, device: torch.device | str = "cpu") -> Tensor:
        """Positions int64 [tokens] in the whole sequence of the ``tokens`` that this rank holds."""
        return self.place.positions(tokens, torch.device(device))

    @torch.no_grad()
    def sum_gradients(self, module: nn.Module) -> None:
        """Replace each parameter's gradient by the sum over ranks, added up in rank order in fp32
        or wider. Each rank's loss must be its share of the whole one, so that the shares add up.
        """
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.grad = sum_over_ranks(parameter.grad, self.group)
