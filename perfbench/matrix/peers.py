"""The peers of a matrix: the section `peers:`, those that need no declaration, and what keeps one
from serving a cell. Looks for packages and files, and imports none of them.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from nsa.config import BRANCHES, ModelConfig, NSAConfig, nearest_name
from nsa.routing import BranchRoute, Capability, Rejected, Route, RouteError
from perfbench.matrix.plugin_file import find
from perfbench.matrix.shipped import MARK, shipped_file
from perfbench.matrix.strict_yaml import Document, Loc
from perfbench.records import ATTENTION, AXES, BUILT_IN, ENTRY_POINTS, PREFIXES, Cell, Peer

if TYPE_CHECKING:
    from perfbench.matrix.schema import PeerSection

SECTION = "peers"
BRANCH = "peer"  # of a peer's Route, so that its counter is peer.NAME
_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")
_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_PACKAGE = re.compile(
    r"([A-Za-z0-9][A-Za-z0-9._-]*)(\[[a-z0-9_,-]+\])?(?:>=([0-9]+(?:\.[0-9]+)*))?"
)
_SM = re.compile(r"(>=)?([0-9]{1,3})\.([0-9])")
_MAX_PATTERN = 200
_DTYPES = [str(dtype) for dtype in AXES["dtype"].choices]
_OPTIONS = [field.name for field in fields(NSAConfig)]
# A kernel that any step may launch: a declared name that it bears is no witness.
_ANYBODYS = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>"
_ADAPTERS = "perfbench.worker.peers"
_EIGHTS = list(range(8, 257, 8))
# Of the wheels that PyPI had on 2026-11-29; perfbench.worker.peers has the adapters.
_BUILT_IN: Mapping[str, Peer] = MappingProxyType(
    {
        "dense_fa4": Peer(
            name="dense_fa4",
            kind=BUILT_IN["dense_fa4"],
            function=f"{_ADAPTERS}.dense:fa4",
            witness="flash_attn.cute",
            packages=[
                "flash-attn-4[cu13]",
                "nvidia-cutlass-dsl",
                "quack-kernels",
                "apache-tvm-ffi",
                "torch-c-dlpack-ext",
                "einops",
            ],
            kernels=r"(?i)flash_?attn.*(fwd|forward)",
            sm=">=8.0",
            dtypes=["bf16", "fp16"],
            head_dims=_EIGHTS,
            equal_dims=True,
        ),
        "dense_fa3": Peer(
            name="dense_fa3",
            kind=BUILT_IN["dense_fa3"],
            function=f"{_ADAPTERS}.dense:fa3",
            witness="fa3_fwd_interface",
            packages=["fa3-fwd"],
            kernels=r"FlashAttnFwdSm90",
            backward=False,
            repeatable=True,
            sm="9.0",
            dtypes=["bf16"],
            head_dims=_EIGHTS,
            equal_dims=True,
        ),
        "flex": Peer(
            name="flex",
            kind=BUILT_IN["flex"],
            function=f"{_ADAPTERS}.flex:causal",
            witness="torch.nn.attention.flex_attention",
            packages=["torch"],
            kernels=r"flex_attention|triton_tem_fused",
            gpu_backward=True,
        ),
        "flex_window": Peer(
            name="flex_window",
            kind=BUILT_IN["flex_window"],
            function=f"{_ADAPTERS}.flex:windowed",
            witness="torch.nn.attention.flex_attention",
            packages=["torch"],
            kernels=r"flex_attention|triton_tem_fused",
            gpu_backward=True,
            nsa={"branches": ["win"]},
        ),
        "fla": Peer(
            name="fla",
            kind=BUILT_IN["fla"],
            function=f"{_ADAPTERS}.fla:attend",
            witness="fla.ops.nsa",
            packages=["fla-core", "einops"],
            kernels=r"parallel_nsa_fwd_kernel",
            sm=">=8.0",
            dtypes=["bf16", "fp16"],
            groups=[16, 32, 64, 128],
            equal_dims=True,
            kv="one",
            wants={"sel_block": 64, "num_initial": 1, "num_local": 2},
            nsa={"cmp_block": 64, "cmp_stride": 64},
        ),
    }
)


@dataclass(frozen=True, slots=True)
class Located:
    """What can be known of a peer without importing it: ``function`` as `module:function`, whose it
    is, or why it is ``absent``.
    """

    function: str = ""
    provider: str = ""
    absent: str = ""


def declared_names(document: Document) -> tuple[str, ...]:
    """The names that the section declares, checked or not: values of the axis `path`."""
    section = document.data.get(SECTION)
    names = section if isinstance(section, dict) else {}
    return tuple(name for name in names if isinstance(name, str))


def parse_peers(
    document: Document, sections: Mapping[str, PeerSection], *, on_gpu: bool
) -> dict[str, Peer]:
    """The declared peers; PerfbenchError(USAGE) with file:line for one that declares too little, or
    a name that says something else than its kind.
    """
    return {name: _parsed(document, name, one, on_gpu) for name, one in sections.items()}


def used_peers(
    document: Document, declared: Mapping[str, Peer], cells: Iterable[Cell]
) -> dict[str, Peer]:
    """The peers of ``cells``, by name; PerfbenchError(USAGE) for a declared one that no cell
    has.
    """
    paths = dict.fromkeys(cell.path for cell in cells if not cell.is_own_step)
    for name in declared:
        if name not in paths:
            document.fail(
                (SECTION, name),
                f"no cell has path: {name}; add it to the axis path, or remove the declaration",
            )
    known = {**_BUILT_IN, **declared}
    return {path: known[path] for path in paths if path in known}


def model_with(peer: Peer | None, model: Mapping[str, Any]) -> dict[str, Any]:
    """``model``, a ModelConfig as a mapping, with the options that the peer has otherwise."""
    if peer is None or not peer.nsa:
        return dict(model)
    return {**model, "nsa": {**model["nsa"], **peer.nsa}}


def why_not_peer(cell: Cell) -> str | None:
    """Why no peer serves such a cell, whichever it is."""
    if cell.workload not in ATTENTION:
        return (
            f"path={cell.path} with workload={cell.workload}: a peer is timed as attention alone;"
            f" wanted workload={' or '.join(ATTENTION)}; exclude it from others"
        )
    if cell.compile == "on":
        return (
            f"path={cell.path} with compile=on: a peer runs as its own function compiles it; wanted"
            " compile=off; leave it off"
        )
    return None


def why_skipped(peer: Peer, cell: Cell, model: ModelConfig, capability: Capability) -> str | None:
    """Why ``peer`` cannot serve ``cell`` on this machine, every reason; None where it can."""
    reasons = [
        *_unfit_for_workload(peer, cell, capability),
        *_unfit_for_machine(peer, capability),
        *_unfit_for_model(peer, cell, model),
    ]
    if absent := located(peer).absent:
        reasons.append(absent)
    return f"skipped, path={peer.name}: {'; '.join(reasons)}" if reasons else None


def route_of_peer(peer: Peer | None, path: str) -> Route:
    """The Route of every cell of ``peer``; RouteError where it is absent or not declared."""
    if peer is None:
        raise RouteError(f"path={path} is neither a path of nsa nor a peer of this matrix")
    found = located(peer)
    if found.absent:
        raise RouteError(f"path={path}: {found.absent}")
    branch = BranchRoute(
        BRANCH,
        peer.name,
        peer.name,
        found.provider,
        f"{found.function}, asked for by name; must be {_meets(peer)}",
        repeatable=peer.repeatable,
    )
    notes: tuple[str, ...] = ()
    if peer.kind == "nsa" and peer.nsa:
        own = ", ".join(f"{name}={value}" for name, value in sorted(peer.nsa.items()))
        notes = (f"{peer.name} has {own} where the model may have others, and so has its oracle",)
    return Route((branch,), (Rejected("fa2", "n/a: a peer names its kernel itself"),), notes)


@lru_cache(maxsize=64)
def _located(function: str, entry_point: str, folder: str, packages: tuple[str, ...]) -> Located:
    provider = ""
    if entry_point:
        named = list(metadata.entry_points(group=ENTRY_POINTS, name=entry_point))
        if len(named) != 1:
            count = f"{len(named)} packages have" if named else "no installed package has"
            return Located(
                absent=f"{count} an entry point {entry_point!r} of the group {ENTRY_POINTS}, wanted"
                " one; install the package that brings it"
            )
        function, dist = named[0].value, named[0].dist
        if not _FUNCTION.fullmatch(function):
            return Located(
                absent=f"the entry point {entry_point!r} is {function[:100]!r}, wanted"
                " module:function; correct the package that brings it"
            )
        provider = f"{dist.name} {dist.version}" if dist is not None else ""
    # the first brings the others, where nothing is wrong
    first = [one for one in packages[:1] if _missing(one)]
    if lacking := first or [one for one in packages if _missing(one)]:
        names = " ".join(map(_quoted, lacking))
        return Located(absent=f"{', '.join(map(_missing, lacking))}; pip install {names}")
    module = function.partition(":")[0]
    if folder:
        try:
            is_there = find(function, [Path(folder)]).folder is not None
        except ValueError:
            is_there = False
        if not is_there:  # an installed one of that name is another's
            return Located(
                absent=f"the checkout {folder} holds no module {module} of Python source; clone it"
                " there, or correct `checkout:`"
            )
        return Located(function, provider or f"checkout {folder}")
    top = module.partition(".")[0]
    if importlib.util.find_spec(top) is None:  # of a top-level name, which imports nothing
        return Located(
            absent=f"no module {top} is installed; install it, or name its folder by `checkout:`"
        )
    return Located(function, provider or _version_of(packages) or f"module {top}")


def located(peer: Peer) -> Located:
    """Look for the peer's packages, entry point and module, without importing any."""
    return _located(peer.function, peer.entry_point, peer.folder, tuple(peer.packages))


def _parsed(document: Document, name: str, one: PeerSection, on_gpu: bool) -> Peer:
    loc: Loc = (SECTION, name)
    if not _NAME.fullmatch(name):
        document.fail(
            loc, f"a peer is called {name[:60]!r}, wanted small letters, digits and _, at most 40"
        )
    if name in (*AXES["path"].choices, *AXES["path"].recorded):
        document.fail(loc, f"{name} is a path already; choose another name")
    for kind, prefix in PREFIXES.items():
        if (one.kind == kind) != name.startswith(prefix):
            document.fail(
                loc,
                f"kind {one.kind} is called {name}; wanted a name that begins with {prefix} for"
                f" kind {kind} and no other, by which a report knows it",
            )
    if bool(one.function) == bool(one.entry_point):
        document.fail(
            loc, "wanted one of `function: module:function` and `entry_point: NAME`; give one"
        )
    if one.function and not _FUNCTION.fullmatch(one.function):
        document.fail((*loc, "function"), f"got {one.function[:100]!r}, wanted module:function")
    for index, package in enumerate(one.packages):
        if not _PACKAGE.fullmatch(package):
            document.fail(
                (*loc, "packages", index),
                f"got {package[:60]!r}, wanted a package such as name or name>=1.2",
            )
    for index, dtype in enumerate(one.dtypes):
        if dtype not in _DTYPES:
            document.fail(
                (*loc, "dtypes", index), f"no dtype {dtype[:60]!r}{nearest_name(dtype, _DTYPES)}"
            )
    for key in ("head_dims", "groups"):
        for index, size in enumerate(getattr(one, key)):
            if size < 1:
                document.fail(
                    (*loc, key, index), f"got {size}, wanted a whole number of at least 1"
                )
    for name in one.wants:
        if name not in _OPTIONS:
            document.fail(
                (*loc, "wants", name),
                f"no option {name[:60]!r} of nsa{nearest_name(name, _OPTIONS)}",
            )
    if one.sm and not _SM.fullmatch(one.sm):
        document.fail((*loc, "sm"), f"got {one.sm[:20]!r}, wanted '9.0' or '>=8.0'")
    if on_gpu and not one.kernels:
        document.fail(
            loc,
            "names no kernels: a regular expression that one of its device kernels has in its name"
            " shows that it ran; add `kernels:`",
        )
    if len(one.kernels) > _MAX_PATTERN or not _compiles(one.kernels):
        document.fail(
            (*loc, "kernels"),
            f"got {one.kernels[:60]!r}, wanted a regular expression of at most {_MAX_PATTERN}"
            " characters",
        )
    if one.kernels and re.search(one.kernels, _ANYBODYS):
        document.fail(
            (*loc, "kernels"),
            f"got {one.kernels[:60]!r}, as names of PyTorch's own kernels have, too, so that it"
            " shows nothing; wanted what the peer's alone have",
        )
    if one.kind != "nsa" and (one.nsa or one.wants or one.kv != "three"):
        document.fail(loc, f"kv, nsa and wants belong to kind nsa, not to {one.kind}; remove them")
    given = one.model_dump(exclude={"checkout"})
    if one.kind == "window":
        given["nsa"] = {"branches": ["win"]}
    return Peer(name=name, folder=_folder(document, one.checkout), **given)


def _folder(document: Document, checkout: str) -> str:
    """Relative to the folder of the matrix."""
    if not checkout:
        return ""
    path = document.path
    file = shipped_file(path) if path.startswith(MARK) else Path(path)
    return str((file.parent / Path(checkout).expanduser()).absolute())


def _compiles(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


def _meets(peer: Peer) -> str:
    return {
        "dense": "full causal attention",
        "window": "causal attention within the window",
        "nsa": "NSA over the blocks that its scores choose",
    }[peer.kind]


def _unfit_for_workload(peer: Peer, cell: Cell, capability: Capability) -> list[str]:
    if not cell.has_backward:
        return []
    if not peer.backward:
        return [f"it has no backward, which workload={cell.workload} times; see attention_forward"]
    if peer.gpu_backward and capability.sm is None:
        return [f"it has no backward on a CPU, which workload={cell.workload} times"]
    return []


def _unfit_for_machine(peer: Peer, capability: Capability) -> list[str]:
    found = _SM.fullmatch(peer.sm)
    if found is None:
        return []
    wanted = int(found[2]), int(found[3])
    if capability.sm is None:
        return [f"it needs a GPU of SM {peer.sm}, this is a CPU"]
    if capability.sm < wanted or (not found[1] and capability.sm != wanted):
        return [f"it needs SM {peer.sm}, this is {capability.sm[0]}.{capability.sm[1]}"]
    return []


def _unfit_for_model(peer: Peer, cell: Cell, model: ModelConfig) -> list[str]:
    reasons = []
    group = model.num_heads // model.num_kv_heads
    for name, value, allowed in (
        ("dtype", cell.dtype, peer.dtypes),
        ("head_dim", model.head_dim, peer.head_dims),
        ("a group of query heads", group, peer.groups),
    ):
        if allowed and value not in allowed:
            shown = (
                f"{allowed[0]} to {allowed[-1]}, every 8th"
                if allowed == _EIGHTS
                else ", ".join(map(str, allowed))
            )
            reasons.append(f"{name} is {value}, it takes {shown}")
    if peer.equal_dims and model.value_dim != model.head_dim:
        reasons.append(f"v_head_dim is {model.value_dim}, it takes that of q, {model.head_dim}")
    if peer.kind != "nsa":
        return reasons
    wants = {"phi": "mean", "selection": "exact", "branches": BRANCHES, **peer.wants}
    for name, value in wants.items():
        if (got := getattr(model.nsa, name)) != value:
            reasons.append(f"nsa.{name} is {_shown(got)}, it computes {_shown(value)}")
    if not reasons:
        try:
            ModelConfig.from_mapping(model_with(peer, model.to_mapping()))
        except ValueError as error:
            reasons.append(f"the model cannot have its options: {error}")
    return reasons


def _shown(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def _missing(requirement: str) -> str:
    """Why the package does not serve; '' where it does."""
    found = _PACKAGE.fullmatch(requirement)
    assert found is not None
    name, least = found[1], found[3]
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return f"package {name} is not installed"
    if least is not None and _release(version) < _release(least):
        return f"package {name} is {version}, wanted {least} or newer"
    return ""


def _release(version: str) -> tuple[int, ...]:
    found = re.match(r"[0-9]+(?:\.[0-9]+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def _quoted(requirement: str) -> str:
    return f"'{requirement}'" if re.search(r"[\[>]", requirement) else requirement


def _version_of(packages: tuple[str, ...]) -> str:
    if not packages:
        return ""
    found = _PACKAGE.fullmatch(packages[0])
    assert found is not None
    return f"{found[1]} {metadata.version(found[1])}"
