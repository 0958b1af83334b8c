"""No speed where another path ran than planned or where the numbers are wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import dispatch, selection, settings
from nsa.ops.interval import sliding
from nsa.ops.selected import PATHS
from nsa.routing import Path
from nsa.settings import Setting, Settings
from perfbench.records.rows import Expect, Status
from perfbench.worker import measure, profile
from perfbench.worker.parity.claim import Claim
from perfbench.worker.parity.sizes import RouteDiffers
from perfbench.worker.workloads import workload
from tests.perfbench import builders
from tests.perfbench.fakes import FakeClock
from tests.perfbench.jobs import TINY, cell_of, job, route_of
from tests.perfbench.measure_cases import PROOF, STEP_S, assert_no_speed, no_build, run, stub

pytestmark = pytest.mark.usefixtures("one_thread", "light")


# Another path than planned.


def test_the_plan_of_another_path(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock(STEP_S)
    row = run(job("v2", plan=builders.route_line(route_of(cell_of("masked")))), clock)
    assert row.status is Status.WRONG_PATH and clock.now() == 0, "not timed"
    assert (
        "this process routes to" in row.reason
        and "'sel.v2'" in row.reason
        and "'sel.masked'" in row.reason
    )
    assert row.route is not None and "sel.v2" in row.route.counters, (
        "the row says what would have run"
    )
    assert row.parity is not None and row.engaged
    assert_no_speed(row)


def test_a_setting_that_reroutes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        settings, "current", lambda: Settings(sel_ranges_v2=Setting(False, "environment"))
    )
    clock = FakeClock(STEP_S)
    row = run(job("v2"), clock)
    assert row.status is Status.WRONG_PATH and clock.now() == 0
    assert (
        "NSA_SEL_RANGES_V2=0 (environment) turns path=v2 into v1" in row.reason
        and "'sel.v1'" in row.reason
    )
    assert row.engaged["sel.v1"] == TINY.num_layers and "sel.v2" not in row.engaged
    assert_no_speed(row)


@pytest.mark.parametrize(
    ("expect", "words"),
    [
        (Expect(engaged=["sel.fa2"]), "expected sel.fa2 to be engaged"),
        (
            Expect(engaged=["sel.v2", "sel.fa2", "win.fa2"]),
            "expected sel.fa2, win.fa2 to be engaged",
        ),
        (Expect(forbidden=["sel.v2"]), "sel.v2 is forbidden here, and it ran"),
        (
            Expect(engaged=["sel.v2"], forbidden=["sel.v1", "win.sdpa"]),
            "win.sdpa is forbidden here",
        ),
    ],
)
def test_expectations(expect: Expect, words: str) -> None:
    clock = FakeClock(STEP_S)
    row = run(job("v2", "forward", expect=expect), clock)
    assert row.status is Status.WRONG_PATH and words in row.reason and clock.now() == 0
    assert_no_speed(row)


def test_expectations_that_hold() -> None:
    assert (
        run(
            job(
                "v2",
                "forward",
                expect=Expect(
                    engaged=["sel.v2", "win.sdpa"], forbidden=["sel.v1", "sel.reference"]
                ),
            )
        ).status
        is Status.OK
    )


def test_a_silent_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that routes to v2 and then runs another path is seen by the counters."""
    selected, slow = dispatch.selected, route_of(cell_of("reference"))
    monkeypatch.setattr(
        dispatch, "selected", lambda route, *x, **options: selected(slow, *x, **options)
    )
    row = run(job("v2", "forward", proof=PROOF))
    assert row.status is Status.WRONG_PATH and "engaged" in row.reason and "sel.loop" in row.reason
    assert_no_speed(row)


@pytest.mark.parametrize("what", ["another", "none", "one more", "one less"])
def test_what_runs_while_timing_is_what_counts(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """The first step goes as planned; the fallback begins later, in the timed window."""
    planned, other = route_of(cell_of("v2")).branches, route_of(cell_of("v1")).branches
    later = {
        "another": other,
        "none": (),
        "one more": (*planned, other[1]),
        "one less": planned[1:],
    }[what]
    stub(monkeypatch, engages=lambda number: planned if number < 5 else later)
    row = run(job(proof=PROOF, profile=True))
    assert row.status is Status.WRONG_PATH and "engaged" in row.reason and row.profile is None
    assert set(row.engaged) == {counter for branch in later for counter in branch.counters}, (
        "of the timed window"
    )
    assert row.telemetry is not None, "facts are kept, the speed is not"
    assert_no_speed(row)


@pytest.mark.parametrize("when", [0, 30])
def test_a_layer_that_took_no_planned_path(monkeypatch: pytest.MonkeyPatch, when: int) -> None:
    """Every name is there, but not once a layer and step: one step, or one layer, went another way
    unseen.
    """
    planned = route_of(cell_of("v2")).branches
    stub(
        monkeypatch,
        engages=lambda number: planned[:1] * 2 + planned[1:] if number == when else planned,
    )
    row = run(job(proof=PROOF, measure={"samples": 30}))
    assert (
        row.status is Status.WRONG_PATH
        and "calls were due from each counter" in row.reason
        and "cmp.sdpa" in row.reason
    )
    assert_no_speed(row)


def test_engagement_of_the_first_step_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    planned, other = route_of(cell_of("v2")).branches, route_of(cell_of("v1")).branches
    counted = stub(monkeypatch, engages=lambda number: other if number == 0 else planned)
    row = run(job(proof=PROOF))
    assert row.status is Status.WRONG_PATH and counted.steps == 1
    assert_no_speed(row)


def test_a_witness_that_contradicts_takes_the_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        profile,
        "testify",
        lambda *_: (False, "the Route names fa2, and no device kernel is called *flash_fwd*"),
    )
    row = run(job("masked", "forward", profile=True))
    assert (
        row.status is Status.WRONG_PATH
        and "no device kernel" in row.reason
        and row.profile is not None
    )
    assert_no_speed(row)
    monkeypatch.setattr(profile, "testify", lambda *_: (None, "nothing can witness it"))
    assert run(job("masked", "forward", profile=True)).status is Status.OK


# Wrong numbers.


def one_key_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = PATHS[Path.V2]
    monkeypatch.setitem(
        PATHS, Path.V2, lambda *x, q_start, **options: attend(*x, q_start=q_start + 1, **options)
    )  # type: ignore[arg-type]


def window_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = sliding.attend
    monkeypatch.setattr(
        sliding, "attend", lambda *x, window, **options: attend(*x, window=window + 1, **options)
    )


def block_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = selection.choose

    def dropped(*x: Any, **options: Any) -> Tensor:
        blocks = choose(*x, **options)
        return torch.cat([blocks[..., :-1], torch.full_like(blocks[..., -1:], -1)], -1)

    monkeypatch.setattr(selection, "choose", dropped)


@pytest.mark.parametrize("kind", ["train", "forward"])
@pytest.mark.parametrize(
    "fault", [one_key_too_many, window_too_long, block_dropped], ids=lambda fault: fault.__name__
)
def test_what_differs_from_the_oracle_is_never_timed(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None], kind: str
) -> None:
    fault(monkeypatch)
    monkeypatch.setattr(workload, "build", no_build)
    clock = FakeClock(STEP_S)
    row = run(job("v2", kind), clock)
    assert row.status is Status.PARITY and clock.now() == 0
    assert row.parity is not None and not row.parity.ok
    assert (
        row.reason == f"differs from the fp64 oracle: {row.parity.worst}"
        and "error / tolerance" in row.reason
    )
    assert row.route is not None and row.engaged == {} and row.telemetry is None
    assert_no_speed(row)


def test_a_proof_of_another_route_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    def differs(*_: Any, **__: Any) -> None:
        raise RouteDiffers("parity would run (sel.v1), the timed cell runs (sel.v2)")

    monkeypatch.setattr(measure, "prove", differs)
    monkeypatch.setattr(workload, "build", no_build)
    row = run(job("v2"))
    assert (
        row.status is Status.PARITY
        and "parity would run (sel.v1)" in row.reason
        and row.parity is None
    )
    assert_no_speed(row)


def test_parity_is_asked_for_exactly_this_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    claims: list[Claim] = []

    def prove(claim: Claim) -> Any:
        claims.append(claim)
        return builders.parity()

    monkeypatch.setattr(measure, "prove", prove)
    stub(monkeypatch, "masked")
    wanted = job("masked", "train")
    run(wanted)
    timed = route_of(cell_of("masked"))
    assert claims == [Claim(TINY, timed, cell_of("masked"), "cpu", wanted.seed)]


def test_a_given_proof_is_carried_and_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(*_: Any, **__: Any) -> None:
        raise AssertionError("proved already in this session")

    monkeypatch.setattr(measure, "prove", check)
    row = run(job("masked", "forward", proof=PROOF))
    assert row.status is Status.OK and row.parity == PROOF and row.parity.proved_in == "another #0"
