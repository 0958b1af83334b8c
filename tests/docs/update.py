"""`python -m tests.docs.update` writes into every console block what its commands print today."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.docs.blocks import PAGES, blocks_of
from tests.docs.test_commands import replayed


def main() -> int:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for block in blocks_of(page):
            if block.language == "console" and "needs" not in block.marks:
                with tempfile.TemporaryDirectory() as folder:
                    answers = replayed(block, Path(folder))
                shown = "\n".join(f"$ {command}\n{output}" for command, output in answers)
                text = text.replace(block.text, shown)
        if text != page.read_text(encoding="utf-8"):
            page.write_text(text, encoding="utf-8")
            print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
