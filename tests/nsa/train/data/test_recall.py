"""Recall: a lookup that knows nothing of how rows are made answers every question, and a guesser
who knows what a row states is right as rarely as is stated.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from nsa.config import NSAConfig
from nsa.train.config import RunConfig
from nsa.train.data import recall
from nsa.train.data.generated import Language
from nsa.train.data.recall import RecallRows, guessing_nats, num_pairs_for
from nsa.train.errors import TrainError, TrainExit
from nsa.train.yaml_file import read_config
from tests.nsa.train.data.cases import Small, take

LANGUAGE = Language("recall", 3, held_out=False)
KEYS = range(16, 128)
VALUES = range(128, 256)


def stated_in(row: list[int]) -> dict[int, tuple[int, int]]:
    """Key -> (value, the place of the value), by reading the row once."""
    found = {}
    for place, (key, value) in enumerate(pairwise(row)):
        if key in KEYS and value in VALUES:
            assert key not in found
            found[key] = (value, place + 1)
    return found


@pytest.mark.parametrize("length", [64, 512, 2049])
def test_a_lookup_answers_every_question_and_no_answer_is_shown(length: int) -> None:
    made = LANGUAGE.questions(5, 2, 4, length)
    for row, labels, stated in zip(
        made.ids.tolist(), made.labels.tolist(), made.stated.tolist(), strict=True
    ):
        pairs = stated_in(row)
        assert len(pairs) == num_pairs_for(length) == len({value for value, _ in pairs.values()})
        asked = [place for place, label in enumerate(labels) if label >= 0]
        assert len(asked) == length // 8
        for place in asked:
            assert (labels[place], stated[place]) == pairs[row[place]]
            assert stated[place] < place
        # a value stands where it is stated and nowhere else, so no question shows an answer
        values = [one for one in row if one in VALUES]
        assert sorted(values) == sorted(value for value, _ in pairs.values())


def ranks(made: RecallRows) -> np.ndarray:
    """Which of the row's pairs, in the order in which they are stated, each question is about."""
    found = []
    for row, stated in zip(made.ids, made.stated, strict=True):
        places = np.flatnonzero(row >= VALUES.start)
        found.append(np.searchsorted(places, stated[stated >= 0]))
    return np.array(found)


def test_who_knows_what_a_row_states_and_not_which_is_right_as_rarely_as_is_stated() -> None:
    """Cross-entropy of a histogram over places and one over the question before: neither the order
    of the pairs nor what was asked before says anything.
    """
    length, pairs = 256, 32
    train, test = (ranks(LANGUAGE.questions(shard, 0, 2000, length)) for shard in (0, 1))
    counts = np.bincount(train.reshape(-1), minlength=pairs) + 1.0
    by_place = -np.log((counts / counts.sum())[test]).mean()
    follows = np.ones((pairs, pairs))
    np.add.at(follows, (train[:, :-1].reshape(-1), train[:, 1:].reshape(-1)), 1)
    follows /= follows.sum(1, keepdims=True)
    by_question = -np.log(follows[test[:, :-1], test[:, 1:]]).mean()
    asked = np.mean([len(set(row.tolist())) for row in test]) / pairs
    assert asked == pytest.approx(1 - (1 - 1 / pairs) ** test.shape[1], abs=0.01)
    assert guessing_nats(pairs) == pytest.approx(3.4657, abs=1e-4)
    assert by_place == pytest.approx(math.log(pairs), abs=0.005)
    assert by_question == pytest.approx(math.log(pairs), abs=0.015)


def test_long_rows_are_guessed_below_one_percent() -> None:
    for length in (1024, 8192, 65_536):
        (row,) = LANGUAGE.questions(0, 0, 1, length).ids.tolist()
        assert 1 / len(stated_in(row)) < 0.01


def test_distances_are_even_over_the_middle_of_a_row() -> None:
    """Pairs in three quarters, questions in the last one: as many questions for each distance from
    a quarter of the row to three quarters, fewer outside.
    """
    length = 65_536
    made = LANGUAGE.questions(0, 0, 12, length)
    distance = (np.arange(length) - made.stated)[made.stated >= 0]
    shares = np.histogram(distance, np.linspace(0, length, 9))[0] / distance.size
    expected = np.array([1, 3, 4, 4, 4, 4, 3, 1]) / 24
    assert np.abs(shares - expected).max() < 0.02
    assert distance.max() > 60_000


def test_train_batches_ask_for_the_key_at_its_value_and_held_out_ones_do_not() -> None:
    small = Small({"kind": "recall", "seed": 3}, seq_len=256, batch=2)
    for split, asks_for_keys in (("train", True), ("held_out", False)):
        loader = small.loader(split=split)
        batch = next(loader) if asks_for_keys else loader.batches(1)[0]
        assert loader.entropy_floor_nats == 0.0
        count = 0
        for row, labels in zip(batch.ids.tolist(), batch.labels.tolist(), strict=True):
            pairs = stated_in(row)
            wanted = {place: row[place - 1] for _, place in pairs.values() if asks_for_keys}
            for place, (one, after) in enumerate(zip(row, [*row[1:], 0], strict=True)):
                if one in KEYS and after not in VALUES:
                    wanted[place] = pairs[one][0]
            assert labels == [wanted.get(place, -100) for place in range(256)]
            count += len(wanted)
        assert batch.num_labels == batch.num_bytes == count == 2 * 32 * (1 + asks_for_keys)


def test_batches_go_on_where_they_stood() -> None:
    small = Small({"kind": "recall", "seed": 3}, seq_len=64, batch=2)
    loader = small.loader()
    next(loader)
    state, after = loader.state_dict(), take(loader, 3)
    again = small.loader()
    again.load_state_dict(state)
    assert take(again, 3) == after
    held_out = small.loader(split="held_out").batches(1)[0]
    assert held_out.ids.tolist() != take(small.loader(), 1)[0][0]


@pytest.mark.parametrize(
    ("data", "seq_len", "said"),
    [
        ({}, 8, "wanted rows of 16 tokens or more"),
        ({"packing": "documents"}, 64, "data.packing=documents.*wanted rows"),
        ({"pairs": 13}, 64, "data.pairs=13 do not fit.*at most 12"),
    ],
)
def test_rows_that_cannot_hold_what_is_wanted_are_refused(
    data: dict[str, object], seq_len: int, said: str
) -> None:
    with pytest.raises(TrainError, match=said) as caught:
        Small({"kind": "recall", **data}, seq_len=seq_len).loader()
    assert caught.value.code is TrainExit.DATA


def test_pairs_fill_the_room_that_is_stated() -> None:
    for length in (16, 64, 100, 4096):
        most = recall.most_pairs(length)
        made = Language("recall", 0, held_out=False, pairs=most).questions(0, 0, 2, length)
        assert [len(stated_in(row)) for row in made.ids.tolist()] == [most, most]


def test_pairs_of_other_data_are_refused_and_change_no_older_hash() -> None:
    with pytest.raises(ValueError, match="data.pairs=4 is of data.kind=recall, not of 'needle'"):
        RunConfig.from_mapping({"data": {"kind": "needle", "pairs": 4}})
    plain = RunConfig.from_mapping({"data": {"kind": "recall"}})
    more = replace(plain, data=replace(plain.data, pairs=4))
    assert "pairs" not in plain.identity()["data"]
    assert plain.sha256() != more.sha256()


def test_legs_are_one_model_and_each_begins_with_the_one_before() -> None:
    legs = [read_config(f"@needle_{name}") for name in ("32", "256", "2k", "8k", "64k")]
    assert [one.train.seq_len for one in legs] == [32, 256, 2048, 8192, 65_536]
    begun = [one.train.init_from for one in legs]
    assert begun == [None, *(one.out for one in legs[:-1])]
    # the first two have a narrow window, the second fewer branches, and neither is a weight
    sizes = [replace(one.model, nsa=replace(NSAConfig(), gate="softmax")) for one in legs]
    assert {(one.train.precision, model) for one, model in zip(legs, sizes, strict=True)} == {
        ("autocast", sizes[0])
    }
    assert {one.model.nsa for one in legs[2:]} == {replace(sizes[0].nsa, rope_base=1e7)}
