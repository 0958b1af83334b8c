"""Cards of a Ray cluster: an actor for each, on a node that has what the matrix's target names."""

from __future__ import annotations

import logging
import signal
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from perfbench.errors import Exit, PerfbenchError
from perfbench.machine import matches
from perfbench.runner.executor import CardLost
from perfbench.runner.fleet.agent import CardAgent
from perfbench.runner.fleet.wanted import CardsWanted, missing_package

TYPE = "accelerator_type:"  # of a node's resource that names its GPUs, as Ray found them
END_S = 5.0


class RayLink:
    """An actor."""

    def __init__(self, ray: Any, actor: Any, node: str) -> None:
        self._ray, self._actor, self.node, self.cpu_card = ray, actor, node, node
        self._asking = threading.Event()
        self._closed = False

    def ask(self, text: str, timeout_s: float) -> str:
        self._asking.set()
        try:
            found: str = self._ray.get(self._actor.handle.remote(text), timeout=timeout_s)
        except self._ray.exceptions.GetTimeoutError:
            self.close()
            raise CardLost(f"no answer within {timeout_s:.0f} s") from None
        except self._ray.exceptions.RayError as error:
            raise CardLost(_last_words(str(error))) from None
        self._asking.clear()
        return found

    def close(self) -> None:
        """An idle actor lets go of its card first; one that measures is killed, and its server ends
        with the pipe to it.
        """
        if self._closed:
            return
        self._closed = True
        with suppress(self._ray.exceptions.RayError):
            if not self._asking.is_set():
                self._ray.get(self._actor.close.remote(), timeout=END_S)
        self._ray.kill(self._actor, no_restart=True)


@contextmanager
def ray_links(wanted: CardsWanted, options: Mapping[str, str]) -> Iterator[Iterator[RayLink]]:
    """An actor for each card that ``wanted`` fits, which may still wait for its resources. Each is
    made when it is asked for, since it takes its card; they end with the block. ``options``:
    `address` of the cluster, by default the one that Ray finds.

    ENVIRONMENT where there is no cluster, or no node with such a card.
    """
    given = dict(options)
    address = given.pop("address", "auto")
    if given:
        raise PerfbenchError(
            Exit.USAGE,
            f"--executor-option {'; '.join(sorted(given))}: Ray takes address alone. Next: leave"
            " the others out",
        )
    with _connected(address) as ray:
        links: list[RayLink] = []
        try:
            yield _made(ray, _nodes(ray, wanted), wanted, links)
        finally:
            for link in links:
                link.close()


def _made(
    ray: Any, nodes: Sequence[tuple[dict[str, Any], str]], wanted: CardsWanted, links: list[RayLink]
) -> Iterator[RayLink]:
    """A link for each of ``nodes``, which it adds to ``links`` before anybody asks it."""
    for node, name in nodes:
        links.append(RayLink(ray, _actor(ray, node, wanted), name))
        yield links[-1]


@contextmanager
def _connected(address: str) -> Iterator[Any]:
    try:
        with _own_signals():  # Ray sets a handler at its import
            import ray
            import ray.exceptions
    except ImportError as error:
        raise missing_package("ray", "ray", error) from None
    if ray.is_initialized():
        yield ray
        return
    try:
        with _own_signals():
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        why = " ".join(str(error).split())[:300]
        raise PerfbenchError(
            Exit.ENVIRONMENT,
            f"no Ray cluster at {address!r}: {why}. Next: `ray start --head`, or --executor-option"
            " address=HOST:PORT",
        ) from None
    try:
        yield ray
    finally:
        ray.shutdown()


@contextmanager
def _own_signals() -> Iterator[None]:
    """The handlers of this program stay, whatever a library sets meanwhile."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def _nodes(ray: Any, wanted: CardsWanted) -> list[tuple[dict[str, Any], str]]:
    """(node, its name) once for each card; ENVIRONMENT where none fits."""
    alive = sorted((one for one in ray.nodes() if one["Alive"]), key=lambda one: one["NodeID"])
    counts = Counter(one["NodeName"] for one in alive)
    found = [
        (one, one["NodeName"] if counts[one["NodeName"]] == 1 else _unlike(one))
        for one in alive
        for _ in range(num_cards(one["Resources"], wanted))
    ]
    if not found:
        seen = "; ".join(f"{one['NodeName']} ({_shown(one['Resources'])})" for one in alive)
        raise PerfbenchError(
            Exit.ENVIRONMENT,
            f"no node of the Ray cluster has {wanted}: got {seen or 'no node'}. Next: start Ray on"
            " such a node, or take another matrix",
        )
    return found


def num_cards(resources: Mapping[str, float], wanted: CardsWanted) -> int:
    """How many measuring processes a node may hold at a time: one for each group of ``count`` GPUs,
    if they are the wanted ones; of a CPU one a node, if it gives any.
    """
    if wanted.is_cpu:
        return int(resources.get("CPU", 0) >= 1)
    types = [name.removeprefix(TYPE) for name in resources if name.startswith(TYPE)]
    if types and not any(matches(wanted.gpu, one) or matches(one, wanted.gpu) for one in types):
        return 0
    return int(resources.get("GPU", 0)) // wanted.count


def _unlike(node: Mapping[str, Any]) -> str:
    return f"{node['NodeName']}-{node['NodeID'][:8]}"


def _shown(resources: Mapping[str, float]) -> str:
    types = [name.removeprefix(TYPE) for name in sorted(resources) if name.startswith(TYPE)]
    gpus = int(resources.get("GPU", 0))
    return f"{gpus} x {'/'.join(types) or 'GPU'}" if gpus else "no GPU"


def _actor(ray: Any, node: Mapping[str, Any], wanted: CardsWanted) -> Any:
    """All CPUs of a node whose CPUs are measured, so that Ray puts nothing else there."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    asked: dict[str, Any] = (
        {"num_cpus": node["Resources"]["CPU"]}
        if wanted.is_cpu
        else {"num_gpus": wanted.count, "num_cpus": 0}
    )
    here = NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False)
    agent = ray.remote(max_restarts=0, max_task_retries=0, scheduling_strategy=here, **asked)
    return agent(CardAgent).remote()


def _last_words(text: str) -> str:
    """One line of what Ray says: of an exception on the node its own."""
    lines: Sequence[str] = [line for line in text.splitlines() if line.strip()]
    causes = [line for line in lines if "Error: " in line or "unexpectedly" in line]
    return " ".join((causes or lines or ["the actor ended"])[-1].split())[:300]
