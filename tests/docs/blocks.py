"""Code in README.md and docs/: fenced blocks with their marks, and commands in running text.

A mark is an HTML comment on the line above a block: `<!-- needs: gpu -->` says why it is not run,
`<!-- exit: 3 -->` the exit code of its last command, `<!-- from: FILE -->` where its lines stand.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
SHELL, PYTHON = ("sh", "bash", "console"), "python"
REASONS = {
    "gpu": "a GPU",
    "network": "a package index",
    "minutes": "longer than a test may take",
    "your run": "a run, a commit or a tool of the reader's own",
}
MARKS = ("needs", "exit", "from")
_FENCE = re.compile(r"^```(\w*)\s*$")
_MARK = re.compile(r"^<!--\s*([\w-]+):\s*(.*?)\s*-->$")
_SPAN = re.compile(r"`([^`\n]+)`")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its lines, and the marks above it."""

    page: Path
    line: int
    language: str
    text: str
    marks: dict[str, str] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """Command lines; of a console block those after `$ `."""
        lines = self.text.splitlines()
        if self.language == "console":
            return [line[2:] for line in lines if line.startswith("$ ")]
        return [line for line in lines if line.strip() and not line.startswith("#")]

    @property
    def exchanges(self) -> list[tuple[str, str]]:
        """Of a console block: each command and what is shown below it."""
        shown: list[tuple[str, list[str]]] = []
        for line in self.text.splitlines():
            if line.startswith("$ "):
                shown.append((line[2:], []))
            else:
                shown[-1][1].append(line)
        return [(command, "\n".join(lines)) for command, lines in shown]


def blocks_of(page: Path, text: str | None = None) -> list[Block]:
    """Every fenced block of a page; ``text`` instead of what the file holds."""
    lines = (page.read_text(encoding="utf-8") if text is None else text).splitlines()
    found: list[Block] = []
    marks: dict[str, str] = {}
    start, language = None, ""
    for number, line in enumerate(lines, 1):
        fence = _FENCE.match(line)
        if start is not None:
            if fence:
                body = "\n".join(lines[start : number - 1])
                found.append(Block(page, start, language, body, marks))
                start, marks = None, {}
        elif fence:
            start, language = number, fence[1]
        elif mark := _MARK.match(line):
            marks = {**marks, mark[1]: mark[2]}
        elif line.strip():
            marks = {}
    return found


def spans_of(page: Path) -> Iterator[tuple[int, str]]:
    """(line, code) of each code span outside the fenced blocks."""
    inside = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("```"):
            inside = not inside
        elif not inside:
            yield from ((number, span) for span in _SPAN.findall(line))


def calls_of(command: str) -> list[list[str]]:
    """The simple commands of a shell line as words, without assignments and comments."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars="&|;")
    lexer.whitespace_split = True
    calls: list[list[str]] = [[]]
    for word in lexer:
        if set(word) <= set("&|;"):
            calls.append([])
        elif calls[-1] or not re.match(r"^[A-Z_]+=", word):
            calls[-1].append(word)
    return [call for call in calls if call]


def arguments_to(program: str, call: Sequence[str]) -> list[str] | None:
    """What ``call`` passes to ``program`` ('perfbench', or a module run by `python -m`), if it is
    called.
    """
    name = Path(call[0]).name
    if name == program:
        return list(call[1:])
    if name.startswith("python") and list(call[1:3]) == ["-m", program]:
        return list(call[3:])
    return None
