"""Every operation of NSA as test_ops times it: a function of tensors, its inputs, and the oracle's
function of the same inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nsa import compress, nsa_attention, select_blocks, selected_attention, sliding_attention
from nsa.compression import param_shapes
from nsa.config import PHI_KINDS, NSAConfig
from nsa.ops import gated_sum, interval, means, scores
from nsa.ops.interval import compressed
from nsa.rope import angles, rotate, turns
from nsa.routing import SPECS, Path
from tests import oracle
from tests.cases import randn

Function = Callable[..., Tensor]


@dataclass(frozen=True)
class Shape:
    """Sizes of one call; ``slow_tokens`` are those of the paths that loop over rows on the host."""

    config: NSAConfig
    batch: int
    tokens: int
    slow_tokens: int
    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    device: str


@dataclass(frozen=True)
class Call:
    """``function(*tensors)``; ``truth`` is the same in fp64, and None where the result is blocks
    (then `blocks_of_oracle` computes them).
    """

    function: Function
    reference: Function | None
    names: Sequence[str]
    tensors: Sequence[Tensor]


Make = Callable[[Shape], Call]


def operations(*, triton: bool) -> Mapping[str, Make]:
    """By name, 'operation implementation'; those of path triton only where Triton runs on a GPU."""
    made: dict[str, Make] = {
        f"compress {phi}": lambda s, phi=phi: _compress(s, phi) for phi in PHI_KINDS
    }  # type: ignore[misc]
    made |= {
        "cmp sdpa": _compressed_sdpa,
        "choose torch": _choose,
        "win sdpa": _window,
        "gated-sum torch": _gated_sum(gated_sum.gated_sum),
    }
    paths = [path for path in Path if triton or path is not Path.TRITON]
    made |= {f"sel {path}": _selected(path) for path in paths}
    if triton:
        made |= {
            "cmp triton": _compressed_triton,
            "choose triton": _choose_triton,
            "win triton": _window_triton,
        }
        made |= {
            "gated-sum triton": _gated_sum(gated_sum.fused_gated_sum),
            "compress triton": _means_triton,
        }
    made |= {f"rope {kind}": _rope(kind) for kind in ("interleaved", "half")}
    made |= {f"nsa {path}": _whole(path) for path in paths if not SPECS[path].slow}
    return made


def blocks_of_oracle(call: Call, shape: Shape) -> tuple[Tensor, Tensor]:
    """(blocks, gap to the next score) of a call that chooses blocks."""
    return oracle.select(*call.tensors[:2], config=shape.config)


def _tensor(s: Shape, *size: int, seed: int) -> Tensor:
    return randn(*size, seed=seed, dtype=s.dtype, device=s.device)


def _q(s: Shape) -> Tensor:
    return _tensor(s, s.batch, s.tokens, s.heads, s.dim, seed=1)


def _kv(s: Shape, length: int | None = None, seed: int = 2) -> tuple[Tensor, Tensor]:
    size = (s.batch, s.tokens if length is None else length, s.kv_heads, s.dim)
    return _tensor(s, *size, seed=seed), _tensor(s, *size, seed=seed + 1)


def _compressed_kv(s: Shape) -> tuple[Tensor, Tensor]:
    k, v = (compress(x, config=replace(s.config, phi="mean")) for x in _kv(s))
    return k, v


def _compress(s: Shape, phi: str) -> Call:
    config, (x, _) = replace(s.config, phi=phi), _kv(s)
    shapes = param_shapes(config, s.dim)
    params = [
        _tensor(s, *size, seed=9 + i) * size[-1] ** -0.5 for i, size in enumerate(shapes.values())
    ]
    truths = {
        "mean": oracle.compress_mean,
        "linear": oracle.compress_linear,
        "mlp": oracle.compress_mlp,
    }

    def function(x: Tensor, *given: Tensor) -> Tensor:
        return compress(x, config=config, params=dict(zip(shapes, given, strict=True)) or None)

    def reference(x: Tensor, *given: Tensor) -> Tensor:
        return truths[phi](x, *given, config.cmp_block, config.cmp_stride)

    return Call(function, reference, ("x", *shapes), (x, *params))


def _means_triton(s: Shape) -> Call:
    """Of K and V in one launch; their sum, so that both have a gradient."""
    grid = {"block": s.config.cmp_block, "stride": s.config.cmp_stride}

    def function(k: Tensor, v: Tensor) -> Tensor:
        return torch.add(*means.means(k, v, **grid))

    def reference(k: Tensor, v: Tensor) -> Tensor:
        return oracle.compress_mean(k, *grid.values()) + oracle.compress_mean(v, *grid.values())

    return Call(function, reference, ("k", "v"), _kv(s))


def _compressed_truth(s: Shape) -> Function:
    grid = {"block": s.config.cmp_block, "stride": s.config.cmp_stride}
    return lambda q, k, v: oracle.compressed(q, k, v, **grid)[0]


def _compressed_sdpa(s: Shape) -> Call:
    grid = {"block": s.config.cmp_block, "stride": s.config.cmp_stride}

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return compressed.attend(q, k, v, q_start=0, scale=s.dim**-0.5, **grid)

    return Call(function, _compressed_truth(s), ("q", "k", "v"), (_q(s), *_compressed_kv(s)))


def _compressed_triton(s: Shape) -> Call:
    grid = {"block": s.config.cmp_block, "stride": s.config.cmp_stride}

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return interval.attend(q, k, v, width=None, q_start=0, scale=s.dim**-0.5, **grid)[0]

    return Call(function, _compressed_truth(s), ("q", "k", "v"), (_q(s), *_compressed_kv(s)))


def _choose(s: Shape) -> Call:
    return Call(
        lambda q, k: select_blocks(q, k, config=s.config, kv_len=s.tokens),
        None,
        ("q", "k"),
        (_q(s), _compressed_kv(s)[0]),
    )


def _choose_triton(s: Shape) -> Call:
    """From the lse that the compressed branch left, which is an input here."""
    c, q, (k, v) = s.config, _q(s), _compressed_kv(s)
    at = {
        "block": c.cmp_block,
        "stride": c.cmp_stride,
        "q_start": 0,
        "first": None,
        "scale": s.dim**-0.5,
    }
    _, lse = interval.attend(q, k, v, width=None, **at)
    slots = {"num_selected": c.num_selected, "num_initial": c.num_initial, "num_local": c.num_local}

    def function(q: Tensor, k: Tensor, lse: Tensor) -> Tensor:
        return scores.choose(q, k, lse, kv_len=s.tokens, sel_block=c.sel_block, **slots, **at)

    return Call(function, None, ("q", "k", "lse"), (q, k, lse))


def _selected(path: Path) -> Make:
    def make(s: Shape) -> Call:
        s = replace(s, tokens=s.slow_tokens) if SPECS[path].slow else s
        q, size = _q(s), s.config.sel_block
        blocks = select_blocks(q, _compressed_kv(s)[0], config=s.config)

        def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return selected_attention(q, k, v, blocks, sel_block=size, path=path)

        def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return oracle.selected(q, k, v, blocks, sel_block=size)

        return Call(function, reference, ("q", "k", "v"), (q, *_kv(s)))

    return make


def _window(s: Shape) -> Call:
    width = s.config.window

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sliding_attention(q, k, v, window=width, fa2="off")

    return Call(
        function,
        lambda q, k, v: oracle.sliding(q, k, v, window=width),
        ("q", "k", "v"),
        (_q(s), *_kv(s)),
    )


def _window_triton(s: Shape) -> Call:
    width = s.config.window

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return interval.attend(
            q, k, v, block=1, stride=1, width=width, q_start=0, scale=s.dim**-0.5
        )[0]

    return Call(
        function,
        lambda q, k, v: oracle.sliding(q, k, v, window=width),
        ("q", "k", "v"),
        (_q(s), *_kv(s)),
    )


def _gated_sum(implementation: Callable[..., Tensor]) -> Make:
    def make(s: Shape) -> Call:
        def function(gates: Tensor, *outputs: Tensor) -> Tensor:
            return implementation(gates, outputs, (0, 1, 2))

        def reference(gates: Tensor, *outputs: Tensor) -> Tensor:
            return (gates[..., None, :] * torch.stack(outputs, -1)).sum(-1)

        size = (s.batch, s.tokens, s.heads)
        outputs = [_tensor(s, *size, s.dim, seed=20 + i) for i in range(3)]
        return Call(function, reference, ("gates", "cmp", "sel", "win"), (_gates(s), *outputs))

    return make


def _rope(kind: str) -> Make:
    def make(s: Shape) -> Call:
        position_T = torch.arange(s.tokens, device=s.device)
        by = turns(
            angles(position_T[None], s.dim, base=s.config.rope_base, scale=s.config.rope_scale),
            s.dtype,
        )

        def reference(x: Tensor) -> Tensor:
            return oracle.rope(
                x, position_T, base=s.config.rope_base, scale=s.config.rope_scale, kind=kind
            )

        return Call(lambda x: rotate(x, by, kind=kind), reference, ("x",), (_q(s),))

    return make


def _whole(path: Path) -> Make:
    def make(s: Shape) -> Call:
        def function(q: Tensor, *rest: Tensor) -> Tensor:
            *kv, gates = rest
            branches = tuple(kv[:2]), tuple(kv[2:4]), tuple(kv[4:])
            return nsa_attention(
                q, *branches, gates, config=s.config, path=path, nonnegative_gates=True
            )

        def reference(q: Tensor, *rest: Tensor) -> Tensor:
            *kv, gates = rest
            return oracle.nsa(
                q, tuple(kv[:2]), tuple(kv[2:4]), tuple(kv[4:]), gates, config=s.config
            )

        kv = [x for seed in (2, 4, 6) for x in _kv(s, seed=seed)]
        names = (
            "q",
            *(f"{kind}_{branch}" for branch in ("cmp", "sel", "win") for kind in ("k", "v")),
            "gates",
        )
        return Call(function, reference, names, (_q(s), *kv, _gates(s)))

    return make


def _gates(s: Shape) -> Tensor:
    return _tensor(s, s.batch, s.tokens, s.heads, 3, seed=8).sigmoid()
