"""`nox` runs every check a change must pass.

One environment, built by the session `dev`, serves all the others.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import nox

nox.needs_version = ">=2024.10"
nox.options.sessions = [
    "lint",
    "types",
    "contracts",
    "tests",
    "postgres",
    "interpret",
    "codegen",
    "browser",
    "fleet",
    "docs",
    "smoke",
]
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_external_run = True

MATRIX = "matrices/cpu.yaml"
# No test is timed. Each worker takes one half in its order, so that neighbours share what a module
# builds and what the oracle found; at the end it takes over from the other.
TWO_AT_A_TIME = ("-q", "-n", "2", "--dist", "worksteal")
FLA = "fla-core==0.6.0"  # tests/peers states where this version differs
CHROMIUMS = ("chromium", "chromium-browser", "google-chrome")  # as tests/browser looks for them
FIRST_HOUR = (  # what `perfbench init` says comes next, with every cell
    ("init", "cpu"),
    ("plan", MATRIX),
    ("run", MATRIX),
    ("baseline", "promote", "latest", "--allow-dirty"),
    ("check", MATRIX),
)
# pip compiles each of 16,855 files (6,450 took 32 s of CPU); the first import compiles what is
# imported. Where no import may write what it compiled, each process would do so anew.
INSTALL = () if sys.dont_write_bytecode else ("--no-compile",)
_bin: list[str] = []  # the folder of `dev`'s programs, known once it has run
_minutes: dict[str, float] = {}  # of each session that has begun


@atexit.register
def _show_minutes() -> None:
    """Also after one that failed: the last line is then its own."""
    if _minutes:
        print(
            f"\n{'session':<10} minutes",
            *(f"{n:<10} {m:7.1f}" for n, m in _minutes.items()),
            sep="\n",
        )
        print(f"{'together':<10} {sum(_minutes.values()):7.1f}", flush=True)


def timed(function: Callable[[nox.Session], None]) -> Callable[[nox.Session], None]:
    """The session, with its minutes in the table at the end."""

    @functools.wraps(function)
    def run(session: nox.Session) -> None:
        begin = time.monotonic()
        try:
            function(session)
        finally:
            _minutes[function.__name__] = (time.monotonic() - begin) / 60

    return run


def _run(
    session: nox.Session, program: str, *arguments: str, env: dict[str, str] | None = None
) -> None:
    session.run(str(Path(_bin[0]) / program), *arguments, external=True, env=env)


@nox.session
@timed
def dev(session: nox.Session) -> None:
    """The shared environment: this checkout, editable, with the development tools."""
    session.install(*INSTALL, "-c", "constraints.txt", "-e", ".[dev]")
    _bin[:] = [session.bin]


@nox.session(venv_backend="none", requires=["dev"])
@timed
def lint(session: nox.Session) -> None:
    """ruff, and actionlint of the workflows; the laws that ruff cannot express are in
    tests/test_laws.py.
    """
    _run(session, "ruff", "check", ".")
    _run(session, "ruff", "format", "--check", ".")
    _run(session, "actionlint", "-shellcheck=", "-pyflakes=")  # which a machine may have or not


@nox.session(venv_backend="none", requires=["dev"])
@timed
def types(session: nox.Session) -> None:
    """mypy: strict on perfbench and on nsa's pure modules."""
    _run(session, "mypy")


@nox.session(venv_backend="none", requires=["dev"])
@timed
def contracts(session: nox.Session) -> None:
    """import-linter: who may import whom; and the rooms as docs/architecture.md draws them.

    `nox -s contracts -- draw` draws them again.
    """
    _run(session, "lint-imports")
    check = [] if session.posargs == ["draw"] else ["--check"]
    limits = ("--max-nodes", "20", "--max-layers", "9")
    _run(session, "python", "tools/package_graph.py", "perfbench", *limits, *check)
    _run(session, "python", "tools/package_graph.py", "nsa", *check)


@nox.session(venv_backend="none", requires=["dev"])
@timed
def tests(session: nox.Session) -> None:
    """Everything that needs no GPU."""
    # Tensors of this size gain nothing from a second thread, and next to another process it waits:
    # 13 minutes instead of 4.
    _run(session, "pytest", *TWO_AT_A_TIME, *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session(venv_backend="none", requires=["dev"])
@timed
def postgres(session: nox.Session) -> None:
    """The history's tests on Debian's PostgreSQL, which root installs where it is missing."""
    if not any(Path("/usr/lib/postgresql").glob("*/bin/postgres")):
        if os.getuid() != 0 or shutil.which("apt-get") is None:
            session.error("no PostgreSQL server. Next, as root: apt-get install postgresql")
        session.run("apt-get", "update", external=True)
        install = ("apt-get", "install", "--yes", "--no-install-recommends", "postgresql")
        session.run(*install, external=True, env={"DEBIAN_FRONTEND": "noninteractive"})
    # `tests` has run them on SQLite.
    arguments = ("--require", "postgres", "-k", "postgres", "tests/perfbench/history")
    _run(session, "pytest", *TWO_AT_A_TIME, *arguments, *session.posargs)


@nox.session(venv_backend="none", requires=["dev"])
@timed
def interpret(session: nox.Session) -> None:
    """Path triton without a GPU: its kernels, and the tests that run every path, in Triton's
    interpreter.
    """
    arguments = ("--require", "interpreter", "-k", "triton or kernels", "tests/nsa")
    _run(
        session,
        "pytest",
        *TWO_AT_A_TIME,
        *arguments,
        *session.posargs,
        env={"OMP_NUM_THREADS": "1"},
    )


@nox.session(venv_backend="none", requires=["dev"])
@timed
def codegen(session: nox.Session) -> None:
    """Every kernel compiled for SM 9.0, judged by the baseline in git; ci.yml has a job for all
    cards, since .ci/run has few minutes. `nox -s codegen -- --arch 8.0` is another one.
    """
    _run(session, "perfbench", "codegen", "--check", *(session.posargs or ("--arch", "9.0")))


@nox.session(venv_backend="none", requires=["dev"])
@timed
def browser(session: nox.Session) -> None:
    """The page of a history in Chromium, of a year of 300 cells; Debian's package is installed
    where there is none.
    """
    if not any(map(shutil.which, CHROMIUMS)):
        root = [] if os.geteuid() == 0 else ["sudo"]
        apt = (*root, "apt-get", "-o", "DPkg::Lock::Timeout=120")
        session.run(*apt, "update", "-qq", external=True)
        session.run(*apt, "install", "-qq", "-y", "chromium", external=True)
    two = ("-q", "-n", "2", "--dist", "loadgroup")
    _run(session, "pytest", *two, "--require", "browser", "tests/browser", *session.posargs)


@nox.session(venv_backend="none", requires=["dev"])
@timed
def fleet(session: nox.Session) -> None:
    """Runs on a real Ray cluster of three nodes, one of which is killed, and on submitit's local
    executor; both are installed here, and without them the tests fail.
    """
    pip = ("-m", "pip", "install", "--quiet", *INSTALL, "-c", "constraints.txt")
    _run(session, "python", *pip, "-e", ".[ray,slurm]")
    quiet = {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    _run(session, "pytest", "-q", "--require", "fleet", "tests/fleet", *session.posargs, env=quiet)


@nox.session(venv_backend="none", requires=["dev"])
@timed
def docs(session: nox.Session) -> None:
    """The site of README.md and docs/, in .site/html; a dead link or a warning fails."""
    pip = ("-m", "pip", "install", "--quiet", *INSTALL, "-c", "constraints.txt")
    _run(session, "python", *pip, "-e", ".[docs]")
    _run(session, "python", "tools/build_site.py")


@nox.session(venv_backend="none", requires=["dev"])
@timed
def smoke(session: nox.Session) -> None:
    """Measure, promote, measure again, gate: on this machine, against a baseline made a minute ago
    and thrown away.
    """
    with tempfile.TemporaryDirectory() as folder:
        runs, baseline = Path(folder, "runs"), Path(folder, "baseline.json")
        _run(session, "perfbench", "run", MATRIX, "--out", str(runs))
        (first,) = runs.iterdir()
        _run(
            session,
            "perfbench",
            "baseline",
            "promote",
            str(first),
            "--to",
            str(baseline),
            "--allow-dirty",
        )
        # Unconfirmed: on a shared machine that got busy, 40 pairs of every cell would take half an
        # hour (tests/perfbench/test_ab.py).
        _run(
            session,
            "perfbench",
            "check",
            MATRIX,
            "--baseline",
            str(baseline),
            "--out",
            str(runs),
            "--no-confirm",
        )


@nox.session(venv_backend="none", requires=["dev"], default=False)
@timed
def gpu(session: nox.Session) -> None:
    """Tests that need a CUDA device; without one they fail."""
    _run(session, "pytest", "-q", "--require", "gpu", "tests/gpu", *session.posargs)


@nox.session(venv_backend="none", requires=["dev"], default=False)
@timed
def bench(session: nox.Session) -> None:
    """How long each operation takes here; `nox -s bench -- --require gpu` on a GPU."""
    _run(session, "pytest", "-q", "tests/benchmarks", "--benchmark-only", *session.posargs)


@nox.session(venv_backend="none", requires=["dev"], default=False)
@timed
def fuzz(session: nox.Session) -> None:
    """Every reader of a file under atheris, two minutes each; `nox -s fuzz -- matrix --seconds 600`
    for one of them.
    """
    _run(
        session,
        "python",
        "-m",
        "pip",
        "install",
        "--quiet",
        "-c",
        "constraints.txt",
        "-e",
        ".[fuzz]",
    )
    _run(session, "python", "-m", "tests.fuzz", *session.posargs)


@nox.session(default=False)
@timed
def dist(session: nox.Session) -> None:
    """The wheel and the source distribution, in dist/, as a stranger gets them: the wheel built
    from the sdist, both checked, the wheel installed in a fresh environment and used from an empty
    folder; and what was installed with it, build/sbom.cdx.json. Needs a network.
    """
    session.install("-c", "constraints.txt", "build", "cyclonedx-bom", "twine")
    root, made = Path.cwd(), Path("dist")
    for folder in (made, Path("build")):
        shutil.rmtree(folder, ignore_errors=True)
    session.run("python", "-m", "build", "--outdir", str(made))
    wheel, sdist = next(made.glob("*.whl")), next(made.glob("*.tar.gz"))
    session.run("twine", "check", "--strict", str(wheel), str(sdist))
    with tempfile.TemporaryDirectory() as folder:
        python = str(Path(folder, "venv", "bin", "python"))
        session.run("python", "-m", "venv", str(Path(folder, "venv")))
        pip = ("-m", "pip", "install", "--quiet", "-c", str(root / "constraints.txt"))
        nsa, perfbench = wheel.resolve(), f"{wheel.resolve()}[perfbench]"
        home = Path(folder, "home")
        home.mkdir()
        with session.chdir(home):
            session.run(python, *pip, str(nsa), external=True)  # the first door: nsa alone
            session.run(python, "-c", "import nsa; nsa.NSAAttention(64, 4, 2, 16)", external=True)
            session.run(python, *pip, perfbench, external=True)
            for words in FIRST_HOUR:
                # The check's second speed may be SUSPECT (7) on a shared machine: it judged.
                codes = [0, 7] if words[0] == "check" else [0]
                command = (python, "-m", "perfbench", *words)
                session.run(*command, external=True, success_codes=codes)
        sbom = root / "build" / "sbom.cdx.json"
        sbom.parent.mkdir(exist_ok=True)
        arguments = ("--output-reproducible", "--pyproject", "pyproject.toml", "-o", str(sbom))
        session.run("cyclonedx-py", "environment", *arguments, python)


@nox.session(venv_backend="none", requires=["dev"], default=False)
@timed
def peers(session: nox.Session) -> None:
    """Compare with fla-core's pure-PyTorch NSA, and print where it differs; needs no GPU, and no
    package but its wheel's.
    """
    with (
        tempfile.TemporaryDirectory() as folder
    ):  # next to the shared environment, so that no other session meets it
        _run(
            session,
            "python",
            "-m",
            "pip",
            "install",
            "--quiet",
            "--target",
            folder,
            "-c",
            "constraints.txt",
            FLA,
        )
        _run(session, "pytest", "-q", "tests/peers", *session.posargs, env={"PYTHONPATH": folder})


@nox.session(venv_backend="none", requires=["dev"], default=False)
@timed
def huggingface(session: nox.Session) -> None:
    """The tests of nsa.huggingface with the newest transformers, and what it pins; torch is the
    shared environment's.
    """
    newest = ("transformers", "tokenizers", "huggingface_hub", "safetensors", "accelerate", "peft")
    with tempfile.TemporaryDirectory() as folder:
        install = ("-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", folder)
        _run(session, "python", *install, *newest)
        _run(session, "python", "-m", "pip", "list", "--path", folder)
        tests = ("-q", "tests/nsa/test_huggingface.py", *session.posargs)
        _run(session, "pytest", *tests, env={"PYTHONPATH": folder})
