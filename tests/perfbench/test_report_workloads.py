"""What the report says of decode, chunked prefill and attention alone, and how it names what
compiled or captured cells ran.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from nsa import routing
from perfbench.gate.judging import judge
from perfbench.matrix.policy import GatePolicy
from perfbench.records.cells import Cell
from perfbench.records.rows import CacheLine, PlannedCell, Replicate, Run
from perfbench.report import markdown, plots, speeds, tables, workloads
from perfbench.report.rows import Row, launch_bound, rows_of
from tests.perfbench import builders as b

MATRIX = """\
version: 1
name: nsa-h100
target: {gpu: H100}
model: m7c_125m
axes: {workload: [decode], seq_len: [2048], path: [v2], fa2: [on]}
"""
MIB = 2**20


def green(cell: PlannedCell, step_ms: float, **fields: Any) -> Replicate:
    """A row of ``cell`` whose step took ``step_ms``; decode steps are one token a sequence."""
    tokens = cell.axes.batch * (1 if cell.axes.workload == "decode" else cell.axes.seq_len)
    speed = tokens / (step_ms / 1e3)
    timed = {
        "tokens_per_step": tokens,
        "samples_s": [4 * step_ms / 1e3] * 5,
        "physics": b.physics(speed, tokens),
    }
    return b.replicate(cell, tok_per_s=speed, **timed, **fields)


def run_of(*cells: tuple[Cell, float, dict[str, Any]], **manifest: Any) -> Run:
    planned = [(b.planned_cell(cell), step_ms, fields) for cell, step_ms, fields in cells]
    run = b.make_run(
        [cell for cell, _, _ in planned], replicates=1, **{"matrix_text": MATRIX, **manifest}
    )
    return b.with_rows(run, [green(cell, step_ms, **fields) for cell, step_ms, fields in planned])


def rows_in(run: Run) -> list[Row]:
    return rows_of(run, judge(run, None, GatePolicy()))


def text_of(run: Run) -> str:
    return markdown.text(run, judge(run, None, GatePolicy()), rows_in(run), [])


def lines(text: str, title: str) -> list[list[str]]:
    """The body of the table of one section."""
    section = text.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]
    found = [
        line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")
    ]
    assert len({len(one) for one in found}) == 1, "a line of another width than its head"
    return found[2:]


def held(tokens: int, mib: float = 72.0, **keys: float) -> dict[str, CacheLine]:
    """Keys at 2,048 held tokens by hand: blocks of 32 by 16, 15 whole blocks of 64 and the one key
    of its own, a window of 512.
    """
    return {
        "cache": CacheLine(
            tokens=tokens,
            memory_bytes=int(mib * MIB),
            keys_read={"cmp": 127.0, "sel": 961.0, "win": 512.0, **keys},
        )
    }


DECODE = Cell("decode", 2048, "v2", "on")


def test_decode_shows_its_step_its_keys_and_its_caches() -> None:
    run = run_of(
        (DECODE, 2.5, held(2048)), (Cell("decode", 2048, "v2", "on", batch=8), 4.0, held(2048, 576))
    )
    one, eight = lines(text_of(run), "Decode")
    assert one == ["v2", "1", "2,048", "2.5", "400", "127 (127)", "961 (961)", "512 (512)", "72.0"]
    assert eight[1:5] == ["8", "2,048", "4", "2,000"] and eight[-1] == "576.0"


def test_keys_that_are_not_those_of_the_closed_form_are_loud() -> None:
    (line,) = lines(text_of(run_of((DECODE, 2.5, held(2048, sel=2049.0)))), "Decode")
    assert line[5:8] == ["127 (127)", "**2,049** (961)", "512 (512)"]


def test_without_a_readable_matrix_the_keys_stand_alone() -> None:
    run = run_of((DECODE, 2.5, held(2048)), matrix_text="version: 9\n")
    assert lines(text_of(run), "Decode")[0][5:8] == ["127", "961", "512"]
    assert "cannot read the run's matrix, so no closed form" in text_of(run)


def test_a_row_without_a_cache_or_a_speed_has_no_number() -> None:
    assert lines(text_of(run_of((DECODE, 2.5, {}))), "Decode")[0][5:] == []
    untrue = run_of((DECODE, 2.5, {**held(2048), "parity": b.parity(ok=False)}))
    assert lines(text_of(untrue), "Decode")[0] == ["v2", "1", "2,048"]


def test_a_chunked_prefill_is_held_against_the_mean_over_its_queries() -> None:
    """64 tokens: blocks of 32 by 16 end at 31, 47 and 63, so 33 + 17 + 1 keys; selection and window
    are the 2,080 causal ones.
    """
    cell = Cell("chunked_prefill", 64, "v2", "on", chunk=32)
    (line,) = lines(
        text_of(run_of((cell, 1.0, held(64, 0.5, cmp=51 / 64, sel=2080 / 64, win=2080 / 64)))),
        "Chunked prefill",
    )
    assert line == [
        "v2",
        "1",
        "64",
        "32",
        "1",
        "64,000",
        "0.8 (0.8)",
        "32.5 (32.5)",
        "32.5 (32.5)",
        "0.5",
    ]


def attention(
    path: str, both_ms: float | None, forward_ms: float | None, seq_len: int = 8192
) -> list[tuple[Cell, float, dict[str, Any]]]:
    times = {"attention": both_ms, "attention_forward": forward_ms}
    return [
        (Cell(name, seq_len, path, "on" if path == "v2" else "auto"), ms, {})
        for name, ms in times.items()
        if ms is not None
    ]


def test_attention_is_reported_forward_backward_and_against_the_best_dense_kernel() -> None:
    run = run_of(
        *attention("v2", 10.0, 2.5),
        *attention("dense_flash", 24.0, 5.0),
        *attention("dense_cudnn", 20.0, 6.0),
    )
    found = {line[0]: line for line in lines(text_of(run), "Attention")}
    assert found["v2"] == [
        "v2",
        "1",
        "8,192",
        "2.5",
        "7.5",
        "10",
        "2.00",
        "2.00",
        "dense_flash, dense_cudnn",
        "GPU",
    ]
    assert found["dense_flash"][3:8] == ["5", "19", "24", "1.00", "0.83"]
    assert found["dense_cudnn"][3:8] == ["6", "14", "20", "0.83", "1.00"]
    by_id = {row.cell.cell_id: row for row in rows_in(run)}
    assert by_id["fa2=on,path=v2,seq_len=8192,workload=attention"].x_dense == pytest.approx(2.0)
    top = (
        text_of(run)
        .split("## The fastest path of NSA at each length", 1)[1]
        .split("## Attention", 1)[0]
    )
    assert re.search(r"\| attention \| v2 \| 819,200 \| 409,600 \| 2\.00 \|", top)


def test_a_backward_needs_both_of_its_cells_proved() -> None:
    assert lines(text_of(run_of(*attention("v2", 10.0, None))), "Attention")[0][3:] == ["10", "GPU"]
    run = run_of(*attention("v2", 10.0, 2.5))
    forward = next(
        cell.cell_id for cell in run.manifest.cells if cell.axes.workload == "attention_forward"
    )
    wrong = b.change_rows(
        run, forward, lambda row: row.model_copy(update={"parity": b.parity(ok=False)})
    )
    assert lines(text_of(wrong), "Attention")[0][3:] == ["10", "GPU"]
    assert "backward ms" not in text_of(wrong) and "both ms" in text_of(wrong)


def test_another_length_or_dtype_is_no_twin() -> None:
    other = run_of(*attention("v2", 10.0, 2.5), *attention("dense_flash", 24.0, 5.0, seq_len=4096))
    assert next(line for line in lines(text_of(other), "Attention") if line[0] == "v2")[6:9] == [
        "-",
        "-",
        "-",
    ]
    dense = [
        (Cell(cell.workload, 8192, "dense_flash", dtype="fp16"), ms, {})
        for cell, ms, _ in attention("dense_flash", 24.0, 5.0)
    ]
    found = lines(text_of(run_of(*attention("v2", 10.0, 2.5), *dense)), "Attention")
    assert [line[0] for line in found] == ["v2, dtype bf16", "dense_flash, dtype fp16"] and found[
        0
    ][6] == "-"


def test_dense_kernels_stand_for_no_twin_of_a_whole_model() -> None:
    cells = [
        (Cell("train", 8192, path, fa2), ms, {})
        for path, fa2, ms in (("v2", "on", 10.0), ("dense_flash", "auto", 5.0))
    ]
    assert {row.x_dense for row in rows_in(run_of(*cells))} == {None}  # type: ignore[arg-type]


def test_a_step_of_decode_is_one_token_and_its_length_costs_no_launches() -> None:
    cells = [
        (Cell(workload, n, "v2", "on"), 2.5, {})
        for workload in ("decode", "forward")
        for n in (2048, 4096)
    ]
    rows = rows_in(run_of(*cells))  # type: ignore[arg-type]
    assert {round(row.step_ms or 0, 6) for row in rows} == {2.5}
    (reported,) = launch_bound(rows)
    assert "workload=forward" in reported and "2.5 ms a step against 2.5 ms" in reported


@pytest.mark.parametrize(
    ("how", "shown"),
    [
        ("call", ""),
        ("capture", " (at the capture, x replays)"),
        ("graph", " (in the compiled graph, x runs)"),
    ],
)
def test_counters_say_how_they_are_known(how: str, shown: str) -> None:
    (row,) = rows_in(run_of((Cell("train", 2048, "v2", "on"), 10.0, {"engaged_by": how})))
    assert tables.counters(row) == f"cmp.sdpa 240, sel.fa2 240, sel.v2 240, win.fa2 240{shown}"


def test_switches_are_named_only_where_they_are_turned() -> None:
    on = Cell("train", 2048, "v2", "on", compile="on")
    prefill = Cell("chunked_prefill", 2048, "v2", "on", chunk=512)
    rows = rows_in(
        run_of((Cell("train", 2048, "v2", "on"), 10.0, {}), (on, 5.0, {}), (prefill, 5.0, {}))
    )
    lines, bars = speeds.panels_of(rows)
    assert not lines and list(bars) == ["train", "chunked_prefill"]
    shapes = [plots.shape(row, plots.varying(rows)) for row in rows]
    assert shapes == ["1 x 2,048", "1 x 2,048, compiled", "1 x 2,048, chunk 512"]
    assert [line[0] for line in tables.fastest(rows)[1]] == [
        "train",
        "train, compile on",
        "chunked_prefill, chunk 512",
    ]


def test_other_runs_have_no_such_tables(tmp_path: Path) -> None:
    assert workloads.tables(b.small_run(), rows_in(b.small_run())) == []


def test_no_two_paths_look_alike_where_no_line_joins_points() -> None:
    """Black and white, one length: only the marker distinguishes the paths."""
    looks = [plots.MARKERS[path] for path in (*routing.Path, "auto")] + [
        plots.DENSE_MARKERS[kind] for kind in routing.DENSE_KINDS
    ]
    assert len(set(looks)) == len(looks) == len(routing.Path) + 1 + len(routing.DENSE_KINDS)


def test_variants_of_one_workload_have_one_scale(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cells = [
        Cell(workload, length, "v2", "on", compile=compiled)
        for workload, compiled in (("train", "off"), ("train", "on"), ("decode", "off"))
        for length in (2048, 4096, 8192)
    ]
    times = [10.0] * 3 + [0.1] * 3 + [1.0] * 3
    drawn: list[Any] = []
    monkeypatch.setattr(plots, "save", lambda figure, target: drawn.append(figure))
    rows = rows_in(
        run_of(*((cell, seconds, {}) for cell, seconds in zip(cells, times, strict=True)))
    )
    assert speeds.draw(rows, tmp_path / "throughput.png", "").shown == 9
    limits = {axes.get_title(loc="left"): axes.get_ylim() for axes in drawn[0].axes}
    assert limits["train"] == limits["train, compile=on"] != limits["decode"]
    assert limits["train"][1] / limits["train"][0] > 100, "both speeds are in it"
