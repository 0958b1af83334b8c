"""What is printed and written: no name or reason is a command to GitHub or to a terminal, and a
full disk loses no verdict.
"""

from __future__ import annotations

import ast
import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfbench.commands import app, console, outcome
from perfbench.errors import Exit, PerfbenchError
from perfbench.gate.judgement import Judgement
from perfbench.gate.judging import judge
from perfbench.matrix.policy import GatePolicy
from perfbench.records.rows import Run, Status
from perfbench.report import github, junit, terminal_table, verdict_json
from perfbench.text import block, escape, inert, plain, visible
from tests.perfbench import builders as b
from tests.perfbench.ab_bench import LONG, Bench
from tests.perfbench.disk import full
from tests.perfbench.report_cases import written

ROOT = Path(__file__).parents[2]
REAL_REPORT = outcome.Outcome.write_report
HIDDEN = "".join(
    map(chr, (*range(9), *range(0xB, 0x20), *range(0x7F, 0xA0), 0x200E, 0x200F, 0xFEFF))
) + "".join(map(chr, (*range(0x2028, 0x202F), *range(0x2066, 0x206A))))
COMMANDS = re.compile(r"^\s*::|##\[", re.MULTILINE)
EVIL = (
    "::error::pwned ##[add-mask]x \u202egnp.exe\u202c \x1b[2J \x9b31m \ufeff | <b>x</b>\n::set-env"
)
CELL = "fa2=on,path=v2,seq_len=2048,workload=train"


def judged(reason: str) -> tuple[Run, Judgement]:
    """A run one of whose cells crashed with this reason."""
    run = b.small_run()
    cell = next(one for one in run.manifest.cells if one.cell_id == CELL)
    broken = b.change_rows(
        run, CELL, lambda row: b.failed(cell, Status.CRASH, row.replicate, reason=reason)
    )
    return broken, judge(broken, None, GatePolicy())


@given(st.text())
def test_no_text_is_a_command_or_hidden(text: str) -> None:
    for shown in (inert(text), inert(visible(text)), inert(plain(text)), inert(EVIL + text)):
        assert not COMMANDS.search(shown) and not set(shown) & set(HIDDEN)
        shown.encode("utf-8")


def test_what_is_hidden_is_shown_as_escapes() -> None:
    for char in HIDDEN:
        spelled = f"\\u{ord(char):04x}"
        assert inert(f"a{char}b") == visible(f"a{char}b") == plain(f"a{char}b") == f"a{spelled}b"
        assert spelled in block(f"a{char}b") or char == "\r"
        assert f"\\{spelled}" in escape(f"a{char}b")
    assert inert("a\tb\nc d\u00e9 \U0001f600") == "a\tb\nc d\u00e9 \U0001f600"
    assert plain("a\r\nb") == "a b"


@pytest.mark.parametrize("indent", ["", " ", "\t", "\u00a0", "\u3000"])
def test_a_line_never_begins_with_a_command(indent: str) -> None:
    assert inert(f"x\n{indent}::error::y") == f"x\n{indent}\\u003a:error::y"
    assert inert("a ::b") == "a ::b"


def test_json_stays_json() -> None:
    text = json.dumps({"a": EVIL, "b": ["##[x]", "\x7f"]}, indent=2, ensure_ascii=False)
    assert json.loads(inert(text)) == {"a": EVIL, "b": ["##[x]", "\x7f"]}


def test_colours_stay_and_nothing_else_of_a_terminal_does() -> None:
    assert inert("\x1b[1;32mgreen\x1b[0m\x1b[2J", colour=True) == "\x1b[1;32mgreen\x1b[0m\\u001b[2J"
    assert "\x1b" not in inert("\x1b[1;32mgreen\x1b[0m")


@pytest.mark.parametrize("width", range(60, 121, 7))
def test_a_wrapped_reason_is_no_command(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The table folds at the width; somewhere '::' comes to stand first."""
    found = False
    for padding in range(width):
        run, judgement = judged("x" * padding + " " + EVIL)
        table = terminal_table(run, judgement, width=width)
        found |= bool(re.search(r"^\s*::", table, re.MULTILINE))
        console.print_text(table)
        out = capsys.readouterr().out
        assert not COMMANDS.search(out) and not set(out) & set(HIDDEN)
    assert found  # it was the door that held, not the table


def test_every_output_shows_hidden_characters_as_escapes() -> None:
    run, judgement = judged(EVIL)
    outputs = {
        "terminal": terminal_table(run, judgement),
        "markdown": written(run, judgement),
        "junit": junit.text(run, judgement),
        "github": "\n".join(github.github_commands(judgement)),
        "json": verdict_json.text(run, judgement),
    }
    for name, text in outputs.items():
        assert not set(text) & set(HIDDEN), name
        assert ("\\u202e" in text and "\\u001b[2J" in text) or name == "markdown", name
    assert "\\\\u202e" in outputs["markdown"]  # a backslash is escaped in prose
    ET.fromstring(outputs["junit"])
    assert json.loads(outputs["json"])["cells"]


def test_annotations_are_one_command_each() -> None:
    _, judgement = judged(EVIL)
    for line in github.github_commands(judgement):
        assert "\n" not in line and re.match(r"::(error|warning) title=[^:]*::", line)


NASTY = "a|b\n<script>x</script>\n| --- | [l](u)"


def test_a_name_breaks_no_table() -> None:
    run, judgement = judged(NASTY)
    run = b.with_manifest(
        run, matrix_name=NASTY, excluded=[{"cell_id": NASTY, "reason": NASTY}], injections=[NASTY]
    )
    text = written(run, judgement)
    assert "<script>" not in re.sub(r"`[^`\n]*`", "", text)
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        bars = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(bars) == 1, table


# the last is for where the command line itself cannot be imported
PRINTING = {
    "perfbench/commands/console.py",
    "perfbench/runner/progress.py",
    "perfbench/__main__.py",
}


def test_all_that_is_printed_goes_through_one_door() -> None:
    """`perfbench.worker` writes to the process that started it."""
    found = []
    for path in sorted((ROOT / "perfbench").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if name in PRINTING or name.startswith("perfbench/worker/"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "print",
                "typer.echo",
                "typer.secho",
                "sys.stdout.write",
                "sys.stderr.write",
            ):
                found.append(f"{name}:{node.lineno}")
    assert found == []


def test_a_file_name_is_no_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x\n::error::y"
    assert app.invoke(["gate", str(path)]) == Exit.USAGE
    err = capsys.readouterr().err
    assert "error" in err and not COMMANDS.search(err)


# --- a full disk


@pytest.fixture
def slow(bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """A stored run that is red: a cell failed."""
    monkeypatch.setattr(outcome.Outcome, "write_report", REAL_REPORT)
    bench.current.ends = {LONG: Status.OOM}
    assert bench.run("run", "small.yaml") == Exit.FAILED
    capsys.readouterr()
    (folder,) = Path("reports/runs").iterdir()
    return folder


def test_a_full_disk_loses_no_red_verdict(
    slow: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {file.name: file.read_bytes() for file in slow.iterdir() if file.is_file()}
    full(monkeypatch)
    assert app.invoke(["report", str(slow)]) == Exit.FAILED
    out, err = capsys.readouterr()
    assert out.startswith("FAILED, exit 6") and "No space left" in err and "Traceback" not in err
    assert "the verdict is exit 0" not in err
    after = {file.name: file.read_bytes() for file in slow.iterdir() if file.is_file()}
    assert after == before  # whole, or as it was: never half


def test_a_green_verdict_whose_report_cannot_be_written_is_not_0(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(outcome.Outcome, "write_report", REAL_REPORT)
    full(monkeypatch)
    assert bench.run("run", "small.yaml") == Exit.USAGE
    out, err = capsys.readouterr()
    assert out.startswith("MEASURED, exit 0") and "No space left" in err
    (folder,) = Path("reports/runs").iterdir()
    later = f"perfbench report {folder} --out DIR"
    said, why = [line for line in err.splitlines() if "report" in line][-2:]
    assert f"Next: make room there, or name another place: `{later}` writes it later" in said
    assert "rights" not in err and "the run is kept" in said
    assert why.endswith("exit 2: the verdict is exit 0, and its report could not be written")
    assert [file.name for file in folder.iterdir()] == ["run.jsonl"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.parametrize("options", [[], ["--json"]])
@pytest.mark.parametrize(
    "command, code",
    [
        (["compare", "reports/evidence/h200-drop"], Exit.REGRESSED),
        (["gate", "tests/data/written-by-0a70f94/runs/small", "--baseline", "none"], Exit.BASELINE),
        (["compare", "tests/data/written-by-0a70f94/runs/small-ab"], Exit.USAGE),  # green
    ],
)
def test_a_stdout_that_is_full_keeps_the_exit_code(
    command: list[str], code: Exit, options: list[str]
) -> None:
    with open("/dev/full", "w") as stdout:
        done = subprocess.run(
            [sys.executable, "-m", "perfbench", *command, *options],
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            check=False,
        )
    assert done.returncode == code, done.stderr
    assert "stdout cannot be written: No space left" in done.stderr
    assert "The verdict: " in done.stderr and "Traceback" not in done.stderr


def test_a_command_whose_data_cannot_be_printed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def echo(text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(console.typer, "echo", echo)
    monkeypatch.setattr(console, "drop_stdout", lambda: None)
    with pytest.raises(PerfbenchError, match="stdout cannot be written") as caught:
        console.print_text("x")
    assert caught.value.exit_code is Exit.USAGE
