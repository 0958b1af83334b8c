"""The command line: what it starts, prints and writes, and one line for each error.

The supervisor, which starts the trainer, and what reads a trained model are fakes at their seams.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from nsa import TinyLM, capability, settings
from nsa.config import preset
from nsa.installing import pip_install
from nsa.train import cli, machine, run_folder
from nsa.train import finished as finished_run
from nsa.train.config import RunConfig, WatchdogConfig
from nsa.train.data.vocabulary import ByteTokenizer
from nsa.train.errors import TrainError, TrainExit
from nsa.train.yaml_file import read_config

ROOT = Path(__file__).parents[3]
TINY = str(ROOT / "configs/tiny-cpu.yaml")


class Supervised:
    """What `supervise` was called with."""

    calls: list[tuple[list[str], Path, WatchdogConfig, int]]

    def __init__(self, code: int) -> None:
        self.calls, self.code = [], code
        self.during: Callable[[Path], None] = lambda out: None

    def __call__(self, argv: list[str], out: Path, config: WatchdogConfig, rank: int) -> int:
        self.calls.append((argv, out, config, rank))
        self.during(out)
        return self.code


def module(name: str, **values: object) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(values)
    return made


@pytest.fixture
def supervised(monkeypatch: pytest.MonkeyPatch) -> Supervised:
    fake = Supervised(code=0)
    watchdog = module("nsa.train.watchdog", supervise=fake, watch=lambda out, **options: 0)
    monkeypatch.setitem(sys.modules, "nsa.train.watchdog", watchdog)
    return fake


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr."""
    err = capsys.readouterr().err
    assert err.startswith("nsa.train: ") and err.count("\n") == 1, err
    return err.removeprefix("nsa.train: ").rstrip("\n")


def checkpoint(out: Path, name: str = "step-00000050") -> Path:
    folder = out / "checkpoints" / name
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    (out / "checkpoints" / "last-good").write_text(f"{name}\n")
    return folder


# starting


def test_a_run_is_shown_saved_and_supervised(
    supervised: Supervised, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    seen: list[dict[str, Any]] = []
    supervised.during = lambda folder: seen.append(json.loads((folder / "config.json").read_text()))
    supervised.code = 7
    assert cli.invoke([TINY, "--set", "train.seq_len=96", "--out", str(out)]) == 7
    ((argv, folder, watchdog, rank),) = supervised.calls
    assert argv == [sys.executable, "-m", "nsa.train.worker", str(out)]
    assert (folder, rank, watchdog) == (out, 0, WatchdogConfig())
    config = read_config(TINY, ["train.seq_len=96", f"out={out}"])
    assert RunConfig.from_mapping(seen[0]["config"]) == config
    assert seen[0]["sha256"] == config.sha256()
    shown = capsys.readouterr().out
    text = shown[: shown.index("route of all layers")]
    assert f"# sha256 {config.sha256()}\n" in text
    (tmp_path / "shown.yaml").write_text(text)
    assert read_config(str(tmp_path / "shown.yaml")) == config
    assert "route of all layers: sel: masked (sdpa, torch" in shown
    assert "auto: its mask is within" in shown


def test_train_may_be_left_out_or_named_and_options_may_come_first(
    supervised: Supervised, tmp_path: Path
) -> None:
    for i, words in enumerate((["train", TINY], [TINY], ["--set", "train.batch=2", TINY])):
        assert cli.invoke([*words, "--out", str(tmp_path / f"run-{i}")]) == 0
    assert len(supervised.calls) == 3


def test_another_run_archives_the_folder_and_shows_where(
    supervised: Supervised, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert cli.invoke([TINY, "--out", str(out)]) == 0
    (out / "log").mkdir()
    assert cli.invoke([TINY, "--out", str(out)]) == 0
    assert not (out / "log").exists()
    (archived,) = tmp_path.glob("run.archived-*")
    assert (archived / "log").is_dir() and (archived / "config.json").is_file()
    assert f"the run that was in {out} is in {archived} now\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "sets, code, message",
    [
        (
            ["data.kind=text", "data.paths=[nothing/here]"],
            TrainExit.DATA,
            "data.paths: nothing/here",
        ),
        (["data.kind=text", "data.paths=[configs]", "data.eval_paths=[no]"], TrainExit.DATA, "no "),
        (["data.kind=parquet", "data.paths=[configs]"], TrainExit.DATA, "holds no file of"),
        (["parallel.kind=fsdp"], TrainExit.USAGE, "parallel.kind=fsdp in one process"),
        (["train.device=cuda"], TrainExit.DEVICE, "train.device=cuda where torch finds no GPU"),
    ],
)
def test_what_cannot_be_leaves_the_run_in_the_folder_alone(
    sets: list[str],
    code: TrainExit,
    message: str,
    supervised: Supervised,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(
        machine,
        "machine_of",
        lambda device, gpu: machine.TrainMachine(capability.assumed("none"), None),
    )
    out = tmp_path / "run"
    assert cli.invoke([TINY, "--out", str(out)]) == 0
    (out / "log").mkdir()
    before = sorted(p.name for p in out.iterdir())
    capsys.readouterr()
    words = [word for one in sets for word in ("--set", one)]
    assert cli.invoke([TINY, "--out", str(out), *words]) == code
    assert message in error_of(capsys)
    assert sorted(p.name for p in out.iterdir()) == before
    assert [p.name for p in tmp_path.iterdir()] == ["run"] and len(supervised.calls) == 1


def test_no_watchdog_leaves_it_off(supervised: Supervised, tmp_path: Path) -> None:
    assert cli.invoke([TINY, "--out", str(tmp_path / "run"), "--no-watchdog"]) == 0
    assert not supervised.calls[0][2].enabled


def test_json_head_has_the_config_and_the_routes(
    supervised: Supervised, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.invoke([TINY, "--out", str(tmp_path / "run"), "--json"]) == 0
    head = json.loads(capsys.readouterr().out)
    assert RunConfig.from_mapping(head["config"]).sha256() == head["sha256"]
    assert [one["branch"] for one in head["routes"][0]["branches"]] == ["cmp", "sel", "win"]


def test_the_parent_holds_no_torch(tmp_path: Path) -> None:
    """Nor has `--help` torch or pydantic."""
    code = f"""
import sys, types
sys.modules["nsa.train.watchdog"] = fake = types.ModuleType("nsa.train.watchdog")
fake.supervise = lambda *arguments: 0
from nsa.train import cli
assert cli.invoke([{TINY!r}, "--out", {str(tmp_path / "run")!r}]) == 0
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    code = """
import sys
from nsa.train import cli
assert cli.invoke(["--help"]) == 0
assert not {"torch", "pydantic", "rich", "ruamel.yaml", "numpy"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Train TinyLM" in done.stdout


# resuming


@pytest.mark.parametrize("words", [["--resume"], ["--resume", "auto"], ["--resume=auto"]])
def test_resume_takes_the_last_good_one_and_keeps_the_folder(
    supervised: Supervised, tmp_path: Path, words: list[str]
) -> None:
    out = tmp_path / "run"
    assert cli.invoke([TINY, "--out", str(out)]) == 0
    folder = checkpoint(out)
    assert cli.invoke([TINY, "--out", str(out), *words]) == 0
    assert supervised.calls[1][0][-2:] == [str(out), str(folder)]
    assert [one.name for one in tmp_path.iterdir()] == ["run"]


def test_bare_resume_before_the_config(supervised: Supervised, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert cli.invoke([TINY, "--out", str(out)]) == 0
    folder = checkpoint(out)
    assert cli.invoke(["--resume", TINY, "--out", str(out)]) == 0
    assert supervised.calls[1][0][-1] == str(folder)


def test_resume_by_path_of_another_run_begins_a_folder(
    supervised: Supervised, tmp_path: Path
) -> None:
    folder = checkpoint(tmp_path / "other")
    out = tmp_path / "run"
    assert cli.invoke([TINY, "--out", str(out), "--resume", str(folder)]) == 0
    assert supervised.calls[0][0][-2:] == [str(out), str(folder)]


def test_resume_by_a_runs_folder_takes_its_last_good_one(
    supervised: Supervised, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    assert cli.invoke([TINY, "--out", str(out)]) == 0
    folder = checkpoint(out)
    assert cli.invoke([TINY, "--out", str(out), "--resume", str(out)]) == 0
    assert supervised.calls[1][0][-1] == str(folder)
    assert [one.name for one in tmp_path.iterdir()] == ["run"]


def test_a_mistaken_resume_leaves_the_run_where_it_is(
    supervised: Supervised, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert cli.invoke([TINY, "--out", str(out)]) == 0
    checkpoint(out)
    (tmp_path / "no-checkpoint").mkdir()
    capsys.readouterr()
    words = [TINY, "--out", str(out), "--resume", str(tmp_path / "no-checkpoint")]
    assert cli.invoke(words) == TrainExit.CHECKPOINT
    assert "no-checkpoint holds no manifest.json" in error_of(capsys)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["no-checkpoint", "run"]
    assert len(supervised.calls) == 1


def test_a_checkpoint_whose_replacement_was_cut_off_is_found(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    moved = folder.rename(folder.with_name(f"{folder.name}.replaced"))
    assert run_folder.checkpoint_of(tmp_path, "auto") == moved


def test_resume_errors(
    supervised: Supervised, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    command = [TINY, "--out", str(out), "--resume"]
    assert cli.invoke(command) == TrainExit.CHECKPOINT
    assert "found no checkpoint" in error_of(capsys)
    assert not out.exists()
    assert cli.invoke([*command, "gone"]) == TrainExit.CHECKPOINT
    assert "--resume gone is no folder" in error_of(capsys)
    assert cli.invoke([TINY, "--out", str(out)]) == 0
    folder = checkpoint(out)
    capsys.readouterr()
    assert cli.invoke([*command, "--set", "train.lr=1e-5"]) == TrainExit.CHECKPOINT
    assert "is of another config (train.lr 0.003 -> 1e-05)" in error_of(capsys)
    harmless = ["data.prefetch=2", "data.workers=0", "parallel.bucket_mb=5"]  # and resume alone
    sets = [word for one in (*harmless, "train.lr=1e-5") for word in ("--set", one)]
    assert cli.invoke([*command, *sets]) == TrainExit.CHECKPOINT
    assert "is of another config (train.lr 0.003 -> 1e-05)" in error_of(capsys)
    assert cli.invoke([*command, "--set", "train.steps=900"]) == TrainExit.CHECKPOINT
    assert error_of(capsys).endswith(
        "(train.steps 300 -> 900); wanted the same; give the same command with --resume, or drop"
        " --resume to begin anew, or begin with its"
        f" weights in another folder: --set train.init_from={out} --out OTHER"
    )
    shutil.rmtree(folder)
    assert cli.invoke(command) == TrainExit.CHECKPOINT
    assert "names 'step-00000050', which is no checkpoint there" in error_of(capsys)
    (tmp_path / "elsewhere").mkdir()
    (out / "checkpoints" / "last-good").write_text("../../elsewhere")
    assert cli.invoke(command) == TrainExit.CHECKPOINT
    assert "names '../../elsewhere'" in error_of(capsys)
    assert len(supervised.calls) == 1


# ranks


def as_rank(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    place = settings.LaunchedPlace(rank, 2, rank)
    monkeypatch.setattr(settings, "launched_place", lambda: place)


def test_another_rank_waits_for_the_first_and_shows_nothing(
    supervised: Supervised,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "run"
    out.mkdir()
    config = read_config(TINY, [f"out={out}"])
    written: list[float] = []

    def write() -> None:
        time.sleep(0.3)
        written.append(time.monotonic())
        run_folder.write_resolved(out, config)

    as_rank(monkeypatch, 1)
    thread = threading.Thread(target=write)
    thread.start()
    assert cli.invoke([TINY, "--out", str(out)]) == 0
    ended = time.monotonic()
    thread.join()
    assert written[0] < ended
    assert supervised.calls[0][3] == 1
    assert capsys.readouterr().out == ""


def test_a_rank_takes_no_older_run_for_its_own(tmp_path: Path) -> None:
    """One of another launcher on this host, of another time on another host, of another config."""
    config = read_config(TINY, [f"out={tmp_path}"])
    run_folder.write_resolved(tmp_path, config)
    run_folder.wait_for_resolved(tmp_path, config, timeout_s=1)
    path = tmp_path / "config.json"
    plain = json.loads(path.read_text())
    host = plain["launcher"]["host"]
    others: list[Mapping[str, Any]] = [
        {"launcher": {"host": host, "pid": os.getppid() + 1}},
        {"launcher": {"host": "x", "pid": 1}, "written_s": time.time() - 3600},
        {"sha256": "0"},
    ]
    for other in others:
        path.write_text(json.dumps({**plain, **other}))
        with pytest.raises(TrainError) as caught:
            run_folder.wait_for_resolved(tmp_path, config, timeout_s=0.15)
        assert caught.value.code == TrainExit.PEER
    path.write_text(json.dumps({**plain, "launcher": {"host": "x", "pid": 1}}))
    run_folder.wait_for_resolved(tmp_path, config, timeout_s=1)
    with pytest.raises(TrainError, match="one --job where not torchrun started them"):
        run_folder.wait_for_resolved(tmp_path, config, job="mine", timeout_s=0.15)
    path.write_text(json.dumps({**plain, "launcher": {"job": "mine"}, "written_s": 0.0}))
    run_folder.wait_for_resolved(tmp_path, config, job="mine", timeout_s=1)
    with pytest.raises(TrainError):
        run_folder.wait_for_resolved(tmp_path, config, job="another", timeout_s=0.15)


# errors


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([TINY, "--bogus"], "No such option: --bogus"),
        (["train"], "Missing argument 'CONFIG'"),
        ([str(ROOT / "configs")], "is a folder; wanted a config"),
        (["gone.yaml"], "cannot read 'gone.yaml': No such file"),
        ([TINY, "--set", "train.stepz=1"], "train.stepz is not known; did you mean 'steps'?"),
        ([TINY, "--set", "train.path=tritonn"], "did you mean 'triton'?"),
        ([TINY, "--set", "train.path=triton"], "path=triton cannot be served"),
        ([TINY, "--gpu", "h200"], "--gpu h200 is for --estimate"),
        ([TINY, "--estimate", "--gpu", "h20"], "did you mean 'h200'?"),
        (["watch"], "Missing argument 'DIR'"),
        (["watch", "gone"], "cannot read gone/config.json: No such file"),
        (["sample", "gone", "--prompt", "x"], "cannot read gone/config.json"),
        (["sample", "gone", "--prompt", "x", "--tokens", "0"], "--tokens 0 must be a number >= 1"),
        (["sample", "gone", "--prompt", "x", "--temperature", "nan"], "must be a number >= 0"),
        (["sample", "gone", "--prompt", "x", "--top-p", "1.5"], "--top-p 1.5 must be above 0"),
        (["export", "gone", "there"], "cannot read gone/config.json"),
    ],
)
def test_what_cannot_be_is_one_line_and_2(
    supervised: Supervised,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.invoke(words) == TrainExit.USAGE
    assert message in error_of(capsys)
    assert not supervised.calls and not list(tmp_path.iterdir())


def test_a_folder_that_no_run_made_is_left_alone(
    supervised: Supervised, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.txt").write_text("x")
    assert cli.invoke([TINY, "--out", str(tmp_path)]) == TrainExit.USAGE
    capsys.readouterr()
    assert [one.name for one in tmp_path.iterdir()] == ["mine.txt"]
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "config.json").write_text("{")
    assert cli.invoke(["watch", str(tmp_path / "torn")]) == TrainExit.USAGE
    assert "it is no JSON" in error_of(capsys)


def test_ctrl_c_is_130(
    supervised: Supervised, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(out: Path) -> None:
        raise KeyboardInterrupt

    supervised.during = interrupt
    assert cli.invoke([TINY, "--out", str(tmp_path / "run")]) == TrainExit.INTERRUPTED
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["typer", "ruamel.yaml"])
def test_a_missing_package_is_one_line_and_10(name: str) -> None:
    code = f"""
import sys
sys.modules[{name!r}] = None
sys.argv = ["nsa.train", {TINY!r}, "--estimate"]
import runpy
runpy.run_module("nsa.train", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == TrainExit.MISSING, done.stderr
    assert f"the package {name} is missing" in done.stderr
    assert f"; {pip_install('train')}" in done.stderr and done.stderr.count("\n") == 1


def test_a_machine_that_does_not_answer_is_a_device_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.sys, "executable", "/bin/false")
    with pytest.raises(TrainError) as caught:
        machine.machine_of("auto", None)
    assert caught.value.code == TrainExit.DEVICE
    assert machine.machine_of("cpu", None).capability.device == "cpu"  # not asked


def test_this_machine_answers_as_it_does_in_process() -> None:
    here = machine.machine_of("auto", None)
    assert here.capability == capability.this_machine()
    assert (here.memory_bytes is not None) == torch.cuda.is_available()


# other commands


def test_estimate_prints_a_table_or_json_and_trains_nothing(
    supervised: Supervised,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    config = str(ROOT / "configs/m7c_125m.yaml")
    assert cli.invoke([config, "--estimate", "--gpu", "h200"]) == 0
    table = capsys.readouterr().out
    assert "parameters                 78,373,632" in table
    assert "at 438,771 tok/s of 8 x 2,048 tokens on one NVIDIA H200" in table
    assert cli.invoke([config, "--estimate", "--gpu", "h200", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["estimate"]["num_parameters"] == 78_373_632
    assert found["estimate"]["speed"]["tok_per_s"] == 438_771
    assert sum(found["estimate"]["memory_bytes"].values()) == found["estimate"]["total_bytes"]
    assert not supervised.calls and not list(tmp_path.iterdir())


def test_watch_looks_at_a_run(
    supervised: Supervised, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    assert cli.invoke([TINY, "--out", str(out), "--set", "watchdog.step_s=5"]) == 0
    calls: list[tuple[Path, dict[str, Any]]] = []

    def look(folder: Path, **options: Any) -> int:
        calls.append((folder, options))
        return 8

    watchdog = module("nsa.train.watchdog", watch=look)
    monkeypatch.setitem(sys.modules, "nsa.train.watchdog", watchdog)
    assert cli.invoke(["watch", str(out), "--once", "--halt"]) == 8
    ((folder, options),) = calls
    assert (folder, options["once"], options["halt"]) == (out, True, True)
    assert options["config"].step_s == 5


def test_help_promises_no_checkpoint_of_a_halt(capsys: pytest.CaptureFixture[str]) -> None:
    """A halted run keeps its last good checkpoint and saves none; a sound run is not halted."""
    cli.invoke(["watch", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "Halt the run for what is found." in shown
    assert "saves a checkpoint" not in shown


# a trained model


def finished(monkeypatch: pytest.MonkeyPatch, **functions: object) -> None:
    fake = module("nsa.train.finished", **functions)
    monkeypatch.setitem(sys.modules, "nsa.train.finished", fake)


def test_sample_prints_what_the_last_good_checkpoint_writes(
    supervised: Supervised,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[Any, ...]] = []

    def sample_text(out: Path, checkpoint: Path, prompt: str, **options: Any) -> str:
        calls.append((out, checkpoint, options))
        return f"{prompt} and more"

    finished(monkeypatch, sample_text=sample_text)
    out = tmp_path / "run"
    assert cli.invoke([TINY, "--out", str(out)]) == 0
    older, newest = checkpoint(out, "step-00000010"), checkpoint(out)
    capsys.readouterr()
    words = ["sample", str(out), "--prompt", "The", "--tokens", "9", "--temperature", "0.5"]
    assert cli.invoke([*words, "--seed", "3"]) == 0
    assert cli.invoke([*words, "--checkpoint", str(older)]) == 0
    assert capsys.readouterr().out == "The and more\n" * 2
    options = {"tokens": 9, "temperature": 0.5, "top_p": 0.95}
    assert calls == [(out, newest, {**options, "seed": 3}), (out, older, {**options, "seed": 0})]


def test_a_text_beyond_memory_is_one_line(
    supervised: Supervised,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trained = TinyLM(preset("tiny")).eval()
    monkeypatch.setattr(finished_run, "load_run", lambda *_: (trained, ByteTokenizer()))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "run"
    assert cli.invoke([TINY, "--out", str(out)]) == 0
    checkpoint(out)
    capsys.readouterr()
    for tokens in (10**13, 10**30):
        words = ["sample", str(out), "--prompt", "The", "--tokens", str(tokens)]
        assert cli.invoke(words) == TrainExit.MEMORY
        message = error_of(capsys)
        assert message.startswith(f"out of memory with --tokens {tokens}: got no memory on cpu for")
        assert message.endswith("; lower --tokens") and "max_len" not in message


def test_export_writes_a_new_folder(
    supervised: Supervised,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[Path, ...]] = []

    def export_run(*paths: Path) -> None:
        calls.append(paths)
        (paths[-1] / "there").mkdir(parents=True)

    finished(monkeypatch, export_run=export_run)
    out, folder = tmp_path / "run", tmp_path / "exported"
    assert cli.invoke([TINY, "--out", str(out)]) == 0
    good = checkpoint(out)
    capsys.readouterr()
    assert cli.invoke(["export", str(out), str(folder)]) == 0
    assert capsys.readouterr().out == f"wrote {folder}\n"
    assert cli.invoke(["export", str(out), str(folder)]) == TrainExit.USAGE
    assert "is there already" in error_of(capsys)
    assert cli.invoke(["export", str(out), "n" * 300]) == TrainExit.USAGE
    assert "cannot be read: File name too long" in error_of(capsys)
    assert calls == [(out, good, folder)]


def test_sample_and_export_want_a_checkpoint(
    supervised: Supervised, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert cli.invoke([TINY, "--out", str(out)]) == 0
    capsys.readouterr()
    for words in (["sample", str(out), "--prompt", "x"], ["export", str(out), "there"]):
        assert cli.invoke(words) == TrainExit.CHECKPOINT
        assert "found no checkpoint" in error_of(capsys)
        assert cli.invoke([*words, "--checkpoint", "gone"]) == TrainExit.CHECKPOINT
        assert error_of(capsys).startswith("--checkpoint gone is no folder")


def test_what_sample_and_export_advise_are_options_of_theirs(
    supervised: Supervised, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert cli.invoke([TINY, "--out", str(out)]) == 0
    capsys.readouterr()
    pointer = out / "checkpoints" / "last-good"

    def refused() -> str:
        assert cli.invoke(["sample", str(out), "--prompt", "x"]) == TrainExit.CHECKPOINT
        return error_of(capsys)

    assert refused() == (
        f"found no checkpoint in {out}; wanted {pointer}; --checkpoint PATH names one of another"
        " folder, or train until one is saved"
    )
    pointer.mkdir(parents=True)
    assert refused().endswith("; --checkpoint PATH names one")
    pointer.rmdir()
    pointer.write_text("gone\n")
    assert refused().endswith(
        "names 'gone', which is no checkpoint there; --checkpoint PATH names one"
    )
