"""Where a run would take place: ``python -m nsa.train.machine`` answers in JSON.

The supervisor asks in a process of its own, so that it holds neither torch nor a CUDA context.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass

from nsa import capability
from nsa.routing import Capability
from nsa.train.errors import TrainError, TrainExit

ASK_TIMEOUT_S = 300  # importing torch from a cold network disk takes a minute


@dataclass(frozen=True, slots=True)
class TrainMachine:
    """``memory_bytes`` of its first GPU as its driver has it; None: no GPU, or not at hand."""

    capability: Capability
    memory_bytes: int | None


def machine_of(device: str, gpu: str | None) -> TrainMachine:
    """Of train.device ``device``, or of a GPU that is not at hand, by its name in
    `nsa.capability.KNOWN_GPUS`.

    ValueError for another name; TrainError DEVICE where this machine does not answer.
    """
    if gpu is not None:
        return TrainMachine(capability.assumed(gpu), None)
    if device == "cpu":
        return TrainMachine(capability.assumed("none"), None)
    command = [sys.executable, "-m", "nsa.train.machine"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=ASK_TIMEOUT_S, check=True
        )
    except subprocess.TimeoutExpired:
        raise _silent(f"no answer within {ASK_TIMEOUT_S} s") from None
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no message"])[-1]
        raise _silent(last) from None
    answer = json.loads(done.stdout.splitlines()[-1])
    found = answer["capability"]
    sm = None if found["sm"] is None else tuple(found["sm"])
    return TrainMachine(Capability(**{**found, "sm": sm}), answer["memory_bytes"])


def _silent(why: str) -> TrainError:
    return TrainError(
        TrainExit.DEVICE,
        f"asking torch for this machine's devices failed: {why}; wanted its answer; run python -m"
        " nsa.train.machine, or --set train.device=cpu",
    )


def main() -> int:
    import torch

    here = capability.this_machine()
    memory = None
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory
    sys.stdout.write(json.dumps({"capability": asdict(here), "memory_bytes": memory}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
