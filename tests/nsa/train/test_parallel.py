"""Two and four processes over gloo against one; and what is refused before a group is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nsa import settings
from nsa.settings import LaunchedPlace
from nsa.train import parallel
from nsa.train.config import RunConfig
from nsa.train.errors import TrainError, TrainExit
from tests.nsa.torchrun import found_by_forks

SCRIPT = Path(__file__).with_name("parallel_ranks.py")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("ranks") / "found.json"
    loaded: dict[str, Any] = found_by_forks(SCRIPT, out)
    return loaded


KINDS = ("ddp", "ddp, small buckets", "fsdp", "hsdp")


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_are_one_process_with_both_batches(found: dict[str, Any], kind: str) -> None:
    """Three clipped steps of two micro-steps move weights by 0.03; what differs is rounding."""
    assert found[kind]["error"] < 1e-5
    assert found[kind]["loss_nats"] == pytest.approx(found["ddp"]["loss_nats"], rel=1e-6)
    assert found[kind]["gradient_norm"] == pytest.approx(found["ddp"]["gradient_norm"], rel=1e-5)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_each_label_of_packed_documents_counts_alike(found: dict[str, Any], kind: str) -> None:
    """Rank 1 has 22 labels where rank 0 has 30: the mean of their means is another loss."""
    assert found[f"{kind}, documents"]["error"] < 1e-5


def test_four_ranks_in_two_copies_are_one_process_with_all_batches(found: dict[str, Any]) -> None:
    """A 2 x 2 mesh: gradients are summed over halves of the weights and over both copies. A sum of
    eight gradients rounds more than one of four.
    """
    four = found["hsdp, replicated"]
    assert four["error"] < 2e-5
    assert four["mesh"] == [2, 2] and found["hsdp"]["mesh"] == [1, 2]
    assert four["local_elements"] == four["elements"] / 2


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_exchanged_once_a_step(found: dict[str, Any], kind: str) -> None:
    """Of two micro-batches the first one's stay on their rank; DDP is told of nothing else."""
    once = [True] if kind.startswith("ddp") else [True, False]
    assert found[kind]["local_micro_steps"] == [once] * 3


def test_buckets_have_the_size_that_is_asked_for(found: dict[str, Any]) -> None:
    assert found["ddp"]["bucket_bytes"] == 25 * 2**20
    assert found["ddp, small buckets"]["bucket_bytes"] == 2**20


def test_compressed_gradients_are_those_of_bf16(found: dict[str, Any]) -> None:
    """Where gloo takes bf16, the hook of NCCL runs here; that it does over NCCL is a GPU's test."""
    compressed, whole = found["ddp, compressed"], found["ddp"]
    assert compressed["in_bf16"] == 1 and whole["in_bf16"] < 0.01
    assert compressed["loss_nats"] == pytest.approx(whole["loss_nats"], rel=1e-3)
    assert compressed["gradient_norm"] == pytest.approx(whole["gradient_norm"], rel=1e-2)


@pytest.mark.parametrize("kind", [*KINDS, "ddp, compressed", "hsdp, replicated"])
def test_a_loss_that_is_not_finite_on_one_rank_changes_nothing_on_any(
    found: dict[str, Any], kind: str
) -> None:
    assert found[kind]["unchanged"] and found[kind]["bad_steps"] == 1


def test_sharded_weights_are_halves(found: dict[str, Any]) -> None:
    assert found["fsdp"]["local_elements"] == found["fsdp"]["elements"] / 2
    assert found["hsdp"]["local_elements"] == found["hsdp"]["elements"] / 2
    assert found["ddp"]["local_elements"] == found["ddp"]["elements"]


def test_ranks_agree_on_the_largest_number(found: dict[str, Any]) -> None:
    assert found["agreed"]["largest"] == 10


def test_compression_wants_nccl(found: dict[str, Any]) -> None:
    refused = found["compressed over gloo"]
    assert refused["code"] == TrainExit.DEVICE and "wanted nccl" in refused["message"]


@pytest.mark.parametrize(
    "place, section, code, message",
    [
        (None, {"kind": "ddp"}, TrainExit.USAGE, "in one process; wanted several"),
        (LaunchedPlace(0, 2, 0), {"kind": "none"}, TrainExit.USAGE, "among 2 processes"),
        (LaunchedPlace(0, 4, 0), {"kind": "hsdp"}, TrainExit.DEVICE, "shard_size=0 among 4"),
        (
            LaunchedPlace(0, 4, 0),
            {"kind": "hsdp", "shard_size": 3},
            TrainExit.DEVICE,
            "shard_size=3 among 4 processes; wanted a divisor",
        ),
        (LaunchedPlace(0, 2, 0), {"backend": "nccl"}, TrainExit.DEVICE, "nccl on cpu"),
        (None, {"backend": "nccl"}, TrainExit.DEVICE, "nccl on cpu"),
        (
            LaunchedPlace(0, 2, 0),
            {"kind": "fsdp", "compress": "bf16"},
            TrainExit.USAGE,
            "compress=bf16 with parallel.kind=fsdp",
        ),
    ],
)
def test_what_cannot_be_is_refused_at_once(
    place: LaunchedPlace | None,
    section: dict[str, Any],
    code: TrainExit,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(settings, "launched_place", lambda: place)
    config = RunConfig.from_mapping({"parallel": section, "train": {"device": "cpu"}})
    with pytest.raises(TrainError, match=message) as caught:
        parallel.connect(config)
    assert caught.value.code is code


@pytest.mark.parametrize("kind", ["fsdp", "hsdp"])
def test_sharded_weights_are_not_compiled(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "launched_place", lambda: LaunchedPlace(0, 4, 0))
    sections = {
        "parallel": {"kind": kind, "shard_size": 2},
        "train": {"device": "cpu", "compile": True},
    }
    with pytest.raises(TrainError, match=f"compile=true with parallel.kind={kind}") as caught:
        parallel.connect(RunConfig.from_mapping(sections))
    assert caught.value.code is TrainExit.USAGE


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(settings, "launched_place", lambda: LaunchedPlace(1, 2, 1))
    config = RunConfig.from_mapping({"train": {"device": "cuda"}})
    with pytest.raises(TrainError, match="local rank 1 with 1 GPUs") as caught:
        parallel.connect(config)
    assert caught.value.code is TrainExit.DEVICE


def test_the_place_is_read_from_torchruns_variables() -> None:
    place = settings.launched_place
    assert place({}) is None
    launched = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
    assert place(launched) == LaunchedPlace(3, 8, 1)
    assert place({"RANK": "0", "WORLD_SIZE": "1"}) == LaunchedPlace(0, 1, 0)
    with pytest.raises(ValueError, match="RANK='x' must be a whole number"):
        place({"RANK": "x", "WORLD_SIZE": "8"})
    with pytest.raises(ValueError, match="RANK=8 must be below WORLD_SIZE=8"):
        place({"RANK": "8", "WORLD_SIZE": "8"})
