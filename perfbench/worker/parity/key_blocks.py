"""Exact dK and dV of a few key blocks over all queries, for a dense upstream gradient.

The oracle on sampled rows sees no other row's contribution to a key, and sums over all keys see no
exchange between two of them. So for the keys of some blocks (the first, the last whole one and
what follows it, one across a block edge, two random ones) this adds up in fp64 what every query
that sees them contributes, in each branch: compressed keys through phi, selected ones where a row
chose their block, those of the window where a row sees them. With p = exp(scale q k - lse), g the
branch's gate times dO, and D = rowsum(g * o):

    dv = sum over rows and heads of p g        dk = sum of scale p (g v - D) q

lse and o come from the fp64 oracle over all keys of a row, in chunks of rows that see a key, and
not from what is judged: a row whose normaliser is wrong must not judge itself. Of one sequence and
KV head with H query heads that costs, in logits,

- selected: H T n l', linear in T (the first block is chosen by every row);
- window: H w (l' + w) a block, whatever T;
- compressed: H T C / 2 with C = T / d, full causal attention: H T^2 / 2. Where that exceeds
  MAX_LOGITS, only the last rows, as many as fit, and the key blocks among them are taken.

So no proof exceeds about MAX_LOGITS plus the linear part: on a GPU that is seconds, and takes every
row of a compressed branch at 131,072 tokens; on a CPU likewise, and takes every row up to some
20,000 tokens of two heads. As many pairs of a sequence and a KV head are taken as fit, drawn by the
seed: at least one, at most MAX_PAIRS.

The bound: each term is a product of roundings, of either sign, so an element is off by about its
terms' root sum of squares times eps, and by what adding n terms in fp32 loses, at most
sqrt(n) eps of that. Rounding flips near-tied blocks, so the blocks must be those of the very call.
Where a compiled graph hides them, FLIPPED rows a key may have chosen otherwise.

T queries, R of them, S keys, K of them, H query heads of one kv head, D head dim, C compressed
blocks, N blocks of a row.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nsa import oracle
from nsa.config import ModelConfig, NSAConfig
from perfbench.worker.parity import layer
from perfbench.worker.parity.backward import DenseBackward, Tensors
from perfbench.worker.parity.identities import ROUNDINGS

MAX_LOGITS = {"cpu": 2**27, "cuda": 2**36}  # of a proof
CHUNK = {"cpu": 2**20, "cuda": 2**25}  # logits at a time, some ten fp64 tensors of that size
MAX_PAIRS = 16
BRANCHES = ("cmp", "sel", "win")
NUM_RANDOM = 2
DRAWS = 4  # of errors, sent through phi
FLIPPED = 2
# NSA.md's tolerance of fp32, of these keys' own largest element: over many rows it is far below 1
RELATIVE_FLOOR = 1e-5
Sums = dict[str, tuple[float, float]]  # name -> (error, tolerance)


@dataclass(frozen=True, slots=True)
class Differentiated:
    """What was differentiated, of ``inputs`` as in `identities`.

    ``blocks`` int [B, T, G, N] are those that each row attends to in branch sel; None: that branch
    is full causal attention. ``hidden``: they are those of another call, equal up to near ties.
    """

    model: ModelConfig
    inputs: Tensors
    branches: tuple[str, ...]
    blocks: Tensor | None
    hidden: bool = False

    @property
    def is_causal_attention(self) -> bool:
        return self.blocks is None and "sel" in self.branches

    @property
    def phi(self) -> layer.PhiParams:
        k, v = (
            {n.removeprefix(which): x.double() for n, x in self.inputs.items() if which in n}
            for which in ("phi_k.", "phi_v.")
        )
        return k or None, v or None


@torch.no_grad()
def check(call: Differentiated, backward: DenseBackward, seed: int) -> Sums:
    """(error, tolerance) of 'keys dk_BRANCH' and 'keys dv_BRANCH', each of the worst element."""
    found: Sums = {}
    first, pairs = _within_budget(call, seed)
    for sequence, head in pairs:
        one = _Head(call, backward, sequence, head)
        for branch in call.branches:
            dk, dv = one.gradients(branch, seed, first)
            for which, exact in (("dk", dk), ("dv", dv)):
                got = backward.grads[f"{which[1]}_{branch}"][sequence, exact.keys, head].double()
                _keep_worst(found, f"keys {which}_{branch}", got, exact)
    return found


def key_tokens(block: int, first: int, tokens: int, seed: int) -> Tensor:
    """The keys that are compared, ascending, of blocks of ``block`` tokens from token ``first``
    on.
    """
    begin, end = -(-first // block), tokens // block  # whole blocks
    starts = [first if begin >= end else begin * block, (end - 1) * block]
    if end - begin > 1:
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(begin + 1, end, (1 + NUM_RANDOM,), generator=generator).tolist()
        starts += [drawn[0] * block - block // 2, *(j * block for j in drawn[1:])]
    keys = {key for start in starts for key in range(start, start + block)}
    keys |= set(range(end * block, tokens))
    return torch.tensor(sorted(key for key in keys if first <= key < tokens))


@dataclass(frozen=True, slots=True)
class _Exact:
    """``value`` [K, D] of ``keys`` [K], and the bound of each element."""

    keys: Tensor
    value: Tensor
    tolerance: Tensor


@dataclass(frozen=True, slots=True)
class _SeenRows:
    """Rows [R] with o [R, H, DV] and lse [R, H] of a branch; ``sees`` [R, K]: which of the compared
    keys they attend to.
    """

    rows: Tensor
    o: Tensor
    lse: Tensor
    sees: Tensor


class _Head:
    """One sequence's one kv head, with its query heads."""

    def __init__(
        self, call: Differentiated, backward: DenseBackward, sequence: int, head: int
    ) -> None:
        self._call, self._backward = call, backward
        self._sequence, self._head = sequence, head
        q, groups = call.inputs["q"], call.model.num_kv_heads
        self._tokens, self._device = q.shape[1], q.device
        self._heads = slice(head * q.shape[2] // groups, (head + 1) * q.shape[2] // groups)
        self._num_heads = q.shape[2] // groups
        self._scale = q.shape[3] ** -0.5
        self._nsa = call.model.nsa

    def gradients(self, branch: str, seed: int, first: int) -> tuple[_Exact, _Exact]:
        """Exact dk and dv of ``branch``; ``first`` is the first row of a branch whose rows see
        everything before them.
        """
        nsa, call = self._nsa, self._call
        k, v = (
            call.inputs[f"{which}_{branch}"][self._sequence, :, self._head].double()
            for which in ("k", "v")
        )
        if branch == "cmp":
            return self._through_phi(k, v, self._keys(seed, first))
        if branch == "sel" and call.blocks is None:
            keys = self._keys(seed, first)
            chunks = self._prefix(k, v, range(self._tokens), keys)
        elif branch == "sel":
            assert call.blocks is not None
            keys = self._keys(seed, 0)
            chunks = self._selected(k, v, keys, call.blocks[self._sequence, :, self._head].long())
        else:
            keys = self._keys(seed, 0)
            distances = torch.arange(nsa.window, device=self._device)
            rows = (keys[:, None] + distances).unique()
            chunks = self._gathered(
                k,
                v,
                rows[rows < self._tokens],
                lambda rows: rows[:, None] - distances,
                lambda rows: (keys <= rows[:, None]) & (keys > rows[:, None] - nsa.window),
            )
        dk, dv = self._sums(branch, k[keys], v[keys], chunks)
        return _Exact(keys, *dk), _Exact(keys, *dv)

    def _keys(self, seed: int, first: int) -> Tensor:
        return key_tokens(self._nsa.sel_block, first, self._tokens, seed).to(self._device)

    def _prefix(self, k: Tensor, v: Tensor, visible: range, keys: Tensor) -> Iterator[_SeenRows]:
        """Rows that see every key from a row on, that of key j from row visible[j]."""
        if not len(keys):
            return
        from_row = torch.tensor(visible, device=self._device)
        begin = int(from_row[keys].min())
        while begin < self._tokens:
            end = self._end_of_chunk(begin, visible, len(keys))
            rows = torch.arange(begin, end, device=self._device)
            seen = bisect_right(visible, end - 1)
            keep = from_row[:seen] <= rows[:, None]
            o, lse = oracle.attention(
                self._q(rows)[None], k[None, :seen, None], v[None, :seen, None], keep[None, None]
            )
            yield _SeenRows(rows, o[0], lse[0], from_row[keys] <= rows[:, None])
            begin = end

    def _end_of_chunk(self, begin: int, visible: range, least: int) -> int:
        """The end of the rows from ``begin`` on, halved until their keys, or the ``least`` that are
        compared, fit CHUNK.
        """
        rows, most = self._tokens - begin, CHUNK[self._device.type] // self._num_heads
        while rows > 1 and rows * max(bisect_right(visible, begin + rows - 1), least) > most:
            rows = (rows + 1) // 2
        return begin + rows

    def _selected(
        self, k: Tensor, v: Tensor, keys: Tensor, blocks_TN: Tensor
    ) -> Iterator[_SeenRows]:
        size = self._nsa.sel_block
        inside = torch.arange(size, device=self._device)
        owners = keys // size

        def keys_of(rows: Tensor) -> Tensor:
            blocks = blocks_TN[rows, :, None]
            return torch.where(blocks < 0, -1, blocks * size + inside).flatten(1)

        def sees(rows: Tensor) -> Tensor:
            chosen = (blocks_TN[rows, None] == owners[:, None]).any(-1)
            return chosen & (keys <= rows[:, None])

        rows = torch.isin(blocks_TN, owners.unique()).any(-1).nonzero()[:, 0]
        return self._gathered(k, v, rows, keys_of, sees)

    def _gathered(
        self,
        k: Tensor,
        v: Tensor,
        rows: Tensor,
        keys_of: Callable[[Tensor], Tensor],
        sees: Callable[[Tensor], Tensor],
    ) -> Iterator[_SeenRows]:
        """``rows`` with the keys that each attends to; what keys_of gives [R, n] beyond the row or
        below 0 is no key.
        """
        if not len(rows):
            return
        width = keys_of(rows[:1]).shape[1] * max(k.shape[1], v.shape[1], self._num_heads)
        for part in rows.split(max(1, CHUNK[self._device.type] // width)):
            index = keys_of(part)
            keep = (index >= 0) & (index <= part[:, None])
            index = index.clamp(min=0, max=len(k) - 1)
            o, lse = oracle.attention(
                self._q(part)[:, None],
                k[index][:, :, None],
                v[index][:, :, None],
                keep[:, None, None],
            )
            yield _SeenRows(part, o[:, 0], lse[:, 0], sees(part))

    def _sums(
        self, branch: str, k: Tensor, v: Tensor, chunks: Iterator[_SeenRows]
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """(dk, its bound), (dv, its bound) of the compared keys k [K, D] and v [K, DV]."""
        dk, dk_squares, dv, dv_squares = (torch.zeros_like(x) for x in (k, k, v, v))
        terms, largest_dk, largest_dv = k.new_zeros(3, len(k), 1)
        for chunk in chunks:
            q, g = self._q(chunk.rows), self._g(branch, chunk.rows)
            logits = torch.einsum("rhd,kd->rhk", q, k) * self._scale
            p = (logits - chunk.lse[..., None]).exp().masked_fill(~chunk.sees[:, None], 0.0)
            gv, go = torch.einsum("rhd,kd->rhk", g, v), g * chunk.o
            ds = p * (gv - go.sum(-1, keepdim=True)) * self._scale
            dv += torch.einsum("rhk,rhd->kd", p, g)
            dk += torch.einsum("rhk,rhd->kd", ds, q)
            # what the difference is made of, since both parts are rounded
            parts = torch.einsum("rhd,kd->rhk", g.square(), v.square()).sqrt()
            parts += go.square().sum(-1, keepdim=True).sqrt()
            sizes = p * parts * self._scale
            dv_squares += torch.einsum("rhk,rhd->kd", p.square(), g.square())
            dk_squares += torch.einsum("rhk,rhd->kd", sizes.square(), q.square())
            for largest, size, x in ((largest_dk, sizes, q), (largest_dv, p, g)):
                of_rows = (size * x.abs().amax(-1, keepdim=True)).sum(1)  # [R, K]
                torch.maximum(largest, of_rows.amax(0)[:, None], out=largest)
            terms += chunk.sees.sum(0)[:, None] * self._num_heads
        eps, sum_eps = self._eps, self._sum_eps
        flipped = FLIPPED if branch == "sel" and self._call.hidden else 0
        bounds = (
            (ROUNDINGS * eps + terms.sqrt() * sum_eps) * squares.sqrt()
            + eps * value.abs()
            + flipped * largest
            for value, squares, largest in (
                (dk, dk_squares, largest_dk),
                (dv, dv_squares, largest_dv),
            )
        )
        return tuple(zip((dk, dv), bounds, strict=True))  # type: ignore[return-value]

    def _through_phi(self, k: Tensor, v: Tensor, keys: Tensor) -> tuple[_Exact, _Exact]:
        """Those of the tokens ``keys``: the gradients of all compressed blocks that hold one of
        them, through phi. Their errors go through phi with random signs.
        """
        nsa, leaves = self._nsa, [x[None, :, None].requires_grad_() for x in (k, v)]
        with torch.enable_grad():
            compressed = layer.compressed_kv(
                leaves[0], leaves[0], leaves[1], self._call.model, self._call.phi
            )
        k_cmp, v_cmp = (x.detach()[0, :, 0] for x in compressed)
        columns = _compressed_over(keys, self._tokens, nsa)
        visible = range(nsa.cmp_block - 1, self._tokens, nsa.cmp_stride)[: len(k_cmp)]
        chunks = self._prefix(k_cmp, v_cmp, visible, columns)
        sums = self._sums("cmp", k_cmp[columns], v_cmp[columns], chunks)

        def back(values: list[Tensor]) -> list[Tensor]:
            upstream = [torch.zeros_like(x) for x in compressed]
            for full, part in zip(upstream, values, strict=True):
                full[0, columns, 0] = part
            grads = torch.autograd.grad(
                compressed,
                leaves,
                upstream,
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
            return [grad[0, keys, 0] for grad in grads]

        exact = back([value for value, _ in sums])
        generator = torch.Generator(self._device).manual_seed(0)
        squares: list[Any] = [0.0, 0.0]
        for _ in range(DRAWS):
            drawn = [
                bound * torch.randn(bound.shape, generator=generator, device=self._device)
                for _, bound in sums
            ]
            squares = [s + x.square() for s, x in zip(squares, back(drawn), strict=True)]
        found = []
        for value, square in zip(exact, squares, strict=True):
            bound = (square / DRAWS).mean(-1, keepdim=True).sqrt() + self._eps * value.abs()
            if nsa.phi != "mean":  # whose own products are rounded, too
                inner = value.square().mean(-1, keepdim=True).sqrt()
                bound = bound + ROUNDINGS * self._eps * inner
            found.append(_Exact(keys, value, bound.expand_as(value)))
        return found[0], found[1]

    def _q(self, rows: Tensor) -> Tensor:
        return self._call.inputs["q"][self._sequence, rows, self._heads].double()

    def _g(self, branch: str, rows: Tensor) -> Tensor:
        """The gradient of the branch's output: its gate times dO, [R, H, DV]."""
        g = self._backward.upstream[self._sequence, rows, self._heads].double()
        gates = self._call.inputs.get("gates")
        if gates is None:
            return g
        column = BRANCHES.index(branch)
        return g * gates[self._sequence, rows, self._heads, column, None].double()

    @property
    def _eps(self) -> float:
        return torch.finfo(self._call.inputs["q"].dtype).eps

    @property
    def _sum_eps(self) -> float:
        """Of what sums are kept in: fp32; CPU kernels may keep them in the call's dtype."""
        fp32 = torch.finfo(torch.float32).eps
        return max(self._eps, fp32) if self._device.type == "cpu" else fp32


def _compressed_over(keys: Tensor, tokens: int, nsa: NSAConfig) -> Tensor:
    """The compressed blocks that hold one of ``keys``, ascending."""
    if tokens < nsa.cmp_block:
        return keys[:0]
    held = torch.zeros(tokens, dtype=torch.bool, device=keys.device)
    held[keys] = True
    return held.unfold(0, nsa.cmp_block, nsa.cmp_stride).any(-1).nonzero()[:, 0]


def _within_budget(call: Differentiated, seed: int) -> tuple[int, list[tuple[int, int]]]:
    """(first row of a branch whose rows see everything before them, the pairs of a sequence and a
    kv head) that MAX_LOGITS allows.
    """
    nsa, q = call.model.nsa, call.inputs["q"]
    (B, T), G = q.shape[:2], call.model.num_kv_heads
    H, most = q.shape[2] // G, MAX_LOGITS[q.device.type]
    before = T // nsa.cmp_stride if "cmp" in call.branches else 0  # keys of the last row
    before += T if call.is_causal_attention else 0
    each = H * before / T / 2  # logits from row r on: each * (T^2 - r^2)
    rest = max(0.0, T * T - most / each) if each else 0.0
    first = int(rest**0.5)
    cost = each * (T * T - first * first)
    if call.blocks is not None and "sel" in call.branches:
        cost += H * T * min(call.blocks.shape[-1] * nsa.sel_block, T)
    order = torch.randperm(B * G, generator=torch.Generator().manual_seed(seed)).tolist()
    count = max(1, min(MAX_PAIRS, int(most / max(cost, 1.0))))
    return first, [divmod(pair, G) for pair in order[:count]]


def _keep_worst(found: Sums, name: str, got: Tensor, exact: _Exact) -> None:
    """Keep the element with the largest error over tolerance; NaN never passes."""
    if not got.numel():
        return
    floor = RELATIVE_FLOOR * float(exact.value.abs().max())
    bound = exact.tolerance.clamp(min=max(floor, 1e-30))
    error = (got - exact.value).abs().nan_to_num(1e9, 1e9)
    worst = int((error / bound).argmax())
    this = float(error.flatten()[worst]), float(bound.flatten()[worst])
    before = found.get(name)
    if before is None or this[0] * before[1] >= before[0] * this[1]:
        found[name] = this
