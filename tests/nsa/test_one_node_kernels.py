"""A training call of path triton as one node of autograd's graph, in Triton's interpreter
(`--require interpreter`): the bits, the names and the refusals of an operator for each part.
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from nsa import NSAAttention, engagement, nsa_attention
from nsa.config import NSAConfig
from nsa.ops import operator
from perfbench.worker import operators
from tests.cases import randn
from tests.nsa.kernel_cases import poisoned_memory  # noqa: F401

T = 12
LITTLE = NSAConfig(
    cmp_block=4, cmp_stride=2, sel_block=4, num_selected=3, num_initial=1, num_local=1, window=5
)
NAMES = ("q", "k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win", "gates")
ONCE = {
    "nsa::means": 1,
    "nsa::interval": 2,
    "nsa::choose": 1,
    "nsa::selected_triton": 1,
    "nsa::joined": 1,
}
BOTH_WAYS = {
    **ONCE,
    "nsa::gate_products": 1,
    "nsa::joined_backward": 1,
    "nsa::means_backward": 1,
}


@pytest.fixture
def no_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what does not look at numbers: all are NaN."""
    from triton.runtime.interpreter import InterpretedFunction

    nothing = lambda *x, **options: None  # noqa: E731
    monkeypatch.setattr(InterpretedFunction, "__getitem__", lambda self, grid: nothing)


def inputs(
    batch: int = 1,
    *,
    queries: int = T,
    heads: tuple[int, int] = (2, 1),
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """In the order of NAMES."""
    q = randn(batch, queries, heads[0], 12, seed=1, dtype=dtype)
    gates = randn(batch, queries, heads[0], 3, seed=2).sigmoid().to(dtype)
    dims = enumerate((12, 20) * 3)
    kv = [randn(batch, T, heads[1], dim, seed=3 + i, dtype=dtype) for i, dim in dims]
    return [q, *kv, gates]


def recorded(given: list[Tensor], wanted: tuple[str, ...] = NAMES) -> list[Tensor]:
    pairs = zip(NAMES, given, strict=True)
    return [x.clone().requires_grad_(name in wanted) for name, x in pairs]


def call(*given: Tensor, config: NSAConfig = LITTLE, joined: bool = True, **options: Any) -> Tensor:
    q, *kv, gates = given
    pairs = ((kv[0], kv[1]), (kv[2], kv[3]), (kv[4], kv[5]))
    options |= {"config": config, "path": "triton", "nonnegative_gates": joined}
    return nsa_attention(q, *pairs, gates, **options)


def both_ways(f: Callable[..., Tensor], leaves: list[Tensor]) -> list[Tensor]:
    """o, and the gradients of those ``leaves`` that have one."""
    o = f(*leaves)
    wanted = [x for x in leaves if x.requires_grad]
    do = randn(*o.shape, seed=11, dtype=o.dtype)
    return [o.detach(), *torch.autograd.grad(o, wanted, do)]


def assert_same_bits(f: Callable[..., Tensor], leaves: list[Tensor]) -> None:
    """With an operator for each part, and without."""
    one = both_ways(f, leaves)
    with operator.through_dispatcher():
        several = both_ways(f, leaves)
    assert all(torch.equal(a, b) for a, b in zip(one, several, strict=True))
    assert any(bool(x.any()) for x in one[1:])


def nodes(o: Tensor) -> list[str]:
    """The nodes behind ``o``, leaves' own apart."""
    found, waiting = {}, [o.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in found or node.name().endswith("AccumulateGrad"):
            continue
        found[node] = node.name()
        waiting += [following for following, _ in node.next_functions]
    return list(found.values())


# The same bits.

CALLS: list[dict[str, Any]] = [
    {},
    {"q_start": T - 9},
    {"q_start": torch.tensor([T - 9, 1])},
    {"cu_seqlens": torch.tensor([0, 5, 5, 11])},
    {"scale": 1},
    {"joined": False},
    {"config": replace(LITTLE, num_local=2, window=3)},
    {"config": replace(LITTLE, branches=("cmp", "sel"))},
    {"config": replace(LITTLE, branches=("sel",))},
    {"config": replace(LITTLE, branches=("win",))},
]


@pytest.mark.parametrize("options", CALLS, ids=lambda x: next(iter(x), "plain"))
def test_calls(options: dict[str, Any]) -> None:
    starts = options.get("q_start", 0)
    batch = 2 if isinstance(starts, Tensor) else 1
    queries = T if isinstance(starts, int) and starts == 0 else 9
    on = options.get("config", LITTLE).branches
    wanted = tuple(name for name in NAMES if name[2:] in on or name in ("q", "gates"))
    leaves = recorded(inputs(batch, queries=queries), wanted)
    assert_same_bits(lambda *x: call(*x, **options), leaves)


@pytest.mark.parametrize("heads", [(4, 2)])
def test_groups_and_a_batch(heads: tuple[int, int]) -> None:
    assert_same_bits(call, recorded(inputs(2, heads=heads)))


@pytest.mark.parametrize("name", ["q", "gates", "v_cmp", "k_cmp v_cmp", "q k_win"])
def test_a_gradient_for_some_alone(name: str) -> None:
    given = recorded(inputs(), tuple(name.split()))
    assert_same_bits(call, given)
    one = call(*given).grad_fn
    assert one is not None and sum(node is not None for node, _ in one.next_functions) == len(
        name.split()
    )


@pytest.mark.parametrize("joined", [True, False])
def test_one_k_and_v_of_all_branches_are_added_up_in_one_order(joined: bool) -> None:
    """In fp16 another order of three gradients has other last bits."""
    q, k, v, *_, gates = inputs(2, dtype=torch.float16)
    leaves = [x.clone().requires_grad_() for x in (q, k, v, gates)]

    def shared(q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
        return call(q, *(k * 1, v * 1) * 3, gates, joined=joined)

    def twice(q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
        return call(q, k, v, k, v, k, v, gates, joined=joined) * k.sum() + k.mean()

    assert_same_bits(shared, leaves)
    assert_same_bits(twice, leaves)
    parts = both_ways(lambda *x: call(*x, joined=joined), recorded(inputs(2, dtype=torch.float16)))
    cmp, sel, win = parts[2], parts[4], parts[6]
    assert not torch.equal((sel + win) + cmp, (cmp + sel) + win), "an order that shows"


def test_gates_of_another_dtype() -> None:
    given = inputs(dtype=torch.float16)
    given[-1] = given[-1].float()
    assert_same_bits(call, recorded(given))


def test_under_autocast() -> None:
    with torch.autocast("cpu", torch.float16):
        assert_same_bits(call, recorded(inputs()))


@pytest.mark.parametrize(
    ("config", "num_nodes"),
    [
        (replace(LITTLE, gate="none"), 1),
        (replace(LITTLE, gate="softmax", share_kv=True), 1),
        (replace(LITTLE, gate="sigmoid", cmp_rope="after"), 2),
        (replace(LITTLE, phi="mlp", share_kv=True), 1),
    ],
    ids=["none", "softmax", "rotated after", "mlp"],
)
def test_layers(config: NSAConfig, num_nodes: int) -> None:
    torch.manual_seed(0)
    layer = NSAAttention(24, 2, 1, 12, 20, config=config, path="triton")
    x = randn(2, T, 24, seed=0)

    def gradients() -> list[Tensor]:
        layer.zero_grad()
        y = layer(x)
        y.square().sum().backward()
        found = [p.grad for p in layer.parameters()]
        assert all(g is not None for g in found)
        return [y.detach(), *(g for g in found if g is not None)]

    one = gradients()
    with operator.through_dispatcher():
        several = gradients()
    assert all(torch.equal(a, b) for a, b in zip(one, several, strict=True))
    ours = [name for name in nodes(layer(x)) if name in ("_AttentionBackward", "meansBackward")]
    assert len(ours) == num_nodes


def test_the_lse_and_the_counts_are_the_same() -> None:
    found = []
    for route in (nullcontext, operator.through_dispatcher):
        with route(), engagement.collect() as seen:
            o, lse = call(*recorded(inputs()), return_lse=True)  # type: ignore[misc]
        assert o.requires_grad and not lse.requires_grad
        found.append((o.detach(), lse, seen.counts))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    assert found[0][2] == found[1][2] and found[0][2]["sel.triton"] == 1


# One node, whose operators bear their names.


@pytest.mark.usefixtures("no_launches")
def test_one_node_holds_all() -> None:
    leaves = recorded(inputs())
    assert nodes(call(*leaves)) == ["_AttentionBackward"]
    with operator.through_dispatcher():
        assert len(nodes(call(*leaves))) == 2, "of the means and of the rest"
    assert call(*inputs()).grad_fn is None
    with torch.no_grad():
        assert call(*leaves).grad_fn is None
    with torch.inference_mode():
        assert call(*leaves).is_inference()


def names(work: Callable[[], object]) -> dict[str, int]:
    """The operators of nsa that a profiler sees."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        work()
    events = seen.profiler.kineto_results.events()  # type: ignore[union-attr]
    return dict(Counter(e.name() for e in events if e.name().startswith("nsa::")))


@pytest.mark.usefixtures("no_launches")
@pytest.mark.parametrize("joined", [True, False])
def test_a_profiler_and_an_observer_count_what_ran(joined: bool) -> None:
    leaves = recorded(inputs())

    def both() -> None:
        call(*leaves, joined=joined).sum().backward()

    def forward() -> None:
        with torch.no_grad():
            call(*leaves)

    of_one = names(both)
    if joined:
        assert of_one == BOTH_WAYS
    assert operators.recorded(both) == of_one
    assert names(forward) == {**{n: c for n, c in ONCE.items() if "join" not in n}} | {
        "nsa::gated_sum": 1
    }
    with operator.through_dispatcher():
        assert names(both) == of_one
        assert operators.recorded(both) == of_one


@pytest.mark.usefixtures("no_launches")
def test_what_needs_no_gradient_runs_no_backward() -> None:
    leaves = recorded(inputs(), ("q",))
    seen = names(lambda: call(*leaves).sum().backward())
    assert seen == {n: c for n, c in BOTH_WAYS.items() if n != "nsa::means_backward"}


@pytest.mark.usefixtures("no_launches")
@pytest.mark.parametrize("retain", [False, True])
def test_outputs_are_freed_before_parts_are_made(
    retain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the branches, of q's size each, unless the graph is retained."""
    from nsa.ops.interval import merged_backward_kernels as merged
    from nsa.ops.kernels import products

    outputs: list[Any] = []
    alive: list[bool] = []
    multiply, differentiate = products.gate_products, merged.backward_q_of_two

    def multiplied(do: Tensor, gates: Tensor, o: tuple[Tensor, ...], lse: Any) -> Any:
        outputs.extend(map(weakref.ref, o))
        return multiply(do, gates, o, lse)  # type: ignore[arg-type]

    def differentiated(*given: Any, **options: Any) -> Tensor:
        alive.extend(one() is not None for one in outputs)
        return differentiate(*given, **options)

    monkeypatch.setattr(products, "gate_products", multiplied)
    monkeypatch.setattr(merged, "backward_q_of_two", differentiated)
    call(*recorded(inputs())).sum().backward(retain_graph=retain)
    assert alive == [retain] * 3


# Who looks at operators gets them.


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        self.names[str(func.name())] += 1
        return func(*args, **(kwargs or {}))


class Around(TorchFunctionMode):
    pass


def test_a_mode_sees_operators_each_way_it_is_open() -> None:
    leaves = recorded(inputs())
    with Seen() as forward:
        o = call(*leaves)
    assert {n: c for n, c in forward.names.items() if n.startswith("nsa::")} == ONCE
    want = torch.autograd.grad(o.sum(), leaves)
    o = call(*leaves)
    with Seen() as backward:
        got = torch.autograd.grad(o.sum(), leaves)
    assert {n for n in backward.names if n.startswith("nsa::")} == set(BOTH_WAYS) - set(ONCE)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_who_counts_as_a_looker() -> None:
    x = torch.ones(2, requires_grad=True)
    assert operator.is_plain(x, torch.nn.Parameter(x.detach()), [x, x], None, 3, 0.5)
    assert not operator.is_plain(x, torch.empty(2, device="meta"))
    assert not operator.is_plain([x, x.detach().as_subclass(type("Other", (Tensor,), {}))])
    with torch.device("cpu"):
        assert operator.is_plain(x)
        with Around():
            assert not operator.is_plain(x)
    for looker in (Seen(), Around(), operator.through_dispatcher()):
        with looker:
            assert not operator.is_plain(x)
    escaped: list[Tensor] = []
    torch.func.grad(lambda y: (escaped.append(y), y.sum())[1])(x.detach())
    assert not operator.is_plain(*escaped)
    traced: list[bool] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of the tracer itself
        torch.jit.trace(
            lambda y: (traced.append(operator.is_plain(y)), y * 2)[1],
            x.detach(),
            check_trace=False,
        )
    assert traced and not any(traced)
    assert operator.is_plain(x)


# What autograd promises.


def whole(x: Tensor, at: int) -> Tensor:
    """Of a part of ``x``: a node of its own, that of nothing else."""
    return x.narrow(1, 0, x.shape[1])


@pytest.mark.usefixtures("no_launches")
@pytest.mark.parametrize("made", ["leaves", "each its own", "one node", "shared"])
@pytest.mark.parametrize("joined", [True, False])
def test_a_second_derivative_of_any_is_refused(made: str, joined: bool) -> None:
    """Of tokens of the compressed branch, too, which are not saved."""
    leaves = recorded(inputs())
    seen = list(leaves)
    if made == "each its own":
        seen = [whole(x, i) for i, x in enumerate(leaves)]
    if made == "one node":
        seen[1:7:2] = torch.stack(leaves[1:7:2]).unbind()
        seen[2:7:2] = torch.stack(leaves[2:7:2]).unbind()
    if made == "shared":
        k, v = leaves[1] * 1, leaves[2] * 1
        seen[1:7] = [k, v] * 3
        leaves = [x for i, x in enumerate(leaves) if i not in (3, 4, 5, 6)]
    o = call(*seen, joined=joined)
    first = torch.autograd.grad(o.sum(), leaves, create_graph=True)
    assert all(x.requires_grad for x in first)
    for one in (first[0], first[1], first[-1]):
        for leaf in leaves:
            with pytest.raises(RuntimeError, match="differentiate twice"):
                torch.autograd.grad(
                    one.square().sum(), leaf, retain_graph=True, materialize_grads=True
                )
        with pytest.raises(RuntimeError, match="differentiate twice"):
            one.sum().backward(retain_graph=True)


@pytest.mark.usefixtures("no_launches")
@pytest.mark.parametrize("only", ["k_cmp", "v_cmp"])
def test_a_second_derivative_of_tokens_alone_is_refused(only: str) -> None:
    leaves = recorded(inputs(), (only,))
    (leaf,) = (x for x in leaves if x.requires_grad)
    for seen in (leaves, [x * 1 for x in leaves]):
        (first,) = torch.autograd.grad(call(*seen).sum(), leaf, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            first.sum().backward()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("route", [nullcontext, operator.through_dispatcher])
def test_checkpoints(reentrant: bool, route: Callable[[], Any]) -> None:
    leaves = recorded(inputs())
    want = both_ways(call, leaves)
    with route():
        got = both_ways_of_leaves(
            lambda *x: checkpoint(call, *x, use_reentrant=reentrant), recorded(inputs())
        )
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def both_ways_of_leaves(f: Callable[..., Tensor], leaves: list[Tensor]) -> list[Tensor]:
    """As `both_ways`, by `backward`, which a reentrant checkpoint wants."""
    o = f(*leaves)
    o.backward(randn(*o.shape, seed=11, dtype=o.dtype))
    grads = [x.grad for x in leaves]
    return [o.detach(), *(x for x in grads if x is not None)]


def test_hooks_pack_what_is_saved() -> None:
    """Offloading: nothing that a hook took away is held elsewhere."""
    packed: list[Tensor] = []

    def pack(x: Tensor) -> int:
        packed.append(x.detach().clone())
        return len(packed) - 1

    leaves = recorded(inputs())
    want = both_ways(call, leaves)
    counts = []
    for route in (nullcontext, operator.through_dispatcher):
        packed.clear()
        with route(), saved_tensors_hooks(pack, lambda i: packed[i]):
            got = both_ways(call, leaves)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        counts.append(len(packed))
    assert counts[0] == counts[1] == 8 + 1 + 7, "gates, q, k and v; blocks; o, lse and lists"


def test_hooks_on_tensors_and_nodes() -> None:
    leaves = recorded(inputs())
    plain = both_ways(call, leaves)
    seen: list[str] = []
    for name, leaf in zip(NAMES, leaves, strict=True):
        leaf.register_hook(lambda g: g * 2)
        leaf.register_post_accumulate_grad_hook(lambda x, name=name: seen.append(name))
    o = call(*leaves)
    assert o.grad_fn is not None
    o.register_hook(lambda g: seen.append("o"))
    o.grad_fn.register_hook(lambda got, given: seen.append("node"))
    o.backward(randn(*o.shape, seed=11))
    assert seen[:2] == ["o", "node"] and sorted(seen[2:]) == sorted(NAMES)
    for leaf, once in zip(leaves, plain[1:], strict=True):
        assert leaf.grad is not None and torch.equal(leaf.grad, once * 2)


@pytest.mark.usefixtures("no_launches")
@pytest.mark.parametrize("name", [*NAMES, "q_start"])
@pytest.mark.parametrize("route", [nullcontext, operator.through_dispatcher])
def test_what_changed_since_is_an_error(name: str, route: Callable[[], Any]) -> None:
    """As ever but for tokens of the compressed branch, which no backward reads."""
    leaves, start = recorded(inputs(queries=9)), torch.tensor([T - 9])
    with route():
        o = call(*leaves, q_start=start)
        with torch.no_grad():
            start.add_(0) if name == "q_start" else leaves[NAMES.index(name)].mul_(1)
        if name in ("k_cmp", "v_cmp"):
            o.sum().backward()
            return
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            o.sum().backward()


def test_a_graph_that_is_kept_gives_the_same_again() -> None:
    leaves = recorded(inputs())
    o = call(*leaves)
    first = torch.autograd.grad(o.sum(), leaves, retain_graph=True)
    second = torch.autograd.grad(o.sum(), leaves)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="a second time"):
        torch.autograd.grad(o.sum(), leaves)


@pytest.mark.usefixtures("no_launches")
def test_a_node_keeps_no_tokens_of_the_compressed_branch() -> None:
    """Nor what the call was given otherwise."""
    leaves = recorded(inputs())
    tokens = [x * 1 for x in leaves[1:3]]
    o = call(leaves[0], *tokens, *leaves[3:])
    storages = {x.untyped_storage().data_ptr() for x in tokens}
    node: Node | None = o.grad_fn
    assert node is not None
    kept = [x for x in node.saved_tensors if x is not None]  # type: ignore[attr-defined]
    assert storages.isdisjoint(x.untyped_storage().data_ptr() for x in kept)
    held = vars(node) if hasattr(node, "__dict__") else {}
    others = [x for x in held.values() if isinstance(x, Tensor)]
    assert storages.isdisjoint(x.untyped_storage().data_ptr() for x in others if x.numel())
