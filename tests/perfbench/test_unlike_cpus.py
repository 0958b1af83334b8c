"""Two CPUs that are not alike are INCOMPARABLE: by how many there are, and which.

Row of the faults: unlike CPUs compared.
"""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from perfbench.errors import Exit
from perfbench.gate import Judgement
from perfbench.gate.comparison import compare
from perfbench.gate.judging import judge
from perfbench.machine import environment
from perfbench.matrix import GatePolicy
from perfbench.records import Environment, Verdict
from tests.perfbench import builders as b

POLICY = GatePolicy()
ARM = "processor\t: {0}\nCPU implementer\t: {1}\nCPU part\t: {2}\n\n"


def judged(here: Environment, then: Environment) -> Judgement:
    run = b.make_run(b.cpu_cells(), gpu=False)
    base = b.baseline_of(b.with_manifest(run, environment=then))
    return judge(b.with_manifest(run, environment=here), base, POLICY)


def test_another_number_of_cpus_is_incomparable() -> None:
    two, many = (b.environment(gpu=False, cpu_count=count) for count in (2, 64))
    assert judged(two, two).exit_code is Exit.OK
    found = judged(many, two)
    assert found.exit_code is Exit.ENVIRONMENT
    assert "cpu_count: 2 -> 64" in found.headline and found.of(Verdict.INCOMPARABLE)


def test_compare_refuses_it_too() -> None:
    run = b.make_run(b.cpu_cells(), gpu=False)
    many = b.with_manifest(run, environment=b.environment(gpu=False, cpu_count=64))
    found = compare(run, many, POLICY, paired=False)
    assert found.exit_code is Exit.ENVIRONMENT and "cpu_count: 2 -> 64" in found.headline


def test_a_run_resumed_on_more_cpus_mixes_two_machines() -> None:
    run = b.make_run(b.cpu_cells(), gpu=False)
    mixed = b.resumed(run, environment=b.environment(gpu=False, cpu_count=64))
    assert judge(mixed, None, POLICY).exit_code is Exit.ENVIRONMENT


def test_the_host_of_a_card_may_have_other_cpus() -> None:
    run = b.small_run()
    other = b.with_manifest(run, environment=b.environment(cpu_count=64))
    assert judge(other, b.baseline_of(run), POLICY).exit_code is Exit.OK


def test_an_older_baseline_did_not_hold_it() -> None:
    run = b.make_run(b.cpu_cells(), gpu=False)
    base = b.baseline_of(run)
    known = {key: value for key, value in base.environment.items() if key != "cpu_count"}
    older = base.model_copy(update={"environment": known})
    assert judge(run, older, POLICY).exit_code is Exit.OK


def named(folder: Path, *cores: tuple[str, str]) -> str:
    info = folder / "cpuinfo"
    info.write_text("".join(ARM.format(n, *core) for n, core in enumerate(cores)), encoding="ascii")
    return environment.cpu_name(info)


def test_arm_is_named_by_implementer_and_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "processor", lambda: "aarch64")
    n1 = named(tmp_path, ("0x41", "0xd0c"), ("0x41", "0xd0c"))
    v2 = named(tmp_path, ("0x41", "0xd4f"))
    assert n1 == "aarch64, implementer 0x41, part 0xd0c"
    assert v2 == "aarch64, implementer 0x41, part 0xd4f"
    mixed = named(tmp_path, ("0x41", "0xd05"), ("0x41", "0xd0b"))
    assert mixed == "aarch64, implementer 0x41, part 0xd05 + 0xd0b"
    one, two = (b.environment(gpu=False, device_name=name) for name in (n1, v2))
    assert judged(two, one).exit_code is Exit.ENVIRONMENT


def test_other_processors_keep_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("model name\t: \nmodel name\t: AMD EPYC 7B13\nCPU part : 0xd0c\n")
    assert environment.cpu_name(info) == "AMD EPYC 7B13"
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "")
    assert environment.cpu_name(tmp_path / "missing") == "unknown CPU"
