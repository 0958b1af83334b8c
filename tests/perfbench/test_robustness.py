"""Damaged files through the command line: no bytes give a traceback, a user's error is one line
with its exit code.

The files are real ones (matrices, a run made on an H100, its baseline), damaged as bytes and as
values. What a killed process, a full disk, a second writer and a clock that steps back do is in
test_schedule_robustness.py and test_run_file.py.
"""

from __future__ import annotations

import contextlib
import copy
import gzip
import io
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nsa.capability import assumed
from nsa.settings import Settings
from perfbench.commands import app
from perfbench.errors import Exit, PerfbenchError
from perfbench.gate import baseline
from perfbench.matrix import matrix as matrices
from perfbench.matrix import plan as plans
from perfbench.records import load_baseline, run_file, show_baseline
from perfbench.records.rows import Run
from tests import effort
from tests.perfbench import builders as b
from tests.perfbench.digested import baseline_text
from tests.perfbench.matrix_text import VALID

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
EVIDENCE = DATA / "runs" / "h100-demo"
RUN = gzip.decompress((EVIDENCE / "green" / run_file.COMPRESSED_RUN_FILE).read_bytes())
BASE = (DATA / "written-by-0a70f94" / "baselines" / "h100-demo.json").read_bytes()
MATRICES = [path.read_bytes() for path in sorted((ROOT / "matrices").glob("*.yaml"))]
CELL = "batch=8,path=dense,seq_len=4096,workload=train"
# The folder is shared by all examples of a test, each of which writes its own file again.
FUZZ = settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def call(*argv: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one command, both as a UTF-8 terminal would take them; any
    bug is an exception here.
    """
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = app.invoke(argv)
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode())  # type: ignore[attr-defined]  # it is a BytesIO
    return code, texts[0], texts[1]


def survives(*argv: str) -> int:
    """The command ends with an exit code of the table, and says why on one line where it could not
    do its work.
    """
    code, out, err = call(*argv)
    assert code in {int(one) for one in Exit} - {Exit.INTERNAL, Exit.INTERRUPTED}
    if not out:
        assert (
            code in (Exit.USAGE, Exit.BASELINE)
            and err.startswith("perfbench: ")
            and err.count("\n") == 1
        ), err
    return code


# Damage to bytes.

PIECES = st.sampled_from(
    [
        b"\x00",
        b"\xef\xbb\xbf",
        b"\r\n",
        b"\t",
        b"\xff",
        b"\xed\xa0\x80",
        b"\n",
        b"\n\n",
        b'"',
        b"{",
        b"}",
        b"[" * 3000,
        b"{" * 40,
        b",",
        b":",
        b"NaN",
        b"-Infinity",
        b"1e999",
        b"9" * 5000,
        b"\\ud800",
        b"\\u0000",
        b"&a ",
        b"*a",
        b"<<: ",
        b"!!python/object ",
        b"%YAML 1.1\n",
        b"---\n",
        b"...",
    ]
)


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """Up to three of: cut off, a bit flipped, something put in, a line doubled, lost or moved,
    other line ends.
    """
    data = whole
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data)))
        lines = data.splitlines(keepends=True) or [b""]
        number = draw(st.integers(0, len(lines) - 1))
        kind = draw(
            st.sampled_from(
                ["cut", "flip", "put", "over", "double", "lose", "swap", "crlf", "bom", "tabs"]
            )
        )
        if kind == "cut":
            data = data[:at]
        elif kind == "flip":
            at = min(at, max(len(data) - 1, 0))
            data = (
                data[:at]
                + bytes(one ^ (1 << draw(st.integers(0, 7))) for one in data[at : at + 1])
                + data[at + 1 :]
            )
        elif kind in ("put", "over"):
            data = (
                data[:at]
                + draw(PIECES)
                + data[at + (draw(st.integers(1, 9)) if kind == "over" else 0) :]
            )
        elif kind == "crlf":
            data = data.replace(b"\n", b"\r\n")
        elif kind == "bom":
            data = b"\xef\xbb\xbf" + data
        elif kind == "tabs":
            data = data.replace(b"  ", b"\t")
        else:
            other = draw(st.integers(0, len(lines) - 1))
            picked = {"double": [lines[number]] * 2, "lose": [], "swap": [lines[other]]}[kind]
            data = b"".join([*lines[:number], *picked, *lines[number + 1 :]])
    return data


@given(st.data())
@settings(FUZZ, max_examples=120)
def test_a_damaged_matrix(tmp_path: Path, data: st.DataObject) -> None:
    file = tmp_path / "m.yaml"
    file.write_bytes(data.draw(damaged(data.draw(st.sampled_from([*MATRICES, VALID.encode()])))))
    try:
        matrices.cells(matrices.load_matrix(file))
    except PerfbenchError as error:
        assert error.exit_code is Exit.USAGE
        assert all(line.startswith(str(file)) for line in str(error).splitlines()), (
            "a line for each mistake, each with its place"
        )


@given(st.data())
@settings(FUZZ, max_examples=40)
def test_a_damaged_run(tmp_path: Path, data: st.DataObject) -> None:
    file = tmp_path / "run.jsonl"
    file.write_bytes(data.draw(damaged(RUN)))
    survives("gate", str(file))


@given(st.data())
@settings(FUZZ, max_examples=40)
def test_a_damaged_baseline(tmp_path: Path, data: st.DataObject) -> None:
    file = tmp_path / "b.json"
    file.write_bytes(data.draw(damaged(BASE)))
    survives("gate", str(EVIDENCE / "green"), "--baseline", str(file))
    survives("baseline", "show", str(file))


# Damage to values.

VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2,
    10**18,
    -(10**30),
    10**400,
    0.0,
    -0.0,
    1e308,
    1e-308,
    5e-324,
    -1.5,
    "",
    "x",
    "1",
    "NaN",
    "\ud800",
    "a\nb\x1b[31m",
    "\x00",
    "é" * 999,
    [],
    {},
    [None],
    [[]],
    {"": None},
    [1e308] * 3,
    [5e-324] * 3,
    [-1.0, 1.0],
    ["\udfff"],
    {"\ud800": "\ud800"},
    float("nan"),
    float("inf"),
]


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value inside, the outer ones first."""
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, below in inner:
        yield (*at, key)
        yield from places(below, (*at, key))


def changed(draw: Callable[[st.SearchStrategy[Any]], Any], whole: Any) -> Any:
    """``whole`` with up to three values replaced, removed or wrapped."""
    whole = copy.deepcopy(whole)
    for _ in range(draw(st.integers(1, 3))):
        if not (where := list(places(whole))):
            break
        *outer, last = draw(st.sampled_from(where))
        holder = whole
        for key in outer:
            holder = holder[key]
        kind = draw(st.sampled_from(["value"] * 4 + ["remove", "wrap", "rename"]))
        if kind == "value":
            holder[last] = copy.deepcopy(draw(st.sampled_from(VALUES)))
        elif kind == "wrap":
            holder[last] = [holder[last]]
        elif kind == "rename" and isinstance(holder, dict):
            holder[f"{last} \ud800\n"] = holder.pop(last)
        else:
            holder.pop(last)
    return whole


def dumped(record: Any) -> bytes:
    return json.dumps(record).encode()


@given(st.data())
@settings(FUZZ, max_examples=60)
def test_a_run_with_other_values(tmp_path: Path, data: st.DataObject) -> None:
    lines = [json.loads(line) for line in RUN.splitlines()]
    number = data.draw(st.sampled_from([0, 1, 2, *range(len(lines))]))
    lines[number] = changed(data.draw, lines[number])
    file = tmp_path / "run.jsonl"
    file.write_bytes(b"".join(dumped(line) + b"\n" for line in lines))
    survives("gate", str(file), *data.draw(st.sampled_from([[], ["--json"], ["--strict"]])))
    command = data.draw(st.sampled_from(["explain", "candidate", "base"]))
    other = str(EVIDENCE / "base")
    {
        "explain": lambda: survives("explain", str(file), CELL),
        "candidate": lambda: survives("compare", other, str(file)),
        "base": lambda: survives("compare", str(file), other),
    }[command]()


@given(st.data())
@settings(FUZZ, max_examples=40)
def test_a_baseline_with_other_values(tmp_path: Path, data: st.DataObject) -> None:
    file = tmp_path / "b.json"
    file.write_bytes(dumped(changed(data.draw, json.loads(BASE))))
    survives("baseline", "show", str(file), *data.draw(st.sampled_from([[], ["--json"]])))
    survives("gate", str(EVIDENCE / "green"), "--baseline", str(file))
    survives("explain", str(EVIDENCE / "green"), CELL, "--baseline", str(file))


@given(st.data())
@settings(FUZZ, max_examples=30)
def test_a_log_of_any_kind(tmp_path: Path, data: st.DataObject) -> None:
    from perfbench.machine.doctor import findings, log

    file = tmp_path / "run.jsonl"
    file.write_bytes(data.draw(damaged(RUN) | st.binary(max_size=200)))
    with contextlib.suppress(PerfbenchError):
        findings.render_text(log.lines(file)).encode()


# Cases by name, which no chance should have to find.

BOMB = "version: 1\na: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{n}: &{n} [{', '.join([f'*{p}'] * 9)}]\n" for p, n in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (BOMB, "anchors"),
        ("version: 1\nname: " + "[" * 100_000, "nested deeper"),
        ("version: 1\nname: " + "{a: " * 50_000, "nested deeper"),
        ("version: 1\n\tname: x\n", "not valid YAML"),
        ("version: 1\nname: a\x00b\n", "remove the character"),
        ('version: 1\nname: "\\ud800"\n', "m.yaml"),
        ("version: " + "9" * 5000 + "\n", "m.yaml:1"),
        ("version: 1e99999\n", "m.yaml:1"),
        ("version: 1\n" * 2, "duplicate key 'version'"),
        ("a" * 2**20 + "b", "larger than"),
        ("- " * 30_000, "m.yaml:1"),
        ("? " * 30_000, "m.yaml:1"),
        ("version: 1\nname: x\n" + "x: !!python/object/apply:os.system [ls]\n", "tag"),
    ],
)
def test_matrices_that_attack_the_parser(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "m.yaml"
    file.write_text(text, encoding="utf-8")

    def refused() -> None:
        code, out, err = call("plan", str(file))
        assert code == Exit.USAGE and out == "" and words in err and err.startswith("perfbench: ")
        assert len(err) < 2000

    assert effort.loops(refused) < 200


DEEP = b'{"kind": "manifest", "schema_version": 1, "x": ' + b"[" * 200_000 + b"\n"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\n",
        b"\x00" * 4096,
        b"null\n",
        b"[]\n",
        b"{}\n",
        DEEP,
        b"\xef\xbb\xbf" + RUN,
        b"9" * 5000 + b"\n",
        RUN[: len(RUN) // 2] * 2,
        RUN.replace(b'"tok_per_s": ', b'"tok_per_s": NaN, "x": ', 1),
        RUN.replace(b'"wall_s": ', b'"wall_s": 1e400, "x": ', 1),
        RUN.replace(b"\n", b"\r"),
    ],
)
def test_run_files_that_are_none(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "run.jsonl"
    file.write_bytes(data)
    for argv in (
        ["gate", str(file)],
        ["compare", str(file), str(EVIDENCE / "base")],
        ["explain", str(file), CELL],
        ["doctor", "--json"][:0],
    ):
        if argv:
            code, out, err = call(*argv)
            assert (code, out) == (Exit.USAGE, "") and err.count("\n") == 1 and f"{file}:" in err


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00" * 4096,
        b"null",
        b"[" * 200_000,
        b'{"a": ' * 100_000,
        b"\xef\xbb\xbf" + BASE,
        b"9" * 5000,
        BASE[:-5],
    ],
)
def test_baselines_that_are_none(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "b.json"
    file.write_bytes(data)
    code, out, err = call("baseline", "show", str(file))
    assert (code, out) == (Exit.BASELINE, "") and err.count("\n") == 1 and str(file) in err
    assert call("gate", str(EVIDENCE / "green"), "--baseline", str(file))[0] == Exit.BASELINE


def test_windows_line_ends_and_a_byte_order_mark(tmp_path: Path) -> None:
    """CRLF is white space to JSON, so such a run is read; a BOM is not, and the error is of
    line 1.
    """
    file = tmp_path / "run.jsonl"
    file.write_bytes(RUN.replace(b"\n", b"\r\n"))
    assert call("gate", str(file))[0] == call("gate", str(EVIDENCE / "green"))[0]


# Sizes.

MANY = """\
version: 1
name: many
target: {gpu: none}
model: tiny
axes:
  workload: [train, forward]
  seq_len: [LENGTHS]
  path: [v2, dense]
  fa2: [off]
  dtype: [fp32]
exclude:
  - {path: v2, seq_len: 64, reason: "too short"}
expect:
  - {match: {path: v2}, engaged: [sel.v2], forbidden: [sel.v1]}
overrides:
  - {match: {path: dense}, gate: {tolerance_pct: 5}, reason: "noisy"}
"""


def test_planning_grows_with_the_cells_and_not_with_their_square() -> None:
    def planning(cells: int) -> Callable[[], None]:
        text = MANY.replace("LENGTHS", ", ".join(str(64 * n) for n in range(1, cells // 4 + 1)))

        def work() -> None:
            matrix = matrices.parse_matrix(text, "many.yaml")
            plan = plans.build_plan(
                matrix, only=[], capability=assumed("none"), settings=Settings()
            )
            shown = plans.plan_text(plan, matrix)
            assert len(plan.cells) + len(plan.excluded) == cells
            assert plan.excluded and shown.count("\n") > cells

        return work

    assert effort.growth(planning, 1000) < 8


def test_reading_and_showing_a_baseline_grows_with_its_cells_and_not_with_their_square(
    tmp_path: Path,
) -> None:
    """The gate itself is in test_gate.py; here the baseline's file is read, and its table made."""
    small = b.baseline_of(b.small_run()).model_dump()
    cell = next(iter(small["cells"].values()))

    def showing(cells: int) -> Callable[[], None]:
        file = tmp_path / f"{cells}.json"
        whole = json.loads(dumped(small | {"cells": {f"{CELL},i={n}": cell for n in range(cells)}}))
        file.write_text(baseline_text(whole), encoding="utf-8")

        def work() -> None:
            assert show_baseline(load_baseline(file)).count("\n") > cells

        return work

    assert effort.growth(showing, 1000) < 8


# Readers next to a writer.


def test_a_run_can_be_read_at_every_moment_while_it_is_written(tmp_path: Path) -> None:
    """A report made during the run sees whole lines, in order, and perhaps one that is not
    finished.
    """
    run: Run = b.small_run(replicates=40)
    writer = run_file.create_run(tmp_path, run.manifest)
    seen, done = [], threading.Event()

    def write() -> None:
        with writer:
            for row in run.replicates:
                writer.append(row)
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    while not done.is_set():
        found = run_file.read_run(writer.folder)
        assert found.replicates == run.replicates[: len(found.replicates)]
        seen.append(len(found.replicates))
    thread.join()
    assert seen == sorted(seen) and len(run_file.read_run(writer.folder).replicates) == len(
        run.replicates
    )


def test_a_baseline_is_whole_at_every_moment_while_it_is_replaced(tmp_path: Path) -> None:
    path, run = tmp_path / "b.json", run_file.read_run(EVIDENCE / "green")
    baseline.promote(run, path, allow_dirty=True)
    done = threading.Event()

    def write() -> None:
        for _ in range(8):
            baseline.promote(run, path, allow_dirty=True)
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    while not done.is_set():
        assert len(load_baseline(path).cells) == 5
    thread.join()
    assert [one.name for one in tmp_path.iterdir()] == ["b.json"]


@pytest.mark.parametrize("name", ["o\ud800x", "o\x85\n", " \u2028"])
@pytest.mark.parametrize("value", [2, None])
def test_names_that_no_terminal_takes(tmp_path: Path, name: str, value: float | None) -> None:
    """A lone surrogate is what an undecodable byte becomes; the others end a line for some
    readers.
    """
    lines = [json.loads(line) for line in RUN.splitlines()]
    row = next(line for line in lines if line["kind"] == "replicate")
    row["parity"]["tensors"] = {name: value}
    file = tmp_path / "run.jsonl"
    file.write_bytes(b"".join(dumped(line) + b"\n" for line in lines))
    wanted = Exit.USAGE if value is None else Exit.NOT_TRUE
    assert survives("gate", str(file)) == survives("gate", str(file), "--json") == wanted
    assert survives("explain", str(file), CELL) == (Exit.USAGE if value is None else Exit.OK)
