"""What a run will take, before it runs: parameters, memory by part, FLOPs, time.

Closed forms: nothing is built, and torch is not imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from nsa import settings
from nsa.config import ModelConfig, NSAConfig
from nsa.routing import EXPLICIT, Capability, Path, Problem, Route, RouteError, route, route_dense
from nsa.train import activations
from nsa.train.activations import Pass
from nsa.train.config import RunConfig
from nsa.train.flops import step_flops
from nsa.train.published import PublishedSpeed, duration, published_speed

# What is sold as so many GB has at least so many 10^9 bytes.
CARD_BYTES: Mapping[str, int] = {
    "NVIDIA A100-SXM4-40GB": 40 * 10**9,
    "NVIDIA A100-SXM4-80GB": 80 * 10**9,
    "NVIDIA A100 80GB PCIe": 80 * 10**9,
    "NVIDIA H100 80GB HBM3": 80 * 10**9,
    "NVIDIA H100 PCIe": 80 * 10**9,
    "NVIDIA H200": 141 * 10**9,
    "NVIDIA L40S": 48 * 10**9,
    "NVIDIA RTX A6000": 48 * 10**9,
    "NVIDIA GeForce RTX 4090": 24 * 10**9,
}
HEADROOM_PCT = 10.0
# the CUDA context, its libraries, and what the allocator cannot use: a margin that nobody measured
CONTEXT_BYTES = 10**9
PACKED_BYTES = 2**30  # path v2 packs as much at a time (nsa.ops.selected.gathered_rows)
NOT_MEASURED = "not measured here; the go/no-go line after 50 steps has it"
# Bytes a parameter: weights, gradients, fp32 masters, both moments of AdamW. The masters' gradients
# are copies in fp32.
_BYTES_OF_PRECISION: Mapping[str, tuple[int, int, int, int]] = {
    "bf16_master": (2, 2 + 4, 4, 8),
    "bf16": (2, 2, 0, 4),
    "autocast": (4, 4, 0, 8),
    "fp32": (4, 4, 0, 8),
}


@dataclass(frozen=True, slots=True)
class Estimate:
    """``parameters`` and ``memory_bytes`` by part, of one rank that holds the whole model.

    ``activation_bytes``: of each layer, a checkpointed one at what it keeps. ``flops_per_step`` and
    ``tokens_per_step``: of one rank. ``card_bytes``, ``free_pct``, ``largest_batch``: None where no
    card is known; ``largest_batch`` leaves HEADROOM_PCT free and is 0 where one sequence does not
    fit. ``eta_s``: of all steps at ``speed``, which was published for this length at this
    batch or the nearest one; else None.
    """

    device_name: str
    batch: int
    parameters: Mapping[str, int]
    memory_bytes: Mapping[str, int]
    activation_bytes: tuple[int, ...]
    tokens_per_step: int
    flops_per_step: float
    card_bytes: int | None
    free_pct: float | None
    largest_batch: int | None
    eta_s: float | None
    speed: PublishedSpeed | None
    notes: tuple[str, ...]

    @property
    def num_parameters(self) -> int:
        return sum(self.parameters.values())

    @property
    def total_bytes(self) -> int:
        return sum(self.memory_bytes.values())

    def to_mapping(self) -> dict[str, Any]:
        """Plain data, with both totals."""
        totals = {"num_parameters": self.num_parameters, "total_bytes": self.total_bytes}
        return {**asdict(self), **totals}

    def rows(self) -> list[tuple[str, str]]:
        """What the table shows: name and value of each line."""
        rows = [("parameters", f"{self.num_parameters:,}")]
        rows += [(f"  {name}", f"{count:,}") for name, count in self.parameters.items()]
        rows.append(("memory", _gb(self.total_bytes)))
        rows += [(f"  {name}", _gb(size)) for name, size in self.memory_bytes.items()]
        least, most = min(self.activation_bytes), max(self.activation_bytes)
        span = _gb(most) if least == most else f"{_gb(least)} to {_gb(most)}"
        rows.append(("activations of a layer", span))
        if self.card_bytes is not None:
            rows.append((f"memory of {self.device_name}", _gb(self.card_bytes)))
            rows.append(("free", f"{self.free_pct:.0f} %"))
            rows.append(("largest batch", f"{self.largest_batch} ({HEADROOM_PCT:.0f} % free)"))
        rows.append(("tokens a step", f"{self.tokens_per_step:,}"))
        rows.append(("TFLOP a step", f"{self.flops_per_step / 1e12:,.3f}"))
        if self.speed is None or self.eta_s is None:
            rows.append(("time of all steps", NOT_MEASURED))
        else:
            shape = f"{self.speed.batch} x {self.speed.seq_len:,} tokens"
            if self.speed.batch != self.batch:
                shape += f", not measured at batch {self.batch},"
            speed = f"{self.speed.tok_per_s:,} tok/s of {shape} on one {self.speed.device}"
            rows.append(
                ("time of all steps", f"{duration(self.eta_s)} at {speed} ({self.speed.source})")
            )
        return rows


def estimate(config: RunConfig, where: Capability, *, card_bytes: int | None = None) -> Estimate:
    """Of one rank on ``where``; ``card_bytes`` of its memory, by default what CARD_BYTES has.

    ``config`` has the tokenizer's vocabulary already (nsa.train.data.vocabulary_size). RouteError
    for a path that cannot serve.
    """
    train = config.train
    if card_bytes is None and where.sm is not None:
        card_bytes = CARD_BYTES.get(where.device_name)
    memory, layers = _memory(config, where)
    total = sum(memory.values())
    speed = published_speed(config, device_name=where.device_name)
    parameters = count_parameters(config.model, attention=train.attention)
    return Estimate(
        device_name=where.device_name,
        batch=train.batch,
        parameters=parameters,
        memory_bytes=memory,
        activation_bytes=layers,
        tokens_per_step=config.tokens_per_step,
        flops_per_step=train.accumulate
        * step_flops(
            config.model, batch=train.batch, tokens=train.seq_len, attention=train.attention
        ),
        card_bytes=card_bytes,
        free_pct=None if card_bytes is None else 100 * (1 - total / card_bytes),
        largest_batch=None if card_bytes is None else _largest_batch(config, where, card_bytes),
        eta_s=None if speed is None else train.steps * config.tokens_per_step / speed.tok_per_s,
        speed=speed,
        notes=_notes(config, where),
    )


def count_parameters(model: ModelConfig, *, attention: str) -> dict[str, int]:
    """Of TinyLM (``attention`` nsa) or DenseLM (dense), by part."""
    configs = [model.config_of(layer) for layer in range(model.num_layers)]
    dense = attention == "dense"
    norms = model.dim * (2 * model.num_layers + 1)
    if any(config.qk_norm for config in configs):
        norms += sum(2 * model.head_dim for config in configs if config.qk_norm)
    parts = {
        "embedding": model.vocab_size * model.dim,
        "attention": sum(_attention_weights(model, one, dense=dense) for one in configs),
        "MLP": 2 * model.mlp_ratio * model.dim**2 * model.num_layers,
        "norms": norms,
        "head": model.vocab_size * model.dim,
    }
    if not dense:
        parts["gate, phi, sinks"] = sum(_small_weights(model, one) for one in configs)
    return parts


def _attention_weights(model: ModelConfig, config: NSAConfig, *, dense: bool) -> int:
    copies = 1 if dense or config.share_kv else 3
    heads = model.num_heads + copies * model.num_kv_heads
    return model.dim * heads * (model.head_dim + model.value_dim)


def _small_weights(model: ModelConfig, config: NSAConfig) -> int:
    dims, block = (model.head_dim, model.value_dim), config.cmp_block
    count = {
        "sigmoid": (model.dim + 1) * model.num_heads * 3,
        "softmax": model.num_kv_heads * model.head_dim * (model.head_dim + 3),
        "none": 0,
    }[config.gate]
    if config.phi == "linear":
        count += sum(dim * block * dim for dim in dims)
    if config.phi == "mlp":
        hidden = config.phi_hidden
        count += sum(block * dim + (hidden or dim) * (block * dim + dim) for dim in dims)
    return count + (3 * model.num_heads if config.sinks else 0)


def _memory(config: RunConfig, where: Capability) -> tuple[dict[str, int], tuple[int, ...]]:
    """(bytes by part, activations of each layer)."""
    train, model = config.train, config.model
    count = sum(count_parameters(model, attention=train.attention).values())
    weights, gradients, masters, moments = _BYTES_OF_PRECISION[train.precision]
    run = _pass(config, where)
    routes = _routes(config, where)
    full = [activations.of_layer(model, i, run, routes[i]) for i in range(model.num_layers)]
    first, stop = model.checkpoint_layers or (0, 0)
    kept = tuple(
        activations.of_input(model, run) if first <= i < stop else size
        for i, size in enumerate(full)
    )
    parts = {
        "weights": weights * count,
        "gradients": gradients * count,
        "masters": masters * count,
        "optimizer": moments * count,
        "activations": sum(kept) + activations.of_ends(model, run),
        "recomputed layer": max(full[first:stop], default=0),
        "loss and backward": max(
            activations.loss_bytes(model, run), activations.backward_bytes(model, run)
        ),
    }
    if train.precision == "autocast":  # bf16 copies of what is multiplied, kept for the backward
        parts["bf16 copies of weights"] = 2 * count
    if any(_implementation(one) == Path.V2 for one in routes):
        parts["packed by path v2"] = PACKED_BYTES
    if run.on_gpu:
        parts["CUDA context and margin"] = CONTEXT_BYTES
    return parts, kept


def _pass(config: RunConfig, where: Capability) -> Pass:
    train = config.train
    batch, tokens = train.batch, train.seq_len
    if config.data.packing == "documents":
        batch, tokens = 1, batch * tokens
    half = train.precision != "fp32"
    stream = 4 if train.precision in ("fp32", "autocast") else 2
    return Pass(batch, tokens, 2 if half else 4, stream, where.sm is not None)


def routes_of(config: RunConfig, where: Capability) -> list[Route]:
    """The Route of each layer's attention call in training on ``where``; RouteError where one
    cannot be served.
    """
    train = config.train
    dtype = "float32" if train.precision == "fp32" else "bfloat16"
    run = _pass(config, where)
    found = []
    for layer in range(config.model.num_layers):
        model = replace(config.model, nsa=config.model.config_of(layer), layers=None)
        problem = Problem.of(model, batch=run.batch, tokens=run.tokens, dtype=dtype)
        if config.data.packing == "documents":
            problem = replace(problem, whole=False)
        if train.attention == "dense":
            found.append(route_dense("dense", problem, where))
        else:
            request = settings.current().request(train.path, train.fa2)
            found.append(route(request, problem, where))
    return found


def _routes(config: RunConfig, where: Capability) -> list[Route | None]:
    """Of NSA; None for each layer of the dense twin."""
    if config.train.attention == "dense":
        return [None] * config.model.num_layers
    return list(routes_of(config, where))


def _implementation(found: Route | None) -> str:
    """Of the selected branch, '' where there is none."""
    branches = () if found is None else found.branches
    return next((one.implementation for one in branches if one.branch == "sel"), "")


def _largest_batch(config: RunConfig, where: Capability, card_bytes: int) -> int:
    """The most sequences a micro-step whose estimate leaves HEADROOM_PCT of the card free."""
    limit = card_bytes * (1 - HEADROOM_PCT / 100)

    def fits(batch: int) -> bool:
        try:
            memory, _ = _memory(replace(config, train=replace(config.train, batch=batch)), where)
        except RouteError:  # a mask that is too large
            return False
        return sum(memory.values()) <= limit

    beyond = 1
    while fits(beyond):
        beyond *= 2
    least = beyond // 2
    while beyond - least > 1:
        middle = (least + beyond) // 2
        least, beyond = (middle, beyond) if fits(middle) else (least, middle)
    return least


def _notes(config: RunConfig, where: Capability) -> tuple[str, ...]:
    notes = []
    for found in dict.fromkeys(_routes(config, where)):
        path = _implementation(found)
        kernels = {one.kernel for one in (() if found is None else found.branches)}
        if path in (Path.REFERENCE, Path.V1) or EXPLICIT in kernels:
            notes.append(f"path {path} keeps more than this estimate has: it is a lower bound")
        elif config.model.value_dim != config.model.head_dim and (not kernels or "sdpa" in kernels):
            notes.append("SDPA keeps its probabilities where V's head dim differs: a lower bound")
    if config.data.packing == "documents":
        notes.append("packed documents: FLOPs are those of one sequence a row, an upper bound")
    if config.parallel.kind in ("fsdp", "hsdp"):
        notes.append("sharded weights: an upper bound, of a rank that holds the whole model")
    if where.sm is not None and where.device_name not in CARD_BYTES:
        notes.append(f"the memory of {where.device_name} is not known here")
    return tuple(notes)


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 10**9 else f"{size / 1e6:.1f} MB"
