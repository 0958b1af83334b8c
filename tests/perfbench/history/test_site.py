"""The page without a browser: its data, its names, what it escapes, its links and sizes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import vl_convert

from perfbench.commands.app import invoke
from perfbench.errors import Exit, PerfbenchError
from perfbench.history import half_width_pct
from perfbench.history.nouns import (
    METRICS,
    ChangePoint,
    HistoryCell,
    Series,
    SeriesKey,
    SeriesPoint,
    TriageKind,
)
from perfbench.history.site import chart_data, chart_png, names, page_data, write_site
from perfbench.history.site.baselines import levels_of
from perfbench.history.site.cells_of_suite import dense_twins, families, peers_of, short_names
from perfbench.history.site.change_lines import ChangeLine, change_line
from perfbench.history.site.charts import AXES, chart_spec, datasets, whole_spec
from perfbench.history.site.palette import PALETTES, Palette
from perfbench.history.site.report_html import report_html
from perfbench.history.site.sparkline import sparkline
from perfbench.history.site.verdict_marks import LETTERS, Light, light_of
from perfbench.history.site.write import SiteOptions
from perfbench.history.store import History
from perfbench.records import BaselineCell, Verdict
from tests.perfbench.history.made_history import (
    DRIFT_PCT,
    STEP_PCT,
    MadeHistory,
    axes_of,
    cell_id_of,
    made_history,
)

ROOT = Path(__file__).parents[3]
RUNS = 24
STEPPED, DRIFTED, FAILING = (cell_id_of(axes_of(place)) for place in range(3))


@pytest.fixture(scope="module")
def history() -> MadeHistory:
    return made_history(cells=9, runs=RUNS)


@pytest.fixture(scope="module")
def site(history: MadeHistory, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "site"
    write_site(history, out, SiteOptions(title="made"))
    return out


def page_of(site: Path, cell_id: str) -> Path:
    return site / "cells" / f"{names.cell_page('nightly-gate', 'h200', cell_id)}.html"


def data_of(page: Path) -> dict:
    text = page.read_text(encoding="utf-8")
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text)
    return json.loads(found)


def series_of(*values: float | None, segments: Sequence[str] = ()) -> Series:
    begin = datetime(2026, 1, 1, tzinfo=UTC)
    points = tuple(
        SeriesPoint(
            f"run-{i}",
            begin + timedelta(days=i),
            f"c{i}",
            value,
            None,
            None,
            3,
            "FAILED" if value is None else "SAME",
            "no value" if value is None else "",
            {"driver": segments[i] if segments else "1"},
        )
        for i, value in enumerate(values)
    )
    key = SeriesKey("s", "c", "path=v2", "tok_per_s")
    return Series(key, METRICS["tok_per_s"], {"path": "v2"}, points)


class Links(HTMLParser):
    """Every address and id of a page, and what of it could run."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.handlers: list[str] = []
        self.scripts: list[dict[str, str | None]] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        self.tags.add(tag)
        self.links += [known[name] or "" for name in ("href", "src") if name in known]
        self.ids |= {known["id"] or ""} if "id" in known else set()
        self.handlers += [name for name in known if name.startswith("on") or name == "style"]
        if tag == "script":
            self.scripts.append(known)


def parsed(page: Path) -> Links:
    found = Links()
    found.feed(page.read_text(encoding="utf-8"))
    return found


def test_every_link_leads_to_a_file_or_out(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) == 3 + 9 + 2 * RUNS
    for page in pages:
        found = parsed(page)
        for link in found.links:
            parts = urlsplit(link)
            if parts.scheme in ("http", "https"):
                continue
            if link == "data:,":  # no icon is fetched
                continue
            assert parts.scheme == "", f"{page}: {link}"
            target = page if not parts.path else page.parent / unquote(parts.path)
            assert target.is_file(), f"{page}: {link}"
            if parts.fragment and "=" not in parts.fragment:
                assert parts.fragment in parsed(target).ids, f"{page}: {link}"


def test_comparisons_that_are_linked_have_their_data(site: Path) -> None:
    found = set(re.findall(r"#a=([\w-]+)&amp;b=([\w-]+)", (site / "index.html").read_text()))
    assert found
    for page in {one for pair in found for one in pair}:
        assert (site / "data" / f"{page}.js").is_file()


def test_pages_run_only_their_own_files(site: Path) -> None:
    for page in site.rglob("*.html"):
        found = parsed(page)
        assert found.handlers == [], page
        for script in found.scripts:
            assert script.get("type") == "application/json" or script.get("src"), page
        policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page.read_text())
        assert policy and "unsafe" not in policy[1] and "default-src 'none'" in policy[1]


def test_planted_changes_show_with_their_commits(site: Path, history: MadeHistory) -> None:
    overview = (site / "index.html").read_text(encoding="utf-8")
    for cell_id, pct, change in zip(
        (STEPPED, DRIFTED), (STEP_PCT, DRIFT_PCT), history.found[:2], strict=True
    ):
        size = f"{pct:+.1f} %".replace("-", "−")
        for text in (overview, page_of(site, cell_id).read_text(encoding="utf-8")):
            assert size in text
            assert (
                f"<code>{change.before_commit[:10]}</code> → <code>{change.commit[:10]}</code>"
                in text
            )
        chart = data_of(page_of(site, cell_id))["metrics"][0]
        (mark,) = chart["changes"]
        assert (mark["kind"], mark["pct"]) == (change.kind.value, pct)


def test_a_cell_page_holds_its_values_alone(site: Path, history: MadeHistory) -> None:
    data = data_of(page_of(site, FAILING))
    speed = data["metrics"][0]
    measured = [
        cell.measured["tok_per_s"].value
        for run in history.every
        for cell in run.cells
        if run.info.suite == "nightly-gate" and cell.cell_id == FAILING
    ]
    assert speed["value"] == [None if v is None else pytest.approx(v, rel=1e-5) for v in measured]
    assert [i for i, value in enumerate(speed["value"]) if value is None] == [4, 13, 22]
    assert set(speed["why"].values()) == {"exit -11: SIGSEGV in the second step"}
    assert [one["name"] for one in data["metrics"]][:2] == ["tok_per_s", "x_dense"]
    assert max(map(len, (json.dumps(peer["value"]) for peer in data["peers"]))) < 40 * RUNS


def test_memory_is_in_gib_on_every_page(site: Path) -> None:
    memory = next(
        one
        for one in data_of(page_of(site, STEPPED))["metrics"]
        if one["name"] == "peak_memory_bytes"
    )
    assert memory["unit"] == "GiB" and memory["value"][0] == pytest.approx(3.2e9 / 2**30, rel=1e-4)
    run = next((site / "data").glob("*gate*.js")).read_text(encoding="utf-8")
    columns = json.loads(run.partition("] = ")[2].rstrip(";\n"))
    place = columns["metrics"].index("peak_memory_bytes")
    assert columns["cells"][0][3 + place][0] == pytest.approx(3.2e9 / 2**30, rel=1e-4)


def test_names_are_safe_and_stable() -> None:
    hostile = (
        "../../etc/passwd",
        "CON",
        "a/b\\c",
        "x" * 5000,
        "",
        "é\u2028\ud800",
        "%2e%2e",
        "a\0b",
    )
    found = [names.cell_page("s", "c", one) for one in hostile]
    assert all(re.fullmatch(r"[a-z0-9][a-z0-9-]{11,80}", one) for one in found)
    assert len(set(found)) == len(hostile)
    assert names.cell_page("a", "b", "c") != names.cell_page("a\0b", "", "c")
    # a permalink of last year: this may never change
    assert names.cell_page("gate", "h200", "path=v2,seq_len=512") == (
        "path-v2-seq-len-512-13dbd573b7ee"
    )


HOSTILE = (
    "<script>alert(1)</script>",
    "</script><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "javascript:alert(1)",
    "\u2028alert(1)\u2029",
    "{{ 7 * 7 }}",
)


def hostile_history() -> MadeHistory:
    """Markup wherever a run holds text."""
    made = made_history(cells=3, runs=3)
    every = []
    for run in made.every:
        bad = " ".join(HOSTILE)
        cells = tuple(
            replace(
                cell,
                cell_id=f"{cell.cell_id},{bad}",
                axes={**cell.axes, f"x{bad}": bad},
                verdict=bad if place else cell.verdict,
                reason=bad,
                reproduce=bad,
            )
            for place, cell in enumerate(run.cells)
        )
        info = replace(
            run.info,
            suite=bad,
            card=bad,
            commit=bad,
            branch=bad,
            headline=bad,
            command=bad,
            segment={bad: bad},
            report="\n\n".join([*HOSTILE, "[x](javascript:alert(1))", "![x](x onerror=alert(1))"]),
        )
        every.append(replace(run, info=info, cells=cells))
    cell = every[0].cells[1]
    key = SeriesKey(bad, bad, cell.cell_id, "tok_per_s")
    old, new = every[0].info, every[2].info
    decision = replace(
        made.triaged[0],
        run_id=new.run_id,
        note=f"note {bad}",
        author=f"author {bad}",
        **dict.fromkeys(("suite", "card"), bad),
        cell_id=key.cell_id,
    )
    change = replace(
        made.found[0],
        key=key,
        before_run_id=old.run_id,
        run_id=new.run_id,
        before_commit=f"old {bad}",
        commit=f"new {bad}",
    )
    other = replace(change, key=replace(key, cell_id=every[0].cells[2].cell_id))
    return MadeHistory(every, [change, other], [decision])


def test_markup_in_a_run_is_text_on_every_page(tmp_path: Path) -> None:
    write_site(hostile_history(), tmp_path / "site", SiteOptions(title=HOSTILE[0]))
    pages = sorted((tmp_path / "site").rglob("*.html"))
    assert len(pages) == 3 + 3 + 3
    for page in pages:
        found = parsed(page)
        assert found.handlers == [] and "img" not in found.tags, page
        assert all(one.get("src") or one.get("type") for one in found.scripts), page
        assert not any(link.startswith("javascript") for link in found.links), page
        text = page.read_text()
        assert page.name != "index.html" or ("accepted: note &lt;script" in text), page
        assert "49" not in re.findall(r"\{\{ 7 \* 7 \}\}|\b49\b", page.read_text())
    for script in (tmp_path / "site" / "data").glob("*.js"):
        text = script.read_text(encoding="utf-8")
        assert text.isascii() and "<" not in text


@pytest.mark.parametrize(
    ("markdown", "wanted", "unwanted"),
    [
        ("<b>x</b>", "&lt;b&gt;", "<b>"),
        ("[x](javascript:alert(1))", "x", "<a"),
        ("[x](//evil.example)", "x", "<a"),
        ("[x](trace.json)", "x", "<a"),
        ("[x](https://example.org/a)", 'rel="noopener noreferrer nofollow"', "javascript"),
        ("![a picture](t.png)", "a picture", "<img"),
        ("# One", "<h2>One</h2>", "<h1>"),
        ("| a |\n| ---: |\n| 1 |", '<td class="number">1</td>', "style="),
        ("<details><summary>A <b></summary>\n\nx\n\n</details>", "<summary>A &lt;b&gt;", "<b>"),
        ("<details><summary>A</summary>", "</details>", "&lt;details"),
        ("</details>", "&lt;/details&gt;", "</details>"),
        ("```\n</details>\n```", "&lt;/details&gt;", "</details>"),
        ("<details open onclick=alert(1)>", "&lt;details", "<details"),
    ],
)
def test_report_is_inert(markdown: str, wanted: str, unwanted: str) -> None:
    found = report_html(markdown)
    assert wanted in found and unwanted not in found


def test_the_commands_read_a_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same bytes as from the nouns themselves."""
    monkeypatch.chdir(tmp_path)
    made = made_history(cells=9, runs=6)
    with History.open(tmp_path / "h.sqlite", create=True) as opened:
        for run in made.every:
            opened.add(run)
        assert len(opened.report_changes(made.found)) == len(made.found)
        for decision in made.triaged:
            opened.triage(decision)
    code = invoke(["site", "--history", "h.sqlite", "--out", "db", "--title", "T"])
    assert code == 0 and "9 cells, 12 runs" in capsys.readouterr().out
    write_site(made, tmp_path / "nouns", SiteOptions("T"))
    for path in (tmp_path / "nouns").rglob("*"):
        if path.is_file():
            same = tmp_path / "db" / path.relative_to(tmp_path / "nouns")
            assert same.read_bytes() == path.read_bytes(), path
    assert (
        invoke(
            ["history", "chart", "path=dense,workload=forward", "c.png", "--history", "h.sqlite"]
        )
        == 0
    )
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    assert invoke(["site", "--history", "h.sqlite", "--repository", "javascript:alert(1)"]) == 2


def test_a_baseline_is_a_level_of_its_cell(history: MadeHistory, tmp_path: Path) -> None:
    cell = BaselineCell.model_construct(
        tok_per_s=[39_000.0, 41_000.0],
        device_time_s=[0.1],
        host_time_s=[],
        kernel_count=180,
        host_syncs=None,
    )
    found = levels_of({STEPPED: cell})
    assert found[STEPPED, "tok_per_s"] == pytest.approx((39_000 * 41_000) ** 0.5)
    assert found[STEPPED, "device_ms"] == pytest.approx(100)
    assert found[STEPPED, "launches"] == 180 and len(found) == 3
    (tmp_path / "h200").mkdir()
    (tmp_path / "h200" / "nightly-gate.json").write_text("{")
    made = write_site(history, tmp_path / "site", SiteOptions(baselines=tmp_path))
    assert len(made.problems) == 1 and "is not JSON" in made.problems[0]


def test_a_history_of_no_runs_says_what_to_do(tmp_path: Path) -> None:
    made = write_site(MadeHistory(), tmp_path / "site", SiteOptions())
    text = made.index.read_text(encoding="utf-8")
    assert made.num_runs == 0 and "perfbench history add latest" in text
    for link in parsed(made.index).links:
        assert link == "data:," or link.startswith("#") or (tmp_path / "site" / link).is_file()


def test_since_leaves_older_runs_out(history: MadeHistory, tmp_path: Path) -> None:
    newest = max(run.info.measured_utc for run in history.every)
    options = SiteOptions(since=newest - timedelta(days=2))
    made = write_site(history, tmp_path / "site", options)
    assert made.num_runs == 2 * 3
    assert len(data_of(page_of(tmp_path / "site", STEPPED))["runs"]["time"]) == 3


def test_written_again_it_loses_what_is_gone_and_touches_nothing_else(tmp_path: Path) -> None:
    made = made_history(cells=3, runs=4)
    write_site(made, tmp_path, SiteOptions())
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    write_site(made, tmp_path, SiteOptions())
    after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert before == after
    gone = names.run_page(made.every[0].info.run_id)
    write_site(MadeHistory(made.every[1:], [], []), tmp_path, SiteOptions())
    left = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert {path.name for path in before.keys() - left} == {f"{gone}.html", f"{gone}.js"}


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(PerfbenchError, match="Next: name another one") as raised:
        write_site(MadeHistory(), tmp_path, SiteOptions())
    assert raised.value.exit_code == Exit.USAGE
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_cell_that_measured_nothing_has_a_page(tmp_path: Path) -> None:
    made = made_history(cells=3, runs=2)
    every = [
        replace(
            run,
            cells=tuple(
                replace(cell, verdict="FAILED", reason="out of memory", measured={})
                for cell in run.cells
            ),
        )
        for run in made.every
    ]
    write_site(MadeHistory(every), tmp_path / "site", SiteOptions())
    data = data_of(page_of(tmp_path / "site", STEPPED))
    assert data["metrics"][0]["why"] == {"0": "out of memory", "1": "out of memory"}


def test_red_is_what_fails_and_blind_what_proves_nothing() -> None:
    lights = {verdict: light_of(verdict) for verdict in Verdict}
    assert {v for v in lights if lights[v] == Light.GREEN} == {"SAME", "FASTER", "NEW"}
    assert {v for v in lights if lights[v] == Light.BLIND} == {"WATCH", "BLIND", "UNSTABLE"}
    assert light_of(None) == Light.NONE and light_of("OF_A_NEWER_PERFBENCH") == Light.RED
    assert set(LETTERS) == set(Verdict) and len(set(LETTERS.values())) == len(Verdict)


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """WCAG 2.2, https://www.w3.org/TR/WCAG22/#dfn-contrast-ratio."""
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("palette", PALETTES.values(), ids=PALETTES)
def test_colours_of_charts_have_contrast(palette: Palette) -> None:
    """AA: 4.5 for text, 3 for lines and marks."""
    for text in (palette.ink, palette.worse, palette.better, palette.baseline):
        assert contrast(text, palette.paper) >= 4.5
    for line in (palette.line, palette.blind, *palette.others):
        assert contrast(line, palette.paper) >= 3


def test_colours_of_pages_have_contrast() -> None:
    css = Path(page_data.__file__).with_name("assets") / "site.css"
    found = re.findall(
        r"--([\w-]+): (?:light-dark\((#\w{6}), (#\w{6})\)|(#\w{6}))", css.read_text()
    )
    colours = {name: (light or both, dark or both) for name, light, dark, both in found}
    for theme in (0, 1):
        one = {name: pair[theme] for name, pair in colours.items()}
        for text in ("ink", "quiet", "link", "worse", "better"):
            for paper in ("paper", "back", "shade"):
                assert contrast(one[text], one[paper]) >= 4.5, (text, paper, theme)
        for light in ("green", "blind", "red"):
            assert contrast(one[f"on-{light}"], one[light]) >= 4.5, (light, theme)


def test_sparkline_breaks_at_gaps_and_marks_changes() -> None:
    found = sparkline([1, 2, None, 4, 3], [3])
    assert found.path.count("M") == 2 and found.path.count("L") == 2
    assert len(found.failures) == 1 and found.changes == ((88.5, 3.0),)
    assert found.last == (117.0, 9.0)
    assert sparkline([]).last is None and sparkline([None]).path == ""
    assert sparkline([5.0]).last == (117.0, 12.0)


def test_a_sparkline_of_a_year_is_as_small_as_one_of_months() -> None:
    year = sparkline([float(i % 7) for i in range(365)], [300])
    assert len(year.path) < 1200 and len(year.changes) == 1


def test_levels_end_at_steps_segments_and_accepted_levels() -> None:
    series = series_of(1, 1, 5, 5, 9, 9, segments=("1", "1", "1", "1", "2", "2"))
    line = chart_data.timeline([series])
    history = made_history(cells=3, runs=6)
    step = replace(history.found[0], key=series.key, before_run_id="run-1", run_id="run-2")
    found = chart_data.levels(series, line, [step])
    assert [(row["i"], row["to"], row["level"]) for row in found] == [
        (0, 1, 1),
        (2, 3, 5),
        (4, 5, 9),
    ]
    accepted = replace(history.triaged[0], run_id="run-3")
    assert [row["i"] for row in chart_data.levels(series, line, [], [accepted])] == [0, 3, 4]


def test_no_level_while_a_series_drifts() -> None:
    series = series_of(1, 1, 2, 3, 4, 4)
    line = chart_data.timeline([series])
    drift = made_history(cells=3, runs=6).found[1]
    drift = replace(drift, key=series.key, before_run_id="run-2", run_id="run-4")
    found = chart_data.levels(series, line, [drift])
    assert [(row["i"], row["to"]) for row in found] == [(0, 1), (5, 5)]


def test_segments_name_what_changed() -> None:
    series = series_of(1, 2, 3, segments=("570", "570", "580"))
    (found,) = chart_data.segment_changes(chart_data.timeline([series]))
    assert found == {"i": 2, "text": "driver 570 → 580", "short": "driver"}


def test_commits_are_in_the_order_of_their_age() -> None:
    """The second run measured an older commit than the first."""
    series = series_of(1, 2, 3)
    times = {"c0": datetime(2025, 12, 5, tzinfo=UTC), "c1": datetime(2025, 12, 1, tzinfo=UTC)}
    line = chart_data.timeline([series], times)
    assert line.orders == (1, 0, 2) and line.commits == ("c1", "c0", "c2")


def test_infinity_and_nan_are_no_values() -> None:
    assert [chart_data.rounded(x) for x in (float("nan"), float("inf"), 1234567.8, 0.1)] == [
        None,
        None,
        1234570,
        0.1,
    ]


def test_dense_twins_differ_in_path_and_fa2_alone() -> None:
    cells = {
        "a": {"path": "triton", "fa2": "auto", "seq_len": 512},
        "b": {"path": "dense", "fa2": "n/a", "seq_len": 512},
        "c": {"path": "dense", "fa2": "n/a", "seq_len": 1024},
        "d": {"path": "v2", "fa2": "on", "seq_len": 512},
    }
    assert dense_twins("a", cells) == ["b"] and dense_twins("c", cells) == []
    assert peers_of("a", cells) == ["b", "d"]
    assert short_names({"a": cells["a"], "d": cells["d"]}) == {
        "a": "path=triton, fa2=auto",
        "d": "path=v2, fa2=on",
    }
    assert short_names({"x[1]": {}, "x[2]": {}}) == {"x[1]": "x[1]", "x[2]": "x[2]"}
    empty = {"[b]": {"benchmark": ""}, "c": {"benchmark": "c"}}
    assert short_names(empty) == {"[b]": "[b]", "c": "benchmark=c"}


def test_a_family_is_a_cell_and_its_peers() -> None:
    cells = {cell_id_of(axes_of(place)): axes_of(place) for place in range(40)}
    cells |= {"x": {"benchmark": "a"}, "y": {"benchmark": "a"}}
    found = families(cells)
    for cell_id in cells:
        assert {*found[cell_id]} == {cell_id, *peers_of(cell_id, cells)}


def test_a_site_of_many_cells_shows_its_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("perfbench.history.site.write.PROGRESS_EACH", 4)
    lines: list[str] = []
    write_site(made_history(cells=9, runs=5), tmp_path / "site", SiteOptions(), lines.append)
    assert lines == [
        "4 of 5 runs of nightly-gate on h200",
        "reads the series of 6 cells of nightly-gate on h200",
        "4 of 6 cells of nightly-gate on h200",
        "4 of 5 runs of nightly-train on h100-80gb-hbm3",
    ]
    url = str(tmp_path / "h.sqlite")
    with History.open(url, create=True) as opened:
        for run in made_history(cells=9, runs=5).every:
            opened.add(run)
    assert invoke(["site", "--history", url, "--out", str(tmp_path / "again")]) == 0
    shown = capsys.readouterr()
    assert [line.removeprefix("perfbench: ") for line in shown.err.splitlines()] == lines
    assert "4 of 5" not in shown.out


def test_the_work_of_a_cell_does_not_grow_with_the_suite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page looks at its family, and a history of one metric is read once."""
    given: list[int] = []
    rows = page_data.peer_rows
    monkeypatch.setattr(
        page_data, "peer_rows", lambda cell, main: given.append(len(main)) or rows(cell, main)
    )
    made = made_history(cells=90, runs=2)
    made.every = [
        replace(
            run,
            cells=tuple(
                replace(cell, measured={"tok_per_s": cell.measured["tok_per_s"]})
                for cell in run.cells
            ),
        )
        for run in made.every
    ]
    read: list[object] = []
    every_series = made.every_series
    made.every_series = lambda **wanted: read.append(wanted) or every_series(**wanted)
    write_site(made, tmp_path / "site", SiteOptions())
    assert len(given) == 90 and max(given) == 5
    assert len(read) == 2  # suites


def line_of(change: ChangePoint, reproduce: str, *sides: SeriesPoint) -> ChangeLine:
    cell = HistoryCell(change.key.cell_id, {"path": "v2"}, "SAME", "", reproduce, {})
    series = Series(change.key, METRICS[change.key.metric], cell.axes, sides)
    return change_line(change, "name", cell, series, has_before=True)


def only_page(change: ChangePoint, reproduce: str) -> list[str]:
    return [*line_of(change, reproduce).commands]


def sides_of(change: ChangePoint, old: float, new: float, **fields: bool) -> list[SeriesPoint]:
    return [
        SeriesPoint(
            run_id, change.measured_utc, "c" * 40, value, None, None, 1, None, "", {}, **fields
        )
        for run_id, value in ((change.before_run_id, old), (change.run_id, new))
    ]


def test_a_change_of_a_dirty_tree_is_not_bisected_and_one_from_0_has_no_percentage() -> None:
    step = made_history(cells=3, runs=6).found[0]
    step = replace(step, before_commit="a" * 40, commit="f" * 40)
    ran = f"perfbench run gate.yaml --only {step.key.cell_id}"
    clean, dirty = (
        line_of(step, ran, *sides_of(step, 100.0, 94.0, is_dirty=one)) for one in (False, True)
    )
    assert "bisect" in clean.commands[-1] and "bisect" not in dirty.commands[-1]
    assert clean.size.endswith(" %") and clean.size == dirty.size
    from_zero = line_of(step, ran, *sides_of(step, 0.0, 3.0))
    assert (from_zero.size, from_zero.interval) == ("0 → 3", "no percentage of 0 exists")


def test_a_bisect_is_typed_with_its_matrix_and_only_where_it_can_judge() -> None:
    step = made_history(cells=3, runs=6).found[0]
    ran = f"perfbench run 'my matrices/gate.yaml' --only {step.key.cell_id}"
    old = str(step.before_commit)
    step = replace(step, before_commit=old, commit="f" * 40)
    (between, typed) = only_page(step, ran)
    assert between == f"git log --oneline {old[:10]}..{'f' * 10}"
    assert typed == (
        f"perfbench bisect {step.key.cell_id} --good {old[:10]} --bad {'f' * 10}"
        " --matrix 'my matrices/gate.yaml'"
    )
    for other, command in (
        (step, ""),
        (step, "pytest --benchmark-only"),
        (replace(step, key=replace(step.key, metric="device_ms")), ran),
        (replace(step, is_worse=False), ran),
        (replace(step, is_worse=None), ran),
        (replace(step, before_commit=None), ran),
        (replace(step, commit=old, before_commit=old), ran),
    ):
        typed = only_page(other, command)[-1]
        assert typed == f"perfbench history {other.key.cell_id} --metric {other.key.metric}"


@pytest.mark.parametrize(
    ("kind", "place", "is_decided"),
    [
        (TriageKind.NOISE, 16, True),
        (TriageKind.NOISE, 5, False),
        (TriageKind.ACCEPTED, 16, True),
        (TriageKind.ACCEPTED, 20, True),
        (TriageKind.ACCEPTED, 15, False),  # the old level
        (TriageKind.NOTE, 16, False),
    ],
)
def test_a_decided_change_is_no_news(
    kind: TriageKind, place: int, is_decided: bool, tmp_path: Path
) -> None:
    made = made_history(cells=3, runs=RUNS)
    assert made.found[0].run_id == made.every[16].info.run_id
    run_id = made.every[place].info.run_id
    decision = replace(made.triaged[0], kind=kind, run_id=run_id, note="the fan", author="ada")
    made.triaged, made.found = [decision], made.found[:1]
    write_site(made, tmp_path / "site", SiteOptions())
    overview = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    page = page_of(tmp_path / "site", STEPPED)
    text = page.read_text(encoding="utf-8")
    for shown in (overview, text):
        assert (f"{kind.value}: the fan (ada)" in shown) is is_decided
        assert ("perfbench bisect" in shown) is not is_decided
        row = next(one for one in re.findall(r"<tr.*?</tr>", shown, re.DOTALL) if "−6.4" in one)
        assert ("judged worse" in row) is not is_decided
    chart = data_of(page)["metrics"][0]
    (mark,) = chart["changes"]
    assert (mark["worse"] is True) is not is_decided
    begins = [level["i"] for level in chart["levels"]]
    assert (16 in begins) is not (kind == TriageKind.NOISE and is_decided)


def test_a_peer_is_compared_in_the_newest_run_alone() -> None:
    mine, theirs = series_of(10, 20), series_of(20, 60)
    other = replace(theirs, key=replace(theirs.key, cell_id="path=dense"), axes={"path": "dense"})
    main = {"path=v2": mine, "path=dense": other}
    assert [one.ratio for one in page_data.peer_rows("path=v2", main)] == [3.0]
    main["path=v2"] = replace(mine, points=series_of(10, None).points)
    (row,) = page_data.peer_rows("path=v2", main)
    assert row.ratio is None and row.remark == "this cell: FAILED, no value"
    main["path=v2"], main["path=dense"] = mine, replace(other, points=series_of(20, None).points)
    (row,) = page_data.peer_rows("path=v2", main)
    assert row.ratio is None and row.remark == "FAILED: no value"
    main["path=dense"] = replace(other, points=other.points[:1])
    (row,) = page_data.peer_rows("path=v2", main)
    assert row.ratio is None and "2026-01-01" in row.remark


def test_half_an_interval_is_its_larger_half() -> None:
    """As in the terminal: of 80 to 125 around 100, 25 %."""
    assert half_width_pct(100.0, 80.0, 125.0) == pytest.approx(25)
    assert half_width_pct(100.0, 70.0, 125.0) == pytest.approx(30)
    assert half_width_pct(100.0, None, 125.0) is None and half_width_pct(0.0, 0.0, 1.0) is None


def test_every_layer_draws_a_set_that_there_is(history: MadeHistory) -> None:
    series = next(iter(history.every_series(suite="nightly-gate", card="h200", metric="tok_per_s")))
    line = chart_data.timeline([series])
    runs = {
        **chart_data.runs_columns(line),
        "light": ["green"] * RUNS,
        "segments": chart_data.segment_changes(line),
    }
    one = {
        **chart_data.series_columns(series, line),
        "changes": [],
        "levels": [],
        "accepted": [],
        "baseline": 1.0,
    }
    found = datasets(runs, one)
    assert len(found["points"]) == RUNS and found["baseline"] == [{"level": 1.0}]
    for axis in AXES:
        used = {layer.get("data", {}).get("name", "points") for layer in chart_spec(axis)["layer"]}
        assert used == set(found)


@pytest.mark.parametrize(
    ("values", "segments", "lines"),
    [
        ((1, 2, 3, 4, 5), "11111", 1),
        ((1, 2, None, 4, 5), "11111", 2),
        ((1, 2, 3, 4, 5), "11222", 2),
    ],
)
@pytest.mark.parametrize("axis", AXES)
def test_no_line_over_a_gap_or_into_another_segment(
    values: tuple[float | None, ...], segments: str, lines: int, axis: str
) -> None:
    spec = whole_spec(series_of(*values, segments=segments), axis=axis)
    drawn = vl_convert.vegalite_to_svg(spec)
    assert drawn.count('aria-roledescription="line mark"') == lines


@pytest.mark.parametrize("axis", AXES)
def test_png_shows_the_step(history: MadeHistory, axis: str) -> None:
    """With the change point it is another picture than without."""
    every = history.every_series(suite="nightly-gate", card="h200", metric="tok_per_s")
    series = next(one for one in every if one.key.cell_id == STEPPED)
    drawn = chart_png(series, history.found, history.triaged, axis=axis, baseline=40_000.0)
    assert drawn.startswith(b"\x89PNG") and drawn != chart_png(series, axis=axis)


def test_a_year_of_300_cells_stays_small_on_each_page(tmp_path: Path) -> None:
    """A cell's page grows with its own runs, not with the cells next to it."""
    few = tmp_path / "few"
    many = tmp_path / "many"
    write_site(made_history(cells=30, runs=8), few, SiteOptions())
    write_site(made_history(cells=90, runs=8), many, SiteOptions())
    small, large = (page_of(one, STEPPED).stat().st_size for one in (few, many))
    assert large < 1.1 * small
    per_cell = ((many / "index.html").stat().st_size - (few / "index.html").stat().st_size) / 60
    assert per_cell < 2500  # 300 cells: an overview of under 800 kB


@pytest.mark.parametrize("path", [".github/workflows/pages.yml", "docs/site.md"])
def test_every_published_page_is_written_after_detect(path: str) -> None:
    """It shows the change points that `detect` stored, and no others."""
    lines = [line.strip() for line in (ROOT / path).read_text(encoding="utf-8").splitlines()]
    written = [index for index, line in enumerate(lines) if line.startswith("perfbench site ")]
    assert written
    for index in written:
        assert lines[index - 1].startswith("perfbench detect --report-only"), lines[index]
