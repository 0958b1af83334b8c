"""The user's own table from a run of `perfbench tune`: what is written, what is refused, and what
`auto` will do otherwise.

Pure: `perfbench.commands.tune` reads and writes the file.
"""

from __future__ import annotations

from collections.abc import Sequence

from nsa.config import ModelConfig
from nsa.routing import Capability, CardEntry, Request, Route, UserTable, plan
from perfbench.errors import Exit
from perfbench.machine import THRESHOLDS
from perfbench.records import torch_dtype_name
from perfbench.text import plain
from perfbench.tuning.decide import TunedRun, thresholds


def refusals(tuned: TunedRun, here: Capability, nsa_sha256: str) -> list[str]:
    """Why nothing may be written from this run; empty where it may.

    ``here`` and ``nsa_sha256``: this machine, and the files of its nsa. A run of other kernels, or
    of a card that is not at hand, could be anybody's.
    """
    manifest, judged = tuned.run.manifest, tuned.judgement
    env, found = manifest.environment, []
    if tuned.exit_code is not Exit.OK:
        found.append(f"it is exit {int(tuned.exit_code)}, so not every cell is proved")
    doubts = [f"{one.verdict}: {one.reason}" for one in judged.findings]
    doubts += [f"{one.cell_id}: {one.verdict}" for one in judged.cells if one.verdict is not None]
    if doubts:
        more = f" and {len(doubts) - 1} more" if len(doubts) > 1 else ""
        found.append(plain(f"its judgement says {doubts[0]}{more}"))
    if not tuned.run.is_verified:
        found.append("it carries no digests, so it may have been edited")
    if here.sm is None or (env.device_name, tuned.sm) != (here.device_name, here.sm):
        found.append(plain(f"it is of {env.device_name}, and this machine has {here.device_name}"))
    # a table decides for auto, and such a run names its paths
    given = [f"{k}={v}" for k, v in sorted(env.nsa_settings.items()) if k != THRESHOLDS]
    if given:
        found.append(
            plain(f"it was measured with {', '.join(given)}, which `auto` reads it without")
        )
    if manifest.source.nsa_sha256 != nsa_sha256:
        found.append("it measured another nsa than the one that is installed here")
    if thresholds(tuned) is None:
        found.append("path triton was not judged")
    return found


def entry_of(tuned: TunedRun, model: ModelConfig, kernels_sha256: str) -> CardEntry:
    """What the table holds of a run that nothing refuses."""
    manifest, found = tuned.run.manifest, thresholds(tuned)
    env = manifest.environment
    assert found is not None and tuned.sm is not None and manifest.source.nsa_sha256 is not None
    return CardEntry(
        device_name=env.device_name,
        sm=tuned.sm,
        dtype=torch_dtype_name(manifest.cells[0].axes.dtype),
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        v_head_dim=model.value_dim,
        triton_min_tokens=found[0],
        fa2_min_len_win=found[1],
        longest_tokens=tuned.lengths[-1],
        run_id=manifest.run_id,
        commit=manifest.source.commit,
        nsa_sha256=manifest.source.nsa_sha256,
        kernels_sha256=kernels_sha256,
        torch=env.torch,
        triton=env.triton or "unknown",
        date=manifest.created_utc,
    )


def with_entry(entries: Sequence[CardEntry], new: CardEntry) -> tuple[CardEntry, ...]:
    """The entries with this one in the place of what was of its card, dtype and shape."""
    return (*(one for one in entries if one.key != new.key), new)


def changes(
    before: UserTable | None,
    after: UserTable,
    model: ModelConfig,
    lengths: Sequence[int],
    entry: CardEntry,
    here: Capability,
) -> list[str]:
    """One line a length: what path=auto took of this model on this card, and what it takes now."""
    found = []
    for tokens in lengths:
        old, new = (
            _taken(
                plan(
                    Request(table=table),
                    model,
                    batch=1,
                    tokens=tokens,
                    dtype=entry.dtype,
                    capability=here,
                )
            )
            for table in (before, after)
        )
        found.append(f"{tokens} tokens: {old}" + (", as before" if old == new else f" -> {new}"))
    return found


def _taken(route: Route) -> str:
    return " ".join(f"{one.branch}.{one.implementation}" for one in route.branches)


def shown(table: UserTable) -> list[str]:
    """One line an entry: for which card and shape, what it says, and by which run."""
    return [
        f"{one.device_name} (SM {one.sm[0]}.{one.sm[1]}), {one.dtype}, {one.num_heads} heads on"
        f" {one.num_kv_heads} of {one.head_dim} and {one.v_head_dim}: path triton from"
        f" {one.triton_min_tokens} keys, FA-2 in the window from"
        f" {'an unknown number of' if one.fa2_min_len_win is None else one.fa2_min_len_win};"
        f" measured to {one.longest_tokens} tokens by run {one.run_id}, {one.date}"
        + ("" if one.kernels_sha256 == table.kernels_sha256 else ", with other kernels than these")
        for one in table.entries
    ]
