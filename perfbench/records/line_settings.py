"""What the records of a run file's lines have in common: unknown fields survive a round trip, NaN
and infinity are refused.
"""

from __future__ import annotations

from pydantic import ConfigDict

LINE_SETTINGS = ConfigDict(
    extra="allow",
    allow_inf_nan=False,
    frozen=True,
    defer_build=True,  # each command builds the validators that it uses, at their first use
    populate_by_name=True,
    serialize_by_alias=True,
)
