"""Chromium, headless, and the sites that it opens from files."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from perfbench.commands.app import invoke
from perfbench.history.site import SiteOptions, write_site
from tests.perfbench.history.made_history import made_history

ROOT = Path(__file__).parents[2]
CHROMIUMS = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = (
    "--no-sandbox",  # which root may not have
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One of two processes makes the site of a year, the other one that of the committed runs."""
    for item in items:
        if isinstance(item, pytest.Function) and item.path.parent == Path(__file__).parent:
            group = "committed" if "committed" in item.fixturenames else "year"
            item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    found = next(filter(None, map(shutil.which, CHROMIUMS)), None)
    if found is None:
        pytest.fail(
            f"--require browser was given, and there is none of {', '.join(CHROMIUMS)}; install"
            " Debian's package chromium"
        )
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=found, args=list(ARGUMENTS))
        yield made
        made.close()


@pytest.fixture(scope="session")
def year(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 cells over 365 runs."""
    made = made_history(cells=300, runs=365)
    by_name = {run.info.run_id: run for run in made.every}
    made.run = by_name.__getitem__
    out = tmp_path_factory.mktemp("year") / "site"
    write_site(made, out, SiteOptions(title="A year"))
    return out


@pytest.fixture(scope="session")
def committed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every run of reports/evidence."""
    home = tmp_path_factory.mktemp("committed")
    url, out = str(home / "history.sqlite"), home / "site"
    for words in (
        ["history", "init"],
        ["history", "add", "--all", str(ROOT / "reports/evidence")],
        ["detect", "--report-only"],
        ["site", "--out", str(out), "--baselines", str(ROOT / "reports/baselines")],
    ):
        assert invoke([*words, "--history", url]) == 0, words
    return out


class Watched:
    """A page of a browser, with what it complained of and where it went."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.complaints: list[str] = []
        self.foreign: list[str] = []
        page.on("console", self._heard)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("dialog", self._dialog)
        page.on("request", self._asked)
        page.set_default_timeout(30_000)

    def _heard(self, message) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def _dialog(self, dialog) -> None:
        self.complaints.append(f"a dialog: {dialog.message}")
        dialog.dismiss()

    def _asked(self, request) -> None:
        if not request.url.startswith(("file:", "data:")):
            self.foreign.append(request.url)


@pytest.fixture
def opened(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Watched]:
    """A page, 1440 by 1000 and light unless the test is parametrized with ``screen``; in the end it
    has complained of nothing and asked nobody else.
    """
    width, scheme = getattr(request, "param", (1440, "light"))
    size = {"width": width, "height": 1000 if width > 800 else 844}
    context = browser.new_context(viewport=size, color_scheme=scheme, has_touch=width < 800)
    watched = Watched(context.new_page())
    yield watched
    context.close()
    assert watched.complaints == []
    assert watched.foreign == []
