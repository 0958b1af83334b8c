"""What was measured over months: a database of judged runs, what changed in it, and its page."""

from typing import TYPE_CHECKING

from perfbench.history.since import ChangeRow, change_rows, newest_first
from perfbench.history.configured import NONE, configured_history, make_history, open_history
from perfbench.history.configured import upgrade_history
from perfbench.history.frames import history_frame
from perfbench.history.from_run import Place, history_run
from perfbench.history.nouns import HistoryRun, RunInfo, SeriesKey
from perfbench.history.prune import PrunePolicy, StoredRun, to_prune

if TYPE_CHECKING:
    # Its module needs SQLAlchemy, which is imported where a history is opened.
    from perfbench.history.store import History
    from perfbench.history.writing import Added
