"""What a measuring process holds, asked of the modules themselves: metadata on the search path can
be another installation's.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import nsa
from perfbench.machine import package_sha256
from perfbench.records import LoadedCode


def loaded_code() -> LoadedCode:
    """Of this process, now; triton is null where nothing has imported it."""
    folder = Path(nsa.__file__).resolve().parent
    triton = sys.modules.get("triton")
    return LoadedCode(
        torch=str(torch.__version__),
        triton=None if triton is None else getattr(triton, "__version__", None),
        cuda=torch.version.cuda,
        nsa_folder=str(folder),
        nsa_sha256=package_sha256(folder),
    )
