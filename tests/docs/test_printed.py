"""Comments in the pages are what `perfbench comment` makes of the committed runs today."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from perfbench.commands import app
from tests.docs.blocks import ROOT
from tests.docs.printed import ALL, quoted, renewed


@pytest.mark.parametrize(("page", "arguments", "shown"), ALL, ids=[one[1] for one in ALL])
def test_a_comment_is_shown_as_it_is_printed(
    page: Path,
    arguments: str,
    shown: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`python -m tests.docs.update` writes it."""
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("GITHUB_RUN_ID", raising=False)  # whose page it would link
    assert app.invoke(shlex.split(arguments)) == 0
    assert quoted(capsys.readouterr().out) == shown, page.name


def test_a_red_a_green_and_a_broken_night_are_shown() -> None:
    text = "\n".join(shown for _, _, shown in ALL)
    words = ("REGRESSED, exit 3", "SAME, exit 0", "INCOMPARABLE, exit 8", "MISSING, exit 6")
    assert all(word in text for word in words)
    assert all(shown.startswith("> ### ") for _, _, shown in ALL)


def test_what_a_page_shows_is_renewed() -> None:
    old = "a\n<!-- printed: perfbench comment x -->\n> old\n<!-- end -->\nb\n"
    new = renewed(old, lambda words: f"<!-- hidden -->\n### {words}\n\nx\n")
    mark = "<!-- printed: perfbench comment x -->"
    assert new == f"a\n{mark}\n> ### ['comment', 'x']\n>\n> x\n<!-- end -->\nb\n"
