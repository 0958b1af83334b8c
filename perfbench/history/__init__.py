"""What was measured over months: a database of judged runs, what changed in it, and its page."""

from perfbench.history import tables
from perfbench.history.nouns import HistoryCell, HistoryRun, MeasuredValue, METRICS, RunInfo
from perfbench.history.nouns import SeriesKey
from perfbench.history.store import History
