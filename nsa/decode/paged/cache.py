"""PagedCache: the keys and values of all layers in pages, for a batch whose rows join and leave.

B rows of the largest batch, T tokens of a chunk, L layers, N pages of a pool, P entries a page, G
kv heads, D head dim, l compressed block, d its stride, w window.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from nsa import checks
from nsa.blocks import BlockGrid
from nsa.capability import probe
from nsa.config import NSAConfig
from nsa.decode.cache import NSACache, check_kind
from nsa.decode.paged.pools import PageShape, checked_scales, default_pages, zeros
from nsa.decode.paged.rows import (
    COMPRESSED,
    GROUPS,
    POOL,
    RAW,
    TOKENS,
    WINDOW,
    HeldPages,
    PagedRows,
)
from nsa.decode.views import KV, CompressFn, PagedView, Step
from nsa.ops import decode_step, paged
from nsa.ops.key_counts import KeysRead
from nsa.ops.positions import to_device

ROLLBACK = 64  # tokens that a row may go back by
FP8_SINCE = (8, 9)  # compute capability whose instructions convert float8_e4m3fn
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FEW_ROWS = 8  # of a table that changed: up to here they are copied by themselves


class HasLayers(Protocol):
    """A TinyLM, as far as a cache needs it."""

    @property
    def blocks(self) -> nn.ModuleList: ...


class PagedCache:
    """Keys and values of all layers of a model, in pages of l' tokens: a selected block is a page.

    A row is a place in the batch: `join` gives one, `leave` frees its pages. `plan` allocates, once
    a step for all layers; then each layer stores and attends (`layers`, one PagedLayer each, which
    NSAAttention and TinyLM take as they take an NSACache). Without a plan the first layer's chunk
    makes one. Three pools of pages: ``tokens`` of the selected branch, ``window``, ``compressed``
    with the raw tokens from which the next block is made. Rows share pages after `join` of what was
    held, and after `reorder`; a page that is shared is copied before it is written to.

    Device tensors, at one address for good, which a plan alone writes: ``block_table`` int32 [B,
    ceil(max_len / P)] (and ``window_table``, ``raw_table``, ``compressed_table``), -1 where there
    is no page; ``seq_lens`` int32 [B], the tokens of each row with this step's; ``num_new`` int32
    [B], this step's. So a CUDA graph may hold a step of any rows (PagedGraph).
    """

    def __init__(
        self,
        configs: Sequence[NSAConfig],
        max_batch: int,
        max_len: int,
        shape: PageShape,
        *,
        num_pages: int | Mapping[str, int] | None = None,
        rollback: int = ROLLBACK,
    ) -> None:
        """Room for ``max_batch`` rows of up to ``max_len`` tokens each in layers of ``configs``.

        ``num_pages``: of the pool of tokens, or of pools by name (tokens, window, compressed); by
        default enough for full rows that share nothing. ``rollback``: how many tokens `truncate`
        may go back at least. ValueError for sizes below 1, layers whose blocks or windows differ,
        and configs whose number of chosen blocks depends on the length.
        """
        if not configs:
            raise ValueError("got no configs; wanted one a layer; give those of the model's layers")
        for name, value in {
            "max_batch": max_batch,
            "max_len": max_len,
            "rollback": rollback,
        }.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(
                    f"PagedCache {name}={value!r}; wanted a whole number of at least 1; give how"
                    " many rows, tokens a row, or tokens to go back by"
                )
        for config in configs:
            checks.fixed_selection(config, whole=False, what="a cache")
        kinds = {(c.cmp_block, c.cmp_stride, c.sel_block, c.window) for c in configs}
        if len(kinds) > 1:
            raise ValueError(
                f"got layers of (cmp_block, cmp_stride, sel_block, window) {sorted(kinds)}; wanted"
                " one for all, since they share their tables; make a cache for each kind"
            )
        self.grid, self.max_batch, self.max_len = BlockGrid.of(configs[0]), max_batch, max_len
        self.shape, self.page = shape, self.grid.sel_block
        given = num_pages if isinstance(num_pages, Mapping) else {}
        pools = default_pages(self.grid, max_batch, max_len, rollback)
        if isinstance(num_pages, int):
            pools[TOKENS] = num_pages
        if unknown := set(given) - set(pools):
            raise ValueError(
                f"got num_pages of {sorted(unknown)}; wanted pools of {sorted(pools)}; rename them"
            )
        self.rows = PagedRows(self.grid, max_batch, max_len, pools | dict(given), rollback)
        self.device = torch.device(shape.device)
        self.has_kernels = self._has_kernels()
        self._make_tensors(len(configs))
        self.layers = [PagedLayer(self, i, config) for i, config in enumerate(configs)]
        self._due: set[int] = set()  # layers that have not taken the planned step yet
        self._planned: list[int] = [0] * max_batch
        self._first: list[dict[str, int]] = []
        self.is_static = False

    @classmethod
    def of(
        cls,
        model: HasLayers,
        max_batch: int,
        max_len: int,
        *,
        num_pages: int | Mapping[str, int] | None = None,
        rollback: int = ROLLBACK,
        scales: tuple[Tensor, Tensor] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """For all layers of a TinyLM, in the weights' dtype (or ``dtype``) on their device; the
        rest as in `PagedCache` and `PageShape`.
        """
        attention: list[Any] = [block.attention for block in model.blocks]
        plain = attention[0].new_cache(1, 1, dtype=dtype)
        k, v = plain.sel
        shape = PageShape(k.shape[2], k.shape[3], v.shape[3], k.dtype, k.device, scales)
        configs = [layer.config for layer in attention]
        return cls(configs, max_batch, max_len, shape, num_pages=num_pages, rollback=rollback)

    def _has_kernels(self) -> bool:
        found = probe(str(self.device))
        if found.triton_provider is None or not paged.has_kernels_of(self.page):
            return False
        if self.shape.scales is not None and (found.sm or (0, 0)) < FP8_SINCE:
            return False
        return self.shape.dtype in KERNEL_DTYPES

    def _make_tensors(self, layers: int) -> None:
        shape, device, rows = self.shape, self.device, self.rows
        heads = (shape.num_kv_heads, shape.head_dim), (shape.num_kv_heads, shape.v_head_dim)
        with torch.inference_mode(False):
            self._scales = self._scales_of(layers)
            self._pools: dict[str, list[Tensor]] = {}
            for name, pool in rows.pools.items():
                fp8 = shape.scales is not None and name != COMPRESSED
                dtype = torch.float8_e4m3fn if fp8 else shape.dtype
                # the last page takes what is not kept
                sizes = [(layers, pool.num_pages + 1, self.page, *one) for one in heads]
                self._pools[name] = zeros(sizes, dtype, device, name)
            # one copy writes what a step is, of which two int32 are a number
            self._of_step = torch.zeros(3, self.max_batch, dtype=torch.int64, device=device)
            self._tables = torch.full(
                (self.max_batch, rows.width), -1, dtype=torch.int32, device=device
            )
            # not pinned: a queued copy from it takes what it holds now, whatever is planned next
            host = torch.frombuffer(rows.table, dtype=torch.int32)
            self._host_tables = host.view(self.max_batch, rows.width)
        # positions of each row's first new token and of its last one; -1 where a row holds none
        self.start_B, self._last_B, counts = self._of_step
        self._last_B.fill_(-1)
        self.seq_lens, self.num_new = counts.view(torch.int32).view(2, self.max_batch)
        self.block_table, self.window_table, self.raw_table, self.compressed_table = (
            self._tables[:, rows.columns[g] : rows.columns[g] + rows.widths[g]] for g in GROUPS
        )

    def _scales_of(self, layers: int) -> tuple[Tensor, Tensor] | None:
        if self.shape.scales is None:
            return None
        k, v = (
            checked_scales(x, layers, self.shape.num_kv_heads).to(self.device)
            for x in self.shape.scales
        )
        return k, v

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each row, with those of a step that is planned; 0 where none has joined."""
        return self.rows.lengths

    def free_pages(self) -> dict[str, int]:
        """Of each pool."""
        return {name: pool.num_free for name, pool in self.rows.pools.items()}

    def memory_bytes(self) -> int:
        """Bytes of all pages, tables and counts."""
        pools = sum(x.nbytes for pair in self._pools.values() for x in pair)
        return pools + self._of_step.nbytes + self._tables.nbytes

    def join(self, held: HeldPages | None = None) -> int:
        """A place in the batch for a new row, empty or with what was ``held``, whose pages it
        shares. ValueError where all max_batch are taken, and for what was dropped or is another
        cache's.
        """
        self._check_idle()
        return self.rows.join(held)

    def leave(self, row: int) -> None:
        """Free the place and the pages of ``row``, but for those that others share."""
        self._check_idle()
        self.rows.leave(row)

    def hold(self, row: int) -> HeldPages:
        """What ``row`` holds now, for rows that begin alike (`join`); it takes no place in the
        batch, and its pages stay until `drop`.
        """
        self._check_idle()
        return self.rows.hold(row)

    def drop(self, held: HeldPages) -> None:
        """Free the pages of ``held``, but for those that rows share. Does nothing the second
        time.
        """
        self.rows.drop(held)

    def truncate(self, row: int, length: int) -> None:
        """Take ``row`` back to its first ``length`` tokens, exactly: the next step continues as if
        the others had never been. At least ``rollback`` tokens may go; ValueError beyond what the
        window and the raw tokens hold.
        """
        self._check_idle()
        self.rows.truncate(row, length)

    def reorder(self, sources: Sequence[int]) -> None:
        """Row b becomes what row ``sources[b]`` was, for beam search; no key is copied until rows
        that share a page write to it. ValueError unless there is one a row, each joined; a place
        without a row may name itself.
        """
        self._check_idle()
        self.rows.reorder(checks.counts("sources", sources))

    def plan(self, num_tokens: int | Sequence[int] = 1) -> None:
        """Prepare a step for all layers: ``num_tokens`` of each row that has joined, or one number
        for each of the max_batch places.

        Allocates pages, copies those that other rows share, and writes the tables and counts on
        the device; the host does not wait. ValueError where a row would exceed max_len, or while a
        planned step was not taken by all layers; OutOfPages (a RuntimeError), and nothing planned,
        where a pool has too few free.
        """
        self._check_idle()
        if isinstance(num_tokens, int):
            counts = [0 if row is None else num_tokens for row in self.rows.rows]
        else:
            counts = list(checks.counts("num_tokens", num_tokens))
        if len(counts) != self.max_batch or min(counts) < 0 or max(counts) < 1:
            raise ValueError(
                f"got num_tokens={num_tokens!r} for {self.max_batch} places, of which"
                f" {sum(row is not None for row in self.rows.rows)} have a row; wanted that many"
                " whole numbers, one at least 1; give 0 for a row that waits"
            )
        first = [{} if row is None else dict(row.first) for row in self.rows.rows]
        writes = self.rows.plan(counts)
        self._planned, self._first = counts, first
        self._due = set(range(len(self.layers)))
        with torch.inference_mode(False), torch.no_grad():
            for name, pairs in writes.copies.items():
                self._copy(name, pairs)
            self._upload(sorted(writes.changed))

    def cancel(self) -> None:
        """Take back a planned step that some layer has not taken, such as one that failed: rows
        hold again what they held before it.
        """
        if self._due:
            self.rows.undo(self._planned, self._first)
            self._due = set()

    def taken(self) -> None:
        """Record that all layers took the planned step: a CUDA graph's replay did."""
        self._due = set()

    @contextmanager
    def static(self) -> Iterator[None]:
        """Within, chunks have the shapes of the largest step and positions of the device alone, and
        are not counted: for warm-up and capture of a graph.
        """
        self.is_static = True
        try:
            yield
        finally:
            self.is_static = False

    def clear_counts(self) -> None:
        """Make the device see rows without a token until the next plan."""
        self._check_idle()
        self._of_step.zero_()
        self._last_B.fill_(-1)

    def _check_idle(self) -> None:
        if self._due:
            raise ValueError(
                f"got a change of rows while layers {sorted(self._due)} have not taken the planned"
                " step; wanted all of them to take it first; run the model, or cancel the plan"
            )

    def _copy(self, name: str, pairs: Sequence[tuple[int, int]]) -> None:
        if pairs:
            source, to = to_device([n for pair in pairs for n in pair], self.device).view(-1, 2).T
            for pool in self._pools[name]:
                moved = pool.view(torch.uint8) if pool.dtype == torch.float8_e4m3fn else pool
                moved[:, to] = moved[:, source]

    def _upload(self, changed: Sequence[int]) -> None:
        lengths, new = self.rows.lengths, self._planned
        counts = torch.tensor([*lengths, *new], dtype=torch.int32).view(torch.int64)
        positions = [a - n for a, n in zip(lengths, new, strict=True)] + [a - 1 for a in lengths]
        of_step = torch.cat([torch.tensor(positions), counts]).view(3, -1)
        self._of_step.copy_(of_step, non_blocking=True)
        if len(changed) > FEW_ROWS:
            self._tables.copy_(self._host_tables, non_blocking=True)
            return
        for b in changed:
            self._tables[b].copy_(self._host_tables[b], non_blocking=True)

    def pages_of(self, layer: int) -> paged.LayerPages:
        """The pages of one layer as the device sees them in the planned step."""
        tables = {
            TOKENS: self.block_table,
            WINDOW: self.window_table,
            RAW: self.raw_table,
            COMPRESSED: self.compressed_table,
        }
        of = {}
        for group in GROUPS:
            k, v = (x[layer] for x in self._pools[POOL[group]])
            scales = None
            if self._scales is not None and POOL[group] != COMPRESSED:
                scales = self._scales[0][layer], self._scales[1][layer]
            of[group] = paged.Pages(k, v, tables[group], scales)
        longest = self.max_len if self.is_static else max(self.rows.lengths)
        return paged.LayerPages(
            cmp=of[COMPRESSED],
            raw=of[RAW],
            sel=of[TOKENS],
            win=of[WINDOW],
            start_B=self.start_B,
            seq_lens=self.seq_lens,
            max_tokens=longest,
        )

    def step_of(self, layer: int) -> tuple[decode_step.Buffers, decode_step.StepPages]:
        """The pages of one layer for a step of one token a row, of whatever length: that of a row
        of max_len tokens, as in a graph.
        """
        names = (TOKENS, WINDOW, COMPRESSED, COMPRESSED)
        pools = [x[layer] for name in names for x in self._pools[name]]
        tables = (self.block_table, self.window_table, self.raw_table, self.compressed_table)
        held = decode_step.RowRoom(
            self.max_len, self.layers[layer].window, self.grid.num_cmp(self.max_len)
        )
        of_rows = decode_step.StepPages(*tables, self.seq_lens, self._last_B, held)
        return decode_step.Buffers(*pools), of_rows

    def starts_of(self, layer: int) -> tuple[int, ...]:
        """Tokens of each row before the chunk that ``layer`` takes next."""
        planned = self._planned if layer in self._due else [0] * self.max_batch
        return tuple(n - new for n, new in zip(self.rows.lengths, planned, strict=True))

    def begin(self, layer: int, T: int, num_tokens: Sequence[int] | None) -> list[int]:
        """The tokens that each row adds in ``layer``'s chunk of T: those planned, or a plan of its
        own where no step is. ValueError where they are not the chunk's.
        """
        if not self._due:
            self.plan(self._counts_of(T, num_tokens))
        elif layer not in self._due:
            raise ValueError(
                "got a second token for a layer while another waits for the first; wanted one"
                " chunk each; step all layers"
            )
        new = self._planned
        if max(new) > T or (num_tokens is not None and list(num_tokens) != new):
            raise ValueError(
                f"got a chunk of {T} tokens with num_tokens={num_tokens}; wanted the planned"
                f" {new}; give the chunk and the plan the same"
            )
        self._due.discard(layer)
        return new

    def _counts_of(self, T: int, num_tokens: Sequence[int] | None) -> list[int]:
        B = self.max_batch
        if num_tokens is None:
            return [0 if row is None else T for row in self.rows.rows]
        new = list(num_tokens)
        if len(new) != B or min(new) < 0 or max(new) != T:
            raise ValueError(
                f"num_tokens={new} for a chunk [{B}, {T}]; wanted {B} numbers from 0 to {T}, the"
                f" largest being {T}; trim the padding"
            )
        return new


class PagedLayer(NSACache):
    """One layer of a PagedCache, taken wherever an NSACache is; ``PagedCache.layers`` has them."""

    # what to do where a step ended in an error between two layers
    undo = "take the step back with cancel() of the PagedCache, and run it again"

    def __init__(self, owner: PagedCache, index: int, config: NSAConfig) -> None:
        self.owner, self.index = owner, index
        self.config, self.grid = config, owner.grid
        self.batch, self.max_len, self.capacity = owner.max_batch, owner.max_len, owner.max_len
        self.window = min(config.window, owner.max_len)
        self.keys_read = KeysRead()
        self.steps = None
        # no memory: of what kind a chunk's k and v are
        shape = owner.shape
        self.sel = [
            torch.empty(1, dtype=shape.dtype, device=owner.device).expand(
                owner.max_batch, 1, shape.num_kv_heads, dim
            )
            for dim in (shape.head_dim, shape.v_head_dim)
        ]
        # of the pools and tables, which stay at their addresses
        self._place: tuple[decode_step.Buffers, decode_step.StepPages] | None = None

    def against_step(self) -> list[str]:
        """What keeps one operator (`nsa.decode.one_step`) from these pages."""
        owner = self.owner
        if owner.shape.scales is not None:
            return ["it reads no float8"]
        if not owner.has_kernels:
            of = f"pages of {owner.page} entries of {owner.shape.dtype} on {owner.device}"
            return [f"no kernel reads {of}"]
        return []

    def begin_step(
        self, chunk: Mapping[str, KV], num_tokens: Sequence[int] | None
    ) -> tuple[decode_step.Buffers, decode_step.StepPages | None]:
        """What `nsa.decode.one_step.begin` gives; a row that takes no token stores none."""
        check_kind(self.batch, self.sel, chunk)
        if not self.owner.is_static:
            self.owner.begin(self.index, 1, num_tokens)
        if self._place is None:
            self._place = self.owner.step_of(self.index)
        return self._place

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens that each row holds, without those of a step that this layer has yet to take."""
        return self.owner.starts_of(self.index)

    def q_start(self, device: torch.device) -> int | Tensor:
        """Position of the next token: an int where all rows are alike, else int64 [B]."""
        if self.owner.is_static:
            return self.owner.start_B.clone()
        starts = self.lengths
        return starts[0] if len(set(starts)) == 1 else to_device(starts, device)

    def memory_bytes(self) -> int:
        """This layer's part of all pages."""
        return self.owner.memory_bytes() // len(self.owner.layers)

    def append(
        self,
        kv_cmp: KV,
        kv_sel: KV,
        kv_win: KV,
        *,
        compress: CompressFn,
        num_tokens: Sequence[int] | None = None,
        step: Step | None = None,
    ) -> PagedView:
        """Store a chunk of T tokens a row (of row b those that are planned) and return what its
        queries attend to; as `NSACache.append`.
        """
        owner, T = self.owner, kv_sel[0].shape[1]
        check_kind(self.batch, self.sel, {"cmp": kv_cmp, "sel": kv_sel, "win": kv_win})
        uniform_start, most = None, (T - 1) // self.config.cmp_stride + 1
        if not owner.is_static:
            starts = self.lengths
            new = owner.begin(self.index, T, num_tokens)
            most = max(
                self.grid.num_cmp(a + n) - self.grid.num_cmp(a)
                for a, n in zip(starts, new, strict=True)
            )
            uniform_start = starts[0] if len(set(starts)) == 1 else None
        pages = owner.pages_of(self.index)
        by_kernels = owner.has_kernels and owner.rows.rollback >= T
        by_kernels = by_kernels and not torch.compiler.is_compiling()
        if by_kernels:
            paged.append(pages, kv_cmp, kv_sel, kv_win)
        if most and by_kernels and self._keeps_means:
            paged.append_means(pages, T, block=self.config.cmp_block, stride=self.config.cmp_stride)
        elif most:
            self._complete(pages, kv_cmp, most, compress)
        if not by_kernels:
            self._put(pages, kv_cmp, kv_sel, kv_win)
        return PagedView(pages, self.grid, kv_win, uniform_start, by_kernels=by_kernels)

    def grow(self, needed: int) -> None:
        """ValueError: caches that step alone ask for it."""
        raise ValueError(
            "got a layer of a PagedCache for nsa.decode.Steps or DecodeGraph; wanted an NSACache;"
            " nsa.decode.PagedGraph captures a step of a PagedCache"
        )

    @property
    def _keeps_means(self) -> bool:
        """Whether a compressed block is the mean of its raw tokens, and nothing is done to it."""
        return self.config.phi == "mean" and self.config.rotates_before_compression

    def _put(self, pages: paged.LayerPages, kv_cmp: KV, kv_sel: KV, kv_win: KV) -> None:
        """The chunk, by the formulas of `nsa.ops.paged.Pages`."""
        keep = self.owner.rows.keep
        T, device = kv_sel[0].shape[1], kv_sel[0].device
        position_BT = pages.start_B[:, None] + torch.arange(T, device=device)
        from_end_BT = pages.seq_lens[:, None] - position_BT
        exists_BT = from_end_BT > 0
        pages.sel.put(position_BT, exists_BT, kv_sel)
        pages.win.put(position_BT, exists_BT & (from_end_BT <= keep[WINDOW]), kv_win)
        pages.raw.put(position_BT, exists_BT & (from_end_BT <= keep[RAW]), kv_cmp)

    def _complete(
        self, pages: paged.LayerPages, chunk: KV, most: int, compress: CompressFn
    ) -> None:
        """Make the blocks that the chunk completes, at most ``most`` a row, from the raw tokens
        before it and its own.
        """
        l, d = self.config.cmp_block, self.config.cmp_stride  # noqa: E741 (the paper's)
        start_B1, total_B1 = pages.start_B[:, None], pages.seq_lens[:, None].long()
        done_B1, due_B1 = (paged.blocks_before(x, l, d) for x in (start_B1, total_B1))
        T, device, dtype = chunk[0].shape[1], chunk[0].device, chunk[0].dtype
        position_BI = done_B1 * d + torch.arange((most - 1) * d + l, device=device)
        before = pages.raw.take(position_BI, position_BI < start_B1, dtype)
        at_BI = position_BI - start_B1
        own = (at_BI >= 0) & (position_BI < total_B1)
        at_BI = at_BI.clamp(0, T - 1)[..., None, None]
        raw_k, raw_v = (
            torch.where(own[..., None, None], x.gather(1, at_BI.expand(-1, -1, *x.shape[2:])), old)
            for x, old in zip(chunk, before, strict=True)
        )
        blocks = compress(raw_k, raw_v, done_B1[:, 0])
        index_BK = done_B1 + torch.arange(most, device=device)
        k, v = (x[:, :most] for x in blocks)
        pages.cmp.put(index_BK, index_BK < due_B1, (k, v))
