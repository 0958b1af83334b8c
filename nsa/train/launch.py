"""From a config to the trainer's process. Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from nsa.train.config import RunConfig
from nsa.train.errors import TrainError, TrainExit
from nsa.train.run_folder import (
    checkpoint_of,
    read_resolved,
    source_of,
    wait_for_resolved,
    write_resolved,
)


def launch(config: RunConfig, rank: int, *, resume: str | None, job: str | None = None) -> int:
    """Run the trainer under the watchdog until it ends: its exit code.

    Rank 0 makes the folder config.out, or archives the run that is in it, and writes the resolved
    config; the others wait for that. ``resume``: a checkpoint's folder, "auto" for the last good
    one of config.out, None to begin anew. ``job`` names what started the ranks, where those of a
    host have no parent in common, as torchrun's have; no other run may have it. TrainError
    CHECKPOINT for none or another config's, USAGE for train.init_from in config.out itself.
    """
    from nsa.train.archive import prepare_run_folder
    from nsa.train.display import show_text
    from nsa.train.watchdog import supervise

    out = Path(config.out).resolve()
    checkpoint = None if resume is None else checkpoint_of(out, resume)
    continues = checkpoint is not None and out in checkpoint.parents
    if config.train.init_from is not None and checkpoint is None:
        source = source_of(config.train.init_from)
        if out == source or out in source.parents:
            raise TrainError(
                TrainExit.USAGE,
                f"train.init_from={config.train.init_from} is in {out}, which this run would"
                " archive; wanted another folder for the run; give --out",
            )
    if continues:
        _check_same(out, config)
    with ExitStack() as held:
        if rank == 0:
            folder = held.enter_context(prepare_run_folder(out, resume=continues))
            if folder.archived is not None:
                show_text(f"the run that was in {out} is in {folder.archived} now", sys.stdout)
            write_resolved(out, config, job=job)
        else:
            wait_for_resolved(out, config, job=job)
        argv = [sys.executable, "-m", "nsa.train.worker", str(out)]
        argv += [] if checkpoint is None else [str(checkpoint)]
        return supervise(argv, out, config.watchdog, rank)


def _check_same(out: Path, config: RunConfig) -> None:
    """TrainError CHECKPOINT where the run in ``out`` is of a config that computes something
    else.
    """
    read = read_resolved(out)
    if read.get("sha256") == config.sha256():
        return
    old, new = _flat(RunConfig.from_mapping(read["config"]).identity()), _flat(config.identity())
    changed = [
        f"{key} {old.get(key)!r} -> {new.get(key)!r}"
        for key in sorted({*old, *new})
        if old.get(key) != new.get(key)
    ]
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    longer = ""
    if any(one.startswith("train.steps ") for one in changed):
        longer = (
            ", or begin with its weights in another folder: --set train.init_from="
            f"{out} --out OTHER"
        )
    raise TrainError(
        TrainExit.CHECKPOINT,
        f"the run in {out} is of another config ({', '.join(changed[:3])}{more}); wanted the same;"
        f" give the same command with --resume, or drop --resume to begin anew{longer}",
    )


def _flat(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def without_watchdog(config: RunConfig) -> RunConfig:
    return replace(config, watchdog=replace(config.watchdog, enabled=False))
