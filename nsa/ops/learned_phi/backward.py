"""The backward of a learned phi: of mlp first what lies between its products, then the gradients of
the tokens and of the weights.
"""

from __future__ import annotations

from torch import Tensor

from nsa.ops.kernels.common import rows
from nsa.ops.learned_phi.backward_hidden_kernels import gradients_of_hidden
from nsa.ops.learned_phi.backward_tokens_kernels import gradients_of_tokens
from nsa.ops.learned_phi.backward_weights_kernels import gradients_of_weights
from nsa.ops.learned_phi.pairs import Pair


def backward(
    d_out: Pair,
    k: Tensor,
    v: Tensor,
    up: Pair,
    position: Pair | None = None,
    down: Pair | None = None,
    pre: Pair | None = None,
    *,
    block: int,
    stride: int,
) -> tuple[Pair, ...]:
    """Gradients of (k, v) and of ``up``, and of ``position`` and ``down`` of mlp, each a pair;
    ``pre`` as `forward` left it.
    """
    k, v, (d_k, d_v) = rows(k), rows(v), (x.contiguous() for x in d_out)
    up = (up[0].contiguous(), up[1].contiguous())
    if position is None or down is None or pre is None:
        d_up = gradients_of_weights((d_k, d_v), k, v, up, block=block, stride=stride)
        return gradients_of_tokens((d_k, d_v), k, v, up, block=block, stride=stride), d_up
    d_pre, position_part, down_part = gradients_of_hidden((d_k, d_v), pre, down)
    d_x = gradients_of_tokens(d_pre, k, v, up, block=block, stride=stride)
    encoding = position, down, position_part, down_part
    return d_x, *gradients_of_weights(d_pre, k, v, up, encoding, block=block, stride=stride)
