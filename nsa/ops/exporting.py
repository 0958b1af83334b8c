"""Whether torch.export traces."""

from __future__ import annotations

import torch


def is_exporting() -> bool:
    """`torch.compiler.is_exporting`, also inside torch.compile of torch 2.11.

    There Dynamo takes that function for True in every graph: compiled calls went the ways of
    export, and their choice of blocks left out a rounding (12 compiled cells of v2 and masked
    failed their proof on an H200). The flag that it returns is False there.
    """
    flag = getattr(torch.compiler, "_is_exporting_flag", None)
    return torch.compiler.is_exporting() if flag is None else bool(flag)
