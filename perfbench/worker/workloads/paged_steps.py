"""Decode steps over pages: a PagedCache that holds a full batch, one token a row a step.

B batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from perfbench import older_nsa
from perfbench.records import Job
from perfbench.worker.workloads.cache_steps import (
    CachedSteps,
    Compress,
    compression_of,
    fill,
    random_chunks,
)

if TYPE_CHECKING:  # an older nsa has no pages, and none is asked for there
    from perfbench.older_nsa import NSACache, PagedCache, Steps, View

SEEDS_APART = 1_000_003  # between the keys and values of two layers


class PagedSteps(CachedSteps):
    """`CachedSteps` of a decode cell whose keys lie in the pages of one PagedCache of all layers.

    A step is one of a server between two that need a page: it plans, which writes counts and takes
    the host some microseconds a row, and runs the model; with a graph it replays that. Then each
    row is as long as before, by a number on the host, and keeps the page of the forgotten token,
    as it would keep it for the next one. (`PagedCache.truncate` frees that page, and the next plan
    would look at all pages of all rows: milliseconds that 63 steps of 64 do not take.)
    """

    pages: PagedCache

    def _filled(self, job: Job) -> list[Any]:
        batch, room = job.axes.batch, self.tokens + 1
        self.pages = older_nsa.PagedCache.of(self.model, batch, room)
        self._seed, self._device = job.seed, job.device
        rows = [self.pages.join() for _ in range(batch)]
        assert rows == list(range(batch))
        with torch.no_grad():
            # a plan is for all layers, so each chunk goes through them all
            drawn = [
                random_chunks(cache, self.tokens, self._generator(layer))
                for layer, cache in enumerate(self.pages.layers)
            ]
            compress = [compression_of(attention) for attention in self.attentions]
            for chunks in zip(*drawn, strict=True):
                self.pages.plan(chunks[0][0][0].shape[1])
                for cache, chunk, own in zip(self.pages.layers, chunks, compress, strict=True):
                    cache.append(*chunk, compress=own)
        return list(self.pages.layers)

    def _generator(self, layer: int) -> torch.Generator:
        return torch.Generator(self._device).manual_seed(self._seed + SEEDS_APART * (layer + 1))

    def _stepping(self) -> Steps | None:
        return None  # counts and tables are the device's already

    def body(self, ids_B1: Tensor) -> None:
        """One step as it was planned, of static shapes and without the host: a graph can hold it.

        Run again it writes the same token to the same place.
        """
        with self.pages.static():
            self._forward(ids_B1)

    def replayed(self, replay: Callable[[], None]) -> Callable[[], None]:
        """A step whose work on the device is ``replay``, of a graph of `body`."""

        def step() -> None:
            self.pages.plan()
            replay()
            self.pages.taken()
            self._forget()

        return step

    def _step(self, counted: list[dict[str, Tensor]] | None) -> None:
        (ids_B1,) = next(self.batches)
        self.made.begin(ids_B1)
        with torch.no_grad():
            self.made.outputs = [self.model(ids_B1, cache=self.pages.layers)]
        self._forget()
        if counted is not None:
            counted += [dict(cache.keys_read) for cache in self.pages.layers]

    def _forget(self) -> None:
        for row in self.pages.rows.rows:
            assert row is not None
            row.length = self.tokens

    def memory_bytes(self) -> int:
        """Of all pages, their tables and counts."""
        return self.pages.memory_bytes()

    def ordinary(self) -> list[Any]:
        """As `CachedSteps.ordinary`, drawn again into contiguous caches, one layer at a time: what
        a page holds, and whose it is, is never asked of the pages.
        """
        return [
            DrawnAgain(partial(self._contiguous, layer), (self.tokens,) * self.pages.max_batch)
            for layer in range(len(self.pages.layers))
        ]

    def _contiguous(self, layer: int) -> NSACache:
        attention = self.attentions[layer]
        cache: NSACache = attention.new_cache(self.pages.max_batch, self.tokens + 1)
        fill(cache, self.tokens, attention, self._generator(layer))
        return cache


@dataclass(frozen=True, slots=True)
class DrawnAgain:
    """A cache that is there while a token is appended to it, and gone with the view."""

    make: Callable[[], NSACache]
    lengths: tuple[int, ...]

    def append(self, *kv: Any, compress: Compress) -> View:
        return self.make().append(*kv, compress=compress)
