"""The nouns that every room shares, and the files they are stored in."""

from perfbench.records.baseline_file import Baseline, BaselineCell, BaselineProblem
from perfbench.records.baseline_file import SCHEMA_VERSION as BASELINE_SCHEMA_VERSION
from perfbench.records.baseline_file import load as load_baseline, path_for as baseline_path
from perfbench.records.baseline_file import read as read_baseline, show as show_baseline
from perfbench.records.baseline_file import write as write_baseline
from perfbench.records.calibration_file import read as read_calibration, told as variance_of_cells
from perfbench.records.cells import ATTENTION, AXES, Axis, BACKWARD, CACHED, Cell, DEFAULT_CHUNK
from perfbench.records.cells import EVERYTHING, Match, NOT_APPLICABLE, ProofKey, SELECTED
from perfbench.records.cells import SELECTIONS, STEPS, Term, Value, check_axis, proof_key
from perfbench.records.cells import select as select_cells, settings_of, show as show_value
from perfbench.records.cells import torch_dtype_name, why_not_here
from perfbench.records.job import Injection, Job, MeasureOptions, SENTINEL_UNITS, failed, utc_now
from perfbench.records.kernel_table import Kernel, Kernels, own_times, table_beside, totalled
from perfbench.records.rerun import asked as typed_revisions, injections as injection_words
from perfbench.records.rerun import name_of as source_name, to_type as revisions_to_type
from perfbench.records.rows import BranchLine, CacheLine, Environment, Expect, METHOD_VERSION
from perfbench.records.rows import Manifest, ParityLine, Physics, PlannedCell, Profile, Replicate
from perfbench.records.rows import Resumed, RouteLine, Run, SentinelLine, Source, Status, Telemetry
from perfbench.records.run_file import COMPRESSED_NAME as COMPRESSED_RUN_FILE
from perfbench.records.run_file import FILE_NAME as RUN_FILE, MAX_REPLICATES, RunWriter
from perfbench.records.run_file import create as create_run, has_run, new_run_id, open_for_resume
from perfbench.records.run_file import is_compressed as is_compressed_run
from perfbench.records.run_file import read as read_run
from perfbench.records.verdict import EXIT_OF, FAIL_UNDER_STRICT, Verdict
