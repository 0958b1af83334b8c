"""NSAAttention and TinyLM: the module is the function, causal bit for bit, undisturbed by
neighbours, and counted.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from nsa import ModelConfig, NSAAttention, NSAConfig, TinyLM, engagement
from nsa.config import preset
from nsa.model import DenseLM
from nsa.routing import Path, RouteError
from tests import oracle
from tests.cases import INTERPRETED, PATHS_HERE, SMALL, assert_parity, here, randn

EVERY_PATH = pytest.mark.parametrize("path", PATHS_HERE)
TINY = preset("tiny")
TOKENS = here(100, 26)
DIM, HEADS, GROUPS, KEY_DIM, VALUE_DIM = 32, 6, 2, 12, 8


def attention(path: str = "auto", **options: object) -> NSAAttention:
    torch.manual_seed(0)
    config = dataclasses.replace(SMALL, **options)  # type: ignore[arg-type]
    return NSAAttention(DIM, HEADS, GROUPS, KEY_DIM, VALUE_DIM, config=config, path=path, fa2="off")


def by_hand(module: NSAAttention, x: Tensor, config: NSAConfig) -> Tensor:
    """The layer from its parameters, in fp64: three K/V projections, RMSNorm and RoPE on q and k,
    sigmoid gates from x, or none.
    """
    parameters = {name: p.double() for name, p in module.named_parameters()}
    x = x.double()
    batch, tokens, _ = x.shape
    at = torch.arange(tokens)

    def rotated(y: Tensor, norm: str) -> Tensor:
        if config.qk_norm:
            mean_square = (y * y).sum(-1, keepdim=True) / KEY_DIM
            y = y / (mean_square + torch.finfo(torch.float32).eps) ** 0.5 * parameters[norm]
        if config.rope == "none":
            return y
        return oracle.rope(y, at, base=config.rope_base, scale=config.rope_scale, kind=config.rope)

    q = rotated(
        (x @ parameters["q_proj.weight"].T).view(batch, tokens, HEADS, KEY_DIM), "q_norm.weight"
    )
    keys = (x @ parameters["k_proj.weight"].T).view(batch, tokens, -1, GROUPS, KEY_DIM).unbind(2)
    values = (
        (x @ parameters["v_proj.weight"].T).view(batch, tokens, -1, GROUPS, VALUE_DIM).unbind(2)
    )
    pairs = [(rotated(k, "k_norm.weight"), v) for k, v in zip(keys, values, strict=True)]
    pairs = pairs * 3 if config.share_kv else pairs
    gates = torch.ones(batch, tokens, HEADS, 3, dtype=torch.float64)
    if config.gate == "sigmoid":
        logits = x @ parameters["gate.proj.weight"].T + parameters["gate.proj.bias"]
        gates = torch.sigmoid(logits.view(batch, tokens, HEADS, 3))
    o = oracle.nsa(q, *pairs, gates, config=config, sinks=parameters.get("sinks"))
    return o.flatten(2) @ parameters["o_proj.weight"].T


@EVERY_PATH
@pytest.mark.parametrize(
    "options",
    here(
        [
            {},
            {"rope": "half", "rope_scale": 0.5},
            {"share_kv": True},
            {"qk_norm": True},
            {"rope": "none"},
            {"gate": "none", "qk_norm": True},
        ],
        [{}, {"qk_norm": True, "rope": "none", "gate": "none"}],
    ),
    ids=str,
)
def test_the_module_equals_the_oracle(path: Path, options: dict[str, object]) -> None:
    module = attention(path, **options)
    if module.config.qk_norm:  # a weight of 1 would not be seen
        with torch.no_grad():
            module.q_norm.weight.copy_(1 + 0.5 * randn(KEY_DIM, seed=3))
            module.k_norm.weight.copy_(1 + 0.5 * randn(KEY_DIM, seed=4))
    x = randn(here(2, 1), TOKENS, DIM, seed=1).requires_grad_()
    true_x = x.detach().double().requires_grad_()
    o, want = module(x), by_hand(module, true_x, module.config)
    assert_parity(o, want, "o")
    upstream = randn(*o.shape, seed=2)
    grads = torch.autograd.grad(o, [x, *module.parameters()], upstream)
    true_grads = torch.autograd.grad(want, [true_x, *module.parameters()], upstream.double())
    for name, got, true in zip(
        ["x", *dict(module.named_parameters())], grads, true_grads, strict=True
    ):
        assert_parity(got, true, f"d{name}", tolerance=2e-5)


@EVERY_PATH
@pytest.mark.parametrize("gate", here(["sigmoid", "softmax"], ["softmax"]))
def test_tokens_after_t_move_nothing(path: Path, gate: str) -> None:
    module = attention(path, gate=gate)
    x = randn(here(2, 1), TOKENS, DIM, seed=1)
    whole = module(x)
    for t in here((0, 7, 30, 81, 98), (7,)):
        changed = x.clone()
        changed[:, t + 1 :] = 10 * torch.randn_like(changed[:, t + 1 :])
        assert torch.equal(module(changed)[:, : t + 1], whole[:, : t + 1])


@EVERY_PATH
def test_a_loss_up_to_t_has_no_gradient_after_t(path: Path) -> None:
    module, x, past = attention(path), randn(1, TOKENS, DIM, seed=1).requires_grad_(), here(51, 15)
    (grad,) = torch.autograd.grad(module(x)[:, :past].square().sum(), x)
    assert not grad[:, past:].any() and grad[:, :past].any(-1).all()


@EVERY_PATH
def test_logits_of_a_model_ignore_the_future(path: Path) -> None:
    torch.manual_seed(0)
    model = TinyLM(TINY, path=path, fa2="off")
    ids, past = torch.randint(256, (here(2, 1), TOKENS)), here(60, 15)
    changed = ids.clone()
    changed[:, past:] = (changed[:, past:] + 1) % 256
    before, after = model(ids), model(changed)
    assert torch.equal(before[:, :past], after[:, :past])
    assert not torch.equal(before[:, past:], after[:, past:])


def test_paths_agree_through_a_model() -> None:
    torch.manual_seed(0)
    model, ids = TinyLM(TINY, path="masked", fa2="off"), torch.randint(256, (1, 129))
    want = model(ids).double()
    for path in (*PATHS_HERE, "auto"):
        other = TinyLM(TINY, path=path, fa2="off")
        other.load_state_dict(model.state_dict())
        assert_parity(other(ids), want, path)


@pytest.mark.parametrize(
    "branches", [("cmp",), ("sel",), ("win",), ("cmp", "win"), ("cmp", "sel", "win")], ids="+".join
)
@pytest.mark.parametrize("gate", ["sigmoid", "softmax"])
def test_a_branch_that_is_off_is_not_computed(branches: tuple[str, ...], gate: str) -> None:
    module = attention(branches=branches, gate=gate)
    with engagement.collect() as engaged:
        o = module(randn(1, 100, DIM, seed=1))
    assert o.shape == (1, 100, DIM) and torch.isfinite(o).all()
    assert {name.split(".")[0] for name in engaged.counts} == set(branches)


def test_a_softmax_gate_over_one_branch_is_that_branch() -> None:
    """Renormalised over the rest: with the window alone, its gate is 1."""
    module = attention(gate="softmax", branches=("win",), gate_temperature=0.3)
    x = randn(2, 100, DIM, seed=1)
    parameters = {name: p.double() for name, p in module.named_parameters()}
    q, k, v = (x.double() @ parameters[f"{name}_proj.weight"].T for name in "qkv")
    at = torch.arange(100)
    q = oracle.rope(q.view(2, 100, HEADS, KEY_DIM), at)
    k = oracle.rope(k.view(2, 100, -1, GROUPS, KEY_DIM)[:, :, -1], at)
    o = oracle.sliding(q, k, v.view(2, 100, -1, GROUPS, VALUE_DIM)[:, :, -1], window=24)
    assert_parity(module(x), o.flatten(2) @ parameters["o_proj.weight"].T, "o")


COUNTERS: list[tuple[str, tuple[str, ...]]] = [
    ("masked", ("cmp.sdpa", "sel.masked", "sel.sdpa", "win.sdpa")),
    ("v2", ("cmp.sdpa", "sel.v2", "sel.sdpa", "win.sdpa")),
    ("v1", ("cmp.sdpa", "sel.v1", "sel.sdpa", "win.sdpa")),
    ("reference", ("cmp.sdpa", "sel.reference", "sel.loop", "win.sdpa")),
    # as short as this, both are causal attention
    ("auto", ("cmp.sdpa", "sel.dense", "sel.sdpa", "win.dense", "win.sdpa")),
    ("adaptive", ("cmp.sdpa", "sel.v1", "sel.sdpa", "win.sdpa")),
]
COUNTERS += (
    [("triton", ("cmp.triton", "score.triton", "sel.triton", "win.triton"))] if INTERPRETED else []
)


@pytest.mark.parametrize(("path", "counters"), COUNTERS)
def test_engagement_counts_every_layer_once(path: str, counters: tuple[str, ...]) -> None:
    model, ids = TinyLM(TINY, path=path, fa2="off"), torch.randint(256, (1, 20))
    with engagement.collect() as engaged:
        model(ids)
    assert dict(engaged.counts) == dict.fromkeys(counters, TINY.num_layers)


def test_engagement_opens_and_closes() -> None:
    model, ids = TinyLM(TINY), torch.randint(256, (1, 20))
    with engagement.collect() as first:
        model(ids)
    once = dict(first.counts)
    with engagement.collect() as second:
        model(ids)
        model(ids).sum().backward()
    assert dict(first.counts) == once, "a closed collection counts no more"
    assert dict(second.counts) == {name: 2 * count for name, count in once.items()}
    with engagement.collect() as idle:
        pass
    assert not idle.counts


def test_the_dense_twin_is_full_causal_attention() -> None:
    """Same dims, another attention: within n blocks and the window, selection alone would be the
    same function.
    """
    torch.manual_seed(0)
    model, ids = DenseLM(TINY), torch.randint(256, (2, 100))
    with engagement.collect() as engaged:
        o = model(ids)
    assert o.shape == (2, 100, 256) and dict(engaged.counts) == {"dense.sdpa": TINY.num_layers}
    changed = ids.clone()
    changed[:, 60:] = (changed[:, 60:] + 1) % 256
    assert torch.equal(o[:, :60], model(changed)[:, :60])
    far = ids.clone()
    far[:, 0] = (far[:, 0] + 1) % 256
    assert not torch.equal(o[:, 99], model(far)[:, 99]), "the last token sees the first"


def test_an_impossible_request_fails_and_never_degrades() -> None:
    with pytest.raises(RouteError, match="fa2=on"):
        TinyLM(TINY, path="v2", fa2="on")(torch.randint(256, (1, 20)))
    with pytest.raises(RouteError, match="'fast'"):
        TinyLM(TINY, path="fast")(torch.randint(256, (1, 20)))


OTHER = ModelConfig(
    dim=48,
    num_layers=1,
    num_heads=6,
    num_kv_heads=3,
    head_dim=8,
    v_head_dim=12,
    nsa=NSAConfig(
        cmp_block=4,
        cmp_stride=4,
        sel_block=8,
        num_selected=4,
        window=9,
        rope="half",
        gate="softmax",
    ),
)


class Trainer:
    """One model with its own optimizer and its own stream of data."""

    def __init__(self, config: ModelConfig, path: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = TinyLM(config, path=path, fa2="off")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.data = torch.Generator().manual_seed(seed)

    def step(self) -> None:
        ids = torch.randint(256, (2, 50), generator=self.data)
        loss = torch.nn.functional.cross_entropy(
            self.model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
        )
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


@pytest.mark.parametrize("paths", [("masked", "v2"), ("v2", "masked"), ("masked", "masked")])
def test_two_interleaved_models_equal_each_alone(paths: tuple[str, str]) -> None:
    """State kept in classes or modules would let one geometry disturb the other."""
    alone = [
        Trainer(config, path, seed)
        for seed, (config, path) in enumerate(zip((TINY, OTHER), paths, strict=True))
    ]
    for trainer in alone:
        for _ in range(3):
            trainer.step()
    together = [
        Trainer(config, path, seed)
        for seed, (config, path) in enumerate(zip((TINY, OTHER), paths, strict=True))
    ]
    for _ in range(3):
        for trainer in together:
            trainer.step()
    for one, both in zip(alone, together, strict=True):
        for (name, a), b in zip(one.model.named_parameters(), both.model.parameters(), strict=True):
            assert torch.equal(a, b), name
