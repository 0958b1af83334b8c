"""Whose collectives a flight recorder's dump holds; the dump of a real hang is in `test_ranks`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nsa.train import flight
from nsa.train.parallel import TrainWorld


@pytest.mark.parametrize(
    ("backend", "dumps", "wanted"),
    [
        ("nccl", ("_dump_fr_trace_json", "_dump_nccl_trace_json"), b"_dump_nccl_trace_json"),
        ("gloo", ("_dump_fr_trace_json", "_dump_nccl_trace_json"), b"_dump_fr_trace_json"),
        ("nccl", ("_dump_fr_trace_json",), b"_dump_fr_trace_json"),
        ("gloo", ("_dump_nccl_trace_json",), b"_dump_nccl_trace_json"),
        ("nccl", (), b'{"entries": [], "missing": "this torch has no flight recorder"}'),
    ],
)
def test_a_halt_keeps_the_trace_of_the_backend(
    backend: str,
    dumps: tuple[str, ...],
    wanted: bytes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A torch with NCCL has two recorders; NCCL's collectives are in one, gloo's in the other."""
    made: dict[str, Any] = {name: lambda name=name: name.encode() for name in dumps}
    monkeypatch.setattr(flight, "_distributed_c10d", SimpleNamespace(**made))
    monkeypatch.setattr(flight.dist, "get_backend", lambda: backend)
    monkeypatch.setattr(flight, "read_halt", lambda out: object())
    monkeypatch.setattr(flight, "POLL_S", 0.0)
    (tmp_path / "stacks").mkdir()
    path = flight.trace_path(tmp_path, 1)
    with flight.recorded(tmp_path, TrainWorld(1, 2, torch.device("cpu"), "ddp")):
        for _ in range(1000):
            if path.exists() and path.read_bytes():
                break
            flight.threading.Event().wait(0.01)
    assert path.read_bytes() == wanted
    other = flight.gloo_path(tmp_path, 1)
    if backend == "nccl" and len(dumps) == 2:  # checkpoints agree by gloo
        assert other.read_bytes() == b"_dump_fr_trace_json"
    else:
        assert not other.exists()
