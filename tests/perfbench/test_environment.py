"""Which GPU CUDA will see, whether it fits the matrix, who else computes on it, and which code is
measured.
"""

import os
import pathlib
import subprocess
import sys
from types import SimpleNamespace

import pytest

from nsa import capability
from perfbench.errors import Exit, PerfbenchError
from perfbench.machine import capability_here, environment, gpu, nvml
from perfbench.machine.environment import check_target, collect_environment, visible_gpu
from perfbench.machine.gpu import gpu_lock, refuse_busy, slug
from perfbench.machine.source import source_of
from perfbench.matrix.schema import Target
from tests.perfbench.fake_nvml import Card, FakeNvml

FIRST = Card(uuid="GPU-8f3a0001-0000-0000-0000-000000000000")
SECOND = Card(uuid="GPU-8f3b0002-0000-0000-0000-000000000000")
SMALL = Card(name="NVIDIA T400", uuid="GPU-11110003-0000-0000-0000-000000000000")
MIG = Card(
    name="NVIDIA H100 80GB HBM3 MIG 1g.10gb", uuid="MIG-aaaa0001-0000-0000-0000-000000000000"
)
SLICED = Card(uuid="GPU-22220004-0000-0000-0000-000000000000", mig=[MIG], mig_mode=True)


def first_visible(
    listed: str | None, *cards: Card, order: str | None = None
) -> tuple[str | None, str]:
    environ = {
        k: v
        for k, v in (("CUDA_VISIBLE_DEVICES", listed), ("CUDA_DEVICE_ORDER", order))
        if v is not None
    }
    found, reason = visible_gpu(module=FakeNvml(*cards), environ=environ)
    assert (found is None) == bool(reason)
    return (found.uuid if found else None), reason


@pytest.mark.parametrize(
    ("listed", "uuid"),
    [
        (None, FIRST.uuid),
        ("0", FIRST.uuid),
        ("1", SECOND.uuid),
        ("1,0", SECOND.uuid),
        (" 1 , 0", SECOND.uuid),
        ("1,-1", SECOND.uuid),
        ("1x", SECOND.uuid),
        (SECOND.uuid, SECOND.uuid),
        ("GPU-8f3b", SECOND.uuid),
        (f"{SECOND.uuid},GPU-nonsense", SECOND.uuid),
    ],
)
def test_forms_of_cuda_visible_devices(listed: str | None, uuid: str) -> None:
    assert first_visible(listed, FIRST, SECOND) == (uuid, "")


@pytest.mark.parametrize(
    ("listed", "reason"),
    [
        ("", "empty"),
        ("-1", "none of the 2 GPUs"),
        ("2", "none of the 2 GPUs"),
        ("-1,0", "none of the 2 GPUs"),
        ("0,0", "repeats"),
        ("GPU-8f3", "fits 2 GPUs"),
        ("GPU-ffff", "fits no GPU"),
        ("banana", "fits no GPU"),
        (",0", "fits no GPU"),
    ],
)
def test_what_hides_every_gpu(listed: str, reason: str) -> None:
    uuid, why = first_visible(listed, FIRST, SECOND)
    assert uuid is None and reason in why


def test_fastest_first_is_ambiguous_only_among_different_cards() -> None:
    uuid, why = first_visible("1", SMALL, FIRST)
    assert uuid is None and "CUDA_DEVICE_ORDER=PCI_BUS_ID" in why
    assert first_visible("1", SMALL, FIRST, order="PCI_BUS_ID") == (FIRST.uuid, "")
    assert first_visible(None, SMALL, FIRST)[0] is None
    assert first_visible(FIRST.uuid, SMALL, FIRST) == (FIRST.uuid, "")


def test_mig_slices() -> None:
    assert first_visible(None, SLICED) == (MIG.uuid, "")
    assert first_visible("0", SLICED) == (MIG.uuid, "")
    assert first_visible("MIG-aaaa", FIRST, SLICED) == (MIG.uuid, "")


@pytest.mark.parametrize("code", [4, 9, 12, 18])
def test_nvml_that_cannot_be_opened_is_a_reason(code: int) -> None:
    found, reason = visible_gpu(module=FakeNvml(FIRST, fails={"nvmlInit": code}), environ={})
    assert found is None and "NVML_ERROR_" in reason


def test_a_driver_without_a_gpu() -> None:
    assert first_visible(None)[1] == "NVML finds the driver, but no GPU"
    found, reason = visible_gpu(
        module=FakeNvml(FIRST, fails={"nvmlDeviceGetHandleByIndex": 15}), environ={}
    )
    assert found is None and "GPU_IS_LOST" in reason


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-80gb-hbm3"),
        ("NVIDIA GeForce RTX 4090", "geforce-rtx-4090"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
        ("../../etc/passwd", "etc-passwd"),
        ("NVIDIA", "nvidia"),
        ("Ünïcode|/\n", "n-code"),
        ("", "gpu"),
    ],
)
def test_slug(name: str, expected: str) -> None:
    assert slug(name) == expected


@pytest.mark.parametrize(
    ("wanted", "name", "fits"),
    [
        ("H100", "NVIDIA H100 80GB HBM3", True),
        ("h100 80gb", "NVIDIA H100 80GB HBM3", True),
        ("RTX 4090", "NVIDIA GeForce RTX 4090", True),
        ("rtx4090", "NVIDIA GeForce RTX 4090", True),
        ("A10", "NVIDIA A100-SXM4-80GB", False),
        ("L40", "NVIDIA L40S", False),
        ("H100", "NVIDIA H200", False),
        ("-", "NVIDIA H200", False),
    ],
)
def test_target_names_whole_words(wanted: str, name: str, fits: bool) -> None:
    assert gpu.matches(wanted, name) is fits


def fit(target: Target, *cards: Card) -> environment.TargetFit:
    return check_target(target, module=FakeNvml(*cards), environ={})


def test_target_none_fits_everywhere_without_asking_nvml() -> None:
    nvml = FakeNvml(fails={"nvmlInit": 12})
    assert check_target(Target(gpu="none"), module=nvml, environ={}) == environment.TargetFit(
        "cpu", None
    )
    assert nvml.calls == []


def test_target_that_fits() -> None:
    found = fit(Target(gpu="H100"), FIRST)
    assert (
        found.device == "cuda"
        and found.gpu is not None
        and found.gpu.uuid == FIRST.uuid
        and not found.warning
    )


@pytest.mark.parametrize("on_mismatch", ["refuse", "warn", "skip"])
@pytest.mark.parametrize(
    ("cards", "count", "got"),
    [
        ((SMALL,), 1, "NVIDIA T400"),
        ((FIRST,), 2, "1 x NVIDIA H100"),
        ((FIRST, SECOND, SECOND), 4, "3 x NVIDIA H100"),
    ],
)
def test_wrong_gpu(on_mismatch: str, cards: tuple[Card, ...], count: int, got: str) -> None:
    target = Target.model_validate({"gpu": "H100", "count": count, "on_mismatch": on_mismatch})
    if on_mismatch == "refuse":
        with pytest.raises(PerfbenchError, match="wants") as caught:
            fit(target, *cards)
        assert caught.value.exit_code is Exit.ENVIRONMENT
        assert got in str(caught.value) and "Next:" in str(caught.value)
        return
    found = fit(target, *cards)
    assert got in found.warning and found.skip is (on_mismatch == "skip")


def test_absent_gpu_is_refused_under_warn_too() -> None:
    for on_mismatch in ("refuse", "warn"):
        with pytest.raises(PerfbenchError, match="got no GPU") as caught:
            fit(Target.model_validate({"gpu": "H100", "on_mismatch": on_mismatch}))
        assert caught.value.exit_code is Exit.ENVIRONMENT
    assert fit(Target(gpu="H100", on_mismatch="skip")).skip


def test_busy_gpu_is_refused() -> None:
    mine = SimpleNamespace(pid=os.getpid(), usedGpuMemory=1)
    other = SimpleNamespace(pid=4321, usedGpuMemory=5 * 2**20)
    handle = gpu.GpuHandle(FIRST.uuid, FIRST.name, 0)
    refuse_busy(handle, FakeNvml(Card(uuid=FIRST.uuid, processes=[mine])))
    with pytest.raises(PerfbenchError, match=r"4321 \(python-4321, 5 MiB\)") as caught:
        refuse_busy(handle, FakeNvml(Card(uuid=FIRST.uuid, processes=[mine, other])))
    assert caught.value.exit_code is Exit.ENVIRONMENT
    blind = FakeNvml(FIRST, fails={"nvmlDeviceGetComputeRunningProcesses": 3})
    assert gpu.busy_processes(FIRST.uuid, blind) == ([], "NVML_ERROR_NOT_SUPPORTED")


def test_our_own_descendants_are_no_company_and_who_started_us_is() -> None:
    handle = gpu.GpuHandle(FIRST.uuid, FIRST.name, 0)
    grandchild = (
        "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import os;"
        " print(os.getpid(), flush=True); input()'])"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", grandchild], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    pids = [child.pid, int(child.stdout.readline()), os.getpid()]
    try:
        listed = [SimpleNamespace(pid=pid, usedGpuMemory=1) for pid in pids]
        refuse_busy(handle, FakeNvml(Card(uuid=FIRST.uuid, processes=listed)))
        parent = SimpleNamespace(pid=os.getppid(), usedGpuMemory=1)
        with pytest.raises(PerfbenchError, match=f"{parent.pid} .python"):
            refuse_busy(handle, FakeNvml(Card(uuid=FIRST.uuid, processes=[*listed, parent])))
    finally:
        child.communicate("\n")


def test_a_process_that_just_ended_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(uuid=FIRST.uuid, processes=[SimpleNamespace(pid=2**30, usedGpuMemory=None)])
    monkeypatch.setattr(gpu.time, "sleep", lambda seconds: card.processes.clear())
    refuse_busy(gpu.GpuHandle(FIRST.uuid, FIRST.name, 0), FakeNvml(card), patience_s=5.0)
    assert card.processes == []


@pytest.mark.parametrize(("code", "name"), [(3, "NOT_SUPPORTED"), (4, "NO_PERMISSION")])
def test_unknown_company_is_a_warning(code: int, name: str) -> None:
    blind = FakeNvml(FIRST, fails={"nvmlDeviceGetComputeRunningProcesses": code})
    found = check_target(Target(gpu="H100"), module=blind, environ={})
    assert found.gpu is not None and not found.skip
    assert (
        name in found.warning
        and "cannot list the processes" in found.warning
        and FIRST.name in found.warning
    )
    refuse_busy(found.gpu, blind)
    other = check_target(
        Target.model_validate({"gpu": "A100", "on_mismatch": "warn"}), module=blind, environ={}
    )
    assert "matrix wants A100" in other.warning and name in other.warning


def test_gpu_lock_is_exclusive_by_uuid_and_ends(tmp_path: pathlib.Path) -> None:
    with gpu_lock(FIRST.uuid, tmp_path):
        with gpu_lock(SECOND.uuid, tmp_path):
            pass
        with (
            pytest.raises(PerfbenchError, match="another perfbench") as caught,
            gpu_lock(FIRST.uuid, tmp_path),
        ):
            pass
        assert caught.value.exit_code is Exit.ENVIRONMENT
    with gpu_lock(FIRST.uuid, tmp_path):
        pass
    assert all(FIRST.uuid not in file.name for file in tmp_path.iterdir())
    with (
        pytest.raises(PerfbenchError, match="cannot be opened"),
        gpu_lock(FIRST.uuid, tmp_path / "missing"),
    ):
        pass


def test_collect_on_a_cpu_has_nulls_for_the_gpu() -> None:
    found = collect_environment("cpu", module=FakeNvml(fails={"nvmlInit": 12}))
    assert (found.gpu_slug, found.gpu_uuid_sha256, found.driver, found.cuda) == (
        "cpu",
        None,
        None,
        None,
    )
    assert found.device_name == found.cpu_name and found.torch[0].isdigit() and found.cpu_count >= 1


def test_collect_on_a_gpu_hides_the_uuid() -> None:
    found = collect_environment("cuda", module=FakeNvml(FIRST), environ={})
    assert (found.gpu_slug, found.driver) == ("h100-80gb-hbm3", "570.86.10")
    assert found.gpu_uuid_sha256 == gpu.uuid_sha256(FIRST.uuid)
    assert FIRST.uuid not in found.model_dump_json()
    assert found.clock_policy == "SM at most 1980 MHz, application clock 1755 MHz, persistence on"
    with pytest.raises(PerfbenchError, match="no GPU to measure on") as caught:
        collect_environment("cuda", module=FakeNvml(FIRST, fails={"nvmlInit": 18}), environ={})
    assert caught.value.exit_code is Exit.ENVIRONMENT


def test_variables() -> None:
    assert (
        environment.no_color({"NO_COLOR": "1"})
        and not environment.no_color({"NO_COLOR": ""})
        and not environment.no_color({})
    )
    assert (
        environment.step_summary({"GITHUB_STEP_SUMMARY": "/x/y"}) == pathlib.Path("/x/y")
        and environment.step_summary({}) is None
    )


def test_cpu_name(tmp_path: pathlib.Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor : 0\nmodel name\t: AMD EPYC 7B13\n")
    assert environment.cpu_name(info) == "AMD EPYC 7B13"
    assert environment.cpu_name(tmp_path / "missing")


def git(folder: pathlib.Path, *args: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", "-C", str(folder), *identity, *args], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def checkout(tmp_path: pathlib.Path) -> pathlib.Path:
    git(tmp_path, "init", "-q", "-b", "main")
    (tmp_path / "code.py").write_text("x = 1\n")
    (tmp_path / ".gitignore").write_text("ignored/\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    return tmp_path


def test_source_of_a_clean_checkout(checkout: pathlib.Path) -> None:
    found = source_of(checkout)
    assert (found.commit, found.dirty_sha256, found.branch, found.reason) == (
        git(checkout, "rev-parse", "HEAD"),
        None,
        "main",
        None,
    )
    assert source_of(checkout, found.commit[:8]) == found  # type: ignore[index]


def test_every_change_of_the_code_changes_the_dirty_hash(checkout: pathlib.Path) -> None:
    seen = {source_of(checkout).dirty_sha256}
    (checkout / "code.py").write_text("x = 2\n")
    seen.add(source_of(checkout).dirty_sha256)
    (checkout / "new.py").write_text("y = 1\n")
    seen.add(source_of(checkout).dirty_sha256)
    (checkout / "new.py").write_text("y = 2\n")
    seen.add(source_of(checkout).dirty_sha256)
    assert len(seen) == 4
    assert source_of(checkout).dirty_sha256 == source_of(checkout).dirty_sha256


def test_results_are_no_part_of_the_measured_code(checkout: pathlib.Path) -> None:
    (checkout / "reports").mkdir()
    (checkout / "reports" / "new.json").write_text("{}")
    assert source_of(checkout).dirty_sha256 is None


def test_source_where_git_cannot_tell(
    checkout: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    bare = tmp_path_factory.mktemp("bare")
    found = source_of(bare)
    assert found.commit is None and "--source-commit" in (found.reason or "")
    given = source_of(bare, "abc123")
    assert given.commit == "abc123" and "not proved" in (given.reason or "")
    installed = checkout / "ignored"
    installed.mkdir()
    assert "installed copy" in (source_of(installed).reason or "")
    empty = tmp_path_factory.mktemp("unborn")
    git(empty, "init", "-q")
    assert source_of(empty).commit is None
    assert source_of(bare / "missing").commit is None


def test_a_commit_that_git_contradicts_is_refused(checkout: pathlib.Path) -> None:
    with pytest.raises(PerfbenchError, match="omit the option") as caught:
        source_of(checkout, "deadbeef")
    assert caught.value.exit_code is Exit.USAGE


def test_source_without_git(checkout: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    found = source_of(checkout, "abc123")
    assert found.commit == "abc123" and "git cannot be started" in (found.reason or "")


def test_the_plan_of_a_gpu_knows_whether_triton_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The parent asks NVML and imports no torch; a plan that did not look would route otherwise
    than the child that measures.
    """
    opened = FakeNvml(FIRST)
    opened.nvmlDeviceGetCudaComputeCapability = lambda handle: (9, 0)  # type: ignore[attr-defined]
    monkeypatch.setattr(nvml, "_load", lambda: opened)
    here = capability_here(fit(Target(gpu="H100"), FIRST))
    assert (
        here == capability.assumed("h100")
        and here.triton_provider
        and here.triton_provider.startswith("triton ")
    )
