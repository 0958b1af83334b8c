"""What was measured over months: a database of judged runs, what changed in it, and its page."""

from perfbench.history.configured import make_history, open_history, upgrade_history
from perfbench.history.frames import history_frame
from perfbench.history.from_run import RunPlace, history_run
from perfbench.history.interval import half_width_pct
from perfbench.history.next_command import next_step
from perfbench.history.nouns import ChangeKind, ChangePoint, HistoryCell, HistoryRun, MeasuredValue
from perfbench.history.nouns import METRICS, RunInfo, Series, SeriesKey, Triage, TriageKind
from perfbench.history.prune import PrunePolicy, StoredRun, to_prune
from perfbench.history.since import ChangeRow, change_rows, newest_first
from perfbench.history.store import History
from perfbench.history.writing import Added
