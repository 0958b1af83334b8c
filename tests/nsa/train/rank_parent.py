"""A rank's supervisor, for torchrun: argv is FAULT OUT [CHECKPOINT]; the fault is rank 1's."""

from __future__ import annotations

import sys
from pathlib import Path

from nsa import settings
from nsa.train.run_folder import wait_for_resolved, write_resolved
from nsa.train.watchdog import supervise
from tests.nsa.train.test_provoked import WORKER, config_of

STALL_S = 4.0
PHASES = ("data", "step", "save")


def main(fault: str, out: Path, rest: list[str]) -> int:
    place = settings.launched_place()
    assert place is not None
    # a rank that waits for another one is in the same phase as long, so the other's limit is later
    limit_s = STALL_S if place.rank == 1 and fault != "none" else 60.0
    watchdog = {"grace_s": 1.0, **{f"{phase}_s": limit_s for phase in PHASES}}
    if fault == "hang in load":
        watchdog["load_s"] = 10.0 if place.rank == 1 else 120.0
    config = config_of(out, watchdog=watchdog, train={"steps": 9}, parallel={"timeout_s": 120})
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
