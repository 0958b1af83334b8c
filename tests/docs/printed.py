"""Markdown that pages show as a command prints it: between `<!-- printed: COMMAND -->` and
`<!-- end -->`, as a quotation. `python -m tests.docs.update` writes it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

from tests.docs.blocks import PAGES

_PRINTED = re.compile(r"^<!-- printed: perfbench ([^\n]*) -->\n(.*?)^<!-- end -->$", re.M | re.S)
HIDDEN = re.compile(r"^<!--.*-->\n")  # the line by which a comment is found again


def printed_in(page: Path) -> list[tuple[str, str]]:
    """(arguments of perfbench, what is shown) of a page."""
    return _PRINTED.findall(page.read_text(encoding="utf-8"))


def quoted(output: str) -> str:
    """What stands in the page for ``output``."""
    lines = HIDDEN.sub("", output.strip("\n")).split("\n")
    return "".join(f"> {line}".rstrip() + "\n" for line in lines)


def renewed(text: str, output_of: Callable[[list[str]], str]) -> str:
    """A page with what its commands print today."""

    def shown(found: re.Match[str]) -> str:
        head = found[0].partition("\n")[0]
        return f"{head}\n{quoted(output_of(shlex.split(found[1])))}<!-- end -->"

    return _PRINTED.sub(shown, text)


ALL = [(page, arguments, shown) for page in PAGES for arguments, shown in printed_in(page)]
