"""Text from outside cannot break the report's Markdown, and numbers are written one way."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from perfbench.records.rows import Status
from perfbench.text import block, cell_code, code, escape, number, plain, ratio
from tests.perfbench import builders as b
from tests.perfbench.report_cases import alone

RENDERER = MarkdownIt("commonmark").enable("table")
NASTY = "a|b\nc\r\x1b[31m `x` ``y`` <script> *b* _i_ [l](u) # \\ $m$ ü 測 \u2028 \ud800"


def test_nasty_values_keep_the_tables_whole() -> None:
    run = b.small_run()
    cell = run.manifest.cells[0]
    run = b.change_rows(
        run,
        cell.cell_id,
        lambda row: b.failed(cell, Status.CRASH, row.replicate, NASTY.replace("\ud800", "")),
    )
    environment = b.environment(
        device_name=NASTY.replace("\ud800", ""), nsa_settings={"NSA_X": "a|b"}
    )
    run = b.with_manifest(
        run,
        environment=environment,
        excluded=[{"cell_id": "a|`b", "reason": "x|\ny"}],
        matrix_path="a|b `c`.yaml",
    )
    text = alone(run)
    html = RENDERER.render(text)
    assert "<script>" not in html and "\x1b" not in text
    for table in re.findall(r"<table>.*?</table>", html, re.DOTALL):
        columns = table.count("<th>") + table.count("<th ")
        assert {row.count("<td") for row in table.split("<tr>")[2:]} <= {columns}
    assert html.count("<tr>") == sum(
        line.startswith("|") for line in text.splitlines()
    ) - html.count("<table>")


@example("_emphasis_ and __strong__ and *a* ~~b~~ but_not_this")
@given(st.text(st.characters(), max_size=40))
def test_escaped_prose_renders_as_itself(text: str) -> None:
    html = RENDERER.render(f"x{escape(text)}x")
    assert html.count("<") == 2 and "\n" not in html.strip()  # one paragraph, no markup
    plain(text).encode("utf-8")


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_a_code_span_in_a_table_stays_one_cell(text: str) -> None:
    html = RENDERER.render(f"| a | b |\n| --- | --- |\n| {cell_code(text)} | z |\n")
    assert html.count("<td>") == 2 and "<td>z</td>" in html
    assert RENDERER.render(code(text)).count("<code>") == (1 if plain(text) else 0)


@given(st.text(st.characters(), max_size=60))
def test_a_block_cannot_be_left(text: str) -> None:
    html = RENDERER.render(f"{block(text)}\n\nafter\n")
    assert html.count("<pre>") == 1 and html.rstrip().endswith("<p>after</p>")


@pytest.mark.parametrize(
    "value, text",
    [
        (None, "-"),
        (0.0123, "0.0123"),
        (9.876, "9.88"),
        (99.96, "100"),
        (123456.7, "123,457"),
        (1e9, "1,000,000,000"),
    ],
)
def test_numbers(value: float | None, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    "value, text", [(None, "-"), (0.0057, "0.0057"), (0.5, "0.50"), (1.0, "1.00"), (12.3, "12.30")]
)
def test_ratios(value: float | None, text: str) -> None:
    assert ratio(value) == text
