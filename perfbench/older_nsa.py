"""What perfbench uses of `nsa` that an older nsa has elsewhere, otherwise, or not at all.

`ab` measures each side with that side's nsa and this perfbench, so a name that moved is imported
here and nowhere else. Nothing of nsa is imported before it is asked for: half of it needs torch.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from nsa.config import ModelConfig, NSAConfig
    from nsa.decode import KV as KV
    from nsa.decode import DenseCache as DenseCache
    from nsa.decode import NSACache as NSACache
    from nsa.decode import PagedCache as PagedCache
    from nsa.decode import PageShape as PageShape
    from nsa.decode import Steps as Steps
    from nsa.decode import View as View
    from nsa.decode import capture as capture
    from nsa.decode import warm_up as warm_up
    from nsa.ops.key_counts import KeysRead as KeysRead
    from nsa.routing import Capability, Route

# Name -> the modules that may have it, the newest first.
_HOMES = {
    "KV": ("nsa.decode", "nsa.cache"),
    "DenseCache": ("nsa.decode",),
    "NSACache": ("nsa.decode", "nsa.cache"),
    "PagedCache": ("nsa.decode",),
    "PageShape": ("nsa.decode",),
    "Steps": ("nsa.decode", "nsa.steps"),
    "View": ("nsa.decode", "nsa.cache"),
    "capture": ("nsa.decode", "nsa.decoding"),
    "warm_up": ("nsa.decode", "nsa.decoding"),
    "KeysRead": ("nsa.ops.key_counts", "nsa.ops.reads"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = _first(*((module, name) for module in _HOMES[name]))
    if found is None:
        raise ImportError(f"cannot import {name} from any of {', '.join(_HOMES[name])}")
    return found


def _first(*places: tuple[str, str]) -> Any:
    """The first of ``places`` (module, name) that exists, else None."""
    for module, name in places:
        if _exists(module) and hasattr(found := importlib.import_module(module), name):
            return getattr(found, name)
    return None


def _exists(module: str) -> bool:
    """Whether ``module`` lies in the nsa that is loaded.

    An editable install of another nsa answers for every nsa.X that this one lacks, so
    `importlib.util.find_spec`, which would ask it, is not asked.
    """
    package = module.rpartition(".")[0]
    if not package:
        return True
    if not _exists(package):
        return False
    path = getattr(importlib.import_module(package), "__path__", None)  # None: not a package yet
    return path is not None and PathFinder.find_spec(module, path) is not None


def has_training_loop() -> bool:
    """Whether this nsa trains: `nsa.train`, whose loop workload train_loop is."""
    return _exists("nsa.train.step")


def dense_keeps_a_cache() -> bool:
    """Whether the dense twin of this nsa decodes: `nsa.decode.DenseCache`."""
    return _exists("nsa.decode.dense_cache")


def steps_in_chunks() -> bool:
    """Whether caches of this nsa step by several tokens: `nsa.decode.ChunkGraph`."""
    return _exists("nsa.decode.chunk_graph")


def dense_steps_in_chunks() -> bool:
    """Whether the dense twin's cache does, too: a step of it then has a row for each token."""
    found = _first(("nsa.decode", "DenseStep"))
    return found is not None and "row_BT11" in {one.name for one in fields(found)}


def keeps_pages() -> bool:
    """Whether this nsa has a cache in pages: `nsa.decode.PagedCache`."""
    return _exists("nsa.decode.paged")


def reads_pages_in_place(route: Route, model: ModelConfig) -> bool:
    """Whether kernels attend to one query's pages where they lie; else they are copied first, and
    each branch is as without pages.
    """
    serves = _first(("nsa.dispatch", "serves_pages"))
    has_kernels_of = _first(("nsa.ops.paged", "has_kernels_of"))
    heads = model.num_heads // model.num_kv_heads
    return bool(has_kernels_of(model.nsa.sel_block) and serves(route, 1, heads))


def takes_pages_in_one_step(config: NSAConfig) -> bool:
    """Whether a step over pages is one operator a layer, as with its positions on the device; it
    was none where the pages' kernels were several.
    """
    has_kernels_of = _first(("nsa.ops.paged", "has_kernels_of"))
    return _exists("nsa.decode.one_step") and bool(has_kernels_of(config.sel_block))


def is_one_step(route: Route, config: NSAConfig) -> bool:
    """Whether a step with its positions on the device is one operator a layer."""
    found = _first(("nsa.routing", "is_one_step"))
    return False if found is None else bool(found(route, config))


def is_one_block(route: Route, config: NSAConfig, batch: int) -> bool:
    """Whether the norms and products of a block are operators of nsa, too, in such a step."""
    found = _first(("nsa.routing", "is_one_block"))
    return False if found is None else bool(found(route, config, batch))


def capability_of(values: Mapping[str, Any]) -> Capability:
    """The Capability of these fields, without those that this nsa does not know yet."""
    from nsa.routing import Capability

    known = {one.name for one in fields(Capability)}
    found = {name: value for name, value in values.items() if name in known}
    return Capability(**{**found, "sm": tuple(found["sm"]) if found["sm"] else None})


def products_are_an_operator() -> bool:
    """Whether a joined backward calls `nsa::gate_products` for o . dO, which was inside it."""
    return _exists("nsa.ops.learned_phi")  # which came with it


def most_phi_features() -> int:
    """Hidden features of a learned phi up to which kernels compute it; -1 where none do."""
    most = _first(("nsa.routing", "PHI_MAX_HIDDEN"))
    return -1 if most is None else int(most)


def sort_min_rows() -> int:
    """(b, t, kv head) of a call from which path triton's selected forward goes by sorted lists."""
    places = (
        ("nsa.routing.thresholds", "SORT_MIN_ROWS"),
        ("nsa.routes", "SORT_MIN_ROWS"),
        ("nsa.ops.kernels.selected", "MIN_ROWS_TO_SORT"),
    )
    least = _first(*places)
    if least is None:
        raise ImportError(f"cannot import {' or '.join(f'{name} of {at}' for at, name in places)}")
    return int(least)


def copy_min_elements() -> int:
    """Elements of q from which path triton loads tiles by descriptors; 0 where it always does."""
    least = _first(
        ("nsa.routing.thresholds", "COPY_MIN_ELEMENTS"), ("nsa.routes", "COPY_MIN_ELEMENTS")
    )
    return int(least or 0)


def least_keys_of_a_split() -> int | None:
    """Compressed keys that a decode step gives one program at least; None where it splits none."""
    least = _first(
        ("nsa.ops.decode.kernels", "LEAST_KEYS"), ("nsa.ops.kernels.decode", "LEAST_KEYS")
    )
    return None if least is None else int(least)


def names_its_operators() -> bool:
    """Whether each implementation of a branch bears a name that a profiler shows."""
    import torch

    _first(("nsa.ops.selected", "PATHS"))
    return hasattr(torch.ops.nsa, "selected_reference")


def shown_to_observers() -> AbstractContextManager[None]:
    """While it is open, an operator that runs without PyTorch's dispatcher is seen by every
    observer, not by a profiler alone; of an older nsa, all go through it.
    """
    found = _first(("nsa.ops.operator", "shown_to_observers"))
    opened: AbstractContextManager[None] = nullcontext() if found is None else found()
    return opened


def workspace_bytes() -> int:
    """What path v2 packs at a time."""
    least = _first(("nsa.ops.selected.v2", "WORKSPACE_BYTES"))
    assert least is not None
    return int(least)


def has_qk_norm(config: NSAConfig) -> bool:
    """Whether q and k are normalised head by head."""
    return getattr(config, "qk_norm", False)


def steps_off(route: Route) -> tuple[str, ...]:
    """The steps of path triton that ``route`` turns off."""
    return getattr(route, "off", ())


def promise_of_sigmoid_gates() -> dict[str, Any]:
    """Keywords that promise `nsa.nsa_attention` that no gate is below 0."""
    from nsa.functional import nsa_attention

    known = "nonnegative_gates" in inspect.signature(nsa_attention).parameters
    return {"nonnegative_gates": True} if known else {}


def attend_view(
    q: Tensor, gates: Tensor, view: View, *, config: NSAConfig, path: str, fa2: str
) -> Tensor:
    """The attention of a chunk over a cache's ``view``."""
    from nsa import functional

    if not _exists("nsa.branches"):
        older: Any = functional
        o: Tensor = older.attend_view(q, gates, view, config=config, path=path, fa2=fa2)
        return o
    from nsa import branches

    S, G, DV = view.sel[1].shape[1:]
    route = functional.route_for(
        q,
        G,
        DV,
        S,
        branches=config.branches,
        q_start=view.q_start,
        path=path,
        fa2=fa2,
        config=config,
    )
    call = branches.Call(route, config, q.shape[-1] ** -0.5)
    return branches.attend_view(q, gates, view, call)


def collect_blocks(*, compiled: bool = False) -> AbstractContextManager[list[Tensor | None] | None]:
    """Collects the blocks that each call chooses, in order, those of ``compiled`` calls included
    where this nsa shows them; None of an nsa that shows none.
    """
    collect = _first(("nsa.chosen_blocks", "collect"))
    if collect is None:
        return nullcontext()
    known = "compiled" in inspect.signature(collect).parameters
    found: AbstractContextManager[list[Tensor | None]] = (
        collect(compiled=compiled) if known else collect()
    )
    return found


def is_of_path(file: str, path: str) -> bool:
    """Whether ``file``, below nsa/ and without .py, is code of this path of the selected branch."""
    home = f"ops/selected/{path}"
    return file == home or file.startswith(f"{home}/")
