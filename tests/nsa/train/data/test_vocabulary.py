"""Tokenizers: what an id stands for, exactly, and which tokenizer it is."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import tiktoken
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from nsa.train.config import DataConfig, RunConfig
from nsa.train.data import tokenizer_of
from nsa.train.data.corpora import TextDocument
from nsa.train.data.vocabulary import (
    ByteTokenizer,
    SubwordTokenizer,
    TiktokenTokenizer,
    Tokenizer,
    tokenizer_from_file,
    train_bpe,
)
from nsa.train.errors import TrainError, TrainExit
from tests.nsa.train.data.cases import (
    Small,
    documents_of,
    plain,
    take,
    text_of,
    write_parquet,
    write_texts,
)

SAMPLE = [
    TextDocument(str(i), f"a sparse block {i} is selected é∑".encode(), "s") for i in range(50)
]


def small_encoding(name: str) -> tiktoken.Encoding:
    ranks = {bytes([i]): i for i in range(256)} | {b"sp": 256, b"ar": 257, b"spar": 258}
    return tiktoken.Encoding(
        name,
        pat_str=r"\S+|\s+",
        mergeable_ranks=ranks,
        special_tokens={"<|endoftext|>": 259},
    )


@pytest.fixture(params=["byte", "bpe", "tiktoken"])
def tokenizer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Tokenizer:
    monkeypatch.setattr(tiktoken, "get_encoding", small_encoding)
    if request.param == "byte":
        return ByteTokenizer()
    return train_bpe(SAMPLE, 300) if request.param == "bpe" else TiktokenTokenizer("gpt2")


ODD = [
    "",
    "a sparse block",
    "é∑𝄞\u200d\n\n\t  x",
    "<|endoftext|> in the text <|endoftext|>",
    "\x00\x7f",
]


@pytest.mark.parametrize("text", ODD)
def test_every_byte_is_counted_and_comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.num_bytes(ids) == len(text.encode())
    assert tokenizer.eot_id not in ids
    assert all(0 <= one < tokenizer.vocab_size for one in ids)
    assert sum(tokenizer.num_bytes([one]) for one in ids) == len(text.encode())


def test_end_of_text_is_an_id_of_no_bytes(tokenizer: Tokenizer) -> None:
    assert 0 <= tokenizer.eot_id < tokenizer.vocab_size
    assert tokenizer.num_bytes([tokenizer.eot_id]) == 0
    assert tokenizer.decode([*tokenizer.encode(b"ab"), tokenizer.eot_id]) == "ab"


def test_a_worker_gets_the_same(tokenizer: Tokenizer) -> None:
    copied = pickle.loads(pickle.dumps(tokenizer))
    assert copied.sha256 == tokenizer.sha256
    assert copied.encode(ODD[2].encode()) == tokenizer.encode(ODD[2].encode())


BPE = train_bpe(SAMPLE, 280)


@given(st.text())
def test_any_text_of_a_bpe(text: str) -> None:
    ids = BPE.encode(text.encode())
    assert BPE.decode(ids) == text
    assert BPE.num_bytes(ids) == len(text.encode())


def test_a_bpe_of_the_same_documents_is_the_same() -> None:
    assert train_bpe(SAMPLE, 290).sha256 == train_bpe(SAMPLE, 290).sha256
    assert train_bpe(SAMPLE, 290).sha256 != train_bpe(SAMPLE[:9], 290).sha256
    assert train_bpe(SAMPLE, 290).vocab_size == 290


def test_the_runs_bpe_is_trained_once_on_the_train_split(tmp_path: Path) -> None:
    write_texts(tmp_path / "corpus")
    small = Small({"paths": (str(tmp_path / "corpus"),), "tokenizer": "bpe", "vocab_size": 320})
    out = tmp_path / "out"
    made = tokenizer_of(small.config(), out)
    assert json.loads((out / "tokenizer.json").read_text())["model"]["type"] == "BPE"
    write_texts(tmp_path / "corpus", count=3)
    (tmp_path / "corpus" / "more.txt").write_text("zzzz " * 500)
    assert tokenizer_of(small.config(), out).sha256 == made.sha256
    assert tokenizer_of(small.config(), tmp_path / "other").sha256 != made.sha256


def test_held_out_text_does_not_change_the_bpe(tmp_path: Path) -> None:
    """Every held-out document is made longer; the tokenizer stays what it was."""
    texts = write_texts(tmp_path / "corpus")
    small = Small({"paths": (str(tmp_path / "corpus"),), "tokenizer": "bpe", "held_out_pct": 20.0})
    before = tokenizer_of(small.config(), tmp_path / "before")
    loader = small.loader(split="held_out", tokenizer="byte", packing="documents")
    held_out = "".join(
        bytes(one for one in batch.ids.flatten().tolist() if one < 256).decode("utf-8", "replace")
        for batch in loader.batches(1000)
    )
    found = [number for number in texts if f"[{number}]" in held_out]
    assert 3 < len(found) < 30
    for number in found:
        (tmp_path / "corpus" / f"{number:03d}.txt").write_text("qqqq" * len(texts[number]))
    assert tokenizer_of(small.config(), tmp_path / "after").sha256 == before.sha256
    (tmp_path / "corpus" / f"{min(set(texts) - set(found)):03d}.txt").write_text("qqqq" * 100)
    assert tokenizer_of(small.config(), tmp_path / "changed").sha256 != before.sha256


def test_held_out_rows_do_not_change_the_bpe(tmp_path: Path) -> None:
    """A unit of parquet holds rows of both splits."""
    texts = [text_of(i, 9) for i in range(300)]
    small = Small({"kind": "parquet", "paths": (str(tmp_path),), "held_out_pct": 20.0})
    write_parquet(tmp_path / "a.parquet", texts, 300)
    bpe = small.config(tokenizer="bpe")
    before = tokenizer_of(bpe, tmp_path / "before").sha256
    batches = small.loader(split="held_out").batches(1000)
    held_out = {text for text in documents_of([plain(one) for one in batches]) if text}
    assert 30 < len(held_out) < 90
    changed = ["qqqq" * 50 if text in held_out else text for text in texts]
    write_parquet(tmp_path / "a.parquet", changed, 300)
    assert tokenizer_of(bpe, tmp_path / "after").sha256 == before
    write_parquet(tmp_path / "a.parquet", ["qqqq" * 50] * 300, 300)
    assert tokenizer_of(bpe, tmp_path / "other").sha256 != before


def config_of(kind: str, path: object, vocab_size: int = 300) -> RunConfig:
    data = DataConfig(
        kind="text", paths=("x",), tokenizer=kind, tokenizer_path=str(path), vocab_size=vocab_size
    )
    return RunConfig(data=data)


def test_a_file_is_used_as_it_is(tmp_path: Path) -> None:
    BPE.save(tmp_path / "given")
    found = tokenizer_of(config_of("file", tmp_path / "given" / "tokenizer.json"), tmp_path / "out")
    assert found.sha256 == BPE.sha256
    assert (tmp_path / "out" / "tokenizer.json").read_text() == BPE._json


def word_level(**parts: object) -> str:
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    made.pre_tokenizer = parts.get("split", tokenizers.pre_tokenizers.Whitespace())
    return made.to_str()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "it is not JSON"),
        ("[1]", "no tokenizer of the package tokenizers"),
        (word_level(), "is not byte-level .pre_tokenizer Whitespace.*data.tokenizer=bpe"),
        (word_level(split=tokenizers.pre_tokenizers.ByteLevel()), "has no end-of-text token"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "t.json").write_text(content)
    with pytest.raises(TrainError, match=message) as caught:
        tokenizer_from_file(tmp_path / "t.json", "data.tokenizer_path")
    assert caught.value.code == TrainExit.DATA
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="data.tokenizer_path: cannot read .*gone.json"):
        tokenizer_of(config_of("file", tmp_path / "gone.json"), tmp_path)


def test_a_bpe_smaller_than_its_bytes_is_refused() -> None:
    with pytest.raises(TrainError, match="257 ids before it merges") as caught:
        train_bpe(SAMPLE, 256)
    assert caught.value.code == TrainExit.USAGE


def test_tiktoken_without_its_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(name: str) -> tiktoken.Encoding:
        raise ConnectionError("Max retries exceeded")

    monkeypatch.setattr(tiktoken, "get_encoding", no_network)
    with pytest.raises(TrainError, match="gpt2 is not at hand.*TIKTOKEN_CACHE_DIR") as caught:
        tokenizer_of(config_of("tiktoken", "gpt2"), tmp_path)
    assert caught.value.code == TrainExit.DATA
    with pytest.raises(TrainError, match="no tiktoken encoding; did you mean 'cl100k_base'"):
        tokenizer_of(config_of("tiktoken", "cl100k"), tmp_path)


@pytest.mark.parametrize("kind", ["bpe", "tiktoken"])
def test_a_missing_package(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    name = "tokenizers" if kind == "bpe" else "tiktoken"
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(TrainError, match=f"the package {name} is missing.*pip install") as caught:
        SubwordTokenizer(BPE._json, "x") if kind == "bpe" else TiktokenTokenizer("gpt2")
    assert caught.value.code == TrainExit.MISSING


def test_text_that_is_not_utf8_names_its_file(tmp_path: Path) -> None:
    write_texts(tmp_path, count=12)
    (tmp_path / "latin.txt").write_bytes("pr\xe9cis ".encode("latin-1") * 40)
    paths = (str(tmp_path),)
    bpe = Small({"paths": paths, "tokenizer": "bpe"}, out=tmp_path / "out")
    with pytest.raises(TrainError, match="latin.txt is not UTF-8 .byte 0xe9 at 2") as caught:
        bpe.loader()
    assert caught.value.code == TrainExit.DATA
    assert "\n" not in str(caught.value)
    BPE.save(tmp_path / "given")
    given = Small(
        {
            "paths": paths,
            "tokenizer": "file",
            "tokenizer_path": str(tmp_path / "given/tokenizer.json"),
        },
        out=tmp_path / "out",
    )
    loader = given.loader()
    with pytest.raises(TrainError, match="latin.txt is not UTF-8.*data.tokenizer=byte"):
        take(loader, 200)
    bytes_loader = Small({"paths": paths}, out=tmp_path / "bytes").loader()
    assert next(bytes_loader).num_labels == 64


def test_a_run_keeps_the_tokenizer_that_it_began_with(tmp_path: Path) -> None:
    """Where the file was changed since, the run's copy is not overwritten by what it is not."""
    given, out = tmp_path / "given.json", tmp_path / "out"
    given.write_text(train_bpe(SAMPLE, 300)._json)
    data = DataConfig(paths=("x",), tokenizer="file", tokenizer_path=str(given))
    before = tokenizer_of(RunConfig(data=data), out)
    kept = (out / "tokenizer.json").read_text()
    assert tokenizer_of(RunConfig(data=data), out).sha256 == before.sha256
    given.write_text(train_bpe(SAMPLE[:9], 270)._json)
    with pytest.raises(TrainError, match="is of another tokenizer") as caught:
        tokenizer_of(RunConfig(data=data), out)
    assert caught.value.code == TrainExit.DATA
    assert (out / "tokenizer.json").read_text() == kept
