"""Selections and gates at random for the tests of the telemetry, and what plain loops say of
them.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import statistics
from nsa.statistics import Summary
from tests.cases import randn

ALL = ("cmp", "sel", "win")
SEL_BLOCK = 8


def random_blocks(
    batch: int, tokens: int, heads: int, slots: int, *, start: list[int], seed: int
) -> Tensor:
    """Ascending unique ids up to the query's block, -1 padded; about a third repeats the previous
    query's, some are empty.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int) -> int:
        return int(torch.randint(high, (), generator=generator))

    out = torch.full((batch, tokens, heads, slots), -1, dtype=torch.int32)
    for b in range(batch):
        for t in range(tokens):
            for g in range(heads):
                kind = draw(6)
                if kind < 2 and t:
                    out[b, t, g] = out[b, t - 1, g]
                elif kind < 5:
                    candidates = (
                        torch.randperm((start[b] + t) // SEL_BLOCK + 1, generator=generator)[
                            : 1 + draw(slots)
                        ]
                        .sort()
                        .values
                    )
                    out[b, t, g, : len(candidates)] = candidates
    return out


def expect_selection(calls: list[tuple[Tensor, list[int], Tensor | None]]) -> dict[str, Any]:
    """Loops over sets of ids; a call is (blocks, q_start a row, present)."""
    lengths: list[int] = []
    sizes: list[int] = []
    same: list[bool] = []
    unions: list[int] = []
    window_sizes: list[int] = []
    for blocks, start, present in calls:
        B, T, G, _ = blocks.shape
        there = [
            [present is None or bool(present.expand(B, T)[b, t]) for t in range(T)]
            for b in range(B)
        ]
        for b in range(B):
            for g in range(G):
                sets = [{j for j in row if j >= 0} for row in blocks[b, :, g].tolist()]
                for t, chosen in enumerate(sets):
                    if not there[b][t]:
                        continue
                    lengths.append(
                        sum(
                            j * SEL_BLOCK <= p <= start[b] + t
                            for j in chosen
                            for p in range(j * SEL_BLOCK, (j + 1) * SEL_BLOCK)
                        )
                    )
                    sizes.append(len(chosen))
                    if t and there[b][t - 1]:
                        same.append(chosen == sets[t - 1])
                for first in range(0, T - 15, 16):
                    if all(there[b][first : first + 16]):
                        unions.append(len(set().union(*sets[first : first + 16])))
                        window_sizes += [len(chosen) for chosen in sets[first : first + 16]]
    return {
        "rows": len(lengths),
        "tokens_mean": sum(lengths) / len(lengths),
        "tokens_min": min(lengths),
        "tokens_max": max(lengths),
        "blocks_mean": sum(sizes) / len(sizes),
        "union_blocks_mean": sum(unions) / len(unions) if unions else None,
        "union_ratio": (
            (sum(unions) / len(unions)) / (sum(window_sizes) / len(window_sizes))
            if unions
            else None
        ),
        "same_as_previous_share": sum(same) / len(same) if same else None,
    }


def expect_gates(calls: list[tuple[Tensor, tuple[str, ...]]]) -> dict[str, Any]:
    gates: dict[str, list[float]] = {b: [] for b in ALL}
    shares: dict[str, list[float]] = {b: [] for b in ALL}
    entropy: list[float] = []
    collapsed: list[bool] = []
    count = invalid = massless = 0
    for tensor, branches in calls:
        for row in tensor.double().flatten(0, 2).tolist():
            on = {b: row[i] for i, b in enumerate(ALL) if b in branches}
            if not all(0 <= x < math.inf for x in on.values()):
                invalid += 1
                continue
            count += 1
            total = sum(on.values())
            massless += total == 0
            for b, x in on.items():
                gates[b].append(x)
                if total:
                    shares[b].append(x / total)
            if total:
                entropy.append(-sum(x / total * math.log(x / total) for x in on.values() if x))
                collapsed.append(max(on.values()) > 0.95 * total)

    def mean(values: list[float] | list[bool]) -> float | None:
        return sum(values) / len(values) if values else None

    return {
        "gate_rows": count,
        "gate_rows_invalid": invalid,
        "gate_rows_massless": massless,
        "gate_mean": {b: mean(gates[b]) for b in ALL},
        "branch_share": {b: mean(shares[b]) for b in ALL},
        "gate_entropy": mean(entropy),
        "collapse_share": mean(collapsed),
    }


def assert_equal(summary: Summary, want: dict[str, Any], *, rel: float = 1e-12) -> None:
    got = summary.to_mapping()
    for name, value in want.items():
        nested = isinstance(value, dict)
        for key, wanted in value.items() if nested else [(name, value)]:
            found = got[name][key] if nested else got[name]
            if wanted is None:
                assert found is None, (name, key)
                assert summary.reasons[f"{name}.{key}" if nested else name]
            else:
                assert found == pytest.approx(wanted, rel=rel, abs=1e-15), (name, key)


def random_gates(*shape: int, seed: int) -> Tensor:
    """fp64, sharp enough that some rows collapse."""
    return (4 * randn(*shape, 3, seed=seed, dtype=torch.float64)).sigmoid()


def observe_both(seed: int, tokens: int = 20) -> tuple[dict[str, Any], dict[str, Any]]:
    """One call of each, and what it amounts to on its own."""
    blocks, gates = (
        random_blocks(1, tokens, 2, 4, start=[50], seed=seed),
        random_gates(1, tokens, 4, seed=seed),
    )
    statistics.observe_selection(blocks, q_start=50, sel_block=SEL_BLOCK)
    statistics.observe_gates(gates, ALL)
    return expect_selection([(blocks, [50], None)]), expect_gates([(gates, ALL)])
