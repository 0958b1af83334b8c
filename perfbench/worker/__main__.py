"""``python -m perfbench.worker``: the measuring server, which imports one `nsa` and no other.

With ``--nsa FOLDER`` it takes that folder's `nsa`, as one side of an A/B. Nothing that imports
`nsa` is imported before the folder is known.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from perfbench.worker.nsa_version import use


def main() -> None:
    """Parse, choose the `nsa`, and serve until stdin ends."""
    parser = argparse.ArgumentParser(prog="python -m perfbench.worker")
    parser.add_argument("--measure", required=True, metavar="MODULE:FUNCTION")
    parser.add_argument(
        "--nsa", type=Path, metavar="FOLDER", help="import the package nsa from here"
    )
    options = parser.parse_args()
    if options.nsa is not None:
        use(options.nsa)
    from perfbench.worker.server import serve

    serve(options.measure, options.nsa)


if __name__ == "__main__":
    main()
