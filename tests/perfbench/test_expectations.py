"""What a card is expected to do: the data file, and how a report shows it."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from perfbench.gate.judging import judge
from perfbench.matrix.policy import GatePolicy
from perfbench.records.cells import Cell
from perfbench.records.rows import Run
from perfbench.records.run_file import read_run
from perfbench.report import expectations
from perfbench.report.expectations import Expectation
from perfbench.report.rows import rows_of
from tests.perfbench import builders as b
from tests.perfbench.report_cases import alone, section

ROOT = Path(__file__).parents[2]
MATRIX = """\
version: 1
name: x
target: {gpu: A100}
model: m7c_125m
axes: {workload: [train], seq_len: [2048], path: [v2, masked, dense], fa2: [on]}
"""


def run_on(device: str, speeds: dict[str, float], matrix: str = MATRIX) -> Run:
    cells = [
        b.planned_cell(Cell("train", 2048, path, "n/a" if path == "dense" else "on"))
        for path in speeds
    ]
    environment = b.environment(device_name=device)
    run = b.make_run(cells, matrix_text=matrix, environment=environment)
    for cell in cells:
        run = b.replace_rows(run, cell.cell_id, tok_per_s=speeds[cell.axes.path])
    return run


def of(run: Run) -> list[expectations.Met]:
    return expectations.met(run, rows_of(run, judge(run, None, GatePolicy())))


def test_a_claim_stands_next_to_what_was_measured() -> None:
    run = run_on("NVIDIA A100-SXM4-80GB", {"v2": 4000.0, "masked": 4650.0, "dense": 20000.0})
    (one,) = of(run)
    assert {row.cell.axes.path for row in one.rows} == {"v2", "masked"}
    assert one.measured == pytest.approx((4000.0, 4650.0))
    assert one.of_expected == pytest.approx(0.5)  # 4,650 over the middle of 9,200 to 9,400
    text = section(alone(run), expectations.TITLE)
    assert "9,200 to 9,400 | 4,000 to 4,650 | 0.50 |" in text


def test_another_card_or_model_is_not_held_against_a_claim() -> None:
    speeds = {"v2": 4000.0}
    assert of(run_on("NVIDIA L40S", speeds)) == []
    assert of(run_on("NVIDIA A100-SXM4-80GB", speeds, MATRIX.replace("m7c_125m", "tiny"))) == []
    text = alone(run_on("NVIDIA L40S", speeds))
    assert "Nothing is claimed or expected of NVIDIA L40S" in section(text, expectations.TITLE)


def test_cells_of_others_are_counted_not_listed() -> None:
    run = run_on("NVIDIA A100-SXM4-80GB", {"dense": 20000.0})
    text = section(alone(run), expectations.TITLE)
    assert "of these cells; 1 expectations of this card are of others" in text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"match": {"pth": "v2"}}, "no axis 'pth'; did you mean 'path'"),
        ({"match": {"path": "v3"}}, "wanted one of"),
        ({"model": "m7c"}, "no model preset 'm7c'"),
        ({"claimed": None}, "neither claimed nor expected"),
        ({"claimed": {"tok_per_s": (5.0, 4.0), "by": "x"}}, "wanted [least, most]"),
        ({"claimed": {"tok_per_s": (0.0, 4.0), "by": "x"}}, "wanted [least, most]"),
        ({"gpuu": "A100"}, "Extra inputs"),
    ],
)
def test_a_mistake_in_the_data_file_is_refused(change: dict[str, object], said: str) -> None:
    good = {
        "gpu": "A100",
        "model": "tiny",
        "match": {"path": "v2"},
        "claimed": {"tok_per_s": (1.0, 2.0), "by": "somebody"},
    }
    Expectation.model_validate(good)
    with pytest.raises(ValidationError) as caught:
        Expectation.model_validate({**good, **change})
    assert said in str(caught.value)


EXPECTED = [one for one in expectations.expectations() if one.expected is not None]


def test_the_data_file_names_the_cards_of_the_claims() -> None:
    claims = {one.gpu: one.claimed.tok_per_s for one in expectations.expectations() if one.claimed}
    assert claims == {"A100": (9200, 9400), "RTX 4090": (4000, 6000), "H100": (15000, 18000)}


@pytest.mark.parametrize("one", EXPECTED, ids=lambda one: f"{one.gpu}-{sorted(one.match.items())}")
def test_what_is_expected_is_what_the_named_run_measured(one: Expectation) -> None:
    """Each cell of the run that matches lies within the range, and the range is no wider than 5 %
    beyond them.
    """
    assert one.expected is not None
    run = read_run(ROOT / one.expected.run)
    (met,) = [found for found in of(run) if found.expectation == one]
    assert met.measured is not None, "the run has no such cell"
    least, most = one.expected.tok_per_s
    assert least <= met.measured[0] and met.measured[1] <= most
    assert least > 0.95 * met.measured[0] and most < 1.05 * met.measured[1]
