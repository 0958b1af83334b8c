"""What `auto` knows of path triton's speed on a card: by the user's own table, by what was measured
for the package, or by an estimate, in this order.

Pure, like all of nsa.routing. No reason names the sequence length (see nsa.routing.decide).
"""

from __future__ import annotations

from dataclasses import dataclass

from nsa.routing.cards import CARDS
from nsa.routing.nouns import Capability, Problem, Request
from nsa.routing.support import FA2_DTYPES
from nsa.routing.thresholds import ESTIMATE_MARGIN, TUNED
from nsa.routing.user_table import CardEntry, UserTable, shape_class

ESTIMATED_BLOCK = 64  # at 128 the selected backward spills 360 bytes a thread on SM 8.9
MEASURES_IT = "`perfbench tune --apply` measures it"


@dataclass(frozen=True, slots=True)
class Speed:
    """``why``: on which ground `auto` takes path triton; ``against``: why it does not, "" where it
    does. ``note``: what the user's table could not decide, "" for nothing.
    """

    why: str
    against: str = ""
    note: str = ""


def speed_of(request: Request, problem: Problem, capability: Capability) -> Speed:
    """What is known of path triton for this problem on a GPU."""
    assert capability.sm is not None
    table, note = request.table, ""
    if table is not None:
        entry = entry_for(table, problem, capability)
        if entry is not None:
            return _by_table(table, entry, problem, capability)
        if problem.dtype in FA2_DTYPES:
            note = (
                f"the user's table {table.path} holds nothing of {capability.device_name};"
                f" {MEASURES_IT}"
            )
    tuned = TUNED.get(capability.sm)
    if tuned is None:
        return _estimated(problem, capability.sm, note)
    least, against = tuned.triton_min_tokens, ""
    if least and problem.k_tokens < least:
        against = f"fewer than {least} keys, where it is not the fastest"
    return Speed("auto: what nsa.routing.thresholds names for this GPU", against, note)


def entry_for(table: UserTable, problem: Problem, capability: Capability) -> CardEntry | None:
    """The table's entry for a problem on this card, of its shape class where there is one, else
    the most reluctant one; None for another card, and for dtypes that no table holds.
    """
    if capability.sm is None or problem.dtype not in FA2_DTYPES:
        return None
    wanted = shape_class(
        problem.num_heads, problem.num_kv_heads, problem.head_dim, problem.v_head_dim
    )
    found: CardEntry | None = None
    for one in table.of_card(capability.device_name, capability.sm):
        if one.shape() == wanted:
            # bf16 and fp16 cost the kernels the same; its own outranks the other
            if one.dtype == problem.dtype:
                return one
            if found is None or found.shape() != wanted:
                found = one
        elif found is None or (
            found.shape() != wanted and one.triton_min_tokens > found.triton_min_tokens
        ):
            found = one
    return found


def table_says_of_window(request: Request, problem: Problem, capability: Capability) -> list[str]:
    """Why fa2=auto takes no FA-2 for the window by the user's table; empty where it does."""
    table = request.table
    entry = None if table is None else entry_for(table, problem, capability)
    if table is None or entry is None or not entry.fa2_min_len_win:
        return []
    if problem.k_tokens >= entry.fa2_min_len_win:
        return []
    return [
        f"fewer than {entry.fa2_min_len_win} keys, where SDPA is as fast by the user's table"
        f" {table.path}"
    ]


def _by_table(
    table: UserTable, entry: CardEntry, problem: Problem, capability: Capability
) -> Speed:
    said = [f"measured on {entry.device_name}, run {entry.run_id}"]
    if entry.shape() != shape_class(
        problem.num_heads, problem.num_kv_heads, problem.head_dim, problem.v_head_dim
    ):
        said.append(
            f"for {entry.num_heads} heads on {entry.num_kv_heads} of {entry.head_dim}, not this"
            " shape"
        )
    old = []
    if entry.kernels_sha256 != table.kernels_sha256:
        old.append("other kernels of nsa than these")
    if entry.torch != capability.torch_version:
        old.append(f"torch {entry.torch}")
    if f"triton {entry.triton}" != capability.triton_provider:
        old.append(f"triton {entry.triton}")
    if old:
        said.append(f"with {' and '.join(old)}, so `perfbench tune --apply` may say otherwise now")
    by = f"by the user's table {table.path} ({'; '.join(said)})"
    least, against = entry.triton_min_tokens, ""
    if least and problem.k_tokens < least:
        against = f"fewer than {least} keys, where it is not the fastest {by}"
    return Speed(f"auto: {by}", against)


def _estimated(problem: Problem, sm: tuple[int, int], note: str) -> Speed:
    """By the keys that a query reads in dense attention, (2S - T) / 2 in the mean, over those that
    it reads here, of which (2S - T) / 2d are compressed: at least ESTIMATE_MARGIN.
    """
    if sm not in CARDS:
        name = f"SM {sm[0]}.{sm[1]}"
        return Speed("", f"its kernels were never compiled for {name}; {MEASURES_IT}", note)
    if problem.kept_tokens is None or problem.cmp_stride is None:
        text = (
            "not measured on this card, and a branch alone names no sizes of the others to"
            f" estimate from; {MEASURES_IT}"
        )
        return Speed("", text, note)
    if problem.sel_block is None or problem.sel_block > ESTIMATED_BLOCK:
        text = (
            "not measured on this card, and its tiles of selection blocks of more than"
            f" {ESTIMATED_BLOCK} tokens may spill registers there; {MEASURES_IT}"
        )
        return Speed("", text, note)
    twice, d = 2 * problem.k_tokens - problem.q_tokens, problem.cmp_stride
    if twice * d < ESTIMATE_MARGIN * (twice + 2 * d * problem.kept_tokens):
        text = (
            "not measured on this card, and estimated not to pay: a query of dense attention reads"
            f" less than {ESTIMATE_MARGIN} times as many keys; {MEASURES_IT}"
        )
        return Speed("", text, note)
    why = (
        "auto: estimated, not measured on this card: a query of dense attention reads at least"
        f" {ESTIMATE_MARGIN} times as many keys; {MEASURES_IT}"
    )
    return Speed(why, "", note)
