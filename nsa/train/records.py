"""The nouns of a training run that its rooms share.

B sequences of a step, T tokens of a sequence, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


class Phase(IntEnum):
    """What a rank is doing; each has a time-out of its own (`WatchdogConfig`)."""

    START = 0  # interpreter and imports
    CONNECT = 1  # the process group is made
    LOAD = 2  # model, tokenizer, corpus, checkpoint
    BUILD = 3  # the first steps: kernels compile, graphs are captured
    DATA = 4  # waits for a batch
    STEP = 5
    EVAL = 6
    SAVE = 7
    SAMPLE = 8
    DONE = 9


@dataclass(frozen=True, slots=True)
class Batch:
    """What one micro-step of one rank trains on.

    ``ids`` and ``labels``: int64 [B, T] on the CPU, pinned where CUDA is; a label is the id that
    follows, IGNORED_LABEL (-100) where there is none. ``cu_seqlens``: int32 [documents + 1], B = 1,
    or None. ``num_labels`` counts labels that are not ignored, ``num_bytes`` the bytes of text that
    they stand for. ``fetch_s``: seconds that the loader's worker took to make it.
    """

    ids: Tensor
    labels: Tensor
    cu_seqlens: Tensor | None
    num_labels: int
    num_bytes: int
    fetch_s: float


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One line of a rank's log: what happened since the line before. None: not measured.

    ``loss_nats`` a token, mean over the steps since the last line, over all ranks; ``tokens_per_s``
    of all ranks; ``wait_p50_ms`` and ``wait_p95_ms``: the step waited so long for its batch;
    ``fetch_*`` as Batch.fetch_s. ``engaged``: counters of a step as it was built, or where that was
    compiled, of the last probe, an eager forward; ``statistics``: of a probe since the last line
    (`nsa.engagement`, `nsa.statistics`). ``bad_steps``: steps since the start whose loss or
    gradient was not finite, and which changed nothing. ``memory_allocated_bytes``,
    ``memory_reserved_bytes``: peaks since the start.
    """

    time_utc: str
    rank: int
    step: int
    loss_nats: float | None
    bits_per_byte: float | None
    gradient_norm: float | None
    learning_rate: float
    tokens_per_s: float | None
    mfu_pct: float | None
    step_ms: float | None
    wait_p50_ms: float | None
    wait_p95_ms: float | None
    fetch_p50_ms: float | None
    fetch_p95_ms: float | None
    bad_steps: int
    memory_allocated_bytes: int | None
    memory_reserved_bytes: int | None
    memory_rss_bytes: int
    engaged: Mapping[str, int] | None
    statistics: Mapping[str, Any] | None
    config_sha256: str

    def to_mapping(self) -> dict[str, Any]:
        return asdict(self)
