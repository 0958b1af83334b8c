"""phi (Eq. 7): the learned maps against both fp64 oracles, and what each map promises besides its
value.

test_branches.py checks the values of the mean.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

import nsa.oracle
from nsa.compression import Phi, compress
from nsa.config import NSAConfig
from tests import oracle
from tests.cases import assert_bf16_rule, assert_parity, assert_same_function, randn

LEARNED = ("linear", "mlp")
NAMES = {"mean": (), "linear": ("weight",), "mlp": ("position", "up", "down")}
STRIDE = 4
PARTS = (1, 2, 3)  # l / d
B, G, D, HIDDEN = 3, 5, 7, 9


def config_of(phi: str, parts: int = 2, **options: object) -> NSAConfig:
    hidden = {"phi_hidden": HIDDEN} if phi == "mlp" else {}
    return NSAConfig(
        cmp_block=parts * STRIDE,
        cmp_stride=STRIDE,
        sel_block=4 * STRIDE,
        phi=phi,
        **{**hidden, **options},
    )


def random_params(
    config: NSAConfig, dim: int = D, *, seed: int = 10, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, ...]:
    """In the order of NAMES, written out by hand: the shapes are the brief's, and scaled so that
    SiLU bends.
    """
    flat = config.cmp_block * dim
    if config.phi == "linear":
        return (randn(dim, flat, seed=seed, dtype=dtype) * flat**-0.5,)
    position = randn(config.cmp_block, dim, seed=seed, dtype=dtype)
    hidden = config.phi_hidden or dim
    up = randn(hidden, flat, seed=seed + 1, dtype=dtype) * flat**-0.5
    return position, up, randn(dim, hidden, seed=seed + 2, dtype=dtype) * hidden**-0.5


def function_of(config: NSAConfig) -> Callable[..., Tensor]:
    return lambda x, *params: compress(
        x, config=config, params=dict(zip(NAMES[config.phi], params, strict=True))
    )


def reference_of(config: NSAConfig, judge: ModuleType = oracle) -> Callable[..., Tensor]:
    phi = judge.compress_linear if config.phi == "linear" else judge.compress_mlp
    return lambda x, *params: phi(x, *params, config.cmp_block, config.cmp_stride)


def eager_of(config: NSAConfig) -> Callable[..., Tensor]:
    """Unfolded blocks, each step rounded to the inputs' dtype: the yardstick of the bf16 rule."""

    def eager(x: Tensor, *params: Tensor) -> Tensor:
        blocks = x.unfold(1, config.cmp_block, config.cmp_stride).movedim(-1, 3)  # [B, C, G, l, D]
        if config.phi == "linear":
            return blocks.flatten(3) @ params[0].T
        position, up, down = params
        return torch.nn.functional.silu((blocks + position).flatten(3) @ up.T) @ down.T

    return eager


def test_by_hand() -> None:
    config = NSAConfig(cmp_block=2, cmp_stride=1, sel_block=2, phi="linear")
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]).view(1, 3, 1, 2)
    # token 0's two features, then token 1's
    weight = torch.tensor([[1.0, 10.0, 100.0, 1000.0], [0.0, 0.0, 0.0, 1.0]])
    want = [[4321.0, 4.0], [6543.0, 6.0]]
    for got in (
        compress(x, config=config, params={"weight": weight}),
        *(j.compress_linear(x, weight, 2, 1) for j in (oracle, nsa.oracle)),
    ):
        assert got[0, :, 0].tolist() == want

    config = NSAConfig(cmp_block=2, cmp_stride=2, sel_block=2, phi="mlp", phi_hidden=1)
    position = torch.tensor([[0.0], [-3.0]])
    up, down = torch.tensor([[2.0, 1.0]]), torch.tensor([[5.0]])
    x = torch.tensor([1.0, 2.0]).view(1, 2, 1, 1)  # 2 * (1 + 0) + 1 * (2 - 3) = 1
    want_mlp = 5 / (1 + 2.718281828459045**-1)
    assert compress(
        x, config=config, params={"position": position, "up": up, "down": down}
    ).item() == pytest.approx(want_mlp)
    for judge in (oracle, nsa.oracle):
        assert judge.compress_mlp(x, position, up, down, 2, 2).item() == pytest.approx(want_mlp)


@pytest.mark.parametrize("phi", LEARNED)
@pytest.mark.parametrize("parts", PARTS)
def test_both_oracles_agree(phi: str, parts: int) -> None:
    config = config_of(phi, parts)
    tensors = (randn(B, 29, G, D, seed=1), *random_params(config))
    assert_same_function(
        lambda *t: reference_of(config, nsa.oracle)(*t).to(t[0].dtype),
        reference_of(config),
        tensors,
        ("x", *NAMES[phi]),
        tolerance=1e-6,
    )


@pytest.mark.parametrize("phi", LEARNED)
@pytest.mark.parametrize("parts", PARTS)
# tokens beyond one whole block
@pytest.mark.parametrize("past", [-1, 0, 1, STRIDE - 1, STRIDE, STRIDE + 1, 5 * STRIDE - 1])
def test_equals_the_oracle(phi: str, parts: int, past: int) -> None:
    config = config_of(phi, parts)
    tokens = config.cmp_block + past
    tensors = (randn(B, tokens, G, D, seed=1), *random_params(config))
    assert function_of(config)(*tensors).shape == (
        B,
        (past + STRIDE) // STRIDE if past >= 0 else 0,
        G,
        D,
    )
    assert_same_function(function_of(config), reference_of(config), tensors, ("x", *NAMES[phi]))


@pytest.mark.parametrize("phi", LEARNED)
@pytest.mark.parametrize("shape", [(1, 65, 1, 1), (1, 100, 2, 60), (2, 33, 1, 33)], ids=str)
def test_equals_the_oracle_at_the_papers_geometry(phi: str, shape: tuple[int, ...]) -> None:
    config = NSAConfig(phi=phi)
    tensors = (randn(*shape, seed=2), *random_params(config, shape[3]))
    assert_same_function(function_of(config), reference_of(config), tensors, ("x", *NAMES[phi]))


@pytest.mark.parametrize("phi", LEARNED)
@pytest.mark.parametrize("parts", PARTS)
def test_gradcheck(phi: str, parts: int) -> None:
    config = config_of(phi, parts, **({"phi_hidden": 3} if phi == "mlp" else {}))
    tensors = (
        randn(1, 14, 1, 2, seed=3, dtype=torch.float64),
        *random_params(config, 2, dtype=torch.float64),
    )
    assert torch.autograd.gradcheck(function_of(config), [t.requires_grad_() for t in tensors])


@pytest.mark.parametrize("phi", LEARNED)
def test_bf16_rule(phi: str) -> None:
    config = config_of(phi)
    tensors = [t.bfloat16() for t in (randn(1, 22, 1, D, seed=4), *random_params(config))]
    assert_bf16_rule(
        function_of(config), reference_of(config), eager_of(config), tensors, ("x", *NAMES[phi])
    )


@pytest.mark.parametrize("phi", ["mean", *LEARNED])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_keeps_the_dtype_of_x(phi: str, dtype: torch.dtype) -> None:
    """Also over fp32 parameters, and where a block is not yet whole."""
    module = Phi(config_of(phi), D)
    for tokens in (3, 13):
        x = randn(1, tokens, 1, D, seed=5, dtype=dtype).requires_grad_()
        y = module(x)
        assert y.dtype == dtype
        y.sum().backward()
        assert x.grad is not None and x.grad.dtype == dtype
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in module.parameters())


@pytest.mark.parametrize("phi", LEARNED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_autocast_computes_in_its_own_dtype_and_keeps_that_of_x(
    phi: str, dtype: torch.dtype
) -> None:
    module = Phi(config_of(phi), D)
    x = randn(1, 13, 1, D, seed=5, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x)
    assert y.dtype == dtype
    assert_parity(y, module.double()(x.double()), "y", tolerance=2**-6)


def test_float64_is_not_computed_in_less() -> None:
    for phi in LEARNED:
        config = config_of(phi, 3)
        tensors = (
            randn(1, 30, 1, D, seed=6, dtype=torch.float64),
            *random_params(config, dtype=torch.float64),
        )
        assert_parity(
            function_of(config)(*tensors), reference_of(config)(*tensors), phi, tolerance=1e-14
        )


@pytest.mark.parametrize("phi", ["mean", *LEARNED])
def test_without_a_whole_block_the_result_is_empty_and_in_the_graph(phi: str) -> None:
    """A sequence too short must not leave parameters without a gradient: DDP would wait for
    them.
    """
    module = Phi(config_of(phi), D)
    for tokens in (0, 1, 7):
        x = randn(2, tokens, 3, D, seed=7).requires_grad_()
        y = module(x)
        assert y.shape == (2, 0, 3, D) and y.requires_grad
        module.zero_grad()
        y.sum().backward()
        assert torch.equal(x.grad, torch.zeros_like(x))
        assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in module.parameters())


@pytest.mark.parametrize("phi", ["mean", *LEARNED])
@pytest.mark.parametrize("parts", PARTS)
def test_a_block_depends_on_its_own_tokens_alone(phi: str, parts: int) -> None:
    """Bit-identical under any change outside, NaN included; different under a change of any token
    inside.
    """
    config = config_of(phi, parts)
    module, x = Phi(config, D), randn(2, 27, 3, D, seed=8)
    before = module(x)
    for token in range(27):
        changed = x.clone()
        changed[:, token] = torch.nan if token % 2 else -changed[:, token]
        after = module(changed)
        for i in range(before.shape[1]):
            inside = i * STRIDE <= token < i * STRIDE + config.cmp_block
            assert torch.equal(before[:, i], after[:, i]) is not inside, f"block {i}, token {token}"


@pytest.mark.parametrize("phi", ["mean", *LEARNED])
@pytest.mark.parametrize("parts", PARTS)
def test_a_poisoned_tail_reaches_no_gradient(phi: str, parts: int) -> None:
    """A tail that is no block may be a cache's unused room: 0 * NaN must not reach a weight's
    gradient.
    """
    config = config_of(phi, parts)
    module, x = Phi(config, D), randn(1, config.cmp_block + 2 * STRIDE - 1, 1, D, seed=8)
    x[:, config.cmp_block + STRIDE :] = torch.nan
    x.requires_grad_()
    module(x).sum().backward()
    assert all(bool(t.grad.isfinite().all()) for t in (x, *module.parameters()))


@pytest.mark.parametrize("phi", LEARNED)
def test_every_kv_head_and_row_goes_through_the_same_map(phi: str) -> None:
    module, x = Phi(config_of(phi), D), randn(2, 17, 3, D, seed=9)
    whole = module(x)
    for b in range(2):
        for g in range(3):
            assert_parity(
                module(x[b : b + 1, :, g : g + 1]),
                whole[b : b + 1, :, g : g + 1],
                f"row {b}, head {g}",
                tolerance=1e-6,
            )


@pytest.mark.parametrize("phi", LEARNED)
def test_strided_and_expanded_inputs(phi: str) -> None:
    module = Phi(config_of(phi), D)
    wide = randn(2, 17, 3, 2 * D, seed=9)
    strided, expanded = wide[..., ::2], wide[:1, :, :1, :D].expand(2, 17, 3, D)
    for x in (strided, expanded):
        assert torch.equal(module(x), module(x.contiguous()))


@pytest.mark.parametrize("phi", ["mean", *LEARNED])
def test_compiles_once_for_every_length(phi: str) -> None:
    module, graphs = Phi(config_of(phi), D), []

    def backend(graph: torch.fx.GraphModule, example: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=backend)
    for tokens in (33, 40, 57, 100):
        x = randn(2, tokens, 3, D, seed=9)
        assert torch.equal(compiled(x), module(x))
    assert len(graphs) == 1


# The module.


@pytest.mark.parametrize("parts", PARTS)
def test_linear_begins_as_the_mean(parts: int) -> None:
    x = randn(B, 30, G, D, seed=11)
    assert_parity(
        Phi(config_of("linear", parts), D)(x),
        oracle.compress_mean(x, parts * STRIDE, STRIDE),
        "linear at its init",
    )
    papers = Phi(NSAConfig(phi="linear"), 64)
    assert torch.equal(papers.weight, torch.eye(64).repeat(1, 32) / 32)


def test_mlp_begins_within_the_scale_of_the_tokens() -> None:
    torch.manual_seed(0)
    module = Phi(NSAConfig(phi="mlp"), 64)
    assert 0.01 < float(module.position.detach().std()) < 0.03
    y = module(randn(1, 512, 2, 64, seed=12))
    assert 0.01 < float(y.detach().std()) < 1.0
    assert (
        float(module.up.detach().abs().max()) <= 2048**-0.5
        and float(module.down.detach().abs().max()) <= 64**-0.5
    )


@pytest.mark.parametrize(
    ("config", "shapes"),
    [
        (NSAConfig(), {}),
        (NSAConfig(phi="linear"), {"weight": (6, 192)}),
        (NSAConfig(phi="mlp"), {"position": (32, 6), "up": (6, 192), "down": (6, 6)}),
        (
            NSAConfig(phi="mlp", phi_hidden=11),
            {"position": (32, 6), "up": (11, 192), "down": (6, 11)},
        ),
    ],
)
def test_phi_owns_its_parameters(config: NSAConfig, shapes: dict[str, tuple[int, ...]]) -> None:
    module = Phi(config, 6)
    assert {name: tuple(p.shape) for name, p in module.named_parameters()} == shapes
    params = module.params()
    assert (params is None) is (config.phi == "mean")
    assert all(params[name] is getattr(module, name) for name in shapes)


def test_mean_draws_no_random_numbers() -> None:
    """So that a model with phi = mean is initialised as it was before there was a choice."""
    state = torch.get_rng_state()
    Phi(NSAConfig(), 8)
    assert torch.equal(state, torch.get_rng_state())


def test_places_inside_a_block_matter_to_mlp() -> None:
    """Permuted tokens, and another encoding of the same tokens, are another block; to the mean the
    first is not.
    """
    config = config_of("mlp")
    position, up, down = random_params(config)
    x = randn(1, config.cmp_block, 1, D, seed=13)
    y = function_of(config)(x, position, up, down)
    for what, other in (
        ("tokens", function_of(config)(x.flip(1), position, up, down)),
        ("encoding", function_of(config)(x, position.flip(0), up, down)),
        ("no encoding", function_of(config)(x, torch.zeros_like(position), up, down)),
    ):
        assert float((y - other).abs().max()) > 1e-2, what
    mean = config_of("mean")
    assert_parity(
        compress(x.flip(1), config=mean), compress(x, config=mean), "mean", tolerance=1e-6
    )


def test_mlp_adds_the_encoding_to_the_tokens() -> None:
    """A block whose tokens carry it already, under none, is the same block."""
    config = config_of("mlp", 1)
    position, up, down = random_params(config)
    x = randn(1, STRIDE, 1, D, seed=13)
    carried = function_of(config)(x + position[None, :, None], torch.zeros_like(position), up, down)
    assert_parity(function_of(config)(x, position, up, down), carried, "carried", tolerance=1e-6)


# Refusals.


def refusals() -> list[tuple[str, dict[str, object] | None, str]]:
    good = {
        phi: dict(zip(NAMES[phi], random_params(config_of(phi)), strict=True)) for phi in LEARNED
    }
    linear, mlp = good["linear"], good["mlp"]
    return [
        ("mean", linear, "phi='mean' got params .'weight'.; it wants none"),
        ("mean", {}, "it wants none"),
        ("linear", None, "phi='linear' got no params; wanted .'weight': .7, 56.*Phi"),
        ("mlp", None, "phi='mlp' got no params"),
        ("linear", mlp, "got params .'down', 'position', 'up'.; wanted .'weight'"),
        ("mlp", linear, "got params .'weight'.; wanted .'position'"),
        ("mlp", {"up": mlp["up"], "down": mlp["down"]}, "got params .'down', 'up'."),
        ("linear", {**linear, "bias": torch.zeros(D)}, "got params .'bias', 'weight'."),
        (
            "linear",
            {"weight": linear["weight"].T},
            "shape .56, 7.; wanted a tensor of shape .7, 56. for head dim 7 and cmp_block=8",
        ),
        ("linear", {"weight": linear["weight"][:, :-1]}, "of shape .7, 55."),
        (
            "mlp",
            {**mlp, "position": mlp["position"][:-1]},
            "'position'. of shape .7, 7.; wanted a tensor of shape .8, 7.",
        ),
        (
            "mlp",
            {**mlp, "up": mlp["up"][:-1]},
            "'up'. of shape .8, 56.; wanted a tensor of shape .9, 56.",
        ),
        ("mlp", {**mlp, "up": mlp["up"][0]}, "'up'. of shape .56,.; wanted"),
        (
            "mlp",
            {**mlp, "down": mlp["down"].T},
            "'down'. of shape .9, 7.; wanted a tensor of shape .7, 9.",
        ),
        ("linear", {"weight": [1.0]}, "'weight'. of list; wanted a tensor"),
        (
            "linear",
            {"weight": linear["weight"].long()},
            "of torch.int64 on cpu; wanted a floating dtype",
        ),
        ("mlp", {**mlp, "down": mlp["down"].to("meta")}, "on meta; wanted a floating dtype on cpu"),
    ]


@pytest.mark.parametrize(("phi", "params", "message"), refusals())
@pytest.mark.parametrize("tokens", [3, 13])
def test_refuses_other_params(
    phi: str, params: dict[str, Tensor] | None, message: str, tokens: int
) -> None:
    with pytest.raises(ValueError, match=message):
        compress(randn(1, tokens, 1, D, seed=14), config=config_of(phi), params=params)


def test_hidden_width_is_free_unless_the_config_names_it() -> None:
    params = dict(zip(NAMES["mlp"], random_params(config_of("mlp")), strict=True))
    free = NSAConfig(cmp_block=8, cmp_stride=4, sel_block=16, phi="mlp")
    x = randn(1, 13, 1, D, seed=14)
    assert torch.equal(
        compress(x, config=free, params=params), compress(x, config=config_of("mlp"), params=params)
    )
    with pytest.raises(
        ValueError, match=r"'down'. of shape .7, 9.; wanted a tensor of shape .7, 8."
    ):
        compress(x, config=free, params={**params, "up": params["up"][:-1]})


@pytest.mark.parametrize("phi", ["mean", *LEARNED])
def test_refuses_other_tensors_and_dims(phi: str) -> None:
    module = Phi(config_of(phi), D)
    with pytest.raises(ValueError, match="wanted .B, S, num_kv_heads, D.; unflatten"):
        module(randn(1, 13, D, seed=15))
    with pytest.raises(ValueError, match="x of torch.int64; wanted a floating dtype"):
        module(torch.ones(1, 13, 1, D, dtype=torch.int64))
    with pytest.raises(ValueError, match="dim=0; wanted a head dim >= 1"):
        Phi(config_of(phi), 0)
