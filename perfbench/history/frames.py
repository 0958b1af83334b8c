"""A history as a pandas DataFrame: `perfbench.history_frame`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from perfbench.records import AXES

if TYPE_CHECKING:
    import pandas as pd

    from perfbench.history.nouns import Series
    from perfbench.history.store import History

# Column -> dtype, in the frame's order; the axes come after the cell's id, the segment at the end.
_OF_SERIES: Mapping[str, str] = MappingProxyType(
    {"suite": "category", "card": "category", "cell_id": "category"}
)
_OF_POINT: Mapping[str, str] = MappingProxyType(
    {
        "metric": "category",
        "unit": "category",
        "run_id": "category",
        "measured_utc": "datetime64[us, UTC]",
        "commit": "category",
        "value": "float64",
        "low": "float64",
        "high": "float64",
        "count": "Int64",
        "verdict": "category",
        "reason": "string",
    }
)
SEGMENT = "segment_"  # begins the columns of what must agree before two points may be compared


def history_frame(
    history: History,
    *,
    suite: str | None = None,
    card: str | None = None,
    cell_id: str | None = None,
    metric: str | None = None,
    since: datetime | None = None,
    demonstrations: bool = False,
) -> pd.DataFrame:
    """One row a point: each metric of each cell of each run, by series and oldest first.

    ``suite``, ``card``, ``cell_id``, ``metric``: that one alone. ``since``: measured from then on.
    ``demonstrations``: runs with injected faults, too.

    =================  ==========================================================================
    of the series      suite (the matrix's name), card, cell_id, and each axis: text as a category,
                       whole numbers (seq_len, batch, chunk) as Int64; NA of another tool's cells
    of the point       metric, unit, run_id, measured_utc, commit, value, low and high (its 95 %
                       interval), count (processes), verdict, reason (why the value is null, or
                       what the verdict says)
    of its segment     segment_driver, segment_torch, ...: two points may be compared where all of
                       them agree
    =================  ==========================================================================

    What is null in the history is NaN or NA here, never 0.

    >>> import perfbench
    >>> with perfbench.open_history() as history:
    ...     speed = perfbench.history_frame(history, card="h200", metric="tok_per_s")
    >>> speed.pivot(index="measured_utc", columns="cell_id", values="value")
    """
    found = history.every_series(
        suite=suite,
        card=card,
        cell_id=cell_id,
        metric=metric,
        since=since,
        demonstrations=demonstrations,
    )
    return _typed([row for series in found for row in _rows(series)])


def _rows(series: Series) -> Iterator[dict[str, Any]]:
    key = series.key
    known: dict[str, Any] = {"suite": key.suite, "card": key.card, "cell_id": key.cell_id}
    known |= dict(series.axes)
    for point in series.points:
        yield {
            **known,
            "metric": key.metric,
            "unit": series.metric.unit,
            "run_id": point.run_id,
            "measured_utc": point.measured_utc,
            "commit": point.commit,
            "value": point.value,
            "low": point.low,
            "high": point.high,
            "count": point.count,
            "verdict": point.verdict,
            "reason": point.reason,
            **{f"{SEGMENT}{name}": value for name, value in point.segment.items()},
        }


def _typed(rows: list[dict[str, Any]]) -> pd.DataFrame:
    import pandas as pd

    dtypes: dict[str, Any] = dict(_OF_SERIES)
    for name, axis in AXES.items():
        dtypes[name] = "category" if axis.kind is str else "Int64"
    dtypes |= _OF_POINT
    names = dict.fromkeys(name for row in rows for name in row)
    # Axes of other tools; then the segments, in the order of their names.
    others = [name for name in names if name not in dtypes and not name.startswith(SEGMENT)]
    segments = sorted(name for name in names if name.startswith(SEGMENT))
    order = [*_OF_SERIES, *AXES, *others, *_OF_POINT, *segments]
    return pd.DataFrame(
        {
            name: pd.Series([row.get(name) for row in rows], dtype=dtypes.get(name, "category"))
            for name in order
        }
    )
