"""NSA as the attention of a Hugging Face Llama, the pretrained projections taken over.

    model = with_nsa(LlamaForCausalLM.from_pretrained(...), NSAConfig())      # then fine-tune it:
    NSA has to be learned

`python examples/llama.py` shows it on a tiny random Llama: where everything is selected the logits
are the original's. Needs transformers 5. Trains, and reads whole sequences; a Hugging Face cache
would hold K and V that NSA does not read, so
``generate`` reads the sequence again for each token (nsa.TinyLM shows decoding from an NSACache).

B batch, T tokens, M model dim.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from nsa import NSAAttention, NSAConfig
from nsa.engagement import collect

_REFUSED = {
    "cache": "a cache of K and V, which NSA does not read",
    "past_key_values": "a cache of K and V, which NSA does not read",
    "use_cache": "use_cache=True, and NSA fills no Hugging Face cache",
    "output_attentions": "output_attentions=True, and NSA has no attention matrix",
}


class LlamaNSA(NSAAttention):
    """NSAAttention with the names of weights, the arguments and the results of transformers'
    LlamaAttention.
    """

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        *,
        cu_seq_lens_q: Tensor | None = None,
        **_checked_by_the_model: Any,
    ) -> tuple[Tensor, None]:
        """hidden_states [B, T, M] -> (y [B, T, M], None).

        ``cu_seq_lens_q`` int [N + 1] packs N documents into B = 1.
        """
        return super().forward(hidden_states, cu_seqlens=cu_seq_lens_q), None


def with_nsa(model: LlamaForCausalLM, config: NSAConfig) -> LlamaForCausalLM:
    """Replace every attention of ``model``, in place, by NSA with its q, k, v and o weights;
    returns ``model``.

    The weights were trained with one K and V, and with half-split RoPE at one base, so
    ``share_kv``, ``rope``, ``rope_base`` and ``rope_scale`` of ``config`` are set to that; the rest
    is yours. The gates are new: equal at first, and of sum 1, so that three branches which see the
    same keys are the attention that was there. Raises ValueError for what NSA does not compute: an
    attention bias or dropout, RoPE scaling other than linear, and, at each forward, padding,
    caches, attention matrices, and positions that do not count from 0 (``cu_seq_lens_q`` packs
    documents).
    """
    llama = model.config
    rope = _supported_rope(llama)
    scale = 1 / float(rope["factor"]) if rope["rope_type"] == "linear" else 1.0
    config = replace(
        config, share_kv=True, rope="half", rope_base=float(rope["rope_theta"]), rope_scale=scale
    )
    for layer in model.model.layers:
        layer.self_attn = _converted(layer.self_attn, llama, config)
    llama.use_cache = model.generation_config.use_cache = False
    model.model.register_forward_pre_hook(_refuse_what_nsa_ignores, with_kwargs=True)
    return model


def _converted(attention: Any, llama: Any, config: NSAConfig) -> LlamaNSA:
    """A layer that owns the projections of ``attention``, on their device and in their dtype."""
    if isinstance(attention, NSAAttention):
        raise ValueError(
            "got a model whose attention is NSA already; wanted one of transformers; load it anew"
            " to convert it otherwise"
        )
    heads = (llama.num_attention_heads, llama.num_key_value_heads, llama.head_dim)
    converted = LlamaNSA(llama.hidden_size, *heads, config=config)
    converted.q_proj, converted.k_proj, converted.v_proj, converted.o_proj = (
        attention.q_proj,
        attention.k_proj,
        attention.v_proj,
        attention.o_proj,
    )
    _equal_gates(converted.gate, config.gate, len(config.branches))
    weight = converted.q_proj.weight
    return converted.to(device=weight.device, dtype=weight.dtype).train(attention.training)


@torch.no_grad()
def _equal_gates(gate: Any, kind: str, num_branches: int) -> None:
    """1 / num_branches for each branch and token.

    The zeros move: their gradient is that of what they are multiplied with.
    """
    if kind == "softmax":
        gate.down.zero_()
        return
    gate.proj.weight.zero_()
    share = torch.tensor(1 / num_branches)
    # a sigmoid never reaches the 1 of a single branch
    gate.proj.bias.fill_(torch.logit(share, eps=1e-6))


def _supported_rope(llama: Any) -> dict[str, Any]:
    """The model's RoPE parameters; ValueError where NSA cannot do what its attention does."""
    rope: dict[str, Any] | None = getattr(llama, "rope_parameters", None)
    if rope is None:
        raise ValueError(
            "the model's config has no rope_parameters; wanted transformers 5's; upgrade with pip"
            " install 'transformers>=5'"
        )
    if (
        rope["rope_type"] not in ("default", "linear")
        or rope.get("partial_rotary_factor", 1.0) != 1.0
    ):
        raise ValueError(
            f"the model's RoPE is {dict(rope)}; wanted rope_type default or linear over whole"
            " heads; NSA scales positions only: take a model without other scaling"
        )
    if llama.attention_bias:
        raise ValueError(
            "the model has attention_bias=True; wanted projections without bias, as NSA's are; take"
            " another model"
        )
    if llama.attention_dropout:
        raise ValueError(
            f"the model has attention_dropout={llama.attention_dropout}; wanted 0, since NSA drops"
            " nothing; set it to 0 in its config"
        )
    return rope


def _refuse_what_nsa_ignores(
    decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Before a forward: ValueError for arguments that would change nothing; drops a mask and
    positions that say nothing.

    Looks into a mask and positions where they are given, which syncs with a GPU; give none to avoid
    that.
    """
    for name, what in _REFUSED.items():
        if kwargs.get(name) not in (None, False):
            raise ValueError(f"got {what}; wanted a whole sequence a call; leave {name} away")
    if len(args) > 1:
        raise ValueError(
            f"got {len(args)} positional arguments; wanted the token ids alone; give the others by"
            " name"
        )
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if mask is not None and (mask.ndim != 2 or not bool((mask != 0).all())):
        raise ValueError(
            f"got an attention_mask {tuple(mask.shape)} that hides tokens; wanted none, or ones [B,"
            " T]: NSA knows no padding; pack rows of different lengths with cu_seq_lens_q, or give"
            " rows of one length"
        )
    if positions is not None:
        _check_positions(positions, kwargs.get("cu_seq_lens_q"))
    return args, kwargs | {"attention_mask": None, "position_ids": None}


def _check_positions(positions_BT: Tensor, cu_seqlens: Tensor | None) -> None:
    token_T = torch.arange(positions_BT.shape[-1], device=positions_BT.device)
    if cu_seqlens is not None:
        token_T = token_T - cu_seqlens[torch.searchsorted(cu_seqlens, token_T, right=True) - 1]
    if not torch.equal(positions_BT, token_T.expand_as(positions_BT)):
        raise ValueError(
            "got position_ids that do not count from 0 in each row or document; wanted none, or"
            " those; NSA numbers the tokens itself, and cu_seq_lens_q says where documents begin"
        )


def main() -> None:
    """A tiny random Llama: equal logits where all is selected, then a training step with sparse
    attention.
    """
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    original = LlamaForCausalLM(
        LlamaConfig(vocab_size=97, num_hidden_layers=2, initializer_range=0.2, **sizes)
    ).eval()
    ids_BT = torch.randint(0, 97, (2, 200))
    sparse_geometry = NSAConfig(cmp_block=8, cmp_stride=4, sel_block=16, num_selected=5, window=24)
    sparse = with_nsa(copy.deepcopy(original), sparse_geometry)

    # compressed blocks of one token: that branch, too, is then the attention that was there
    everything = NSAConfig(cmp_block=1, cmp_stride=1, sel_block=16, num_selected=13, window=200)
    with torch.no_grad():
        expected = original(ids_BT).logits
        difference = (with_nsa(original, everything)(ids_BT).logits - expected).abs().max()
    print(
        f"everything selected: logits up to {float(expected.abs().max()):.1f}, changed by at most"
        f" {float(difference):.1e}"
    )

    with collect() as ran:
        loss = sparse(ids_BT, labels=ids_BT).loss
        loss.backward()
    print(f"sparse: loss {loss.item():.3f}, ran {ran.counts}")


if __name__ == "__main__":
    main()
