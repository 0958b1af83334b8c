"""LayerGraphs: a decode step of each layer as a CUDA graph of its own, so that a model which runs
from Python, layer by layer, costs little more than the GPU's time.

B batch, M model dim.
"""

from __future__ import annotations

import contextvars
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from nsa import checks, engagement
from nsa.decode import graph as one_graph
from nsa.decode.cache import NSACache, check_cache
from nsa.decode.dense_cache import DenseCache
from nsa.decode.graph_cache import Steps
from nsa.decode.layer_parts import LayerParts
from nsa.decode.views import not_a_step


class LayerGraphs:
    """One decode step of each layer, captured once and replayed by each call of that layer.

    ``model`` is a TinyLM (or DenseLM), whose blocks are captured, or a list of NSAAttention in the
    order in which a model of your own calls them; ``cache`` has one cache a layer, of one history,
    which prefill has filled; rows may differ in length. From then on ``model(ids, cache=cache)``,
    or ``layer(x, cache=cache[i])``, with one token a row replays each layer: hooks on a layer and
    code between layers run in each step, and the numbers are those of `nsa.decode.Steps`. As
    with `nsa.DecodeGraph`, the buffers grow to max_len at once and keep their addresses,
    ``NSACache.lengths`` counts each step, ``NSACache.keys_read`` is of the last replay, and `close`
    hands the caches back as ordinary ones.

    A layer takes x [B, 1, M] in the weights' dtype, and its y [B, 1, M] is memory of its graph: the
    next step overwrites it, so clone what must persist. Weights are read in place: a replay uses
    in-place changes. What it would not follow is a ValueError that says so: a hook inside a layer,
    another weight or module, another autocast, gradients, open `nsa.statistics`, ``num_tokens``,
    chunks of more than one token, layers in another order. An attribute that is no weight, such as
    ``path``, is not looked at: it stays what it was. ``engaged`` is what the capture dispatched
    (`nsa.engagement` counts no replay).

    ValueError also where the model is not on CUDA, NSA_STRICT_ASSERTS is on, no row has room, or
    the caches step already; RouteError for a path whose loop runs on the host. Where CUDA refuses a
    capture, its RuntimeError is raised; after any error the caches are ordinary ones again.
    """

    def __init__(
        self, model: nn.Module | Sequence[nn.Module], cache: Sequence[NSACache | DenseCache]
    ) -> None:
        x_B1M, layers = _taken_apart(model, len(cache[0].lengths) if cache else 0)
        if len(layers) != len(cache):
            raise ValueError(
                f"got {len(cache)} caches for {len(layers)} layers; wanted one each; new_cache of"
                " the model or layer makes them"
            )
        for layer, one in zip(layers, cache, strict=True):
            if not isinstance(one, DenseCache):
                check_cache(one, _attention_of(layer).config)
        one_graph.check_device(x_B1M.device)
        one_graph.check_not_strict()
        self.engaged: dict[str, int] = {}
        shared: tuple[dict[object, Any], dict[str, int]] = ({}, self.engaged)
        with ExitStack() as undo, torch.inference_mode(False), torch.no_grad():
            self._layers = [
                LayerGraph(layer, place, weakref.ref(one), torch.zeros_like(x_B1M), shared)
                for place, (layer, one) in enumerate(zip(layers, cache, strict=True))
            ]
            self.steps = Steps(cache)
            undo.callback(self.steps.end)
            self.steps.check_room()
            with self.steps.unmoved():
                one_graph.warm_up(self._step_again, x_B1M.device)
                one_graph.refuse_host_loops(self.engaged)
                # of all, which never replay at once: each is as large as one layer's step
                pool = one_graph.new_pool()
                for one_layer in self._layers:
                    one_layer.record(pool)
            undo.pop_all()
        self.steps.replays = {id(c): own for c, own in zip(cache, self._layers, strict=True)}

    def close(self) -> None:
        """Free the graphs, and hand the caches back as ordinary ones with all that they took; a
        token that only some layers took is none. Does nothing the second time.
        """
        self._layers = []
        self.steps.end()

    def _step_again(self) -> None:
        """Run a step that the next one overwrites, as in `nsa.decode.graph`."""
        for one in self._layers:
            one.run()
        self.steps.forget_last()


class LayerGraph:
    """The step of ``layer``, the one at ``place``: x [B, 1, M] -> y [B, 1, M].

    ``shared`` by all: the Layouts that the first layer of a config makes, in its graph, and the
    counts of what was dispatched.
    """

    def __init__(
        self,
        layer: nn.Module,
        place: int,
        cache: weakref.ref[NSACache | DenseCache],
        x_B1M: Tensor,
        shared: tuple[dict[object, Any], dict[str, int]],
    ) -> None:
        self.layer, self._place, self._cache, self._x_B1M = layer, place, cache, x_B1M
        self._layouts, self._engaged = shared
        self._parts = LayerParts(layer, x_B1M.device)
        self._y_B1M: Tensor
        self._replay: Callable[[], None]

    def run(self) -> None:
        """The step as the host launches it."""
        # no open collection may count these steps, which append no tokens
        contextvars.Context().run(self._counted_run)

    def record(self, pool: Any) -> None:
        """Capture the step in memory of ``pool``."""
        self._replay = one_graph.capture(self.run, self._x_B1M.device, pool)

    def step(
        self, x_B1M: Tensor, cache: NSACache | DenseCache, num_tokens: object = None
    ) -> Tensor:
        """y of a replay for x, whose token ``cache`` then holds; ``num_tokens`` is refused."""
        own = self._x_B1M
        if num_tokens is not None or x_B1M.shape[1:2] != own.shape[1:2]:
            got = f"a chunk {tuple(x_B1M.shape[:2])}"
            raise not_a_step(got + (" with num_tokens" if num_tokens is not None else ""), 1)
        if (x_B1M.shape, x_B1M.dtype, x_B1M.device) != (own.shape, own.dtype, own.device):
            got, wanted = (f"{x.dtype} {tuple(x.shape)} on {x.device}" for x in (x_B1M, own))
            raise ValueError(
                f"got x {got} for a layer of LayerGraphs; wanted {wanted}; cast or move it, or make"
                " LayerGraphs for that batch"
            )
        self._parts.check(x_B1M)
        steps: Any = cache.steps
        steps.check_replay(cache, self._place)
        own.copy_(x_B1M)
        self._replay()
        steps.replayed(cache)
        return self._y_B1M

    def _counted_run(self) -> None:
        cache, layer = self._cache(), self.layer
        assert cache is not None
        if self._place == 0:
            self._layouts.clear()
            self._engaged.clear()
        attention = _attention_of(layer)
        with engagement.collect() as counted, one_graph.casting_anew(self._x_B1M.device):
            kind = (attention.config, cache.kv[0].shape[3])
            if kind not in self._layouts:
                x = self._x_B1M
                self._layouts[kind] = attention.layout(x, dtype=x.dtype, cache=cache)
            # hooks on the layer are called in each step, and not by its graph
            forward: Callable[..., Tensor] = type(layer).forward
            self._y_B1M = forward(layer, self._x_B1M, cache=cache, layout=self._layouts[kind])
        for name, count in counted.counts.items():
            self._engaged[name] = self._engaged.get(name, 0) + count


def _attention_of(layer: Any) -> Any:
    """That of a block, or the layer."""
    return getattr(layer, "attention", layer)


def _taken_apart(
    model: nn.Module | Sequence[nn.Module], batch: int
) -> tuple[Tensor, list[nn.Module]]:
    """x [batch, 1, M] of zeros as the layers take it, and the layers. ValueError for what is
    neither a model with blocks nor a list of NSAAttention.
    """
    embedding: Any = getattr(model, "embedding", None)
    if isinstance(model, nn.Module) and embedding is not None and hasattr(model, "blocks"):
        (dtype, device), dim = checks.compute_kind(embedding), embedding.embedding_dim
        blocks: Any = model.blocks
        layers: list[nn.Module] = [*blocks]
    elif (
        isinstance(model, Sequence | nn.ModuleList)
        and len(model) > 0
        and all(hasattr(one, "layout") and hasattr(one, "dim") for one in model)
    ):
        layers = [*model]
        (dtype, device), dim = checks.compute_kind(layers[0]), layers[0].dim
    else:
        raise ValueError(
            f"got a {type(model).__name__} for LayerGraphs; wanted a TinyLM, or a list of"
            " NSAAttention in the order of their calls; give the layers alone of another model"
        )
    return torch.zeros(batch, 1, int(dim), dtype=dtype, device=device), layers
