"""Measures one cell inside a process of its own; the only room with torch."""

from perfbench.worker.nsa_version import NSA_WITNESS
from perfbench.worker.processes import MEASURE, SERVER, kill_group
