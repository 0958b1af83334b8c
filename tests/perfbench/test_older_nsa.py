"""The seam to an older nsa: names that moved are found where that nsa has them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nsa.decode import KV, NSACache, Steps, capture, warm_up
from nsa.ops.decode.kernels import LEAST_KEYS
from nsa.ops.key_counts import KeysRead
from nsa.routing import Path as SelectedPath
from nsa.routing import Route
from nsa.routing.thresholds import COPY_MIN_ELEMENTS, SORT_MIN_ROWS
from perfbench import older_nsa

ROOT = Path(__file__).parents[2]
CODE = """
from perfbench import older_nsa as here
names = ("KV", "NSACache", "Steps", "KeysRead", "capture", "warm_up")
print(*(getattr(here, name) for name in names))
print(here.sort_min_rows(), here.copy_min_elements(), here.least_keys_of_a_split())
"""
# The layout before operations had folders, and one from before decode steps split their keys.
YESTERDAY = {
    "cache": "KV, NSACache = 1, 2",
    "steps": "Steps = 3",
    "decoding": "capture, warm_up = 5, 6",
    "routing": "",
    "routes": "SORT_MIN_ROWS, COPY_MIN_ELEMENTS = 7, 8",
    "ops/__init__": "",
    "ops/reads": "KeysRead = 4",
    "ops/kernels/__init__": "",
    "ops/kernels/decode": "LEAST_KEYS = 9",
}
BEFORE = {
    **{name: text for name, text in YESTERDAY.items() if name != "ops/kernels/decode"},
    "routes": "",
    "ops/kernels/selected": "MIN_ROWS_TO_SORT = 10",
}


def test_the_names_are_those_of_this_nsa() -> None:
    assert (older_nsa.NSACache, older_nsa.Steps) == (NSACache, Steps)
    assert (older_nsa.KeysRead, older_nsa.KV) == (KeysRead, KV)
    assert (older_nsa.capture, older_nsa.warm_up) == (capture, warm_up)
    assert older_nsa.sort_min_rows() == SORT_MIN_ROWS
    assert older_nsa.copy_min_elements() == COPY_MIN_ELEMENTS
    assert older_nsa.least_keys_of_a_split() == LEAST_KEYS
    assert older_nsa.promise_of_sigmoid_gates() == {"nonnegative_gates": True}
    assert older_nsa.steps_off(Route((), off=("copy",))) == ("copy",)


@pytest.mark.parametrize(
    ("modules", "shown"),
    [(YESTERDAY, "1 2 3 4 5 6\n7 8 9\n"), (BEFORE, "1 2 3 4 5 6\n10 0 None\n")],
    ids=["yesterday", "before"],
)
def test_an_older_nsa_has_them_elsewhere(
    modules: dict[str, str], shown: str, tmp_path: Path
) -> None:
    for name, text in {"__init__": "", **modules}.items():
        path = tmp_path / "nsa" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (tmp_path / "perfbench").symlink_to(ROOT / "perfbench")
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == shown


def test_a_name_that_no_nsa_has_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(older_nsa._HOMES, "Steps", ("nsa.stepping", "nsa.routing.steps"))
    with pytest.raises(ImportError, match="cannot import Steps from any of nsa.stepping"):
        _ = older_nsa.Steps
    with pytest.raises(AttributeError, match="Stps"):
        older_nsa.Stps  # noqa: B018
    monkeypatch.setattr(older_nsa, "_exists", lambda module: False)
    with pytest.raises(ImportError, match=r"SORT_MIN_ROWS of nsa\.routing\.thresholds or"):
        older_nsa.sort_min_rows()


@pytest.mark.parametrize("path", list(SelectedPath))
def test_a_file_is_of_one_path(path: SelectedPath) -> None:
    """Triton's is a folder, which was a file."""
    files = [f"ops/selected/{name}" for name in ("v1", "v2", "triton", "triton/operator")]
    own = [file for file in files if older_nsa.is_of_path(file, path)]
    assert own == [file for file in files if file.split("/")[2] == path]
