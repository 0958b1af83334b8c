"""The matrix that `perfbench tune` measures: as text, so that its run file holds all of it.

Pure: no torch, no file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nsa.config import ModelConfig
from nsa.routing import MASK_LIMIT_ELEMENTS, Capability, Path, Problem, RouteError
from nsa.settings import Settings
from perfbench.errors import Exit, PerfbenchError
from perfbench.matrix import route_of
from perfbench.records import STEPS, Cell, torch_dtype_name

NAME = "tune"
WORKLOAD = "attention"  # forward and backward of attention alone
PATHS = (Path.TRITON, Path.V2, Path.MASKED)
DEFAULT_LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
# Every cell must be what its name says; these settings would make it another.
_TURN_ROUTES = (
    "NSA_FORCE_SEL_MASK",
    "NSA_USE_FA2",
    "NSA_USE_FA2_WIN",
    "NSA_USE_FA2_CMP",
    "NSA_SEL_RANGES_V2",
    *(f"NSA_TRITON_{step.upper()}" for step in STEPS),
)
_OWN_WINDOW = "path triton has a window kernel of its own, so FA-2 next to it decides nothing"
_ENGAGED: Mapping[tuple[Path, str], tuple[str, ...]] = {
    (Path.TRITON, "off"): ("cmp.triton", "sel.triton", "win.triton"),
    (Path.V2, "on"): ("sel.v2", "sel.fa2", "win.fa2"),
    (Path.V2, "off"): ("sel.v2", "sel.sdpa", "win.sdpa"),
    (Path.MASKED, "on"): ("sel.masked", "win.fa2"),
    (Path.MASKED, "off"): ("sel.masked", "win.sdpa"),
}


@dataclass(frozen=True, slots=True)
class Machine:
    """What the matrix is for; ``gpu`` is the card's name, None on a CPU."""

    gpu: str | None
    capability: Capability

    @property
    def dtype(self) -> str:
        return "fp32" if self.gpu is None else "bf16"  # CPUs are slow at bf16

    @property
    def matrix_name(self) -> str:
        """It carries the compute capability, which keys `TUNED` and is nowhere else in a run
        file.
        """
        sm = self.capability.sm
        return f"{NAME}-cpu" if sm is None else f"{NAME}-sm{sm[0]}.{sm[1]}"


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def sm_of(matrix_name: str) -> tuple[int, int] | None:
    """The compute capability that `Machine.matrix_name` carries; None on a CPU.

    ValueError: not a name of a tune matrix.
    """
    kind, _, rest = matrix_name.partition("-")
    major, _, minor = rest.removeprefix("sm").partition(".")
    if kind != NAME or (
        rest != "cpu" and not (rest.startswith("sm") and _is_number(major) and _is_number(minor))
    ):
        raise ValueError(
            f"got a run of matrix {matrix_name!r}, wanted one that `perfbench tune` made"
        )
    return None if rest == "cpu" else (int(major), int(minor))


def parse_lengths(text: str) -> tuple[int, ...]:
    """'256,512' as whole numbers, ascending; PerfbenchError(USAGE) for anything else."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and 0 < int(part) < 10**9 for part in parts):
        raise PerfbenchError(
            Exit.USAGE,
            f"--lengths {text[:100]!r} is not a list of whole numbers >= 1; write e.g."
            " 256,512,1024",
        )
    if len(set(map(int, parts))) < len(parts):
        raise PerfbenchError(
            Exit.USAGE, f"--lengths {text[:100]!r} names a length twice; write each once"
        )
    return tuple(sorted(map(int, parts)))


def refuse_settings(settings: Settings) -> None:
    """PerfbenchError(USAGE) where the environment turns a named path or FA-2 choice into
    another.
    """
    if turning := [
        f"{name}={value}" for name, value in settings.given().items() if name in _TURN_ROUTES
    ]:
        text = (
            f"{', '.join(turning)} changes what a cell runs, and every cell of `perfbench tune`"
            " must be what its name says"
        )
        raise PerfbenchError(
            Exit.USAGE, f"{text}. Next: unset {' and '.join(one.split('=')[0] for one in turning)}"
        )


def tuning_matrix(
    machine: Machine,
    model_name: str,
    model: ModelConfig,
    lengths: Sequence[int],
    processes: int,
    settings: Settings,
) -> str:
    """The matrix as YAML; what this machine cannot serve is excluded with the reasons of its
    RouteError.

    ``lengths`` ascend. The same arguments give the same text.
    """
    excluded = _excluded(machine, model, lengths, settings)
    gone = {(path, fa2) for path, fa2, _ in excluded}
    rules = [_flow(path=path, fa2=fa2, reason=reason) for path, fa2, reason in excluded]
    rules += _too_large(machine, model, lengths)
    expect = [
        f"{{match: {_flow(path=path, fa2=fa2)}, engaged: {json.dumps(counters)}}}"
        for (path, fa2), counters in _ENGAGED.items()
        if (path, fa2) not in gone
        and (path is not Path.MASKED or _mask_fits(machine, model, lengths[0]))
    ]
    on_gpu = machine.gpu is not None
    measure = (
        "prepare_together: 8, warmup_s: 0.3, max_s: 0.4, min_sample_ms: 50"
        if on_gpu
        else "warmup_s: 0.1, samples: 5, min_sample_ms: 20"
    )
    lines = [
        "# Written by `perfbench tune`: from which lengths which implementation is the fastest.",
        "version: 1",
        f"name: {machine.matrix_name}",
        f"target: {{gpu: {json.dumps(machine.gpu or 'none')}}}",
        f"model: {model_name}",
        (
            f"axes: {{workload: [{WORKLOAD}], seq_len: {list(lengths)}, path: [{', '.join(PATHS)}],"
            f" fa2: [on, off], dtype: [{machine.dtype}], l2: [{'cold' if on_gpu else 'warm'}]}}"
        ),
        "exclude:",
        *(f"  - {rule}" for rule in rules),
        "expect:",
        *(f"  - {rule}" for rule in expect),
        f"measure: {{processes: {processes}, {measure}}}",
        "limits: {timeout_s: 120, oom: record_and_skip_larger}",
        "gate: {min_replicates: 2}",
    ]
    return "\n".join(lines) + "\n"


def _excluded(
    machine: Machine, model: ModelConfig, lengths: Sequence[int], settings: Settings
) -> list[tuple[Path, str, str]]:
    """(path, fa2, why) of what is not measured at any length: no route of a path that is named
    looks at the length.
    """
    found = []
    for path, fa2 in _ENGAGED:
        cell = Cell(WORKLOAD, lengths[0], path.value, fa2, dtype=machine.dtype)
        try:
            route_of(cell, model, settings, machine.capability)
        except RouteError as error:
            found.append((path, fa2, str(error).split(". Next:")[0]))
    refused = next((why for path, _, why in found if path is Path.TRITON), None)
    return [(Path.TRITON, "on", refused or _OWN_WINDOW), *found]


def _mask_fits(machine: Machine, model: ModelConfig, tokens: int) -> bool:
    problem = Problem.of(model, batch=1, tokens=tokens, dtype=torch_dtype_name(machine.dtype))
    return problem.mask_elements <= MASK_LIMIT_ELEMENTS


def _too_large(machine: Machine, model: ModelConfig, lengths: Sequence[int]) -> list[str]:
    first = next((tokens for tokens in lengths if not _mask_fits(machine, model, tokens)), None)
    if first is None:
        return []
    reason = f"`auto` builds no mask of more than {MASK_LIMIT_ELEMENTS} elements"
    return [f"{{path: masked, seq_len: {json.dumps(f'>={first}')}, reason: {json.dumps(reason)}}}"]


def _flow(**values: str) -> str:
    return (
        "{" + ", ".join(f"{key}: {json.dumps(str(value))}" for key, value in values.items()) + "}"
    )
