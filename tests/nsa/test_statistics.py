"""Telemetry: every value against plain loops, and no effect on what it watches (no sync, gradient or graph break)."""

from __future__ import annotations

import contextvars
import dataclasses
import json
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from nsa import TinyLM, statistics
from nsa.config import preset
from nsa.statistics import Summary
from tests.cases import randn

ALL = ("cmp", "sel", "win")
SEL_BLOCK = 8


def random_blocks(batch: int, tokens: int, heads: int, slots: int, *, start: list[int], seed: int) -> Tensor:
    """Ascending unique ids up to the query's block, -1 padded; about a third repeats the previous query's, some are empty."""
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int) -> int:
        return int(torch.randint(high, (), generator=generator))

    out = torch.full((batch, tokens, heads, slots), -1, dtype=torch.int32)
    for b in range(batch):
        for t in range(tokens):
            for g in range(heads):
                kind = draw(6)
                if kind < 2 and t:
                    out[b, t, g] = out[b, t - 1, g]
                elif kind < 5:
                    candidates = torch.randperm((start[b] + t) // SEL_BLOCK + 1, generator=generator)[: 1 + draw(slots)].sort().values
                    out[b, t, g, : len(candidates)] = candidates
    return out


def expect_selection(calls: list[tuple[Tensor, list[int], Tensor | None]]) -> dict[str, Any]:
    """Loops over sets of ids; a call is (blocks, q_start a row, present)."""
    lengths: list[int] = []
    sizes: list[int] = []
    same: list[bool] = []
    unions: list[int] = []
    window_sizes: list[int] = []
    for blocks, start, present in calls:
        B, T, G, _ = blocks.shape
        there = [[present is None or bool(present.expand(B, T)[b, t]) for t in range(T)] for b in range(B)]
        for b in range(B):
            for g in range(G):
                sets = [{j for j in row if j >= 0} for row in blocks[b, :, g].tolist()]
                for t, chosen in enumerate(sets):
                    if not there[b][t]:
                        continue
                    lengths.append(
                        sum(j * SEL_BLOCK <= p <= start[b] + t for j in chosen for p in range(j * SEL_BLOCK, (j + 1) * SEL_BLOCK))
                    )
                    sizes.append(len(chosen))
                    if t and there[b][t - 1]:
                        same.append(chosen == sets[t - 1])
                for first in range(0, T - 15, 16):
                    if all(there[b][first : first + 16]):
                        unions.append(len(set().union(*sets[first : first + 16])))
                        window_sizes += [len(chosen) for chosen in sets[first : first + 16]]
    return {
        "rows": len(lengths),
        "tokens_mean": sum(lengths) / len(lengths),
        "tokens_min": min(lengths),
        "tokens_max": max(lengths),
        "blocks_mean": sum(sizes) / len(sizes),
        "union_blocks_mean": sum(unions) / len(unions) if unions else None,
        "union_ratio": (sum(unions) / len(unions)) / (sum(window_sizes) / len(window_sizes)) if unions else None,
        "same_as_previous_share": sum(same) / len(same) if same else None,
    }


def expect_gates(calls: list[tuple[Tensor, tuple[str, ...]]]) -> dict[str, Any]:
    gates: dict[str, list[float]] = {b: [] for b in ALL}
    shares: dict[str, list[float]] = {b: [] for b in ALL}
    entropy: list[float] = []
    collapsed: list[bool] = []
    count = invalid = massless = 0
    for tensor, branches in calls:
        for row in tensor.double().flatten(0, 2).tolist():
            on = {b: row[i] for i, b in enumerate(ALL) if b in branches}
            if not all(0 <= x < math.inf for x in on.values()):
                invalid += 1
                continue
            count += 1
            total = sum(on.values())
            massless += total == 0
            for b, x in on.items():
                gates[b].append(x)
                if total:
                    shares[b].append(x / total)
            if total:
                entropy.append(-sum(x / total * math.log(x / total) for x in on.values() if x))
                collapsed.append(max(on.values()) > 0.95 * total)

    def mean(values: list[float] | list[bool]) -> float | None:
        return sum(values) / len(values) if values else None

    return {
        "gate_rows": count,
        "gate_rows_invalid": invalid,
        "gate_rows_massless": massless,
        "gate_mean": {b: mean(gates[b]) for b in ALL},
        "branch_share": {b: mean(shares[b]) for b in ALL},
        "gate_entropy": mean(entropy),
        "collapse_share": mean(collapsed),
    }


def assert_equal(summary: Summary, want: dict[str, Any], *, rel: float = 1e-12) -> None:
    got = summary.to_mapping()
    for name, value in want.items():
        nested = isinstance(value, dict)
        for key, wanted in value.items() if nested else [(name, value)]:
            found = got[name][key] if nested else got[name]
            if wanted is None:
                assert found is None, (name, key)
                assert summary.reasons[f"{name}.{key}" if nested else name]
            else:
                assert found == pytest.approx(wanted, rel=rel, abs=1e-15), (name, key)


def random_gates(*shape: int, seed: int) -> Tensor:
    """fp64, sharp enough that some rows collapse."""
    return (4 * randn(*shape, 3, seed=seed, dtype=torch.float64)).sigmoid()


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
        assert want["tokens_min"] == 0 and 0 < want["same_as_previous_share"] < 1 < want["union_ratio"], "or the inputs prove little"


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
        statistics.observe_selection(garbage, q_start=torch.tensor([10, 30]), sel_block=SEL_BLOCK, present=present)
        statistics.observe_gates(gates.masked_fill(~present.expand(2, 64)[..., None, None], math.nan), ALL, present=present)
    assert_equal(seen.read(), expect_selection([(blocks, [10, 30], present)]))
    assert_equal(seen.read(), expect_gates([(gates[present.expand(2, 64)][None], ALL)]))


def test_absent_queries_set_no_extreme() -> None:
    """Tokens of the four rows: 0 (absent), 8, 16, 24 (absent)."""
    blocks = torch.tensor([[-1, -1, -1], [0, -1, -1], [0, 1, -1], [0, 1, 2]], dtype=torch.int32)[None, :, None]
    with statistics.collect() as seen:
        statistics.observe_selection(blocks, q_start=99, sel_block=8, present=torch.tensor([[False, True, True, False]]))
    got = seen.read()
    assert (got.rows, got.tokens_min, got.tokens_mean, got.tokens_max) == (2, 8, 12.0, 16)


def test_rows_without_a_block() -> None:
    with statistics.collect() as seen:
        statistics.observe_selection(torch.full((1, 32, 1, 3), -1, dtype=torch.int32), q_start=0, sel_block=SEL_BLOCK)
    got = seen.read()
    assert (got.rows, got.tokens_mean, got.tokens_min, got.tokens_max, got.blocks_mean) == (32, 0.0, 0, 0, 0.0)
    assert (got.union_blocks_mean, got.same_as_previous_share, got.union_ratio) == (0.0, 1.0, None)
    assert "that chose any block" in got.reasons["union_ratio"]


def test_union_ratio_by_hand() -> None:
    """16 queries that agree load one set; 16 that choose two blocks of their own load 32, that is 16 times a single query's."""
    alike = torch.tensor([0, 5], dtype=torch.int32).expand(1, 16, 1, 2)
    apart = torch.arange(32, dtype=torch.int32).reshape(1, 16, 1, 2)
    for blocks, ratio, union in ((alike, 1.0, 2.0), (apart, 16.0, 32.0), (torch.cat([alike, apart], 1), 8.5, 17.0)):
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
    gates[0, 0, 0, 1], gates[0, 1, 0, 2], gates[0, 2, 1, 0], gates[0, 3] = math.nan, math.inf, -0.1, 0.0
    with statistics.collect() as seen:
        statistics.observe_gates(gates, ALL)
        statistics.observe_gates(gates[:, 2:3], ("sel", "win"))  # the negative gate is of a branch that is off
    assert_equal(seen.read(), expect_gates([(gates, ALL), (gates[:, 2:3], ("sel", "win"))]))
    assert (seen.read().gate_rows_invalid, seen.read().gate_rows_massless) == (3, 2)
    with statistics.collect() as nothing_valid:
        statistics.observe_gates(torch.full((1, 2, 2, 3), math.nan), ALL)
    got = nothing_valid.read()
    assert (got.gate_rows, got.gate_rows_invalid, got.gate_entropy, got.gate_mean["cmp"]) == (0, 4, None, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_gates_are_summed_in_fp64(dtype: torch.dtype) -> None:
    gates = random_gates(1, 2000, 4, seed=8).to(dtype)
    with statistics.collect() as seen:
        statistics.observe_gates(gates, ALL)
    assert_equal(seen.read(), expect_gates([(gates, ALL)]), rel=1e-6)


def test_nothing_observed_is_null_with_a_reason() -> None:
    with statistics.collect() as seen:
        statistics.observe_selection(torch.zeros(1, 0, 2, 4, dtype=torch.int32), q_start=0, sel_block=SEL_BLOCK)
        statistics.observe_gates(torch.zeros(0, 3, 2, 3), ALL)
    got = seen.read().to_mapping()
    reasons, captured = got.pop("reasons"), got.pop("captured_calls")
    assert captured == 0
    flat = {
        k: v
        for name, value in got.items()
        for k, v in ({f"{name}.{b}": x for b, x in value.items()} if isinstance(value, dict) else {name: value}).items()
    }
    assert set(flat.values()) == {None} and set(flat) == set(reasons)
    assert all("torch.compile" in reason and "profile" in reason for reason in reasons.values())


def test_a_call_with_one_query_has_no_neighbours() -> None:
    with statistics.collect() as seen:
        for t in range(20):  # decoding
            statistics.observe_selection(torch.zeros(1, 1, 1, 2, dtype=torch.int32), q_start=t, sel_block=SEL_BLOCK)
    got = seen.read()
    assert (got.rows, got.union_ratio, got.union_blocks_mean, got.same_as_previous_share) == (20, None, None, None)
    assert "16 consecutive" in got.reasons["union_ratio"] and "two consecutive" in got.reasons["same_as_previous_share"]


def test_summary_is_frozen_and_json() -> None:
    with statistics.collect() as seen:
        observe_both(0)
    summary = seen.read()
    with pytest.raises(dataclasses.FrozenInstanceError):
        summary.rows = 1  # type: ignore[misc]
    mapping = summary.to_mapping()
    assert json.loads(json.dumps(mapping, allow_nan=False)) == mapping
    assert set(mapping) == {f.name for f in dataclasses.fields(Summary)}


def observe_both(seed: int, tokens: int = 20) -> tuple[dict[str, Any], dict[str, Any]]:
    """One call of each, and what it amounts to on its own."""
    blocks, gates = random_blocks(1, tokens, 2, 4, start=[50], seed=seed), random_gates(1, tokens, 4, seed=seed)
    statistics.observe_selection(blocks, q_start=50, sel_block=SEL_BLOCK)
    statistics.observe_gates(gates, ALL)
    return expect_selection([(blocks, [50], None)]), expect_gates([(gates, ALL)])


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
    """Two models, each in its own context (as tasks are), step by turns; a thread that opened nothing is not seen."""
    contexts = [contextvars.copy_context() for _ in range(2)]
    managers = [statistics.collect() for _ in contexts]
    seen = [context.run(manager.__enter__) for context, manager in zip(contexts, managers, strict=True)]
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


def gradients(model: TinyLM, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad(set_to_none=True)
    logits = model(ids)
    logits.float().logsumexp(-1).sum().backward()
    return logits.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_model_does_not_notice(checkpointed: bool) -> None:
    config = dataclasses.replace(preset("tiny"), checkpoint_layers=(0, 2) if checkpointed else None)
    torch.manual_seed(0)
    model, ids = TinyLM(config), torch.randint(0, 256, (2, 100))
    plain, plain_grads = gradients(model, ids)
    with statistics.collect() as seen:
        watched, watched_grads = gradients(model, ids)
    assert torch.equal(plain, watched)
    assert len(plain_grads) == len(watched_grads) and all(map(torch.equal, plain_grads, watched_grads))
    got = seen.read()
    assert (got.rows, got.gate_rows) == (2 * 100 * 2 * 2, 2 * 100 * 4 * 2), "layers times heads times queries, once each"


def test_observing_adds_nothing_to_the_graph() -> None:
    gates = random_gates(1, 20, 2, seed=9).requires_grad_()
    with statistics.collect() as seen:
        statistics.observe_gates(gates, ALL)
    assert gates.grad_fn is None and not any(total.requires_grad for total in seen._sums.values())


def test_a_recomputation_is_not_observed_again() -> None:
    def layer(x: Tensor) -> Tensor:
        gates = x.sigmoid()
        statistics.observe_gates(gates, ALL)
        return gates.square()

    x = randn(1, 5, 2, 3, seed=10).requires_grad_()
    with statistics.collect() as seen:
        y = checkpoint(layer, x, use_reentrant=False)
        assert isinstance(y, Tensor)
        y.sum().backward()
    assert seen.read().gate_rows == 10


def test_inference_mode_first_and_then_training() -> None:
    with statistics.collect() as seen:
        with torch.inference_mode():
            first = observe_both(1)
            once = seen.read()
        observe_both(2)
    assert_equal(once, first[0] | first[1])
    assert seen.read().rows == 80


SYNCS = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__", "__len__")
SYNCING_OPS = {"_local_scalar_dense", "nonzero", "index", "masked_select", "equal", "is_nonzero", "_unique2", "bincount"}


class NoSyncingOps(TorchDispatchMode):
    """Refuses operators that read a tensor on the host, whose output's shape depends on one, or that upload a Python list."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split("::")[1].split(".")[0]
        assert name not in SYNCING_OPS, f"{name} syncs"
        return func(*args, **(kwargs or {}))


@contextmanager
def no_syncs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(name: str) -> Callable[..., Any]:
        def raise_(*args: Any, **kwargs: Any) -> Any:
            raise AssertionError(f"Tensor.{name} syncs")

        return raise_

    with monkeypatch.context() as patch, NoSyncingOps():
        for name in SYNCS:
            patch.setattr(Tensor, name, refuse(name))
        yield


def test_observing_never_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, gates = random_blocks(2, 40, 2, 4, start=[9, 50], seed=11), random_gates(2, 40, 4, seed=11)
    present = torch.arange(40)[None] < 35
    q_start = torch.tensor([9, 50])
    with statistics.collect() as seen, no_syncs(monkeypatch):
        for mask in (None, present):
            statistics.observe_selection(blocks, q_start=q_start, sel_block=SEL_BLOCK, present=mask)
            statistics.observe_selection(blocks, q_start=9, sel_block=SEL_BLOCK, present=mask)
            statistics.observe_gates(gates, ALL, present=mask)
            statistics.observe_gates(gates, ("sel",), present=mask)
    assert seen.read().rows == 2 * (2 * 40 * 2 + 2 * 35 * 2)
    with pytest.raises(AssertionError, match="syncs"), no_syncs(monkeypatch):
        blocks.max().item()
    with pytest.raises(AssertionError, match="syncs"), no_syncs(monkeypatch):
        gates[..., [0, 2]]


def test_read_moves_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    moves: list[int] = []
    cpu = Tensor.cpu

    def counting(self: Tensor) -> Tensor:
        moves.append(self.numel())
        return cpu(self)

    with statistics.collect() as seen:
        for seed in range(3):
            observe_both(seed)
    monkeypatch.setattr(Tensor, "cpu", counting)
    monkeypatch.setattr(Tensor, "item", None)
    assert seen.read().rows == 120
    assert len(moves) == 1


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
    both._sums = {torch.device("cpu"): next(iter(parts[0]._sums.values())), torch.device("cpu", 0): next(iter(parts[1]._sums.values()))}
    assert_equal(both.read(), expect_selection(wants))


def watched(gates: Tensor, blocks: Tensor) -> Tensor:
    statistics.observe_gates(gates, ALL)
    statistics.observe_selection(blocks, q_start=0, sel_block=SEL_BLOCK)
    return (gates * blocks.clamp(min=0).sum()).sum(-1)


@pytest.mark.parametrize("opened", ["while tracing", "after tracing", "never"])
def test_compiled_calls_are_not_observed_and_say_so(opened: str) -> None:
    torch._dynamo.reset()
    gates, blocks = random_gates(1, 20, 2, seed=12), random_blocks(1, 20, 1, 4, start=[0], seed=12)
    compiles: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        compiles.append(len(list(graph.graph.nodes)))
        return graph.forward

    compiled = torch.compile(watched, fullgraph=True, backend=backend)
    if opened != "while tracing":
        assert torch.equal(compiled(gates, blocks), watched(gates, blocks))
    if opened != "never":
        with statistics.collect() as seen:
            got = compiled(gates, blocks)
        assert torch.equal(got, watched(gates, blocks))
        assert seen.read().rows is None and seen.read().gate_rows is None
        assert "torch.compile" in seen.read().reasons["rows"] and "profile" in seen.read().reasons["rows"]
    assert torch.equal(compiled(gates, blocks), watched(gates, blocks))
    assert len(compiles) == 1, "opening or closing a collection must not recompile"


def test_eager_backend() -> None:
    torch._dynamo.reset()
    gates, blocks = random_gates(1, 20, 2, seed=13), random_blocks(1, 20, 1, 4, start=[0], seed=13)
    with statistics.collect():
        assert torch.equal(torch.compile(watched, fullgraph=True, backend="eager")(gates, blocks), watched(gates, blocks))


def test_captured_calls_are_counted_not_observed(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA graphs need a GPU; what is decided from the stream's state does not."""

    class OnCuda(Tensor):
        is_cuda = True  # type: ignore[assignment]

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with statistics.collect() as outer, statistics.collect() as seen:
        statistics.observe_gates(random_gates(1, 4, 2, seed=14).as_subclass(OnCuda), ALL)
    assert seen.read().captured_calls == outer.read().captured_calls == 1
    assert seen.read().gate_rows is None and "captured 1 calls" in seen.read().reasons["gate_rows"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: statistics.observe_selection(torch.zeros(2, 3, 4).int(), q_start=0, sel_block=8), r"got shape \(2, 3, 4\); wanted blocks"),
        (lambda: statistics.observe_gates(torch.zeros(2, 3, 4), ALL), r"got shape \(2, 3, 4\); wanted gates"),
        (lambda: statistics.observe_gates(torch.zeros(1, 3, 4, 2), ALL), "got 2 gates and branches"),
        (lambda: statistics.observe_gates(torch.zeros(1, 3, 4, 3), ("cmp", "dense")), "wanted one gate for each"),
        (lambda: statistics.observe_gates(torch.zeros(1, 3, 4, 3), ()), "wanted one gate for each"),
        (lambda: statistics.observe_gates(torch.zeros(1, 3, 4, 3), ALL, present=torch.ones(1, 3)), r"wanted torch.bool \[1 or 1, 3\]"),
        (lambda: statistics.observe_gates(torch.zeros(1, 3, 4, 3), ALL, present=torch.ones(1, 4).bool()), r"\(1, 4\); wanted torch.bool"),
    ],
)
def test_errors_say_got_and_wanted(call: Callable[[], None], message: str) -> None:
    with statistics.collect(), pytest.raises(ValueError, match=message):
        call()
