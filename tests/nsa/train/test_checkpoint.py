"""Checkpoints: whole or not at all, whoever is killed and whatever a disk does."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from nsa.train import checkpoint, manifest
from nsa.train.checkpoint import CheckpointStore, last_good
from nsa.train.errors import TrainError, TrainExit
from nsa.train.rng import rng_state, set_rng_state

CONFIG = {"train": {"lr": 0.001, "steps": 9}, "model": {"dim": 8}}
Make = Callable[..., CheckpointStore]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Make]:
    made: list[CheckpointStore] = []

    def make(out: Path = tmp_path, **changed: Any) -> CheckpointStore:
        options: dict[str, Any] = {
            "keep": 2,
            "asynchronous": False,
            "config_sha256": "a" * 64,
            "rank": 0,
            "world_size": 1,
            "config": CONFIG,
        }
        made.append(CheckpointStore(out, **{**options, **changed}))
        made[-1].prepare()
        return made[-1]

    yield make
    for one in made:
        one.close()


def state_of(value: float) -> dict[str, Any]:
    value = float(value)
    weight = torch.nn.Parameter(torch.full((3, 4), value))
    return {
        "model": {"blocks.0.weight": weight, "empty": torch.zeros(0, 2)},
        "optimizer": {
            "exp_avg": {"blocks.0.weight": torch.full((3, 4), -value, dtype=torch.float64)},
            "step": {"blocks.0.weight": torch.tensor(value)},
        },
    }


def leaves(state: dict[str, Any]) -> list[Tensor]:
    return [t for one in state.values() for t in (leaves(one) if isinstance(one, dict) else [one])]


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(x.equal(y) for x, y in zip(leaves(a), leaves(b), strict=True))


def names(out: Path) -> list[str]:
    return sorted(one.name for one in (out / "checkpoints").iterdir())


def fails(what: Callable[[], object], *wanted: str) -> None:
    with pytest.raises(TrainError) as caught:
        what()
    assert caught.value.code is TrainExit.CHECKPOINT
    message = str(caught.value)
    assert "\n" not in message
    for one in wanted:
        assert one in message, message


@pytest.mark.parametrize("asynchronous", [False, True])
def test_loads_in_place_what_was_saved(store: Make, asynchronous: bool, tmp_path: Path) -> None:
    saving = store(asynchronous=asynchronous)
    assert saving.last_good() is None
    saved = state_of(1.5)
    saving.save(7, saved, {"loader": {"row": 3}})
    for one in leaves(saved):  # training goes on at once
        one.detach().fill_(99.0)
    saving.close()
    assert names(tmp_path) == ["last-good", "step-00000007"]
    loaded = state_of(0.0)
    addresses = [one.data_ptr() for one in leaves(loaded)]
    assert store().load(loaded) == [{"loader": {"row": 3}}]
    assert same(loaded, state_of(1.5))
    assert addresses == [one.data_ptr() for one in leaves(loaded)]
    assert last_good(tmp_path) == tmp_path / "checkpoints" / "step-00000007"


def test_the_tensors_are_staged_before_the_disk_is_written(
    store: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, save = threading.Event(), checkpoint.dcp.save

    def late(*args: Any, **kwargs: Any) -> Any:
        assert may_write.wait(60)
        return save(*args, **kwargs)

    monkeypatch.setattr(checkpoint.dcp, "save", late)
    saving, tensors = store(asynchronous=True), state_of(1.0)
    for step in (1, 2):
        for one in leaves(tensors):
            one.detach().fill_(float(step))
        may_write.clear()
        saving.save(step, tensors, {})
        assert saving.last_good() is None or step == 2
        for one in leaves(tensors):
            one.detach().fill_(-1.0)
        may_write.set()
        saving.wait()
        loaded = state_of(0.0)
        saving.load(loaded)
        assert {one.mean().item() for one in leaves(loaded) if one.numel()} == {float(step)}


def test_a_stager_that_serves_once_does(
    store: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """That of torch 2.11 closes itself after its first use; a second save failed on an H200."""
    stage = checkpoint.DefaultStager.stage

    def once(self: Any, tensors: dict[str, Tensor]) -> Any:
        staged = stage(self, tensors)
        self.close()
        return staged

    monkeypatch.setattr(checkpoint.DefaultStager, "stage", once)
    saving = store(asynchronous=True)
    for step in (1, 2, 3):
        saving.save(step, state_of(step), {})
    saving.wait()
    assert names(tmp_path) == ["last-good", "step-00000002", "step-00000003"]
    loaded = state_of(0.0)
    saving.load(loaded)
    assert same(loaded, state_of(3.0))


def test_part_of_what_was_saved_loads(store: Make) -> None:
    store().save(1, state_of(1.0), {})
    part = {"model": state_of(0.0)["model"]}
    store().load(part)
    assert same(part, {"model": state_of(1.0)["model"]})


@pytest.mark.parametrize("keep, left", [(1, [5]), (2, [4, 5]), (0, [1, 2, 3, 4, 5])])
def test_keeps_the_newest(store: Make, keep: int, left: list[int], tmp_path: Path) -> None:
    saving = store(keep=keep)
    for step in range(1, 6):
        saving.save(step, state_of(step), {})
    assert names(tmp_path) == ["last-good", *(f"step-{step:08d}" for step in left)]


def test_after_a_resume_from_an_earlier_step_the_last_good_one_is_the_new_one(
    store: Make, tmp_path: Path
) -> None:
    saving = store()
    for step in (10, 30):
        saving.save(step, state_of(step), {"run": 1})
    loaded = state_of(0.0)
    saving.load(loaded, tmp_path / "checkpoints" / "step-00000010")
    assert same(loaded, state_of(10))
    saving.save(15, state_of(-15), {"run": 2})
    assert names(tmp_path) == ["last-good", "step-00000015", "step-00000030"]
    saving.save(20, state_of(-20), {"run": 2})
    assert names(tmp_path) == ["last-good", "step-00000015", "step-00000020"]
    assert saving.load(loaded) == [{"run": 2}] and same(loaded, state_of(-20))


def test_the_last_good_one_stays_where_the_clock_was_set_back(store: Make, tmp_path: Path) -> None:
    saving = store(keep=1)
    saving.save(1, state_of(1), {})
    later = time.time() + 86_400
    os.utime(tmp_path / "checkpoints" / "step-00000001", (later, later))
    saving.save(2, state_of(2), {})
    assert saving.last_good() == tmp_path / "checkpoints" / "step-00000002"
    loaded = state_of(0)
    saving.load(loaded)
    assert same(loaded, state_of(2))


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "extra-rank0.json", "config.json"])
@pytest.mark.parametrize("harm", ["truncated", "edited", "missing"])
def test_a_damaged_file_is_named_and_another_checkpoint_offered(
    store: Make, tmp_path: Path, name: str, harm: str
) -> None:
    saving = store()
    for step in (400, 500):
        saving.save(step, state_of(step), {})
    path = tmp_path / "checkpoints" / "step-00000500" / name
    content = bytearray(path.read_bytes())
    if harm == "missing":
        path.unlink()
    else:
        content[len(content) // 2] ^= 1
        path.write_bytes(content[:-1] if harm == "truncated" else content)
    offered = tmp_path / "checkpoints" / "step-00000400"
    fails(
        lambda: saving.load(state_of(0.0)),
        str(path),
        f"resume from step-00000400 with --resume {offered}",
    )
    loaded = state_of(0.0)
    saving.load(loaded, offered)
    assert same(loaded, state_of(400))
    saving.save(500, state_of(-500), {})  # takes the place of the damaged one
    saving.load(loaded)
    assert same(loaded, state_of(-500)) and ".replaced" not in "".join(names(tmp_path))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 1}', '{"schema": 99}'])
def test_a_manifest_that_is_none(store: Make, tmp_path: Path, text: str) -> None:
    store().save(5, state_of(5), {})
    path = tmp_path / "checkpoints" / "step-00000005" / "manifest.json"
    path.write_text(text)
    fails(lambda: store().load(state_of(0.0)), str(path), "no other that is whole")


def test_another_to_load_is_named_by_the_option_of_the_command(store: Make) -> None:
    saving = store()
    saving.save(4, state_of(4), {})
    saving.save(5, state_of(5), {})
    last = saving.last_good()
    assert last is not None
    whole, damaged = (last.with_name(f"step-0000000{step}") for step in (4, 5))
    (damaged / "extra-rank0.json").write_text("")
    sampling = store(option="--checkpoint")
    fails(lambda: sampling.load(state_of(0.0)), f"take step-00000004 with --checkpoint {whole}")
    beginning = store(option="train.init_from")
    fails(lambda: beginning.load(state_of(0.0)), f"take step-00000004 with train.init_from={whole}")
    shutil.rmtree(whole)
    fails(
        lambda: sampling.load(state_of(0.0)), "no other that is whole; train until another is saved"
    )
    other = store(option="--checkpoint", config_sha256="b" * 64)
    saving.save(6, state_of(6), {})
    fails(lambda: other.load(state_of(0.0)), "or give --checkpoint PATH one of this")


def test_none_to_resume_from_and_a_pointer_to_nothing(store: Make, tmp_path: Path) -> None:
    fails(lambda: store().load(state_of(0.0)), "no checkpoint to resume from")
    store().save(5, state_of(5), {})
    (tmp_path / "checkpoints" / "last-good").write_text("step-00000099\n")
    fails(lambda: store().load(state_of(0.0)), "'step-00000099'", "step-00000005")
    fails(lambda: store().load(state_of(0.0), tmp_path / "nowhere"), "nowhere/manifest.json")


def test_another_config_is_refused_with_what_differs(store: Make) -> None:
    store().save(5, state_of(5), {})
    changed = {"train": {"lr": 0.002, "steps": 9}, "model": {"dim": 8, "heads": [2]}}
    other = store(config_sha256="b" * 64, config=changed)
    fails(
        lambda: other.load(state_of(0.0)),
        "a" * 12,
        "b" * 12,
        "model.heads null there and [2] here, train.lr 0.001 there and 0.002 here;",
    )


@pytest.mark.parametrize(
    "tensor, wanted",
    [(torch.zeros(3, 5), "float32 [3, 4]; wanted"), (torch.zeros(3, 4).double(), "float64")],
)
def test_another_model_is_refused(store: Make, tensor: Tensor, wanted: str) -> None:
    store().save(5, state_of(5), {})
    fails(
        lambda: store().load({"model": {"blocks.0.weight": tensor}}),
        "model.blocks.0.weight as",
        wanted,
    )
    fails(lambda: store().load({"model": {"bias": tensor}}), "no tensor model.bias")


def test_what_is_no_tensor_and_what_is_no_json(store: Make) -> None:
    with pytest.raises(ValueError, match="state has model.step of type int"):
        store().save(1, {"model": {"step": 3}}, {})
    with pytest.raises(ValueError, match="extra is no JSON data"):
        store().save(1, state_of(1), {"tensor": torch.zeros(1)})
    with pytest.raises(ValueError, match="world_size=2 without a process group"):
        store(world_size=2)


def full_disk(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("where", ["tensors", "extra", "manifest"])
def test_a_full_disk_leaves_the_last_good_one(
    store: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool, where: str
) -> None:
    saving = store(asynchronous=asynchronous)
    saving.save(400, state_of(400), {})
    saving.wait()
    if where == "tensors":
        monkeypatch.setattr(torch, "save", full_disk)
    elif where == "extra":
        monkeypatch.setattr(checkpoint, "write_text", full_disk)
    else:
        monkeypatch.setattr(manifest, "write_text", full_disk)
    wanted = ("step 500 is not saved", "No space left on device", "step-00000400")
    if asynchronous:
        saving.save(500, state_of(500), {})
        fails(lambda: saving.save(600, state_of(600), {}), *wanted)
        saving.save(600, state_of(600), {})
        fails(saving.wait, "step 600")
        saving.wait()  # an error is raised by one call
    else:
        fails(lambda: saving.save(500, state_of(500), {}), *wanted)
    assert names(tmp_path) == ["last-good", "step-00000400"]
    monkeypatch.undo()
    loaded = state_of(0.0)
    saving.load(loaded)
    assert same(loaded, state_of(400))
    saving.save(700, state_of(700), {})
    saving.wait()
    assert saving.last_good() == tmp_path / "checkpoints" / "step-00000700"


def test_a_full_disk_is_named_below_the_archive_that_it_cut_off(
    store: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's writer of archives speaks of positions in the file, and hides why."""

    def save(*_: object, **__: object) -> None:
        try:
            full_disk()
        finally:
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 7 vs 5")

    saving = store()
    monkeypatch.setattr(torch, "save", save)
    fails(
        lambda: saving.save(500, state_of(500), {}),
        "/checkpoints: No space left on device; the last good checkpoint is none;"
        " make room or mend the disk, then start again",
    )
    monkeypatch.undo()
    saving.save(400, state_of(400), {})
    monkeypatch.setattr(torch, "save", save)
    fails(
        lambda: saving.save(500, state_of(500), {}),
        "/checkpoints: No space left on device; the last good checkpoint is step-00000400;"
        " make room or mend the disk, then resume",
    )


def test_a_disk_that_failed_is_not_blamed_for_another_error(
    store: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(*_: object, **__: object) -> None:
        try:
            raise FileNotFoundError(errno.ENOENT, "looked for")
        finally:
            raise RuntimeError("no such type")

    monkeypatch.setattr(torch, "save", save)
    fails(lambda: store().save(500, state_of(500), {}), "RuntimeError: no such type; the last")
    usage = shutil.disk_usage("/")._replace(free=5)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    fails(lambda: store().save(500, state_of(500), {}), "no such type (5 bytes are free there);")


def test_a_file_that_the_kernel_refuses_is_no_checkpoint(store: Make, tmp_path: Path) -> None:
    saving = store()
    saving.save(400, state_of(400), {})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, hard))  # the tensors' file has 5 kB
    try:
        fails(
            lambda: saving.save(500, state_of(500), {}),
            "step 500 is not saved",
            "/checkpoints: File too large; the last good checkpoint is step-00000400",
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == ["last-good", "step-00000400"]


def test_a_folder_that_cannot_be(store: Make, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    fails(lambda: store(tmp_path / "file"), "cannot be written")


# One process imports torch; each attempt is a fork of it that kills itself, with SIGKILL, before
# the n-th file event of a save (open, mkdir, rename, remove, rmdir, listdir; outside of torch also
# write and fsync), or is killed by a timer.
KILLED = """
import os, pathlib, random, shutil, signal, sys, threading, time, torch
from nsa.train.checkpoint import CheckpointStore
from nsa.train.manifest import CheckpointManifest

def store(out, asynchronous):
    made = CheckpointStore(out, keep=2, asynchronous=asynchronous, config_sha256="a" * 64, rank=0,
                           world_size=1)
    made.prepare()
    return made

def state(value):
    return {"w": torch.full((50, 50), float(value)), "m": {"w": torch.full((3,), -float(value))}}

def train(out, asynchronous, steps, die_at=None):
    saving, events = store(out, asynchronous), 0
    def count():
        nonlocal events
        events += 1
        if events == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
    def audited(event, args):
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir"):
            if str(args[0]).startswith(str(out)):
                count()
    def profiled(frame, event, called):
        if event == "c_call" and called.__name__ in ("write", "fsync"):
            if "/torch/" not in frame.f_code.co_filename:
                count()
    if die_at is not None:
        sys.addaudithook(audited)
        sys.setprofile(profiled)
        threading.setprofile(profiled)
    for step in steps:
        saving.save(step, state(step), {"step": step})
    saving.close()

def forked(function, *args):
    pid = os.fork()
    if pid == 0:
        try:
            function(*args)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return pid

def check(out, least):
    saving = store(out, False)
    left = sorted(one.name for one in saving._folder.iterdir())
    assert not [one for one in left if "tmp" in one or "replaced" in one], left
    for name in left:
        if name.startswith("step-"):
            CheckpointManifest.read(saving._folder / name).check_sizes(saving._folder / name)
    loaded = state(0)
    (extra,) = saving.load(loaded)
    step = extra["step"]
    assert step >= least, (step, least)
    assert loaded["w"].eq(step).all() and loaded["m"]["w"].eq(-step).all()
    assert saving.last_good().name == f"step-{step:08d}"
    saving.save(9, state(9), {"step": 9})
    assert saving.load(loaded) == [{"step": 9}]

def outcome(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

root, asynchronous, steps = pathlib.Path(sys.argv[1]), sys.argv[2] == "async", eval(sys.argv[3])
seed = root / "seed"
assert outcome(forked(train, seed, False, (1, 2))) == 0
ends, die_at, chance = [], 0, random.Random(0)
while not ends or ends[-1] == -signal.SIGKILL:
    die_at += 1
    out = root / f"event{die_at}"
    shutil.copytree(seed, out)
    ends.append(outcome(forked(train, out, asynchronous, steps, die_at)))
    assert outcome(forked(check, out, 2 if steps[0] == 3 else 1)) == 0, ("event", die_at)
assert ends[-1] == 0
print(len(ends) - 1, "kills")
for attempt in range(5):
    out = root / f"time{attempt}"
    shutil.copytree(seed, out)
    pid = forked(train, out, asynchronous, range(3, 100))
    time.sleep(chance.uniform(0.02, 0.25))
    os.kill(pid, signal.SIGKILL)
    assert outcome(pid) == -signal.SIGKILL
    assert outcome(forked(check, out, 2)) == 0, ("time", attempt)
"""


@pytest.mark.parametrize(
    "mode, steps", [("sync", "(3,)"), ("async", "(3,)"), ("sync", "(2,)")], ids=str
)
def test_killed_at_any_moment(tmp_path: Path, mode: str, steps: str) -> None:
    """``steps`` of (2,) saves anew what last-good names."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), mode, steps],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) >= 25, "kills by event: a save has more than that"
    shutil.rmtree(tmp_path)


RANKS = """
import json, os, sys, torch
from pathlib import Path
from torch import distributed as dist, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from nsa.train import manifest
from nsa.train.checkpoint import CheckpointStore
from nsa.train.config import LoopConfig
from nsa.train.errors import TrainError, TrainExit
from nsa.train.optimizer import build_optimizer

rank, out = int(sys.argv[1]), Path(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{out}/meet", rank=rank, world_size=2)

def made(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))  # rank 1 holds no row of the second
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = build_optimizer(model, LoopConfig(precision="fp32", lr=0.1))
    return model, optimizer

def trained(model, optimizer):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.clip(1.0)
    optimizer.step()
    optimizer.zero_grad()

def whole(model, optimizer):
    tensors = [*model.parameters(), *optimizer.state_dict()["exp_avg_sq"].values()]
    return [one.full_tensor().detach().clone() for one in tensors]

store = CheckpointStore(out, keep=2, asynchronous=True, config_sha256="a" * 64, rank=rank,
                        world_size=2)
store.prepare()
model, optimizer = made(0)
trained(model, optimizer)
wanted = whole(model, optimizer)
state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(),
         "replicated": torch.arange(5.0)}
store.save(1, state, {"rank": rank, "of": "first"})
trained(model, optimizer)  # while it is written
store.wait()

other, its = made(1)
loaded = {"model": other.state_dict(), "optimizer": its.state_dict(),
          "replicated": torch.zeros(5)}
extras = store.load(loaded)
assert extras == [{"rank": 0, "of": "first"}, {"rank": 1, "of": "first"}], extras
assert all(torch.equal(a, b) for a, b in zip(whole(other, its), wanted, strict=True))
assert loaded["replicated"].equal(torch.arange(5.0))
trained(other, its)
assert all(torch.equal(a, b) for a, b in zip(whole(other, its), whole(model, optimizer),
                                             strict=True))

if rank == 1:  # the disk of one rank is full: both learn it
    manifest.os.fsync, fsync = None, manifest.os.fsync
    def full(_): raise OSError(28, "No space left on device")
    manifest.os.fsync = full
store.save(2, state, {})
try:
    store.wait()
except TrainError as error:
    assert "No space left" in str(error) and "step-00000001" in str(error), error
else:
    raise AssertionError("a full disk was not seen")
if rank == 1:
    manifest.os.fsync = fsync
assert store.last_good().name == "step-00000001"
if rank == 1:  # it dies, which is no fault of the disk
    os._exit(0)
torch.save(wanted, out / "wanted.pt")
store.save(3, state, {})
try:
    store.wait()
except TrainError as error:
    assert error.code is TrainExit.PEER, error
    for words in ("another rank ended or hung while step 3 was saved", "gloo/", "step-00000001"):
        assert words in str(error), error
else:
    raise AssertionError("a dead rank was not seen")
os._exit(0)  # gloo's threads abort some interpreters' ends
"""


def test_two_processes_save_and_load_and_one_loads_what_they_saved(
    store: Make, tmp_path: Path
) -> None:
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANKS, str(rank), str(tmp_path)])
        for rank in range(2)
    ]
    assert [one.wait() for one in ranks] == [0, 0]
    alone = {
        "model": {
            "0.weight": torch.zeros(3, 4),
            "0.bias": torch.zeros(3),
            "1.weight": torch.zeros(1, 3),
            "1.bias": torch.zeros(1),
        },
        "replicated": torch.zeros(5),
    }
    extras = store().load(alone)
    assert [one["rank"] for one in extras] == [0, 1]
    wanted = torch.load(tmp_path / "wanted.pt")
    assert same({"": dict(enumerate(wanted[:4]))}, {"": alone["model"]})
    saved = manifest.CheckpointManifest.read(tmp_path / "checkpoints" / "step-00000001")
    assert saved.world_size == 2 and {"__0_0.distcp", "__1_0.distcp"} <= saved.files.keys()


def test_random_states_survive_json() -> None:
    def drawn() -> list[float]:
        return [
            random.random(),
            random.gauss(0.0, 1.0),
            float(numpy.random.rand()),
            float(numpy.random.randn()),
            torch.rand(()).item(),
            torch.randn(()).item(),
        ]

    drawn()  # a half-used pair of Gaussians is part of the state
    state = json.loads(json.dumps(rng_state()))
    first, second = drawn(), drawn()
    set_rng_state(state)
    assert drawn() == first and drawn() == second and first != second
