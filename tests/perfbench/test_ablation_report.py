"""reports/ablation.md from built runs of the shipped matrices: every ratio against arithmetic made
here, and none without its proof.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from nsa.routing import Capability
from nsa.settings import Settings
from perfbench.errors import PerfbenchError
from perfbench.matrix import matrix as matrices
from perfbench.matrix import plan
from perfbench.records.rows import PlannedCell, Replicate, Run, Source
from perfbench.records.run_file import create_run
from tests.perfbench import builders as b
from tests.perfbench.test_kernel_report import table
from tools.studies import ablation

ROOT = Path(__file__).parents[2]
H200 = Capability(
    "cuda", "NVIDIA H200", (9, 0), "torch.varlen 2.13.0", "", "2.13.0", "triton 3.7.1", ""
)
CHAIN = "The chain of a training step"
FACTORS = (0.99, 1.0, 1.02)  # of a step's time in three processes
# Milliseconds a step, by (workload, tokens, without).
STEPS_MS: dict[tuple[str, int, str], float] = {
    ("attention", 65536, "none"): 12.0,
    ("attention", 65536, "copy"): 15.0,
    ("attention", 65536, "lists"): 24.0,
    ("attention", 65536, "join"): 13.2,
    ("attention_forward", 65536, "none"): 5.0,
    ("attention_forward", 65536, "copy"): 6.0,
    ("attention_forward", 65536, "lists"): 4.0,
    ("attention", 8192, "none"): 1.5,
    ("attention", 8192, "lists"): 3.0,
    ("attention", 8192, "join"): 1.8,
    ("attention_forward", 8192, "none"): 0.5,
    ("attention_forward", 8192, "lists"): 0.55,
}
# Tokens per second, by (tokens, path, compile, cuda_graph).
SPEEDS: dict[tuple[int, str, str, str], float] = {
    (512, "v1", "off", "off"): 400.0,
    (512, "v2", "off", "off"): 4000.0,
    (512, "masked", "off", "off"): 5000.0,
    (512, "triton", "off", "off"): 6000.0,
    (512, "triton", "on", "off"): 15_000.0,
    (512, "triton", "on", "on"): 60_000.0,
    (2048, "v2", "off", "off"): 16_000.0,
    (2048, "masked", "off", "off"): 20_000.0,
    (2048, "triton", "off", "off"): 24_000.0,
    (2048, "triton", "on", "off"): 60_000.0,
    (2048, "triton", "on", "on"): 240_000.0,
}


def planned(name: str) -> tuple[plan.Plan, matrices.Matrix]:
    matrix = matrices.load_matrix(ROOT / "matrices" / f"{name}.yaml")
    return plan.build_plan(matrix, only=[], capability=H200, settings=Settings()), matrix


def stored(name: str, step_ms: Callable[[PlannedCell], float], **manifest: Any) -> Run:
    """Three processes of every cell of a shipped matrix."""
    built, matrix = planned(name)
    rows = []
    for cell in built.cells:
        tokens, at_ms = cell.axes.seq_len, step_ms(cell)
        speeds = [1e3 * tokens / (at_ms * factor) for factor in FACTORS]
        rows += [
            b.replicate(cell, number, tok_per_s=speed, profile=b.profile())
            for number, speed in enumerate(speeds)
        ]
    excluded = [{"cell_id": one.cell_id, "reason": one.reason} for one in built.excluded]
    values: dict[str, Any] = {
        "matrix_text": matrix.text,
        "matrix_path": f"matrices/{name}.yaml",
        "matrix_name": name,
        "excluded": excluded,
    }
    environment = b.environment(device_name=H200.device_name, **manifest.pop("environment", {}))
    return b.with_rows(
        b.make_run(built.cells, environment=environment, **{**values, **manifest}), rows
    )


def steps(**manifest: Any) -> Run:
    def ms(cell: PlannedCell) -> float:
        return STEPS_MS[cell.axes.workload, cell.axes.seq_len, cell.axes.without]

    return stored("ablation-h200", ms, **manifest)


def chain(**manifest: Any) -> Run:
    def ms(cell: PlannedCell) -> float:
        path, compiled, captured = (
            getattr(cell.axes, name) for name in ("path", "compile", "cuda_graph")
        )
        return 1e3 * cell.axes.seq_len / SPEEDS[cell.axes.seq_len, path, compiled, captured]

    return stored("chain-h200", ms, **manifest)


def off(run: Run) -> dict[tuple[str, ...], list[str]]:
    return {tuple(line[:3]): line[3:] for line in table(ablation.render([run]), "Each step off")}


def links(run: Run, shape: str) -> dict[str, list[str]]:
    return {line[1]: line[2:] for line in table(ablation.render([run]), CHAIN) if line[0] == shape}


def with_cell(
    run: Run, axes: Mapping[str, Any], change: Callable[[Replicate], Replicate]
) -> tuple[Run, str]:
    """The run with a change of every row of the one cell of these axes, and its name."""
    (cell,) = [
        one.cell_id for one in run.manifest.cells if axes.items() <= one.axes.to_mapping().items()
    ]
    return b.change_rows(run, cell, change), cell


def test_a_step_costs_the_time_without_it_over_the_time_with_everything() -> None:
    """15 over 12 ms; processes at 0.99 to 1.02 of both: from 0.99 * 15 / (1.02 * 12) = 1.213 to
    1.02 * 15 / (0.99 * 12) = 1.288.
    """
    found = off(steps())
    assert found["65,536", "attention", "copy"] == ["12", "15", "1.25", "1.21", "1.29", "GPU"]
    assert found["65,536", "attention", "lists"] == ["12", "24", "2.00", "1.94", "2.06", "GPU"]
    assert found["65,536", "attention_forward", "lists"] == [
        "5",
        "4",
        "0.80",
        "0.78",
        "0.82",
        "GPU",
    ], "a step that costs is reported as well"
    assert found["8,192", "attention", "lists"] == ["1.5", "3", "2.00", "1.94", "2.06", "GPU"]
    assert ("8,192", "attention", "copy") not in found, "so short a call makes no descriptors"


def test_a_step_that_the_host_is_waited_for_says_so() -> None:
    run, _ = with_cell(
        steps(),
        {"seq_len": 8192, "workload": "attention", "without": "lists"},
        lambda row: row.model_copy(update={"host_bound": True}),
    )
    assert [off(run)["8,192", "attention", step][-1] for step in ("lists", "join")] == [
        "GPU / host",
        "GPU",
    ]


def test_a_run_that_was_cut_off_tells_how_many_processes_it_has() -> None:
    run = steps()
    few = run.model_copy(
        update={
            "replicates": [
                row for row in run.replicates if row.replicate < 2 or "seq_len=8192" in row.cell_id
            ]
        }
    )
    assert ", 3 processes a cell" in ablation.render(
        [run]
    ) and ", 2 to 3 of 3 processes a cell" in ablation.render([few])


def test_steps_stand_in_one_order_and_each_is_explained() -> None:
    markdown = ablation.render([steps()])
    assert [line[:3] for line in table(markdown, "Each step off")][:5] == [
        ["8,192", "attention", "lists"],
        ["8,192", "attention", "join"],
        ["8,192", "attention_forward", "lists"],
        ["65,536", "attention", "copy"],
        ["65,536", "attention", "lists"],
    ]
    assert "*copy*: tiles by tensor descriptors" in markdown and "*split*" not in markdown
    left_out = [line[0] for line in table(markdown, "Left out by the matrix")]
    assert left_out == [
        "`l2=cold,path=triton,seq_len=8192,without=copy,workload=attention`",
        *(
            f"`l2=cold,path=triton,seq_len={s},without={step},workload=attention_forward`"
            for s, step in ((8192, "copy"), (8192, "join"))
        ),
        "`l2=cold,path=triton,seq_len=65536,without=join,workload=attention_forward`",
    ]


def test_a_link_is_held_against_the_one_before_and_the_first() -> None:
    found = links(chain(), "1 x 512")
    assert list(found) == ["v1", "v2", "masked", "triton", "+ compile", "+ CUDA graph"]
    assert found["v1"] == ["400 (392 to 404)", "-", "1.00", "93", "GPU"]
    assert [line[1:3] for line in found.values()][1:] == [
        ["10.00", "10.00"],
        ["1.25", "12.50"],
        ["1.20", "15.00"],
        ["2.50", "37.50"],
        ["4.00", "150.00"],
    ]


def test_a_shape_without_the_first_link_begins_with_the_next() -> None:
    markdown = ablation.render([chain()])
    found = links(chain(), "1 x 2,048")
    assert found["v1"] == ["-"] * 5
    assert found["v2"][:3] == ["16,000 (15,686 to 16,162)", "-", "1.00"] and found["+ CUDA graph"][
        1:3
    ] == ["4.00", "15.00"]
    ((cell, why),) = table(markdown, "Left out by the matrix")
    assert cell == "`path=v1,seq_len=2048,workload=train`" and "Python loop" in why


def unproved(row: Replicate) -> Replicate:
    return row.model_copy(update={"parity": b.parity(ok=False)})


def test_a_number_without_its_proof_is_a_dash_with_its_reason() -> None:
    run, cell = with_cell(
        steps(), {"seq_len": 65536, "workload": "attention", "without": "none"}, unproved
    )
    assert off(run)["65,536", "attention", "copy"] == ["-", "15", "-", "-", "-", "- / GPU"]
    ((name, verdict, why),) = table(ablation.render([run]), "Not published")
    assert (name, verdict) == (f"`{cell}`", "PARITY") and why.startswith("differs from the oracle")


def test_a_setting_that_did_not_reach_its_process_is_a_dash() -> None:
    def on(row: Replicate) -> Replicate:
        assert row.route is not None
        return row.model_copy(update={"route": row.route.model_copy(update={"off": []})})

    run, _ = with_cell(steps(), {"seq_len": 8192, "workload": "attention", "without": "lists"}, on)
    assert off(run)["8,192", "attention", "lists"] == ["1.5", "-", "-", "-", "-", "GPU / -"]
    assert "its process turned off nothing, the plan says lists" in ablation.render([run])


def test_a_link_that_fell_out_leaves_the_next_against_the_one_above() -> None:
    run, _ = with_cell(chain(), {"seq_len": 512, "path": "masked"}, unproved)
    found = links(run, "1 x 512")
    assert found["masked"] == ["-"] * 5 and found["triton"][1:3] == ["1.50", "15.00"]


def test_utilisation_and_what_bounds_a_link_are_reported() -> None:
    idle = {"telemetry": b.telemetry(utilisation_pct=31.0), "host_bound": True}
    run, _ = with_cell(
        chain(), {"seq_len": 512, "path": "v1"}, lambda row: row.model_copy(update=idle)
    )
    assert links(run, "1 x 512")["v1"][3:] == ["31", "host"]
    blank = {
        "telemetry": b.telemetry(utilisation_pct=None, absent={"utilisation_pct": "no"}),
        "host_bound": None,
    }
    run, _ = with_cell(
        chain(), {"seq_len": 512, "path": "v1"}, lambda row: row.model_copy(update=blank)
    )
    assert links(run, "1 x 512")["v1"][3:] == ["-", "-"]


def test_a_throttled_process_does_not_count() -> None:
    def hot(row: Replicate) -> Replicate:
        return (
            row
            if row.replicate
            else row.model_copy(update={"telemetry": b.telemetry(throttled=True)})
        )

    run, _ = with_cell(
        steps(), {"seq_len": 65536, "workload": "attention", "without": "lists"}, hot
    )
    assert off(run)["65,536", "attention", "lists"][1:3] == [
        "24.2",
        "2.02",
    ], "24 and 24.48 ms are left"


def test_the_page_names_machine_commit_matrix_and_settings() -> None:
    copy_off = {"nsa_settings": {"NSA_TRITON_COPY": "0"}}
    markdown = ablation.render(
        [steps(source=Source(commit="ab" * 20, dirty_sha256=None), environment=copy_off), chain()]
    )
    for fact in (
        "## NVIDIA H200, 12 heads over 2 of 64: run ",
        "ab" * 20,
        "`matrices/ablation-h200.yaml`, 3 processes a cell",
        "torch 2.13.0",
    ):
        assert fact in markdown
    assert (
        markdown.count("\n## ") == 2
        and markdown.count("**Settings of the whole run: NSA_TRITON_COPY=0**") == 1
    )


def test_a_run_that_switches_nothing_is_refused() -> None:
    with pytest.raises(
        PerfbenchError,
        match="switches nothing off and on; wanted cells without one of copy, lists, roles, join,"
        " split",
    ):
        ablation.render([b.make_run(b.h100_cells()[-1:])])


def test_the_command_writes_the_page_and_says_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = chain()
    with create_run(tmp_path / "runs", run.manifest) as writer:
        for row in run.replicates:
            writer.append(row)
    out = tmp_path / "ablation.md"
    assert ablation.main([str(writer.folder), "--out", str(out)]) == 0
    assert out.read_text(encoding="utf-8") == ablation.render(
        [run]
    ) and capsys.readouterr().out.strip() == str(out)
    assert ablation.main([str(tmp_path / "none"), "--out", str(out)]) == 2
    assert ablation.main([str(writer.folder), "--out", str(tmp_path / "no" / "a.md")]) == 2
    assert "give another --out" in capsys.readouterr().err


def test_the_matrices_fit_their_minutes() -> None:
    """The chain trains, so each cell's step is proved: 12 of its 33 processes took 85 s."""
    for name, cells, most in (("ablation-h200", 12, 3), ("chain-h200", 11, 8)):
        built, _ = planned(name)
        minutes = built.estimate_s / 60
        assert len(built.cells) == cells and built.warnings == [] and minutes <= most
