"""The cards that measure one run: alike in what must agree before two speeds may be compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any

from perfbench.errors import Exit, PerfbenchError
from perfbench.records import Environment
from perfbench.runner.executor import CardLost, Executor
from perfbench.runner.fleet.agent import versions_here
from perfbench.runner.fleet.card import FleetCard, RemoteExecutor

SHOWN = 12  # characters of a digest
OPEN_S = 300.0  # a node checks the base's commit out
LEAVE_OUT = "it is left out"


class Fleet:
    """Cards that have answered, of one fingerprint and one source tree."""

    def __init__(self, cards: Sequence[FleetCard]) -> None:
        self.cards = list(cards)

    @property
    def alive(self) -> list[FleetCard]:
        return [card for card in self.cards if not card.is_lost]

    @property
    def environment(self) -> Environment:
        """Of its first card; the others differ in what no comparison asks for."""
        return self.cards[0].facts.environment

    def end(self) -> None:
        """End every agent; what one of them measures is lost."""
        for card in self.cards:
            card.is_lost = True
            card.close()

    def check_alive(self) -> FleetCard:
        """A card that can measure; ENVIRONMENT where every one is lost."""
        if not self.alive:
            raise PerfbenchError(
                Exit.ENVIRONMENT,
                f"every card of the fleet is lost ({', '.join(map(str, self.cards))}), wanted one"
                " that measures. Next: look at their nodes",
            )
        return self.alive[0]

    @contextmanager
    def versions(self, base: str) -> Iterator[FleetVersions]:
        """Executors of the commit ``base`` and of the nodes' own tree, on one card; CardLost where
        it is lost meanwhile, ENVIRONMENT where none is left.
        """
        card = self.check_alive()
        try:
            card.ask({"op": "versions", "base": base}, OPEN_S)
            yield FleetVersions(card)
        except CardLost as lost:
            card.close()
            raise CardLost(f"{card} is lost ({lost}): its pairs go on elsewhere") from None
        finally:
            if not card.is_lost:
                with suppress(CardLost):  # the next one who asks hears of it
                    card.ask({"op": "end_versions"}, OPEN_S)


class FleetVersions:
    """Both sides of pairs, on one card."""

    def __init__(self, card: FleetCard) -> None:
        self.environment = card.facts.environment
        self.executors: tuple[Executor, Executor] = (
            RemoteExecutor(card, 0),
            RemoteExecutor(card, 1),
        )


def greet_all(
    cards: Iterable[FleetCard],
    hello: Mapping[str, Any],
    wait_s: float,
    say: Callable[[str], None],
    *,
    most: int | None = None,
) -> Fleet:
    """The cards that can measure this run, at most ``most``; ``say`` names each one that cannot,
    with its reason. ``cards`` is read no further than needed: the next stands in for one that
    cannot.

    ENVIRONMENT with all reasons where none can.
    """
    offered, seen, left = iter(cards), list[FleetCard](), list[FleetCard]()
    reasons: dict[FleetCard, str] = {}
    while batch := list(islice(offered, None if most is None else most - len(left))):
        seen += batch
        left += batch
        refused = _greeted(batch, hello, wait_s)
        for judged in (_of_other_source, _unlike):
            refused |= judged([card for card in left if card not in refused])
        for card in refused:
            card.is_lost = True
            card.close()
        left = [card for card in left if card not in refused]
        reasons |= refused
    lines = [f"{card.node}: {' '.join(reasons[card].split())}" for card in seen if card in reasons]
    if not left:
        raise PerfbenchError(
            Exit.ENVIRONMENT,
            f"no card of the fleet can measure this: got {'; '.join(lines) or 'no card'}; wanted"
            " one that does. Next: mend what the lines name",
        )
    for line in lines:
        say(f"{line}; {LEAVE_OUT}")
    for card in left:
        if card.facts.warning:
            say(f"{card}: {card.facts.warning}")
    return Fleet(left)


def _greeted(
    cards: Sequence[FleetCard], hello: Mapping[str, Any], wait_s: float
) -> dict[FleetCard, str]:
    """Each may wait in a queue, so all are asked at once; the cards that cannot be taken, and
    why.
    """

    def greeted(number: int) -> str:
        try:
            cards[number].greet(hello, wait_s)
        except CardLost as lost:
            return str(lost)
        return ""

    with ThreadPoolExecutor(max(len(cards), 1)) as pool:
        found = list(pool.map(greeted, range(len(cards))))
    return {card: why for card, why in zip(cards, found, strict=True) if why}


def _of_other_source(cards: Sequence[FleetCard]) -> dict[FleetCard, str]:
    """Cards whose node has other files than this process."""
    here, found = versions_here(), {}
    for card in cards:
        theirs = card.facts.versions
        odd = [
            f"{name}/ has other files ({str(theirs.get(name))[:SHOWN]}) than here ({mine[:SHOWN]})"
            for name, mine in here.items()
            if theirs.get(name) != mine
        ]
        if odd:
            found[card] = f"another source tree, {'; '.join(odd)}: install the same commit there"
    return found


def _unlike(cards: Sequence[FleetCard]) -> dict[FleetCard, str]:
    """Cards that are not like most of them: one run has one fingerprint."""
    if not cards:
        return {}
    prints = {card: _must_agree(card) for card in cards}
    counts = Counter(tuple(sorted(one.items())) for one in prints.values())
    usual = dict(counts.most_common(1)[0][0])
    found = {}
    for card, mine in prints.items():
        if odd := [
            f"{key} {mine[key]}, not {usual[key]}" for key in usual if mine[key] != usual[key]
        ]:
            found[card] = f"unlike the other cards, {'; '.join(odd)}"
    return found


def _must_agree(card: FleetCard) -> dict[str, str]:
    environment = card.facts.environment
    settings = {**(environment.speed_variables or {}), **environment.nsa_settings}
    return {key: str(value) for key, value in environment.fingerprint().items()} | {
        "settings": " ".join(f"{name}={text}" for name, text in sorted(settings.items()))
    }
