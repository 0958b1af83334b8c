"""``python -m nsa.train``."""

from __future__ import annotations

import sys

from nsa.installing import pip_install


def main() -> int:
    """The command line; 10 with one line where a package that it needs is not installed."""
    try:
        from nsa.train import cli
    except ModuleNotFoundError as error:
        if error.name != "typer":
            raise
        sys.stderr.write(
            "nsa.train: the package typer is missing, which `python -m nsa.train` needs;"
            f" {pip_install('train')}\n"
        )
        return 10
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
