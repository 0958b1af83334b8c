"""The loop in this process: its lines, what is looked at, checkpoints, resume, early ends."""

from __future__ import annotations

import csv
import json
import math
import random
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa import capability
from nsa.config import preset
from nsa.model import TinyLM
from nsa.train import loop
from nsa.train.config import RunConfig
from nsa.train.errors import TrainError, TrainExit
from nsa.train.heartbeat import HeartbeatReader
from nsa.train.loop import Trainer
from nsa.train.records import Batch, Phase
from nsa.train.step import TrainStep

MODEL = replace(preset("tiny"), dim=32, head_dim=8, num_layers=1)


def config_of(**sections: dict[str, Any]) -> RunConfig:
    mapping: dict[str, dict[str, Any]] = {
        "data": {"kind": "synthetic", "workers": 0},
        "train": {
            "steps": 12,
            "batch": 2,
            "seq_len": 96,
            "precision": "fp32",
            "path": "masked",
            "warmup_steps": 2,
            "lr": 1e-2,
            "eval_every": 6,
            "eval_batches": 2,
        },
        "checkpoint": {"every": 4, "keep": 0},
        "log": {"every": 2, "probe_every": 4},
    }
    for name, values in sections.items():
        mapping[name] = {**mapping.get(name, {}), **values}
    return replace(RunConfig.from_mapping(mapping), model=MODEL)


def trained(config: RunConfig, out: Path, **options: Any) -> Trainer:
    out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(config, out, **options)
    assert trainer.run() is TrainExit.OK
    return trainer


def log_of(out: Path, rank: int = 0) -> list[dict[str, Any]]:
    text = (out / "log" / f"rank{rank}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def steps_of(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in log if "loss_nats" in line and "learning_rate" in line]


def same(one: Trainer, other: Trainer) -> None:
    a, b = one.plain_model.state_dict(), other.plain_model.state_dict()
    torch.testing.assert_close(a, b, rtol=0, atol=0)
    torch.testing.assert_close(
        one.optimizer.state_dict(), other.optimizer.state_dict(), rtol=0, atol=0
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, Path, list[str]]:
    out = tmp_path_factory.mktemp("run")
    notes: list[str] = []
    return trained(config_of(), out, notify=notes.append), out, notes


def test_binary_files_that_were_left_out_are_named_in_a_line(tmp_path: Path) -> None:
    texts, notes = tmp_path / "texts", []
    texts.mkdir()
    (texts / "text.txt").write_text("a line of text\n" * 100)
    (texts / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    data = {"kind": "text", "paths": [str(texts)]}
    config = config_of(data=data, train={"steps": 1, "eval_every": 0}, log={"probe_every": 0})
    trained(config, tmp_path / "run", notify=notes.append)
    assert "data.paths: binary files left out: 1 (a NUL in the first 8,000 bytes)" in notes
    (start,) = (one for one in log_of(tmp_path / "run") if one["kind"] == "start")
    assert start["data"]["binary_files_left_out"] == 1


def test_a_line_every_two_steps(run: tuple[Trainer, Path, list[str]]) -> None:
    trainer, out, _ = run
    lines = steps_of(log_of(out))
    assert [line["step"] for line in lines] == [2, 4, 6, 8, 10, 12]
    for line in lines:
        assert line["config_sha256"] == trainer.config.sha256()
        assert line["memory_rss_bytes"] > 2**20 and line["memory_allocated_bytes"] is None
    assert lines[0]["tokens_per_s"] is None  # the first steps build, and are no speed
    for line in lines[2:]:
        assert line["tokens_per_s"] * line["step_ms"] / 1e3 == pytest.approx(2 * 96)
    assert lines[-1]["loss_nats"] < lines[0]["loss_nats"]
    assert lines[0]["learning_rate"] == pytest.approx(1e-2 * 2 / 3)  # two of three warm steps
    assert lines[-1]["bits_per_byte"] == pytest.approx(lines[-1]["loss_nats"] / math.log(2))


def test_the_same_lines_are_in_the_csv(run: tuple[Trainer, Path, list[str]]) -> None:
    _, out, _ = run
    with (out / "log" / "training.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    lines = steps_of(log_of(out))
    assert [float(row["loss_nats"]) for row in rows] == [line["loss_nats"] for line in lines]


def test_probes_count_what_ran_and_how_gates_stand(run: tuple[Trainer, Path, list[str]]) -> None:
    _, out, _ = run
    lines = steps_of(log_of(out))
    assert lines[0]["statistics"] is None  # before the first probe
    for line in lines:
        assert line["engaged"]["sel.masked"] == MODEL.num_layers
    # probes: as the step is built, and after 4, 8 and 12 steps; a line states each once
    probed = [line["step"] for line in lines if line["statistics"] is not None]
    assert probed == [4, 8, 12]
    shares = lines[1]["statistics"]["branch_share"]
    assert sum(shares.values()) == pytest.approx(1)


def test_events_say_how_it_began_and_ended(run: tuple[Trainer, Path, list[str]]) -> None:
    trainer, out, notes = run
    events = {line["kind"]: line for line in log_of(out) if line.get("kind")}
    assert events["start"]["cuda_graph"] == "off: a CPU has no CUDA graphs"
    assert any("sel" in line and "masked" in line for line in events["start"]["route"])
    assert events["start"]["not_repeatable"] == [] and not any("last bits" in n for n in notes)
    assert events["start"]["entropy_floor_nats"] == trainer.loader.entropy_floor_nats
    assert events["done"]["step"] == 12
    assert any(
        "no CUDA graph: a CPU has none" in n or "a CPU has no CUDA graphs" in n for n in notes
    )


@pytest.mark.parametrize(
    ("train", "wanted"),
    [
        ({"path": "triton", "precision": "bf16_master"}, []),
        ({"path": "masked"}, ["cmp.sdpa", "sel.sdpa", "win.sdpa"]),
        ({"attention": "dense"}, ["dense.sdpa"]),
    ],
    ids=["triton", "masked", "dense"],
)
def test_what_gives_other_bits_each_time_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    train: dict[str, Any],
    wanted: list[str],
) -> None:
    trainer = Trainer(config_of(train={"steps": 1, "eval_every": 0, **train}), tmp_path)
    notes: list[str] = []
    trainer.notify = notes.append
    # a GPU's routes; what runs is the CPU's
    monkeypatch.setattr(capability, "probe", lambda device: capability.assumed("h200"))
    monkeypatch.setattr(Trainer, "_train", lambda self: TrainExit.OK)
    assert trainer.run() is TrainExit.OK
    (start,) = [line for line in log_of(tmp_path) if line["kind"] == "start"]
    assert start["not_repeatable"] == wanted
    assert [n for n in notes if "last bits" in n] == [
        f"{', '.join(wanted)}: the backward gives other last bits each time, so a run that resumes"
        " is not the same to the bit"
    ] * bool(wanted)


def test_every_line_has_the_configs_hash_and_saves_have_one(
    run: tuple[Trainer, Path, list[str]],
) -> None:
    trainer, out, _ = run
    lines = log_of(out)
    assert {line.get("config_sha256") for line in lines} == {trainer.config.sha256()}
    assert [line["step"] for line in lines if line["kind"] == "save"] == [4, 8, 12]


@torch.no_grad()
def plainly(trainer: Trainer, batch: Batch) -> dict[str, float]:
    """Sums over the labels of ``batch``: nats, right ones, and bytes of the text they decode to."""
    log_p = trainer.plain_model(batch.ids).double().log_softmax(-1)
    kept = batch.labels >= 0
    labels = batch.labels[kept]
    return {
        "nats": -float(log_p[kept].gather(-1, labels[:, None]).sum()),
        "right": int((log_p.argmax(-1)[kept] == labels).sum()),
        "labels": len(labels),
        "bytes": len(trainer.tokenizer.decode(labels.tolist()).encode()),
    }


def summed(parts: list[dict[str, float]]) -> dict[str, float]:
    return {name: sum(one[name] for one in parts) for name in parts[0]}


@pytest.fixture(scope="module")
def subwords(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Trainer, Path, list[dict[str, float]]]:
    """A run whose tokens are no bytes, and what each step's batch is to its model before it."""
    out = tmp_path_factory.mktemp("subwords")
    rng = random.Random(0)  # ASCII, which decodes to its bytes wherever a row is cut
    words = ["".join(rng.choices("etaoinsh", k=rng.randint(1, 9))) for _ in range(60)]
    (out / "text.txt").write_text("\n".join(" ".join(rng.choices(words, k=9)) for _ in range(500)))
    config = config_of(
        data={
            "kind": "text",
            "paths": [str(out / "text.txt")],
            "tokenizer": "bpe",
            "vocab_size": 384,
        },
        train={"steps": 6},
    )
    seen: list[dict[str, float]] = []
    before = Trainer._run_step

    def run_step(self: Trainer, batches: list[Batch]) -> None:
        seen.append(summed([plainly(self, one) for one in batches]))
        before(self, batches)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_run_step", run_step)
        return trained(config, out / "run"), out / "run", seen


@pytest.mark.parametrize("tokens", ["bytes", "subwords"])
def test_held_out_loss_is_that_of_plain_pytorch(
    tokens: str, request: pytest.FixtureRequest
) -> None:
    trainer, out, _ = request.getfixturevalue("run" if tokens == "bytes" else "subwords")
    found = [line for line in log_of(out) if line.get("kind") == "eval"][-1]
    assert trainer._held_out is not None
    total = summed([plainly(trainer, one) for one in trainer._held_out.batches(2)])
    assert found["step"] == trainer.step_count
    assert found["loss_nats"] == pytest.approx(total["nats"] / total["labels"], rel=1e-6)
    assert found["accuracy_pct"] == pytest.approx(100 * total["right"] / total["labels"])
    bits = total["nats"] / math.log(2) / total["bytes"]
    assert found["bits_per_byte"] == pytest.approx(bits, rel=1e-6)


def test_a_line_has_bits_of_the_bytes_that_its_tokens_stand_for(
    subwords: tuple[Trainer, Path, list[dict[str, float]]],
) -> None:
    _, out, seen = subwords
    line = steps_of(log_of(out))[-1]
    total = summed(seen[4:6])  # the steps since the line before
    assert line["step"] == 6 and total["bytes"] > 1.5 * total["labels"]
    assert line["loss_nats"] == pytest.approx(total["nats"] / total["labels"], rel=1e-5)
    bits = total["nats"] / math.log(2) / total["bytes"]
    assert line["bits_per_byte"] == pytest.approx(bits, rel=1e-5)


def test_an_evaluation_is_shown_next_to_the_entropy_of_the_data(
    run: tuple[Trainer, Path, list[str]],
) -> None:
    (line,) = [note for note in run[2] if note.startswith("step 12: held out ")]
    assert line.endswith("; the data's entropy is 1.1097 nats")


def test_the_heartbeat_ends_in_done(run: tuple[Trainer, Path, list[str]]) -> None:
    _, out, _ = run
    beat = HeartbeatReader(out / "heartbeat" / "rank0.bin").read()
    assert beat is not None
    assert (beat.phase, beat.step) == (Phase.DONE, 12)


def test_checkpoints_are_where_they_are_due(run: tuple[Trainer, Path, list[str]]) -> None:
    _, out, _ = run
    names = sorted(p.name for p in (out / "checkpoints").iterdir() if p.is_dir())
    assert names == ["step-00000004", "step-00000008", "step-00000012"]
    assert (out / "checkpoints" / "last-good").read_text().strip() == "step-00000012"


@pytest.mark.parametrize("step", [4, 8])
def test_a_resumed_run_is_one_that_was_never_interrupted(
    run: tuple[Trainer, Path, list[str]], step: int, tmp_path: Path
) -> None:
    """Bit for bit: weights, moments, and the losses of the steps that follow."""
    whole, out, _ = run
    resumed = trained(config_of(), tmp_path, resume=out / "checkpoints" / f"step-{step:08d}")
    same(resumed, whole)
    after = [line["loss_nats"] for line in steps_of(log_of(out)) if line["step"] > step]
    assert [line["loss_nats"] for line in steps_of(log_of(tmp_path))] == after


@pytest.mark.parametrize(
    "sections",
    [
        {"data": {"kind": "random"}},
        {"train": {"accumulate": 3, "clip": 0.1}},
        {"train": {"attention": "dense"}, "log": {"probe_every": 0}},
        {"model": {"checkpoint_layers": [0, 1]}},
        {"checkpoint": {"asynchronous": False}},
    ],
)
def test_other_ways_to_train_resume_alike(sections: dict[str, Any], tmp_path: Path) -> None:
    config = config_of(**sections)
    if "model" in sections:
        config = replace(config, model=replace(MODEL, checkpoint_layers=(0, 1)))
    whole = trained(config, tmp_path / "whole")
    resumed = trained(
        config, tmp_path / "rest", resume=tmp_path / "whole/checkpoints/step-00000008"
    )
    same(resumed, whole)


def interrupting(trainer: Trainer, at: int, what: Callable[[], object]) -> None:
    """Call ``what`` once ``at`` steps are done."""
    before = trainer._is_due
    done: list[int] = []

    def is_due(every: int) -> bool:
        if trainer.step_count == at and not done:
            done.append(at)
            what()
        return before(every)

    trainer._is_due = is_due  # type: ignore[method-assign]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_with_a_checkpoint(number: signal.Signals, tmp_path: Path) -> None:
    notes: list[str] = []
    trainer = Trainer(config_of(), tmp_path, notify=notes.append)
    interrupting(trainer, 5, lambda: signal.raise_signal(number))
    before = signal.getsignal(number)
    assert trainer.run() is TrainExit.INTERRUPTED
    assert signal.getsignal(number) is before
    assert (tmp_path / "checkpoints" / "last-good").read_text().strip() == "step-00000005"
    assert (
        notes[-1] == "interrupted at step 5, which is saved; the same command with --resume goes on"
    )


def test_a_halt_ends_the_run_and_keeps_the_last_good_checkpoint(tmp_path: Path) -> None:
    trainer = Trainer(config_of(), tmp_path)
    interrupting(trainer, 5, lambda: (tmp_path / "halt.json").write_text("{}"))
    assert trainer.run() is TrainExit.UNHEALTHY
    assert (tmp_path / "checkpoints" / "last-good").read_text().strip() == "step-00000004"
    assert log_of(tmp_path)[-1] == {**log_of(tmp_path)[-1], "kind": "end", "reason": "unhealthy"}


def test_a_checkpoint_of_another_config_is_refused(
    run: tuple[Trainer, Path, list[str]], tmp_path: Path
) -> None:
    _, out, _ = run
    config = config_of(train={"lr": 2e-2})
    with pytest.raises(TrainError) as caught:
        Trainer(config, tmp_path, resume=out / "checkpoints" / "step-00000004").run()
    assert caught.value.code is TrainExit.CHECKPOINT


def test_out_of_memory_in_the_first_step_names_the_largest_batch_that_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(self: TinyLM, ids: torch.Tensor, **options: Any) -> torch.Tensor:
        if ids.shape[0] > 5:
            raise torch.OutOfMemoryError("planted")
        return before(self, ids, **options)

    before = TinyLM.forward
    monkeypatch.setattr(TinyLM, "forward", forward)
    config = config_of(train={"batch": 12})
    message = "the largest batch that fits is 5; --set train.batch=5 --set train.accumulate=3"
    with pytest.raises(TrainError, match=message) as caught:
        Trainer(config, tmp_path).run()
    assert caught.value.code is TrainExit.MEMORY
    assert not (tmp_path / "checkpoints" / "last-good").exists()


def test_go_no_go_comes_after_fifty_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "GO_NO_GO_STEPS", 6)
    notes: list[str] = []
    trained(config_of(), tmp_path, notify=notes.append)
    event = next(line for line in log_of(tmp_path) if line.get("kind") == "go_no_go")
    assert event["step"] == 6 and event["line"] in notes
    assert "tok/s" in event["line"] and "6 steps left" in event["line"]


def test_go_no_go_is_of_the_first_line_from_fifty_steps_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines may be farther apart; the line has the numbers of its own step."""
    monkeypatch.setattr(loop, "GO_NO_GO_STEPS", 5)
    trained(config_of(log={"every": 8}), tmp_path)
    events = [line for line in log_of(tmp_path) if line.get("kind") == "go_no_go"]
    assert [one["step"] for one in events] == [8]
    assert events[0]["line"].startswith("go/no-go after 8 steps")


def test_samples_are_written_on_request(tmp_path: Path) -> None:
    source = tmp_path / "text.txt"
    source.write_text("the cat sat on the mat and looked at the moon. " * 200)
    config = config_of(
        data={"kind": "text", "paths": [str(source)]},
        train={"sample_every": 12, "sample_prompt": "the ", "sample_tokens": 8, "eval_every": 0},
    )
    trained(config, tmp_path / "run")
    event = next(line for line in log_of(tmp_path / "run") if line.get("kind") == "sample")
    assert event["text"].startswith("the ") and len(event["text"]) > 4


def test_the_last_steps_have_a_line_of_their_own(tmp_path: Path) -> None:
    trained(config_of(train={"steps": 7, "eval_every": 0}), tmp_path)
    assert [line["step"] for line in steps_of(log_of(tmp_path))] == [2, 4, 6, 7]


def test_samples_of_the_dense_twin_are_refused(tmp_path: Path) -> None:
    config = config_of(train={"attention": "dense", "sample_every": 4})
    with pytest.raises(TrainError, match="wanted NSA with whole weights") as caught:
        Trainer(config, tmp_path).run()
    assert caught.value.code is TrainExit.USAGE


def test_an_empty_prompt_begins_with_id_0_where_documents_have_no_end(tmp_path: Path) -> None:
    trained(config_of(train={"sample_every": 12, "eval_every": 0}), tmp_path)
    event = next(line for line in log_of(tmp_path) if line.get("kind") == "sample")
    assert config_of().train.sample_prompt == "" and event["text"]


def test_a_sample_is_shown_as_one_line_without_control_characters(tmp_path: Path) -> None:
    notes: list[str] = []
    config = config_of(train={"sample_every": 12, "sample_prompt": "\x1b[2J\a\n"})
    trained(config, tmp_path, notify=notes.append)
    (shown,) = [line for line in notes if " writes: " in line]
    assert shown.startswith("step 12 writes: \\x1b[2J\\x07\\n") and shown.isprintable()
    event = next(line for line in log_of(tmp_path) if line.get("kind") == "sample")
    assert event["text"].startswith("\x1b[2J\a\n")


def test_a_step_that_is_not_finite_is_counted_in_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = TrainStep._loss_sum
    calls = iter(range(100))

    def loss_sum(self: TrainStep, *args: Any) -> torch.Tensor:
        loss = before(self, *args)
        return loss * float("nan") if next(calls) == 4 else loss

    monkeypatch.setattr(TrainStep, "_loss_sum", loss_sum)
    trained(config_of(), tmp_path)
    lines = steps_of(log_of(tmp_path))
    assert [line["bad_steps"] for line in lines] == [0, 0, 1, 1, 1, 1]
    assert all(math.isfinite(line["loss_nats"]) for line in lines)


def test_bad_steps_between_lines_are_saved_and_no_alarm_of_a_resumed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log counts from the start of the run, the watchdog from the start of the process."""
    config = config_of(checkpoint={"every": 6}, log={"every": 12, "probe_every": 0})
    before = TrainStep._loss_sum
    calls = iter(range(100))

    def loss_sum(self: TrainStep, *args: Any) -> torch.Tensor:
        loss = before(self, *args)
        return loss * float("nan") if next(calls) in (3, 4) else loss

    with monkeypatch.context() as planted:
        planted.setattr(TrainStep, "_loss_sum", loss_sum)
        trained(config, tmp_path / "whole")
    saved = tmp_path / "whole" / "checkpoints" / "step-00000006"
    assert json.loads((saved / "extra-rank0.json").read_text())["bad_steps"] == 2
    trained(config, tmp_path / "rest", resume=saved)
    assert steps_of(log_of(tmp_path / "rest"))[-1]["bad_steps"] == 2
    beat = HeartbeatReader(tmp_path / "rest" / "heartbeat" / "rank0.bin").read()
    assert beat is not None and beat.report is not None
    assert beat.report.bad_steps == 0
