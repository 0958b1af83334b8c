"""The parts of NSA that bench_fusion compiles: each a module, with the inputs that it takes in a
model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nsa.attention import NSAAttention
from nsa.config import ModelConfig
from nsa.gate import SigmoidGate, SoftmaxGate
from nsa.model import IGNORED_LABEL, TinyLM, next_token_labels
from nsa.ops.gated_sum import gated_sum
from nsa.rope import angles, rotate, turns

WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}


class GateAndCombine(nn.Module):
    """gates(x, q), then the gated sum of three branch outputs."""

    def __init__(self, model: ModelConfig, kind: str) -> None:
        super().__init__()
        self.gate: nn.Module = SigmoidGate(model.dim, model.num_heads)
        if kind == "softmax":
            self.gate = SoftmaxGate(
                model.num_kv_heads, model.head_dim, temperature=1.0, branches=model.nsa.branches
            )

    def forward(self, x: Tensor, q: Tensor, cmp: Tensor, sel: Tensor, win: Tensor) -> Tensor:
        return gated_sum(self.gate(x, q), [cmp, sel, win], (0, 1, 2))


class ProjectAndRotate(nn.Module):
    """q and k of three branches: the projections, then RoPE by the turns that the layers share."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.model = model
        self.q_proj = nn.Linear(model.dim, model.num_heads * model.head_dim, bias=False)
        self.k_proj = nn.Linear(model.dim, 3 * model.num_kv_heads * model.head_dim, bias=False)

    def forward(self, x: Tensor, by: Tensor) -> Tensor:
        q, k = (p(x).unflatten(-1, (-1, self.model.head_dim)) for p in (self.q_proj, self.k_proj))
        return torch.cat([rotate(t, by, kind=self.model.nsa.rope).flatten(2) for t in (q, k)], -1)


class Step(nn.Module):
    """A model's loss on ids; its blocks are what gets compiled: one graph serves all of them."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.model = TinyLM(model, "masked", "off")

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.model(ids).flatten(0, 1).float()
        return nn.functional.cross_entropy(
            logits, next_token_labels(ids).flatten(), ignore_index=IGNORED_LABEL
        )

    def compile_blocks(self, backend: str) -> None:
        for block in self.model.blocks:
            block.compile(fullgraph=True, dynamic=False, backend=backend)


@dataclass(frozen=True)
class Part:
    """``inputs`` makes the arguments of ``module`` for (batch, tokens) in a dtype, those with a
    gradient asking for it.
    """

    name: str
    module: Callable[[], nn.Module]
    inputs: Callable[[int, int, torch.dtype], list[Tensor]]
    reference_dtype: torch.dtype


def parts(model: ModelConfig, dtype: torch.dtype, device: str) -> dict[str, Part]:
    generator = torch.Generator().manual_seed(1)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype).requires_grad_()

    def gate_inputs(B: int, T: int, _: torch.dtype) -> list[Tensor]:
        heads = (B, T, model.num_heads)
        return [
            randn(B, T, model.dim),
            randn(*heads, model.head_dim),
            *(randn(*heads, model.value_dim) for _ in range(3)),
        ]

    def rope_inputs(B: int, T: int, of: torch.dtype) -> list[Tensor]:
        theta = angles(
            torch.arange(T, device=device)[None],
            model.head_dim,
            base=model.nsa.rope_base,
            scale=model.nsa.rope_scale,
        )
        return [randn(B, T, model.dim), turns(theta, of)]

    def layer(path: str) -> Callable[[], nn.Module]:
        heads = (model.dim, model.num_heads, model.num_kv_heads, model.head_dim, model.v_head_dim)
        return lambda: NSAAttention(
            *heads, config=model.nsa, path=path, fa2="off" if path == "masked" else "auto"
        )

    def states(B: int, T: int, _: torch.dtype) -> list[Tensor]:
        return [randn(B, T, model.dim)]

    def ids(B: int, T: int, _: torch.dtype) -> list[Tensor]:
        return [torch.randint(model.vocab_size, (B, T), generator=generator).to(device)]

    wide = WIDER[dtype]
    made = [
        Part(
            "gate+combine softmax",
            lambda: GateAndCombine(model, "softmax"),
            gate_inputs,
            torch.float64,
        ),
        Part(
            "gate+combine sigmoid",
            lambda: GateAndCombine(model, "sigmoid"),
            gate_inputs,
            torch.float64,
        ),
        Part("projections+rope", lambda: ProjectAndRotate(model), rope_inputs, torch.float64),
        Part("layer masked", layer("masked"), states, wide),
        Part("layer v2", layer("v2"), states, wide),
        Part("TinyLM step", lambda: Step(model), ids, wide),
    ]
    return {part.name: part for part in made}
