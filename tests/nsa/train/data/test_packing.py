"""Rows and documents: what became of every byte, and which label stands where."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsa.model import next_token_labels
from nsa.train.data.corpora import SplitRule, TextDocument
from nsa.train.data.packing import BatchShape, DocumentRecipe, PackedBatch
from nsa.train.data.vocabulary import ByteTokenizer
from nsa.train.errors import TrainError, TrainExit
from tests.nsa.train.data.cases import Small, take, write_texts

EOT = 256


class Listed:
    """Documents that are given, ``unit_size`` a unit."""

    sha256 = "listed"
    num_documents: int | None = None
    num_bytes: int | None = None
    num_binary = 0

    def __init__(self, texts: list[bytes], unit_size: int) -> None:
        self.texts = texts
        self.units = [texts[i : i + unit_size] for i in range(0, len(texts), unit_size)]
        self.sizes = [1] * len(self.units)

    def names(self, unit: int) -> None:
        return None

    def read(self, unit: int, start: int) -> Iterator[TextDocument]:
        for i, text in enumerate(self.units[unit][start:], start):
            yield TextDocument(f"{unit}.{i}", text, "listed")


def one_pass(texts: list[bytes], packing: str, rows: int = 2, length: int = 8, unit: int = 3):
    """Every batch of one pass over one shard, and the ids that they should hold between them."""
    corpus = Listed(texts, unit)
    recipe = DocumentRecipe(
        corpus=corpus,
        rule=SplitRule("train", 0.0, whole=True),
        shards=[list(range(len(corpus.units)))],
        tokenizer=ByteTokenizer(),
        shape=BatchShape(rows, length, packing),
        seed=0,
        endless=False,
    )
    stream = recipe.stream(0, {})
    batches: list[PackedBatch] = []
    while (batch := stream.next_batch()) is not None:
        batches.append(batch)
    return batches


TEXTS = st.lists(st.binary(max_size=40), min_size=1, max_size=20).filter(any)


@given(texts=TEXTS, rows=st.integers(1, 3), length=st.integers(1, 20), unit=st.integers(1, 7))
def test_rows_are_the_stream_and_every_label_is_the_next_id(
    texts: list[bytes], rows: int, length: int, unit: int
) -> None:
    batches = one_pass(texts, "rows", rows, length, unit)
    total = sum(len(text) + 1 for text in texts if text)
    ids = [one for batch in batches for one in batch.ids.tolist()]
    stream = ids[:total]
    documents = bytes(0 if one == EOT else 1 for one in stream)
    assert documents.count(0) == sum(1 for text in texts if text)
    cut, text = [], []
    for one in stream:
        if one == EOT:
            cut.append(bytes(text))
            text = []
        else:
            text.append(one)
    assert sorted(cut) == sorted(text for text in texts if text)
    labels = [one for batch in batches for one in batch.labels.tolist()]
    assert labels == [*stream[1:], *[-100] * (len(ids) - total + 1)]
    assert sum(batch.num_labels for batch in batches) == total - 1
    assert sum(batch.num_bytes for batch in batches) == sum(map(len, texts)) - 1
    assert all(batch.ids.size == rows * length for batch in batches)


@given(texts=TEXTS, rows=st.integers(1, 3), length=st.integers(1, 20), unit=st.integers(1, 7))
def test_documents_see_no_other(texts: list[bytes], rows: int, length: int, unit: int) -> None:
    batches = one_pass(texts, "documents", rows, length, unit)
    pieces = []
    for batch in batches:
        assert batch.cu_seqlens is not None
        cu_seqlens = batch.cu_seqlens.tolist()
        expected = next_token_labels(
            torch.tensor(batch.ids)[None], cu_seqlens=torch.tensor(batch.cu_seqlens)
        )
        assert batch.labels.tolist() == expected[0].tolist()
        kept = [one for one in batch.labels.tolist() if one != -100]
        assert batch.num_labels == len(kept)
        assert batch.num_bytes == sum(1 for one in kept if one < EOT)
        pieces += [batch.ids[a:b].tolist() for a, b in pairwise(cu_seqlens)]
        assert EOT not in [one for piece in pieces for one in piece[:-1]]
    whole, part = [], []
    for piece in pieces:  # a piece without an end goes on in the next one
        part += piece
        if piece[-1] == EOT:
            whole.append(bytes(part[:-1]))
            part = []
    assert part == []
    assert sorted(whole) == sorted(text for text in texts if text)
    assert [batch.cu_seqlens[-1] for batch in batches[:-1]] == [rows * length] * (len(batches) - 1)


def test_padding_is_covered_by_no_document() -> None:
    (batch,) = one_pass([b"abc", b"de"], "documents", rows=2, length=8)
    assert batch.cu_seqlens is not None
    assert batch.cu_seqlens.tolist()[-1] == 7
    assert batch.ids[7:].tolist() == [EOT] * 9
    assert batch.labels[6:].tolist() == [-100] * 10


def test_shapes_and_dtypes(tmp_path: Path) -> None:
    write_texts(tmp_path)
    for packing, shape in (("rows", (2, 32)), ("documents", (1, 64))):
        batch = next(Small({"paths": (str(tmp_path),), "packing": packing}).loader())
        assert batch.ids.shape == batch.labels.shape == shape
        assert batch.ids.dtype == batch.labels.dtype == torch.int64
        assert (batch.cu_seqlens is None) == (packing == "rows")
        if batch.cu_seqlens is not None:
            assert batch.cu_seqlens.dtype == torch.int32
        assert batch.fetch_s > 0


@pytest.mark.parametrize("packing", ["rows", "documents"])
def test_epochs_have_orders_of_their_own(packing: str, tmp_path: Path) -> None:
    write_texts(tmp_path, count=20, words=8)
    small = Small({"paths": (str(tmp_path),), "packing": packing, "held_out_pct": 0.0})
    loader = small.loader()
    ids: list[int] = []
    while loader.state_dict()["shards"]["0"]["epoch"] < 3:
        ids += next(loader).ids.flatten().tolist()
    text = bytes(0 if one == EOT else one for one in ids)
    order = [one.split(b"]")[0] for one in text.split(b"\0")]
    first, second = order[:20], order[20:40]
    assert sorted(first) == sorted(second)
    assert len(set(first)) == 20
    assert first != second


@pytest.mark.parametrize("packing", ["rows", "documents"])
def test_a_corpus_shorter_than_a_sequence(packing: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("short " * 20)
    paths = (str(tmp_path),)
    with pytest.raises(TrainError, match="120 bytes, shorter than .*seq_len=128 tokens") as caught:
        Small({"paths": paths, "packing": packing}, seq_len=128).loader()
    assert caught.value.code == TrainExit.DATA
    # With ids of several bytes the corpus is shorter than it looks; its first pass shows it.
    small = Small({"paths": paths, "packing": packing, "tokenizer": "bpe"}, seq_len=100)
    loader = small.loader()
    with pytest.raises(TrainError, match=r"the corpus holds \d+ tokens, fewer than .* = 101"):
        take(loader, 5)


def test_a_shard_shorter_than_a_sequence(tmp_path: Path) -> None:
    write_texts(tmp_path, count=20, words=8)
    loader = Small({"paths": (str(tmp_path),), "shards": 8}, seq_len=400).loader()
    with pytest.raises(TrainError, match=r"shard \d of 8 holds .*data.shards smaller"):
        take(loader, 8)
