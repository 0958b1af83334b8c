"""Trains TinyLM with Accelerate on random ids: `python examples/accelerate_step.py`, or
`accelerate launch examples/accelerate_step.py` for several processes.

Needs accelerate; nothing of NSA is special to it.
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

from nsa import TinyLM
from nsa.config import preset
from nsa.model import next_token_labels

if __name__ == "__main__":
    set_seed(0)
    accelerator = Accelerator()
    model = TinyLM(preset("tiny"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = DataLoader(torch.randint(0, 256, (4, 128)).repeat(6, 1), batch_size=4)
    model, optimizer, rows = accelerator.prepare(model, optimizer, rows)
    for step, ids_BT in enumerate(rows):
        logits_BTV, labels_BT = model(ids_BT), next_token_labels(ids_BT)
        loss = torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print(f"step {step}: loss {loss.item():.3f}")
