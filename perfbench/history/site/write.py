"""Writes the site: a page a cell, a page a run, the overview, and what they share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import lru_cache
from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsa.installing import pip_install
from perfbench.errors import Exit, PerfbenchError, unwritable
from perfbench.history.interval import half_width_pct
from perfbench.history.next_command import COMMIT_CHARS
from perfbench.history.nouns import (
    METRICS,
    Better,
    ChangePoint,
    HistoryCell,
    HistoryRun,
    Metric,
    RunInfo,
    Series,
    SeriesKey,
    SeriesPoint,
    Triage,
)
from perfbench.history.site import names, page_data
from perfbench.history.site.baselines import LevelOf, read_levels
from perfbench.history.site.cells_of_suite import families, short_names
from perfbench.history.site.change_lines import ChangeLine, change_line, turned_line
from perfbench.history.site.charts import AXES, HOURS_BELOW_DAYS, MAX_FEW, chart_spec
from perfbench.history.site.decided import decision_on
from perfbench.history.site.palette import PALETTES
from perfbench.history.site.report_html import report_html
from perfbench.history.site.units import (
    in_shown_unit,
    iso,
    minute,
    series_in_shown_unit,
    short_commit,
    shown,
)
from perfbench.history.site.verdict_marks import LETTERS, light_of
from perfbench.records import Verdict

if TYPE_CHECKING:
    import jinja2

    from perfbench.history.store import History

ASSETS = (
    "site.css",
    "theme.js",
    "site.js",
    "overview.js",
    "charts.js",
    "cell.js",
    "run.js",
    "compare.js",
)
OWN = "assets/site.js"  # a folder that has it is a site, and may be written again
PROGRESS_EACH = 2000  # pages of cells or of runs from one line of progress to the next
Suite = tuple[str, str]  # its name, and the card


@dataclass(frozen=True, slots=True)
class SiteOptions:
    """``since``: runs from then on; null for all. ``baselines``: the folder of baseline files.
    ``repository``: the address that commits are linked to, e.g. 'https://github.com/OWNER/NAME'.
    """

    title: str = "perfbench"
    since: datetime | None = None
    baselines: Path | None = None
    repository: str = ""


@dataclass(frozen=True, slots=True)
class WrittenSite:
    """``num_files`` of ``num_bytes`` together; ``problems``: what could not be read."""

    index: Path
    num_runs: int
    num_cells: int
    num_files: int
    num_bytes: int
    problems: tuple[str, ...]


def write_site(
    history: History,
    out: Path,
    options: SiteOptions,
    progress: Callable[[str], None] = lambda line: None,
) -> WrittenSite:
    """Write the whole site into ``out``, and remove pages of an earlier site that are no more.

    ``progress`` gets a line each `PROGRESS_EACH` pages; none for fewer.
    PerfbenchError(USAGE) where ``out`` holds something else, or cannot be written.
    """
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / OWN).is_file())):
        raise PerfbenchError(
            Exit.USAGE,
            f"{out} holds something that is no site of perfbench; wanted a new or empty folder, or"
            " such a site. Next: name another one with --out",
        )
    try:
        return _Writer(history, out, options, progress).write()
    except OSError as error:
        raise unwritable(out, error, "change its rights, or name another folder with --out") from (
            error
        )


@dataclass(slots=True)
class _SuitePages:
    """What is known of a suite on a card once its runs are read. ``cells``: the newest of each."""

    suite: str
    card: str
    runs: list[page_data.RunSummary]
    cells: dict[str, HistoryCell]
    main: dict[str, Series]
    short: dict[str, str]
    metrics: tuple[str, ...]
    has_more: bool  # series than those of ``main``
    rows: list[page_data.CellRow] = field(default_factory=list)


class _Writer:
    def __init__(
        self, history: History, out: Path, options: SiteOptions, progress: Callable[[str], None]
    ) -> None:
        self.history, self.out, self.options, self.progress = history, out, options, progress
        self.written: dict[Path, int] = {}
        self.changes: Sequence[ChangePoint] = sorted(history.change_points(), key=_newest_first)
        self.decisions: Sequence[Triage] = history.decisions()
        self.problems: list[str] = []
        self.metrics: dict[str, Metric] = dict(METRICS)

    def write(self) -> WrittenSite:
        infos = self.history.runs(since=self.options.since)
        commit_times = {one.commit: one.commit_utc for one in infos if one.commit_utc}
        suites: dict[Suite, list[RunInfo]] = {}
        for info in infos:
            suites.setdefault((info.suite, info.card), []).append(info)
        levels: Mapping[Suite, LevelOf] = {}
        if self.options.baselines is not None:
            levels, self.problems = read_levels(self.options.baselines, suites)
        self._assets()
        index: list[list[str]] = []
        changed: list[ChangeLine] = []
        pages = []
        for suite, mine in sorted(suites.items()):
            one = self._runs_of(suite, mine, index)
            known = page_data.Levels(
                self.changes,
                self.decisions,
                levels.get(suite, {}),
                {name: when for name, when in commit_times.items() if name and when},
            )
            changed += self._cells_of(one, known)
            pages.append(one)
        self._script("data/cells.js", "perfbenchCells", index)
        every = sorted(
            (run for one in pages for run in one.runs),
            key=lambda run: (run.info.measured_utc, run.info.run_id),
            reverse=True,
        )
        # What needs a look first: red, then the newest.
        pages.sort(key=lambda one: (not dict(one.runs[0].counts)["red"], -one.runs[0].milliseconds))
        changed.sort(key=lambda row: (-row.milliseconds, row.kind == "verdict"))  # stable
        self._page("index.html", "overview.j2", suites=pages, changes=changed, runs=every)
        self._page("runs.html", "runs.j2", runs=every)
        shown_metrics = {name: _described(one) for name, one in self.metrics.items()}
        self._page("compare.html", "compare.j2", runs=every, data=shown_metrics)
        self._remove_stale()
        return WrittenSite(
            self.out / "index.html",
            len(infos),
            len(index),
            len(self.written),
            sum(self.written.values()),
            tuple(self.problems),
        )

    def _runs_of(
        self, suite: Suite, infos: Sequence[RunInfo], index: list[list[str]]
    ) -> _SuitePages:
        """Write a page for each run of a suite, newest first, and collect its cells."""
        name, card = suite
        keys = self.history.keys(suite=name, card=card)
        metrics = page_data.run_metrics(key.metric for key in keys)
        runs = [self.history.run(info.run_id) for info in infos[:1]]
        cells: dict[str, HistoryCell] = {}
        absent: dict[str, list[SeriesPoint]] = {}
        rows, places = [], dict[tuple[str, str, str], int]()
        for number, info in enumerate(infos):
            run = runs[0] if number == 0 else self.history.run(info.run_id)
            self.metrics |= run.metrics
            for cell in run.cells:
                cells.setdefault(cell.cell_id, cell)
                place = (name, card, cell.cell_id)
                if place not in places:
                    places[place] = len(index)
                    page = names.cell_page(*place)
                    index.append([page, cell.cell_id, name, card, cell.cell_id])
                if not cell.measured:
                    absent.setdefault(cell.cell_id, []).append(_absent_point(info, cell))
            rows.append(page_data.run_summary(run))
            scales = {metric: in_shown_unit(self._metric(metric))[1] for metric in metrics}
            columns = page_data.run_columns(run, places, scales)
            self._script(f"data/{rows[-1].page}.js", f"perfbenchRuns[{rows[-1].page!r}]", columns)
            older = names.run_page(infos[number + 1].run_id) if number + 1 < len(infos) else ""
            newer = names.run_page(infos[number - 1].run_id) if number else ""
            self._run_page(run, rows[-1], columns, (older, newer))
            self._count(number + 1, len(infos), "runs", suite)
        if len(cells) >= PROGRESS_EACH:
            self.progress(f"reads the series of {len(cells):,} cells of {name} on {card}")
        main = dict(self._main_series(suite, keys))
        for cell_id, points in absent.items():
            key = SeriesKey(name, card, cell_id, page_data.RUN_METRICS[0])
            empty = Series(key, METRICS[key.metric], cells[cell_id].axes, tuple(points[::-1]))
            main.setdefault(cell_id, empty)
        short = short_names({cell_id: cell.axes for cell_id, cell in cells.items()})
        for cell_id, text in short.items():
            index[places[name, card, cell_id]][1] = text
        has_more = len({key.metric for key in keys}) > 1
        return _SuitePages(name, card, rows, cells, main, short, metrics, has_more)

    def _main_series(self, suite: Suite, keys: Sequence[SeriesKey]) -> Iterator[tuple[str, Series]]:
        """Each cell's series of the metric that stands for it."""
        every = groupby(sorted(keys), key=lambda key: key.cell_id)
        wanted = {cell: page_data.main_metric(key.metric for key in mine) for cell, mine in every}
        for metric in sorted(set(wanted.values())):
            for series in self.history.every_series(
                suite=suite[0], card=suite[1], metric=metric, since=self.options.since
            ):
                if wanted[series.key.cell_id] == metric and series.points:
                    yield series.key.cell_id, series_in_shown_unit(series)

    def _cells_of(self, suite: _SuitePages, known: page_data.Levels) -> list[ChangeLine]:
        """Write a page for each cell of a suite, and return what changed in it."""
        streamed: Iterator[Series] = iter(())
        if suite.has_more:
            streamed = self.history.every_series(
                suite=suite.suite, card=suite.card, since=self.options.since
            )
        seen, changed = set[str](), []
        family = families({cell_id: one.axes for cell_id, one in suite.main.items()})
        of_cell: dict[str, list[ChangePoint]] = {}
        for change in known.changes:
            if (change.key.suite, change.key.card) == (suite.suite, suite.card):
                of_cell.setdefault(change.key.cell_id, []).append(change)

        def write(cell_id: str, every: Sequence[Series]) -> None:
            peers = {one: suite.main[one] for one in family[cell_id]}
            mine = replace(known, changes=of_cell.get(cell_id, ()))
            changed.extend(self._cell_page(suite, every, peers, mine))
            self._count(len(suite.rows), len(suite.main), "cells", (suite.suite, suite.card))

        for cell_id, series in groupby(streamed, key=lambda one: one.key.cell_id):
            every = [series_in_shown_unit(one) for one in series if one.points]
            if every and cell_id in suite.main:
                seen.add(cell_id)
                write(cell_id, every)
        for cell_id in sorted(suite.main.keys() - seen):
            write(cell_id, [suite.main[cell_id]])
        lights = [light.value for light in page_data.LIGHTS]
        suite.rows.sort(key=lambda row: (row.is_stale, lights.index(row.mark.light), row.name))
        return changed

    def _cell_page(
        self,
        suite: _SuitePages,
        every: Sequence[Series],
        family: Mapping[str, Series],
        known: page_data.Levels,
    ) -> list[ChangeLine]:
        """``family``: the main series of the cells that compute the same. ``known``: with the
        changes of this cell.
        """
        cell_id = every[0].key.cell_id
        cell, main = suite.cells[cell_id], suite.main[cell_id]
        newest = suite.runs[0].info.run_id
        row = page_data.cell_row(suite.short[cell_id], cell, main, known, newest)
        suite.rows.append(row)
        keys = {series.key: series for series in every}
        when_of = {row.info.run_id: row.when for row in suite.runs}
        changed = [
            change_line(
                one,
                suite.short[cell_id],
                cell,
                keys[one.key],
                decision_on(one, keys[one.key], known.decisions),
                has_before=one.before_run_id in when_of,
            )
            for one in known.changes
            if one.key in keys and one.run_id in when_of
        ]
        columns = page_data.cell_columns(every, family, known)
        decisions = [
            one for one in known.decisions if one.run_id in when_of and any(map(one.matches, keys))
        ]
        self._page(
            f"cells/{row.page}.html",
            "cell.j2",
            suite=suite,
            cell=cell,
            row=row,
            last=main.points[-1],
            metric=main.metric,
            baseline=known.baselines.get((cell_id, main.metric.name)),
            changes=changed,
            decisions=decisions,
            segments=columns["runs"]["segments"],
            times=columns["runs"]["time"],
            peers=page_data.peer_rows(cell_id, family),
            run_page=names.run_page,
            when_of=when_of,
            data=columns,
        )
        turned = turned_line(suite.short[cell_id], cell, main)
        return changed if turned is None else [*changed, turned]

    def _run_page(
        self,
        run: HistoryRun,
        row: page_data.RunSummary,
        columns: Mapping[str, Any],
        neighbours: tuple[str, str],
    ) -> None:
        import markupsafe

        # html=False and the link rules make it inert: report_html.py
        report = markupsafe.Markup(report_html(run.info.report))
        described = [_described(self._metric(name)) for name in columns["metrics"]]
        self._page(
            f"runs/{row.page}.html",
            "run.j2",
            row=row,
            info=run.info,
            report=report,
            older=neighbours[0],
            newer=neighbours[1],
            data={"page": row.page, "metrics": described},
        )

    def _count(self, done: int, total: int, what: str, suite: Suite) -> None:
        if done % PROGRESS_EACH == 0:
            self.progress(f"{done:,} of {total:,} {what} of {suite[0]} on {suite[1]}")

    def _metric(self, name: str) -> Metric:
        return self.metrics.get(name) or Metric(name, name, "", Better.NEITHER)

    def _assets(self) -> None:
        folder = resources.files("perfbench.history.site").joinpath("assets")
        for name in ASSETS:
            self._put(f"assets/{name}", folder.joinpath(name).read_text(encoding="utf-8"))
        specs = {
            theme: {axis: chart_spec(axis, palette) for axis in AXES}
            for theme, palette in PALETTES.items()
        }
        shared = {
            "specs": specs,
            "maxFew": MAX_FEW,
            "hoursBelowDays": HOURS_BELOW_DAYS,
            "commitChars": COMMIT_CHARS,
            "lights": {verdict.value: light_of(verdict).value for verdict in Verdict},
            "letters": {verdict.value: letter for verdict, letter in LETTERS.items()},
        }
        self._script("assets/specs.js", "perfbenchShared", shared)
        self._put("assets/vega.js", _vega())

    def _page(self, path: str, template: str, **values: Any) -> None:
        root = "../" * path.count("/")
        page = _templates().get_template(template)
        text = page.render(root=root, title=self.options.title, options=self.options, **values)
        self._put(path, text)

    def _script(self, path: str, name: str, content: object) -> None:
        before = "window.perfbenchRuns = window.perfbenchRuns || {};\n" if "[" in name else ""
        self._put(path, f"{before}window.{name} = {_json(content)};\n")

    def _put(self, path: str, text: str) -> None:
        """A file that is the same already is not touched."""
        place, data = self.out / path, text.encode("utf-8", "backslashreplace")
        self.written[place] = len(data)
        if place.is_file() and place.stat().st_size == len(data) and place.read_bytes() == data:
            return
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)

    def _remove_stale(self) -> None:
        for pattern in ("cells/*.html", "runs/*.html", "data/*.js"):
            for path in self.out.glob(pattern):
                if path not in self.written:
                    path.unlink()


def _described(metric: Metric) -> dict[str, str]:
    metric, _ = in_shown_unit(metric)
    return {"title": metric.title, "unit": metric.unit, "better": metric.better.value}


def _newest_first(change: ChangePoint) -> tuple[float, SeriesKey, tuple[int, str]]:
    key = replace(change.key, metric="")
    return -change.measured_utc.timestamp(), key, page_data.metric_order(change.key.metric)


def _absent_point(info: RunInfo, cell: HistoryCell) -> SeriesPoint:
    return SeriesPoint(
        info.run_id,
        info.measured_utc,
        info.commit,
        None,
        None,
        None,
        0,
        cell.verdict,
        cell.reason,
        info.segment,
    )


def _json(content: object) -> str:
    """JSON that is inert in HTML and a script: ASCII, and neither `<`, `>` nor `&`."""
    text = json.dumps(content, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


@lru_cache(maxsize=1)
def _templates() -> jinja2.Environment:
    try:
        import jinja2
        import markupsafe
    except ImportError:
        raise PerfbenchError(
            Exit.USAGE, f"the page needs jinja2. Next: {pip_install('history')}"
        ) from None
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("perfbench.history.site", "pages"),
        auto_reload=False,  # else it looks at the file before each of thousands of pages
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "json": lambda content: markupsafe.Markup(_json(content)),
        "minute": minute,
        "iso": iso,
        "short": short_commit,
        "light": lambda verdict: light_of(verdict).value,
    }
    made.globals |= {"shown": shown, "half_width_pct": half_width_pct, "mark_of": page_data.mark_of}
    return made


@lru_cache(maxsize=1)
def _vega() -> str:
    """Vega, Vega-Lite and Vega-Embed in one script, about 900 kB."""
    try:
        import vl_convert
    except ImportError:
        raise PerfbenchError(
            Exit.USAGE, f"the page needs vl-convert. Next: {pip_install('history')}"
        ) from None
    bundle: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return bundle
