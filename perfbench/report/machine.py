"""The machine in the report: is it the one of the baseline, is it as fast as it was, did it stay
cool.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from statistics import median

from perfbench.gate import (
    Judgement,
    cards_of,
    comparability_key,
    environment_differences,
    named,
    on_several,
    rows_by_cell,
    sentinel_rates,
    sentinels_by_card,
    usable,
)
from perfbench.records import Run, SentinelLine, Status, Telemetry
from perfbench.report.context import ReportContext
from perfbench.report.tables import without_empty
from perfbench.text import NULL, cell_code, escape, number, signed_pct

MAX_BLOCKS = 8  # columns; more are shown as their range
SCALES = {"FLOP": (1e12, "TFLOP/s"), "byte": (1e9, "GB/s")}


def facts(run: Run, judgement: Judgement, context: ReportContext) -> list[str]:
    """Markdown lines; what is not known is stated."""
    lines = []
    if context.comparability_key is None:
        known = (
            "its file is not at hand here"
            if judgement.baseline is not None
            else "there is no baseline"
        )
        lines.append(f"Not compared with the machine of {context.name}: {known}.")
    elif changed := environment_differences(
        comparability_key(run.manifest), context.comparability_key
    ):
        lines.append(f"Not the environment of {context.name} (then to now): {escape(changed)}")
    else:
        lines.append(
            "GPU, driver, CUDA, torch, triton, flash provider and method are those of"
            f" {context.name}."
        )
    lines += [escape(note) for note in judgement.notes]
    return lines + fleet_lines(run) + _telemetry(run)


def fleet_lines(run: Run) -> list[str]:
    """The cards of a fleet with their cells, which moved, and which have replicates on two."""
    joined = [*run.manifest.cards, *(card for one in run.resumed for card in one.cards)]
    mixed = {cell_id: on_several(usable(rows)) for cell_id, rows in rows_by_cell(run).items()}
    several = [cell_id for cell_id, why in mixed.items() if why]
    if not joined:
        count = f"{len(several)} of {len(mixed)} cells have replicates on two cards"
        return [f"Resumed on another card: {count}, which no interval knows."] if several else []
    cells: dict[str, set[str]] = {}
    for cell_id, rows in rows_by_cell(run).items():
        for card in cards_of(rows):
            cells.setdefault(card, set()).add(cell_id)
    named = {line.device_uuid_sha256 or line.node: line for line in joined}
    shown = [
        f"{escape(line.node)}{f' (uuid sha256 {uuid[:16]})' if uuid else ''}:"
        f" {len(cells.get(card, ()))} cells"
        for card, line in named.items()
        for uuid in [line.device_uuid_sha256]
    ]
    lines = [f"A fleet of {len(named)} cards, each cell on one: {'; '.join(shown)}."]
    lines += [
        f"Moved at {one.resumed_utc}, all replicates measured again on one other card:"
        f" {', '.join(map(cell_code, one.moved))}, because {escape(one.reason)}."
        for one in run.resumed
        if one.moved
    ]
    return lines + [
        f"{cell_code(cell_id)} is no measurement of one card: {escape(mixed[cell_id])}."
        for cell_id in several
    ]


def sentinels(
    run: Run, judgement: Judgement, context: ReportContext
) -> tuple[list[str], list[str]]:
    """(header, lines) of the sentinels' table; both empty where the run has none."""
    names = list(dict.fromkeys([*run.manifest.sentinels, *(line.name for line in run.sentinels)]))
    if not names:
        return [], []
    is_fleet = bool(run.manifest.cards)
    last = {
        (line.name, line.card if is_fleet else None, line.block): line for line in run.sentinels
    }
    blocks = sorted({block for _, _, block in last})
    single = len(blocks) <= MAX_BLOCKS
    head = [
        "sentinel",
        "unit",
        *([f"block {block}" for block in blocks] if single else ["blocks", "least", "most"]),
    ]
    head += ["median", context.name, "change", "band", "in band"]
    rates, by_card = sentinel_rates(run), sentinels_by_card(run)
    cards = sorted({card or "" for _, card, _ in last}) if is_fleet else [""]
    lines = []
    for name, card in itertools.product(names, cards):
        units = [line.unit for line in run.sentinels if line.name == name]
        scale, unit = SCALES.get(units[0], (1.0, units[0])) if units else (1.0, NULL)
        mine = by_card.get(card, {}).get(name, []) if is_fleet else rates.get(name, [])
        shown = f"{name}, {named(card, run.sentinels)}" if card else name
        each = (
            [_block(last.get((name, card or None, block)), scale) for block in blocks]
            if single
            else _range(mine, scale)
        )
        against = _against(mine, context.sentinels, name, scale, judgement)
        lines.append([escape(shown), unit, *each, *against])
    head, lines = without_empty(head, lines, left=2)
    return head, [f"| {' | '.join(line)} |" for line in lines]


def no_sentinels(context: ReportContext) -> str:
    """What stands in place of their table."""
    if context.paired:
        return (
            "No sentinel ran, and none is needed: both sides share the session, in turns on one"
            " machine, so what slows it slows both."
        )
    return "No sentinel ran, so a slower machine cannot be distinguished from slower code."


def _block(line: SentinelLine | None, scale: float) -> str:
    if line is None:
        return NULL
    if line.status is not Status.OK or line.rate_per_s is None:
        return line.status.value
    return number(line.rate_per_s / scale, 4) + (" (throttled)" if line.is_throttled else "")


def _range(rates: list[float], scale: float) -> list[str]:
    return (
        [str(len(rates)), *(number(one / scale, 4) for one in (min(rates), max(rates)))]
        if rates
        else ["0", NULL, NULL]
    )


def _against(
    mine: list[float],
    then: Mapping[str, list[float]],
    name: str,
    scale: float,
    judgement: Judgement,
) -> list[str]:
    band = judgement.policy.sentinel_band_pct
    now = median(mine) if mine else None
    theirs = median(then[name]) if then.get(name) else None
    change = None if now is None or theirs is None else 100 * (now / theirs - 1)
    inside = NULL if change is None else "yes" if abs(round(change, 9)) <= band else "**no**"
    shown = [number(None if value is None else value / scale, 4) for value in (now, theirs)]
    return [*shown, signed_pct(change), f"± {band:g} %", inside]


def _telemetry(run: Run) -> list[str]:
    timed = [row for row in run.replicates if row.status is Status.OK]
    seen: list[Telemetry] = [row.telemetry for row in timed if row.telemetry is not None]
    hot = sum(row.is_throttled for row in timed)
    parts = []
    for what, unit, values in (
        ("SM clock", "MHz", [one.sm_clock_mhz for one in seen]),
        ("temperature", "C", [one.temperature_c for one in seen]),
        ("power", "W", [one.power_w for one in seen]),
    ):
        known = [value for value in values if value is not None]
        if known:
            low, high = f"{min(known):,.0f}", f"{max(known):,.0f}"
            parts.append(f"{what} {low if low == high else f'{low} to {high}'} {unit}")
    text = ", ".join(parts) or "no telemetry of the device"
    cold = f"{hot} of {len(timed)} timed replicates throttled and do not count"
    return [
        f"While timing: {text};"
        f" {cold if hot else 'none throttled' if seen else 'throttling is not known'}."
    ]
