"""The configuration of a training run: typed, strict, frozen, hashed.

Needs no torch. `nsa.train.yaml_file` reads one from YAML.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Self

from nsa.config import ModelConfig, nearest_name

CORPORA = (
    *("text", "parquet", "fineweb_edu"),
    *("random", "synthetic", "needle", "recall", "copying"),
)
TOKENIZERS = ("byte", "bpe", "file", "tiktoken")
PACKINGS = ("rows", "documents")
PRECISIONS = ("bf16_master", "autocast", "bf16", "fp32")
SCHEDULES = ("cosine", "wsd", "constant")
AUTO_ON_OFF = ("auto", "on", "off")
ATTENTIONS = ("nsa", "dense")
PARALLEL = ("auto", "none", "ddp", "fsdp", "hsdp")
COMPRESSION = ("off", "bf16")


@dataclass(frozen=True, slots=True)
class DataConfig:
    """``kind``: what is read. ``paths``: files, folders or globs of text or parquet; none for what
    is generated (random, synthetic, needle, recall, copying), and for fineweb_edu none (the hub) or
    local parquet of its schema.
    ``held_out_pct`` of the corpus is kept for evaluation, unless ``eval_paths`` names one.

    ``packing``: "rows" joins documents with the end-of-text id and cuts the stream into rows, and
    attention crosses documents; "documents" gives cu_seqlens, one packed row of batch x seq_len
    tokens, and no document sees another. ``tokenizer``: bytes; a BPE trained on the corpus in the
    run, of ``vocab_size`` ids; a file of `tokenizers` (``tokenizer_path``); a tiktoken encoding
    (``tokenizer_path`` is its name). ``workers``: processes that prefetch, ``prefetch`` batches
    each; 0 reads in the trainer. ``shards``: streams into which the corpus is cut, 0: chosen by its
    size; the ranks share them. ``pairs``: of kind recall, what a row states; 0: by its length.
    """

    kind: str = "text"
    paths: tuple[str, ...] = ()
    eval_paths: tuple[str, ...] = ()
    held_out_pct: float = 1.0
    text_column: str = "text"
    tokenizer: str = "byte"
    tokenizer_path: str | None = None
    vocab_size: int = 32_768
    packing: str = "rows"
    workers: int = 1
    prefetch: int = 4
    shards: int = 0
    seed: int = 0
    pairs: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "paths", _strings("data.paths", self.paths))
        object.__setattr__(self, "eval_paths", _strings("data.eval_paths", self.eval_paths))
        _one_of("data.kind", self.kind, CORPORA)
        _one_of("data.tokenizer", self.tokenizer, TOKENIZERS)
        _one_of("data.packing", self.packing, PACKINGS)
        _whole("data", self, at_least=0, names=("workers", "shards", "seed", "pairs"))
        _whole("data", self, at_least=1, names=("prefetch", "vocab_size"))
        _number("data.held_out_pct", self.held_out_pct, least=0.0, most=50.0)
        if self.pairs and self.kind != "recall":
            raise ValueError(
                f"data.pairs={self.pairs} is of data.kind=recall, not of {self.kind!r}; omit it"
            )
        if self.kind in ("text", "parquet") and not self.paths:
            raise ValueError(
                f"data.paths is empty and data.kind={self.kind!r} reads files; give files, folders"
                " or globs, or data.kind=synthetic"
            )
        if self.tokenizer in ("file", "tiktoken") and not self.tokenizer_path:
            what = "the path of a tokenizer.json" if self.tokenizer == "file" else "an encoding"
            raise ValueError(f"data.tokenizer={self.tokenizer!r} needs data.tokenizer_path: {what}")


@dataclass(frozen=True, slots=True)
class LoopConfig:
    """Section ``train``. ``batch`` sequences of ``seq_len`` tokens a rank and micro-step, times
    ``accumulate`` micro-steps a step.

    ``attention``: NSA, or the dense twin. ``precision``: bf16 weights with fp32 masters, fp32
    weights under bf16 autocast, bf16 throughout, or fp32. ``cuda_graph``: the whole step as one
    graph; auto where it holds. ``schedule``: linear warm-up, then cosine to ``min_lr_ratio``, or
    constant with a linear decay over the last ``decay_steps`` (wsd). ``clip``: largest gradient
    norm, 0: none. ``path``, ``fa2``: as of TinyLM. ``eval_every``, ``sample_every``: steps, 0:
    never. ``device``: auto, cpu or cuda. ``init_from``: a run's folder, one of its checkpoints or
    an export, whose weights the run begins with, optimizer and data anew: for longer sequences.
    """

    steps: int = 1000
    seq_len: int = 2048
    batch: int = 8
    accumulate: int = 1
    attention: str = "nsa"
    path: str = "auto"
    fa2: str = "auto"
    precision: str = "bf16_master"
    compile: bool = False
    cuda_graph: str = "auto"
    lr: float = 6e-4
    min_lr_ratio: float = 0.1
    schedule: str = "cosine"
    warmup_steps: int = 100
    decay_steps: int = 0
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip: float = 1.0
    eval_every: int = 0
    eval_batches: int = 8
    sample_every: int = 0
    sample_prompt: str = ""
    sample_tokens: int = 64
    device: str = "auto"
    init_from: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        _whole(
            "train",
            self,
            at_least=1,
            names=("steps", "seq_len", "batch", "accumulate", "eval_batches", "sample_tokens"),
        )
        _whole(
            "train",
            self,
            at_least=0,
            names=("warmup_steps", "decay_steps", "eval_every", "sample_every", "seed"),
        )
        _one_of("train.attention", self.attention, ATTENTIONS)
        _one_of("train.precision", self.precision, PRECISIONS)
        _one_of("train.cuda_graph", self.cuda_graph, AUTO_ON_OFF)
        _one_of("train.schedule", self.schedule, SCHEDULES)
        _one_of("train.device", self.device, ("auto", "cpu", "cuda"))
        _flag("train.compile", self.compile)
        if self.init_from is not None and (
            not isinstance(self.init_from, str) or not self.init_from
        ):
            raise ValueError(f"train.init_from={self.init_from!r} must be the path of a folder")
        _number("train.lr", self.lr, least=0.0)
        _number("train.min_lr_ratio", self.min_lr_ratio, least=0.0, most=1.0)
        for name in ("weight_decay", "beta1", "beta2", "eps", "clip"):
            _number(f"train.{name}", getattr(self, name), least=0.0)
        if self.schedule == "wsd" and not 0 < self.decay_steps <= self.steps:
            raise ValueError(
                f"train.schedule=wsd with train.decay_steps={self.decay_steps}; wanted 1 to"
                f" train.steps={self.steps}; a tenth of the steps is usual"
            )


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """``every`` steps, 0: only at the end; ``keep`` the newest, 0: all. ``asynchronous``: written
    while training goes on.
    """

    every: int = 500
    keep: int = 2
    asynchronous: bool = True

    def __post_init__(self) -> None:
        _whole("checkpoint", self, at_least=0, names=("every", "keep"))
        _flag("checkpoint.asynchronous", self.asynchronous)


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """``kind``: auto is ddp under torchrun, else none. ``compress``: gradients travel as bf16
    (ddp). ``bucket_mb`` as DistributedDataParallel's. ``timeout_s`` of a collective.
    ``shard_size``: ranks that share one copy of the weights (hsdp). ``backend``: auto is nccl on
    GPUs, gloo on CPUs.
    """

    kind: str = "auto"
    backend: str = "auto"
    compress: str = "off"
    bucket_mb: int = 25
    timeout_s: int = 600
    shard_size: int = 0

    def __post_init__(self) -> None:
        _one_of("parallel.kind", self.kind, PARALLEL)
        _one_of("parallel.backend", self.backend, ("auto", "nccl", "gloo"))
        _one_of("parallel.compress", self.compress, COMPRESSION)
        _whole("parallel", self, at_least=1, names=("bucket_mb", "timeout_s"))
        _whole("parallel", self, at_least=0, names=("shard_size",))


@dataclass(frozen=True, slots=True)
class WatchdogConfig:
    """Seconds without progress after which a phase has stalled, and what else halts a run.

    ``grace_s``: from a halt to the kill. ``bad_steps``: steps in a row without a finite loss and
    gradient. Lines of the log in a row: ``flat_lines`` with the same loss, ``zero_gradient_lines``
    with a gradient of 0, ``slow_lines`` with tok/s below ``slow_ratio`` of the run's median.
    ``collapse_lines``: probes in a row (log.probe_every) in which one branch has a mean share of
    the gates above ``collapse_share``.
    ``floor_margin_nats``: how far below the data's known entropy the loss may be.
    ``memory_creep_pct`` of growth over the run's first tenth. ``slow_path``: whether a slow path
    that nobody asked for halts.
    ``webhook``: a URL that is sent a JSON of the halt.
    """

    enabled: bool = True
    start_s: float = 300.0
    connect_s: float = 600.0
    load_s: float = 1800.0
    build_s: float = 1800.0
    data_s: float = 300.0
    step_s: float = 300.0
    eval_s: float = 1800.0
    save_s: float = 1800.0
    sample_s: float = 600.0
    grace_s: float = 20.0
    bad_steps: int = 3
    flat_lines: int = 20
    zero_gradient_lines: int = 3
    collapse_lines: int = 3
    collapse_share: float = 0.99
    slow_lines: int = 10
    slow_ratio: float = 0.5
    floor_margin_nats: float = 0.05
    memory_creep_pct: float = 50.0
    slow_path: bool = True
    webhook: str | None = None

    def __post_init__(self) -> None:
        _flag("watchdog.enabled", self.enabled)
        _flag("watchdog.slow_path", self.slow_path)
        for one in fields(self):
            if one.name.endswith(("_s", "_pct", "_nats", "_ratio", "_share")):
                _number(f"watchdog.{one.name}", getattr(self, one.name), least=0.0)
        lines = [one.name for one in fields(self) if one.name.endswith("_lines")]
        _whole("watchdog", self, at_least=1, names=("bad_steps", *lines))
        url = self.webhook
        is_url = isinstance(url, str) and url.startswith(("http://", "https://"))
        if url is not None and not is_url:
            raise ValueError(f"watchdog.webhook={url!r} must be a URL of http:// or https://")


@dataclass(frozen=True, slots=True)
class LogConfig:
    """``every`` steps a line; ``probe_every`` steps, and once the step is built, an eager forward
    counts what is engaged and how gates and selection stand, 0: never. It took 46 to 76 ms for
    2,048 tokens of 12 layers on an H200.
    """

    every: int = 10
    probe_every: int = 250
    tensorboard: bool = False

    def __post_init__(self) -> None:
        _whole("log", self, at_least=1, names=("every",))
        _whole("log", self, at_least=0, names=("probe_every",))
        _flag("log.tensorboard", self.tensorboard)


# Names of the first implementation's config, and what they are here: section.name.
FOUNDING_NAMES: Mapping[str, str] = {
    "train.batch_size": "train.batch",
    "train.accumulate_grad_batches": "train.accumulate",
    "train.lr_schedule": "train.schedule",
    "train.grad_clip": "train.clip",
    "train.max_steps": "train.steps",
    "train.save_every": "checkpoint.every",
    "train.log_every": "log.every",
    "train.eval_interval": "train.eval_every",
    "runtime.precision": "train.precision",
    "runtime.device": "train.device",
    "runtime.path": "train.path",
}
_SECTIONS: Mapping[str, type] = {
    "data": DataConfig,
    "train": LoopConfig,
    "checkpoint": CheckpointConfig,
    "parallel": ParallelConfig,
    "watchdog": WatchdogConfig,
    "log": LogConfig,
}


@dataclass(frozen=True, slots=True)
class RunConfig:
    """All of a run. ``out``: the folder that holds its log, checkpoints and resolved config."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=lambda: DataConfig(kind="synthetic"))
    train: LoopConfig = field(default_factory=LoopConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    log: LogConfig = field(default_factory=LogConfig)
    out: str = "runs/train"

    @property
    def tokens_per_step(self) -> int:
        """Of one rank."""
        return self.train.batch * self.train.accumulate * self.train.seq_len

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Build from sections of plain values; founding names are accepted; an unknown section or
        key is a ValueError with the nearest name.
        """
        plain = renamed(mapping)
        known = [one.name for one in fields(cls)]
        for name in plain:
            if name not in known:
                raise ValueError(f"{name} is no section{nearest_name(name, known)}")
        made: dict[str, Any] = {}
        for name, section in _SECTIONS.items():
            values = _mapping(name, plain.get(name, {}))
            keys = [one.name for one in fields(section)]
            for key in values:
                if key not in keys:
                    raise ValueError(f"{name}.{key} is not known{nearest_name(key, keys)}")
            if name == "data" and "kind" not in values and "paths" not in values:
                values = {"kind": "synthetic", **values}
            made[name] = section(**values)
        made["model"] = ModelConfig.from_mapping(_mapping("model", plain.get("model", {})))
        if "out" in plain:
            made["out"] = str(plain["out"])
        return cls(**made)

    def to_mapping(self) -> dict[str, Any]:
        """Every resolved value as plain data: what `from_mapping` takes back."""
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]

    def identity(self) -> dict[str, Any]:
        """What changes what is computed, as plain data: all but where it is written, how it is
        logged and watched, how many processes fetch, how ranks talk, and the vocabulary, which is
        the tokenizer's and has a hash of its own. A schedule that does not fall over all steps may
        be given more of them.
        """
        mapping = self.to_mapping()
        for name, section in _SECTIONS.items():  # 1 and 1.0 are one number
            for one in fields(section):
                if one.type == "float":
                    mapping[name][one.name] = float(mapping[name][one.name])
        for name in ("out", "log", "watchdog", "checkpoint"):
            del mapping[name]
        del mapping["model"]["vocab_size"]
        mapping["parallel"] = {"compress": mapping["parallel"]["compress"]}
        for name in ("workers", "prefetch"):
            del mapping["data"][name]
        for name in [one for one in mapping["train"] if one.startswith(("eval_", "sample_"))]:
            del mapping["train"][name]
        del mapping["train"]["device"], mapping["train"]["decay_steps"]
        if self.train.schedule != "cosine":
            del mapping["train"]["steps"]
        if self.train.init_from is None:  # so that older checkpoints keep their hash
            del mapping["train"]["init_from"]
        if not self.data.pairs:  # the same
            del mapping["data"]["pairs"]
        return mapping

    def sha256(self) -> str:
        """Hash of `identity`."""
        return hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()

    def with_vocab(self, vocab_size: int) -> Self:
        """This with a model of the tokenizer's vocabulary."""
        return replace(self, model=replace(self.model, vocab_size=vocab_size))


def renamed(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """``mapping`` with founding names as those of today; ValueError where both are given."""
    plain = {name: dict(v) if isinstance(v, Mapping) else v for name, v in mapping.items()}
    for old, new in FOUNDING_NAMES.items():
        (section, key), (to, name) = old.split("."), new.split(".")
        values = plain.get(section)
        if not isinstance(values, dict) or key not in values:
            continue
        target = plain[to] = _mapping(to, plain.get(to))
        if name in target:
            raise ValueError(f"{new} is given twice ({old} is another name for it); keep one")
        target[name] = plain[section].pop(key)
    if plain.get("runtime") == {}:
        del plain["runtime"]
    return plain


def _mapping(name: str, value: object) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}={value!r} must be a mapping of names to values")
    return dict(value)


def _one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name}={value!r} is not known{nearest_name(str(value), list(known))}")


def _flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be true or false")


def _whole(section: str, config: object, *, at_least: int, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            raise ValueError(f"{section}.{name}={value!r} must be a whole number >= {at_least}")


def _number(name: str, value: object, *, least: float, most: float = float("inf")) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not least <= value <= most or value == float("inf"):  # type: ignore[operator]
        upper = "" if most == float("inf") else f" and <= {most:g}"
        raise ValueError(f"{name}={value!r} must be a number >= {least:g}{upper}")


def _strings(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
        raise ValueError(f"{name}={value!r} must be a list of paths")
    return tuple(value)
