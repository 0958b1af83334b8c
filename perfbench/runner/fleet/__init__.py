"""Measures on the cards of a cluster: the rows of all of them come into one run file."""

from perfbench.runner.fleet.fleet import Fleet
from perfbench.runner.fleet.measure import run_on_fleet
from perfbench.runner.fleet.opening import FleetOptions, open_fleet
