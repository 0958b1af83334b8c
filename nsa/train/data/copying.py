"""Rows that state one token of each kind among noise and ask for them by their kind: copying over
any distance.

As `nsa.train.data.recall`, but the token that answers is also the one that a question finds: one
step of attention, where recall must first carry a key to its value. What is left to learn is to
find one token among all, which is what the choice of blocks is for.
"""

from __future__ import annotations

import numpy as np

from nsa.train.data.recall import ASKING, RecallRows, question_places, some_of

# Of the 256 ids: noise, the tokens of each kind, a question for each kind.
NUM_NOISE, NUM_KINDS, NUM_OF_A_KIND = 16, 14, 16
FIRST_STATED = NUM_NOISE
FIRST_QUESTION = FIRST_STATED + NUM_KINDS * NUM_OF_A_KIND
LEAST_TOKENS = 32  # so that all kinds fit before the questions


def copying_rows(rng: np.random.Generator, rows: int, length: int) -> RecallRows:
    """``rows`` rows of ``length`` tokens, `LEAST_TOKENS` or more: ``labels`` is the token that the
    row states of the kind asked for, ``stated`` its place in the first three quarters.
    """
    row_R1 = np.arange(rows)[:, None]
    ids = rng.integers(0, NUM_NOISE, (rows, length), np.int32)
    labels, stated, preceding = (np.full_like(ids, -1) for _ in range(3))

    at_RK = some_of(rng, rows, length - length // ASKING, NUM_KINDS)
    tokens_RK = FIRST_STATED + NUM_OF_A_KIND * np.arange(NUM_KINDS, dtype=np.int32)
    tokens_RK = tokens_RK + rng.integers(0, NUM_OF_A_KIND, at_RK.shape, np.int32)
    ids[row_R1, at_RK] = tokens_RK

    at_RQ = question_places(rng, rows, length)
    kind_RQ = rng.integers(0, NUM_KINDS, at_RQ.shape)
    ids[row_R1, at_RQ] = FIRST_QUESTION + kind_RQ
    labels[row_R1, at_RQ] = tokens_RK[row_R1, kind_RQ]
    stated[row_R1, at_RQ] = at_RK[row_R1, kind_RQ]
    return RecallRows(ids, labels, stated, preceding)
