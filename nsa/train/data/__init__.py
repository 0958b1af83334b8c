"""Data of a training run: corpora, tokenizers, packing, and loaders whose state is exact."""

from __future__ import annotations

from nsa.train.data.loading import load, tokenizer_of, vocabulary_size

__all__ = ["load", "tokenizer_of", "vocabulary_size"]
