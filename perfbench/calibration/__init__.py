"""Certifies the gate on stored samples, and estimates the variance between machine starts."""

from perfbench.calibration.calibration import calibration_json
from perfbench.calibration.noise import calibrate, write_calibration
from perfbench.calibration.report import render_calibration
