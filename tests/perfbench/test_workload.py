"""One step of a cell: what it changes, what it is fed, and that it is the model that was asked
for.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nsa import engagement
from nsa.model import DenseLM, TinyLM
from perfbench.worker.workloads import workload
from perfbench.worker.workloads.workload import NUM_BATCHES, Workload
from tests.perfbench.jobs import TINY, job

pytestmark = pytest.mark.usefixtures("one_thread")


def weights(work: Workload) -> dict[str, Tensor]:
    return {name: x.detach().clone() for name, x in work.model.named_parameters()}


def inputs_of(work: Workload, steps: int) -> list[Tensor]:
    """What the model was fed in ``steps`` steps."""
    fed: list[Tensor] = []
    hook = work.model.register_forward_pre_hook(lambda _, args: fed.append(args[0].clone()))
    for _ in range(steps):
        work.step()
    hook.remove()
    return fed


@pytest.mark.parametrize("path", ["v2", "masked", "dense"])
def test_a_training_step_moves_every_weight(path: str) -> None:
    work = workload.build(job(path, "train"))
    before = weights(work)
    work.step()
    after = weights(work)
    assert [name for name in before if torch.equal(before[name], after[name])] == []
    assert all(torch.isfinite(x).all() for x in after.values())


def test_gradients_of_two_steps_do_not_add_up() -> None:
    """With a learning rate of 0 the same batch has the same gradients, eight batches later."""
    work = workload.build(job("masked", "train"))
    assert work.optimizer is not None
    work.optimizer.param_groups[0]["lr"] = 0.0
    work.step()
    wanted = [x.grad.clone() for x in work.model.parameters() if x.grad is not None]
    for _ in range(NUM_BATCHES):
        work.step()
    torch.testing.assert_close([x.grad for x in work.model.parameters()], wanted)


def test_training_is_real_optimisation() -> None:
    """AdamW moves each weight by at most its learning rate in the first step; the loss on repeated
    data falls.
    """
    work = workload.build(job("masked", "train"))
    before = weights(work)
    work.step()
    moved = max(
        float((x.detach() - before[name]).abs().max()) for name, x in work.model.named_parameters()
    )
    assert 0.5e-4 < moved < 2e-4
    (ids,) = inputs_of(work, 1)

    def loss() -> float:
        with torch.no_grad():
            logits = work.model(ids)
        return float(
            torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        )

    first = loss()
    for _ in range(4 * NUM_BATCHES):
        work.step()
    assert loss() < first


@pytest.mark.parametrize("path", ["v2", "dense"])
def test_a_forward_step_touches_nothing(path: str) -> None:
    work = workload.build(job(path, "forward"))
    before = weights(work)
    outputs: list[Tensor] = []
    work.model.register_forward_hook(lambda _, args, o: outputs.append(o))
    work.step()
    assert all(torch.equal(before[name], x) for name, x in work.model.named_parameters())
    assert all(x.grad is None for x in work.model.parameters())
    assert outputs[0].shape == (1, 64, TINY.vocab_size) and not outputs[0].requires_grad


@pytest.mark.parametrize("kind", ["train", "forward"])
def test_every_step_is_fed_another_batch(kind: str) -> None:
    work = workload.build(job("masked", kind, seq_len=96, batch=2))
    assert work.tokens_per_step == 2 * 96
    fed = inputs_of(work, NUM_BATCHES + 1)
    assert all(ids.shape == (2, 96) and ids.dtype == torch.int64 for ids in fed)
    assert all(int(ids.min()) >= 0 and int(ids.max()) < TINY.vocab_size for ids in fed)
    assert not any(torch.equal(fed[i], fed[j]) for i in range(NUM_BATCHES) for j in range(i))
    assert torch.equal(fed[0], fed[NUM_BATCHES])
    assert fed[0].unique().numel() > 50, "random bytes, not a constant"


def test_the_seed_decides_weights_and_data() -> None:
    one, same, other = (workload.build(job(seed=seed)) for seed in (1, 1, 2))
    assert all(torch.equal(x, weights(same)[name]) for name, x in weights(one).items())
    assert not torch.equal(weights(one)["head.weight"], weights(other)["head.weight"])
    fed = [inputs_of(work, 1)[0] for work in (one, same, other)]
    assert torch.equal(fed[0], fed[1]) and not torch.equal(fed[0], fed[2])


@pytest.mark.parametrize(
    ("path", "model"), [("v2", TinyLM), ("masked", TinyLM), ("auto", TinyLM), ("dense", DenseLM)]
)
def test_the_model_is_the_cells_own(path: str, model: type) -> None:
    planned_job = job(path, "forward")
    work = workload.build(planned_job)
    assert type(work.model) is model
    with engagement.collect() as engaged:
        work.step()
    assert sorted(engaged.counts) == sorted(set(planned_job.plan.counters))
    assert set(engaged.counts.values()) == {TINY.num_layers}


def test_dtype_is_the_cells_own() -> None:
    planned_job = job("masked", "train")
    work = workload.build(
        planned_job.model_copy(update={"axes": replace(planned_job.axes, dtype="bf16")})
    )
    assert {x.dtype for x in work.model.parameters()} == {torch.bfloat16}
    before = weights(work)
    work.step()
    assert not torch.equal(before["head.weight"], weights(work)["head.weight"])


def test_out_of_memory_passes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*_: object) -> TinyLM:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    monkeypatch.setattr(workload, "TinyLM", too_large)
    with pytest.raises(torch.OutOfMemoryError, match="20.00 GiB"):
        workload.build(job("v2"))
