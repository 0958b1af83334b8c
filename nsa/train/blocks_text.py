"""The statistics of a file of blocks, for a reader: a line a number, a column a layer. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NAMES = (
    ("blocks", "queries_that_choose", "queries that choose"),
    ("summary", "blocks_mean", "blocks a query"),
    ("summary", "tokens_mean", "tokens a query"),
    ("summary", "union_ratio", "distinct blocks of 16 queries / one's"),
    ("summary", "same_as_previous_share", "same set as the previous query"),
    ("blocks", "shared_with_previous_share", "free blocks shared with it"),
    ("blocks", "equal_in_all_heads_share", "same set in all KV heads"),
    ("blocks", "hottest_block_share", "free blocks that are the hottest one"),
    ("blocks", "hottest_1pct_share", "free blocks in the hottest 1 %"),
    ("summary", "gate_entropy", "gate entropy, nats"),
)


def blocks_table(about: Mapping[str, Any]) -> list[list[str]]:
    """Rows of text: a name, then a value for each layer; the first row is the head."""
    layers = about["layers"]
    rows = [["", *(f"layer {layer}" for layer in layers)]]
    for section, key, name in _NAMES:
        rows.append([name, *(_shown(key, one[section].get(key)) for one in layers.values())])
    for branch in ("cmp", "sel", "win"):
        shares = [one["summary"]["branch_share"][branch] for one in layers.values()]
        rows.append([f"gate mass of {branch}", *(_shown("share", share) for share in shares)])
    spread = [one["blocks"]["distance_share"] for one in layers.values()]
    for octave in max(spread, key=len, default={}):
        values = [_shown("share", one.get(octave, 0.0) if one else None) for one in spread]
        rows.append([f"free blocks {octave} back", *values])
    return rows


def blocks_lines(about: Mapping[str, Any]) -> list[str]:
    """What the blocks are of, and `blocks_table` in columns."""
    rows = blocks_table(about)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        blocks_head(about),
        *(
            "  ".join(
                [row[0].ljust(widths[0])]
                + [value.rjust(width) for value, width in zip(row[1:], widths[1:], strict=True)]
            )
            for row in rows
        ),
    ]


def blocks_head(about: Mapping[str, Any]) -> str:
    """'run mine, step 300: 16,384 tokens of held out text, 1.2345 nats a token'."""
    run, checkpoint = about["run"]["name"], about["checkpoint"]["step"]
    return (
        f"run {run}, step {checkpoint:,}: {about['tokens']:,} tokens ({about['text']['source']}),"
        f" {about['held_out']['loss_nats']:.4f} nats a token"
    )


def _shown(key: str, value: float | None) -> str:
    if value is None:
        return "-"
    if key.endswith("share"):
        return f"{100 * value:.1f} %"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"
