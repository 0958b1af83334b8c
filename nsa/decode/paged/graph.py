"""PagedGraph: a decode step of the largest batch as one CUDA graph, which stays while rows join,
leave, go back and change places.

B rows of the largest batch, T tokens of a step, V vocabulary.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nsa import checks, engagement
from nsa.decode import graph as one_graph
from nsa.decode.paged.cache import PagedCache


class PagedGraph:
    """One step of ``model`` over ``cache``, captured once: ids int64 [max_batch, T] -> logits
    [max_batch, T, vocab_size] in the weights' dtype.

    ``tokens`` is T, the most a row may take in a step: 1, or with speculative decoding the draft's
    and one. Each call plans, replays and counts; shapes are those of max_batch rows of max_len
    tokens, whatever there is. The graph reads the cache's tables and writes to its pages; between
    calls the cache is an ordinary PagedCache, whose rows may join, leave, be truncated, reordered
    or take a prompt without the graph. The logits of a token beyond ``num_tokens`` mean nothing.

    ``nsa.engagement`` counts the capture alone: ``engaged`` is what every replay runs. ValueError
    where the model is not on CUDA, NSA_STRICT_ASSERTS is on, or T is below 1 or more than the
    cache's rollback; RouteError for a path whose loop runs on the host.
    """

    def __init__(self, model: one_graph.Steppable, cache: PagedCache, *, tokens: int = 1) -> None:
        _, device = checks.compute_kind(model.embedding)
        one_graph.check_device(device)
        one_graph.check_not_strict()
        if isinstance(tokens, bool) or not 1 <= tokens <= cache.rows.rollback:
            raise ValueError(
                f"got tokens={tokens!r} a step; wanted 1 to {cache.rows.rollback}, the cache's"
                " rollback; give fewer, or make the cache with a larger one"
            )
        self._model, self._cache = model, cache
        self.engaged: dict[str, int] = {}
        self._logits_BTV: Tensor
        with torch.inference_mode(False), torch.no_grad(), cache.static():
            self._ids_BT = torch.zeros(cache.max_batch, tokens, dtype=torch.int64, device=device)
            # No row has a token: whatever runs now stores nothing.
            cache.clear_counts()
            one_graph.warm_up(self._step, device)
            one_graph.refuse_host_loops(self.engaged)
            self._replay: Callable[[], None] | None = one_graph.capture(self._step, device)

    def __call__(self, ids_BT: Tensor, *, num_tokens: int | Sequence[int] = 1) -> Tensor:
        """Append the first ``num_tokens[b]`` of ids int64 [max_batch, T] to each row (one number:
        to each that has joined), and return the logits [max_batch, T, V] of what follows each.

        The result is the graph's own memory: the next call overwrites it. Neither waits for the
        device. ValueError and OutOfPages as `PagedCache.plan`, also for ids of another shape, dtype
        or device, and after `close`; nothing is planned then.
        """
        if self._replay is None:
            raise ValueError(
                "got a token for a closed PagedGraph; wanted an open one; make another of the same"
                " model and cache"
            )
        own = self._ids_BT
        if (ids_BT.shape, ids_BT.dtype, ids_BT.device) != (own.shape, own.dtype, own.device):
            got, wanted = (f"{x.dtype} {tuple(x.shape)} on {x.device}" for x in (ids_BT, own))
            raise ValueError(
                f"got ids {got}; wanted {wanted}: a line for each place in the batch, joined or"
                " not; pad them, or make a graph for that shape"
            )
        most = num_tokens if isinstance(num_tokens, int) else max(num_tokens, default=0)
        if most > own.shape[1]:
            raise ValueError(
                f"got num_tokens={num_tokens} for a step of {own.shape[1]}; wanted no more; make"
                " the graph with tokens as large"
            )
        self._cache.plan(num_tokens)
        own.copy_(ids_BT)
        self._replay()
        self._cache.taken()
        return self._logits_BTV

    def close(self) -> None:
        """Free the graph; the cache stays as it is. Does nothing the second time."""
        self._replay = None

    def _step(self) -> None:
        # no open collection may count these steps, which append no tokens
        contextvars.Context().run(self._counted_step)

    def _counted_step(self) -> None:
        with engagement.collect() as counted, one_graph.casting_anew(self._ids_BT.device):
            self._logits_BTV = self._model(self._ids_BT, cache=self._cache.layers)
        self.engaged = counted.counts
