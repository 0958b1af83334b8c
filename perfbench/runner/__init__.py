"""Decides which job is next, in which process, and stores its row before the next one."""

from perfbench.runner.ab.checkout import CannotBuild, Side, own_side, side as checked_out_side
from perfbench.runner.ab.confirm import FOLDER as CONFIRM_FOLDER, Ground, base_commits
from perfbench.runner.ab.confirm import confirm as confirm_cells, stored as stored_confirmation
from perfbench.runner.ab.pair import Pair, Task, are_paired, is_pair, new_folder as new_pair_folder
from perfbench.runner.ab.pair import read as read_pair
from perfbench.runner.ab.schedule import interleave, prepared as prepared_pair
from perfbench.runner.ab.version_plan import plan_of as plan_of_version
from perfbench.runner.executor import Executor
from perfbench.runner.progress import SilentProgress, progress_for
from perfbench.runner.run import parse_injection
from perfbench.runner.schedule import without_resume
