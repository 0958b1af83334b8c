"""Copying: a lookup that knows nothing of how rows are made answers every question, and nothing
but what a row states says which token of a kind is right.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from nsa.config import NSAConfig
from nsa.train.data import copying
from nsa.train.data.generated import Language
from nsa.train.errors import TrainError, TrainExit
from nsa.train.yaml_file import read_config
from tests.nsa.train.data.cases import Small, take

LANGUAGE = Language("copying", 3, held_out=False)


def kind_of(token: int) -> tuple[str, int]:
    """Read from the ids alone: noise below 16, 14 kinds of 16 tokens each, 14 questions."""
    if token < 16:
        return "noise", 0
    return ("stated", (token - 16) // 16) if token < 240 else ("question", token - 240)


@pytest.mark.parametrize("length", [32, 513, 4096])
def test_a_lookup_answers_every_question(length: int) -> None:
    made = LANGUAGE.questions(5, 2, 3, length)
    assert made.ids.min() == 0 and made.ids.max() < 254
    for row, labels, stated in zip(
        made.ids.tolist(), made.labels.tolist(), made.stated.tolist(), strict=True
    ):
        found = {}
        for place, token in enumerate(row):
            what, kind = kind_of(token)
            if what == "stated":
                assert kind not in found, "a kind is stated twice"
                found[kind] = (token, place)
            elif what == "question":
                assert (labels[place], stated[place]) == found[kind]
            assert (labels[place] >= 0) == (what == "question")
        assert len(found) == 14
        assert sum(label >= 0 for label in labels) == min(length // 8, 1024)


def test_what_a_row_states_is_drawn_evenly() -> None:
    """Token and place: a guesser is right once in 16, wherever the question stands."""
    made = LANGUAGE.questions(0, 0, 2000, 256)
    asked = made.labels >= 0
    of_a_kind = np.bincount((made.labels[asked] - 16) % 16, minlength=16)
    places = np.bincount(made.stated[asked] // 24, minlength=8)
    for counts in (of_a_kind, places):
        even = counts.sum() / len(counts)
        # of 28,000 draws of 16 a standard deviation is 2.4 %, and some are asked for twice
        assert np.abs(counts / even - 1).max() < 0.12
    assert places.sum() == 2000 * 32


def test_its_stream_labels_questions_alone_and_short_rows_are_refused() -> None:
    ids, labels = (
        np.array(x) for x in take(Small({"kind": "copying"}, seq_len=64).loader(), 1)[0][:2]
    )
    asked = ids >= copying.FIRST_QUESTION
    assert asked.any() and (labels[asked] >= 16).all() and (labels[asked] < 240).all()
    assert (labels[~asked] == -100).all()
    with pytest.raises(TrainError, match="copying .*wanted rows of 32 tokens or more") as caught:
        Small({"kind": "copying"}, seq_len=31).loader()
    assert caught.value.code is TrainExit.DATA


def test_legs_are_one_model_and_each_begins_with_the_one_before() -> None:
    names = ("64", "128", "256", "512", "2k", "4k", "16k", "64k")
    legs = [read_config(f"@copying_{name}") for name in names]
    lengths = [64, 128, 256, 512, 2048, 4096, 16_384, 65_536]
    assert [one.train.seq_len for one in legs] == lengths
    begun = [one.train.init_from for one in legs]
    assert begun == [None, *(one.out for one in legs[:-1])]
    own = NSAConfig(rope="none", share_kv=True)
    nsa = [one.model.nsa for one in legs]
    # the last two have NSA's own sizes, and those before differ in what no weight's shape is of
    assert nsa[-2:] == [own, own]
    sizes = {"cmp_block": 32, "cmp_stride": 16, "num_selected": 16, "window": 512}
    assert {replace(one, branches=own.branches, **sizes) for one in nsa} == {own}
    assert [one.cmp_block for one in nsa] == [1, 4, 16, 32, 32, 32, 32, 32]
    assert {replace(one.model, nsa=own) for one in legs} == {legs[-1].model}
    assert {one.train.precision for one in legs} == {"autocast"}
