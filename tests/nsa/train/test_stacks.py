"""Stacks of a process in which something else took a signal over, blocks it or waits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nsa.train import stacks
from tests.nsa.train.supervised import wait_for

TRITON = """
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
@triton.jit
def double(x, n: tl.constexpr):
    at = tl.arange(0, n)
    tl.store(x + at, tl.load(x + at) * 2)
source = ASTSource(double, {"x": "*fp32", "n": "constexpr"}, constexprs={"n": 128})
triton.compile(source, target=GPUTarget("cuda", 90, 32))
"""
# what a library does: the process still catches the signal, and abs() writes nothing
TAKE = "c = ctypes.CDLL(None)\nfor number in {}: c.signal(int(number), c.abs)\n"
SLEEP = "def sleeps():\n    print('ready', flush=True)\n    time.sleep(300)\n"
# posix_spawn blocks all signals, and waits in the kernel for its child, which waits for a writer
SPAWN = """
threading.Thread(target=time.sleep, args=(300,), daemon=True).start()
def spawns():
    print("ready", flush=True)
    action = (os.POSIX_SPAWN_OPEN, 0, sys.argv[2], os.O_RDONLY, 0)
    os.posix_spawn("/bin/true", ["true"], {}, file_actions=[action])
"""


@pytest.fixture
def _compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that is in the cache, or is interpreted, needs no LLVM."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@contextmanager
def process(path: Path, code: str, last: str, *words: str) -> Iterator[int]:
    """A process that installed the handlers and ran ``code``, and is in ``last``, which prints
    ready: its pid.
    """
    head = "import ctypes, os, sys, time, threading; from pathlib import Path\n"
    head += "from nsa.train import stacks; stacks.install(Path(sys.argv[1]))\n"
    file = path.parent.parent / "process.py"  # Triton reads a kernel's source
    file.write_text(f"{head}{code}\n{last}")
    argv = [sys.executable, str(file), str(path), *words]
    started = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, process_group=0)
    try:
        assert started.stdout is not None
        assert started.stdout.readline() == "ready\n"
        yield started.pid
    finally:
        os.killpg(started.pid, signal.SIGKILL)
        started.communicate()


@pytest.mark.parametrize(
    "taken",
    [TRITON, TAKE.format("stacks.SIGNALS[:1]")],
    ids=["SIGUSR1, by Triton", "the first"],
)
@pytest.mark.usefixtures("_compiles")
def test_stacks_come_where_one_signal_is_taken_over(tmp_path: Path, taken: str) -> None:
    path = stacks.stacks_path(tmp_path, 0)
    with process(path, SLEEP + taken, "sleeps()") as pid:
        assert stacks.dump(pid, path, 2.0)
        assert path.read_text().count("in sleeps") == 1


@pytest.mark.usefixtures("_compiles")
def test_triton_takes_sigusr1_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Why it is not the first one that is sent."""
    path = stacks.stacks_path(tmp_path, 0)
    with process(path, SLEEP + TRITON, "sleeps()") as pid:
        monkeypatch.setattr(stacks, "SIGNALS", stacks.SIGNALS[1:])
        assert not stacks.dump(pid, path, 0.3)
    text = path.read_text()
    assert "no answer in 0.3 s to SIGUSR1 (10): something else may have taken" in text
    assert "SIGUSR1 (10): the process catches\n" in text


def test_text_of_another_kind_is_no_answer(tmp_path: Path) -> None:
    path = stacks.stacks_path(tmp_path, 0)
    taken = TAKE.format("stacks.SIGNALS") + "print('ready', flush=True)\n"
    writes = "while True: open(sys.argv[1], 'a').write('Traceback\\n'); time.sleep(0.01)"
    with process(path, taken, writes) as pid:
        assert not stacks.dump(pid, path, 0.3)
    text = path.read_text()
    assert "no answer in 0.3 s to SIGRTMIN+7 (41), SIGUSR1 (10)" in text
    assert "SIGRTMIN+7 (41): the process catches\n" in text


def test_a_main_thread_that_waits_in_the_kernel_is_dumped_by_another(tmp_path: Path) -> None:
    path = stacks.stacks_path(tmp_path, 0)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with process(path, SPAWN, "spawns()", str(fifo)) as pid:
        wait_for(lambda: stacks.state(pid) == "D")
        assert stacks.dump(pid, path, 2.0)
    assert "in spawns" in path.read_text()


@pytest.mark.parametrize("installs", [True, False])
def test_a_proc_without_masks_of_signals(
    tmp_path: Path, installs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gVisor's: who keeps no file of stacks open is not sent what would end it."""
    read = stacks._read

    def gvisor(path: Path) -> str:
        lines = read(path).splitlines(keepends=True)
        return "".join(one for one in lines if not one.startswith(("Sig", "Shd")))

    monkeypatch.setattr(stacks, "_read", gvisor)
    path = stacks.stacks_path(tmp_path, 0)
    undone = "import faulthandler\nfor one in stacks.SIGNALS: faulthandler.unregister(one)\n"
    with process(path, SLEEP + ("" if installs else undone), "sleeps()") as pid:
        assert stacks.dump(pid, path, 2.0) == installs
        assert stacks.state(pid) in ("R", "S")
    text = path.read_text()
    assert ("in sleeps" in text) == installs
    assert ("this kernel's /proc has no masks of signals" in text) != installs
