"""A valid matrix, and ways to spoil it."""

import pytest

from perfbench.errors import Exit, PerfbenchError
from perfbench.matrix import matrix as matrices

VALID = """\
version: 1
name: demo
target: {gpu: none}
model: tiny
axes:
  workload: [train, forward]
  seq_len: [128, 256, 512]
  path: [v1, v2, dense]
  fa2: [on, off]
exclude:
  - {path: v1, seq_len: ">256", reason: "too slow"}
include:
  - {path: reference, seq_len: 64, fa2: off}
expect:
  - {match: {path: v2}, engaged: [sel.v2], forbidden: [sel.v1]}
  - {match: {path: v2, fa2: on}, engaged: [sel.fa2, win.fa2]}
measure: {processes: 3, warmup_s: 1}
gate: {tolerance_pct: 5}
"""


def parse(text: str = VALID) -> matrices.Matrix:
    return matrices.parse_matrix(text, "m.yaml")


def edited(old: str, new: str) -> str:
    assert old in VALID
    return VALID.replace(old, new, 1)


def error_of(text: str) -> str:
    with pytest.raises(PerfbenchError) as caught:
        parse(text)
    assert caught.value.exit_code is Exit.USAGE
    return str(caught.value)
