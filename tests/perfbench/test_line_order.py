"""A report does not follow the order of lines in the file: replicates go by number, resumes by
time.

Row of the faults: order.
"""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest

from perfbench.commands.outcome import policy_of
from perfbench.gate.judging import judge
from perfbench.matrix import GatePolicy
from perfbench.records import Run, read_run
from perfbench.report import junit, terminal_table
from perfbench.report.rows import rows_of
from tests.perfbench import builders as b
from tests.perfbench.report_cases import written

HOME = Path(__file__).parents[1] / "data" / "written-by-0a70f94" / "runs"
CELL = "fa2=on,path=v2,seq_len=2048,workload=train"


def printed(run: Run) -> str:
    judgement = judge(run, None, policy_of(run))
    return written(run, judgement) + terminal_table(run, judgement)


def both(folder: Path, seed: int) -> tuple[Run, Run]:
    """A run that was resumed four times, in a file without digests, and with its lines shuffled;
    lines of one replicate keep their order, since its last one counts.
    """
    data = gzip.decompress((HOME / "h100" / "run.jsonl.gz").read_bytes())
    manifest, *lines = data.splitlines(keepends=True)
    rng, places = random.Random(seed), dict[str, float]()

    def place(line: bytes) -> float:
        one = json.loads(line)
        keys = ("kind", "cell_id", "replicate", "name", "block", "resumed_utc")
        return places.setdefault(str([one.get(key) for key in keys]), rng.random())

    as_written = folder / "run.jsonl"
    as_written.write_bytes(data)
    first = read_run(as_written)
    as_written.write_bytes(b"".join([manifest, *sorted(lines, key=place)]))
    return first, read_run(as_written)


@pytest.mark.parametrize("seed", range(3))
def test_shuffled_lines_make_the_same_report(tmp_path: Path, seed: int) -> None:
    first, shuffled = both(tmp_path, seed)
    assert shuffled.replicates != first.replicates and len(first.resumed) == 4
    assert shuffled.resumed == first.resumed
    assert printed(shuffled) == printed(first)


def test_shuffled_lines_make_the_same_junit(tmp_path: Path) -> None:
    """Of our own: what a CI server reads."""
    texts = [junit.text(run, judge(run, None, policy_of(run))) for run in both(tmp_path, 3)]
    assert texts[0] == texts[1] and "<testcase" in texts[0]


def test_shuffled_lines_are_the_same_baseline(tmp_path: Path) -> None:
    """Of our own: a run against its own baseline, whichever of both has its lines shuffled."""
    first, shuffled = both(tmp_path, 4)
    policy = policy_of(first)
    rendered = [
        repr(judge(run, b.baseline_of(base), policy))
        for run in (first, shuffled)
        for base in (first, shuffled)
    ]
    assert len(set(rendered)) == 1, rendered


def test_counts_are_those_of_the_first_replicate() -> None:
    run = b.small_run()
    counters = ("cmp.sdpa", "sel.v2", "win.fa2")
    marked = b.change_rows(
        run,
        CELL,
        lambda row: row.model_copy(update={"engaged": dict.fromkeys(counters, row.replicate + 1)}),
    )
    back = b.with_rows(marked, reversed(marked.replicates))
    for one in (marked, back):
        rows = rows_of(one, judge(one, None, GatePolicy()))
        (row,) = (row for row in rows if row.cell.cell_id == CELL)
        assert row.engaged == dict.fromkeys(counters, 1)
