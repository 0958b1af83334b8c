"""Arguments of the public functions, checked before anything runs: each ValueError says got, wanted, next step."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa import settings
from nsa.config import NSAConfig

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def may_read(x: Tensor) -> bool:
    """Whether contents may be looked at: on a CPU that syncs with nothing, elsewhere only in strict mode."""
    return not torch.compiler.is_compiling() and (x.device.type == "cpu" or is_strict())


def is_strict() -> bool:
    """NSA_STRICT_ASSERTS=1; never inside torch.compile, where looking would break the graph."""
    return not torch.compiler.is_compiling() and bool(settings.current().strict_asserts.value)


def qkv(q: Tensor, k: Tensor, v: Tensor, *, q_start: int | Tensor, whole: bool = True) -> None:
    """q [B, T, HQ, DK], k [B, S, HKV, DK], v [B, S, HKV, DV]; with ``whole``, S must reach q_start + T."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; wanted four dimensions [B, tokens, heads, D]; unflatten the heads")
        if 0 in x.shape[:1] or (name == "q" and 0 in x.shape):
            raise ValueError(f"{name} has shape {tuple(x.shape)}; wanted at least one sequence and one query; skip empty calls")
        if x.dtype not in DTYPES or x.dtype != q.dtype:
            raise ValueError(f"{name} is {x.dtype} and q is {q.dtype}; wanted one floating dtype for all; cast them first")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device} and q on {q.device}; wanted one device; move them first")
    if k.shape[:3] != v.shape[:3] or k.shape[0] != q.shape[0]:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: wanted equal batches, and k and v alike up to "
            "their last dimension; check the layout [B, tokens, heads, D]"
        )
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"q has head dim {q.shape[3]}, k has {k.shape[3]}; wanted them equal; only v's may differ")
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(f"{q.shape[2]} query heads over {k.shape[2]} kv heads; wanted a whole multiple; check num_heads, num_kv_heads")
    start(q, q_start)
    if whole and isinstance(q_start, int) and k.shape[1] < q_start + q.shape[1]:
        raise ValueError(
            f"k holds {k.shape[1]} tokens; queries at {q_start} .. {q_start + q.shape[1] - 1} want {q_start + q.shape[1]}; "
            "pass every key up to the last query, or a smaller q_start"
        )


def start(q: Tensor, q_start: int | Tensor) -> None:
    if isinstance(q_start, Tensor):
        if q_start.shape != q.shape[:1] or q_start.dtype != torch.int64:
            raise ValueError(f"q_start is {q_start.dtype} {tuple(q_start.shape)}; wanted an int, or int64 [{q.shape[0]}]")
    elif not isinstance(q_start, int) or q_start < 0:
        raise ValueError(f"q_start={q_start!r}; wanted the position of the first query, an int >= 0; 0 begins a sequence")


def fixed_selection(config: NSAConfig, *, whole: bool, what: str) -> None:
    """The adaptive n goes by the length of a call: only whole sequences, one to a row, would choose alike in every call."""
    if config.adaptive_num_selected and not whole:
        raise ValueError(
            f"got config.adaptive_num_selected=True with {what}; wanted whole sequences without cache or packing, since n goes by the "
            "length of the call and would differ from that of the same tokens in one sequence; set adaptive_num_selected=False"
        )


def sizes(**values: int) -> None:
    """Block sizes and strides, in tokens."""
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name}={value}; wanted a number of tokens >= 1; nsa.NSAConfig holds the paper's")


def same_kv(pairs: dict[str, tuple[Tensor, Tensor]]) -> None:
    """The three branches' K and V must have one shape: a route is for all of them."""
    first_k, first_v = next(iter(pairs.values()))
    # pairwise, not as a set: hashing a dynamic length would fix it under torch.compile
    if any(k.shape != first_k.shape or v.shape != first_v.shape for k, v in pairs.values()):
        shapes = {branch: (tuple(k.shape), tuple(v.shape)) for branch, (k, v) in pairs.items()}
        raise ValueError(f"kv shapes (k, v) {shapes}; wanted the same for each branch; project them alike")


def blocks(blocks: Tensor, q: Tensor, k: Tensor) -> None:
    """int32 [B, T, HKV, N] beside q and k."""
    wanted = (*q.shape[:2], k.shape[2])
    if blocks.ndim != 4 or tuple(blocks.shape[:3]) != wanted or blocks.dtype != torch.int32 or blocks.device != q.device:
        raise ValueError(
            f"blocks is {blocks.dtype} {tuple(blocks.shape)} on {blocks.device}; wanted int32 [{', '.join(map(str, wanted))}, N] "
            f"on {q.device}; nsa.select_blocks returns such"
        )


def no_gradient(q: Tensor) -> None:
    """A cache keeps values, not their history."""
    if torch.is_grad_enabled() and q.requires_grad:
        raise ValueError("a cache was given while gradients are recorded, and a cache keeps none; wrap the call in torch.no_grad()")


def packed(cu_seqlens: Tensor, q: Tensor, k: Tensor, q_start: int | Tensor, *, read: bool) -> None:
    """cu_seqlens [N + 1] beside packed q [1, T, ...]; its contents are looked at only with ``read``, which may sync."""
    if q.shape[0] != 1 or k.shape[1] != q.shape[1] or isinstance(q_start, Tensor) or q_start != 0:
        raise ValueError(
            f"cu_seqlens with q {tuple(q.shape)}, k {tuple(k.shape)}, q_start={q_start!r}; wanted one packed row of as many keys as "
            "queries, beginning at 0; pack the batch into B = 1"
        )
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"cu_seqlens is {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}; wanted int32 or int64 [documents + 1]")
    if cu_seqlens.device != q.device:
        raise ValueError(f"cu_seqlens is on {cu_seqlens.device} and q on {q.device}; wanted one device; move it")
    if read:
        bounds = cu_seqlens.tolist()
        if bounds[0] != 0 or bounds != sorted(bounds) or bounds[-1] > q.shape[1]:
            raise ValueError(f"cu_seqlens {bounds[:8]} .. {bounds[-1]} over {q.shape[1]} tokens; wanted 0 first, ascending, and no more")


def block_contents(blocks: Tensor, num_keys: int, sel_block: int) -> None:
    """Strict mode: ascending, unique, in range, -1 only at the end. Synchronises."""
    highest = -(-num_keys // sel_block) - 1
    real = blocks >= 0
    padded_then_real = (~real[..., :-1] & real[..., 1:]).any()
    unsorted = (real[..., 1:] & (blocks[..., 1:] <= blocks[..., :-1])).any()
    outside = ((blocks < -1) | (blocks > highest)).any()
    if bool(padded_then_real | unsorted | outside):
        raise ValueError(
            f"blocks must ascend without repetition within 0 .. {highest}, with -1 only at the end; got "
            f"{blocks.min().item()} .. {blocks.max().item()}, out of order or repeated; sort and de-duplicate each row"
        )
