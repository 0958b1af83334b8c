"""The selected branch alone in the page of kernels: times by kind of selection against their floor,
and the parts of the device's time.
"""

from __future__ import annotations

from typing import Any

import pytest

from nsa.config import preset
from nsa.settings import Settings
from perfbench.matrix import attention_calls, matrix
from perfbench.records.cells import SELECTED, SELECTIONS, TRAINED, Cell
from perfbench.records.rows import PlannedCell, Run
from tests.perfbench import builders as b
from tests.perfbench import test_kernel_report as page
from tools.studies import floors, kernels
from tools.studies.floors import Rates
from tools.studies.kernelparts import REST, parts_ms
from tools.studies.selected import PARTS

MATRIX = page.MATRIX.replace(
    "[attention, attention_forward]", "[selected, selected_forward]"
).replace("[triton]}", "[triton], selection: [own, hot]}")
KERNELS = {
    "nsa_selected_forward": 1.0,
    "nsa_selected_backward": 1.5,
    "nsa_selected_sum_kv": 0.25,
    "nsa_selected_keys": 0.125,
    "sort": 0.625,
}
STEPS = {"own": (1.5, 4.0), "hot": (3.0, 10.0)}  # forward and both, ms


def stored(**manifest: Any) -> Run:
    cells: list[PlannedCell] = []
    rows = []
    for kind, times_ms in STEPS.items():
        for name, step_ms in zip(reversed(SELECTED), times_ms, strict=True):
            cell = Cell(name, 65536, "triton", l2="cold", selection=kind)
            decided = attention_calls.route_of(cell, preset("m7c_125m"), Settings(), page.TRITON)
            cells.append(
                PlannedCell(
                    cell_id=cell.cell_id,
                    axes=cell,
                    config_sha256="c" * 64,
                    route=b.route_line(decided),
                    layers=1,
                )
            )
            shown = b.profile(
                kernels={kernel: 1e-3 * ms for kernel, ms in KERNELS.items()}, device_time_s=4e-3
            )
            rows += page.rows(
                cells[-1], step_ms, profile=shown, cold_start_s=step_ms, peak_memory_bytes=3 << 30
            )
    made = b.make_run(
        cells,
        replicates=1,
        **{"matrix_text": MATRIX, "environment": b.environment(device_name=page.H100), **manifest},
    )
    return b.watched(b.with_rows(made, rows), {"copy": [3.02e12]})


def test_the_page_has_each_kinds_times_against_its_floor() -> None:
    markdown = kernels.render([stored()])
    assert "### Times" not in markdown and "### Targets" not in markdown, (
        "the whole attention was not timed"
    )
    own, hot = page.table(markdown, "The selected branch alone")
    assert own[:6] == [
        "65,536",
        "triton",
        "own",
        "1.5 (1.48 to 1.53)",
        "2.5 (2.43 to 2.6)",
        "4 (3.96 to 4.08)",
    ]
    assert hot[2:6] == ["hot", "3 (2.97 to 3.06)", "7 (6.84 to 7.23)", "10 (9.9 to 10.2)"]
    assert own[6:8] == ["1.00", "1.00"] and hot[6:8] == ["2.00", "2.50"]
    least, back = floors.selected(
        preset("m7c_125m"),
        batch=1,
        tokens=65536,
        dtype="bf16",
        rates=Rates(742e12, 132 * 16 * 1.83e9, 3.02e12),
    )
    assert hot[8:12] == [
        f"{least.total_ms:.3f}",
        f"{least.total_ms / 3:.0%}".replace("%", " %"),
        f"{back.total_ms:.3f}",
        f"{back.total_ms / 7:.0%}".replace("%", " %"),
    ]


def test_extra_memory_leaves_out_what_the_process_holds() -> None:
    """bf16: q and dO of 12 x 64, k and v of 2 x 64, and 16 int32 blocks for 2 heads, less the slots
    of the first queries; four sets.
    """
    tokens, L2 = 65536, 2 * (50 << 20)
    empty = 2 * 4 * sum(64 * (16 - held) for held in range(1, 16))
    num_bytes = tokens * 2 * (12 * 64 + 2 * 128) + tokens * 2 * 16 * 4 - empty
    forward, both = (
        (3 << 30) - 4 * one - L2 for one in (num_bytes, num_bytes + tokens * 2 * 12 * 64)
    )
    own = page.table(kernels.render([stored()]), "The selected branch alone")[0]
    assert own[12:14] == [f"{forward / 2**30:.2f}", f"{both / 2**30:.2f}"]


def test_the_device_parts_stand_above_their_floor() -> None:
    lines = page.table(kernels.render([stored()]), "The selected branch alone: where the time goes")
    assert [line[:4] for line in lines[::2]] == [
        ["65,536", "triton", kind, step] for kind in STEPS for step in ("forward", "both")
    ]
    assert lines[0][4:] == [
        "4.000",
        "1.000 (25 %)",
        "1.500 (38 %)",
        "0.250 (6 %)",
        "0.125 (3 %)",
        "-",
        "1.125 (28 %)",
    ]
    assert (
        lines[1][3] == "its floor"
        and lines[1][5] != "-"
        and lines[1][6:10] == ["-"] * 4
        and lines[3][6] != "-"
    )
    assert float(lines[3][4]) == pytest.approx(
        sum(float(cell) for cell in lines[3][5:] if cell != "-"), abs=0.002
    )


def test_every_kernel_of_the_branch_has_a_part() -> None:
    for name in (
        "nsa_selected_forward_by_row",
        "nsa_selected_anything_new",
        "nsa_row_products",
        "nsa_interval_sum_kv",  # of the parts that dense tiles leave
    ):
        assert parts_ms({name: 1.0}, 1.0, PARTS)[REST] == 0


def test_cold_starts_are_reported_by_the_median_cell_and_the_worst() -> None:
    """Of each cell the slowest of three processes, the last: 3 x 1.5, 4, 3 and 10 s."""
    run = stored()
    slower = [
        row.model_copy(update={"cold_start_s": row.cold_start_s * (row.replicate + 1)})
        for row in run.replicates
        if row.cold_start_s
    ]
    markdown = kernels.render([b.with_rows(run, slower)])
    name = "l2=cold,path=triton,selection=hot,seq_len=65536,workload=selected"
    assert f"Cold start: 10.5 s in the median cell, 30 s in the worst, `{name}`" in markdown
    blank = [row.model_copy(update={"cold_start_s": None}) for row in run.replicates]
    assert "Cold start" not in kernels.render([b.with_rows(run, blank)])


def test_a_cell_that_is_not_proved_has_no_number() -> None:
    run_, name = stored(), "l2=cold,path=triton,selection=hot,seq_len=65536,workload=selected"
    markdown = kernels.render(
        [
            b.change_rows(
                run_, name, lambda row: row.model_copy(update={"parity": b.parity(ok=False)})
            )
        ]
    )
    assert page.table(markdown, "The selected branch alone")[1][4:6] == ["-", "-"]
    assert [line[0] for line in page.table(markdown, "Not published")] == [f"`{name}`"]


def test_the_shipped_matrices_ask_for_what_the_page_shows() -> None:
    shape_b = matrix.load_matrix(page.ROOT / "matrices" / "kernels-b-h200.yaml")
    assert page.kerneltargets.shape_of(shape_b.model) == "B"
    kinds = matrix.load_matrix(page.ROOT / "matrices" / "selections-h200.yaml")
    assert {(c.cell.workload, c.cell.selection) for c in matrix.cells(kinds)[0]} == {
        (name, kind) for name in SELECTED for kind in SELECTIONS if kind != TRAINED
    }
