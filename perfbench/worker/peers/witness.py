"""What must be among a profiled step's names for a peer to have run."""

from __future__ import annotations

import re
from collections.abc import Mapping

from perfbench.records import Peer

_MOST_NAMED = 4


def witness_of(peer: Peer, kernels: Mapping[str, int], *, on_gpu: bool) -> tuple[bool, str]:
    """Whether a device kernel bears a name of ``peer``, and the sentence that says so.

    On a CPU the count of its calls is all that there is: kernels have no names there.
    """
    if not on_gpu:
        return True, f"{peer.name} was called (CPU: no kernel names)"
    marks = re.compile(peer.kernels)
    own = [name for name in kernels if marks.search(name)]
    if not own:
        longest = ", ".join(list(kernels)[:_MOST_NAMED]) or "none"
        return (
            False,
            f"{peer.name} declares kernels of the name {peer.kernels!r}, and none of the"
            f" {len(kernels)} that ran bears it: {longest}",
        )
    return True, f"kernel names agree with {peer.name} ({len(own)} of {len(kernels)} names)"
