"""What a corpus is: units of documents, their split into train and held out, and their shards."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from nsa.train.errors import TrainError, TrainExit

Split = Literal["train", "held_out"]

MAX_SHARDS = 64
MIN_SHARD_BYTES = 16_384
# Up to so many documents every name is hashed, so that a small corpus holds out at least one.
FEW_DOCUMENTS = 10_000


@dataclass(frozen=True, slots=True)
class TextDocument:
    """``name`` is unique in its corpus and decides the split; ``source`` is for messages."""

    name: str
    text: bytes
    source: str


class Corpus(Protocol):
    """Documents in units: a piece of a file, a row group. A unit is read by one rank alone.

    Units are numbered from 0. Every process opens the same corpus to the same units.
    """

    @property
    def sha256(self) -> str:
        """Of the listing: names and sizes, not of every byte."""
        ...

    @property
    def sizes(self) -> Sequence[int]:
        """Bytes of each unit, or another measure of work where bytes are not known."""
        ...

    @property
    def num_documents(self) -> int | None: ...

    @property
    def num_bytes(self) -> int | None:
        """Of text, at most; None where that takes reading all of it."""
        ...

    @property
    def num_binary(self) -> int:
        """Binary files of folders and globs that are no part of it."""
        ...

    def names(self, unit: int) -> Iterable[str] | None:
        """Of the unit's documents; None where that takes reading them."""
        ...

    def read(self, unit: int, start: int) -> Iterator[TextDocument]:
        """The unit's documents from number ``start`` on; TrainError DATA where unreadable."""
        ...


def listing_sha256(lines: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(f"{line!r}\n".encode())
    return digest.hexdigest()


def fraction_of(name: str) -> float:
    """Where the document stands in [0, 1): the same in every run, whatever its seed."""
    digest = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


@dataclass(frozen=True, slots=True)
class SplitRule:
    """``whole``: every document belongs. Else held out is what stands at or below ``limit``."""

    split: Split
    limit: float
    whole: bool = False

    def has(self, name: str) -> bool:
        return self.whole or (fraction_of(name) <= self.limit) == (self.split == "held_out")


def split_rule(corpus: Corpus, split: Split, held_out_pct: float) -> SplitRule:
    """By hash of the document's name; a corpus of 2 to 10,000 documents holds out at least one."""
    if held_out_pct == 0.0 or corpus.num_documents == 1:
        return SplitRule(split, limit=-1.0)
    limit = held_out_pct / 100
    if corpus.num_documents is not None and 2 <= corpus.num_documents <= FEW_DOCUMENTS:
        every = [corpus.names(unit) or () for unit in range(len(corpus.sizes))]
        limit = max(limit, min(fraction_of(name) for names in every for name in names))
    return SplitRule(split, limit)


def units_of(corpus: Corpus, rule: SplitRule) -> list[int]:
    """Units that hold a document of the split, as far as names are known without reading."""
    found = []
    for unit in range(len(corpus.sizes)):
        names = corpus.names(unit)
        if names is None or any(rule.has(name) for name in names):
            found.append(unit)
    return found


def num_shards_for(num_units: int, num_bytes: int | None) -> int:
    """A power of two, at most 64: each shard has at least 2 units, and 16 KiB where that is
    known.
    """
    most = MAX_SHARDS if num_bytes is None else num_bytes // MIN_SHARD_BYTES
    shards = MAX_SHARDS
    while shards > 1 and (shards * 2 > num_units or shards > most):
        shards //= 2
    return shards


def deal(units: Sequence[int], sizes: Sequence[int], shards: int, seed: int) -> list[list[int]]:
    """Cut ``units`` into ``shards`` lists of about the same size: largest first, each to the
    smallest shard; units of the same size in a seeded order.
    """
    order = np.random.default_rng([seed, shards]).permutation(len(units))
    shuffled = sorted((units[i] for i in order), key=lambda unit: -sizes[unit])
    heap = [(0, 0, shard) for shard in range(shards)]
    dealt: list[list[int]] = [[] for _ in range(shards)]
    for unit in shuffled:
        size, count, shard = heapq.heappop(heap)
        dealt[shard].append(unit)
        heapq.heappush(heap, (size + sizes[unit], count + 1, shard))
    return [sorted(one) for one in dealt]


def data_error(message: str) -> TrainError:
    return TrainError(TrainExit.DATA, message)
