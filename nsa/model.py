"""TinyLM and its dense twin: pre-norm decoder, RMSNorm, ungated SiLU MLP, untied head."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nsa import checks, fused_block
from nsa.attention import NSAAttention
from nsa.config import ModelConfig, NSAConfig
from nsa.decode import (
    DecodeGraph,
    DenseCache,
    NSACache,
    check_cache,
    check_dense_cache,
    check_device,
    replay_of,
)
from nsa.dense import DenseAttention
from nsa.ops.positions import to_device
from nsa.padding import Padding, call_padded
from nsa.sampling import SAMPLING, Sampling, endings, has_ended, next_token
from nsa.shared_positions import Layout

IGNORED_LABEL = -100  # torch.nn.functional.cross_entropy's ignore_index


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); ``options`` are the attention's."""

    def __init__(self, model: ModelConfig, attention: nn.Module) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(model.dim)
        self.attention = attention
        self.mlp_norm = nn.RMSNorm(model.dim)
        hidden = model.mlp_ratio * model.dim
        self.mlp = nn.Sequential(
            nn.Linear(model.dim, hidden, bias=False),
            nn.SiLU(),
            nn.Linear(hidden, model.dim, bias=False),
        )

    def forward(self, x_BTM: Tensor, **options: Any) -> Tensor:
        cache, num_tokens = options.get("cache"), options.get("num_tokens")
        replay = replay_of(cache, self)
        if replay is not None and options.get("cu_seqlens") is None:
            return replay.step(x_BTM, cache, num_tokens)
        if cache is not None and (layout := options.get("layout")) is not None:
            route = fused_block.route_of(
                self, x_BTM, cache=cache, layout=layout, num_tokens=num_tokens
            )
            if route is not None:
                return fused_block.step(self, x_BTM, route, cache, layout)
        x_BTM = x_BTM + self.attention(self.attention_norm(x_BTM), **options)
        return x_BTM + self.mlp(self.mlp_norm(x_BTM))


class _Decoder(nn.Module):
    def __init__(self, model: ModelConfig, attention: Callable[[NSAConfig], nn.Module]) -> None:
        super().__init__()
        self.config = model
        self.embedding = nn.Embedding(model.vocab_size, model.dim)
        self.blocks = nn.ModuleList(
            Block(model, attention(model.config_of(layer))) for layer in range(model.num_layers)
        )
        self.norm = nn.RMSNorm(model.dim)
        self.head = nn.Linear(model.dim, model.vocab_size, bias=False)

    def _check_ids(self, ids_BT: Tensor, *, padded: bool = False) -> None:
        weight = checks.plain_weight(self.embedding)
        # a vocabulary that was resized is the embedding's, whatever the config says
        vocab_size = self.config.vocab_size if weight is None else weight.shape[0]
        checks.ids(ids_BT, vocab_size, weight, padded=padded)

    def _check_caches(self, caches: object, check: Callable[[object, int], None]) -> None:
        """ValueError unless ``caches`` are one a layer, each as ``check`` wants that of its layer,
        with one history.
        """
        maker = f"{type(self).__name__}.new_cache"
        if not isinstance(caches, Sequence) or isinstance(caches, str):
            raise ValueError(
                f"got a cache of type {type(caches).__name__}; wanted a list of one cache a"
                f" layer; {maker} makes it"
            )
        if len(caches) != len(self.blocks):
            raise ValueError(
                f"got {len(caches)} caches for {len(self.blocks)} layers; wanted one each;"
                f" {maker} makes them"
            )
        for layer, one in enumerate(caches):
            check(one, layer)
        # compiled, the lengths of caches that step are the device's; those of layers that replay
        # are alike between two steps, and asking each takes as long as several replays
        steps = caches[0].steps if caches else None
        known = torch.compiler.is_compiling() or (
            steps is not None and bool(steps.replays) and steps.is_between
        )
        if not known and len({c.lengths for c in caches}) > 1:
            lengths = [c.lengths for c in caches]
            undo = getattr(caches[0], "undo", None) or f"begin anew with {maker}"
            raise ValueError(
                f"got caches that hold {lengths} tokens; wanted the same in each layer; {undo}"
            )
        if len({id(c.steps) for c in caches}) > 1:
            raise ValueError(
                "got caches of which only some step, or apart; wanted all of them or none; give"
                " Steps those of all layers"
            )

    def _layouts(
        self, x: Tensor, caches: Sequence[NSACache | DenseCache] | None = None, **options: Any
    ) -> Sequence[Layout | None]:
        """Each layer's Layout of x [B, T, M]; layers of one config share one. None for layers that
        replay: their graphs make it.
        """
        steps = caches[0].steps if caches else None
        if steps is not None and steps.replays:
            return [None] * len(self.blocks)
        made: dict[NSAConfig, Layout] = {}
        for layer in range(len(self.blocks)):
            config = self.config.config_of(layer)
            if config not in made:
                options["cache"] = None if caches is None else caches[layer]
                made[config] = self._layout_of(layer, x, dtype=x.dtype, **options)
        return [made[self.config.config_of(layer)] for layer in range(len(self.blocks))]

    def _layout_of(self, layer: int, x: Tensor, **options: Any) -> Layout:
        attention: Any = self.blocks[layer].attention
        if isinstance(attention, NSAAttention | DenseAttention):  # one of several ranks has its own
            return attention.layout(x, **options)
        return Layout.of(x, self.config.config_of(layer), self.config.head_dim, **options)

    def _logits(
        self, x: Tensor, options: Callable[[int], dict[str, Any]] = lambda layer: {}
    ) -> Tensor:
        """The logits of embedded tokens x [B, T, M]; ``options`` gives each layer its own."""
        first, stop = self.config.checkpoint_layers or (0, 0)
        for layer, block in enumerate(self.blocks):
            if first <= layer < stop and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=False, **options(layer))
            else:
                x = block(x, **options(layer))
        return self.head(self.norm(x))


class TinyLM(_Decoder):
    """Decoder-only language model with NSA (Eq. 5) in every layer, or as ``model.layers`` says:
    ids int64 [B, T] -> logits [B, T, vocab_size] in the weights' dtype.

    ``path`` and ``fa2`` as in NSAAttention. RouteError for a request that nothing serves: of an
    unknown name at once, else in the forward.
    """

    def __init__(self, model: ModelConfig, path: str = "auto", fa2: str = "auto") -> None:
        super().__init__(
            model,
            lambda config: NSAAttention(
                model.dim,
                model.num_heads,
                model.num_kv_heads,
                model.head_dim,
                model.v_head_dim,
                config,
                path=path,
                fa2=fa2,
            ),
        )

    def forward(
        self,
        ids_BT: Tensor,
        *,
        cache: Sequence[NSACache] | None = None,
        cu_seqlens: Tensor | Sequence[int] | None = None,
        num_tokens: Sequence[int] | Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """ids int64 or int32 [B, T] -> logits [B, T, vocab_size]; the rest as in NSAAttention, with
        one cache a layer (`new_cache`). What an ``attention_mask`` leaves out is no id, and its
        logits are 0.

        ValueError for ids of another shape, dtype or device, on a CPU also outside the vocabulary
        (elsewhere in strict mode alone, since looking would make the host wait), and for caches
        that are not one a layer, of its config, with one history.
        """
        self._check_ids(ids_BT, padded=attention_mask is not None)
        if cache is not None:
            self._check_caches(
                cache, lambda one, layer: check_cache(one, self.config.config_of(layer))
            )
        if attention_mask is not None:
            checks.mask_alone(cu_seqlens=cu_seqlens, num_tokens=num_tokens)
            return call_padded(self, ids_BT, attention_mask, cache=cache)
        options: dict[str, Any] = {"cu_seqlens": cu_seqlens, "num_tokens": num_tokens}
        x_BTM = self.embedding(ids_BT)
        layouts = self._layouts(x_BTM, cache, **options)
        return self._logits(
            x_BTM,
            lambda layer: {
                "cache": None if cache is None else cache[layer],
                "layout": layouts[layer],
                **options,
            },
        )

    def new_cache(
        self,
        batch: int,
        max_len: int,
        *,
        initial_len: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> list[NSACache]:
        """One empty cache a layer."""
        layers: list[Any] = list(self.blocks)
        return [
            layer.attention.new_cache(batch, max_len, initial_len=initial_len, dtype=dtype)
            for layer in layers
        ]

    @torch.no_grad()
    def generate(
        self,
        ids_BT: Tensor,
        *,
        max_new_tokens: int,
        prompt_lengths: Sequence[int] | None = None,
        attention_mask: Tensor | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        stop: Sequence[Sequence[int]] = (),
        cuda_graph: bool = False,
        **sampling: Unpack[Sampling],
    ) -> Tensor:
        """Continue each prompt by ``max_new_tokens`` tokens: int64 [B, T + max_new_tokens].

        ``sampling`` is ``temperature``, ``top_p``, ``top_k`` and ``generator`` of
        `nsa.sampling.next_token`: by default the most likely token. A row ends after an
        ``eos_token_id`` (one or several) or after the ids of one of ``stop``, which it keeps; the
        host looks whether all have ended, on a GPU every 16 steps. Row b is its first
        ``prompt_lengths[b]`` tokens, the new ones, then zeros; ``attention_mask`` [B, T] instead
        says which of the ids are its prompt, wherever the padding lies. ``cuda_graph`` replays each
        decode step from a DecodeGraph, which saves the host's time; the capture costs as much as
        some steps, once a call. ValueError for it where the model is not on CUDA, and for arguments
        that do not fit.
        """
        masked = attention_mask is not None
        self._check_ids(ids_BT, padded=masked or prompt_lengths is not None)
        ids_BT = ids_BT.long()
        if attention_mask is not None:
            checks.mask_alone(prompt_lengths=prompt_lengths)
            padding = Padding.of(attention_mask, ids_BT)
            ids_BT, prompt_lengths = padding.pack(ids_BT), padding.count_B.tolist()
        checks.known(sampling, SAMPLING, also=[*inspect.signature(self.generate).parameters][1:-1])
        ends = endings(eos_token_id, stop)
        if cuda_graph:
            check_device(ids_BT.device)
        B, T = ids_BT.shape
        lengths = (
            [T] * B if prompt_lengths is None else checks.counts("prompt_lengths", prompt_lengths)
        )
        (max_new_tokens,) = checks.counts("max_new_tokens", [max_new_tokens])
        if max_new_tokens < 1 or len(lengths) != B or not all(1 <= n <= T for n in lengths):
            raise ValueError(
                f"max_new_tokens={max_new_tokens}, prompt_lengths={lengths} for ids [{B}, {T}];"
                f" wanted at least one new token, and {B} lengths from 1 to {T}; an empty prompt"
                " needs a first token"
            )
        if B == 0:
            return ids_BT.new_zeros(0, T + max_new_tokens)
        longest = max(lengths)
        cache = self.new_cache(B, longest + max_new_tokens)
        out = ids_BT.new_zeros(B, T + max_new_tokens)
        token = torch.arange(T, device=ids_BT.device)
        length_B = to_device(lengths, ids_BT.device)
        out[:, :T] = ids_BT.masked_fill(token >= length_B[:, None], 0)
        logits = self(out[:, :longest], cache=cache, num_tokens=lengths)
        last_BV = logits[torch.arange(B, device=ids_BT.device), length_B - 1]
        decode: Callable[[Tensor], Tensor]
        if cuda_graph and max_new_tokens > 1:  # the first token is the prefill's
            decode = DecodeGraph(self, cache)
        else:

            def decode(ids_B1: Tensor) -> Tensor:
                return self(ids_B1, cache=cache)[:, -1]

        new_BN = ids_BT.new_zeros(B, max_new_tokens)
        ended_B = torch.zeros(B, dtype=torch.bool, device=ids_BT.device)
        look_every = 1 if ids_BT.device.type == "cpu" else 16
        for step in range(max_new_tokens):
            chosen_B = next_token(last_BV, **sampling).masked_fill(ended_B, 0)
            out.scatter_(1, (length_B + step)[:, None], chosen_B[:, None])
            new_BN[:, step] = chosen_B
            for ending in ends:
                ended_B |= has_ended(new_BN[:, : step + 1], ending)
            if ends and (step + 1) % look_every == 0 and ended_B.all():
                break
            if step + 1 < max_new_tokens:
                last_BV = decode(chosen_B[:, None])
        return out


class DenseLM(_Decoder):
    """The same model with full causal attention; ``kind`` as in nsa.routing.DENSE_KINDS, with a
    cache CACHED_DENSE_KINDS.
    """

    def __init__(self, model: ModelConfig, kind: str = "dense") -> None:
        super().__init__(model, lambda config: DenseAttention(model, kind, config=config))

    def forward(self, ids_BT: Tensor, *, cache: Sequence[DenseCache] | None = None) -> Tensor:
        """ids int64 [B, T] -> logits [B, T, vocab_size]. With a ``cache`` (one a layer,
        `new_cache`) the ids continue each row's sequence; `nsa.DecodeGraph` captures such a step,
        `nsa.ChunkGraph` one of several tokens.

        ValueError for caches that are not one a layer, with one history.
        """
        self._check_ids(ids_BT)
        if cache is not None:
            self._check_caches(cache, lambda one, layer: check_dense_cache(one))
        x_BTM = self.embedding(ids_BT)
        layouts = self._layouts(x_BTM, cache)
        return self._logits(
            x_BTM,
            lambda layer: {
                "cache": None if cache is None else cache[layer],
                "layout": layouts[layer],
            },
        )

    def new_cache(
        self,
        batch: int,
        max_len: int,
        *,
        initial_len: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> list[DenseCache]:
        """One empty cache a layer."""
        layers: list[Any] = list(self.blocks)
        return [
            layer.attention.new_cache(batch, max_len, initial_len=initial_len, dtype=dtype)
            for layer in layers
        ]


def next_token_labels(
    ids_BT: Tensor, *, cu_seqlens: Tensor | Sequence[int] | None = None
) -> Tensor:
    """The label of each token is the next one: int64 [B, T], IGNORED_LABEL where there is none;
    of ids int64 or int32.

    With ``cu_seqlens`` (B = 1) the last token of each document has none, nor have tokens beyond the
    last document.
    """
    labels = torch.nn.functional.pad(ids_BT[:, 1:].long(), (0, 1), value=IGNORED_LABEL)
    if cu_seqlens is None:
        return labels
    cu_seqlens = checks.cu_seqlens_tensor(cu_seqlens, ids_BT.device)
    token = torch.arange(ids_BT.shape[1], device=ids_BT.device)
    ends = torch.isin(token + 1, cu_seqlens.long()) | (token >= cu_seqlens[-1])
    return labels.masked_fill(ends, IGNORED_LABEL)
