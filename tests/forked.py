"""Python processes with an environment of their own that need not import torch again: forks of one
that has.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
SERVER = """
import json, os, sys, traceback
import torch
import torch._dynamo  # what the first call of an operator imports

def act(job):
    os.environ.clear()
    os.environ.update(job["environment"])
    for descriptor, path in ((1, job["stdout"]), (2, job["stderr"])):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), descriptor)
    status = 0
    try:
        exec(job["code"], {"__name__": "__main__"})
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)

assert not [name for name in sys.modules if name.partition(".")[0] in ("nsa", "perfbench")]
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        act(json.loads(line))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class TorchProcess:
    """Starts with the first run; nsa is imported anew in each, so that it reads the environment."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._server: subprocess.Popen[str] | None = None

    def run(self, code: str, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        """``python -c code`` in the root of the checkout with exactly ``environment``; an exception
        is exit status 1 and its traceback.
        """
        if self._server is None:
            self._server = subprocess.Popen(
                [sys.executable, "-c", SERVER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=ROOT,
                text=True,
            )
        assert self._server.stdin is not None and self._server.stdout is not None
        stdout, stderr = self._folder / "stdout", self._folder / "stderr"
        job = {"code": code, "environment": dict(environment)}
        job |= {"stdout": str(stdout), "stderr": str(stderr)}
        self._server.stdin.write(json.dumps(job) + "\n")
        self._server.stdin.flush()
        status = int(self._server.stdout.readline())
        return subprocess.CompletedProcess(
            ["python", "-c", code], status, stdout.read_text(), stderr.read_text()
        )

    def close(self) -> None:
        if self._server is not None:
            self._server.communicate()
