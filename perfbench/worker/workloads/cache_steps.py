"""Steps that go through an NSACache: decode, one token a step on a filled cache, and prefill in
chunks.

B batch, T tokens, G kv heads, D head dim.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nsa.attention import NSAAttention
from nsa.config import ModelConfig
from nsa.functional import compress_kv
from nsa.model import DenseLM, TinyLM
from perfbench.matrix import held_tokens, pieces
from perfbench.older_nsa import KV, KeysRead, Steps
from perfbench.records import CacheLine, Job
from perfbench.worker.workloads.made import Made

# Of the largest logit: the same kernels, but libraries may choose others for a graph; bf16 has 8
# bits.
REPLAY_TOLERANCE = 2**-5
NUM_COMPARED = 3  # replays
FILL_TOKENS = 2048  # appended at a time, so that little random K and V is alive next to the cache
Compress = Callable[[Tensor, Tensor, Tensor], KV]  # raw k, v and the first block -> blocks
Counts = dict[str, Tensor]  # branch -> keys that a call gathered, [B or 1, T] or [B, T, G]


class CachedSteps:
    """``run()`` enqueues one step of ``tokens_per_step`` tokens, without waiting for it.

    A decode step appends one random token a sequence to caches that hold ``tokens``, and yields its
    logits. A prefill step fills empty caches with ``tokens``, a chunk at a time, and yields every
    token's logits.

    Every step begins with caches of one length, and goes back to it by forgetting a length, without
    a copy or a sync. A decode step can begin so because it writes where the one before wrote: a row
    of K and V beyond the length, a slot of the ring that no window of this length reaches, a raw
    token behind those that are kept. It completes no compressed block (`held_tokens`).

    The dense twin's cache holds as many tokens, and its step leaves as little.

    ``stepping``: the caches step with their lengths on the device (`nsa.decode`), as in
    nsa.DecodeGraph and nsa.ChunkGraph, for ``body`` to be captured: the same tokens at the same
    place, which are then forgotten on the device. A captured prefill is one graph of all chunks.
    """

    def __init__(
        self,
        job: Job,
        config: ModelConfig,
        model: TinyLM | DenseLM,
        num_batches: int,
        *,
        stepping: bool = False,
    ) -> None:
        """Raises torch.OutOfMemoryError where the caches do not fit."""
        cell = job.axes
        batch, seq_len, decodes = cell.batch, cell.seq_len, cell.workload == "decode"
        self.model, self.decodes = model, decodes
        self.tokens = held_tokens(config, seq_len) if decodes else seq_len
        self.pieces = [(0, 1)] if decodes else pieces(cell)
        new = self.pieces[-1][1]
        self.tokens_per_step = batch * new
        self.begin: list[Any] = (
            self._filled(job) if decodes else list(model.new_cache(batch, seq_len))
        )
        self.batches = itertools.cycle(
            (ids,)
            for ids in torch.randint(
                config.vocab_size, (num_batches, batch, new), device=job.device
            )
        )
        self.steps = self._stepping() if stepping else None
        self.made = Made()
        # of the last `body`, for each piece; of a captured one, the graph's own memory
        self._logits: list[Tensor] = []
        self._counts: list[KeysRead] = []  # for each piece and cache

    def _filled(self, job: Job) -> list[Any]:
        """What a decode step goes through: for each layer a cache of ``tokens`` with room for one
        more.
        """
        caches: list[Any] = list(self.model.new_cache(job.axes.batch, self.tokens + 1))
        for cache, attention in zip(caches, self.attentions, strict=True):
            fill(cache, self.tokens, attention)
        return caches

    def _stepping(self) -> Steps | None:
        """The caches turned for captured steps."""
        begin, end = self.pieces[0]
        return Steps(self.begin, end) if end - begin > 1 else Steps(self.begin)

    @property
    def attentions(self) -> list[Any]:
        """The module of each layer."""
        blocks: list[Any] = list(self.model.blocks)
        return [block.attention for block in blocks]

    def ordinary(self) -> list[Any]:
        """For each layer what holds what a timed step begins with, and appends a token where it
        lies, for the proof of the step; the buffers are those of the step.
        """
        found = []
        for cache in self.begin:
            found.append(ordinary := copy.copy(cache))
            if cache.steps is not None:
                ordinary.end_steps([self.tokens] * cache.batch, getattr(cache, "tail", []))
        return found

    def body(self, ids_BT: Tensor) -> None:
        """One step with ``stepping``, of static shapes and without the host: a graph can hold
        it.
        """
        assert self.steps is not None
        self._forward(ids_BT)
        if self.decodes:
            self.steps.forget_last()
        else:
            self.steps.forget_all()

    def _forward(self, ids_BT: Tensor) -> None:
        """The model's calls of a step that a graph can hold."""
        self.made.begin(ids_BT)
        self._logits, self._counts = [], []
        with torch.no_grad():
            for begin, end in self.pieces:
                self._logits.append(self.model(ids_BT[:, begin:end], cache=self.begin))
                self._counts += self._take_counters()
        self.made.outputs = self._logits

    def _take_counters(self) -> list[KeysRead]:
        """Each cache's of the last call; the next one counts into others."""
        counters = [cache.keys_read for cache in self.begin]
        for cache in self.begin:
            cache.keys_read = KeysRead()
        return counters

    def replayed(self, replay: Callable[[], None]) -> Callable[[], None]:
        """A step whose work on the device is ``replay``, of a graph of `body`."""
        return replay

    def how_a_replay_differs(
        self, replay: Callable[[], None], inputs: Callable[[], Sequence[Tensor]]
    ) -> str:
        """Compares the logits of replays of `body`, which read ``inputs()``, with those of the same
        steps launched by the host.

        Empty where they agree. Several, since the ids of one may be those of the capture.
        """
        return next(
            filter(None, (self._how_one_differs(replay, inputs) for _ in range(NUM_COMPARED))), ""
        )

    def _how_one_differs(
        self, replay: Callable[[], None], inputs: Callable[[], Sequence[Tensor]]
    ) -> str:
        replay()
        graphs = self._logits, self._counts
        got = [logits_BTV.clone() for logits_BTV in self._logits]
        self.body(*inputs())
        wanted = self._logits
        (self._logits, self._counts), self.made.outputs = graphs, graphs[0]
        error = _largest(a - b for a, b in zip(got, wanted, strict=True))
        limit = REPLAY_TOLERANCE * _largest(wanted)
        if error <= limit:
            return ""
        return (
            f"a replay's logits differ by {error:.3g} from those of the same step launched by the"
            f" host; wanted at most {limit:.3g}; find what the graph does not hold, or measure with"
            " cuda_graph=off"
        )

    def run(self) -> None:
        self._step(None)

    def line(self, replay: Callable[[], None] | None = None) -> CacheLine:
        """What the caches hold, and the keys that one more step reads of them.

        With a ``replay`` of the captured step that is the step, and the keys are counted from what
        it wrote: the graph's own blocks and positions, which the counters of the capture know.
        """
        counted: list[Counts] = []
        if replay is None:
            self._step(counted)
        else:
            replay()
            counted += [dict(counts) for counts in self._counts]
        return CacheLine(
            tokens=self.tokens,
            memory_bytes=self.memory_bytes(),
            keys_read=mean_keys_read(counted),
        )

    def memory_bytes(self) -> int:
        """Of the caches of all layers."""
        return sum(cache.memory_bytes() for cache in self.begin)

    def _step(self, counted: list[Counts] | None) -> None:
        # A copy has a length of its own and the buffers of the original: the next step begins where
        # this one did.
        caches, (ids_BT,) = [copy.copy(cache) for cache in self.begin], next(self.batches)
        self.made.begin(ids_BT)
        with torch.no_grad():
            for begin, end in self.pieces:
                logits_BTV = self.model(ids_BT[:, begin:end], cache=caches)
                if self.made.keep:
                    self.made.outputs.append(logits_BTV)
                del logits_BTV
                if counted is not None:
                    counted += [dict(cache.keys_read) for cache in caches]


@torch.no_grad()
def fill(
    cache: Any, tokens: int, attention: nn.Module, generator: torch.Generator | None = None
) -> None:
    """Append ``tokens`` random tokens a row to the cache of the layer ``attention``, an NSACache
    compressed as the layer does, or a DenseCache; drawn by ``generator``, or torch's own.
    """
    if not isinstance(attention, NSAAttention):
        for begin in range(0, tokens, FILL_TOKENS):
            cache.append(_random(cache.kv, cache.batch, min(FILL_TOKENS, tokens - begin)))
        return
    compress = compression_of(attention)
    for chunk in random_chunks(cache, tokens, generator):
        cache.append(*chunk, compress=compress)


def compression_of(attention: NSAAttention) -> Compress:
    """How the layer makes compressed K and V of raw ones."""
    phi_params = (attention.phi_k.params(), attention.phi_v.params())

    def compress(k: Tensor, v: Tensor, first_block: Tensor) -> KV:
        return compress_kv(k, v, first_block, config=attention.config, phi_params=phi_params)

    return compress


def random_chunks(
    cache: Any, tokens: int, generator: torch.Generator | None = None
) -> Iterator[tuple[KV, KV, KV]]:
    """(compressed, selected, window branch's) raw K and V of ``tokens`` random tokens a row, a
    chunk at a time: the same for caches of one shape by generators of one seed.
    """
    for begin in range(0, tokens, FILL_TOKENS):
        new = min(FILL_TOKENS, tokens - begin)
        kv_cmp, kv_sel, kv_win = (_random(cache.sel, cache.batch, new, generator) for _ in range(3))
        yield kv_cmp, kv_sel, kv_win


def _random(
    buffers: Sequence[Tensor],
    batch: int,
    tokens: int,
    generator: torch.Generator | None = None,
) -> KV:
    k, v = (x.new_empty(batch, tokens, *x.shape[2:]).normal_(generator=generator) for x in buffers)
    return k, v


def _largest(tensors: Iterable[Tensor]) -> float:
    """NaN where one holds a NaN, which Python's max would drop."""
    return float(torch.stack([x.float().abs().max() for x in tensors]).max())


def mean_keys_read(counted: Sequence[Counts]) -> dict[str, float]:
    """Keys a query and kv head for each branch: the mean over the queries of all calls, rows of the
    batch and kv heads.
    """
    means: dict[str, float] = {}
    for branch in counted[0]:
        keys = [count[branch].double() for count in counted]
        means[branch] = float(
            torch.cat([x.reshape(*x.shape[:2], -1).mean((0, 2)) for x in keys]).mean()
        )
    return means
