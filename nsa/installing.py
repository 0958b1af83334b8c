"""The command that installs an extra of this distribution, from where this one came from."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

NAME = "nsa-perfbench"


def pip_install(extra: str, root: Path = Path(__file__).parents[1]) -> str:
    """``pip install ...`` with ``extra``, quoted for a shell.

    Of a checkout, installed or not, where ``root``, the folder of this package, has our
    pyproject.toml; of the repository and commit that pip installed it from; else by name.
    """
    project = root / "pyproject.toml"
    if project.is_file() and f'name = "{NAME}"' in project.read_text(encoding="utf-8"):
        return f"pip install -e {shlex.quote(f'{root}[{extra}]')}"
    return f"pip install {shlex.quote(f'{NAME}[{extra}]{_origin()}')}"


def _origin() -> str:
    """`` @ git+URL@COMMIT`` by what pip recorded (PEP 610); "" for a wheel or an index."""
    import importlib.metadata  # which takes longer than a command line's help should

    try:
        text = importlib.metadata.distribution(NAME).read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return ""
    found = json.loads(text or "{}")
    vcs = found.get("vcs_info")
    return f" @ {vcs['vcs']}+{found['url']}@{vcs['commit_id']}" if vcs else ""
