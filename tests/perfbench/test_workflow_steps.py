"""Every workflow as far as it runs without GitHub: actionlint, and the command of each step, taken
from the file and run in a repository of a team, with a CPU in place of a GPU, a bare repository in
place of GitHub's, and a server on this machine in place of its API.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from perfbench.commands import app
from tests.perfbench.github_server import TOKEN, FakeGitHub, serving
from tests.perfbench.repositories import commit, git, make

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
ACTIONLINT = Path(sys.executable).parent / "actionlint"
EXPECTED = "join(fromJSON(needs.routes.outputs.entries).*.matrix, ' ')"
EXPRESSION = re.compile(r"\$\{\{\s*(.*?)\s*\}\}")
TINY = """\
version: 1
name: tiny
target: {gpu: none}
model: tiny
axes: {workload: [forward], seq_len: [128], path: [dense], fa2: [off], dtype: [fp32]}
measure: {processes: 1, warmup_s: 0.02, samples: 3, min_sample_ms: 5}
gate: {min_replicates: 1}
"""
ENTRY = {
    "name": "tiny",
    "card": "cpu",
    "runner": ["ubuntu-latest"],
    "matrix": "matrices/tiny.yaml",
    "baseline": "reports/baselines/cpu/tiny.json",
    "constraints": "constraints.txt",
}
# What stands in for python3 -m venv: an environment whose pip writes down what it would install,
# and refuses a file of constraints that is not there.
PYTHON = """\
#!/bin/sh
if [ "$1 $2" = "-m venv" ]; then
  mkdir -p "$3/bin" && cp "$(dirname "$0")"/{perfbench,python,pip} "$3/bin/"
else
  exec "PYTHON" "$@"
fi
"""
PIP = """\
#!/bin/sh
printf '%s\\n' "$*" >> "$PIP_LOG"
while [ $# -gt 0 ]; do if [ "$1" = -c ]; then test -f "$2" || exit 1; fi; shift; done
"""
GH = '#!/bin/sh\nprintf "%s\\n" "$@" > "$GH_LOG"\n'
# As `python` of an environment; pip and pytest are written down.
PROGRAM = """\
#!/bin/sh
case "$1 $2" in
  "-m pip") shift 2; exec pip "$@";;
  "-m pytest") printf '%s\\n' "$*" >> "$PIP_LOG";;
  *) exec "PYTHON" "$@";;
esac
"""
# Every step with a command, by the test that runs it.
TRIED = {
    "test_a_first_night_of_a_fleet": (
        "perfbench.yml routes Fleet",
        "perfbench.yml routes Install",
        "perfbench.yml routes Routes",
        "perfbench.yml speed Install",
        "perfbench.yml speed Check",
        "perfbench.yml comment Install",
        "perfbench.yml comment Comment",
        "first-baseline.yml propose Install",
        "first-baseline.yml propose Promote",
        "first-baseline.yml propose Propose",
        "ci.yml routes Routes",
    ),
    "test_a_commit_that_can_move_is_refused": ("perfbench.yml routes What is measured",),
    "test_the_other_installations": (
        "ci.yml routes Install",
        "ci.yml codegen Install",
        "nightly.yml tests Install",
        "nightly.yml tests GPU tests",
        "nightly.yml changes Install",
        "pages.yml build Install",
        "release.yml build Build and try",
    ),
    "test_the_page_and_what_changed": (
        "pages.yml build Build",
        "nightly.yml changes What changed",
        "nightly.yml changes The page",
    ),
    "test_a_tag_is_the_version": ("release.yml build The tag is the version",),
    "tests/tools/test_ci_run.py": ("ci.yml nox .ci/run",),
    "tests/perfbench/test_codegen.py": ("ci.yml codegen Machine code",),
    "test_the_action_runs_what_the_workflow_runs": (
        "action.yml action Install",
        "action.yml action Check",
    ),
}


def jobs_of(path: Path) -> dict[str, Any]:
    found = YAML(typ="safe").load(path)
    jobs = found.get("jobs") or {"action": found["runs"]}
    return {name: job for name, job in jobs.items() if "steps" in job}


def test_actionlint_has_nothing_to_say() -> None:
    """Without shellcheck, which a machine may have or not."""
    done = subprocess.run(
        [ACTIONLINT, "-shellcheck=", "-pyflakes="], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("needs: [routes, speed]", "needs: [routes, sped]"),
        ("${{ matrix.constraints }}", "${{ matrix.constraint }"),
        ("secrets.history", "secret.history"),
        ("timeout-minutes: 90", "timeout-minute: 90"),
    ],
)
def test_actionlint_sees_a_planted_fault(right: str, wrong: str, tmp_path: Path) -> None:
    folder = tmp_path / ".github" / "workflows"
    folder.mkdir(parents=True)
    text = (GITHUB / "workflows" / "perfbench.yml").read_text(encoding="utf-8")
    assert right in text
    (folder / "perfbench.yml").write_text(text.replace(right, wrong), encoding="utf-8")
    git(tmp_path, "init", "-q")
    command = [ACTIONLINT, "-shellcheck=", "-pyflakes="]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True).returncode == 1


def test_actionlint_has_nothing_to_say_of_what_init_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git(tmp_path, "init", "-q")
    monkeypatch.chdir(tmp_path)
    assert app.invoke(["init", "cpu"]) == app.invoke(["init", "h200"]) == 0
    shutil.copy(GITHUB / "actionlint.yaml", tmp_path / ".github")
    command = [ACTIONLINT, "-shellcheck=", "-pyflakes="]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", [*WORKFLOWS, GITHUB / "actions/check/action.yml"], ids=str)
def test_nothing_of_an_event_reaches_a_shell(path: Path) -> None:
    """Values come through `env`; no failure is hidden; every job has a limit, and one that runs
    somebody's code may only read.
    """
    for job in jobs_of(path).values():
        assert path.name == "action.yml" or 0 < job["timeout-minutes"] <= 360
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step) and "continue-on-error" not in step
            assert "${{" not in step.get("run", "") and "|| true" not in step.get("run", "")


def test_every_step_with_a_command_is_run_by_a_test() -> None:
    found = {
        f"{path.name} {name} {step.get('name', step['run'])}"
        for path in [*WORKFLOWS, GITHUB / "actions/check/action.yml"]
        for name, job in jobs_of(path).items()
        for step in job["steps"]
        if "run" in step
    }
    listed = [one for steps in TRIED.values() for one in steps]
    assert found == set(listed) and len(listed) == len(found)
    assert {name for name in TRIED if "/" not in name} <= set(globals())


def test_the_action_runs_what_the_workflow_runs() -> None:
    """A reusable workflow of another repository cannot use an action of its own by path."""
    named = {
        step["name"]: step
        for step in jobs_of(GITHUB / "workflows/perfbench.yml")["speed"]["steps"]
        if "name" in step
    }
    for step in jobs_of(GITHUB / "actions/check/action.yml")["action"]["steps"]:
        other = named[step["name"]]
        assert step.get("run") == other.get("run") and step.get("uses") == other.get("uses")


def test_what_runs_a_commit_may_only_read_and_gets_no_secret_of_a_pull_request() -> None:
    jobs = jobs_of(GITHUB / "workflows/perfbench.yml")
    for name in ("routes", "speed"):
        assert jobs[name]["permissions"] == {"contents": "read"}
        for step in jobs[name]["steps"]:
            if step.get("uses", "").startswith("actions/checkout"):
                assert step["with"]["persist-credentials"] is False
    # the only job with the caller's token never checks out what is measured
    assert "inputs.commit" not in json.dumps(jobs["comment"])
    asked = YAML(typ="safe").load(GITHUB / "workflows/gpu-pr.yml")
    assert set(asked["on"]) == {"workflow_dispatch"}
    (job,) = asked["jobs"].values()
    assert "secrets" not in job and job["with"]["environment"] == "gpu"
    for path in WORKFLOWS:
        on = YAML(typ="safe").load(path)["on"]
        assert "pull_request_target" not in on
        if "pull_request" in on:
            text = path.read_text(encoding="utf-8")
            assert "secrets." not in text and "self-hosted" not in text


class Team:
    """A repository that measures with perfbench, its remote, and the environment of a step."""

    def __init__(self, home: Path) -> None:
        self.folder, self.home = home / "team", home
        make(self.folder, 1.0)
        # a process that measures looks for nsa where perfbench lies
        (self.folder / "perfbench").symlink_to(ROOT / "perfbench")
        for name, text in {
            "matrices/tiny.yaml": TINY,
            "constraints.txt": "",
            ".gitignore": "__pycache__/\n.venv/\nreports/runs/\nruns/\nbody.md\n",
            ".github/fleet.json": json.dumps([ENTRY | {"first_baseline_due": True}]),
        }.items():
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_text(text, encoding="utf-8")
        commit(self.folder, "a fleet")
        git(home, "init", "-q", "--bare", "origin.git")
        git(self.folder, "remote", "add", "origin", str(home / "origin.git"))
        git(self.folder, "push", "-q", "origin", "HEAD:refs/heads/main")
        bin_ = home / "bin"
        bin_.mkdir()
        program = f'#!/bin/sh\nexec "{sys.executable}" '
        for name, text in {
            "python3": PYTHON.replace("PYTHON", sys.executable),
            "python": PROGRAM.replace("PYTHON", sys.executable),
            "perfbench": f'{program}-m perfbench "$@"\n',
            "pip": PIP,
            "gh": GH,
            "nox": PIP,
        }.items():
            (bin_ / name).write_text(text.replace("/bin/sh", "/bin/bash"), encoding="utf-8")
            (bin_ / name).chmod(0o755)
        self.env = {
            "HOME": str(home),
            "PATH": f"{bin_}:/usr/local/bin:/usr/bin:/bin",
            "PYTHONPATH": str(self.folder),
            "OMP_NUM_THREADS": "1",
            "PIP_LOG": str(home / "pip.log"),
            "GH_LOG": str(home / "gh.log"),
            "GITHUB_ACTIONS": "true",
            "GITHUB_OUTPUT": str(home / "output"),
            "GITHUB_STEP_SUMMARY": str(home / "summary.md"),
            "GITHUB_REPOSITORY": "o/r",
            "GITHUB_RUN_ID": "55",
        }

    def step(self, workflow: str, job: str, name: str, values: dict[str, str], **env: str) -> Any:
        """The command of a step, with its own `env`, whose expressions ``values`` gives."""
        found = jobs_of(GITHUB / "workflows" / workflow)[job]["steps"]
        (step,) = [one for one in found if one.get("name") == name]
        own = {
            key: EXPRESSION.sub(lambda one: values[one[1]], str(text))
            for key, text in step.get("env", {}).items()
        }
        return subprocess.run(
            ["bash", "-e", "-c", step["run"]],
            cwd=self.folder,
            env={**self.env, **own, **env},
            capture_output=True,
            text=True,
            check=False,
        )

    def reset_log(self) -> None:
        (self.home / "pip.log").unlink(missing_ok=True)

    @property
    def outputs(self) -> dict[str, str]:
        lines = (self.home / "output").read_text(encoding="utf-8").splitlines()
        return dict(line.split("=", 1) for line in lines)


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Team:
    return Team(tmp_path_factory.mktemp("fleet"))


def test_a_first_night_of_a_fleet(team: Team) -> None:
    """From the fleet's file to the pull request with the first baseline, and the night after."""
    team.reset_log()
    values = {"inputs.fleet": ".github/fleet.json"}
    assert team.step("perfbench.yml", "routes", "Fleet", values).returncode == 0
    entries = team.outputs["entries"]
    (entry,) = json.loads(entries)
    install = {"inputs.install": "-e .[postgres]", "inputs.constraints": ""}
    install |= {"matrix.constraints": entry["constraints"]}
    for job in ("routes", "speed", "comment"):
        done = team.step("perfbench.yml", job, "Install", install)
        assert done.returncode == 0, done.stderr
    assert team.step("first-baseline.yml", "propose", "Install", install).returncode == 0
    with_versions = "install -c constraints.txt -e .[postgres]"
    plain = "install -e .[postgres]"
    installed = (team.home / "pip.log").read_text().splitlines()
    assert installed == [plain, with_versions, plain, plain]
    lost = install | {"matrix.constraints": "gone.txt"}
    assert team.step("perfbench.yml", "speed", "Install", lost).returncode == 1

    due = {"steps.fleet.outputs.entries": entries}
    done = team.step("perfbench.yml", "routes", "Routes", due)
    assert done.returncode == 0 and "tiny: model tiny, 1 cell" in done.stdout, done.stderr
    values = {"matrix.matrix": entry["matrix"], "inputs.budget": "10m"}
    values |= {"secrets.history": "", "secrets.webhook": ""}
    done = team.step("perfbench.yml", "speed", "Check", values)
    assert done.returncode == 9 and "::error title=perfbench%3A NO_BASELINE" in done.stderr
    assert "NO_BASELINE, exit 9" in Path(team.env["GITHUB_STEP_SUMMARY"]).read_text()
    (run,) = (team.folder / "reports/runs").iterdir()
    assert {"run.jsonl", "report.md", "verdict.json", "junit.xml", "badge.json"} <= {
        one.name for one in run.iterdir()
    }
    shutil.copytree(team.folder / "reports/runs", team.folder / "runs/run-tiny")

    with serving(FakeGitHub()) as github:
        values = {
            "github.token": TOKEN,
            "inputs.pull_request": "7",
            EXPECTED: "matrices/tiny.yaml x.yaml",
        }
        done = team.step("perfbench.yml", "comment", "Comment", values, GITHUB_API_URL=github.url)
        assert done.returncode == 0, done.stderr
        (comment,) = github.comments
        assert "NO_BASELINE, exit 9" in comment["body"] and "| `x` | 6 | MISSING" in comment["body"]

    for again in (False, True):
        done = team.step("first-baseline.yml", "propose", "Promote", {})
        assert done.returncode == 0, done.stderr
        values = {"github.token": TOKEN, "github.event.repository.default_branch": "main"}
        done = team.step("first-baseline.yml", "propose", "Propose", values)
        assert done.returncode == 0, done.stderr
        if again:
            break
        words = Path(team.env["GH_LOG"]).read_text().splitlines()
        assert words[:4] == ["pr", "create", "--base", "main"]
        branch = words[words.index("--head") + 1]
        shown = git(team.home / "origin.git", "ls-tree", "-r", "--name-only", branch)
        assert entry["baseline"] in shown and "runs/" not in shown
        assert "NO_BASELINE" in (team.folder / words[words.index("--body-file") + 1]).read_text()
        shutil.rmtree(team.folder / "runs")  # the night after leaves nothing without a baseline
    assert "no run that lacks a baseline was left" in done.stdout

    due = {"steps.fleet.outputs.entries": json.dumps([ENTRY])}
    done = team.step("perfbench.yml", "routes", "Routes", due)
    assert done.returncode == 0 and "1 of 1 cell as in the baseline" in done.stdout, done.stdout
    retired = team.folder / "reports/baselines/cpu/old.json"
    retired.write_text('{\n "retired": "a card that is gone"}')
    done = team.step("ci.yml", "routes", "Routes", {})
    assert done.returncode == 0 and "1 of 1 cell as in the baseline" in done.stdout, done.stderr
    (team.folder / entry["baseline"]).unlink()
    assert team.step("ci.yml", "routes", "Routes", {}).returncode == 9
    git(team.folder, "checkout", "-q", "--", entry["baseline"])
    matrix = team.folder / entry["matrix"]
    matrix.write_text(TINY.replace("[dense]", "[dense, v2]").replace("[128]", "[256]"))
    done = team.step("perfbench.yml", "routes", "Routes", due)
    assert done.returncode == 6 and "MISSING" in done.stdout


@pytest.mark.parametrize("entries", ["[]", '[{"matrix": "m.yaml"}]', "", "{}"])
def test_a_gate_that_judges_nothing_is_red(entries: str, team: Team) -> None:
    due = {"steps.fleet.outputs.entries": entries}
    assert team.step("perfbench.yml", "routes", "Routes", due).returncode != 0


@pytest.mark.parametrize(
    ("given", "code"),
    [("", 0), ("a" * 40, 0), ("main", 2), ("a" * 39, 2), ("refs/pull/1/merge", 2)],
)
def test_a_commit_that_can_move_is_refused(given: str, code: int, team: Team) -> None:
    done = team.step("perfbench.yml", "routes", "What is measured", {"inputs.commit": given})
    assert done.returncode == code


def test_a_tag_is_the_version(team: Team) -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    shutil.copy(ROOT / "pyproject.toml", team.folder)
    version = re.search(r'^version = "(.*)"', text, re.MULTILINE)
    assert version is not None
    for name, code in ((f"v{version[1]}", 0), ("v0.0.0-other", 1)):
        done = team.step("release.yml", "build", "The tag is the version", {}, GITHUB_REF_NAME=name)
        assert done.returncode == code, done.stderr


def test_the_other_installations(team: Team) -> None:
    """Of environments that no step above makes: pip gets what is there."""
    team.reset_log()
    (team.folder / "reports/baselines/h200").mkdir(parents=True, exist_ok=True)
    (team.folder / "reports/baselines/h200/constraints.txt").touch()
    for step in TRIED["test_the_other_installations"]:
        workflow, job, name = step.split(" ", 2)
        done = team.step(workflow, job, name, {}, CARD="h200")
        assert done.returncode == 0, f"{step}: {done.stderr}"
    assert (team.home / "pip.log").read_text().splitlines() == [
        *["install -c constraints.txt -e .[perfbench]"] * 2,
        "install -c reports/baselines/h200/constraints.txt -e .[dev]",
        "-m pytest -q --require gpu tests/gpu",
        "install -c constraints.txt -e .[postgres]",
        "install -c constraints.txt -e .[history]",
        "install -c constraints.txt nox",
        "-s dist",  # of nox
    ]
    assert list((ROOT / "tests/gpu").glob("test_*.py"))


def test_the_page_and_what_changed(team: Team) -> None:
    """Of one run, in which nothing can have changed."""
    shutil.copytree(ROOT / "tests/data/runs/cpu", team.folder / "reports" / "evidence" / "cpu")
    values = {"runner.temp": str(team.home)}
    more = {"RUNNER_TEMP": str(team.home), "PERFBENCH_HISTORY": str(team.home / "history.sqlite")}
    for step in TRIED["test_the_page_and_what_changed"]:
        workflow, job, name = step.split(" ", 2)
        done = team.step(workflow, job, name, values, **more)
        assert done.returncode == 0, f"{step}: {done.stderr}"
    for site in (team.home / "site", team.folder / "site"):
        assert (site / "index.html").is_file()


GOOD = ENTRY | {"first_baseline_due": True}
OTHER = {"name": "other", "baseline": "reports/baselines/h200/tiny.json"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[", "got what is no JSON"),
        ('{"name": "tiny"}', "wanted a list of entries"),
        (json.dumps([{("runer" if k == "runner" else k): v for k, v in ENTRY.items()}]), "runer"),
        (json.dumps([ENTRY | {"first_baseline_du": True}]), "entry 1 with"),
        (json.dumps([ENTRY | {"name": "a/b"}]), "the name 'a/b'"),
        (json.dumps([ENTRY, ENTRY | {"matrix": "x.yaml"}]), "the name tiny twice"),
        (json.dumps([ENTRY | {"baseline": "base.json"}]), "where check looks"),
        (json.dumps([GOOD, ENTRY | OTHER]), ""),
    ],
)
def test_a_typo_in_a_fleet_is_one_line_before_a_gpu_is_touched(
    text: str, said: str, team: Team, tmp_path: Path
) -> None:
    """`entries` is then not written, so that no job on a GPU starts."""
    path, output = tmp_path / "fleet.json", tmp_path / "output"
    path.write_text(text, encoding="utf-8")
    values = {"inputs.fleet": str(path)}
    done = team.step("perfbench.yml", "routes", "Fleet", values, GITHUB_OUTPUT=str(output))
    assert done.returncode == (2 if said else 0), done.stderr
    assert said in done.stderr and len(done.stderr.splitlines()) == (1 if said else 0)
    assert output.read_text() == ("" if said else f"entries={text}\n")
