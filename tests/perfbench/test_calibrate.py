"""The certificate against known noise, and the calibration of runs whose noise was put in."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from perfbench.calibration import calibrate, certify, simulate, write_calibration
from perfbench.calibration import calibration_json as as_json
from perfbench.calibration import render_calibration as render
from perfbench.calibration.certify import Effort, Rate, uniformity
from perfbench.commands import app, console, outcome
from perfbench.commands.calibrate import certify as certify_command
from perfbench.errors import Exit, PerfbenchError
from perfbench.gate import stats
from perfbench.matrix import matrix as matrices
from perfbench.matrix.policy import GatePolicy, Policies
from perfbench.records.calibration_file import read_calibration, variance_of_cells
from perfbench.records.cells import Cell
from perfbench.records.rows import Run
from tests.perfbench.builders import (
    environment,
    make_run,
    planned_cell,
    profile,
    replicate,
    small_run,
    speed_of,
    with_manifest,
    with_rows,
)
from tests.perfbench.digested import write_run
from tests.perfbench.disk import full

POLICY = GatePolicy()
LITTLE = Effort(null_cell_sessions=24, null_alone=24, drops=6, claimed_drops=24, mode_trials=4)


@pytest.fixture(autouse=True)
def _few_worlds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certify, "WORLDS", simulate.WORLDS[:1])


def noisy(
    run_id: str,
    rng: random.Random,
    *,
    replicates: int = 6,
    within: float = 0.01,
    session: float = 0.02,
    cells: int = 12,
) -> Run:
    """One start: every cell deviates by itself for the session, and so does every process."""
    planned = [planned_cell(Cell("train", 1024 * (i + 1), "dense", "auto")) for i in range(cells)]
    rows = []
    for cell in planned:
        speed = speed_of(cell) * (1 + rng.gauss(0, session))
        for n in range(replicates):
            rows.append(
                replicate(cell, n, tok_per_s=speed * (1 + rng.gauss(0, within)), host_bound=False)
            )
    return with_manifest(with_rows(make_run(planned, replicates=replicates), rows), run_id=run_id)


def saved(folder: Path, runs: Sequence[Run]) -> list[Path]:
    paths = []
    for number, run in enumerate(runs):
        path = folder / f"{number}.jsonl"
        write_run(path, run)
        paths.append(path)
    return paths


def test_bounds_of_clopper_and_pearson() -> None:
    """The design's own numbers: 2,996 silent sessions claim 0.1 %, 299 caught drops claim 99 %; 3
    of 10 from a printed table.
    """
    assert Rate(0, 2995).upper < 0.001001 and Rate(0, 2900).upper > 0.001
    assert Rate(299, 299).lower == pytest.approx(0.99, abs=1e-4)
    assert (Rate(3, 10).lower, Rate(3, 10).upper) == (
        pytest.approx(0.0873, abs=1e-4),
        pytest.approx(0.6066, abs=1e-4),
    )
    assert (Rate(0, 5).lower, Rate(5, 5).upper) == (0.0, 1.0)


def test_uniformity_tells_a_uniform_sample_from_another() -> None:
    even = [(i + 0.5) / 1000 for i in range(1000)]
    assert uniformity(even)[0] == pytest.approx(0.0005) and uniformity(even)[1] > 0.999
    assert uniformity([p * p for p in even])[1] < 1e-6


def test_each_block_is_one_abba_and_one_baab() -> None:
    base, candidate = simulate.in_turns(400, 1, "cell")
    seen = set()
    for pair in range(0, 400, 4):
        sides = dict.fromkeys(base[pair : pair + 4], "a")
        sides |= dict.fromkeys(candidate[pair : pair + 4], "b")
        seen.add("".join(sides[place] for place in range(2 * pair, 2 * pair + 8)))
    assert seen == {"abbabaab", "baababba"}


def test_the_rule_keeps_its_two_promises_on_gpu_bound_cells() -> None:
    """Few sessions, so with room; the report has the many."""
    world = simulate.WORLDS[0]
    null = simulate.simulate(world, POLICY, sessions=40, seed=(7, 0))
    drops = simulate.simulate(world, POLICY, sessions=80, seed=(7, 1), drop_pct=3.0)
    assert sum(tally.sessions for tally in null.values()) == 480
    assert sum(tally.outcomes["REGRESSED"] for tally in null.values()) == 0
    found = [tally.outcomes["REGRESSED"] / tally.sessions for tally in drops.values()]
    assert min(found) > 0.95 and sum(found) / 3 > 0.98
    # what significance alone would have looked at
    assert all(tally.significant < 0.9 * tally.sessions for tally in drops.values())


def test_a_screen_by_significance_alone_would_miss_the_goal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The certificate can fail: with the usual screen it does."""
    monkeypatch.setattr(
        stats, "screened", lambda comparison, policy: comparison.p_slower < policy.alpha_screen
    )
    drops = simulate.simulate(simulate.WORLDS[0], POLICY, sessions=40, seed=(7, 1), drop_pct=3.0)
    assert sum(tally.outcomes["REGRESSED"] for tally in drops.values()) < 0.9 * sum(
        tally.sessions for tally in drops.values()
    )


def test_host_bound_cells_are_blind_and_never_red() -> None:
    world = next(world for world in simulate.WORLDS if world.name == "host bound")
    for tally in simulate.simulate(world, POLICY, sessions=5, seed=(1,), drop_pct=3.0).values():
        assert tally.outcomes["BLIND"] > 0.8 * tally.sessions and tally.outcomes["REGRESSED"] == 0


def test_a_session_is_judged_alone_when_the_family_is_one_cell() -> None:
    base = [[0.0, 0.001, -0.001, 0.002, -0.002]]
    slower = [[x - 0.1 for x in base[0]]]
    pairs = [[0.0005 * (-1) ** i for i in range(stats.MAX_PAIRS)]]
    (judged,) = simulate.judge_session(
        base,
        slower,
        (pairs, [[x - 0.05 - 0.0001 * (i % 3) for i, x in enumerate(pairs[0])]]),
        0.0,
        POLICY,
    )
    assert judged.outcome == "REGRESSED" and judged.screened and judged.pairs == 40


@pytest.mark.parametrize(("within", "noisier"), [(0.001, False), (0.05, True)])
def test_a_machine_that_is_noisier_than_the_claim_is_named_next_to_it(
    within: float, noisier: bool, tmp_path: Path
) -> None:
    runs = [noisy(f"run-{n}", random.Random(n), within=within) for n in range(2)]
    text = headline(render(calibrate(saved(tmp_path, runs), seed=1, policy=POLICY, effort=LITTLE)))
    assert ("**This machine is noisier than that claim: " in text) is noisier


def test_noise_that_was_put_in_comes_out(tmp_path: Path) -> None:
    rng = random.Random(5)
    paths = saved(tmp_path, [noisy(f"run-{n}", rng) for n in range(4)])
    found = calibrate(paths, seed=1, policy=POLICY, effort=LITTLE)
    assert (
        len(found.starts) == 4
        and {cell.starts for cell in found.cells} == {4}
        and {cell.within_df for cell in found.cells} == {20}
    )
    moderated = [cell.moderated_sd_pct for cell in found.cells if cell.moderated_sd_pct is not None]
    assert len(moderated) == 12 and sum(moderated) / 12 == pytest.approx(1.0, rel=0.15)
    assert found.between_start_sd_pct["GPU bound"] == pytest.approx(2.0, rel=0.35)
    assert all(
        cell.blocks is not None and cell.judged_drop_pct == 3 and cell.tolerance_pct == 1
        for cell in found.cells
    )
    assert found.screened.trials == 36 and found.red == Rate(0, 48)


def test_each_cell_reports_its_variance_between_starts_and_the_baseline_takes_it(
    tmp_path: Path,
) -> None:
    rng = random.Random(5)
    runs = [noisy(f"run-{n}", rng, session=0.003, within=0.002) for n in range(6)]
    out = tmp_path / "calibration.md"
    found = calibrate(saved(tmp_path, runs), seed=1, policy=POLICY, effort=LITTLE)
    write_calibration(out, found)
    sessions = [cell.between_starts for cell in found.cells if cell.between_starts is not None]
    assert len(sessions) == 12 and {session.starts for session in sessions} == {6}
    assert sum(session.sd for session in sessions) / 12 == pytest.approx(0.003, rel=0.35)
    assert all(session.sd < session.gate_sd < 0.01 for session in sessions)
    manifest = runs[0].manifest
    configs = {cell.cell_id: cell.config_sha256 for cell in manifest.cells}
    taken = variance_of_cells(
        read_calibration(out.with_suffix(".json"), "h100-80gb-hbm3"),
        manifest.environment.fingerprint(),
        configs,
    )
    assert taken == {
        cell.cell_id: {
            "night_log_sd": cell.between_starts.gate_sd,
            "device_night_log_sd": cell.device_between_starts.gate_sd
            if cell.device_between_starts
            else None,
            "night_starts": 6,
        }
        for cell in found.cells
        if cell.between_starts
    }


def test_device_time_has_a_variance_of_its_own(tmp_path: Path) -> None:
    """20 ms on the device, 4 % apart between two starts, the same for all processes of a start: sd
    4 % / sqrt(2).
    """
    runs = []
    for n in range(2):
        run = noisy(f"run-{n}", random.Random(n), cells=1)
        rows = [
            row.model_copy(update={"profile": profile(device_time_s=0.02 * (1 + 0.04 * n))})
            for row in run.replicates
        ]
        runs.append(with_rows(run, rows))
    (cell,) = calibrate(saved(tmp_path, runs), seed=1, policy=POLICY, effort=LITTLE).cells
    assert (
        cell.device_between_starts is not None
        and cell.device_between_starts.sd == pytest.approx(math.log(1.04) / math.sqrt(2), rel=1e-3)
    )
    assert cell.device_sd_pct == pytest.approx(0, abs=1e-9)


def test_the_report_names_the_gpu_its_starts_and_both_kinds_of_sd(tmp_path: Path) -> None:
    """Nothing in it is of one GPU only."""
    here = environment(gpu_slug="h200-141gb-hbm3e", device_name="NVIDIA H200")
    runs = [
        with_manifest(noisy(f"run-{n}", random.Random(n), cells=2), environment=here)
        for n in range(3)
    ]
    found = calibrate(saved(tmp_path, runs), seed=1, policy=POLICY, effort=LITTLE)
    text = render(found)
    assert (
        "**The machine: 3 machine starts** of NVIDIA H200" in text
        and "NVIDIA H200 (h200-141gb-hbm3e), 3 machine starts" in text
    )
    assert [line for line in text.splitlines() if line.startswith("| run-")] == [
        f"| run-{n} | abababab | 2 | 12 |" for n in range(3)
    ]
    (line,) = [
        line for line in text.splitlines() if "seq_len=1024," in line and "| tok/s | 3 |" in line
    ]
    session = found.cells[0].between_starts
    assert session is not None and f"| {100 * session.sd:.2f} | {100 * session.upper:.2f} |" in line
    assert line.endswith(f"| {100 * session.gate_sd:.2f} |")
    assert f"{found.screened.hits} of 4 (at most " in text and "confirmed" in text


def test_a_machine_noisier_than_the_worlds_says_that_they_are_not_it(tmp_path: Path) -> None:
    for within, said in ((0.005, False), (0.03, True)):
        runs = [noisy(f"run-{n}", random.Random(n), within=within) for n in range(2)]
        assert (
            "Noisier than the certified worlds"
            in render(calibrate(saved(tmp_path, runs), seed=1, policy=POLICY, effort=LITTLE))
        ) is said


def test_a_restless_cell_is_blind_with_a_drop_that_it_can_judge(tmp_path: Path) -> None:
    paths = saved(tmp_path, [noisy(f"run-{n}", random.Random(n), within=0.10) for n in range(2)])
    found = calibrate(paths, seed=1, policy=POLICY, effort=LITTLE)
    for cell in found.cells:
        assert (
            cell.blocks is None
            and cell.judged_drop_pct is not None
            and 6 < cell.judged_drop_pct < 20
        )
        assert cell.tolerance_pct == pytest.approx(cell.judged_drop_pct / 3)
    assert "| BLIND |" in render(found)


def test_the_overrides_of_blind_cells_are_a_matrix_s(tmp_path: Path) -> None:
    """The printed lines, under a matrix of these cells: each is judged for a drop that the pairs
    can show, a third of it tolerated.
    """
    noise = [0.10, 0.002]
    runs = []
    for n in range(2):
        restless, calm = (
            noisy(f"run-{n}", random.Random(n), within=within, cells=3) for within in noise
        )
        last = restless.manifest.cells[2].cell_id
        rows = [row for row in restless.replicates if row.cell_id != last] + [
            row for row in calm.replicates if row.cell_id == last
        ]
        runs.append(with_rows(restless, rows))
    found = calibrate(saved(tmp_path, runs), seed=1, policy=POLICY, effort=LITTLE)
    text = render(found)
    block = text.split("```yaml\n")[1].split("```")[0]
    matrix = matrices.parse_matrix(
        "version: 1\nname: small\ntarget: {gpu: none}\nmodel: tiny\n"
        "axes: {workload: [train], seq_len: [1024, 2048, 3072], path: [dense], batch: [1, 2]}\n"
        + block,
        "small.yaml",
    )
    blind = {cell.cell_id: cell for cell in found.cells if cell.blocks is None}
    # no cell of batch 2, none that is not BLIND
    assert len(blind) == 2 and set(matrix.by_cell) == set(blind)
    for cell_id, cell in blind.items():
        policy = matrices.policies(matrix).of(cell_id)
        assert (
            cell.judged_drop_pct is not None
            and cell.judged_drop_pct <= policy.min_effect_pct < cell.judged_drop_pct + 0.1
        )
        assert policy.tolerance_pct == pytest.approx(policy.min_effect_pct / 3, rel=0.01)
    again = calibrate(saved(tmp_path, runs), seed=1, policy=policy, effort=LITTLE)
    # with its override it is not BLIND
    assert next(cell for cell in again.cells if cell.cell_id == cell_id).blocks is not None


def test_no_blind_cell_no_override(tmp_path: Path) -> None:
    text = render(
        calibrate(
            saved(tmp_path, [noisy("only", random.Random(1), within=0.002)]),
            seed=1,
            policy=POLICY,
            effort=LITTLE,
        )
    )
    assert "so no `overrides:`." in text and "```yaml" not in text


def headline(text: str) -> str:
    return text.split("## The rule")[0]


def power_row(
    name: str, sd_pct: float, hits: int, *, blind: int = 0, drop_pct: float = 3.0
) -> certify.PowerRow:
    world = simulate.World(name, (sd_pct,))
    every = Rate(1000, 1000)
    return certify.PowerRow(
        world, sd_pct, drop_pct, Rate(hits, 1000), every, every, Rate(blind, 1000), 9.0
    )


def test_the_headline_says_which_worlds_miss_the_wanted_power(tmp_path: Path) -> None:
    found = calibrate(
        saved(tmp_path, [noisy("only", random.Random(1))]), seed=1, policy=POLICY, effort=LITTLE
    )
    best = [
        certify.PowerRow(
            simulate.WORLDS[0], 0.93, 3.0, Rate(2490, 2500), Rate(9, 9), Rate(9, 9), Rate(0, 9), 9.0
        )
    ]
    others = [
        power_row("noisy sessions", 0.34, 929),
        power_row("noisy sessions", 0.93, 925),
        power_row("heavy tails", 1.0, 957),
        power_row("heavy tails", 0.5, 990),
        power_row("host bound", 7.3, 0, blind=1000),
        power_row("hardly measured", 1.0, 991),
        power_row("small drops", 1.0, 300, drop_pct=1.0),
        power_row("good", 1.0, 1000),
    ]
    text = headline(
        render(
            dataclasses.replace(
                found, certificate=dataclasses.replace(found.certificate, power=best + others)
            )
        )
    )
    assert 'in the world "GPU bound" alone: 2,490 of 2,500 drops**' in text
    missed, blind, open_ = (line for line in text.splitlines() if "of the 6 worlds" in line)
    assert "99.00 % is missed in 2 of the 6 worlds**" in missed
    assert missed.endswith(
        ': "noisy sessions" 92.5 % (925 of 1,000, sd 0.93 %); "heavy tails" 95.7 % (957 of 1,000,'
        " sd 1 %)."
    )
    assert (
        "BLIND on wall time in 1 of the 6 worlds" in blind
        and '"host bound" 100 % (1,000 of 1,000, sd 7.3 %)' in blind
    )
    assert 'in 1 of the 6 worlds: "hardly measured" 99.10 % (991 of 1,000' in open_
    assert "small drops" not in text and "good" not in text
    alone = headline(
        render(
            dataclasses.replace(
                found, certificate=dataclasses.replace(found.certificate, power=best)
            )
        )
    )
    assert "is reached in every one of the 1 worlds" in alone and "missed" not in alone


def test_the_headline_says_that_no_confirmation_was_judged_here(tmp_path: Path) -> None:
    """Two processes of a cell and start are not two pairs."""
    for replicates, judged in ((2, False), (3, False), (6, True)):
        runs = [noisy(f"run-{n}", random.Random(n), replicates=replicates) for n in range(2)]
        text = headline(
            render(calibrate(saved(tmp_path, runs), seed=1, policy=POLICY, effort=LITTLE))
        )
        assert ("**No confirmation was judged in these runs: 0 of 0.**" in text) is not judged
        assert (f"With {replicates} processes of a cell and start" in text) is not judged
        assert ("an A/A by interleaved pairs has not run in them" in text) is not judged
        assert ("an A/A of two checkouts by interleaved pairs is not in it" in text) is judged and (
            "0 of 24 REGRESSED" in text
        ) is judged
        assert "**No real pair was given**" in text and "no kernel got slower" in text


@pytest.mark.parametrize(
    "name, written",
    [("new", "new/calibration.md"), ("deep/new", "deep/new/calibration.md"), ("a/b.md", "a/b.md")],
)
def test_a_name_without_suffix_is_a_folder(
    name: str, written: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certify, "Effort", lambda: LITTLE)
    monkeypatch.setattr(outcome, "policy_of", lambda run: Policies(POLICY))
    certify_command(saved(tmp_path, [noisy("only", random.Random(1), cells=1)]), 1, tmp_path / name)
    out = tmp_path / written
    assert (
        out.read_text().startswith("# Calibration")
        and json.loads(out.with_suffix(".json").read_text())["seed"] == 1
    )
    assert sum(path.is_file() for path in tmp_path.rglob("*")) == 3


def test_another_suffix_is_refused_before_anything_is_simulated(tmp_path: Path) -> None:
    with pytest.raises(
        PerfbenchError, match=r"wanted a folder or a \.md file\. Next: --out .*/found$"
    ) as caught:
        certify_command([tmp_path / "none.jsonl"], 1, tmp_path / "found.json")
    assert caught.value.exit_code is Exit.USAGE


def test_one_run_does_what_it_can_and_says_so(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "calibration.md"
    runs = saved(tmp_path, [noisy("only", random.Random(1))])
    found = calibrate(runs, seed=1, policy=POLICY, effort=LITTLE)
    write_calibration(out, found)
    text, data = out.read_text(), json.loads(out.with_suffix(".json").read_text())
    assert found.between_start_sd_pct == {"GPU bound": None} and found.screened == Rate(0, 0)
    assert (
        "**The machine: 1 machine start** of" in text
        and "give more runs of one commit" in text
        and "nan" not in text.lower()
    )
    assert data["certificate"]["seed"] == 1 and data["cells"][0]["night"] is None
    assert data["certificate"]["null"][0]["red"]["upper"] == pytest.approx(Rate(0, 24).upper)


def test_cards_of_one_run_are_starts_of_their_own(tmp_path: Path) -> None:
    run = noisy("two-cards", random.Random(2))
    rows = [
        row.model_copy(update={"device_uuid_sha256": "cd" * 32 if row.replicate > 2 else "ab" * 32})
        for row in run.replicates
    ]
    assert (
        len(
            calibrate(
                saved(tmp_path, [with_rows(run, rows)]), seed=1, policy=POLICY, effort=LITTLE
            ).starts
        )
        == 2
    )


def test_the_same_inputs_give_the_same_bytes(tmp_path: Path) -> None:
    paths = saved(tmp_path, [noisy(f"run-{n}", random.Random(n)) for n in range(2)])
    one, two = (calibrate(paths, seed=3, policy=POLICY, effort=LITTLE) for _ in range(2))
    assert (as_json(one), render(one)) == (as_json(two), render(two))
    turned = calibrate(paths[::-1], seed=3, policy=POLICY, effort=LITTLE)
    assert (as_json(turned), render(turned)) == (as_json(one), render(one))
    other = calibrate(paths, seed=4, policy=POLICY, effort=LITTLE)
    assert as_json(other) != as_json(one)


def _refused(tmp_path: Path, runs: Sequence[Run], match: str) -> None:
    with pytest.raises(PerfbenchError, match=match) as caught:
        calibrate(saved(tmp_path, runs), seed=1, policy=POLICY, effort=LITTLE)
    assert caught.value.exit_code is Exit.USAGE and "\n" not in str(caught.value)


def test_what_is_not_a_against_a_is_refused(tmp_path: Path) -> None:
    run = small_run(replicates=3)
    code = run.manifest.source.model_copy(update={"commit": "0" * 40})
    _refused(tmp_path, [], "got no run")
    _refused(tmp_path, [small_run(replicates=1)], "at most 1 usable replicates .* processes: 5")
    _refused(tmp_path, [run, run], "named twice")
    _refused(tmp_path, [run, with_manifest(run, run_id="b", source=code)], "needs the same code")
    _refused(
        tmp_path,
        [run, with_manifest(run, run_id="b", environment=environment(torch="2.14.0"))],
        "another environment",
    )
    work = [cell.model_copy(update={"config_sha256": "0" * 64}) for cell in run.manifest.cells]
    _refused(
        tmp_path,
        [run, with_manifest(run, run_id="b", cells=work)],
        "needs the same work: name runs of one matrix",
    )
    _refused(
        tmp_path, [with_manifest(run, injections=["slowdown=10%@all"])], "measure without --inject"
    )


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run that `calibrate` takes, and little effort to certify it with."""
    monkeypatch.setattr(certify, "Effort", lambda: LITTLE)
    monkeypatch.setattr(outcome, "policy_of", lambda run: Policies(POLICY))
    (path,) = saved(tmp_path, [noisy("only", random.Random(1), cells=1)])
    return str(path)


@pytest.mark.parametrize(
    ("options", "begins"), [((), "# Calibration"), (("--json",), "{")], ids=["md", "json"]
)
def test_the_report_is_printed_before_it_is_written(
    stored: str,
    options: tuple[str, ...],
    begins: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Minutes of simulation are not lost to a folder that cannot be made."""
    (tmp_path / "file").write_text("")
    to = tmp_path / "file" / "calibration.md"
    assert app.invoke(["calibrate", stored, "--out", str(to), *options]) == Exit.USAGE
    out, err = capsys.readouterr()
    assert out.startswith(begins) and f"{to} cannot be written" in err and "Traceback" not in err


def test_a_full_disk_leaves_the_report_that_was_there(
    stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tmp_path / "calibration.md"
    before.write_text("of yesterday")
    full(monkeypatch)
    assert app.invoke(["calibrate", stored, "--out", str(before)]) == Exit.USAGE
    out, err = capsys.readouterr()
    assert out.startswith("# Calibration") and "No space left" in err
    assert before.read_text() == "of yesterday"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.jsonl", "calibration.md"]


def test_a_full_stdout_leaves_the_files(
    stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def echo(text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(console.typer, "echo", echo)
    monkeypatch.setattr(console, "drop_stdout", lambda: None)
    assert app.invoke(["calibrate", stored, "--out", str(tmp_path / "found")]) == Exit.USAGE
    assert "stdout cannot be written" in capsys.readouterr().err
    assert sorted(path.name for path in (tmp_path / "found").iterdir()) == [
        "calibration.json",
        "calibration.md",
    ]
