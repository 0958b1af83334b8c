"""Peers in a report: the best dense kernel is the best of those that ran, whoever wrote it; the
window alone is held against none; an absent peer is said.
"""

from __future__ import annotations

import pytest

from perfbench.gate.judging import judge
from perfbench.matrix.policy import GatePolicy
from perfbench.records.cells import Cell
from perfbench.records.rows import LoadedPeer
from perfbench.report import gap, speeds, tables
from perfbench.report.rows import Row
from tests.perfbench.test_report_workloads import attention, lines, rows_in, run_of, text_of


def by_path(rows: list[Row], workload: str = "attention") -> dict[str, Row]:
    return {row.cell.axes.path: row for row in rows if row.cell.axes.workload == workload}


def test_the_best_dense_kernel_may_be_a_peers() -> None:
    run = run_of(
        *attention("v2", 10.0, 2.5),
        *attention("dense_cudnn", 20.0, 6.0),
        *attention("dense_fa4", 15.0, 4.5),
        *attention("dense_fa3", None, 4.0),
        *attention("flex_window", 1.0, 0.5),
        *attention("sfnsa", 12.0, 3.0),
    )
    rows = rows_in(run)
    both, forward = by_path(rows), by_path(rows, "attention_forward")
    assert both["v2"].x_dense == pytest.approx(1.5)
    assert both["sfnsa"].x_dense == pytest.approx(1.25)
    assert forward["v2"].x_dense == pytest.approx(1.6)  # FA-3's, which has no backward
    assert both["dense_cudnn"].x_dense == pytest.approx(0.75)
    assert both["flex_window"].x_dense is None
    assert "the window alone has no dense twin" in both["flex_window"].nulls["x dense"]
    found = {line[0]: line for line in lines(text_of(run), "Attention")}
    assert found["v2"][6:9] == ["1.60", "1.50", "dense_fa3, dense_fa4"]
    top = tables.fastest(rows)[1]
    assert {line[1] for line in top} == {"v2"}, "not the window, which computes less"


def test_a_crossover_is_with_the_best_dense_peer() -> None:
    cells = [
        (Cell("attention", tokens, path, "on" if path == "v2" else "auto"), ms, {})
        for path, times in {
            "v2": (2.0, 4.0, 8.0),
            "dense": (2.5, 10.0, 40.0),
            "dense_mine": (1.0, 3.0, 16.0),
            "flex_window": (0.1, 6.0, 0.1),
        }.items()
        for tokens, ms in zip((1024, 2048, 4096), times, strict=True)
    ]
    (found,) = speeds.crossovers(rows_in(run_of(*cells)))
    assert found.series[0] == "v2" and (found.below, found.above) == (2048, 4096)


def test_peers_are_no_link_of_a_chain() -> None:
    run = run_of(*attention("v2", 10.0, None), *attention("sfnsa", 9.0, None))
    chains = gap.gaps(run, judge(run, None, GatePolicy())).chains
    assert chains == {}


def test_an_absent_peer_is_said_in_the_report() -> None:
    why = "skipped, path=dense_fa4: package flash-attn-4 is not installed; pip install flash-attn-4"
    left = [{"cell_id": "path=dense_fa4,seq_len=8192,workload=attention", "reason": why}]
    text = text_of(run_of(*attention("v2", 10.0, 2.5), excluded=left))
    assert "package flash-attn-4 is not installed; pip install flash-attn-4" in text


def test_a_report_says_which_peers_ran() -> None:
    loaded = {
        "dense_fa4": LoadedPeer(
            name="dense_fa4", version="flash-attn-4 4.0.0b36", file="/x/a.py", file_sha256="0"
        ),
        "sfnsa": LoadedPeer(
            name="sfnsa",
            version=None,
            file="/x/sfnsa_peer.py",
            file_sha256="0",
            commit="ab" * 20,
            dirty_sha256="1",
        ),
    }
    cells = [
        (cell, ms, {"peer": loaded[path]})
        for path in loaded
        for cell, ms, _ in attention(path, 10.0, 2.5)
    ]
    wanted = "dense_fa4 flash-attn-4 4.0.0b36; sfnsa sfnsa_peer.py at abababababab with changes"
    assert wanted in text_of(run_of(*cells)).replace("\\_", "_")
    assert "peers" not in text_of(run_of(*attention("v2", 10.0, 2.5)))


def test_fa2_is_named_for_none_of_them() -> None:
    run = run_of(*attention("v2", 10.0, 2.5), *attention("sfnsa", 12.0, 3.0))
    assert "FA-2 n/a" not in text_of(run)
    assert {line[1] for line in tables.fastest(rows_in(run))[1]} == {"v2"}
