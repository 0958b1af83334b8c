"""The chart of a series as a Vega-Lite specification: one for the page and for a PNG.

What it draws is in named data sets (`datasets`), so that the page holds numbers alone and draws
with the same specification.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nsa.installing import pip_install
from perfbench.errors import Exit, PerfbenchError
from perfbench.history.nouns import ChangePoint, Series, Triage, TriageKind
from perfbench.history.site import chart_data
from perfbench.history.site.chart_data import Row
from perfbench.history.site.decided import decisions_on
from perfbench.history.site.palette import LIGHT, Palette
from perfbench.history.site.units import series_in_shown_unit
from perfbench.history.site.verdict_marks import light_of

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
AXES = ("time", "order")
# SI prefixes from 1,000 on: 0.2 is not 200m.
NUMBER = "format(datum.value, abs(datum.value) < 1000 ? '.4~g' : '.4~s')"
MAX_FEW = 30  # points that are drawn with their intervals
HOURS_BELOW_DAYS = 4
Spec = dict[str, Any]


def chart_spec(axis: str, palette: Palette = LIGHT) -> Spec:
    """The chart over ``axis``: 'time', or 'order', by the age of each run's commit.

    Parameters that a page sets: ``hovered``, the index of a run; ``commits``, by place; ``few``,
    whether each point has its interval drawn; ``hours``, whether labels of time have hours.
    """
    return {
        "$schema": SCHEMA,
        "width": "container",
        "height": 300,
        "autosize": {"type": "fit", "contains": "padding"},
        "params": [
            {"name": "hovered", "value": -1},
            {"name": "commits", "value": []},
            {"name": "few", "value": False},
            {"name": "hours", "value": False},
        ],
        "data": {"name": "points"},
        "transform": _without_bridges(axis),
        "encoding": {"x": _x(axis)},
        "layer": [
            *_behind(axis, palette),
            *_series(palette),
            *_in_front(axis, palette),
        ],
        "resolve": {"scale": {"color": "independent"}},
        "config": _config(palette),
    }


def _x(axis: str) -> Spec:
    if axis == "time":
        return {
            "field": "time",
            "type": "temporal",
            "scale": {"type": "utc"},
            "axis": {
                "title": None,
                "labelExpr": "hours ? utcFormat(datum.value, '%b %d %H:%M') : datum.label",
                "labelOverlap": True,
                "labelFlush": True,
                "tickCount": 6,
            },
        }
    look = {
        "title": None,
        "labelExpr": "commits[datum.value] || ''",
        "labelOverlap": True,
        "tickMinStep": 1,
        "tickCount": 6,
        "format": "d",
    }
    return {
        "field": "order",
        "type": "quantitative",
        "scale": {"zero": False, "nice": False},
        "axis": look,
    }


def _y(field: str = "value") -> Spec:
    return {
        "field": field,
        "type": "quantitative",
        "scale": {"zero": False},
        "axis": {"title": None, "labelExpr": NUMBER, "tickCount": 5},
    }


def _without_bridges(axis: str) -> list[Spec]:
    """No line crosses a run without a value, or from one segment into another: each stretch between
    them is a line of its own.
    """
    return [
        {"calculate": "!isValid(datum.value) || datum.fresh ? 1 : 0", "as": "cut"},
        {
            "window": [{"op": "sum", "field": "cut", "as": "stretch"}],
            "sort": [{"field": axis}, {"field": "i"}],
        },
    ]


def _behind(axis: str, palette: Palette) -> list[Spec]:
    span = {"x": _x(axis), "x2": {"field": f"{axis}2"}}
    return [
        {
            "data": {"name": "drifts"},
            "mark": {"type": "rect", "opacity": 0.14},
            "encoding": {**span, "color": _judged(palette)},
        },
        {
            "data": {"name": "segments"},
            "mark": {
                "type": "rule",
                "strokeDash": [2, 3],
                "color": palette.baseline,
                "clip": True,
            },
            "encoding": {"x": _x(axis)},
        },
        {
            "data": {"name": "segments"},
            "mark": {
                "type": "text",
                "align": {"expr": "datum.late ? 'right' : 'left'"},
                "baseline": "bottom",
                "dx": {"expr": "datum.late ? -4 : 4"},
                "dy": -14,
                "fontSize": 11,
                "color": palette.baseline,
                "limit": 120,
            },
            "encoding": {
                "x": _x(axis),
                "y": {"value": "height"},
                "text": {"field": "text", "type": "nominal"},
            },
        },
        {
            "data": {"name": "baseline"},
            "mark": {"type": "rule", "strokeDash": [6, 4], "color": palette.baseline, "size": 1.5},
            "encoding": {"x": {"value": 0}, "x2": {"value": "width"}, "y": _y("level")},
        },
        {
            "data": {"name": "levels"},
            "mark": {"type": "rule", "color": palette.ink, "size": 1.5, "opacity": 0.75},
            "encoding": {**span, "y": _y("level")},
        },
    ]


def _series(palette: Palette) -> list[Spec]:
    valid = {"filter": "isValid(datum.value)"}
    one_line = {"field": "stretch", "type": "nominal"}
    return [
        {
            "transform": [{"filter": "isValid(datum.low) && isValid(datum.high)"}],
            "mark": {"type": "area", "opacity": 0.2, "color": palette.line, "line": False},
            "encoding": {"y": _y("low"), "y2": {"field": "high"}, "detail": one_line},
        },
        {
            "transform": [{"filter": "few && isValid(datum.low) && isValid(datum.high)"}],
            "mark": {"type": "rule", "size": 1.5, "color": palette.line},
            "encoding": {"y": _y("low"), "y2": {"field": "high"}},
        },
        {
            "data": {"name": "others"},
            "transform": [valid],
            "mark": {"type": "line", "size": 1.5},
            "encoding": {
                "y": _y(),
                "color": {
                    "field": "name",
                    "type": "nominal",
                    "scale": {"range": list(palette.others)},
                    "sort": None,
                    "legend": None,
                },
            },
        },
        {
            "transform": [valid],
            "mark": {"type": "line", "size": 1.75, "color": palette.line},
            "encoding": {"y": _y(), "detail": one_line},
        },
        {
            "transform": [valid, {"filter": "datum.light == 'green' || datum.light == 'none'"}],
            "mark": {
                "type": "point",
                "filled": True,
                "size": {"expr": "few ? 44 : 10"},
                "color": palette.line,
            },
            "encoding": {"y": _y()},
        },
        {
            "transform": [valid, {"filter": "datum.light == 'blind'"}],
            "mark": {"type": "point", "shape": "diamond", "size": 42, "color": palette.blind},
            "encoding": {"y": _y()},
        },
        {
            "transform": [valid, {"filter": "datum.light == 'red'"}],
            "mark": {
                "type": "point",
                "shape": "triangle-down",
                "filled": True,
                "size": 55,
                "color": palette.worse,
            },
            "encoding": {"y": _y()},
        },
        {
            "transform": [{"filter": "!isValid(datum.value)"}],
            "mark": {
                "type": "point",
                "shape": "M-1,-1L1,1M1,-1L-1,1",
                "size": 46,
                "strokeWidth": 1.8,
                "color": palette.worse,
                "yOffset": -7,
            },
            "encoding": {"y": {"value": "height"}},
        },
    ]


def _in_front(axis: str, palette: Palette) -> list[Spec]:
    x = {"x": _x(axis)}
    label = {"type": "text", "fontSize": 11, "fontWeight": 600, "align": "left", "dx": 4}
    return [
        {
            "data": {"name": "steps"},
            "mark": {"type": "rule", "size": 1.5},
            "encoding": {**x, "color": _judged(palette)},
        },
        {
            "data": {"name": "labels"},
            "mark": {**label, "align": {"expr": "datum.late ? 'right' : 'left'"}}
            | {"dx": {"expr": "datum.late ? -4 : 4"}, "baseline": "top", "dy": 2},
            "encoding": {
                **x,
                "y": {"value": 0},
                "text": {"field": "text", "type": "nominal"},
                "color": _judged(palette),
            },
        },
        {
            "data": {"name": "accepted"},
            "mark": {
                "type": "point",
                "shape": "square",
                "filled": True,
                "size": 60,
                "color": palette.better,
                "yOffset": 22,
            },
            "encoding": {**x, "y": {"value": 0}},
        },
        {
            "transform": [{"filter": "datum.i === hovered"}],
            "mark": {"type": "rule", "color": palette.ink, "opacity": 0.5},
            "encoding": {},
        },
        {
            "transform": [{"filter": "datum.i === hovered && isValid(datum.value)"}],
            "mark": {
                "type": "point",
                "size": 90,
                "strokeWidth": 2,
                "color": palette.ink,
                "fill": palette.paper,
            },
            "encoding": {"y": _y()},
        },
    ]


def _judged(palette: Palette) -> Spec:
    """Worse, better, or neither."""
    return {
        "field": "judged",
        "type": "nominal",
        "scale": {
            "domain": ["worse", "better", "neither"],
            "range": [palette.worse, palette.better, palette.ink],
        },
        "legend": None,
    }


def _config(palette: Palette) -> Spec:
    return {
        "background": palette.paper,
        "font": FONT,
        "view": {"stroke": None},
        "axis": {
            "labelColor": palette.ink,
            "labelFontSize": 11,
            "gridColor": palette.faint,
            "gridOpacity": 0.6,
            "domainColor": palette.faint,
            "tickColor": palette.faint,
        },
        "axisX": {"grid": False},
        "title": {"color": palette.ink, "fontSize": 13, "anchor": "start", "frame": "group"},
    }


def datasets(runs: Mapping[str, Any], one: Mapping[str, Any]) -> dict[str, list[Row]]:
    """The named data sets, from a page's columns. assets/charts.js does the same.

    ``runs``: of `chart_data.runs_columns`, with ``light`` and ``segments``. ``one``: of
    `chart_data.series_columns`, with ``changes``, ``levels``, ``accepted`` and ``baseline``.
    """
    last = max(1, len(runs["time"]) - 1)
    at = one.get("at") or range(len(runs["time"]))

    def place(i: int, suffix: str = "") -> Row:
        return {f"time{suffix}": runs["time"][i], f"order{suffix}": runs["order"][i]}

    def judged(change: Mapping[str, Any]) -> str:
        return {True: "worse", False: "better", None: "neither"}[change["worse"]]

    points = [
        {
            "i": i,
            **place(i),
            "value": one["value"][k],
            "low": one["low"][k] if one["low"] else None,
            "high": one["high"][k] if one["high"] else None,
            "light": runs["light"][i],
            "fresh": runs["fresh"][i],
        }
        for k, i in enumerate(at)
    ]
    changes = one["changes"]
    return {
        "points": points,
        "drifts": [
            {**place(c["from"]), **place(c["i"], "2"), "judged": judged(c)}
            for c in changes
            if c["kind"] == "drift"
        ],
        "steps": [{**place(c["i"]), "judged": judged(c)} for c in changes if c["kind"] == "step"],
        "labels": [
            {
                **place(c["i"]),
                "judged": judged(c),
                "text": f"{'drift ' if c['kind'] == 'drift' else ''}{_signed(c['pct'])}",
                "late": int(c["i"] > 0.8 * last),
            }
            for c in changes
        ],
        "segments": [
            {**place(row["i"]), "text": row["short"], "late": int(row["i"] > 0.8 * last)}
            for row in runs["segments"]
        ],
        "levels": [
            {**place(row["i"]), **place(row["to"], "2"), "level": row["level"]}
            for row in one["levels"]
        ],
        "accepted": [place(row["i"]) for row in one["accepted"] if row["kind"] == "accepted"],
        "baseline": [] if one["baseline"] is None else [{"level": one["baseline"]}],
        "others": [],
    }


def parameters(runs: Mapping[str, Any]) -> dict[str, Any]:
    """What `chart_spec` has a page set, from its columns."""
    times = runs["time"]
    span = max(times) - min(times)
    return {
        "commits": runs["commits"],
        "few": len(times) <= MAX_FEW,
        "hours": span < HOURS_BELOW_DAYS * 86_400_000,
    }


def _signed(pct: float) -> str:
    return f"{'+' if pct >= 0 else '−'}{abs(pct):.1f} %"


def chart_png(
    series: Series,
    changes: Sequence[ChangePoint] = (),
    decisions: Sequence[Triage] = (),
    *,
    axis: str = "time",
    baseline: float | None = None,
    width: int = 900,
) -> bytes:
    """The chart of the page as a PNG, on light paper, ``width`` points wide and twice as many
    pixels.
    """
    try:
        import vl_convert
    except ImportError:
        raise PerfbenchError(
            Exit.USAGE, f"a chart needs vl-convert. Next: {pip_install('history')}"
        ) from None
    spec = whole_spec(series, changes, decisions, axis=axis, baseline=baseline, width=width)
    made: bytes = vl_convert.vegalite_to_png(spec, scale=2)
    return made


def whole_spec(
    series: Series,
    changes: Sequence[ChangePoint] = (),
    decisions: Sequence[Triage] = (),
    *,
    axis: str = "time",
    baseline: float | None = None,
    width: int = 900,
) -> Spec:
    """The specification of the chart with its data."""
    series = series_in_shown_unit(series)
    line = chart_data.timeline([series])
    mine = [change for change in changes if change.key == series.key]
    triaged = [one for one in decisions if one.matches(series.key)]
    decided = decisions_on(mine, series, triaged)
    real = [one for one in mine if one not in decided or decided[one].kind != TriageKind.NOISE]
    runs = {
        **chart_data.runs_columns(line),
        "light": [light_of(point.verdict).value for point in line.points],
        "segments": chart_data.segment_changes(line),
    }
    one = {
        **chart_data.series_columns(series, line),
        "changes": chart_data.change_marks(mine, line, decided),
        "levels": chart_data.levels(series, line, real, triaged),
        "accepted": chart_data.accepted_rows(triaged, line),
        "baseline": chart_data.rounded(baseline),
    }
    unit = f" ({series.metric.unit})" if series.metric.unit else ""
    key = series.key
    spec, found = chart_spec(axis), datasets(runs, one)
    spec["layer"] = [
        one for one in spec["layer"] if found[one.get("data", {}).get("name", "points")]
    ]
    for param in spec["params"]:
        param["value"] = parameters(runs).get(param["name"], param["value"])
    return {
        **spec,
        "width": width,
        "title": {
            "text": f"{series.metric.title}{unit}",
            "subtitle": f"{key.cell_id}, {key.suite} on {key.card}",
            "subtitleColor": LIGHT.ink,
        },
        "datasets": found,
    }
