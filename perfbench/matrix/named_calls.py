"""The operators of nsa that a step calls, each exactly so often: a closed form of the cell and its
Route. Pure: no torch.

The names are as a profiler shows them: `nsa::selected_v2`, `nsa::selected_v2_backward`, and
`nsa::selected_v2 > aten::index_select` for what runs inside one. Each implementation bears its own
name in its own file, so one that another stands in for is missed, and the other is too many.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from nsa.blocks import BlockGrid
from nsa.config import BRANCHES, ModelConfig
from nsa.routing import DENSE, SCORE, BranchRoute, Path, Problem, Route
from perfbench import older_nsa
from perfbench.matrix.attention_calls import problems
from perfbench.records import ATTENTION, CACHED, PAGED, SELECTED, TRAINING, Cell
from perfbench.roofline import BYTES_OF

NAMESPACE = "nsa::"
INSIDE = " > "
SDPA = "aten::scaled_dot_product_attention"
VARLEN = "torch_attn::_varlen_attn"  # PyTorch's build of FA-2; flash_attn's own is seen by kernels
GATHER, SCATTER, EXP = "aten::index_select", "aten::scatter_", "aten::exp"
# What is counted inside an operator, besides SDPA, which is counted inside each.
COUNTED_INSIDE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "nsa::selected_v2": (GATHER, VARLEN),
        "nsa::selected_v2_backward": (GATHER, VARLEN),
        "nsa::selected_masked": (SCATTER,),
        "nsa::selected_reference": (EXP,),
        "nsa::sliding": (VARLEN,),
    }
)
# As nsa.ops.selected.gathered_rows: two sequences a row, and so many fit a grid.
_MOST_ROWS_OF_A_CHUNK = 65_535 // 2


@dataclass(frozen=True, slots=True)
class OperatorCalls:
    """``exact`` calls a step of each operator of nsa and of SDPA, and no others; names in
    ``at_least`` may have more, where what is counted depends on the blocks' values.

    ``in_graph``: nodes of a compiled forward.
    """

    exact: Mapping[str, int] = field(default_factory=dict)
    at_least: frozenset[str] = frozenset()
    in_graph: Mapping[str, int] = field(default_factory=dict)


def operator_calls(
    route: Route, cell: Cell, model: ModelConfig, *, workspace_bytes: int
) -> OperatorCalls:
    """Of one step of ``cell``, all layers; ``workspace_bytes`` bounds what path v2 packs at a
    time. A peer calls no operator of nsa; it may call SDPA.
    """
    if cell.is_peer:
        return OperatorCalls(at_least=frozenset({SDPA}))
    calls = _Calls(route, cell, model, workspace_bytes)
    for problem in problems(cell, model):
        calls.add(problem)
    return calls.of_step()


class _Calls:
    """The calls of one layer, added up over its calls of attention."""

    def __init__(self, route: Route, cell: Cell, model: ModelConfig, workspace_bytes: int) -> None:
        self._route, self._cell, self._model = route, cell, model
        self._workspace_bytes = workspace_bytes
        self._forward: Counter[str] = Counter()
        self._backward: Counter[str] = Counter()
        self._bare_sdpa = 0  # inside no operator of nsa
        self._at_least: set[str] = set()

    def add(self, problem: Problem) -> None:
        """One call of attention: its branches, what compresses for them, and their gated sum."""
        cell = self._cell
        pages = cell.cache == PAGED
        of_device = cell.cuda_graph == "on"  # positions: those of pages always are
        if pages:
            of_device = cell.compile == "off" and older_nsa.takes_pages_in_one_step(self._model.nsa)
        one_step = of_device and older_nsa.is_one_step(self._route, self._model.nsa)
        if pages and not one_step and older_nsa.reads_pages_in_place(self._route, self._model):
            self._operator("nsa::gated_sum")  # the others are kernels without an operator
            return
        if cell.workload == "decode" and one_step:
            self._operator("nsa::decode_step")
            if older_nsa.is_one_block(self._route, self._model.nsa, cell.batch):
                self._forward["nsa::linear_step"] += 4  # qkv, out, and two of the MLP
            return
        for branch in self._route.branches:
            self._add_branch(branch, problem)
        nsa = self._model.nsa
        if cell.is_dense or cell.workload in SELECTED:
            return
        if (
            self._has_kernel("cmp")
            and problem.whole
            and nsa.phi == "mean"
            and problem.k_tokens >= nsa.cmp_block
        ):
            self._operator("nsa::means", has_backward=True)
        if (
            self._has_kernel("cmp")
            and nsa.phi != "mean"
            and (problem.whole or cell.compile == "on")
            and cell.workload not in CACHED
            and problem.k_tokens >= nsa.cmp_block
            and (nsa.phi_hidden or 0) <= older_nsa.most_phi_features()
        ):
            self._operator(f"nsa::phi_{nsa.phi}", has_backward=True)
        if self._has_kernel("sel") and set(problem.branches) == set(BRANCHES):
            name = "nsa::joined" if self._joins() else "nsa::gated_sum"
            self._operator(name, has_backward=True)
            if self._joins() and older_nsa.products_are_an_operator():
                self._backward["nsa::gate_products"] += 1

    def of_step(self) -> OperatorCalls:
        """All layers; a checkpointed layer's forward runs twice."""
        cell, model = self._cell, self._model
        layers = 1 if cell.workload in (*ATTENTION, *SELECTED) else model.num_layers
        first, stop = model.checkpoint_layers or (0, 0)
        again = max(0, min(stop, layers) - first) if cell.workload in TRAINING else 0
        exact: Counter[str] = Counter()
        for calls, times in ((self._forward, layers + again), (self._backward, layers)):
            exact.update({name: times * count for name, count in calls.items()})
        inside = sum(count for name, count in exact.items() if name.endswith(INSIDE + SDPA))
        sdpa = {SDPA: (layers + again) * self._bare_sdpa + inside}
        open_counts = frozenset({*self._at_least, SDPA} if self._at_least else ())
        if cell.compile == "off":
            return OperatorCalls(_positive({**exact, **sdpa}), open_counts)
        in_graph = {
            name: layers * count for name, count in self._forward.items() if INSIDE not in name
        }
        return OperatorCalls(
            _positive(exact),
            open_counts,
            _positive({**in_graph, SDPA: layers * self._bare_sdpa}),
        )

    def _add_branch(self, branch: BranchRoute, problem: Problem) -> None:
        grid = BlockGrid.of(self._model.nsa)
        if branch.branch == "dense" and self._cell.workload in CACHED:
            # SDPA's own operator; FA-2 is called below it, and FA-3 is not PyTorch's
            self._bare_sdpa += branch.kernel == "sdpa"
            if branch.kernel == Path.TRITON:
                self._operator("nsa::interval")
        elif branch.branch == "dense" or branch.implementation == DENSE:
            self._bare_sdpa += 1
        elif branch.branch == SCORE:
            self._operator("nsa::choose")
            if not self._has_kernel("cmp"):  # its log-sum-exp is made first
                self._operator("nsa::interval")
        elif branch.branch == "sel":
            self._add_selected(Path(branch.implementation), branch, problem)
        elif branch.kernel == Path.TRITON:
            self._operator("nsa::interval", has_backward=not self._joins())
        elif branch.branch == "cmp":
            self._formula("nsa::compressed_sdpa", {SDPA: int(grid.num_cmp(problem.k_tokens) > 0)})
        elif branch.kernel == "fa2":
            packaged = branch.provider.startswith("flash_attn")
            self._formula("nsa::sliding", {} if packaged else {VARLEN: 1})
        else:
            tiles = self._cell.compile == "off" and problem.q_tokens > self._model.nsa.window
            self._formula("nsa::sliding", {SDPA: 2 if tiles else 1})

    def _add_selected(self, path: Path, branch: BranchRoute, problem: Problem) -> None:
        model, rows = self._model, problem.batch * problem.num_kv_heads * problem.q_tokens
        if path is Path.TRITON:
            self._operator("nsa::selected_triton", has_backward=not self._joins())
        elif path is Path.V2:
            chunks = self._chunks(rows, problem)
            served = {SDPA: chunks} if branch.kernel == "sdpa" else {}
            if branch.provider.startswith("torch.varlen"):
                served = {VARLEN: chunks}
            self._operator("nsa::selected_v2", {GATHER: 2 * chunks, **served}, has_backward=True)
        elif path is Path.MASKED:
            self._formula("nsa::selected_masked", {SDPA: 1, SCATTER: 1})
        elif path is Path.REFERENCE:
            self._formula("nsa::selected_reference", {EXP: rows})
            self._leave_open("nsa::selected_reference", EXP)
        elif path is Path.V1:
            # A bucket for each number of blocks that a row has.
            begin = problem.k_tokens - problem.q_tokens
            most = model.nsa.num_selected_for(problem.k_tokens)
            first, last = (
                min(most, position // model.nsa.sel_block + 1)
                for position in (begin, problem.k_tokens - 1)
            )
            self._formula("nsa::selected_v1", {SDPA: last - first + 1})
            self._leave_open("nsa::selected_v1", SDPA)
        else:
            self._formula(f"nsa::selected_{path}", {})

    def _leave_open(self, name: str, child: str) -> None:
        """A search by regions leaves slots empty, so that no closed form counts a row's blocks."""
        if self._model.nsa.selection != "exact":
            self._forward[name + INSIDE + child] = 1
            self._at_least.add(name + INSIDE + child)

    def _chunks(self, rows: int, problem: Problem) -> int:
        """Packed calls of path v2: rows of K and V of their blocks, within the workspace."""
        nsa, size = self._model.nsa, BYTES_OF[self._cell.dtype]
        row_bytes = (
            nsa.num_selected_for(problem.k_tokens)
            * nsa.sel_block
            * (problem.head_dim + problem.v_head_dim)
            * size
        )
        at_once = max(1, min(_MOST_ROWS_OF_A_CHUNK, self._workspace_bytes // row_bytes))
        return -(-rows // at_once)

    def _has_kernel(self, branch: str) -> bool:
        return any(
            b.branch == branch and Path.TRITON in (b.kernel, b.implementation)
            for b in self._route.branches
        )

    def _joins(self) -> bool:
        """Whether one operator has the gradients of all branches, which run without."""
        return (
            self._cell.has_backward
            and self._cell.workload not in SELECTED
            and all(self._has_kernel(branch) for branch in BRANCHES)
            and "join" not in self._route.off
        )

    def _operator(
        self, name: str, inside: Mapping[str, int] | None = None, *, has_backward: bool = False
    ) -> None:
        for calls, called in ((self._forward, name), (self._backward, f"{name}_backward")):
            if calls is self._backward and not (has_backward and self._cell.has_backward):
                continue
            calls[called] += 1
            for child, count in (inside or {}).items():
                calls[called + INSIDE + child] += count

    def _formula(self, name: str, inside: Mapping[str, int]) -> None:
        """PyTorch's own operators under a name; traced by a compiler, the name is not there."""
        if self._cell.compile == "off":
            self._operator(name, inside)
        else:
            self._bare_sdpa += inside.get(SDPA, 0)


def _positive(counts: Mapping[str, int]) -> dict[str, int]:
    return {name: count for name, count in sorted(counts.items()) if count}
