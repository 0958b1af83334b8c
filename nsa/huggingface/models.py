"""Models of transformers with NSA in their attentions: made from dense ones, and loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from nsa import checks
from nsa.config import NSAConfig, check_heads
from nsa.huggingface.interface import INPUT, NAME, register
from nsa.huggingface.layer import InterfaceNSA

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
# of a decoder's forward, in order
_ARGUMENTS = (
    "input_ids",
    "attention_mask",
    "position_ids",
    "cache",
    "inputs_embeds",
    "use_cache",
)
_OF_THE_MODEL = ("attn_implementation", "device_map", "dtype", "output_loading_info", "torch_dtype")
_OF_THE_HUB = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")


def convert(model: Any, config: NSAConfig = NSAConfig()) -> Any:
    """Give ``model``, in place, NSA with its own q, k, v and o projections; returns ``model``.

    Each attention gets a submodule ``nsa`` of gates and phi, and ``model.config.nsa`` holds
    ``config``, so that `save_pretrained` stores both; `nsa.huggingface.from_pretrained` loads them.
    The model keeps its one K and V and its RoPE, so ``share_kv`` is set, and ``cmp_rope`` to
    "before": the compressed branch is of rotated keys. The gates begin as
    `InterfaceNSA.reset_gate` says.

    Raises ValueError for a model of another family than llama, mistral, qwen2 and qwen3, one that
    has NSA already, sliding windows, and options that ask for what attention is not given:
    gate="softmax" (queries before RoPE), cmp_rope="after", RoPE of NSA's own,
    adaptive_num_selected.
    """
    from transformers import PreTrainedModel

    checks.config(config)
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"convert got a {type(model).__name__}; wanted a model of transformers; convert it"
            " before it is wrapped (get_peft_model, DistributedDataParallel)"
        )
    if getattr(model.config, NAME, None) is not None:
        raise ValueError(
            f"convert got a {type(model).__name__} whose config has nsa already; wanted a dense"
            " model; load it anew to convert it otherwise"
        )
    config = _of_rotated_keys(config)
    _check_family(model)
    register()
    _attach(model, config)
    model.config.nsa = _mapping_of(config)
    model.set_attn_implementation(NAME)
    _keep_implementation(model)
    return model


def from_pretrained(source: str, model_class: Any = None, **options: Any) -> Any:
    """The model that ``save_pretrained`` wrote after `convert`, gates and phi included, bit for
    bit.

    ``source``, ``options``: as in transformers' ``from_pretrained`` (a folder or a name; dtype,
    device_map, ...). ``model_class``: the one that is stored by default. Raises ValueError for a
    checkpoint whose config has no nsa, and for one without each of NSA's tensors.
    """
    import transformers

    register()
    if model_class is not None and model_class.__name__.startswith("Auto"):
        raise ValueError(
            f"model_class is {model_class.__name__}; wanted the class of a model, such as"
            " LlamaForCausalLM; leave it out for the one that is stored"
        )
    config = options.pop("config", None)
    if not isinstance(config, transformers.PretrainedConfig):
        of_hub = {name: options[name] for name in _OF_THE_HUB if name in options}
        config = transformers.AutoConfig.from_pretrained(config or source, **of_hub)
        # as transformers does: what the config has is changed there, and the rest is the model's
        for name in [one for one in options if one not in _OF_THE_MODEL and hasattr(config, one)]:
            setattr(config, name, options.pop(name))
    mapping = getattr(config, NAME, None)
    if mapping is None:
        raise ValueError(
            f"{source} has no nsa in its config; wanted a checkpoint of a converted model; load it"
            " with transformers and call nsa.huggingface.convert(model, NSAConfig())"
        )
    nsa_config = NSAConfig.from_mapping(mapping)
    dense = model_class or _stored_class(config, source)

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        dense.__init__(self, *args, **kwargs)
        _attach(self, nsa_config)

    # Its modules must be there before the weights are read; the class is gone when they are.
    loader: Any = type(dense.__name__, (dense,), {"__init__": init, "__module__": dense.__module__})
    options.setdefault("attn_implementation", NAME)
    wants_info = options.pop("output_loading_info", False)
    model, info = loader.from_pretrained(source, config=config, output_loading_info=True, **options)
    model.__class__ = dense
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        wrong = sorted(str(key) for key in info[what] if f".{NAME}." in str(key))
        if wrong:
            raise ValueError(
                f"{source} has {what.replace('_', ' ')} of NSA: {', '.join(wrong[:3])}"
                f" ({len(wrong)}); wanted the tensors of its config.nsa, and no new ones; save it"
                " again with save_pretrained, adapters merged"
            )
    _keep_implementation(model)
    return (model, info) if wants_info else model


def _stored_class(config: Any, source: str) -> Any:
    import transformers

    names = getattr(config, "architectures", None) or ["?"]
    found = getattr(transformers, names[0], None)
    if found is None:
        raise ValueError(
            f"{source} names architecture {names[0]!r}; wanted a class of transformers; pass"
            " model_class="
        )
    return found


def _keep_implementation(model: Any) -> None:
    """Let config.json ask for NSA: loaded without this module it is refused, not dense."""
    model.config.attn_implementation = NAME


def _mapping_of(config: NSAConfig) -> dict[str, Any]:
    """``config`` as JSON gives it back."""
    return asdict(config) | {"branches": list(config.branches)}


def _of_rotated_keys(config: NSAConfig) -> NSAConfig:
    """``config`` for keys that the model rotates; ValueError for what they cannot give."""
    default = {field.name: field.default for field in fields(NSAConfig)}
    wanted: dict[str, tuple[Any, str]] = {
        "gate": (
            "sigmoid",
            "'none' has nothing to learn, and 'softmax' reads queries before RoPE, which attention"
            " does not get",
        ),
        "adaptive_num_selected": (False, "a cache would choose otherwise than a whole sequence"),
        **{
            name: (default[name], "the model rotates by its own RoPE")
            for name in ("rope", "rope_base", "rope_scale")
        },
        **{
            name: (default[name], "the model's own attention has none")
            for name in ("qk_norm", "softcap", "sinks")
        },
    }
    for name, (value, why) in wanted.items():
        if getattr(config, name) != value:
            raise ValueError(
                f"convert got NSAConfig.{name}={getattr(config, name)!r}; wanted {value!r}: {why};"
                " leave it out"
            )
    if config.cmp_rope == "after":
        raise ValueError(
            "convert got NSAConfig.cmp_rope='after'; wanted 'before' or 'auto': a cache of the"
            " model holds rotated keys; leave it out"
        )
    return replace(config, share_kv=True, cmp_rope="before")


def _check_family(model: Any) -> None:
    config = model.config
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"convert got a model of type {config.model_type!r}; wanted one of"
            f" {', '.join(FAMILIES)}, which were tried; take one of those, or nsa.NSAAttention in"
            " a model of your own"
        )
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if window is not None or kinds != {"full_attention"}:
        raise ValueError(
            f"convert got a model with sliding_window={window} and layers of {sorted(kinds)};"
            " wanted full attention, since a cache would drop keys that NSA selects; load it with"
            " sliding_window=None: NSA's own window is NSAConfig.window"
        )


def _attentions(model: nn.Module) -> Iterator[nn.Module]:
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "layer_idx")
    return (m for m in model.modules() if all(hasattr(m, name) for name in names))


def _attach(model: Any, config: NSAConfig) -> None:
    """A submodule ``nsa`` in each attention, on its device and in the model's dtype."""
    decoder = model.config
    heads, kv_heads = decoder.num_attention_heads, decoder.num_key_value_heads
    for attention in _attentions(model):
        head_dim: Any = attention.head_dim
        check_heads(heads, kv_heads, head_dim, head_dim)
        layer = InterfaceNSA(config, decoder.hidden_size, heads, head_dim)
        device = next(attention.parameters()).device
        attention.nsa = layer.to(device=device, dtype=model.dtype).train(attention.training)
        attention.register_forward_pre_hook(_hand_on_input, with_kwargs=True)
    model.base_model.register_forward_pre_hook(_pass_documents, with_kwargs=True)


def _hand_on_input(
    attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The states of an attention as a keyword more, which it passes to the interface."""
    return args, kwargs | {INPUT: args[0] if args else kwargs["hidden_states"]}


def _pass_documents(
    decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Packed documents are those of cu_seq_lens_q; ValueError for position_ids that begin anew
    without it.

    Where transformers would look for documents itself, which makes a mask of their pairs, it gets
    one of [T] ones, which it hands to `mask_of` as it is.
    """
    options = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
    states = options.get("input_ids")
    states = options.get("inputs_embeds") if states is None else states
    if states is None or len(args) > len(_ARGUMENTS):
        return args, kwargs  # the model says what is wrong
    mask = options.get("attention_mask")
    if options.get("cu_seq_lens_q") is None and not torch.compiler.is_compiling():
        _check_positions(options.get("position_ids"), mask)
    elif mask is None:
        ones = torch.ones(states.shape[1], dtype=torch.bool, device=states.device)
        return (), options | {"attention_mask": ones}
    return args, kwargs


def _check_positions(positions: Tensor | None, mask: Tensor | None) -> None:
    if positions is None or positions.ndim != 2 or positions.shape[1] == 1:
        return
    jumps = positions.diff() != 1
    if mask is not None and mask.ndim == 2:
        present = mask[:, -positions.shape[1] :] != 0
        jumps = jumps & present[:, 1:] & present[:, :-1]
    if bool(jumps.any()):
        raise ValueError(
            "got position_ids that do not count up by 1, as of packed documents, without"
            " cu_seq_lens_q; wanted one sequence a row; pass cu_seq_lens_q, or pad with"
            " attention_mask"
        )
