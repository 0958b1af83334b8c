"""LayerParts: what a captured layer was made of, so that a replay notices what it would not follow.

B batch, M model dim.
"""

from __future__ import annotations

from itertools import chain, repeat
from operator import contains, is_
from typing import Any

import torch
from torch import Tensor, nn

from nsa import checks, chosen_blocks, statistics


class LayerParts:
    """The modules, weights and autocast of ``layer`` as a graph of its forward has them.

    A replay follows what is changed in place in a weight, and nothing else. The comparison is made
    in each step, before a graph that takes some 50 us: so it is of what the modules' dictionaries
    hold, by identity, and of addresses; other attributes are not looked at. ValueError for a layer
    with a hook inside it; those on the layer itself are called by whoever calls the layer.
    """

    def __init__(self, layer: nn.Module, device: torch.device) -> None:
        modules = [*layer.modules()]
        self._inside = modules[1:]
        self._check_hooks()
        self._hooks: list[Any] = [
            hooks for one in self._inside for hooks in (one._forward_hooks, one._forward_pre_hooks)
        ]
        self._vars = [vars(one) for one in self._inside]
        parts = (d for one in modules for d in (one._modules, one._parameters, one._buffers))
        self._dicts: list[dict[str, Any]] = [d for d in parts if d]
        self._held = self._now()
        self.tensors = [x for x in self._held if isinstance(x, Tensor)]
        self._places = [*map(Tensor.data_ptr, self.tensors)]
        self._kind = device.type
        self._autocast = self._autocast_now()

    def check(self, x: Tensor) -> None:
        """ValueError where a replay for x would not be a call of the layer as it is now."""
        if torch.compiler.is_compiling():  # torch.compile then leaves this call to Python
            raise _no_replay("a step that is compiled", "one from Python")
        if torch.is_grad_enabled():
            checks.no_gradient(x, *self.tensors)
        if statistics.is_collecting() or chosen_blocks.is_collecting():
            raise _no_replay(
                "a step while statistics or chosen blocks are collected", "no collection"
            )
        if self._autocast_now() != self._autocast:
            raise _no_replay("a step under another autocast", "that of the capture")
        if any(self._hooks) or any(map(contains, self._vars, repeat("forward"))):
            self._check_hooks()
        if nn.modules.module._has_any_global_hook():
            raise _no_replay("a step under a hook of all modules", "no such hook")
        held = self._now()
        if len(held) != len(self._held) or not all(map(is_, held, self._held)):
            raise _no_replay("a layer with another weight or module", "those of the capture")
        if [*map(Tensor.data_ptr, self.tensors)] != self._places:
            raise _no_replay("a weight at another address", "it changed in place")

    def _now(self) -> list[Any]:
        return [*chain.from_iterable(map(dict.values, self._dicts))]

    def _autocast_now(self) -> tuple[bool, torch.dtype]:
        return torch.is_autocast_enabled(self._kind), torch.get_autocast_dtype(self._kind)

    def _check_hooks(self) -> None:
        for one in self._inside:
            if checks.is_hooked(one):
                raise ValueError(
                    f"got a hook on, or another forward of, a {type(one).__name__} inside a layer"
                    " of LayerGraphs; wanted them on the layer alone, since a replay calls no"
                    " module; remove it, or close the LayerGraphs"
                )


def _no_replay(got: str, wanted: str) -> ValueError:
    return ValueError(
        f"got {got} for a layer of LayerGraphs; wanted {wanted}; close them, and make others where"
        " it is to stay so"
    )
