"""What this computer is, and what the doctor says of it."""

from perfbench.machine.clock_events import THROTTLING, reason_names, REASON_BITS
from perfbench.machine.environment import TargetFit, check_target, collect as collect_environment
from perfbench.machine.environment import give, no_color, step_summary, uuid_sha256
from perfbench.machine.environment import variable as environment_variable, visible_gpu
from perfbench.machine.gpu import NVML_LAG_S, gpu_lock, refuse_busy, used_memory
from perfbench.machine.nvml import NvmlUnavailable, query as nvml_query, session as nvml_session
from perfbench.machine.source import source
