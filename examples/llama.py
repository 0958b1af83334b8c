"""NSA as the attention of a Hugging Face Llama, the pretrained projections taken over.

`python examples/llama.py` shows it on a tiny random Llama: where everything is selected the logits
are the original's; a training step with sparse attention; and what was trained comes back from
disk. docs/huggingface.md says the rest. Needs transformers 5.
"""

from __future__ import annotations

import copy
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nsa import NSAConfig
from nsa.engagement import collect
from nsa.huggingface import convert, from_pretrained


def main() -> None:
    """Equal logits where all is selected, a sparse training step, and a model from disk."""
    torch.manual_seed(0)
    original = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=97,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.2,
        )
    ).eval()
    ids_BT = torch.randint(0, 97, (2, 200))
    sparse_geometry = NSAConfig(cmp_block=8, cmp_stride=4, sel_block=16, num_selected=5, window=24)
    sparse = convert(copy.deepcopy(original), sparse_geometry)

    # compressed blocks of one token: that branch, too, is then the attention that was there
    everything = NSAConfig(cmp_block=1, cmp_stride=1, sel_block=16, num_selected=13, window=200)
    with torch.no_grad():
        expected = original(ids_BT).logits
        difference = (convert(original, everything)(ids_BT).logits - expected).abs().max()
    print(
        f"everything selected: logits up to {float(expected.abs().max()):.1f}, changed by at most"
        f" {float(difference):.1e}"
    )

    optimizer = torch.optim.AdamW(sparse.parameters(), lr=1e-2)
    with collect() as ran:
        loss = sparse(ids_BT, labels=ids_BT).loss
        loss.backward()
    optimizer.step()
    print(f"sparse: loss {loss.item():.3f}, ran {ran.counts}")

    with tempfile.TemporaryDirectory() as folder:
        sparse.save_pretrained(folder)
        loaded = from_pretrained(folder).state_dict()
    equal = sum(torch.equal(loaded[name], x) for name, x in sparse.state_dict().items())
    print(f"from disk: {equal} of {len(loaded)} tensors bit for bit, gates included")


if __name__ == "__main__":
    main()
