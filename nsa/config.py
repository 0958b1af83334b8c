"""Geometry and options of NSA, frozen, and validated when built. Imports no torch."""

from __future__ import annotations

import difflib
import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Self, TypeVar

BRANCHES = ("cmp", "sel", "win")
# see ModelConfig.sha256
_LATER_NSA_OPTIONS = (
    "phi_hidden",
    "adaptive_num_selected",
    "selection",
    "score_dtype",
    "qk_norm",
    "softcap",
    "sinks",
)
PHI_KINDS = ("mean", "linear", "mlp")
SELECTION_KINDS = ("exact", "hierarchical")
SCORE_DTYPES = ("float32", "bfloat16", "float16")
GATE_KINDS = ("sigmoid", "softmax", "none")
ROPE_KINDS = ("interleaved", "half", "none")
FULL_WINDOW = 2**30  # more tokens than any sequence has
CMP_ROPE_KINDS = ("auto", "before", "after")

# The paper's letters and the first implementation's YAML names.
NSA_ALIASES: Mapping[str, str] = {
    "l": "cmp_block",
    "d": "cmp_stride",
    "l_sel": "sel_block",
    "n_sel": "num_selected",
    "w": "window",
}
MODEL_ALIASES: Mapping[str, str] = {
    "n_layers": "num_layers",
    "n_heads": "num_heads",
    "n_kv_groups": "num_kv_heads",
    "d_k": "head_dim",
    "d_v": "v_head_dim",
}

# A founding value by today's field, and what it is here.
NSA_VALUE_ALIASES: Mapping[tuple[str, str], str] = {("phi", "avg"): "mean"}


def _positive(owner: str, **values: int) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{owner}.{name}={value!r} must be a whole number >= 1; set it to one")


def _one_of(owner: str, name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(
            f"{owner}.{name}={value!r} is not known; choose one of {', '.join(choices)}"
        )


def _whole_from_0(owner: str, name: str, value: object, hint: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{owner}.{name}={value!r} must be a whole number >= 0; {hint}")


def _true_or_false(owner: str, name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{owner}.{name}={value!r} must be True or False; set it to one")


# what fp32 holds without losing bits, the dtype that these numbers meet
_SMALLEST, _LARGEST = 2.0**-126, (2.0 - 2.0**-23) * 2.0**127


def _number_above_0(owner: str, name: str, value: object) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not _SMALLEST <= value <= _LARGEST:  # type: ignore[operator]
        raise ValueError(
            f"{owner}.{name}={value!r} must be > 0 and a finite number that float32 holds, from"
            f" {_SMALLEST:.3g} to {_LARGEST:.3g}; the default is fine for most uses"
        )


def _branches(value: object) -> tuple[str, ...]:
    """``value`` as a tuple of branches, each once; ValueError, with the tuple that was meant."""
    owner = "NSAConfig"
    if isinstance(value, str):
        names = value.replace(",", " ").replace("+", " ").split()
        meant = tuple(dict.fromkeys(n for n in names if n in BRANCHES))
        raise ValueError(
            f"{owner}.branches={value!r} must be a tuple of branches; write"
            f" branches={meant or BRANCHES!r}"
        )
    if not isinstance(value, tuple | list):
        raise ValueError(
            f"{owner}.branches={value!r} must be a tuple of branches; write branches={BRANCHES!r},"
            " or some of them"
        )
    for branch in value:
        _one_of(owner, "branches", branch, BRANCHES)
    if not value or len(set(value)) != len(value):
        raise ValueError(
            f"{owner}.branches={tuple(value)!r} must name each branch once, and at least one"
            f" of {BRANCHES}"
        )
    return tuple(value)


def nearest_name(name: str, valid: Sequence[str]) -> str:
    """Return ``'; did you mean X?'`` or the list of all valid names."""
    near = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else f"; valid names: {', '.join(sorted(valid))}"


def _resolve_keys(
    owner: str, data: Mapping[str, Any], known: list[str], aliases: Mapping[str, str]
) -> dict[str, Any]:
    resolved: dict[str, Any] = {}
    for key, value in data.items():
        name = aliases.get(key, key)
        if name not in known:
            raise ValueError(f"{owner} has no key {key!r}{nearest_name(key, [*known, *aliases])}")
        if name in resolved:
            raise ValueError(
                f"{owner}.{name} is given twice ({key!r} is another name for it); keep one"
            )
        resolved[name] = value
    return resolved


def _resolve_nsa(owner: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """Values of NSAConfig by field, of YAML keys and of the first implementation's names."""
    known = [one.name for one in fields(NSAConfig)]
    resolved = _resolve_keys(owner, data, known, NSA_ALIASES)
    return {
        name: NSA_VALUE_ALIASES.get((name, value), value) if isinstance(value, str) else value
        for name, value in resolved.items()
    }


_Class = TypeVar("_Class", bound=type)


def _with_known_names(aliases: Mapping[str, str]) -> Callable[[_Class], _Class]:
    """A dataclass whose TypeError for an unknown keyword has the nearest field; ``aliases`` are
    what ``from_mapping`` takes besides.
    """

    def decorate(cls: _Class) -> _Class:
        known, made = [f.name for f in fields(cls)], vars(cls)["__init__"]

        @functools.wraps(made)
        def checked(self: Any, *args: Any, **values: Any) -> None:
            for name in values:
                if name not in known:
                    near = f"; did you mean {aliases[name]!r}?" if name in aliases else ""
                    raise TypeError(
                        f"{cls.__name__} has no field {name!r}{near or nearest_name(name, known)}"
                    )
            made(self, *args, **values)

        cls.__init__ = checked  # type: ignore[misc]
        return cls

    return decorate


@_with_known_names(NSA_ALIASES)
@dataclass(frozen=True, slots=True)
class NSAConfig:
    """Geometry and options of one NSA layer (arXiv 2502.11089; defaults are the paper's section
    4.1).

    All sizes are in tokens, except ``num_selected``, ``num_initial`` and ``num_local``, which count
    selection blocks.
    ``cmp_rope='auto'`` means ``before`` for phi = mean and ``after`` for linear and mlp, since a
    learned map of rotated keys is not a function of relative position. ``phi_hidden`` is mlp's
    hidden width, by default the head dim.
    ``adaptive_num_selected`` lowers num_selected to 8 up to 512 tokens and to 12 up to 1,024 (the
    first implementation's rule).
    ``selection='hierarchical'`` searches regions of four blocks; ``score_dtype`` below float32
    changes the chosen set of close rows: both are opt-in, and nsa.selection reports what they
    change.
    ``qk_norm`` takes RMSNorm over the head dim of q and of k, before RoPE and before the gate, each
    with one learned weight [head_dim] for all heads and branches (as Qwen 3 does; for the layer
    alone). ``rope='none'`` rotates nothing. ``gate='none'`` adds the branches up.
    ``softcap=c`` makes each logit z, scaled already, c * tanh(z / c), in every branch and where
    blocks are scored (as Gemma 2 does). ``sinks`` gives each query head a logit a branch, of value
    0, in the denominator of its softmax, and of the blocks' scores (as gpt-oss does). Both are
    served by path reference alone, which is slow.
    Raises ValueError naming the field, what it got and what fits.
    """

    cmp_block: int = 32
    cmp_stride: int = 16
    sel_block: int = 64
    num_selected: int = 16
    window: int = 512
    num_initial: int = 1
    num_local: int = 2
    phi: str = "mean"
    gate: str = "sigmoid"
    gate_temperature: float = 1.0
    cmp_rope: str = "auto"
    rope: str = "interleaved"
    rope_base: float = 10_000.0
    rope_scale: float = 1.0
    share_kv: bool = False
    branches: tuple[str, ...] = BRANCHES
    phi_hidden: int | None = None
    adaptive_num_selected: bool = False
    selection: str = "exact"
    score_dtype: str = "float32"
    qk_norm: bool = False
    softcap: float | None = None
    sinks: bool = False

    def __post_init__(self) -> None:
        _positive(
            "NSAConfig",
            cmp_block=self.cmp_block,
            cmp_stride=self.cmp_stride,
            sel_block=self.sel_block,
            num_selected=self.num_selected,
            window=self.window,
            num_local=self.num_local,
        )
        _whole_from_0("NSAConfig", "num_initial", self.num_initial, "1 is the paper's value")
        for name in ("cmp_block", "sel_block"):
            size = getattr(self, name)
            if size % self.cmp_stride:
                nearest = max(1, round(size / self.cmp_stride)) * self.cmp_stride
                raise ValueError(
                    f"NSAConfig.{name}={size} must be a multiple of cmp_stride={self.cmp_stride};"
                    f" try {nearest}"
                )
        forced = self.num_initial + self.num_local
        if self.num_selected < forced:
            raise ValueError(
                f"NSAConfig.num_selected={self.num_selected} cannot hold num_initial + num_local ="
                f" {forced} forced blocks; raise num_selected to at least {forced}"
            )
        _one_of("NSAConfig", "phi", self.phi, PHI_KINDS)
        _one_of("NSAConfig", "gate", self.gate, GATE_KINDS)
        _one_of("NSAConfig", "selection", self.selection, SELECTION_KINDS)
        _one_of("NSAConfig", "score_dtype", self.score_dtype, SCORE_DTYPES)
        if self.phi_hidden is not None:
            _positive("NSAConfig", phi_hidden=self.phi_hidden)
            if self.phi != "mlp":
                raise ValueError(
                    f"NSAConfig.phi_hidden={self.phi_hidden} is mlp's, and phi={self.phi!r}; set"
                    " phi='mlp' or omit phi_hidden"
                )
        _true_or_false("NSAConfig", "adaptive_num_selected", self.adaptive_num_selected)
        _true_or_false("NSAConfig", "share_kv", self.share_kv)
        _true_or_false("NSAConfig", "qk_norm", self.qk_norm)
        _true_or_false("NSAConfig", "sinks", self.sinks)
        _one_of("NSAConfig", "rope", self.rope, ROPE_KINDS)
        _one_of("NSAConfig", "cmp_rope", self.cmp_rope, CMP_ROPE_KINDS)
        for name in ("gate_temperature", "rope_base", "rope_scale"):
            _number_above_0("NSAConfig", name, getattr(self, name))
        if self.softcap is not None:
            _number_above_0("NSAConfig", "softcap", self.softcap)
        object.__setattr__(self, "branches", _branches(self.branches))

    @property
    def rotates_before_compression(self) -> bool:
        return self.cmp_rope == "before" or (self.cmp_rope == "auto" and self.phi == "mean")

    def num_selected_for(self, kv_len: int) -> int:
        """n for a sequence of ``kv_len`` keys: num_selected, or by the adaptive rule at most 8 to
        512 tokens and 12 to 1,024.

        Never fewer than the forced blocks, which the rule does not know.
        """
        if not self.adaptive_num_selected or kv_len > 1024:
            return self.num_selected
        return max(
            min(self.num_selected, 8 if kv_len <= 512 else 12), self.num_initial + self.num_local
        )

    def full_attention(self) -> Self:
        """This config for a layer of full causal attention: one K and V, no gate, and a window that
        leaves no key out. RoPE, ``qk_norm``, ``softcap`` and ``sinks`` stay.
        """
        return replace(self, branches=("win",), window=FULL_WINDOW, share_kv=True, gate="none")

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any]) -> Self:
        """Build from YAML keys, the paper's letters included; an unknown key is a ValueError with
        the nearest name.
        """
        return cls(**_resolve_nsa("nsa", data))


@_with_known_names(MODEL_ALIASES)
@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a decoder-only language model whose attention is NSA (or, in its dense twin, causal
    attention).

    ``num_heads`` are query heads; ``num_heads % num_kv_heads`` must be 0. ``v_head_dim=None`` means
    ``head_dim``. ``layers`` gives each layer an NSAConfig of its own; None: all have ``nsa``.
    """

    dim: int = 768
    num_layers: int = 12
    num_heads: int = 12
    num_kv_heads: int = 2
    head_dim: int = 64
    v_head_dim: int | None = None
    vocab_size: int = 256
    mlp_ratio: int = 4
    # layers [first, stop) are recomputed in the backward; None: none
    checkpoint_layers: tuple[int, int] | None = None
    nsa: NSAConfig = field(default_factory=NSAConfig)
    layers: tuple[NSAConfig, ...] | None = None

    def __post_init__(self) -> None:
        check_heads(self.num_heads, self.num_kv_heads, self.head_dim, self.value_dim)
        _positive(
            "ModelConfig",
            dim=self.dim,
            num_layers=self.num_layers,
            vocab_size=self.vocab_size,
            mlp_ratio=self.mlp_ratio,
        )
        if not isinstance(self.nsa, NSAConfig):
            raise ValueError(
                f"ModelConfig.nsa={self.nsa!r} must be an NSAConfig; ModelConfig.from_mapping takes"
                " a mapping"
            )
        if self.layers is not None:
            object.__setattr__(self, "layers", _own_configs(self.layers, self.num_layers))
        if self.checkpoint_layers is not None:
            layers: object = self.checkpoint_layers
            whole = isinstance(layers, tuple | list) and [type(x) for x in layers] == [int, int]
            if whole:
                object.__setattr__(self, "checkpoint_layers", tuple(self.checkpoint_layers))
            if not whole or not 0 <= layers[0] < layers[1] <= self.num_layers:  # type: ignore[index]
                raise ValueError(
                    f"ModelConfig.checkpoint_layers={self.checkpoint_layers} must be (first, stop)"
                    f" with 0 <= first < stop <= num_layers={self.num_layers}; null checkpoints"
                    " none"
                )

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    def config_of(self, layer: int) -> NSAConfig:
        """The NSAConfig of layer ``layer``, from 0."""
        return self.nsa if self.layers is None else self.layers[layer]

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any]) -> Self:
        """Build from YAML keys (``preset:`` names a base, ``nsa:`` is a mapping); unknown keys are
        ValueErrors.

        ``layers:`` is a list of what each layer has: ``nsa``, ``dense`` (full causal attention), or
        a mapping of what differs from ``nsa:``. A list that is shorter than the model is repeated.
        """
        data = dict(data)
        base = preset(data.pop("preset")) if "preset" in data else cls()
        known = [f.name for f in fields(cls)]
        resolved = _resolve_keys("model", data, known, MODEL_ALIASES)
        if "nsa" in resolved:
            if not isinstance(resolved["nsa"], Mapping):
                raise ValueError(
                    f"model.nsa={resolved['nsa']!r} must be a mapping such as {{l: 32, d: 16}}"
                )
            resolved["nsa"] = replace(base.nsa, **_resolve_nsa("nsa", resolved["nsa"]))
        values = {name: getattr(base, name) for name in known} | resolved
        if resolved.get("layers") is not None:
            values["layers"] = _layers(resolved["layers"], values["nsa"], values["num_layers"])
        return cls(**values)

    def to_mapping(self) -> dict[str, Any]:
        """Every value by its field's name, ``nsa`` as a mapping of its own: what `from_mapping`
        takes back. Raises nothing.
        """
        return asdict(self)

    def sha256(self) -> str:
        """Hash of every resolved value, so that a toy config never runs under a big one's name.

        An option added later is omitted at its default, where it changes nothing, so that stored
        baselines stay comparable.
        """
        mapping = self.to_mapping()
        defaults = asdict(NSAConfig())
        for nsa in (mapping["nsa"], *(mapping["layers"] or ())):
            for name in _LATER_NSA_OPTIONS:
                if nsa[name] == defaults[name]:
                    del nsa[name]
        for name in ("checkpoint_layers", "layers"):
            if mapping[name] is None:
                del mapping[name]
        return hashlib.sha256(json.dumps(mapping, sort_keys=True).encode()).hexdigest()


def _own_configs(layers: object, num_layers: int) -> tuple[NSAConfig, ...]:
    given = tuple(layers) if isinstance(layers, tuple | list) else ()
    if len(given) != num_layers or not all(isinstance(one, NSAConfig) for one in given):
        raise ValueError(
            f"ModelConfig.layers={layers!r} must be {num_layers} NSAConfigs, one a layer, or None;"
            " ModelConfig.from_mapping takes a list that it repeats"
        )
    return given


def _layers(pattern: object, nsa: NSAConfig, num_layers: int) -> tuple[NSAConfig, ...]:
    """What ``layers:`` of a YAML file says, repeated to ``num_layers``."""
    if not isinstance(pattern, list | tuple) or not pattern or num_layers % len(pattern):
        raise ValueError(
            f"model.layers={pattern!r} must be a list whose length divides num_layers={num_layers};"
            " write one entry a layer, or those that repeat, such as [{branches: [win]}, nsa]"
        )
    return tuple(_layer(entry, nsa) for entry in pattern) * (num_layers // len(pattern))


def _layer(entry: object, nsa: NSAConfig) -> NSAConfig:
    if isinstance(entry, NSAConfig):
        return entry
    if isinstance(entry, Mapping):
        return replace(nsa, **_resolve_nsa("layers", entry))
    if entry not in ("nsa", "dense"):
        raise ValueError(
            f"model.layers has {entry!r}; wanted nsa, dense, or a mapping of what differs from"
            " nsa:, such as {branches: [win], window: 1024}"
        )
    return nsa if entry == "nsa" else nsa.full_attention()


def check_heads(num_heads: int, num_kv_heads: int, head_dim: int, v_head_dim: int) -> None:
    """Raise ValueError unless the heads form whole groups and head_dim can be rotated in pairs."""
    _positive(
        "model",
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
    )
    if num_heads % num_kv_heads:
        nearest = max(1, round(num_heads / num_kv_heads)) * num_kv_heads
        raise ValueError(
            f"num_heads={num_heads} must be a multiple of num_kv_heads={num_kv_heads}; try"
            f" num_heads={nearest}"
        )
    if head_dim % 2:
        raise ValueError(
            f"head_dim={head_dim} must be even: RoPE rotates pairs; try {head_dim + 1}"
        )


PRESETS: Mapping[str, ModelConfig] = {
    # The first implementation's model: 78.3 M parameters; small per-group gates, softmax as there.
    "m7c_125m": ModelConfig(nsa=NSAConfig(gate="softmax")),
    # Small enough for a CPU, and with blocks that compete from 81 tokens on.
    "tiny": ModelConfig(
        dim=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        nsa=NSAConfig(cmp_block=8, cmp_stride=4, sel_block=16, num_selected=5, window=24),
    ),
}


def preset(name: str) -> ModelConfig:
    """Return the preset ``name``; ValueError names the nearest one."""
    if name not in PRESETS:
        raise ValueError(f"no model preset {name!r}{nearest_name(name, list(PRESETS))}")
    return PRESETS[name]
