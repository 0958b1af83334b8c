"""Arguments of the public functions, checked before anything runs: each ValueError says got,
wanted, next step.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from numbers import Real

import torch
from torch import Tensor, nn

from nsa import settings
from nsa.config import NSAConfig, nearest_name
from nsa.ops.positions import to_device
from nsa.ops.precision import autocast_dtype

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INDICES = (torch.int32, torch.int64)


def may_read(x: Tensor) -> bool:
    """Whether contents may be read: on a CPU, where that does not sync; elsewhere only in strict
    mode.

    A subclass of Tensor may have no contents, whatever its device says: FakeTensor is one.
    """
    if (
        torch.compiler.is_compiling()
        or type(x) not in (Tensor, torch.nn.Parameter)
        or x.device.type == "meta"
    ):
        return False
    return x.device.type == "cpu" or is_strict()


def is_strict() -> bool:
    """NSA_STRICT_ASSERTS=1; never inside torch.compile, where reads would break the graph."""
    return not torch.compiler.is_compiling() and bool(settings.current().strict_asserts.value)


def qkv(q: Tensor, k: Tensor, v: Tensor, *, q_start: int | Tensor, whole: bool = True) -> None:
    """q [B, T, HQ, DK], k [B, S, HKV, DK], v [B, S, HKV, DV]; with ``whole``, S must reach q_start
    + T.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; wanted four dimensions [B, tokens, heads, D];"
                " unflatten the heads"
            )
        if name == "q" and 0 in x.shape[1:]:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; wanted at least one query, head and dim a"
                " sequence; skip calls without tokens"
            )
        if name == "v" and x.shape[3] == 0:
            raise ValueError(
                f"v has shape {tuple(x.shape)}; wanted a head dim >= 1; project values that hold"
                " something"
            )
        if x.dtype not in DTYPES or x.dtype != q.dtype:
            other_dtype = "" if x is q else f" and q is {q.dtype}"
            raise ValueError(
                f"{name} is {x.dtype}{other_dtype}; wanted one floating dtype for all; cast"
                " them first"
            )
        if x.device != q.device:
            raise ValueError(
                f"{name} is on {x.device} and q on {q.device}; wanted one device; move them first"
            )
    if k.shape[:3] != v.shape[:3] or k.shape[0] != q.shape[0]:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: wanted equal batches, and"
            " k and v alike up to their last dimension; check the layout [B, tokens, heads, D]"
        )
    if q.shape[3] != k.shape[3]:
        raise ValueError(
            f"q has head dim {q.shape[3]}, k has {k.shape[3]}; wanted them equal; only v's may"
            " differ"
        )
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"{q.shape[2]} query heads over {k.shape[2]} kv heads; wanted a whole multiple; check"
            " num_heads, num_kv_heads"
        )
    start(q, q_start, num_keys=k.shape[1] if whole else None)
    if whole and isinstance(q_start, int) and k.shape[1] < q_start + q.shape[1]:
        raise ValueError(
            f"k holds {k.shape[1]} tokens; queries at {q_start} .. {q_start + q.shape[1] - 1} want"
            f" {q_start + q.shape[1]}; pass every key up to the last query, or a smaller q_start"
        )


def start(q: Tensor, q_start: int | Tensor, *, num_keys: int | None) -> None:
    """q_start: an int >= 0, or int64 [B] on q's device; the contents of a tensor only where they
    may be read.

    With ``num_keys`` none may exceed num_keys - T, so that the last query has a key at its
    position.
    """
    if not isinstance(q_start, Tensor):
        if isinstance(q_start, bool) or not isinstance(q_start, int) or q_start < 0:
            raise ValueError(
                f"q_start={q_start!r}; wanted the position of the first query, an int >= 0; 0"
                " begins a sequence"
            )
        return
    if q_start.shape != q.shape[:1] or q_start.dtype != torch.int64:
        raise ValueError(
            f"q_start is {q_start.dtype} {tuple(q_start.shape)}; wanted an int, or int64"
            f" [{q.shape[0]}]; give one position a row"
        )
    if q_start.device != q.device:
        raise ValueError(
            f"q_start is on {q_start.device} and q on {q.device}; wanted one device; move it"
        )
    if q_start.numel() and may_read(q_start):
        lowest, highest = (int(x) for x in q_start.aminmax())
        if lowest < 0 or (num_keys is not None and highest + q.shape[1] > num_keys):
            end = (
                ""
                if num_keys is None
                else (
                    f" and <= {num_keys - q.shape[1]}, for {q.shape[1]} queries over {num_keys}"
                    " keys"
                )
            )
            raise ValueError(
                f"q_start holds {lowest} .. {highest}; wanted positions >= 0{end}; pass every key"
                " up to each row's last query"
            )


def fixed_selection(config: NSAConfig, *, whole: bool, what: str) -> None:
    """The adaptive n depends on the length of a call, so only whole sequences, one a row, get the
    same n in every call.
    """
    if config.adaptive_num_selected and not whole:
        raise ValueError(
            f"got config.adaptive_num_selected=True with {what}; wanted whole sequences without"
            " cache or packing, since n goes by the length of the call and would differ from that"
            " of the same tokens in one sequence; set adaptive_num_selected=False"
        )


def sizes(**values: int) -> None:
    """Block sizes, strides and windows, in tokens."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(
                f"{name}={value!r}; wanted a whole number of tokens >= 1; nsa.NSAConfig holds the"
                " paper's"
            )


def compressed_grid(block: int, stride: int) -> None:
    """d must divide l, or no block would end where another begins."""
    sizes(block=block, stride=stride)
    if block % stride:
        raise ValueError(
            f"block={block}, stride={stride}; wanted a block that is a multiple of the stride; 32"
            " and 16 are the paper's"
        )


def same_kv(pairs: dict[str, tuple[Tensor, Tensor]]) -> None:
    """The three branches' K and V must have one shape: a route is for all of them."""
    first_k, first_v = next(iter(pairs.values()))
    # pairwise, not as a set: hashing a dynamic length would fix it under torch.compile
    if any(k.shape != first_k.shape or v.shape != first_v.shape for k, v in pairs.values()):
        shapes = {branch: (tuple(k.shape), tuple(v.shape)) for branch, (k, v) in pairs.items()}
        raise ValueError(
            f"kv shapes (k, v) {shapes}; wanted the same for each branch; project them alike"
        )


def scale(scale: float | None) -> None:
    """What scores are multiplied by before the softmax: finite, or None."""
    # compared, since torch.compile traces no math.isfinite of a number that changes between calls
    if scale is not None and not (isinstance(scale, int | float) and -math.inf < scale < math.inf):
        raise ValueError(f"scale={scale!r}; wanted a finite number; None is head_dim ** -0.5")


def pair(name: str, kv: object) -> None:
    """A branch's (k, v)."""
    if not (
        isinstance(kv, tuple | list) and len(kv) == 2 and all(isinstance(x, Tensor) for x in kv)
    ):
        got = f"a tensor {tuple(kv.shape)}" if isinstance(kv, Tensor) else f"{type(kv).__name__}"
        raise ValueError(f"{name} is {got}; wanted the pair (k, v) of tensors; pass (k, v)")


def config(config: object) -> None:
    if not isinstance(config, NSAConfig):
        raise ValueError(
            f"config is {type(config).__name__}; wanted an NSAConfig; nsa.NSAConfig() has the"
            " paper's sizes"
        )


def keys(kv_len: int, q: Tensor, *, q_start: int | Tensor) -> None:
    """kv_len tokens hold the queries."""
    sizes(kv_len=kv_len)
    if not isinstance(q_start, Tensor) and kv_len < q_start + q.shape[1]:
        end = q_start + q.shape[1]
        raise ValueError(
            f"kv_len={kv_len}; wanted at least {end}, the end of the queries; leave it out, or"
            " count every key that exists"
        )


def gates(gates: Tensor, q: Tensor, branches: tuple[str, ...]) -> None:
    """Floating [B, T, HQ, 3], matching q."""
    wanted = (*q.shape[:3], len(branches))
    if gates.shape != wanted:
        raise ValueError(
            f"gates {tuple(gates.shape)}; wanted {wanted}: one a head for each of {branches};"
            " unflatten the heads"
        )
    if not gates.is_floating_point() or gates.device != q.device:
        raise ValueError(
            f"gates is {gates.dtype} on {gates.device}; wanted a floating dtype on {q.device},"
            " where q is; cast or move it"
        )


def sinks(sinks: Tensor | None, q: Tensor, config: NSAConfig, branches: tuple[str, ...]) -> None:
    """Floating [HQ, 3], matching q, where config.sinks is on; else None."""
    if not config.sinks:
        if sinks is not None:
            raise ValueError(
                "got sinks, and config.sinks is False; wanted no sinks; set NSAConfig(sinks=True)"
            )
        return
    wanted = (q.shape[2], len(branches))
    if not isinstance(sinks, Tensor) or tuple(sinks.shape) != wanted:
        got = tuple(sinks.shape) if isinstance(sinks, Tensor) else type(sinks).__name__
        raise ValueError(
            f"sinks is {got}, and config.sinks is True; wanted a tensor {wanted}: one logit a query"
            f" head for each of {branches}; pass sinks=, or set sinks=False"
        )
    if not sinks.is_floating_point() or sinks.device != q.device:
        raise ValueError(
            f"sinks is {sinks.dtype} on {sinks.device}; wanted a floating dtype on {q.device},"
            " where q is; cast or move it"
        )


def states(x: Tensor, dim: int, weight: Tensor | None) -> None:
    """x [B, T, dim] of a layer whose first projection is ``weight``, as `plain_weight` gives it.
    Autocast casts any floating x.
    """
    if x.ndim != 3 or x.shape[2] != dim or 0 in x.shape[1:]:
        raise ValueError(
            f"x has shape {tuple(x.shape)}; wanted [B, tokens, {dim}], of one token at least;"
            " give a batch of sequences"
        )
    if not x.is_floating_point():
        raise ValueError(
            f"x is {x.dtype}; wanted a floating dtype, that of the layer's weights; cast x"
        )
    if weight is None:
        return
    if x.device != weight.device:
        raise ValueError(
            f"x is on {x.device}; wanted {weight.device}, where the layer's weights are; move one"
            " of them"
        )
    if x.dtype != weight.dtype and autocast_dtype(x.device) is None:
        raise ValueError(
            f"x is {x.dtype}; wanted {weight.dtype}, the weights' dtype; cast x or the layer, or"
            " run under torch.autocast"
        )


def projected(name: str, x: Tensor, heads: int, dim: int) -> None:
    """What a projection gave, [..., heads * dim]: one that was replaced may have another width, or
    give its bias apart.
    """
    if not isinstance(x, Tensor) or x.shape[-1] != heads * dim:
        got = f"[..., {x.shape[-1]}]" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(
            f"got {got} from {name}; wanted a Tensor [..., {heads * dim}], {heads} heads of {dim}"
            " (of all branches, where K and V are not shared); wrap the projection that took its"
            " place"
        )


def plain_weight(module: nn.Module) -> Tensor | None:
    """The weight of a torch.nn.Linear or Embedding that computes with it as it is stored, else
    None.

    A module that took its place (an adapter, a quantized one), a weight of another kind or dtype,
    and a forward or a hook of the user's own say nothing of what fits as input.
    """
    if (
        type(module) not in (nn.Linear, nn.Embedding)
        or "forward" in module.__dict__
        or module._forward_pre_hooks
    ):
        return None
    weight = module.weight
    # weights on meta are loaded by whoever put them there
    if not isinstance(weight, Tensor) or weight.device.type == "meta":
        return None
    return weight if weight.dtype in DTYPES else None


def is_hooked(module: nn.Module) -> bool:
    """Whether a call of ``module`` is more than its class's forward, or another: some libraries put
    a function of their own in its place, to move weights or to add an adapter.
    """
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or "forward" in vars(module)
        or nn.modules.module._has_any_global_hook()
    )


def compute_kind(module: nn.Module) -> tuple[torch.dtype, torch.device]:
    """dtype and device that ``module`` computes in, of the first of its parameters and buffers that
    is floating; torch's default dtype on the device of any other where none is.

    One on meta, which its owner loads for each call, counts only where all are there.
    """
    stored = [*module.parameters(), *module.buffers()]
    stored = [x for x in stored if x.device.type != "meta"] or stored
    for x in stored:
        if x.dtype in DTYPES:
            return x.dtype, x.device
    device = stored[0].device if stored else torch.device("cpu")
    return torch.get_default_dtype(), device


def ids(ids: Tensor, vocab_size: int, weight: Tensor | None, *, padded: bool = False) -> None:
    """int64 or int32 [B, T] for an embedding of ``vocab_size`` tokens, whose weight is ``weight``
    as `plain_weight` gives it. Ids are checked where contents may be read, unless padding is still
    to be cut.
    """
    if ids.ndim != 2 or 0 in ids.shape[1:] or ids.dtype not in INDICES:
        raise ValueError(
            f"ids is {ids.dtype} {tuple(ids.shape)}; wanted int64 or int32 [B, tokens], of one"
            " token at least; ids[None] is a batch of one, and ids.long() int64"
        )
    if weight is not None and ids.device != weight.device:
        raise ValueError(
            f"ids is on {ids.device}; wanted {weight.device}, where the model's weights are;"
            " move one of them"
        )
    if not padded and ids.numel() and may_read(ids):
        lowest, highest = (int(x) for x in ids.aminmax())
        if lowest < 0 or highest >= vocab_size:
            raise ValueError(
                f"ids holds {lowest} .. {highest}; wanted 0 .. {vocab_size - 1}; use the"
                " model's tokenizer, or a larger vocab_size"
            )


def blocks(blocks: Tensor, q: Tensor, k: Tensor) -> None:
    """int32 [B, T, HKV, N], matching q and k."""
    wanted = (*q.shape[:2], k.shape[2])
    if (
        blocks.ndim != 4
        or tuple(blocks.shape[:3]) != wanted
        or blocks.dtype != torch.int32
        or blocks.device != q.device
    ):
        raise ValueError(
            f"blocks is {blocks.dtype} {tuple(blocks.shape)} on {blocks.device}; wanted int32"
            f" [{', '.join(map(str, wanted))}, N] on {q.device}; nsa.select_blocks returns such"
        )


def sampling(*, temperature: float, top_p: float, top_k: int | None) -> None:
    """Finite, temperature >= 0, 0 < top_p <= 1, and top_k >= 1 or None."""
    if top_k is not None and (type(top_k) is not int or top_k < 1):
        raise ValueError(f"top_k={top_k!r}; wanted a whole number of tokens >= 1; None takes all")
    for name, value, fits, wanted in (
        ("temperature", temperature, lambda x: 0 <= x < math.inf, "a finite number >= 0; 0"),
        ("top_p", top_p, lambda x: 0 < x <= 1, "a number above 0, at most 1; 1"),
    ):
        # numpy's scalars are numbers.Real, too
        number = isinstance(value, Real) and not isinstance(value, bool)
        if not number or not fits(value):
            raise ValueError(f"{name}={value!r}; wanted {wanted} is the default")


def known(given: Iterable[str], names: Sequence[str], *, also: Sequence[str]) -> None:
    """TypeError for a keyword of generate that is none of ``names``, with the nearest of them and
    of those it takes ``also``.
    """
    for name in given:
        if name not in names:
            near = nearest_name(name, [*names, *also])
            raise TypeError(f"got generate({name}=...), which is not known{near}")


def counts(name: str, values: object) -> list[int]:
    """``values`` as whole numbers, one a row, of whatever kind of whole number they are."""
    if isinstance(values, list | tuple) and all(type(n) is int for n in values):
        return list(values)
    try:
        return [operator.index(n) for n in values]  # type: ignore[attr-defined]
    except TypeError as error:
        raise ValueError(
            f"{name}={values!r}; wanted whole numbers, one a row; a list such as [3, 5] is"
        ) from error


def lengths(num_tokens: Sequence[int] | Tensor, x: Tensor) -> Tensor:
    """Tokens of each row of x [B, T, ...], from 0 to T: int64 [B] on x's device. Those of a tensor
    are read only where they may be.
    """
    B, T = x.shape[:2]
    wanted = f"wanted {B} whole numbers from 0 to {T}; count each row's tokens"
    if not isinstance(num_tokens, Tensor):
        given = counts("num_tokens", num_tokens)
        if len(given) != B or not all(0 <= n <= T for n in given):
            raise ValueError(f"num_tokens={given} for {B} rows of {T} tokens; {wanted}")
        return to_device(given, x.device)
    if num_tokens.shape != (B,) or num_tokens.dtype not in INDICES or num_tokens.device != x.device:
        got = f"{num_tokens.dtype} {tuple(num_tokens.shape)} on {num_tokens.device}"
        raise ValueError(f"num_tokens is {got}; {wanted}, int64 on {x.device}")
    if B and may_read(num_tokens):
        lowest, highest = (int(n) for n in num_tokens.aminmax())
        if lowest < 0 or highest > T:
            raise ValueError(f"num_tokens holds {lowest} .. {highest}; {wanted}")
    return num_tokens.long()


def cu_seqlens_tensor(cu_seqlens: Tensor | Sequence[int], device: torch.device) -> Tensor:
    """``cu_seqlens``, as a tensor on ``device`` where it is a list of whole numbers. ValueError for
    other values.
    """
    if isinstance(cu_seqlens, Tensor):
        return cu_seqlens
    return to_device(counts("cu_seqlens", cu_seqlens), device)


def attention_mask(mask: Tensor, x: Tensor) -> None:
    """bool or whole numbers [B, T], true where x [B, T, ...] holds a token."""
    if not isinstance(mask, Tensor) or mask.shape != x.shape[:2] or mask.is_floating_point():
        got = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else repr(mask)
        raise ValueError(
            f"attention_mask is {got}; wanted bool or 0 and 1, {list(x.shape[:2])}: which tokens of"
            " this call exist; NSA is causal by itself, and takes no mask of pairs and no bias"
        )
    if mask.device != x.device:
        raise ValueError(
            f"attention_mask is on {mask.device} and the tokens on {x.device}; wanted one device;"
            " move it"
        )


def mask_alone(**others: object) -> None:
    """An attention_mask says by itself which tokens exist."""
    if given := [name for name, value in others.items() if value is not None]:
        raise ValueError(
            f"got attention_mask and {', '.join(given)}; wanted at most one of them; leave out the"
            " mask"
        )


def no_gradient(*tensors: Tensor) -> None:
    """ValueError where gradients are recorded: a cache does not keep their history."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise ValueError(
            "a cache was given while gradients are recorded, and a cache keeps none; wrap the call"
            " in torch.no_grad()"
        )


def packed(cu_seqlens: Tensor, q: Tensor, k: Tensor, q_start: int | Tensor, *, read: bool) -> None:
    """cu_seqlens [N + 1] for packed q [1, T, ...]; its contents are checked only with ``read``,
    which may sync.
    """
    if q.shape[0] != 1 or k.shape[1] != q.shape[1] or isinstance(q_start, Tensor) or q_start != 0:
        raise ValueError(
            f"cu_seqlens with q {tuple(q.shape)}, k {tuple(k.shape)}, q_start={q_start!r}; wanted"
            " one packed row of as many keys as queries, beginning at 0; pack the batch into B = 1"
        )
    if (
        cu_seqlens.ndim != 1
        or cu_seqlens.shape[0] < 2
        or cu_seqlens.dtype not in (torch.int32, torch.int64)
    ):
        got = f"{cu_seqlens.dtype} {tuple(cu_seqlens.shape)}"
        raise ValueError(
            f"cu_seqlens is {got}; wanted int32 or int64 [documents + 1]; torch.tensor([0, T]) is"
            " one document"
        )
    if cu_seqlens.device != q.device:
        raise ValueError(
            f"cu_seqlens is on {cu_seqlens.device} and q on {q.device}; wanted one device; move it"
        )
    if read:
        bounds = cu_seqlens.tolist()
        if bounds[0] != 0 or bounds != sorted(bounds) or bounds[-1] > q.shape[1]:
            got = f"{bounds[:8]} .. {bounds[-1]} over {q.shape[1]} tokens"
            raise ValueError(
                f"cu_seqlens {got}; wanted 0 first, ascending, and no more; give each"
                " document's end"
            )


def block_contents(blocks: Tensor, num_keys: int, sel_block: int, q_start: int | Tensor) -> None:
    """Strict mode: ids ascend, are unique and begin at or before their query; -1 only at the end.

    Synchronises.

    Aligned rows of packed documents count from 0 as well, and their ids are global.
    """
    highest = -(-num_keys // sel_block) - 1
    first_B1 = q_start[:, None] if isinstance(q_start, Tensor) else q_start
    current = ((torch.arange(blocks.shape[1], device=blocks.device) + first_B1) // sel_block)[
        ..., None, None
    ]
    before, after = blocks[..., :-1], blocks[..., 1:]
    faults = {
        "out of range": (blocks < -1) | (blocks > highest),
        "in the future": blocks > current,
        "repeated": (after >= 0) & (after == before),
        "out of order": (after >= 0) & ((after < before) | (before < 0)),
    }
    for fault, found in zip(
        faults, torch.stack([x.any() for x in faults.values()]).tolist(), strict=True
    ):
        if found:
            b, t, g, _ = faults[fault].nonzero()[0].tolist()
            last = int(current.expand(blocks.shape[0], *current.shape[-3:])[b, t])
            raise ValueError(
                f"blocks[{b}, {t}, {g}] is {blocks[b, t, g].tolist()}, with an id {fault}; wanted"
                f" distinct ids within 0 .. {min(last, highest)}, ascending, -1 only at the end;"
                " sort and mask each row, or call nsa.select_blocks"
            )
