"""A rank's supervisor, for torchrun: argv is FAULT OUT [CHECKPOINT]; the fault is rank 1's."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from nsa import settings
from nsa.train.config import RunConfig
from nsa.train.run_folder import wait_for_resolved, write_resolved
from nsa.train.watchdog import supervise
from tests.nsa.train.test_provoked import WORKER, config_of

GRACE_S = 1.0
PHASES = ("data", "step", "save")
LIMITS_S = {  # of the phase that the fault is in; of the first two, rank 0 may begin later
    "hang in connect": 10.0,
    "hang in load": 10.0,
    **{f"hang in {phase}": 4.0 for phase in PHASES},
    "killed": 0.0,
}


def run_config(out: Path, **sections: dict[str, Any]) -> RunConfig:
    """Nine steps, over so few shards that twelve batches of one process take some of them twice."""
    return config_of(out, data={"shards": 8}, train={"steps": 9}, **sections)


def main(fault: str, out: Path, rest: list[str]) -> int:
    place = settings.launched_place()
    assert place is not None
    # a rank that waits for another one is in the same phase as long, so the other's limit is later
    watchdog = {"grace_s": GRACE_S, **{f"{phase}_s": 60.0 for phase in PHASES}}
    watchdog |= {"connect_s": 120.0, "load_s": 120.0}
    if place.rank == 1 and fault.startswith("hang in "):
        watchdog[f"{fault.removeprefix('hang in ')}_s"] = LIMITS_S[fault]
    config = run_config(out, watchdog=watchdog, parallel={"timeout_s": 120})
    if place.rank == 0:
        out.mkdir(exist_ok=True)
        write_resolved(out, config)
    else:
        wait_for_resolved(out, config)
    own = fault if place.rank == 1 else "none"
    argv = [sys.executable, str(WORKER), own, str(out), *rest]
    return supervise(argv, out, config.watchdog, place.rank)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
