"""Streams that fail on purpose, in a module that a worker process can import."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from nsa.train.data.corpora import data_error
from nsa.train.data.packing import PackedBatch


@dataclass(frozen=True)
class Scripted:
    """A recipe whose shards give ``good`` batches of ones, and then do what ``then`` names."""

    good: int
    then: str
    num_shards: int = 2

    def stream(self, shard: int, cursor: Mapping[str, int]) -> ScriptedStream:
        return ScriptedStream(self, cursor.get("batches", 0))


@dataclass
class ScriptedStream:
    recipe: Scripted
    batches: int

    @property
    def cursor(self) -> dict[str, int]:
        return {"batches": self.batches}

    def next_batch(self) -> PackedBatch:
        if self.batches >= self.recipe.good:
            self._fail()
        self.batches += 1
        loaded = int("torch" in sys.modules)
        ids = np.full(4, loaded, np.int32)
        return PackedBatch(ids, ids, None, 4, 4)

    def _fail(self) -> None:
        if self.recipe.then == "refuse":
            raise data_error("x.txt is not UTF-8")
        if self.recipe.then == "break":
            raise ZeroDivisionError("a defect")
        while self.recipe.then == "hang":
            time.sleep(0.1)
