"""GPU tests are asked for by name (`--require gpu`); then a missing GPU fails them, it does not skip them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

GPU_TESTS = Path(__file__).parent / "gpu"

settings.register_profile("project", deadline=None, derandomize=True)  # shared CPUs stall for seconds; same inputs, same verdict
settings.load_profile("project")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require", choices=["gpu"], default=None, help="also collect tests/gpu, and fail them where there is no CUDA device")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    asked = config.getoption("--require") == "gpu"
    return None if asked or not collection_path.is_relative_to(GPU_TESTS) else True


def pytest_runtest_setup(item: pytest.Item) -> None:
    if not item.path.is_relative_to(GPU_TESTS):
        return
    import torch

    if not torch.cuda.is_available():
        pytest.fail("--require gpu was given, and torch sees no CUDA device; run without --require, or on a machine with a GPU")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As measure does: beside another process, a second thread that has to wait stalls the first (a test took 17 s, not 0.4)."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
