"""The axis `cache`: decode steps over pages, what a matrix may ask of them, what proves them, and
what the report says next to the same cell over contiguous caches.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from nsa.decode import PagedCache
from nsa.settings import Settings
from perfbench import older_nsa
from perfbench.errors import Exit, PerfbenchError
from perfbench.gate.judging import judge
from perfbench.matrix import attention_calls, load_matrix, named_calls
from perfbench.matrix.matrix import cells_of, config_sha256, parse_matrix
from perfbench.matrix.policy import GatePolicy
from perfbench.records import CacheLine, Cell, PlannedCell, Replicate, RouteLine, Run, Status
from perfbench.records.job import Job
from perfbench.report import pages
from perfbench.report.rows import rows_of
from perfbench.report.tables import fastest
from perfbench.worker.workloads import workload
from perfbench.worker.workloads.paged_steps import PagedSteps
from perfbench.worker.workloads.workload import NUM_BATCHES
from tests.perfbench import builders as b
from tests.perfbench.jobs import TINY
from tests.perfbench.measure_cases import PROOF, assert_no_speed, run
from tests.perfbench.report_cases import alone, section
from tests.perfbench.test_cache_steps import cached, keys_at, seen
from tests.perfbench.test_decode_graph import HollowGrapher
from tests.perfbench.test_graphs import FakeGrapher
from tests.perfbench.test_plan import H100, build

pytestmark = pytest.mark.usefixtures("one_thread", "light")
ROOT = pathlib.Path(__file__).parents[2]
MATRIX = """\
version: 1
name: t
target: {gpu: H100}
model: m7c_125m
axes: {workload: [WORKLOAD], seq_len: [2048], path: [PATH], cache: [contiguous, paged]}
measure: {processes: 3}
"""


@pytest.fixture(autouse=True)
def _fake_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "CudaGrapher", FakeGrapher)


def over_pages(path: str = "masked", graph: str = "off", **changes: Any) -> Job:
    asked = cached(path, batch=2, **changes)
    axes = replace(asked.axes, cuda_graph=graph, cache="paged")
    return asked.model_copy(update={"axes": axes})


# The axis.


def test_contiguous_is_in_no_name_no_hash_and_no_file() -> None:
    plain, paged = Cell("decode", 2048, "triton"), Cell("decode", 2048, "triton", cache="paged")
    assert plain == Cell("decode", 2048, "triton", cache="contiguous")
    assert plain.cell_id == "path=triton,seq_len=2048,workload=decode"
    assert paged.cell_id == "cache=paged,path=triton,seq_len=2048,workload=decode"
    stored = {"workload": "decode", "seq_len": 2048, "path": "triton"}
    assert Cell.from_mapping(stored) == plain and Cell.from_mapping(stored).to_mapping() == stored
    route = RouteLine(branches=[], counters=[])
    for cell in (plain, paged):
        line = PlannedCell(cell_id="c", axes=cell, config_sha256="", route=route)
        kept = line.model_dump()["axes"]
        assert ("cache" in kept) == (cell is paged) and Cell.from_mapping(kept) == cell
    asked = parse_matrix(MATRIX.replace("WORKLOAD", "decode").replace("PATH", "triton"), "m.yaml")
    older = parse_matrix(asked.text.replace(", cache: [contiguous, paged]", ""), "m.yaml")
    assert [cell.cell_id for cell in cells_of(asked)] == [plain.cell_id, paged.cell_id]
    one, other = (config_sha256(asked, cell.cell_id) for cell in (plain, paged))
    assert one == config_sha256(older, plain.cell_id) != other


@pytest.mark.parametrize(
    ("workload_", "path", "words"),
    [
        ("forward", "triton", "workload=forward: only a decode step is measured over pages"),
        ("chunked_prefill", "triton", "wanted workload=decode; exclude cache: paged"),
        ("train", "dense", "wanted workload=decode"),
        ("my.module:step", "triton", "wanted workload=decode"),
        ("decode", "dense", "path=dense: only NSA keeps pages; wanted a path of NSA"),
        ("decode", "dense_fa3", "path=dense_fa3: only NSA keeps pages"),
    ],
)
def test_what_keeps_no_pages_is_refused_with_its_reason(
    workload_: str, path: str, words: str
) -> None:
    reason = attention_calls.why_not(Cell(workload_, 2048, path, cache="paged"), TINY)
    assert reason is not None and reason.startswith("cache=paged with") and words in reason


def test_a_plan_refuses_them_and_an_nsa_without_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is dropped unseen: the matrix has to exclude such a cell."""
    asked = parse_matrix(MATRIX.replace("WORKLOAD", "decode").replace("PATH", "dense"), "m.yaml")
    with pytest.raises(PerfbenchError) as caught:
        build(asked)
    assert caught.value.exit_code is Exit.USAGE and "only NSA keeps pages" in str(caught.value)
    cell = Cell("decode", 2048, "triton", cache="paged", without="split")
    assert "no such switch" in str(attention_calls.why_not(cell, TINY))
    cell = replace(cell, without="none")
    assert attention_calls.why_not(cell, TINY) is None
    monkeypatch.setattr(attention_calls, "keeps_pages", lambda: False)
    assert "--only cache=contiguous" in str(attention_calls.why_not(cell, TINY))


def test_the_decode_matrix_holds_pages_next_to_the_same_captured_cells() -> None:
    cells = build(load_matrix(str(ROOT / "matrices" / "decode-h200.yaml")), H100).cells
    paged = [cell for cell in cells if cell.axes.cache == "paged"]
    plain = {cell.cell_id: cell.route for cell in cells}
    assert {(cell.axes.batch, cell.axes.seq_len) for cell in paged} == {
        (batch, tokens) for batch in (1, 8, 64) for tokens in (2048, 8192, 32768, 65536)
    }
    for cell in paged:
        assert plain[replace(cell.axes, cache="contiguous").cell_id] == cell.route


# Steps.


def test_a_step_over_pages_is_one_token_at_one_place_and_leaves_no_trace() -> None:
    work = workload.build(over_pages())
    steps = work.steps
    assert isinstance(steps, PagedSteps)
    first, *_, again = found = seen(work, NUM_BATCHES + 1)
    free = steps.pages.free_pages()
    assert [(ids.shape, lengths) for ids, lengths, _ in found] == [((2, 1), (100, 100))] * 9
    assert first[0].equal(again[0]) and first[2].equal(again[2])
    assert not first[2].equal(found[1][2])
    seen(work, 1)
    assert steps.pages.free_pages() == free, "a page more for each step"
    assert not first[2][0].equal(first[2][1]), "rows of their own"


@pytest.mark.parametrize(("path", "graph"), [("masked", "on"), ("v2", "off")])
def test_a_row_says_what_the_pages_held_and_what_was_read(path: str, graph: str) -> None:
    asked = over_pages(path, graph, profile=True)
    row = run(asked)
    assert (row.status, row.reason) == (Status.OK, "")
    assert row.engaged_by == ("capture" if graph == "on" else "call")
    assert row.engaged == dict.fromkeys(
        asked.plan.counters, TINY.num_layers * row.steps_per_sample * len(row.samples_s)
    )
    assert row.parity is not None and set(row.parity.tensors) == {"o", "layer", "blocks"}
    assert row.step_proof is not None and row.step_proof.ok
    assert row.cache is not None and row.cache.tokens == 100 and row.cache.keys_read == keys_at(100)
    # 7 pages of 16 tokens a row and what the table says of them; K and V of 2 kv heads
    nsa, pages_of_tokens = TINY.nsa, 2 * 7 + 1
    entry = TINY.num_kv_heads * (TINY.head_dim + TINY.value_dim) * 4 * TINY.num_layers
    assert row.cache.memory_bytes > pages_of_tokens * nsa.sel_block * entry
    assert Replicate.model_validate_json(row.model_dump_json()) == row


# Proof.


def drops_a_page(cache: PagedCache) -> None:
    """The table has no page of each row's first tokens, which every query selects."""
    cache.block_table[:, 0] = -1


def reads_another_rows_page(cache: PagedCache) -> None:
    cache.block_table[1, 0] = cache.block_table[0, 0]


def wrong_blocks(cache: PagedCache) -> None:
    """The compressed blocks of row 1 are row 0's."""
    cache.compressed_table[1] = cache.compressed_table[0]


FAULTS = (drops_a_page, reads_another_rows_page, wrong_blocks)


def plant(patch: pytest.MonkeyPatch, fault: Callable[[PagedCache], None]) -> None:
    """In every step of one token: what was filled in before lies where it should."""
    real = PagedCache.plan

    def wrong(cache: PagedCache, num_tokens: int | Sequence[int] = 1) -> None:
        real(cache, num_tokens)
        if num_tokens == 1 or num_tokens == [1, 1]:
            fault(cache)

    patch.setattr(PagedCache, "plan", wrong)


@pytest.mark.parametrize("graph", ["off", "on"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_pages_that_are_wrong_are_never_timed(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[PagedCache], None], graph: str
) -> None:
    """By the parity of the attention and the layer, and where that passed before, by the step's."""
    plant(monkeypatch, fault)
    row = run(over_pages(graph=graph))
    assert row.status is Status.PARITY and "differs from the fp64 oracle" in row.reason
    assert_no_speed(row)
    row = run(over_pages(graph=graph, proof=PROOF))
    assert row.status is Status.PARITY and "differs from its plain twin" in row.reason
    assert_no_speed(row)


def test_a_replay_that_is_not_the_step_is_never_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "CudaGrapher", HollowGrapher)
    row = run(over_pages(graph="on", proof=PROOF))
    assert row.status is Status.PARITY and row.reason.startswith("a replay's logits differ by ")
    assert_no_speed(row)


def test_a_step_that_is_kept_fills_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were its token kept, each step would be another."""
    monkeypatch.setattr(PagedSteps, "_forget", lambda self: None)
    with pytest.raises(ValueError, match="would hold 102 tokens"):
        run(over_pages(graph="on", proof=PROOF))


@pytest.mark.parametrize("graph", ["off", "on"])
def test_a_step_over_pages_is_one_operator_a_layer(
    graph: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a step that copied pages first is WRONG_PATH; of an older nsa the kernels that read pages
    called no operator but the sum.
    """
    model = load_matrix(str(ROOT / "matrices" / "decode-h200.yaml")).model
    cell = Cell("decode", 2048, "triton", cuda_graph=graph, cache="paged")

    def due(cell: Cell) -> dict[str, int]:
        route = attention_calls.route_of(cell, model, Settings(), H100)
        return dict(named_calls.operator_calls(route, cell, model, workspace_bytes=1 << 30).exact)

    assert due(cell) == {"nsa::decode_step": 12, "nsa::linear_step": 48}
    assert due(replace(cell, batch=128)) == {"nsa::decode_step": 12}
    with monkeypatch.context() as patched:
        patched.setattr(older_nsa, "takes_pages_in_one_step", lambda config: False)
        assert due(cell) == {"nsa::gated_sum": 12}
    copied = replace(model, nsa=replace(model.nsa, sel_block=192, cmp_stride=32))
    route = attention_calls.route_of(cell, copied, Settings(), H100)
    calls = named_calls.operator_calls(route, cell, copied, workspace_bytes=1 << 30).exact
    assert calls["nsa::interval"] == 24, "no kernel reads a page of 192"


# The report.

PLAIN = Cell("decode", 8192, "v2", "off", cuda_graph="on", batch=8)
PAGED = replace(PLAIN, cache="paged")
DENSE = Cell("decode", 8192, "dense", cuda_graph="on", batch=8)


def run_of(*speeds: tuple[Cell, float]) -> Run:
    planned = [(b.planned_cell(cell), speed) for cell, speed in speeds]
    rows = [
        b.replicate(cell, number, tok_per_s=speed * (1 + 0.01 * (number - 2))).model_copy(
            update={"cache": CacheLine(tokens=8192, memory_bytes=3 << 20, keys_read={})}
        )
        for cell, speed in planned
        for number in range(5)
    ]
    return b.with_rows(b.make_run([cell for cell, _ in planned]), rows)


def line_of(run_: Run) -> dict[str, str]:
    table = pages.table(rows_of(run_, judge(run_, None, GatePolicy())))
    assert table is not None
    (line,) = table.lines
    return dict(zip(table.head, line, strict=True))


def test_the_report_has_pages_over_contiguous_with_its_interval() -> None:
    found = run_of((PLAIN, 1000.0), (PAGED, 800.0), (DENSE, 500.0))
    line = line_of(found)
    assert line["paged / contiguous (95 %)"].startswith("1.250 (") and line["pages, MiB"] == "3.0"
    rows = {row.cell.axes: row for row in rows_of(found, judge(found, None, GatePolicy()))}
    assert rows[PAGED].x_dense == pytest.approx(1.6) and rows[PLAIN].x_dense == pytest.approx(2.0)
    assert "1.250 (" in section(alone(found), pages.TITLE)
    head, lines = fastest(list(rows.values()))
    at = head.index("x dense")
    assert sorted(line[at] for line in lines) == ["1.60", "2.00"]


def test_the_interval_is_of_both_bands() -> None:
    """ln 1.03 and ln 1.04 are .029559 and .039221, whose squares' sum has the root .049112."""
    found = run_of((PLAIN, 1100.0), (PAGED, 1000.0))
    rows = {row.cell.axes: row for row in rows_of(found, judge(found, None, GatePolicy()))}
    paged = replace(rows[PAGED], tok_per_s=1000.0, low=970.0, high=1030.0)
    plain = replace(rows[PLAIN], tok_per_s=1100.0, low=1060.0, high=1144.0)
    ratio = pages.over_contiguous(paged, plain)
    assert ratio is not None and ratio.text == "1.100 (1.047 to 1.155)"
    unsure = pages.over_contiguous(replace(paged, low=None, high=None), plain)
    assert unsure is not None and unsure.text == "1.100"


def test_where_one_of_the_pair_is_absent_there_is_no_ratio() -> None:
    assert line_of(run_of((PAGED, 800.0)))["paged / contiguous (95 %)"] == "-"
    other = run_of((PAGED, 800.0), (replace(PLAIN, seq_len=2048), 1000.0))
    assert line_of(other)["contiguous, ms"] == "-"
    plain = run_of((PLAIN, 1000.0))
    assert pages.table(rows_of(plain, judge(plain, None, GatePolicy()))) is None
