"""What a card is expected to do, next to what this run measured: claims of others and our own runs,
from the data file expectations.yaml.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from nsa.config import preset
from perfbench.records import Match, Run, Term, Value, check_axis
from perfbench.report.rows import Row
from perfbench.report.workloads import Table, model_of
from perfbench.text import NULL, cell_code, code, escape, number, ratio

FILE = "expectations.yaml"
TITLE = "Expected and measured"
Range = tuple[float, float]  # least, most


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Claimed(_Strict):
    """Tokens per second that somebody states; ``by`` says who, and what is unknown about it."""

    tok_per_s: Range
    by: str = Field(min_length=1)


class Expected(_Strict):
    """Tokens per second of a stored run of ours: its cells that match must lie within."""

    tok_per_s: Range
    run: str = Field(min_length=1)


class Expectation(_Strict):
    """Of the cells that meet ``match``, with the preset ``model``, on cards with ``gpu`` in their
    name.

    ValueError for an unknown axis or value, for a range the wrong way round, and where nothing is
    claimed nor expected.
    """

    gpu: str = Field(min_length=1)
    model: str = Field(min_length=1)
    match: dict[str, Value | list[Value]] = Field(min_length=1)
    claimed: Claimed | None = None
    expected: Expected | None = None

    @model_validator(mode="after")
    def _is_sound(self) -> Expectation:
        _match(self)
        preset(self.model)
        if self.claimed is None and self.expected is None:
            raise ValueError("neither claimed nor expected is given; give one of them")
        for one in (self.claimed, self.expected):
            if one is not None and not 0 < one.tok_per_s[0] <= one.tok_per_s[1]:
                raise ValueError(f"tok_per_s {one.tok_per_s}; wanted [least, most] above 0")
        return self


class _File(_Strict):
    version: Literal[1]
    expectations: list[Expectation]


@dataclass(frozen=True, slots=True)
class Met:
    """An expectation of this run's card and model, with the cells of the run that it is of."""

    expectation: Expectation
    rows: tuple[Row, ...]

    @property
    def measured(self) -> Range | None:
        """Least and most tok/s of the cells; None where none has a speed."""
        speeds = [row.tok_per_s for row in self.rows if row.tok_per_s is not None]
        return (min(speeds), max(speeds)) if speeds else None

    @property
    def of_expected(self) -> float | None:
        """The fastest cell's speed over the middle of what is expected, else of what is claimed."""
        wanted = self.expectation.expected or self.expectation.claimed
        if self.measured is None or wanted is None:
            return None
        return 2 * self.measured[1] / sum(wanted.tok_per_s)


@lru_cache(maxsize=1)
def expectations() -> tuple[Expectation, ...]:
    """All of the data file."""
    from ruamel.yaml import YAML

    text = resources.files("perfbench.report").joinpath(FILE).read_text(encoding="utf-8")
    loaded = YAML(typ="safe", pure=True).load(text)
    return tuple(_File.model_validate(loaded).expectations)


def met(run: Run, rows: Sequence[Row]) -> list[Met]:
    """What is expected of this run's card and model, in the order of the file."""
    device, model = run.manifest.environment.device_name, model_of(run)
    return [
        Met(one, tuple(row for row in rows if _match(one).matches(row.cell.axes)))
        for one in expectations()
        if one.gpu in device and model == preset(one.model)
    ]


def table(run: Run, rows: Sequence[Row]) -> Table:
    """Every report has it; without a line where nothing is expected of its card and cells."""
    known = met(run, rows)
    lines = [_line(one) for one in known if one.rows]
    device = escape(run.manifest.environment.device_name)
    if not lines:
        many = (
            f" of these cells; {len(known)} expectations of this card are of others"
            if known
            else ""
        )
        note = f"Nothing is claimed or expected of {device}{many} (perfbench/report/{FILE})."
        return Table(TITLE, [], [], note)
    head = ["cells", "claimed tok/s", "expected tok/s", "measured tok/s", "measured / expected"]
    note = (
        "Claimed is what a source states, and nobody here measured; expected is what stored runs of"
        " this project gave; measured is this run, least to most over the cells that match. The"
        " ratio is the fastest of them over the middle of what is expected, or claimed where"
        f" nothing is. The data: perfbench/report/{FILE}."
    )
    return Table(TITLE, [*head, "from"], lines, note)


def _line(one: Met) -> list[str]:
    claimed, expected = one.expectation.claimed, one.expectation.expected
    sources = [
        *([escape(claimed.by)] if claimed else []),
        *([code(expected.run)] if expected else []),
    ]
    return [
        cell_code(str(_match(one.expectation)).strip("{}")),
        _range(claimed.tok_per_s if claimed else None),
        _range(expected.tok_per_s if expected else None),
        _range(one.measured),
        ratio(one.of_expected),
        "; ".join(sources),
    ]


def _range(values: Range | None) -> str:
    if values is None:
        return NULL
    least, most = map(number, values)
    return least if least == most else f"{least} to {most}"


def _match(one: Expectation) -> Match:
    terms: list[tuple[str, tuple[Term, ...]]] = []
    for name, values in one.match.items():
        axis = check_axis(name)
        alternatives = values if isinstance(values, list) else [values]
        terms.append((name, tuple(axis.term(value) for value in alternatives)))
    return Match(tuple(terms))
