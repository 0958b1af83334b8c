"""Which baseline and which rules judge a run, and from where they were read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from perfbench.errors import PerfbenchError
from perfbench.machine import JudgingCommit, judging_commit
from perfbench.matrix import JudgeRules, Matrix, parse_matrix
from perfbench.records import (
    MAKE_ONE,
    PROMOTE,
    Baseline,
    BaselineProblem,
    Verdict,
    baseline_path,
    parse_baseline,
    read_baseline,
)

BASELINES = Path("reports/baselines")


@dataclass(frozen=True, slots=True)
class JudgedBy:
    """``rules`` are those that the baseline was promoted with: None where nobody knows them.

    ``notes`` say from where both were read.
    """

    found: Baseline | BaselineProblem
    rules: JudgeRules | None
    notes: tuple[str, ...]


def judged_by(
    matrix: Matrix, gpu_slug: str, named: Path | None, measured: str | None = None
) -> JudgedBy:
    """What judges a run of ``matrix``: the file that the user ``named``, else the baseline of the
    GPU and the matrix as it is on the default branch, where this change forked off.

    Without git the file itself. ``measured`` is the run's commit: the matrix of the default branch
    stands in for a baseline without rules only where the run is of this checkout.
    """
    if named is not None:
        found = read_baseline(named)
        return _with_rules(found, f"{named}, named by --baseline", None, matrix, is_named=True)
    path = baseline_path(BASELINES, gpu_slug, matrix.name)
    commit = judging_commit(Path.cwd())
    if isinstance(commit, str):
        found = read_baseline(path)
        return _with_rules(found, f"{path} as it lies here, since {commit}", None, matrix)
    found = _committed(path, commit)
    here = measured is None or measured == commit.head
    return _with_rules(found, f"{path} at {commit}", commit if here else None, matrix)


def loosened_skip(matrix: Matrix) -> str:
    """Why a matrix may not skip this machine, which a baseline of it does not; empty where it
    may.
    """
    for path, found in _all_baselines(matrix.name):
        rules = _rules_of(found)
        if rules is None or isinstance(rules, str):
            continue
        then = rules.settings
        now = JudgeRules.of(matrix).settings
        for key in ("target.on_mismatch", "target.gpu", "target.count"):
            if key in then and then[key] != now[key]:
                return f"{key}: got {now[key]}, the baseline's {then[key]} ({path})"
    return ""


def _all_baselines(name: str) -> Iterable[tuple[Path, Baseline | BaselineProblem]]:
    """Every baseline of a matrix, whatever the GPU."""
    commit = judging_commit(Path.cwd())
    if isinstance(commit, str):
        paths = sorted(BASELINES.glob("*/*.json"))
        known = [(path, read_baseline(path)) for path in paths]
    else:
        known = [(path, _committed(path, commit)) for path in commit.files(BASELINES)]
    for path, found in known:
        if isinstance(found, Baseline) and found.matrix_name == name:
            yield path, found


def _committed(path: Path, commit: JudgingCommit) -> Baseline | BaselineProblem:
    data = commit.read(path)
    if data is not None:
        return parse_baseline(data, f"baseline {path} at {commit.commit[:12]}")
    here = (
        "; the one that lies here does not count before it is reviewed and on the default branch:"
        f" name it with --baseline {path}"
        if path.exists()
        else f"{MAKE_ONE}{PROMOTE} --to {path}, and commit it"
    )
    return BaselineProblem(Verdict.NO_BASELINE, f"no baseline {path} at {commit}{here}")


def _with_rules(
    found: Baseline | BaselineProblem,
    where: str,
    commit: JudgingCommit | None,
    matrix: Matrix,
    *,
    is_named: bool = False,
) -> JudgedBy:
    """A retired baseline judges only where the user named it."""
    note = f"baseline and policy were read from {where}"
    if isinstance(found, Baseline) and found.retired is not None and not is_named:
        text = (
            f"the baseline {where} is retired: {found.retired}. Next: promote a new one, or name"
            " it with --baseline all the same"
        )
        found = BaselineProblem(Verdict.NO_BASELINE, text)
    if isinstance(found, BaselineProblem):
        return JudgedBy(found, None, ())  # its message says where it was looked for
    rules = _rules_of(found)
    if isinstance(rules, str):
        problem = BaselineProblem(Verdict.CORRUPT, f"baseline {where}: {rules}")
        return JudgedBy(problem, None, (note,))
    if rules is not None:
        return JudgedBy(found, rules, (note,))
    if commit is not None and (rules := _rules_at(commit, matrix)) is not None:
        text = f"the baseline holds no policy, so that of {matrix.path} at {commit} stands in"
        return JudgedBy(found, rules, (f"the baseline was read from {where}", text))
    text = "unverified policy: the baseline holds none, so the run's own matrix states it"
    return JudgedBy(found, None, (f"the baseline was read from {where}", text))


def _rules_of(found: Baseline | BaselineProblem) -> JudgeRules | str | None:
    """The stored rules; None where there are none, and why they cannot be read."""
    if isinstance(found, BaselineProblem) or found.rules is None:
        return None
    try:
        return JudgeRules.from_stored(found.rules)
    except ValueError as error:
        return f"its rules cannot be read: {' '.join(str(error).split())[:200]}"


def _rules_at(commit: JudgingCommit, matrix: Matrix) -> JudgeRules | None:
    """Those of the matrix file as it is in the commit, if it is the same matrix."""
    data = commit.read(Path(matrix.path))
    if data is None:
        return None
    try:
        text = data.decode("utf-8-sig")
        then = parse_matrix(text, matrix.path, trained=matrix.trained)
    except (PerfbenchError, UnicodeDecodeError):
        return None
    return JudgeRules.of(then) if then.name == matrix.name else None
