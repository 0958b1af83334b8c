"""The hard gates: what is not finished, right, on the planned path and possible is red and has no
number.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from perfbench.errors import Exit
from perfbench.gate.judging import judge
from perfbench.matrix.policy import GatePolicy
from perfbench.records.cells import Cell
from perfbench.records.rows import Expect, Run, Status
from perfbench.records.verdict import EXIT_OF, Verdict
from tests.perfbench import builders as b
from tests.perfbench.edits import edit, fail, only_rows, reason_of, verdict_of

POLICY = GatePolicy()
TRAIN = "fa2=on,path=v2,seq_len=2048,workload=train"
FORWARD = "fa2=on,path=v2,seq_len=2048,workload=forward"
DENSE = "path=dense,seq_len=2048,workload=train"


def recount(run: Run, counter: str, count: int) -> Run:
    return edit(run, TRAIN, engaged={**run.of_cell(TRAIN)[0].engaged, counter: count})


def borrowed(run: Run, name: str) -> Run:
    return edit(run, TRAIN, parity=b.parity(proved_in=name))


# --- hard gates


@pytest.mark.parametrize("status", [Status.OOM, Status.TIMEOUT, Status.CRASH, Status.SKIPPED])
def test_a_replicate_that_did_not_finish_fails_the_cell(status: Status) -> None:
    judgement = judge(
        fail(b.small_run(), TRAIN, status, reason=f"the start {'x' * 900}"), None, POLICY
    )
    assert verdict_of(judgement, TRAIN) is Verdict.FAILED and judgement.exit_code is Exit.FAILED
    assert reason_of(judgement, TRAIN).startswith(
        f"{status.value}: the start"
    ) and "(3 of 3 replicates)" in reason_of(judgement, TRAIN)
    assert len(reason_of(judgement, TRAIN)) < 400
    assert verdict_of(judgement, DENSE) is None  # the rest is judged


def test_one_crash_among_good_replicates_is_not_hidden() -> None:
    run = b.small_run()
    cell = run.manifest.cells[0]
    crashed = b.failed(cell, Status.CRASH, 1, stderr_tail="Traceback\nKeyError: 7\n")
    judgement = judge(
        b.change_rows(run, cell.cell_id, lambda row: crashed if row.replicate == 1 else row),
        b.baseline_of(run),
        POLICY,
    )
    assert verdict_of(judgement, cell.cell_id) is Verdict.FAILED
    assert "KeyError: 7 (1 of 3 replicates)" in reason_of(judgement, cell.cell_id)


def test_an_ok_row_without_a_speed_fails() -> None:
    assert (
        verdict_of(judge(edit(b.small_run(), TRAIN, tok_per_s=None), None, POLICY), TRAIN)
        is Verdict.FAILED
    )


UNTRUE: dict[str, tuple[Callable[[Run], Run], Verdict, str]] = {
    "parity status": (
        lambda r: fail(r, TRAIN, Status.PARITY, reason="o[0, 3]"),
        Verdict.PARITY,
        "o[0, 3]",
    ),
    "parity not ok": (
        lambda r: edit(r, TRAIN, parity=b.parity(ok=False)),
        Verdict.PARITY,
        "differs from the oracle",
    ),
    "parity over tolerance, though ok": (
        lambda r: edit(r, TRAIN, parity=b.parity(tensors={"dk": 1.4})),
        Verdict.PARITY,
        "dk 1.4",
    ),
    "parity absent": (lambda r: edit(r, TRAIN, parity=None), Verdict.PARITY, "without proof"),
    "parity of no rows": (
        lambda r: edit(r, TRAIN, parity=b.parity(rows=0)),
        Verdict.PARITY,
        "0 rows",
    ),
    "parity of no tensors": (
        lambda r: edit(r, TRAIN, parity=b.parity(tensors={})),
        Verdict.PARITY,
        "names no tensor",
    ),
    "proof of no row": (
        lambda r: borrowed(r, f"{TRAIN} #9"),
        Verdict.PARITY,
        f"its proof is not in this run: no row {TRAIN} #9",
    ),
    "proof in a circle": (
        lambda r: edit(r, TRAIN, parity=b.parity(proved_in=f"{TRAIN} #0")),
        Verdict.PARITY,
        "its proof is not in this run",
    ),
    "proof of another route": (
        lambda r: borrowed(r, f"{DENSE} #0"),
        Verdict.PARITY,
        "proved another route",
    ),
    "layers left out": (
        lambda r: recount(r, "sel.v2", 239),
        Verdict.WRONG_PATH,
        "sel.v2 ran 239 times, wanted 240 (12 layer calls a step",
    ),
    "ran twice": (
        lambda r: recount(r, "win.fa2", 480),
        Verdict.WRONG_PATH,
        "win.fa2 ran 480 times, wanted 240 (12 layer calls a step",
    ),
    "no physics": (
        lambda r: edit(r, TRAIN, physics=None),
        Verdict.FAILED,
        "no proof: finished without physics",
    ),
    "no telemetry": (
        lambda r: edit(r, TRAIN, telemetry=None),
        Verdict.FAILED,
        "no proof: finished without telemetry",
    ),
    "no profile": (
        lambda r: edit(r, TRAIN, profile=None),
        Verdict.WRONG_PATH,
        "no second witness: no replicate",
    ),
    "a witness that saw nothing": (
        lambda r: edit(r, TRAIN, profile=b.profile(witness_ok=None, witness="no kernel names")),
        Verdict.WRONG_PATH,
        "no second witness: the profiler could not determine which kernels ran (no kernel names)",
    ),
    "another card": (
        lambda r: edit(r, TRAIN, device_uuid_sha256="cd" * 32),
        Verdict.ENV,
        "measured on card cdcdcdcdcdcdcdcd, the run's",
    ),
    "an unknown card": (
        lambda r: edit(r, TRAIN, device_uuid_sha256=None),
        Verdict.ENV,
        "device_uuid_sha256 is null",
    ),
    "wrong path status": (
        lambda r: fail(r, TRAIN, Status.WRONG_PATH, reason="engaged sel.v1"),
        Verdict.WRONG_PATH,
        "engaged sel.v1",
    ),
    "wrong path status without words": (
        lambda r: fail(r, TRAIN, Status.WRONG_PATH),
        Verdict.WRONG_PATH,
        "never ran",
    ),
    "nothing engaged": (lambda r: edit(r, TRAIN, engaged={}), Verdict.WRONG_PATH, "sel.v2"),
    "counted zero": (
        lambda r: edit(r, TRAIN, engaged={**r.replicates[0].engaged, "sel.v2": 0}),
        Verdict.WRONG_PATH,
        "planned sel.v2",
    ),
    "another path too": (
        lambda r: edit(r, TRAIN, engaged={**r.replicates[0].engaged, "sel.reference": 1}),
        Verdict.WRONG_PATH,
        "sel.reference ran, which the plan has not",
    ),
    "another route": (
        lambda r: edit(r, TRAIN, route=r.manifest.cells[1].route),
        Verdict.WRONG_PATH,
        "routed to dense",
    ),
    "no route": (lambda r: edit(r, TRAIN, route=None), Verdict.WRONG_PATH, "no route"),
    "another config": (
        lambda r: edit(r, TRAIN, config_sha256="f" * 64),
        Verdict.WRONG_PATH,
        "measured config ffff",
    ),
    "the profiler disagrees": (
        lambda r: edit(r, TRAIN, profile=b.profile(witness_ok=False, witness="no flash kernel")),
        Verdict.WRONG_PATH,
        "no flash kernel",
    ),
    "faster than the GEMM": (
        lambda r: edit(r, TRAIN, physics=b.physics(1000.0, 2048, flops_per_s=736e12)),
        Verdict.IMPOSSIBLE,
        "GEMM in this process reached 700",
    ),
    "faster than the GEMM by its samples": (
        lambda r: edit(r, TRAIN, physics=b.physics(1000.0, 2048, flops=1e18)),
        Verdict.IMPOSSIBLE,
        "TFLOP/s",
    ),
    "a clock that is wrong for the step and the GEMM alike": (
        lambda r: edit(
            r,
            TRAIN,
            physics=b.physics(
                1000.0, 2048, gemm_flops_per_s=1.1e15, datasheet_flops_per_s=989.4e12
            ),
        ),
        Verdict.IMPOSSIBLE,
        "datasheet says 989.4",
    ),
    "faster than the memory": (
        lambda r: edit(
            r, TRAIN, physics=b.physics(1000.0, 2048, min_bytes=1e12, bytes_per_s=3.4e12)
        ),
        Verdict.IMPOSSIBLE,
        "GB/s beyond the L2's 50 MiB",
    ),
    "tok/s edited": (
        lambda r: edit(r, TRAIN, tok_per_s=r.replicates[0].tok_per_s * 1.02),
        Verdict.IMPOSSIBLE,
        "its samples give",
    ),
    "no samples": (lambda r: edit(r, TRAIN, samples_s=[]), Verdict.IMPOSSIBLE, "0 samples"),
    "a sample of no time": (
        lambda r: edit(r, TRAIN, samples_s=[0.1, 0.0]),
        Verdict.IMPOSSIBLE,
        "least 0 s",
    ),
    "no steps": (
        lambda r: edit(r, TRAIN, steps_per_sample=0),
        Verdict.IMPOSSIBLE,
        "0 steps per sample",
    ),
    "forward slower than training": (
        lambda r: b.scale_rows(r, FORWARD, 0.3),
        Verdict.IMPOSSIBLE,
        "slower than its whole step, backward included",
    ),
}


@pytest.mark.parametrize("name", UNTRUE)
def test_what_is_not_true_is_red_and_has_no_number(name: str) -> None:
    break_it, verdict, words = UNTRUE[name]
    cell_id = FORWARD if name.startswith("forward") else TRAIN
    run = b.small_run()
    broken = break_it(run)
    for baseline in (None, b.baseline_of(run)):
        judgement = judge(broken, baseline, POLICY)
        cell = next(cell for cell in judgement.cells if cell.cell_id == cell_id)
        assert (cell.verdict, judgement.exit_code) == (verdict, EXIT_OF[verdict])
        assert words in cell.reason and cell.cand_tok_per_s is None and cell.change_pct is None
        assert f"perfbench run matrices/h100.yaml --only cell={cell_id}" == cell.reproduce
        others = {c.verdict for c in judgement.cells if c.cell_id != cell_id}
        assert others == {None if baseline is None else Verdict.SAME}


@pytest.mark.parametrize(
    "expect, words",
    [
        (Expect(engaged=["sel.masked"]), "expected sel.masked never ran"),
        (Expect(forbidden=["win.fa2"]), "win.fa2 ran, which is forbidden here"),
    ],
)
def test_expect_is_rechecked_from_the_row(expect: Expect, words: str) -> None:
    cell = b.planned_cell(Cell("train", 2048, "v2", "on"), expect=expect)
    judgement = judge(b.make_run([cell]), None, POLICY)
    assert judgement.exit_code is Exit.WRONG_PATH and words in judgement.headline


def test_what_the_hardware_allows_is_green() -> None:
    run = b.small_run()

    def exit_with(**changes: float | None) -> Exit:
        speed = run.of_cell(TRAIN)[0].tok_per_s
        assert speed is not None
        return judge(
            edit(run, TRAIN, physics=b.physics(speed, 2048, **changes)), None, POLICY
        ).exit_code

    assert exit_with(flops_per_s=1.04 * 700e12) is Exit.OK
    assert exit_with(min_bytes=40 * 2**20, bytes_per_s=9e12) is Exit.OK  # fits the L2
    # the 10 MiB beyond the L2 pass slowly enough
    assert exit_with(min_bytes=60 * 2**20, bytes_per_s=9e12) is Exit.OK
    assert exit_with(min_bytes=200 * 2**20, bytes_per_s=9e12) is Exit.NOT_TRUE
    unknown_card: dict[str, float | None] = {
        "gemm_flops_per_s": None,
        "datasheet_bytes_per_s": None,
    }
    assert exit_with(**unknown_card, flops_per_s=9e20, bytes_per_s=9e20) is Exit.OK


def test_forward_is_compared_with_the_training_of_its_own_axes_only() -> None:
    cells = [
        b.planned_cell(Cell("train", 512, "dense")),
        b.planned_cell(Cell("forward", 512, "reference", "off")),
    ]
    assert judge(b.make_run(cells), None, POLICY).exit_code is Exit.OK


def test_a_forward_of_attention_is_compared_with_the_attention_of_its_own_axes() -> None:
    def exit_with(factor: float, **axes: int) -> Exit:
        cells = [
            b.planned_cell(Cell("attention", 512, "dense")),
            b.planned_cell(Cell("attention_forward", 512, "dense", **axes)),
        ]  # type: ignore[arg-type]
        run = b.make_run(cells)
        speed = run.replicates[0].tok_per_s
        assert speed is not None
        return judge(
            b.replace_rows(run, cells[1].cell_id, tok_per_s=factor * speed), None, POLICY
        ).exit_code

    assert exit_with(0.99) is Exit.NOT_TRUE and exit_with(1.01) is Exit.OK
    assert exit_with(0.99, batch=2) is Exit.OK


def test_several_troubles_of_one_cell_are_all_reported_worst_first() -> None:
    run = b.small_run()
    cell = run.manifest.cells[0]
    broken = edit(run, TRAIN, engaged={}, parity=b.parity(ok=False))
    crash = b.failed(cell, Status.CRASH, 2, "signal 11")
    judgement = judge(
        b.change_rows(broken, TRAIN, lambda row: crash if row.replicate == 2 else row), None, POLICY
    )
    reason = reason_of(judgement, TRAIN)
    assert verdict_of(judgement, TRAIN) is Verdict.PARITY and judgement.exit_code is Exit.NOT_TRUE
    assert (
        reason.startswith("differs from the oracle")
        and "WRONG_PATH: planned" in reason
        and "FAILED: crash: signal 11" in reason
    )


# --- proofs, witnesses and cards


def test_a_proof_of_this_run_holds_for_every_length_of_its_route() -> None:
    short, long = (b.planned_cell(Cell("train", s, "v2", "on")) for s in (1024, 2048))
    run = b.make_run([short, long])
    lent = b.parity(proved_in=f"{short.cell_id} #1")
    green = edit(run, long.cell_id, parity=lent)
    assert judge(green, None, POLICY).exit_code is Exit.OK
    for broken in (
        edit(green, short.cell_id, parity=b.parity(ok=False)),  # the proof failed
        only_rows(green, short.cell_id, {0}),  # the proof is not here
        edit(green, long.cell_id, device_uuid_sha256="cd" * 32),  # the proof is another card's
    ):
        judgement = judge(
            b.resumed(broken, environment=b.environment(gpu_uuid_sha256="cd" * 32)), None, POLICY
        )
        assert (
            verdict_of(judgement, long.cell_id) is Verdict.PARITY
            and judgement.exit_code is Exit.NOT_TRUE
        )
        assert "its proof is not in this run" in reason_of(judgement, long.cell_id)


def test_rows_older_than_the_count_of_layers_are_not_counted() -> None:
    run = recount(b.small_run(), "sel.v2", 1)
    old = b.with_manifest(
        run, cells=[cell.model_copy(update={"layers": None}) for cell in run.manifest.cells]
    )
    assert (
        judge(old, None, POLICY).exit_code is Exit.OK
        and judge(run, None, POLICY).exit_code is Exit.WRONG_PATH
    )


def test_one_profiled_replicate_is_enough_and_a_dead_cell_is_only_failed() -> None:
    run = b.small_run()
    assert [row.profile is None for row in run.of_cell(TRAIN)] == [False, True, True]
    assert judge(run, None, POLICY).exit_code is Exit.OK
    crashed = b.failed(run.manifest.cells[0], Status.CRASH, 0, "signal 11")
    dead = b.change_rows(run, TRAIN, lambda row: crashed if row.replicate == 0 else row)
    # not WRONG_PATH: it died before its profile
    assert verdict_of(judge(dead, None, POLICY), TRAIN) is Verdict.FAILED


def test_a_resumed_card_counts_and_no_other() -> None:
    run = b.small_run()
    moved = b.change_rows(
        run,
        TRAIN,
        lambda row: (
            row.model_copy(update={"device_uuid_sha256": "cd" * 32}) if row.replicate else row
        ),
    )
    assert (
        judge(
            b.resumed(moved, environment=b.environment(gpu_uuid_sha256="cd" * 32)), None, POLICY
        ).exit_code
        is Exit.OK
    )
    elsewhere = judge(moved, b.baseline_of(run), POLICY)
    assert verdict_of(elsewhere, TRAIN) is Verdict.ENV and elsewhere.exit_code is Exit.ENVIRONMENT
    assert "(2 of 3 replicates)" in reason_of(elsewhere, TRAIN)


def test_a_gpu_run_that_names_no_card_is_env() -> None:
    run = b.small_run()
    blank = b.with_manifest(run, environment=b.environment(gpu_uuid_sha256=None))
    blank = b.with_rows(
        blank, [row.model_copy(update={"device_uuid_sha256": None}) for row in blank.replicates]
    )
    judgement = judge(blank, b.baseline_of(run), POLICY)
    assert judgement.exit_code is Exit.ENVIRONMENT and judgement.counts == {"ENV": 4}


def test_a_cpu_needs_no_card_and_no_telemetry_but_physics_and_a_profile() -> None:
    run = b.make_run(b.cpu_cells(), gpu=False)
    cell_id = run.manifest.cells[0].cell_id
    unsure = b.profile(False, witness_ok=None)
    assert (
        judge(edit(run, cell_id, telemetry=None, profile=unsure), None, POLICY).exit_code is Exit.OK
    )
    assert judge(edit(run, cell_id, physics=None), None, POLICY).exit_code is Exit.FAILED
    assert judge(edit(run, cell_id, profile=None), None, POLICY).exit_code is Exit.WRONG_PATH
