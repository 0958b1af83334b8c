"""The operators that a step called, from a profiler's events, against those that its Route makes
due: every operator of nsa and PyTorch's attention, exactly.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import fx
from torch.profiler import ExecutionTraceObserver

from nsa.config import ModelConfig
from nsa.routing import Route
from perfbench import older_nsa
from perfbench.matrix import (
    COUNTED_INSIDE,
    INSIDE,
    NAMESPACE,
    SDPA,
    OperatorCalls,
    operator_calls,
)
from perfbench.records import Job, Peer

_CHILDREN = frozenset({SDPA, *(name for names in COUNTED_INSIDE.values() for name in names)})
_MOST_NAMED = 4  # differences in one sentence


def due(job: Job, model: ModelConfig, route: Route) -> OperatorCalls | None:
    """What one step of ``job`` calls; None for an older nsa, whose formulas bear no names."""
    if not older_nsa.names_its_operators() and not job.axes.is_peer:
        return None
    return operator_calls(route, job.axes, model, workspace_bytes=older_nsa.workspace_bytes())


@dataclass(frozen=True, slots=True)
class Calls:
    """``due``, and what is known besides the profiled step: ``captured``, the calls while its graph
    was captured, of which a replay shows none; ``graph``, the nodes of what was compiled; ``peer``,
    what serves the step in nsa's place.
    """

    due: OperatorCalls
    captured: Mapping[str, int] | None = None
    graph: Mapping[str, int] | None = None
    peer: Peer | None = None

    def seen(self, profiled: Mapping[str, int]) -> Mapping[str, int]:
        return profiled if self.captured is None else self.captured

    def fault(self, profiled: Mapping[str, int]) -> str:
        """How the calls differ from those that are due; empty where they do not."""
        wanted, got = self.due.exact, self.seen(profiled)
        if self.graph is None:
            return differences(wanted, got, self.due.at_least)
        # A compiler makes its own of SDPA, which the graph has by name.
        wanted, got = ({n: c for n, c in one.items() if n != SDPA} for one in (wanted, got))
        return "; ".join(
            filter(
                None,
                (
                    differences(wanted, got, self.due.at_least),
                    differences(self.due.in_graph, self.graph),
                ),
            )
        )


def is_counted(name: str) -> bool:
    return name.startswith(NAMESPACE) or name in _CHILDREN


def counted(events: Iterable[Any]) -> dict[str, int]:
    """Calls by name of Kineto's host ``events``: those of nsa, SDPA, and what COUNTED_INSIDE names
    within them.
    """
    spans: dict[int, list[tuple[int, int, str]]] = defaultdict(list)
    for event in events:
        if is_counted(name := event.name()):
            begin = event.start_ns()
            spans[event.start_thread_id()].append((begin, -(begin + event.duration_ns()), name))
    found: Counter[str] = Counter()
    for of_thread in spans.values():
        inside: list[tuple[int, str]] = []  # operators of nsa that are open, and when each ends
        for begin, minus_end, name in sorted(of_thread):
            while inside and inside[-1][0] <= begin:
                inside.pop()
            _count(found, name, inside[-1][1] if inside else None)
            if name.startswith(NAMESPACE):
                inside.append((-minus_end, name))
    return dict(sorted(found.items()))


def recorded(work: Callable[[], None]) -> dict[str, int]:
    """As `counted`, of one call of ``work``, without Kineto: that would trace the device during a
    capture, or, begun without a device, trace none later.
    """
    with TemporaryDirectory(prefix="perfbench-") as folder, older_nsa.shown_to_observers():
        file = Path(folder) / "operators.json"
        observer = ExecutionTraceObserver().register_callback(str(file))
        observer.start()
        try:
            work()
        finally:
            observer.stop()
            observer.unregister_callback()
        nodes = json.loads(file.read_text(encoding="utf-8"))["nodes"]
    by_id = {node["id"]: node for node in nodes}
    found: Counter[str] = Counter()
    for node in nodes:
        if not is_counted(node["name"]):
            continue
        around = by_id.get(node["ctrl_deps"])
        while around is not None and not around["name"].startswith(NAMESPACE):
            parent = by_id.get(around["ctrl_deps"])
            around = None if parent is around else parent
        _count(found, node["name"], None if around is None else around["name"])
    return dict(sorted(found.items()))


def _count(found: Counter[str], name: str, around: str | None) -> None:
    """One call of ``name``, ``around`` it the innermost operator of nsa."""
    if name.startswith(NAMESPACE) or name == SDPA:
        found[name] += 1
    if around is not None and (name == SDPA or name in COUNTED_INSIDE.get(around, ())):
        found[around + INSIDE + name] += 1


def in_graph(graph: fx.GraphModule) -> dict[str, int]:
    """Nodes of a graph that Dynamo traced which call an operator of nsa, or SDPA."""
    found: Counter[str] = Counter()
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is torch.nn.functional.scaled_dot_product_attention:
            found[SDPA] += 1
        name = getattr(node.target, "_qualified_op_name", None) or str(node.target)
        if name.startswith(NAMESPACE):
            found[name] += 1
    return dict(sorted(found.items()))


def differences(
    wanted: Mapping[str, int], got: Mapping[str, int], at_least: frozenset[str] = frozenset()
) -> str:
    """'NAME was called G times, W are due; ...'; empty where every name has its count."""
    odd = [
        name
        for name in sorted({*wanted, *got})
        if (count := got.get(name, 0)) != (least := wanted.get(name, 0))
        and not (name in at_least and count > least)
    ]
    shown = [
        f"{name} was called {got.get(name, 0)} times, {wanted.get(name, 0)} are due"
        for name in odd[:_MOST_NAMED]
    ]
    if len(odd) > _MOST_NAMED:
        shown.append(f"and {len(odd) - _MOST_NAMED} more names differ")
    return "; ".join(shown)
