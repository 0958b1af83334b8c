"""`python -m tests.docs.update` writes into every console block, and into every `printed:` mark,
what its commands print today.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.docs.blocks import PAGES, ROOT, blocks_of
from tests.docs.printed import renewed
from tests.docs.test_commands import replayed


def _printed(arguments: list[str]) -> str:
    """Outside of a workflow, whose page a comment would link."""
    words = [sys.executable, "-m", "perfbench", *arguments]
    command = ["env", "-u", "GITHUB_RUN_ID", *words]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def main() -> int:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for block in blocks_of(page):
            if block.language == "console" and "needs" not in block.marks:
                with tempfile.TemporaryDirectory() as folder:
                    answers = replayed(block, Path(folder))
                shown = "\n".join(f"$ {command}\n{output}" for command, output in answers)
                text = text.replace(block.text, shown)
        text = renewed(text, _printed)
        if text != page.read_text(encoding="utf-8"):
            page.write_text(text, encoding="utf-8")
            print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
