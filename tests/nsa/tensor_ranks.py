"""Started by torchrun in two processes: tensor-parallel layers and models against the same ones
whole, on each rank. Rank 0 writes what it found as JSON to argv[1].
"""

from __future__ import annotations

import copy
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from nsa import NSAAttention, NSAConfig
from nsa.config import preset
from nsa.model import TinyLM, next_token_labels
from nsa.parallel import tensor_parallel_plan, whole_state_dict
from tests.nsa.torchrun import end_together

SMALL = NSAConfig(
    cmp_block=8, cmp_stride=4, sel_block=8, num_selected=4, window=12, num_initial=1, num_local=1
)
# (query heads, kv heads, DK, DV, config)
LAYERS: dict[str, tuple[int, int, int, int, NSAConfig]] = {
    "plain": (8, 4, 8, 8, SMALL),
    "other value dim": (4, 2, 8, 12, SMALL),
    "shared kv": (8, 4, 8, 8, replace(SMALL, share_kv=True, gate="none")),
    "softmax gate": (8, 4, 8, 8, replace(SMALL, gate="softmax")),
    "learned phi": (8, 4, 8, 12, replace(SMALL, phi="mlp")),
    "sinks and norms": (8, 4, 8, 8, replace(SMALL, phi="linear", sinks=True, qk_norm=True)),
}
TOKENS = 61


def worst(found: dict[str, Tensor | None], wanted: dict[str, Tensor | None]) -> float:
    """The largest difference, relative to the largest value of its tensor."""
    assert found.keys() == wanted.keys()
    errors = [0.0]
    for name, want in wanted.items():
        got = found[name]
        assert (got is None) == (want is None), name
        if want is not None and got is not None:
            assert got.shape == want.shape, name
            scale = float(want.abs().max()) or 1.0
            errors.append(float((got - want).abs().max()) / scale)
    return float(torch.tensor(errors).max())  # NaN where one is, which Python's max would drop


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in module.named_parameters()}


def whole_gradients(module: nn.Module) -> dict[str, Tensor | None]:
    """Of a sharded module, as the whole one has them: they go through what gathers its weights."""
    with torch.no_grad():
        for parameter in module.parameters():
            assert parameter.grad is not None
            parameter.copy_(parameter.grad)
    return dict(whole_state_dict(module))


def scatter(module: nn.Module) -> None:
    """Sinks and norms that differ from head to head, as after training."""
    generator = torch.Generator().manual_seed(3)
    for name, p in module.named_parameters():
        if "norm" in name or name == "sinks":
            p.data += torch.randn(p.shape, generator=generator, dtype=p.dtype)


def layer_of(name: str) -> NSAAttention:
    heads, kv_heads, dk, dv, config = LAYERS[name]
    torch.manual_seed(1)
    layer = NSAAttention(32, heads, kv_heads, dk, dv, config, path="reference").double()
    scatter(layer)
    return layer


def compare_layer(name: str, mesh: DeviceMesh) -> dict[str, Any]:
    wanted = layer_of(name)
    sharded = copy.deepcopy(wanted)
    if mesh.get_local_rank():  # the first rank's weights count
        for p in sharded.parameters():
            p.data.fill_(9.0)
    parallelize_module(sharded, mesh, tensor_parallel_plan(sharded, mesh))
    state = whole_state_dict(sharded)
    generator = torch.Generator().manual_seed(2)
    x, upstream = (
        torch.randn(2, TOKENS, 32, dtype=torch.double, generator=generator) for _ in range(2)
    )
    mask = torch.arange(TOKENS) >= torch.tensor([[0], [7]])
    found: dict[str, Any] = {
        "state": all(torch.equal(state[key], value) for key, value in wanted.state_dict().items()),
        "heads": [sharded.num_heads, sharded.num_kv_heads],
    }
    for call, options in (("whole", {}), ("masked", {"attention_mask": mask})):
        results = []
        for layer in (sharded, wanted):
            layer.zero_grad()
            own_x = x.clone().requires_grad_()
            y = layer(own_x, **options)
            y.backward(upstream)
            results.append({"y": y.detach(), "x": own_x.grad})
        found[call] = worst(results[0], results[1])
    with torch.no_grad():
        cache = sharded.new_cache(2, TOKENS)
        y = torch.cat([sharded(x[:, :50], cache=cache), sharded(x[:, 50:], cache=cache)], 1)
        found["cache"] = worst({"y": y}, {"y": wanted(x)})
    found["gradients"] = worst(whole_gradients(sharded), gradients(wanted))
    return found


def compare_model(mesh: DeviceMesh) -> dict[str, Any]:
    config = replace(preset("tiny"), vocab_size=32, nsa=SMALL, checkpoint_layers=(0, 1))
    torch.manual_seed(4)
    wanted = TinyLM(config, "reference").double()
    sharded = copy.deepcopy(wanted)
    parallelize_module(sharded, mesh, tensor_parallel_plan(sharded, mesh))
    ids = torch.randint(32, (2, TOKENS), generator=torch.Generator().manual_seed(5))
    losses = []
    for model in (sharded, wanted):
        logits = model(ids).flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, next_token_labels(ids).flatten())
        loss.backward()
        losses.append({"loss": loss.detach()})
    local = [p.to_local() for p in sharded.parameters() if isinstance(p, DTensor)]
    share = sum(p.numel() for p in local) / sum(
        p.numel() for name, p in wanted.named_parameters() if "attention." in name or "mlp." in name
    )
    return {
        "loss": worst(losses[0], losses[1]),
        "share": share,
        "gradients": worst(whole_gradients(sharded), gradients(wanted)),
    }


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = {name: compare_layer(name, mesh) for name in LAYERS}
    found["model"] = compare_model(mesh)
    three = NSAAttention(32, 3, 3, 8, config=SMALL)
    refused = {}
    for name, module in (("heads", three), ("kind", nn.Linear(2, 2))):
        try:
            tensor_parallel_plan(module, mesh)
        except ValueError as error:
            refused[name] = str(error)
    found["refused"] = refused
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, found)
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(gathered))
    end_together()


if __name__ == "__main__":
    main()
