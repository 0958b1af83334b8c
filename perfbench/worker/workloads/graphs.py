"""How a step runs: eagerly, from a compiled graph, or replayed from a CUDA graph; and how it is
then known what ran.

Nothing is counted inside a compiled graph nor in a replay. What a replay runs was counted when it
was captured. What a compiled graph holds is read from the graph itself: which functions of nsa its
nodes came from, for each layer. Which kernels those became, the profiler says.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
import torch._dynamo
from torch import Tensor, fx
from torch._guards import CompileContext

from nsa import engagement
from nsa.routing import BranchRoute, Path, Route
from perfbench import older_nsa
from perfbench.worker import operators

Body = Callable[..., None]
Batches = Iterator[tuple[Tensor, ...]]
# The function of nsa/dispatch.py that is the door of each branch.
_DOORS: Mapping[str, str] = {
    "cmp": "compressed",
    "sel": "selected",
    "win": "window",
    "score": "choose",
    "dense": "dense",
}
_FRAME = re.compile(r'File "[^"]*\bnsa[/\\]([\w/\\]+)\.py", line \d+, in (\w+)')


def eager(body: Body, batches: Batches) -> Callable[[], None]:
    def step() -> None:
        body(*next(batches))

    return step


class Grapher(Protocol):
    """What makes a graph of work: a seam, because only a GPU has graphs."""

    def warm(self, work: Callable[[], None]) -> None:
        """Run ``work`` as often as it takes until it is fit to be captured."""
        ...

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Call ``work`` once and return what replays it."""
        ...


class CudaGrapher:
    def warm(self, work: Callable[[], None]) -> None:
        older_nsa.warm_up(work, self._device())

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        return older_nsa.capture(work, self._device())

    def _device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())


class AtCapture:
    """What a step called while it was captured, since a replay calls nothing."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}  # counters of one replay
        self.operators: dict[str, int] = {}  # calls by name, as operators.counted
        # the blocks of each call of a replay, in the graph's memory; None of an older nsa
        self.blocks: list[Tensor | None] | None = None

    def watch(self, capture: Callable[[], None], *, names_operators: bool) -> None:
        """Record what ``capture`` calls; ``names_operators``: by name too, which takes a second."""
        with engagement.collect() as counted, older_nsa.collect_blocks() as self.blocks:
            if names_operators:
                self.operators = operators.recorded(capture)
            else:
                capture()
        self.counts = counted.counts


class Captured(AtCapture):
    """Replays ``body`` from a graph, the next batch copied into its inputs before each replay;
    captures at the first call.

    What a graph cannot hold, a sync with the host above all, is the RuntimeError of that call;
    nothing runs eagerly instead. ``names_operators`` as in `AtCapture.watch`.
    """

    def __init__(
        self, body: Body, batches: Batches, grapher: Grapher, *, names_operators: bool = False
    ) -> None:
        super().__init__()
        self._body, self._batches, self._grapher = body, batches, grapher
        self._names_operators = names_operators
        self._replay: Callable[[], None] | None = None
        self.inputs: tuple[Tensor, ...] = ()  # which a replay reads, as the last one read them

    def __call__(self) -> None:
        if self._replay is None:
            self._replay = self._captured()
        with torch.no_grad():
            for own, fresh in zip(self.inputs, next(self._batches), strict=True):
                own.copy_(fresh)
        self._replay()

    def close(self) -> None:
        """End the graph: NCCL's communicator waits, where it is ended, for those that hold it."""
        self._replay = None

    def _captured(self) -> Callable[[], None]:
        self.inputs = tuple(
            x.detach().clone().requires_grad_(x.requires_grad) for x in next(self._batches)
        )

        def work() -> None:
            self._body(*self.inputs)

        self._grapher.warm(work)
        replays: list[Callable[[], None]] = []

        def capture() -> None:
            replays.append(self._grapher.capture(work))

        self.watch(capture, names_operators=self._names_operators)
        return replays[0]


class Compiled:
    """A module compiled as one graph, which raises where it cannot be one; remembers what that
    graph calls of nsa.

    Within DistributedDataParallel PyTorch splits the graph at the borders of gradient buckets, so
    that a bucket is reduced while the next one is computed: its parts are of one compilation, and
    add up. ``runs``: how often a step runs it, as the graph of a block that all layers share.
    """

    def __init__(
        self, module: Callable[..., Any], backend: str = "inductor", *, runs: int = 1
    ) -> None:
        self._compile, self._runs = torch._dynamo.lookup_backend(backend), runs
        # by compilation, of each node: the layer, and its frames in nsa
        self._graphs: dict[str, list[tuple[str, str]]] = {}
        self._operators: Counter[str] = Counter()
        self.run: Callable[..., Tensor] = torch.compile(
            module, backend=self._read, fullgraph=True, dynamic=False
        )

    def _read(self, graph: fx.GraphModule, example_inputs: list[Tensor]) -> Any:
        compilation = str(CompileContext.current_compile_id())
        self._graphs.setdefault(compilation, []).extend(
            (_layer(node), node.stack_trace or "")
            for node in graph.graph.nodes
            if node.op.startswith("call_")
        )
        self._operators.update(operators.in_graph(graph))
        return self._compile(graph, example_inputs)

    @property
    def operators(self) -> dict[str, int]:
        """What a step's runs call by name, as operators.in_graph."""
        return {name: self._runs * count for name, count in sorted(self._operators.items())}

    def counts(self, route: Route) -> dict[str, int]:
        """Counters of a step's runs: for each branch of ``route`` the layers whose nodes came
        through its door and implementation.

        A branch that no layer holds is left out. RuntimeError where a second graph was compiled,
        and another one may have run.
        """
        if len(self._graphs) != 1:
            raise RuntimeError(
                f"{len(self._graphs)} graphs were compiled for one shape; wanted 1; fix what makes"
                " it recompile"
            )
        (nodes,) = self._graphs.values()
        counts: dict[str, int] = {}
        for branch in route.branches:
            layers = {layer for layer, stack in nodes if _came_through(branch, stack)}
            due = self._runs * len(layers)
            counts |= dict.fromkeys(branch.counters, due) if layers else {}
        return counts


def _layer(node: fx.Node) -> str:
    modules = list((node.meta.get("nn_module_stack") or {}).values())
    return str(modules[-1][0]) if modules else ""


def _came_through(branch: BranchRoute, stack: str) -> bool:
    """Whether the frames of a node pass the branch's door and, of the selected branch, the path's
    own file.
    """
    frames = [(file.replace("\\", "/"), function) for file, function in _FRAME.findall(stack)]
    if ("dispatch", _DOORS[branch.branch]) not in frames:
        return False
    files = {file for file, _ in frames}
    if branch.branch == "sel" and branch.implementation in tuple(Path):
        return any(older_nsa.is_of_path(file, branch.implementation) for file in files)
    return any(file.startswith("ops/") for file in files)
