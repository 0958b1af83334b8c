"""Opens the fleet that a command names: its scheduler, its cards, what each is told first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

from perfbench.errors import Exit, PerfbenchError
from perfbench.machine import settings_to_adopt
from perfbench.runner.fleet.agent import AgentTarget
from perfbench.runner.fleet.card import FleetCard
from perfbench.runner.fleet.fleet import Fleet, greet_all
from perfbench.runner.fleet.ray_links import ray_links
from perfbench.runner.fleet.slurm_links import slurm_links
from perfbench.runner.fleet.wanted import CardsWanted

LOCAL = "local"
EXECUTORS = (LOCAL, "ray", "slurm")
WAIT_S = 600.0  # for a card in a queue; those that have answered by then measure


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """``executor`` is one of EXECUTORS; ``cards`` at most (of Slurm: so many are asked for);
    ``given`` are options of the scheduler, and `wait_s`. ``measure`` stands in for the measuring
    function.
    """

    executor: str = LOCAL
    cards: int | None = None
    given: Mapping[str, str] = field(default_factory=dict)
    folder: Path = Path("reports/runs")  # that the nodes of Slurm share
    measure: str = ""

    @classmethod
    def parsed(
        cls, executor: str, cards: int | None, words: list[str], folder: Path
    ) -> FleetOptions:
        """USAGE where one is not valid, or would be ignored."""
        if executor not in EXECUTORS:
            raise PerfbenchError(
                Exit.USAGE, f"--executor {executor!r} is none of {', '.join(EXECUTORS)}; name one"
            )
        if executor == LOCAL and (cards is not None or words):
            raise PerfbenchError(
                Exit.USAGE,
                "--cards and --executor-option are for a fleet, and this is --executor local. Next:"
                " add --executor ray or slurm, or leave them out",
            )
        given = {}
        for word in words:
            name, equals, text = word.partition("=")
            if not name or not equals:
                raise PerfbenchError(
                    Exit.USAGE,
                    f"--executor-option {word!r} is no KEY=VALUE; write e.g. address=auto",
                )
            given[name] = text
        return cls(executor, cards, given, folder)

    @property
    def is_fleet(self) -> bool:
        return self.executor != LOCAL


class _TargetLike(Protocol):
    """A matrix's `target:` section."""

    @property
    def gpu(self) -> str: ...
    @property
    def count(self) -> int: ...
    @property
    def is_cpu(self) -> bool: ...


@contextmanager
def open_fleet(
    options: FleetOptions, target: _TargetLike, say: Callable[[str], None]
) -> Iterator[Fleet]:
    """The cards of ``options`` that fit ``target``; every agent ends with the block.

    USAGE where a package is missing or an option is wrong, ENVIRONMENT where no card can measure.
    """
    given = dict(options.given)
    wait_s = _seconds(given.pop("wait_s", str(WAIT_S)))
    wanted = CardsWanted(target.gpu, target.count, target.is_cpu, options.cards)
    made = (
        ray_links(wanted, given)
        if options.executor == "ray"
        else slurm_links(wanted, options.folder, given)
    )
    hello = {
        "settings": settings_to_adopt(),
        "target": asdict(AgentTarget(target.gpu, target.count, target.is_cpu)),
        "measure": options.measure,
    }
    with made as links:
        cards = (FleetCard(link) for link in links)
        yield greet_all(cards, hello, wait_s, say, most=options.cards)


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise PerfbenchError(
            Exit.USAGE, f"--executor-option wait_s={text!r} is no number of seconds; write e.g. 600"
        )
    return found
