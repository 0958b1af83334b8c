"""The contract of a peer's function, by kind.

B batch, T tokens, G kv heads, HQ query heads, D head dim, DV head dim of v, N blocks. Every peer
returns o [B, T, HQ, DV] in the dtype of q; gradients come by autograd.

- dense, causal:      f(q, k, v, *, scale)
- window, causal:     f(q, k, v, *, window, scale)
- nsa, three K and V: f(q, (k_cmp, v_cmp), (k_sel, v_sel), (k_win, v_win), gates, *, config, scale)
- nsa, one K and V:   f(q, k, v, gates, *, config, scale)

q [B, T, HQ, D], k [B, T, G, D], v [B, T, G, DV], gates [B, T, HQ, 3] of cmp, sel and win;
``config`` is the NSAConfig; a token of the window sees itself and window - 1 before it. An NSA
peer may return (o, blocks), blocks int [B, T, G, N] in any order, -1 for none: its choice is proved
then, too.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nsa import engagement
from nsa.config import BRANCHES, ModelConfig
from perfbench.machine import source_of
from perfbench.matrix import located, route_of_peer
from perfbench.records import LoadedPeer, Peer
from perfbench.worker.plugin_object import resolve

THREE = ("q", *(f"{kind}_{branch}" for branch in BRANCHES for kind in ("k", "v")), "gates")


@lru_cache(maxsize=16)
def _imported(function: str, folder: str) -> Callable[..., Any]:
    module, _, name = function.partition(":")
    if folder:  # out of it, and of no other module of that name
        found = resolve(function, [Path(folder)])
    else:
        found = getattr(importlib.import_module(module), name, None)
    if not callable(found):
        raise ValueError(
            f"peer {function}: {module} has no function {name}; wanted the peer's; correct"
            " `function:` or the entry point"
        )
    called: Callable[..., Any] = found
    return called


def function_of(peer: Peer) -> Callable[..., Any]:
    """The peer's function, imported; ValueError where its module has none of that name."""
    return _imported(located(peer).function, peer.folder)


def loaded_peer(peer: Peer) -> LoadedPeer:
    """What this process imports for ``peer``: the version and the file, asked of the module."""
    module = function_of(peer).__module__ if not peer.witness else peer.witness
    file = getattr(importlib.import_module(module), "__file__", None)
    source = source_of(Path(peer.folder)) if peer.folder else None
    return LoadedPeer(
        name=peer.name,
        version=_version_of(module),
        file=file or module,
        file_sha256=None if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest(),
        commit=source.commit if source else None,
        dirty_sha256=source.dirty_sha256 if source else None,
    )


def _version_of(module: str) -> str | None:
    """Distributions that bring the module's top-level package; of several those with its files."""
    top, path = module.partition(".")[0], module.replace(".", "/")
    names = sorted(set(metadata.packages_distributions().get(top, ())))
    if len(names) > 1:
        names = [
            name
            for name in names
            if any(str(one).startswith(path) for one in metadata.files(name) or ())
        ] or names
    return ", ".join(f"{name} {metadata.version(name)}" for name in names) or None


class PeerAttention(nn.Module):
    """One call of a peer on the tensors of ``names``; counted where it is called. Returns o, and
    keeps the blocks that it gave in ``blocks``.
    """

    def __init__(self, model: ModelConfig, peer: Peer) -> None:
        super().__init__()
        self.model, self.peer = model, peer
        self.names = names_of(peer)
        self.blocks: Tensor | None = None
        (self._branch,) = route_of_peer(peer, peer.name).branches
        self._function = function_of(peer)

    def shapes(self) -> dict[str, tuple[int, int]]:
        """Heads and width of each input [B, T, heads, width]."""
        model = self.model
        keys, values = (model.num_kv_heads, model.head_dim), (model.num_kv_heads, model.value_dim)
        sizes = {name: keys if name.startswith("k") else values for name in self.names}
        sizes["q"] = model.num_heads, model.head_dim
        if "gates" in sizes:
            sizes["gates"] = model.num_heads, len(BRANCHES)
        return sizes

    def used(self) -> list[str]:
        """Inputs that have a gradient: all."""
        return list(self.names)

    def forward(self, *inputs: Tensor) -> Tensor:
        peer, model, q = self.peer, self.model, inputs[0]
        options: dict[str, Any] = {"scale": model.head_dim**-0.5, **peer.options}
        arguments: tuple[Any, ...] = inputs
        if peer.kind == "window":
            options["window"] = model.nsa.window
        if peer.kind == "nsa":
            options["config"] = model.nsa
            if peer.kv == "three":
                _, *kv, gates = inputs
                arguments = (q, *zip(kv[::2], kv[1::2], strict=True), gates)
        engagement.record(self._branch)
        given = self._function(*arguments, **options)
        o, self.blocks = given if isinstance(given, tuple) else (given, None)
        return self._checked(o, inputs)

    def _checked(self, o: object, inputs: tuple[Tensor, ...]) -> Tensor:
        """ValueError where what came back breaks the contract; numbers are the proof's business."""
        q, model, name = inputs[0], self.model, self.peer.name
        wanted = (*q.shape[:2], model.num_heads, model.value_dim)
        if not isinstance(o, Tensor) or tuple(o.shape) != wanted or o.dtype != q.dtype:
            got = f"{tuple(o.shape)} {o.dtype}" if isinstance(o, Tensor) else type(o).__name__
            raise ValueError(
                f"peer {name} returned {got}, wanted o {wanted} {q.dtype}; see docs/peers.md"
            )
        blocks = self.blocks
        if blocks is not None and (
            not isinstance(blocks, Tensor)
            or tuple(blocks.shape[:3]) != (*q.shape[:2], model.num_kv_heads)
            or blocks.is_floating_point()
        ):
            raise ValueError(
                f"peer {name} returned blocks of another kind than int [B, T, G, N]; see"
                " docs/peers.md"
            )
        if not o.requires_grad and _grad_is_wanted(inputs):
            raise ValueError(
                f"peer {name}: its output has no gradient, wanted one by autograd; declare"
                " `backward: false`"
            )
        return o


def names_of(peer: Peer) -> tuple[str, ...]:
    """The inputs of a peer, in the order of its contract, where its K and V are called k and v."""
    if peer.kind != "nsa":
        return ("q", "k", "v")
    return THREE if peer.kv == "three" else ("q", "k", "v", "gates")


def ascending(blocks: Tensor) -> Tensor:
    """``blocks`` in ascending order, -1 at the end."""
    end = blocks.new_full((), 2**31 - 1)
    in_order = blocks.where(blocks >= 0, end).sort(-1).values
    return in_order.where(in_order < end, -1)


def _grad_is_wanted(inputs: tuple[Tensor, ...]) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
