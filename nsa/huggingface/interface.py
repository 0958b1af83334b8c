"""The two functions that transformers calls: of an attention, and of its mask.

B batch, T query tokens, S key tokens, M model dim, H query heads, G kv heads, D head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nsa.installing import pip_install

NAME = "nsa"
INPUT = "nsa_input"  # the keyword by which an attention hands on the states that its gates read

_UNKNOWN = {
    "softcap": "caps its logits",
    "s_aux": "has attention sinks",
    "position_bias": "adds a bias of positions",
    "sliding_window": "has a sliding window of its own",
}
_NEXT = {
    "sliding_window": "set config.sliding_window=None: NSA's own window is NSAConfig.window",
}


def register() -> None:
    """Make ``attn_implementation="nsa"`` known to transformers, in this process; again, it changes
    nothing.

    `convert` and `from_pretrained` do it. A model that has no gates of NSA is refused in its first
    forward. Raises ImportError without transformers.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ModuleNotFoundError as error:
        raise ImportError(
            f"got no package {error.name}; wanted transformers; {pip_install('huggingface')}"
        ) from error
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask_of)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """query [B, H, T, D] over key and value [B, G, S, D] -> (o [B, T, H, D], None).

    ``attention_mask`` is what `mask_of` returned. ValueError for what NSA does not compute.
    """
    if getattr(module, "nsa", None) is None or INPUT not in options:
        raise ValueError(
            f"{type(module).__name__} got attn_implementation='nsa' without gates; wanted a model"
            " that nsa.huggingface.convert or nsa.huggingface.from_pretrained returned; call"
            " convert(model, NSAConfig()), or load its checkpoint with from_pretrained"
        )
    _refuse_what_nsa_ignores(module, attention_mask, options)
    layer: Any = module.nsa
    o: Tensor = layer(
        options[INPUT],
        query,
        key,
        value,
        mask=attention_mask,
        scale=options.get("scaling"),
        cu_seqlens=options.get("cu_seq_lens_q"),
    )
    return o, None


def _refuse_what_nsa_ignores(
    module: nn.Module, mask: Tensor | None, options: dict[str, Any]
) -> None:
    who = type(module).__name__
    for name, what in _UNKNOWN.items():
        if options.get(name) is not None:
            raise ValueError(
                f"{who} {what} ({name}={options[name]!r}), which NSA does not compute; wanted none;"
                f" {_NEXT.get(name, 'take another model, or attn_implementation eager')}"
            )
    if options.get("output_attentions"):
        raise ValueError(
            f"{who} got output_attentions=True, and NSA has no matrix of attention; wanted False;"
            " call model.set_attn_implementation('eager') to look at dense attention"
        )
    if options.get("dropout"):
        raise ValueError(
            f"{who} got dropout={options['dropout']} in training, and NSA drops nothing; wanted 0;"
            " set attention_dropout=0 in the config before the model is made"
        )
    if options.get("is_causal") is False or not getattr(module, "is_causal", True):
        raise ValueError(f"{who} is not causal; wanted a decoder; take attn_implementation sdpa")
    if mask is not None and mask.ndim > 2:
        raise ValueError(
            f"{who} got an attention_mask {tuple(mask.shape)}; wanted [B, tokens], from which NSA"
            " chooses blocks; pass the padding alone, in two dimensions"
        )
    if mask is not None and options.get("cu_seq_lens_q") is not None:
        raise ValueError(
            f"{who} got cu_seq_lens_q and padding or a cache; wanted documents alone, packed"
            " into one row; leave attention_mask and the cache out"
        )


def mask_of(
    *,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Tensor | None:
    """What `attend` needs to know of the keys: bool [B, keys] where some are padding, bool [keys]
    where a cache has more room than keys, else None.

    Reads the mask, which waits for a GPU once a forward. ValueError for a mask that is not causal
    and padding, and inside torch.compile for a cache whose length is a tensor.
    """
    from transformers.masking_utils import causal_mask_function

    if mask_function not in (None, causal_mask_function):
        window = options.get("local_size")
        raise ValueError(
            f"got a mask of a sliding window or chunk of {window} tokens; wanted a causal one; set"
            " config.sliding_window=None: NSA's own window is NSAConfig.window"
            if window is not None
            else "got a mask that is more than causal (position_ids of packed documents, or a"
            " mask function); wanted a causal one; pass cu_seq_lens_q for packed documents, or"
            " pad them with attention_mask"
        )
    if isinstance(q_offset, Tensor) and torch.compiler.is_compiling():
        raise ValueError(
            "got a StaticCache inside torch.compile, which hides how many keys it holds; wanted a"
            " DynamicCache; leave cache_implementation out, or pass disable_compile=True"
        )
    end = int(q_offset) + q_length
    # [keys] of bool is an earlier answer: generate asks before the model does
    made_here = attention_mask is not None and attention_mask.ndim == 1
    if attention_mask is not None and not (made_here and attention_mask.dtype == torch.bool):
        if attention_mask.ndim != 2 or attention_mask.shape[1] != end:
            raise ValueError(
                f"got an attention_mask {tuple(attention_mask.shape)} for {end} keys; wanted [B,"
                f" {end}], one for each token that the cache holds or the call adds; append to it"
            )
        if torch.compiler.is_compiling() or not bool(attention_mask.all()):
            return attention_mask.bool()
    if end == kv_length:
        return None
    return torch.ones(end, dtype=torch.bool, device=options.get("device"))
