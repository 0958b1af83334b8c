"""Trains TinyLM with PyTorch Lightning on random ids: `python examples/lightning_step.py`.

Needs pytorch-lightning; nothing of NSA is special to it.
"""

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

from nsa import TinyLM
from nsa.config import preset
from nsa.model import next_token_labels


class Training(pl.LightningModule):
    """Next-token training with AdamW."""

    def __init__(self) -> None:
        super().__init__()
        self.model = TinyLM(preset("tiny"))

    def training_step(self, ids_BT: torch.Tensor, index: int) -> torch.Tensor:
        """ids [B, T] -> the mean loss in nats a token."""
        logits_BTV, labels_BT = self.model(ids_BT), next_token_labels(ids_BT)
        loss = torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten())
        print(f"step {index}: loss {loss.item():.3f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """All parameters, gates and phi included."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


if __name__ == "__main__":
    pl.seed_everything(0)
    rows = DataLoader(torch.randint(0, 256, (4, 128)).repeat(6, 1), batch_size=4)
    trainer = pl.Trainer(max_epochs=1, logger=False, enable_checkpointing=False)
    trainer.fit(Training(), rows)
