"""Local parquet files as a corpus: a row is a document, row groups are read one at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from nsa.config import nearest_name
from nsa.train.data.corpora import TextDocument, data_error, listing_sha256
from nsa.train.data.packages import need
from nsa.train.data.paths import list_files

WANTED_UNITS = 128
READ_ROWS = 256
SUFFIXES = (".parquet", ".pq")


class ParquetRows:
    """A unit is a row group; a part of one where the files have fewer than 128 groups."""

    num_binary = 0

    def __init__(self, patterns: Sequence[str], column: str, option: str) -> None:
        self.column = column
        files = list_files(patterns, option=option, suffixes=SUFFIXES).files
        self.sha256 = listing_sha256((one.name, one.size) for one in files)
        self._paths = [(one.path, one.name) for one in files]
        groups: list[tuple[int, int, int, int, int]] = []
        for number, one in enumerate(files):
            metadata = open_parquet(one.path, column).metadata
            first_row = 0
            for group in range(metadata.num_row_groups):
                rows = metadata.row_group(group).num_rows
                size = _column_bytes(metadata.row_group(group), column)
                groups.append((number, group, first_row, rows, size))
                first_row += rows
        total = sum(rows for *_, rows, _ in groups)
        if not total:
            raise data_error(f"{option}={list(patterns)} holds no rows; wanted at least one")
        self.num_documents: int | None = total
        self.num_bytes: int | None = sum(size for *_, size in groups)
        self._units = [part for one in groups for part in _parts(one, total, len(groups))]
        self.sizes: Sequence[int] = [size for *_, size in self._units]

    def names(self, unit: int) -> Iterable[str]:
        number, _, _, first_row, rows, _ = self._units[unit]
        name = self._paths[number][1]
        return (f"{name}:{row}" for row in range(first_row, first_row + rows))

    def read(self, unit: int, start: int) -> Iterator[TextDocument]:
        number, group, skip, first_row, rows, _ = self._units[unit]
        path, name = self._paths[number]
        file, arrow = open_parquet(path, self.column), need("pyarrow", "data.kind=parquet")
        skip, left, row = skip + start, rows - start, first_row + start
        batches = file.iter_batches(READ_ROWS, row_groups=[group], columns=[self.column])
        while left > 0:
            try:
                column = next(batches).column(0)
            except (arrow.ArrowException, OSError) as error:
                raise unreadable(path, error) from error
            taken = column.slice(skip, left).cast(arrow.large_binary())
            skip = max(0, skip - len(column))
            left -= len(taken)
            for text in taken:
                yield TextDocument(f"{name}:{row}", text.as_py() or b"", str(path))
                row += 1


def _parts(
    group: tuple[int, int, int, int, int], total: int, num_groups: int
) -> Iterator[tuple[int, int, int, int, int, int]]:
    """(file, group, first row within the group, first row within the file, rows, bytes)."""
    number, index, first_row, rows, size = group
    wanted = rows if num_groups >= WANTED_UNITS else max(1, total // WANTED_UNITS)
    for skip in range(0, rows, max(1, wanted)):
        taken = min(wanted, rows - skip)
        yield number, index, skip, first_row + skip, taken, max(1, size * taken // rows)


def open_parquet(path: Path, column: str) -> Any:
    """The ParquetFile; TrainError DATA where it is none, or has no text in ``column``."""
    arrow = need("pyarrow", "data.kind=parquet")
    parquet = need("pyarrow.parquet", "data.kind=parquet")
    try:
        file = parquet.ParquetFile(path)
    except (arrow.ArrowException, OSError) as error:
        raise unreadable(path, error) from error
    schema = file.schema_arrow
    if column not in schema.names:
        near = nearest_name(column, schema.names)
        raise data_error(f"{path} has no column {column!r} (data.text_column){near}")
    kind, types = schema.field(column).type, arrow.types
    texts = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
    if not any(one(kind) for one in texts):
        strings = [one.name for one in schema if any(is_text(one.type) for is_text in texts)]
        raise data_error(
            f"{path}: column {column!r} is {kind}, not text; columns of text:"
            f" {', '.join(strings) or 'none'} (data.text_column)"
        )
    return file


def unreadable(path: Path, error: BaseException) -> Exception:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return data_error(f"cannot read {path} as parquet: {reason}; is it whole?")


def _column_bytes(group: Any, column: str) -> int:
    """Uncompressed bytes of the column in the row group."""
    for index in range(group.num_columns):
        chunk = group.column(index)
        if chunk.path_in_schema == column:
            return int(chunk.total_uncompressed_size)
    return int(group.total_byte_size)
