"""Steps: caches that take a fixed number of tokens a row at a time, their lengths on the device: a
step of decode, or of prefill in chunks, without the host.

Nothing in a step has the position as a Python number or in a shape, so a CUDA graph holds it, and
each replay continues where the previous one ended. The numbers are those of the ordinary
cache but for the order in which the window's keys are summed.

B batch, G kv heads, D head dim, l compressed block, d its stride, w window.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NoReturn

import torch
from torch import Tensor

from nsa.config import NSAConfig
from nsa.decode.cache import NSACache, check_chunk
from nsa.decode.dense_cache import DenseCache
from nsa.decode.views import KV, CompressFn, DenseStep, Replay, Step, View, not_a_step
from nsa.ops.positions import to_device


class Steps:
    """Turns caches of one history, one a layer, into ones that take ``tokens`` a row at a time;
    `end` turns them back.

    Their ``append``, and a forward with them, then takes ids or states of so many tokens a row,
    without num_tokens; rows may differ in length and advance together. The buffers grow to max_len
    first, since a graph holds their addresses. Each layer also keeps raw tokens in a ring, and the
    window in one that has room for the step's tokens. A single token attends to the window where it
    lies in its ring: it sees all of it, in whatever order. A step that is run again from the same
    position leaves what it left before.

    Under torch.compile all steps are one graph: nothing in it has a length as a number, and the
    host learns what they took when it is asked, by waiting for the device.

    A DenseCache needs no rings: its step writes the tokens' own rows alone.

    ValueError for caches that do not hold the same, or that other Steps have already.
    """

    def __init__(self, caches: Sequence[NSACache | DenseCache], tokens: int = 1) -> None:
        if isinstance(caches, NSACache | DenseCache) or not hasattr(caches, "__len__"):
            raise ValueError(
                f"got a {type(caches).__name__} for Steps; wanted a list of caches, one a layer;"
                " put it in a list, or take the one that new_cache of the model makes"
            )
        if not caches or len({(c.lengths, c.max_len, c.kv[0].device) for c in caches}) != 1:
            got = sorted({f"{c.lengths} of {c.max_len} on {c.kv[0].device}" for c in caches})
            raise ValueError(
                f"got caches that hold {got}; wanted the same of each; give those of one model,"
                " TinyLM.new_cache makes them"
            )
        if any(c.steps is not None for c in caches) or len({id(c) for c in caches}) != len(caches):
            raise ValueError(
                "got caches that step already; wanted ordinary ones, each once; end their Steps, or"
                " close their DecodeGraph"
            )
        _check_tokens(tokens, caches)
        self.tokens = tokens
        first = caches[0]
        self._max_len, self._begin, self._taken, self._may_forget = (
            first.max_len,
            first.lengths,
            0,
            False,
        )
        # Weak, since each cache holds these Steps: a cycle would keep its buffers until Python
        # happens to look for cycles.
        self._caches = [weakref.ref(c) for c in caches]
        self._ids = frozenset(id(c) for c in caches)
        self._due = set(self._ids)  # which have not taken the current token yet
        self.replays: dict[int, Replay] = {}  # by id of the cache, of LayerGraphs
        self._lags = False  # compiled steps are not counted as they run
        # what steps write to must not belong to the inference_mode that they may be made in
        with torch.inference_mode(False), torch.no_grad():
            self.length_B = to_device(self._begin, first.kv[0].device)
            for cache in caches:
                cache.grow(cache.max_len)
            rings = [self._rings(c) if isinstance(c, NSACache) else ([], []) for c in caches]
        for cache, (raw, win) in zip(caches, rings, strict=True):  # all or none, where memory ends
            cache.begin_steps(self, raw, win)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "got a copy (or a pickle) of caches that step; wanted ordinary ones, since the host and"
            " the device count a step for these alone; Next: end their Steps (or DecodeGraph)"
        )

    def lengths_of(self, cache: NSACache | DenseCache) -> tuple[int, ...]:
        """Tokens that each row of ``cache`` holds, known on the host: steps are counted. After
        compiled ones the device is asked.
        """
        self._catch_up()
        taken = self._taken + self.tokens * (id(cache) not in self._due)
        return tuple(n + taken for n in self._begin)

    def next(self, config: NSAConfig) -> Step:
        """Where the next tokens go in caches of ``config``. ValueError where no room is left."""
        self.check_room()
        # the last layer's append moves length_B on while the position is in use
        return Step(self.length_B.clone(), config, self._max_len, self.tokens)

    def next_dense(self) -> DenseStep:
        """As `next`, in caches of full causal attention."""
        self.check_room()
        return DenseStep.of(self.length_B.clone(), self.tokens)

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
    ) -> View:
        """What `NSACache.append` does, of a step's tokens; ``step`` is that of this forward, made
        here where it is not given.
        """
        self.check_turn(cache, {"cmp": kv_cmp, "sel": kv_sel, "win": kv_win}, num_tokens)
        step = self.next(cache.config) if step is None else step
        for buffers, row_BT11, kv in (
            (cache.sel, step.sel_BT11, kv_sel),
            (cache.win, step.win_BT11, kv_win),
            (cache.raw, step.raw_BT11, kv_cmp),
        ):
            for buffer, x in zip(buffers, kv, strict=True):
                buffer.scatter_(1, row_BT11.expand_as(x), x)
        raw_k, raw_v = (_taken_rows(ring, step.raw_BL11) for ring in cache.raw)
        for buffer, x in zip(cache.cmp, compress(raw_k, raw_v, step.block_B), strict=True):
            buffer.scatter_(1, step.cmp_BM11.expand_as(x), x)
        self.took(cache)
        k_cmp, v_cmp = (x[:, :-1] for x in cache.cmp)
        k, v = (x[:, :-1] for x in cache.sel)
        win_k, win_v = (
            x if self.tokens == 1 else _taken_rows(x, step.win_view_BV11) for x in cache.win
        )
        return View(
            cmp=(k_cmp, v_cmp),
            sel=(k, v),
            win=(win_k, win_v),
            q_start=step.position_B,
            win_start=step.win_start_B,
        )

    def check_turn(
        self,
        cache: NSACache | DenseCache,
        chunk: Mapping[str, KV],
        num_tokens: Sequence[int] | None,
    ) -> None:
        """ValueError unless ``chunk`` is a step's tokens for every row, and ``cache`` is due for
        them.
        """
        if self.replays:  # whose positions are those of the last replay of the first layer
            raise ValueError(
                "got a step that no graph of its LayerGraphs replays; wanted a call of the modules"
                " that were captured, each with its own cache; call those, or close the LayerGraphs"
            )
        tokens = next(iter(chunk.values()))[0].shape[1]
        if tokens != self.tokens or num_tokens is not None:
            got = f"a chunk of {tokens} tokens" + (
                "" if num_tokens is None else f" with num_tokens={list(num_tokens)}"
            )
            raise not_a_step(got, self.tokens)
        check_chunk(cache, chunk, None)
        self._check_due(cache)

    def check_replay(self, cache: NSACache | DenseCache, place: int) -> None:
        """ValueError unless the next step is that of ``cache``, captured as the layer at ``place``,
        and there is room for the token.
        """
        self._check_due(cache)
        if (taken := len(self._ids) - len(self._due)) != place:
            raise ValueError(
                f"got the step of layer {place} while layer {taken} waits for the token; wanted the"
                " layers in the order of their LayerGraphs, which replay what the first one makes;"
                " call them so, or close the LayerGraphs"
            )
        if place == 0:
            self.check_room()

    def check_room(self) -> None:
        """ValueError where a row is full: the host counts, so that no step writes beyond. In a
        compiled step the device looks: a RuntimeError on a CPU, an assert on CUDA, after which the
        process has lost its GPU. Call this before such a step where a row may be full.
        """
        if torch.compiler.is_compiling():
            torch._assert_async(
                (self.length_B <= self._max_len - self.tokens).all(),
                f"got a token for a row that holds max_len={self._max_len}; wanted room; make"
                " the cache larger with new_cache(batch, max_len)",
            )
            return
        self._catch_up()
        longest, room = max(self._begin) + self._taken, self._max_len
        if longest + self.tokens > room:
            raise ValueError(
                f"a row would hold {longest + self.tokens} tokens; wanted at most max_len={room},"
                " for which the cache has room; make it larger with new_cache(batch, max_len), or"
                " begin a new one"
            )

    def forget_last(self) -> None:
        """Go back by the last step: the next one takes its place.

        ValueError for a second in a row, whose window has lost a key.
        """
        if not self._may_forget or self._due != self._ids:
            raise ValueError(
                "got no whole step to forget; wanted one since the last that was forgotten; run a"
                " step of all layers"
            )
        self._catch_up()
        self._taken, self._may_forget = self._taken - self.tokens, False
        self.length_B.sub_(self.tokens)

    def forget_all(self) -> None:
        """Go back to empty rows, for other sequences.

        ValueError where they began with tokens: their windows are lost; and between the layers of a
        step.
        """
        if any(self._begin) or self._due != self._ids:
            raise ValueError(
                f"got rows that began with {list(self._begin)} tokens, or half a step; wanted empty"
                " rows and whole steps; begin with a new cache"
            )
        self._catch_up()
        self._taken, self._may_forget = 0, False
        self.length_B.zero_()

    def count_replay(self) -> None:
        """Record the replay of a one-step graph: the device has advanced, and nothing ran on the
        host.
        """
        self._taken, self._may_forget = self._taken + self.tokens, True

    def replayed(self, cache: NSACache | DenseCache) -> None:
        """The host's part of `took`, after a replay of the device's."""
        self._due.discard(id(cache))
        if not self._due:
            self._due = set(self._ids)
            self.count_replay()

    @property
    def is_between(self) -> bool:
        """Whether no layer is ahead of another, so that all caches hold as many tokens."""
        return len(self._due) == len(self._ids)

    @contextmanager
    def unmoved(self) -> Iterator[None]:
        """Restore the lengths after the steps within: a graph's capture runs the host's part of a
        step, and not the device's.
        """
        kept, kept_B = (self._taken, self._may_forget), self.length_B.clone()
        try:
            yield
        finally:
            (self._taken, self._may_forget), self._due = kept, set(self._ids)
            self.length_B.copy_(kept_B)

    def end(self) -> None:
        """Make the caches ordinary again, with what they took. Does nothing the second time."""
        self._due = set(self._ids)  # a token that only some layers took is none
        self.replays = {}
        for cache in (held() for held in self._caches):
            if cache is not None and cache.steps is self:
                tail: list[Tensor] = []
                if isinstance(cache, NSACache):
                    with torch.inference_mode(False), torch.no_grad():
                        tail = [self._tail(ring, cache) for ring in cache.raw]
                        if self.tokens > 1:
                            cache.win = [self._window(x, cache.window) for x in cache.win]
                cache.end_steps(self.lengths_of(cache), tail)

    def took(self, cache: NSACache | DenseCache) -> None:
        """Record that ``cache`` has taken the step's tokens; the last one moves the length on."""
        self._due.discard(id(cache))
        if not self._due:  # the last layer
            self._due = set(self._ids)
            self._may_forget = True
            if torch.compiler.is_compiling():  # a number that is read would be the graph's own
                self._lags = True
            else:
                self._taken += self.tokens
            self.length_B.add_(self.tokens)

    def _check_due(self, cache: NSACache | DenseCache) -> None:
        if id(cache) not in self._due:
            raise ValueError(
                "got a second token for a cache while another layer waits for the first; wanted one"
                " each; step all layers"
            )

    def _catch_up(self) -> None:
        if self._lags:
            self._taken, self._lags = int(self.length_B[0]) - self._begin[0], False

    def _from_B1(self, cache: NSACache) -> Tensor:
        """Position [B, 1] of the first token that the next block covers: C * d, at each row's
        length.
        """
        starts = [cache.grid.num_cmp(n) * cache.config.cmp_stride for n in self.lengths_of(cache)]
        return to_device(starts, self.length_B.device)[:, None]

    def _rings(self, cache: NSACache) -> tuple[list[Tensor], list[Tensor]]:
        """The raw tokens' and the window's, of what ``cache`` holds."""
        raw = [self._ring(tail, cache) for tail in cache.tail]
        if self.tokens == 1:
            return raw, cache.win
        rows = Step.window_rows(cache.config, self._max_len, self.tokens)
        return raw, [self._window(x, rows) for x in cache.win]

    def _latest_BR(self, rows: int) -> Tensor:
        """The latest position of each row that is s modulo ``rows``, of each slot s; negative where
        there is none.
        """
        last_B1 = self.length_B[:, None] - 1
        return last_B1 - (last_B1 - torch.arange(rows, device=last_B1.device)) % rows

    def _window(self, ring_BWGD: Tensor, rows: int) -> Tensor:
        """The same tokens in a ring of ``rows``; 0 where the old one had none."""
        old, position_BR = ring_BWGD.shape[1], self._latest_BR(rows)
        held_BR = (position_BR >= 0) & (position_BR >= self.length_B[:, None] - old)
        fresh = _taken_rows(ring_BWGD, (position_BR % old)[..., None, None])
        return fresh.masked_fill(~held_BR[..., None, None], 0)

    def _ring(self, tail_BIGD: Tensor, cache: NSACache) -> Tensor:
        """The tail's tokens as a ring: slot s holds the latest whose position is s modulo its rows;
        0 where none is needed.
        """
        rows = Step.raw_rows(cache.config, self.tokens)
        index_BR = self._latest_BR(rows) - self._from_B1(cache)
        padded = torch.nn.functional.pad(tail_BIGD, (0, 0, 0, 0, 0, 1))  # l = 1 leaves no tail
        ring = _taken_rows(padded, index_BR.clamp(min=0)[..., None, None])
        return ring.masked_fill(index_BR[..., None, None] < 0, 0)

    def _tail(self, ring_BRGD: Tensor, cache: NSACache) -> Tensor:
        """The inverse of `_ring`: the raw tokens from C * d on, [B, l - 1, G, D]."""
        token = torch.arange(cache.config.cmp_block - 1, device=ring_BRGD.device)
        slot_BI = (self._from_B1(cache) + token) % ring_BRGD.shape[1]
        return _taken_rows(ring_BRGD, slot_BI[..., None, None])


def _taken_rows(ring_BRGD: Tensor, slot_BN11: Tensor) -> Tensor:
    """[B, N, G, D]."""
    return ring_BRGD.gather(1, slot_BN11.expand(-1, -1, *ring_BRGD.shape[2:]))


def _check_tokens(tokens: int, caches: Sequence[NSACache | DenseCache]) -> None:
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        raise ValueError(
            f"got tokens={tokens!r} a step; wanted a whole number of at least 1; give how many each"
            " call takes"
        )
    if tokens > caches[0].max_len:
        raise ValueError(
            f"got {tokens} tokens a step for caches of max_len={caches[0].max_len}; wanted at most"
            " as many; make the caches larger, or the steps smaller"
        )
