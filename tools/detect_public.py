"""Series that others published with labels: Mozilla's, MongoDB's and Apache Otava's tests.

The labels are what their tools report, or how many changes, and no truth.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MOZILLA = ("runs1", "runs2", "runs3", "runs4", "runs5", "a11y", "tp5rss")
OTAVA_DEFAULT = "test_tb_magnitude0_p001"  # of its parameter sets, the nearest to its defaults


@dataclass(frozen=True, slots=True)
class PublicSeries:
    """``labels``: indexes of points at which another tool reports a change; null where only their
    ``count`` is known.
    """

    name: str
    values: list[float]
    labels: list[int] | None
    count: int


def public_series(folder: Path) -> Iterator[PublicSeries]:
    """Those of /work/shared/data, whose README says where they are from."""
    expected = json.loads((folder / "mozilla_talos" / "labels.json").read_text())["expected"]
    for name in MOZILLA:
        with (folder / "mozilla_talos" / f"{name}.csv").open() as file:
            rows = [(int(row["timestamp"]), float(row["value"])) for row in csv.DictReader(file)]
        times = [moment for moment, _ in rows]
        labels = [times.index(moment) for moment in expected[name] if moment in times]
        yield PublicSeries(f"Mozilla {name}", [v for _, v in rows], labels, len(expected[name]))
    for size in ("small", "medium", "large"):
        found = json.loads((folder / "mongodb_spa" / f"profile_{size}.json").read_text())
        yield PublicSeries(f"MongoDB profile {size}", found["series"], None, found["expected"])
    values = json.loads((folder / "mongodb_spa" / "long_series.json").read_text())
    yield PublicSeries("MongoDB long", values, None, 4)
    found = json.loads((folder / "otava" / "tigerbeetle.json").read_text())
    (labels,) = (
        one["expected_indexes"]
        for one in found["otava_expected_by_params"]
        if one["name"] == OTAVA_DEFAULT
    )
    yield PublicSeries("Otava tigerbeetle", found["series"], labels, len(labels))
