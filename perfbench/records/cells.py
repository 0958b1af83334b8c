"""The axes of a matrix, the cells that they span, and the rules that match cells.

Pure: no torch, no files.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from urllib.parse import quote

from nsa.config import nearest_name
from nsa.routing import AUTO, DENSE_KINDS, FA2_CHOICES, PATH_REQUESTS, Path
from perfbench.records.own_step import OWN_STEP_FORM, OWN_STEP_PATTERN, is_own_step
from perfbench.records.peers import BUILT_IN, CACHED_DENSE, is_peer, kind_of

# fa2 of a dense path and of a peer, which name their kernel themselves; path of a user's own step
# that states none
NOT_APPLICABLE = "n/a"
DEFAULT_CHUNK = 2048
# Kinds of blocks in workloads of the selected branch: perfbench.worker.workloads.block_patterns.
TRAINED = "trained"  # those of a file, which the matrix names
SELECTIONS = ("own", "random", "local", "hot", TRAINED)
CACHED = ("decode", "chunked_prefill")  # workloads whose steps go through an NSACache
# Attention alone, on inputs of its own; the first with its backward.
ATTENTION = ("attention", "attention_forward")
# The selected branch alone, on blocks of its own; the first with its backward.
SELECTED = ("selected", "selected_forward")
# Whole steps of training: a step alone, and a step of nsa.train's loop with its loader.
TRAINING = ("train", "train_loop")
BACKWARD = (*TRAINING, "attention", "selected")
EVERYTHING = "none"  # what a cell is without by default
# Of path triton, each turned off by NSA_TRITON_<STEP>=0. Spelled out, since an older nsa, which
# `ab` measures, too, names none.
STEPS = ("copy", "lists", "roles", "join", "split")
# How several ranks train: gradients reduced (DistributedDataParallel), or weights, gradients and
# state sharded as well (FSDP2).
PARALLEL = ("ddp", "fsdp")
PAGED = "paged"
# How a decode step's keys lie in memory: nsa.decode.NSACache, or nsa.decode.PagedCache.
CACHES = ("contiguous", PAGED)
Value = str | int
Term = tuple[str, Value]  # comparison and operand, e.g. ('>=', 2048)
ProofKey = tuple[tuple[str, ...], tuple[tuple[str, Value], ...]]  # counters, axes

_COMPARE: Mapping[str, Callable[[Value, Value], bool]] = {
    "==": operator.eq,
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_COMPARISON = re.compile(r"(>=|<=|>|<)\s*([1-9][0-9]{0,17})")
_WHOLE = re.compile(r"[1-9][0-9]{0,17}")
_TORCH_DTYPES: Mapping[str, str] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis: ``default`` None means that every cell states it; ``recorded`` are values that only
    results carry; ``pattern`` is what else a text may be, and ``form`` says it in words.
    """

    kind: type[str] | type[int]
    default: Value | None
    choices: tuple[str, ...] = ()
    recorded: tuple[str, ...] = ()
    # besides the choices: any text of this form
    pattern: str = ""
    form: str = ""

    @property
    def wanted(self) -> str:
        choices = f"one of {', '.join(self.choices)}" if self.choices else "a whole number >= 1"
        return f"{choices}, or {self.form}" if self.form else choices

    def check(self, value: object) -> Value:
        """Return ``value``, or raise ValueError that says what it got and what fits."""
        if self.kind is int:
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                hint = (
                    "; write it as plain digits, without quotes"
                    if isinstance(value, str | float)
                    else ""
                )
                raise ValueError(f"got {show_value(value)}, wanted {self.wanted}{hint}")
            return value
        if not isinstance(value, str):
            hint = (
                "; on and off are text in YAML 1.2, true and false are not"
                if isinstance(value, bool)
                else ""
            )
            raise ValueError(f"got {show_value(value)}, wanted {self.wanted}{hint}")
        if value not in self.choices + self.recorded and not (
            self.pattern and re.fullmatch(self.pattern, value)
        ):
            near = nearest_name(value, list(self.choices))
            raise ValueError(f"got {show_value(value)}, wanted {self.wanted}{near}")
        return value

    def term(self, spec: object) -> Term:
        """Parse one alternative of a match: an exact value or, for whole numbers, '>=N', '>N',
        '<=N', '<N'.
        """
        if self.kind is int and isinstance(spec, str):
            if not (found := _COMPARISON.fullmatch(spec.strip())):
                raise ValueError(
                    f"got {show_value(spec)}, wanted {self.wanted} or a comparison such as '>=2048'"
                )
            return found[1], int(found[2])
        return "==", self.check(spec)


AXES: Mapping[str, Axis] = {
    "workload": Axis(
        str,
        None,
        (*TRAINING, "forward", *CACHED, *ATTENTION, *SELECTED),
        pattern=OWN_STEP_PATTERN,
        form=OWN_STEP_FORM,
    ),
    "seq_len": Axis(int, None),
    "path": Axis(
        str,
        None,
        tuple(dict.fromkeys((*map(str, PATH_REQUESTS), *DENSE_KINDS, *BUILT_IN, *CACHED_DENSE))),
        recorded=(NOT_APPLICABLE,),
    ),
    "fa2": Axis(str, "auto", FA2_CHOICES, (NOT_APPLICABLE,)),
    "batch": Axis(int, 1),
    "dtype": Axis(str, "bf16", tuple(_TORCH_DTYPES)),
    "l2": Axis(str, "warm", ("warm", "cold")),
    "chunk": Axis(int, DEFAULT_CHUNK),
    "compile": Axis(str, "off", ("off", "on")),
    "cuda_graph": Axis(str, "off", ("off", "on")),
    "selection": Axis(str, SELECTIONS[0], SELECTIONS),
    "without": Axis(str, EVERYTHING, (EVERYTHING, *STEPS)),
    "world_size": Axis(int, 1),
    "parallel": Axis(str, PARALLEL[0], PARALLEL),
    "cache": Axis(str, CACHES[0], CACHES),
}
# Axes that a file names only where a cell turns them: most cells are of one process, and keep no
# pages.
_ONLY_TURNED = ("world_size", "parallel", "cache")
_NAMES = tuple(name for name in AXES if name not in _ONLY_TURNED)


def show_value(value: object) -> str:
    """A value as a message names it: with its kind where a reader could mistake it, and never
    longer than a line.
    """
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return f"the truth value {str(value).lower()}"
    if isinstance(value, str):
        return f"the text {value[:60]!r}"
    return repr(value)[:80]


def why_not_here(cell: Cell, *, on_gpu: bool) -> str | None:
    """Why a device of this kind cannot time ``cell`` whatever its route; None where it can."""
    if cell.l2 == "cold" and not on_gpu:
        return (
            "l2=cold needs a GPU: no portable way empties a CPU's caches before each step; use l2:"
            " [warm]"
        )
    if cell.cuda_graph == "on" and not on_gpu:
        return "cuda_graph=on needs a GPU: a CPU has no CUDA graphs; use cuda_graph: [off]"
    return None


def settings_of(cell: Cell) -> dict[str, str]:
    """NSA_* variables that the cell's measuring process is given, in addition to those of the
    run's environment.
    """
    return {} if cell.without == EVERYTHING else {f"NSA_TRITON_{cell.without.upper()}": "0"}


def torch_dtype_name(dtype: str) -> str:
    """'bf16' -> 'bfloat16': what the axis calls a dtype in torch's words."""
    return _TORCH_DTYPES[dtype]


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of the matrix: its axes, each with its own type.

    An axis that means nothing to the cell has one value, so that its values are one cell.

    That is fa2='n/a' on a dense path and on a peer, and the default of ``chunk`` in every workload
    but chunked_prefill and of ``selection`` in every one but those of the selected branch alone,
    and of ``without`` on every path but triton (and auto, where it is refused) and in a user's own
    step, to which the path is a parameter, 'n/a' where none is stated, and of ``parallel`` where
    ``world_size`` is 1. ``batch`` is a rank's.

    A file holds the axes as a mapping: `from_mapping` and `to_mapping` are the only ways between
    the two. ``unknown`` are axes of a newer perfbench; ``named`` are the axes that the file named,
    so that what an older perfbench wrote is written again as it was.
    """

    workload: str
    seq_len: int
    path: str
    fa2: str = "auto"
    batch: int = 1
    dtype: str = "bf16"
    l2: str = "warm"
    chunk: int = DEFAULT_CHUNK
    compile: str = "off"
    cuda_graph: str = "off"
    selection: str = SELECTIONS[0]
    without: str = EVERYTHING
    world_size: int = 1
    parallel: str = PARALLEL[0]
    cache: str = CACHES[0]
    unknown: tuple[tuple[str, Value], ...] = field(default=(), repr=False)
    named: tuple[str, ...] = field(default=_NAMES, repr=False, compare=False)
    _id: str = field(default="", init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.workload != "chunked_prefill":
            object.__setattr__(self, "chunk", DEFAULT_CHUNK)
        if self.workload not in SELECTED:
            object.__setattr__(self, "selection", SELECTIONS[0])
        if self.path not in (Path.TRITON, AUTO) or self.is_own_step:
            object.__setattr__(self, "without", EVERYTHING)
        if self.world_size == 1:
            object.__setattr__(self, "parallel", PARALLEL[0])
        if self.path == NOT_APPLICABLE and not self.is_own_step:
            raise ValueError(
                f"path={NOT_APPLICABLE} belongs to a user's own step, not to"
                f" workload={self.workload}; name a path"
            )
        if self.path in (*DENSE_KINDS, *CACHED_DENSE, NOT_APPLICABLE) or is_peer(self.path):
            object.__setattr__(self, "fa2", NOT_APPLICABLE)
        elif self.fa2 == NOT_APPLICABLE:
            raise ValueError(
                f"fa2={NOT_APPLICABLE} belongs to dense paths and peers, not to path={self.path};"
                " use on, off or auto"
            )

    @classmethod
    def from_mapping(cls, axes: Mapping[str, Value]) -> Cell:
        """The cell of these axes, defaults where an axis is absent.

        ValueError where one without a default is absent, or has a value of another type.
        """
        return _cell_of(tuple(axes.items()))

    def to_mapping(self) -> dict[str, Value]:
        """The axes as a file holds them: every axis, defaults included; of a cell that was read,
        those that were read, and what differs from a default since.
        """
        if self.named is _NAMES and self.world_size == 1 and self.cache == CACHES[0]:
            return {name: getattr(self, name) for name in _NAMES}
        unknown = dict(self.unknown)
        found = {
            name: unknown[name] if name in unknown else getattr(self, name) for name in self.named
        }
        for name, axis in AXES.items():
            value = getattr(self, name)
            if name not in found and value not in (axis.default, NOT_APPLICABLE):
                found[name] = value
        return found

    def value(self, axis: str) -> Value | None:
        """The value of ``axis``; None where the cell has no such axis."""
        found: Value | None = getattr(self, axis) if axis in AXES else dict(self.unknown).get(axis)
        return found

    @property
    def is_own_step(self) -> bool:
        """Whether the workload is a user's ``module:function``, to which the other axes are
        parameters.
        """
        return is_own_step(self.workload)

    @property
    def is_dense(self) -> bool:
        """Whether full attention is measured in place of NSA."""
        return kind_of(self.path) == "dense" and not self.is_own_step

    @property
    def is_peer(self) -> bool:
        """Whether others than nsa serve it: a path of perfbench.matrix.peers."""
        of_nsa = self.workload in CACHED and self.path in CACHED_DENSE
        return is_peer(self.path) and not of_nsa and not self.is_own_step

    @property
    def has_backward(self) -> bool:
        return self.workload in BACKWARD

    @property
    def cell_id(self) -> str:
        """``axis=value`` in sorted order, defaults left out: an axis added later renames
        nothing.
        """
        if not self._id:  # a plan asks four times
            values = {name: getattr(self, name) for name in AXES}
            shown = {
                k: v for k, v in values.items() if v != AXES[k].default and v != NOT_APPLICABLE
            }
            object.__setattr__(
                self, "_id", ",".join(f"{key}={_encoded(shown[key])}" for key in sorted(shown))
            )
        return self._id


@lru_cache(maxsize=8192)  # the rows of a run name the same few cells again and again
def _cell_of(axes: tuple[tuple[str, Value], ...]) -> Cell:
    values = dict(axes)

    def value(name: str) -> Value:
        found = values.get(name, AXES[name].default)
        if found is None:
            raise ValueError(f"no axis {name}")
        return found

    def text(name: str) -> str:
        if not isinstance(found := value(name), str):
            raise ValueError(f"axis {name} is {str(found)[:60]!r}, wanted str")
        return found

    def number(name: str) -> int:
        if not isinstance(found := value(name), int):
            raise ValueError(f"axis {name} is {str(found)[:60]!r}, wanted int")
        return found

    return Cell(
        workload=text("workload"),
        seq_len=number("seq_len"),
        path=text("path"),
        fa2=text("fa2"),
        batch=number("batch"),
        dtype=text("dtype"),
        l2=text("l2"),
        chunk=number("chunk"),
        compile=text("compile"),
        cuda_graph=text("cuda_graph"),
        selection=text("selection"),
        without=text("without"),
        world_size=number("world_size"),
        parallel=text("parallel"),
        cache=text("cache"),
        unknown=tuple(item for item in axes if item[0] not in AXES),
        named=names if (names := tuple(values)) != _NAMES else _NAMES,
    )


@lru_cache(maxsize=8192)  # a large matrix asks for the same few values a hundred thousand times
def _encoded(value: Value) -> str:
    return quote(str(value), safe=":")


@dataclass(frozen=True, slots=True)
class Match:
    """Axes to alternatives: a cell matches when every named axis meets one of its alternatives."""

    terms: tuple[tuple[str, tuple[Term, ...]], ...]

    def matches(self, cell: Cell) -> bool:
        return all(
            any(_COMPARE[op](getattr(cell, axis), operand) for op, operand in alternatives)
            for axis, alternatives in self.terms
        )

    def __str__(self) -> str:
        shown = (
            f"{axis}: {'|'.join(f'{op}{operand}'.removeprefix('==') for op, operand in terms)}"
            for axis, terms in self.terms
        )
        return "{" + ", ".join(shown) + "}"


def with_choices(axis: Axis, further: Iterable[str]) -> Axis:
    """``axis`` with ``further`` choices at the end, each once."""
    return replace(axis, choices=tuple(dict.fromkeys((*axis.choices, *further))))


def check_axis(name: str) -> Axis:
    """The axis called ``name``; ValueError names the nearest one."""
    if name not in AXES:
        raise ValueError(f"no axis {name[:60]!r}{nearest_name(name, list(AXES))}")
    return AXES[name]


def select_cells(cells: Iterable[Cell], only: Iterable[str]) -> list[Cell]:
    """Keep the cells that ``AXIS=V`` terms ask for: the same axis is `or`, different axes are
    `and`.

    V may compare (``seq_len>=2048`` or ``seq_len=>=2048``); ``cell=ID`` names whole cells.
    ValueError where a term is malformed or matches no cell, or where no cell is left.
    """
    everything = list(cells)
    kept, by_axis = everything, dict[str, list[Callable[[Cell], bool]]]()
    for text in only:
        name, tests = _only_term(text, everything)
        if not any(tests(cell) for cell in everything):
            raise ValueError(
                f"--only {text[:100]} matches none of the {len(everything)} cells;"
                f" {_valid(name, text, everything)}"
            )
        by_axis.setdefault(name, []).append(tests)
    for tests_of_axis in by_axis.values():
        kept = [cell for cell in kept if any(test(cell) for test in tests_of_axis)]
    if not kept:
        raise ValueError(
            f"no cell meets all of --only {' --only '.join(only)}; drop one of them, or `perfbench"
            " plan` lists the cells"
        )
    return kept


def _only_term(text: str, cells: list[Cell]) -> tuple[str, Callable[[Cell], bool]]:
    found = re.fullmatch(r"([A-Za-z0-9_-]+)\s*(>=|<=|>|<|=)\s*(.*)", text, re.DOTALL)
    if not found:
        raise ValueError(
            f"--only {text[:100]!r} is not AXIS=VALUE; axes: {', '.join(AXES)}, or cell=ID"
        )
    name, relation, value = found[1], found[2], found[3].strip()
    if name == "cell":
        return name, lambda cell: cell.cell_id == value
    if name not in AXES:
        raise ValueError(
            f"--only {text[:100]}: no axis {name[:60]!r}{nearest_name(name, [*AXES, 'cell'])}"
        )
    spec: Value = value if relation == "=" else relation + value
    axis = AXES[name]
    if name == "path":  # peers that the matrix declares
        axis = with_choices(axis, sorted({cell.path for cell in cells}))
    if axis.kind is int and _WHOLE.fullmatch(str(spec)):
        spec = int(spec)
    try:
        match = Match(((name, (axis.term(spec),)),))
    except ValueError as error:
        if relation == "=" and "," in value:
            each = " ".join(f"--only {name}={part.strip()}" for part in value.split(",")[:40])
            raise ValueError(
                f"--only {text[:100]}: got several values, wanted one; write {each}"
            ) from None
        raise ValueError(f"--only {text[:100]}: {error}") from None
    return name, match.matches


def _valid(name: str, text: str, cells: list[Cell]) -> str:
    if name == "cell":
        ids, wanted = [cell.cell_id for cell in cells], text.removeprefix("cell=").strip()
        near = nearest_name(wanted, ids[:1000])
        if "did you mean" in near:
            return near.removeprefix("; ")
        return f"they are {', '.join(ids[:3])}, ...; `perfbench plan` lists them"
    values = sorted({getattr(cell, name) for cell in cells})
    return f"they have {name}: {', '.join(str(v) for v in values[:40])}"


def proof_key(cell: Cell, counters: Iterable[str], *, own_length: bool) -> ProofKey:
    """What a parity proof depends on besides the model: its route, and all axes but the lengths and
    the batch.

    Parity has a length of its own. ``own_length``: where it was made at the cell's instead, it
    holds for that one alone. Calls with a cache have one size, by which their kernels go, so their
    proof is of their batch.
    """
    cached = cell.workload in CACHED
    free = {"seq_len": not own_length, "batch": not cached}
    axes = cell.to_mapping().items()
    return tuple(sorted(counters)), tuple(sorted(item for item in axes if not free.get(item[0])))
