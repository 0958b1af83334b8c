"""FineWeb-Edu as a corpus, through `datasets`: streamed from the hub, or local files of its
schema.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from nsa.config import nearest_name
from nsa.train.data.corpora import TextDocument, data_error, listing_sha256
from nsa.train.data.packages import need
from nsa.train.data.paths import list_files

HUB_NAME = "HuggingFaceFW/fineweb-edu"
HUB_CONFIG = "sample-10BT"
COLUMNS = ("text", "id")
WHAT = "data.kind=fineweb_edu"


class FineWebEdu:
    """A unit is a row group, which `datasets` makes a shard of its own; nothing is downloaded
    before it is read. A document's name is its column ``id``, known only when it is read.
    """

    num_documents: int | None = None
    num_bytes: int | None = None
    num_binary = 0

    def __init__(self, patterns: Sequence[str], option: str) -> None:
        datasets = need("datasets", WHAT)
        need("pyarrow", WHAT)
        suffixes = (".parquet",)
        files = list_files(patterns, option=option, suffixes=suffixes).files if patterns else []
        self._source = ", ".join(patterns) if patterns else f"{HUB_NAME} ({HUB_CONFIG})"
        stream = self._opened(datasets, [str(one.path) for one in files])
        columns = list(stream.column_names or COLUMNS)
        for column in COLUMNS:
            if column not in columns:
                raise data_error(
                    f"{self._source} has no column {column!r}, which FineWeb-Edu has"
                    f"{nearest_name(column, columns)}; data.kind=parquet reads any schema"
                )
        self._stream = stream.select_columns(list(COLUMNS)).reshard()
        self.sizes: Sequence[int] = [1] * self._stream.num_shards
        listing: list[object] = [(one.name, one.size) for one in files] or [HUB_NAME, HUB_CONFIG]
        self.sha256 = listing_sha256([*listing, len(self.sizes)])

    def names(self, unit: int) -> None:
        return None

    def read(self, unit: int, start: int) -> Iterator[TextDocument]:
        one = self._stream.shard(num_shards=len(self.sizes), index=unit)
        source = f"row group {unit} of {self._source}"
        try:
            for row in one.skip(start) if start else one:
                text = (row["text"] or "").encode("utf-8", "surrogatepass")
                yield TextDocument(str(row["id"]), text, source)
        except (OSError, ValueError) as error:  # pyarrow's errors are ValueErrors
            raise self._failed(error) from error

    def _opened(self, datasets: Any, files: list[str]) -> Any:
        try:
            if files:
                return datasets.load_dataset(
                    "parquet", data_files=files, split="train", streaming=True
                )
            return datasets.load_dataset(HUB_NAME, name=HUB_CONFIG, split="train", streaming=True)
        except (OSError, ValueError, datasets.exceptions.DatasetGenerationError) as error:
            raise self._failed(error) from error

    def _failed(self, error: BaseException) -> Exception:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return data_error(
            f"cannot read {self._source}: {reason}; check the files or the network, or give"
            " data.paths of local parquet files"
        )
