"""Rows that state values of keys and ask for them: associative recall with several questions a key.

As in multi-query associative recall (arXiv 2312.04927), a question shows no answer, so the one
place of a row that has it is the pair that states it.

P pairs that a row states.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Of the 256 ids: noise, keys, values.
NUM_NOISE, NUM_KEYS, NUM_VALUES = 16, 112, 128
FIRST_KEY, FIRST_VALUE = NUM_NOISE, NUM_NOISE + NUM_KEYS
PAIR_CELL = 4  # tokens of which at most one pair, key and value, takes two
QUESTION_CELL = 2  # tokens of which at most one is a question
# Questions lie in the last quarter of a row and pairs before it, so that each question can be
# about each pair, and guessing is as good everywhere.
ASKING = 4
TOKENS_A_PAIR = 8  # of a row, up to all keys
# More would leave so many marks of a key in the haystack that they alone fill the chosen blocks.
MOST_QUESTIONS = 1024
LEAST_TOKENS = 2 * TOKENS_A_PAIR  # so that a row states two pairs


@dataclass(frozen=True, slots=True)
class RecallRows:
    """int32 [rows, length] each. ``labels``: the value at a question, else -1. ``stated``: where
    that value stands, else -1; always before the question. ``preceding``: the key at its value,
    else -1.

    With ``preceding`` as further labels a model learns early to carry a key to its value, without
    which no question can find it.
    """

    ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    stated: NDArray[np.int32]
    preceding: NDArray[np.int32]


def num_pairs_for(length: int, pairs: int = 0) -> int:
    """P of a row of ``length`` tokens; ``pairs`` 0: one for every 8 tokens, at most all keys."""
    return pairs or min(length // TOKENS_A_PAIR, NUM_KEYS)


def most_pairs(length: int) -> int:
    """That fit into the first three quarters of a row, each with a key of its own."""
    return min((length - length // ASKING) // PAIR_CELL, NUM_KEYS)


def num_questions_for(length: int) -> int:
    return min(length // ASKING // QUESTION_CELL, MOST_QUESTIONS)


def guessing_nats(num_pairs: int) -> float:
    """Of a model that knows which values the row states and not which belongs to the key: values of
    a row differ, and each is asked for as often.
    """
    return math.log(num_pairs)


def recall_rows(rng: np.random.Generator, rows: int, length: int, pairs: int = 0) -> RecallRows:
    """``rows`` rows of ``length`` tokens; ``pairs`` as `num_pairs_for` has it."""
    num_pairs, asking = num_pairs_for(length, pairs), length // ASKING
    row_R1 = np.arange(rows)[:, None]
    ids = rng.integers(0, NUM_NOISE, (rows, length), np.int32)
    labels, stated, preceding = (np.full_like(ids, -1) for _ in range(3))

    at_RP = PAIR_CELL * some_of(rng, rows, (length - asking) // PAIR_CELL, num_pairs)
    at_RP += rng.integers(0, PAIR_CELL - 1, at_RP.shape)
    keys_RP = FIRST_KEY + some_of(rng, rows, NUM_KEYS, num_pairs)
    values_RP = FIRST_VALUE + some_of(rng, rows, NUM_VALUES, num_pairs)
    ids[row_R1, at_RP], ids[row_R1, at_RP + 1] = keys_RP, values_RP
    preceding[row_R1, at_RP + 1] = keys_RP

    at_RQ = question_places(rng, rows, length)
    asked_RQ = rng.integers(0, num_pairs, at_RQ.shape)
    ids[row_R1, at_RQ] = keys_RP[row_R1, asked_RQ]
    labels[row_R1, at_RQ] = values_RP[row_R1, asked_RQ]
    stated[row_R1, at_RQ] = at_RP[row_R1, asked_RQ] + 1
    return RecallRows(ids, labels, stated, preceding)


def question_places(rng: np.random.Generator, rows: int, length: int) -> NDArray[np.int64]:
    """[rows, questions] in the last quarter of a row, in random order."""
    asking = length // ASKING
    at_RQ = QUESTION_CELL * some_of(rng, rows, asking // QUESTION_CELL, num_questions_for(length))
    return at_RQ + length - asking + rng.integers(0, QUESTION_CELL, at_RQ.shape)


def some_of(rng: np.random.Generator, rows: int, of: int, count: int) -> NDArray[np.int64]:
    """[rows, count]: for each row ``count`` different numbers below ``of``, in random order."""
    return rng.random((rows, of)).argsort(axis=1)[:, :count]
