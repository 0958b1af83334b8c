"""Text files as a corpus: a file is a document, a long one is cut into pieces."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import BinaryIO

from nsa.train.data.corpora import TextDocument, data_error, listing_sha256
from nsa.train.data.paths import ListedFile, Listing, list_files

# A hundred pieces of a corpus keep 64 shards busy; 1 MiB is 0.3 s of a BPE.
PIECES = 128
MIN_PIECE_BYTES = 4_096
MAX_PIECE_BYTES = 2**20
# How far behind the even cut the next line is looked for.
LINE_BYTES = 65_536


class TextFiles:
    """A unit is one document: a file, or a piece of one that is longer than a 128th of the corpus
    (4 KiB to 1 MiB). Pieces begin at a line, or at a character where no line begins within 64 KiB;
    together they are the file, byte for byte.
    """

    def __init__(self, listing: Listing) -> None:
        self.files: Sequence[ListedFile] = listing.files
        files, self.num_binary = listing.files, len(listing.binary)
        self.num_bytes: int | None = sum(one.size for one in files)
        limit = min(max(self.num_bytes // PIECES, MIN_PIECE_BYTES), MAX_PIECE_BYTES)
        self._pieces = [-(-one.size // limit) for one in files]
        self._ends = list(accumulate(self._pieces))
        self.num_documents: int | None = self._ends[-1]
        self.sha256 = listing_sha256((one.name, one.size) for one in files)
        self.sizes: Sequence[int] = [
            one.size // pieces
            for one, pieces in zip(files, self._pieces, strict=True)
            for _ in range(pieces)
        ]

    @classmethod
    def open(cls, patterns: Sequence[str], option: str) -> TextFiles:
        return cls(list_files(patterns, option=option, suffixes=()))

    def names(self, unit: int) -> Iterable[str]:
        file, piece, _ = self._place(unit)
        return (f"{file.name}#{piece}",)

    def read(self, unit: int, start: int) -> Iterator[TextDocument]:
        if start:
            return
        file, piece, pieces = self._place(unit)
        try:
            with open(file.path, "rb") as stream:
                first = _cut(stream, file.size, piece, pieces)
                last = _cut(stream, file.size, piece + 1, pieces)
                stream.seek(first)
                text = stream.read(last - first)
        except OSError as error:
            raise data_error(f"cannot read {file.path}: {error.strerror}") from error
        if len(text) < last - first:
            raise data_error(
                f"{file.path} is shorter than the {file.size} bytes that it had when the run began;"
                " leave the corpus alone while it is read, then resume"
            )
        yield TextDocument(f"{file.name}#{piece}", text, str(file.path))

    def _place(self, unit: int) -> tuple[ListedFile, int, int]:
        number = bisect_right(self._ends, unit)
        pieces = self._pieces[number]
        return self.files[number], unit - (self._ends[number] - pieces), pieces


def _cut(stream: BinaryIO, size: int, piece: int, pieces: int) -> int:
    """Where piece number ``piece`` begins: the first line at or behind the even cut."""
    even = piece * size // pieces
    if even in (0, size):
        return even
    stream.seek(even - 1)
    seen = stream.read(LINE_BYTES + 1)
    line = seen.find(b"\n")
    if line >= 0:
        return even + line
    # No line begins here: cut at a character. Bytes 10xxxxxx continue one, at most 3 of them.
    first = next((i for i in range(1, min(5, len(seen))) if seen[i] & 0xC0 != 0x80), 1)
    return even - 1 + first
