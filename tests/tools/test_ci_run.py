""".ci/run: the minutes of each part, and a failure beyond its limit, with programs that take as
long as a test says.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "run"
# A shell whose SECONDS is what the fakes below say has passed.
PYTHON3 = """#!/bin/sh
mkdir -p "$3/bin"
printf '#!/bin/sh\\nexit 0\\n' > "$3/bin/pip"
printf '#!/bin/sh\\nexit %s\\n' "$FAKE_NOX" > "$3/bin/nox"
chmod +x "$3/bin/pip" "$3/bin/nox"
"""


def ran(
    tmp_path: Path,
    *,
    minutes: float,
    limit: str | None = None,
    nox: int = 0,
    slowness: str | None = "1",
) -> subprocess.CompletedProcess[str]:
    """The script, to which ``minutes`` have passed when it ends, and whose nox exits with that."""
    home = tmp_path / "checkout"
    (home / ".ci").mkdir(parents=True)
    # Bash counts SECONDS from any value that it is set to: the clock is set ahead.
    text = SCRIPT.read_text(encoding="utf-8")
    ahead = text.replace("installed=$SECONDS\n", f"SECONDS={60 * minutes:.0f}\ninstalled=60\n")
    assert ahead != text
    (home / ".ci" / "run").write_text(ahead, encoding="utf-8")
    fakes = tmp_path / "bin"
    fakes.mkdir()
    (fakes / "python3").write_text(PYTHON3, encoding="utf-8")
    (fakes / "python3").chmod(0o755)
    environment = {"PATH": f"{fakes}:{os.environ['PATH']}", "FAKE_NOX": str(nox)}  # noqa: TID251
    if slowness is not None:
        environment["CI_SLOWNESS"] = slowness
    if limit is not None:
        environment["CI_LIMIT_MINUTES"] = limit
    bash = shutil.which("bash")
    assert bash is not None
    return subprocess.run(
        [bash, str(home / ".ci" / "run")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_it_prints_the_minutes_of_each_part(tmp_path: Path) -> None:
    done = ran(tmp_path, minutes=39)
    assert done.returncode == 0 and done.stderr == ""
    assert re.search(
        r"venv and nox +1\.0\nthe sessions of nox +38\.0\nall +39\.0\n$", done.stdout
    ), done.stdout


@pytest.mark.parametrize("limit", [None, "40"])
def test_more_than_forty_minutes_fail(tmp_path: Path, limit: str | None) -> None:
    done = ran(tmp_path, minutes=41, limit=limit)
    assert done.returncode == 1
    assert "41.0 minutes are more than the 40 that it may take" in done.stderr
    assert re.search(r"all +41\.0", done.stdout)


@pytest.mark.parametrize("minutes, code", [(2.5, 1), (1.4, 0)])
def test_the_limit_is_a_setting(tmp_path: Path, minutes: float, code: int) -> None:
    assert ran(tmp_path, minutes=minutes, limit="1.5").returncode == code


@pytest.mark.parametrize("minutes, code", [(59, 0), (61, 1)])
def test_a_slower_machine_has_more_minutes(tmp_path: Path, minutes: float, code: int) -> None:
    assert ran(tmp_path, minutes=minutes, slowness="1.5").returncode == code


@pytest.mark.parametrize("minutes, code", [(39, 0), (81, 1)])
def test_of_any_machine_between_one_and_two_limits(
    tmp_path: Path, minutes: float, code: int
) -> None:
    assert ran(tmp_path, minutes=minutes, slowness=None).returncode == code


def test_a_failure_keeps_its_exit_code_and_its_minutes(tmp_path: Path) -> None:
    done = ran(tmp_path, minutes=50, nox=3)
    assert done.returncode == 3 and "are more than" in done.stderr
    assert re.search(r"all +50\.0", done.stdout)


def test_a_limit_that_is_none_is_refused(tmp_path: Path) -> None:
    done = ran(tmp_path, minutes=1, limit="soon")
    assert done.returncode == 2 and "wanted minutes" in done.stderr
