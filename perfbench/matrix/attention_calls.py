"""The attention calls that one step of a cell makes: their shapes, how many, and the one Route that
serves them. Pure: no torch.
"""

from __future__ import annotations

from dataclasses import replace

from nsa import routing
from nsa.blocks import BlockGrid
from nsa.config import ModelConfig
from nsa.routing import (
    ADAPTIVE,
    DENSE,
    DENSE_KINDS,
    SPECS,
    Capability,
    Path,
    Problem,
    Route,
    RouteError,
)
from nsa.settings import Settings
from perfbench.matrix.peers import route_of_peer, why_not_peer
from perfbench.older_nsa import (
    copy_min_elements,
    dense_keeps_a_cache,
    dense_steps_in_chunks,
    has_training_loop,
    keeps_pages,
    sort_min_rows,
    steps_in_chunks,
)
from perfbench.records import (
    ATTENTION,
    CACHED,
    CACHED_DENSE,
    EVERYTHING,
    PAGED,
    SELECTED,
    TRAINING,
    Cell,
    Peer,
    torch_dtype_name,
)

GOT_LOOP = "workload=train_loop"
_OF_LISTS = ("lists", "roles")  # steps that only a call with enough rows for lists takes
LOOP_SYMBOLS = 256  # ids of the synthetic text, whose tokens are bytes


def pieces(cell: Cell) -> list[tuple[int, int]]:
    """[begin, end) of each chunk of a chunked prefill: ``chunk`` tokens each, the last one the
    remainder.
    """
    begins = range(0, cell.seq_len, cell.chunk)
    return [(begin, min(begin + cell.chunk, cell.seq_len)) for begin in begins]


def held_tokens(model: ModelConfig, seq_len: int) -> int:
    """Tokens in the cache when a decode step begins: ``seq_len``, or one fewer where the step would
    complete a compressed block.

    cmp_stride - 1 of cmp_stride steps complete none, and a step that completes none leaves a cache
    that its next step can begin from again.
    """
    grid = BlockGrid.of(model.nsa)
    return seq_len - (grid.num_cmp(seq_len + 1) - grid.num_cmp(seq_len))


def layer_calls(cell: Cell, model: ModelConfig) -> int:
    """How often a step calls each branch's implementation: once a layer, and for each chunk of a
    prefill; attention alone is one layer.
    """
    if cell.workload in (*ATTENTION, *SELECTED):
        return 1
    return model.num_layers * (len(pieces(cell)) if cell.workload == "chunked_prefill" else 1)


def of_selected(sequence: Problem) -> Problem:
    """The call of the selected branch alone, on blocks that it is given: nothing to score, and no
    length at which every block is selected.
    """
    return replace(
        sequence, branches=("sel",), select_all_tokens=None, window=None, whole=False, scores=None
    )


def problems(cell: Cell, model: ModelConfig) -> list[Problem]:
    """The attention calls of a layer in a step, in order."""
    sequence = Problem.of(
        model, batch=cell.batch, tokens=cell.seq_len, dtype=torch_dtype_name(cell.dtype)
    )
    if cell.workload == "decode":
        held = held_tokens(model, cell.seq_len)
        # A captured step's positions are a tensor, as of rows that differ in length.
        captured = cell.cuda_graph == "on"
        return [replace(sequence, q_tokens=1, k_tokens=held + 1, whole=False, ragged=captured)]
    if cell.workload == "chunked_prefill" and cell.cuda_graph == "on":
        one = replace(sequence, q_tokens=cell.chunk, whole=False, ragged=True)
        return [one] * len(pieces(cell))
    if cell.workload == "chunked_prefill":
        return [
            replace(sequence, q_tokens=end - begin, k_tokens=end, whole=False)
            for begin, end in pieces(cell)
        ]
    if cell.workload in SELECTED:
        return [of_selected(sequence)]
    if cell.compile == "on":
        # A compiled region does not look at the length, which would recompile at each.
        return [replace(sequence, select_all_tokens=None, window=None, whole=False)]
    return [sequence]


def route_of(
    cell: Cell,
    model: ModelConfig,
    settings: Settings,
    capability: Capability,
    peer: Peer | None = None,
) -> Route:
    """The Route of a cell's calls; RouteError where its request cannot be served, or not by one
    Route for all chunks. ``peer`` serves a cell whose path is one.
    """
    if cell.is_peer:
        return route_of_peer(peer, cell.path)
    calls = problems(cell, model)
    if cell.is_dense and cell.workload not in CACHED:
        return routing.route_dense(cell.path, calls[0], capability)
    if cell.is_dense:
        routes = [routing.route_dense_cached(cell.path, call, capability) for call in calls]
    else:
        request = settings.request(cell.path, cell.fa2)
        routes = [routing.route(request, call, capability) for call in calls]
    for later in routes[1:]:
        if later.counters != routes[0].counters:
            raise RouteError(
                f"path={cell.path} takes {', '.join(routes[0].counters)} for the first chunk and"
                f" {', '.join(later.counters)} for a later one; wanted one route, which one proof"
                " can be for; name a path, or choose a chunk that divides seq_len"
            )
    return routes[-1]


def why_not(cell: Cell, model: ModelConfig) -> str | None:
    """Why no machine can time ``cell``, whatever its route: got, wanted, next step; None where one
    can.
    """
    if cell.world_size > 1 and (reason := _why_not_ranks(cell)):
        return reason
    if cell.cache == PAGED and (reason := _why_not_pages(cell)):
        return reason
    if cell.is_peer and (reason := why_not_peer(cell)):
        return reason
    nsa, got = model.nsa, f"workload={cell.workload}"
    if cell.is_own_step:
        return None
    if graph := next(
        (f"{name}=on" for name in ("compile", "cuda_graph") if getattr(cell, name) == "on"), None
    ):
        if cell.workload in CACHED and cell.compile == "on":
            return (
                f"{graph} with {got}: the lengths of a cache are the host's, so no graph holds a"
                f" step; wanted {graph[:-2]}off; leave it off"
            )
        if cell.workload == "chunked_prefill" and (reason := _why_not_chunk_graph(cell)):
            return f"{graph} with {got}{reason}"
        if cell.workload in CACHED and cell.path in (Path.V2, Path.MASKED) and cell.fa2 != "off":
            return (
                f"{graph} with {got}, path={cell.path} and fa2={cell.fa2}: a captured step's"
                " positions are on the device, where FA-2's window takes none; wanted fa2=off or"
                " path=triton; name one of them"
            )
        if cell.path == ADAPTIVE or (cell.path in tuple(Path) and SPECS[Path(cell.path)].slow):
            return (
                f"{graph} with path={cell.path}: its loop runs on the host, which no graph holds;"
                " wanted a fast path; exclude this one"
            )
    if cell.without != EVERYTHING and (reason := _why_not_without(cell, model)):
        return reason
    if cell.workload in SELECTED:
        return _why_not_selected(cell, model)
    if cell.workload == "train_loop":
        return _why_not_loop(cell, model)
    if cell.workload not in CACHED:
        if cell.path in CACHED_DENSE and cell.path not in DENSE_KINDS and not cell.is_peer:
            return (
                f"{got} with path={cell.path}: it serves a cache alone; wanted"
                f" workload={' or '.join(CACHED)}, or path=dense; exclude it from others"
            )
        return None
    if cell.is_dense and cell.path not in CACHED_DENSE:
        return (
            f"{got} with path={cell.path}: it keeps no cache; wanted a path of NSA, or"
            f" {', '.join(CACHED_DENSE)}; exclude it, with that reason"
        )
    if cell.is_dense and not dense_keeps_a_cache():
        return (
            f"{got} with path={cell.path}: the dense twin of this nsa keeps no cache; wanted a"
            " newer revision; leave it out with --only"
        )
    if nsa.adaptive_num_selected:
        return (
            f"{got} with adaptive_num_selected: a cache wants one n for all lengths; set"
            " nsa.adaptive_num_selected to false"
        )
    shortest = {"seq_len": cell.seq_len} if cell.workload == "decode" else {"chunk": cell.chunk}
    for name, size in shortest.items():
        if size < nsa.cmp_block:
            return (
                f"{got} with {name}={size}: no compressed block would be read; wanted {name} >="
                f" cmp_block={nsa.cmp_block}; raise it"
            )
    if cell.workload == "decode" and nsa.cmp_stride == 1:
        return (
            f"{got} with cmp_stride=1: every step completes a block, so no step can be repeated;"
            " wanted cmp_stride >= 2; raise it"
        )
    if cell.workload == "chunked_prefill" and cell.chunk > cell.seq_len:
        return (
            f"{got} with chunk={cell.chunk}: more than seq_len={cell.seq_len}, one call; wanted"
            " chunk <= seq_len; lower chunk"
        )
    return None


def _why_not_chunk_graph(cell: Cell) -> str | None:
    """Why no graph of a chunk serves the cell's prompt."""
    if not steps_in_chunks():
        return (
            ": this nsa has no nsa.decode.ChunkGraph; wanted a newer revision, or cuda_graph=off;"
            " leave it off"
        )
    if cell.seq_len % cell.chunk:
        return (
            f", seq_len={cell.seq_len} and chunk={cell.chunk}: a graph holds whole chunks alone;"
            " wanted seq_len a multiple of chunk; change one, or leave cuda_graph off"
        )
    if cell.path == "dense_flash":
        return (
            f" and path={cell.path}: FA-2 takes no positions that are on the device; wanted"
            " cuda_graph=off, or path=dense_triton or dense_fa3; exclude this one"
        )
    if cell.is_dense and not dense_steps_in_chunks():
        return (
            f" and path={cell.path}: the dense twin of this nsa takes one token a captured step;"
            " wanted a newer revision, or cuda_graph=off for it; leave it out with --only"
        )
    return None


def _why_not_ranks(cell: Cell) -> str | None:
    """Why several processes cannot run the cell's step together."""
    got = f"world_size={cell.world_size} with"
    if cell.workload != "train":
        return (
            f"{got} workload={cell.workload}: nothing there is reduced between ranks; wanted"
            " workload=train; exclude world_size: '>1' for the others"
        )
    if cell.cuda_graph == "on" and cell.parallel == "fsdp":
        return (
            f"{got} cuda_graph=on and parallel=fsdp: the host frees gathered weights by events of"
            " several streams, of which PyTorch gives no rule to capture them; wanted parallel=ddp;"
            " exclude cuda_graph: on for fsdp"
        )
    return None


def _why_not_pages(cell: Cell) -> str | None:
    """Why the cell's step cannot go through a PagedCache."""
    got = f"cache={PAGED} with"
    if cell.workload != "decode":
        return (
            f"{got} workload={cell.workload}: only a decode step is measured over pages; wanted"
            f" workload=decode; exclude cache: {PAGED} for the others"
        )
    if cell.is_dense or cell.is_peer:
        return (
            f"{got} path={cell.path}: only NSA keeps pages; wanted a path of NSA; exclude cache:"
            f" {PAGED} for this one"
        )
    if not keeps_pages():
        return (
            f"{got} an nsa that has no nsa.decode.PagedCache: wanted a newer revision; leave it out"
            " with --only cache=contiguous"
        )
    if cell.without != EVERYTHING:
        return (
            f"{got} without={cell.without}: the kernels over pages have no such switch; wanted"
            f" without={EVERYTHING}; leave it out"
        )
    return None


def _why_not_without(cell: Cell, model: ModelConfig) -> str | None:
    """Why the cell has no such step to be without, so that its time would say nothing of it."""
    got = f"without={cell.without} with"
    if cell.path != Path.TRITON:
        return (
            f"{got} path={cell.path}: another path may serve it, which has no such step; wanted"
            " path=triton; name it"
        )
    if cell.without == "split" and cell.workload != "decode":
        return (
            f"{got} workload={cell.workload}: only a decode step splits its keys; wanted"
            " workload=decode; leave it out"
        )
    if cell.without == "copy" and cell.workload in ("decode", *SELECTED):
        return (
            f"{got} workload={cell.workload}: its kernels load no tile by a descriptor; wanted"
            " another workload; leave it out"
        )
    if cell.without in _OF_LISTS and cell.workload == "decode":
        return (
            f"{got} workload=decode: a decode step has too few queries to sort; wanted another"
            " workload; leave it out"
        )
    tokens = min(cell.chunk, cell.seq_len) if cell.workload == "chunked_prefill" else cell.seq_len
    if (
        cell.without in _OF_LISTS
        and (rows := cell.batch * tokens * model.num_kv_heads) < sort_min_rows()
    ):
        return (
            f"{got} {rows} rows (batch x tokens of a call x KV heads): so few are not sorted;"
            f" wanted at least {sort_min_rows()}; take longer sequences, or leave it out"
        )
    least = copy_min_elements()
    if (
        cell.without == "copy"
        and (elements := cell.batch * tokens * model.num_heads * model.head_dim) < least
    ):
        return (
            f"{got} {elements} elements of q in a call (batch x tokens x heads x dim): so few are"
            f" loaded without descriptors; wanted at least {least}; take longer sequences, or leave"
            " it out"
        )
    if cell.without == "join" and cell.workload not in (*TRAINING, "attention"):
        return (
            f"{got} workload={cell.workload}: only a backward of all branches is joined; wanted"
            " train or attention; leave it out"
        )
    return None


def _why_not_selected(cell: Cell, model: ModelConfig) -> str | None:
    nsa, got = model.nsa, f"workload={cell.workload}"
    if cell.is_dense:
        return (
            f"{got} with path={cell.path}: full attention selects nothing; wanted a path of NSA;"
            " exclude dense from it, with that reason"
        )
    if "sel" not in nsa.branches:
        return (
            f"{got} with nsa.branches={', '.join(nsa.branches)}: wanted sel among them; add it, or"
            " leave the workload out"
        )
    if cell.selection == "own" and nsa.selection != "exact":
        return (
            f"{got} with selection=own and nsa.selection={nsa.selection}: its search may leave"
            " slots empty, so no closed form counts the keys; wanted nsa.selection=exact, or"
            " selection random, local or hot; name one"
        )
    return None


def _why_not_loop(cell: Cell, model: ModelConfig) -> str | None:
    """Why `nsa.train` cannot run this cell as its loop."""
    got = f"{GOT_LOOP} with"
    if not has_training_loop():
        return (
            f"{GOT_LOOP}: this nsa has no nsa.train, whose loop it is; wanted a newer revision;"
            " leave the workload out with --only"
        )
    if cell.dtype == "fp16":
        return (
            f"{got} dtype=fp16: the loop scales no loss, which fp16 needs; wanted bf16 (weights"
            " with fp32 masters) or fp32; name one"
        )
    if cell.is_dense and cell.path != DENSE:
        return (
            f"{got} path={cell.path}: the loop's dense twin is path=dense; wanted that; exclude"
            " this one"
        )
    if model.vocab_size < LOOP_SYMBOLS:
        return (
            f"{got} vocab_size={model.vocab_size}: its synthetic text has {LOOP_SYMBOLS} ids;"
            f" wanted vocab_size >= {LOOP_SYMBOLS}; raise it"
        )
    if cell.cuda_graph == "on" and model.checkpoint_layers is not None:
        return (
            f"{got} cuda_graph=on and checkpoint_layers: the loop captures no checkpointed step;"
            " wanted cuda_graph=off; leave it off"
        )
    return None
