"""Optional packages, imported where a run needs them."""

from __future__ import annotations

import importlib
from typing import Any

from nsa.installing import pip_install
from nsa.train.errors import TrainError, TrainExit

ONLY_IN_ALL = ("datasets", "tiktoken")  # of the extras in pyproject.toml


def need(module: str, what: str) -> Any:
    """The module ``module``, which ``what`` needs; TrainError MISSING where it is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:
            raise  # the package is there, and one that it needs is not
        extra = "train-all" if package in ONLY_IN_ALL else "train"
        raise TrainError(
            TrainExit.MISSING,
            f"the package {package} is missing, which {what} needs; {pip_install(extra)}",
        ) from error
