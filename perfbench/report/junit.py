"""JUnit XML: one test case for each cell, so that every CI shows the gate as it shows tests."""

from __future__ import annotations

import re
from collections.abc import Mapping
from xml.etree import ElementTree as ET

from perfbench.errors import Exit
from perfbench.gate import CellVerdict, Judgement
from perfbench.records import EXIT_OF, FAIL_UNDER_STRICT, Run, Verdict
from perfbench.text import visible

# XML 1.0 cannot hold these, not even as a reference.
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def text(run: Run, judgement: Judgement) -> str:
    """The file's content; the same run and judgement, the same bytes.

    A cell fails where its verdict fails, WATCH, BLIND and UNSTABLE under --strict alone; their MDE
    is a property. An excluded cell is skipped with its reason. A finding of the run as a whole is a
    test case of its own.
    """
    suite = ET.Element("testsuite", name=_clean(f"perfbench {run.manifest.matrix_name}"))
    suite.set("timestamp", _clean(run.manifest.created_utc.removesuffix("Z").split("+")[0]))
    _properties(suite, _about(run, judgement))
    seconds = _seconds(run)
    for finding in judgement.findings:
        case = _case(suite, run, "the run as a whole", finding.verdict.value, 0.0)
        if EXIT_OF[finding.verdict] is not Exit.OK or (
            judgement.strict and finding.verdict in FAIL_UNDER_STRICT
        ):
            _failure(case, finding.verdict, finding.reason, finding.reason)
    for cell in judgement.cells:
        _cell(suite, run, judgement, cell, seconds.get(cell.cell_id, 0.0))
    for one in run.manifest.excluded:
        case = _case(suite, run, "excluded", str(one.get("cell_id", "a cell")), 0.0)
        ET.SubElement(
            case,
            "skipped",
            message=_clean(f"excluded: {one.get('reason') or 'no reason was recorded'}"),
        )
    whole = ET.Element("testsuites", name="perfbench")
    whole.append(suite)
    for element in (whole, suite):
        element.set("tests", str(len(suite.findall("testcase"))))
        element.set("failures", str(len(suite.findall("testcase/failure"))))
        element.set("errors", "0")
        element.set("skipped", str(len(suite.findall("testcase/skipped"))))
        element.set("time", f"{sum(seconds.values()):.3f}")
    ET.indent(whole)
    return (
        '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(whole, encoding="unicode") + "\n"
    )


def _cell(
    suite: ET.Element, run: Run, judgement: Judgement, cell: CellVerdict, seconds: float
) -> None:
    case = _case(suite, run, cell.axes.workload, cell.cell_id, seconds)
    _properties(case, _numbers(cell))
    failed = cell.exit_code is not Exit.OK or (
        judgement.strict and cell.verdict in FAIL_UNDER_STRICT
    )
    if failed and cell.verdict is not None:
        reason = _changed(cell) + cell.reason
        body = f"{reason}\nreproduce: {cell.reproduce}" if cell.reproduce else reason
        _failure(case, cell.verdict, cell.reason, body, _changed(cell))
    else:
        ET.SubElement(case, "system-out").text = _clean(
            f"{_changed(cell)}{cell.verdict or 'MEASURED'}: {cell.reason}"
        )


def _changed(cell: CellVerdict) -> str:
    """What changed, before how it was judged; empty where no speed was compared."""
    return f"{cell.change}: " if cell.change else ""


def _case(suite: ET.Element, run: Run, group: str, name: str, seconds: float) -> ET.Element:
    # Viewers split the class at dots.
    group = f"{run.manifest.matrix_name.replace('.', '_')}.{group.replace('.', '_')}"
    return ET.SubElement(
        suite, "testcase", classname=_clean(group), name=_clean(name), time=f"{seconds:.3f}"
    )


def _failure(
    case: ET.Element, verdict: Verdict, message: str, body: str, changed: str = ""
) -> None:
    ET.SubElement(
        case, "failure", type=verdict.value, message=_clean(f"{changed}{verdict.value}: {message}")
    ).text = _clean(body)


def _properties(element: ET.Element, values: Mapping[str, str]) -> None:
    holder = ET.SubElement(element, "properties")
    for name, value in values.items():
        ET.SubElement(holder, "property", name=name, value=_clean(value))


def _about(run: Run, judgement: Judgement) -> dict[str, str]:
    manifest = run.manifest
    found = {
        "headline": judgement.headline,
        "exit_code": str(int(judgement.exit_code)),
        "strict": str(judgement.strict).lower(),
    }
    found |= {
        "run_id": manifest.run_id,
        "commit": manifest.source.commit or "unknown",
        "gpu": manifest.environment.gpu_slug,
    }
    return found | ({"injections": ", ".join(manifest.injections)} if manifest.injections else {})


def _numbers(cell: CellVerdict) -> dict[str, str]:
    found = {"verdict": "MEASURED" if cell.verdict is None else cell.verdict.value}
    values = {
        "tok_per_s": cell.cand_tok_per_s,
        "base_tok_per_s": cell.base_tok_per_s,
        "change_pct": cell.change_pct,
        "mde_pct": cell.mde_pct,
        "device_ms": cell.step.device_ms,
        "host_ms": cell.step.host_ms,
        "launches": cell.step.launches,
    }
    found |= {name: f"{value:.6g}" for name, value in values.items() if value is not None}
    if cell.own is not None:
        found["proved"] = "; ".join(cell.own.proved) or "nothing"
        found["not_proved"] = "; ".join(cell.own.not_proved) or "nothing"
    return found | ({"judged_by": cell.metric} if cell.evidence else {})


def _seconds(run: Run) -> dict[str, float]:
    found: dict[str, float] = {}
    for row in run.replicates:
        found[row.cell_id] = found.get(row.cell_id, 0.0) + row.wall_s
    return found


def _clean(value: str) -> str:
    """Characters that XML 1.0 has no place for, or that nobody would see, spelled out."""
    return _FORBIDDEN.sub(lambda match: f"\\u{ord(match[0]):04x}", visible(value))
