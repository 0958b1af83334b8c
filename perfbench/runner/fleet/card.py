"""One card of a fleet, seen from the process that leads the run: what its node says of itself, and
an executor that measures there.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

from pydantic import ValidationError

from perfbench.errors import Exit, PerfbenchError
from perfbench.records import CardLine, Environment, Job, Replicate
from perfbench.runner.executor import MEMORY_BACK_S, START_TIMEOUT_S, CardLost

if TYPE_CHECKING:
    from nsa.routing import Capability

SLACK_S = 60.0  # of a busy node and a network
# `CardAgent.hello` looks at the card, and hashes the sources
HELLO_S = 120.0


class CardLink(Protocol):
    """A way to the agent of one card; ``node`` is its node, as the scheduler names it.

    ``cpu_card`` is what a node's CPUs are locked by, which have no UUID; '' is the host's name.
    """

    @property
    def node(self) -> str: ...
    @property
    def cpu_card(self) -> str: ...

    def ask(self, text: str, timeout_s: float) -> str:
        """The reply to one request; CardLost where the agent ends, does not answer within
        ``timeout_s``, or the link is closed.
        """
        ...

    def close(self) -> None:
        """End the agent and all that it started; safe from any thread, and twice."""
        ...


@dataclass(frozen=True, slots=True)
class CardFacts:
    """What an agent says of its node and card."""

    host: str
    environment: Environment
    capability: Capability
    versions: Mapping[str, str]
    warning: str = ""

    @classmethod
    def parsed(cls, reply: Mapping[str, Any]) -> Self:
        """CardLost where an agent of another version says something else."""
        from nsa.routing import Capability

        try:
            values = {**reply["capability"]}
            if values.get("sm") is not None:
                values["sm"] = tuple(values["sm"])
            return cls(
                str(reply["host"]),
                Environment.model_validate(reply["environment"]),
                Capability(**values),
                dict(reply["versions"]),
                str(reply["warning"]),
            )
        except (KeyError, TypeError, ValidationError) as error:
            raise CardLost(
                f"it answers in words of another perfbench ({type(error).__name__}: "
                f"{' '.join(str(error).split())[:120]})"
            ) from None


class FleetCard:
    """A card that has answered; ``measure`` stands in for the measuring function."""

    def __init__(self, link: CardLink) -> None:
        self._link = link
        self._one_at_a_time = threading.Lock()
        self.is_lost = False
        self.facts: CardFacts

    def greet(self, hello: Mapping[str, Any], timeout_s: float = HELLO_S) -> None:
        """Take the card; CardLost where it cannot be taken, with the node's own words."""
        try:
            reply = self.ask({"op": "hello", "cpu_card": self._link.cpu_card, **hello}, timeout_s)
            self.facts = CardFacts.parsed(reply)
        except PerfbenchError as error:
            raise CardLost(str(error)) from None

    @property
    def node(self) -> str:
        return self._link.node

    @property
    def line(self) -> CardLine:
        """As a run file has it."""
        environment = self.facts.environment
        return CardLine(
            node=self.node,
            device_uuid_sha256=environment.gpu_uuid_sha256,
            environment=environment,
        )

    @property
    def card(self) -> str:
        """As the rows name it (`Replicate.card`)."""
        return self.facts.environment.gpu_uuid_sha256 or self.node

    def __str__(self) -> str:
        uuid = self.facts.environment.gpu_uuid_sha256
        return f"card {uuid[:8]} of node {self.node}" if uuid else f"node {self.node}"

    def ask(self, request: Mapping[str, Any], timeout_s: float) -> Any:
        """What the agent answers; PerfbenchError as it raised it there, CardLost where there is no
        answer.
        """
        with self._one_at_a_time, ExitStack() as out_of_step:
            out_of_step.callback(self._lose)  # Ctrl-C included: its next answer would be this one's
            reply = json.loads(self._link.ask(json.dumps(request), timeout_s))
            out_of_step.pop_all()
        if "error" in reply:
            raise PerfbenchError(Exit(reply["exit_code"]), reply["error"])
        return reply["ok"]

    def close(self) -> None:
        self._link.close()

    def _lose(self) -> None:
        self.is_lost = True
        self.close()


class RemoteExecutor:
    """Measures on ``card``; ``slot`` is which of its executors, 0 but for pairs of versions.

    What the card's own machine says against measuring loses the card: the cells have others.
    """

    def __init__(self, card: FleetCard, slot: int = 0) -> None:
        self._card, self._slot = card, slot

    def new_block(self) -> None:
        # the server before it may have to be killed, its driver calls first
        self._ask("new_block", SLACK_S + START_TIMEOUT_S)

    def prepare(self, jobs: Sequence[Job]) -> None:
        timeout_s = START_TIMEOUT_S + SLACK_S + sum(job.timeout_s for job in jobs)
        self._ask("prepare", timeout_s, jobs=[job.model_dump() for job in jobs])

    def execute(self, job: Job) -> Replicate:
        # It prepares, then times, each at most `timeout_s`; and once more without its peers.
        once_s = 2 * job.timeout_s + START_TIMEOUT_S + MEMORY_BACK_S
        found = self._ask("execute", 2 * once_s + SLACK_S, job=job.model_dump())
        row = Replicate.model_validate(found)
        absent = {name: why for name, why in row.absent.items() if name != "node"}
        return row.model_copy(update={"node": self._card.node, "absent": absent})

    def close(self) -> None:
        """Nothing: the fleet ends its cards."""

    def _ask(self, operation: str, timeout_s: float, **values: Any) -> Any:
        try:
            return self._card.ask({"op": operation, "slot": self._slot, **values}, timeout_s)
        except PerfbenchError as error:
            if error.exit_code is not Exit.ENVIRONMENT:
                raise
            self._card.is_lost = True
            raise CardLost(" ".join(str(error).split())) from None
