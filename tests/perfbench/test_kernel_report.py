"""reports/kernels.md from built runs: every number against arithmetic made here, and none without
its proof.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nsa.config import NSAConfig, preset
from nsa.routing import DENSE_KINDS, Capability, Problem, Request, route, route_dense
from perfbench.errors import PerfbenchError
from perfbench.gate.judgement import CellVerdict
from perfbench.records.cells import Cell
from perfbench.records.rows import PlannedCell, Profile, Replicate, Run, Source
from perfbench.records.run_file import RunWriter, create_run
from perfbench.records.verdict import Verdict
from tests.perfbench import builders as b
from tools.studies import floors, kernellines, kernelparts, kernels, kerneltargets
from tools.studies.floors import Rates

ROOT = Path(__file__).parents[2]
H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
TRITON = Capability("cuda", H100, (9, 0), "torch.varlen 2.13.0", "", "2.13.0", "triton 3.7.1")
MATRIX = """\
version: 1
name: kernels
target: {gpu: H100}
model: m7c_125m
axes: {workload: [attention, attention_forward], seq_len: [65536], path: [triton]}
"""
MIB, GIB = 2**20, 2**30
# A forward and a backward of path triton by hand, ms; what is not named here is the rest.
KERNELS = {
    "nsa_interval_forward": 0.5,
    "nsa_interval_forward_band": 1.0,
    "nsa_scores": 0.75,
    "nsa_choose": 0.25,
    "nsa_selected_forward": 1.0,
    "nsa_selected_sum": 0.5,
    "nsa_gated_sum": 0.125,
    "void at::native::reduce_kernel<512>": 0.25,
}
# Medians of (forward, both) by length and path. Dense is the faster at 8,192, and the slower from
# 32,768 on.
STEPS: dict[int, dict[str, tuple[float, float]]] = {
    8192: {"triton": (0.5, 1.6), "dense_flash": (0.45, 1.6), "dense_cudnn": (0.25, 1.0)},
    32768: {"triton": (2.0, 5.0), "dense_flash": (5.0, 19.0), "dense_cudnn": (3.5, 12.5)},
    65536: {"triton": (5.0, 15.0), "dense_flash": (20.0, 80.0), "dense_cudnn": (15.0, 50.0)},
}


def planned(cell: Cell) -> PlannedCell:
    problem = Problem.of(b.MODEL, batch=cell.batch, tokens=cell.seq_len, dtype="bfloat16")
    decided = (
        route_dense(cell.path, problem, TRITON)
        if cell.path in DENSE_KINDS
        else route(Request(cell.path), problem, TRITON)
    )
    return PlannedCell(
        cell_id=cell.cell_id,
        axes=cell,
        config_sha256="c" * 64,
        route=b.route_line(decided),
        layers=1,
    )


def rows(cell: PlannedCell, step_ms: float, **fields: Any) -> list[Replicate]:
    """Three processes: 1 % faster, the median, 2 % slower."""
    tokens = cell.axes.seq_len
    found = []
    for number, factor in enumerate((0.99, 1.0, 1.02)):
        speed = 1e3 * tokens / (step_ms * factor)
        longest = {name: 1e-3 * ms for name, ms in KERNELS.items()}
        profile = b.profile(kernels=longest, device_time_s=4.5e-3)
        values: dict[str, Any] = {
            "physics": b.physics(speed, tokens, gemm_flops_per_s=742e12),
            "profile": profile,
        }
        found.append(
            b.replicate(
                cell, number, tok_per_s=speed, **{**values, "peak_memory_bytes": 4 * GIB, **fields}
            )
        )
    return found


def run_of(
    steps: dict[int, dict[str, tuple[float, float]]] | None = None,
    *,
    card: str = H100,
    **manifest: Any,
) -> Run:
    cells: list[PlannedCell] = []
    timed: list[Replicate] = []
    for tokens, paths in (STEPS if steps is None else steps).items():
        for path, times_ms in paths.items():
            for workload, step_ms in zip(("attention_forward", "attention"), times_ms, strict=True):
                cells.append(
                    planned(
                        Cell(
                            workload,
                            tokens,
                            path,
                            l2="cold",
                            **({"fa2": "n/a"} if path in DENSE_KINDS else {}),
                        )
                    )
                )
                timed += rows(cells[-1], step_ms)
    environment = b.environment(device_name=card)
    run = b.make_run(
        cells, replicates=1, **{"matrix_text": MATRIX, "environment": environment, **manifest}
    )
    return b.watched(b.with_rows(run, timed), {"copy": [3.0e12, 3.02e12, 3.1e12]})


def text(**options: Any) -> str:
    return kernels.render([run_of(**options)])


def table(markdown: str, title: str, number: int = 0) -> list[list[str]]:
    """The body of one table of a section."""
    section = markdown.split(f"### {title}\n", 1)[1].split("\n#", 1)[0]
    tables = [part.splitlines() for part in section.strip().split("\n\n") if part.startswith("| ")]
    found = [[cell.strip() for cell in line[1:-1].split(" | ")] for line in tables[number]]
    assert len({len(one) for one in found}) == 1, "a line of another width than its head"
    return found[2:]


def by_path(lines: list[list[str]], tokens: str = "65,536") -> dict[str, list[str]]:
    return {line[1]: line[2:] for line in lines if line[0] == tokens}


def test_times_are_medians_and_a_backward_is_their_difference_with_its_spread() -> None:
    """Processes are 0.99, 1 and 1.02 of the median: backward from 0.99 * 15 - 1.02 * 5 to 1.02 * 15
    - 0.99 * 5.
    """
    found = by_path(table(text(), "Times"))
    assert found["triton"][:3] == ["5 (4.95 to 5.1)", "10 (9.75 to 10.4)", "15"]
    assert found["dense_cudnn"][:3] == ["15 (14.9 to 15.3)", "35 (34.2 to 36.1)", "50"]


def test_a_backward_below_zero_is_no_time() -> None:
    """One process of the forward waited for its host, longer than forward and backward take."""
    run = run_of()
    (cell,) = [
        one
        for one in run.manifest.cells
        if one.axes.workload == "attention_forward"
        and one.axes.path == "triton"
        and one.axes.seq_len == 65536
    ]
    held_up = rows(cell, 20.0)[1]
    slow = b.change_rows(
        run, cell.cell_id, lambda row: held_up if row.replicate == held_up.replicate else row
    )
    found = by_path(table(kernels.render([slow]), "Times"))["triton"]
    assert found[:2] == ["5.1 (4.95 to 20)", "9.9 (- to 10.4)"]


def test_the_best_dense_kernel_is_each_columns_own() -> None:
    steps = {
        65536: {"triton": (5.0, 15.0), "dense_flash": (14.0, 80.0), "dense_cudnn": (15.0, 50.0)}
    }
    assert by_path(table(text(steps=steps), "Times"))["triton"][3:6] == ["2.80", "3.50", "3.33"]


def test_dense_at_another_length_or_batch_is_no_twin() -> None:
    steps = {65536: {"triton": (5.0, 15.0)}, 32768: {"dense_flash": (5.0, 19.0)}}
    assert by_path(table(text(steps=steps), "Times"))["triton"][3:6] == ["-", "-", "-"]


def test_the_floor_is_that_of_the_measured_rates() -> None:
    """Of 65,536 tokens, by hand: see test_floors; 742 TFLOP/s and the median copy of 3.02 TB/s."""
    found = by_path(table(text(), "Floor and memory"))
    assert found["triton"][:4] == ["1.48", "30 %", "2.57", "26 %"]
    assert (
        "742 TFLOP/s (large products measured in this run), 3.02 TB/s (copies measured in this run)"
        in text()
    )


def test_a_card_without_a_datasheet_has_no_floor() -> None:
    markdown = text(card="NVIDIA Z9")
    assert by_path(table(markdown, "Floor and memory"))["triton"][:4] == ["-"] * 4
    assert "No datasheet entry for NVIDIA Z9" in markdown
    assert "| its floor |" in text() and "| its floor |" not in markdown


def test_extra_memory_is_the_peak_without_what_the_process_holds() -> None:
    """bf16, 65,536 tokens: q and o of 12 x 64, three k and v of 2 x 64, 36 gates; four sets of
    them; twice 50 MiB of L2.
    """
    inputs = 65536 * 2 * (12 * 64 + 3 * 2 * 2 * 64 + 36)
    grad_o = 65536 * 2 * 12 * 64
    forward = (4 * GIB - 4 * inputs - 100 * MIB) / GIB
    both = (4 * GIB - 4 * (inputs + grad_o) - 100 * MIB) / GIB
    assert by_path(table(text(), "Floor and memory"))["triton"][4:] == [
        f"{forward:.2f}",
        f"{both:.2f}",
    ]
    dense = 65536 * 2 * (12 * 64 + 2 * 2 * 64)
    assert (
        by_path(table(text(), "Floor and memory"))["dense_flash"][4]
        == f"{(4 * GIB - 4 * dense - 100 * MIB) / GIB:.2f}"
    )


def test_what_the_report_takes_to_be_held_is_what_is_held() -> None:
    """The report imports no torch, so it says both numbers once more."""
    from perfbench.worker.workloads import attention, workload

    assert kernellines.HELD_INPUTS == attention.NUM_INPUTS
    assert kernellines.FLUSHED_L2S == workload.L2_FLUSH_FACTOR


def test_every_part_has_its_kernels_and_the_rest_is_what_is_left() -> None:
    first = table(text(), "Where the time goes")[0]
    assert first[:4] == ["8,192", "triton", "forward", "4.500"]
    shares = [
        "1.000 (22 %)",
        "0.500 (11 %)",
        "0.750 (17 %)",
        "0.250 (6 %)",
        "1.500 (33 %)",
        "-",
        "0.125 (3 %)",
        "-",
        "0.375 (8 %)",
    ]
    assert first[4:] == shares
    assert "| win | cmp | scores | top-n | sel |" in text() and "cmp and win" not in text()


def test_each_branch_stands_above_its_own_floor() -> None:
    """Of 65,536 tokens the parts of test_floors: window and compressed branch are one sum in an
    older file.
    """
    model = preset("m7c_125m")
    rates = Rates(742e12, 132 * 16 * 1.83e9, 3.02e12)
    floor = floors.forward(
        model, batch=1, tokens=65536, dtype="bf16", dense=False, rates=rates
    ).parts_ms
    lines = table(text(), "Where the time goes")
    (at,) = [n for n, line in enumerate(lines) if line[:3] == ["65,536", "triton", "forward"]]
    assert (
        lines[at + 1][4:6] == [f"{floor['win']:.3f}", f"{floor['cmp']:.3f}"]
        and floor["win"] != floor["cmp"]
    )
    older = table(kernels.render([unmarked(run_of())]), "Where the time goes")
    assert older[at + 1][4] == f"{floor['win'] + floor['cmp']:.3f}"


def unmarked(run: Run) -> Run:
    """The same run of a commit whose kernels had one name for both branches."""
    longest = {
        **{name: 1e-3 * ms for name, ms in KERNELS.items() if "_band" not in name},
        "nsa_interval_forward": 1.5e-3,
    }
    profile = b.profile(kernels=longest, device_time_s=4.5e-3)
    return b.with_rows(run, [row.model_copy(update={"profile": profile}) for row in run.replicates])


def test_an_older_run_has_one_column_for_what_its_names_do_not_part() -> None:
    markdown = kernels.render([unmarked(run_of())])
    first = table(markdown, "Where the time goes")[0]
    assert (
        "| cmp and win | scores |" in markdown
        and first[4:6] == ["1.500 (33 %)", "0.750 (17 %)"]
        and len(first) == 12
    )


def test_a_launch_of_both_branches_is_not_counted_as_one_of_them() -> None:
    """One column more, and only in a run that has such launches."""
    run = run_of()
    longest = {
        **{name: 1e-3 * ms for name, ms in KERNELS.items()},
        "nsa_interval_backward_q_both_copy": 0.25e-3,
        "nsa_interval_backward_kv_both": 0.125e-3,
    }
    profile = b.profile(kernels=longest, device_time_s=5e-3)
    run = b.with_rows(run, [row.model_copy(update={"profile": profile}) for row in run.replicates])
    markdown = kernels.render([run])
    first = table(markdown, "Where the time goes")[0]
    assert "| win | cmp and win | cmp | scores |" in markdown
    assert first[4:7] == ["1.000 (20 %)", "0.375 (8 %)", "0.500 (10 %)"]


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("nsa_interval_backward_kv_band", "win"),
        ("nsa_interval_backward_kv", "cmp"),
        ("nsa_interval_backward_kv_both", "cmp and win"),
        ("nsa_interval_backward_q_both_copy", "cmp and win"),
        ("nsa_interval_sum_kv", "cmp and win"),
        ("nsa_selected_backward_tiles_q", "sel"),
        ("nsa_gate_products", "o . dO of every branch"),
        ("nsa_row_products", "o . dO of every branch"),
    ],
)
def test_a_kernels_name_says_its_part(kernel: str, part: str) -> None:
    assert [name for name, ms in kernelparts.parts_ms({kernel: 1.0}, 1.0).items() if ms] == [part]


def test_every_kernel_of_the_package_has_a_part() -> None:
    of_decode = {"decode_step", "linear_step", "paged"}  # the study reads whole sequences
    sources = "\n".join(
        path.read_text(encoding="utf-8")
        for path in (ROOT / "nsa" / "ops").glob("**/*.py")
        if path.parent.name not in of_decode
    )
    names = re.findall(r"^@triton\.jit[^\n]*\ndef (nsa_\w+)\(", sources, re.MULTILINE)
    names += re.findall(r'named_by\("(nsa_\w+)"', sources)
    assert len(names) > 8
    assert [
        name for name in names if kernelparts.parts_ms({name: 1.0}, 1.0)[kernelparts.REST]
    ] == []


def test_the_longest_kernels_are_named_in_order() -> None:
    (line,) = [
        one
        for one in table(text(), "Where the time goes", 1)
        if one[:3] == ["65,536", "triton", "both"]
    ]
    assert line[3:] == [
        "4.500",
        (
            "`nsa_interval_forward_band` 1; `nsa_selected_forward` 1; `nsa_scores` 0.75;"
            " `nsa_interval_forward` 0.5"
        ),
    ]


def target(markdown: str, begins: str) -> list[str]:
    (line,) = [one for one in table(markdown, "Targets") if one[0].startswith(begins)]
    return line[1:]


def test_targets_say_met_and_not_met() -> None:
    steps = {65536: {"triton": (3.5, 9.1), "dense_flash": (20.0, 80.0)}}
    markdown = text(steps=steps)
    assert target(markdown, "forward at") == [
        "3.5",
        "at most 3.6: met",
        "at most 3: **not met**",
        "at most 2.5: **not met**",
    ]
    assert target(markdown, "backward at") == [
        "5.6",
        "at most 6: met",
        "at most 5.2: **not met**",
        "at most 4.2: **not met**",
    ]
    assert target(markdown, "host syncs") == ["0", *["at most 0: met"] * 3]
    fast = {65536: {"triton": (2.4, 9.0), "dense_flash": (20.0, 80.0)}}
    assert all(one.endswith(": met") for one in target(text(steps=fast), "forward at")[1:])


def test_targets_of_a_length_that_was_not_measured_have_no_answer() -> None:
    few = {8192: STEPS[8192]}
    assert target(text(steps=few), "forward at") == [
        "-",
        *(f"at most {limit}: not measured" for limit in ("3.6", "3", "2.5")),
    ]
    assert target(text(steps=few), "host time at 2,048, forward, ms")[0] == "-"


def profile(**changes: Any) -> Profile:
    return Profile(
        **{
            "kernel_count": 21,
            "device_time_s": 1e-3,
            "wall_s": 1e-3,
            "busy_fraction": 1.0,
            "host_syncs": 0,
            "witness_ok": True,
            "witness": "",
            **changes,
        }
    )


def test_host_time_is_the_median_process_and_launches_are_the_most() -> None:
    """Of steps that Python launches: a captured one has neither."""

    def line(tokens: int, captured: str, *profiles: Profile) -> kernellines.Line:
        timing = kernellines.KernelTiming((1.0,), profiles, None, False)
        axes = {"path": "triton", "seq_len": tokens, "batch": 1, "dtype": "bf16"}
        return kernellines.Line({**axes, "cuda_graph": captured}, timing, timing)

    times = (0.3e-3, 0.4e-3, 0.9e-3)
    lines = [
        line(2048, "on", profile(host_time_s=0.01e-3)),
        line(2048, "off", *(profile(host_time_s=one) for one in times)),
        line(16384, "off", profile(kernel_count=24), profile(kernel_count=37), profile()),
    ]
    found = {one.what: one for one in kerneltargets.targets("A", lines)}
    forward = found["host time at 2,048, forward, ms"]
    assert (forward.measured, forward.answers) == (
        "0.4",
        ("at most 0.6: met", "at most 0.35: **not met**", "at most 0.2: **not met**"),
    )
    assert found["host time at 2,048, forward and backward, ms"].answers[1] == "at most 1: met"
    launches = found["launches at 16,384, forward and backward"]
    assert (launches.measured, launches.answers[0]) == ("37", "at most 36: **not met**")


@pytest.mark.parametrize(
    ("ratios", "found"),
    [
        ({8192: 0.5, 32768: 2.0}, (8192, 32768, 16384.0)),  # halfway in both logarithms
        ({8192: 1.0, 32768: 2.0}, (None, 8192, None)),
        ({8192: 0.5, 32768: 0.9}, (32768, None, None)),
        # from there on, not the first time
        ({2048: 1.2, 8192: 0.5, 32768: 2.0}, (8192, 32768, 16384.0)),
        ({}, (None, None, None)),
    ],
)
def test_the_crossing_is_from_where_on_dense_is_never_faster(
    ratios: dict[int, float], found: tuple[Any, ...]
) -> None:
    low, high, meeting = kerneltargets.crossing(ratios)
    assert (low, high) == found[:2] and meeting == (
        found[2] if found[2] is None else pytest.approx(found[2])
    )


def test_a_crossing_between_two_lengths_leaves_what_lies_between_open() -> None:
    """1.6 against 1.0 ms at 8,192 and 5 against 12.5 ms at 32,768: log 1.6 of log 4 of the way,
    8,192 * 4 ** (log 1.6 / log 4).
    """
    measured, *answers = target(text(), "crossover")
    assert measured == "about 13,107, between 8,192 and 32,768"
    assert answers == ["at most 16,000: open", "at most 12,000: open", "at most 8,000: **not met**"]


@pytest.mark.parametrize(("extra_bytes", "answer"), [(2 * 1.09, "met"), (2 * 1.2, "**not met**")])
def test_memory_that_grows_faster_than_the_length_is_reported(
    extra_bytes: float, answer: str
) -> None:
    def line(tokens: int, extra: float) -> kernellines.Line:
        axes = {"path": "triton", "seq_len": tokens, "batch": 1, "dtype": "bf16"}
        return kernellines.Line(
            axes, None, kernellines.KernelTiming((1.0,), (), round(extra * GIB), False)
        )

    (found,) = [
        one
        for one in kerneltargets.targets("A", [line(65536, 1), line(131072, extra_bytes)])
        if "grows" in one.what
    ]
    assert found.answers[0] == f"at most 1.1 x: {answer}"


def test_targets_are_of_named_shapes_alone() -> None:
    model = preset("m7c_125m")
    assert kerneltargets.shape_of(model) == "A"
    assert kerneltargets.shape_of(replace(model, num_heads=64, num_kv_heads=4, head_dim=128)) == "B"
    assert kerneltargets.shape_of(replace(model, num_heads=16)) is None
    assert kerneltargets.shape_of(replace(model, nsa=NSAConfig(window=256))) is None
    assert "None is set for these heads" in text(matrix_text=MATRIX.replace("m7c_125m", "tiny"))


def test_another_card_than_the_targets_is_said() -> None:
    assert f"**The targets were set for an {H200}, and this card is an {H100}**" in text(card=H100)
    assert "The targets were set for" not in text(card=H200)


@pytest.mark.parametrize(
    ("workload", "change", "left"),
    [
        ("attention", {"parity": b.parity(ok=False)}, ["5 (4.95 to 5.1)", "-", "-"]),
        ("attention_forward", {"engaged": {"sel.v1": 20}}, ["-", "-", "15"]),
        (
            "attention",
            {"profile": b.profile(witness_ok=False, witness="no kernel of the Route")},
            ["5 (4.95 to 5.1)", "-", "-"],
        ),
    ],
)
def test_a_number_without_its_proof_is_not_published(
    workload: str, change: dict[str, Any], left: list[str]
) -> None:
    run = run_of()
    (cell,) = [
        one.cell_id
        for one in run.manifest.cells
        if one.axes.workload == workload and one.axes.path == "triton" and one.axes.seq_len == 65536
    ]
    markdown = kernels.render([b.change_rows(run, cell, lambda row: row.model_copy(update=change))])
    assert by_path(table(markdown, "Times"))["triton"][:3] == left
    assert [line[0] for line in table(markdown, "Not published")] == [f"`{cell}`"]
    assert target(markdown, "backward at")[0] == "-"


def test_the_page_names_machine_versions_commit_and_run() -> None:
    markdown = text(source=Source(commit="ab" * 20, dirty_sha256="cd" * 32))
    for fact in (
        H100,
        "driver 570.86.10",
        "CUDA 13.0",
        "torch 2.13.0",
        "Triton 3.7.1",
        "ab" * 20,
        "20260102T030405Z",
    ):
        assert fact in markdown
    assert "**with uncommitted changes** (cdcdcdcdcdcd)" in markdown
    assert "INJECTED FAULTS" in text(injections=["slowdown:5"]) and "INJECTED" not in markdown


def test_without_a_readable_matrix_there_are_times_alone() -> None:
    markdown = text(matrix_text="version: 9\n")
    assert by_path(table(markdown, "Times"))["triton"][2] == "15"
    assert by_path(table(markdown, "Floor and memory"))["triton"] == ["-"] * 6
    assert "cannot read the run's matrix" in markdown


def test_a_run_of_something_else_is_refused() -> None:
    with pytest.raises(
        PerfbenchError,
        match="alone; wanted cells of workload attention, attention_forward, selected or",
    ):
        kernels.render([b.small_run()])


def stored(run: Run, folder: Path) -> Path:
    writer: RunWriter
    with create_run(folder, run.manifest) as writer:
        for record in (*run.replicates, *run.sentinels):
            writer.append(record)
    return writer.folder


def test_the_command_writes_the_page_with_the_log_next_to_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = stored(run_of(), tmp_path / "runs"), tmp_path / "kernels.md"
    assert kernels.main([str(run), "--out", str(out)]) == 0
    assert out.read_text(encoding="utf-8") == text() and "There is no log" in text()
    (tmp_path / "kernels-log.md").write_text("### Step 1\n\n| a |\n| --- |\n", encoding="utf-8")
    assert kernels.main([str(run), "--out", str(out)]) == 0
    assert out.read_text(encoding="utf-8").endswith("## Log\n\n### Step 1\n\n| a |\n| --- |\n")
    assert capsys.readouterr().out.split() == [str(out)] * 2


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = stored(run_of(steps={8192: STEPS[8192]}), tmp_path / "runs")
    assert kernels.main([str(tmp_path / "none"), "--out", str(tmp_path / "a.md")]) == 2
    assert kernels.main([str(run), "--out", str(tmp_path / "no" / "a.md")]) == 2
    assert (
        kernels.main([str(run), "--out", str(tmp_path / "a.md"), "--log", str(tmp_path / "no.md")])
        == 2
    )
    errors = capsys.readouterr().err
    assert (
        "name a run folder" in errors
        and "give another --out" in errors
        and "name it with --log" in errors
    )


def test_a_crossing_at_the_limit_meets_it() -> None:
    measured, *answers = target(
        text(steps={8000: {"triton": (0.2, 0.9), "dense_cudnn": (0.25, 1.0)}}), "crossover"
    )
    assert measured == "at or below 8,000" and answers[2] == "at most 8,000: met"


def test_a_red_cell_is_not_proved_even_with_a_speed() -> None:
    cell = CellVerdict("a", {}, None, "", cand_tok_per_s=1.0)
    assert kernellines.is_proved(cell)
    assert not kernellines.is_proved(replace(cell, verdict=Verdict.IMPOSSIBLE))
    assert not kernellines.is_proved(replace(cell, cand_tok_per_s=None))
