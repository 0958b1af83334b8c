"""Where the time goes: device time of a step by part against the floor of each, and the longest
kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nsa.routing import PATH_REQUESTS
from perfbench.text import NULL, cell_code, fixed, number
from tools.studies.kernellines import Line, device_ms, kernel_ms
from tools.studies.kerneltext import path_of, share, table

Parts = Sequence[tuple[str, str]]
NUM_LONGEST = 4  # kernels named for each length
# in the name of an interval kernel: it serves the window; names in run files from before it do not
# part the branches
BAND = "_band"
TOGETHER = "cmp and win"
# What a kernel's name says of its part; the first that fits.
PARTS: Parts = (
    ("win", BAND),
    ("cmp", "nsa_interval_"),
    ("scores", "nsa_scores"),
    ("top-n", "nsa_choose"),
    ("sel", "nsa_selected_"),
    ("o . dO of every branch", "_products"),
    ("gated sum", "nsa_gated_sum"),
    ("phi", "nsa_means"),
    ("phi", "nsa_phi"),
)
UNPARTED: Parts = ((TOGETHER, "nsa_interval_"), *PARTS[2:])
BOTH = "_both"  # in the name of a kernel that computes gradients of cmp and win in one launch
# Where such a one ran, one launch also sums the parts of every branch's dK and dV.
JOINED: Parts = (
    PARTS[0],
    (TOGETHER, BOTH),
    (TOGETHER, "nsa_interval_sum_kv"),
    *PARTS[1:],
)
REST = "rest"
# part of a floor -> its column
FLOOR_PART = {"cmp": "cmp", "win": "win", "score": "scores", "sel": "sel"}


def where(lines: Sequence[Line]) -> list[str]:
    """Device time by part for the sparse paths, then the longest kernels of every line, forward and
    both.
    """
    rows, longest = [], []
    parts = parts_of(lines)
    for line in lines:
        for what, timed in (("forward", line.forward), ("both", line.whole)):
            if timed is None or (total_ms := device_ms(timed.profiles)) is None:
                continue
            kernels = kernel_ms(timed.profiles)
            start = [f"{line.tokens:,}", path_of(line, lines), what]
            shown = "; ".join(
                f"{cell_code(name[:80])} {number(ms)}"
                for name, ms in list(kernels.items())[:NUM_LONGEST]
            )
            longest.append([*start, fixed(total_ms, 3), shown])
            if line.path in PATH_REQUESTS:
                by_part = parts_ms(kernels, total_ms, parts)
                rows.append(
                    [*start, fixed(total_ms, 3), *(share(ms, total_ms) for ms in by_part.values())]
                )
                rows += _floor_row(line, what, parts)
    if not longest:
        return ["### Where the time goes", "", "No proved cell has a profile of the device.", ""]
    note = (
        "Device milliseconds of one profiled step, medians over processes, with their share; below"
        f" each the floor. *phi*: compression by a kernel. *{REST}*: compression by PyTorch,"
        " sorting, copies, and what is beyond the dozen longest kernels of a step; of a floor, the"
        " traffic. A profiled step runs apart from the timed ones, so its sum may differ from"
        " their time."
    )
    if parts is JOINED:
        note += (
            f" *{TOGETHER}*: launches of gradients that serve both, and sums of parts of every"
            " branch's; the floor of that work stands under each branch."
        )
    page = ["### Where the time goes", "", note, ""]
    if rows:
        head = ["tokens", "path", "step", "all", *dict(parts), REST]
        page += [*table(head, rows), ""]
    return [
        *page,
        "The longest kernels, ms:",
        "",
        *table(["tokens", "path", "step", "all", "kernels"], longest),
        "",
    ]


def parts_of(lines: Sequence[Line]) -> Parts:
    """`PARTS`, or `JOINED`; where no kernel of these lines bears the mark of the window,
    `UNPARTED`.
    """
    kernels = {
        kernel
        for line in lines
        for timed in (line.forward, line.whole)
        if timed is not None
        for profile in timed.profiles
        for kernel in profile.kernels
    }
    if not any(BAND in kernel for kernel in kernels):
        return UNPARTED
    return JOINED if any(BOTH in kernel for kernel in kernels) else PARTS


def _floor_row(line: Line, what: str, parts: Parts) -> list[list[str]]:
    """The floor of the step in the columns of ``parts``; nothing where there is none."""
    if line.forward_floor is None or line.backward_floor is None:
        return []
    given = (
        (line.forward_floor,) if what == "forward" else (line.forward_floor, line.backward_floor)
    )
    by_part = dict.fromkeys((name for name, _ in parts), 0.0)
    for floor in given:
        for branch, ms in floor.parts_ms.items():
            column = FLOOR_PART[branch]
            by_part[column if column in by_part else TOGETHER] += ms
    rest_ms = sum(floor.traffic_ms for floor in given)
    cells = [fixed(ms, 3) if ms else NULL for ms in (*by_part.values(), rest_ms)]
    return [["", "", "its floor", fixed(sum(floor.total_ms for floor in given), 3), *cells]]


def parts_ms(
    kernels: Mapping[str, float], total_ms: float, parts: Parts = JOINED
) -> dict[str, float]:
    """Milliseconds of each of ``parts``, and what is left of ``total_ms`` as the rest."""
    found = dict.fromkeys((name for name, _ in parts), 0.0)
    for kernel, ms in kernels.items():
        part = next((name for name, mark in parts if mark in kernel), None)
        if part is not None:
            found[part] += ms
    return {**found, REST: max(0.0, total_ms - sum(found.values()))}
