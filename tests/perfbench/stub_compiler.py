"""A compiler of `perfbench codegen` for tests: `python -m tests.perfbench.stub_compiler WHAT`.

It needs neither torch nor Triton, and answers each job with two variants.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

NUMBERS = {
    "warps": 4,
    "registers": 96,
    "stores": 0,
    "loads": 0,
    "stack": 0,
    "shared": 1024,
    "tcgen05": 0,
    "wgmma": 8,
    "mma": 0,
    "code": 640,
}


def emit(event: str, **content: object) -> None:
    print(json.dumps({"event": event, **content}), flush=True)


def main(what: str) -> None:
    if what == "broken":
        sys.exit("No module named 'triton'")
    for line in sys.stdin:
        job = json.loads(line)
        emit("versions", triton="9.9.9", ptxas="13.0.1")
        for kernel in ("nsa_one", "nsa_two"):
            known = {
                "kernel": kernel,
                "variant": f"{job['shape']}.case",
                "source": "nsa/one.py:7",
            }
            if f"{kernel} {known['variant']}" in job["skip"]:
                continue
            emit("begin", **known)
            if (
                what == "crash"
                and kernel == "nsa_one"
                and (job["sm"], job["shape"]) == ("9.0", "A")
            ):
                print("LLVM ERROR: out of registers", file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGABRT)
            once = Path(what)
            if what.endswith(".killed") and not once.exists():
                once.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "refused" and kernel == "nsa_two":
                emit("failed", **known, reason="ptxas k.ptx, line 3; error   : no such register")
                continue
            emit("built", **known, **NUMBERS)
        emit("done")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
