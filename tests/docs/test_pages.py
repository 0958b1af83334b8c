"""README.md and docs/ say what is so: sizes, links, quotations, and lists that the code has too."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from nsa.config import MODEL_ALIASES, NSA_ALIASES, NSA_VALUE_ALIASES
from nsa.train.config import FOUNDING_NAMES, RunConfig
from perfbench.errors import Exit
from perfbench.records import EXIT_OF, Verdict
from tests.docs.blocks import PAGES, ROOT, SHELL, Block, blocks_of, spans_of
from tests.docs.test_commands import apps, run, sandbox
from tools import build_site

README = ROOT / "README.md"
DOCS = ROOT / "docs"
LINK = re.compile(r"\]\(([^)\s]+)\)")
QUOTED = [block for page in PAGES for block in blocks_of(page) if "from" in block.marks]


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def test_readme_is_short_and_leads_with_the_picture() -> None:
    lines = text_of(README).splitlines()
    assert len(lines) <= 140
    assert any("](docs/lengths.png)" in line for line in lines[:10])


def test_ci_runs_the_second_command() -> None:
    """.ci/run is README's test command, in folders of its own."""
    commands = [command for block in blocks_of(README) for command in block.commands]
    installing = [one for one in commands if one.startswith("python3 -m venv")]
    assert "torch==" in installing[0], "torch for a CPU stands before what would install CUDA's"
    first, second = installing[1:]
    assert first.endswith("perfbench run matrices/cpu.yaml")
    script = text_of(ROOT / ".ci" / "run").replace('"$work/venv/bin/', ".venv/bin/")
    script = script.replace('"$work/venv"', ".venv").replace('"', "")
    for part in second.split(" && "):
        assert part in script


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"```.*?```", "", text_of(page), flags=re.DOTALL)
    for target in LINK.findall(prose):
        file, _, anchor = target.partition("#")
        if not target.startswith(("https://", "#")):
            assert (page.parent / file).exists(), target
        if anchor and not target.startswith("https://"):
            linked = page.parent / file if file else page
            heads = re.findall(r"^#+ (.*)$", text_of(linked), flags=re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}
            assert anchor in slugs, target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_rooms_and_files_that_a_page_names_exist(page: Path) -> None:
    """`perfbench/gate`, `nsa/oracle.py`, `matrices/cpu.yaml`; a room may be one module still."""
    named = [
        span
        for _, span in spans_of(page)
        if re.fullmatch(
            r"(nsa|perfbench|tools|matrices|examples|tests|reports|\.github)/[\w./-]+", span
        )
        and not re.search(r"NAME|RUN|/runs/", span)
    ]
    for span in named:
        file = ROOT / span
        assert file.exists() or file.with_suffix(".py").exists(), span


def test_every_page_is_linked_from_the_readme() -> None:
    linked = set(LINK.findall(text_of(README)))
    assert {f"docs/{page.name}" for page in DOCS.glob("*.md")} <= linked


def test_something_is_quoted() -> None:
    assert QUOTED


@pytest.mark.parametrize("block", QUOTED, ids=lambda block: block.id)
def test_quotations_stand_in_their_source(block: Block) -> None:
    source = text_of(ROOT / block.marks["from"]).splitlines()
    for line in block.text.splitlines():
        assert line in source, line


def test_every_command_is_described() -> None:
    page = text_of(DOCS / "commands.md")
    perfbench = apps()["perfbench"].commands
    for name, command in perfbench.items():
        for sub in getattr(command, "commands", {"": None}):
            assert f"`perfbench {name} {sub}".rstrip() in page


def test_every_verdict_and_exit_code_is_described() -> None:
    page = text_of(DOCS / "verdicts.md")
    codes, _, meanings = page.partition("## What each verdict means")
    table = {
        verdict: int(row.split("|")[1].split(",")[0])
        for row in codes.splitlines()
        if re.match(r"\| \d", row)
        for verdict in row.split("|")[2].replace(" ", "").split(",")
        if verdict
    }
    assert table == {str(verdict): int(EXIT_OF[verdict]) for verdict in Verdict}
    for code in Exit:
        assert re.search(rf"^\| {int(code)}\b", codes, flags=re.MULTILINE), code
    for verdict in Verdict:
        assert re.search(rf"\b{verdict}\b", meanings), verdict


def test_matrix_of_the_page_is_valid(tmp_path: Path) -> None:
    """And its cell name is one of that matrix."""
    block, *_ = (b for b in blocks_of(DOCS / "matrix.md") if b.language == "yaml")
    (sandbox(tmp_path) / "page.yaml").write_text(block.text, encoding="utf-8")
    done = run("perfbench plan page.yaml", tmp_path)
    assert done.returncode == 0, done.stderr
    name = "fa2=on,path=v2,seq_len=2048,workload=train"
    assert f"`{name}`" in text_of(DOCS / "matrix.md")
    assert name in done.stdout and "warning" not in done.stdout + done.stderr


def test_every_matrix_is_described() -> None:
    page = text_of(DOCS / "matrix.md") + text_of(DOCS / "evidence.md")
    for matrix in ROOT.glob("matrices/*.yaml"):
        assert f"`{matrix.stem}`" in page or f"matrices/{matrix.name}" in page, matrix.name


def test_every_page_is_in_the_site() -> None:
    """Once, in the order of mkdocs.yml."""
    text = re.sub(r"!!python/name:\S+", "", text_of(ROOT / "mkdocs.yml"))
    pages = re.findall(r"[\w/-]+\.md", str(YAML(typ="safe").load(text)["nav"]))
    assert sorted(pages) == sorted(page.relative_to(ROOT).as_posix() for page in PAGES)


def test_site_holds_what_pages_link_to(tmp_path: Path) -> None:
    """Also what linked pages link to, and nothing else."""
    root, pages = tmp_path / "root", tmp_path / "pages"
    for name, text in {
        "README.md": "[a](docs/a.md) [x](https://x.y/z.md) `[no](reports/no.md)`",
        "docs/a.md": "![p](p.png) [r](../reports/r.md#head)\n```text\n[no](no.md)\n```\n",
        "docs/p.png": "",
        "reports/r.md": "[deep](deep/run.jsonl) [dead](gone.md)",
        "reports/deep/run.jsonl": "",
        "reports/no.md": "",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    (pages / "old").mkdir(parents=True)
    build_site.lay_out(root, pages)
    assert {file.relative_to(pages).as_posix() for file in pages.glob("**/*.*")} == {
        "README.md",
        "docs/a.md",
        "docs/p.png",
        "reports/r.md",
        "reports/deep/run.jsonl",
    }


def test_the_training_page_lists_every_founding_name() -> None:
    """Its table has old names left and today's right, in the same order."""
    text = text_of(DOCS / "train.md")
    table = text[text.index("| the first implementation's | here |") :].partition("\n\n")[0]
    listed: dict[str, str] = {}
    for row in table.splitlines()[2:]:
        old, new = (re.findall(r"`([^`]+)`", cell) for cell in row.strip("|").split("|"))
        listed |= dict(zip(old, new, strict=True))
    assert listed == {
        **FOUNDING_NAMES,
        **{f"model.{old}": f"model.{new}" for old, new in MODEL_ALIASES.items()},
        **{f"model.nsa.{old}": f"model.nsa.{new}" for old, new in NSA_ALIASES.items()},
        **{f"{key}: {old}": f"{key}: {new}" for (key, old), new in NSA_VALUE_ALIASES.items()},
    }


def test_the_training_page_says_what_the_hash_leaves_out() -> None:
    """Every key that RunConfig.identity drops, by name, section or `section.prefix_*`."""
    (row,) = [
        one for one in text_of(DOCS / "train.md").splitlines() if one.startswith("| `config.json`")
    ]
    named = re.findall(r"`([^`]+)`", row.partition(": not ")[2].partition(";")[0])
    whole, kept = RunConfig().to_mapping(), RunConfig().identity()
    for section, values in whole.items():
        keys = values if isinstance(values, dict) else {"": values}
        dropped = [key for key in keys if section not in kept or key not in kept[section]]
        if section not in kept or section == "parallel":
            assert section in named
            continue
        for key in dropped:
            if (section, key) in {("data", "pairs"), ("train", "init_from")}:
                continue  # as long as nobody sets them
            names = {f"{section}.{key}", f"{section}.{key.partition('_')[0]}_*"}
            assert names & {*named}, f"{section}.{key}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lists_stand_in_quotes(page: Path) -> None:
    """zsh takes a bare `[a]` for a pattern that matches no file."""
    commands = [
        command
        for block in blocks_of(page)
        if block.language in SHELL
        for command in block.commands
    ]
    commands += [span for _, span in spans_of(page) if span.startswith("--set")]
    bare = [one for one in commands if re.search(r"(?<![\"'\w.])[\w.]+=\[", one)]
    assert not [one for one in bare if "--set" in one]
