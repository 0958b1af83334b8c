"""The nouns that every room shares, and the files they are stored in."""

from perfbench.records.baseline_file import Baseline, BaselineCell, BaselineProblem
from perfbench.records.baseline_file import load_baseline, baseline_path, parse_baseline
from perfbench.records.baseline_file import read_baseline, show_baseline
from perfbench.records.baseline_file import MAKE_ONE, PROMOTE, retire_baseline, write_baseline
from perfbench.records.calibration_file import read_calibration, variance_of_cells
from perfbench.records.cells import ATTENTION, AXES, Axis, BACKWARD, CACHED, Cell
from perfbench.records.cells import EVERYTHING, Match, NOT_APPLICABLE, PAGED, ProofKey
from perfbench.records.cells import SELECTED, SELECTIONS, STEPS, TRAINED, TRAINING, Term, Value
from perfbench.records.cells import check_axis, proof_key, torch_dtype_name, why_not_here
from perfbench.records.cells import select_cells, settings_of, show_value, with_choices
from perfbench.records.digests import LINE_KEY
from perfbench.records.measured import MEASURED
from perfbench.records.bounds import BOUNDS, bounds_of, measured_of
from perfbench.records.job import Injection, Job, MeasureOptions, OF_RANKS, SENTINEL_UNITS
from perfbench.records.job import failed, utc_now
from perfbench.records.kernel_table import Kernel, Kernels, own_times, table_path, totalled
from perfbench.records.memory_table import Memory, MemoryRow, table_of_memory
from perfbench.records.rerun import injection_words, without_resume
from perfbench.records.rerun import revisions_to_type, source_name, typed_revisions
from perfbench.records.rows import BranchLine, CacheLine, ConfirmationPlan, Environment, Expect
from perfbench.records.rows import LengthProof, LoadedPeer, LoopLine, NOT_IN_OLDER, NOT_RECORDED
from perfbench.records.rows import LoadedCode, METHOD_VERSION, Manifest, OtherClocks, ParityLine
from perfbench.records.rows import Physics, PlannedCell, Profile, Replicate, Resumed, RouteLine
from perfbench.records.rows import Run, SentinelLine, Source, Status, StepProof, StoredCell
from perfbench.records.rows import CardLine, build_validators
from perfbench.records.ranks import RankLine, RanksLine, Telemetry
from perfbench.records.run_file import COMPRESSED_RUN_FILE, MAX_REPLICATES, RUN_FILE, RunWriter
from perfbench.records.run_file import create_run, has_run, new_run_id, open_for_resume
from perfbench.records.run_file import is_compressed_run, read_run
from perfbench.records.verdict import EXIT_OF, FAIL_UNDER_STRICT, Verdict
from perfbench.records.atomic_write import whole_file
from perfbench.records.peers import BUILT_IN, CACHED_DENSE, ENTRY_POINTS, Kind, PREFIXES, Peer
from perfbench.records.peers import kind_of
from perfbench.records.regular_file import read_regular_file
from perfbench.records.own_step import OwnStepFile, OwnStepLine, is_own_step
from perfbench.records.trained_blocks import TrainedBlocks, read_trained_blocks
from perfbench.records.cell_names import cell_of_id, find_cell, shared_axes, short_ids
from perfbench.records.cell_names import varying_axes
