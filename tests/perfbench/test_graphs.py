"""Steps from a compiled or a CUDA graph: what they are fed, how it is known what ran, and that
nothing runs eagerly instead.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.distributed import DDPOptimizer

from nsa import engagement
from nsa.attention import NSAAttention
from nsa.model import DenseLM, TinyLM
from nsa.routing import Route
from nsa.settings import Settings
from perfbench.errors import PerfbenchError
from perfbench.matrix import attention_calls
from perfbench.matrix import matrix as matrices
from perfbench.records.cells import Cell, why_not_here
from perfbench.records.job import Job
from perfbench.records.rows import Replicate, Status
from perfbench.worker import measure, profile
from perfbench.worker.parity import layer
from perfbench.worker.parity.claim import Claim
from perfbench.worker.workloads import workload
from perfbench.worker.workloads.graphs import Captured, Compiled
from perfbench.worker.workloads.ranks_step import RanksGrapher
from tests.perfbench.jobs import TINY, cell_of, job, route_of
from tests.perfbench.measure_cases import PROOF, run
from tests.perfbench.parity_cases import TOKENS, prove
from tests.perfbench.test_plan import CPU, H100, ROOT, build
from tests.perfbench.test_profile import CUDNN, EFFICIENT, FA2, LAYERS, cuda, dense, seen

pytestmark = pytest.mark.usefixtures("one_thread", "light")


@pytest.fixture(autouse=True)
def _quick_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs that dynamo makes and nothing turns into machine code, which would take a minute: of
    the step, and of the attention that the proof at length compares with the oracle.
    """
    monkeypatch.setattr(workload, "Compiled", lambda module: Compiled(module, backend="eager"))

    def compiled_of(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        made: Callable[..., Tensor] = torch.compile(
            function, backend="eager", fullgraph=True, dynamic=False
        )
        return made

    monkeypatch.setattr(layer, "compiled_of", compiled_of)


def on(
    axis: str, path: str = "masked", kind: str = "forward", seq_len: int = 64, **changes: Any
) -> Job:
    planned_job = job(path, kind, seq_len, proof=PROOF, **changes)
    return planned_job.model_copy(update={"axes": replace(planned_job.axes, **{axis: "on"})})


# Compiled graphs.


def routed(path: str, seq_len: int = 64) -> Route:
    return attention_calls.route_of(
        Cell("forward", seq_len, path, dtype="fp32", compile="on"), TINY, Settings(), CPU
    )


@pytest.mark.parametrize("path", ["masked", "dense"])
def test_a_compiled_graph_tells_what_it_calls(path: str) -> None:
    model: nn.Module = DenseLM(TINY) if path == "dense" else TinyLM(TINY, path)
    compiled, ids = Compiled(model, "eager"), torch.zeros(1, 64, dtype=torch.int64)
    with engagement.collect() as counted:
        logits = compiled.run(ids)
    assert counted.counts == {}, "or it could simply be counted"
    torch.testing.assert_close(logits, model(ids))
    assert compiled.counts(routed(path)) == dict.fromkeys(routed(path).counters, TINY.num_layers)


def test_a_compiled_graph_of_another_path_does_not_pass() -> None:
    compiled = Compiled(TinyLM(TINY, "v2"), "eager")
    compiled.run(torch.zeros(1, 64, dtype=torch.int64))
    planned_job = routed("masked")
    assert set(compiled.counts(planned_job)) == {"cmp.sdpa", "win.sdpa"}
    assert compiled.counts(routed("dense")) == {}


class HalfWindow(NSAAttention):
    """A layer that leaves its selected branch out."""

    def __init__(self) -> None:
        nsa = replace(TINY.nsa, branches=("cmp", "win"))
        super().__init__(
            TINY.dim, TINY.num_heads, TINY.num_kv_heads, TINY.head_dim, None, nsa, path="masked"
        )


def test_a_layer_that_lacks_a_branch_is_missed() -> None:
    model = TinyLM(TINY, "masked")
    model.blocks[1].attention = HalfWindow()
    compiled = Compiled(model, "eager")
    compiled.run(torch.zeros(1, 64, dtype=torch.int64))
    counts = compiled.counts(routed("masked"))
    assert counts["sel.masked"] == 1 and counts["cmp.sdpa"] == counts["win.sdpa"] == 2


def test_a_second_graph_is_not_passed_over() -> None:
    compiled = Compiled(DenseLM(TINY), "eager")
    for tokens in (64, 96):
        compiled.run(torch.zeros(1, tokens, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="2 graphs were compiled for one shape; wanted 1"):
        compiled.counts(routed("dense"))


def test_parts_of_one_compilation_add_up_and_a_shared_block_counts_as_often_as_it_runs() -> None:
    """As DistributedDataParallel has it: PyTorch's own splitter, with buckets of a few weights."""
    model, ids, parts = TinyLM(TINY, "v2"), torch.zeros(1, 64, dtype=torch.int64), []
    split, shared = Compiled(model, "eager"), Compiled(model, "eager", runs=3)
    read = split._read

    def counted(graph: Any, inputs: list[Tensor]) -> Any:
        parts.append(graph)
        return read(graph, inputs)

    splitter = DDPOptimizer(2**14, counted, first_bucket_cap=2**14)
    split.run = torch.compile(model, backend=splitter.compile_fn, fullgraph=True)
    for one in (split, shared):
        one.run(ids)
    assert len(parts) > TINY.num_layers
    route = routed("v2")
    assert split.counts(route) == dict.fromkeys(route.counters, TINY.num_layers)
    assert shared.counts(route) == dict.fromkeys(route.counters, 3 * TINY.num_layers)
    assert split.operators["nsa::selected_v2"] == TINY.num_layers
    assert shared.operators == {name: 3 * count for name, count in split.operators.items()}


def test_what_breaks_the_graph_is_an_error() -> None:
    class Printing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return x + 1

    with pytest.raises(torch._dynamo.exc.Unsupported):
        Compiled(Printing(), "eager").run(torch.zeros(2))


@pytest.mark.parametrize(
    ("path", "kind"), [("dense", "train"), ("v2", "forward"), ("masked", "attention")]
)
def test_a_compiled_row_says_how_it_is_known_what_ran(path: str, kind: str) -> None:
    planned_job = on("compile", path, kind, profile=True)
    row = run(planned_job)
    assert (row.status, row.reason, row.engaged_by) == (Status.OK, "", "graph")
    layers = 1 if kind == "attention" else TINY.num_layers
    assert row.engaged == dict.fromkeys(
        planned_job.plan.counters, layers * row.steps_per_sample * len(row.samples_s)
    )
    assert row.profile is not None and row.profile.witness_ok is True
    older = {
        key: value for key, value in row.model_dump(mode="json").items() if key != "engaged_by"
    }
    assert Replicate.model_validate(older).engaged_by == "call"


def test_a_compiled_cell_that_also_runs_eagerly_is_the_wrong_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = workload.build

    def both(one: Job) -> workload.Workload:
        made, eager = real(one), real(job("dense", "forward"))

        def step() -> None:
            made.step()
            eager.step()

        return replace(made, step=step)

    monkeypatch.setattr(workload, "build", both)
    row = run(on("compile", "dense"))
    assert (
        row.status is Status.WRONG_PATH
        and "ran eagerly next to the graph" in row.reason
        and row.tok_per_s is None
    )


def test_a_compiled_cell_is_proved_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that is wrong by a tenth is caught, in the function and in the layer."""
    real = torch.compile

    def lossy(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        if not (options.get("fullgraph") and options.get("dynamic") is False):
            return real(function, **options)
        return lambda *args, **given: 0.9 * function(*args, **given)

    with monkeypatch.context() as compiler:
        compiler.setattr(torch, "compile", lossy)
        for path in ("masked", "dense"):
            fine = prove(path, TOKENS, train=False, seed=1)
            wrong = prove(path, TOKENS, train=False, seed=1, compile="on")
            assert (
                fine.ok and not wrong.ok and wrong.tensors["o"] > 1 and wrong.tensors["layer"] > 1
            )
    claims: list[Claim] = []
    monkeypatch.setattr(measure, "prove", lambda claim: claims.append(claim) or PROOF)
    run(on("compile", "dense").model_copy(update={"proof": None}))
    assert [claim.compiled for claim in claims] == [True]


# CUDA graphs, by a stand-in for the card's.


class FakeGrapher:
    """Replays like a graph: the same work on the same tensors, and nothing is counted."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def warm(self, work: Callable[[], None]) -> None:
        self.done.append("warm")
        work()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        self.done.append("capture")
        work()

        def replay() -> None:
            self.done.append("replay")
            token = engagement._ACTIVE.set(())
            work()
            engagement._ACTIVE.reset(token)

        return replay


class Stream:
    """In place of a stream of torch.cuda: notes what it waits for."""

    def __init__(self, log: list[str], name: str = "side") -> None:
        self.log, self.name = log, name

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


def test_ranks_wrap_warm_up_and_capture_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """By PyTorch's rules for DistributedDataParallel; a CPU has no graphs, so torch.cuda is not
    it.
    """
    log: list[str] = []

    class Graph:
        def replay(self) -> None:
            log.append("replay")

    @contextmanager
    def entered(stream: Stream) -> Iterator[None]:
        log.append(f"on {stream.name}")
        yield
        log.append(f"off {stream.name}")

    def captured(graph: Graph, *, stream: Stream, capture_error_mode: str) -> Any:
        log.append(f"capture, {capture_error_mode}")
        return entered(stream)

    fakes = {
        "Stream": partial(Stream, log),
        "current_stream": partial(Stream, log, "current"),
        "stream": entered,
        "CUDAGraph": Graph,
        "graph": captured,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    grapher = RanksGrapher()
    with grapher.stream():
        log.append("wrapped")
    grapher.warm(lambda: log.append("step"))
    grapher.capture(lambda: log.append("step"))()
    begin, end = ["side waits for current", "on side"], ["off side", "current waits for side"]
    warm = [*begin, *["step"] * 11, *end]
    capture = ["capture, thread_local", "on side", "step", "off side", "replay"]
    assert log == [*begin, "wrapped", *end, *warm, *capture]


def test_a_graph_that_was_closed_is_captured_again() -> None:
    """NCCL's communicator waits for the graphs that hold it, so that closing must let go of one."""
    grapher, kept = FakeGrapher(), weakref.WeakSet[Any]()
    capture = grapher.capture

    def captured(work: Callable[[], None]) -> Callable[[], None]:
        replay = capture(work)
        kept.add(replay)
        return replay

    monkeyed: Any = grapher
    monkeyed.capture = captured
    step = Captured(lambda x: None, itertools.cycle([(torch.zeros(1),)]), grapher)
    step()
    assert len(kept) == 1
    step.close()
    assert len(kept) == 0
    step()
    assert grapher.done == ["warm", "capture", "replay"] * 2


def test_a_replay_reads_the_next_batch_from_the_same_tensors() -> None:
    read: list[tuple[int, int, bool]] = []

    def body(x: Tensor, y: Tensor) -> None:
        read.append((int(x), x.data_ptr(), x.requires_grad))

    batches = itertools.cycle(
        (torch.tensor(float(i), requires_grad=True), torch.tensor(9.0)) for i in range(1, 6)
    )
    grapher = FakeGrapher()
    step = Captured(body, batches, grapher)
    assert grapher.done == [], (
        "nothing is captured before the first step, whose seconds are the cold start"
    )
    for _ in range(3):
        step()
    assert grapher.done == ["warm", "capture", "replay", "replay", "replay"]
    assert [value for value, _, _ in read] == [1, 1, 2, 3, 4] and len(
        {place for _, place, _ in read}
    ) == 1
    assert all(wants for _, _, wants in read)


@pytest.mark.parametrize("kind", ["train", "forward", "attention"])
def test_a_captured_row_says_how_it_is_known_what_ran(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(workload, "CudaGrapher", FakeGrapher)
    monkeypatch.setattr(torch.optim, "AdamW", lambda *a, **k: _plain(*a, **k))
    planned_job = on("cuda_graph", "v2", kind)
    row = run(planned_job)
    assert (row.status, row.reason, row.engaged_by) == (Status.OK, "", "capture")
    layers = 1 if kind == "attention" else TINY.num_layers
    assert row.engaged == dict.fromkeys(
        planned_job.plan.counters, layers * row.steps_per_sample * len(row.samples_s)
    )


REAL_ADAMW = torch.optim.AdamW
CAPTURABLE: list[bool] = []


def _plain(*args: Any, capturable: bool, **options: Any) -> torch.optim.Optimizer:
    """A CPU refuses capturable."""
    CAPTURABLE.append(capturable)
    return REAL_ADAMW(*args, **options)


def test_the_optimizer_is_capturable_only_where_it_is_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.optim, "AdamW", _plain)
    CAPTURABLE.clear()
    workload.build(on("cuda_graph", kind="train"))
    workload.build(job("masked", "train"))
    assert CAPTURABLE == [True, False]


def test_what_cannot_be_captured_fails_and_is_not_run_eagerly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Refuses(FakeGrapher):
        def capture(self, work: Callable[[], None]) -> Callable[[], None]:
            raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(workload, "CudaGrapher", Refuses)
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        run(on("cuda_graph"))


def test_a_replay_that_dispatches_again_is_the_wrong_path(monkeypatch: pytest.MonkeyPatch) -> None:
    class Eager(FakeGrapher):
        def capture(self, work: Callable[[], None]) -> Callable[[], None]:
            super().capture(work)
            return work

    monkeypatch.setattr(workload, "CudaGrapher", Eager)
    row = run(on("cuda_graph"))
    assert row.status is Status.WRONG_PATH and "ran eagerly next to the capture" in row.reason


# The profiler's word on a graph.


@pytest.mark.parametrize(
    ("chosen", "kernels", "ok"),
    [
        (cuda("v2", "off"), seen(EFFICIENT, each=3 * LAYERS), True),
        (cuda("v2", "off"), seen(EFFICIENT, each=3 * LAYERS - 1), False),
        (cuda("masked", "on"), {FA2: LAYERS, EFFICIENT: 2 * LAYERS}, True),
        (cuda("masked", "on"), {FA2: LAYERS, EFFICIENT: 2 * LAYERS - 1}, False),
        (cuda("masked", "on"), {FA2: LAYERS - 1, EFFICIENT: 3 * LAYERS}, False),
        # a backward is no forward
        (cuda("v2", "off"), {EFFICIENT.replace("cutlassF", "cutlassB"): 9 * LAYERS}, False),
        (dense("dense"), seen(FA2), True),
        (dense("dense"), seen(CUDNN), True),
        (dense("dense_cudnn"), seen(CUDNN), True),
        (dense("dense_cudnn"), seen(FA2), False),
        (dense("dense"), seen("softmax_warp_forward", each=99), False),
    ],
)
def test_a_replay_is_witnessed_by_kernels_alone(
    chosen: Route, kernels: dict[str, int], ok: bool
) -> None:
    shown = profile._fused_as_operator(chosen, kernels, {}, True, LAYERS)
    assert profile.testify(chosen, kernels, shown, True, LAYERS)[0] is ok


def test_on_a_cpu_a_graph_shows_the_operators_below() -> None:
    chosen, below = route_of(cell_of("masked")), "aten::_scaled_dot_product_flash_attention_for_cpu"
    for count, ok in ((6, True), (5, False)):
        shown = profile._fused_as_operator(
            chosen, {}, {below: count, below + "_backward": 99}, False, 2
        )
        assert profile.testify(chosen, {}, shown, False, 2)[0] is ok


# Axes, matrices, refusals.


def test_the_kernel_and_training_matrices() -> None:
    kernels, train = (
        matrices.load_matrix(ROOT / "matrices" / f"{name}-h200.yaml")
        for name in ("kernels", "train")
    )
    card = replace(H100, triton_provider="triton 3.7.1", triton_reason="")
    plans = [build(matrix, card) for matrix in (kernels, train)]
    assert [plan.warnings for plan in plans] == [[], []] and all(
        cell.expect.engaged for plan in plans for cell in plan.cells
    )
    assert {cell.layers for cell in plans[0].cells} == {1} and {
        cell.layers for cell in plans[1].cells
    } == {12}
    assert {cell.axes.seq_len for cell in plans[0].cells} == {
        2**n for n in (11, 13, 14, 15, 16, 17)
    }
    shapes = {(cell.axes.batch, cell.axes.seq_len) for cell in plans[1].cells}
    assert shapes == {(8, 2048), (2, 8192), (1, 32768), (1, 65536), (1, 2048)}
    graphs = {
        (cell.axes.compile, cell.axes.cuda_graph)
        for cell in plans[1].cells
        if cell.axes.seq_len == 2048
    }
    assert graphs == {("off", "off"), ("off", "on"), ("on", "off"), ("on", "on")}


def test_the_axes_rename_nothing_and_name_their_own_cells() -> None:
    assert Cell("train", 128, "v2").cell_id == "path=v2,seq_len=128,workload=train"
    assert (
        Cell("train", 128, "v2", compile="on", cuda_graph="on").cell_id
        == "compile=on,cuda_graph=on,path=v2,seq_len=128,workload=train"
    )
    assert "needs a GPU" in str(
        why_not_here(Cell("train", 128, "v2", cuda_graph="on"), on_gpu=False)
    )
    assert why_not_here(Cell("train", 128, "v2", cuda_graph="on"), on_gpu=True) is None


def test_a_compiled_region_is_routed_without_its_length() -> None:
    eager = attention_calls.route_of(
        Cell("forward", 64, "auto", dtype="fp32"), TINY, Settings(), CPU
    )
    compiled = attention_calls.route_of(
        Cell("forward", 64, "auto", dtype="fp32", compile="on"), TINY, Settings(), CPU
    )
    assert "sel.dense" in eager.counters and "sel.masked" in compiled.counters


MATRIX = """\
version: 1
name: t
target: {gpu: H100}
model: m7c_125m
axes: {workload: [KIND], seq_len: [256], path: [PATH], AXIS: [off, on]}
measure: {processes: 3}
"""


@pytest.mark.parametrize("axis", ["compile", "cuda_graph"])
@pytest.mark.parametrize(
    ("kind", "path", "message"),
    [
        ("train", "v1", "its loop runs on the host, which no graph holds; wanted a fast path"),
        ("forward", "adaptive", "its loop runs on the host"),
        ("attention", "reference", "its loop runs on the host"),
    ],
)
def test_what_no_graph_holds_is_refused_before(
    axis: str, kind: str, path: str, message: str
) -> None:
    text = MATRIX.replace("KIND", kind).replace("PATH", path).replace("AXIS", axis)
    with pytest.raises(PerfbenchError) as caught:
        build(matrices.parse_matrix(text, "t.yaml"))
    assert f"{axis}=on with" in str(caught.value) and message in str(caught.value)
    with pytest.raises(PerfbenchError, match="wanted one of off, on"):
        matrices.parse_matrix(text.replace("[off, on]", "[true]"), "t.yaml")
