"""Measures on the cards of a cluster: the rows of all of them come into one run file."""

from perfbench.runner.fleet.card import CardFacts, CardLink, FleetCard, RemoteExecutor
from perfbench.runner.fleet.fleet import Fleet, FleetVersions
from perfbench.runner.fleet.measure import run_on_fleet
from perfbench.runner.fleet.opening import EXECUTORS, FleetOptions, open_fleet
