"""What torch.compile's fusion saves: eager against compiled, part by part, each with its parity,
kernels and raw samples.

    python -m tests.benchmarks.bench_fusion --out fusion.json                       # on a CUDA
    device, within --budget-s python -m tests.benchmarks.bench_fusion --out fusion.json --device cpu
    --preset tiny --dtype float32 --shapes 1x100 \\
        --samples 3 --sample-ms 1 --backend aot_eager                               # checks the
        script itself

A part is one function and its backward. Both sides run in one process in turn, on the same inputs.
What does not compile, does not fit or finds the budget spent has its reason in the JSON, and no
number.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from nsa.config import preset
from tests.benchmarks.fusion_parts import Part, Step, parts

SLACK = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10, torch.float32: 1e-5}
WARMUPS = 3


def order(
    names: Sequence[str], shapes: Sequence[tuple[int, int]]
) -> Iterator[tuple[str, tuple[int, int]]]:
    """What is cheap to compile first, at every shape; v2 last, where the budget may be spent."""
    small = [n for n in names if "+" in n]
    rest = [n for n in names if "+" not in n and n != "layer v2"]
    yield from itertools.product(small, shapes)
    yield from ((name, shape) for shape in shapes for name in rest)
    yield from (("layer v2", shape) for shape in shapes if "layer v2" in names)


class Subject:
    """One side of a case: ``step()`` is forward and backward, and returns (output, gradients
    ...).
    """

    def __init__(
        self,
        module: nn.Module,
        call: Callable[..., Tensor],
        inputs: list[Tensor],
        upstream: Tensor | None,
    ) -> None:
        self.call, self.inputs, self.upstream = call, inputs, upstream
        self.wanted = [t for t in (*inputs, *module.parameters()) if t.requires_grad]

    def step(self) -> list[Tensor]:
        y = self.call(*self.inputs)
        upstream = None if self.upstream is None else self.upstream.to(y.dtype)
        # the sigmoid gate takes no q
        return [y, *torch.autograd.grad(y, self.wanted, upstream, materialize_grads=True)]


def subjects(
    part: Part, shape: tuple[int, int], dtype: torch.dtype, device: str, backend: str
) -> tuple[Subject, Subject, Subject]:
    """(eager, compiled, reference): the same weights and inputs, the reference in the part's wider
    dtype.
    """
    torch.manual_seed(0)
    module = part.module().to(device, dtype)
    inputs = part.inputs(*shape, dtype)
    with torch.no_grad():
        y = module(*inputs)
    upstream = (
        None
        if y.ndim == 0
        else torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(device, dtype)
    )
    twin, wide = copy.deepcopy(module), copy.deepcopy(module).to(part.reference_dtype)
    compiled: Callable[..., Tensor] = twin
    if isinstance(twin, Step):
        twin.compile_blocks(backend)
    else:
        compiled = torch.compile(twin, fullgraph=True, dynamic=False, backend=backend)
    wide_inputs = [
        x.detach().to(part.reference_dtype).requires_grad_() if x.is_floating_point() else x
        for x in inputs
    ]
    return (
        Subject(module, module, inputs, upstream),
        Subject(twin, compiled, inputs, upstream),
        Subject(wide, wide, wide_inputs, upstream),
    )


def parity(
    eager: list[Tensor], compiled: list[Tensor], reference: list[Tensor], slack: float
) -> dict[str, Any]:
    """Relative L2 errors against the reference, of the worst tensor; the compiled side may err
    twice as much as eager, plus ``slack``.
    """

    @torch.no_grad()
    def error(x: Tensor, true: Tensor) -> float:
        norm = float(true.double().norm())
        return float((x.double() - true.double()).norm()) / (norm or 1.0)

    pairs = [(error(e, t), error(c, t)) for e, c, t in zip(eager, compiled, reference, strict=True)]
    worst_eager, worst = max(pairs, key=lambda p: p[1] / (2 * p[0] + slack))
    return {
        "ok": all(c <= 2 * e + slack for e, c in pairs),  # a NaN is not
        "eager_error": worst_eager,
        "compiled_error": worst,
        "limit": 2 * worst_eager + slack,
        "tensors": len(pairs),
    }


def seconds(step: Callable[[], object], steps: int, device: str) -> float:
    if not device.startswith("cuda"):
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        return time.perf_counter() - begin
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    first.record()
    for _ in range(steps):
        step()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3


def kernels(step: Callable[[], object], device: str) -> int | None:
    """Kernels of one step by the profiler; None on a CPU, which launches none."""
    if not device.startswith("cuda"):
        return None
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    events = seen.profiler.kineto_results.events()
    on_device = [
        e
        for e in events
        if e.device_type() == torch.autograd.DeviceType.CUDA and not e.is_user_annotation()
    ]
    return sum(not e.name().startswith(("Memcpy", "Memset")) for e in on_device)


def measure(
    part: Part, shape: tuple[int, int], dtype: torch.dtype, options: argparse.Namespace
) -> dict[str, Any]:
    device = options.device
    eager, compiled, reference = subjects(part, shape, dtype, device, options.backend)
    results = eager.step()
    begin = time.perf_counter()
    compiled_results = compiled.step()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    row: dict[str, Any] = {"compile_s": time.perf_counter() - begin}
    row["parity"] = parity(results, compiled_results, reference.step(), SLACK[dtype]) | {
        "truth": str(part.reference_dtype)
    }
    del results, compiled_results, reference
    sides = {"eager": eager, "compiled": compiled}
    for side in sides.values():
        seconds(side.step, WARMUPS, device)
    steps = {
        name: max(1, round(1.2e-3 * options.sample_ms / seconds(side.step, 1, device) + 0.5))
        for name, side in sides.items()
    }
    samples: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(options.samples):
        # neither side always follows the other
        for name in sorted(sides, reverse=bool(number % 2)):
            samples[name].append(1e3 * seconds(sides[name].step, steps[name], device) / steps[name])
    row |= {
        "steps_per_sample": steps,
        "samples_ms": samples,
        "median_ms": {n: statistics.median(s) for n, s in samples.items()},
    }
    row["kernels"] = {name: kernels(side.step, device) for name, side in sides.items()}
    row["speedup"] = row["median_ms"]["eager"] / row["median_ms"]["compiled"]
    return row


def environment(device: str) -> dict[str, Any]:
    on_cuda = device.startswith("cuda")
    triton: str | None = None
    if on_cuda:
        import triton as installed

        triton = installed.__version__
    return {
        "device": torch.cuda.get_device_name() if on_cuda else platform.processor() or "cpu",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton,
        "python": platform.python_version(),
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    begin = time.perf_counter()
    dtype = getattr(torch, options.dtype)
    known = parts(preset(options.preset), dtype, options.device)
    rows: list[dict[str, Any]] = []
    asked = {
        k: getattr(options, k)
        for k in ("preset", "dtype", "backend", "samples", "sample_ms", "budget_s")
    }
    report: dict[str, Any] = {
        "environment": environment(options.device),
        "asked": asked,
        "rows": rows,
    }
    last_s: dict[str, float] = {}
    for name, shape in order(list(known), options.shapes):
        row: dict[str, Any] = {"part": name, "batch": shape[0], "tokens": shape[1]}
        rows.append(row)
        started = time.perf_counter()
        left_s = options.budget_s - (started - begin)
        # shapes grow, and so does what a case takes
        if left_s < 1.3 * last_s.get(name, 0.0) or left_s <= 0:
            row["skipped"] = (
                f"{left_s:.0f} s left of --budget-s {options.budget_s:g}; this part took"
                f" {last_s.get(name, 0.0):.0f} s before"
            )
            continue
        torch._dynamo.reset()
        try:
            row |= measure(known[name], shape, dtype, options)
        # what torch raises where it cannot compile, does not fit, or a kernel fails
        except RuntimeError as error:
            row["skipped"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        last_s[name] = time.perf_counter() - started
        row["took_s"] = last_s[name]
        save(report, options.out)  # what is measured stays, whatever the next case does
    report["took_s"] = time.perf_counter() - begin
    save(report, options.out)
    return report


def save(report: dict[str, Any], out: Path) -> None:
    out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def table(report: dict[str, Any]) -> Iterator[str]:
    yield f"{report['environment']} {report['took_s']:.0f} s"
    yield (
        f"{'part':22}{'B x T':>10}{'eager ms':>11}{'compiled':>11}{'speedup':>9}"
        f"{'kernels':>14}{'compile s':>11}  parity"
    )
    for row in report["rows"]:
        start = f"{row['part']:22}{row['batch']:>4} x{row['tokens']:5}"
        if "skipped" in row:
            yield f"{start}  skipped: {row['skipped']}"[:140]
            continue
        ms, launched, proof = row["median_ms"], row["kernels"], row["parity"]
        yield (
            f"{start}{ms['eager']:11.3f}{ms['compiled']:11.3f}{row['speedup']:9.2f}"
            f"{launched['eager']!s:>7}{launched['compiled']!s:>7}{row['compile_s']:11.1f}"
            f"  {'ok' if proof['ok'] else 'WRONG'} {proof['compiled_error']:.1e} (eager"
            f" {proof['eager_error']:.1e})"
        )


def _shapes(text: str) -> list[tuple[int, int]]:
    return [
        (int(batch), int(tokens))
        for batch, tokens in (shape.split("x") for shape in text.split(","))
    ]


def main() -> None:
    """Exit code 1 where a compiled side is not the same function."""
    cli = argparse.ArgumentParser(description="eager against torch.compile, part by part")
    cli.add_argument("--out", type=Path, required=True)
    cli.add_argument("--device", default="cuda")
    cli.add_argument("--preset", default="m7c_125m")
    cli.add_argument(
        "--dtype", default="bfloat16", choices=[str(d).removeprefix("torch.") for d in SLACK]
    )
    cli.add_argument(
        "--shapes",
        type=_shapes,
        default=_shapes("1x2048,1x8192,8x2048"),
        help="batch x tokens, comma-separated",
    )
    cli.add_argument("--samples", type=int, default=20)
    cli.add_argument(
        "--sample-ms", type=float, default=50.0, help="a sample lasts at least about this long"
    )
    cli.add_argument(
        "--budget-s",
        type=float,
        default=130.0,
        help="no case begins that would end later, judged by the shape before",
    )
    cli.add_argument("--backend", default="inductor")
    report = run(cli.parse_args())
    print(*table(report), sep="\n")
    raise SystemExit(any(not row["parity"]["ok"] for row in report["rows"] if "parity" in row))


if __name__ == "__main__":
    main()
