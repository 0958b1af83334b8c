"""DecodeGraph: a decode step of a TinyLM as one CUDA graph, so that a step costs the GPU's time and
not the host's.

B batch, T tokens of the step, V vocabulary.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from nsa import checks, engagement
from nsa.decode.cache import NSACache
from nsa.decode.dense_cache import DenseCache
from nsa.decode.graph_cache import Steps
from nsa.routing import EXPLICIT, SPECS, Path, RouteError

# before a capture: kernels compile, libraries make handles and workspaces, autotuners choose,
# optimizers make their state
WARM_STEPS = 3


class Steppable(Protocol):
    """A TinyLM or DenseLM, as far as a graph needs it."""

    @property
    def embedding(self) -> nn.Embedding: ...

    def __call__(self, ids_BT: Tensor, *, cache: Any) -> Tensor: ...


class StepGraph:
    """A forward of ``model`` with ``cache`` of ``tokens`` ids a row, captured once."""

    kind = ""  # the class's public name
    wanted = ""  # of ids

    def __init__(
        self, model: Steppable, cache: Sequence[NSACache | DenseCache], tokens: int
    ) -> None:
        if not hasattr(model, "embedding"):
            raise ValueError(
                f"model is {type(model).__name__}; wanted a TinyLM or DenseLM, whose step is"
                " captured; a layer alone is called as ever"
            )
        _, device = checks.compute_kind(model.embedding)
        check_device(device)
        check_not_strict()
        self._model, self._cache = model, list(cache)
        with ExitStack() as undo, torch.inference_mode(False), torch.no_grad():
            self.steps = Steps(self._cache, tokens)
            undo.callback(self.steps.end)
            self.steps.check_room()
            shape = self._cache[0].batch, tokens
            self._ids_BT = torch.zeros(shape, dtype=torch.int64, device=device)
            self._logits_BTV: Tensor
            self.engaged: dict[str, int] = {}
            with self.steps.unmoved():
                warm_up(self._step_again, device)
                refuse_host_loops(self.engaged)
                self._replay: Callable[[], None] | None = capture(self._step, device)
            undo.pop_all()

    def replayed(self, ids_BT: Tensor) -> Tensor:
        """Logits [B, T, V] of a replay with these ids."""
        if self._replay is None:
            raise ValueError(
                f"got ids for a closed {self.kind}; wanted an open one; make another of the"
                " same model and cache"
            )
        own = self._ids_BT
        if (ids_BT.shape, ids_BT.dtype, ids_BT.device) != (own.shape, own.dtype, own.device):
            got, wanted = (f"{x.dtype} {tuple(x.shape)} on {x.device}" for x in (ids_BT, own))
            raise ValueError(
                f"got ids {got}; wanted {wanted}: {self.wanted}; reshape or move them, or make a"
                " graph for that batch"
            )
        self.steps.check_room()
        own.copy_(ids_BT)
        self._replay()
        self.steps.count_replay()
        return self._logits_BTV

    def close(self) -> None:
        """Free the graph, and hand the cache back as an ordinary one with all that it took.

        Does nothing the second time.
        """
        self._replay = None
        self.steps.end()

    def _step(self) -> None:
        # no open collection may count these steps, which append no tokens
        contextvars.Context().run(self._counted_step)

    def _counted_step(self) -> None:
        with engagement.collect() as counted, casting_anew(self._ids_BT.device):
            self._logits_BTV = self._model(self._ids_BT, cache=self._cache)
        self.engaged = counted.counts

    def _step_again(self) -> None:
        """Run a step that the next one overwrites: a step from the same position writes all that
        this one wrote.
        """
        self._step()
        self.steps.forget_last()


class DecodeGraph(StepGraph):
    """One decode step, captured once and replayed for each token: ids int64 [B, 1] -> logits [B,
    vocab_size] in the weights' dtype.

    The step is a forward of ``model`` with ``cache`` (Eq. 5 for one query a row), which prefill has
    filled; rows may differ in length. The graph owns the cache from then on: its buffers grow to
    max_len at once and keep their addresses, each call takes one token a row, and
    ``NSACache.lengths`` counts it. `close` hands the cache back as an ordinary one. Several graphs
    may exist at once, each with its own cache. The weights are read in place: a replay uses
    in-place changes; autocast is fixed when the graph is made. Shapes and the route depend on the
    cache's max_len, not on what it holds, so a max_len far beyond what is needed costs time in
    every step.

    ``nsa.engagement`` counts Python's calls, and a replay makes none: ``engaged`` is what the
    capture dispatched, which every replay runs. ``NSACache.keys_read`` is of the last replay.
    Nothing is observed by ``nsa.statistics``.

    ValueError where the model is not on CUDA, NSA_STRICT_ASSERTS is on (it reads contents), no row
    of the cache has room, or its caches step already; RouteError for a path whose loop runs on the
    host. Where CUDA refuses the capture, its RuntimeError is raised and the cache is an ordinary
    one again.
    """

    kind, wanted = "DecodeGraph", "one token a row"

    def __init__(self, model: Steppable, cache: Sequence[NSACache | DenseCache]) -> None:
        super().__init__(model, cache, 1)

    def __call__(self, ids_B1: Tensor) -> Tensor:
        """Append ids int64 [B, 1] and return the logits [B, V] of what follows them.

        The result is the graph's own memory: the next call overwrites it, so clone what must
        persist. Neither waits for the device nor copies from the host. ValueError for ids of
        another shape, dtype or device (an id outside the vocabulary is not looked for, as in every
        forward on CUDA), where a row is full, and after `close`.
        """
        return self.replayed(ids_B1)[:, -1]


def casting_anew(device: torch.device) -> torch.autocast:
    """Autocast as it is set, but without its cache of cast weights: the graph must cast them
    itself, since the cache is freed.
    """
    kind = device.type
    return torch.autocast(
        kind,
        dtype=torch.get_autocast_dtype(kind),
        enabled=torch.is_autocast_enabled(kind),
        cache_enabled=False,
    )


def check_device(device: torch.device) -> None:
    """ValueError where ``device`` has no CUDA graphs."""
    if device.type != "cuda":
        raise ValueError(
            f"got a CUDA graph for a model on {device}; wanted one on 'cuda'; move it there, or"
            " leave cuda_graph off"
        )


def check_not_strict() -> None:
    """ValueError in strict mode."""
    if checks.is_strict():
        raise ValueError(
            "got NSA_STRICT_ASSERTS=1, which reads contents; wanted a step that reads none;"
            " unset it, or decode eagerly"
        )


def refuse_host_loops(engaged: dict[str, int]) -> None:
    """RouteError where a counter is that of a path which loops over rows in Python. Path reference
    does not where its softmax is explicit.
    """
    explicit = engaged.get(f"sel.{EXPLICIT}", 0)
    if slow := [
        name
        for name, count in engaged.items()
        if name.startswith("sel.") and name[4:] in tuple(Path) and SPECS[Path(name[4:])].slow
        if count > (explicit if name[4:] == Path.REFERENCE else 0)
    ]:
        wanted = ", ".join(path for path in Path if not SPECS[path].slow)
        raise RouteError(
            f"got {slow[0]}, whose loop runs on the host, in a graph; wanted one of {wanted}; make"
            " the model with such a path"
        )


def warm_up(work: Callable[[], None], device: torch.device) -> None:
    """Run ``work`` on a side stream, as PyTorch requires before a capture."""
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_STEPS):
                work()
        torch.cuda.current_stream().wait_stream(stream)


def new_pool() -> Any:
    """Memory for graphs that never replay at once."""
    return torch.cuda.graph_pool_handle()


def capture(work: Callable[[], None], device: torch.device, pool: Any = None) -> Callable[[], None]:
    """Call ``work`` once while a CUDA graph records it, and return what replays it. ``pool``:
    `new_pool`, of graphs that share memory, since they replay one after another.
    """
    with torch.cuda.device(device):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            work()
    replay: Callable[[], None] = graph.replay
    return replay
