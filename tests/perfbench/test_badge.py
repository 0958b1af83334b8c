"""badge.json as shields.io takes it, and the same picture as SVG."""

from __future__ import annotations

import dataclasses
import json
from xml.etree import ElementTree as ET

import pytest

from perfbench.gate.judging import judge
from perfbench.matrix.policy import GatePolicy
from perfbench.records import BaselineProblem, Verdict
from perfbench.report.badge import badge_json, badge_svg
from tests.perfbench import builders as b
from tests.perfbench.report_cases import troubled

ALONE = judge(b.small_run(), None, GatePolicy())
SAME = judge(b.small_run(), b.baseline_of(b.small_run()), GatePolicy())
LOST = judge(b.small_run(), BaselineProblem(Verdict.NO_BASELINE, "none"), GatePolicy())
RED = troubled()[1]


def only(verdict: Verdict) -> object:
    """The red judgement, with the cells of one verdict alone."""
    return dataclasses.replace(RED, cells=RED.of(verdict), findings=[])


@pytest.mark.parametrize(
    ("judgement", "message", "color"),
    [
        (ALONE, "MEASURED 4", "lightgrey"),
        (LOST, "NO_BASELINE", "orange"),
        (RED, "WRONG_PATH", "red"),
        (only(Verdict.REGRESSED), "REGRESSED -10.0 %", "red"),
    ],
)
def test_it_says_the_worst_and_its_number(judgement, message: str, color: str) -> None:
    found = json.loads(badge_json("nightly", judgement))
    assert found == {
        "schemaVersion": 1,
        "label": "perfbench nightly",
        "message": message,
        "color": color,
    }


def test_open_cells_are_yellow_and_green_is_green() -> None:
    colours = {json.loads(badge_json("n", one))["color"] for one in (SAME,)}
    assert colours <= {"yellow", "brightgreen"}
    cells = [dataclasses.replace(cell, verdict=Verdict.SAME) for cell in SAME.cells]
    green = dataclasses.replace(SAME, cells=cells)
    assert json.loads(badge_json("n", green))["color"] == "brightgreen"
    cells[0] = dataclasses.replace(cells[0], verdict=Verdict.WATCH)
    assert json.loads(badge_json("n", dataclasses.replace(SAME, cells=cells)))["color"] == "yellow"


def test_the_picture_holds_the_same_words_whatever_the_name() -> None:
    name = '<a href="x">&\x00\n'
    svg = badge_svg(name, RED)
    texts = [one.text for one in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]
    assert texts == [r'perfbench <a href="x">&\u0000', "WRONG_PATH"]
