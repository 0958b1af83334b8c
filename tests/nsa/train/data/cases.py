"""Small corpora whose every document is known by what it contains."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from nsa.train.config import DataConfig, LoopConfig, RunConfig
from nsa.train.data import load, tokenizer_of
from nsa.train.data.loader import Loader
from nsa.train.records import Batch

WORDS = ("sparse", "attention", "selects", "blocks", "of", "keys", "and", "values", "é", "∑")


def text_of(number: int, words: int) -> str:
    """``[number]``, then words, then ``[/number]``."""
    rng = Random(number)
    return f"[{number}] " + " ".join(rng.choice(WORDS) for _ in range(words)) + f" [/{number}]"


def write_texts(folder: Path, count: int = 60, words: int = 60) -> dict[int, str]:
    """``count`` files of different lengths; number -> text."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {i: text_of(i, 1 + Random(i).randrange(2 * words)) for i in range(count)}
    for number, text in texts.items():
        (folder / f"{number:03d}.txt").write_text(text, encoding="utf-8")
    return texts


def write_parquet(path: Path, texts: list[str], group: int, **columns: list[Any]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": texts, **columns}), path, row_group_size=group)


def fineweb_columns(count: int, first: int = 0) -> dict[str, list[Any]]:
    """The columns of FineWeb-Edu that are not ``text``."""
    return {
        "id": [f"<urn:uuid:{i:06d}>" for i in range(first, first + count)],
        "dump": ["CC-MAIN-2024-10"] * count,
        "url": [f"https://example.org/{i}" for i in range(count)],
        "file_path": ["s3://x"] * count,
        "language": ["en"] * count,
        "language_score": [0.9] * count,
        "token_count": [7] * count,
        "score": [3.1] * count,
        "int_score": [3] * count,
    }


@dataclass(frozen=True)
class Small:
    """A config of a small run, and its loaders."""

    data: dict[str, Any] = field(default_factory=dict)
    seq_len: int = 32
    batch: int = 2
    out: Path | None = None

    def config(self, **data: Any) -> RunConfig:
        return RunConfig(
            data=DataConfig(**{"workers": 0, **self.data, **data}),
            train=LoopConfig(seq_len=self.seq_len, batch=self.batch, device="cpu"),
        )

    def loader(
        self, *, rank: int = 0, world_size: int = 1, split: str = "train", **data: Any
    ) -> Loader:
        config = self.config(**data)
        with TemporaryDirectory() as unused:
            tokenizer = tokenizer_of(config, self.out or Path(unused))
        return load(config, rank=rank, world_size=world_size, split=split, tokenizer=tokenizer)


def plain(batch: Batch) -> tuple[Any, ...]:
    """What must be the same, bit by bit: everything but the clock."""
    cu_seqlens = None if batch.cu_seqlens is None else batch.cu_seqlens.tolist()
    counts = (batch.num_labels, batch.num_bytes)
    return (batch.ids.tolist(), batch.labels.tolist(), cu_seqlens, *counts)


def take(loader: Loader, count: int) -> list[tuple[Any, ...]]:
    return [plain(next(loader)) for _ in range(count)]


def by_shard(loader: Loader, count: int) -> list[tuple[str, tuple[Any, ...]]]:
    """(shard, batch): the shard whose cursor moved."""
    found = []
    for _ in range(count):
        before = loader.state_dict()["shards"]
        batch = plain(next(loader))
        after = loader.state_dict()["shards"]
        (moved,) = [shard for shard in after if after[shard] != before[shard]]
        found.append((moved, batch))
    return found


def documents_of(batches: list[tuple[Any, ...]]) -> list[str]:
    """Texts between end-of-text ids in one shard's batches of bytes; the last may be cut."""
    texts, text = [], bytearray()
    for ids, *_ in batches:
        for one in (one for row in ids for one in row):
            if one == 256:
                texts.append(text.decode())
                text = bytearray()
            else:
                text.append(one)
    return [*texts, text.decode("utf-8", "ignore")]
