"""The gated sum's kernel, and what all the operators register with PyTorch, in Triton's interpreter
(`--require interpreter`).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

# importing them registers the operators
from nsa.ops import (
    gated_sum,
    interval,  # noqa: F401
    joint_backward,  # noqa: F401
    learned_phi,  # noqa: F401
    means,  # noqa: F401
    scores,  # noqa: F401
)
from nsa.ops.selected.triton import forward as selected_forward
from nsa.ops.selected.triton import list_calls
from tests.cases import Case, assert_same_function, qkv, randn
from tests.nsa.kernel_cases import (
    attend,
    differentiable,
    operator_calls,
    poisoned_memory,  # noqa: F401
)

# The gated sum.


@pytest.mark.parametrize("value_dim", [16, 100])
def test_gated_sum(value_dim: int) -> None:
    gates = randn(2, 3, 33, 3, seed=0).transpose(1, 2)
    tensors = (gates, *(randn(2, 33, 3, value_dim, seed=i) for i in (1, 2, 3)))

    def reference(g: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return torch.einsum("bthn,nbthd->bthd", g, torch.stack([a, b, c]))

    def fused(g: Tensor, *outputs: Tensor) -> Tensor:
        return gated_sum.fused_gated_sum(g, outputs, (0, 1, 2))

    assert_same_function(fused, reference, tensors, ("gates", "cmp", "sel", "win"))


# What the operators register with PyTorch.


@pytest.mark.parametrize("name", operator_calls())
def test_the_operators_keep_what_their_schemas_promise(name: str) -> None:
    """No alias, no mutation, a gradient that is registered; fake tensors as real ones, for dynamic
    shapes as well.
    """
    torch.library.opcheck(getattr(torch.ops.nsa, name).default, differentiable(name))


@pytest.mark.parametrize("name", ["selected_triton", "selected_triton_backward"])
def test_so_do_operators_that_keep_lists(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(list_calls, "SORT_MIN_ROWS", 0)
    inputs = list(differentiable(name))
    if name == "selected_triton_backward":
        q, k, v, blocks, _, _, sel_block, _, _, _ = inputs[4:]
        options = {"sel_block": sel_block, "q_start": 0, "scale": 0.25, "lists": inputs[3]}
        selected_forward.forward(q.detach(), k.detach(), v.detach(), blocks, **options)
    torch.library.opcheck(getattr(torch.ops.nsa, name).default, tuple(inputs))


def test_a_second_derivative_is_refused() -> None:
    q, k, v = (x.requires_grad_() for x in qkv(Case(4, 1, 16, 16, 1)))
    blocks = torch.zeros(1, 4, 2, 1, dtype=torch.int32)
    (d_q,) = torch.autograd.grad(attend(q, k, v, blocks).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        d_q.sum().backward()


def test_a_penalty_on_gradients_is_not_dropped() -> None:
    """The incoming gradient depends on nothing here; the gradients do."""
    q, k, v = (x.requires_grad_() for x in qkv(Case(4, 1, 16, 16, 1)))
    blocks = torch.zeros(1, 4, 2, 1, dtype=torch.int32)
    o = attend(q, k, v, blocks)
    (d_q,) = torch.autograd.grad(o.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        (o.sum() + d_q.square().sum()).backward()
