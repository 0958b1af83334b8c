"""`perfbench.load`: every value against the JSON line that it comes from, read by `json` alone."""

from __future__ import annotations

import doctest
import gzip
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import perfbench
from perfbench.errors import Exit, PerfbenchError
from perfbench.records import Cell, run_file
from tests.perfbench import builders

DATA = Path(__file__).parents[1] / "data"
OLD = DATA / "written-by-0a70f94" / "runs"
RUNS = DATA / "runs"
GATE = RUNS / "h100-gate" / "start-1"  # with telemetry, sentinels, graphs
OOM = OLD / "h100-demo-oom"


def lines(file: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The manifest, and the replicates."""
    data = file.read_bytes()
    first, *rest = map(
        json.loads, (gzip.decompress(data) if file.suffix == ".gz" else data).splitlines()
    )
    return first, [one for one in rest if one["kind"] == "replicate"]


def same(found: Any, wanted: Any) -> bool:
    return bool(pd.isna(found)) if wanted is None else bool(found == wanted)


@pytest.mark.parametrize("folder", [GATE, OOM, OLD / "h100"], ids=lambda folder: folder.name)
def test_every_value_is_that_of_its_line(folder: Path) -> None:
    manifest, rows = lines(folder / "run.jsonl.gz")
    frame = perfbench.load(folder)
    assert len(frame) == len(rows) > 3
    for (_, got), row in zip(frame.iterrows(), rows, strict=True):
        speed, telemetry = row.get("tok_per_s"), row.get("telemetry") or {}
        parity, physics = row.get("parity") or {}, row.get("physics") or {}
        profile, route = row.get("profile"), row.get("route")
        wanted = {
            "run_id": manifest["run_id"],
            "side": None,
            "matrix": manifest["matrix_name"],
            "commit": manifest["source"]["commit"],
            "dirty": manifest["source"]["dirty_sha256"] is not None,
            "gpu": manifest["environment"]["gpu_slug"],
            "device": manifest["environment"]["device_name"],
            "torch": manifest["environment"]["torch"],
            "triton": manifest["environment"]["triton"],
            "cell_id": row["cell_id"],
            **row["axes"],
            "replicate": row["replicate"],
            "started_utc": pd.Timestamp(row["started_utc"]),
            "status": row["status"],
            "reason": row["reason"],
            "tok_per_s": speed,
            "tokens_per_step": row["tokens_per_step"] or None,
            "steps_per_sample": row["steps_per_sample"] or None,
            "num_samples": len(row["samples_s"]),
            "samples_s": tuple(row["samples_s"]),
            "host_bound": row.get("host_bound"),
            "throttled": telemetry.get("throttled"),
            "route": None if route is None else " ".join(route["counters"]),
            "parity_ok": parity.get("ok"),
            "parity_max_error": parity.get("max_error"),
            "parity_tolerance": parity.get("tolerance"),
            "peak_memory_bytes": row.get("peak_memory_bytes"),
            "utilisation_pct": telemetry.get("utilisation_pct"),
            "sm_clock_mhz": telemetry.get("sm_clock_mhz"),
            "floor_fraction": physics.get("floor_fraction"),
            "cold_start_s": row.get("cold_start_s"),
            "wall_s": row["wall_s"],
        }
        wrong = {name: (got[name], one) for name, one in wanted.items() if not same(got[name], one)}
        assert not wrong
        if speed is None:
            assert math.isnan(got.step_ms)
        else:
            assert got.step_ms == pytest.approx(1000 * row["tokens_per_step"] / speed)
            # a step is a sample by its number of steps, whichever sample
            steps = [1000 * one / row["steps_per_sample"] for one in row["samples_s"]]
            assert min(steps) * 0.999 <= got.step_ms <= max(steps) * 1.001
        on_device = profile and profile["device_time_s"]
        assert same(got.device_ms, 1000 * on_device if on_device else None)


def test_columns_have_types_and_units() -> None:
    frame = perfbench.load(GATE, OOM)
    kinds = {name: str(dtype) for name, dtype in frame.dtypes.items()}
    texts = ["run_id", "side", "matrix", "commit", "gpu", "torch", "triton", "cell_id", "status"]
    axes = ["workload", "path", "fa2", "dtype", "l2", "compile", "cuda_graph", "without"]
    assert {kinds[name] for name in [*texts, *axes]} == {"category"}
    whole = ["seq_len", "batch", "chunk", "replicate", "peak_memory_bytes", "tokens_per_step"]
    assert {kinds[name] for name in whole} == {"Int64"}
    numbers = ["tok_per_s", "step_ms", "device_ms", "parity_max_error", "power_w", "wall_s"]
    assert {kinds[name] for name in numbers} == {"float64"}
    truths = ["parity_ok", "host_bound", "throttled", "steady", "dirty"]
    assert {kinds[name] for name in truths} == {"boolean"}
    assert kinds["started_utc"] == "datetime64[us, UTC]" and kinds["reason"] == "string"
    assert [name for name, kind in kinds.items() if kind == "object"] == ["samples_s"]


def test_a_failed_replicate_is_a_row_without_a_speed() -> None:
    frame = perfbench.load(OOM)
    (failed,) = frame[frame.status == "oom"].itertuples()
    assert math.isnan(failed.tok_per_s) and math.isnan(failed.step_ms) and failed.samples_s == ()
    assert "out of memory" in failed.reason and failed.peak_memory_bytes is pd.NA
    assert failed.parity_ok is pd.NA or isinstance(failed.parity_ok, bool)
    assert frame[frame.status == "ok"].tok_per_s.notna().all() and len(frame) == 5
    assert frame.tok_per_s.count() == 4  # what pandas averages over


def test_runs_follow_one_another_and_keep_their_names() -> None:
    frame = perfbench.load(GATE, OOM)
    assert list(frame.index) == list(range(25))
    ids = [lines(folder / "run.jsonl.gz")[0]["run_id"] for folder in (GATE, OOM)]
    assert list(frame.run_id) == [ids[0]] * 20 + [ids[1]] * 5
    alone = pd.concat([perfbench.load(GATE), perfbench.load(OOM)], ignore_index=True)
    for name in frame:
        assert frame[name].astype(object).equals(alone[name].astype(object)), name
    # fixed categories, so that frames of different runs still join as categories
    assert {str(alone[name].dtype) for name in ("side", "status", "path", "workload")} == {
        "category"
    }


def test_a_pair_says_its_side() -> None:
    frame = perfbench.load(RUNS / "h200-drop", GATE)
    sides = frame.side.astype(object)
    assert list(sides[:16]) == ["a"] * 8 + ["b"] * 8 and sides[16:].isna().all()
    change = frame.groupby("side", observed=True).tok_per_s.median()
    assert change["b"] / change["a"] == pytest.approx(1 - 0.0291, abs=0.004)  # planted: 3 %
    alone = perfbench.load(RUNS / "h200-drop" / "b")
    assert alone.side.isna().all() and list(alone.tok_per_s) == list(frame.tok_per_s[8:16])


def test_plain_and_compressed_files_and_text_paths_are_alike(tmp_path: Path) -> None:
    plain = tmp_path / "run.jsonl"
    plain.write_bytes(gzip.decompress((OOM / "run.jsonl.gz").read_bytes()))
    for path in (plain, tmp_path, str(plain), OOM / "run.jsonl.gz"):
        pd.testing.assert_frame_equal(perfbench.load(path), perfbench.load(OOM))


def test_of_a_replicate_that_was_measured_again_the_last_row_counts(tmp_path: Path) -> None:
    run = builders.small_run()
    first, second, *_ = run.replicates
    again = first.model_copy(update={"attempt": 1, "tok_per_s": 7.0})
    with run_file.create_run(tmp_path, run.manifest) as writer:
        for row in (first, second, again):
            writer.append(row)
    frame = perfbench.load(writer.path)
    assert list(frame.replicate) == [second.replicate, first.replicate]
    assert list(frame.attempt) == [0, 1] and frame.tok_per_s[1] == 7.0


def test_an_axis_that_an_older_file_lacks_has_its_default_and_an_unknown_value_is_kept(
    tmp_path: Path,
) -> None:
    run = builders.small_run()
    row = run.replicates[0]
    known = {k: v for k, v in row.axes.to_mapping().items() if k != "without"}
    axes = {**known, "dtype": "fp8"}
    with run_file.create_run(tmp_path, run.manifest) as writer:
        writer.append(row.model_copy(update={"axes": Cell.from_mapping(axes)}))
    (got,) = perfbench.load(writer.path).itertuples()
    assert got.without == "none" and got.dtype == "fp8"


def test_a_run_without_replicates_has_all_columns(tmp_path: Path) -> None:
    with run_file.create_run(tmp_path, builders.small_run().manifest) as writer:
        pass
    empty, full = perfbench.load(writer.path), perfbench.load(GATE)
    assert len(empty) == 0 and list(empty) == list(full)
    assert empty.tok_per_s.dtype == "float64" and empty.seq_len.dtype == "Int64"


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    def refusal(*paths: Path) -> str:
        with pytest.raises(PerfbenchError) as caught:
            perfbench.load(*paths)
        assert caught.value.exit_code is Exit.USAGE and "\n" not in str(caught.value)
        return str(caught.value)

    assert "cannot be read" in refusal(tmp_path / "none") and "Next:" in refusal(tmp_path)
    torn = tmp_path / "run.jsonl.gz"
    torn.write_bytes((GATE / "run.jsonl.gz").read_bytes()[:500])
    assert "gzip data that was cut off" in refusal(GATE, tmp_path)
    torn.unlink()
    (tmp_path / "run.jsonl").write_bytes(b"no run\n")
    assert f"{tmp_path / 'run.jsonl'}:1: not a JSON record" in refusal(tmp_path)
    twice = refusal(GATE, OOM, GATE / "run.jsonl.gz")
    assert lines(GATE / "run.jsonl.gz")[0]["run_id"] in twice and "count twice" in twice
    with pytest.raises(TypeError, match="wanted run folders"):
        perfbench.load()


@pytest.mark.parametrize("text", ["yesterday", "2026-11-28T01:02:03"])
def test_a_time_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    run = builders.small_run()
    with run_file.create_run(tmp_path, run.manifest) as writer:
        writer.append(run.replicates[0].model_copy(update={"started_utc": text}))
    with pytest.raises(PerfbenchError, match=rf"#0: .*{text}.*the file is damaged"):
        perfbench.load(writer.path)


def test_the_example_of_its_docstring_runs() -> None:
    names: dict[str, Any] = {}
    source = [
        one.source for one in doctest.DocTestParser().get_examples(perfbench.load.__doc__ or "")
    ]
    for text in source[:-2]:
        exec(text.replace("reports/evidence/train-h200", str(GATE)), names)
    medians = eval(source[-2], names)
    assert medians.shape == (1, 2) and medians.notna().all(axis=None)
    samples = eval(source[-1], names)
    assert len(samples) == names["ok"].num_samples.sum() > len(names["ok"])


def test_importing_perfbench_loads_nothing_heavy() -> None:
    heavy = "{'pandas', 'torch', 'pydantic', 'numpy', 'matplotlib'}"
    script = f"""
import sys, perfbench
assert not {heavy} & set(sys.modules), {heavy} & set(sys.modules)
assert 'load' in perfbench.__all__
frame = perfbench.load({str(OOM)!r})
assert 'torch' not in sys.modules and len(frame) == 5
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=DATA.parents[1])
    with pytest.raises(AttributeError, match=r"no attribute 'lod'; it has .*load"):
        perfbench.lod  # noqa: B018


def test_the_command_line_loads_no_pandas() -> None:
    script = f"""
import sys
from perfbench.commands import app
app.invoke(['gate', {str(OOM)!r}])
assert 'pandas' not in sys.modules
"""
    subprocess.run(
        [sys.executable, "-c", script], check=True, cwd=DATA.parents[1], capture_output=True
    )
