"""The variance between machine starts: put in and found again, bounded, shrunk, and carried into a
baseline.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from pathlib import Path

import pytest

from perfbench.calibration import between_starts
from perfbench.errors import Exit, PerfbenchError
from perfbench.gate import stats
from perfbench.records import calibration_file

Family = dict[str, dict[str, list[float]]]


def family(
    rng: random.Random,
    *,
    starts: int,
    session: float = 0.005,
    shared: bool = False,
    cells: int = 4,
) -> Family:
    """Five processes a start, 0.3 % between them."""
    of_start = [rng.gauss(0, session) for _ in range(starts)]
    return {
        f"cell{c}": {
            f"start{s}": [ln + rng.gauss(0, 0.003) for _ in range(5)]
            for s in range(starts)
            for ln in [of_start[s] if shared else rng.gauss(0, session)]
        }
        for c in range(cells)
    }


def test_two_starts_of_one_cell_by_hand() -> None:
    """Means 0.01 and 0.03: variance 2e-4, less the variance of the processes, 2e-6 / 2; one
    degree of freedom, chi2(5 %) = 0.00393.
    """
    (found,) = between_starts.estimate({"one": {"a": [0.009, 0.011], "b": [0.029, 0.031]}}).values()
    assert found.starts == 2 and found.df == 1
    assert found.own_variance == pytest.approx(2e-4 - 1e-6) and found.sd == pytest.approx(
        math.sqrt(1.99e-4)
    )
    assert found.upper == pytest.approx(math.sqrt(2e-4 / 0.0039321 - 1e-6), rel=1e-3)
    assert found.gate_sd == found.sd  # above what is assumed, though two starts bound nothing


def test_unequal_starts_count_by_their_means() -> None:
    """Processes 0.002 apart in a start of two (variance 2e-6), one process in the other: the noise
    is 2e-6 (1 / 2 + 1) / 2.
    """
    (found,) = between_starts.estimate({"one": {"a": [0.009, 0.011], "b": [0.03]}}).values()
    assert found.own_variance == pytest.approx(2e-4 - 1.5e-6)


def test_a_cell_of_one_start_tells_nothing() -> None:
    assert (
        between_starts.estimate({"one": {"a": [0.0, 0.1]}}) == {}
        and between_starts.estimate({}) == {}
    )
    assert between_starts.pooled_sd({}) is None


@pytest.mark.parametrize(
    "sd, upper, taken",
    [(0.002, 0.006, 0.006), (0.002, 0.05, 0.01), (0.015, 0.05, 0.015), (0.0, 0.0, 0.0)],
)
def test_the_gate_takes_the_bound_or_the_assumption_and_never_less_than_the_estimate(
    sd: float, upper: float, taken: float
) -> None:
    assert between_starts.gate_sd(sd, upper) == taken


def test_many_starts_find_what_was_put_in() -> None:
    found = between_starts.estimate(family(random.Random(1), starts=40)).values()
    assert statistics.mean(session.sd for session in found) == pytest.approx(0.005, rel=0.15)
    assert 0.005 < statistics.mean(session.upper for session in found) < 0.0065 and {
        session.starts for session in found
    } == {40}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("starts", [3, 5])
def test_the_bound_holds_for_most_families_of_few_starts(starts: int, shared: bool) -> None:
    rng = random.Random(7)
    held = [
        session.upper > 0.005
        for _ in range(200)
        for session in between_starts.estimate(family(rng, starts=starts, shared=shared)).values()
    ]
    assert sum(held) / len(held) > 0.84


def test_the_family_adds_what_a_cells_few_starts_do_not_show() -> None:
    """A cell whose three starts agree by chance is taken to vary as much as its like; alone it
    would look calm.
    """
    restless = family(random.Random(3), starts=3, cells=7)
    restless["close"] = {
        f"start{s}": [mean + deviation for deviation in (0.002, -0.002, 0.0)]
        for s, mean in enumerate((0.001, -0.001, 0.0))
    }
    alone, among = (
        between_starts.estimate({"close": restless["close"]})["close"],
        between_starts.estimate(restless)["close"],
    )
    assert alone.sd < 0.001 and among.sd > 0.002 and among.df > 2 * alone.df


def test_starts_that_agree_better_than_their_processes_bound_nothing_away() -> None:
    """Equal means of processes 0.2 % apart: the estimate is none, and the bound is that of the
    noise, not none.
    """
    (found,) = between_starts.estimate(
        {"one": {f"start{s}": [0.002, -0.002, 0.0] for s in range(3)}}
    ).values()
    noise = 4e-6 / 3  # of a mean of three
    assert found.sd == 0 and found.own_variance == pytest.approx(-noise)
    # chi2(5 %) of two degrees of freedom
    assert found.upper == pytest.approx(math.sqrt(noise * 2 / 0.102587 - noise), rel=1e-4)


def test_cells_that_vary_together_count_as_one() -> None:
    same = [{"a": 0.01, "b": -0.02, "c": 0.01}] * 4
    assert between_starts.independence(same, [1.0] * 4) == pytest.approx(1 / 4)
    # no start is good for all
    own = [
        {"a": x, "b": y, "c": -x - y}
        for x, y in ((1.0, -1.0), (-1.0, 1.0), (1.0, 0.0), (-1.0, 0.0))
    ]
    # the mean takes one of four
    assert between_starts.independence(own, [1.0] * 4) == pytest.approx(3 / 4)
    # no start in common
    assert (
        between_starts.independence([{"a": 1.0, "b": 0.0}, {"c": 1.0, "d": 0.0}], [1.0, 1.0])
        == 1 / 2
    )
    # nothing moves
    assert between_starts.independence([{"a": 1.0, "b": 1.0}] * 2, [1.0, 1.0]) == 1 / 2
    assert between_starts.independence([], []) == 1


def test_the_order_of_cells_and_starts_changes_nothing() -> None:
    cells = family(random.Random(2), starts=4)
    other = {name: dict(reversed(starts.items())) for name, starts in reversed(cells.items())}
    assert between_starts.estimate(cells) == between_starts.estimate(other)


# --- read back


HERE = {
    "gpu_slug": "h200",
    "device_name": "NVIDIA H200",
    "driver": "580.1",
    "cuda": "13.0",
    "torch": "2.11.0",
    "triton": "3.6.0",
}
CONFIGS = {"both": "b0" * 32, "wall": "a1" * 32, "none": "00" * 32, "new": "11" * 32}


def stored(path: Path, **changes: object) -> Path:
    session = {"starts": 3, "gate_sd": 0.004, "sd": 0.001}
    cells = [
        {
            "cell_id": "both",
            "config_sha256": CONFIGS["both"],
            "night": session,
            "device_night": {"starts": 2, "gate_sd": 0.002},
        },
        {
            "cell_id": "wall",
            "config_sha256": CONFIGS["wall"],
            "night": session,
            "device_night": None,
        },
        {"cell_id": "none", "config_sha256": CONFIGS["none"], "night": None, "device_night": None},
        {"cell_id": "gone", "config_sha256": "22" * 32, "night": session, "device_night": None},
    ]
    path.write_text(
        json.dumps({"gpu_slug": "h200", "environment": HERE, "cells": cells, "seed": 1, **changes})
    )
    return path


def one_cell(times: int = 1, **session: float) -> str:
    cell = {"cell_id": "a", "night": {"starts": 3, **session}, "device_night": None}
    return json.dumps({"gpu_slug": "h200", "cells": times * [cell]})


def test_what_the_gate_needs_is_read_back(tmp_path: Path) -> None:
    """Skips cells that the run does not have, and cells that the calibration does not know."""
    assert calibration_file.variance_of_cells(
        calibration_file.read_calibration(stored(tmp_path / "calibration.json"), "h200"),
        HERE,
        CONFIGS,
    ) == {
        "both": {"night_log_sd": 0.004, "device_night_log_sd": 0.002, "night_starts": 2},
        "wall": {"night_log_sd": 0.004, "device_night_log_sd": None, "night_starts": 3},
    }


@pytest.mark.parametrize(
    "text, slug, words",
    [
        (None, "h200", "cannot be read: No such file"),
        ("{", "h200", "is no calibration"),
        ('{"gpu_slug": "h200"}', "h200", "is no calibration: cells: Field required"),
        (
            one_cell(gate_sd=-1),
            "h200",
            "no calibration: cells.0.night.gate_sd: Input should be greater than 0",
        ),
        (
            one_cell(gate_sd=0.0),
            "h200",
            "no calibration: cells.0.night.gate_sd: Input should be greater than 0",
        ),
        (
            one_cell(gate_sd=5.0),
            "h200",
            "no calibration: cells.0.night.gate_sd: Input should be less than or equal to 0.5",
        ),
        (one_cell(times=2, gate_sd=0.004), "h200", "got cell 'a' twice, wanted each once"),
        (
            (
                '{"gpu_slug": "h200", "cells": [{"cell_id": "a", "night": {"starts": 1, "gate_sd":'
                ' 0}, "device_night": null}]}'
            ),
            "h200",
            "no cal",
        ),
        (
            '{"gpu_slug": "h100", "cells": []}',
            "h200",
            "got a calibration of h100, wanted one of h200",
        ),
        (
            (
                '{"gpu_slug": "h200", "cells": [{"cell_id": "a", "night": null, "device_night":'
                " null}]}"
            ),
            "h200",
            "one machine start, wanted two",
        ),
    ],
)
def test_what_tells_no_between_session_variance_is_refused(
    text: str | None, slug: str, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "calibration.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(PerfbenchError, match=words) as caught:
        calibration_file.read_calibration(path, slug)
    message = str(caught.value)
    assert (
        caught.value.exit_code is Exit.USAGE
        and "\n" not in message
        and "Next: perfbench calibrate" in message
    )


def test_the_largest_variation_that_a_baseline_takes(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(one_cell(gate_sd=0.5))
    assert set(calibration_file.read_calibration(path, "h200").cells) == {"a"}


@pytest.mark.parametrize(
    "environment, configs, words",
    [
        (
            {"torch": "2.13.0"},
            CONFIGS,
            "got a calibration with torch 2.11.0, wanted 2.13.0 as in the run",
        ),
        ({"triton": None}, CONFIGS, "got a calibration with triton 3.6.0, wanted none"),
        (
            {"device_name": "NVIDIA H200 NVL"},
            CONFIGS,
            "with device_name NVIDIA H200, wanted NVIDIA H200 NVL",
        ),
        (
            {"flash_provider": "flash-attn 2.8"},
            CONFIGS,
            "with flash_provider unknown, wanted flash-attn 2.8",
        ),
        (
            {},
            {**CONFIGS, "wall": "ff" * 32},
            "got config a1a1a1a1a1a1 of wall, wanted ffffffffffff",
        ),
        ({}, {"new": "11" * 32, "none": "00" * 32}, "knows no cell of the run: got 3 others"),
    ],
)
def test_a_calibration_of_other_work_or_another_environment_is_refused(
    environment: dict[str, str | None], configs: dict[str, str], words: str, tmp_path: Path
) -> None:
    known = calibration_file.read_calibration(stored(tmp_path / "calibration.json"), "h200")
    with pytest.raises(PerfbenchError, match=words) as caught:
        calibration_file.variance_of_cells(known, {**HERE, **environment}, configs)
    message = str(caught.value)
    assert (
        caught.value.exit_code is Exit.USAGE
        and "\n" not in message
        and "Next: perfbench calibrate" in message
    )


def test_another_driver_is_no_other_machine(tmp_path: Path) -> None:
    known = calibration_file.read_calibration(stored(tmp_path / "calibration.json"), "h200")
    assert (
        calibration_file.variance_of_cells(known, {**HERE, "driver": "590.2"}, CONFIGS)
        == calibration_file.variance_of_cells(known, HERE, CONFIGS)
        != {}
    )


def test_a_file_of_an_earlier_perfbench_says_so(tmp_path: Path) -> None:
    cell = {"cell_id": "wall", "night": {"starts": 3, "gate_sd": 0.004}, "device_night": None}
    known = calibration_file.read_calibration(
        stored(tmp_path / "calibration.json", cells=[cell]), "h200"
    )
    with pytest.raises(
        PerfbenchError, match=r"got no config \(an earlier perfbench wrote it\) of wall"
    ):
        calibration_file.variance_of_cells(known, HERE, CONFIGS)


def test_the_assumption_is_what_the_gate_assumes() -> None:
    assert between_starts.gate_sd(0.0, 1.0) == stats.ASSUMED_BETWEEN_SESSION_SD
