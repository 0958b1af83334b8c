"""The model of a cell in plain PyTorch, from its config and its weights.

It shares no code with `nsa` but the attention function, which has a proof of its own.

B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nsa.config import ModelConfig
from perfbench import older_nsa
from perfbench.worker.step_proof import twin_parts as parts
from perfbench.worker.step_proof.attend import Attention, Heads

# tokens from which a layer is computed again in the backward instead of remembered
TOKENS_TO_RECOMPUTE = 1024


@dataclass(frozen=True, slots=True)
class TwinStep:
    """``logits`` [B, T, V]; ``loss`` and ``gradients`` (by name) of a training step."""

    logits: Tensor
    loss: Tensor | None
    gradients: dict[str, Tensor | None]


def step(
    model: ModelConfig,
    weights: Mapping[str, Tensor],
    attention: Attention,
    ids: Tensor,
    *,
    labels: Tensor | None = None,
    position: int = 0,
) -> TwinStep:
    """One step with ``ids`` [B, T], the first at ``position``, in the dtype of ``weights``; with
    ``labels`` [B, T] a training step.
    """
    if labels is None:
        with torch.no_grad():
            return TwinStep(_logits(model, weights, attention, ids, position), None, {})
    leaves = {name: x.detach().requires_grad_() for name, x in weights.items()}
    logits = _logits(model, leaves, attention, ids, position)
    loss = cross_entropy(logits, labels)
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return TwinStep(logits.detach(), loss.detach(), dict(zip(leaves, found, strict=True)))


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean of -log softmax at the label, in fp32 or wider."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    chosen = wide.gather(-1, labels[..., None])[..., 0]
    return (wide.logsumexp(-1) - chosen).mean()


def _logits(
    model: ModelConfig, w: Mapping[str, Tensor], attention: Attention, ids: Tensor, position: int
) -> Tensor:
    x = w["embedding.weight"][ids]
    for layer in range(model.num_layers):
        prefix = f"blocks.{layer}."
        own = {name.removeprefix(prefix): t for name, t in w.items() if name.startswith(prefix)}
        options = (model, own, attention, layer, position)
        if torch.is_grad_enabled() and ids.numel() >= TOKENS_TO_RECOMPUTE:
            x = checkpoint(_block, x, *options, use_reentrant=False)
        else:
            x = _block(x, *options)
    return parts.linear(parts.norm(x, w["norm.weight"]), w["head.weight"])


def _block(
    x: Tensor,
    model: ModelConfig,
    w: Mapping[str, Tensor],
    attention: Attention,
    layer: int,
    position: int,
) -> Tensor:
    inside = {
        name.removeprefix("attention."): t for name, t in w.items() if name.startswith("attention.")
    }
    heads = _heads(parts.norm(x, w["attention_norm.weight"]), model, inside, attention, position)
    x = x + parts.linear(attention(layer, heads).flatten(2), inside["o_proj.weight"])
    hidden = parts.silu(parts.linear(parts.norm(x, w["mlp_norm.weight"]), w["mlp.0.weight"]))
    return x + parts.linear(hidden, w["mlp.2.weight"])


def _heads(
    x: Tensor, model: ModelConfig, w: Mapping[str, Tensor], attention: Attention, position: int
) -> Heads:
    nsa, dense = model.nsa, attention.cell.is_dense
    q = parts.linear(x, w["q_proj.weight"]).unflatten(-1, (model.num_heads, model.head_dim))
    k = parts.linear(x, w["k_proj.weight"]).unflatten(-1, (-1, model.head_dim))
    v = parts.linear(x, w["v_proj.weight"]).unflatten(-1, (-1, model.value_dim))
    if older_nsa.has_qk_norm(nsa):
        q, k = parts.norm(q, w["q_norm.weight"]), parts.norm(k, w["k_norm.weight"])
    gates = None if dense else parts.gates(x, q, w, model)
    token = torch.arange(x.shape[1], device=x.device) + position
    q, turned = (parts.rope(t, token, nsa) for t in (q, k))
    return Heads(
        q,
        _of_branches(k, model)[0],
        _of_branches(turned, model),
        _of_branches(v, model),
        gates,
        {name: t for name, t in w.items() if name.startswith("phi_")},
    )


def _of_branches(x: Tensor, model: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    """cmp, sel and win, in this order; the same one thrice where they share."""
    groups = model.num_kv_heads
    if x.shape[2] == groups:
        return x, x, x
    return x[:, :, :groups], x[:, :, groups : 2 * groups], x[:, :, 2 * groups :]
