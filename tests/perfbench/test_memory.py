"""What a step allocated: the table, the profiler's hooks, and how a trace shows it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from perfbench.records.kernel_table import Kernels
from perfbench.records.memory_table import Memory, MemoryRow, table_of_memory
from perfbench.tracing import memory_diff
from perfbench.tracing.diff import Traced, TraceDiff
from perfbench.worker import memory

MIB = 2**20


def held_by(events: list[tuple[str, int, int]], start: int = 1000) -> Memory:
    """Of an allocator that held ``start`` bytes before."""
    totals, with_total = start, []
    for owner, address, size in events:
        totals += size
        with_total.append((owner, address, size, totals))
    return table_of_memory(with_total)


def test_the_peak_names_what_was_alive_then() -> None:
    """a and b are alive together; c is larger than either, and comes when both are gone."""
    found = held_by(
        [
            ("a", 1, 100),
            ("b", 2, 50),
            ("a", 1, -100),
            ("b", 2, -50),
            ("c", 1, 120),
            ("d", 3, 10),
            ("d", 3, -10),
        ]
    )
    assert found.peak_bytes == 150 and found.kept_bytes == 120
    assert {name: row.at_peak_bytes for name, row in found.rows.items()} == {
        "a": 100,
        "b": 50,
        "c": 0,
        "d": 0,
    }
    assert found.rows["c"].allocated_bytes == 120 and found.rows["d"].count == 1


def test_memory_of_before_that_is_freed_lowers_what_is_held() -> None:
    found = held_by([("free", 9, -40), ("a", 1, 30)])
    assert found.peak_bytes == 0 and found.kept_bytes == -10
    assert found.rows["a"].at_peak_bytes == 0


def test_an_address_that_is_used_again_belongs_to_its_new_owner() -> None:
    found = held_by([("a", 1, 30), ("a", 1, -30), ("b", 1, 30), ("c", 2, 5)])
    assert found.rows["b"].at_peak_bytes == 30 and found.rows["a"].at_peak_bytes == 0


def test_a_release_that_nobody_saw_is_known_from_what_the_allocator_holds() -> None:
    """a is freed in another thread between its event and b's, at the same address."""
    found = table_of_memory([("a", 1, 30, 130), ("b", 1, 40, 140)])
    assert found.peak_bytes == 40 and found.kept_bytes == 40
    assert found.rows["a"].at_peak_bytes == 0 and found.rows["b"].at_peak_bytes == 40


def step_of(rows: int) -> Callable[[], None]:
    x = torch.randn(rows, 256)

    def step() -> None:
        a = x * 2.0  # rows KiB
        b = torch.cat([a, a])  # 2 * rows KiB, a still alive
        b.sum()

    return step


def test_the_hooks_see_what_a_step_allocates_and_when() -> None:
    found, why_not = memory.profile_memory(step_of(1024), "cpu")
    assert why_not == "" and found is not None
    assert found.rows["aten::mul"].allocated_bytes == pytest.approx(MIB, rel=0.01)
    assert found.rows["aten::cat"].allocated_bytes == pytest.approx(2 * MIB, rel=0.01)
    assert found.peak_bytes == pytest.approx(3 * MIB, rel=0.01)
    assert abs(found.kept_bytes) < 1024
    smaller, _ = memory.profile_memory(step_of(512), "cpu")
    assert smaller is not None and smaller.peak_bytes == pytest.approx(1.5 * MIB, rel=0.01)


def test_a_step_without_memory_or_with_too_many_events_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert memory.profile_memory(lambda: None, "cpu") == (None, "the step allocated nothing")
    monkeypatch.setattr(memory, "MAX_EVENTS", 3)
    found, why_not = memory.profile_memory(step_of(8), "cpu")
    assert found is None and "memory is recorded up to 3" in why_not


def traced(name: str, held: Memory | None, absent: str = "") -> Traced:
    kernels = Kernels.model_validate(
        {
            "device": "cpu",
            "rows": {"aten::mm": {"count": 1, "seconds": 1e-3}},
            "chrome_absent": "none",
        }
    )
    return Traced(
        name=name, kernels=kernels.model_copy(update={"memory": held, "memory_absent": absent})
    )


def held(peak_mib: int) -> Memory:
    row = MemoryRow(count=2, allocated_bytes=peak_mib * MIB, at_peak_bytes=peak_mib * MIB)
    rows = {f"aten::op{n}": row.model_copy(update={"at_peak_bytes": n * MIB}) for n in range(12)}
    return Memory(peak_bytes=peak_mib * MIB, kept_bytes=0, rows={**rows, "nsa::selected": row})


def test_both_sides_stand_next_to_one_another_largest_first() -> None:
    text = TraceDiff(
        cell_id="x", base=traced("a", held(100)), candidate=traced("b", held(300))
    ).to_markdown()
    assert "peak 100 MiB above its start" in text and "peak 300 MiB above its start" in text
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    (first,) = [line for line in lines if "nsa::selected" in line]
    assert first == "| `nsa::selected` | 100 | 100 | 2 | 300 | 300 | 2 |"
    assert "3 more operators allocated less." in text
    assert "\n\n\n" not in text


def test_a_trace_of_before_and_one_without_memory_are_shown_as_they_are() -> None:
    older = TraceDiff(cell_id="x", base=None, candidate=traced("b", None)).to_markdown()
    assert "memory" not in older
    absent = TraceDiff(cell_id="x", base=None, candidate=traced("b", None, "why")).to_markdown()
    assert "memory of the candidate's step: not recorded, why" in absent
    assert memory_diff.render_markdown(None, None) == ""
