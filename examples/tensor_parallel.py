"""Trains TinyLM with each rank's share of the heads, on random ids:
`torchrun --standalone --nproc-per-node 2 examples/tensor_parallel.py`, on GPUs or on CPUs.

Ranks of one mesh see the same ids, and print one loss.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from nsa import TinyLM
from nsa.config import preset
from nsa.model import next_token_labels
from nsa.parallel import tensor_parallel_plan

if __name__ == "__main__":
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    mesh = init_device_mesh(kind, (dist.get_world_size(),))
    torch.manual_seed(0)
    model = TinyLM(preset("tiny")).to(kind)
    parallelize_module(model, mesh, tensor_parallel_plan(model, mesh))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    ids_BT = torch.randint(0, 256, (4, 128), generator=torch.Generator().manual_seed(1)).to(kind)
    for step in range(6):
        logits_BTV, labels_BT = model(ids_BT), next_token_labels(ids_BT)
        loss = torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    dist.barrier()  # over gloo a rank that leaves first may abort the others
    dist.destroy_process_group()
