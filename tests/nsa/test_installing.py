"""The command that installs an extra names what this installation came from."""

from __future__ import annotations

import importlib.metadata
import json
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from nsa.installing import pip_install

ROOT = Path(__file__).parents[2]
FROM_GIT = {
    "url": "https://host/owner/repository",
    "vcs_info": {"vcs": "git", "commit_id": "0af3"},
}


def recorded(monkeypatch: pytest.MonkeyPatch, origin: object) -> None:
    """pip's direct_url.json of the distribution; None: it has none, as from an index."""
    text = None if origin is None else json.dumps(origin)
    made = SimpleNamespace(read_text=lambda name: text if name == "direct_url.json" else None)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: made)


def test_a_checkout_installs_itself() -> None:
    assert shlex.split(pip_install("train")) == ["pip", "install", "-e", f"{ROOT}[train]"]


@pytest.mark.parametrize(
    ("origin", "wanted"),
    [
        (FROM_GIT, "nsa-perfbench[train] @ git+https://host/owner/repository@0af3"),
        ({"url": "file:///tmp/x.whl", "archive_info": {}}, "nsa-perfbench[train]"),
        (None, "nsa-perfbench[train]"),
    ],
)
def test_an_installation_names_its_origin(
    origin: object, wanted: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recorded(monkeypatch, origin)
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "another"\n')
    assert shlex.split(pip_install("train", tmp_path)) == ["pip", "install", wanted]


def test_what_was_never_installed_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def gone(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", gone)
    assert pip_install("train", tmp_path) == "pip install 'nsa-perfbench[train]'"
