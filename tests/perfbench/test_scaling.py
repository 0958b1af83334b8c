"""The fitted exponent of time against length, and what is called superlinear."""

from __future__ import annotations

import math
import random

import pytest

from perfbench.gate.judging import judge
from perfbench.matrix.policy import GatePolicy
from perfbench.records.cells import Cell
from perfbench.records.rows import Run
from perfbench.report import scaling
from perfbench.report.rows import rows_of
from tests.perfbench import builders as b
from tests.perfbench.report_cases import alone, section

LENGTHS = (2048, 8192, 16384, 32768, 65536)
MATRIX = """\
version: 1
name: nsa-h100
target: {gpu: H100}
model: m7c_125m
axes: {workload: [train], seq_len: [2048, 8192, 16384, 32768, 65536], path: [v2, dense], fa2: [on]}
"""


def run_of(exponent: float, *, path: str = "v2", bend: float = 0.0, noise: float = 0.002) -> Run:
    """Steps of 1 ms at 2,048 tokens that grow with ``exponent``, the last one by ``bend`` more."""
    cells = [
        b.planned_cell(Cell("train", n, path, "on" if path == "v2" else "n/a")) for n in LENGTHS
    ]
    run = b.make_run(cells, matrix_text=MATRIX)
    rng, rows = random.Random(3), []
    for row in run.replicates:
        n = row.axes.seq_len
        power = exponent + (bend if n == LENGTHS[-1] else 0.0)
        step_s = 1e-3 * (n / LENGTHS[0]) ** power * (1 + noise * rng.gauss(0, 1))
        cell = next(one for one in cells if one.cell_id == row.cell_id)
        rows.append(b.replicate(cell, row.replicate, tok_per_s=n / step_s))
    return b.with_rows(run, rows)


def growth_of(run: Run) -> scaling.Growth:
    (found,) = scaling.growths(run, rows_of(run, judge(run, None, GatePolicy())))
    return found


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 1.7, 2.0])
def test_an_exact_power_is_found_with_an_interval_of_no_width(exponent: float) -> None:
    times_s = [3e-3 * n**exponent for n in LENGTHS]
    slope, low, high = scaling.fit(LENGTHS, times_s)
    assert slope == pytest.approx(exponent, abs=1e-9)
    assert high - low == pytest.approx(0, abs=1e-6)


def test_the_interval_covers_the_true_exponent_as_often_as_it_says() -> None:
    """scipy's own regression gives the same slope and error; 95 % of intervals hold the truth."""
    from scipy import stats

    rng, held, trials = random.Random(1), 0, 2000
    for _ in range(trials):
        times_s = [1e-3 * n**1.2 * math.exp(rng.gauss(0, 0.05)) for n in LENGTHS]
        slope, low, high = scaling.fit(LENGTHS, times_s)
        held += low <= 1.2 <= high
    x = [math.log(n) for n in LENGTHS]
    line = stats.linregress(x, [math.log(t) for t in times_s])
    assert slope == pytest.approx(line.slope)
    half = stats.t.ppf(0.975, len(LENGTHS) - 2) * line.stderr
    assert (high - low) / 2 == pytest.approx(half)
    assert held / trials == pytest.approx(0.95, abs=0.015)


def test_quadratic_time_of_sparse_attention_is_superlinear() -> None:
    """The model's work grows with about S^1.1: every key is looked at where some would do."""
    found = growth_of(run_of(2.0))
    assert found.closed_form is not None and 1.0 < found.closed_form < 1.3
    assert found.low > 1.9 and found.is_superlinear


def test_quadratic_time_of_dense_attention_is_what_its_work_asks_for() -> None:
    found = growth_of(run_of(1.55, path="dense"))
    assert found.closed_form == pytest.approx(1.6, abs=0.15)
    assert not found.is_superlinear


def test_time_that_follows_the_work_or_the_launches_is_not_marked() -> None:
    assert not growth_of(run_of(1.05)).is_superlinear
    assert not growth_of(run_of(0.2)).is_superlinear


def test_a_bend_at_the_end_is_seen_behind_launch_bound_beginnings() -> None:
    """Flat up to 32,768 tokens, then four times the time for twice the tokens."""
    found = growth_of(run_of(0.1, bend=0.45))
    assert found.low < found.closed_form  # type: ignore[operator]
    assert found.last > 2 and found.is_superlinear


def test_noise_alone_does_not_accuse() -> None:
    assert not growth_of(run_of(1.1, noise=0.2)).is_superlinear


def test_the_report_has_the_table_and_the_sentence() -> None:
    text = alone(run_of(2.0))
    assert "**superlinear**" in section(text, scaling.TITLE)
    assert "time grows faster than the work: fa2=on, path=v2, workload=train" in text
    quiet = alone(run_of(1.05))
    assert "**superlinear**" not in quiet and "time grows faster" not in quiet


def test_two_lengths_have_no_exponent() -> None:
    run = run_of(1.0)
    keep = [cell for cell in run.manifest.cells if cell.axes.seq_len <= 8192]
    rows = [row for row in run.replicates if row.axes.seq_len <= 8192]
    run = b.with_manifest(b.with_rows(run, rows), cells=keep)
    assert scaling.TITLE not in alone(run)


def test_a_matrix_that_cannot_be_read_leaves_the_closed_form_empty() -> None:
    found = growth_of(b.with_manifest(run_of(2.0), matrix_text="version: 99\n"))
    assert found.closed_form is None and not found.is_superlinear
