"""The proof of a step of the loop is red for a fault planted in its data, its micro-steps, its
optimizer or in what it reports; a healthy step passes by a factor of three.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa.train.data.loader import Loader
from nsa.train.optimizer import TrainOptimizer
from nsa.train.records import Batch
from nsa.train.step import TrainStep
from perfbench.records.rows import Status
from perfbench.worker.workloads import train_loop, workload
from tests.perfbench import loop_cases
from tests.perfbench.loop_cases import of, step_of
from tests.perfbench.measure_cases import assert_no_speed, run
from tests.perfbench.test_step_faults import (
    attention_detached,
    far,
    hidden_states_detached,
    last_layer_skipped,
    mlp_skipped,
    query_detached,
    wrong,
)
from tests.perfbench.test_step_proof import LEARNING, assert_clear

in_process, graphs = loop_cases.in_process, loop_cases.graphs
pytestmark = pytest.mark.usefixtures("one_thread", "light", "in_process")
LOOP = (*LEARNING, "data", "norm")
DTYPES = pytest.mark.parametrize("dtype", ["fp32", "bf16"])
Plant = Callable[[pytest.MonkeyPatch], None]
named = {"ids": lambda fault: fault.__name__}


@pytest.fixture(autouse=True)
def _forget_graphs() -> Iterator[None]:
    yield
    torch._dynamo.reset()


# Healthy steps.


@DTYPES
@pytest.mark.parametrize("path", ["masked", "v1", "v2", "adaptive", "dense"])
def test_a_healthy_step(path: str, dtype: str) -> None:
    line = step_of(of(path, dtype=dtype))
    assert_clear(line, *LOOP, *([] if path == "dense" else ["blocks"]))
    assert (line.num_layers, line.tokens, line.blocks) == (2, 224, "given")


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("compiled", ["off", "on"])
@pytest.mark.parametrize("captured", ["off", "on"])
def test_a_healthy_step_in_a_graph(compiled: str, captured: str) -> None:
    line = step_of(of(compile=compiled, cuda_graph=captured))
    assert_clear(line, *LOOP, *(["blocks"] if compiled == "off" else []))


@DTYPES
def test_healthy_micro_steps(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    monkeypatch.setattr(train_loop, "ACCUMULATE", 3)
    line = step_of(of(dtype=dtype))
    assert_clear(line, *LOOP, "blocks")
    assert line.tokens == 3 * 224


def test_the_steps_that_are_proved_clip() -> None:
    """Else a fault in clipping could not show."""
    work = workload.build(of())
    for _ in range(3):
        work.step()
    assert work.loop is not None
    assert work.loop.step.read().gradient_norm > 1.02 * work.loop.config.train.clip


# Data.


def changed_batches(monkeypatch: pytest.MonkeyPatch, change: Callable[[int, Batch], Batch]) -> None:
    """``change`` is given the number of each batch, from 0, and the batch."""
    real, count = Loader.__next__, iter(range(10**9))
    monkeypatch.setattr(Loader, "__next__", lambda self: change(next(count), real(self)))


def first_again(monkeypatch: pytest.MonkeyPatch, since: int = 0) -> None:
    kept: list[Batch] = []

    def change(number: int, batch: Batch) -> Batch:
        kept[:] = kept or [batch]
        return batch if number < since else kept[0]

    changed_batches(monkeypatch, change)


def test_a_loader_that_repeats_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    first_again(monkeypatch)
    line = step_of(of())
    assert wrong(line) == {"data"} and "have 2 distinct rows of 18" in line.worst
    row = run(of())
    assert row.status is Status.PARITY and "distinct rows" in row.reason
    assert_no_speed(row)


def test_rows_that_are_alike_in_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(number: int, batch: Batch) -> Batch:
        ids, labels = (x[:1].expand_as(x).contiguous() for x in (batch.ids, batch.labels))
        return replace(batch, ids=ids, labels=labels)

    changed_batches(monkeypatch, change)
    line = step_of(of())
    assert wrong(line) == {"data"} and "have 9 distinct rows of 18" in line.worst


def test_a_loader_that_repeats_after_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    first_again(monkeypatch, since=13)
    row = run(of())
    assert row.status is Status.PARITY and row.tok_per_s is None and row.samples_s == []
    assert row.step_proof is not None and row.step_proof.ok
    assert "distinct batches among the" in row.reason and row.loop is not None


BATCHES: dict[str, tuple[Callable[[Batch], Batch], str]] = {
    "labels are the inputs": (
        lambda b: replace(b, labels=b.ids),
        "the labels are not the ids that follow",
    ),
    "a label is ignored": (
        lambda b: replace(b, labels=torch.where(torch.arange(112) == 111, -100, b.labels)),
        "ids and labels from -100",
    ),
    "beyond the vocabulary": (
        lambda b: replace(b, labels=torch.where(torch.arange(112) == 111, 256, b.labels)),
        "to 256; wanted 0 to 255",
    ),
    "labels are miscounted": (
        lambda b: replace(b, num_labels=b.num_labels - 1),
        "223 labels are counted of 224",
    ),
}


@pytest.mark.parametrize("name", BATCHES)
def test_batches_that_are_no_text(name: str) -> None:
    """Of the function alone: a label outside of the vocabulary is an error of the loss, too."""
    from perfbench.worker.step_proof.loop_step import data_fault

    work = workload.build(of())
    work.step()
    assert work.loop is not None
    (batch,) = work.loop.last().given
    assert data_fault([batch], batch.ids, batch.labels, 256) == ""
    change, sentence = BATCHES[name]
    odd = change(batch)
    assert sentence in data_fault([odd], odd.ids, odd.labels, 256)


def test_a_miscounted_batch_is_another_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    changed_batches(monkeypatch, lambda _, b: replace(b, num_labels=2 * b.num_labels))
    assert wrong(step_of(of())) == {"data", "loss", "gradients"}


@pytest.mark.usefixtures("graphs")
def test_a_graph_that_reads_the_batch_of_its_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a loop that forgets to copy into the graph's inputs trains on, for ever."""
    real = TrainStep._captured

    def stale(self: Any, batches: Any) -> None:
        if self._replay is None:
            real(self, batches)
        else:
            self._replay()

    monkeypatch.setattr(TrainStep, "_captured", stale)
    line = step_of(of(cuda_graph="on"))
    assert wrong(line) == {"data"}
    assert "the ids that the model had are not those that the loader gave" in line.worst


# Micro-steps and the model.


def first_micro_step_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    body = TrainStep._body
    monkeypatch.setattr(TrainStep, "_body", lambda self, micro, n: body(self, micro[:1], n))


def second_backward_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    real, count = TrainStep._loss_sum, iter(range(10**9))

    def loss(self: Any, *rest: Any) -> Tensor:
        found: Tensor = real(self, *rest)
        return found if next(count) % 2 == 0 else found * 0 + found.detach()

    monkeypatch.setattr(TrainStep, "_loss_sum", loss)


@DTYPES
def test_a_skipped_micro_step(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    monkeypatch.setattr(train_loop, "ACCUMULATE", 2)
    assert step_of(of(dtype=dtype)).ok
    first_micro_step_alone(monkeypatch)
    line = step_of(of(dtype=dtype))
    assert wrong(line) == {"data"} and "1 micro-steps on 2 batches; wanted 2" in line.worst


@DTYPES
def test_a_micro_step_without_its_backward(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    monkeypatch.setattr(train_loop, "ACCUMULATE", 2)
    second_backward_skipped(monkeypatch)
    line = step_of(of(dtype=dtype))
    assert wrong(line) == {"gradients"} and far(line, "gradients")


@DTYPES
@pytest.mark.parametrize("fault", [hidden_states_detached, query_detached], **named)
def test_a_backward_that_is_cut(monkeypatch: pytest.MonkeyPatch, fault: Plant, dtype: str) -> None:
    fault(monkeypatch)
    line = step_of(of(dtype=dtype))
    assert wrong(line) == {"gradients"} and far(line, "gradients")


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("axes", [{}, {"cuda_graph": "on"}, {"compile": "on"}], ids=str)
@pytest.mark.parametrize("fault", [mlp_skipped, attention_detached], **named)
def test_a_fault_in_the_model(
    monkeypatch: pytest.MonkeyPatch, fault: Plant, axes: dict[str, str]
) -> None:
    fault(monkeypatch)
    assert step_of(of(**axes)).ok is False


def test_a_layer_without_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    last_layer_skipped(monkeypatch)
    assert "1 calls of the attention in a step; wanted 2" in step_of(of()).worst


# The optimizer.


def optimizer_step(
    monkeypatch: pytest.MonkeyPatch, step: Callable[[Any, Callable[[Any], None]], None]
) -> None:
    real = TrainOptimizer.step
    monkeypatch.setattr(TrainOptimizer, "step", lambda self: step(self, real))


def without_bias_correction(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(self: Any, real: Callable[[Any], None]) -> None:
        counts = [state["step"] for state in self._adamw.state.values()]
        for count in counts:
            count += 1e6
        real(self)
        for count in counts:
            count -= 1e6

    optimizer_step(monkeypatch, step)


def with_decayed_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(self: Any, real: Callable[[Any], None]) -> None:
        self._adamw.param_groups[1]["weight_decay"] = 0.1
        real(self)

    optimizer_step(monkeypatch, step)


def without_decay(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(self: Any, real: Callable[[Any], None]) -> None:
        self._adamw.param_groups[0]["weight_decay"] = 0.0
        real(self)

    optimizer_step(monkeypatch, step)


def with_other_betas(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(self: Any, real: Callable[[Any], None]) -> None:
        self._adamw.param_groups[0]["betas"] = (0.9, 0.999)
        real(self)

    optimizer_step(monkeypatch, step)


def without_clipping(monkeypatch: pytest.MonkeyPatch) -> None:
    clip = TrainOptimizer.clip
    monkeypatch.setattr(TrainOptimizer, "clip", lambda self, most: clip(self, 0.0))


def at_a_constant_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_loop, "learning_rate", lambda step, config: config.lr)


def a_step_late(monkeypatch: pytest.MonkeyPatch) -> None:
    real = train_loop.learning_rate
    monkeypatch.setattr(
        train_loop, "learning_rate", lambda step, config: real(max(0, step - 1), config)
    )


def taken_for_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(self: Any, real: Callable[[Any], None]) -> None:
        self.found_inf.fill_(1.0)
        real(self)

    optimizer_step(monkeypatch, step)


@DTYPES
@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (without_bias_correction, "the update of"),
        (with_decayed_norms, "the update of"),
        (without_decay, "the update of"),
        (with_other_betas, "exp_avg_sq of"),
        (without_clipping, "exp_avg_sq of"),
        (at_a_constant_rate, "the update of"),
        (a_step_late, "the update of"),
        (taken_for_bad, "a step count of 0 after 0"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_another_optimizer(
    monkeypatch: pytest.MonkeyPatch, fault: Plant, sentence: str, dtype: str
) -> None:
    fault(monkeypatch)
    line = step_of(of(dtype=dtype))
    if dtype == "bf16" or fault not in (without_clipping, taken_for_bad):
        assert wrong(line) == {"optimizer"} and sentence in line.worst
        assert far(line, "optimizer", 2.0)
    else:  # no kernel divided the gradient, which is then seen as another one
        assert {"norm", "gradients"} <= wrong(line) and far(line, "gradients")


def masters_lag(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are not rounded from their masters."""

    def step(self: Any, real: Callable[[Any], None]) -> None:
        weights = {name: x.clone() for name, x in self._locals.items()}
        real(self)
        for name, x in self._locals.items():
            x.copy_(weights[name])

    optimizer_step(monkeypatch, step)


def no_masters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(train_loop.PRECISIONS, "bf16", "bf16")


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [(masters_lag, "is not its master rounded"), (no_masters, "has no fp32 master")],
    ids=["lag", "none"],
)
def test_masters(monkeypatch: pytest.MonkeyPatch, fault: Plant, sentence: str) -> None:
    """A rate of 6e-6 moves few bf16 weights by a step of theirs; at 100 times that all move."""
    real = train_loop.config_of

    def faster(*rest: Any) -> Any:
        config = real(*rest)
        return replace(config, train=replace(config.train, lr=6e-2))

    monkeypatch.setattr(train_loop, "config_of", faster)
    assert step_of(of(dtype="bf16")).ok
    fault(monkeypatch)
    line = step_of(of(dtype="bf16"))
    assert "optimizer" in wrong(line) and sentence in line.worst


def test_an_optimizer_without_a_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    init = TrainOptimizer.__init__

    def without(self: Any, parameters: Any, *rest: Any, **options: Any) -> None:
        init(self, dict(list(parameters.items())[:-1]), *rest, **options)

    monkeypatch.setattr(TrainOptimizer, "__init__", without)
    line = step_of(of())
    assert "optimizer" in wrong(line) and line.tensors["optimizer"] == 1e9


# What the loop reports.


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        (lambda t: replace(t, loss_nats=1.001 * (t.loss_nats or 0.0)), {"loss"}),
        (lambda t: replace(t, loss_nats=None), {"loss"}),
        (lambda t: replace(t, gradient_norm=1.01 * t.gradient_norm), {"norm", "optimizer"}),
    ],
    ids=["loss", "no loss", "norm"],
)
def test_another_report(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], Any], kinds: set[str]
) -> None:
    read = TrainStep.read
    monkeypatch.setattr(TrainStep, "read", lambda self: change(read(self)))
    line = step_of(of(dtype="bf16"))
    assert wrong(line) == kinds


def test_a_step_that_counts_itself_as_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    add = TrainStep._add
    one = torch.tensor(1.0)
    monkeypatch.setattr(
        TrainStep, "_add", lambda self, loss, n, bad, norm: add(self, loss, n, one, norm)
    )
    line = step_of(of())
    assert wrong(line) == {"optimizer", "loss"}
