"""The commit that made a cell slower: which one is measured next, what a step decides, how often
the whole procedure is right, and the command.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from scipy.stats import binom

from perfbench.commands import app, outcome
from perfbench.errors import PerfbenchError
from perfbench.gate import LOOKS, SoughtDrop, StepTurn
from perfbench.gate.bisection import decide_step
from perfbench.runner.ab import schedule
from perfbench.runner.ab.bisect import Ending, find_first_bad
from perfbench.runner.ab.commits import Commit, CommitRange, commits_between, touching
from perfbench.runner.ab.halving import Halving
from perfbench.tracing import Tracing
from tests.perfbench import repositories
from tests.perfbench.ab_bench import LONG, MATRIX, SHORT
from tests.perfbench.bisect_bench import marked_plan, marked_sides
from tests.perfbench.repositories import git, worktrees
from tools.bisect_drawn import POLICY, DrawnPairs, drawn_bisect, line

# ---- the whole procedure, drawn


def test_a_drop_of_3_pct_in_1_pct_of_noise_is_found_among_64_commits() -> None:
    """1,000 bisects: at least as many are right as a procedure that is right in 99 % of them
    reaches with all but one chance in 1,000, and none names another commit.
    """
    right = wrong = 0
    for seed in range(1000):
        result, planted = drawn_bisect(seed, lambda rng: {rng.randrange(1, 65): 0.03})
        if result.first_bad is not None:
            is_right = int(result.first_bad.sha[1:]) in planted
            right, wrong = right + is_right, wrong + (not is_right)
    assert right >= binom.ppf(0.001, 1000, POLICY.power) and wrong == 0


def two(first: float, second: float, rng: random.Random) -> dict[int, float]:
    one, other = sorted(rng.sample(range(1, 65), 2))
    return {one: first, other: second}


@pytest.mark.parametrize(
    ("first", "second"),
    [(0.03, 0.03), (0.02, 0.02), (0.02, 0.04), (0.06, -0.03)],
    ids=["two drops", "two small drops", "unlike drops", "recovered in part"],
)
def test_one_drop_of_a_history_of_two_changes_is_named(first: float, second: float) -> None:
    named = 0
    for seed in range(100):
        result, planted = drawn_bisect(seed, lambda rng: two(first, second, rng))
        if result.first_bad is not None:
            named += 1
            assert planted.get(int(result.first_bad.sha[1:]), 0.0) > 0
    assert named >= binom.ppf(0.001, 100, POLICY.power)


def test_a_drop_that_later_commits_recovered_is_none_to_bisect() -> None:
    for seed in range(30):
        result, _ = drawn_bisect(seed, lambda rng: two(0.06, 1 - 1 / 0.94, rng))
        assert result.ending is Ending.NOT_SLOWER


def test_a_slow_drift_names_no_commit() -> None:
    for seed in range(30):
        result, _ = drawn_bisect(seed, lambda rng: dict.fromkeys(range(1, 65), 0.001))
        assert result.ending in (Ending.NOT_CONFIRMED, Ending.RANGE)


def test_without_a_drop_nothing_is_bisected() -> None:
    endings = [drawn_bisect(seed, lambda rng: {})[0] for seed in range(100)]
    assert all(one.ending is Ending.NOT_SLOWER and not one.steps for one in endings)


def test_a_wrong_turn_is_not_named() -> None:
    """The whole drop is measured, a step is answered wrongly, and the last pair refuses."""
    found = line([f"t{number}" for number in range(9)])
    levels = {f"c{number}": -0.05 if number >= 6 else 0.0 for number in range(9)}

    class Wrong(DrawnPairs):
        def step(self, name, base, candidate, drop):  # type: ignore[no-untyped-def]
            one = super().step(name, base, candidate, drop)
            return one if candidate.sha != "c4" else type(one)(StepTurn.BAD, "wrong", one.change)

    result = find_first_bad(found, Wrong(levels, 0.001, random.Random(1)), POLICY, print)
    assert result.ending is Ending.NOT_CONFIRMED and result.first_bad is None


# ---- which commit is next


def test_commits_that_leave_the_package_alone_are_never_measured() -> None:
    """Of 64 commits 4 change it: two steps, and the one that is named changed it."""
    trees = ["t0"] + [f"t{1 + number // 16}" for number in range(64)]
    drop = {f"c{number}": -0.05 if number > 32 else 0.0 for number in range(65)}
    measurer = DrawnPairs(drop, 0.001, random.Random(0))
    result = find_first_bad(line(trees), measurer, POLICY, lambda text: None)
    assert (result.ending, result.left[0].sha) == (Ending.FOUND, "c33")
    assert len(measurer.measured) == 2 == Halving(line(trees)).num_steps
    assert {*measurer.measured} <= {"c1", "c17", "c33", "c49"}


def test_a_revert_is_known_by_its_package() -> None:
    """Good, broken, reverted, broken again as before: the package of each is known, so nothing is
    measured, and the newest is the one.
    """
    halving = Halving(line(["good", "slow", "good", "slow"]))
    assert halving.next() is None and [one.sha for one in halving.left] == ["c3"]


def test_skipped_commits_are_passed_by_and_leave_a_range() -> None:
    levels = {f"c{number}": -0.05 if number >= 6 else 0.0 for number in range(9)}
    found = line([f"t{number}" for number in range(9)])

    def bisect(*broken: str) -> tuple[Ending, list[str]]:
        measurer = DrawnPairs(levels, 0.001, random.Random(0), frozenset(broken))
        result = find_first_bad(found, measurer, POLICY, lambda text: None)
        return result.ending, [one.sha for one in result.left]

    assert bisect("c4") == (Ending.FOUND, ["c6"])
    assert bisect("c2", "c3", "c4") == (Ending.FOUND, ["c6"])
    assert bisect("c5") == (Ending.RANGE, ["c5", "c6"])
    assert bisect(*(f"c{n}" for n in range(1, 8))) == (Ending.RANGE, [f"c{n}" for n in range(1, 9)])


def test_a_merged_branch_is_searched_where_every_parent_is() -> None:
    """m merges a side branch, s1 and s2, which began at the good end."""
    made = [
        Commit("p1", "tp1", "", ("good",)),
        Commit("s1", "ts1", "", ("good",)),
        Commit("s2", "ts2", "", ("s1",)),
        Commit("m", "tm", "", ("p1", "s2")),
    ]
    found = CommitRange(Commit("good", "tg", "", ()), made[-1], tuple(made))
    levels = {"good": 0.0, "p1": 0.0, "s1": 0.0, "s2": -0.05, "m": -0.05}
    result = find_first_bad(found, DrawnPairs(levels, 0.001, random.Random(0)), POLICY, print)
    assert result.first_bad == made[2] and result.parent == "s1"
    # good on both sides: the merge itself
    levels |= {"s2": 0.0}
    result = find_first_bad(found, DrawnPairs(levels, 0.001, random.Random(0)), POLICY, print)
    assert result.first_bad == made[3]


# ---- what a step decides


def drop_of(pct: float) -> SoughtDrop:
    return SoughtDrop("tok_per_s", bad_ln=-pct / 100, alpha=0.0003, least_ln=0.01)


def test_a_step_is_decided_at_its_first_certain_look() -> None:
    rng = random.Random(4)
    noise = [rng.gauss(0, 0.015) for _ in range(LOOKS[-1])]
    for change, turn in ((0.0, StepTurn.GOOD), (-0.06, StepTurn.BAD)):
        looked = [
            decide_step([change + x for x in noise[:n]], drop_of(6), is_last=False) for n in LOOKS
        ]
        assert [one.turn for one in looked if one is not None][:1] == [turn]
        assert looked[0] is None  # four pairs prove little


def test_at_the_last_look_a_part_of_the_drop_moves_its_level() -> None:
    rng = random.Random(4)
    half = [-0.03 + rng.gauss(0, 0.003) for _ in range(LOOKS[-1])]
    drop = drop_of(6)
    assert decide_step(half, drop, is_last=False) is None
    found = decide_step(half, drop, is_last=True)
    assert found is not None and found.is_part and found.change is not None
    moved = drop.after(found)
    assert moved.ln_drop == pytest.approx(0.03, abs=0.002) and moved.least_ln == drop.least_ln
    again = decide_step(half, moved, is_last=True)  # its like is at that level now
    assert again is not None and (again.turn, again.is_part) == (found.turn, False)


def test_noise_beyond_the_drop_skips_the_commit() -> None:
    rng = random.Random(4)
    wild = [rng.gauss(-0.03, 0.2) for _ in range(LOOKS[-1])]
    found = decide_step(wild, drop_of(6), is_last=True)
    assert found is not None and found.turn is StepTurn.SKIPPED
    assert drop_of(6).after(found) == drop_of(6)


# ---- the history that git knows


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Nine commits: speeds by their marker, one that cannot be built, three of other files."""
    folder = tmp_path_factory.mktemp("bisect") / "repository"
    made = repositories.make(folder, 1000.0)
    for number, text in enumerate(
        ["SPEED = 1000", "", "SPEED = 1001", "SPEED = broken", "", "SPEED = 999", "SPEED = 900", ""]
    ):
        place = "nsa/marker.py" if text else "README.md"
        (folder / place).write_text(f"{text or number}\n", encoding="utf-8")
        made.append(repositories.commit(folder, f"change {number}"))
    return folder, made


def test_the_commits_that_touch_the_package(history: tuple[Path, list[str]]) -> None:
    folder, made = history
    found = commits_between(made[0], "HEAD", folder)
    assert [one.sha for one in found.commits] == made[1:]
    assert [one.sha for one in touching(found)] == [made[n] for n in (1, 3, 4, 6, 7)]
    assert found.commits[0].subject == "change 0" and found.bad.sha == made[-1]


@pytest.mark.parametrize(
    ("good", "bad", "message"),
    [
        ("HEAD", "HEAD", "one commit twice"),
        ("HEAD", "HEAD~3", "exchange them, --bad is the older one"),
        ("v1-dirty", "HEAD", "got 'v1-dirty'"),
        (".", "HEAD", "got '.'"),
        ("--all", "HEAD", "got '--all'"),
        ("alone", "HEAD", "is no ancestor of --bad HEAD, wanted one. Next: name two commits"),
        ("branch", "HEAD", "Next: --good {}, where they part"),
    ],
)
def test_what_is_no_history_is_one_line(
    history: tuple[Path, list[str]], good: str, bad: str, message: str
) -> None:
    folder, made = history
    if good == "alone":
        git(folder, "branch", "-f", "alone", git(folder, "commit-tree", "HEAD^{tree}", "-m", "x"))
    tree = git(folder, "rev-parse", "HEAD^{tree}")
    git(
        folder, "branch", "-f", "branch", git(folder, "commit-tree", tree, "-p", made[2], "-m", "x")
    )
    with pytest.raises(PerfbenchError) as caught:
        commits_between(good, bad, folder)
    assert message.format(made[2][:12]) in str(caught.value) and caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


def test_a_shallow_clone_is_refused(history: tuple[Path, list[str]], tmp_path: Path) -> None:
    git(tmp_path, "clone", "-q", "--depth", "3", f"file://{history[0]}", "shallow")
    with pytest.raises(PerfbenchError, match="git fetch --unshallow"):
        commits_between("HEAD~2", "HEAD", tmp_path / "shallow")
    with pytest.raises(PerfbenchError, match="git fetch --unshallow"):
        commits_between(history[1][0], "HEAD", tmp_path / "shallow")


# ---- the command


@pytest.fixture
def here(
    history: tuple[Path, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """In an empty folder with small.yaml; speeds are those of the markers. The hashes."""
    monkeypatch.setattr(outcome, "CHECKOUT", history[0])
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(MATRIX, encoding="utf-8")
    monkeypatch.setattr(schedule, "prepared_versions", marked_sides)
    monkeypatch.setattr(schedule, "plan_of_version", marked_plan)

    def traced(version: object, cells: list[str], tracing: Tracing) -> dict[str, object]:
        assert tracing.context.fit.held
        return no_trace(cells)

    monkeypatch.setattr("perfbench.tracing.trace_side", traced)
    random.seed(5)
    return history[1]


def no_trace(cells: list[str]) -> dict[str, object]:
    from perfbench.tracing.diff import Traced

    return {cell_id: Traced(name="v", reason="not here") for cell_id in cells}


def bisect(*words: str) -> int:
    return app.invoke(["bisect", "--matrix", "small.yaml", "--seed", "7", *words])


def folder() -> Path:
    (found,) = Path("reports/runs").iterdir()
    return found


def test_the_command_finds_the_commit(here: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert bisect("--good", here[0], "--bad", "HEAD", "seq_len=128", "--json") == 3
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert (found["ending"], found["first_bad"]["sha"], found["parent"]) == (
        "found",
        here[7],
        here[6],
    )
    assert found["confirmation"]["change"]["change_pct"] == pytest.approx(-9.9, abs=0.3)
    assert (found["commits"], found["commits_that_change_nsa"], found["cell_id"]) == (8, 5, SHORT)
    turns = {one["commit"]["sha"]: one["turn"] for one in found["steps"]}
    assert turns.get(here[4], "skipped") == "skipped" and turns[here[6]] == "good"
    assert {"good", "bad", "skipped"} >= {*turns.values()}
    assert "8 commits, 5 of them change what is measured" in printed.err
    text = (folder() / "report.md").read_text(encoding="utf-8")
    assert text.startswith(f"# First bad commit: {here[7][:12]} change 6")
    assert json.loads((folder() / "result.json").read_text(encoding="utf-8")) == found
    pairs = sorted(one.name for one in (folder() / "pairs").iterdir())
    assert "whole" in pairs and all((folder() / "pairs" / one / "a").is_dir() for one in pairs)
    assert len(worktrees(outcome.CHECKOUT)) == 1


def test_what_is_not_slower_is_not_bisected(
    here: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert bisect("--good", here[0], "--bad", here[3], "seq_len=256") == 0
    assert "not confirmed slower" in capsys.readouterr().out
    assert bisect("--good", here[7], "--bad", here[8], LONG) == 0  # README.md alone
    assert "is the same at " in capsys.readouterr().out


def test_names_of_the_same_package_are_one_line(
    here: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Branches of two commits that leave nsa/ alone; of one commit; and of two histories."""
    root = outcome.CHECKOUT
    git(root, "branch", "-f", "before", here[7])
    git(root, "branch", "-f", "after", here[8])
    git(root, "branch", "-f", "alike", here[8])
    tree = git(root, "rev-parse", f"{here[8]}^{{tree}}")
    apart = git(root, "commit-tree", tree, "-p", here[0], "-m", "squashed")
    git(root, "branch", "-f", "apart", apart)
    assert bisect("--good", "before", "--bad", "after", LONG) == 0
    printed = capsys.readouterr()
    same = f"`nsa/` is the same at before ({here[7][:12]}) and after ({here[8][:12]})"
    assert (printed.out, printed.err) == (f"Nothing to bisect: {same}\n", "")
    assert bisect("--good", "before", "--bad", "after", LONG, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ending"], found["reason"], found["folder"]) == ("same_code", same, None)
    assert bisect("--good", "after", "--bad", "alike", LONG) == 2
    err = capsys.readouterr().err
    assert "got one commit twice (after and alike are" in err and err.count("\n") == 1
    assert bisect("--good", "apart", "--bad", "after", LONG) == 2
    err = capsys.readouterr().err
    assert "nsa/ is the same at both" in err and err.count("\n") == 1
    assert not Path("reports").exists()


def test_a_dirty_bad_end_is_one_line(
    here: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """HEAD is measured as committed, which is remarked; `git describe --dirty` names no commit."""
    assert bisect("--good", here[0], "--bad", f"{here[8][:12]}-dirty", SHORT) == 2
    err = capsys.readouterr().err
    assert f"commit the changes first, or name '{here[8][:12]}'" in err and err.count("\n") == 1
    remark = f"--bad is {here[8][:12]} as it was committed: the uncommitted changes of"
    marker = outcome.CHECKOUT / "nsa" / "marker.py"
    kept = marker.read_text(encoding="utf-8")
    marker.write_text("SPEED = 1\n", encoding="utf-8")
    words = ("--good", here[0], "--budget", "0.0001s", SHORT)
    try:
        bisect("--bad", "HEAD", *words)
        assert capsys.readouterr().err.count(remark) == 1
        bisect("--bad", "HEAD~1", *words)
        assert "uncommitted" not in capsys.readouterr().err
    finally:
        marker.write_text(kept, encoding="utf-8")
    bisect("--bad", "HEAD", *words)
    assert "uncommitted" not in capsys.readouterr().err


def test_a_bad_end_without_a_speed_ends_with_its_reason(
    here: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert bisect("--good", here[0], "--bad", here[4], SHORT) == 2
    assert "lacks what this harness needs" in capsys.readouterr().err


def test_an_interrupted_bisect_is_resumed_where_it_was(
    here: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.perfbench.ab_bench import FakeSide

    left = [100]
    execute = FakeSide.execute

    def counted(side: FakeSide, job):  # type: ignore[no-untyped-def]
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return execute(side, job)

    monkeypatch.setattr(FakeSide, "execute", counted)
    assert bisect("--good", here[0], "--bad", "HEAD", SHORT) == 130
    resume = f"perfbench bisect --resume {folder()}"
    assert resume in capsys.readouterr().err
    rows = {one: one.read_bytes() for one in (folder() / "pairs").rglob("run.jsonl")}
    left[0] = 10_000
    assert app.invoke(["bisect", "--resume", str(folder())]) == 3
    assert here[7][:12] in capsys.readouterr().out
    assert all(one.read_bytes().startswith(content) for one, content in rows.items())
    # once more: nothing is measured again
    assert app.invoke(["bisect", "--resume", str(folder()), "--json"]) == 3
    before = left[0]
    assert json.loads(capsys.readouterr().out)["first_bad"]["sha"] == here[7]
    assert app.invoke(["bisect", "--resume", str(folder())]) == 3 and left[0] == before


def test_a_spent_budget_names_the_command_that_resumes(
    here: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert bisect("--good", here[0], "--bad", "HEAD", SHORT, "--budget", "0.0001s") == 6
    assert f"resume: `perfbench bisect --resume {folder()}`" in capsys.readouterr().out
    assert app.invoke(["bisect", "--resume", str(folder()), "--budget", "1h"]) == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--good", "HEAD~1", "--bad", "HEAD"], "got no CELL, wanted the cell"),
        (["--bad", "HEAD", SHORT], "got no --good"),
        (["--good", "HEAD~1", "--bad", "HEAD", "seq_len=7"], "no cell 'seq_len=7'"),
        (["--good", "HEAD~1", "--bad", "HEAD", "path=v2"], "names 2 cells"),
        (["--good", "HEAD", "--bad", "HEAD~1", SHORT], "exchange them"),
        (["--resume", "nowhere"], "bisect.json cannot be read"),
        (["--good", "HEAD~1", "--bad", "HEAD", SHORT, "--budget", "x"], "--budget 'x'"),
    ],
)
def test_wrong_usage_is_one_line(
    here: list[str], capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert bisect(*words) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
    assert not Path("reports").exists()


def test_a_resumed_bisect_keeps_what_it_began_with(
    here: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert bisect("--good", here[0], "--bad", "HEAD", SHORT, "--budget", "0.0001s") == 6
    capsys.readouterr()
    for words in (["seq_len=256"], ["--good", "HEAD~1"], ["--all-commits"], ["--seed", "8"]):
        assert app.invoke(["bisect", "--resume", str(folder()), *words]) == 2
        assert f"Next: perfbench bisect --resume {folder()}" in capsys.readouterr().err
    (folder() / "bisect.json").write_text('{"version": 1}', encoding="utf-8")
    assert app.invoke(["bisect", "--resume", str(folder())]) == 2
    assert "cannot be read (good: Field required)" in capsys.readouterr().err
