"""A disk on which no file can be written any more."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest


def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """No text can be written to a file any more; half of it may have been."""

    def write_text(path: Path, text: str, **_: Any) -> int:
        with path.open("w", encoding="utf-8") as file:
            file.write(text[: len(text) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(Path, "write_text", write_text)
