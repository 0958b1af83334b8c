"""Text files: which are found, and how long ones are cut."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa.train.data.paths import ListedFile, Listing
from nsa.train.data.text_files import MAX_PIECE_BYTES, TextFiles
from nsa.train.errors import TrainError, TrainExit

PICTURE = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"


def pieces_of(files: TextFiles) -> list[bytes]:
    return [one.text for unit in range(len(files.sizes)) for one in files.read(unit, 0)]


def listed(path: Path, content: bytes) -> TextFiles:
    path.write_bytes(content)
    return TextFiles(Listing([ListedFile(path, path.name, len(content))], []))


@settings(max_examples=40)
@given(
    parts=st.lists(st.sampled_from(["a", "é", "∑", "𝄞", "\n", " "]), min_size=1, max_size=40),
    repeat=st.integers(1, 4000),
)
def test_pieces_are_the_file_and_cut_no_character(
    tmp_path_factory: pytest.TempPathFactory, parts: list[str], repeat: int
) -> None:
    content = "".join(parts * repeat).encode()[:200_000]
    content = content.decode("utf-8", "ignore").encode() or b"x"
    files = listed(tmp_path_factory.mktemp("text") / "one.txt", content)
    pieces = pieces_of(files)
    assert b"".join(pieces) == content
    assert len(pieces) == len(files.sizes) == files.num_documents
    for piece in pieces:
        piece.decode("utf-8")
    for start in accumulate(map(len, pieces[:-1])):
        at_line = content[start - 1 : start] == b"\n"
        assert at_line or b"\n" not in content[start - 1 : start + 60_000]


def test_bytes_that_are_no_text_are_cut_too(tmp_path: Path) -> None:
    content = b"\x80\xff" * 20_000
    assert b"".join(pieces_of(listed(tmp_path / "raw", content))) == content


def test_a_long_file_is_many_documents_and_a_short_one_is_one(tmp_path: Path) -> None:
    lines = b"".join(b"line %d of a long file\n" % i for i in range(8000))
    (tmp_path / "long.txt").write_bytes(lines)
    (tmp_path / "short.txt").write_bytes(b"short")
    files = TextFiles.open([str(tmp_path)], "data.paths")
    pieces = pieces_of(files)
    assert len(pieces) > 40
    assert pieces[-1] == b"short"
    assert all(piece.endswith(b"\n") and piece.startswith(b"line ") for piece in pieces[:-1])
    assert max(map(len, pieces)) < MAX_PIECE_BYTES


def test_folders_globs_and_files(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    for name in ("one.txt", "a/two.md", "a/b/three.txt", ".git/config", "a/.hidden"):
        (tmp_path / name).write_text(name)
    (tmp_path / "a/empty.txt").write_text("")

    def names(*patterns: str) -> list[str]:
        files = TextFiles.open([str(tmp_path / pattern) for pattern in patterns], "data.paths")
        return [one.path.relative_to(tmp_path).as_posix() for one in files.files]

    assert names("") == ["a/b/three.txt", "a/two.md", "one.txt"]
    assert sorted(names("**/*.txt")) == ["a/b/three.txt", "one.txt"]
    assert names("one.txt", "") == ["one.txt", "a/b/three.txt", "a/two.md"]  # none twice


def test_a_corpus_that_moved_is_the_same(tmp_path: Path) -> None:
    """Its listing and the names that decide the split."""
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "x.txt").write_text("the same")
    here, there = (TextFiles.open([str(tmp_path / p)], "data.paths") for p in ("here", "there"))
    assert here.sha256 == there.sha256
    assert [*here.names(0)] == [*there.names(0)]


@pytest.mark.parametrize(
    ("make", "pattern", "message"),
    [
        (lambda p: None, "gone.txt", "gone.txt does not exist .*check the path"),
        (lambda p: (p / "e.txt").write_text(""), "e.txt", "e.txt is empty .0 bytes."),
        (lambda p: (p / "d").mkdir(), "d", "the folder .*d holds no file"),
        (lambda p: None, "*.txt", "no file matches"),
        (lambda p: (p / "e.txt").write_text(""), "*.txt", "every file is empty;"),
        (lambda p: (p / "x.png").write_bytes(PICTURE), "x.png", "x.png is binary: .*wanted text;"),
        (lambda p: (p / "x.png").write_bytes(PICTURE), "", "every file is empty or binary;"),
    ],
)
def test_what_cannot_be_read_is_one_line(tmp_path: Path, make, pattern: str, message: str) -> None:
    make(tmp_path)
    with pytest.raises(TrainError, match=message) as caught:
        TextFiles.open([str(tmp_path / pattern)], "data.paths")
    assert caught.value.code == TrainExit.DATA
    assert "\n" not in str(caught.value)


def test_binary_files_of_folders_and_globs_are_left_out_and_counted(tmp_path: Path) -> None:
    (tmp_path / "one.md").write_text("text")
    (tmp_path / "two.md").write_bytes("Grüße".encode("latin-1"))  # text, if no UTF-8
    (tmp_path / "late.md").write_bytes(b"x" * 8_000 + b"\0")  # where git does not look, either
    (tmp_path / "x.png").write_bytes(PICTURE)
    (tmp_path / "edge.bin").write_bytes(b"x" * 7_999 + b"\0")
    for patterns in (["."], ["*"], [".", "*"]):
        files = TextFiles.open([str(tmp_path / one) for one in patterns], "data.paths")
        assert {one.path.name for one in files.files} == {"one.md", "two.md", "late.md"}
        assert files.num_binary == 2


def test_a_file_that_shrank_is_an_error(tmp_path: Path) -> None:
    files = listed(tmp_path / "one.txt", b"x" * 100)
    (tmp_path / "one.txt").write_bytes(b"x" * 10)
    with pytest.raises(TrainError, match="shorter than the 100 bytes"):
        pieces_of(files)
