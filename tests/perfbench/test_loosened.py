"""The judge does not ask the accused: baseline and policy are those of the default branch, a change
is judged by the stricter of its own and theirs, and what it loosens is exit 2.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from perfbench.commands import outcome
from perfbench.errors import Exit
from perfbench.gate.strictness import STRICTER, is_looser, joint_rules
from perfbench.matrix import JudgeRules, policies
from perfbench.matrix.matrix import parse_matrix
from perfbench.matrix.policy import GatePolicy, Policies
from perfbench.records import Verdict, load_baseline
from tests.perfbench.ab_bench import LONG, MATRIX, SHORT, Bench
from tests.perfbench.digested import edit_baseline
from tests.perfbench.matrix_text import VALID
from tests.perfbench.repositories import commit, git

RULED = MATRIX + "expect:\n  - {match: {}, engaged: [sel.v2], forbidden: [sel.v1]}\n"
BASELINE = Path("reports/baselines/cpu/small.json")
NEW = LONG.replace("256", "512")


def write(text: str) -> None:
    Path("small.yaml").write_text(text, encoding="utf-8")


def promote(bench: Bench, out: str = "first") -> None:
    assert bench.run("run", "small.yaml", "--out", out) == 0
    (run,) = Path(out).iterdir()
    assert bench.run("baseline", "promote", str(run)) == 0


@pytest.fixture
def home(bench: Bench, tmp_path: Path) -> Bench:
    """A repository whose main holds the matrix and its baseline of 1000 tok/s; a branch of it is
    checked out, on which the code is 94 % slower.
    """
    git(tmp_path, "init", "-q")
    write(RULED)
    Path(".gitignore").write_text("first/\nsecond/\nreports/runs/\n", encoding="utf-8")
    promote(bench)
    commit(tmp_path, "baseline")
    git(tmp_path, "checkout", "-q", "-b", "change")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "slower")
    bench.current.speed = 60.0
    return bench


def check(
    bench: Bench, capsys: pytest.CaptureFixture[str], *options: str
) -> tuple[int, dict[str, str | None], str]:
    """Exit code, verdict by cell, and everything printed, of a `check` without its second stage."""
    capsys.readouterr()
    code = bench.run("check", "small.yaml", "--no-confirm", "--json", *options)
    out, err = capsys.readouterr()
    cells = json.loads(out)["cells"] if out else []
    return code, {cell["cell_id"]: cell["verdict"] for cell in cells}, out + err


# What a change may try -> its matrix, the exit code, and what must be said.
LOOSE = {
    "min_effect_pct": (("min_effect_pct: 5", "min_effect_pct: 99.9"), "got 99.9, the baseline's 5"),
    "tolerance_pct": (("tolerance_pct: 1", "tolerance_pct: 99"), "got 99, the baseline's 1"),
    "min_replicates": (("min_replicates: 2", "min_replicates: 4"), "got 4, the baseline's 2"),
    "missing": (
        ("gate: {", "gate: {missing: warn, "),
        "gate.missing: got warn, the baseline's fail",
    ),
    "alpha_screen": (("gate: {", "gate: {alpha_screen: 1.0e-9, "), "gate.alpha_screen: got 1e-09"),
    "alpha_confirm": (("gate: {", "gate: {alpha_confirm: 1.0e-9, "), "gate.alpha_confirm"),
    "sentinel_band_pct": (("gate: {", "gate: {sentinel_band_pct: 90, "), "gate.sentinel_band_pct"),
    "power": (("gate: {", "gate: {power: 0.6, "), "gate.power: got 0.6, the baseline's 0.99"),
    "confirm_pairs": (("confirm_pairs: 8", "confirm_pairs: 4"), "gate.confirm_pairs"),
    "processes": (("processes: 4", "processes: 3"), "measure.processes: got 3, the baseline's 4"),
    "warmup_s": (("processes: 4", "processes: 4, warmup_s: 0"), "measure.warmup_s: got 0, "),
    "samples": (("processes: 4", "processes: 4, samples: 1"), "measure.samples: got 1, the"),
    "min_sample_ms": (("processes: 4", "processes: 4, min_sample_ms: 1"), "measure.min_sample_ms"),
    "max_s": (("processes: 4", "processes: 4, max_s: 0.1"), "measure.max_s"),
    "timeout_s": (("gate:", "limits: {timeout_s: 1}\ngate:"), "limits.timeout_s: got 1, the"),
    "oom": (("gate:", "limits: {oom: record}\ngate:"), "limits.oom: got record, the"),
    "on_mismatch": (
        ("{gpu: none}", "{gpu: none, on_mismatch: warn}"),
        "target.on_mismatch: got warn",
    ),
    "no expectation": (("engaged: [sel.v2], ", ""), "expect.engaged of"),
    "nothing forbidden": ((", forbidden: [sel.v1]", ""), f"expect.forbidden of {SHORT}: got none"),
    "alias": (("", ""), f"aliases: got {LONG} -> {NEW}, the baseline's none"),
    "override": (
        (
            "gate: {",
            "overrides:\n  - {match: {seq_len: 256}, gate: {min_effect_pct: 90}, reason: x}\n"
            "gate: {",
        ),
        f"gate.min_effect_pct of {LONG}: got 90, the baseline's 5",
    ),
}


def aliased(text: str) -> str:
    """``text`` with LONG renamed to NEW."""
    return text.replace("[128, 256]", "[128, 512]") + f"aliases: {{'{LONG}': '{NEW}'}}\n"


@pytest.mark.parametrize("attack", LOOSE)
def test_what_a_change_loosens_is_exit_2_and_named(
    home: Bench, attack: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (old, new), words = LOOSE[attack]
    assert old in RULED
    write(aliased(RULED) if attack == "alias" else RULED.replace(old, new, 1))
    code, verdicts, said = check(home, capsys)
    assert code == Exit.USAGE == 2 and "LOOSENED" in said and words in said
    # judged by the stricter of both: a drop of 94 % is not proved to be none
    assert verdicts and "SAME" not in verdicts.values()


ELSE_RED = {
    "excluded": (
        ("measure:", "exclude: [{seq_len: 256, reason: slow}]\nmeasure:"),
        Exit.FAILED,
        "MISSING",
    ),
    "renamed, and new cells pass": (("[128, 256]", "[128, 512]"), Exit.FAILED, "MISSING"),
    "another batch": (("seq_len:", "batch: [2], seq_len:"), Exit.FAILED, "MISSING"),
    "another model": (
        ("model: tiny", "model: {preset: tiny, num_layers: 3}"),
        Exit.ENVIRONMENT,
        "another config under the same name",
    ),
    "another name": (("name: small", "name: smaller"), Exit.BASELINE, "no baseline"),
    "never judged": (("min_replicates: 2", "min_replicates: 5"), Exit.USAGE, "are never judged"),
    "skipped": (
        ("{gpu: none}", "{gpu: H100, on_mismatch: skip}"),
        Exit.USAGE,
        "target.on_mismatch: got skip, the baseline's refuse",
    ),
}


@pytest.mark.parametrize("attack", ELSE_RED)
def test_every_other_way_out_is_red(
    home: Bench, attack: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (old, new), wanted, words = ELSE_RED[attack]
    assert old in RULED
    write(RULED.replace(old, new, 1))
    code, _, said = check(home, capsys)
    assert code == wanted and words in said


def test_what_a_change_tightens_judges_it(home: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    home.current.speed = 1000.0
    write(
        RULED.replace("min_effect_pct: 5", "min_effect_pct: 4").replace(
            "processes: 4", "processes: 5"
        )
    )
    code, verdicts, _ = check(home, capsys)
    assert code == 0 and set(verdicts) == {SHORT, LONG}


def baseline_note(said: str) -> str:
    return next(line for line in said.splitlines() if "baseline and policy were read" in line)


def test_the_report_says_from_where_the_baseline_was_read(
    home: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = git(tmp_path, "rev-parse", "main")
    _, _, said = check(home, capsys)
    assert f"{BASELINE} at {base[:12]}, the merge base of HEAD with main" in baseline_note(said)
    home.run("check", "small.yaml", "--no-confirm")
    assert "note: baseline and policy were read from" in capsys.readouterr().out


def test_a_baseline_that_the_change_edits_does_not_judge_it(
    home: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The slow run promoted, committed on the branch; then deleted; then a link to another."""
    before = check(home, capsys)[1]
    promote(home, "second")
    commit(tmp_path, "a slower baseline")
    assert load_baseline(BASELINE).cells[LONG].speed == pytest.approx(60, rel=0.01)
    assert check(home, capsys)[1] == before and "SAME" not in before.values()
    git(tmp_path, "rm", "-q", str(BASELINE))
    commit(tmp_path, "no baseline")
    assert check(home, capsys)[1] == before
    BASELINE.parent.mkdir(parents=True)
    BASELINE.symlink_to("/dev/null")
    commit(tmp_path, "a link")
    assert check(home, capsys)[1] == before


def test_a_working_copy_does_not_judge_on_the_default_branch(
    home: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    git(tmp_path, "checkout", "-q", "main")
    edit_baseline(BASELINE, lambda content: content["cells"].pop(LONG))
    home.current.speed = 1000.0
    code, verdicts, said = check(home, capsys)
    assert code == 0 and verdicts[LONG] == "SAME"
    assert "HEAD, which is on the default branch main" in baseline_note(said)


def test_a_baseline_that_is_not_on_the_default_branch_is_none(
    home: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(RULED.replace("name: small", "name: smaller"))
    promote(home, "second")
    commit(tmp_path, "another name with a baseline of its own")
    code, _, said = check(home, capsys)
    assert code == Exit.BASELINE and "reviewed and on the default branch" in said


def test_a_loosening_holds_once_its_baseline_is_on_the_default_branch(
    home: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home.current.speed = 1000.0
    write(RULED.replace("min_effect_pct: 5", "min_effect_pct: 30"))
    assert check(home, capsys)[0] == 2
    capsys.readouterr()
    promote(home, "second")
    said = capsys.readouterr().out
    assert "loosened for every later run: gate.min_effect_pct: got 30, the baseline's 5" in said
    commit(tmp_path, "loosened")
    assert check(home, capsys)[0] == 2  # on its own branch it is not reviewed yet
    git(tmp_path, "checkout", "-q", "main")
    git(tmp_path, "merge", "-q", "change")
    assert check(home, capsys)[0] == 0


def test_without_git_the_file_and_its_policy_hold(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    write(RULED)
    promote(bench)
    write(RULED.replace("min_effect_pct: 5", "min_effect_pct: 99.9"))
    bench.current.speed = 60.0
    code, _, said = check(bench, capsys)
    assert code == 2 and "as it lies here, since git rev-parse" in baseline_note(said)


def test_a_named_baseline_is_that_file_and_its_policy_holds(
    home: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    write(RULED.replace("min_effect_pct: 5", "min_effect_pct: 99.9"))
    code, verdicts, said = check(home, capsys, "--baseline", str(BASELINE))
    assert code == 2 and "SAME" not in verdicts.values()
    assert f"{BASELINE}, named by --baseline" in baseline_note(said)


def older(content: dict[str, object]) -> None:
    """As 0a70f94 wrote it."""
    for key in ("rules", "run_sha256", "content_sha256"):
        content.pop(key)
    content["schema_version"] = 2


def make_older() -> None:
    content = json.loads(BASELINE.read_text())
    older(content)
    BASELINE.write_text(json.dumps(content))


def test_an_older_baseline_is_helped_out_by_the_matrix_of_the_default_branch(
    home: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    git(tmp_path, "checkout", "-q", "main")
    make_older()
    commit(tmp_path, "older")
    git(tmp_path, "checkout", "-q", "-b", "other")
    write(RULED.replace("min_effect_pct: 5", "min_effect_pct: 99.9"))
    commit(tmp_path, "loosened")
    monkeypatch.setattr(outcome, "CHECKOUT", tmp_path)
    code, verdicts, said = check(home, capsys)
    assert code == 2 and "that of small.yaml at" in said and "got 99.9" in said
    assert "SAME" not in verdicts.values() and "unverified" in said


def test_an_older_baseline_without_git_leaves_the_policy_unverified(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    promote(bench)
    make_older()
    code, _, said = check(bench, capsys)
    assert code == 0 and "unverified policy" in said


def test_a_baseline_with_rules_that_are_none_is_corrupt(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    promote(bench)
    for broken in ({}, {"gate": {"min_effect_pct": -1}, "by_cell": {}}):
        edit_baseline(BASELINE, lambda content, rules=broken: content.update(rules=rules))
        code, _, said = check(bench, capsys)
        assert code == Exit.BASELINE and "its rules cannot be read" in said


# --- the table itself


def rules(text: str) -> JudgeRules:
    return JudgeRules.of(parse_matrix(text, "m.yaml"))


def test_rules_survive_the_file() -> None:
    found = rules(VALID)
    stored = json.loads(json.dumps(found.to_stored()))
    assert JudgeRules.from_stored(stored) == found
    assert found.expect and found.gate["tolerance_pct"] == 5


def test_every_ordered_key_exists() -> None:
    found = rules(VALID)
    known = {*(f"gate.{key}" for key in found.gate), *found.settings}
    assert set(STRICTER) <= known


@pytest.mark.parametrize("key", STRICTER)
def test_an_ordered_key_is_loosened_one_way_only(key: str) -> None:
    order = STRICTER[key]
    low, high = (1, 2) if isinstance(order, str) else order[:2]
    strict, loose = (low, high) if order == "lower" else (high, low)
    assert is_looser(key, loose, strict) and not is_looser(key, strict, loose)
    assert not is_looser(key, loose, loose)


def test_what_is_in_no_table_must_be_equal() -> None:
    assert is_looser("gate.metric", "a", "b") and is_looser("later.key", 1, 2)
    assert is_looser("gate.missing", "later", "fail")


def test_fewer_sentinels_are_a_loosening() -> None:
    more = VALID + "sentinels: [gemm, copy]\n"
    fewer = VALID + "sentinels: [gemm]\n"
    found = joint_rules(rules(fewer), rules(more), Policies(GatePolicy()), [])
    assert [str(one) for one in found.loosened] == [
        "sentinels: got gemm, the baseline's gemm, copy"
    ]
    assert joint_rules(rules(more), rules(fewer), Policies(GatePolicy()), []).loosened == ()


def test_each_cell_is_judged_by_the_stricter_of_both() -> None:
    """An override of the baseline that the matrix drops is a loosening of its cell alone."""
    cell = "path=dense,seq_len=256,workload=train"
    over = (
        "overrides:\n  - {match: {path: dense, seq_len: 256, workload: train},"
        " gate: {min_effect_pct: 1, tolerance_pct: 9}, reason: x}\n"
    )
    plain, changed = parse_matrix(VALID, "m.yaml"), parse_matrix(VALID + over, "m.yaml")
    found = joint_rules(JudgeRules.of(plain), JudgeRules.of(changed), policies(plain), [cell])
    assert [str(one) for one in found.loosened] == [
        f"gate.min_effect_pct of {cell}: got 3, the baseline's 1"
    ]
    assert found.policies.of(cell).min_effect_pct == 1
    assert found.policies.of(cell).tolerance_pct == 5  # the matrix's own is the stricter
    assert found.policies.of("another").min_effect_pct == 3
    (finding,) = found.findings()
    assert finding.verdict is Verdict.LOOSENED and str(found.loosened[0]) in finding.reason


def test_the_page_shows_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "baselines.md").read_text(encoding="utf-8")
    for key, order in STRICTER.items():
        stricter = order if isinstance(order, str) else order[-1]
        assert f"| `{key}` | {stricter} |" in page
    assert page.count("| `gate.") + page.count("| `measure.") == len(STRICTER)


def test_a_folder_in_a_baselines_commit_is_not_run(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    """A baseline is a file: it may name a commit of this repository, and no code elsewhere."""
    promote(bench)

    def elsewhere(content: dict[str, Any]) -> None:
        for cell in content["cells"].values():
            cell["commit"] = str(bench.repository)

    edit_baseline(BASELINE, elsewhere)
    bench.current.speed = 800.0
    bench.run("check", "small.yaml")
    assert bench.a.jobs == [] and "knows no commit" in capsys.readouterr().err


def test_a_retired_baseline_judges_only_where_it_is_named(
    home: Bench, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    git(tmp_path, "checkout", "-q", "main" if "main" in branches(tmp_path) else "master")
    why = "this card is not lent any more, so nobody can renew it"
    assert home.run("baseline", "retire", str(BASELINE), "--reason", why) == 0
    commit(tmp_path, "retired")
    git(tmp_path, "checkout", "-q", "-B", "later")
    code, _, said = check(home, capsys)
    assert code == Exit.BASELINE and f"is retired: {why}" in said
    code, verdicts, said = check(home, capsys, "--baseline", str(BASELINE))
    assert code != Exit.BASELINE and "is retired" not in said
    assert "NO_BASELINE" not in verdicts.values()
    assert home.run("baseline", "show", str(BASELINE)) == 0
    since = load_baseline(BASELINE).retired_utc
    assert since and capsys.readouterr().out.startswith(f"retired: {why} (since {since})")


def branches(repository: Path) -> str:
    return git(repository, "branch", "--format=%(refname:short)")


def test_a_retired_file_stays_what_it_was_and_an_empty_reason_is_refused(
    home: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    before = load_baseline(BASELINE)
    assert home.run("baseline", "retire", str(BASELINE), "--reason", " ") == Exit.USAGE
    assert "wanted why" in capsys.readouterr().err and load_baseline(BASELINE) == before
    assert home.run("baseline", "retire", str(BASELINE), "--reason", "gone") == 0
    after = load_baseline(BASELINE)
    assert after.retired == "gone" and after.cells == before.cells and after.rules == before.rules
    edit_baseline(BASELINE, lambda content: content.update(retired_utc="2026-01-02T03:04:05Z"))
    assert home.run("baseline", "retire", str(BASELINE), "--reason", "sold") == 0
    again = load_baseline(BASELINE)
    assert (again.retired, again.retired_utc) == ("sold", "2026-01-02T03:04:05Z")


def test_a_retired_file_of_an_older_schema_gets_no_digest(
    home: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = json.loads(BASELINE.read_text(encoding="utf-8"))
    old = {k: v for k, v in raw.items() if k not in ("content_sha256", "run_sha256", "rules")}
    BASELINE.write_text(json.dumps({**old, "schema_version": 2}), encoding="utf-8")
    assert home.run("baseline", "retire", str(BASELINE), "--reason", "gone") == 0
    assert load_baseline(BASELINE).retired == "gone"


def test_two_runs_are_compared_by_the_stricter_matrix(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.run("run", "small.yaml", "--out", "first") == 0
    write(MATRIX.replace("min_effect_pct: 5", "min_effect_pct: 99.9"))
    bench.current.speed = 60.0
    assert bench.run("run", "small.yaml", "--out", "second") == 0
    (base,), (candidate,) = Path("first").iterdir(), Path("second").iterdir()
    capsys.readouterr()
    bench.run("compare", str(base), str(candidate), "--json")
    said = json.loads(capsys.readouterr().out)
    assert said["policy"]["min_effect_pct"] == 5
    assert "SAME" not in {cell["verdict"] for cell in said["cells"]}
    assert any("looser than the base, which judges: gate.min" in note for note in said["notes"])


def test_show_prints_the_policy(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    promote(bench)
    capsys.readouterr()
    assert bench.run("baseline", "show", str(BASELINE)) == 0
    assert "policy: " in (out := capsys.readouterr().out) and "min_effect_pct 5" in out
    make_older()
    assert bench.run("baseline", "show", str(BASELINE)) == 0
    assert "unverified: written without a digest\nunverified policy" in capsys.readouterr().out
