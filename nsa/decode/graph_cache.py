"""Steps: caches that take one token a row at a time, their lengths on the device: a decode step
without the host.

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
from nsa.decode.views import KV, CompressFn, DenseStep, Step, View
from nsa.ops.positions import to_device


class Steps:
    """Turns caches of one history, one a layer, into ones that take a token a row at a time; `end`
    turns them back.

    Their ``append``, and a forward with them, then takes ids or states of one token a row, without
    num_tokens; rows may differ in length and advance together. The buffers grow to max_len first,
    since a graph holds their addresses. Each layer also keeps its last l raw tokens in a
    ring. The window is attended to where it lies in its ring: a query sees all of it, in whatever
    order. A step that is run again from the same position leaves what it left before.

    Under torch.compile all steps are one graph: nothing in it has a length as a number, and the
    host learns what they took when it is asked, by waiting for the device.

    ValueError for caches that do not hold the same, or that other Steps have already.
    """

    def __init__(self, caches: Sequence[NSACache | DenseCache]) -> None:
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
        self._lags = False  # compiled steps are not counted as they run
        # what steps write to must not belong to the inference_mode that they may be made in
        with torch.inference_mode(False), torch.no_grad():
            self.length_B = to_device(self._begin, first.kv[0].device)
            for cache in caches:
                cache.grow(cache.max_len)
            rings = [
                [self._ring(tail, c) for tail in c.tail] if isinstance(c, NSACache) else []
                for c in caches
            ]
        for cache, ring in zip(caches, rings, strict=True):  # all or none, where memory ends
            cache.begin_steps(self, ring)

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
        taken = self._taken + (id(cache) not in self._due)
        return tuple(n + taken for n in self._begin)

    def next(self, config: NSAConfig) -> Step:
        """Where the next token goes in caches of ``config``. ValueError where no room is left."""
        self.check_room()
        # the last layer's append moves length_B on while the position is in use
        return Step(self.length_B.clone(), config, self._max_len)

    def next_dense(self) -> DenseStep:
        """As `next`, in caches of full causal attention."""
        self.check_room()
        p_B = self.length_B.clone()
        return DenseStep(p_B, p_B.int(), p_B[:, None, None, None])

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
        """What `NSACache.append` does, of one token a row; ``step`` is that of this forward, made
        here where it is not given.
        """
        self.check_turn(cache, {"cmp": kv_cmp, "sel": kv_sel, "win": kv_win}, num_tokens)
        step = self.next(cache.config) if step is None else step
        for buffers, row_B111, kv in (
            (cache.sel, step.sel_B111, kv_sel),
            (cache.win, step.win_B111, kv_win),
            (cache.raw, step.raw_B111, kv_cmp),
        ):
            for buffer, x in zip(buffers, kv, strict=True):
                buffer.scatter_(1, row_B111.expand_as(x), x)
        raw_k, raw_v = (ring.gather(1, step.block_BL11.expand_as(ring)) for ring in cache.raw)
        for buffer, x in zip(cache.cmp, compress(raw_k, raw_v, step.block_B), strict=True):
            buffer.scatter_(1, step.cmp_B111.expand_as(x), x)
        self.took(cache)
        k_cmp, v_cmp = (x[:, :-1] for x in cache.cmp)
        k, v = (x[:, :-1] for x in cache.sel)
        return View(
            cmp=(k_cmp, v_cmp),
            sel=(k, v),
            win=(cache.win[0], cache.win[1]),
            q_start=step.position_B,
            win_start=step.win_start_B,
        )

    def check_turn(
        self,
        cache: NSACache | DenseCache,
        chunk: Mapping[str, KV],
        num_tokens: Sequence[int] | None,
    ) -> None:
        """ValueError unless ``chunk`` is one token for every row, and ``cache`` is due for one."""
        tokens = next(iter(chunk.values()))[0].shape[1]
        if tokens != 1 or num_tokens is not None:
            got = f"a chunk of {tokens} tokens" + (
                "" if num_tokens is None else f" with num_tokens={list(num_tokens)}"
            )
            raise ValueError(
                f"got {got} for a cache that steps; wanted one token for every row; end its Steps"
                " (or DecodeGraph) first"
            )
        check_chunk(cache, chunk, None)
        if id(cache) not in self._due:
            raise ValueError(
                "got a second token for a cache while another layer waits for the first; wanted one"
                " each; step all layers"
            )

    def check_room(self) -> None:
        """ValueError where a row is full: the host counts, so that no step writes beyond. In a
        compiled step the device looks: a RuntimeError on a CPU, an assert on CUDA, after which the
        process has lost its GPU. Call this before such a step where a row may be full.
        """
        if torch.compiler.is_compiling():
            torch._assert_async(
                (self.length_B < self._max_len).all(),
                f"got a token for a row that holds max_len={self._max_len}; wanted room; make"
                " the cache larger with NSACache.empty(max_len=...)",
            )
            return
        self._catch_up()
        longest, room = max(self._begin) + self._taken, self._max_len
        if longest >= room:
            raise ValueError(
                f"a row would hold {longest + 1} tokens; wanted at most max_len={room}, for which"
                " the cache has room; make it larger with NSACache.empty(max_len=...), or begin a"
                " new one"
            )

    def forget_last(self) -> None:
        """Go back by the last token: the next step takes its place.

        ValueError for a second in a row, whose window has lost a key.
        """
        if not self._may_forget or self._due != self._ids:
            raise ValueError(
                "got no whole step to forget; wanted one since the last that was forgotten; run a"
                " step of all layers"
            )
        self._catch_up()
        self._taken, self._may_forget = self._taken - 1, False
        self.length_B.sub_(1)

    def count_replay(self) -> None:
        """Record the replay of a one-step graph: the device has advanced, and nothing ran on the
        host.
        """
        self._taken, self._may_forget = self._taken + 1, True

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
        for cache in (held() for held in self._caches):
            if cache is not None and cache.steps is self:
                tail: list[Tensor] = []
                if isinstance(cache, NSACache):
                    with torch.inference_mode(False), torch.no_grad():
                        tail = [self._tail(ring, cache) for ring in cache.raw]
                cache.end_steps(self.lengths_of(cache), tail)

    def took(self, cache: NSACache | DenseCache) -> None:
        """Record that ``cache`` has taken the current token; the last one moves the length on."""
        self._due.discard(id(cache))
        if not self._due:  # the last layer
            self._due = set(self._ids)
            self._may_forget = True
            if torch.compiler.is_compiling():  # a number that is read would be the graph's own
                self._lags = True
            else:
                self._taken += 1
            self.length_B.add_(1)

    def _catch_up(self) -> None:
        if self._lags:
            self._taken, self._lags = int(self.length_B[0]) - self._begin[0], False

    def _from_B1(self, cache: NSACache) -> Tensor:
        """Position [B, 1] of the first token that the next block covers: C * d, at each row's
        length.
        """
        starts = [cache.grid.num_cmp(n) * cache.config.cmp_stride for n in self.lengths_of(cache)]
        return to_device(starts, self.length_B.device)[:, None]

    def _ring(self, tail_BIGD: Tensor, cache: NSACache) -> Tensor:
        """The tail's tokens as a ring [B, l, G, D]: slot s holds the latest whose position is s
        modulo l; 0 where none is needed.
        """
        l = cache.config.cmp_block  # noqa: E741
        last_B1 = self.length_B[:, None] - 1
        position_BL = last_B1 - (last_B1 - torch.arange(l, device=last_B1.device)) % l
        index_BL = position_BL - self._from_B1(cache)
        padded = torch.nn.functional.pad(tail_BIGD, (0, 0, 0, 0, 0, 1))
        ring = padded.gather(1, index_BL.clamp(min=0)[..., None, None].expand_as(padded))
        return ring.masked_fill(index_BL[..., None, None] < 0, 0)

    def _tail(self, ring_BLGD: Tensor, cache: NSACache) -> Tensor:
        """The inverse of `_ring`: the raw tokens from C * d on, [B, l - 1, G, D]."""
        l = cache.config.cmp_block  # noqa: E741
        slot_BI = (self._from_B1(cache) + torch.arange(l - 1, device=ring_BLGD.device)) % l
        return ring_BLGD.gather(1, slot_BI[..., None, None].expand(-1, -1, *ring_BLGD.shape[2:]))
