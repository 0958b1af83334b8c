"""The public door of context parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from nsa.attention import NSAAttention
from nsa.dense import DenseAttention
from nsa.parallel.attention import ShardedAttention
from nsa.parallel.dense import ShardedDense
from nsa.parallel.gather import gather, sum_over_ranks
from nsa.parallel.zigzag import Zigzag, check_dim, check_rank_tokens

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

M = TypeVar("M", bound=nn.Module)
_SHARDED: dict[type[nn.Module], type[nn.Module]] = {
    NSAAttention: ShardedAttention,
    DenseAttention: ShardedDense,
}


class ContextParallel:
    """One sequence over the P ranks of a 1-D ``mesh`` (or of a dimension of one: ``mesh["cp"]``).

    Of 2P equal chunks rank r holds r and 2P - 1 - r. ValueError for what is no mesh, and for a mesh
    of more dimensions.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        from torch.distributed.device_mesh import DeviceMesh as Mesh

        if not isinstance(mesh, Mesh):
            raise ValueError(
                f"got {type(mesh).__name__}; wanted a DeviceMesh of one dimension; make it by"
                " torch.distributed.device_mesh.init_device_mesh"
            )
        if mesh.ndim != 1:
            raise ValueError(
                f"got a mesh of {mesh.ndim} dimensions {mesh.mesh_dim_names}; wanted one; pass"
                ' mesh["NAME"], the dimension that shares a sequence'
            )
        self.group = mesh.get_group()
        self.place = Zigzag(mesh.get_local_rank(), mesh.size())

    def wrap(self, module: M) -> M:
        """``module`` itself, each NSAAttention in it from now on a `ShardedAttention`, and each
        DenseAttention a `ShardedDense`, which take this rank's tokens. Parameters and their names
        stay.

        All else in it must treat each token by itself, as TinyLM and DenseLM do. ValueError for a
        module without such a layer, one that is wrapped already, one of another class, and kind
        dense_cudnn.
        """
        layers = [x for x in module.modules() if isinstance(x, NSAAttention | DenseAttention)]
        others = sorted({type(x).__name__ for x in layers if type(x) not in _SHARDED})
        if others or not layers:
            raise ValueError(
                f"got a {type(module).__name__} with {', '.join(others) or 'no attention of nsa'};"
                " wanted NSAAttention or DenseAttention alone, not wrapped yet; other attention"
                " would see this rank's tokens only"
            )
        if any(isinstance(x, DenseAttention) and x.kind == "dense_cudnn" for x in layers):
            raise ValueError(
                "got kind='dense_cudnn' with context parallelism, whose causal mask takes as many"
                " queries as keys; wanted dense or dense_flash; set kind"
            )
        for layer in layers:
            sharded: Any = layer
            # as FSDP2 does: parameters, hooks and isinstance stay as they are
            sharded.__class__ = _SHARDED[type(layer)]
            sharded.place, sharded.group = self.place, self.group
        return module

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's tokens of ``x``, which every rank holds whole: ids, labels, states.

        ValueError unless ``x`` is a tensor whose dimension ``dim`` is a multiple of 2P; a layer
        also wants chunks of a multiple of its sel_block.
        """
        return self.place.shard(x, dim)

    def unshard(self, x: Tensor, dim: int = 1) -> Tensor:
        """All tokens in order, of what each rank holds of them. Every rank must call it.

        Its gradient is that of the sum of all ranks' losses: where every rank computes the same
        loss from the whole, divide it by P. ValueError unless ``x`` is a tensor whose dimension
        ``dim`` holds two equal chunks.
        """
        check_dim(x, dim)
        check_rank_tokens(x.shape[dim])
        moved = x.movedim(dim, 0)[None]
        (every,) = gather(moved, [(0, self.place.size * x.shape[dim])], self.group)
        return every[0].movedim(0, dim)

    def positions(self, tokens: int, device: torch.device | str = "cpu") -> Tensor:
        """Positions int64 [tokens] in the whole sequence of the ``tokens`` that this rank holds.
        ValueError unless they are two equal chunks.
        """
        check_rank_tokens(tokens)
        return self.place.positions(tokens, torch.device(device))

    @torch.no_grad()
    def sum_gradients(self, module: nn.Module) -> None:
        """Replace each parameter's gradient by the sum over ranks, added up in rank order in fp32
        or wider. Each rank's loss must be its share of the whole one, so that the shares add up.
        """
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.grad = sum_over_ranks(parameter.grad, self.group)
