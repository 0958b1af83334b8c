"""The machine as routing sees it, without torch and without CUDA."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perfbench.errors import Exit, PerfbenchError
from perfbench.machine import nvml
from perfbench.machine.environment import TargetFit

if TYPE_CHECKING:
    from nsa.routing import Capability


def capability_here(fit: TargetFit) -> Capability:
    """The capability of the GPU that ``fit`` names, from NVML; of a CPU where it names none.

    ENVIRONMENT where NVML does not know the compute capability.
    """
    # A measuring process imports this room before it knows whose nsa it measures.
    from nsa.capability import assumed, of_gpu

    if fit.gpu is None:
        return assumed("none")
    with nvml.nvml_session() as opened:
        handle, missing = nvml.nvml_query(opened, "nvmlDeviceGetHandleByUUID", fit.gpu.uuid)
        sm = None
        if not missing:
            sm, missing = nvml.nvml_query(opened, "nvmlDeviceGetCudaComputeCapability", handle)
    if missing or sm is None:
        raise PerfbenchError(
            Exit.ENVIRONMENT,
            f"NVML does not report the compute capability of {fit.gpu.name}: {missing}. Next:"
            " `perfbench doctor`",
        )
    return of_gpu(fit.gpu.name, (int(sm[0]), int(sm[1])))
