"""What `perfbench history show` answers, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import groupby
from typing import TYPE_CHECKING, Any

from perfbench.commands.history_choice import USUAL, Scope, cell_and_metric, the_metric
from perfbench.errors import Exit, PerfbenchError
from perfbench.records import cell_of_id, short_ids
from perfbench.text import NULL, aligned, number, shorten, signed_pct

if TYPE_CHECKING:
    from perfbench.history import ChangeRow, History, RunInfo, SeriesKey

COMMIT_CHARS = 10
REMARK_CHARS = 80
DIGITS = 4  # of a value: changes of 0.1 % are read from it
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Wanted:
    """What was asked for; null is everything."""

    cell: str | None
    since: datetime | None
    commit: str | None
    metric: str | None
    card: str | None
    suite: str | None
    limit: int
    demonstrations: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """Rows, newest first; ``left``: how many more there are. ``commands``: each row's, by run and
    cell. ``injected``: run -> its faults; ``origins``: run -> the tool that it was imported from.
    """

    rows: Sequence[ChangeRow]
    left: int
    commands: Mapping[tuple[str, str], str]
    injected: Mapping[str, str]
    origins: Mapping[str, str]
    one_cell: bool

    def text(self) -> str:
        """Of one cell a table of its runs, and the command that measures it again, of each row
        where they differ; of several a table for each run.
        """
        if not self.rows:
            return "no row: nothing was measured"
        metric = self.rows[0].metric
        title = f"{metric.title}{f', {_unit(metric.unit)}' if metric.unit else ''}"
        if self.one_cell:
            return "\n".join([f"{self.rows[0].key.cell_id}: {title}", *self._of_one_cell()])
        parts = [title]
        for run_id, rows in groupby(self.rows, key=lambda row: row.point.run_id):
            parts += ["", *self._of_one_run(run_id, list(rows))]
        return "\n".join(parts)

    def _of_one_cell(self) -> Iterator[str]:
        keys = [row.key for row in self.rows]
        again = {self._command(row) for row in self.rows}
        head = ["measured", "commit", "suite", "card", *self._values(), "run"]
        head += ["again"] if len(again) > 1 else []
        several = {"suite": {key.suite for key in keys}, "card": {key.card for key in keys}}
        yield from self._table([name for name in head if len(several.get(name, "  ")) > 1], keys)
        for name, values in several.items():
            if len(values) == 1:
                yield f"{name}: {next(iter(values))}"
        if len(again) == 1:
            yield f"again: {next(iter(again))}"

    def _of_one_run(self, run_id: str, rows: Sequence[ChangeRow]) -> Iterator[str]:
        key, point = rows[0].key, rows[0].point
        commit = (point.commit or "no commit")[:COMMIT_CHARS]
        yield f"{_when(rows[0])}  {commit}  {key.suite} on {key.card}  {run_id}"
        head = ["cell", *self._values(), "again"]
        yield from self._table(head, [row.key for row in rows], rows)

    def _values(self) -> list[str]:
        return ["verdict", self.rows[0].key.metric, "± 95 %", "change", "remark"]

    def _table(
        self, head: Sequence[str], keys: Sequence[SeriesKey], rows: Sequence[ChangeRow] = ()
    ) -> list[str]:
        """Without a column of remarks where there is none."""
        names = _short({key.cell_id for key in keys})
        lines = [[self._value(name, row, names) for name in head] for row in rows or self.rows]
        kept = [
            place
            for place, name in enumerate(head)
            if name != "remark" or any(line[place] != NULL for line in lines)
        ]
        return aligned(
            [head[place] for place in kept],
            [[line[place] for place in kept] for line in lines],
            (keys[0].metric, "± 95 %", "change"),
        )

    def _command(self, row: ChangeRow) -> str:
        return self.commands.get((row.point.run_id, row.key.cell_id)) or NULL

    def _remark(self, row: ChangeRow) -> str:
        faults = self.injected.get(row.point.run_id, "")
        why = row.remark.removeprefix(f"{row.point.verdict}: ")
        origin = self.origins.get(row.point.run_id, "")
        known = [f"INJECTED {faults}" if faults else "", f"from {origin}" if origin else "", why]
        return "; ".join(filter(None, known))

    def _value(self, name: str, row: ChangeRow, names: Mapping[str, str]) -> str:
        point = row.point
        if name == row.key.metric:
            return _number(point.value, row.metric.unit)
        return {
            "measured": _when(row),
            "commit": (point.commit or NULL)[:COMMIT_CHARS],
            "suite": row.key.suite,
            "card": row.key.card,
            "cell": names[row.key.cell_id],
            "verdict": point.verdict or (NULL if point.run_id in self.origins else "MEASURED"),
            "± 95 %": _half(row),
            "change": signed_pct(row.change_pct),
            "remark": shorten(self._remark(row), REMARK_CHARS) or NULL,
            "run": point.run_id,
            "again": self._command(row),
        }[name]

    def to_json(self) -> list[dict[str, Any]]:
        return [
            {
                "measured_utc": row.point.measured_utc.isoformat(),
                "run_id": row.point.run_id,
                "injections": self.injected.get(row.point.run_id, ""),
                "origin": self.origins.get(row.point.run_id, "perfbench"),
                "commit": row.point.commit,
                "suite": row.key.suite,
                "card": row.key.card,
                "cell_id": row.key.cell_id,
                "metric": row.key.metric,
                "unit": row.metric.unit,
                "verdict": row.point.verdict,
                "value": row.point.value,
                "low": row.point.low,
                "high": row.point.high,
                "count": row.point.count,
                "change_pct": row.change_pct,
                "began": row.began,
                "reason": row.point.reason,
                "reproduce": self.commands.get((row.point.run_id, row.key.cell_id), ""),
            }
            for row in self.rows
        ]


@dataclass(frozen=True, slots=True)
class RunList:
    """The newest runs, where no cell, time or commit was asked for."""

    runs: Sequence[RunInfo]
    left: int = 0
    head: Sequence[str] = field(default=("measured", "commit", "suite", "card", "exit", "run"))

    def text(self) -> str:
        if not self.runs:
            return "no run. Next: perfbench history add RUN..."
        lines = [
            [
                f"{one.measured_utc:%Y-%m-%d %H:%M}",
                (one.commit or NULL)[:COMMIT_CHARS],
                one.suite,
                one.card,
                NULL if one.exit_code is None else str(one.exit_code),
                one.run_id,
                shorten(one.headline, 80),
            ]
            for one in self.runs
        ]
        return "\n".join(aligned([*self.head, "headline"], lines, ("exit",)))

    def to_json(self) -> list[dict[str, Any]]:
        return [
            {
                "measured_utc": one.measured_utc.isoformat(),
                "run_id": one.run_id,
                "origin": one.origin,
                "commit": one.commit,
                "suite": one.suite,
                "card": one.card,
                "exit_code": one.exit_code,
                "headline": one.headline,
                "injections": list(one.injections),
                "folder": one.folder,
                "command": one.command,
            }
            for one in self.runs
        ]


def answer(history: History, wanted: Wanted) -> Answer | RunList:
    """USAGE where CELL names no cell or several, or nothing has the metric, card or suite."""
    if wanted.cell is None and wanted.since is None and wanted.commit is None:
        runs = history.runs(
            suite=wanted.suite, card=wanted.card, demonstrations=wanted.demonstrations
        )
        _check_known(history, wanted, runs)
        return RunList(runs[: wanted.limit], max(0, len(runs) - wanted.limit))
    from perfbench.history import newest_first

    scope = Scope(wanted.suite, wanted.card, wanted.demonstrations)
    _check_known(history, wanted, ())
    cell_id, metric = None, wanted.metric
    if metric is not None:
        history.metric(metric)  # USAGE where no run has it
    if wanted.cell is not None:
        cell_id, metric = cell_and_metric(history, wanted.cell, metric, scope)
    runs = _runs(history, wanted)
    rows = _rows(history, wanted, (cell_id, metric or USUAL), runs)
    if not rows and metric is None and (other := _other_metric(history, wanted)):
        rows = _rows(history, wanted, (cell_id, other), runs)
    shown = newest_first(rows)[: wanted.limit]
    return Answer(
        shown,
        max(0, len(rows) - wanted.limit),
        history.commands({row.point.run_id for row in shown}),
        {one.run_id: ", ".join(one.injections) for one in runs if one.injections},
        {one.run_id: one.origin for one in runs if one.origin != "perfbench"},
        cell_id is not None,
    )


def _runs(history: History, wanted: Wanted) -> list[RunInfo]:
    """USAGE: no run is of the commit that was asked for."""
    commit, shown = wanted.commit, wanted.demonstrations
    runs = history.runs(since=wanted.since, commit=commit, demonstrations=shown)
    if commit is not None and not runs:
        every = history.runs(commit=commit, demonstrations=True)
        if not every:
            known = "`perfbench history` lists the newest runs with theirs"
            raise PerfbenchError(
                Exit.USAGE, f"--commit: no run of a commit {commit[:60]!r}. Next: {known}"
            )
    return runs


def _rows(
    history: History,
    wanted: Wanted,
    named: tuple[str | None, str],
    runs: Sequence[RunInfo],
) -> list[ChangeRow]:
    """Of these runs alone; the cell null for all, and its metric."""
    from perfbench.history import change_rows

    cell_id, metric = named
    run_ids = {one.run_id for one in runs}
    found = history.every_series(
        suite=wanted.suite,
        card=wanted.card,
        cell_id=cell_id,
        metric=metric,
        demonstrations=wanted.demonstrations,
    )
    return [row for one in found for row in change_rows(one) if row.point.run_id in run_ids]


def _other_metric(history: History, wanted: Wanted) -> str | None:
    """The only one that was measured, null where nothing was; USAGE where there are several."""
    there = history.metric_names(
        suite=wanted.suite,
        card=wanted.card,
        since=wanted.since,
        commit=wanted.commit,
        demonstrations=wanted.demonstrations,
    )
    return the_metric(there, None, "what was measured") if there else None


def _check_known(history: History, wanted: Wanted, runs: Sequence[RunInfo]) -> None:
    if runs or (wanted.suite is None and wanted.card is None):
        return
    every = history.runs(demonstrations=wanted.demonstrations)
    suites, cards = ({getattr(one, name) for one in every} for name in ("suite", "card"))
    for option, value, known in (
        ("--suite", wanted.suite, suites),
        ("--card", wanted.card, cards),
    ):
        if value is not None and value not in known:
            there = ", ".join(sorted(known)[:12]) or "none"
            raise PerfbenchError(
                Exit.USAGE,
                f"{option}: got {value[:60]!r}, wanted one that the history has. Next: {there}",
            )


def _short(cell_ids: Collection[str]) -> dict[str, str]:
    cells = {cell_id: cell_of_id(cell_id) for cell_id in cell_ids}
    short = short_ids(cell for cell in cells.values() if cell is not None)
    return {
        cell_id: cell_id if cell is None else short.get(cell.cell_id, cell_id)
        for cell_id, cell in cells.items()
    }


def _when(row: ChangeRow) -> str:
    return f"{row.point.measured_utc:%Y-%m-%d %H:%M}"


def _unit(unit: str) -> str:
    return "GiB" if unit == "bytes" else unit


def _number(value: float | None, unit: str) -> str:
    return number(value / GIB if value is not None and unit == "bytes" else value, DIGITS)


def _half(row: ChangeRow) -> str:
    from perfbench.history import half_width_pct

    pct = half_width_pct(row.point.value, row.point.low, row.point.high)
    return NULL if pct is None else f"{number(pct, 2)} %"
