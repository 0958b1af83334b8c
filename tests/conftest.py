"""GPU tests are asked for by name (`--require gpu`); then a missing GPU fails them, it does not
skip them. `--require two-gpus` asks for those of two GPUs as well, in the same way.

`--require interpreter` turns Triton's interpreter on, so that path `triton` runs on a CPU: every
test over the paths gets it. `--require postgres` gives the history's tests a second database.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from hypothesis import settings

from tests.forked import TorchProcess

GPU_TESTS = Path(__file__).parent / "gpu"
TWO_GPU_TESTS = GPU_TESTS / "test_two_gpus.py"
BROWSER_TESTS = Path(__file__).parent / "browser"
FLEET_TESTS = Path(__file__).parent / "fleet"
KERNELS = (
    "choice",
    "context",
    "decode",
    "dense_tiles",
    "interval",
    "interval_roles",
    "joint_backward",
    "lists",
    "means",
    "one_node",
    "operator",
    "paged",
    "paged_step",
    "passing_keys",
    "phi",
    "selected",
    "step",
    "warp_roles",
)
KERNEL_TESTS = {Path(__file__).parent / "nsa" / f"test_{name}_kernels.py" for name in KERNELS}

# shared CPUs stall for seconds; same inputs, same verdict
settings.register_profile("project", deadline=None, derandomize=True)
settings.load_profile("project")


def pytest_addoption(parser: pytest.Parser) -> None:
    what = (
        "gpu: also collect tests/gpu, and fail them where there is no CUDA device; two-gpus: also"
        " those of two GPUs, and fail them where there are fewer; interpreter: run path triton in"
        " Triton's interpreter; postgres: run the history's tests on a PostgreSQL"
        " server, too, and fail them where it cannot be started; browser: collect tests/browser,"
        " and fail them where there is no Chromium; fleet: collect tests/fleet, and fail them"
        " without ray and submitit"
    )
    choices = ["gpu", "two-gpus", "interpreter", "postgres", "browser", "fleet"]
    parser.addoption("--require", choices=choices, default=None, help=what)
    parser.addoption(
        "--shuffle", type=int, default=None, metavar="SEED", help="run the tests in a random order"
    )


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell starts what it puts into the background so, and processes that tests interrupt
        # would inherit it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("--require") != "interpreter":
        return
    pytest.MonkeyPatch().setenv("TRITON_INTERPRET", "1")  # which Triton reads while it is imported
    from tests.interpreter import patch_language_once

    patch_language_once()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed = config.getoption("--shuffle")
    if seed is not None:
        Random(seed).shuffle(items)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    asked = config.getoption("--require")
    if collection_path == TWO_GPU_TESTS:
        return None if asked == "two-gpus" else True
    if collection_path.is_relative_to(GPU_TESTS):
        return None if asked in ("gpu", "two-gpus") else True
    if collection_path.is_relative_to(BROWSER_TESTS):
        return None if asked == "browser" else True
    if collection_path.is_relative_to(FLEET_TESTS):
        return None if asked == "fleet" else True
    return True if collection_path in KERNEL_TESTS and asked != "interpreter" else None


def pytest_runtest_setup(item: pytest.Item) -> None:
    if not item.path.is_relative_to(GPU_TESTS):
        return
    import torch

    asked, wanted = item.config.getoption("--require"), 2 if item.path == TWO_GPU_TESTS else 1
    got = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if got < wanted:
        pytest.fail(
            f"--require {asked} was given, and torch sees {got} CUDA devices of {wanted}; run"
            " without --require, or on a machine with that many GPUs"
        )


@pytest.fixture(autouse=True)
def copy_engine_for_small_tensors(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Path triton fetches tiles by descriptors where q is large, which a test's is not: here
    always, unless the test says otherwise.
    """
    if request.config.getoption("--require") in ("gpu", "two-gpus", "interpreter"):
        from nsa.ops.kernels import common

        monkeypatch.setattr(common, "COPY_MIN_ELEMENTS", 0)


@pytest.fixture(scope="session")
def torch_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TorchProcess]:
    made = TorchProcess(tmp_path_factory.mktemp("forked"))
    yield made
    made.close()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread, as in measure: next to another process, a second thread that has to wait stalls
    the first (a test took 17 s, not 0.4).
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
