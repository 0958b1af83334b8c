"""``perfbench`` and ``python -m perfbench``."""

from __future__ import annotations

import os
import sys

from nsa.installing import pip_install
from perfbench.text import inert


def main() -> int:
    """The command line; 2 with one line where the extra `perfbench` is not installed: `nsa` alone
    brings torch and triton; so on a system without fork.
    """
    if os.name != "posix":
        text = f"perfbench: got the system {sys.platform}, wanted Linux or macOS, which can fork"
        print(inert(f"{text}. Next: run it in WSL 2; nsa itself runs here"), file=sys.stderr)
        return 2
    try:
        from perfbench.commands import main as run
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("nsa", "perfbench"):
            raise
        text = f"perfbench: the package {missing} is missing: got nsa alone, wanted the harness too"
        print(inert(f"{text}. Next: {pip_install('perfbench')}"), file=sys.stderr)
        return 2
    return run()


if __name__ == "__main__":
    sys.exit(main())
