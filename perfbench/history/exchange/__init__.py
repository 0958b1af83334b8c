"""Other tools' files as runs of a history, and runs of a history as their files."""

from perfbench.history.exchange.action_export import custom, data_js
from perfbench.history.exchange.bencher import write as write_bencher
from perfbench.history.exchange.formats import READERS, ImportFormat, detect
from perfbench.history.exchange.source import (
    COMMIT,
    Exported,
    Imported,
    SourceFile,
    Stated,
    is_commit,
)
