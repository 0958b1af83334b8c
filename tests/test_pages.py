"""What pages link to is in git, and what git keeps in reports/ is what pages show."""

from __future__ import annotations

import gzip
import re
import subprocess
from pathlib import Path
from urllib.parse import unquote

import pytest

from perfbench.commands import app

ROOT = Path(__file__).parents[1]
TRACKED = frozenset(
    subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split("\0")
) - {""}
FOLDERS = frozenset(str(parent) for name in TRACKED for parent in Path(name).parents)
PAGES = sorted(
    name
    for name in TRACKED
    if name.endswith(".md")
    and (name in ("README.md", "CHANGELOG.md") or name.startswith(("docs/", "reports/", "tests/")))
)
REPORTS = sorted(name for name in TRACKED if name.startswith("reports/"))
EVIDENCE = "reports/evidence"
# a script of a sweep, or what one printed
SWEEP = re.compile(
    r"-script\.txt\.gz$|/tiles-\d\.json\.gz$|/decode-kernels\.txt\.gz$|/copying-h200/\w+\.json\.gz$"
)
MAX_BYTES = 5_000_000  # of reports/, a clone carries them all
_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)")
_LINK = re.compile(
    r"\]\(\s*<?([^)\s>]+)[^)]*\)|^\[[^\]]+\]:\s*(\S+)|(?:src|href)=\"([^\"]+)\"", re.M
)


def links(text: str) -> list[str]:
    """The targets of a page's links and images that are no address of the web, without what is
    code.
    """
    prose = _CODE.sub("", _FENCE.sub("", text))
    targets = ["".join(found) for found in _LINK.findall(prose)]
    return [one for one in targets if not re.match(r"[a-z][a-z0-9+.-]*:|//|#", one)]


def resolved(page: str, target: str) -> str:
    """Where a link leads, from the root."""
    to = (ROOT / page).parent / unquote(target.partition("#")[0])
    return to.resolve().relative_to(ROOT.resolve()).as_posix()


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def shown() -> set[str]:
    """Everything that some page links to or shows."""
    return {resolved(page, target) for page in PAGES for target in links(text_of(page))}


def test_links_are_found_in_prose_alone() -> None:
    text = '[a](x.md#p) ![b](<y%20z.png> "t") `[c](no.md)` [d](https://e.org) [e](#f)\n'
    text += '```\n[g](no.md)\n```\n[h]: r.md\n<img src="i.svg">\n'
    assert links(text) == ["x.md#p", "y%20z.png", "r.md", "i.svg"]
    assert resolved("reports/a.md", "../docs/y%20z.png#p") == "docs/y z.png"


@pytest.mark.parametrize("page", PAGES)
def test_every_link_of_a_page_leads_to_a_file_in_git(page: str) -> None:
    lost = [
        target
        for target in links(text_of(page))
        if (to := resolved(page, target)) not in TRACKED and to not in FOLDERS
    ]
    assert not lost, f"{page} links to what git does not have: {', '.join(lost)}"


def test_every_folder_of_evidence_that_is_named_anywhere_is_there() -> None:
    """In commands and comments, too; a name ends before what no path has."""
    named = re.compile(rf"{EVIDENCE}/([\w./%=-]*[\w])")
    texts = [name for name in TRACKED if name.endswith((".md", ".py", ".yaml", ".toml", ".yml"))]
    lost = {
        f"{name}: {found}"
        for name in texts
        if name != f"tests/{Path(__file__).name}"
        for found in named.findall(text_of(name))
        if (to := f"{EVIDENCE}/{found}") not in TRACKED and to not in FOLDERS
    }
    assert not lost


def test_reports_weigh_little() -> None:
    sizes = {name: (ROOT / name).stat().st_size for name in REPORTS}
    largest = sorted(sizes.items(), key=lambda one: -one[1])[:5]
    assert sum(sizes.values()) <= MAX_BYTES, f"{sum(sizes.values())} bytes; {largest}"


def test_reports_hold_what_was_measured_and_what_pages_show() -> None:
    derived = {"verdict.json", "junit.xml", "run.jsonl"}
    assert not [name for name in REPORTS if Path(name).name in derived or "/traces/" in name]
    pictures = {name for name in REPORTS if name.endswith((".png", ".svg"))}
    assert pictures and not pictures - shown(), "a picture that no page shows"


def test_the_index_of_evidence_links_every_run() -> None:
    """A run or a pair has its report.md (tune.md), and the index leads to it, or to the data where
    that alone is kept; what `check` confirmed belongs to its run.
    """
    page = f"{EVIDENCE}/README.md"
    linked = {resolved(page, target) for target in links(text_of(page))}
    runs = {Path(name).parent for name in REPORTS if name.endswith("/run.jsonl.gz")}
    pairs = {run.parent for run in runs if f"{run.parent}/report.md" in TRACKED}
    homes = {
        run.parent if run.parent in pairs else run for run in runs if "confirm" not in run.parts
    }
    lost = {
        home.as_posix()
        for home in homes
        if not linked
        & {f"{home.as_posix()}/{page}" for page in ("report.md", "tune.md", "run.jsonl.gz")}
    }
    assert len(homes) >= 20 and not lost


@pytest.mark.parametrize("folder", ["h200-drop", "cpu-gate/same", "cpu-gate/start-1"])
def test_a_committed_report_is_what_its_run_renders_today(folder: str, tmp_path: Path) -> None:
    """A pair with a planted fault, a pair without, a single run; every byte of report.md."""
    app.invoke(["report", str(ROOT / EVIDENCE / folder), "--out", str(tmp_path)])
    committed = (ROOT / EVIDENCE / folder / "report.md").read_bytes()
    again = f"perfbench report {EVIDENCE}/{folder}"
    assert (tmp_path / "report.md").read_bytes() == committed, f"render it again: {again}"


def test_compressed_runs_carry_no_time_and_no_name() -> None:
    """As `gzip -9 -n` writes them: compressing again gives the same bytes."""
    for name in REPORTS:
        if name.endswith(".gz"):
            data = (ROOT / name).read_bytes()
            assert data[:4] == b"\x1f\x8b\x08\x00" and data[4:8] == bytes(4), name
            # a run of perfbench, what a study collected, else a log of nsa.train
            begins = {"run.jsonl.gz": '{"kind": "manifest"', "runs.json.gz": '{"about": '}
            wanted = begins.get(name.rpartition("/")[2], '{"kind": "start"')
            if not SWEEP.search(name):
                assert gzip.decompress(data).startswith(wanted.encode()), name
