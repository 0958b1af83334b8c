"""What GitHub shows of a run: annotations next to the log, and the report on the page of the
workflow run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from perfbench.errors import Exit
from perfbench.gate import CellVerdict, Finding, Judgement, severity
from perfbench.machine import environment_variable, step_summary
from perfbench.records import EXIT_OF, FAIL_UNDER_STRICT, Verdict, short_ids
from perfbench.text import block, plain, shorten

MAX_ANNOTATIONS = 10  # of one kind that GitHub keeps of a step; it drops the others without a word
SUMMARY_BYTES = 1024 * 1024  # of one step; GitHub refuses a larger one as a whole
_MESSAGE_CHARS = 900  # of an annotation: it is read in a box, and GitHub cuts at 4 KB
MAX_BARS, BAR_CHARS = 30, 24
_NOTICE_BYTES = 400  # what the cut line and the closing of open blocks need at most
_IMAGE = re.compile(r"^!\[(.*)\]\(([\w.-]+)\)$", re.MULTILINE)
_FENCE = re.compile(r"^(`{3,})")


def announce(judgement: Judgement, page: Path | None) -> Iterator[str]:
    """Lines to print: one annotation a finding.

    ``page`` (report.md) is appended to the step's summary. Nothing elsewhere.
    """
    if environment_variable("GITHUB_ACTIONS") != "true":
        return
    yield from github_commands(judgement)
    summary = step_summary()
    if (
        page is not None
        and summary is not None
        and (
            problem := append_summary(
                summary, page.read_text(encoding="utf-8"), charts=charts_of(judgement)
            )
        )
    ):
        yield f"perfbench: warning: {problem}"


def github_commands(judgement: Judgement) -> list[str]:
    """Workflow commands, one a line, worst first: an error for each red cell, one warning for each
    kind of open verdict.

    At most 10 errors and 10 warnings; the tenth says how many are left out. Nothing for a green
    judgement.
    """
    failing = [
        (f.verdict, _command("error", f"perfbench: {f.verdict.value}", f.reason))
        for f in judgement.findings
        if _fails(f)
    ]
    failing += [
        (cell.verdict, _red(cell))
        for cell in judgement.cells
        if cell.verdict is not None and cell.exit_code is not Exit.OK
    ]
    errors = [line for _, line in sorted(failing, key=lambda one: severity(one[0]))]
    level = "error" if judgement.strict else "warning"
    warnings = list(_open(judgement, level))
    if judgement.strict:
        errors, warnings = [*errors, *warnings], []
    return [
        *github_commands_at_most(errors, "error"),
        *github_commands_at_most(warnings, "warning"),
    ]


def escape_data(value: str) -> str:
    """The message of a workflow command: it ends with the line, so line ends are
    percent-encoded.
    """
    return value.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def escape_property(value: str) -> str:
    """A property of a workflow command, which also ends at a comma, and its list at a colon."""
    return escape_data(value).replace(":", "%3A").replace(",", "%2C")


def charts_of(judgement: Judgement) -> dict[str, str]:
    """Pictures drawn in letters, by the name of the file that only the artifact holds: of
    changes.png each change as a bar, the worst first. No entry where nothing was compared.
    """
    found = [
        (cell.evidence[0].change_pct or 0.0, cell)
        for cell in judgement.cells
        if cell.change and cell.evidence
    ]
    if not found:
        return {}
    names = short_ids(cell.axes for _, cell in found)
    largest = sorted(found, key=lambda one: (-abs(one[0]), one[1].cell_id))[:MAX_BARS]
    shown = sorted(largest, key=lambda one: (one[0], one[1].cell_id))
    texts = [shorten(names.get(cell.cell_id, cell.cell_id), 60) for _, cell in shown]
    width = max(map(len, texts))
    whole = max(judgement.policy.min_effect_pct, *(abs(change) for change, _ in shown))
    lines = [
        f"{text:<{width}} {change:+7.1f} %  {_bar(-change, whole):>{BAR_CHARS}}|"
        f"{_bar(change, whole)}".rstrip()
        for text, (change, _) in zip(texts, shown, strict=True)
    ]
    if more := len(found) - len(shown):
        lines.append(f"and {more} more, which changed less or as little")
    return {"changes.png": block("\n".join(lines))}


def _bar(change: float, whole: float) -> str:
    """As long as ``change`` is of ``whole``; '' for one to the other side."""
    return "█" * round(BAR_CHARS * max(0.0, change) / whole)


def summary(
    report: str, *, limit_bytes: int = SUMMARY_BYTES, charts: Mapping[str, str] | None = None
) -> str:
    """``report`` (Markdown) for the step summary: pictures, which only the artifact holds, by name,
    with what ``charts`` has for them; at most ``limit_bytes``.

    The last line says what was cut, with open code blocks and folds closed before it.
    """

    def picture(found: re.Match[str]) -> str:
        chart = (charts or {}).get(found[2])
        where = f"`{found[2]}` in the run's folder, which the workflow keeps as an artifact."
        return f"*{found[1]}*: {where}" + (f"\n\n{chart}" if chart else "")

    shown = _IMAGE.sub(picture, report)
    if len(shown.encode()) <= limit_bytes:
        return shown
    kept, fence, folds, room = [], "", 0, limit_bytes - _NOTICE_BYTES
    for line in shown.splitlines():
        room -= len(line.encode()) + 1
        if room < 0:
            break
        kept.append(line)
        found = _FENCE.match(line)
        if found and not fence:
            fence = found[1]
        elif fence and line.rstrip() == fence:
            fence = ""
        if not fence:
            folds += line.startswith("<details>") - line.startswith("</details>")
    closing = [*([fence] if fence else []), *["", "</details>"] * folds]
    notice = (
        f"**Cut here**: GitHub shows at most {limit_bytes:,} bytes and the report has"
        f" {len(shown.encode()):,}."
    )
    return "\n".join(
        [*kept, *closing, "", f"{notice} The whole of it is `report.md` in the run's folder.", ""]
    )


def append_summary(
    path: Path,
    report: str,
    *,
    limit_bytes: int = SUMMARY_BYTES,
    charts: Mapping[str, str] | None = None,
) -> str:
    """Append ``report`` to the step's summary file; return why it could not be done, or an empty
    text.

    What earlier commands of the step wrote counts against the limit. A summary never changes an
    exit code: nothing is raised.
    """
    try:
        held = path.stat().st_size if path.exists() else 0
        if limit_bytes - held <= 2 * _NOTICE_BYTES:
            return (
                f"got {held:,} bytes in {path}, wanted room for the report below {limit_bytes:,};"
                " see report.md in the run's folder"
            )
        with path.open("a", encoding="utf-8", newline="\n") as file:
            file.write(summary(report, limit_bytes=limit_bytes - held, charts=charts))
    except OSError as error:
        return (
            f"cannot append the report to {path}: {error.strerror or error}; see report.md in the"
            " run's folder"
        )
    return ""


def _fails(finding: Finding) -> bool:
    return EXIT_OF[finding.verdict] is not Exit.OK


def _red(cell: CellVerdict) -> str:
    again = f"\nreproduce: {plain(cell.reproduce)}" if cell.reproduce else ""
    change = f"{cell.change}: " if cell.change else ""
    title = f"perfbench: {cell.verdict} {cell.cell_id}"
    return _command("error", title, f"{change}{cell.reason}", again)


def _open(judgement: Judgement, level: str) -> Iterator[str]:
    """One annotation for each verdict that is open: dozens of BLIND cells are one piece of news."""
    for verdict in (*FAIL_UNDER_STRICT, Verdict.NEW):
        cells = judgement.of(verdict)
        if cells:
            kind = "warning" if verdict is Verdict.NEW else level
            first, more = cells[0], f" (and {len(cells) - 1} more)" if len(cells) > 1 else ""
            count = f"{len(cells)} {'cell' if len(cells) == 1 else 'cells'}"
            yield _command(
                kind,
                f"perfbench: {verdict.value}, {count}",
                f"{first.cell_id}: {first.change}{': ' if first.change else ''}{first.reason}",
                more,
            )


def _command(level: str, title: str, message: str, tail: str = "") -> str:
    return github_command(level, title, shorten(plain(message), _MESSAGE_CHARS) + tail)


def github_command(level: str, title: str, message: str, *, source: str = "") -> str:
    """One annotation; ``source``, 'nsa/model.py:21', is the line that it is shown at."""
    file, _, line = source.partition(":")
    at = f"file={escape_property(file)},line={line}," if line else ""
    return (
        f"::{level} {at}title={escape_property(shorten(plain(title), 200))}::{escape_data(message)}"
    )


def github_commands_at_most(lines: list[str], level: str) -> Iterable[str]:
    """``lines``, or the first nine and one that says how many are left out."""
    if len(lines) <= MAX_ANNOTATIONS:
        return lines
    left = len(lines) - MAX_ANNOTATIONS + 1
    return [
        *lines[: MAX_ANNOTATIONS - 1],
        _command(
            level, "perfbench: more", f"{left} more of this kind; see the summary of this run"
        ),
    ]
