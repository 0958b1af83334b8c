"""One shard's stream of batches: documents become rows of ids and labels, and where it stands is a
few numbers.

N = rows x seq_len tokens of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from nsa.train.data.corpora import Corpus, SplitRule, TextDocument, data_error
from nsa.train.data.generated import Language
from nsa.train.data.vocabulary import Tokenizer, not_utf8

IGNORED_LABEL = -100  # as nsa.model's, which needs torch
# Documents of a row group are permuted in blocks, so that a worker holds 256 of them a shard: of
# FineWeb-Edu 1.2 MB, of 64 shards 80 MB.
BLOCK = 256
# A generated document is a quarter of a sequence on average, a half at most.
LONGEST_PART = 2

Cursor = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class BatchShape:
    """``rows`` sequences of ``length`` tokens; ``packing`` as `DataConfig.packing`."""

    rows: int
    length: int
    packing: str

    @property
    def tokens(self) -> int:
        return self.rows * self.length


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """``ids`` and ``labels`` int32 [N], row after row; ``cu_seqlens`` int32 [documents + 1]."""

    ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    cu_seqlens: NDArray[np.int32] | None
    num_labels: int
    num_bytes: int


class ShardStream(Protocol):
    """``cursor``: JSON data from which another process goes on with the next batch."""

    @property
    def cursor(self) -> dict[str, int]: ...

    def next_batch(self) -> PackedBatch | None:
        """None at the end, which a stream of the train split does not have."""
        ...


class StreamRecipe(Protocol):
    """What a worker process needs to make the streams of its shards; can be pickled."""

    @property
    def num_shards(self) -> int: ...

    def stream(self, shard: int, cursor: Cursor) -> ShardStream:
        """The stream of ``shard`` from ``cursor`` on; {} is its beginning."""
        ...


@dataclass(frozen=True, slots=True)
class GeneratedRecipe:
    language: Language
    shape: BatchShape
    num_shards: int

    def stream(self, shard: int, cursor: Cursor) -> ShardStream:
        return GeneratedStream(self, shard, cursor.get("batches", 0))


class GeneratedStream:
    def __init__(self, recipe: GeneratedRecipe, shard: int, batches: int) -> None:
        self._recipe, self._shard, self._batches = recipe, shard, batches

    @property
    def cursor(self) -> dict[str, int]:
        return {"batches": self._batches}

    def next_batch(self) -> PackedBatch:
        language, shape = self._recipe.language, self._recipe.shape
        at = (self._shard, self._batches)
        self._batches += 1
        if language.asks:
            found = language.questions(*at, shape.rows, shape.length)
            wanted = found.labels
            if not language.held_out:  # which measures what is recalled
                wanted = np.maximum(wanted, found.preceding)
            labels = np.where(wanted < 0, IGNORED_LABEL, wanted).reshape(-1)
            num_labels = int(np.count_nonzero(labels != IGNORED_LABEL))
            return PackedBatch(found.ids.reshape(-1), labels, None, num_labels, num_labels)
        if shape.packing == "rows":
            made = language.ids(*at, shape.rows, shape.length + 1)
            ids = made[:, :-1].reshape(-1)
            labels = np.where(language.has_label(made), made[:, 1:], IGNORED_LABEL).reshape(-1)
            num_labels = int(np.count_nonzero(labels != IGNORED_LABEL))
            return PackedBatch(ids, labels, None, num_labels, num_labels)
        longest = max(2, shape.length // LONGEST_PART)
        lengths = language.lengths(*at, shape.tokens, longest)
        made = language.ids(*at, len(lengths), longest)
        pieces = [row[:length] for row, length in zip(made, lengths, strict=True)]
        ids, labels, cu_seqlens = join_documents(pieces, shape.tokens, padding=0)
        num_labels = int(np.count_nonzero(labels != IGNORED_LABEL))
        return PackedBatch(ids, labels, cu_seqlens, num_labels, num_labels)


@dataclass(frozen=True, slots=True)
class DocumentRecipe:
    """``shards``: the units of each. ``endless``: epoch after epoch, each in an order of its own;
    else one pass, whose last batch is padded.
    """

    corpus: Corpus
    rule: SplitRule
    shards: Sequence[Sequence[int]]
    tokenizer: Tokenizer
    shape: BatchShape
    seed: int
    endless: bool

    @property
    def num_shards(self) -> int:
        return len(self.shards)

    def stream(self, shard: int, cursor: Cursor) -> ShardStream:
        return DocumentStream(self, shard, cursor)

    def walk(
        self, shard: int, place: DocumentPlace
    ) -> Iterator[tuple[DocumentPlace, TextDocument]]:
        """Documents of the split in ``shard``, in the order of the epoch, from ``place`` on."""
        units = self.shards[shard]
        order = np.random.default_rng([self.seed, 1, shard, place.epoch]).permutation(len(units))
        for number in range(place.unit, len(units)):
            unit = units[order[number]]
            start = place.document if number == place.unit else 0
            first = start - start % BLOCK
            rows = iter(self.corpus.read(unit, first))
            while block := list(islice(rows, BLOCK)):
                rng = np.random.default_rng([self.seed, 2, unit, first, place.epoch])
                mixed = rng.permutation(len(block))
                for index in range(max(0, start - first), len(block)):
                    document = block[mixed[index]]
                    if self.rule.has(document.name):
                        yield DocumentPlace(place.epoch, number, first + index), document
                first += BLOCK


@dataclass(frozen=True, slots=True)
class DocumentPlace:
    """Document number ``document`` of the ``unit``-th unit of the shard's epoch, in its order."""

    epoch: int = 0
    unit: int = 0
    document: int = 0


@dataclass(slots=True)
class DocumentStream:
    """``_offset`` ids of the document at ``_place`` are taken; ``_epoch_ids`` were in the epoch's
    documents before it.
    """

    _recipe: DocumentRecipe
    _shard: int
    _start: Cursor
    _place: DocumentPlace = field(init=False)
    _offset: int = field(init=False)
    _epoch_ids: int = field(init=False)
    _batches: int = field(init=False)
    _ids: NDArray[np.int32] | None = field(init=False, default=None)
    _documents: Iterator[tuple[DocumentPlace, TextDocument]] | None = field(init=False)

    def __post_init__(self) -> None:
        names = ("epoch", "unit", "document")
        self._place = DocumentPlace(**{name: self._start.get(name, 0) for name in names})
        self._offset = self._start.get("offset", 0)
        self._epoch_ids = self._start.get("epoch_ids", 0)
        self._batches = self._start.get("batches", 0)
        self._documents = self._recipe.walk(self._shard, self._place)

    @property
    def cursor(self) -> dict[str, int]:
        place = self._place
        return {
            "epoch": place.epoch,
            "unit": place.unit,
            "document": place.document,
            "offset": self._offset,
            "epoch_ids": self._epoch_ids,
            "batches": self._batches,
        }

    def next_batch(self) -> PackedBatch | None:
        shape, tokenizer = self._recipe.shape, self._recipe.tokenizer
        pieces = list(self._pieces(shape.tokens))
        if not pieces:
            return None
        self._batches += 1
        end = max(tokenizer.eot_id, 0)
        cu_seqlens: NDArray[np.int32] | None = None
        if shape.packing == "rows":
            following = self._following()
            ids, labels = join_rows(pieces, following, shape.tokens, padding=end)
        else:
            ids, labels, cu_seqlens = join_documents(pieces, shape.tokens, padding=end)
        kept = labels[labels != IGNORED_LABEL]
        return PackedBatch(ids, labels, cu_seqlens, kept.size, tokenizer.num_bytes(kept))

    def _pieces(self, tokens: int) -> Iterator[NDArray[np.int32]]:
        while tokens and (ids := self._current()) is not None:
            piece = ids[self._offset : self._offset + tokens]
            self._offset += piece.size
            tokens -= piece.size
            yield piece

    def _following(self) -> int:
        """The id behind the last one that was taken: the last label of the batch."""
        ids = self._current()
        return IGNORED_LABEL if ids is None else int(ids[self._offset])

    def _current(self) -> NDArray[np.int32] | None:
        """A document with ids that are not taken yet; None at the end."""
        while self._documents is not None:
            if self._ids is not None and self._offset < self._ids.size:
                return self._ids
            found = next(self._documents, None)
            if found is None:
                self._end_epoch()
                continue
            if self._ids is not None:  # not after a resume, which goes on within its document
                self._epoch_ids += self._ids.size
                self._offset = 0
            self._place, document = found
            self._ids = self._encoded(document)
        return None

    def _encoded(self, document: TextDocument) -> NDArray[np.int32]:
        tokenizer = self._recipe.tokenizer
        try:
            ids = tokenizer.encode(document.text)
        except UnicodeDecodeError as error:
            raise not_utf8(document, error) from error
        if ids and tokenizer.eot_id >= 0:
            ids.append(tokenizer.eot_id)
        return np.asarray(ids, np.int32)

    def _end_epoch(self) -> None:
        if not self._recipe.endless:
            self._documents = None
            return
        held = self._epoch_ids + (0 if self._ids is None else self._ids.size)
        wanted = self._recipe.shape.length + 1
        if held < wanted:
            shards = self._recipe.num_shards
            what = "the corpus" if shards == 1 else f"shard {self._shard} of {shards}"
            more = "" if shards == 1 else ", data.shards smaller"
            raise data_error(
                f"{what} holds {held} tokens, fewer than train.seq_len + 1 = {wanted}; make"
                f" train.seq_len smaller{more}, or give more text"
            )
        self._place = DocumentPlace(self._place.epoch + 1)
        self._ids, self._offset, self._epoch_ids = None, 0, 0
        self._documents = self._recipe.walk(self._shard, self._place)


def join_rows(
    pieces: Sequence[NDArray[np.int32]], following: int, tokens: int, *, padding: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """ids, labels int32 [tokens]: the stream, and the stream one further, whose last is
    ``following``.
    """
    taken = np.concatenate(pieces)
    ids = np.full(tokens, padding, np.int32)
    labels = np.full(tokens, IGNORED_LABEL, np.int32)
    ids[: taken.size] = taken
    labels[: taken.size - 1] = taken[1:]
    labels[taken.size - 1] = following
    return ids, labels


def join_documents(
    pieces: Sequence[NDArray[np.int32]], tokens: int, *, padding: int
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """ids, labels int32 [tokens], cu_seqlens int32 [documents + 1]: a document's last token has no
    label, nor has the padding behind the last document, which no document covers.
    """
    taken = np.concatenate(pieces)
    cu_seqlens = np.cumsum([0, *(one.size for one in pieces)], dtype=np.int32)
    ids = np.full(tokens, padding, np.int32)
    labels = np.full(tokens, IGNORED_LABEL, np.int32)
    ids[: taken.size] = taken
    labels[: taken.size - 1] = taken[1:]
    labels[cu_seqlens[1:] - 1] = IGNORED_LABEL
    return ids, labels, cu_seqlens
