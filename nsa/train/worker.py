"""The trainer's process: ``python -m nsa.train.worker OUT [CHECKPOINT]``, started by the supervisor
or, without one, by hand.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import torch

from nsa import RouteError, settings
from nsa.train import stacks
from nsa.train.collective import is_of_a_collective
from nsa.train.config import RunConfig
from nsa.train.errors import TrainError, TrainExit
from nsa.train.loop import Trainer
from nsa.train.watchdog import begin_alone


def main(argv: Sequence[str]) -> int:
    out = Path(argv[0])
    resume = Path(argv[1]) if len(argv) > 1 else None
    place = settings.launched_place()
    rank = 0 if place is None else place.rank
    begin_alone(out, rank)
    stacks.install(stacks.stacks_path(out, rank))
    mapping = json.loads((out / "config.json").read_text(encoding="utf-8"))
    config = RunConfig.from_mapping(mapping["config"])
    trainer = Trainer(config, out, resume=resume, notify=_show)
    try:
        return trainer.run()
    except TrainError as error:
        if place is not None:  # where it was when another rank's end reached it
            _keep_stack(out, rank)
        return _fail(error.code, str(error))
    except RouteError as error:
        return _fail(TrainExit.USAGE, str(error))
    except torch.OutOfMemoryError as error:
        step = trainer.step_count + 1
        return _fail(TrainExit.MEMORY, f"out of memory in step {step}: {error}")
    except RuntimeError as error:
        if place is None or not is_of_a_collective(error):
            raise
        _keep_stack(out, rank)
        return _fail(
            TrainExit.PEER,
            f"a collective failed in step {trainer.step_count + 1}: {error}; another rank has ended"
            " or hangs; read its output and stacks",
        )
    except KeyboardInterrupt:
        return _fail(TrainExit.INTERRUPTED, "interrupted twice; the last good checkpoint stays")


def _keep_stack(out: Path, rank: int) -> None:
    """Append the stack of the error that is handled to this rank's stacks, if the disk takes it."""
    with suppress(OSError), stacks.stacks_path(out, rank).open("a", encoding="utf-8") as file:
        traceback.print_exc(file=file)


def _show(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _fail(code: TrainExit, message: str) -> int:
    sys.stderr.write(f"nsa.train: {' '.join(message.split())}\n")
    return code


def _leave(code: int) -> NoReturn:
    """End a rank at once: a thread of gloo that outlives its group aborts an interpreter that ends
    in the usual way, once in some 13 runs.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if settings.launched_place() is not None:
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    _leave(main(sys.argv[1:]))
