"""Parquet by row groups, and FineWeb-Edu's local files through `datasets`."""

from __future__ import annotations

import pickle
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nsa.train.data.fineweb import FineWebEdu
from nsa.train.data.parquet_rows import ParquetRows
from nsa.train.errors import TrainError, TrainExit
from tests.nsa.train.data.cases import fineweb_columns, text_of, write_parquet

TEXTS = [text_of(i, i % 17) for i in range(300)]


@pytest.fixture
def two_files(tmp_path: Path) -> Path:
    write_parquet(tmp_path / "a.parquet", TEXTS[:200], 40, **fineweb_columns(200))
    write_parquet(tmp_path / "b.parquet", TEXTS[200:], 64, **fineweb_columns(100, 200))
    return tmp_path


def test_units_hold_every_row_once(two_files: Path) -> None:
    rows = ParquetRows([str(two_files)], "text", "data.paths")
    read = [one for unit in range(len(rows.sizes)) for one in rows.read(unit, 0)]
    assert [one.text.decode() for one in read] == TEXTS
    names = [name for unit in range(len(rows.sizes)) for name in rows.names(unit)]
    assert [one.name for one in read] == names
    assert len(set(names)) == rows.num_documents == 300
    assert len(rows.sizes) > 64  # seven row groups are cut further


@pytest.mark.parametrize("open_corpus", [ParquetRows, FineWebEdu])
def test_reading_goes_on_within_a_unit(two_files: Path, open_corpus) -> None:
    column = ["text"] if open_corpus is ParquetRows else []
    corpus = open_corpus([str(two_files)], *column, "data.paths")
    for unit in (0, len(corpus.sizes) - 1):
        whole = list(corpus.read(unit, 0))
        for start in (1, len(whole) - 1, len(whole)):
            assert list(corpus.read(unit, start)) == whole[start:]


def test_a_large_row_group_is_read_in_parts(tmp_path: Path) -> None:
    """300 rows of one group are more than one read of 256."""
    many = [text_of(i, 1) for i in range(130 * 300)]
    write_parquet(tmp_path / "a.parquet", many, 300)
    rows = ParquetRows([str(tmp_path)], "text", "data.paths")
    assert len(rows.sizes) == 130
    assert [one.text.decode() for one in rows.read(1, 280)] == many[580:600]


def test_only_the_unit_is_read(two_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = ParquetRows([str(two_files)], "text", "data.paths")
    asked: list[tuple[list[int], list[str]]] = []
    iter_batches = pq.ParquetFile.iter_batches

    def counting(self, size, *, row_groups, columns):
        asked.append((row_groups, columns))
        return iter_batches(self, size, row_groups=row_groups, columns=columns)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", counting)
    assert [one.text.decode() for one in rows.read(0, 0)] == TEXTS[:2]
    assert asked == [([0], ["text"])]


def test_fineweb_is_the_rows_of_its_files(two_files: Path) -> None:
    corpus = FineWebEdu([str(two_files)], "data.paths")
    assert len(corpus.sizes) == 7  # row groups: 5 of 40, 2 of up to 64
    read = [one for unit in range(7) for one in corpus.read(unit, 0)]
    assert [one.text.decode() for one in read] == TEXTS
    assert [one.name for one in read] == fineweb_columns(300)["id"]
    copied = pickle.loads(pickle.dumps(corpus))  # as a worker gets it
    assert list(copied.read(3, 5)) == list(corpus.read(3, 5))


def test_nulls_and_binary_columns(tmp_path: Path) -> None:
    table = pa.table({"text": pa.array(["a", None, "b"]), "raw": pa.array([b"\xff", b"", b"c"])})
    pq.write_table(table, tmp_path / "a.parquet")

    def read(column: str) -> list[bytes]:
        rows = ParquetRows([str(tmp_path / "a.parquet")], column, "data.paths")
        return [one.text for unit in range(len(rows.sizes)) for one in rows.read(unit, 0)]

    assert read("text") == [b"a", b"", b"b"]
    assert read("raw") == [b"\xff", b"", b"c"]


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("txt", "no column 'txt' .data.text_column.; did you mean 'text'"),
        ("score", "'score' is double, not text; columns of text: text, id"),
    ],
)
def test_a_wrong_column_names_the_right_one(two_files: Path, column: str, message: str) -> None:
    with pytest.raises(TrainError, match=message) as caught:
        ParquetRows([str(two_files)], column, "data.paths")
    assert caught.value.code == TrainExit.DATA


def test_fineweb_of_another_schema_is_refused(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", TEXTS, 10, ids=TEXTS)
    with pytest.raises(TrainError, match="no column 'id'.*did you mean 'ids'.*kind=parquet"):
        FineWebEdu([str(tmp_path)], "data.paths")


@pytest.mark.parametrize("damage", [lambda whole: b"no parquet", lambda whole: whole[:-40]])
def test_what_is_no_parquet_is_one_line(tmp_path: Path, damage) -> None:
    write_parquet(tmp_path / "a.parquet", TEXTS, 10, **fineweb_columns(300))
    whole = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(damage(whole))
    for open_corpus in (
        lambda: ParquetRows([str(tmp_path)], "text", "data.paths"),
        lambda: FineWebEdu([str(tmp_path)], "data.paths"),
    ):
        with pytest.raises(TrainError, match="cannot read") as caught:
            open_corpus()
        assert caught.value.code == TrainExit.DATA
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("open_corpus", [ParquetRows, FineWebEdu])
def test_damage_in_the_middle_is_one_line(tmp_path: Path, open_corpus) -> None:
    path = tmp_path / "a.parquet"
    write_parquet(path, [str(i) * 50 for i in range(300)], 30, **fineweb_columns(300))
    column = ["text"] if open_corpus is ParquetRows else []
    corpus = open_corpus([str(path)], *column, "data.paths")
    with open(path, "r+b") as stream:
        stream.seek(4)
        stream.write(b"\xff" * 3000)
    with pytest.raises(TrainError, match="cannot read") as caught:
        list(corpus.read(0, 0))
    assert caught.value.code == TrainExit.DATA
    assert "\n" not in str(caught.value)


def test_a_folder_without_parquet(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(TrainError, match="holds no file of .parquet"):
        ParquetRows([str(tmp_path)], "text", "data.paths")


def test_a_file_without_rows(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "a.parquet")
    with pytest.raises(TrainError, match="holds no rows"):
        ParquetRows([str(tmp_path)], "text", "data.paths")
