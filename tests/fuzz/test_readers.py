"""The fuzzer's readers without the fuzzer: valid files, a few hundred damaged ones, and attacks by
name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from perfbench.errors import Exit, PerfbenchError
from perfbench.matrix import matrix, rules, schema, strict_yaml
from perfbench.records import run_file
from tests import effort
from tests.fuzz import readers
from tests.fuzz.readers import PART, READERS, survives

GOOD = """\
version: 1
name: m
target: {gpu: none}
model: tiny
axes: {workload: [train], seq_len: [LENGTHS], path: [v2], dtype: [fp32]}
"""


def refusal(name: str, data: bytes, folder: Path) -> str:
    """The message; fails where the reader took the file."""
    with pytest.raises(PerfbenchError) as caught:
        READERS[name].read(data, folder)
    assert not survives(name, data, folder)
    return str(caught.value)


@pytest.mark.parametrize("name", READERS)
def test_seeds_are_read(name: str, tmp_path: Path) -> None:
    """At least one is taken whole: a reader that refuses all of them would be fuzzed no deeper than
    its first check.
    """
    assert sum(survives(name, seed, tmp_path) for seed in READERS[name].seeds()) > 0


@pytest.mark.parametrize("name", READERS)
def test_damaged_seeds(name: str, tmp_path: Path) -> None:
    reader, taken = READERS[name], 0
    for number in range(150):
        random = Random(number)
        taken += survives(name, reader.mutate(random.choice(reader.seeds()), random), tmp_path)
    assert 0 < taken < 150, "damage that every reader takes, or none, tests nothing"


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\n",
        b"\x00" * 4096,
        b"\xef\xbb\xbf",
        b"\xff\xfe{\x00",
        b"\r",
        b"null",
        b"[]",
        b"{}",
        b'"\\ud800"',
        b"9" * 5000,
        b"1e999999",
        b"[" * 200_000,
        b'{"a":' * 100_000,
        b'{"kind": "manifest", "schema_version": ' + b"9" * 4000 + b"}\n",
        b"- " * 50_000,
        PART,
    ],
)
def test_files_that_are_none(name: str, data: bytes, tmp_path: Path) -> None:
    """At once: the slowest, 50,000 nested sequences of YAML, takes as long as 23 plain loops."""

    def refused() -> None:
        assert not survives(name, data, tmp_path)

    assert effort.loops(refused) < 100


@pytest.mark.parametrize("name", READERS)
def test_windows_line_ends_and_a_byte_order_mark(name: str, tmp_path: Path) -> None:
    for seed in READERS[name].seeds():
        survives(name, seed.replace(b"\n", b"\r\n"), tmp_path)
        survives(name, b"\xef\xbb\xbf" + seed, tmp_path)


def test_a_line_of_many_megabytes(tmp_path: Path) -> None:
    """A matrix is not read beyond its bound; a run file is, in linear time."""

    def refused(length: int) -> Callable[[], None]:
        line = b"x" * length

        def work() -> None:
            assert "larger than" in refusal_once("matrix", line, tmp_path)
            assert "cut off" in refusal_once("run", line, tmp_path)
            assert "not JSON" in refusal_once("baseline", line, tmp_path)
            assert "no calibration" in refusal_once("calibration", line, tmp_path)

        return work

    assert effort.growth(refused, 10_000_000) < 8


def refusal_of_too_many(text: bytes, folder: Path) -> None:
    assert f"more than {strict_yaml.MAX_VALUES} values" in refusal_once("matrix", text, folder)


def refusal_once(name: str, data: bytes, folder: Path) -> str:
    with pytest.raises(PerfbenchError) as caught:
        READERS[name].read(data, folder)
    assert len(str(caught.value)) < 500
    return str(caught.value)


# What fuzzing found.


def test_a_matrix_of_too_many_values_is_refused_before_all_are_parsed(tmp_path: Path) -> None:
    """A megabyte of them took 22 s: now half a megabyte costs no less, since both end at the
    bound.
    """

    def refused(commas: int) -> Callable[[], None]:
        text = b"version: 1\nx: [" + b"1," * commas
        return lambda: refusal_of_too_many(text, tmp_path)

    assert effort.growth(refused, 130_000) < 2


def test_an_axis_of_many_values_is_checked_in_linear_time() -> None:
    """Each was looked for in a list of those before it: 20,000 took 3 s."""

    def checking(count: int) -> Callable[[], None]:
        lengths = range(1, count + 1)
        document = strict_yaml.parse(GOOD.replace("LENGTHS", ",".join(map(str, lengths))), "m.yaml")
        file = schema.validate(document)

        def work() -> None:
            assert rules.parse_axes(document, file)["seq_len"] == tuple(lengths)

        return work

    assert effort.growth(checking, 2_500) < 8


def test_of_many_mistakes_the_first_are_shown() -> None:
    """Thousands of them were ten megabytes of text."""
    text = (
        GOOD.replace("LENGTHS", "64") + "gate:\n" + "".join(f"  wrong_{n}: 1\n" for n in range(500))
    )
    with pytest.raises(PerfbenchError) as caught:
        matrix.parse_matrix(text, "m.yaml")
    lines = str(caught.value).splitlines()
    assert [line.split(":")[1] for line in lines[:20]] == [str(7 + n) for n in range(20)]
    assert lines[20:] == ["m.yaml:1: 480 more mistakes, from line 27 on; correct these first"]


def test_cells_times_rules_are_bounded() -> None:
    """20,000 cells and as many exclusions would be compared for minutes."""
    text = (
        GOOD.replace("LENGTHS", ",".join(map(str, range(1, 5001))))
        + "exclude:\n"
        + "  - {path: v1, reason: x}\n" * 401
    )
    with pytest.raises(
        PerfbenchError,
        match=r"m.yaml:5: axes: 5000 cells times 401 rules are more than 2000000 comparisons",
    ):
        matrix.parse_matrix(text, "m.yaml")


def edited(seed: bytes, kind: str, **values: Any) -> bytes:
    """``seed`` with fields of every line of that kind changed."""
    lines = [json.loads(line) for line in seed.splitlines()]
    return b"".join(
        json.dumps(one | values if one["kind"] == kind else one).encode() + b"\n" for one in lines
    )


@pytest.mark.parametrize("count", [-1, run_file.MAX_REPLICATES + 1, 10**18])
def test_a_number_of_replicates_that_no_run_has(count: int, tmp_path: Path) -> None:
    """What is missing in a pair is counted up to it: 10**9 hung for minutes."""
    seed = READERS["run"].seeds()[0]
    assert ":1: replicates is" in refusal(
        "run", edited(seed, "manifest", replicates=count), tmp_path
    )
    run_file.parse(edited(seed, "manifest", replicates=run_file.MAX_REPLICATES), "run.jsonl")


def test_a_matrix_asks_for_no_more_replicates_than_a_run_file_holds() -> None:
    text = (
        GOOD.replace("LENGTHS", "64") + f"measure: {{processes: {run_file.MAX_REPLICATES + 1}}}\n"
    )
    with pytest.raises(
        PerfbenchError, match=r"m.yaml:6: measure.processes: 100001 is more than 100000"
    ):
        matrix.parse_matrix(text, "m.yaml")


@pytest.mark.parametrize(
    "values",
    [
        {"samples_s": [1e308] * 4},
        {"steps_per_sample": 10**400},
        {"steps_per_sample": -(2**63) - 1},
        {"wall_s": -1e100},
        {"attempt": 2**63},
    ],
)
def test_numbers_of_a_run_that_overflow(values: dict[str, Any], tmp_path: Path) -> None:
    """The gate adds, divides and turns them into floats: such were a ZeroDivisionError and an
    OverflowError.
    """
    assert "is beyond" in refusal(
        "run", edited(READERS["run"].seeds()[0], "replicate", **values), tmp_path
    )


def test_numbers_at_the_bound_are_read() -> None:
    data = edited(READERS["run"].seeds()[0], "replicate", wall_s=9e99, attempt=2**63 - 1)
    assert run_file.parse(data, "run.jsonl").replicates[0].attempt == 2**63 - 1


def test_a_count_of_a_baseline_that_overflows(tmp_path: Path) -> None:
    whole = json.loads(READERS["baseline"].seeds()[0])
    next(iter(whole["cells"].values()))["kernel_count"] = 10**400
    assert "is beyond 64 bits" in refusal("baseline", json.dumps(whole).encode(), tmp_path)


@pytest.mark.parametrize("slug", ["a\nb", "\x1b[31m", "\x00", "\u2028"])
def test_a_calibration_of_a_gpu_whose_name_no_terminal_should_be_sent(
    slug: str, tmp_path: Path
) -> None:
    whole = json.loads(READERS["calibration"].seeds()[0]) | {"gpu_slug": slug}
    assert "got a calibration of" in refusal("calibration", json.dumps(whole).encode(), tmp_path)


def test_the_matrix_of_a_run_whose_path_no_terminal_should_be_sent(tmp_path: Path) -> None:
    data = edited(
        READERS["run"].seeds()[0],
        "manifest",
        matrix_text="version: 2\n",
        matrix_sha256=hashlib.sha256(b"version: 2\n").hexdigest(),
        matrix_path="m\n\x1b[31m.yaml",
    )
    assert refusal("run", data, tmp_path).startswith(r"m \u001b[31m.yaml:1: ")


@pytest.mark.parametrize(
    ("error", "finding"),
    [
        (ZeroDivisionError("x"), ZeroDivisionError),
        (PerfbenchError(Exit.INTERNAL, "x"), AssertionError),
        (PerfbenchError(Exit.USAGE, ""), AssertionError),
        (PerfbenchError(Exit.USAGE, "two\nlines"), AssertionError),
        (PerfbenchError(Exit.USAGE, "\x1b[31m"), AssertionError),
        (PerfbenchError(Exit.USAGE, "\ud800"), UnicodeEncodeError),
        (PerfbenchError(Exit.USAGE, "x" * 9000), AssertionError),
    ],
)
def test_what_counts_as_a_finding(
    error: Exception, finding: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(data: bytes, folder: Path) -> None:
        raise error

    monkeypatch.setattr(readers, "READERS", {"baseline": replace(READERS["baseline"], read=read)})
    with pytest.raises(finding):
        survives("baseline", b"", tmp_path)
