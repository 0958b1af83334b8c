"""What a run would find on this machine, and what is wrong with one that was made: a line each,
with what to do.

Needs no GPU and imports no torch. `driver` asks the driver, `install` the installation, `log` a run
or a log.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perfbench.machine import environment
from perfbench.machine.doctor import driver, install
from perfbench.machine.doctor.findings import DoctorLine

VISIBLE = "CUDA_VISIBLE_DEVICES"


def diagnose(
    root: Path = Path(),
    *,
    gpu: str | None = None,
    module: Any | None = None,
    environ: Mapping[str, str] | None = None,
) -> list[DoctorLine]:
    """Every line, in the order in which a fault hides the next one.

    ``gpu`` is looked at in place of what CUDA_VISIBLE_DEVICES names, and spelled like it;
    ``module`` stands in for pynvml, ``environ`` for the process's environment.
    """
    order = environment.environment_variable("CUDA_DEVICE_ORDER", environ)
    source, listed = (
        ("--gpu", gpu)
        if gpu is not None
        else (VISIBLE, environment.environment_variable(VISIBLE, environ))
    )
    sight = driver.look(source, listed, order, module)
    return [
        *driver.lines(sight, module),
        *install.lines(
            root, has_gpu=sight.gpu is not None, driver_cuda=sight.driver_cuda, environ=environ
        ),
    ]
