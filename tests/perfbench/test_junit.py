"""The files of a judgement for other programs: JUnit XML and verdict.json, valid for every name and
reason.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from perfbench import report
from perfbench.errors import Exit, PerfbenchError
from perfbench.gate.judgement import Judgement
from perfbench.gate.judging import judge
from perfbench.matrix.policy import GatePolicy
from perfbench.records import BaselineProblem
from perfbench.records.rows import Run
from perfbench.records.verdict import Verdict
from perfbench.report import junit, verdict_json
from tests.perfbench import builders as b
from tests.perfbench.edits import conclude

POLICY = GatePolicy()
TRAIN = "fa2=on,path=v2,seq_len=2048,workload=train"
FORWARD = "fa2=on,path=v2,seq_len=2048,workload=forward"
DENSE = "path=dense,seq_len=2048,workload=train"


def mixed(strict: bool = False) -> tuple[Run, Judgement]:
    """Four cells: confirmed slower, blind, wrong path and the same; one more is excluded."""
    whole = b.small_run(excluded=[{"cell_id": "path=v1", "reason": "loops: hours"}])
    base = b.baseline_of(b.replace_rows(whole, FORWARD, host_bound=True))
    run = b.scale_rows(whole, TRAIN, 0.9)
    run = b.replace_rows(run, DENSE, engaged={"dense.flash": 240})
    run = b.replace_rows(run, FORWARD, host_bound=True)
    return run, conclude(judge(run, base, POLICY, strict=strict), whole, run, POLICY)


def suite(run: Run, judgement: Judgement) -> ET.Element:
    root = ET.fromstring(junit.text(run, judgement))
    found = root.find("testsuite")
    assert (
        root.tag == "testsuites"
        and found is not None
        and dict(root.attrib)["tests"] == found.get("tests")
    )
    return found


def cases(run: Run, judgement: Judgement) -> dict[str, ET.Element]:
    return {str(case.get("name")): case for case in suite(run, judgement).findall("testcase")}


def properties(case: ET.Element) -> dict[str, str]:
    return {
        str(one.get("name")): str(one.get("value")) for one in case.findall("properties/property")
    }


def test_every_cell_is_a_case_and_red_ones_fail_with_the_reason() -> None:
    run, judgement = mixed()
    assert judgement.counts == {"SAME": 1, "BLIND": 1, "REGRESSED": 1, "WRONG_PATH": 1}
    whole = suite(run, judgement)
    assert [whole.get(name) for name in ("tests", "failures", "errors", "skipped", "time")] == [
        "5",
        "2",
        "0",
        "1",
        "60.000",
    ]
    found = cases(run, judgement)
    failure = found[TRAIN].find("failure")
    assert (
        failure is not None
        and failure.get("type") == "REGRESSED"
        and "-10.00 %" in str(failure.get("message"))
    )
    assert f"reproduce: perfbench run matrices/h100.yaml --only cell={TRAIN}" in str(failure.text)
    assert found[DENSE].find("failure[@type='WRONG_PATH']") is not None
    skipped = found["path=v1"].find("skipped")
    assert skipped is not None and skipped.get("message") == "excluded: loops: hours"
    assert (
        found[TRAIN].get("classname") == "nsa-h100.train" and found[TRAIN].get("time") == "15.000"
    )
    assert properties(whole)["exit_code"] == "4" and "injections" not in properties(whole)


def test_open_cells_pass_with_their_mde_and_fail_under_strict() -> None:
    run, judgement = mixed()
    blind = cases(run, judgement)[FORWARD]
    assert (
        blind.find("failure") is None
        and properties(blind)["verdict"] == "BLIND"
        and float(properties(blind)["mde_pct"]) > 0
    )
    assert (
        str(blind.findtext("system-out"))
        .partition(" processes: ")[2]
        .startswith("BLIND: host bound")
    )
    assert cases(*mixed(strict=True))[FORWARD].find("failure[@type='BLIND']") is not None


def test_a_finding_of_the_run_is_a_case() -> None:
    run = b.small_run(injections=["oom@path=v2"])
    judgement = judge(run, BaselineProblem(Verdict.NO_BASELINE, "no baseline at x.json"), POLICY)
    found = cases(run, judgement)["NO_BASELINE"]
    assert (
        found.find("failure[@type='NO_BASELINE']") is not None
        and found.get("classname") == "nsa-h100.the run as a whole"
    )
    assert properties(suite(run, judgement))["injections"] == "oom@path=v2"


@example("\x00\x1b[31m<b>&\"' ]]> \ud800 \ufffe \U0001f4a9")
@given(st.text(st.characters(), max_size=30))
def test_any_characters_give_valid_xml_and_json(text: str) -> None:
    run = b.small_run()
    plain = judge(run, None, POLICY)
    broken = dataclasses.replace(
        plain.cells[0], verdict=Verdict.FAILED, reason=text, reproduce=text, cell_id=f"a{text}"
    )
    judgement = dataclasses.replace(plain, cells=[broken], headline=text)
    written = junit.text(run, judgement)
    assert len(ET.fromstring(written.encode()).findall("testsuite/testcase/failure")) == 1
    assert json.loads(verdict_json.text(run, judgement).encode())["kind"] == "verdict"


def test_names_that_differ_by_a_forbidden_character_stay_apart() -> None:
    assert len({junit._clean(name) for name in ("a\x00", "a\x01", "a", "a\ufffe")}) == 4


# --- verdict.json


def problems(value: Any, schema: dict[str, Any], root: dict[str, Any], at: str = "$") -> list[str]:
    """Checks the part of JSON Schema that the schema uses, without the code that wrote it."""
    if "$ref" in schema:
        return problems(value, root["$defs"][schema["$ref"].removeprefix("#/$defs/")], root, at)
    if "anyOf" in schema:
        every = [problems(value, one, root, at) for one in schema["anyOf"]]
        return [] if [] in every else min(every, key=len)
    used = {
        "type",
        "enum",
        "const",
        "properties",
        "required",
        "additionalProperties",
        "items",
        "$defs",
        "$schema",
        "title",
        "description",
    }
    assert schema.keys() <= used | {
        "default",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "minimum",
        "multipleOf",
    }, schema.keys()
    kinds = {
        "object": dict,
        "array": list,
        "string": str,
        "boolean": bool,
        "null": type(None),
        "integer": int,
        "number": (int, float),
    }
    found = []
    if "type" in schema and (
        not isinstance(value, kinds[schema["type"]])
        or (isinstance(value, bool) and schema["type"] != "boolean")
    ):
        return [f"{at}: {value!r} is no {schema['type']}"]
    if ("const" in schema and value != schema["const"]) or (
        "enum" in schema and value not in schema["enum"]
    ):
        found.append(f"{at}: {value!r} is none of {schema.get('enum', schema.get('const'))}")
    if isinstance(value, (int, float)):
        low, high = (
            schema.get("exclusiveMinimum", float("-inf")),
            schema.get("exclusiveMaximum", float("inf")),
        )
        found += (
            []
            if low < value < high
            and value >= schema.get("minimum", float("-inf"))
            and value % schema.get("multipleOf", value or 1) == 0
            else [f"{at}: {value} is out of range"]
        )
    if isinstance(value, dict):
        known, rest = schema.get("properties", {}), schema.get("additionalProperties", {})
        found += [
            f"{at}.{name} is missing" for name in schema.get("required", []) if name not in value
        ]
        for name, one in value.items():
            if name not in known and rest is False:
                found.append(f"{at}.{name} is unknown")
            else:
                found += problems(one, known.get(name, rest), root, f"{at}.{name}")
    if isinstance(value, list):
        found += [
            text
            for place, one in enumerate(value)
            for text in problems(one, schema["items"], root, f"{at}[{place}]")
        ]
    return found


def test_the_verdict_file_obeys_its_schema(tmp_path: Path) -> None:
    run, judgement = mixed()
    files = report.write_ci(run, judgement, tmp_path)
    names = ["verdict.json", "junit.xml", "badge.json", "badge.svg"]
    assert [file.name for file in files] == names
    data, schema = json.loads(files[0].read_text()), json.loads(json.dumps(report.verdict_schema()))
    assert problems(data, schema, schema) == []
    assert (
        data["exit_code"] == 4
        and data["run"]["run_id"] == run.manifest.run_id
        and data["run"]["injections"] == []
    )
    slower = next(cell for cell in data["cells"] if cell["cell_id"] == TRAIN)
    assert (
        slower["verdict"] == "REGRESSED"
        and slower["confirmed"]
        and slower["evidence"][0]["ln"]["n_base"] == 3
    )
    assert ET.fromstring(files[1].read_text()).tag == "testsuites"
    before = [file.read_bytes() for file in files]
    assert before == [file.read_bytes() for file in report.write_ci(run, judgement, tmp_path)]
    alone = report.to_json(judge(run, None, POLICY))
    assert problems(alone, schema, schema) == [] and alone["run"] is None


@pytest.mark.parametrize(
    "change",
    [
        {"exit_code": "4"},
        {"headline": None},
        {"extra": 1},
        {"schema_version": 2},
        {"policy": {"alpha_screen": 0.5}},
        {"cells": [{"cell_id": "a"}]},
        {"counts": {"SAME": "1"}},
        {"findings": [{"verdict": "GREEN", "reason": ""}]},
    ],
)
def test_the_schema_refuses_other_files(change: dict[str, Any]) -> None:
    schema = report.verdict_schema()
    data = {**report.to_json(mixed()[1]), **change}
    assert problems(data, schema, schema)


def test_every_key_of_the_file_is_required() -> None:
    schema = report.verdict_schema()
    data = report.to_json(mixed()[1])
    assert set(schema["required"]) == set(data) and set(
        schema["$defs"]["CellLine"]["required"]
    ) == set(data["cells"][0])
    assert re.match(r"https://json-schema.org/", schema["$schema"])


def test_a_folder_that_cannot_be_written_exits_2(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PerfbenchError, match="cannot write the report") as caught:
        report.write_ci(*mixed(), tmp_path / "file")
    assert caught.value.exit_code is Exit.USAGE
