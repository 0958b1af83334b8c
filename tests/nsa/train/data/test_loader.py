"""The order of batches: the same for any number of workers, after any resume, on any world size."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa.train.data.loader import Loader
from nsa.train.data.text_files import TextFiles
from nsa.train.errors import TrainError, TrainExit
from tests.nsa.train.data.cases import (
    Small,
    by_shard,
    documents_of,
    fineweb_columns,
    plain,
    take,
    text_of,
    write_parquet,
    write_texts,
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[int, str]]:
    folder = tmp_path_factory.mktemp("corpus")
    return str(folder), write_texts(folder)


@pytest.fixture(scope="module")
def parquet(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("parquet")
    texts = [text_of(i, i % 13) for i in range(1200)]
    write_parquet(folder / "a.parquet", texts[:800], 300, **fineweb_columns(800))
    write_parquet(folder / "b.parquet", texts[800:], 64, **fineweb_columns(400, 800))
    return str(folder)


@pytest.fixture(params=["text", "parquet", "synthetic"])
def small(request: pytest.FixtureRequest, corpus: tuple[str, Any], parquet: str) -> Small:
    paths = {"text": (corpus[0],), "parquet": (parquet,)}
    kind = request.param
    return Small({"kind": kind, "paths": paths.get(kind, ()), "shards": 6})


@pytest.mark.parametrize("packing", ["rows", "documents"])
def test_workers_change_nothing(small: Small, packing: str) -> None:
    """40 batches, and a resume behind the 17th with another number of workers."""
    alone = small.loader(packing=packing)
    expected = take(alone, 40)
    for workers, after in ((1, 2), (2, 1)):
        loader = small.loader(packing=packing, workers=workers, prefetch=3)
        assert take(loader, 17) == expected[:17]
        state = json.loads(json.dumps(loader.state_dict()))
        loader.close()
        resumed = small.loader(packing=packing, workers=after)
        resumed.load_state_dict(state)
        assert take(resumed, 23) == expected[17:]
        assert resumed.state_dict() == alone.state_dict()
        resumed.close()


def test_fineweb_goes_on_exactly_in_a_worker(parquet: str) -> None:
    small = Small({"kind": "fineweb_edu", "paths": (parquet,), "shards": 4})
    expected = take(small.loader(), 40)
    begun = small.loader()
    take(begun, 17)
    resumed = small.loader(workers=1)
    resumed.load_state_dict(json.loads(json.dumps(begun.state_dict())))
    assert take(resumed, 23) == expected[17:]
    resumed.close()


def test_the_state_is_of_what_was_taken_and_not_of_what_was_fetched(small: Small) -> None:
    loader = small.loader(workers=1, prefetch=8)
    take(loader, 3)
    batches = [one["batches"] for one in loader.state_dict()["shards"].values()]
    loader.close()
    assert sum(batches) == 3


@settings(max_examples=25)
@given(
    first=st.integers(0, 60),
    second=st.integers(0, 40),
    packing=st.sampled_from(["rows", "documents"]),
    seq_len=st.sampled_from([5, 32, 300]),
)
def test_resume_anywhere_is_exact(
    corpus: tuple[str, Any], first: int, second: int, packing: str, seq_len: int
) -> None:
    """Also within a document, at its end, and over epochs: 300 x 2 tokens are several documents,
    5 x 2 a part of one.
    """
    data = {"paths": (corpus[0],), "shards": 3, "packing": packing}
    small = Small(data, seq_len=seq_len)
    expected = take(small.loader(), first + second + 10)
    begun = small.loader()
    take(begun, first)
    once = small.loader()
    once.load_state_dict(json.loads(json.dumps(begun.state_dict())))
    assert take(once, second) == expected[first : first + second]
    twice = small.loader()
    twice.load_state_dict(once.state_dict())
    assert take(twice, 10) == expected[first + second :]


def train_texts(small: Small, texts: dict[int, str]) -> list[str]:
    """Of the documents that the held-out loader does not show."""
    held_out = [plain(one) for one in small.loader(split="held_out").batches(10_000)]
    shown = set(documents_of(held_out))
    return sorted(text for text in texts.values() if text not in shown)


@pytest.mark.parametrize("sizes", [(2, 3, 1), (6, 1, 2), (1, 6, 3)])
@pytest.mark.parametrize("packing", ["rows", "documents"])
def test_no_document_is_lost_or_seen_twice_over_world_sizes(
    corpus: tuple[str, dict[int, str]], sizes: tuple[int, ...], packing: str
) -> None:
    """Three runs on different numbers of ranks, each from the merged state of the one before."""
    data = {"paths": (corpus[0],), "shards": 6, "packing": packing, "held_out_pct": 10.0}
    small = Small(data)
    seen: dict[str, list[tuple[Any, ...]]] = defaultdict(list)
    merged: dict[str, Any] | None = None
    for world_size, count in zip(sizes, (31, 13, 600), strict=True):
        states = []
        for rank in range(world_size):
            loader = small.loader(rank=rank, world_size=world_size)
            if merged is not None:
                loader.load_state_dict(merged)
            for shard, batch in by_shard(loader, count // world_size):
                seen[shard].append(batch)
            states.append(json.loads(json.dumps(loader.state_dict())))
        merged = Loader.merge(states)
    alone = defaultdict(list)
    for shard, batch in by_shard(small.loader(), 400):
        alone[shard].append(batch)
    for shard, batches in alone.items():
        both = min(len(batches), len(seen[shard]))
        assert both > 40
        assert seen[shard][:both] == batches[:both]
    # What the shards hold between them, by the texts themselves.
    expected = Counter(train_texts(small, corpus[1]))
    assert len(expected) > 40
    first_epochs: Counter[str] = Counter()
    for batches in seen.values():
        documents = documents_of(batches)[:-1]
        first_epochs.update(documents[: _first_repeat(documents)])
    assert first_epochs == expected


def _first_repeat(documents: list[str]) -> int:
    """How many differ before one comes again: an epoch, where all texts differ."""
    seen: set[str] = set()
    for number, one in enumerate(documents):
        if one in seen:
            return number
        seen.add(one)
    raise AssertionError(f"no second epoch within {len(documents)} documents")


def test_a_rank_reads_its_own_shards_only(
    corpus: tuple[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: dict[int, set[int]] = defaultdict(set)
    rank = 0
    original = TextFiles.read

    def counting(self: TextFiles, unit: int, start: int):
        read[rank].add(unit)
        return original(self, unit, start)

    monkeypatch.setattr(TextFiles, "read", counting)
    small = Small({"paths": (corpus[0],), "shards": 4}, seq_len=256)
    for rank in range(4):
        take(small.loader(rank=rank, world_size=4), 60)
    assert all(10 < len(units) < 20 for units in read.values())
    assert sum(map(len, read.values())) == len(set().union(*read.values()))


def test_shards_are_of_about_the_same_size(tmp_path: Path) -> None:
    for i in range(200):
        (tmp_path / f"{i}.txt").write_text("x" * (1 + (i * 7919) % 3000))
    small = Small({"paths": (str(tmp_path),), "shards": 8, "held_out_pct": 0.0})
    recipe = small.loader()._recipe
    sizes = [sum(recipe.corpus.sizes[u] for u in units) for units in recipe.shards]
    assert max(sizes) - min(sizes) < 200
    assert sorted(u for units in recipe.shards for u in units) == list(range(200))


def test_the_seed_deals_the_pieces(tmp_path: Path) -> None:
    for i in range(40):
        (tmp_path / f"{i}.txt").write_text(f"{i:04d} " * 40)
    small = Small({"paths": (str(tmp_path),), "shards": 4})
    assert small.loader()._recipe.shards == small.loader()._recipe.shards
    assert small.loader()._recipe.shards != small.loader(seed=1)._recipe.shards


def test_shards_are_chosen_by_size(tmp_path: Path, corpus: tuple[str, Any]) -> None:
    assert Small({"paths": (corpus[0],)}).loader().describe()["shards"] == 1
    (tmp_path / "long.txt").write_text("a line of a long text\n" * 100_000)
    assert Small({"paths": (str(tmp_path),)}).loader().describe()["shards"] == 32
    assert Small({"kind": "random"}).loader().describe()["shards"] == 64


@pytest.mark.parametrize("kind", ["text", "parquet", "fineweb_edu"])
def test_held_out_is_apart_from_train_and_always_the_same(
    kind: str, corpus: tuple[str, dict[int, str]], parquet: str
) -> None:
    paths = (corpus[0],) if kind == "text" else (parquet,)
    texts = corpus[1] if kind == "text" else {i: text_of(i, i % 13) for i in range(1200)}
    small = Small({"kind": kind, "paths": paths, "held_out_pct": 10.0, "shards": 1})
    loader = small.loader(split="held_out")
    first = [plain(one) for one in loader.batches(3)]
    everything = [plain(one) for one in loader.batches(10_000)]
    assert [plain(one) for one in loader.batches(3)] == first == everything[:3]
    assert [plain(one) for one in small.loader(split="held_out", seed=5).batches(3)] == first
    held_out = [text for text in documents_of(everything) if text]
    assert len(held_out) == len(set(held_out)) > 3
    seen, train = [], small.loader()
    while train.state_dict()["shards"]["0"]["epoch"] == 0:
        seen.append(plain(next(train)))
    trained = set(documents_of(seen)[:-1])
    assert not trained & set(held_out)
    missed = set(texts.values()) - trained - set(held_out)
    assert len(missed) == 0


@pytest.mark.parametrize("packing", ["rows", "documents"])
def test_binary_files_are_left_out_and_counted(tmp_path: Path, packing: str) -> None:
    (tmp_path / "text.txt").write_text("text " * 400)
    for name in ("one.png", "two.png"):
        (tmp_path / name).write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + b"\xff" * 4000)
    loader = Small({"paths": (str(tmp_path),), "packing": packing, "held_out_pct": 0.0}).loader()
    assert loader.describe()["binary_files_left_out"] == 2
    assert loader.describe()["bytes"] == 2000
    assert 0xFF not in {one for batch in take(loader, 60) for row in batch[0] for one in row}
    assert Small({"kind": "random"}).loader().describe()["binary_files_left_out"] == 0


def test_eval_paths_are_held_out_instead(tmp_path: Path, corpus: tuple[str, Any]) -> None:
    (tmp_path / "eval.txt").write_text("[eval] " + "only here " * 40)
    data = {"paths": (corpus[0],), "eval_paths": (str(tmp_path),), "shards": 1}
    small = Small(data)
    (text,) = documents_of([plain(one) for one in small.loader(split="held_out").batches(99)])[:1]
    assert text == "[eval] " + "only here " * 40
    seen, loader = [], small.loader()
    while loader.state_dict()["shards"]["0"]["epoch"] == 0:
        seen.append(plain(next(loader)))
    found = documents_of(seen)
    assert set(corpus[1].values()) <= set(found)


def test_every_rank_evaluates_as_many_batches(corpus: tuple[str, Any]) -> None:
    """A forward of sharded weights is collective: a rank without text must not stay behind."""
    small = Small({"paths": (corpus[0],), "shards": 8})
    alone = small.loader(split="held_out").batches(50)
    assert 0 < len(alone) < 50
    labels = 0
    for rank in range(4):
        ranks = small.loader(split="held_out", rank=rank, world_size=4).batches(50)
        assert len(ranks) == 50
        assert all(one.ids.shape == alone[0].ids.shape for one in ranks)
        labels += sum(one.num_bytes for one in ranks)
    assert abs(labels - sum(one.num_bytes for one in alone)) <= 4  # a first byte is no label


def test_one_document_is_held_out_of_a_small_corpus(tmp_path: Path) -> None:
    write_texts(tmp_path, count=5)
    small = Small({"paths": (str(tmp_path),), "held_out_pct": 0.001})
    assert len(small.loader(split="held_out").batches(1)) == 1


@pytest.mark.parametrize(
    ("data", "files"), [({"held_out_pct": 0.0}, 5), ({}, 1), ({"kind": "fineweb_edu"}, 0)]
)
def test_an_empty_held_out_split_says_what_to_do(
    data: dict[str, Any], files: int, tmp_path: Path
) -> None:
    write_texts(tmp_path, count=files)
    if not files:
        write_parquet(tmp_path / "a.parquet", ["one text"] * 9, 9, **fineweb_columns(9))
    small = Small({"paths": (str(tmp_path),), "held_out_pct": 0.1, **data}, seq_len=8)
    with pytest.raises(TrainError, match="(larger|a second), give data.eval_paths") as caught:
        small.loader(split="held_out").batches(3)
    assert caught.value.code == TrainExit.DATA


@pytest.mark.parametrize(
    ("files", "counted"), [(1, "1 document,.*give a second"), (2, "2 documents,.*larger")]
)
def test_an_empty_split_counts_the_documents(files: int, counted: str, tmp_path: Path) -> None:
    write_texts(tmp_path, count=files)
    small = Small({"paths": (str(tmp_path),), "held_out_pct": 0.0}, seq_len=8)
    with pytest.raises(TrainError, match=rf"held_out split of text is empty \({counted}"):
        small.loader(split="held_out")


def test_ranks_that_do_not_divide_the_shards(corpus: tuple[str, Any]) -> None:
    small = Small({"paths": (corpus[0],), "shards": 6})
    with pytest.raises(TrainError, match="4 ranks .* 6 shards; start 1, 2, 3, 6 ranks") as caught:
        small.loader(rank=1, world_size=4)
    assert caught.value.code == TrainExit.DEVICE


def test_more_shards_than_pieces(tmp_path: Path) -> None:
    write_texts(tmp_path, count=4)
    with pytest.raises(TrainError, match="data.shards=5.*has 3 pieces.*at most 3") as caught:
        Small({"paths": (str(tmp_path),), "shards": 5}).loader()
    assert caught.value.code == TrainExit.DATA


def test_a_state_of_something_else_is_refused(tmp_path: Path, corpus: tuple[str, Any]) -> None:
    write_texts(tmp_path / "other", count=9)
    small = Small({"paths": (corpus[0],), "shards": 2})
    state = small.loader().state_dict()
    for change, what in (
        ({"paths": (str(tmp_path / "other"),)}, "corpus"),
        ({"tokenizer": "bpe", "vocab_size": 300}, "tokenizer"),
        ({"shards": 4}, "num_shards: 2, and the run has 4"),
        ({"packing": "documents"}, "packing"),
        ({"seed": 7}, "seed: 0, and the run has 7; set data.seed"),
    ):
        with pytest.raises(TrainError, match=f"of another {what}") as caught:
            small.loader(**change).load_state_dict(state)
        assert caught.value.code == TrainExit.DATA


def test_states_that_do_not_merge(corpus: tuple[str, Any]) -> None:
    small = Small({"paths": (corpus[0],), "shards": 4})
    states = [small.loader(rank=rank, world_size=2).state_dict() for rank in range(2)]
    merged = Loader.merge(states)
    assert sorted(merged["shards"]) == ["0", "1", "2", "3"]
    other = small.loader(packing="documents").state_dict()
    for wrong, message in (
        ([], "no loader state"),
        ([states[0], states[0]], r"shards \['0', '2'\] are in .* two ranks"),
        ([states[0], other], "different corpora"),
    ):
        with pytest.raises(TrainError, match=message) as caught:
            Loader.merge(wrong)
        assert caught.value.code == TrainExit.CHECKPOINT
    with pytest.raises(TrainError, match=r"lacks shards \[1, 3\] of rank 0") as caught:
        small.loader().load_state_dict(states[0])
    assert caught.value.code == TrainExit.CHECKPOINT


def test_a_loader_does_what_its_split_can(corpus: tuple[str, Any]) -> None:
    small = Small({"paths": (corpus[0],)})
    with pytest.raises(TypeError, match="batches"):
        next(small.loader(split="held_out"))
    with pytest.raises(TypeError, match="held-out"):
        small.loader().batches(1)


def test_closing_goes_on_behind_the_last_batch(small: Small) -> None:
    expected = take(small.loader(), 12)
    for workers in (0, 1):
        loader = small.loader(workers=workers)
        first = take(loader, 5)
        loader.close()
        assert [*first, *take(loader, 7)] == expected
        loader.close()
