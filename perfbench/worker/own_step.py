"""The contract of a user's own step: what its function is given, what it returns, and how its own
comparisons are judged.

``function(request, device)`` returns any object with ``step`` (a callable without arguments, one
step, which need not wait for the device) and ``tokens_per_step``; all else is optional, and what is
absent is not proved: ``parity``, ``operators``, ``kernels``, ``flops``, ``min_bytes``, ``setup``,
``teardown``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from perfbench.records import Job, torch_dtype_name

PAGE = "docs/own-step.md"


@dataclass(frozen=True, slots=True)
class StepRequest:
    """The cell that a user's function builds its step for: the axes as the matrix has them.

    ``dtype`` in the axis's words, ``torch_dtype`` in torch's. ``path`` is 'n/a' where the matrix
    states none. ``seed`` differs between processes.
    """

    batch: int
    seq_len: int
    dtype: str
    path: str
    fa2: str
    compile: str
    cuda_graph: str
    seed: int

    @classmethod
    def of(cls, job: Job) -> StepRequest:
        """Of one process of a cell."""
        cell = job.axes
        return cls(
            batch=cell.batch,
            seq_len=cell.seq_len,
            dtype=cell.dtype,
            path=cell.path,
            fa2=cell.fa2,
            compile=cell.compile,
            cuda_graph=cell.cuda_graph,
            seed=job.seed,
        )

    @property
    def torch_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, torch_dtype_name(self.dtype))
        return found


@dataclass(frozen=True, slots=True)
class DeclaredStep:
    """What the returned object declares, checked.

    ``operators``: name in the profiler -> least calls a step. ``kernels``: part of a device
    kernel's name -> least launches a step. ``flops`` and ``min_bytes`` are of one step.
    """

    step: Callable[[], object]
    tokens_per_step: int
    parity: Callable[[], object] | None = None
    operators: Mapping[str, int] | None = None
    kernels: Mapping[str, int] | None = None
    flops: float | None = None
    min_bytes: float | None = None
    setup: Callable[[], object] | None = None
    teardown: Callable[[], object] | None = None

    @classmethod
    def of(cls, target: str, returned: object) -> DeclaredStep:
        """ValueError names what is missing or of another kind."""
        fields: dict[str, Any] = {
            name: getattr(returned, name, None) for name in cls.__dataclass_fields__
        }
        step, tokens = fields["step"], fields["tokens_per_step"]
        if not callable(step):
            raise ValueError(
                f"got {_kind(returned)} from {target}, whose step is {_kind(step)}; wanted an"
                f" object with a callable step and tokens_per_step; return one ({PAGE})"
            )
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
            raise ValueError(
                f"got tokens_per_step={tokens!r:.60} from {target}, wanted a whole number >= 1:"
                " what one step trains on"
            )
        for name in ("parity", "setup", "teardown"):
            if fields[name] is not None and not callable(fields[name]):
                raise ValueError(
                    f"got {name}={fields[name]!r:.60} from {target}, wanted a callable; leave it"
                    " out where there is none"
                )
        for name in ("operators", "kernels"):
            fields[name] = _counts(target, name, fields[name])
        for name in ("flops", "min_bytes"):
            fields[name] = _positive(target, name, fields[name])
        return cls(**fields)


def _counts(target: str, name: str, given: object) -> dict[str, int] | None:
    """Names with their least counts; a list wants each once."""
    if given is None:
        return None
    if isinstance(given, list | tuple | set | frozenset):
        given = dict.fromkeys(given, 1)
    if (
        isinstance(given, Mapping)
        and given
        and all(isinstance(one, str) and one for one in given)
        and all(isinstance(least, int) and least > 0 for least in given.values())
    ):
        return {str(one): int(least) for one, least in given.items()}
    raise ValueError(
        f"got {name}={given!r:.60} from {target}, wanted names, or a mapping of names to the least"
        " calls of a step; leave it out where there is none"
    )


def _positive(target: str, name: str, given: object) -> float | None:
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given < math.inf:
        raise ValueError(
            f"got {name}={given!r:.60} from {target}, wanted a number above 0, of one step; leave"
            " it out where it is not known"
        )
    return float(given)


def ratios_of(target: str, comparisons: object) -> dict[str, float]:
    """Name -> largest |got - wanted| / tolerance, over the whole tensor and in fp64; infinite where
    a value is not finite.

    ``comparisons`` is what ``parity`` returned: name -> (got, wanted, tolerance), tensors or
    numbers. ValueError where it is nothing of the kind, or nothing is compared.
    """
    if not isinstance(comparisons, Mapping) or not comparisons:
        raise ValueError(
            f"got {_kind(comparisons)} from parity of {target}, wanted a mapping of names to (got,"
            f" wanted, tolerance), at least one; return what was compared ({PAGE})"
        )
    return {str(name): _ratio(target, str(name), one) for name, one in comparisons.items()}


def _ratio(target: str, name: str, one: object) -> float:
    if not isinstance(one, tuple | list) or len(one) != 3:
        raise ValueError(
            f"got {one!r:.60} as {name} from parity of {target}, wanted (got, wanted, tolerance)"
        )
    if _is_same_memory(one[0], one[1]):
        raise ValueError(
            f"got {name} from parity of {target}, where {name} is compared with its own memory:"
            " that shows nothing; wanted a reference that was computed apart"
        )
    got, wanted = (torch.as_tensor(value).detach().to("cpu", torch.float64) for value in one[:2])
    tolerance = float(one[2])
    if got.shape != wanted.shape or got.numel() == 0:
        raise ValueError(
            f"got {name} of shape {tuple(got.shape)} from parity of {target}, wanted"
            f" {tuple(wanted.shape)}, and a value at least"
        )
    if not 0 < tolerance < math.inf:
        raise ValueError(
            f"got a tolerance of {tolerance:g} for {name} from parity of {target}, wanted a number"
            " above 0"
        )
    error = float((got - wanted).abs().max())
    return error / tolerance if math.isfinite(error) else math.inf


def _is_same_memory(got: object, wanted: object) -> bool:
    if not isinstance(got, torch.Tensor) or not isinstance(wanted, torch.Tensor):
        return False
    return got.device == wanted.device and got.data_ptr() == wanted.data_ptr() != 0


def _kind(value: object) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
