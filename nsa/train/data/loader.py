"""Batches of a rank, and the state from which they go on exactly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from nsa.train.data.fetching import FetchedBatch, FetchProcess, batches_in_turn, next_in_turn
from nsa.train.data.packing import IGNORED_LABEL, BatchShape, StreamRecipe
from nsa.train.errors import TrainError, TrainExit
from nsa.train.records import Batch

STATE_FORMAT = 1


@dataclass(frozen=True, slots=True)
class LoaderPlan:
    """``workers`` 0: batches are made in the trainer. ``identity``: what a state must be of:
    "corpus" and "tokenizer" as sha256, "num_shards", "packing", "seed".
    """

    split: str
    rank: int
    world_size: int
    workers: int
    prefetch: int
    pin: bool
    identity: Mapping[str, str | int]
    entropy_floor_nats: float | None
    description: Mapping[str, Any] = field(default_factory=dict)


class Loader:
    """Iterates over the train split without end; `batches` are those of the held-out split.

    A batch comes from one shard, and the rank's shards take turns, so that the order is the same
    for every number of workers. The state has a cursor a shard; other ranks' are merged in by
    `merge`, and any world size that divides the number of shards goes on from there.
    """

    def __init__(self, recipe: StreamRecipe, shape: BatchShape, plan: LoaderPlan) -> None:
        self._recipe, self._shape, self._plan = recipe, shape, plan
        mine = range(plan.rank, recipe.num_shards, plan.world_size)
        self._cursors: dict[int, dict[str, int]] = {
            shard: recipe.stream(shard, {}).cursor for shard in mine
        }
        self._processes: list[FetchProcess[tuple[FetchedBatch, Batch]]] = []
        self._made_here: Iterator[FetchedBatch] | None = None
        self._held_out: list[Batch] = []

    @property
    def entropy_floor_nats(self) -> float | None:
        """Nats a token below which no model can be; None where it is not known."""
        return self._plan.entropy_floor_nats

    def describe(self) -> dict[str, Any]:
        """For the log: kind, split, documents and bytes of the corpus (None: not counted), binary
        files that were left out, shards, and sha256 of its listing.
        """
        return dict(self._plan.description)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        if self._plan.split != "train":
            raise TypeError("a loader of the held-out split has batches(n), and no endless order")
        fetched, batch = self._take()
        self._cursors[fetched.shard] = fetched.cursor
        return batch

    def batches(self, count: int) -> list[Batch]:
        """The first ``count`` batches of the held-out split, the same at each call; fewer where it
        is smaller. On several ranks always ``count``, for a forward may be collective: ranks whose
        share is smaller get batches without labels.
        """
        if self._plan.split != "held_out":
            raise TypeError("batches(n) is of the held-out split; iterate over the train split")
        if self._made_here is None:
            self._made_here = batches_in_turn(self._recipe, self._cursors)
        while len(self._held_out) < count and (one := next(self._made_here, None)) is not None:
            self._held_out.append(self._batch(one))
        found = self._held_out[:count]
        if self._plan.world_size > 1:
            return found + [self._empty_batch()] * (count - len(found))
        if not found:
            raise TrainError(
                TrainExit.DATA,
                "the held-out split is empty; make data.held_out_pct larger, give data.eval_paths,"
                " or set train.eval_every=0",
            )
        return found

    def state_dict(self) -> dict[str, Any]:
        """JSON data: where the rank's shards stand behind the last batch that was taken."""
        shards = {str(shard): dict(cursor) for shard, cursor in self._cursors.items()}
        return {"format": STATE_FORMAT, **self._plan.identity, "shards": shards}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of this rank, or a merged one; TrainError DATA where it is of another
        corpus, tokenizer, or cut, CHECKPOINT where it lacks shards of this rank.
        """
        wanted = {"format": STATE_FORMAT, **self._plan.identity}
        for name, value in wanted.items():
            if state.get(name) != value:
                raise TrainError(
                    TrainExit.DATA,
                    f"the checkpoint is of another {name}: {_short(state.get(name))}, and the run"
                    f" has {_short(value)}; {REMEDIES[name]}",
                )
        missing = [shard for shard in self._cursors if str(shard) not in state["shards"]]
        if missing:
            raise TrainError(
                TrainExit.CHECKPOINT,
                f"the checkpoint lacks shards {missing} of rank {self._plan.rank}; merge the loader"
                " states of every rank that wrote it",
            )
        self.close()
        self._cursors = {shard: dict(state["shards"][str(shard)]) for shard in self._cursors}

    @staticmethod
    def merge(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """One state of those of all ranks of one moment; any world size loads it."""
        if not states:
            raise TrainError(TrainExit.CHECKPOINT, "no loader state to merge; wanted one a rank")
        merged = {name: value for name, value in states[0].items() if name != "shards"}
        shards: dict[str, Any] = {}
        for state in states:
            if {name: value for name, value in state.items() if name != "shards"} != merged:
                raise TrainError(
                    TrainExit.CHECKPOINT, "the ranks' loader states are of different corpora"
                )
            twice = sorted(set(shards) & set(state["shards"]))
            if twice:
                raise TrainError(
                    TrainExit.CHECKPOINT,
                    f"shards {twice} are in the loader states of two ranks; give each rank's once",
                )
            shards |= state["shards"]
        return {**merged, "shards": shards}

    def close(self) -> None:
        """End the workers; iterating again starts new ones behind the last batch taken."""
        for process in self._processes:
            process.close()
        self._processes, self._made_here, self._held_out = [], None, []

    def _take(self) -> tuple[FetchedBatch, Batch]:
        workers = min(self._plan.workers, len(self._cursors))
        if not workers:
            if self._made_here is None:
                self._made_here = batches_in_turn(self._recipe, self._cursors)
            fetched = next(self._made_here)
            return fetched, self._batch(fetched)
        if not self._processes:
            self._start(workers)
        shard = next_in_turn(self._cursors)
        its_worker = self._processes[list(self._cursors).index(shard) % workers]
        while True:
            for process in self._processes:  # any of them: the other may wait for ever
                process.raise_failure()
            if (taken := its_worker.poll()) is not None:
                return taken

    def _start(self, workers: int) -> None:
        shards = list(self._cursors)
        for worker in range(workers):
            own = {shard: self._cursors[shard] for shard in shards[worker::workers]}
            process = FetchProcess(
                self._recipe, own, prefetch=self._plan.prefetch, ready=self._with_batch
            )
            self._processes.append(process)

    def _with_batch(self, fetched: FetchedBatch) -> tuple[FetchedBatch, Batch]:
        return fetched, self._batch(fetched)

    def _batch(self, fetched: FetchedBatch) -> Batch:
        packed, pin = fetched.packed, self._plan.pin
        rows = self._shape.rows if packed.cu_seqlens is None else 1
        ids = torch.from_numpy(packed.ids).long().view(rows, -1)
        labels = torch.from_numpy(packed.labels).long().view(rows, -1)
        return Batch(
            ids=ids.pin_memory() if pin else ids,
            labels=labels.pin_memory() if pin else labels,
            cu_seqlens=None if packed.cu_seqlens is None else torch.from_numpy(packed.cu_seqlens),
            num_labels=packed.num_labels,
            num_bytes=packed.num_bytes,
            fetch_s=fetched.fetch_s,
        )

    def _empty_batch(self) -> Batch:
        packed = self._shape.packing == "documents"
        shape = (1, self._shape.tokens) if packed else (self._shape.rows, self._shape.length)
        cu_seqlens = torch.tensor([0, self._shape.tokens], dtype=torch.int32)
        return Batch(
            ids=torch.zeros(shape, dtype=torch.int64),
            labels=torch.full(shape, IGNORED_LABEL, dtype=torch.int64),
            cu_seqlens=cu_seqlens if packed else None,
            num_labels=0,
            num_bytes=0,
            fetch_s=0.0,
        )


REMEDIES: Mapping[str, str] = {
    "format": "resume with the version of nsa that wrote it",
    "corpus": "give the files that it was trained on, unchanged, or start a new run",
    "tokenizer": "keep OUT/tokenizer.json of that run, or start a new run",
    "num_shards": "set data.shards to that number",
    "packing": "set data.packing to that",
    "seed": "set data.seed to that",
}


def _short(value: object) -> str:
    text = str(value)
    return text[:12] if len(text) == 64 else text
