"""Trains TinyLM on packed documents whose tokens lie on all ranks, on random ids:
`torchrun --standalone --nproc-per-node 2 examples/context_parallel.py`, on GPUs or on CPUs; one
rank will do.

Every rank has the whole batch and computes its shard of it; the loss is that of one process.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from nsa import TinyLM
from nsa.config import preset
from nsa.model import next_token_labels
from nsa.parallel import ContextParallel

if __name__ == "__main__":
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    if kind == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    cp = ContextParallel(init_device_mesh(kind, (dist.get_world_size(),)))
    torch.manual_seed(0)  # the same weights on every rank
    model = cp.wrap(TinyLM(preset("tiny")).to(kind))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids_BT = torch.randint(0, 256, (1, 512), generator=torch.Generator().manual_seed(1)).to(kind)
    cu_seqlens = [0, 100, 350, 512]
    labels_BT = next_token_labels(ids_BT, cu_seqlens=cu_seqlens)
    count = int((labels_BT >= 0).sum())
    for step in range(6):
        logits_BTV = model(cp.shard(ids_BT), cu_seqlens=cu_seqlens)
        loss = torch.nn.functional.cross_entropy(
            logits_BTV.flatten(0, 1), cp.shard(labels_BT).flatten(), reduction="sum"
        )
        (loss / count).backward()
        cp.sum_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item() / count:.3f}")
    dist.barrier()  # over gloo a rank that leaves first may abort the others
    dist.destroy_process_group()
