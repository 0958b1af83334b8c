"""TinyLM and its dense twin as a model of transformers, so that `AutoModelForCausalLM` reads what
`nsa.train.export.save_pretrained` wrote.

Importing this module imports transformers, and `register_tinylm` makes it known there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from nsa.config import ModelConfig
from nsa.model import DenseLM, TinyLM

MODEL_TYPE = "nsa_tinylm"


class TinyLMConfig(PretrainedConfig):
    """config.json of an exported model. ``model``: what ModelConfig.from_mapping takes;
    ``attention``: "nsa", or "dense" for the twin.
    """

    model_type = MODEL_TYPE

    def __init__(
        self, model: dict[str, Any] | None = None, attention: str = "nsa", **options: Any
    ) -> None:
        # transformers itself makes one without arguments, to see what differs from it
        self.model = (
            ModelConfig() if model is None else ModelConfig.from_mapping(model)
        ).to_mapping()
        self.attention = attention
        super().__init__(**options)


class TinyLMForCausalLM(PreTrainedModel):
    """Logits and loss of a TinyLM or DenseLM, under the names of its own tensors."""

    config_class = TinyLMConfig
    base_model_prefix = ""

    def __init__(self, config: TinyLMConfig) -> None:
        super().__init__(config)
        model = ModelConfig.from_mapping(config.model)
        core = DenseLM(model) if config.attention == "dense" else TinyLM(model)
        # Its parts are this module's, so that names are those of the file; itself it is none.
        object.__setattr__(self, "_core", core)
        self.embedding, self.blocks = core.embedding, core.blocks
        self.norm, self.head = core.norm, core.head
        self._tied_weights_keys = {"head.weight": "embedding.weight"}  # where the config ties
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **_: Any,
    ) -> CausalLMOutput:
        """ids int64 [B, T], labels the same (each position's own id, -100: none) -> logits
        [B, T, vocab_size] and the mean loss in nats. ValueError for a mask of the dense twin, which
        has none.
        """
        core: Any = self._core
        options: dict[str, Any] = {}
        if attention_mask is not None and not bool(attention_mask.all()):
            if isinstance(core, DenseLM):
                raise ValueError(
                    "got an attention_mask with zeros for the dense twin; wanted whole rows; give"
                    " rows of one length"
                )
            options["attention_mask"] = attention_mask
        logits = core(input_ids, **options)
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(
                logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten()
            )
        return CausalLMOutput(loss=loss, logits=logits)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        # transformers builds on the meta device and calls this for what no file holds: buffers of
        # gates, and weights that are missing
        reset: Any = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def register_tinylm() -> None:
    """Let AutoConfig and AutoModelForCausalLM read exported models in this process; again, it
    changes nothing.
    """
    AutoConfig.register(MODEL_TYPE, TinyLMConfig, exist_ok=True)
    AutoModelForCausalLM.register(TinyLMConfig, TinyLMForCausalLM, exist_ok=True)
