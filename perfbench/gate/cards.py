"""Which card a cell was measured on, and what a comparison across cards is worth: none.

Two cards of one model differ by more than the processes of one, and no test here knows by how much.
So replicates on two cards are no sample of one speed; a stored baseline of another card is what the
variance between sessions stands for, never less than where none was measured; and pairs are rows of
one card (`coverage.are_adjacent`), which alone can call a cell slower.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING

from perfbench.gate.coverage import usable
from perfbench.gate.stats import ASSUMED_BETWEEN_SESSION_SD
from perfbench.records import Replicate, Run, SentinelLine, Status

if TYPE_CHECKING:
    from perfbench.records import Baseline, BaselineCell

SHOWN = 8  # characters of a card's hash


def cards_of(rows: Sequence[Replicate]) -> list[str]:
    """The cards of the rows that count, as `Replicate.card`; of a CPU of no fleet none."""
    return sorted({row.card for row in usable(rows) if row.card is not None})


def on_several(good: Sequence[Replicate]) -> str:
    """Why the replicates of a cell are no sample of one speed; '' where one card measured them."""
    by_card: dict[str, list[int]] = {}
    for row in good:
        if row.card is not None:
            by_card.setdefault(row.card, []).append(row.replicate)
    if len(by_card) < 2:
        return ""
    shown = "; ".join(
        f"{named(card, good)} has {', '.join(map(str, by_card[card]))}" for card in sorted(by_card)
    )
    return f"its replicates ran on {len(by_card)} cards ({shown}): measure it again on one"


def named(card: str, rows: Sequence[Replicate | SentinelLine]) -> str:
    """'card 1a2b3c4d of node n1', 'node n1' of a CPU's, 'card 1a2b3c4d' of no fleet."""
    row = next(row for row in rows if row.card == card)
    if row.device_uuid_sha256 is None:
        return f"node {row.node}"
    node = "" if row.node is None else f" of node {row.node}"
    return f"card {row.device_uuid_sha256[:SHOWN]}{node}"


def is_of_another_card(base: BaselineCell, good: Sequence[Replicate]) -> bool:
    """False where nobody recorded one of them."""
    here = cards_of(good)
    return bool(base.cards and here) and not set(base.cards) & set(here)


def between_session_sd(base: BaselineCell, good: Sequence[Replicate]) -> float:
    """The sd of ln tok/s between sessions that the screen adds: what was measured, where the card
    is the baseline's; of another card at least what is assumed where nothing was measured.
    """
    if base.night_log_sd is None:
        return ASSUMED_BETWEEN_SESSION_SD
    if is_of_another_card(base, good):
        return max(base.night_log_sd, ASSUMED_BETWEEN_SESSION_SD)
    return base.night_log_sd


def on_other_cards(rows: Mapping[str, Sequence[Replicate]], baseline: Baseline) -> list[str]:
    """A note on the cells whose baseline another card made."""
    other = sorted(
        cell_id
        for cell_id, base in baseline.cells.items()
        if base.cards and is_of_another_card(base, rows.get(cell_id, []))
    )
    if not other:
        return []
    count = f"{len(other)} cell{'s are' if len(other) > 1 else ' is'}"
    return [
        f"{count} compared with a baseline of another card, e.g. {other[0]}: the screen takes what"
        " two cards differ by for a difference between sessions, and only pairs on one card make a"
        " cell REGRESSED"
    ]


def moved_cards(run: Run, baseline: Baseline, band_pct: float) -> dict[str, str]:
    """Cards of a fleet that are not as fast as the baseline's, by their own sentinels -> what they
    say; the cells of other cards are compared.
    """
    found = {}
    for card, rates in sentinels_by_card(run).items():
        moved = []
        for name in sorted(set(rates) & set(baseline.sentinels)):
            change_pct = 100 * (median(rates[name]) / median(baseline.sentinels[name]) - 1)
            if abs(round(change_pct, 9)) > band_pct:
                moved.append(f"{name} {change_pct:+.2f} % (median of {len(rates[name])} blocks)")
        if moved:
            text = f"{named(card, run.sentinels)} is not as fast as the baseline's"
            found[card] = (
                f"{text}: {'; '.join(moved)}, the band is {band_pct:g} % either way; no commit"
                " changes this work: look for other load, clocks or another host"
            )
    return found


def sentinels_by_card(run: Run) -> dict[str, dict[str, list[float]]]:
    """Card of a fleet -> rates of each sentinel by block, as `comparable.sentinel_rates`."""
    last = {(line.card, line.name, line.block): line for line in run.sentinels}
    found: dict[str, dict[str, list[float]]] = {}
    for (card, name, _), line in sorted(last.items(), key=lambda item: (item[0][0] or "", item[0])):
        good = line.status is Status.OK and not line.is_throttled
        if card is not None and good and line.rate_per_s is not None:
            found.setdefault(card, {}).setdefault(name, []).append(line.rate_per_s)
    return found
