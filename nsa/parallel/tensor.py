"""Tensor parallelism: each rank has whole kv heads of every layer, with their queries and gates.

B batch, T tokens, M model dim, Q query heads, G kv heads, D head dim, P ranks.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from nsa.attention import NSAAttention
from nsa.model import TinyLM

# of each parameter that holds something of each head, the dimension that counts heads
_HEADS = {
    "q_proj.weight": 0,
    "k_proj.weight": 0,
    "v_proj.weight": 0,
    "o_proj.weight": 1,
    "sinks": 0,
    "gate.proj.weight": 0,
    "gate.proj.bias": 0,
    "gate.up": 0,
    "gate.down": 0,
}
_KV = ("k_proj.weight", "v_proj.weight")
# those of all heads: a rank's gradient is that of its own heads
_SHARED = (
    *(f"phi_{of}.{name}" for of in "kv" for name in ("weight", "position", "up", "down")),
    "q_norm.weight",
    "k_norm.weight",
)


def tensor_parallel_plan(module: nn.Module, mesh: DeviceMesh) -> dict[str, ParallelStyle]:
    """The plan of an NSAAttention or a TinyLM for
    ``torch.distributed.tensor.parallel.parallelize_module(module, mesh, plan)``, for a ``mesh`` of
    one dimension and P ranks.

    Each rank then computes num_kv_heads / P kv heads with their queries and gates (`HeadParallel`);
    of a TinyLM it also has 1 / P of each MLP's hidden width, while embedding, norms and head stay
    plain and whole on each rank. Inputs and outputs are whole and the same on each rank. The
    weights that count are those of the mesh's first rank. ValueError for another kind of module,
    a mesh of several dimensions, and num_kv_heads, or an MLP's hidden width, that P does not
    divide.
    """
    if mesh.ndim != 1:
        raise ValueError(
            f"got a mesh of {mesh.ndim} dimensions {mesh.mesh_dim_names}; wanted one; give its part"
            ' of the tensor-parallel ranks, such as mesh["tp"]'
        )
    if isinstance(module, NSAAttention):
        _check_heads(module, mesh.size())
        return {"": HeadParallel()}
    if not isinstance(module, TinyLM):
        raise ValueError(
            f"got a {type(module).__name__}; wanted an NSAAttention or a TinyLM; make the plan of"
            " each NSAAttention of your model"
        )
    plan: dict[str, ParallelStyle] = {}
    for layer, block in enumerate(module.blocks):
        parts = cast("Any", block)
        _check_heads(parts.attention, mesh.size())
        hidden = parts.mlp[0].out_features
        if hidden % mesh.size():
            raise ValueError(
                f"got an MLP of hidden width {hidden} over {mesh.size()} ranks; wanted a multiple"
                " of the ranks; take fewer, or another mlp_ratio"
            )
        plan[f"blocks.{layer}.attention"] = HeadParallel()
        plan[f"blocks.{layer}.mlp.0"] = ColwiseParallel()
        plan[f"blocks.{layer}.mlp.2"] = RowwiseParallel()
    return plan


def whole_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """The state dict of ``module`` as it would be without a plan: plain whole tensors, rows of
    k_proj and v_proj by branch. All ranks must call it.

    A sharded NSAAttention's own state dict has DTensors whose rows of k_proj and v_proj go by head
    first, whatever the number of ranks.
    """
    found = {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in module.state_dict().items()
    }
    for path, one in module.named_modules():
        if not isinstance(one, NSAAttention) or _style_of(one) is None:
            continue
        for name in _KV:
            key = f"{path}.{name}" if path else name
            found[key] = _by_branch(found[key], one.num_kv, _width(one, name))
    return found


class HeadParallel(ParallelStyle):
    """An NSAAttention by whole kv heads, over a mesh of P ranks: x [B, T, M] -> y [B, T, M], both
    whole on each rank.

    Parameters become DTensors. Those of heads are sharded, k_proj and v_proj with their rows by
    head first and by branch second, so that a rank has its heads of every branch. A learned phi and
    qk_norm's weights serve all heads and stay whole: their gradients are summed over the ranks, as
    x's are, and y. The layer's num_heads and num_kv_heads become a rank's own, which a cache takes.
    Within a call the layer's parameters are the local tensors, so that every path serves it.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, NSAAttention):
            raise ValueError(
                f"got a {type(module).__name__}; wanted an NSAAttention; take tensor_parallel_plan"
            )
        ranks = device_mesh.size()
        _check_heads(module, ranks)
        for name, parameter in list(module.named_parameters()):
            placement = _placement_of(name)
            whole = parameter.detach()
            if name in _KV:
                whole = _by_head(whole, module.num_kv, _width(module, name))
            placed = distribute_tensor(
                whole, device_mesh, [placement], src_data_rank=self.src_data_rank
            )
            owner, leaf = _owner_of(module, name)
            owner.register_parameter(leaf, nn.Parameter(placed, _needs_gradient(owner, leaf)))
        module.num_heads //= ranks
        module.num_kv_heads //= ranks
        module.q_proj.out_features //= ranks
        module.k_proj.out_features //= ranks
        module.v_proj.out_features //= ranks
        module.o_proj.in_features //= ranks
        self._mesh, self._depth = device_mesh, 0
        self._kept: dict[str, nn.Parameter] = {}
        module.register_forward_pre_hook(self._enter, with_kwargs=True)
        module.register_forward_hook(self._leave, always_call=True)
        module.__dict__["tensor_parallel"] = self
        return module

    def _enter(
        self, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Local tensors in place of the parameters; a call of the layer within its own call, as
        for an attention_mask, has them already.
        """
        self._depth += 1
        if self._depth > 1:
            return None
        attention = cast("NSAAttention", module)
        group = self._mesh.get_group()
        for name, parameter in list(attention.named_parameters()):
            self._kept[name] = parameter
            local = cast("DTensor", parameter).to_local()
            if name in _SHARED:
                local = _SumOfGradients.apply(local, group)
            if name in _KV:
                local = _by_branch(local, attention.num_kv, _width(attention, name))
            _put(attention, name, local)
        rest = dict(options)
        x_BTM = args[0] if args else rest.pop("x_BTM")
        return (_SumOfGradients.apply(x_BTM, group),), rest

    def _leave(self, module: nn.Module, args: tuple[Any, ...], y_BTM: Tensor | None) -> Any:
        """Without a result where the call raised an error."""
        self._depth -= 1
        if self._depth:
            return None
        for name, parameter in self._kept.items():
            _put(module, name, parameter)
        self._kept.clear()
        return None if y_BTM is None else _Sum.apply(y_BTM, self._mesh.get_group())


class _Sum(torch.autograd.Function):
    """The sum of all ranks' tensors; each rank's gradient is that of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


class _SumOfGradients(torch.autograd.Function):
    """``x``, the same on all ranks, of which each computes something else: its gradient is the sum
    of theirs.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


def _check_heads(layer: nn.Module, ranks: int) -> None:
    heads = layer.num_kv_heads
    if _style_of(layer) is not None:
        raise ValueError(
            "got an NSAAttention that is tensor-parallel already; wanted a whole one; apply the"
            " plan once"
        )
    if cast("int", heads) % ranks:
        raise ValueError(
            f"got num_kv_heads={heads} over {ranks} ranks; wanted a multiple of the ranks, since a"
            " rank has whole kv heads; take a mesh of fewer ranks"
        )


def _style_of(layer: nn.Module) -> HeadParallel | None:
    return layer.__dict__.get("tensor_parallel")


def _placement_of(name: str) -> Placement:
    if name in _HEADS:
        return Shard(_HEADS[name])
    if name in _SHARED:
        return Replicate()
    raise ValueError(
        f"got the parameter {name!r}; wanted those of NSAAttention alone, of which it is known what"
        " belongs to a head; apply the plan before adapters"
    )


def _width(layer: NSAAttention, name: str) -> int:
    return layer.head_dim if name == "k_proj.weight" else layer.v_head_dim


def _by_head(weight: Tensor, branches: int, width: int) -> Tensor:
    """Rows (branch, head, feature) -> (head, branch, feature)."""
    return weight.unflatten(0, (branches, -1, width)).transpose(0, 1).flatten(0, 2)


def _by_branch(weight: Tensor, branches: int, width: int) -> Tensor:
    """The inverse of `_by_head`, of all heads or of a rank's."""
    return weight.unflatten(0, (-1, branches, width)).transpose(0, 1).flatten(0, 2)


def _owner_of(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf


def _needs_gradient(owner: nn.Module, leaf: str) -> bool:
    parameter = owner._parameters[leaf]
    return parameter is not None and parameter.requires_grad


def _put(module: nn.Module, name: str, tensor: Tensor) -> None:
    """``tensor``, which may be no leaf and so no Parameter, where the parameter ``name`` is."""
    owner, leaf = _owner_of(module, name)
    owner._parameters[leaf] = cast("nn.Parameter", tensor)
