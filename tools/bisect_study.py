"""How often `perfbench bisect` is right, by bisects whose pairs are drawn: reports/bisect.json, and
the table and the transcript of docs/bisect.md.

    python -m tools.bisect_study --seed 18 --bisects 1000
    python -m tools.bisect_study --page-only   # writes the page from the stored numbers
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from perfbench.gate import StepTurn
from perfbench.report import bisect_markdown
from perfbench.runner import BisectResult, CommitRange, Ending, find_first_bad
from tools.bisect_drawn import (
    BRANCHES,
    COMMITS,
    PAIR_S,
    POLICY,
    DrawnPairs,
    Drops,
    drawn_bisect,
    levels_of,
    line,
    octopus,
)

ROOT = Path(__file__).parents[1]
PAGE, NUMBERS = ROOT / "docs" / "bisect.md", ROOT / "reports" / "bisect.json"


@dataclass(frozen=True, slots=True)
class PlantedHistory:
    """A row of the table; ``make``: the history, where it is no line of 64 commits."""

    what: str
    drops: Drops
    sd: float = 0.01
    make: Callable[[], CommitRange] | None = None


def one(size: float, count: int, rng: random.Random) -> dict[int, float]:
    """A drop at any of ``count`` commits."""
    return {rng.randrange(1, count + 1): size}


def two(first: float, second: float, rng: random.Random) -> dict[int, float]:
    """Two changes of speed, in this order."""
    places = sorted(rng.sample(range(1, COMMITS + 1), 2))
    return dict(zip(places, (first, second), strict=True))


def drift(size: float, rng: random.Random) -> dict[int, float]:
    """Every commit loses ``size``."""
    return dict.fromkeys(range(1, COMMITS + 1), size)


def nothing(rng: random.Random) -> dict[int, float]:
    """No commit changes the speed."""
    return {}


HISTORIES = (
    PlantedHistory("one of 3 %", partial(one, 0.03, COMMITS)),
    PlantedHistory("one of 20 %, noise of 5 %", partial(one, 0.2, COMMITS), 0.05),
    PlantedHistory("one of 3 %, noise of 2 %", partial(one, 0.03, COMMITS), 0.02),
    PlantedHistory(
        f"one of 3 %, {BRANCHES} branches that one commit merges",
        partial(one, 0.03, BRANCHES),
        make=partial(octopus, BRANCHES),
    ),
    PlantedHistory("two of 3 %", partial(two, 0.03, 0.03)),
    PlantedHistory("two of 2 %", partial(two, 0.02, 0.02)),
    PlantedHistory("one of 2 % and one of 4 %", partial(two, 0.02, 0.04)),
    PlantedHistory("one of 6 %, of which a later commit recovers 3 %", partial(two, 0.06, -0.03)),
    PlantedHistory("64 of 0.1 %", partial(drift, 0.001)),
    PlantedHistory("none", nothing),
)


def outcome_of(history: PlantedHistory, seed: int) -> tuple[str, bool, int]:
    """What one bisect came to, whether a step turned wrongly, and its pairs."""
    found = None if history.make is None else history.make()
    result, planted = drawn_bisect(seed, history.drops, found=found, sd=history.sd)
    if result.first_bad is not None:
        is_right = planted.get(int(result.first_bad.sha[1:]), 0.0) > 0
        how = "right" if is_right else "wrong"
    else:
        how = "not_slower" if result.ending is Ending.NOT_SLOWER else "not_named"
    levels = levels_of(result.range, planted)
    wrong = len(planted) == 1 and any(
        _is_wrong(step.found.turn, levels[step.commit.sha]) for step in result.steps
    )
    return how, wrong, _pairs(result)


def _is_wrong(turn: StepTurn, level: float) -> bool:
    """Of a history with one drop, in which each level is that of one end."""
    return turn is (StepTurn.GOOD if level < 0 else StepTurn.BAD)


def _pairs(result: BisectResult) -> int:
    founds = (result.whole, result.confirmation, *(step.found for step in result.steps))
    return sum(one.change.pairs for one in founds if one is not None and one.change is not None)


def row_of(history: PlantedHistory, seed: int, bisects: int) -> dict[str, Any]:
    """The counts of one row, over seeds from ``seed`` * ``bisects`` on."""
    outcomes = [outcome_of(history, seed * bisects + number) for number in range(bisects)]
    names = [how for how, _, _ in outcomes]
    return {
        "what": history.what,
        **{how: names.count(how) for how in ("right", "not_named", "not_slower", "wrong")},
        "wrong_turns": sum(wrong for _, wrong, _ in outcomes),
        "pairs": round(sum(pairs for _, _, pairs in outcomes) / bisects),
    }


def table(numbers: Mapping[str, Any]) -> str:
    """The table of the page."""
    rows = [
        f"| {row['what']} | {row['right']:,} | {row['not_named']:,} | {row['not_slower']:,} |"
        f" {row['wrong']:,} | {row['wrong_turns']:,} | {row['pairs']:,} |"
        for row in numbers["rows"]
    ]
    head = (
        f"{numbers['bisects']:,} bisects of each history (`python -m tools.bisect_study --seed"
        f" {numbers['seed']} --bisects {numbers['bisects']}`):"
    )
    names = (
        "| drops | right | not named | B not REGRESSED | wrong | a step turned wrongly | pairs |"
    )
    return "\n".join([head, "", names, "| --- |" + " ---: |" * 6, *rows])


def transcript() -> str:
    """A drawn bisect of seven commits, of which the third cannot be imported and the fifth loses
    5 % of the speed: what the command prints of it.
    """
    lines: list[str] = []
    found = line([f"t{number}" for number in range(8)])
    levels = levels_of(found, {5: 0.05})
    measurer = DrawnPairs(levels, 0.01, random.Random(18), frozenset({"c3"}))
    result = find_first_bad(found, measurer, POLICY, lines.append)
    template = "perfbench bisect --good {good} --bad {bad} --matrix MATRIX CELL"
    text = bisect_markdown(result, "CELL", "perfbench bisect --resume FOLDER", template)
    head = (
        f"Of a history of seven commits with drawn speeds and pairs of {PAIR_S:.0f} s: the third"
        " cannot be imported, and the fifth loses 5 %."
    )
    return "\n".join(
        [head, "", "```text", *(f"perfbench: {one}" for one in lines), "", text.rstrip(), "```"]
    )


def page_with(page: str, **parts: str) -> str:
    """``page`` with each part between its markers."""
    for name, text in parts.items():
        begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
        before, found, rest = page.partition(begin)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise ValueError(f"docs/bisect.md has no {begin.strip()} ... {end}")
        page = f"{before}{begin}\n{text}\n\n{end}{after}"
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=18)
    parser.add_argument("--bisects", type=int, default=1000)
    parser.add_argument("--page-only", action="store_true")
    options = parser.parse_args()
    if not options.page_only:
        with ProcessPoolExecutor(2) as pool:
            measured = partial(row_of, seed=options.seed, bisects=options.bisects)
            rows = list(pool.map(measured, HISTORIES))
        numbers = {"seed": options.seed, "bisects": options.bisects, "rows": rows}
        NUMBERS.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    numbers = json.loads(NUMBERS.read_text(encoding="utf-8"))
    page = PAGE.read_text(encoding="utf-8")
    page = page_with(page, bisects=table(numbers), transcript=transcript())
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
