"""Data of known entropy: uniform random bytes, a language of one Markov chain, and needles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from nsa.train.data.copying import copying_rows
from nsa.train.data.recall import RecallRows, recall_rows

NUM_SYMBOLS = 256  # ids: bytes, all of them or those of the language
# Bytes of the language: 64 that can be read.
ALPHABET = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789 ."
# Each symbol is followed by one of 4, with these chances of 20.
CHANCES = (11, 5, 3, 1)
ROWS_AT_ONCE = 48  # from so many rows on, NumPy steps over all of them faster than Python over each

# Needles: among noise a row states values of keys, PAIR key value, and asks for each later on,
# QUERY key value. Only the value behind a QUERY is a label; what states it lies anywhere before.
PAIR, QUERY = 0, 1
NOISE = b"abcdefghijklmnopqrstuvwxyz"
KEYS = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ"  # a key is two of them: 676
VALUES = b"0123456789"
NEEDLE = 4  # tokens of a PAIR or a QUERY
SLOT = 16  # a row is cut into slots of so many tokens, of which each holds one needle at most
SLOTS_A_PAIR = 4  # so one value is asked for every 64 tokens
LEAST_NEEDLE = SLOT * SLOTS_A_PAIR  # tokens of a row with a needle in it


def random_entropy_nats() -> float:
    """Of a uniform byte."""
    return math.log(NUM_SYMBOLS)


def synthetic_entropy_nats() -> float:
    """The chain's entropy rate, nats a token: 1.1097. Every symbol's four chances are the same
    numbers, so the rate is their entropy, whatever the share of each symbol.
    """
    total = sum(CHANCES)
    return -sum(one / total * math.log(one / total) for one in CHANCES)


@cache
def successors(seed: int) -> NDArray[np.uint8]:
    """The language of ``seed``: uint8 [256, 20], row: a byte, the byte that follows it for each of
    20 equally likely draws. Bytes outside the alphabet never occur.

    The likeliest successors form one circle through all symbols, so that every symbol is reached
    from every other.
    """
    rng = np.random.default_rng([seed, 0x4C414E47])
    symbols = np.frombuffer(ALPHABET, np.uint8)
    circle = rng.permutation(symbols)
    table = np.zeros((NUM_SYMBOLS, sum(CHANCES)), np.uint8)
    for place, symbol in enumerate(circle):
        after = circle[(place + 1) % len(circle)]
        others = rng.permutation(symbols[symbols != after])[: len(CHANCES) - 1]
        table[symbol] = np.repeat([after, *others], CHANCES)
    return table


@dataclass(frozen=True, slots=True)
class Language:
    """Batch ``index`` of a shard is a function of (seed, split, shard, index) alone."""

    kind: str
    seed: int
    held_out: bool
    pairs: int = 0  # of recall: as `recall.num_pairs_for`

    @property
    def asks(self) -> bool:
        """Whether its labels are answers to questions, and not the ids that follow."""
        return self.kind in ("recall", "copying")

    def questions(self, shard: int, index: int, rows: int, length: int) -> RecallRows:
        """A batch of a kind that `asks`."""
        rng = np.random.default_rng([self.seed, self.held_out, shard, index])
        if self.kind == "copying":
            return copying_rows(rng, rows, length)
        return recall_rows(rng, rows, length, self.pairs)

    def ids(self, shard: int, index: int, rows: int, length: int) -> NDArray[np.int32]:
        """int32 [rows, length]; rows are independent of one another. Not of a kind that `asks`."""
        rng = np.random.default_rng([self.seed, self.held_out, shard, index])
        if self.kind == "needle":
            return np.stack([_haystack(rng, length) for _ in range(rows)])
        if self.kind == "random":
            return rng.integers(0, NUM_SYMBOLS, (rows, length), np.uint8).astype(np.int32)
        draws = rng.integers(0, sum(CHANCES), (length, rows), np.uint8)
        first = rng.choice(np.frombuffer(ALPHABET, np.uint8), rows)
        walk = _walk_rows if rows < ROWS_AT_ONCE else _walk_steps
        return walk(successors(self.seed), draws, first).astype(np.int32)

    def has_label(self, ids: NDArray[np.int32]) -> NDArray[np.bool_]:
        """bool [rows, length - 1]: of ``ids`` [rows, length], whether the next one is a label."""
        kept = np.ones((ids.shape[0], ids.shape[1] - 1), np.bool_)
        if self.kind == "needle":
            kept[:, :2] = False
            kept[:, 2:] = ids[:, :-3] == QUERY
        return kept

    def lengths(self, shard: int, index: int, total: int, longest: int) -> Sequence[int]:
        """Of documents that fill ``total`` tokens: 2 to ``longest``, the last what is left."""
        rng = np.random.default_rng([self.seed, self.held_out, shard, index, 1])
        lengths: list[int] = []
        while total:
            one = min(int(rng.integers(2, max(2, longest) + 1)), total)
            lengths.append(one)
            total -= one
        return lengths


def _walk_steps(
    table: NDArray[np.uint8], draws: NDArray[np.uint8], first: NDArray[np.uint8]
) -> NDArray[np.uint8]:
    """The chain from ``first`` [rows] by ``draws`` [length, rows]: uint8 [rows, length]; all rows
    step by step, 3 to 6 us a step (two shared cores).
    """
    made, state = np.empty(draws.shape, np.uint8), first
    for step, drawn in enumerate(draws):
        made[step] = state
        state = table[state, drawn]
    return np.ascontiguousarray(made.T)


def _walk_rows(
    table: NDArray[np.uint8], draws: NDArray[np.uint8], first: NDArray[np.uint8]
) -> NDArray[np.uint8]:
    """The same, row after row, .1 to .2 us a token."""
    after = [bytes(row) for row in table]
    made = bytearray()
    for symbol, column in zip(first.tolist(), draws.T, strict=True):
        for drawn in column.tobytes():
            made.append(symbol)
            symbol = after[symbol][drawn]
    return np.frombuffer(made, np.uint8).reshape(draws.shape[::-1])


def _haystack(rng: np.random.Generator, length: int) -> NDArray[np.int32]:
    """One row, int32 [length]: each key that is asked for was stated once before."""
    row = rng.choice(np.frombuffer(NOISE, np.uint8), length).astype(np.int32)
    num_slots = length // SLOT
    num_pairs = min(num_slots // SLOTS_A_PAIR, len(KEYS) ** 2)
    slots = rng.permutation(num_slots)[: 2 * num_pairs].reshape(num_pairs, 2)
    slots.sort(axis=1)
    starts = slots * SLOT + rng.integers(0, SLOT - NEEDLE + 1, slots.shape)
    keys = np.frombuffer(KEYS, np.uint8)
    chosen = rng.permutation(len(KEYS) ** 2)[:num_pairs]
    values = rng.choice(np.frombuffer(VALUES, np.uint8), num_pairs)
    for marker, start in ((PAIR, starts[:, 0]), (QUERY, starts[:, 1])):
        row[start] = marker
        row[start + 1] = keys[chosen // len(KEYS)]
        row[start + 2] = keys[chosen % len(KEYS)]
        row[start + 3] = values
    return row
