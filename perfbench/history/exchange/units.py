"""Metrics of other tools: a name that ends with its unit, so that another unit is another series
and never a step of a thousand.
"""

from __future__ import annotations

import hashlib
import re

from perfbench.history.nouns import METRICS, Better, Metric
from perfbench.text import visible

_MICRO = str.maketrans({"µ": "u", "μ": "u"})
_PLAIN = re.compile(r"[a-z]+([/_][a-z]+)*|%|")


def metric_of(stem: str, unit: str, better: Better, title: str = "") -> Metric:
    """The metric of a tool's number: ``stem`` with ``unit``, e.g. 'median' in 's' is median_s.

    A unit that a name cannot spell ends with a digest of it, so that two units are two metrics.
    """
    unit = visible(unit.translate(_MICRO))
    spelled = unit.replace("/", "_per_").replace("%", "pct")
    if not _PLAIN.fullmatch(unit) or "_per_" in unit:
        spelled = f"{slug(spelled)[:40]}_{digest(unit)[:6]}"
    name = "_".join(part for part in (stem, spelled) if part)
    return METRICS.get(name) or Metric(name, visible(title) or stem.replace("_", " "), unit, better)


def slug(text: str) -> str:
    """Lower-case letters, digits and single underscores."""
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")


def digest(*parts: str) -> str:
    """sha256 of several texts, in hexadecimal; no two lists of texts are joined to the same."""
    joined = "".join(f"{len(part)}:{part}" for part in parts)
    return hashlib.sha256(joined.encode("utf-8", "backslashreplace")).hexdigest()


def digest_of_bytes(data: bytes) -> str:
    """sha256 in hexadecimal."""
    return hashlib.sha256(data).hexdigest()
