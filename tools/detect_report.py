"""The text of reports/detect.md around the tables of tools/detect_study.py."""

from __future__ import annotations

from collections.abc import Mapping

PAGE = """# How well `perfbench detect` finds changes

Made by

```
python -m tools.detect_study {command}
```

`--series` N is how many series are behind each number: N/4 of a delay (N/2 in a short series), N/2
of a step, a year or a drift that goes on, and N of the rest: a share moves in steps of 100/N to
400/N %. All series are generated, but those of the last section: levels of 10,000 with noise of
1 % sd where nothing else is written, so that a step of 3 % is one of 3 noise sd. How the detection
works, and what its alarms promise: [docs/detection.md](../docs/detection.md). Otava is Apache Otava
0.8.0 with its defaults (`window_len` 50, `max_pvalue` 0.001, `min_magnitude` 0); its `max_pvalue`
is of one test, not of a series, so that other settings would trade its alarms against its recall.

## Goals
{goals}

300 cells x 13 metrics x 365 points take {speed} of one core.

## Alarms in silent series of 200 points
The share of series in which anything is reported.

{silent}

## Alarms in a year of daily looks
Each silent series grows from 10 to 365 points and is looked at after each; a series counts if any
look reports anything.

{year}

## One step
200 points, one step up or down, at least 20 points from the ends. Recall: found at most 3 points
from its place. Precision: of all that is reported, the share that is a planted step. The interval
is the 95 % one of the step's size, of the steps that were found.

{steps}

## Several steps, and steps near an end
In normal noise.

{shapes}

## Delay
150 points, then a step down; a look after each new point. The delay counts points from the step on
until it is reported: 1 is the first point of the new level. `by 30 points`: the share that was
reported at all.

{delays}

## Short series
One step up in the middle; recall as above. The last column is of series without a step.

{short}

A series that has just begun, looked at after each new point, with a step of 10 sd down after so
many points. The last column is of silent series that grow from 6 to 60 points: the share in which
any look reports anything.

{young}

## Drift of 5 % over 50 points
Found: a step or a drift is reported within its time. Otava reports steps alone.

{drifts}

## Drifts while they go on
A straight line over 50 points, up or down, in normal noise, looked at after every fifth point from
its start until 50 points after its end. Seen: a step or a drift of its direction is reported within
its time. The median counts points from the drift's start.

{going}

## Public series
From the tests of Mozilla's Perfherder (9,350 points of 7 series), MongoDB's
signal-processing-algorithms and Apache Otava. The labels are what those tools report there, and no
truth; of MongoDB's only how many there are is known. perfbench takes no days of these series, so
that no weekly pattern is taken out.

{public}
"""


def report_of(command: str, speed: str, tables: Mapping[str, str]) -> str:
    """Markdown."""
    return PAGE.format(command=command, speed=speed, **tables)
