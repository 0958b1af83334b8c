"""Draw what imports what between the rooms of a package, and refuse circles and too many rooms.

    python tools/package_graph.py perfbench --max-nodes 20 --max-layers 9
    python tools/package_graph.py perfbench nsa --check

A node is a module or package directly below the one that is named; imports of everything inside
count as its own, those under TYPE_CHECKING too. `__main__` is left out, and the package itself
unless something below imports it. Writes docs/architecture-PACKAGE.svg; with ``--check`` the file
must be what would be written. Exit 1 for a circle, a limit that is exceeded, or a stale file.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from xml.sax.saxutils import escape

import grimp

ROOT = Path(__file__).parents[1]
OUT = ROOT / "docs"
Graph = Mapping[str, frozenset[str]]  # room -> the rooms that it imports

CHAR, PAD, HEIGHT, GAP, RISE = 7.3, 12, 30, 18, 74  # pixels
SWEEPS = 24  # of ordering rooms by their neighbours


def graph_of(package: str) -> Graph:
    """The rooms of an importable ``package`` and what they import of one another."""
    modules = grimp.build_graph(package, cache_dir=None)
    root = (package, "")

    def room(module: str) -> tuple[str, str]:
        return (package, module.removeprefix(package).lstrip(".").partition(".")[0])

    found: dict[tuple[str, str], set[tuple[str, str]]] = defaultdict(set)
    for module in modules.modules:
        home = room(module)
        if home[1] == "__main__":
            continue
        others = {room(name) for name in modules.find_modules_directly_imported_by(module)}
        found[home] |= others - {home, (package, "__main__")}
    if not any(root in imports for imports in found.values()):
        found.pop(root, None)
    return {
        name or package: frozenset(other or package for _, other in imports)
        for (_, name), imports in sorted(found.items())
    }


def circle_of(graph: Graph) -> list[str] | None:
    """The rooms of a shortest circle, the first again at its end; None where there is none."""
    best: list[str] | None = None
    for start in sorted(graph):
        before: dict[str, str] = {}
        waiting = [start]
        while waiting and start not in before:
            for other in sorted(graph[waiting[0]]):
                if other not in before:
                    before[other] = waiting[0]
                    waiting.append(other)
            waiting.pop(0)
        if start in before:
            path = [start, before[start]]
            while path[-1] != start:
                path.append(before[path[-1]])
            if best is None or len(path) < len(best):
                best = path[::-1]
    return best


def layers_of(graph: Graph) -> list[list[str]]:
    """Rooms by the longest way down, the lowest layer first; ``graph`` has no circle."""
    height: dict[str, int] = {}

    def of(room: str) -> int:
        if room not in height:
            height[room] = 1 + max((of(other) for other in graph[room]), default=-1)
        return height[room]

    for room in graph:
        of(room)
    return [
        sorted(room for room in graph if height[room] == level)
        for level in range(max(height.values(), default=-1) + 1)
    ]


def reduced(graph: Graph) -> Graph:
    """Without the arrows whose target is also reached through another room."""
    reach: dict[str, set[str]] = {}
    for layer in layers_of(graph):
        for room in layer:
            reach[room] = set(graph[room]).union(*(reach[other] for other in graph[room]))
    return {
        room: frozenset(
            other
            for other in imports
            if not any(other in reach[third] for third in imports - {other})
        )
        for room, imports in graph.items()
    }


def complaints(
    package: str, graph: Graph, max_nodes: int | None, max_layers: int | None
) -> list[str]:
    """What is wrong with the graph, in words."""
    if circle := circle_of(graph):
        return [f"{package}: a circle of imports: {' -> '.join(circle)}"]
    layers = len(layers_of(graph))
    found = []
    for count, most, what in ((len(graph), max_nodes, "rooms"), (layers, max_layers, "layers")):
        if most is not None and count > most:
            found.append(f"{package}: {count} {what}; wanted at most {most}")
    return found


def svg_of(package: str, graph: Graph) -> str:
    """A drawing of ``graph``, which has no circle: importers above what they import."""
    arrows = reduced(graph)
    rows, paths = _ordered(layers_of(graph), arrows)
    rows = rows[::-1]  # the highest layer at the top
    places = _placed(rows)
    width = max(300.0, *(x + w + GAP for x, _, w in places.values()))
    height = RISE * (len(rows) - 1) + HEIGHT + 2 * GAP + 16
    count = f"{len(graph)} rooms on {len(rows)} layers"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}"'
        f' viewBox="0 0 {width:.0f} {height}" font-family="monospace" font-size="12">',
        f"<title>{escape(package)}: {count}</title>",
        '<rect width="100%" height="100%" rx="8" fill="#ffffff"/>',
        '<g fill="none" stroke="#8c959f" stroke-width="1.1">',
        *(_curve([places[stop] for stop in path]) for path in paths),
        "</g>",
    ]
    for room in sorted(graph):
        x, y, w = places[room]
        parts += [
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{HEIGHT}" rx="5"'
            ' fill="#ddf4ff" stroke="#0b5fbe"/>',
            f'<text x="{x + w / 2:.1f}" y="{y + 19.5:.1f}" text-anchor="middle" fill="#1f2328">'
            f"{escape(room)}</text>",
        ]
    parts += [
        f'<text x="{GAP}" y="{height - 10}" font-size="11" fill="#57606a">{count}; tools/'
        "package_graph.py</text>",
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description="Draw a package's rooms by layer.")
    parser.add_argument("packages", nargs="+", metavar="PACKAGE")
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIR")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where stale")
    parser.add_argument("--max-nodes", type=int, metavar="N")
    parser.add_argument("--max-layers", type=int, metavar="N")
    options = parser.parse_args(argv)
    wrong = []
    for package in options.packages:
        graph = graph_of(package)
        found = complaints(package, graph, options.max_nodes, options.max_layers)
        wrong += found
        if circle_of(graph):
            continue
        file, text = options.out / f"architecture-{package}.svg", svg_of(package, graph)
        if not options.check:
            file.write_text(text, encoding="utf-8")
        elif not file.exists() or file.read_text(encoding="utf-8") != text:
            wrong.append(f"{file} is stale: python tools/package_graph.py {package} draws it")
        print(f"{package}: {len(graph)} rooms on {len(layers_of(graph))} layers")
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


def _ordered(layers: list[list[str]], arrows: Graph) -> tuple[list[list[str]], list[list[str]]]:
    """Layers with a stop in each layer that an arrow passes, so ordered that few arrows cross; and
    each arrow as the stops on its way down.
    """
    level = {room: index for index, layer in enumerate(layers) for room in layer}
    rows = [list(layer) for layer in layers]
    paths = []
    for room, imports in arrows.items():
        for other in sorted(imports):
            stops = [f"{room}>{other}>{at}" for at in range(level[room] - 1, level[other], -1)]
            for at, stop in zip(range(level[room] - 1, level[other], -1), stops, strict=True):
                rows[at].append(stop)
            paths.append([room, *stops, other])
    near: dict[str, list[str]] = defaultdict(list)
    for path in paths:
        for above, below in pairwise(path):
            near[above].append(below)
            near[below].append(above)
    best, fewest = [list(row) for row in rows], _crossings(rows, paths)
    for sweep in range(SWEEPS):
        for row in rows if sweep % 2 else rows[::-1]:
            place = {
                stop: (index + 0.5) / len(other)
                for other in rows
                for index, stop in enumerate(other)
            }
            row.sort(
                key=lambda stop, place=place: (  # type: ignore[misc]
                    sum(place[other] for other in near[stop]) / max(1, len(near[stop])),
                    stop,
                )
            )
        if (crossings := _crossings(rows, paths)) < fewest:
            best, fewest = [list(row) for row in rows], crossings
    return best, paths


def _crossings(rows: Iterable[list[str]], paths: Sequence[Sequence[str]]) -> int:
    place = {stop: (at, index) for at, row in enumerate(rows) for index, stop in enumerate(row)}
    between: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for path in paths:
        for above, below in pairwise(path):
            between[place[above][0]].append((place[above][1], place[below][1]))
    return sum(
        (a - c) * (b - d) < 0
        for pairs in between.values()
        for index, (a, b) in enumerate(pairs)
        for c, d in pairs[:index]
    )


def _placed(rows: Sequence[Sequence[str]]) -> dict[str, tuple[float, float, float]]:
    """x, y and width of every room and stop, each row centred."""
    widths = {
        stop: 2.0 if ">" in stop else len(stop) * CHAR + 2 * PAD for row in rows for stop in row
    }
    totals = [sum(widths[stop] + GAP for stop in row) - GAP for row in rows]
    places = {}
    for at, (row, total) in enumerate(zip(rows, totals, strict=True)):
        x = GAP + (max(totals) - total) / 2
        for stop in row:
            places[stop] = (x, GAP + at * RISE, widths[stop])
            x += widths[stop] + GAP
    return places


def _curve(stops: Sequence[tuple[float, float, float]]) -> str:
    """One arrow: from the bottom of the first box to the top of the last, through the stops."""
    parts = []
    for (x, y, w), (x2, y2, w2) in pairwise(stops):
        start, end, bend = (x + w / 2, y + HEIGHT), (x2 + w2 / 2, y2), (y2 - y - HEIGHT) / 2
        parts.append(
            f"{'L' if parts else 'M'}{start[0]:.1f} {start[1]:.1f}C{start[0]:.1f}"
            f" {start[1] + bend:.1f} {end[0]:.1f} {end[1] - bend:.1f} {end[0]:.1f} {end[1]:.1f}"
        )
    x, y = stops[-1][0] + stops[-1][2] / 2, stops[-1][1]
    tip = f"M{x - 3.5:.1f} {y - 6:.1f}L{x:.1f} {y:.1f}L{x + 3.5:.1f} {y - 6:.1f}"
    return f'<path d="{"".join(parts)}{tip}"/>'


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
