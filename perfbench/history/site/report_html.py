"""A report's Markdown as HTML that runs nothing: written by `perfbench`, or by anybody."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

from nsa.installing import pip_install
from perfbench.errors import Exit, PerfbenchError

_OPEN = re.compile(r"^<details><summary>(.*)</summary>\s*$")
_CLOSE = re.compile(r"^</details>\s*$")
_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})")


def report_html(markdown: str) -> str:
    """HTML of the report: markup inside it is text, except for the folded parts that perfbench
    writes. A picture becomes its alt text, a link other than http(s) its words.

    Headings go down by one level, since the page has a heading of its own.
    """
    parts: list[str] = []
    open_parts, lines, fence = 0, list[str](), ""
    for line in markdown.replace("\r\n", "\n").split("\n"):
        if marker := _FENCE.match(line):
            if not fence:
                fence = marker[1]
            elif marker[1].startswith(fence) and not line.strip(" `~"):
                fence = ""
        opened, closed = _OPEN.match(line), _CLOSE.match(line)
        if fence or not (opened or (closed and open_parts)):
            lines.append(line)
            continue
        parts.append(_rendered(lines))
        lines = []
        if opened:
            open_parts += 1
            parts.append(f"<details><summary>{html.escape(html.unescape(opened[1]))}</summary>")
        else:
            open_parts -= 1
            parts.append("</details>")
    return "".join([*parts, _rendered(lines), "</details>" * open_parts])


def _rendered(lines: Sequence[str]) -> str:
    found: str = _renderer().render("\n".join(lines))
    return found


@lru_cache(maxsize=1)
def _renderer() -> Any:
    try:
        from markdown_it import MarkdownIt
    except ImportError:
        raise PerfbenchError(
            Exit.USAGE,
            f"the page needs markdown-it-py. Next: {pip_install('history')}",
        ) from None
    made = MarkdownIt("commonmark", {"html": False}).enable("table")
    made.core.ruler.push("inert", _make_inert)
    made.add_render_rule("table_open", _table_open)
    made.add_render_rule("table_close", _table_close)
    return made


def _make_inert(state: Any) -> None:
    for token in state.tokens:
        if token.type in ("heading_open", "heading_close"):
            token.tag = f"h{min(6, int(token.tag[1]) + 1)}"
        if token.attrs.pop("style", None) == "text-align:right":  # which the policy would block
            token.attrSet("class", "number")
        if token.children:
            token.children = _inert_inline(token.children)


def _inert_inline(tokens: Sequence[Any]) -> list[Any]:
    kept: list[Any] = []
    links: list[bool] = []  # whether each open link stays
    for token in tokens:
        if token.type == "image":
            token.type, token.tag, token.nesting = "text", "", 0
            token.children = None
        elif token.type == "link_open":
            links.append(urlsplit(str(token.attrGet("href"))).scheme in ("http", "https"))
            token.attrSet("rel", "noopener noreferrer nofollow")
            if not links[-1]:
                continue
        elif token.type == "link_close" and not links.pop():
            continue
        kept.append(token)
    return kept


def _table_open(*_: Any) -> str:
    return '<div class="scroll" tabindex="0" role="group" aria-label="table"><table>\n'


def _table_close(*_: Any) -> str:
    return "</table></div>\n"
