"""What was measured over months: a database of judged runs, what changed in it, and its page."""

from perfbench.history.configured import make_history, open_history, upgrade_history
from perfbench.history.frames import history_frame
from perfbench.history.from_run import RunPlace, history_run
from perfbench.history.nouns import HistoryCell, HistoryRun, MeasuredValue, METRICS, RunInfo
from perfbench.history.nouns import SeriesKey
from perfbench.history.prune import PrunePolicy, StoredRun, to_prune
from perfbench.history.since import ChangeRow, change_rows, newest_first
from perfbench.history.store import History
from perfbench.history.writing import Added
