"""Context parallelism over a mesh of one rank, whose late chunk is a chunk as on several, by path
triton in its interpreter (`--require interpreter`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from nsa import NSAAttention, dispatch
from nsa.ops import joint_backward
from nsa.ops.decode import kernels as decode
from nsa.parallel import ContextParallel, gather, rotation
from nsa.parallel.gather import WantedItems
from nsa.parallel.layout import ShardedLayout
from tests.cases import SMALL, assert_parity, randn


@pytest.fixture(scope="module")
def cp() -> Iterator[ContextParallel]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield ContextParallel(init_device_mesh("cpu", (1,)))
    dist.destroy_process_group()


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What ran, in order: branches, the choice, uses of the joint backward, and what arrived."""
    notes: list[str] = []

    def note(owner: Any, name: str) -> None:
        plain = getattr(owner, name)

        def noted(*x: Any, **options: Any) -> Any:
            notes.append(name)
            return plain(*x, **options)

        monkeypatch.setattr(owner, name, noted)

    for name in ("compressed", "choose", "selected", "window"):
        note(dispatch, name)
    note(joint_backward, "arguments")
    note(WantedItems, "lay_out")
    return notes


def gradients(layer: NSAAttention, x: Tensor, upstream: Tensor, **packing: Any) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = layer(x, **packing)
    return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], upstream)]


@pytest.mark.parametrize("packing", [{}, {"cu_seqlens": [0, 5, 29]}], ids=["one", "documents"])
def test_kernels_serve_a_late_chunk_as_a_whole_sequence(
    cp: ContextParallel, packing: dict[str, Any], events: list[str]
) -> None:
    """Its keys of the selected branch arrive after the blocks are chosen."""
    torch.manual_seed(0)
    layer = NSAAttention(16, 3, 1, 8, 12, config=SMALL, path="triton")
    x, upstream = (randn(1, 32, 16, seed=seed) for seed in (1, 2))
    want = gradients(layer, x, upstream, **packing)
    events.clear()
    got = gradients(cp.wrap(copy.deepcopy(layer)), cp.shard(x), cp.shard(upstream), **packing)
    branches = ["compressed", "choose", "selected", "window", "arguments"]
    arrived = [event for event in events if event == "lay_out"]
    assert [event for event in events if event != "lay_out"] == branches * 2
    assert len(arrived) == 4 + 2 + 2  # halos, compressed K and V, those of the selected branch
    if not packing:  # which looks for NaN before it begins
        first_branch = events.index("compressed")
        assert events[first_branch:][:4] == ["compressed", "choose", "lay_out", "lay_out"]
    names = ["y", "x", *dict(layer.named_parameters())]
    for name, a, b in zip(names, got, want, strict=True):
        assert_parity(a, b.double(), name)


def test_a_chunk_is_served_by_the_kernel_of_the_whole(
    cp: ContextParallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 queries of 3 heads alone are a call of few queries, whose kernel splits the keys and so
    rounds otherwise; as half of 32 they are not.
    """
    few: list[int] = []
    split = decode.interval

    def noted(q: Tensor, *x: Any, **options: Any) -> None:
        few.append(q.shape[1])
        split(q, *x, **options)

    monkeypatch.setattr(decode, "interval", noted)
    layer = NSAAttention(16, 3, 1, 8, 12, config=SMALL, path="triton")
    x = randn(1, 32, 16, seed=1)
    with torch.no_grad():
        layer(x[:, :16])
        assert set(few) == {16}
        few.clear()
        layer(x)
        cp.wrap(layer)(cp.shard(x))
    assert few == []


def test_gradients_of_the_selected_keys_travel_while_others_are_computed(
    cp: ContextParallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are sent first and awaited last; those of compressed keys while q is rotated back, and
    those of the halos while the gates are differentiated.
    """
    events: list[tuple[str, int]] = []
    send, add, turn = dist.all_to_all_single, gather.ordered_sum, rotation.rotate

    def sent(received: Tensor, own: Tensor, **options: Any) -> Any:
        events.append(("sent", own.numel()))
        return send(received, own, **options)

    def added(parts: Tensor, wide: torch.dtype) -> Tensor:
        events.append(("added", parts[0].numel()))
        return add(parts, wide)

    def turned(x: Tensor, *others: Any, **options: Any) -> Tensor:
        events.append(("turned", x.numel()))
        return turn(x, *others, **options)

    monkeypatch.setattr(rotation, "rotate", turned)
    monkeypatch.setattr(dist, "all_to_all_single", sent)
    monkeypatch.setattr(gather, "ordered_sum", added)
    layer = cp.wrap(NSAAttention(16, 3, 1, 8, 12, config=SMALL, path="triton"))
    x = randn(1, 64, 16, seed=1).requires_grad_()
    gates = layer.get_parameter("gate.proj.weight")
    gates.register_hook(lambda _: events.append(("gates", 0)))
    y = layer(cp.shard(x)).sum()
    events.clear()
    y.backward()
    k, v = 64 * 8, 64 * 12
    assert events[0] == ("sent", k + v)
    assert events[-3:] == [("added", k), ("added", v), ("turned", 3 * k)]
    words = "sent sent turned added added sent gates added added added added added added turned"
    assert [what for what, _ in events] == words.split()


def test_a_layer_keeps_the_layout_of_its_last_length(
    cp: ContextParallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made in inference mode it serves training, and one of another length does not."""
    made: list[int] = []
    plain = ShardedLayout.of_shard

    def noted(x: Tensor, *others: Any, **options: Any) -> ShardedLayout:
        made.append(x.shape[1])
        return plain(x, *others, **options)

    monkeypatch.setattr(ShardedLayout, "of_shard", noted)
    layer = NSAAttention(16, 4, 2, 8, 8, config=SMALL, path="masked")
    sharded, x = cp.wrap(copy.deepcopy(layer)), randn(1, 64, 16, seed=1)
    with torch.inference_mode():
        sharded(cp.shard(x))
    for tokens in (64, 32, 32, 64):
        upstream = randn(1, tokens, 16, seed=2)
        want = gradients(layer, x[:, :tokens], upstream)
        got = gradients(sharded, cp.shard(x[:, :tokens]), cp.shard(upstream))
        for a, b in zip(got, want, strict=True):
            assert_parity(a, b.double(), f"{tokens} tokens")
    assert made == [64, 32, 64]


def test_a_first_gradient_may_be_part_of_a_graph(cp: ContextParallel) -> None:
    """As on one process; a second one is an error of the attention itself."""
    layer = cp.wrap(NSAAttention(16, 3, 1, 8, 12, config=SMALL, path="masked"))
    x = randn(1, 64, 16, seed=1).requires_grad_()
    (want,) = torch.autograd.grad(layer(cp.shard(x)).square().sum(), x)
    (got,) = torch.autograd.grad(layer(cp.shard(x)).square().sum(), x, create_graph=True)
    assert torch.equal(got, want)
    with pytest.raises(RuntimeError, match="differentiat"):
        got.sum().backward()
