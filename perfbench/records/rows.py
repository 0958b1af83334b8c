"""The run file: one manifest line, then one line per replicate.

Everything printed is rendered from it.

SI units, units in key names, raw samples kept, NaN and infinity forbidden. Unknown fields survive a
round trip.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, ValidationError
from pydantic_core import PydanticCustomError, core_schema

from perfbench.records.cells import Cell, Value
from perfbench.records.line_settings import LINE_SETTINGS
from perfbench.records.own_step import OwnStepFile, OwnStepLine
from perfbench.records.peers import Peer
from perfbench.records.ranks import RankLine, RanksLine, Telemetry
from perfbench.records.trained_blocks import TrainedBlocks

SCHEMA_VERSION = 3  # 2: sentinel lines; 3: each line carries its digest
DIGESTS_SINCE = 3
METHOD_VERSION = 1  # raise it whenever a number would change although the measured code did not


class _Record(BaseModel):
    model_config = LINE_SETTINGS


class _AsMapping:
    """Reads a Cell from the mapping of axes that a file holds, and writes it as one."""

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        mapping = handler.generate_schema(dict[str, Value])
        return core_schema.no_info_wrap_validator_function(
            cls._read,
            mapping,
            serialization=core_schema.plain_serializer_function_ser_schema(
                Cell.to_mapping, return_schema=mapping
            ),
        )

    @staticmethod
    def _read(value: Any, mapping: core_schema.ValidatorFunctionWrapHandler) -> Cell:
        if isinstance(value, Cell):
            return value
        try:
            return Cell.from_mapping(mapping(value))
        except ValidationError:
            raise
        except ValueError as error:
            raise PydanticCustomError("axes", "{problem}", {"problem": str(error)}) from None


StoredCell = Annotated[Cell, _AsMapping]  # a Cell in memory, {"axis": value} in a file


class Status(StrEnum):
    """How a replicate ended. Only OK carries a speed."""

    OK = "ok"
    PARITY = "parity"  # differs from the oracle; never timed
    WRONG_PATH = "wrong_path"  # engagement differs from the plan, or violates `expect`
    OOM = "oom"
    TIMEOUT = "timeout"
    CRASH = "crash"  # exit by exception or signal
    SKIPPED = "skipped"  # not tried: a shorter sequence of the same path ran out of memory


class BranchLine(_Record):
    """One branch of the Route, as ``nsa.routing.BranchRoute``."""

    branch: str
    implementation: str
    kernel: str
    provider: str
    reason: str
    syncs: bool
    repeatable: bool


class RouteLine(_Record):
    """The Route as data; ``counters`` are those that must be engaged, and no others of these
    branches.
    """

    branches: list[BranchLine]
    counters: list[str]
    rejected: list[dict[str, str]] = []
    notes: list[str] = []
    off: list[str] = []  # steps of path triton that a setting turned off


class Expect(_Record):
    """What the matrix demands of a cell: its routing, and the most that a step of it may cost."""

    engaged: list[str] = []
    forbidden: list[str] = []
    # Null: no bound, as in older files.
    max_launches: int | None = Field(default=None, gt=0)  # kernels of a step, on any replicate
    max_host_ms: float | None = Field(default=None, gt=0)  # median over the replicates
    max_device_ms: float | None = Field(default=None, gt=0)  # likewise


class PlannedCell(_Record):
    cell_id: str
    axes: StoredCell
    config_sha256: str
    route: RouteLine
    expect: Expect = Expect()
    layers: int | None = (
        # calls of each counter due a step: one a layer, and one for each chunk of it; null in older
        # files
        None
    )


NOT_IN_OLDER = ("cpu_count",)  # of a fingerprint: what older files do not hold


class Environment(_Record):
    """Where a run was made. ``gpu_*``, ``driver`` and ``cuda`` are null on a CPU."""

    gpu_slug: str  # 'h100-80gb-hbm3', 'cpu'
    device_name: str  # marketing name of the GPU, or of the processor
    gpu_uuid_sha256: str | None
    driver: str | None
    cuda: str | None
    torch: str
    triton: str | None
    flash_provider: str | None
    python: str
    platform: str
    cpu_name: str
    cpu_count: int
    clock_policy: str
    nsa_settings: dict[str, str] = {}
    # other variables that change speed, e.g. OMP_NUM_THREADS; null in older files
    speed_variables: dict[str, str] | None = None
    # the user's table of thresholds that NSA_THRESHOLDS named; its digest is among nsa_settings
    thresholds_file: str | None = None

    def fingerprint(self) -> dict[str, str | None]:
        """What must agree before two speeds may be compared; on a CPU how many of them, too, which
        older files do not hold.
        """
        keys = ("gpu_slug", "device_name", "driver", "cuda", "torch", "triton", "flash_provider")
        count = {"cpu_count": str(self.cpu_count)} if self.gpu_slug == "cpu" else {}
        return {**{key: getattr(self, key) for key in keys}, **count}

    def settings(self) -> dict[str, str] | None:
        """NSA_* and other variables that change speed; None where the latter were not recorded."""
        if self.speed_variables is None:
            return None
        return {**self.speed_variables, **self.nsa_settings}


class Source(_Record):
    """The measured code: a commit, and the hash of uncommitted changes (null: clean).

    ``reason`` where git is missing.
    """

    commit: str | None
    dirty_sha256: str | None
    branch: str | None = None
    reason: str | None = None
    nsa_sha256: str | None = None  # of the files of its nsa; null in older files

    @property
    def unproved(self) -> str | None:
        """Why it is not known which code was measured; None where git named its commit."""
        if self.commit is None:
            return f"unknown, not proved ({self.reason or 'no reason was recorded'})"
        return None if self.reason is None else "given by hand, not proved"


class CardLine(_Record):
    """One card of a fleet: its node, as the scheduler names it, the hash of its UUID (null: the
    node's CPU), and that node's environment.
    """

    node: str
    device_uuid_sha256: str | None
    environment: Environment


class ConfirmationPlan(_Record):
    """How the pairs of a confirmation are looked at, fixed before the first: each of ``cells``,
    worst first, after each number of pairs in ``looks`` until it is settled, as one of ``tests``
    cells.
    """

    tests: int
    looks: list[int]
    cells: list[str]


class Manifest(_Record):
    kind: Literal["manifest"] = "manifest"
    schema_version: int = SCHEMA_VERSION
    method_version: int = METHOD_VERSION
    run_id: str
    created_utc: str
    argv: list[str]
    seed: int
    injections: list[str]
    source: Source
    matrix_name: str
    matrix_path: str
    matrix_text: str
    matrix_sha256: str
    replicates: int
    sentinels: list[str] = []
    only: list[str] = []
    cells: list[PlannedCell]
    excluded: list[dict[str, Any]] = []
    environment: Environment
    # of one side of a confirmation; null: every pair is measured
    confirmation: ConfirmationPlan | None = None
    # of the cells with selection=trained; null: none has it, and in older files
    trained_blocks: TrainedBlocks | None = None
    # of the workloads that are a user's own step; none in older files
    own_steps: list[OwnStepFile] = []
    # of the cells whose path is a peer; empty in older files
    peers: list[Peer] = []
    # of a fleet; empty of one machine, and in older files
    cards: list[CardLine] = []
    # cell -> half the 95 % interval of its baseline, in %: a spent budget leaves out the surest
    # first. Empty without a budget or a baseline, and in older files.
    prior_half_pct: dict[str, float] = {}


class Resumed(_Record):
    """Appended when a run is resumed, perhaps on another card of the same model, and when a fleet
    moves cells to another card.
    """

    kind: Literal["resumed"] = "resumed"
    resumed_utc: str
    argv: list[str]
    environment: Environment
    only: list[str] = []
    cards: list[CardLine] = []  # of a fleet: those that joined
    # cells whose card was lost: all their replicates are measured again, on one other card
    moved: list[str] = []
    reason: str = ""  # why they moved


class ParityLine(_Record):
    """Comparison with the fp64 oracle at the cell's own geometry, heads and dtype, on sampled
    rows.
    """

    ok: bool
    tokens: int
    rows: int
    max_error: float
    tolerance: float
    tensors: dict[str, float] = {}  # 'o', 'dq', ... -> error / tolerance
    # proved at the timed cell's own length: at the standard one this request takes another route
    own_length: bool = False
    # recall and share of changed rows, where the choice of blocks is no exact fp32 top-n
    selection: dict[str, float] | None = None
    # 'CELL #REPLICATE' of this run that proved the same route; null: this row itself
    proved_in: str | None = None
    worst: str  # tensor and place of the largest error / tolerance


class LengthProof(_Record):
    """The attention function at the timed length and batch, next to the proof at a length where
    every row could be compared.
    """

    ok: bool | None  # null: not made, because of ``absent``
    absent: str = ""
    tokens: int = 0
    batch: int = 0
    rows: int = 0  # of each sequence, against the fp64 oracle
    # tensors of those rows, sums over all rows, and 'keys dk_BRANCH' -> error / tolerance
    tensors: dict[str, float] = {}
    worst: str = ""
    # sha256 of output and gradients, the same in every replicate of one card; null because of
    # ``no_digest``, and in older files
    digest: str | None = None
    no_digest: str = ""
    seconds: float = 0.0


NOT_RECORDED = "not recorded"  # how the reason of an older nsa's absent proof begins


class StepProof(_Record):
    """The step that is timed, run once by the timed callable, against a plain twin of the model."""

    ok: bool | None  # null: not made, because of ``absent``
    absent: str = ""
    tokens: int = 0  # of the step
    num_parameters: int | None = None
    num_layers: int | None = None
    # the twin had the step's own blocks, once they were judged; or chose for itself
    blocks: Literal["given", "own"] | None = None
    # 'logits', 'loss', 'gradients', 'optimizer', 'blocks'; of a loop 'data' and 'norm', too ->
    # error / tolerance of the worst tensor
    tensors: dict[str, float] = {}
    worst: str = ""  # which tensor, what it is off by and may be
    seconds: float = 0.0


def _is_throttled(telemetry: Telemetry | None) -> bool:
    """False where nobody asked the card: what is not known discards no row."""
    return telemetry is not None and telemetry.throttled is True


class Profile(_Record):
    """One untimed step under torch.profiler: the second witness."""

    kernels: dict[str, float] = {}  # the 12 longest: name -> device seconds
    kernel_count: int
    device_time_s: float  # without NCCL's kernels
    wall_s: float
    busy_fraction: float | None
    host_syncs: int
    # kernel names show what the Route names; null where nothing can witness it
    witness_ok: bool | None
    witness: str
    # what the host takes to enqueue one step on an idle device, without waiting for it and without
    # the profiler; a CPU computes in the call, so that there it is the step's. Null in older files
    host_time_s: float | None = None
    # calls of nsa's operators, of SDPA, and 'OPERATOR > CHILD'; of a captured step while it was
    # captured. Empty in older files.
    operators: dict[str, int] = {}


class CacheLine(_Record):
    """What the NSACache of a layer held in a step of workload decode or chunked_prefill, and what a
    query read of it.
    """

    tokens: int  # each sequence held, when a timed decode step began; when a timed prefill ended
    memory_bytes: int  # of all layers, compressed keys and windows included
    keys_read: dict[
        str,
        float,
        # branch -> keys a query and kv head, counted in one untimed step, mean over queries and
        # layers
    ]


class LoopLine(_Record):
    """Of workload train_loop: what the loader gave in the timed window, where every batch differed
    from all that the process had trained on.
    """

    precision: str  # of the loop's config
    batches: int  # taken in the window
    wait_p50_s: float  # a step waited so long for its batches
    wait_p95_s: float
    fetch_p50_s: float  # the loader's worker took so long to make one
    fetch_p95_s: float


class LoadedCode(_Record):
    """What the measuring process itself had imported."""

    torch: str
    triton: str | None  # null where it was not imported
    cuda: str | None
    nsa_folder: str
    nsa_sha256: str


class LoadedPeer(_Record):
    """The peer that a measuring process had imported, asked of its module."""

    name: str
    version: str | None  # of its package; null where its module belongs to none
    file: str
    file_sha256: str | None  # null of a module without a file
    commit: str | None = None  # of its checkout, where git knows one
    dirty_sha256: str | None = None  # of the checkout's uncommitted changes


class OtherClocks(_Record):
    """The timed window, and the GEMM of `Physics`, by clocks other than the one of the samples."""

    # the kernel's raw clock over all samples, and over what ran between their steps
    raw_s: float
    between_s: float = 0.0
    # of raw_s, before a sample's first step and after its last; 0 in older files, and on a GPU
    aside_s: float = 0.0
    cpu_s: float  # CPU time of the process meanwhile
    # that computed on a CPU, so that no more CPU time can have passed; null on a GPU
    threads: int | None = None
    gemm_s: float | None = None  # by the samples' clock
    gemm_raw_s: float | None = None
    gemm_aside_s: float = 0.0
    # the parent's clock over the whole window, the messages' way included; null in older files, and
    # where no parent watched
    parent_s: float | None = None


class Physics(_Record):
    """Closed-form work of one step, and how near the measured time is to the hardware's floor."""

    flops: float
    min_bytes: float
    flops_per_s: float
    bytes_per_s: float
    gemm_flops_per_s: float | None  # measured in this process, same dtype
    # null for a card that is not in the table, and in older files
    datasheet_flops_per_s: float | None = None
    datasheet_bytes_per_s: float | None  # null for a card that is not in the table
    l2_bytes: int | None
    floor_s: float | None
    floor_fraction: float | None  # floor_s / measured seconds: 1 is the limit
    notes: list[str] = []


class SentinelLine(_Record):
    """A frozen piece of work that no commit changes, timed once a block: it separates a slower
    machine from slower code.
    """

    kind: Literal["sentinel"] = "sentinel"
    name: str  # gemm | copy | sdpa_frozen | all_reduce
    block: int
    attempt: int = 0  # of the block, as Replicate.attempt
    status: Status
    reason: str = ""
    started_utc: str
    samples_s: list[float] = []  # of one unit of work each
    steps_per_sample: int = 0  # units that each sample is the mean of; 0 in older files
    other_clocks: OtherClocks | None = None  # null in older files
    # median over the samples, in ``unit`` per second
    rate_per_s: float | None = Field(default=None, gt=0)
    unit: str  # FLOP | byte
    telemetry: Telemetry | None = None
    device_uuid_sha256: str | None = None
    node: str | None = None  # of a fleet; null on one machine, and in older files

    @property
    def is_throttled(self) -> bool:
        """Whether the card slowed down while this was timed."""
        return _is_throttled(self.telemetry)

    @property
    def card(self) -> str | None:
        """Which card it was, as `Replicate.card`."""
        return self.device_uuid_sha256 or self.node


class Replicate(_Record):
    """One child process of one cell; of several rows of the same replicate the last one counts."""

    kind: Literal["replicate"] = "replicate"
    cell_id: str
    replicate: int
    axes: StoredCell
    config_sha256: str
    status: Status
    reason: str = ""
    started_utc: str
    wall_s: float
    steps_per_sample: int = 0
    tokens_per_step: int = 0
    attempt: int = 0  # above 0: measured again, because the card throttled in every earlier one
    samples_s: list[float] = []
    other_clocks: OtherClocks | None = None  # null in older files
    tok_per_s: float | None = Field(default=None, gt=0)
    steady: bool | None = None  # the warm-up ended level; false: it ran into its cap first
    # seconds a step times the mean SM clock of the window
    cycles_per_step: float | None = Field(default=None, gt=0)
    # null in a window too short for NVML's counter
    energy_j_per_token: float | None = Field(default=None, gt=0)
    tuned: dict[
        str,
        str,
        # autotuner -> the configuration that it chose; a changed choice explains a changed speed
    ] = {}
    absent: dict[str, str] = {}  # why a value of this row is null
    # The first step; shorter where this process made the proof, or repeated its digest, and had
    # loaded libraries; longer next to `waiting_peers`.
    cold_start_s: float | None = None
    # other processes that prepared at the same time; all of them waited while this one was timed
    waiting_peers: int = Field(default=0, validation_alias="company", serialization_alias="company")
    peak_memory_bytes: int | None = None
    cache: CacheLine | None = None  # null in other workloads, and in older files
    loop: LoopLine | None = None  # likewise
    ranks: RanksLine | None = None  # null of one process, and in older files
    host_bound: bool | None = None
    route: RouteLine | None = None
    engaged: dict[str, int] = {}
    # How it is known: each call counted as it ran; or counted at a CUDA graph's capture, or read
    # from a compiled graph, times its runs.
    engaged_by: Literal["call", "capture", "graph"] = "call"
    parity: ParityLine | None = None
    own_step: OwnStepLine | None = None  # null in the harness's own workloads
    step_proof: StepProof | None = None  # null in older files: not recorded
    length_proof: LengthProof | None = None  # likewise; made by replicate 0
    telemetry: Telemetry | None = None
    profile: Profile | None = None
    physics: Physics | None = None
    device_uuid_sha256: str | None = None
    node: str | None = None  # of a fleet; null on one machine, and in older files
    loaded: LoadedCode | None = None  # null in older files
    peer: LoadedPeer | None = None  # null where nsa serves the cell
    stderr_tail: str = ""
    # of wall_s, seconds of 'setup', 'proof', 'warmup', 'timing' and 'witness'; empty in older
    # files, and in a user's own step
    phases_s: dict[str, float] = {}

    @property
    def is_throttled(self) -> bool:
        """Whether the card slowed down while this was timed; such a row does not count."""
        return _is_throttled(self.telemetry)

    @property
    def card(self) -> str | None:
        """Which card it was: the hash of its UUID; of a CPU its node; None on a CPU of no
        fleet.
        """
        return self.device_uuid_sha256 or self.node


class Run(BaseModel):
    """A run file as read: ``torn`` says that its last line was cut off and dropped.

    ``sha256`` is the digest of its last line, which stands for the whole file; None in a file of an
    older schema, of which nobody can tell whether it was edited.
    """

    model_config = ConfigDict(frozen=True, defer_build=True)
    manifest: Manifest
    resumed: list[Resumed] = []
    replicates: list[Replicate] = []
    sentinels: list[SentinelLine] = []
    torn: bool = False
    sha256: str | None = None

    @property
    def is_verified(self) -> bool:
        """Whether digests show that the file is as it was written."""
        return self.manifest.schema_version >= DIGESTS_SINCE

    def of_cell(self, cell_id: str) -> list[Replicate]:
        return [r for r in self.replicates if r.cell_id == cell_id]


def build_validators() -> None:
    """Build the validators of all records now: in a process that forks others, each of which would
    build its own.
    """
    records: list[type[BaseModel]] = [*_Record.__subclasses__(), Telemetry, RankLine, RanksLine]
    for record in records:
        record.model_rebuild()
