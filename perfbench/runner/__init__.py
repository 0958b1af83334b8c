"""Decides which job is next, in which process, and stores its row before the next one."""

from perfbench.runner.ab.bisect import BisectResult, Ending, find_first_bad, pairs_ahead
from perfbench.runner.ab.bisect_pairs import BisectFile, PairMeasurer, interrupted
from perfbench.runner.ab.bisect_pairs import read_bisect, resume_command, write_bisect
from perfbench.runner.ab.checkout import CannotBuild, Checkout, checked_out, is_commit, own_checkout
from perfbench.runner.ab.commits import SHORT, Commit, CommitRange, changes_between
from perfbench.runner.ab.commits import commits_between, touching
from perfbench.runner.ab.confirm import CONFIRM_FOLDER, Confirmation, base_commits
from perfbench.runner.ab.confirm import confirm_cells, stored_confirmation
from perfbench.runner.ab.own_sides import shared_steps
from perfbench.runner.ab.pair import Pair, PairSpec, are_paired, is_pair, new_pair_folder, read_pair
from perfbench.runner.ab.schedule import measure_pair
from perfbench.runner.ab.version_executor import prepared_versions
from perfbench.runner.ab.version_plan import plan_of_version
from perfbench.runner.context import MeasuringContext
from perfbench.runner.executor import Executor, held_cards, prepared_executors
from perfbench.runner.fleet import open_fleet, run_on_fleet
from perfbench.runner.progress import SilentProgress, progress_for
from perfbench.runner.run import RunSpec, parse_injection, run_matrix
