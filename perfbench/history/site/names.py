"""Names of the site's files: safe on every file system and in every URL, and stable."""

from __future__ import annotations

import hashlib
import re
import unicodedata

MAX_SLUG = 60  # characters of the readable half; eCryptfs allows 143 bytes a name


def page_name(*parts: str) -> str:
    """A readable half in [a-z0-9-] and 12 hex digits of the SHA-256 of ``parts``.

    It depends on nothing else, so that a link to a page outlives other cells and runs.
    """
    whole = "\0".join(parts).encode("utf-8", "surrogatepass")
    text = unicodedata.normalize("NFKD", parts[-1]).encode("ascii", "ignore").decode()
    slug = re.sub(r"[^a-z0-9]+", "-", text.lower())[:MAX_SLUG].strip("-")
    digest = hashlib.sha256(whole).hexdigest()[:12]
    return f"{slug}-{digest}" if slug else digest


def cell_page(suite: str, card: str, cell_id: str) -> str:
    return page_name("cell", suite, card, cell_id)


def run_page(run_id: str) -> str:
    return page_name("run", run_id)
