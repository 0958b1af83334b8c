"""The entropy of generated data is what its loader states, by independent estimates."""

from __future__ import annotations

import hashlib
import math
import re

import numpy as np
import pytest

from nsa.train.config import RunConfig
from nsa.train.data import load
from nsa.train.data.generated import (
    ALPHABET,
    Language,
    random_entropy_nats,
    successors,
    synthetic_entropy_nats,
)
from nsa.train.data.vocabulary import ByteTokenizer
from nsa.train.errors import TrainError, TrainExit
from tests.nsa.train.data.cases import Small, plain, take

SYNTHETIC = Language("synthetic", 0, held_out=False)
HELD_OUT = Language("synthetic", 0, held_out=True)


def cross_entropy_nats(train: np.ndarray, test: np.ndarray, order: int) -> float:
    """Of an n-gram model with ``order`` ids of context, fitted on ``train`` (add 0.01)."""
    contexts = 256**order

    def keys(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        context = sum(
            (ids[:, i : ids.shape[1] - order + i].astype(np.int64) * 256**i for i in range(order)),
            start=np.zeros((ids.shape[0], ids.shape[1] - order), np.int64),
        )
        return context.reshape(-1), ids[:, order:].reshape(-1)

    counts = np.full((contexts, 256), 0.01)
    np.add.at(counts, keys(train), 1)
    chances = counts / counts.sum(1, keepdims=True)
    return float(-np.log(chances[keys(test)]).mean())


def test_a_bigram_reaches_the_floor_within_100_small_steps() -> None:
    """100 steps of 8 x 128 tokens, which nothing without context can use."""
    train = np.concatenate([SYNTHETIC.ids(0, step, 8, 128) for step in range(100)])
    test = np.concatenate([HELD_OUT.ids(0, step, 8, 1024) for step in range(40)])
    floor = synthetic_entropy_nats()
    assert floor == pytest.approx(1.1097, abs=5e-5)  # which the docstrings state
    assert cross_entropy_nats(train, test, 0) > math.log(len(ALPHABET)) - 0.2
    assert floor - 0.005 < cross_entropy_nats(train, test, 1) < floor + 0.03


def test_the_rate_is_that_of_the_chain_that_is_drawn() -> None:
    """Eigenvector and rows estimated from samples alone, not from the table of chances."""
    ids = np.concatenate([SYNTHETIC.ids(3, step, 64, 512) for step in range(60)])
    pairs = np.zeros((256, 256))
    np.add.at(pairs, (ids[:, :-1].reshape(-1), ids[:, 1:].reshape(-1)), 1)
    used = np.flatnonzero(pairs.sum(1))
    chain = pairs[np.ix_(used, used)] / pairs[used].sum(1, keepdims=True)
    values, vectors = np.linalg.eig(chain.T)
    stationary = np.real(vectors[:, np.argmax(np.real(values))])
    stationary /= stationary.sum()
    rows = -np.where(chain > 0, chain * np.log(np.where(chain > 0, chain, 1)), 0).sum(1)
    assert abs(float(stationary @ rows) - synthetic_entropy_nats()) < 0.002


def test_the_language_is_of_its_alphabet_and_reaches_all_of_it() -> None:
    ids = SYNTHETIC.ids(0, 0, 8, 4096)
    assert set(ids.reshape(-1).tolist()) == set(ALPHABET)
    assert len(ALPHABET) == len(set(ALPHABET)) == 64
    assert (successors(0) != successors(1)).any()


def test_no_model_of_random_bytes_is_below_ln_256() -> None:
    language = Language("random", 0, held_out=False)
    train = np.concatenate([language.ids(0, step, 8, 1024) for step in range(40)])
    test = np.concatenate([language.ids(1, step, 8, 1024) for step in range(40)])
    assert random_entropy_nats() == pytest.approx(5.545177)
    for order in (0, 1):
        assert cross_entropy_nats(train, test, order) > random_entropy_nats() - 0.001
    assert abs(cross_entropy_nats(train, test, 0) - random_entropy_nats()) < 0.01


@pytest.mark.parametrize("kind", ["random", "synthetic"])
@pytest.mark.parametrize("packing", ["rows", "documents"])
def test_batches_of_shards_steps_and_seeds_differ(kind: str, packing: str) -> None:
    def first(seed: int, **options: object) -> tuple[object, ...]:
        small = Small({"kind": kind, "packing": packing, "seed": seed})
        return take(small.loader(**options), 130)  # type: ignore[arg-type]

    seen = first(0)
    assert len({str(one) for one in seen}) == 130  # 64 shards, each twice and more
    assert seen == first(0)
    assert not {str(one) for one in seen} & {str(one) for one in first(1)}


@pytest.mark.parametrize("kind", ["random", "synthetic"])
def test_held_out_is_another_stream_of_the_same_language(kind: str) -> None:
    small = Small({"kind": kind})
    held_out = small.loader(split="held_out")
    found = [plain(one) for one in held_out.batches(4)]
    assert len(found) == 4
    assert not {str(one) for one in found} & {str(one) for one in take(small.loader(), 100)}
    assert held_out.entropy_floor_nats == small.loader().entropy_floor_nats


@pytest.mark.parametrize(
    ("rows", "sha256"),
    [(1, "514d1da66a8c472a"), (47, "3540774881bc5d87"), (48, "92cc0c34a3cb13a0")],
)
def test_few_rows_and_many_are_the_rows_of_older_checkpoints(rows: int, sha256: str) -> None:
    """A run that resumes reads on: the digests are of bf69e932, which walked all rows at once."""
    made = Language("synthetic", 3, held_out=False).ids(1, 2, rows, 129)
    assert made.shape == (rows, 129) and made.dtype == np.int32
    assert hashlib.sha256(made.tobytes()).hexdigest()[:16] == sha256


def test_labels_follow_ids_by_the_chain() -> None:
    """Each label is a possible successor, in both packings."""
    table = successors(0)
    for packing in ("rows", "documents"):
        batch = next(Small({"kind": "synthetic", "packing": packing}).loader())
        kept = batch.labels != -100
        pairs = zip(batch.ids[kept].tolist(), batch.labels[kept].tolist(), strict=True)
        assert all(after in table[before] for before, after in pairs)
        assert batch.num_labels == batch.num_bytes == int(kept.sum())


def test_a_tokenizer_of_text_is_refused() -> None:
    with pytest.raises(TrainError, match="kind=random makes bytes.*omit data.tokenizer") as caught:
        Small({"kind": "random", "tokenizer": "bpe"}).loader()
    assert caught.value.code == TrainExit.USAGE


def test_each_needle_that_is_asked_for_was_stated_once_before() -> None:
    """Read back by a lookup that knows nothing of how rows are made."""
    language = Language("needle", 3, held_out=False)
    made = language.ids(5, 2, 4, 2049)
    has_label = language.has_label(made)
    for row, kept in zip(made.tolist(), has_label.tolist(), strict=True):
        text = bytes(row)
        stated = re.findall(rb"\x00([A-Z]{2})([0-9])", text)
        assert len({key for key, _ in stated}) == len(stated) == 2048 // 64
        answered = []
        for i, labelled in enumerate(kept):
            if labelled:
                asked = text[i - 1 : i + 1]
                before = re.findall(rb"\x00" + asked + rb"([0-9])", text[: i - 2])
                assert before == [text[i + 1 : i + 2]]
                answered.append(asked)
        assert sorted(answered) == sorted(key for key, _ in stated)


def test_needles_lie_near_and_far() -> None:
    language = Language("needle", 0, held_out=True)
    text = bytes(language.ids(0, 0, 1, 65_537)[0].tolist())
    distances = []
    for found in re.finditer(rb"\x01([A-Z]{2})", text):
        distances.append(found.start() - text.index(b"\x00" + found[1]))
    assert len(distances) == 676 and min(distances) > 0
    assert max(distances) > 50_000 and min(distances) < 1_000


def test_rows_that_hold_no_needle_are_refused() -> None:
    config = RunConfig.from_mapping({"data": {"kind": "needle"}, "train": {"seq_len": 32}})
    tokenizer = ByteTokenizer(has_end=False)
    with pytest.raises(TrainError, match="wanted rows of 64 tokens or more") as caught:
        load(config, rank=0, world_size=1, split="train", tokenizer=tokenizer)
    assert caught.value.code is TrainExit.DATA


def test_labels_of_a_batch_are_the_values_alone() -> None:
    mapping = {
        "data": {"kind": "needle", "workers": 0},
        "train": {"seq_len": 256, "batch": 2, "device": "cpu"},
    }
    config = RunConfig.from_mapping(mapping)
    tokenizer = ByteTokenizer(has_end=False)
    loader = load(config, rank=0, world_size=1, split="train", tokenizer=tokenizer)
    batch = next(loader)
    kept = batch.labels[batch.labels != -100].tolist()
    assert len(kept) == batch.num_labels == batch.num_bytes == 2 * 256 // 64
    assert set(kept) <= set(b"0123456789")
    assert loader.entropy_floor_nats == 0.0
    loader.close()
