"""Data of known entropy: uniform random bytes, and a language of one Markov chain."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

NUM_SYMBOLS = 256  # ids: bytes, all of them or those of the language
# Bytes of the language: 64 that can be read.
ALPHABET = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789 ."
# Each symbol is followed by one of 4, with these chances of 20.
CHANCES = (11, 5, 3, 1)


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

    def ids(self, shard: int, index: int, rows: int, length: int) -> NDArray[np.int32]:
        """int32 [rows, length]; rows are independent of one another."""
        rng = np.random.default_rng([self.seed, self.held_out, shard, index])
        if self.kind == "random":
            return rng.integers(0, NUM_SYMBOLS, (rows, length), np.uint8).astype(np.int32)
        table = successors(self.seed)
        draws = rng.integers(0, sum(CHANCES), (length, rows), np.uint8)
        state = rng.choice(np.frombuffer(ALPHABET, np.uint8), rows)
        made = np.empty((length, rows), np.uint8)
        for step in range(length):
            made[step] = state
            state = table[state, draws[step]]
        return np.ascontiguousarray(made.T).astype(np.int32)

    def lengths(self, shard: int, index: int, total: int, longest: int) -> Sequence[int]:
        """Of documents that fill ``total`` tokens: 2 to ``longest``, the last what is left."""
        rng = np.random.default_rng([self.seed, self.held_out, shard, index, 1])
        lengths: list[int] = []
        while total:
            one = min(int(rng.integers(2, max(2, longest) + 1)), total)
            lengths.append(one)
            total -= one
        return lengths
