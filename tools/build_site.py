"""Build the documentation's site: `python tools/build_site.py`.

The pages are README.md, docs/ and every committed file that they link to, reports included, laid
out as in the checkout: a link that works on GitHub works on the site, and a dead one is a warning,
which `--strict` makes an error.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ROOT / ".site" / "pages"
LINK = re.compile(r"\]\(([^)\s#]+)[^)]*\)")
CODE = re.compile(r"^```.*?^```|`[^`\n]+`", flags=re.DOTALL | re.MULTILINE)


def linked(page: Path, root: Path) -> Iterator[Path]:
    """Files below ``root`` that a Markdown page links to or shows."""
    for target in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        file = (page.parent / target).resolve()
        if "://" not in target and file.is_file() and file.is_relative_to(root):
            yield file


def lay_out(root: Path, pages: Path) -> list[Path]:
    """Copy README.md, docs/ and what they link to, and so on, from ``root`` to ``pages``."""
    shutil.rmtree(pages, ignore_errors=True)
    waiting = [root / "README.md", *sorted((root / "docs").glob("**/*"))]
    done: list[Path] = []
    while waiting:
        file = waiting.pop()
        if file in done or not file.is_file():
            continue
        done.append(file)
        copy = pages / file.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
        if file.suffix == ".md":
            waiting += linked(file, root)
    return done


def main() -> int:
    """Return mkdocs' exit code; the site is in .site/html."""
    lay_out(ROOT, PAGES)
    # Material announces its end of life (May 2027, then Zensical reads this mkdocs.yml) each time.
    quiet = ["env", "NO_MKDOCS_2_WARNING=1"]
    # --quiet would hide warnings from --strict
    command = [*quiet, sys.executable, "-m", "mkdocs", "build", "--strict"]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
