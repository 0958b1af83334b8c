"""What changed in a series: steps, drifts, new segments, and which of it is news."""

from perfbench.history.detection.news import JudgedChange, Remembered, News, SeriesChanges
from perfbench.history.detection.news import judge_series
from perfbench.history.detection.series import SegmentStart
from perfbench.history.detection.shifts import Shift, find_shifts
