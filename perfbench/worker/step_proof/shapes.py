"""The parameters that a model of a config has, from the config alone."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from nsa.config import ModelConfig
from perfbench import older_nsa

Shape = tuple[int, ...]


def parameter_shapes(model: ModelConfig, *, dense: bool) -> dict[str, Shape]:
    """Name and shape of each parameter of the language model, or of its twin with full causal
    attention.
    """
    hidden = model.mlp_ratio * model.dim
    shapes: dict[str, Shape] = {"embedding.weight": (model.vocab_size, model.dim)}
    for layer in range(model.num_layers):
        shapes |= {
            f"blocks.{layer}.{name}": shape
            for name, shape in {
                "attention_norm.weight": (model.dim,),
                **_of_attention(model, dense=dense),
                "mlp_norm.weight": (model.dim,),
                "mlp.0.weight": (hidden, model.dim),
                "mlp.2.weight": (model.dim, hidden),
            }.items()
        }
    return {
        **shapes,
        "norm.weight": (model.dim,),
        "head.weight": (model.vocab_size, model.dim),
    }


def _of_attention(model: ModelConfig, *, dense: bool) -> dict[str, Shape]:
    nsa, heads, groups = model.nsa, model.num_heads, model.num_kv_heads
    copies = 1 if dense or nsa.share_kv else 3
    shapes: dict[str, Shape] = {
        "q_proj.weight": (heads * model.head_dim, model.dim),
        "k_proj.weight": (copies * groups * model.head_dim, model.dim),
        "v_proj.weight": (copies * groups * model.value_dim, model.dim),
        "o_proj.weight": (model.dim, heads * model.value_dim),
    }
    if older_nsa.has_qk_norm(nsa):
        shapes["q_norm.weight"] = shapes["k_norm.weight"] = (model.head_dim,)
    if not dense:
        for which, dim in (("phi_k", model.head_dim), ("phi_v", model.value_dim)):
            flat, hidden = nsa.cmp_block * dim, nsa.phi_hidden or dim
            if nsa.phi == "linear":
                shapes[f"{which}.weight"] = (dim, flat)
            elif nsa.phi == "mlp":
                shapes[f"{which}.position"] = (nsa.cmp_block, dim)
                shapes[f"{which}.up"], shapes[f"{which}.down"] = (hidden, flat), (dim, hidden)
        if nsa.gate == "sigmoid":
            shapes["gate.proj.weight"], shapes["gate.proj.bias"] = (
                (heads * 3, model.dim),
                (heads * 3,),
            )
        elif nsa.gate != "none":
            shapes["gate.up"] = (groups, model.head_dim, model.head_dim)
            shapes["gate.down"] = (groups, model.head_dim, 3)
    return {f"attention.{name}": shape for name, shape in shapes.items()}


def fault_of(model: nn.Module, wanted: Mapping[str, Shape], *, train: bool) -> str:
    """What is wrong with the parameters of ``model``: the first that lacks, that nothing knows,
    that has another shape, or that cannot learn in ``train``; empty where none is.
    """
    got = dict(model.named_parameters())
    if lacking := [name for name in wanted if name not in got]:
        return f"the model lacks {_some(lacking)}, which its config has"
    if unknown := [name for name in got if name not in wanted]:
        return f"the model has {_some(unknown)}, which its config does not"
    for name, shape in wanted.items():
        if tuple(got[name].shape) != shape:
            return f"{name} is {tuple(got[name].shape)}; wanted {shape} by the config"
        if train and not got[name].requires_grad:
            return f"{name} wants no gradient, and the cell trains"
    return ""


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more parameters"
