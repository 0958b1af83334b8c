"""Tokenizers: bytes, or subwords of `tokenizers` and tiktoken; each id stands for exact bytes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from nsa.config import nearest_name
from nsa.train.data.corpora import TextDocument, data_error
from nsa.train.data.packages import need
from nsa.train.errors import TrainError, TrainExit

FILE_NAME = "tokenizer.json"
END_OF_TEXT = "<|endoftext|>"
NUM_BYTES = 256


class Tokenizer(Protocol):
    """``vocab_size`` counts ``eot_id``, which stands for 0 bytes; ``eot_id`` is -1 where documents
    have no end. ``sha256`` is the same for tokenizers that give the same ids.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def eot_id(self) -> int: ...

    @property
    def sha256(self) -> str: ...

    def encode(self, text: bytes) -> list[int]:
        """Ids without end-of-text; UnicodeDecodeError where it takes text and gets other bytes."""
        ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def num_bytes(self, ids: Sequence[int] | NDArray[np.int32]) -> int:
        """Bytes of UTF-8 that the ids stand for, exactly."""
        ...

    def save(self, folder: Path) -> None:
        """Write ``folder``/tokenizer.json, atomically."""
        ...


class ByteTokenizer:
    """An id is a byte, and 256 is end-of-text; ``has_end=False``: 256 ids, no end (random and
    synthetic data).
    """

    def __init__(self, *, has_end: bool = True) -> None:
        self.eot_id = NUM_BYTES if has_end else -1
        self.vocab_size = NUM_BYTES + has_end
        self._description = json.dumps({"kind": "byte", "vocab_size": self.vocab_size})
        self.sha256 = hashlib.sha256(self._description.encode()).hexdigest()

    def encode(self, text: bytes) -> list[int]:
        return list(text)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(one for one in ids if one < NUM_BYTES).decode("utf-8", "replace")

    def num_bytes(self, ids: Sequence[int] | NDArray[np.int32]) -> int:
        return int(np.count_nonzero(np.asarray(ids) < NUM_BYTES))

    def save(self, folder: Path) -> None:
        write_atomically(folder / FILE_NAME, self._description)


class SubwordTokenizer:
    """Of the package `tokenizers`, byte-level (GPT-2's alphabet of bytes): text of any kind comes
    back byte for byte. Special tokens that stand in the text are text, not ids of their own.
    """

    def __init__(self, text: str, source: str) -> None:
        tokenizers = need("tokenizers", "data.tokenizer=bpe or file")
        self._json = text
        self._tokenizer = tokenizers.Tokenizer.from_str(text)
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        description = json.loads(text)
        check_byte_level(description, source)
        self.eot_id = end_of_text_id(description, source)
        ids: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(ids.values()) + 1
        self.sha256 = hashlib.sha256(text.encode()).hexdigest()
        added = {one["content"] for one in description.get("added_tokens", [])}
        self._lengths = np.zeros(self.vocab_size, np.int64)
        for token, number in ids.items():  # a character of a byte-level token is one byte
            self._lengths[number] = len(token.encode()) if token in added else len(token)
        self._lengths[self.eot_id] = 0

    def encode(self, text: bytes) -> list[int]:
        # Without offsets: 640k tok/s a core where `encode` makes 440k.
        (encoded,) = self._tokenizer.encode_batch_fast(
            [text.decode("utf-8")], add_special_tokens=False
        )
        return encoded.ids  # type: ignore[no-any-return]

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def num_bytes(self, ids: Sequence[int] | NDArray[np.int32]) -> int:
        return int(self._lengths[np.asarray(ids, np.int64)].sum())

    def save(self, folder: Path) -> None:
        write_atomically(folder / FILE_NAME, self._json)

    def __reduce__(self) -> tuple[Any, ...]:
        return SubwordTokenizer, (self._json, "the run's tokenizer")


class TiktokenTokenizer:
    """A tiktoken encoding by name; its vocabulary is at hand in tiktoken's cache, or downloaded."""

    def __init__(self, name: str) -> None:
        tiktoken = need("tiktoken", "data.tokenizer=tiktoken")
        known = tiktoken.list_encoding_names()
        if name not in known:
            raise data_error(
                f"data.tokenizer_path={name!r} is no tiktoken encoding{nearest_name(name, known)}"
            )
        try:
            self._encoding = tiktoken.get_encoding(name)
        except OSError as error:  # requests' errors are OSErrors
            raise data_error(
                f"the vocabulary of tiktoken's {name} is not at hand, and cannot be downloaded"
                f" ({type(error).__name__}); run once with a network and TIKTOKEN_CACHE_DIR set, or"
                " take data.tokenizer=bpe"
            ) from error
        self._name = name
        self.vocab_size: int = self._encoding.n_vocab
        self.eot_id: int = self._encoding.eot_token
        self._lengths = np.zeros(self.vocab_size, np.int64)
        digest = hashlib.sha256(name.encode())
        for token in self._encoding.token_byte_values():
            self._lengths[self._encoding.encode_single_token(token)] = len(token)
            digest.update(token)
        self.sha256 = digest.hexdigest()

    def encode(self, text: bytes) -> list[int]:
        return self._encoding.encode_ordinary(text.decode("utf-8"))  # type: ignore[no-any-return]

    def decode(self, ids: Sequence[int]) -> str:
        plain = [one for one in ids if self._lengths[one]]
        return self._encoding.decode(plain, errors="replace")  # type: ignore[no-any-return]

    def num_bytes(self, ids: Sequence[int] | NDArray[np.int32]) -> int:
        return int(self._lengths[np.asarray(ids, np.int64)].sum())

    def save(self, folder: Path) -> None:
        text = json.dumps({"kind": "tiktoken", "encoding": self._name, "sha256": self.sha256})
        write_atomically(folder / FILE_NAME, text)

    def __reduce__(self) -> tuple[Any, ...]:
        return TiktokenTokenizer, (self._name,)


def tokenizer_from_file(path: Path, option: str) -> SubwordTokenizer:
    """Of a tokenizer.json; TrainError DATA where it is none, or not byte-level."""
    try:
        text = path.read_text(encoding="utf-8")
        described = json.loads(text)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
        raise data_error(f"{option}: cannot read {path}: {reason}") from error
    if not isinstance(described, dict) or "model" not in described:
        raise data_error(
            f'{option}: {path} is no tokenizer of the package tokenizers (no "model" in it); give'
            " its tokenizer.json"
        )
    return SubwordTokenizer(text, str(path))


def train_bpe(documents: Iterable[TextDocument], vocab_size: int) -> SubwordTokenizer:
    """A byte-level BPE of at most ``vocab_size`` ids, the first of them end-of-text; the same
    documents give the same tokenizer.
    """
    tokenizers = need("tokenizers", "data.tokenizer=bpe")
    if vocab_size <= NUM_BYTES:
        raise TrainError(
            TrainExit.USAGE,
            f"data.vocab_size={vocab_size}; a byte-level BPE has {NUM_BYTES + 1} ids before it"
            " merges anything; take more, or data.tokenizer=byte",
        )
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(documents), trainer)
    return SubwordTokenizer(tokenizer.to_str(), "the run's BPE")


def _texts(documents: Iterable[TextDocument]) -> Iterator[str]:
    for document in documents:
        try:
            yield document.text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise not_utf8(document, error) from error


def not_utf8(document: TextDocument, error: UnicodeDecodeError) -> TrainError:
    return data_error(
        f"{document.source} is not UTF-8 (byte 0x{document.text[error.start]:02x} at"
        f" {error.start} of {document.name}); convert it, or take data.tokenizer=byte"
    )


def check_byte_level(description: dict[str, Any], source: str) -> None:
    """Else the bytes that an id stands for, and with them bits per byte, are not exact."""
    steps = description.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers", [steps])
    if not any(one.get("type") == "ByteLevel" for one in steps):
        kinds = [str(one.get("type")) for one in steps]
        raise data_error(
            f"{source} is not byte-level (pre_tokenizer {', '.join(kinds)}), so bits per byte would"
            " not be exact; take a byte-level one (GPT-2, Llama 3, Qwen), or data.tokenizer=bpe"
        )


def end_of_text_id(description: dict[str, Any], source: str) -> int:
    added = {one["content"]: int(one["id"]) for one in description.get("added_tokens", [])}
    for token in (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>"):
        if token in added:
            return added[token]
    raise data_error(
        f"{source} has no end-of-text token; wanted {END_OF_TEXT} among its added tokens, which are"
        f" {', '.join(sorted(added)) or 'none'}"
    )


def write_atomically(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)
