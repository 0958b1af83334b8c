"""Peers: attention that others wrote, timed next to nsa's own under a name that the axis `path`
takes. What a peer declares, and what its name alone says.

Pure: nothing here imports a peer.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from nsa.routing import DENSE_KINDS, PATH_REQUESTS

Kind = Literal["dense", "window", "nsa"]
# A declared peer's name begins so, since a report or a history knows a cell by its axes alone.
PREFIXES: Mapping[Kind, str] = MappingProxyType({"dense": "dense_", "window": "window_"})
ENTRY_POINTS = "perfbench.peers"  # their group
# Peers that a matrix names without declaring them (perfbench.matrix.peers has the rest).
BUILT_IN: Mapping[str, Kind] = MappingProxyType(
    {
        "dense_fa4": "dense",
        "dense_fa3": "dense",
        "flex": "dense",
        "flex_window": "window",
        "fla": "nsa",
    }
)
# What `path` may be with a cache, of full causal attention: nsa.routing.CACHED_DENSE_KINDS, which
# an older nsa has not. With a cache nsa itself calls FA-3, which stores the token, too.
CACHED_DENSE = ("dense", "dense_flash", "dense_triton", "dense_fa3")


class Peer(BaseModel):
    """What a peer is, what it needs and what it must meet.

    ``function`` is `module:function`, or what ``entry_point`` of the group ENTRY_POINTS names;
    imported in measuring processes only. ``folder``, an absolute path, is searched first.
    ``witness`` is the module whose version and file a row records, by default that of
    ``function``. ``options`` are passed by keyword.

    Needs: ``packages`` (`name` or `name>=1.2`), ``sm`` (`9.0` or `>=8.0`; empty: any device),
    ``dtypes``, ``head_dims`` and ``groups`` (query heads a KV head) with empty for any;
    ``gpu_backward``: its backward runs on a GPU alone. ``kernels``, a regular expression, is found
    in the name of at least one device kernel of each step. ``wants`` are options of the model's nsa
    that must be so; ``nsa`` are those that this peer has otherwise than the matrix, and its oracle
    with it. ``kv`` one: the three branches of an NSA peer share K and V.
    """

    model_config = ConfigDict(extra="allow", frozen=True, defer_build=True)
    name: str
    kind: Kind
    function: str = ""
    entry_point: str = ""
    folder: str = ""
    witness: str = ""
    options: dict[str, Any] = {}
    packages: list[str] = []
    kernels: str = ""
    backward: bool = True
    gpu_backward: bool = False
    repeatable: bool = False
    sm: str = ""
    dtypes: list[str] = []
    head_dims: list[int] = []
    groups: list[int] = []
    equal_dims: bool = False  # head_dim and v_head_dim must agree
    kv: Literal["one", "three"] = "three"
    wants: dict[str, Any] = {}
    nsa: dict[str, Any] = {}

    @property
    def declared(self) -> dict[str, Any]:
        """What is measured, for the hash of a cell: not where it lies, nor what was found."""
        what = self.model_dump(exclude={"name", "folder"}, exclude_defaults=True)
        return dict(sorted(what.items()))


def kind_of(path: str) -> Kind:
    """What a value of the axis `path` computes, by its name: full causal attention, the window
    alone, or NSA.
    """
    if path in DENSE_KINDS:
        return "dense"
    if path in BUILT_IN:
        return BUILT_IN[path]
    return next((kind for kind, prefix in PREFIXES.items() if path.startswith(prefix)), "nsa")


def is_peer(path: str) -> bool:
    """Whether others than nsa serve this value of the axis `path`."""
    return path in BUILT_IN or path not in (*PATH_REQUESTS, *DENSE_KINDS, *CACHED_DENSE)
