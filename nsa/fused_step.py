"""The attention of one layer in a step of one token a row, as one operator: where path triton
serves every branch and nothing looks at what lies between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TypeGuard

import torch
from torch import Tensor, nn

from nsa import checks, chosen_blocks, dispatch, statistics
from nsa.config import BRANCHES, NSAConfig
from nsa.decode import NSACache, Step, one_step
from nsa.gate import SoftmaxGate
from nsa.ops import decode_step, key_counts
from nsa.ops.derivatives import has_transforms
from nsa.routing import Route, is_one_step
from nsa.shared_positions import Layout


def serves(
    route: Route, config: NSAConfig, cache: NSACache, layout: Layout, *tensors: Tensor
) -> bool:
    """Whether `attend` gives what the branches one by one would, of ``tensors`` that go into it."""
    return (
        not one_step.against(cache, tensors[0].shape[1])
        and (cache.steps is None or isinstance(layout.step, Step))
        and len({x.dtype for x in tensors[:3]}) == 1  # else the call of branches says why
        and is_one_step(route, config)
        and not checks.is_strict()
        and not statistics.is_collecting()
        and not torch.compiler.is_compiling()
        and not has_transforms()
        and all(type(x) in (Tensor, nn.Parameter) for x in (*tensors, *cache.sel))
    )


def attend(
    route: Route,
    cache: NSACache,
    layout: Layout,
    projected: tuple[Tensor, Tensor, Tensor],
    gate: tuple[nn.Module, Tensor],
    num_tokens: Sequence[int] | None = None,
) -> Tensor:
    """o [B, 1, HQ, DV] of q [B, 1, HQ, D], k and v [B, 1, n, D or DV] as they are projected, which
    the cache takes. ``gate``: the layer's module, and x [B, 1, M]. ``num_tokens`` and errors as of
    NSACache.append.
    """
    q, k, v = (x.contiguous() for x in projected)
    module, x = gate
    up = down = gates = None
    if _has_kernel(module, cache.config):
        up, down = module.up, module.down
    else:
        gates = module(x, q).to(q.dtype).contiguous()
    turns = torch.view_as_real(layout.turns) if layout.turns.is_complex() else layout.turns
    if turns.shape[0] == 1:  # rows of pages that the host knows to be alike share one
        turns = turns.expand(q.shape[0], *turns.shape[1:]).contiguous()
    step = layout.step
    if not isinstance(step, Step):
        step = Step(one_step.position_of(cache), cache.config, cache.max_len)
    made = decode_step.Projected(q, k, v, turns, step.position_B, gates, up, down)
    rope = cache.config.rope
    return attend_projected(route, cache, step, made, rope=rope, num_tokens=num_tokens)


def attend_projected(
    route: Route,
    cache: NSACache,
    step: Step,
    x: decode_step.Projected,
    *,
    rope: str,
    num_tokens: Sequence[int] | None = None,
) -> Tensor:
    """`attend` of what the operator takes; ``rope`` "none" where q and k are turned already."""
    config, G = cache.config, cache.sel[0].shape[2]
    begins = (0, G, 2 * G) if x.k.shape[2] > G else (0, 0, 0)
    chunk = {
        branch: (x.k[:, :, begin : begin + G], x.v[:, :, begin : begin + G])
        for branch, begin in zip(BRANCHES, begins, strict=True)
    }
    buffers, pages = one_step.begin(cache, chunk, num_tokens)
    o, blocks = dispatch.decode_step(
        route,
        x,
        buffers,
        decode_step.StepGeometry(
            config.cmp_block,
            config.cmp_stride,
            config.sel_block,
            config.num_selected_for(cache.max_len),
            config.num_initial,
            config.num_local,
            x.q.shape[3] ** -0.5,
            config.gate_temperature,
            rope,
        ),
        pages,
    )
    one_step.end(cache)
    chosen_blocks.record(blocks)
    _count_keys(x.q, cache, step, blocks)
    return o


def _has_kernel(module: nn.Module, config: NSAConfig) -> TypeGuard[SoftmaxGate]:
    """Whether `nsa.ops.decode_step` makes the gates of ``module``: as the layer made it, since the
    kernel reads weights where contiguous ones would lie, and the config's temperature.
    """
    return (
        type(module) is SoftmaxGate
        and module.all_on
        and not checks.is_hooked(module)
        and module.temperature == config.gate_temperature
        and all(type(w) is nn.Parameter and w.is_contiguous() for w in (module.up, module.down))
    )


def _count_keys(q: Tensor, cache: NSACache, step: Step, blocks: Tensor) -> None:
    """As nsa.branches counts them."""
    config, later = cache.config, cache.keys_read.later
    grid = {"block": config.cmp_block, "stride": config.cmp_stride}
    num_cmp, at = cache.grid.num_cmp(cache.max_len), step.position_B
    later("cmp", partial(key_counts.compressed, q, num_cmp, q_start=at, **grid))
    selected = partial(key_counts.selected, blocks, cache.max_len, sel_block=config.sel_block)
    later("sel", partial(selected, q_start=at))
    rows = cache.window  # a count that held the cache would keep its buffers
    later(
        "win",
        lambda: key_counts.sliding(q, rows, q_start=step.win_start_B, window=config.window),
    )
