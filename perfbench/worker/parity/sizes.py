"""At which length, for which request and with how many sequences a proof runs the kernels of the
timed cell.
"""

from __future__ import annotations

from dataclasses import replace

from nsa import capability, routing, settings
from nsa.config import NSAConfig
from nsa.routing import SPECS, Path, Problem, Route, route
from perfbench.matrix import of_selected
from perfbench.older_nsa import copy_min_elements, least_keys_of_a_split, sort_min_rows
from perfbench.records import torch_dtype_name
from perfbench.worker.parity import cache, layer
from perfbench.worker.parity.claim import Claim


class RouteDiffers(Exception):
    """The parity problem would take another Route than the timed cell: its proof would prove
    nothing.
    """


def standard_tokens(nsa: NSAConfig) -> int:
    """Beyond the length where everything is selected, and no multiple of anything."""
    return (nsa.num_selected + 4) * nsa.sel_block + 1


def standard_tokens_of(claim: Claim) -> int:
    """Tokens of the usual proof: `standard_tokens`, or where path triton decodes, so many that its
    compressed keys are split; of blocks of a trained model at most as many as there are.
    """
    nsa = claim.model.nsa
    usual, least = standard_tokens(nsa), least_keys_of_a_split()
    if claim.trained is not None:
        return min(usual, len(claim.trained))
    decodes = claim.chunk == 1 and any(
        branch.implementation == Path.TRITON for branch in claim.timed.branches
    )
    if not decodes or least is None:
        return usual
    return max(usual, 2 * least * nsa.cmp_stride + nsa.cmp_block + 1)


def same_route_at(claim: Claim) -> tuple[int, str]:
    """(tokens, request) of a proof that takes the timed Route; RouteDiffers, with all that was
    tried, where none does.
    """
    standard, path = standard_tokens_of(claim), claim.cell.path
    if claim.peer is not None:  # whose Route is the same at every length
        return standard, path
    tries = [(standard, claim.request_by_name), (standard, path), (claim.cell.seq_len, path)]
    seen = []
    for tokens, request in dict.fromkeys(tries):
        counters = route_at(claim, request, tokens).counters
        if counters == claim.timed.counters:
            return tokens, request
        seen.append(f"{request} at {tokens} tokens runs {counters}")
    raise RouteDiffers(
        f"parity would prove another route ({'; '.join(seen)}) than the timed"
        f" {claim.timed.counters}: time a cell of one of those"
    )


def layer_at(claim: Claim) -> tuple[int, str]:
    """(tokens, request) of the layer's proof, at a length where every block is selected.

    Where no such length gives the timed Route (a window longer than that, of `auto`), the selected
    branch is the timed one, and the window's kernel has the proof of the attention function alone.
    """
    longest, timed = layer.tokens_selecting_all(claim.model.nsa), claim.timed.counters
    lengths = [longest, *([claim.cell.seq_len] if claim.cell.seq_len <= longest else [])]
    for tokens in lengths:
        for request in (claim.request_by_name, claim.cell.path):
            if route_at(claim, request, tokens).counters == timed:
                return tokens, request
    return longest, claim.request_by_name


def route_at(claim: Claim, request: str, tokens: int) -> Route:
    """The Route of ``request`` at ``tokens``, of the selected branch alone where the cell is."""
    problem = Problem.of(
        claim.model,
        batch=usual_batch(request),
        tokens=tokens,
        dtype=torch_dtype_name(claim.cell.dtype),
    )
    here = capability.probe(claim.device)
    if request.startswith("dense"):
        if claim.chunk is None:
            return routing.route_dense(request, problem, here)
        return routing.route_dense_cached(
            request, replace(problem, ragged=claim.stepping > 0), here
        )
    if claim.selected_alone:
        problem = of_selected(problem)
    return route(settings.current().request(request, claim.cell.fa2), problem, here)


def usual_batch(request: str) -> int:
    """Two sequences, so that batch rows cannot be mixed up unseen, and that v2 needs more than one
    workspace (m7c_125m, bf16); one of a slow path.
    """
    return 1 if request in tuple(Path) and SPECS[Path(request)].slow else 2


def batches(claim: Claim, request: str, tokens: int) -> tuple[int, ...]:
    """Sequences of each proof of ``tokens``.

    Path triton serves large calls by other kernels than small ones: it sorts rows, and it loads by
    descriptors, each from a size on. So there is a proof on each side of every such size that a
    timed call may reach.

    A call with a cache has one size, by which it goes: chunks that never make a large one need no
    proof of it, and a decode step, which has few rows for any number of sequences, is proved with
    as many as the timed cell has.
    """
    usual, timed, chunk = usual_batch(request), claim.cell.batch, claim.chunk
    branches = claim.timed.branches
    if not any(Path.TRITON in (branch.implementation, branch.kernel) for branch in branches):
        return (usual,)
    if chunk == 1:
        return (usual,) if usual == timed else (usual, timed)
    longest_call = tokens
    if chunk is not None:
        pieces = cache.pieces_of(chunk, [], tokens)
        longest_call = max(end - begin for begin, end in pieces)
    wanted, most = set[int](), None
    for least, each in _kernel_sizes(claim):
        large = -(-least // (longest_call * each))  # sequences from which a proof is a large call
        wanted.add(min(usual, large - 1))
        if chunk is None or timed * chunk * each >= least:  # a timed call may be a large one
            wanted.add(max(usual, large))
        else:
            most = large - 1 if most is None else min(most, large - 1)
    if most is not None:
        wanted = {min(count, most) for count in wanted}
    return tuple(sorted(count for count in wanted if count > 0))


def _kernel_sizes(claim: Claim) -> list[tuple[int, int]]:
    """(least size of a large call, size that each of its tokens adds) of each kind of kernel that
    only large calls take.
    """
    model = claim.model
    sizes = [(sort_min_rows(), model.num_kv_heads)]
    if not claim.selected_alone:  # which makes no descriptors
        sizes.append((copy_min_elements(), model.num_heads * model.head_dim))
    return [(least, each) for least, each in sizes if least]
