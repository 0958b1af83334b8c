"""The folder of a run: its resolved config and its checkpoints; what a run begins with.

Imports no torch.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nsa.train.config import RunConfig
from nsa.train.errors import TrainError, TrainExit
from nsa.train.manifest import MANIFEST

CONFIG = "config.json"
EXPORTED = "model.safetensors"
WAIT_FOR_FIRST_RANK_S = 300.0
_POLL_S = 0.1


def checkpoint_of(out: Path, named: str, option: str = "--resume") -> Path:
    """The folder that ``named``, the value of ``option``, names: a checkpoint; of another run's
    folder its last good one; "auto" for the last good one of ``out``. TrainError CHECKPOINT.
    """
    if named != "auto":
        path = Path(named).resolve()
        if not path.is_dir():
            raise _no_checkpoint(f"{option} {named} is no folder", out, option)
        if (path / "checkpoints").is_dir():
            return checkpoint_of(path, "auto", option)
        if not (path / MANIFEST).is_file():
            raise _no_checkpoint(f"{option} {named} holds no {MANIFEST}", out, option)
        return path
    pointer = out / "checkpoints" / "last-good"
    try:
        name = pointer.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        if option == "--resume":
            step = "train without --resume to begin anew, or name the run's folder"
        else:
            step = f"{naming(option)} names one of another folder, or train until one is saved"
        raise TrainError(
            TrainExit.CHECKPOINT, f"found no checkpoint in {out}; wanted {pointer}; {step}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise TrainError(
            TrainExit.CHECKPOINT,
            f"cannot read {pointer}: {error}; {naming(option)} names one",
        ) from None
    # the second name is one's of which a newer save of the same step was about to take the place
    names = (name, f"{name}.replaced") if name and Path(name).name == name else ()
    found = [pointer.parent / one for one in names if (pointer.parent / one).is_dir()]
    if not found:
        raise TrainError(
            TrainExit.CHECKPOINT,
            f"{pointer} names {name!r}, which is no checkpoint there; {naming(option)} names one",
        )
    return found[0]


def naming(option: str) -> str:
    """``option`` with a value, as it is written: of the command line, or of a config."""
    return f"{option} PATH" if option.startswith("-") else f"{option}=PATH"


def source_of(named: str) -> Path:
    """The checkpoint or the exported folder that train.init_from=``named`` is: of a run's folder
    its last good one. TrainError CHECKPOINT for none.
    """
    path = Path(named).resolve()
    if (path / EXPORTED).is_file():
        return path
    if (path / MANIFEST).is_file() or (path / "checkpoints").is_dir():
        return checkpoint_of(path, named, "train.init_from")
    raise TrainError(
        TrainExit.CHECKPOINT,
        f"train.init_from={named} is no run with a checkpoint, no checkpoint and no export; wanted"
        " the folder of one of these",
    )


def _no_checkpoint(what: str, out: Path, option: str) -> TrainError:
    last = "--resume" if option == "--resume" else f"no {option}"
    return TrainError(
        TrainExit.CHECKPOINT,
        f"{what}; wanted a checkpoint, such as {out}/checkpoints/step-00000500; {last} takes the"
        " last good one",
    )


def write_resolved(out: Path, config: RunConfig, *, job: str | None = None) -> None:
    """Write ``out``/config.json whole or not at all. ``job`` as in `launch.launch`."""
    text = json.dumps(
        {
            "sha256": config.sha256(),
            "config": config.to_mapping(),
            "launcher": _launcher(job),
            "written_s": time.time(),
        },
        indent=2,
    )
    whole = out / f".{CONFIG}.{os.getpid()}"
    try:
        with whole.open("w", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        whole.replace(out / CONFIG)
    except OSError as error:
        whole.unlink(missing_ok=True)
        raise TrainError(
            TrainExit.USAGE,
            f"cannot write {out / CONFIG}: {error.strerror}; wanted a folder for the run; --out"
            " names another",
        ) from None


def read_resolved(out: Path) -> dict[str, Any]:
    """What `write_resolved` wrote; TrainError USAGE where ``out`` holds no run."""
    try:
        read = json.loads((out / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no JSON"
        raise TrainError(
            TrainExit.USAGE,
            f"cannot read {out / CONFIG}: {why}; wanted the folder of a run, which python -m"
            " nsa.train CONFIG makes",
        ) from None
    if not isinstance(read, dict) or not isinstance(read.get("config"), dict):
        raise TrainError(
            TrainExit.USAGE, f"{out / CONFIG} holds no config; wanted the folder of a run"
        )
    return read


def wait_for_resolved(
    out: Path,
    config: RunConfig,
    *,
    job: str | None = None,
    timeout_s: float = WAIT_FOR_FIRST_RANK_S,
) -> None:
    """Wait until rank 0 of this run has written ``out``/config.json; TrainError PEER where it does
    not. An older run's file in the same folder is not taken for it. ``job`` as in `launch.launch`.
    """
    begin_s = time.time()
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if (out / CONFIG).is_file():
            read = read_resolved(out)
            if _is_of_this_run(read, job, begin_s) and read.get("sha256") == config.sha256():
                return
        time.sleep(_POLL_S)
    raise TrainError(
        TrainExit.PEER,
        f"rank 0 wrote no {out / CONFIG} of this config within {timeout_s:.0f} s; wanted the same"
        " command and folder on each rank, and one --job where not torchrun started them; see its"
        " log",
    )


def _is_of_this_run(read: Mapping[str, Any], job: str | None, begin_s: float) -> bool:
    launcher, own = read.get("launcher"), _launcher(job)
    if job is not None:
        return launcher == own
    if isinstance(launcher, dict) and launcher.get("host") == own["host"]:
        return launcher == own
    # another host: clocks of one cluster differ by less, and torchrun starts ranks together
    return float(read.get("written_s", 0.0)) > begin_s - 60.0


def _launcher(job: str | None) -> dict[str, Any]:
    """What the ranks of this run have in common, and no other run has: a job's name, or torchrun's
    process, which starts all ranks of a host.
    """
    return {"host": platform.node(), "pid": os.getppid()} if job is None else {"job": job}
