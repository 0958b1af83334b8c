"""Attention alone, without projections, on inputs of its own: of all branches (workloads attention
and attention_forward), or of the selected branch on blocks of its own (selected and
selected_forward).

B batch, T tokens, G kv heads, D head dim, N slots.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from nsa import dispatch
from nsa.compression import param_shapes
from nsa.config import BRANCHES, ModelConfig
from nsa.functional import capability_of, nsa_attention, selected_attention
from nsa.routing import Problem, route_dense
from perfbench.older_nsa import promise_of_sigmoid_gates
from perfbench.records import Cell, Peer
from perfbench.worker.peers.call import PeerAttention
from perfbench.worker.workloads import block_patterns
from perfbench.worker.workloads.made import Made

NUM_INPUTS = 4  # distinct random inputs: the model's shape at 131,072 tokens takes 0.4 GB of each


class SparseAttention(nn.Module):
    """`nsa.nsa_attention` of one call's tensors, in the order of ``names``; phi's tensors are
    parameters.
    """

    def __init__(self, model: ModelConfig, path: str, fa2: str) -> None:
        super().__init__()
        self.model, self.path, self.fa2 = model, path, fa2
        self.names = [
            "q",
            *(f"{kind}_{branch}" for branch in BRANCHES for kind in ("k", "v")),
            "gates",
        ]
        self.phi = nn.ModuleDict()
        for which, dim in (("k", model.head_dim), ("v", model.value_dim)):
            phi = {
                name: nn.Parameter(torch.randn(shape) * shape[-1] ** -0.5)
                for name, shape in param_shapes(model.nsa, dim).items()
            }
            self.phi[which] = nn.ParameterDict(phi)

    def shapes(self) -> dict[str, tuple[int, int]]:
        """Heads and width of each input [B, T, heads, width]."""
        model = self.model
        keys, values = (model.num_kv_heads, model.head_dim), (model.num_kv_heads, model.value_dim)
        kv = {name: keys if name.startswith("k_") else values for name in self.names[1:-1]}
        return {
            "q": (model.num_heads, model.head_dim),
            **kv,
            "gates": (model.num_heads, len(BRANCHES)),
        }

    def used(self) -> list[str]:
        """Inputs that have a gradient: those of branches that are computed."""
        return [
            name
            for name in self.names
            if name in ("q", "gates") or name[2:] in self.model.nsa.branches
        ]

    def forward(self, *inputs: Tensor) -> Tensor:
        q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates = inputs
        phi_k, phi_v = (dict(self.phi[which].named_parameters()) or None for which in ("k", "v"))
        o: Tensor = nsa_attention(
            q,
            (k_cmp, v_cmp),
            (k_sel, v_sel),
            (k_win, v_win),
            gates,
            config=self.model.nsa,
            phi_params=(phi_k, phi_v),
            path=self.path,
            fa2=self.fa2,
            **promise_of_sigmoid_gates(),
        )
        return o


class FullAttention(nn.Module):
    """Full causal attention of the same heads; ``kind`` as in nsa.routing.DENSE_KINDS."""

    names = ("q", "k", "v")

    def __init__(self, model: ModelConfig, kind: str) -> None:
        super().__init__()
        self.model, self.kind = model, kind

    def shapes(self) -> dict[str, tuple[int, int]]:
        model = self.model
        return {
            "q": (model.num_heads, model.head_dim),
            "k": (model.num_kv_heads, model.head_dim),
            "v": (model.num_kv_heads, model.value_dim),
        }

    def used(self) -> list[str]:
        return list(self.names)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        problem = Problem.of(
            self.model,
            batch=q.shape[0],
            tokens=q.shape[1],
            dtype=str(q.dtype).removeprefix("torch."),
        )
        route = route_dense(self.kind, problem, capability_of(str(q.device)))
        return dispatch.dense(route, q, k, v, scale=self.model.head_dim**-0.5)


Alone = SparseAttention | FullAttention | PeerAttention


def module_of(model: ModelConfig, path: str, fa2: str, peer: Peer | None = None) -> Alone:
    """The attention of one layer alone; ``peer`` serves a path that is one."""
    if peer is not None:
        return PeerAttention(model, peer)
    return (
        FullAttention(model, path)
        if path.startswith("dense")
        else SparseAttention(model, path, fa2)
    )


def inputs(
    module: Alone,
    batch: int,
    tokens: int,
    *,
    dtype: torch.dtype,
    device: str,
    backward: bool,
) -> Iterator[tuple[Tensor, ...]]:
    """Random inputs [B, T, heads, width] in the order of the module's names, then the output's
    gradient where ``backward``; without end.

    Gates are sigmoids. With ``backward`` the used inputs are leaves that want a gradient.
    """
    model, used = module.model, module.used() if backward else []

    def one() -> tuple[Tensor, ...]:
        made = {
            name: torch.randn(batch, tokens, *size, dtype=dtype, device=device)
            for name, size in module.shapes().items()
        }
        if "gates" in made:
            made["gates"] = made["gates"].sigmoid()
        leaves = [x.requires_grad_(name in used) for name, x in made.items()]
        if backward:
            leaves.append(
                torch.randn(
                    batch, tokens, model.num_heads, model.value_dim, dtype=dtype, device=device
                )
            )
        return tuple(leaves)

    return itertools.cycle([one() for _ in range(NUM_INPUTS)])


class SelectedBranch(nn.Module):
    """`nsa.selected_attention` of q, k, v and blocks; has no parameters."""

    names = ("q", "k", "v", "blocks")

    def __init__(self, model: ModelConfig, path: str, fa2: str) -> None:
        super().__init__()
        self.model, self.path, self.fa2 = model, path, fa2

    def forward(self, q: Tensor, k: Tensor, v: Tensor, blocks: Tensor) -> Tensor:
        return selected_attention(
            q, k, v, blocks, sel_block=self.model.nsa.sel_block, path=self.path, fa2=self.fa2
        )


def selected_inputs(
    model: ModelConfig,
    cell: Cell,
    *,
    dtype: torch.dtype,
    device: str,
    seed: int,
    trained: Tensor | None = None,
) -> Iterator[tuple[Tensor, ...]]:
    """Random q, k, v, and blocks of the cell's kind (`block_patterns.chosen`), then the output's
    gradient where the cell has a backward; without end.

    With a backward q, k and v are leaves that want a gradient. ``seed`` decides all of it but the
    blocks of selection=trained, which are those of ``trained`` in each input.
    """
    generator, backward = torch.Generator(device).manual_seed(seed), cell.has_backward

    def normal(heads: int, width: int) -> Tensor:
        return torch.randn(
            cell.batch, cell.seq_len, heads, width, dtype=dtype, device=device, generator=generator
        )

    def one() -> tuple[Tensor, ...]:
        q = normal(model.num_heads, model.head_dim)
        k, v = (normal(model.num_kv_heads, width) for width in (model.head_dim, model.value_dim))
        blocks = block_patterns.chosen(
            cell.selection,
            q,
            config=model.nsa,
            num_kv_heads=model.num_kv_heads,
            generator=generator,
            trained=trained,
        )
        leaves = [x.requires_grad_(backward) for x in (q, k, v)]
        return (*leaves, blocks, *((normal(model.num_heads, model.value_dim),) if backward else ()))

    return itertools.cycle([one() for _ in range(NUM_INPUTS)])


def step_body(
    module: Alone,
    run: Callable[..., Tensor],
    made: Made,
    *,
    backward: bool,
) -> Callable[..., None]:
    """One call of ``run`` (the module, or what it was compiled to) on one of `inputs`; with
    ``backward`` every gradient, too.
    """
    return body_of(run, parameters_of(module), made, backward=backward)


def parameters_of(module: nn.Module) -> list[Tensor]:
    """The parameters that have a gradient: phi's, where compressed keys are attended to."""
    sparse = isinstance(module, SparseAttention) and "cmp" in module.model.nsa.branches
    return list(module.parameters()) if sparse else []


def body_of(
    run: Callable[..., Tensor], parameters: list[Tensor], made: Made, *, backward: bool
) -> Callable[..., None]:
    """One call of ``run``; with ``backward`` the gradients of ``parameters`` and of each argument
    that wants one.

    The last argument is then the gradient of what ``run`` returns. Gradients are not added up;
    ``made`` has them until the next call.
    """
    if not backward:

        def forward(*arguments: Tensor) -> None:
            made.begin(*arguments)
            with torch.no_grad():
                made.outputs = [run(*arguments)]

        return forward

    def both(*arguments: Tensor) -> None:
        made.begin(*arguments)
        *tensors, grad = arguments
        wanted = [x for x in tensors if x.requires_grad]
        output = run(*tensors)
        made.gradients = torch.autograd.grad(output, wanted + parameters, grad)
        made.outputs = [output.detach()]

    return both
