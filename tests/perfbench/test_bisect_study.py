"""What docs/bisect.md claims of its simulation is what the committed numbers and the tool have."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
from scipy.stats import binom

from perfbench.gate import LOOKS, StepTurn, compare, step_shares
from perfbench.records import ConfirmationPlan, Run, Verdict
from perfbench.runner.ab.commits import CommitRange
from perfbench.runner.ab.halving import Halving
from tests.perfbench import builders as b
from tools import bisect_study
from tools.bisect_drawn import POLICY, judged, levels_of, line, octopus

TRAIN = "fa2=on,path=v2,seq_len=2048,workload=train"


@pytest.fixture(scope="module")
def numbers() -> dict[str, Any]:
    return json.loads(bisect_study.NUMBERS.read_text(encoding="utf-8"))


def test_the_page_is_what_the_stored_numbers_and_the_tool_say(numbers: dict[str, Any]) -> None:
    page = bisect_study.PAGE.read_text(encoding="utf-8")
    parts = {"bisects": bisect_study.table(numbers), "transcript": bisect_study.transcript()}
    assert bisect_study.page_with(page, **parts) == page
    assert [row["what"] for row in numbers["rows"]] == [one.what for one in bisect_study.HISTORIES]
    outcomes = ("right", "not_named", "not_slower", "wrong")
    assert {sum(row[how] for how in outcomes) for row in numbers["rows"]} == {numbers["bisects"]}


def test_the_stored_numbers_keep_the_promise(numbers: dict[str, Any]) -> None:
    """No wrong name, and steps that turn wrongly in 1 - power of the bisects."""
    most = binom.ppf(0.999, numbers["bisects"], 1 - POLICY.power)
    for row in numbers["rows"]:
        assert row["wrong"] == 0 and row["wrong_turns"] <= most


@pytest.mark.parametrize("place", range(len(bisect_study.HISTORIES)))
def test_the_stored_numbers_are_of_this_code(numbers: dict[str, Any], place: int) -> None:
    """20 bisects of each row: as many right as the stored share makes likely."""
    history = bisect_study.HISTORIES[place]
    found = bisect_study.row_of(history, numbers["seed"] + 1, 20)
    share = numbers["rows"][place]["right"] / numbers["bisects"]
    low, high = (binom.ppf(edge, 20, share) for edge in (0.0001, 0.9999))
    assert low - 1 <= found["right"] <= high and found["wrong"] == 0


def test_drawn_pairs_are_judged_as_the_gate_judges_rows() -> None:
    """50 pairs of commits, as rows of run files and as the differences alone."""
    rng = random.Random(3)
    verdicts = set()
    for number in range(50):
        change = (0.0, -0.01, -0.02, -0.03, -0.05)[number % 5]
        drawn = [change + rng.gauss(0, 0.015) for _ in range(LOOKS[-1])]
        base, candidate = _runs(drawn)
        judgement = compare(base, candidate, POLICY, paired=True)
        (cell,) = (one for one in judgement.cells if one.cell_id == TRAIN)
        ours = judged(drawn)
        assert (cell.verdict is Verdict.REGRESSED) == ours.is_slower, (number, cell)
        if ours.is_slower:
            assert ours.change is not None
            assert len(cell.evidence[0].base) == ours.change.pairs
        verdicts.add(ours.verdict)
    assert verdicts == {Verdict.REGRESSED, Verdict.SAME}


# ---- what the steps of a history divide


@pytest.mark.parametrize("found", [octopus(16), line([f"t{n}" for n in range(65)])])
def test_no_answers_take_more_steps_than_planned(found: CommitRange) -> None:
    """Each commit in turn is the first bad one."""
    planned, most = Halving(found).num_steps, 0
    for bad in found.commits:
        levels = levels_of(found, {int(bad.sha[1:]): 0.03})
        halving, steps = Halving(found), 0
        while (commit := halving.next()) is not None:
            turn = StepTurn.BAD if levels[commit.sha] < 0 else StepTurn.GOOD
            halving.answer(commit, turn)
            steps += 1
        assert halving.left == [bad]
        most = max(most, steps)
    assert most == planned == (16 if len(found.commits) == 17 else 6)


def test_the_shares_of_all_steps_are_never_more_than_the_promise() -> None:
    for planned in (0, 1, 6, 16):
        shares = step_shares(POLICY, planned)
        spent = sum(shares.of(step) for step in range(planned + 60))
        assert spent == pytest.approx(1 - POLICY.power)
        assert spent <= (1 - POLICY.power) * (1 + 1e-12)
        assert len({shares.of(step) for step in range(planned)}) <= 1


def _runs(drawn: list[float]) -> tuple[Run, Run]:
    """A base of even speed, and a candidate that differs from it by ``drawn`` (ln speed)."""
    planned = [cell for cell in b.h100_cells() if cell.cell_id == TRAIN]
    plan = ConfirmationPlan(tests=1, looks=list(LOOKS), cells=[TRAIN])
    base = b.make_run(planned, replicates=LOOKS[-1], confirmation=plan)
    rows = [
        b.replicate(planned[0], number, tok_per_s=b.speed_of(planned[0]) * math.exp(change))
        for number, change in enumerate(drawn)
    ]
    return base, b.with_rows(base, rows)
