"""``python -m nsa``."""

from __future__ import annotations

import sys


def main() -> int:
    """The command line; 2 with one line where typer, which the extra `perfbench` brings, is not
    installed.
    """
    try:
        from nsa import cli
    except ModuleNotFoundError as error:
        if error.name != "typer":
            raise
        print(
            "nsa: the package typer is missing, which `python -m nsa` prints with. Next:"
            " pip install typer",
            file=sys.stderr,
        )
        return 2
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
