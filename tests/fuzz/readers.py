"""What is fuzzed: every reader of a file that a user may hand over, and valid files to start from.

A reader passes where it returns or refuses with a PerfbenchError that the command line can print.
Everything else is a finding.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from random import Random

from nsa.capability import assumed
from nsa.config import preset
from nsa.settings import Settings
from perfbench.calibration import aa_runs
from perfbench.commands.judging import judge_alone
from perfbench.commands.outcome import policy_of
from perfbench.errors import Exit, PerfbenchError
from perfbench.gate import judging
from perfbench.history import exchange, writing
from perfbench.matrix import matrix as matrices
from perfbench.matrix import plan as plans
from perfbench.records import BaselineProblem, baseline_file, read_calibration, run_file
from perfbench.records.rows import DIGESTS_SINCE, Run
from perfbench.report import CommentedRun, comment_text, verdict_json
from perfbench.runner.ab import pair
from perfbench.tuning import decide, report
from perfbench.tuning import matrix as tuneplan
from tests.fuzz import mutations
from tests.perfbench import builders
from tests.perfbench.matrix_text import VALID

DATA = Path(__file__).parents[1] / "data"
RUNS = DATA / "runs"
MATRICES = Path(__file__).parents[2] / "matrices"
PART = b"\n--- the other side ---\n"  # between the two run files of a pair
MAX_MESSAGE_CHARS = 8000
_CONTROL = re.compile(r"[\x00-\x1f\x7f\u2028\u2029]")


@dataclass(frozen=True, slots=True)
class Reader:
    """``read`` gets the bytes and a folder of its own to lay them in; ``seeds`` are valid;
    ``mutate`` keeps their shape.
    """

    read: Callable[[bytes, Path], None]
    seeds: Callable[[], list[bytes]]
    mutate: mutations.Mutate


def survives(name: str, data: bytes, folder: Path) -> bool:
    """Whether reader ``name`` took ``data``; False where it refused it as it should.

    Any other outcome is an exception.
    """
    try:
        READERS[name].read(data, folder)
    except PerfbenchError as error:
        _check_refusal(name, error, folder)
        return False
    return True


def _check_refusal(name: str, error: PerfbenchError, folder: Path) -> None:
    text = str(error)
    assert error.exit_code in (Exit.USAGE, Exit.BASELINE), f"{error.exit_code!r}: {text[:300]}"
    assert 0 < len(text) <= MAX_MESSAGE_CHARS, f"a message of {len(text)} characters"
    text.encode()  # a lone surrogate cannot be printed
    # a matrix has a line for each mistake, also the one that a run file holds
    lines = text.split("\n")
    assert name in ("matrix", "run", "tune") or len(lines) == 1, (
        f"more than one line: {text[:300]!r}"
    )
    assert all(lines) and not _CONTROL.search("".join(lines)), (
        f"what no terminal should be sent: {text[:300]!r}"
    )
    if name == "matrix":
        assert all(line.startswith(str(folder)) for line in lines), (
            f"a mistake without its place: {text[:300]!r}"
        )


def _matrix(data: bytes, folder: Path) -> None:
    matrix = matrices.load_matrix(_laid(data, folder / "m.yaml"))
    matrices.warnings(matrix)
    with suppress(PerfbenchError):  # a route that cannot serve a cell: every such cell is listed
        plan = plans.build_plan(matrix, only=[], capability=assumed("none"), settings=Settings())
        plans.plan_text(plan, matrix).encode()


def _run(data: bytes, folder: Path) -> None:
    run = run_file.read_run(_laid(data, folder / run_file.RUN_FILE))
    outcome = judge_alone(folder)
    verdict_json.text(run, outcome.judgement).encode()
    aa_runs.counts(aa_runs.read([run]))


def _compressed(data: bytes, folder: Path) -> None:
    run_file.read_run(_laid(data, folder / run_file.COMPRESSED_RUN_FILE))


def _baseline(data: bytes, folder: Path) -> None:
    path = _laid(data, folder / "b.json")
    found = baseline_file.read_baseline(path)
    if isinstance(found, BaselineProblem):
        raise PerfbenchError(Exit.BASELINE, found.message)
    baseline_file.show_baseline(found).encode()
    verdict_json.text(_green(), judging.judge(_green(), found, policy_of(_green()))).encode()


@cache
def _green() -> Run:
    return run_file.read_run(RUNS / "h100-demo" / "green")


def _calibration(data: bytes, folder: Path) -> None:
    read_calibration(_laid(data, folder / "calibration.json"), "h200")


def _tune(data: bytes, folder: Path) -> None:
    run = run_file.read_run(_laid(data, folder / run_file.RUN_FILE))
    judged = judge_alone(folder).judgement
    try:
        tuned = decide.decide_run(run, judged)
    # of another matrix, or a demonstration: `perfbench tune --from` makes this error of it
    except ValueError as error:
        raise PerfbenchError(
            Exit.USAGE, f"{error}. Next: name the folder of one, or measure without --from"
        ) from None
    report.tuning_json(tuned).encode()
    report.tuning_markdown(tuned).encode()


def _pair(data: bytes, folder: Path) -> None:
    for name, part in zip(pair.NAMES, (data.split(PART, 1) * 2)[:2], strict=True):
        (folder / name).mkdir(exist_ok=True)
        _laid(part, folder / name / run_file.RUN_FILE)
    assert isinstance(pair.is_pair(folder), bool)
    found = pair.read_pair(folder)
    pair.are_paired(found.base, found.candidate)


def _exchange(data: bytes, folder: Path) -> None:
    """A file of another tool; what is taken of it, a history stores."""
    source = exchange.SourceFile(str(folder / "x.json"), data, datetime(2026, 1, 1, tzinfo=UTC))
    kind = exchange.detect([source])
    for run in exchange.READERS[kind]([source], exchange.Stated()).runs:
        try:
            writing.check(run)
        except PerfbenchError as error:
            raise AssertionError(f"no history takes what was read: {error}") from None
        assert "\\x00" not in repr(run), "PostgreSQL stores no NUL"
        exchange.data_js([run]).text.encode()
        exchange.write_bencher(run).text.encode()


def _laid(data: bytes, path: Path) -> Path:
    path.write_bytes(data)
    return path


def _verdict(data: bytes, folder: Path) -> None:
    """As `perfbench comment` takes it: one that is read is shown, within GitHub's limit."""
    path = folder / "verdict.json"
    path.write_bytes(data)
    try:
        found = verdict_json.read_verdict(path)
    except ValueError as error:
        raise PerfbenchError(Exit.USAGE, str(error)) from None
    page = comment_text([CommentedRun(found, "RUN")])
    assert len(page.encode()) <= 65_536 and page.splitlines()[0].startswith("<!-- perfbench")


# Valid files, cut small: a fuzzer learns more from many small files than from a few large ones.


def _matrix_seeds() -> list[bytes]:
    return [VALID.encode(), *(path.read_bytes() for path in sorted(MATRICES.glob("*.yaml")))]


def _run_seeds() -> list[bytes]:
    small = [
        _cut(RUNS / name)
        for name in ("h100-demo/green", "h100-demo/wrong-path", "h100-gate/start-1", "cpu-confirm")
    ]
    return [*small, _lines(builders.small_run()), _lines(builders.resumed(builders.small_run()))]


def _compressed_seeds() -> list[bytes]:
    return [gzip.compress(seed) for seed in _run_seeds()]


def _cut(folder: Path) -> bytes:
    """The first cell of a run with two of its replicates and one sentinel."""
    first, *rest = [
        json.loads(line)
        for line in gzip.decompress(
            (folder / run_file.COMPRESSED_RUN_FILE).read_bytes()
        ).splitlines()
    ]
    first["cells"] = first["cells"][:1]
    rows = [one for one in rest if one.get("cell_id") == first["cells"][0]["cell_id"]][:2]
    watched = [one for one in rest if one["kind"] == "sentinel"][:1]
    return b"".join(json.dumps(one).encode() + b"\n" for one in [first, *watched, *rows])


def _lines(run: Run) -> bytes:
    """Without digests, as an older schema: a mutation must get further than the first of them."""
    run = run.model_copy(
        update={"manifest": run.manifest.model_copy(update={"schema_version": DIGESTS_SINCE - 1})}
    )
    records = [run.manifest, *run.resumed, *run.sentinels, *run.replicates]
    return b"".join(json.dumps(one.model_dump(mode="json")).encode() + b"\n" for one in records)


def _baseline_seeds() -> list[bytes]:
    whole = [json.loads(path.read_bytes()) for path in sorted(DATA.glob("*/baselines/*.json"))]
    return [
        json.dumps(one | {"cells": dict(list(one["cells"].items())[:2])}).encode() for one in whole
    ]


def _calibration_seeds() -> list[bytes]:
    return [(DATA / "calibration.json").read_bytes()]


def _tune_seeds() -> list[bytes]:
    capability = assumed("none")
    text = tuneplan.tuning_matrix(
        tuneplan.Machine(None, capability), "tiny", preset("tiny"), (64, 128), 2, Settings()
    )
    matrix = matrices.parse_matrix(text, "tune-cpu.yaml")
    plan = plans.build_plan(matrix, only=[], capability=capability, settings=Settings())
    excluded = [{"cell_id": one.cell_id, "reason": one.reason} for one in plan.excluded]
    run = builders.make_run(plan.cells[:4], replicates=2, gpu=False)
    named = builders.with_manifest(
        run,
        matrix_name=matrix.name,
        matrix_text=text,
        matrix_sha256=matrix.sha256,
        excluded=excluded[:2],
    )
    return [_lines(named)]


def _pair_seeds() -> list[bytes]:
    sides = [_cut(RUNS / "h200-drop" / name) for name in pair.NAMES]
    return [PART.join(sides), PART.join([_run_seeds()[0]] * 2)]


def _exchange_seeds() -> list[bytes]:
    files = [path for path in sorted((DATA / "exchange").rglob("*.js*")) if path.is_file()]
    seeds = [path.read_bytes() for path in files]
    google = exchange.SourceFile("g", (DATA / "exchange" / "google.json").read_bytes())
    runs = exchange.READERS[exchange.ImportFormat.GOOGLE_BENCHMARK](
        [google], exchange.Stated()
    ).runs
    return [*seeds, exchange.data_js(runs).text.encode()]


def _verdict_seeds() -> list[bytes]:
    run = _green()
    red = judging.judge(
        builders.scale_rows(run, run.manifest.cells[0].cell_id, 0.5),
        builders.baseline_of(run),
        policy_of(run),
    )
    alone = judging.judge(run, None, policy_of(run))
    return [verdict_json.text(run, one).encode() for one in (red, alone)]


def _damaged_exchange(data: bytes, random: Random) -> bytes:
    """Inside the JSON of data.js, too, and of one line of many."""
    head, assigned, rest = data.partition(b"= ")
    if head.strip() == b"window.BENCHMARK_DATA":
        return head + assigned + mutations.of_json(rest, random)
    if data.startswith(b'{"reason"'):
        return mutations.of_json_lines(data, random)
    return mutations.of_json(data, random)


READERS: Mapping[str, Reader] = {
    "matrix": Reader(_matrix, cache(_matrix_seeds), mutations.of_yaml),
    "run": Reader(_run, cache(_run_seeds), mutations.of_json_lines),
    "compressed": Reader(_compressed, cache(_compressed_seeds), mutations.of_gzip),
    "baseline": Reader(_baseline, cache(_baseline_seeds), mutations.of_json),
    "calibration": Reader(_calibration, cache(_calibration_seeds), mutations.of_json),
    "tune": Reader(_tune, cache(_tune_seeds), mutations.of_json_lines),
    "exchange": Reader(_exchange, cache(_exchange_seeds), _damaged_exchange),
    "pair": Reader(_pair, cache(_pair_seeds), mutations.of_json_lines),
    "verdict": Reader(_verdict, cache(_verdict_seeds), mutations.of_json),
}
