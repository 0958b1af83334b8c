"""The selected branch alone: its times by kind of selection and length, against their floor, and
the device's time by part.
"""

from __future__ import annotations

from collections.abc import Sequence

from perfbench.records import SELECTIONS
from perfbench.text import NULL, fixed, number, ratio
from tools.studies.kernellines import GIB, Line, device_ms, kernel_ms, reached
from tools.studies.kernelparts import REST, parts_ms
from tools.studies.kerneltext import backward, path_of, share, table, with_range

# What a kernel's name says of its part of the branch; the first that fits.
PARTS = (
    ("attention", "nsa_selected_forward"),
    ("gradients", "nsa_selected_backward"),
    ("sums of parts", "nsa_selected_sum"),
    ("sums of parts", "nsa_interval_sum_kv"),
    ("lists and others of the branch", "nsa_selected_"),
    ("o . dO", "nsa_row_products"),
)
TIMES = "### The selected branch alone"
DEVICE = "### The selected branch alone: where the time goes"


def section(lines: Sequence[Line]) -> list[str]:
    """Markdown of a run's cells of the selected branch: times, floors and memory, then device
    milliseconds of each part.
    """
    if not lines:
        return [TIMES, "", "No cell is proved, so there is no number.", ""]
    lines = sorted(lines, key=_order)
    return [*_times(lines), *_device(lines)]


def _order(line: Line) -> tuple[int, int, str, int, str]:
    kind = str(line.axes.get("selection", SELECTIONS[0]))
    return line.tokens, int(line.axes["batch"]), line.path, SELECTIONS.index(kind), repr(line.axes)


def _start(line: Line, lines: Sequence[Line]) -> list[str]:
    return [
        f"{line.tokens:,}",
        path_of(line, lines),
        str(line.axes.get("selection", SELECTIONS[0])),
    ]


def _times(lines: Sequence[Line]) -> list[str]:
    head = [
        "tokens",
        "path",
        "selection",
        "forward, ms",
        "backward, ms",
        "both, ms",
        "x own: forward",
        "both",
    ]
    head += [
        "floor of forward, ms",
        "reached",
        "floor of backward, ms",
        "reached",
        "extra GiB: forward",
        "both",
        "bound",
    ]
    rows = []
    for line in lines:
        row = [
            *_start(line, lines),
            with_range(line.forward),
            backward(line),
            with_range(line.whole),
        ]
        row += [ratio(_against_own(lines, line, what)) for what in ("forward_ms", "both_ms")]
        for floor, got_ms in (
            (line.forward_floor, line.forward_ms),
            (line.backward_floor, line.backward_ms),
        ):
            row += [number(None if floor is None else floor.total_ms), reached(floor, got_ms)]
        memory = [
            None if one is None or one.extra_bytes is None else one.extra_bytes / GIB
            for one in (line.forward, line.whole)
        ]
        bound = dict.fromkeys(
            "host" if one.host_bound else "GPU"
            for one in (line.forward, line.whole)
            if one is not None
        )
        rows.append([*row, *(fixed(gib, 2) for gib in memory), " / ".join(bound)])
    note = (
        "Blocks are given, not chosen, and every kind reads the same number of keys. *own*: what"
        " the model's scores choose for random inputs; *random*: each query others; *local*: the"
        " queries of a block share all but one; *hot*: all queries the same. *x own* is the time"
        " over that of *own* at the same shape: above 1 it is slower. Times and floors are as for"
        " the whole attention; they are not compared with a dense kernel, as full attention selects"
        " nothing."
    )
    return [TIMES, "", *table(head, rows), "", note, ""]


def _against_own(lines: Sequence[Line], line: Line, what: str) -> float | None:
    same = [one for one in lines if {**one.axes, "selection": ""} == {**line.axes, "selection": ""}]
    own = next(
        (
            getattr(one, what)
            for one in same
            if one.axes.get("selection", SELECTIONS[0]) == SELECTIONS[0]
        ),
        None,
    )
    mine = getattr(line, what)
    return mine / own if mine and own else None


def _device(lines: Sequence[Line]) -> list[str]:
    rows = []
    for line in lines:
        for what, timed in (("forward", line.forward), ("both", line.whole)):
            total_ms = None if timed is None else device_ms(timed.profiles)
            if timed is None or total_ms is None:
                continue
            by_part = parts_ms(kernel_ms(timed.profiles), total_ms, PARTS)
            rows.append(
                [
                    *_start(line, lines),
                    what,
                    fixed(total_ms, 3),
                    *(share(ms, total_ms) for ms in by_part.values()),
                ]
            )
            rows += _floor_row(line, what)
    if not rows:
        return [DEVICE, "", "No proved cell has a profile of the device.", ""]
    note = (
        "Device milliseconds of one profiled step, with their share; below each the floor: its"
        f" arithmetic, and as *{REST}* its traffic. *{REST}* of a step: sorting, copies, and what"
        " is beyond its dozen longest kernels."
    )
    head = ["tokens", "path", "selection", "step", "all", *dict(PARTS), REST]
    return [DEVICE, "", *table(head, rows), "", note, ""]


def _floor_row(line: Line, what: str) -> list[list[str]]:
    if line.forward_floor is None or line.backward_floor is None:
        return []
    floors = {
        "attention": line.forward_floor,
        "gradients": line.backward_floor if what == "both" else None,
    }
    given = [floor for floor in floors.values() if floor is not None]
    arithmetic = [
        None if (floor := floors.get(name)) is None else floor.parts_ms["sel"]
        for name in dict(PARTS)
    ]
    cells = [
        NULL if ms is None else fixed(ms, 3)
        for ms in (*arithmetic, sum(floor.traffic_ms for floor in given))
    ]
    return [["", "", "", "its floor", fixed(sum(floor.total_ms for floor in given), 3), *cells]]
