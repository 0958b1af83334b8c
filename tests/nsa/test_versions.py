"""FAULTS 'weight: a warning on versions that were not tried': torch and Triton outside the tried
pairs are named once, at the first use and never at import.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest

from nsa.capability import TRIED, UntriedVersionWarning, untried

ROOT = Path(__file__).parents[2]
# a process of its own, since a warning comes once a process; versions as packages would say them
SCRIPT = """
import importlib.metadata, sys, warnings
real, said = importlib.metadata.version, {{"torch": {torch!r}, "triton": {triton!r}}}
importlib.metadata.version = lambda name: said.get(name) or real(name)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import nsa, torch
    from nsa import NSAAttention, NSAConfig, nsa_attention, sliding_attention
    print("import", len(caught))
    x = torch.randn(1, 8, 2, 4)
    for _ in range(2):
        sliding_attention(x, x, x, window=3)
        gates = torch.ones(1, 8, 2, 3)
        nsa_attention(x, *[(x, x)] * 3, gates, config=NSAConfig())
print("use", len(caught), *[w.category.__name__ for w in caught])
for w in caught:
    print(w.message)
"""


def said(torch: str, triton: str) -> list[str]:
    script = SCRIPT.format(torch=torch, triton=triton)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_an_untried_torch_is_named_once_and_not_at_import() -> None:
    imported, used, *messages = said("2.14.1+cpu", "3.7.1")
    assert imported == "import 0"
    assert used == "use 1 UntriedVersionWarning"
    (message,) = messages  # one line
    assert "torch 2.14.1+cpu with triton 3.7.1" in message
    assert "wanted torch 2.11.0 with triton 3.6.0 or torch 2.13.0 with triton 3.7.1;" in message


def test_a_tried_pair_is_silent() -> None:
    assert said("2.13.0+cu130", "3.7.1") == ["import 0", "use 0"]


@pytest.mark.parametrize(
    ("torch", "triton", "is_tried"),
    [
        *[(torch, triton, True) for torch, triton in TRIED],
        ("2.11.0+cu128", "3.6.0", True),
        ("2.13.0", None, True),
        ("2.12.0", None, False),
        ("2.13.1", "3.7.1", False),
        ("2.13.0", "3.6.0", False),  # each was tried, not together
        ("2.13.0", "3.7.0", False),
        ("0", None, False),
    ],
)
def test_pairs_are_compared_whole(torch: str, triton: str | None, is_tried: bool) -> None:
    assert (untried(torch, triton) is None) == is_tried


def test_the_warning_has_a_category_of_its_own() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", UntriedVersionWarning)
        warnings.warn("x", UntriedVersionWarning, stacklevel=1)


def test_what_is_pinned_for_the_tests_is_tried() -> None:
    pins = (ROOT / "constraints.txt").read_text()
    pair = tuple(re.search(rf"^{name}==(\S+)", pins, re.M)[1] for name in ("torch", "triton"))
    assert pair in TRIED
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert any(x.startswith("torch>=2.11") for x in needs), "the oldest that was tried"
