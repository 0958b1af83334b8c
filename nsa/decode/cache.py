"""NSACache: what one NSA layer keeps of the tokens so far, and each branch's view of it for the
next chunk.

Prefill, chunked prefill and decode are one function of (cache, chunk); rows of a batch may hold
different numbers of tokens, which are known on the host, so nothing is read back from the device.

B batch, T tokens of the chunk, G kv heads, D head dim, l compressed block, d its stride, w window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Protocol, Self

import torch
from torch import Tensor

from nsa import checks
from nsa.blocks import BlockGrid
from nsa.config import NSAConfig
from nsa.decode.views import KV, CompressFn, Replay, Step, View
from nsa.ops.key_counts import KeysRead
from nsa.ops.positions import to_device


class TakesSteps(Protocol):
    """What a cache asks of the `nsa.decode.Steps` that it belongs to."""

    length_B: Tensor
    replays: dict[int, Replay]

    @property
    def is_between(self) -> bool: ...

    def lengths_of(self, cache: NSACache) -> tuple[int, ...]: ...

    def next(self, config: NSAConfig) -> Step: ...

    def check_turn(
        self, cache: NSACache, chunk: Mapping[str, KV], num_tokens: Sequence[int] | None
    ) -> None: ...

    def took(self, cache: NSACache) -> None: ...

    def append(
        self,
        cache: NSACache,
        kv_cmp: KV,
        kv_sel: KV,
        kv_win: KV,
        *,
        compress: CompressFn,
        num_tokens: Sequence[int] | None,
        step: Step | None,
    ) -> View: ...


class Holds(Protocol):
    """What `check_chunk` asks of a cache, of whatever attention."""

    @property
    def batch(self) -> int: ...
    @property
    def max_len(self) -> int: ...
    @property
    def kv(self) -> list[Tensor]: ...
    @property
    def lengths(self) -> tuple[int, ...]: ...
    @property
    def steps(self) -> object: ...


@dataclass(frozen=True, slots=True)
class TokenShape:
    """K and V of one token, and where they are kept."""

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    device: torch.device | str

    def buffers(self, batch: int, rows: Sequence[int], *, window: int = 0) -> list[list[Tensor]]:
        """Zeros for K and V [batch, n, G, D] of each n of ``rows``, of which the first is for all
        tokens. Where memory ends, torch.OutOfMemoryError says what all of them take.
        """

        def zeros(n: int, dim: int) -> Tensor:
            return torch.zeros(
                batch, n, self.num_kv_heads, dim, dtype=self.dtype, device=self.device
            )

        try:
            with torch.inference_mode(False):  # else only inference_mode could write to them
                return [[zeros(n, self.head_dim), zeros(n, self.v_head_dim)] for n in rows]
        except (RuntimeError, TypeError) as error:  # the latter of a size beyond int64
            token = self.num_kv_heads * (self.head_dim + self.v_head_dim) * self.dtype.itemsize
            needed = batch * sum(rows) * token
            raise torch.OutOfMemoryError(  # on a CPU, too, where PyTorch's is a RuntimeError
                f"got no memory on {self.device} for a cache of {needed:,} bytes:"
                f" {token:,} a token, {batch} x {rows[0] - 1:,} tokens, window {window:,};"
                " wanted room for them; lower batch, max_len or window, or begin with a smaller"
                " initial_len"
            ) from error


class NSACache:
    """Preallocated keys and values of one layer.

    Make it with ``empty``; NSAAttention and TinyLM fill it.

    Keeps all K and V for the selected branch, a ring of the last min(w, max_len) for the window,
    the compressed K and V, and the raw tokens from C * d on (at most l - 1), from which the next
    compressed block continues exactly. No gradient. It may be made or used under inference_mode or
    no_grad, in any order.

    While ``steps`` is not None (`nsa.decode.Steps`, which DecodeGraph and ChunkGraph use) it takes
    a fixed number of tokens a row at a time, and the lengths are on the device, too.
    """

    def __init__(
        self,
        config: NSAConfig,
        batch: int,
        max_len: int,
        capacity: int,
        token: TokenShape,
    ) -> None:
        self.config, self.grid, self.batch, self.max_len, self.capacity = (
            config,
            BlockGrid.of(config),
            batch,
            max_len,
            capacity,
        )
        # rows of the window's ring: a row never holds more tokens
        self.window = min(config.window, max_len)
        self._lengths = [0] * batch
        self.keys_read = KeysRead()

        # One row more than there is room for takes what a shorter row of a ragged chunk must not
        # keep.
        self.sel, self.cmp, self.win, self.tail = token.buffers(
            batch,
            (capacity + 1, self.grid.num_cmp(capacity) + 1, self.window, config.cmp_block - 1),
            window=self.window,
        )
        self.steps: TakesSteps | None = None
        # while it steps: the last raw tokens in a ring, which then stand for the tail
        self.raw: list[Tensor] = []

    @classmethod
    def empty(
        cls,
        config: NSAConfig,
        batch: int,
        max_len: int,
        *,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        initial_len: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Self:
        """Room for ``max_len`` tokens a row, or for ``initial_len`` at first, then doubled as
        needed up to ``max_len``.

        Of k [B, T, HKV, head_dim] and v [B, T, HKV, v_head_dim] in ``dtype``. ValueError for sizes
        below 1 or beyond max_len.

        config.adaptive_num_selected is a ValueError: decode would attend to other blocks than one
        call over the sequence.
        """
        checks.fixed_selection(config, whole=False, what="a cache")
        capacity = room_of("NSACache", batch, max_len, initial_len)
        token = TokenShape(
            num_kv_heads, head_dim, head_dim if v_head_dim is None else v_head_dim, dtype, device
        )
        return cls(config, batch, max_len, capacity, token)

    @property
    def kv(self) -> list[Tensor]:
        """K and V of all tokens."""
        return self.sel

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens that each row holds."""
        return tuple(self._lengths) if self.steps is None else self.steps.lengths_of(self)

    def q_start(self, device: torch.device) -> int | Tensor:
        """Position of the next token: an int where all rows are alike, else (and while it steps)
        int64 [B].
        """
        if self.steps is not None:
            return self.steps.length_B.clone()
        return (
            self._lengths[0] if len(set(self._lengths)) == 1 else to_device(self._lengths, device)
        )

    def memory_bytes(self) -> int:
        """Bytes of the buffers as they are now."""
        return sum(
            x.nbytes for pair in (self.sel, self.cmp, self.win, self.tail, self.raw) for x in pair
        )

    def append(
        self,
        kv_cmp: KV,
        kv_sel: KV,
        kv_win: KV,
        *,
        compress: CompressFn,
        num_tokens: Sequence[int] | None = None,
        step: Step | None = None,
    ) -> View:
        """Store a chunk of T tokens a row (only the first ``num_tokens[b]`` of row b) and return
        what its queries attend to.

        Each kv is k [B, T, HKV, DK] and v [B, T, HKV, DV] of the cache's dtype and device;
        ``kv_cmp`` is what ``compress`` takes, rotated or not. ValueError, and nothing stored, where
        one is of another kind or a row would exceed max_len. ``step``: that of the forward, where
        the cache steps and its layers share one.
        """
        if self.steps is not None:
            return self.steps.append(
                self, kv_cmp, kv_sel, kv_win, compress=compress, num_tokens=num_tokens, step=step
            )
        T = kv_sel[0].shape[1]
        new = check_chunk(self, {"cmp": kv_cmp, "sel": kv_sel, "win": kv_win}, num_tokens)
        old, total = (
            list(self._lengths),
            [length + count for length, count in zip(self._lengths, new, strict=True)],
        )
        self.grow(max(total))
        q_start: int | Tensor = old[0]
        win_start: int | Tensor
        uniform = len(set(old)) == 1
        if uniform and len(set(new)) == 1:
            view_win, win_start = self._append_alike(kv_cmp, kv_sel, kv_win, old[0], compress)
        else:
            old_B, new_B = (to_device(x, kv_sel[0].device) for x in (old, new))
            q_start = old[0] if uniform else old_B
            view_win, win_start = self._window_view(kv_win, old, old_B)
            self._store(self.sel, kv_sel, old_B, new_B)
            self._store_ring(kv_win, old_B, new_B)
            self._compress(kv_cmp, old, total, compress)
        self._lengths = total
        longest = old[0] + T if uniform else max(total)
        num_cmp = self.grid.num_cmp(max(total))
        k, v = self.sel
        k_cmp, v_cmp = self.cmp
        return View(
            cmp=(k_cmp[:, :num_cmp], v_cmp[:, :num_cmp]),
            sel=(k[:, :longest], v[:, :longest]),
            win=view_win,
            q_start=q_start,
            win_start=win_start,
        )

    def _append_alike(
        self, kv_cmp: KV, kv_sel: KV, kv_win: KV, start: int, compress: CompressFn
    ) -> tuple[KV, int]:
        """Store a chunk where all rows hold ``start`` tokens and get as many: by slices alone,
        since a step of decode waits for the host.

        Returns the window's view and the position of the first query in it.
        """
        T, w = kv_sel[0].shape[1], self.window
        before, kept = min(w - 1, start), min(w, T)
        earlier = [slots for slots, _ in _ring_parts(start - before, before, w)]
        k, v = (
            torch.cat([*(ring[:, slots] for slots in earlier), x], 1)
            for ring, x in zip(self.win, kv_win, strict=True)
        )
        for ring, x in zip(self.win, kv_win, strict=True):
            for slots, tokens in _ring_parts(start + T - kept, kept, w):
                ring[:, slots] = x[:, T - kept :][:, tokens]
        for buffer, x in zip(self.sel, kv_sel, strict=True):
            buffer[:, start : start + T] = x
        d, done, due = (
            self.config.cmp_stride,
            self.grid.num_cmp(start),
            self.grid.num_cmp(start + T),
        )
        raw = tuple(
            torch.cat([tail[:, : start - done * d], x], 1)
            for tail, x in zip(self.tail, kv_cmp, strict=True)
        )
        if due > done:
            blocks = compress(raw[0], raw[1], to_device([done] * self.batch, raw[0].device))
            for buffer, x in zip(self.cmp, blocks, strict=True):
                buffer[:, done:due] = x[:, : due - done]
        for tail, x in zip(self.tail, raw, strict=True):
            tail[:, : start + T - due * d] = x[:, (due - done) * d :]
        return (k, v), before

    def grow(self, needed: int) -> None:
        """Make room for ``needed`` tokens a row, at most max_len, by doubling what there is."""
        if needed <= self.capacity:
            return
        capacity = self.capacity
        while capacity < needed:
            capacity = min(2 * capacity, self.max_len)

        def grown(pair: list[Tensor], rows: int) -> list[Tensor]:
            return [
                torch.cat([x, x.new_zeros(self.batch, rows - x.shape[1], *x.shape[2:])], 1)
                for x in pair
            ]

        # allocate both before storing either: when memory runs out, the cache is unchanged
        with torch.inference_mode(False), torch.no_grad():
            self.sel, self.cmp = (
                grown(self.sel, capacity + 1),
                grown(self.cmp, self.grid.num_cmp(capacity) + 1),
            )
        self.capacity = capacity

    def next_step(self) -> Step | None:
        """Where the next token goes; None unless it steps."""
        return None if self.steps is None else self.steps.next(self.config)

    def begin_steps(self, steps: TakesSteps, raw: list[Tensor], win: list[Tensor]) -> None:
        """Take a step's tokens from now on, with the last raw tokens in the ring ``raw`` and the
        window in the ring ``win``. Called by `Steps`.
        """
        self.raw, self.win, self.steps = raw, win, steps

    def end_steps(self, lengths: Sequence[int], tail: list[Tensor]) -> None:
        """Turn back into an ordinary cache that holds ``lengths`` tokens and ``tail``.

        Called by `Steps.end`.
        """
        self._lengths, self.tail, self.raw, self.steps = list(lengths), tail, [], None

    def _window_view(self, kv: KV, old: list[int], old_B: Tensor) -> tuple[KV, int | Tensor]:
        """The last w - 1 tokens of each row, oldest first, then the chunk."""
        w = self.window
        if len(set(old)) == 1:
            before = min(w - 1, old[0])
            slot = (torch.arange(before, device=old_B.device) + old[0] - before) % w
            k, v = (torch.cat([ring[:, slot], x], 1) for ring, x in zip(self.win, kv, strict=True))
            return (k, v), before
        before_B = old_B.clamp(max=w - 1)
        i = torch.arange(w - 1, device=old_B.device)
        slot_BI = (old_B - before_B)[:, None].add(i) % w
        k, v = (
            _join(_rows(ring, slot_BI), x, before_B) for ring, x in zip(self.win, kv, strict=True)
        )
        return (k, v), before_B

    def _store(self, buffers: list[Tensor], chunk: KV, start_B: Tensor, count_B: Tensor) -> None:
        """The first ``count_B`` rows of the chunk to rows start_B .. of each buffer."""
        for buffer, x in zip(buffers, chunk, strict=True):
            i = torch.arange(x.shape[1], device=x.device)
            index_BT = torch.where(i < count_B[:, None], start_B[:, None] + i, buffer.shape[1] - 1)
            buffer.scatter_(1, index_BT[:, :, None, None].expand_as(x), x)

    def _store_ring(self, chunk: KV, old_B: Tensor, new_B: Tensor) -> None:
        """Slot s holds the latest token whose position is s modulo w."""
        w = self.window
        last_B1 = (old_B + new_B - 1)[:, None]
        position_BW = last_B1 - (last_B1 - torch.arange(w, device=old_B.device)) % w
        token_BW = position_BW - old_B[:, None]
        for ring, x in zip(self.win, chunk, strict=True):
            fresh = _rows(x, token_BW.clamp(0, x.shape[1] - 1))
            ring.copy_(torch.where((token_BW >= 0)[:, :, None, None], fresh, ring))

    def _compress(self, chunk: KV, old: list[int], total: list[int], compress: CompressFn) -> None:
        """Append the blocks that the chunk completes, and keep the raw tokens from the next block
        on.
        """
        grid, d, device = self.grid, self.config.cmp_stride, chunk[0].device
        done, due = [grid.num_cmp(n) for n in old], [grid.num_cmp(n) for n in total]
        kept_B, done_B, emitted_B = (
            to_device(x, device)
            for x in (
                [n - c * d for n, c in zip(old, done, strict=True)],
                done,
                [b - a for a, b in zip(done, due, strict=True)],
            )
        )
        alike = len(set(old)) == 1
        kept = old[0] - done[0] * d
        raw_k, raw_v = (
            torch.cat([tail[:, :kept], x], 1) if alike else _join(tail, x, kept_B)
            for tail, x in zip(self.tail, chunk, strict=True)
        )
        if max(due) > min(done):
            self._store(self.cmp, compress(raw_k, raw_v, done_B), done_B, emitted_B)
        i = torch.arange(self.config.cmp_block - 1, device=device)
        from_BI = (emitted_B * d)[:, None] + i
        for tail, raw in zip(self.tail, (raw_k, raw_v), strict=True):
            tail.copy_(_rows(raw, from_BI.clamp(max=raw.shape[1] - 1)))


def room_of(kind: str, batch: int, max_len: int, initial_len: int | None) -> int:
    """The tokens a row for which a new cache has room at first; ValueError for sizes below 1 or
    beyond ``max_len``. ``kind`` names the cache.
    """
    capacity = max_len if initial_len is None else initial_len
    for name, value in {"batch": batch, "max_len": max_len, "initial_len": capacity}.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            give = (
                "the number of sequences"
                if name == "batch"
                else "the longest sequence that you expect, in tokens"
            )
            raise ValueError(
                f"{kind} {name}={value!r}; wanted a whole number of at least 1; give {give}"
            )
    if capacity > max_len:
        raise ValueError(
            f"{kind} initial_len={capacity} exceeds max_len={max_len}; lower it, or raise max_len"
        )
    return capacity


def check_cache(cache: object, config: NSAConfig) -> None:
    """ValueError unless ``cache`` is an NSACache of ``config``: another one's blocks and window
    would be silently wrong.
    """
    if not isinstance(cache, NSACache):
        raise ValueError(
            f"got a cache of type {type(cache).__name__}; wanted an NSACache; new_cache of the"
            " layer or model makes it"
        )
    if cache.config is not config and cache.config != config:
        differ = [
            f.name
            for f in fields(config)
            if getattr(cache.config, f.name) != getattr(config, f.name)
        ]
        got, wanted = ({name: getattr(c, name) for name in differ} for c in (cache.config, config))
        raise ValueError(
            f"got a cache made with {got}; wanted the layer's {wanted}; make it with the layer's"
            " new_cache"
        )


def check_chunk(
    cache: Holds, chunk: Mapping[str, KV], num_tokens: Sequence[int] | None
) -> list[int]:
    """The tokens that each row adds; ValueError before anything is stored.

    ``chunk`` holds the k and v of each branch.
    """
    check_kind(cache.batch, cache.kv, chunk)
    B, T = next(iter(chunk.values()))[0].shape[:2]
    new = [T] * B if num_tokens is None else checks.counts("num_tokens", num_tokens)
    if len(new) != B or min(new) < 0 or max(new) != T:
        raise ValueError(
            f"num_tokens={new} for a chunk [{B}, {T}]; wanted {B} numbers from 0 to {T}, the"
            f" largest being {T}; trim the padding"
        )
    if cache.steps is not None:  # which count their own room, and not as numbers when compiled
        return new
    total = [old + n for old, n in zip(cache.lengths, new, strict=True)]
    if max(total) > cache.max_len:
        raise ValueError(
            f"a row would hold {max(total)} tokens; wanted at most max_len={cache.max_len}, for"
            " which the cache has room; make it larger with NSACache.empty(max_len=...), or begin"
            " a new one"
        )
    return new


def check_rows(batch: int, rows: int) -> None:
    """ValueError unless a chunk of ``rows`` rows is one of a cache of ``batch``."""
    if batch != rows:
        raise ValueError(
            f"the cache holds {batch} rows, the chunk {rows}; wanted the same; make a cache of"
            " that batch, or split it"
        )


def check_kind(batch: int, kept: Sequence[Tensor], chunk: Mapping[str, KV]) -> None:
    """ValueError unless the k and v of each branch of ``chunk`` are of ``batch`` rows, and of the
    heads [..., G, D], dtype and device of ``kept`` k and v.
    """
    B, T = next(iter(chunk.values()))[0].shape[:2]
    check_rows(batch, B)
    for branch, kv in chunk.items():
        for name, x, buffer in zip(("k", "v"), kv, kept, strict=True):
            if (buffer.dtype, buffer.device) != (x.dtype, x.device):
                raise ValueError(
                    f"the cache's {name} is {buffer.dtype} on {buffer.device}, the chunk {x.dtype}"
                    f" on {x.device} ({branch}); wanted the same; make the cache like the model:"
                    " new_cache(dtype=...)"
                )
            if x.shape != (B, T, *buffer.shape[2:]):
                raise ValueError(
                    f"the cache's {name} holds heads {tuple(buffer.shape[2:])}, and the chunk's is"
                    f" {tuple(x.shape)} ({branch}); wanted {(B, T, *buffer.shape[2:])}; make the"
                    " cache with the layer's heads and head dims"
                )


def _ring_parts(first: int, count: int, w: int) -> list[tuple[slice, slice]]:
    """Slots of a ring of w for positions first .. first + count - 1 (count <= w), and which of
    those positions each part holds.
    """
    begin = first % w
    head = min(count, w - begin)
    parts = [(slice(begin, begin + head), slice(0, head))]
    return parts if head == count else [*parts, (slice(0, count - head), slice(head, count))]


def _rows(x_BLGD: Tensor, index_BI: Tensor) -> Tensor:
    """Row index_BI[b, i] of each batch row: [B, I, G, D]."""
    return x_BLGD.gather(1, index_BI[:, :, None, None].expand(-1, -1, *x_BLGD.shape[2:]))


def _join(before_BIGD: Tensor, chunk_BTGD: Tensor, count_B: Tensor) -> Tensor:
    """The first ``count_B`` rows of ``before``, then the chunk, left-aligned: [B, I + T, G, D]; the
    end repeats the last token.
    """
    I, T = before_BIGD.shape[1], chunk_BTGD.shape[1]  # noqa: E741
    i = torch.arange(I + T, device=count_B.device)
    both = torch.cat([before_BIGD, chunk_BTGD], 1)
    return _rows(
        both, torch.where(i < count_B[:, None], i, (i - count_B[:, None]).clamp(max=T - 1) + I)
    )
