"""What a policy lets go, as a pure function; and `perfbench prune`, which deletes on --yes."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from perfbench.commands import app
from perfbench.history.nouns import ChangeKind, ChangePoint, MeasuredValue, Triage, TriageKind
from perfbench.history.prune import PrunePolicy, StoredRun, to_prune
from perfbench.history.store import History
from tests.perfbench import builders
from tests.perfbench.digested import baseline_text
from tests.perfbench.history.made_runs import key, made_cell, made_run

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)  # a Sunday
CELL, OTHER = ("gate", "h200", "c0"), ("gate", "h200", "c1")


def days(count: float) -> timedelta:
    return timedelta(days=count)


def run(age: float, *cells: tuple[str, str, str], demonstration: bool = False) -> StoredRun:
    """Named after its age in days."""
    return StoredRun(f"{age:g}", NOW - days(age), frozenset(cells or (CELL,)), demonstration)


def left(ages: list[float], policy: PrunePolicy, kept: tuple[str, ...] = ()) -> list[float]:
    gone = to_prune([run(age) for age in ages], policy, NOW, kept)
    return [age for age in ages if f"{age:g}" not in gone]


def test_old_runs_go_the_oldest_first() -> None:
    runs = [run(age) for age in (3, 401, 399, 400, 500)]
    assert to_prune(runs, PrunePolicy(older_than=days(400)), NOW) == ["500", "401"]


def test_no_policy_keeps_everything() -> None:
    assert to_prune([run(1), run(9999)], PrunePolicy(), NOW) == []


def test_one_a_week_stays_after_a_while() -> None:
    """Of each ISO week the last run; the weeks before 90 days ago alone."""
    ages = [float(age) for age in range(150)]
    found = left(ages, PrunePolicy(weekly_after=days(90)))
    young, old = [a for a in found if a <= 90], [a for a in found if a > 90]
    assert young == ages[:91]
    # NOW is a Sunday, the last day of its ISO week, and so is every seventh day before
    assert old == [91.0, 98.0, 105.0, 112.0, 119.0, 126.0, 133.0, 140.0, 147.0]


def test_one_a_week_until_they_are_too_old() -> None:
    ages = [10.0, 91.0, 92.0, 98.0, 399.0, 406.0]
    policy = PrunePolicy(older_than=days(400), weekly_after=days(90))
    assert left(ages, policy) == [10.0, 91.0, 98.0, 399.0]


def test_the_newest_of_each_cell_stay() -> None:
    """However old; alone, all others go."""
    ages = [1.0, 2.0, 500.0, 600.0]
    assert left(ages, PrunePolicy(keep_last=3)) == [1.0, 2.0, 500.0]
    assert left(ages, PrunePolicy(older_than=days(400), keep_last=3)) == [1.0, 2.0, 500.0]
    assert left(ages, PrunePolicy(older_than=days(400), keep_last=1)) == [1.0, 2.0]


def test_a_run_stays_for_any_of_its_cells() -> None:
    runs = [run(1), run(2, CELL, OTHER), run(3, CELL, OTHER)]
    assert to_prune(runs, PrunePolicy(keep_last=1), NOW) == ["3"]
    weekly = PrunePolicy(weekly_after=days(90))
    runs = [run(91), run(92, CELL, OTHER), run(93, OTHER)]
    assert to_prune(runs, weekly, NOW) == ["93"]


def test_a_demonstration_keeps_no_place() -> None:
    runs = [run(1, demonstration=True), run(2), run(3)]
    assert to_prune(runs, PrunePolicy(keep_last=1), NOW) == ["3", "1"]
    runs = [run(91, demonstration=True), run(92), run(93)]
    assert to_prune(runs, PrunePolicy(weekly_after=days(90)), NOW) == ["93", "91"]


def test_what_is_named_stays() -> None:
    policy = PrunePolicy(older_than=days(400))
    assert left([500.0, 501.0, 502.0], policy, kept=("501",)) == [501.0]


# The command.


@pytest.fixture(autouse=True)
def _filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six daily runs of long ago; a baseline names one, a change point two, a decision one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PERFBENCH_HISTORY", raising=False)
    first = datetime(2020, 1, 1, tzinfo=UTC)
    with History.open("reports/history.sqlite", create=True) as history:
        for day in range(7):
            history.add(made_run(day, measured_utc=first + days(day)))
        change = ChangePoint(
            *(key(), ChangeKind.STEP, "run-002", "run-003", None, None, first + days(3)),
            *(-5.0, -6.0, -4.0, True),
        )
        assert history.report_changes([change])
        history.triage(Triage(TriageKind.NOTE, "run-005", "why", "me", NOW))
    base = builders.baseline_of(builders.make_run(builders.h100_cells()[:1]), run_id="run-000")
    path = Path("reports/baselines/h200/nightly.json")
    path.parent.mkdir(parents=True)
    path.write_text(baseline_text(base.model_dump(mode="json")))


def call(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = app.invoke(["prune", *argv])
    return code, *capsys.readouterr()


def there() -> list[str]:
    with History.open("reports/history.sqlite") as history:
        return sorted(one.run_id for one in history.runs(demonstrations=True))


def test_nothing_is_deleted_before_yes(capsys: pytest.CaptureFixture[str]) -> None:
    everything = there()
    code, out, err = call(capsys, "--older-than", "400d")
    assert code == 0 and out == (
        "run-001  nightly, h200\nrun-004  nightly, h200\nrun-006  nightly, h200\n"
    )
    assert err == "perfbench: 3 of 7 runs would go; --yes deletes them\n"
    assert there() == everything
    code, out, err = call(capsys, "--older-than", "400d", "--yes", "--json")
    assert json.loads(out) == {
        "deleted": True,
        "runs": ["run-001", "run-004", "run-006"],
        "of": 7,
    }
    assert there() == ["run-000", "run-002", "run-003", "run-005"]
    code, out, err = call(capsys, "--older-than", "400d")
    assert (code, out, err) == (0, "", "perfbench: 0 of 4 runs would go\n")


def test_the_newest_stay(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "--keep-last", "1", "--yes")[0] == 0
    assert there() == ["run-000", "run-002", "run-003", "run-005", "run-006"]


def test_runs_of_other_tools_have_other_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    """Each metric counts, since no run has to have all."""
    with History.open("reports/history.sqlite") as history:
        history.delete_runs(there())
        for day, metric in enumerate(("launches", "device_ms", "launches"), 10):
            one = {metric: MeasuredValue(1.0, count=1)}
            history.add(made_run(day, made_cell("c0", one), origin="asv"))
    assert call(capsys, "--keep-last", "1", "--yes")[0] == 0
    assert there() == ["run-012"]


def test_a_baseline_that_cannot_be_read_stops_it(capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody knows then which run it needs."""
    Path("reports/baselines/h200/nightly.json").write_text("{")
    code, out, err = call(capsys, "--older-than", "400d", "--yes")
    assert (code, out) == (9, "") and "nightly.json" in err
    assert len(there()) == 7


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "got no policy, wanted --older-than"),
        (("--older-than", "soon"), "--older-than: got 'soon', wanted a length of time"),
        (("--keep-weekly-after", "-9d"), "--keep-weekly-after: got '-9d'"),
        (("--keep-last", "0"), "--keep-last"),
        (("--older", "9d"), "No such option"),
    ],
)
def test_a_mistake_deletes_nothing(
    argv: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = call(capsys, *argv, "--yes")
    assert code == 2 and message in err and len(there()) == 7
