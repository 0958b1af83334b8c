"""GitHub output: annotations that no name can break, a summary within its limit, and the nightly
workflow.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from nsa.capability import assumed
from nsa.settings import Settings
from perfbench.gate.judgement import CellVerdict, Judgement
from perfbench.gate.judging import judge
from perfbench.matrix.matrix import load_matrix
from perfbench.matrix.plan import build_plan
from perfbench.matrix.policy import GatePolicy
from perfbench.records import BaselineProblem
from perfbench.records.verdict import Verdict
from perfbench.report import github
from tests.perfbench import builders as b
from tests.perfbench.report_cases import troubled

POLICY = GatePolicy()
ROOT = Path(__file__).parents[2]
COMMAND = re.compile(r"::(error|warning) title=([^:,\r\n]*)::([^\r\n]*)")


def judged(*verdicts: Verdict, strict: bool = False) -> Judgement:
    cells = [
        CellVerdict(f"seq_len={n},path=v2", {}, verdict, f"because {n}", reproduce=f"do {n}")
        for n, verdict in enumerate(verdicts)
    ]
    return dataclasses.replace(judge(b.small_run(), None, POLICY), cells=cells, strict=strict)


def levels(judgement: Judgement) -> list[str]:
    return [line.split(" ")[0] for line in github.github_commands(judgement)]


def test_every_red_is_an_error_and_each_kind_of_open_cell_one_warning() -> None:
    judgement = judged(
        *[Verdict.BLIND] * 30,
        Verdict.WATCH,
        Verdict.REGRESSED,
        Verdict.PARITY,
        Verdict.SAME,
        Verdict.NEW,
        Verdict.FASTER,
    )
    lines = github.github_commands(judgement)
    assert [line.split(" ")[0] for line in lines] == [
        "::error",
        "::error",
        "::warning",
        "::warning",
        "::warning",
    ]
    # the worst first
    assert (
        lines[0]
        == "::error title=perfbench%3A PARITY seq_len=32%2Cpath=v2::because 32%0Areproduce: do 32"
    )
    assert lines[1].startswith("::error title=perfbench%3A REGRESSED")
    assert (
        lines[3]
        == "::warning title=perfbench%3A BLIND%2C 30 cells::seq_len=0,path=v2: because 0 (and 29"
        " more)"
    )


def test_a_green_run_says_nothing_and_strict_turns_warnings_into_errors() -> None:
    assert github.github_commands(judged(Verdict.SAME, Verdict.FASTER)) == []
    assert github.github_commands(judge(b.small_run(), None, POLICY)) == []
    assert levels(judged(Verdict.WATCH, Verdict.NEW)) == ["::warning", "::warning"]
    assert levels(judged(Verdict.WATCH, strict=True)) == ["::error"]


def test_a_finding_of_the_run_is_an_error() -> None:
    judgement = judge(
        b.small_run(), BaselineProblem(Verdict.NO_BASELINE, "no baseline: 100 %"), POLICY
    )
    assert github.github_commands(judgement) == [
        "::error title=perfbench%3A NO_BASELINE::no baseline: 100 %25"
    ]


def test_no_more_than_github_keeps() -> None:
    lines = github.github_commands(judged(*[Verdict.FAILED] * 25))
    assert (
        len(lines) == 10
        and "16 more of this kind" in lines[-1]
        and levels(judged(*[Verdict.FAILED] * 10)) == ["::error"] * 10
    )


@example("100 % :: a,b\r\n::error::x `y`")
@given(st.text(st.characters(), max_size=40))
def test_no_text_breaks_a_command(text: str) -> None:
    cell = CellVerdict(f"id{text}", {}, Verdict.FAILED, f"why{text}", reproduce=text)
    (line,) = github.github_commands(dataclasses.replace(judged(), cells=[cell]))
    found = COMMAND.fullmatch(line)
    assert (
        found is not None
        and found[1] == "error"
        and unquote(found[2]).startswith("perfbench: FAILED id")
    )
    line.encode()


@given(st.text(max_size=30))
def test_escapes_are_undone_by_the_runner(text: str) -> None:
    def undone(value: str, pairs: list[tuple[str, str]]) -> str:
        for code, plain in pairs:
            value = value.replace(code, plain)
        return value

    data = [("%0D", "\r"), ("%0A", "\n"), ("%25", "%")]  # the order of the runner's own code
    assert undone(github.escape_data(text), data) == text and not re.search(
        r"[\r\n]", github.escape_data(text)
    )
    assert undone(github.escape_property(text), [("%3A", ":"), ("%2C", ","), *data]) == text


# --- the step summary


def test_pictures_are_named_because_a_summary_cannot_show_them() -> None:
    shown = github.summary("# x\n\n![tok/s](throughput.png)\n\ntext ![no](a.png)\n")
    assert (
        shown
        == "# x\n\n*tok/s*: `throughput.png` in the run's folder, which the workflow keeps as an"
        " artifact.\n\ntext ![no](a.png)\n"
    )


def test_changes_are_drawn_in_letters() -> None:
    """Where the picture of them stands: the worst first, to the left what is slower, at one scale;
    a change of half the largest is half as long.
    """
    _, judgement = troubled()
    chart = github.charts_of(judgement)["changes.png"]
    shown = github.summary("# x\n\n![c](changes.png)\n", charts={"changes.png": chart})
    assert shown.startswith("# x\n\n*c*: `changes.png` in the run's folder") and chart in shown
    bars = re.findall(r"([+-] *[\d.]+) %  ( *█*)\|(█*)$", chart, re.MULTILINE)
    changes = [float(change) for change, _, _ in bars]
    compared = [cell for cell in judgement.cells if cell.change]
    assert changes == sorted(changes) and len(bars) == github.MAX_BARS < len(compared)
    assert f"and {len(compared) - len(bars)} more" in chart and changes[-1] > 10 > changes[-2]
    per_pct = github.BAR_CHARS / max(map(abs, changes))
    for change, slower, faster in zip(changes, *list(zip(*bars, strict=True))[1:], strict=True):
        assert slower.count("█") == pytest.approx(max(0.0, -change) * per_pct, abs=1)
        assert len(faster) == pytest.approx(max(0.0, change) * per_pct, abs=1)
    assert github.charts_of(judge(b.small_run(), None, POLICY)) == {}


def test_a_large_report_is_cut_at_a_line_and_says_so() -> None:
    text = (
        "# head\n\n<details><summary>x</summary>\n\n````text\n"
        + "ü" * 99
        + "\n```\n" * 1
        + ("row\n" * 5000)
        + "````\n\n</details>\n"
    )
    shown = github.summary(text, limit_bytes=2000)
    assert len(shown.encode()) <= 2000 and shown.startswith("# head\n\n<details>")
    tail = shown.splitlines()[-6:]
    assert tail[:4] == ["row", "````", "", "</details>"] and tail[5].startswith(
        "**Cut here**: GitHub shows at most 2,000 bytes and"
    )
    assert f"the report has {len(text.encode()):,}." in tail[5]
    assert github.summary(text, limit_bytes=len(text.encode())) == text


@given(
    st.lists(
        st.sampled_from(
            ["a", "```", "````", "<details><summary>s</summary>", "</details>", "", "ü" * 50]
        ),
        max_size=60,
    )
)
def test_the_limit_holds_for_every_report(lines: list[str]) -> None:
    assert len(github.summary("\n".join(lines), limit_bytes=1000).encode()) <= 1000


def test_the_summary_is_appended_and_never_raises(tmp_path: Path) -> None:
    path = tmp_path / "summary.md"
    path.write_text("before\n")
    assert (
        github.append_summary(path, "# one\n") == ""
        and github.append_summary(path, "# two\n") == ""
    )
    assert path.read_text() == "before\n# one\n# two\n"
    path.write_text("x" * 5000)
    full = github.append_summary(path, "# three\n", limit_bytes=5100)
    assert full.startswith("got 5,000 bytes") and path.stat().st_size == 5000
    assert "cannot append the report" in github.append_summary(tmp_path, "# x\n")  # a folder


def test_a_long_report_stays_within_what_the_step_has_left(tmp_path: Path) -> None:
    path = tmp_path / "summary.md"
    path.write_text("x" * 500)
    assert github.append_summary(path, "line\n" * 2000, limit_bytes=3000) == ""
    assert 2500 < path.stat().st_size <= 3000 and "**Cut here**" in path.read_text()


# --- the workflows


def workflow(name: str) -> dict[Any, Any]:
    found = YAML(typ="safe").load(ROOT / ".github" / "workflows" / name)
    assert isinstance(found, dict)
    return found


CALLED = ("perfbench.yml", "first-baseline.yml")  # by the nightly, in the same run


@pytest.mark.parametrize("name", ["ci.yml", "nightly.yml", "gpu-pr.yml"])
def test_workflows_have_least_permissions_a_time_limit_and_one_run_at_a_time(name: str) -> None:
    """Steps: tests/perfbench/test_workflow_steps.py."""
    found = workflow(name)
    assert found["permissions"] == {"contents": "read"} and "group" in found["concurrency"]
    for job in found["jobs"].values():
        if "uses" in job:
            assert job["uses"].removeprefix("./.github/workflows/") in CALLED
            continue
        assert 0 < job["timeout-minutes"] <= 360 and "permissions" not in job


def test_the_nightly_never_runs_code_of_a_fork_and_keeps_the_whole_run() -> None:
    found = workflow("nightly.yml")
    assert set(found["on"]) == {"schedule", "workflow_dispatch"}
    for job in found["jobs"].values():
        assert "github.event.repository.fork" in job["if"] and "vars.GPU_NIGHTLY" in job["if"]
    assert found["jobs"]["fleet"]["uses"] == "./.github/workflows/perfbench.yml"
    job = workflow("perfbench.yml")["jobs"]["speed"]
    # the base's commit must be there to be measured
    assert job["steps"][0]["with"]["fetch-depth"] == 0
    commands = [step["run"] for step in job["steps"] if "run" in step]
    (check,) = [command for command in commands if "perfbench check" in command]
    assert check == '.venv/bin/perfbench check "$MATRIX" --budget "$BUDGET"'
    (upload,) = [
        step for step in job["steps"] if step.get("uses", "").startswith("actions/upload-artifact@")
    ]
    assert (
        upload["if"] == "always()"
        and upload["with"]["path"] == "reports/runs/"
        and upload["with"]["if-no-files-found"] == "error"
    )
    assert found["concurrency"]["cancel-in-progress"] is False


def fleet() -> list[dict[str, Any]]:
    found = json.loads((ROOT / ".github" / "fleet.json").read_text(encoding="utf-8"))
    assert isinstance(found, list)
    return found


def test_the_fleet_is_card_runner_matrix_and_baseline() -> None:
    """As docs/ci.md explains it; names are those of artifacts, so each is one alone."""
    needed = {"name", "card", "runner", "matrix", "baseline"}
    optional = {"constraints", "first_baseline_due"}
    names = [one["name"] for one in fleet()]
    assert len(set(names)) == len(names)
    for one in fleet():
        assert needed <= set(one) <= needed | optional
        assert re.fullmatch(r"[\w.-]+", one["name"]) and one["runner"][-1] == one["card"]
        assert (ROOT / one["matrix"]).is_file()
        assert (ROOT / one.get("constraints", one["matrix"])).is_file()
        assert " " not in one["matrix"] + one["baseline"]  # a shell reads them as words


def nightly_sets() -> list[tuple[str, str]]:
    """(card, set) of every job that measures."""
    return [(one["card"], one["name"].removesuffix(f"-{one['card']}")) for one in fleet()]


def test_the_nightly_covers_the_sets_that_matter_and_the_gpu_tests() -> None:
    assert {one for _, one in nightly_sets()} == {"gate", "kernels", "train", "decode"}
    for card, one in nightly_sets():
        assert f"matrices/nightly-{one}-{card}.yaml" in {entry["matrix"] for entry in fleet()}
    tests = workflow("nightly.yml")["jobs"]["tests"]
    assert tests["strategy"]["matrix"]["card"] == sorted({card for card, _ in nightly_sets()})
    assert any(
        "pytest -q --require gpu tests/gpu" in step.get("run", "") for step in tests["steps"]
    )
    assert tests["if"].startswith("always()")  # a red set hides no broken kernel


def test_the_nightly_reads_the_history_that_its_sets_write() -> None:
    jobs = workflow("nightly.yml")["jobs"]
    url = jobs["fleet"]["secrets"]["history"]
    speed = workflow("perfbench.yml")["jobs"]["speed"]["steps"]
    (check,) = [step for step in speed if step.get("name") == "Check"]
    assert check["env"]["PERFBENCH_HISTORY"] == "${{ secrets.history }}"
    assert url == jobs["changes"]["env"]["PERFBENCH_HISTORY"] == "${{ secrets.PERFBENCH_HISTORY }}"
    commands = [step.get("run", "") for step in jobs["changes"]["steps"]]
    assert commands[-3:-1] == [
        ".venv/bin/perfbench detect",  # its exit code is the job's
        ".venv/bin/perfbench site --since 365d",
    ]
    assert jobs["changes"]["if"].startswith("always()")  # a red set hides no drift
    assert "-report-only" not in " ".join(commands)


@pytest.mark.parametrize(("card", "name"), nightly_sets())
def test_every_set_of_the_nightly_is_a_matrix_of_its_card(card: str, name: str) -> None:
    matrix = load_matrix(str(ROOT / f"matrices/nightly-{name}-{card}.yaml"))
    assert matrix.name == f"nightly-{name}-{card}" and matrix.target.gpu.lower() == card
    assert matrix.measure.processes >= matrix.gate.min_replicates
    plan = build_plan(matrix, only=[], capability=assumed(card), settings=Settings())
    served = {counter for cell in plan.cells for counter in cell.route.counters}
    assert "sel.triton" in served, "the flagship path is in every set"
    # a screen that finds nothing must leave most of the night's 45 minutes to confirmations
    minutes = plan.estimate_s / 60
    assert minutes <= 15
