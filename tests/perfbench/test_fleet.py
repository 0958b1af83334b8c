"""A fleet without a cluster: who may measure, where cells go, and what the gate makes of cards."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from nsa.capability import assumed
from perfbench.errors import Exit, PerfbenchError
from perfbench.gate import judge, promote, rows_by_cell, usable
from perfbench.gate.cards import between_session_sd
from perfbench.gate.coverage import paired_rows
from perfbench.matrix import GatePolicy
from perfbench.records import Baseline, CardLine, Environment, Job, Run, Verdict
from perfbench.runner.executor import CardLost
from perfbench.runner.fleet import FleetOptions, run_on_fleet
from perfbench.runner.fleet.agent import versions_here
from perfbench.runner.fleet.card import FleetCard
from perfbench.runner.fleet.fleet import Fleet, greet_all
from perfbench.runner.fleet.ray_links import num_cards
from perfbench.runner.fleet.wanted import CardsWanted
from perfbench.runner.run import RunSpec
from tests.perfbench import builders as b
from tests.perfbench.plan_cases import CODE, planned_from
from tests.perfbench.runner_cases import HERE, TEXT, FakeExecutor

ONE, TWO = "ab" * 32, "cd" * 32
POLICY = GatePolicy()


class FakeLink:
    """An agent in this process; ``dies`` after so many measured jobs."""

    def __init__(self, node: str, *, dies: int = 10**9, **facts: Any) -> None:
        self.node = self.cpu_card = node
        self._dies, self._executor = dies, FakeExecutor()
        self.facts: dict[str, Any] = {
            "host": node,
            "environment": HERE.model_dump(),
            "capability": asdict(assumed("none")),
            "versions": versions_here(),
            "warning": "",
            **facts,
        }
        self.jobs: list[Job] = []
        self.blocks = self.closed = 0

    def ask(self, text: str, timeout_s: float) -> str:
        request = json.loads(text)
        found: object = None
        if request["op"] == "hello":
            found = self.facts
        elif request["op"] == "new_block":
            self.blocks += 1
        elif request["op"] == "execute":
            self.jobs.append(Job.model_validate(request["job"]))
            if len(self.jobs) > self._dies:
                raise CardLost("the cable was pulled")
            found = self._executor.execute(self.jobs[-1]).model_dump()
        return json.dumps({"ok": found})

    def close(self) -> None:
        self.closed += 1


def greeted(*links: FakeLink, say: Callable[[str], None] = print) -> Fleet:
    return greet_all([FleetCard(link) for link in links], {}, 5.0, say)


def spec_with(fleet: Fleet, **changes: Any) -> RunSpec:
    matrix, plan = planned_from(TEXT)
    words = ["perfbench", "run", "m.yaml", "--executor", "ray"]
    lines = [card.line for card in fleet.cards]
    return RunSpec(plan, matrix, HERE, CODE, words, 7, cards=lines, **changes)


def test_cells_that_are_set_next_to_each_other_lie_on_one_card(tmp_path: Path) -> None:
    """Forward and step of a length, and its dense twin: 4 cells; three lengths on two cards."""
    links = FakeLink("n1"), FakeLink("n2")
    fleet = greeted(*links)
    done = run_on_fleet(spec_with(fleet), fleet, runs_dir=tmp_path)
    assert done.missing == [] and len(done.run.replicates) == 36
    homes = {(row.axes.seq_len, row.node) for row in done.run.replicates}
    assert {length for length, _ in homes} == {128, 256, 512} and len(homes) == 3
    assert sorted(len(link.jobs) for link in links) == [12, 24]
    assert all(link.blocks == 3 for link in links), "a fresh server for each block"


def test_a_lost_card_s_cells_are_measured_whole_elsewhere(tmp_path: Path) -> None:
    bad, good = FakeLink("bad", dies=5), FakeLink("good")
    fleet = greeted(bad, good)
    done = run_on_fleet(spec_with(fleet), fleet, runs_dir=tmp_path)
    (moved,) = done.run.resumed
    assert "bad" in moved.reason and "the cable was pulled" in moved.reason and bad.closed
    rows = {cell_id: usable(found) for cell_id, found in rows_by_cell(done.run).items()}
    assert all({row.node for row in found} == {"good"} for found in rows.values())
    assert all(len(found) == 3 for found in rows.values()) and len(rows) == 12
    assert len(done.run.replicates) == 36 + 5


def test_the_last_card_lost_ends_the_run_with_the_command_that_resumes(tmp_path: Path) -> None:
    fleet = greeted(FakeLink("bad", dies=5))
    with pytest.raises(PerfbenchError, match=r"every card .* is lost \(node bad\)") as caught:
        run_on_fleet(spec_with(fleet), fleet, runs_dir=tmp_path)
    assert caught.value.exit_code is Exit.ENVIRONMENT and "--executor ray --resume" in str(
        caught.value
    )


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (
            {"versions": {"perfbench": "0" * 64, "nsa": versions_here()["nsa"]}},
            "perfbench/ has other",
        ),
        ({"versions": {}}, "another source tree, perfbench/ has other files"),
        ({"environment": HERE.model_copy(update={"torch": "2.0"}).model_dump()}, "torch 2.0, not"),
        ({"environment": {"gpu_slug": "cpu"}}, "words of another perfbench"),
        (
            {"environment": HERE.model_copy(update={"nsa_settings": {"NSA_X": "1"}}).model_dump()},
            "settings NSA_X=1, not",
        ),
    ],
)
def test_a_node_that_is_not_alike_is_left_out_by_name(facts: dict[str, Any], words: str) -> None:
    odd, said = FakeLink("odd", **facts), list[str]()
    fleet = greeted(FakeLink("n1"), odd, FakeLink("n2"), say=said.append)
    assert [card.node for card in fleet.cards] == ["n1", "n2"] and odd.closed
    (line,) = said
    assert line.startswith("odd: ") and words in line and "\n" not in line


def test_the_next_card_stands_in_for_one_that_cannot_measure() -> None:
    """As after a node's death, which its cluster has not noticed; no third card is taken."""
    dead, taken, said = FakeLink("dead", versions={}), list[str](), list[str]()

    def offered() -> Iterator[FleetCard]:
        for link in (dead, FakeLink("n2"), FakeLink("n3")):
            taken.append(link.node)
            yield FleetCard(link)

    fleet = greet_all(offered(), {}, 5.0, said.append, most=1)
    assert [card.node for card in fleet.cards] == ["n2"] and taken == ["dead", "n2"]
    assert dead.closed and [line[:5] for line in said] == ["dead:"]


def test_no_card_at_all_names_every_reason() -> None:
    one, other = FakeLink("n1", versions={}), FakeLink("n2", environment={})
    with pytest.raises(PerfbenchError, match="n1: another source tree.*n2: it answers") as caught:
        greeted(one, other)
    assert caught.value.exit_code is Exit.ENVIRONMENT


@pytest.mark.parametrize(
    ("resources", "count"),
    [
        ({"GPU": 8.0, "CPU": 96.0, "accelerator_type:H200": 1.0}, 8),
        ({"GPU": 8.0, "accelerator_type:H100": 1.0}, 0),
        ({"GPU": 2.0}, 2),  # the agent looks
        ({"CPU": 96.0}, 0),
    ],
)
def test_cards_that_match_the_target(resources: dict[str, float], count: int) -> None:
    assert num_cards(resources, CardsWanted("H200", 1, is_cpu=False)) == count
    assert num_cards(resources, CardsWanted("none", 1, is_cpu=True)) == int("CPU" in resources)


@pytest.mark.parametrize(
    ("executor", "cards", "words", "said"),
    [
        ("kubernetes", None, [], "none of local, ray, slurm"),
        ("local", 2, [], "--cards and --executor-option are for a fleet"),
        ("ray", None, ["address"], "no KEY=VALUE"),
    ],
)
def test_options_that_would_be_ignored(
    executor: str, cards: int | None, words: list[str], said: str
) -> None:
    with pytest.raises(PerfbenchError, match=said) as caught:
        FleetOptions.parsed(executor, cards, words, Path("runs"))
    assert caught.value.exit_code is Exit.USAGE


# What the gate makes of cards.


def environment_of(card: str) -> Environment:
    return b.environment(gpu_uuid_sha256=card)


def fleet_run() -> Run:
    """`small_run` on a fleet of two cards, all of it on the first."""
    run = b.small_run(replicates=3)
    cards = [
        CardLine(node=node, device_uuid_sha256=uuid, environment=environment_of(uuid))
        for node, uuid in (("n1", ONE), ("n2", TWO))
    ]
    rows = [row.model_copy(update={"node": "n1"}) for row in run.replicates]
    return b.with_rows(b.with_manifest(run, cards=cards), rows)


def made_on(card: str, base: Baseline) -> Baseline:
    cells = {name: cell.model_copy(update={"cards": [card]}) for name, cell in base.cells.items()}
    return base.model_copy(update={"cells": cells})


def on_card(run: Run, cell_id: str, card: str, replicates: tuple[int, ...] = (0, 1, 2)) -> Run:
    node = {ONE: "n1", TWO: "n2"}[card]
    change = {"device_uuid_sha256": card, "node": node}
    return b.with_rows(
        run,
        [
            row.model_copy(update=change)
            if row.cell_id == cell_id and row.replicate in replicates
            else row
            for row in run.replicates
        ],
    )


def test_replicates_on_two_cards_are_compared_with_nothing() -> None:
    run = fleet_run()
    cell_id = run.manifest.cells[0].cell_id
    base, mixed = b.baseline_of(run), on_card(run, cell_id, TWO, (2,))
    judged = {one.cell_id: one for one in judge(mixed, base, POLICY).cells}
    assert judged[cell_id].verdict is Verdict.INCOMPARABLE
    assert (
        "replicates ran on 2 cards" in judged[cell_id].reason
        and "n2 has 2" in judged[cell_id].reason
    )
    assert all(one.verdict is Verdict.SAME for name, one in judged.items() if name != cell_id)
    alone = {one.cell_id: one for one in judge(mixed, None, POLICY).cells}
    assert "2 cards" in alone[cell_id].reason and alone[cell_id].verdict is None
    with pytest.raises(PerfbenchError, match="1 cells are of several cards"):
        promote(mixed, Path("never.json"))


def test_a_cell_whole_on_another_card_is_compared_and_the_note_says_so() -> None:
    run = fleet_run()
    cell_id = run.manifest.cells[0].cell_id
    base = made_on(ONE, b.baseline_of(run))
    judgement = judge(on_card(run, cell_id, TWO), base, POLICY)
    assert judgement.of(Verdict.INCOMPARABLE) == []
    assert any("a baseline of another card" in note for note in judgement.notes)
    assert not any("another card" in note for note in judge(run, base, POLICY).notes)


def test_the_variance_of_one_card_s_sessions_is_not_that_of_two_cards() -> None:
    run = fleet_run()
    cell_id = run.manifest.cells[0].cell_id
    base = made_on(ONE, b.baseline_of(run, night_log_sd=0.001)).cells[cell_id]
    assert between_session_sd(base, run.of_cell(cell_id)) == 0.001
    elsewhere = on_card(run, cell_id, TWO).of_cell(cell_id)
    assert between_session_sd(base, elsewhere) == 0.01, "what is assumed where none was measured"


def test_a_slow_card_takes_its_own_cells_alone() -> None:
    run = fleet_run()
    cell_id, other = (cell.cell_id for cell in run.manifest.cells[:2])
    lines = [
        b.sentinel("gemm", block, rate, device_uuid_sha256=card, node=node)
        for block in range(3)
        for card, node, rate in ((ONE, "n1", 700e12), (TWO, "n2", 500e12))
    ]
    run = b.with_manifest(on_card(run, cell_id, TWO), sentinels=["gemm"])
    run = run.model_copy(update={"sentinels": lines})
    base = b.baseline_of(run).model_copy(update={"sentinels": {"gemm": [700e12] * 3}})
    judgement = judge(run, base, POLICY)
    judged = {one.cell_id: one.verdict for one in judgement.cells}
    assert judged[cell_id] is Verdict.INCOMPARABLE and judged[other] is Verdict.SAME
    (finding,) = judgement.findings
    assert "of node n2 is not as fast" in finding.reason and judgement.exit_code is Exit.ENVIRONMENT
    fewer = run.model_copy(update={"sentinels": lines[::2]})
    assert any(
        "no rate of the sentinel gemm on" in f.reason for f in judge(fewer, base, POLICY).findings
    )


def test_a_pair_is_of_one_card() -> None:
    run = fleet_run()
    cell_id = run.manifest.cells[0].cell_id
    here, there = run.of_cell(cell_id), on_card(run, cell_id, TWO, (1,)).of_cell(cell_id)
    assert list(paired_rows(run, run, here, here)) == [0, 1, 2]
    assert list(paired_rows(run, run, here, there)) == [0, 2]
