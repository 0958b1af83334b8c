"""The badge of a run: its verdict in two words, as https://shields.io/badges/endpoint-badge takes
it, and as a picture for who has no public address.
"""

from __future__ import annotations

import json
from typing import Any
from xml.sax.saxutils import escape

from perfbench.errors import Exit
from perfbench.gate import CellVerdict, Judgement, severity
from perfbench.records import FAIL_UNDER_STRICT, Verdict
from perfbench.text import plain, shorten

# Names of shields.io and the colours that it gives them.
COLOURS = {
    "brightgreen": "#4c1",
    "yellow": "#dfb317",
    "orange": "#fe7d37",
    "red": "#e05d44",
    "lightgrey": "#9f9f9f",
}
BROKEN = (Exit.ENVIRONMENT, Exit.BASELINE, Exit.STRICT)  # nobody knows whether the code is worse
CHAR_PX = 6.5  # of Verdana at 11 px, about; `textLength` makes it exact
_SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="20" role="img" aria-label="{alt}">
<title>{alt}</title>
<rect width="{left}" height="20" fill="#555"/>
<rect x="{left}" width="{right}" height="20" fill="{colour}"/>
<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">
<text x="5" y="14" textLength="{left_text}">{label}</text>
<text x="{start}" y="14" textLength="{right_text}">{message}</text>
</g>
</svg>
"""


def badge(matrix_name: str, judgement: Judgement) -> dict[str, Any]:
    """'perfbench nightly-gate-h200 | REGRESSED -81.9 %', red for what failed, orange for what could
    not be judged, yellow for open cells, grey where no speed was compared.
    """
    label = shorten(f"perfbench {matrix_name}", 60)
    found = {"schemaVersion": 1, "label": label, "message": _message(judgement)}
    return found | {"color": _colour(judgement)}


def badge_json(matrix_name: str, judgement: Judgement) -> str:
    """The file's content."""
    return json.dumps(badge(matrix_name, judgement), indent=1) + "\n"


def badge_svg(matrix_name: str, judgement: Judgement) -> str:
    """The same as a picture."""
    found = badge(matrix_name, judgement)
    label, message = plain(found["label"]), plain(found["message"])
    left_text, right_text = (round(CHAR_PX * len(text)) for text in (label, message))
    left, right = left_text + 10, right_text + 10
    return _SVG.format(
        width=left + right,
        left=left,
        right=right,
        left_text=left_text,
        right_text=right_text,
        start=left + 5,
        colour=COLOURS[found["color"]],
        label=escape(label),
        message=escape(message),
        alt=escape(f"{label}: {message}", {'"': "&quot;"}),
    )


def _message(judgement: Judgement) -> str:
    verdicts = [finding.verdict for finding in judgement.findings]
    verdicts += [cell.verdict for cell in judgement.cells if cell.verdict is not None]
    if not verdicts:
        return f"MEASURED {len(judgement.cells)}"
    first = min(verdicts, key=severity)
    cells = [cell for cell in judgement.of(first) if cell.change]
    if not cells:
        return first.value
    pick = max if first is Verdict.FASTER else min
    return f"{first.value} {pick(map(_changed, cells)):+.1f} %"


def _changed(cell: CellVerdict) -> float:
    """The percentage of `CellVerdict.change`, without a negative zero."""
    return round(cell.evidence[0].change_pct or 0.0, 1) + 0.0


def _colour(judgement: Judgement) -> str:
    if judgement.exit_code in BROKEN:
        return "orange"
    if judgement.exit_code is not Exit.OK:
        return "red"
    if judgement.of(*FAIL_UNDER_STRICT) or judgement.is_too_noisy:
        return "yellow"
    return "lightgrey" if judgement.baseline is None else "brightgreen"
