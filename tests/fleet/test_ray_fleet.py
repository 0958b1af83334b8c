"""A real Ray cluster of three nodes on this machine, whose CPUs stand for the cards."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from perfbench.commands.app import invoke
from perfbench.errors import Exit, PerfbenchError
from perfbench.records import Replicate, Status, read_run
from perfbench.runner import open_fleet
from perfbench.runner.fleet import FleetOptions
from tests.fleet.conftest import STUB, TEXT, Left, Watching, on_fleet, rows_of, spec_of

NODES: dict[str, Any] = {}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head that gives no CPU, and three nodes with one each."""
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for name in ("one", "two", "three"):
        NODES[name] = made.add_node(num_cpus=1, node_name=name)
    ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
    made.wait_for_nodes()
    yield made
    ray.shutdown()
    made.shutdown()


def of_ray(**changes: Any) -> FleetOptions:
    values = {"executor": "ray", "measure": STUB, "given": {"wait_s": "90"}}
    return FleetOptions(**{**values, **changes})


def test_a_killed_node_loses_no_cell(cluster: Cluster, tmp_path: Path, nothing_left: Left) -> None:
    """Node `two` dies after its first row; that cell is measured again, whole, on another."""
    spec, said = spec_of(TEXT), list[str]()

    def kill(row: Replicate) -> None:
        if row.node == "two" and "two" in NODES:
            gone = NODES.pop("two")
            threading.Thread(target=cluster.remove_node, args=(gone, False)).start()

    progress = Watching(kill)
    with open_fleet(of_ray(), spec.matrix.target, said.append) as fleet:
        assert {card.node for card in fleet.cards} == {"one", "two", "three"}, said
        assert fleet.environment.settings() == spec.environment.settings()
        done = on_fleet(spec, fleet, runs_dir=tmp_path, progress=progress)
        assert [card.node for card in fleet.alive] != [] and len(fleet.alive) == 2
    assert done.missing == []
    rows, cells = rows_of(done.folder), [cell.cell_id for cell in spec.plan.cells]
    assert set(rows) == {(cell_id, number) for cell_id in cells for number in range(5)}
    homes = {cell_id: {rows[cell_id, number] for number in range(5)} for cell_id in cells}
    assert all(len(nodes) == 1 for nodes in homes.values()), homes
    assert set.union(*homes.values()) == {"one", "three"}
    assert any("node two is lost" in note for note in progress.notes), progress.notes
    (moved,) = (one for one in done.run.resumed if one.moved)
    assert "node two was lost" in moved.reason and set(moved.moved) < set(cells)
    assert {line.node for line in done.run.manifest.cards} == {"one", "two", "three"}
    counted = Counter((row.cell_id, row.replicate, row.node) for row in done.run.replicates)
    assert set(counted.values()) == {1}
    caches = {(row.reason.split()[1], row.node) for row in done.run.replicates}
    assert len({cache for cache, _ in caches}) == len(caches) == 3, "a cache of each card's own"
    assert nothing_left() == []


def test_a_cell_truly_measured_by_the_command(cluster: Cluster, tmp_path: Path) -> None:
    text = TEXT.replace("[64, 128, 192]", "[64]").replace("[dense]", "[v2]\n  fa2: [off]")
    matrix = tmp_path / "m.yaml"
    text = text.replace("processes: 5", "processes: 1") + "gate: {min_replicates: 1}\n"
    matrix.write_text(text)
    words = ["run", str(matrix), "--executor", "ray", "--cards", "1", "--out", str(tmp_path)]
    assert invoke([*words, "--history", "none"]) == Exit.OK
    (folder,) = (one.parent for one in tmp_path.glob("*/run.jsonl"))
    (row,) = read_run(folder).replicates
    assert row.status is Status.OK and row.parity is not None and row.parity.ok
    assert row.node in ("one", "three") and row.node in (folder / "report.md").read_text()


def test_nobody_has_such_a_card(cluster: Cluster) -> None:
    target = spec_of(TEXT.replace("{gpu: none}", "{gpu: H200}")).matrix.target
    refused = pytest.raises(PerfbenchError, match="no node of the Ray cluster has H200: got")
    with refused as caught, open_fleet(of_ray(), target, print):
        pass
    assert caught.value.exit_code is Exit.ENVIRONMENT and "\n" not in str(caught.value)


def test_a_card_is_one_process_s(cluster: Cluster) -> None:
    """The second fleet finds every CPU taken, and says so; the first goes on."""
    target, said = spec_of(TEXT).matrix.target, list[str]()
    with open_fleet(of_ray(), target, print) as fleet:
        refused = pytest.raises(PerfbenchError, match="no answer within 3 s")
        second = open_fleet(of_ray(given={"wait_s": "3"}), target, said.append)
        with refused as caught, second:
            pass
        assert caught.value.exit_code is Exit.ENVIRONMENT
        assert fleet.cards[0].ask({"op": "new_block", "slot": 0}, 60) is None


def test_another_node_stands_in_for_one_that_has_just_died(cluster: Cluster) -> None:
    """Ray lists a dead node as alive until it has missed its heartbeats."""
    first = min(
        (one for one in ray.nodes() if one["Alive"] and "CPU" in one["Resources"]),
        key=lambda one: one["NodeID"],
    )["NodeName"]
    threading.Thread(target=cluster.remove_node, args=(NODES.pop(first), False)).start()
    target, said = spec_of(TEXT).matrix.target, list[str]()
    with open_fleet(of_ray(cards=1), target, said.append) as fleet:
        assert [card.node for card in fleet.cards] == list(NODES), said
    assert all(line.startswith(f"{first}: ") for line in said)
