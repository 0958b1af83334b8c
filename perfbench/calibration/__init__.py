"""Certifies the gate on stored samples, and estimates the variance between machine starts."""

from perfbench.calibration.calibrate import as_json, calibrate as certify_gate
from perfbench.calibration.calibrate import render as as_markdown
