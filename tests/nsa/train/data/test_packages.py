"""The error of a package that is missing names the extra that has it, by pyproject.toml."""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path

import pytest

from nsa.installing import pip_install
from nsa.train.data.packages import need
from nsa.train.errors import TrainError, TrainExit

EXTRAS = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())["project"][
    "optional-dependencies"
]


@pytest.mark.parametrize("package", ["pyarrow", "tokenizers", "numpy", "datasets", "tiktoken"])
def test_the_extra_that_is_named_has_the_package(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(TrainError, match=f"the package {package} is missing") as caught:
        need(package, "this test")
    assert caught.value.code is TrainExit.MISSING
    named = [one for one in EXTRAS if str(caught.value).endswith(f"; {pip_install(one)}")]
    assert [any(one.startswith(package) for one in EXTRAS[extra]) for extra in named] == [True]
