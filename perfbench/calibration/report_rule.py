"""The rule in the calibration's Markdown: what it makes of simulated sessions and drops, of stored
samples, and of interleaved pairs of one commit with itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from perfbench.records import Verdict
from perfbench.text import NULL, cell_code, escape

if TYPE_CHECKING:
    from perfbench.calibration.aa_pairs import RealPair
    from perfbench.calibration.calibration import Calibration
    from perfbench.calibration.certify import Certificate, NullRow, PowerRow, Rate

REASON_CHARS = 90  # of a cell without a speed; its run has the whole
HOW = (
    "`perfbench ab HEAD HEAD MATRIX`, planted with `--inject slowdown=3%@CELL`; `--pair FOLDER`"
    " passes it to `perfbench calibrate`"
)
MISSED, BLIND, OPEN = "missed", "BLIND", "open: too few drops to decide"


def sections(certificate: Certificate) -> list[str]:
    """The lines of its four sections."""
    return [*_null(certificate), *_power(certificate), *_stored(certificate), *_modes(certificate)]


def shortfalls(certificate: Certificate) -> list[str]:
    """List items for the headline: the worlds whose drops of min_effect are missed, BLIND or open,
    each with its worst noise.
    """
    policy = certificate.policy
    rows = [row for row in certificate.power if row.drop_pct == policy.min_effect_pct]
    worlds = len({row.world.name for row in rows})
    missed, blind, open_ = (
        [row for row in rows if _reached(row, certificate) == how] for how in (MISSED, BLIND, OPEN)
    )
    worse = {row.world.name for row in (*missed, *blind)}
    wanted = f"the wanted {pct(policy.power)}"
    items = []
    if missed:
        items.append(
            f"- **{wanted[0].upper()}{wanted[1:]} is missed in {_of(missed)} of the {worlds}"
            f" worlds**: {_worst(missed)}."
        )
    if blind:
        items.append(
            f"- **BLIND on wall time in {_of(blind)} of the {worlds} worlds**, not judged by it:"
            f" {_most_blind(blind)}."
        )
    if few := [row for row in open_ if row.world.name not in worse]:
        items.append(
            f"- Too few drops to prove {wanted} in {_of(few)} of the {worlds} worlds:"
            f" {_worst(few)}."
        )
    return items or [
        f"- {wanted[0].upper()}{wanted[1:]} is reached in every one of the {worlds} worlds."
    ]


def _of(rows: Iterable[PowerRow]) -> int:
    return len({row.world.name for row in rows})


def _worst(rows: Sequence[PowerRow]) -> str:
    """The row of least power of each world, the worst world first; sd is between processes."""
    return _by_world(sorted(rows, key=lambda one: one.power.share), lambda row: row.power)


def _most_blind(rows: Sequence[PowerRow]) -> str:
    return _by_world(sorted(rows, key=lambda one: -one.blind.share), lambda row: row.blind)


def _by_world(rows: Sequence[PowerRow], rate: Callable[[PowerRow], Rate]) -> str:
    """The first row of each world."""
    found: dict[str, PowerRow] = {}
    for row in rows:
        found.setdefault(row.world.name, row)
    return "; ".join(
        f'"{escape(name)}" {pct(rate(row).share)} ({counts(rate(row))},'
        f" sd {row.process_sd_pct:g} %)"
        for name, row in found.items()
    )


def _null(certificate: Certificate) -> list[str]:
    rows = [
        [
            escape(row.world.name),
            counts(row.red),
            pct(row.red.upper),
            f"{row.suspect.hits:,}",
            pct(row.screened.share),
            pct(row.blind.share),
            NULL if row.mean_pairs is None else f"{row.mean_pairs:.1f}",
            f"{row.p_values:,}",
            num(row.ks_distance),
            num(row.ks_p),
            pct(row.below_hundredth.share) if row.below_hundredth.trials else NULL,
        ]
        for row in certificate.null
    ]
    head = [
        "world",
        "false alarms",
        "at most",
        "of them SUSPECT",
        "confirmed or BLIND",
        "BLIND",
        "pairs, mean",
        "p-values",
        "KS distance",
        "KS p",
        "p < 0.01",
    ]
    return [
        "## Sessions in which nothing got slower",
        "",
        (
            "A false alarm is a cell REGRESSED, or SUSPECT, which fails too. Below *alone* one"
            " cell is confirmed in every session, whatever the screen says, with the whole of"
            " alpha_confirm, and the machine's state goes on from each of its processes to the"
            " next. The p-values are those of the first look; under the null of independent noise"
            " they are uniform, 1 % of them below 0.01."
        ),
        "",
        *table(head, rows),
        "",
        *_caution(certificate.null),
    ]


def _caution(rows: Iterable[NullRow]) -> list[str]:
    odd = [row for row in rows if row.ks_p is not None and row.ks_p < 0.01]
    if not odd:
        return ["No world's p-values differ from uniform at 1 %.", ""]
    return [f"Not uniform at 1 %: {'; '.join(escape(row.world.name) for row in odd)}.", ""]


def _power(certificate: Certificate) -> list[str]:
    rows = [
        [
            escape(row.world.name),
            f"{row.process_sd_pct:g}",
            f"{row.drop_pct:g}",
            counts(row.red),
            pct(row.power.share) if row.power.trials else NULL,
            pct(row.power.lower) if row.power.trials else NULL,
            pct(row.screened.share),
            pct(row.significant.share),
            NULL if row.mean_pairs is None else f"{row.mean_pairs:.0f}",
            pct(row.blind.share),
            _reached(row, certificate),
        ]
        for row in certificate.power
    ]
    head = [
        "world",
        "sd between processes, %",
        "drop, %",
        "REGRESSED",
        "power",
        "at least",
        "passed the screen",
        "significance alone",
        "pairs, mean",
        "BLIND",
        "goal",
    ]
    return [
        "## Injected drops",
        "",
        (
            "*Power*: REGRESSED of those that are not BLIND. *Passed the screen*: went on to be"
            " confirmed, or BLIND. *Significance alone*: what a screen that only asks for p <"
            f" {certificate.policy.alpha_screen:g} would have let pass; the rest would never have"
            " been looked at again. BLIND cells are not judged on wall time: where the host binds"
            " them, device time, launches and syncs judge them. Every drop here is a number that"
            " the simulation lowers; drops by real extra work have a table of their own."
        ),
        "",
        *table(head, rows),
        "",
    ]


def _reached(row: PowerRow, certificate: Certificate) -> str:
    policy = certificate.policy
    if row.drop_pct < policy.min_effect_pct:
        return "none below min_effect"
    if row.blind.share > 0.5:
        return BLIND
    if row.power.lower >= policy.power:
        return "reached"
    return MISSED if row.power.upper < policy.power else OPEN


def _stored(certificate: Certificate) -> list[str]:
    row = certificate.permutation
    if row is None:
        return ["## Stored samples", "", "No stored process has enough samples to shuffle.", ""]
    return [
        "## Stored samples",
        "",
        (
            f"The samples of {row.processes} real processes, shuffled into two sides again and"
            f" again: {counts(row.red)} called slower as one test, at most {pct(row.red.upper)};"
            f" {pct(row.below_hundredth.share)} of the p-values are below 0.01 (KS distance"
            f" {num(row.ks_distance)}). The {certificate.stored_samples:,} samples, in sd of their"
            " process, are also the noise of the last world above."
        ),
        "",
    ]


def _modes(certificate: Certificate) -> list[str]:
    sizes = sorted({row.samples for row in certificate.modes})
    kinds = list(dict.fromkeys(row.kind for row in certificate.modes))
    share = {(row.kind, row.samples): row.flagged for row in certificate.modes}
    one = [row.flagged for row in certificate.modes if not row.two_modes]
    hits, trials = sum(rate.hits for rate in one), sum(rate.trials for rate in one)
    return [
        "## Two modes within a process",
        "",
        f"Samples of one mode called two: {hits} of {trials:,}. Few samples cannot show two modes.",
        "",
        *table(
            ["samples", *(f"{n:,}" for n in sizes)],
            [[kind, *(pct(share[kind, n].share) for n in sizes)] for kind in kinds],
        ),
        "",
    ]


def pairs_headline(c: Calibration) -> str:
    if not c.pairs:
        return (
            "**No real pair was given**: every drop in these numbers is simulated, no kernel got"
            f" slower. {HOW}."
        )
    planted = [one for one in c.pairs if one.extra_work_pct > 0 and one.change_pct is not None]
    red = [f"{one.extra_work_pct:g} %" for one in planted if one.verdict == Verdict.REGRESSED]
    rest = [
        f"{one.extra_work_pct:g} % ({escape(one.verdict)})"
        for one in planted
        if one.verdict != Verdict.REGRESSED
    ]
    parts = (
        [f"**Real interleaved pairs**: with nothing planted {bounded(c.pairs_red)} cells REGRESSED"]
        if c.pairs_red.trials
        else []
    )
    parts += [f"real extra work found REGRESSED at {', '.join(red)}"] if red else []
    parts += [f"and not called slower at {', '.join(rest)}"] if rest else []
    wrong = sum(one.change_pct is None for one in c.pairs)
    parts += [f"{wrong} cell{'s' if wrong > 1 else ''} gave no speed to judge"] if wrong else []
    return "; ".join(parts) + "."


def pairs_section(c: Calibration) -> list[str]:
    head = ["## Real pairs", ""]
    if not c.pairs:
        return [*head, f"None was given: {HOW}.", ""]
    rows = [
        [
            f"{one.extra_work_pct:g}",
            cell_code(one.cell_id),
            f"{one.pairs}",
            _signed(one.expected_pct),
            _signed(one.change_pct),
            _bounds(one),
            _verdict(one),
            escape(one.run_id),
        ]
        for one in c.pairs
    ]
    columns = [
        "extra work, %",
        "cell",
        "pairs",
        "expected, %",
        "measured, %",
        "bounds, %",
        "verdict",
        "run",
    ]
    return [
        *head,
        (
            "One commit against itself, in turns on one machine; 0 is an A/A, elsewhere side b did"
            " that much more work in each step. Work of x % of a step lowers tok/s by x / (100 +"
            " x). The bounds are at the confirmation's alpha. Each pair is judged by its own"
            " matrix: a drop below its min_effect_pct need not be found, and one below its"
            " tolerance_pct must not be called REGRESSED."
        ),
        "",
        *table(columns, rows),
        "",
    ]


def _verdict(one: RealPair) -> str:
    return escape(
        one.verdict if one.change_pct is not None else f"{one.verdict}: {one.reason[:REASON_CHARS]}"
    )


def _signed(value: float | None) -> str:
    return NULL if value is None else f"{value or 0.0:+.2f}"


def _bounds(one: RealPair) -> str:
    return (
        NULL if one.change_pct is None else f"{_signed(one.lower_pct)} to {_signed(one.upper_pct)}"
    )


def met(ok: bool) -> str:
    return "Reached." if ok else "**Not reached.**"


def counts(rate: Rate) -> str:
    return f"{rate.hits:,} of {rate.trials:,}"


def bounded(rate: Rate) -> str:
    return f"{counts(rate)} (at most {pct(rate.upper)})" if rate.trials else counts(rate)


def pct(share: float) -> str:
    return f"{100 * share:.3g} %" if share < 0.99 or share == 1 else f"{100 * share:.2f} %"


def num(value: float | None) -> str:
    return NULL if value is None else f"{value:.2g}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    rule = ["---"] * len(head)
    return [f"| {' | '.join(row)} |" for row in (head, rule, *rows)]
