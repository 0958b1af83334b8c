"""Workloads decode and chunked_prefill: what a step does to a cache, what is counted, proved and
refused.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa.config import ModelConfig
from nsa.decode import DenseCache, NSACache
from nsa.ops import key_counts
from nsa.routing import CACHED_DENSE_KINDS, RouteError
from nsa.settings import Settings
from perfbench import roofline
from perfbench.errors import PerfbenchError
from perfbench.matrix import attention_calls
from perfbench.matrix import matrix as matrices
from perfbench.matrix import plan as plans
from perfbench.records.cells import Cell
from perfbench.records.job import Job
from perfbench.records.peers import CACHED_DENSE
from perfbench.records.rows import Replicate, Status
from perfbench.report.rows import is_twin
from perfbench.worker.parity import cache as cache_parity
from perfbench.worker.workloads import workload
from perfbench.worker.workloads.workload import NUM_BATCHES, Workload
from tests.perfbench.jobs import TINY, job
from tests.perfbench.measure_cases import run
from tests.perfbench.test_plan import BARE, CPU, H100, build

pytestmark = pytest.mark.usefixtures("one_thread", "light")
ROOT = pathlib.Path(__file__).parents[2]
PATHS = pytest.mark.parametrize("path", ["v2", "masked"])


def cached(
    path: str = "masked",
    kind: str = "decode",
    seq_len: int = 100,
    *,
    chunk: int = 40,
    **changes: Any,
) -> Job:
    planned_job = job(path, kind, seq_len, **changes)
    return planned_job.model_copy(update={"axes": replace(planned_job.axes, chunk=chunk)})


def seen(work: Workload, steps: int) -> list[tuple[Tensor, tuple[int, ...], Tensor]]:
    """(ids, lengths of the first layer's cache before the call, logits) of each call of the model
    in ``steps`` steps.
    """
    calls_: list[tuple[Tensor, tuple[int, ...], Tensor]] = []
    before: list[tuple[int, ...]] = []
    hooks = [
        work.model.register_forward_pre_hook(
            lambda _, args, options: before.append(options["cache"][0].lengths), with_kwargs=True
        ),
        work.model.register_forward_hook(
            lambda _, args, logits: calls_.append((args[0].clone(), before[-1], logits.clone()))
        ),
    ]
    for _ in range(steps):
        work.step()
    for hook in hooks:
        hook.remove()
    return calls_


def keys_at(position: int, model: ModelConfig = TINY) -> dict[str, int]:
    """Counted one by one: compressed blocks that end by ``position``, keys of at most n blocks up
    to it, keys in the window.
    """
    nsa = model.nsa
    blocks = position // nsa.sel_block  # whole ones before the query's own
    return {
        "cmp": sum(
            1
            for first in range(0, position + 1, nsa.cmp_stride)
            if first + nsa.cmp_block - 1 <= position
        ),
        "sel": (
            min(blocks, nsa.num_selected - 1) * nsa.sel_block
            + position
            - blocks * nsa.sel_block
            + 1
        ),
        "win": sum(1 for key in range(position + 1) if position - key < nsa.window),
    }


# Steps.


@PATHS
# one token more completes a compressed block at 99 (8 + 4 i = 100)
@pytest.mark.parametrize("seq_len", [32, 99, 100, 145])
def test_every_decode_step_is_one_token_on_the_same_cache(path: str, seq_len: int) -> None:
    work = workload.build(cached(path, seq_len=seq_len, batch=2))
    steps = seen(work, NUM_BATCHES + 1)
    held = seq_len - (seq_len + 1 >= 8 and (seq_len + 1 - 8) % 4 == 0)
    assert work.tokens_per_step == 2
    for ids, lengths, logits in steps:
        assert (
            ids.shape == (2, 1)
            and lengths == (held, held)
            and logits.shape == (2, 1, TINY.vocab_size)
        )
        assert not logits.requires_grad and bool(torch.isfinite(logits).all())
    ids, _, logits = zip(*steps, strict=True)
    assert torch.equal(ids[0], ids[NUM_BATCHES]) and torch.equal(logits[0], logits[NUM_BATCHES]), (
        "a step must leave no trace"
    )
    assert not torch.equal(ids[0], ids[1]) and not torch.equal(logits[0], logits[1])


def test_the_filled_cache_is_one_that_the_model_can_go_on_from() -> None:
    """A step's logits follow from all that the fill stored: change a token of any branch, and they
    move.
    """
    (_, _, logits), *_ = seen(work := workload.build(cached()), NUM_BATCHES)
    assert work.cache is not None
    steps = work.cache.__self__  # type: ignore[attr-defined]
    for name in ("sel", "cmp", "win"):
        for which, at in ((0, 98), (1, 98)):
            buffer = getattr(steps.begin[1], name)[which]
            row = {"sel": at, "cmp": 22, "win": at % TINY.nsa.window}[name]
            kept = buffer[:, row].clone()
            buffer[:, row] += 3
            (_, _, moved), *_ = seen(work, NUM_BATCHES)
            assert not torch.equal(logits, moved), (name, which)
            buffer[:, row] = kept
    assert torch.equal(seen(work, NUM_BATCHES)[0][2], logits)


@PATHS
@pytest.mark.parametrize("chunk", [40, 50, 100])
def test_a_prefill_in_chunks_is_the_forward_of_the_whole(path: str, chunk: int) -> None:
    work = workload.build(cached(path, "chunked_prefill", chunk=chunk, batch=2))
    pieces = -(-100 // chunk)
    first, *_, again = [seen(work, 1) for _ in range(NUM_BATCHES + 1)]
    assert len(first) == pieces and work.tokens_per_step == 200
    assert [lengths for _, lengths, _ in first] == [
        (begin, begin) for begin in range(0, 100, chunk)
    ]
    ids, logits = (torch.cat([call[i] for call in first], 1) for i in (0, 2))
    with torch.no_grad():
        whole = work.model(ids)
    torch.testing.assert_close(logits, whole, rtol=1e-4, atol=1e-4)
    assert torch.equal(logits, torch.cat([call[2] for call in again], 1)), (
        "a prefill must begin with nothing"
    )


# Rows.


@PATHS
@pytest.mark.parametrize(("seq_len", "batch"), [(100, 1), (99, 3), (40, 2)])
def test_a_decode_row_says_what_the_cache_held_and_what_was_read(
    path: str, seq_len: int, batch: int
) -> None:
    row = run(cached(path, seq_len=seq_len, batch=batch, profile=True))
    assert (row.status, row.reason) == (Status.OK, "")
    held = {100: 100, 99: 98, 40: 40}[seq_len]
    assert (
        row.cache is not None and row.cache.tokens == held and row.cache.keys_read == keys_at(held)
    )
    per_token = 2 * TINY.num_kv_heads * TINY.head_dim * 4 * batch * TINY.num_layers
    rows = held + 2 + (held + 1 - 8) // 4 + 2 + TINY.nsa.window + TINY.nsa.cmp_block - 1
    assert row.cache.memory_bytes == rows * per_token
    assert row.tokens_per_step == batch
    assert set(row.engaged.values()) == {
        TINY.num_layers * row.steps_per_sample * len(row.samples_s)
    }
    assert row.parity is not None and {"o", "layer", "blocks"} == set(row.parity.tensors)
    assert row.profile is not None and row.profile.witness_ok is True
    assert Replicate.model_validate_json(row.model_dump_json()) == row


def test_a_prefill_row_counts_a_call_for_each_chunk() -> None:
    row = run(cached("v2", "chunked_prefill", batch=2, profile=True))
    assert (row.status, row.reason) == (Status.OK, "") and row.tokens_per_step == 200
    assert set(row.engaged.values()) == {
        3 * TINY.num_layers * row.steps_per_sample * len(row.samples_s)
    }
    assert row.cache is not None and row.cache.tokens == 100
    mean = {
        branch: sum(keys_at(t)[branch] for t in range(100)) / 100
        for branch in ("cmp", "sel", "win")
    }
    assert row.cache.keys_read == pytest.approx(mean)


def test_keys_are_those_gathered_not_a_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        key_counts, "selected", lambda blocks, *_, **__: torch.full(blocks.shape[:3], 17)
    )
    row = run(cached())
    assert row.cache is not None and row.cache.keys_read == {**keys_at(100), "sel": 17}


def test_other_workloads_keep_no_cache_and_say_so() -> None:
    row = run(job("masked", "forward"))
    assert row.cache is None and row.absent["cache"] == "workload=forward keeps no cache"
    older = {key: value for key, value in row.model_dump(mode="json").items() if key != "cache"}
    assert Replicate.model_validate(older).cache is None


# Proof.


def stale_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """The window's ring is never written: prefill in one call is right, whatever follows is not."""
    real = NSACache.append

    def stale(cache: NSACache, *args: Any, **options: Any) -> Any:
        kept = [ring.clone() for ring in cache.win]
        view = real(cache, *args, **options)
        cache.win = kept
        return view

    monkeypatch.setattr(NSACache, "append", stale)


def block_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A completed compressed block is seen one call later, which only calls of one token show at
    every boundary.
    """
    real = NSACache.append

    def late(cache: NSACache, *args: Any, **options: Any) -> Any:
        view = real(cache, *args, **options)
        whole = view.cmp[0].shape[1]
        return (
            replace(view, cmp=(view.cmp[0][:, : whole - 1], view.cmp[1][:, : whole - 1]))
            if whole > 1
            else view
        )

    monkeypatch.setattr(NSACache, "append", late)


@pytest.mark.parametrize("kind", ["decode", "chunked_prefill"])
@pytest.mark.parametrize("fault", [stale_ring, block_too_late], ids=lambda fault: fault.__name__)
def test_a_cache_that_is_wrong_is_never_timed(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[Any], None], kind: str
) -> None:
    fault(monkeypatch)
    row = run(cached("v2", kind))
    assert (
        row.status is Status.PARITY
        and row.tok_per_s is None
        and row.samples_s == []
        and row.cache is None
    )
    assert run(job("v2", "forward")).status is Status.OK, "a forward's proof does not see it"


def test_a_proof_of_decode_decodes_every_row_that_it_compares() -> None:
    assert cache_parity.pieces_of(1, [0, 1, 7, 9], 10) == [
        (0, 1),
        (1, 2),
        (2, 7),
        (7, 8),
        (8, 9),
        (9, 10),
    ]
    assert cache_parity.pieces_of(1, [4], 5) == [(0, 4), (4, 5)]
    assert cache_parity.pieces_of(2048, [3], 10) == [
        (0, 4),
        (4, 8),
        (8, 10),
    ], "a chunk longer than the proof crosses boundaries, too"
    assert cache_parity.pieces_of(3, [3], 10) == [(0, 3), (3, 6), (6, 9), (9, 10)]


# Routes, calls, refusals.


def axes(workload_: str, seq_len: int, path: str = "auto", **more: Any) -> Cell:
    return Cell(workload_, seq_len, path, **more)


def test_a_decode_step_is_routed_as_what_it_is() -> None:
    """At 64 tokens every block is selected, so a forward is full causal attention, and one query on
    a cache is not.
    """
    whole = attention_calls.route_of(axes("forward", 64, dtype="fp32"), TINY, Settings(), CPU)
    step = attention_calls.route_of(axes("decode", 64, dtype="fp32"), TINY, Settings(), CPU)
    assert "sel.dense" in whole.counters and "sel.masked" in step.counters
    assert (
        attention_calls.route_of(axes("decode", 65536), TINY, Settings(), BARE)
        .branch("sel")
        .implementation
        == "masked"
    ), "one row of a mask"


def test_chunks_of_two_routes_are_refused() -> None:
    # masks of 2 x 32,768 x 32,768 elements, then twice that
    sizes = {"seq_len": 65536, "chunk": 32768}
    with pytest.raises(
        RouteError, match="for the first chunk and .* for a later one; wanted one route"
    ):
        attention_calls.route_of(axes("chunked_prefill", **sizes), TINY, Settings(), BARE)
    assert attention_calls.route_of(
        axes("chunked_prefill", path="masked", **sizes), TINY, Settings(), BARE
    )


def test_chunk_is_an_axis_of_chunked_prefill_alone() -> None:
    assert Cell("forward", 128, "v2", chunk=64) == Cell("forward", 128, "v2")
    assert (
        Cell("chunked_prefill", 4096, "v2").cell_id
        == "path=v2,seq_len=4096,workload=chunked_prefill"
    )
    assert (
        Cell("chunked_prefill", 4096, "v2", chunk=64).cell_id
        == "chunk=64,path=v2,seq_len=4096,workload=chunked_prefill"
    )
    assert attention_calls.layer_calls(axes("chunked_prefill", 4097), TINY) == 3 * TINY.num_layers
    assert attention_calls.layer_calls(axes("decode", 4097), TINY) == TINY.num_layers


MATRIX = """\
version: 1
name: t
target: {gpu: H100}
model: MODEL
axes: {workload: [KIND], seq_len: [SEQ], path: [PATH], chunk: [CHUNK]}
measure: {processes: 3}
"""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"PATH": "dense_cudnn"},
            (
                "workload=decode with path=dense_cudnn: it keeps no cache; wanted a path of NSA, or"
                " dense, dense_flash, dense_triton, dense_fa3; exclude"
            ),
        ),
        (
            {"PATH": "dense_triton", "KIND": "forward"},
            "workload=forward with path=dense_triton: it serves a cache alone; wanted",
        ),
        (
            {"SEQ": "31"},
            (
                "with seq_len=31: no compressed block would be read; wanted seq_len >="
                " cmp_block=32; raise it"
            ),
        ),
        (
            {"CHUNK": "31", "KIND": "chunked_prefill"},
            "with chunk=31: no compressed block would be read",
        ),
        (
            {"CHUNK": "128", "SEQ": "64", "KIND": "chunked_prefill"},
            "with chunk=128: more than seq_len=64, one call; wanted chunk <= seq_len",
        ),
        (
            {"MODEL": "{preset: m7c_125m, nsa: {adaptive_num_selected: true}}"},
            "set nsa.adaptive_num_selected to false",
        ),
        (
            {"MODEL": "{preset: m7c_125m, nsa: {cmp_stride: 1}}"},
            "every step completes a block, so no step can be repeated",
        ),
    ],
)
def test_what_no_machine_can_time_is_refused_before(changes: dict[str, str], message: str) -> None:
    text = MATRIX
    for name, value in {
        "MODEL": "m7c_125m",
        "KIND": "decode",
        "SEQ": "256",
        "PATH": "v2",
        "CHUNK": "64",
        **changes,
    }.items():
        text = text.replace(name, value)
    with pytest.raises(PerfbenchError) as caught:
        build(matrices.parse_matrix(text, "t.yaml"))
    assert message in str(caught.value)


# Physics.


@pytest.mark.parametrize("position", [0, 7, 30, 99, 100, 255])
def test_keys_of_a_query_are_what_its_row_adds(position: int) -> None:
    keys = roofline.keys_of_query(TINY, position)
    assert keys == keys_at(position)
    longer, shorter = (
        roofline.attention_pairs(TINY, n, dense=False) for n in (position + 1, position)
    )
    assert sum(keys.values()) == longer - shorter


def test_the_floor_of_a_decode_step() -> None:
    """tiny at 100 tokens: 24 blocks, 4 x 16 + 5 selected and 24 window keys; two layers, 2 kv
    heads, K and V of 16, fp32.
    """
    shape: dict[str, Any] = {"workload": "decode", "batch": 3, "tokens": 100, "dense": False}
    weights = roofline.linear_parameters(TINY, dense=False)
    kv = 3 * 2 * 2 * (24 + 69 + 24) * 32
    assert roofline.step_min_bytes(TINY, dtype="fp32", **shape) == 4 * (
        weights + kv + 3 * TINY.vocab_size
    )
    assert roofline.step_flops(TINY, **shape) == 3 * (2 * weights + 2 * 2 * 4 * 32 * (24 + 69 + 24))
    shared = replace(TINY, nsa=replace(TINY.nsa, share_kv=True))
    less = 3 * 2 * 2 * (24 + 69) * 32  # the window's keys may be among the selected ones
    assert roofline.step_min_bytes(shared, dtype="fp32", **shape) == 4 * (
        roofline.linear_parameters(shared, dense=False) + less + 3 * 256
    )
    whole = {**shape, "workload": "forward"}
    assert roofline.step_flops(
        TINY, **{**shape, "workload": "chunked_prefill"}
    ) == roofline.step_flops(TINY, **whole)


# Matrices.


def test_the_decode_matrices_are_one_but_for_the_card_and_short() -> None:
    files = {gpu: (ROOT / "matrices" / f"decode-h{gpu}.yaml").read_text() for gpu in (100, 200)}
    assert files[100].replace("h100", "h200").replace("H100", "H200") == files[200]
    planned = build(
        matrix := matrices.load_matrix(ROOT / "matrices" / "decode-h100.yaml"),
        replace(H100, triton_provider="triton 3.6.0"),
    )
    minutes = planned.estimate_s / 60
    assert planned.warnings == [] and minutes < 16
    decode = {(c.axes.batch, c.axes.seq_len) for c in planned.cells if c.axes.workload == "decode"}
    assert decode == {
        (batch, tokens) for batch in (1, 8, 64) for tokens in (2048, 8192, 32768, 65536)
    }
    prefill = [c for c in planned.cells if c.axes.workload == "chunked_prefill"]
    assert [c.layers for c in prefill] == 4 * [12 * 4, 12 * 32] and matrix.model.num_layers == 12
    twins = {c.axes.path for c in planned.cells if c.axes.is_dense}
    assert twins == {"dense", "dense_flash", "dense_triton"}, "and dense_fa3 where it is installed"
    assert plans.plan_json(planned)["cells"]


# The dense twin.


@pytest.mark.parametrize("kind", ["decode", "chunked_prefill"])
def test_the_dense_twin_is_proved_and_timed_through_its_cache(kind: str) -> None:
    row = run(cached("dense", kind, batch=2, profile=True))
    assert (row.status, row.reason) == (Status.OK, "")
    pieces = 3 if kind == "chunked_prefill" else 1
    due = pieces * TINY.num_layers * row.steps_per_sample * len(row.samples_s)
    assert row.engaged == {"dense.sdpa": due}
    assert row.parity is not None and set(row.parity.tensors) == {"o", "layer"}
    assert row.step_proof is not None and row.step_proof.ok
    assert row.profile is not None and row.profile.witness_ok is True
    assert row.profile.operators == {"aten::scaled_dot_product_attention": pieces * 2}
    assert row.cache is not None and row.cache.tokens == 100
    mean = 101 if kind == "decode" else sum(range(1, 101)) / 100
    assert row.cache.keys_read == {"dense": pytest.approx(mean)}
    rows = 112  # 100 or 101, in whole 16
    per_token = 2 * TINY.num_kv_heads * TINY.head_dim * 4 * 2 * TINY.num_layers
    assert row.cache.memory_bytes == rows * per_token


def forgets_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second token of a cache is never stored: a chunk of all tokens sees it, no later one."""
    real = DenseCache.append

    def forgetful(cache: DenseCache, *args: Any, **options: Any) -> Any:
        view = real(cache, *args, **options)
        if len(cache.lengths) and cache.lengths[0] > 2:
            cache.kv[1][:, 1] = 0
        return view

    monkeypatch.setattr(DenseCache, "append", forgetful)


@pytest.mark.parametrize("kind", ["decode", "chunked_prefill"])
def test_a_dense_cache_that_is_wrong_is_never_timed(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    forgets_a_token(monkeypatch)
    row = run(cached("dense", kind))
    assert row.status is Status.PARITY and row.tok_per_s is None


def test_a_dense_step_that_is_wrong_is_seen_by_its_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its proofs pass, and the timed step attends to one key fewer."""
    real = DenseCache.append

    def short(cache: DenseCache, *args: Any, **options: Any) -> Any:
        view = real(cache, *args, **options)
        if cache.lengths[0] != 101:
            return view
        return replace(view, kv=(view.kv[0][:, 1:], view.kv[1][:, 1:]))

    monkeypatch.setattr(DenseCache, "append", short)
    job_ = cached("dense").model_copy(update={"proof": run(cached("masked")).parity})
    row = run(job_)
    assert row.status is Status.PARITY and "the step differs from its plain twin" in row.reason


def test_the_dense_paths_of_a_cache_and_where_fa3_is_absent() -> None:
    assert CACHED_DENSE == CACHED_DENSE_KINDS
    own, elsewhere = axes("decode", 64, "dense_fa3"), axes("attention", 64, "dense_fa3")
    assert (own.is_peer, elsewhere.is_peer) == (False, True) and own.is_dense
    assert is_twin(own) and is_twin(axes("decode", 64, "dense_triton"))
    assert not is_twin(axes("train", 64, "dense_flash"))
    text = MATRIX.replace("MODEL", "m7c_125m").replace("KIND", "decode").replace("SEQ", "256")
    text = text.replace("CHUNK", "64").replace("PATH", "dense, dense_triton, dense_fa3")
    planned = build(
        matrices.parse_matrix(text, "t.yaml"), replace(H100, triton_provider="triton 3.6.0")
    )
    assert [cell.route.counters for cell in planned.cells] == [["dense.sdpa"], ["dense.triton"]]
    (absent,) = planned.excluded
    assert "path=dense_fa3: package fa3-fwd is not installed" in absent.reason


def test_the_floor_of_a_dense_decode_step_reads_every_key() -> None:
    shape: dict[str, Any] = {"workload": "decode", "batch": 3, "tokens": 100, "dense": True}
    weights = roofline.linear_parameters(TINY, dense=True)
    numbers = weights + 3 * 2 * 2 * 101 * 32 + 3 * TINY.vocab_size
    assert roofline.step_min_bytes(TINY, dtype="fp32", **shape) == 4 * numbers
    assert roofline.step_flops(TINY, **shape) == 3 * (2 * weights + 2 * 2 * 4 * 32 * 101)
