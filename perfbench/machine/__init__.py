"""What this computer is, and which code lies on it."""

from perfbench.machine.capability import capability_here
from perfbench.machine.clock_events import THROTTLING, reason_names
from perfbench.machine.environment import TargetFit, check_target, collect_environment
from perfbench.machine.environment import (
    HISTORY_FILE,
    NO_HISTORY,
    compiling_environment,
    configured_history,
    configured_webhook,
    environment_variable,
    pull_request_number,
    workflow_page,
)
from perfbench.machine.environment import adopt_settings, settings_to_adopt
from perfbench.machine.environment import give, no_color, step_summary
from perfbench.machine.environment import THRESHOLDS, visible_gpu, visible_gpus, without_users_table
from perfbench.machine.environment import without_variables
from perfbench.machine.gpu import NVML_LAG_S, gpu_lock, matches, refuse_busy, used_memory
from perfbench.machine.gpu import GpuHandle, uuid_sha256
from perfbench.machine.load import load_now
from perfbench.machine.default_branch import JudgingCommit, judging_commit
from perfbench.machine.nvml import NvmlUnavailable, nvml_query, nvml_session
from perfbench.machine.source import PACKAGE, commit_time, package_sha256, source_of
from perfbench.machine.source import subjects_between
