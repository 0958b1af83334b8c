"""The page of a history in Chromium: a year of 300 cells, read from files without a server."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from perfbench.commands.app import invoke
from perfbench.history.nouns import MeasuredValue
from perfbench.history.site import SiteOptions, names, write_site
from perfbench.history.site.palette import LIGHT
from tests.browser.conftest import Watched
from tests.perfbench.history.made_history import (
    MadeHistory,
    axes_of,
    cell_id_of,
    commit_of,
    made_history,
)
from tests.perfbench.history.test_site import hostile_history

STEPPED, DRIFTED, FAILING = (
    f"cells/{names.cell_page('nightly-gate', 'h200', cell_id_of(axes_of(place)))}.html"
    for place in range(3)
)
SPEED = '.chart[data-metric="tok_per_s"]'
SCREENS = [(1440, "light"), (1440, "dark"), (390, "light"), (390, "dark")]
WIDE = "document.documentElement.scrollWidth - window.innerWidth"


def go(page: Page, site: Path, path: str) -> None:
    page.goto(f"{site.as_uri()}/{path}")


def visible_cells(page: Page) -> int:
    return page.locator(".cells tbody tr:not([hidden])").count()


def wait_for_chart(page: Page, axis: str = "time") -> None:
    expect(page.locator(SPEED)).to_have_attribute("data-drawn", axis)


def run_of(site: Path) -> str:
    return f"runs/{max((site / 'runs').glob('*gate*.html')).name}"


def test_the_overview_filters_and_the_address_keeps_it(opened: Watched, year: Path) -> None:
    page = opened.page
    go(page, year, "index.html")
    assert visible_cells(page) == 300
    page.keyboard.press("/")
    page.keyboard.type("path=dense* -decode")
    expect(page.locator("#shown")).to_have_text("40 of 300 cells")
    assert visible_cells(page) == 40
    page.get_by_role("button", name="red", exact=True).click()
    expect(page.locator("#shown")).to_have_text("0 of 300 cells")
    page.fill("#words", "verdict=regressed")
    expect(page.locator("#shown")).to_have_text("1 of 300 cells")
    page.locator("#since").get_by_text("all", exact=True).click()
    address = page.url
    assert "q=verdict%3Dregressed" in address and "since=0" in address
    page.goto("about:blank")
    page.goto(address)
    expect(page.locator("#shown")).to_have_text("1 of 300 cells")
    assert page.input_value("#words") == "verdict=regressed"
    expect(page.locator("#changes tbody tr:not([hidden])").first).to_contain_text("−6.4 %")


def test_what_changed_leads_to_the_cell_and_the_comparison(opened: Watched, year: Path) -> None:
    page = opened.page
    go(page, year, "index.html#since=0&q=kind%3Dstep%20metric%3Dtok_per_s")
    (row,) = page.locator("#changes tbody tr:not([hidden])").all()
    commits = row.locator("td").nth(4).inner_text()
    row.locator("td").nth(4).get_by_role("link").click()
    expect(page.locator("#table tbody tr")).to_have_count(200)
    pair = [page.locator(f"#{side} option:checked").inner_text() for side in "ab"]
    for side, commit in zip(pair, commits.split(" → "), strict=True):
        assert commit in side
    page.locator("#table tbody tr").first.get_by_role("link").click()
    wait_for_chart(page)


def test_hover_shows_the_run_and_a_click_opens_it(opened: Watched, year: Path) -> None:
    page = opened.page
    go(page, year, STEPPED)
    wait_for_chart(page)
    box = page.locator(SPEED).bounding_box()
    page.mouse.move(box["x"] + box["width"] - 25, box["y"] + 80)
    tip = page.locator("#tip")
    expect(tip).to_be_visible()
    expect(tip).to_contain_text("REGRESSED")
    expect(tip).to_contain_text(re.compile(r"95 %: [\d,]+ to [\d,]+ tok/s, 3 processes"))
    commit, run_id = tip.locator("code").all_inner_texts()
    page.mouse.click(box["x"] + box["width"] - 25, box["y"] + 80)
    page.wait_for_url("**/runs/*.html")
    expect(page.locator("dl")).to_contain_text(commit)
    expect(page.locator("dl")).to_contain_text(run_id)


def test_keys_walk_over_the_runs(opened: Watched, year: Path) -> None:
    page = opened.page
    go(page, year, STEPPED)
    wait_for_chart(page)
    chart, tip = page.locator(SPEED), page.locator("#tip")
    chart.focus()
    chart.press("End")
    expect(tip).to_contain_text("2027-01-02")
    chart.press("ArrowLeft")
    expect(tip).to_contain_text("2027-01-01")
    chart.press("Home")
    expect(tip).to_contain_text("2026-01-03")
    chart.press("Escape")
    expect(tip).to_be_hidden()


def test_a_failure_shows_its_reason(opened: Watched, year: Path) -> None:
    page = opened.page
    go(page, year, FAILING)
    wait_for_chart(page)
    chart = page.locator(SPEED)
    chart.press("Home")
    for _ in range(4):
        chart.press("ArrowRight")
    expect(page.locator("#tip")).to_contain_text("no value")
    expect(page.locator("#tip")).to_contain_text("SIGSEGV in the second step")


def peer_marks(page: Page) -> int:
    """Pixels of the chart in the colour of the first peer."""
    return page.evaluate(
        """([place, colour]) => {
          const wanted = [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
          const canvas = document.querySelector(`${place} canvas`);
          const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
          let count = 0;
          for (let i = 0; i < data.length; i += 4) {
            count += wanted.every((one, k) => Math.abs(data[i + k] - one) <= 2);
          }
          return count;
        }""",
        [SPEED, LIGHT.others[0]],
    )


def test_the_axis_and_the_peers_are_in_the_address(opened: Watched, year: Path) -> None:
    page = opened.page
    go(page, year, STEPPED)
    wait_for_chart(page)
    page.get_by_text("commits", exact=True).first.click()
    wait_for_chart(page, "order")
    alone = peer_marks(page)
    page.get_by_text("path=dense").first.click()
    assert "x=order" in page.url and "peers=path%3Ddense" in page.url
    page.reload()
    wait_for_chart(page, "order")
    assert page.locator("#peers input").first.is_checked()
    assert peer_marks(page) > alone + 200


def test_the_head_of_a_chart_is_the_newest_run(opened: Watched, tmp_path: Path) -> None:
    """A speed before a WRONG_PATH run is no current one."""
    made = made_history(cells=3, runs=6)
    last = made.every[-1]
    wrong = {"verdict": "WRONG_PATH", "reason": "ran masked"}
    empty = dict.fromkeys(last.cells[0].measured, MeasuredValue(None, reason="ran masked"))
    cells = (replace(last.cells[0], measured=empty, **wrong), *last.cells[1:])
    made.every[-1] = replace(last, cells=cells)
    write_site(made, tmp_path, SiteOptions())
    page = opened.page
    head = page.locator("figure.main figcaption span")
    go(page, tmp_path, STEPPED)
    expect(head).to_have_text(
        re.compile(r"^- \(WRONG_PATH: ran masked\); [\d,]+ tok/s on 2026-01-07 02:17$")
    )
    go(page, tmp_path, DRIFTED)
    expect(head).to_have_text(re.compile(r"^[\d,]+ tok/s$"))


def test_all_runs_of_a_cell_are_a_table_that_sorts(opened: Watched, year: Path) -> None:
    page = opened.page
    go(page, year, DRIFTED)
    page.get_by_text("All runs of this cell").click()
    rows = page.locator("#all tbody tr")
    expect(rows).to_have_count(365)
    head = page.locator("#all th").nth(2)
    head.get_by_role("button").click()
    expect(head).to_have_attribute("aria-sort", "ascending")
    values = rows.locator("td:nth-child(3)").all_inner_texts()
    speeds = [float(value.split()[0].replace(",", "")) for value in values]
    assert speeds == sorted(speeds)


def test_compare_takes_commits_and_sorts(opened: Watched, year: Path) -> None:
    """A commit stands for all its runs: the cells of both suites."""
    page = opened.page
    go(page, year, "compare.html")
    expect(page.locator("#table tbody tr")).to_have_count(200)
    old, new = commit_of(60), commit_of(181)  # all of one driver; before and after the step
    go(page, year, f"compare.html#a={old[:10]}&b={new[:10]}&q=path%3Dtriton")
    page.reload()
    summary = page.locator("#summary")
    expect(summary).to_contain_text(
        re.compile(r"\d+ of 60 cells changed by more than the interval\.$")
    )
    assert page.locator("#a option:checked").get_attribute("data-commit") == old
    expect(page.locator("#a option:checked")).to_have_text(f"{old[:10]} · all 4 runs")
    expect(page.locator("#a optgroup")).to_have_attribute("label", "all runs of a commit")
    expect(page.locator("#commits")).to_be_visible()
    page.locator("#table th").nth(3).get_by_role("button").click()
    first = page.locator("#table tbody tr").first
    expect(first).to_contain_text("workload=forward, seq_len=512, path=triton, batch=1")
    expect(first.locator(".judged")).to_have_class(re.compile("worse"))
    expect(page.locator("#table tbody")).to_contain_text("workload=train")
    page.select_option("#metric", "launches")
    expect(page.locator("#table tbody tr")).to_have_count(60)
    assert "metric=launches" in page.url


def test_compare_does_not_count_across_a_driver(opened: Watched, year: Path) -> None:
    page = opened.page
    go(page, year, "compare.html")
    oldest = page.locator("#a option[data-suite=nightly-gate]").last.get_attribute("value")
    go(page, year, f"compare.html#a={oldest}&b={run_of(year)[5:-5]}&q=path%3Dtriton")
    page.reload()
    expect(page.locator("#summary")).to_have_text(
        "0 of 40 cells changed by more than the interval;"
        " 40 not comparable (driver 570.86 → 580.159)."
    )
    expect(page.locator("#table .judged")).to_have_count(0)
    expect(page.locator("#table tbody tr").first).to_contain_text("not comparable")


def imported(folder: Path, *medians: dict[str, float]) -> Path:
    """The site of pytest-benchmark's runs, one a day, each of benchmark -> seconds."""
    url, out = str(folder / "h.sqlite"), folder / "site"
    assert invoke(["history", "init", "--history", url]) == 0
    for day, run in enumerate(medians, 1):
        entries = [
            {"fullname": name, "params": None, "stats": {"median": seconds, "rounds": 5}}
            for name, seconds in run.items()
        ]
        whole = {"machine_info": {"node": "n"}, "commit_info": {"id": f"{day:040x}"}}
        whole |= {"datetime": f"2026-11-0{day}T10:00:00+00:00", "benchmarks": entries}
        file = folder / f"{day}.json"
        file.write_text(json.dumps(whole))
        assert invoke(["import", "pytest-benchmark", str(file), "--history", url]) == 0
    assert invoke(["site", "--out", str(out), "--history", url]) == 0
    return out


def test_compare_counts_what_differs_where_there_is_no_interval(
    opened: Watched, tmp_path: Path
) -> None:
    site = imported(tmp_path, {"a": 1.0, "b": 1.0, "c": 1.0}, {"a": 1.071, "b": 0.8641, "c": 1.0})
    page = opened.page
    go(page, site, "compare.html")
    expect(page.locator("#summary")).to_have_text("no interval: 2 of 3 cells differ.")
    expect(page.locator("#table tbody")).to_contain_text("+7.10 %")
    expect(page.locator("#commits")).to_be_hidden()


def test_a_name_in_brackets_is_shown_as_it_is(opened: Watched, tmp_path: Path) -> None:
    names_of = ("[bold]mark[/bold]", "[red]", "plain")
    site = imported(tmp_path, dict.fromkeys(names_of, 1.0))
    page = opened.page
    heads = set()
    for path in sorted((site / "cells").glob("*.html")):
        page.goto(path.as_uri())
        heads.add(page.locator("h1").inner_text())
    assert heads == {f"benchmark={name}" for name in names_of}


def test_the_theme_is_remembered(opened: Watched, year: Path) -> None:
    page = opened.page
    go(page, year, STEPPED)
    wait_for_chart(page)
    background = "getComputedStyle(document.documentElement).backgroundColor"
    light = page.evaluate(background)
    page.locator("#theme").click()
    dark = page.evaluate(background)
    assert dark != light
    go(page, year, "index.html")
    assert page.evaluate(background) == dark
    page.locator("#theme").click()
    assert page.evaluate(background) == light


@pytest.mark.parametrize("opened", SCREENS, indirect=True, ids=lambda one: f"{one[0]}-{one[1]}")
def test_no_page_is_wider_than_the_screen(opened: Watched, year: Path) -> None:
    page = opened.page
    for path in ("index.html", STEPPED, FAILING, run_of(year), "compare.html", "runs.html"):
        go(page, year, path)
        if path.startswith("cells"):
            wait_for_chart(page)
        assert page.evaluate(WIDE) <= 0, path


@pytest.mark.parametrize("opened", SCREENS[2:], indirect=True, ids=lambda one: f"{one[0]}-{one[1]}")
def test_no_committed_run_is_wider_than_the_screen(opened: Watched, committed: Path) -> None:
    """Their headlines name cells, in more than 60 characters without a space."""
    page = opened.page
    pages = sorted(f"runs/{path.name}" for path in (committed / "runs").glob("*.html"))
    wide, longest = {}, 0
    for path in ("index.html", "runs.html", "compare.html", *pages):
        go(page, committed, path)
        if (more := page.evaluate(WIDE)) > 0:
            wide[path] = more
        for headline in page.locator(".facts .big").all_inner_texts():
            longest = max(longest, *map(len, headline.split()))
    assert wide == {}
    assert longest > 60


@pytest.mark.parametrize("opened", [(390, "light")], indirect=True)
def test_a_tap_shows_the_run_and_a_second_one_opens_it(opened: Watched, year: Path) -> None:
    page = opened.page
    go(page, year, STEPPED)
    wait_for_chart(page)
    box = page.locator(SPEED).bounding_box()
    page.touchscreen.tap(box["x"] + 120, box["y"] + 60)
    expect(page.locator("#tip")).to_be_visible()
    assert "/cells/" in page.url
    page.touchscreen.tap(box["x"] + 120, box["y"] + 60)
    page.wait_for_url("**/runs/*.html")


def test_everything_can_be_reached_by_keyboard(opened: Watched, year: Path) -> None:
    page = opened.page
    go(page, year, "index.html#q=is%3Dred&since=0")
    seen = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("document.activeElement.id || document.activeElement.textContent"))
    assert {"To the content", "Runs", "Compare", "theme", "words", "red"} <= seen
    assert any(one.startswith("workload=forward, seq_len=512, path=triton") for one in seen)


def test_markup_in_a_run_does_not_run(opened: Watched, tmp_path: Path) -> None:
    """A dialog, a message on the console or an `img` would be a complaint of `opened`."""
    write_site(hostile_history(), tmp_path, SiteOptions(title="<script>alert(1)</script>"))
    page = opened.page
    for path in sorted(tmp_path.rglob("*.html")):
        page.goto(path.as_uri())
        if path.parent.name == "cells":
            wait_for_chart(page)
            page.locator(SPEED).press("End")
            page.get_by_text("All runs of this cell").click()
            expect(page.locator("#tip")).to_contain_text("<script>alert(1)</script>")
        if path.name == "index.html":
            page.locator("#since").get_by_text("all", exact=True).click()
            expect(page.locator("#changes")).to_contain_text("accepted: note <script>alert(1)")
            expect(page.locator("#changes")).to_contain_text("new <scrip")
        if path.parent.name == "runs":
            expect(page.locator("#table tbody tr")).to_have_count(3)
        assert page.locator("img, iframe, script:not([src]):not([type])").count() == 0
        assert (
            page.evaluate("[...document.links].filter((a) => a.protocol === 'javascript:').length")
            == 0
        )
    go(
        page,
        tmp_path,
        "compare.html#q=%3Cimg%20src%3Dx%20onerror%3Dalert(1)%3E&a=javascript:alert(1)",
    )
    page.reload()
    expect(page.locator("#summary")).to_contain_text("names a run that is not here")


@pytest.mark.parametrize("opened", SCREENS, indirect=True)
def test_the_committed_runs_are_a_page(opened: Watched, committed: Path) -> None:
    """The cell whose speed the README heads with, against its baseline and next to its dense
    twin.
    """
    page = opened.page
    go(page, committed, "index.html")
    assert page.evaluate(WIDE) <= 0
    page.fill("#words", "suite=nightly-kernels-h200 seq_len=131072 path=triton workload=attention")
    expect(page.locator("#shown")).to_contain_text("1 of ")
    page.locator(".cells tbody tr:not([hidden]) a").first.click()
    wait_for_chart(page)
    assert page.evaluate(WIDE) <= 0
    expect(page.locator("main")).to_contain_text("against the baseline of")
    expect(page.locator("main")).to_contain_text("perfbench run matrices/nightly-kernels-h200.yaml")
    expect(page.locator("main")).to_contain_text("dense_cudnn")


def test_a_history_of_no_runs_is_a_page(opened: Watched, tmp_path: Path) -> None:
    write_site(MadeHistory(), tmp_path, SiteOptions())
    for path in ("index.html", "runs.html", "compare.html"):
        go(opened.page, tmp_path, path)
    expect(opened.page.get_by_text("What to do")).to_be_visible()


KEYSTROKE = """() => {
  const words = document.getElementById("words");
  const begin = performance.now();
  words.value = "path=dense*";
  words.dispatchEvent(new Event("input"));
  document.body.getBoundingClientRect(); // laid out
  return performance.now() - begin;
}"""


def test_a_year_opens_like_a_month(opened: Watched, year: Path, tmp_path: Path) -> None:
    """300 cells over 365 runs next to the same cells over 30: the script's time until a chart
    stands, until the overview does, and of one keystroke of its filter, in one browser.
    """
    made = made_history(cells=300, runs=30)
    by_name = {run.info.run_id: run for run in made.every}
    made.run = by_name.__getitem__
    write_site(made, tmp_path, SiteOptions())
    page = opened.page
    cost: dict[tuple[str, str], float] = {}
    for name, site in (("month", tmp_path), ("year", year)):
        taken: dict[str, list[float]] = {"cell": [], "overview": [], "keystroke": []}
        for _ in range(3):
            go(page, site, STEPPED)
            wait_for_chart(page)
            taken["cell"].append(page.evaluate("performance.now()"))
            go(page, site, "index.html")
            expect(page.locator("#shown")).to_have_text("300 of 300 cells")
            taken["overview"].append(page.evaluate("performance.now()"))
            taken["keystroke"].append(page.evaluate(KEYSTROKE))
            expect(page.locator("#shown")).to_have_text("60 of 300 cells")
        cost |= {(name, what): min(found) for what, found in taken.items()}
    for what in ("cell", "overview", "keystroke"):
        assert cost["year", what] < 3 * cost["month", what], cost
