"""How many pairs the confirmation is planned for, where a cell is judged by wall time and by device
time.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

from perfbench.gate.confirmation import pairs_for
from perfbench.gate.evidence import DEVICE, WALL
from perfbench.gate.judgement import Judgement
from perfbench.gate.judging import judge
from perfbench.matrix.policy import GatePolicy, Policies
from perfbench.records.rows import Run
from tests.perfbench import builders as b

POLICY = GatePolicy()
TRAIN = "fa2=on,path=v2,seq_len=2048,workload=train"


def restless(*, wall_sd: float, device_ms: float, host_bound: bool, seed: int) -> Run:
    """Eight replicates: a device time that hardly moves, and a wall time of this sd of ln tok/s."""
    run, rng = b.small_run(replicates=8), random.Random(seed)
    cell = next(cell for cell in run.manifest.cells if cell.cell_id == TRAIN)

    def row(number: int) -> object:
        speed = b.speed_of(cell) * math.exp(rng.gauss(0, wall_sd))
        profile = b.profile(device_time_s=device_ms / 1e3 * math.exp(rng.gauss(0, 0.001)))
        return b.replicate(cell, number, tok_per_s=speed, host_bound=host_bound, profile=profile)

    return b.change_rows(run, TRAIN, lambda old: row(old.replicate))  # type: ignore[arg-type, return-value]


def screened(
    *, wall_sd: float, base_host_bound: bool, policy: GatePolicy | Policies = POLICY
) -> Judgement:
    """Device time grew by a tenth, and the candidate is host bound: both metrics are in doubt, wall
    time only if that is new.
    """
    base = restless(wall_sd=wall_sd, device_ms=20, host_bound=base_host_bound, seed=1)
    judgement = judge(
        restless(wall_sd=wall_sd, device_ms=22, host_bound=True, seed=2),
        b.baseline_of(base),
        policy,
    )
    cell = next(cell for cell in judgement.cells if cell.cell_id == TRAIN)
    assert judgement.to_confirm == [TRAIN] and [one.metric for one in cell.evidence] == [
        DEVICE,
        WALL,
    ]
    return judgement


def with_evidence(judgement: Judgement, *places: int) -> Judgement:
    cells = [
        replace(cell, evidence=tuple(cell.evidence[i] for i in places)) if cell.screened else cell
        for cell in judgement.cells
    ]
    return replace(judgement, cells=cells)


def test_the_metric_that_needs_most_pairs_decides() -> None:
    """The device is settled by the policy's 8 pairs.

    Wall time of 1.5 % a side is 2.1 % a pair, for which 18 do if that is known.
    """
    judgement = screened(wall_sd=0.015, base_host_bound=False)
    assert pairs_for(with_evidence(judgement, 0), POLICY) == POLICY.confirm_blocks == 8
    assert 18 <= pairs_for(judgement, POLICY) <= 40
    assert pairs_for(with_evidence(judgement, 1, 0), POLICY) == pairs_for(judgement, POLICY)


def test_wall_time_that_is_not_gated_asks_for_no_pairs() -> None:
    assert pairs_for(screened(wall_sd=0.12, base_host_bound=False), POLICY) == 40
    assert pairs_for(screened(wall_sd=0.12, base_host_bound=True), POLICY) == 8
    assert pairs_for(with_evidence(screened(wall_sd=0.12, base_host_bound=True), 1), POLICY) == 8


def test_what_is_gated_is_known_by_the_cells_own_tolerance() -> None:
    policies = Policies(POLICY, {TRAIN: GatePolicy(tolerance_pct=2)})
    assert (
        pairs_for(screened(wall_sd=0.015, base_host_bound=False, policy=policies), policies) >= 18
    )
