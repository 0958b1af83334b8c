"""Bytes that autograd keeps of a forward, layer by layer, in closed form (nsa.model,
nsa.attention and the operators that a Route names). Needs no torch.

B sequences, T tokens, N = B T, M model dim, Q query heads, G kv heads, D head dim, C compressed
blocks, w window. Each entry is one piece of memory by name, so that what two branches share is
counted once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nsa.blocks import BlockGrid
from nsa.config import ModelConfig, NSAConfig
from nsa.routing import DENSE, Path, Route

_LSE_BYTES = 4  # statistics of a softmax or of a norm are fp32
_COMPLEX_BYTES = 8


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward of ``batch`` sequences of ``tokens`` tokens on a device.

    ``element_bytes`` of what matrices are multiplied in, ``stream_bytes`` of the residual stream
    (autocast keeps it in fp32). ``on_gpu``: RMSNorm is one kernel there, which keeps no normalised
    copy, and SDPA under a mask has K and V of every query head.
    """

    batch: int
    tokens: int
    element_bytes: int
    stream_bytes: int
    on_gpu: bool

    @property
    def num_tokens(self) -> int:
        return self.batch * self.tokens


def of_layer(model: ModelConfig, layer: int, run: Pass, route: Route | None) -> int:
    """Bytes that layer ``layer`` keeps for its backward, its input included; ``route`` None: the
    dense twin.
    """
    config, e, N = model.config_of(layer), run.element_bytes, run.num_tokens
    hidden = model.mlp_ratio * model.dim
    kept = 2 * (_norm(model.dim, run) + N * model.dim * e)  # of each norm: what it made, too
    kept += 2 * N * hidden * e  # before and after SiLU
    own = _dense(model, run) if route is None else _nsa(model, config, run, route)
    if config.qk_norm:
        copies = 1 if route is None else _copies(config)
        for heads in (model.num_heads, copies * model.num_kv_heads):
            own[f"qk_norm {heads}"] = (
                N * heads * (model.head_dim * e * (1 if run.on_gpu else 2) + _LSE_BYTES)
            )
    return kept + sum(own.values())


def of_input(model: ModelConfig, run: Pass) -> int:
    """Of a checkpointed layer: its input alone."""
    return run.num_tokens * model.dim * run.stream_bytes


def of_ends(model: ModelConfig, run: Pass) -> int:
    """Ids, RoPE's turns, the last norm, and the log-probabilities that the loss keeps in fp32."""
    N = run.num_tokens
    configs = {model.config_of(layer) for layer in range(model.num_layers)}
    turns = len(configs) * run.tokens * (model.head_dim // 2) * _COMPLEX_BYTES
    norm = _norm(model.dim, run) + N * model.dim * run.element_bytes
    return 8 * N + turns + norm + 4 * N * model.vocab_size


def loss_bytes(model: ModelConfig, run: Pass) -> int:
    """What the loss needs next to that at its peak: logits as the head made them and in fp32, and
    their gradient in fp32.
    """
    return run.num_tokens * model.vocab_size * (run.element_bytes + 4 + 4)


def backward_bytes(model: ModelConfig, run: Pass) -> int:
    """The most that gradients of one layer's activations take while all else is kept: of the
    stream, and of the MLP's hidden layer before and after SiLU.
    """
    hidden = model.mlp_ratio * model.dim
    return run.num_tokens * (model.dim * run.stream_bytes + 2 * hidden * run.element_bytes)


def _norm(dim: int, run: Pass) -> int:
    """RMSNorm's input and its statistics; not its output, which the next product keeps."""
    copies = 1 if run.on_gpu else 2
    return run.num_tokens * (copies * dim * run.stream_bytes + _LSE_BYTES)


def _copies(config: NSAConfig) -> int:
    return 1 if config.share_kv else 3


def _dense(model: ModelConfig, run: Pass) -> dict[str, int]:
    N, e = run.num_tokens, run.element_bytes
    per_kv = model.num_kv_heads * (model.head_dim + model.value_dim)
    return {
        "q": N * model.num_heads * model.head_dim * e,
        "k, v": N * per_kv * e,
        "o": N * model.num_heads * model.value_dim * e,
        "lse": N * model.num_heads * _LSE_BYTES,
    }


def _nsa(model: ModelConfig, config: NSAConfig, run: Pass, route: Route) -> dict[str, int]:
    N, e = run.num_tokens, run.element_bytes
    num_outputs = len(config.branches)
    output = N * model.num_heads * model.value_dim * e
    kept = {"gates": _gate(model, config, run), "o": output, "outputs": num_outputs * output}
    kept.update(_phi(model, config, run))
    for branch in config.branches:
        implementation = route.branch(branch).implementation
        kernel = route.branch(branch).kernel
        kept.update(_BRANCHES[branch](model, config, run, implementation, kernel))
    return kept


def _gate(model: ModelConfig, config: NSAConfig, run: Pass) -> int:
    N, e = run.num_tokens, run.element_bytes
    gates = N * model.num_heads * 3 * e
    if config.gate == "sigmoid":
        return gates
    if config.gate == "none":
        return 0
    # the group's mean query, and its hidden layer before and after SiLU; softmax in fp32
    return gates + N * model.num_kv_heads * (3 * model.head_dim * e + 3 * 4)


def _phi(model: ModelConfig, config: NSAConfig, run: Pass) -> dict[str, int]:
    """What a learned phi keeps: the tokens in chunks, and mlp's hidden layer."""
    if config.phi == "mean" or config.branches == ("win",):
        return {}
    e, G = run.element_bytes, model.num_kv_heads
    C = BlockGrid.of(config).num_cmp(run.tokens)
    chunked = run.tokens // config.cmp_stride * config.cmp_stride if C else 0
    kept = run.batch * chunked * G * (model.head_dim + model.value_dim) * e
    if config.phi == "mlp":
        hidden = (config.phi_hidden or model.head_dim) + (config.phi_hidden or model.value_dim)
        kept += run.batch * C * G * hidden * (4 + e)
    if not config.rotates_before_compression:
        kept += C * (model.head_dim // 2) * _COMPLEX_BYTES
    return {"phi": kept}


def _projected(model: ModelConfig, config: NSAConfig, run: Pass) -> dict[str, int]:
    """q, k and v as the projections and RoPE left them, k and v of all branches in one piece."""
    N, e = run.num_tokens, run.element_bytes
    kv_heads = _copies(config) * model.num_kv_heads
    return {
        "q": N * model.num_heads * model.head_dim * e,
        "k": N * kv_heads * model.head_dim * e,
        "v": N * kv_heads * model.value_dim * e,
    }


def _lse(model: ModelConfig, run: Pass) -> int:
    return run.num_tokens * model.num_heads * _LSE_BYTES


def _masked_sdpa(
    model: ModelConfig, run: Pass, *, rows: int, keys: int, calls: int, masks: int
) -> int:
    """One `nsa.ops.sdpa.grouped` of ``calls`` sequences of ``rows`` queries and ``keys`` keys:
    copies of q, k and v, its output, its statistics, ``masks`` additive masks.
    """
    e, per_head = run.element_bytes, model.head_dim + model.value_dim
    kv_heads = model.num_heads if run.on_gpu else model.num_kv_heads
    queries = calls * rows * model.num_heads * (per_head * e + _LSE_BYTES)
    return queries + calls * keys * kv_heads * per_head * e + masks * rows * keys * e


def _compressed(
    model: ModelConfig, config: NSAConfig, run: Pass, implementation: str, kernel: str
) -> dict[str, int]:
    C = BlockGrid.of(config).num_cmp(run.tokens)
    if kernel == Path.TRITON:
        per_kv = model.num_kv_heads * (model.head_dim + model.value_dim)
        compressed = run.batch * C * per_kv * run.element_bytes
        return {
            **_projected(model, config, run),
            "cmp": compressed,
            "cmp lse": _lse(model, run),
        }
    if C == 0:
        return {}
    blind = run.tokens  # bool
    return {
        "cmp": blind + _masked_sdpa(model, run, rows=run.tokens, keys=C, calls=run.batch, masks=1)
    }


def _selected(
    model: ModelConfig, config: NSAConfig, run: Pass, implementation: str, kernel: str
) -> dict[str, int]:
    slots = run.num_tokens * model.num_kv_heads * config.num_selected_for(run.tokens)
    blocks = 4 * slots
    if implementation == DENSE:
        # its output is the branch's
        return {**_projected(model, config, run), "sel lse": _lse(model, run)}
    if implementation == Path.TRITON:
        return {
            **_projected(model, config, run),
            "blocks": blocks,
            "sel lse": _lse(model, run),
        }
    if implementation == Path.MASKED:
        empty = run.num_tokens * model.num_kv_heads  # bool
        masks = run.batch * model.num_kv_heads
        return {
            "sel": empty
            + _masked_sdpa(
                model, run, rows=run.tokens, keys=run.tokens, calls=run.batch, masks=masks
            )
        }
    # the paths that gather again in the backward keep the choice, and the queries' positions
    return {**_projected(model, config, run), "blocks": blocks, "position": 8 * run.tokens}


def _window(
    model: ModelConfig, config: NSAConfig, run: Pass, implementation: str, kernel: str
) -> dict[str, int]:
    if implementation in (DENSE, "fa2") or kernel == Path.TRITON:
        kept = {**_projected(model, config, run), "win lse": _lse(model, run)}
        if kernel == "fa2" and run.on_gpu:
            kept["win bounds"] = 8 * (run.batch + 1)
        return kept
    head = min(run.tokens, config.window)
    kept = {"win head": _masked_sdpa(model, run, rows=head, keys=head, calls=run.batch, masks=1)}
    tiles = -(-run.tokens // config.window) - 1
    if tiles:
        kept["win tiles"] = _masked_sdpa(
            model,
            run,
            rows=config.window,
            keys=2 * config.window,
            calls=run.batch * tiles,
            masks=1,
        )
    return kept


_Branch = Callable[[ModelConfig, NSAConfig, Pass, str, str], dict[str, int]]
_BRANCHES: dict[str, _Branch] = {"cmp": _compressed, "sel": _selected, "win": _window}
