"""Telemetry of selection and gates: the length of selections, the agreement of neighbours, and the
mass of each gate.

    with nsa.statistics.collect() as seen:
        model(ids)
    print(seen.read())  # a Summary; to_mapping() gives what a log can store

Without an open collection a call costs one read of a context variable. Sums stay on the tensors'
device (fp64) until ``Collection.read`` moves one tensor to the host, once a log. Not observed:
calls inside torch.compile (Python state there is read when traced, not when run, and a guarded
counter would recompile at every call, so they are not counted either) and calls that a CUDA graph
captures (counted; their replays are not). There the profiler is the witness. What a backward
recomputes (activation checkpointing) was observed in the forward.

B batch, T query tokens, Q query heads, G kv heads, N selected blocks, W windows of queries, R
branches that are on. A row is one query of one kv head; a gate row is one query of one query head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from nsa.config import BRANCHES
from nsa.ops import key_counts

WINDOW = 16  # queries that a block-sparse kernel processes together
COLLAPSE_SHARE = 0.95  # of a row's gate mass in one branch

_ROWS = (
    "rows",
    "tokens",
    "blocks",
    "pairs",
    "pairs_equal",
    "windows",
    "window_union",
    "window_blocks",
)
_GATE_ROWS = ("gate_rows", "invalid", "massless", "entropy", "collapsed")
_PER_BRANCH = tuple(
    f"{name}.{branch}" for name in ("on", "gate", "on_with_mass", "share") for branch in BRANCHES
)
_GATES = _GATE_ROWS + _PER_BRANCH
_PEAKS = ("tokens_max", "minus_tokens_min")
_COLUMNS = _ROWS + _GATES + _PEAKS
_ROWS_AT = slice(0, len(_ROWS))
_GATES_AT = slice(len(_ROWS), len(_ROWS) + len(_GATES))
_PEAKS_AT = slice(len(_COLUMNS) - len(_PEAKS), len(_COLUMNS))

_ELSEWHERE = (
    "calls under torch.compile and replays of CUDA graphs are not observed; profile one step there"
)


@dataclass(frozen=True, slots=True)
class Summary:
    """What a collection saw; None where it saw nothing, with the reason under the same name
    (``gate_mean.win``) in ``reasons``.

    ``tokens_*``: tokens at or before the query in a row's chosen blocks. ``blocks_mean``: chosen
    blocks of a row.
    ``union_blocks_mean``: distinct blocks of a window, WINDOW consecutive queries of one kv head,
    tiled from each call's first query (a shorter rest is no window); ``union_ratio``: that over the
    mean blocks of a row of the same windows, between 1 (all choose alike) and WINDOW.
    ``same_as_previous_share``: of the rows with a previous query in the same call, those with its
    set. ``gate_mean``: mean gate of each branch. The normalised gates are each over the row's sum
    of the branches that are on, for rows where that is > 0: ``branch_share`` is their mean,
    ``gate_entropy`` their mean entropy (nats),
    ``collapse_share`` the share of rows where one exceeds COLLAPSE_SHARE. A branch's means are over
    the calls that had it on.
    ``gate_rows_invalid`` (a gate that is not finite, or negative) count for nothing else;
    ``gate_rows`` holds the
    ``gate_rows_massless`` (sum 0). Shares are fractions of 1.
    """

    rows: int | None
    tokens_mean: float | None
    tokens_min: int | None
    tokens_max: int | None
    blocks_mean: float | None
    union_blocks_mean: float | None
    union_ratio: float | None
    same_as_previous_share: float | None
    gate_rows: int | None
    gate_rows_invalid: int | None
    gate_rows_massless: int | None
    gate_mean: Mapping[str, float | None]
    branch_share: Mapping[str, float | None]
    gate_entropy: float | None
    collapse_share: float | None
    captured_calls: int
    compiled_calls: None
    reasons: Mapping[str, str]

    def to_mapping(self) -> dict[str, Any]:
        """Numbers, None, strings and dicts of them, fit for JSON."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {
            name: dict(value) if isinstance(value, Mapping) else value
            for name, value in values.items()
        }


@dataclass(slots=True)
class Collection:
    """Sums since ``collect`` was entered: one fp64 tensor a device, and the calls that a CUDA graph
    captured.
    """

    captured_calls: int = 0
    _sums: dict[torch.device, Tensor] = field(default_factory=dict)

    def read(self) -> Summary:
        """The Summary so far; syncs once, by one copy to the host.

        May be called while open, after, and again.
        """
        totals = dict.fromkeys(_COLUMNS, 0.0)
        if self._sums:
            # An accelerator gathers, so that only the last copy waits for it.
            target = max(self._sums, key=lambda device: device.type != "cpu")
            per_device = torch.stack(
                [sums.to(target, non_blocking=target.type != "cpu") for sums in self._sums.values()]
            )
            merged = torch.cat(
                [per_device[:, : _PEAKS_AT.start].sum(0), per_device[:, _PEAKS_AT].amax(0)]
            )
            totals = dict(zip(_COLUMNS, merged.cpu().tolist(), strict=True))
        return _summary(_derived(totals), self.captured_calls)

    def _on(self, device: torch.device) -> Tensor:
        if device not in self._sums:
            # an inference tensor could not be added to outside that mode
            with torch.inference_mode(False):
                sums = torch.zeros(len(_COLUMNS), dtype=torch.float64, device=device)
                sums[_PEAKS_AT] = -math.inf
            self._sums[device] = sums
        return self._sums[device]


_ACTIVE: ContextVar[tuple[Collection, ...]] = ContextVar("nsa_statistics", default=())


@contextmanager
def collect() -> Iterator[Collection]:
    """Observe every eager call in this context (thread or task); may be nested, and then both see
    it.
    """
    collection = Collection()
    token = _ACTIVE.set((*_ACTIVE.get(), collection))
    try:
        yield collection
    finally:
        _ACTIVE.reset(token)


def is_collecting() -> bool:
    """Whether a collection is open. False inside torch.compile."""
    return not torch.compiler.is_compiling() and bool(_ACTIVE.get())


def observe_selection(
    blocks: Tensor, *, q_start: int | Tensor, sel_block: int, present: Tensor | None = None
) -> None:
    """Add ``blocks`` int32 [B, T, G, N] (ascending, unique, -1 padded at the end) to every open
    collection.

    ``q_start``: position of the first query, int or int64 [B]. ``present`` bool [B or 1, T]:
    queries that hold a token, all by default; the others count for nothing. Never syncs; does
    nothing without a collection. Raises ValueError for other shapes.
    """
    # Checked first: this is a constant to the compiler, and a context variable is not.
    if (
        torch.compiler.is_compiling()
        or not (collections := _ACTIVE.get())
        or _is_elsewhere(blocks, collections)
    ):
        return
    with torch.no_grad():
        present_BT = _present(blocks, present, "blocks [B, T, G, N]")
        if blocks.numel() == 0:
            return
        sums, peaks = _selection_sums(blocks.detach(), present_BT, q_start, sel_block)
        for collection in collections:
            total = collection._on(blocks.device)
            total[_ROWS_AT].add_(sums)
            total[_PEAKS_AT].copy_(torch.maximum(total[_PEAKS_AT], peaks))


def observe_gates(
    gates: Tensor, branches: tuple[str, ...], *, present: Tensor | None = None
) -> None:
    """Add ``gates`` [B, T, Q, 3] (cmp, sel, win; activated already), of which ``branches`` are on,
    to every open collection.

    ``present`` as in ``observe_selection``. Never syncs; does nothing without a collection. Raises
    ValueError for other shapes.
    """
    if (
        torch.compiler.is_compiling()
        or not (collections := _ACTIVE.get())
        or _is_elsewhere(gates, collections)
    ):
        return
    with torch.no_grad():
        present_BT = _present(gates, present, "gates [B, T, HQ, 3]")
        if gates.shape[-1] != len(BRANCHES) or not branches or not set(branches) <= set(BRANCHES):
            raise ValueError(
                f"got {gates.shape[-1]} gates and branches {branches}; wanted one gate for each of"
                f" {BRANCHES}; pass all three"
            )
        if gates.numel() == 0:
            return
        sums = _gate_sums(gates.detach(), present_BT, branches)
        for collection in collections:
            collection._on(gates.device)[_GATES_AT].add_(sums)


def _is_elsewhere(x: Tensor, collections: tuple[Collection, ...]) -> bool:
    """Whether this call is a backward's recomputation, or is being captured: a replay would write
    to sums long freed.
    """
    if torch._C._current_graph_task_id() != -1:
        return True
    if not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    for collection in collections:
        collection.captured_calls += 1
    return True


def _present(x: Tensor, present: Tensor | None, wanted: str) -> Tensor:
    """Boolean [B, T]; all true where ``present`` is None."""
    if x.ndim != 4:
        raise ValueError(
            f"got shape {tuple(x.shape)}; wanted {wanted}; pass one row a query and head"
        )
    B, T = x.shape[:2]
    if present is None:
        return torch.ones(B, T, dtype=torch.bool, device=x.device)
    if (
        present.dtype != torch.bool
        or present.ndim != 2
        or present.shape[0] not in (1, B)
        or present.shape[1] != T
    ):
        raise ValueError(
            f"present is {present.dtype} {tuple(present.shape)}; wanted torch.bool [{B} or 1, {T}];"
            " one flag a query"
        )
    return present.expand(B, T)


def _selection_sums(
    blocks: Tensor, present_BT: Tensor, q_start: int | Tensor, sel_block: int
) -> tuple[Tensor, Tensor]:
    """_ROWS and _PEAKS of one call, fp64."""
    G = blocks.shape[2]
    tokens_BTG = key_counts.selected(blocks, None, q_start=q_start, sel_block=sel_block)
    chosen_BTG = (blocks >= 0).sum(-1)
    present = present_BT[..., None].expand(-1, -1, G)
    pair = present[:, 1:] & present[:, :-1]
    # ascending and padded alike: the same set is the same row
    equal = (blocks[:, 1:] == blocks[:, :-1]).all(-1)
    rows = [present, tokens_BTG * present, chosen_BTG * present, pair, pair & equal]
    sums = torch.stack([x.sum() for x in rows] + _window_sums(blocks, present_BT, chosen_BTG))
    signed = torch.stack([tokens_BTG, -tokens_BTG]).double().masked_fill(~present, -math.inf)
    return sums.double(), signed.amax((1, 2, 3))


def _window_sums(blocks: Tensor, present_BT: Tensor, chosen_BTG: Tensor) -> list[Tensor]:
    """Windows whose queries are all present, their distinct blocks, and their rows' chosen
    blocks.
    """
    G, W = blocks.shape[2], blocks.shape[1] // WINDOW
    if W == 0:
        return [torch.zeros((), dtype=torch.int64, device=blocks.device)] * 3
    full_windows, tile = slice(0, W * WINDOW), (W, WINDOW)
    present_BWG = present_BT[:, full_windows].unflatten(1, tile).all(2)[..., None].expand(-1, -1, G)
    ids = blocks[:, full_windows].unflatten(1, tile).transpose(2, 3).flatten(3).sort(-1).values
    first = torch.ones_like(ids, dtype=torch.bool)
    first[..., 1:] = ids[..., 1:] != ids[..., :-1]
    union_BWG = (first & (ids >= 0)).sum(-1)
    chosen_BWG = chosen_BTG[:, full_windows].unflatten(1, tile).sum(2)
    return [present_BWG.sum(), (union_BWG * present_BWG).sum(), (chosen_BWG * present_BWG).sum()]


def _gate_sums(gates: Tensor, present_BT: Tensor, branches: tuple[str, ...]) -> Tensor:
    """_GATES of one call, fp64; the ratios in fp32 or the gates' own dtype if wider."""
    wide = torch.promote_types(gates.dtype, torch.float32)
    on = [i for i, branch in enumerate(BRANCHES) if branch in branches]
    # not by a list, which would be copied to the device
    g_BTQR = torch.stack([gates[..., i] for i in on], -1).to(wide)
    present = present_BT[..., None].expand(g_BTQR.shape[:3])
    valid = (g_BTQR.isfinite() & (g_BTQR >= 0)).all(-1) & present
    g_BTQR = g_BTQR.masked_fill(~valid[..., None], 0)
    mass_BTQ = g_BTQR.sum(-1)
    massive = mass_BTQ > 0
    p_BTQR = g_BTQR / mass_BTQ.masked_fill(~massive, 1)[..., None] * massive[..., None]
    rows, rows_with_mass = valid.sum(), massive.sum()
    entropy = torch.special.entr(p_BTQR).sum(dtype=torch.float64)
    collapsed = (p_BTQR.amax(-1) > COLLAPSE_SHARE).sum()
    gate_R = g_BTQR.sum((0, 1, 2), dtype=torch.float64)
    share_R = p_BTQR.sum((0, 1, 2), dtype=torch.float64)
    sums: dict[str, Tensor] = dict(
        zip(
            _GATE_ROWS,
            (rows, present.sum() - rows, rows - rows_with_mass, entropy, collapsed),
            strict=True,
        )
    )
    for r, branch in enumerate(BRANCHES[i] for i in on):
        sums |= {
            f"on.{branch}": rows,
            f"gate.{branch}": gate_R[r],
            f"on_with_mass.{branch}": rows_with_mass,
            f"share.{branch}": share_R[r],
        }
    zero = torch.zeros((), dtype=torch.float64, device=gates.device)
    return torch.stack([sums.get(name, zero).double() for name in _GATES])


def _derived(totals: Mapping[str, float]) -> dict[str, float]:
    return {
        **totals,
        "tokens_min": -totals["minus_tokens_min"],
        "window_union_rows": totals["window_union"] * WINDOW,
        "gate_rows_seen": totals["gate_rows"] + totals["invalid"],
        "gate_rows_with_mass": totals["gate_rows"] - totals["massless"],
    }


def _summary(totals: Mapping[str, float], captured_calls: int) -> Summary:
    captured = f"; a CUDA graph captured {captured_calls} calls" if captured_calls else ""
    reasons = {"compiled_calls": f"not counted: {_ELSEWHERE}"}

    def ratio(name: str, over: str, under: str, missing: str) -> float | None:
        if totals[under] > 0:
            return totals[over] / totals[under]
        reasons[name] = f"{missing}{captured}; {_ELSEWHERE}"
        return None

    def count_of(name: str, column: str, under: str, missing: str) -> int | None:
        """The column as an int; None, with a reason, where ``under`` is 0."""
        return None if ratio(name, column, under, missing) is None else round(totals[column])

    def per_branch(name: str, over: str, under: str, missing: str) -> dict[str, float | None]:
        return {
            b: ratio(f"{name}.{b}", f"{over}.{b}", f"{under}.{b}", f"{missing} with branch {b} on")
            for b in BRANCHES
        }

    selection, gates = "no selection was observed", "no gates were observed"
    window = f"no call held {WINDOW} consecutive queries"
    mass = "no valid gate row with a sum > 0 was observed"
    return Summary(
        rows=count_of("rows", "rows", "rows", selection),
        tokens_mean=ratio("tokens_mean", "tokens", "rows", selection),
        tokens_min=count_of("tokens_min", "tokens_min", "rows", selection),
        tokens_max=count_of("tokens_max", "tokens_max", "rows", selection),
        blocks_mean=ratio("blocks_mean", "blocks", "rows", selection),
        union_blocks_mean=ratio("union_blocks_mean", "window_union", "windows", window),
        union_ratio=ratio(
            "union_ratio", "window_union_rows", "window_blocks", f"{window} that chose any block"
        ),
        same_as_previous_share=ratio(
            "same_as_previous_share", "pairs_equal", "pairs", "no call held two consecutive queries"
        ),
        gate_rows=count_of("gate_rows", "gate_rows", "gate_rows_seen", gates),
        gate_rows_invalid=count_of("gate_rows_invalid", "invalid", "gate_rows_seen", gates),
        gate_rows_massless=count_of("gate_rows_massless", "massless", "gate_rows_seen", gates),
        gate_mean=per_branch("gate_mean", "gate", "on", "no valid gate row was observed"),
        branch_share=per_branch("branch_share", "share", "on_with_mass", mass),
        gate_entropy=ratio("gate_entropy", "entropy", "gate_rows_with_mass", mass),
        collapse_share=ratio("collapse_share", "collapsed", "gate_rows_with_mass", mass),
        captured_calls=captured_calls,
        compiled_calls=None,
        reasons=reasons,
    )
