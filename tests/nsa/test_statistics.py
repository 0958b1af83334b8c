"""Telemetry: every value against plain loops, of the calls for which a collection was open."""

from __future__ import annotations

import contextvars
import dataclasses
import json
import math
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nsa import TinyLM, statistics
from nsa.config import preset
from nsa.statistics import Summary
from tests.nsa.statistics_cases import (
    ALL,
    SEL_BLOCK,
    assert_equal,
    expect_gates,
    expect_selection,
    observe_both,
    random_blocks,
    random_gates,
)


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 50])
@pytest.mark.parametrize("start", [[0, 0], [40, 40], [3, 57]])
def test_selection_against_loops(tokens: int, start: list[int]) -> None:
    blocks = random_blocks(2, tokens, 3, 4, start=start, seed=tokens)
    q_start = start[0] if start[0] == start[1] else torch.tensor(start)
    with statistics.collect() as seen:
        statistics.observe_selection(blocks, q_start=q_start, sel_block=SEL_BLOCK)
    want = expect_selection([(blocks, start, None)])
    assert_equal(seen.read(), want)
    if tokens == 50:
        assert (
            want["tokens_min"] == 0 and 0 < want["same_as_previous_share"] < 1 < want["union_ratio"]
        ), "or the inputs prove little"


def test_calls_of_different_shapes_add_up() -> None:
    calls: list[tuple[Tensor, list[int], Tensor | None]] = [
        (random_blocks(1, 33, 2, 4, start=[0], seed=1), [0], None),
        (random_blocks(2, 1, 2, 6, start=[90, 41], seed=2), [90, 41], None),
        (random_blocks(1, 16, 1, 2, start=[200], seed=3), [200], None),
    ]
    with statistics.collect() as seen:
        for blocks, start, _ in calls:
            statistics.observe_selection(blocks, q_start=torch.tensor(start), sel_block=SEL_BLOCK)
    assert_equal(seen.read(), expect_selection(calls))


@pytest.mark.parametrize("rows", [1, 2])
def test_absent_queries_count_for_nothing(rows: int) -> None:
    present = torch.ones(rows, 64, dtype=torch.bool)
    present[0, 40:43] = False
    present[-1, 60:] = False
    blocks = random_blocks(2, 64, 2, 4, start=[10, 30], seed=4)
    garbage = blocks.masked_fill(~present.expand(2, 64)[..., None, None], 7)
    gates = random_gates(2, 64, 3, seed=5)
    with statistics.collect() as seen:
        statistics.observe_selection(
            garbage, q_start=torch.tensor([10, 30]), sel_block=SEL_BLOCK, present=present
        )
        statistics.observe_gates(
            gates.masked_fill(~present.expand(2, 64)[..., None, None], math.nan),
            ALL,
            present=present,
        )
    assert_equal(seen.read(), expect_selection([(blocks, [10, 30], present)]))
    assert_equal(seen.read(), expect_gates([(gates[present.expand(2, 64)][None], ALL)]))


def test_absent_queries_set_no_extreme() -> None:
    """Tokens of the four rows: 0 (absent), 8, 16, 24 (absent)."""
    blocks = torch.tensor([[-1, -1, -1], [0, -1, -1], [0, 1, -1], [0, 1, 2]], dtype=torch.int32)[
        None, :, None
    ]
    with statistics.collect() as seen:
        statistics.observe_selection(
            blocks, q_start=99, sel_block=8, present=torch.tensor([[False, True, True, False]])
        )
    got = seen.read()
    assert (got.rows, got.tokens_min, got.tokens_mean, got.tokens_max) == (2, 8, 12.0, 16)


def test_rows_without_a_block() -> None:
    with statistics.collect() as seen:
        statistics.observe_selection(
            torch.full((1, 32, 1, 3), -1, dtype=torch.int32), q_start=0, sel_block=SEL_BLOCK
        )
    got = seen.read()
    assert (got.rows, got.tokens_mean, got.tokens_min, got.tokens_max, got.blocks_mean) == (
        32,
        0.0,
        0,
        0,
        0.0,
    )
    assert (got.union_blocks_mean, got.same_as_previous_share, got.union_ratio) == (0.0, 1.0, None)
    assert "that chose any block" in got.reasons["union_ratio"]


def test_union_ratio_by_hand() -> None:
    """16 queries that agree load one set; 16 that choose two blocks of their own load 32, that is
    16 times a single query's.
    """
    alike = torch.tensor([0, 5], dtype=torch.int32).expand(1, 16, 1, 2)
    apart = torch.arange(32, dtype=torch.int32).reshape(1, 16, 1, 2)
    for blocks, ratio, union in (
        (alike, 1.0, 2.0),
        (apart, 16.0, 32.0),
        (torch.cat([alike, apart], 1), 8.5, 17.0),
    ):
        with statistics.collect() as seen:
            statistics.observe_selection(blocks, q_start=1000, sel_block=SEL_BLOCK)
        assert (seen.read().union_ratio, seen.read().union_blocks_mean) == (ratio, union)


@pytest.mark.parametrize("branches", [ALL, ("cmp", "win"), ("sel",)])
def test_gates_against_loops(branches: tuple[str, ...]) -> None:
    gates = random_gates(2, 40, 3, seed=6)
    gates[0, 0, 0] = 0.0
    gates[0, 1, 1] = torch.tensor([0.0, 0.7, 0.0])
    with statistics.collect() as seen:
        statistics.observe_gates(gates, branches)
    want = expect_gates([(gates, branches)])
    assert_equal(seen.read(), want)
    assert len(branches) < 2 or 0 < want["collapse_share"] < 1, "or the inputs prove little"


def test_invalid_and_massless_gates_reach_no_mean() -> None:
    gates = random_gates(1, 12, 2, seed=7)
    gates[0, 0, 0, 1], gates[0, 1, 0, 2], gates[0, 2, 1, 0], gates[0, 3] = (
        math.nan,
        math.inf,
        -0.1,
        0.0,
    )
    with statistics.collect() as seen:
        statistics.observe_gates(gates, ALL)
        # the negative gate is of a branch that is off
        statistics.observe_gates(gates[:, 2:3], ("sel", "win"))
    assert_equal(seen.read(), expect_gates([(gates, ALL), (gates[:, 2:3], ("sel", "win"))]))
    assert (seen.read().gate_rows_invalid, seen.read().gate_rows_massless) == (3, 2)
    with statistics.collect() as nothing_valid:
        statistics.observe_gates(torch.full((1, 2, 2, 3), math.nan), ALL)
    got = nothing_valid.read()
    assert (got.gate_rows, got.gate_rows_invalid, got.gate_entropy, got.gate_mean["cmp"]) == (
        0,
        4,
        None,
        None,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_gates_are_summed_in_fp64(dtype: torch.dtype) -> None:
    gates = random_gates(1, 2000, 4, seed=8).to(dtype)
    with statistics.collect() as seen:
        statistics.observe_gates(gates, ALL)
    assert_equal(seen.read(), expect_gates([(gates, ALL)]), rel=1e-6)


def test_nothing_observed_is_null_with_a_reason() -> None:
    with statistics.collect() as seen:
        statistics.observe_selection(
            torch.zeros(1, 0, 2, 4, dtype=torch.int32), q_start=0, sel_block=SEL_BLOCK
        )
        statistics.observe_gates(torch.zeros(0, 3, 2, 3), ALL)
    got = seen.read().to_mapping()
    reasons, captured = got.pop("reasons"), got.pop("captured_calls")
    assert captured == 0
    flat = {
        k: v
        for name, value in got.items()
        for k, v in (
            {f"{name}.{b}": x for b, x in value.items()}
            if isinstance(value, dict)
            else {name: value}
        ).items()
    }
    assert set(flat.values()) == {None} and set(flat) == set(reasons)
    assert all("torch.compile" in reason and "profile" in reason for reason in reasons.values())


def test_a_call_with_one_query_has_no_neighbours() -> None:
    with statistics.collect() as seen:
        for t in range(20):  # decoding
            statistics.observe_selection(
                torch.zeros(1, 1, 1, 2, dtype=torch.int32), q_start=t, sel_block=SEL_BLOCK
            )
    got = seen.read()
    assert (got.rows, got.union_ratio, got.union_blocks_mean, got.same_as_previous_share) == (
        20,
        None,
        None,
        None,
    )
    assert (
        "16 consecutive" in got.reasons["union_ratio"]
        and "two consecutive" in got.reasons["same_as_previous_share"]
    )


def test_summary_is_frozen_and_json() -> None:
    with statistics.collect() as seen:
        observe_both(0)
    summary = seen.read()
    with pytest.raises(dataclasses.FrozenInstanceError):
        summary.rows = 1  # type: ignore[misc]
    mapping = summary.to_mapping()
    assert json.loads(json.dumps(mapping, allow_nan=False)) == mapping
    assert set(mapping) == {f.name for f in dataclasses.fields(Summary)}


def test_nested_and_repeated_collections() -> None:
    observe_both(0)
    with statistics.collect() as outer:
        observe_both(1)
        before = outer.read()
        with statistics.collect() as inner:
            want = observe_both(2)
        after_inner = inner.read()
        observe_both(3)
    with statistics.collect() as again:
        want_again = observe_both(4)
    observe_both(5)
    assert before.rows == 40 and outer.read().rows == 120 and outer.read().gate_rows == 240
    assert_equal(inner.read(), want[0] | want[1])
    assert inner.read() == after_inner
    assert_equal(again.read(), want_again[0] | want_again[1])


def test_a_collection_closes_when_the_body_raises() -> None:
    with pytest.raises(KeyError), statistics.collect() as seen:
        raise KeyError
    observe_both(0)
    assert seen.read().rows is None


def test_interleaved_contexts_do_not_mix() -> None:
    """Two models, each in its own context (as tasks are), step by turns; a thread that opened
    nothing is not seen.
    """
    contexts = [contextvars.copy_context() for _ in range(2)]
    managers = [statistics.collect() for _ in contexts]
    seen = [
        context.run(manager.__enter__) for context, manager in zip(contexts, managers, strict=True)
    ]
    torch.manual_seed(0)
    models = [TinyLM(preset("tiny")).requires_grad_(False) for _ in contexts]
    ids = [torch.randint(0, 256, (1, tokens)) for tokens in (100, 37)]
    alone = []
    for model, x in zip(models, ids, strict=True):
        with statistics.collect() as only:
            model(x)
            model(x)
        alone.append(only.read())
    for _ in range(2):
        for context, model, x in zip(contexts, models, ids, strict=True):
            context.run(model, x)
    thread = threading.Thread(target=observe_both, args=(0,))
    thread.start()
    thread.join()
    for context, manager in zip(contexts, managers, strict=True):
        context.run(manager.__exit__, None, None, None)
    assert [s.read() for s in seen] == alone
    assert alone[0].rows == 2 * 2 * 2 * 100 and alone[0] != alone[1]


def test_devices_are_summed() -> None:
    """A second accumulator stands for a second device: sums add, extremes do not."""
    parts, wants = [], []
    for seed, tokens in ((1, 20), (2, 40)):
        with statistics.collect() as part:
            blocks = random_blocks(1, tokens, 2, 4, start=[seed * 30], seed=seed)
            statistics.observe_selection(blocks, q_start=seed * 30, sel_block=SEL_BLOCK)
        parts.append(part)
        wants.append((blocks, [seed * 30], None))
    both = statistics.Collection()
    both._sums = {
        torch.device("cpu"): next(iter(parts[0]._sums.values())),
        torch.device("cpu", 0): next(iter(parts[1]._sums.values())),
    }
    assert_equal(both.read(), expect_selection(wants))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: statistics.observe_selection(
                torch.zeros(2, 3, 4).int(), q_start=0, sel_block=8
            ),
            r"got shape \(2, 3, 4\); wanted blocks",
        ),
        (
            lambda: statistics.observe_gates(torch.zeros(2, 3, 4), ALL),
            r"got shape \(2, 3, 4\); wanted gates",
        ),
        (
            lambda: statistics.observe_gates(torch.zeros(1, 3, 4, 2), ALL),
            "got 2 gates and branches",
        ),
        (
            lambda: statistics.observe_gates(torch.zeros(1, 3, 4, 3), ("cmp", "dense")),
            "wanted one gate for each",
        ),
        (lambda: statistics.observe_gates(torch.zeros(1, 3, 4, 3), ()), "wanted one gate for each"),
        (
            lambda: statistics.observe_gates(
                torch.zeros(1, 3, 4, 3), ALL, present=torch.ones(1, 3)
            ),
            r"wanted torch.bool \[1 or 1, 3\]",
        ),
        (
            lambda: statistics.observe_gates(
                torch.zeros(1, 3, 4, 3), ALL, present=torch.ones(1, 4).bool()
            ),
            r"\(1, 4\); wanted torch.bool",
        ),
    ],
)
def test_errors_say_got_and_wanted(call: Callable[[], None], message: str) -> None:
    with statistics.collect(), pytest.raises(ValueError, match=message):
        call()
