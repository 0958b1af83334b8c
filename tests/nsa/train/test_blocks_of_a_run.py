"""`python -m nsa.train blocks`: the blocks are those that the trained layers choose, the statistics
are those of a loop over queries, and what cannot be kept is one line.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import nsa
from nsa import attention
from nsa.config import ModelConfig
from nsa.train import cli
from nsa.train.block_statistics import block_statistics
from nsa.train.blocks_file import write_blocks
from nsa.train.data.generated import Language
from nsa.train.errors import TrainError, TrainExit
from nsa.train.finished import load_run
from nsa.train.run_folder import checkpoint_of, write_resolved
from tests.nsa.train.test_loop import MODEL, config_of, trained

TOKENS = 300
TEXT = bytes(32 + (i * i + i // 7) % 90 for i in range(1000))
LAYERS = ModelConfig.from_mapping(
    {"preset": "tiny", "dim": 32, "head_dim": 8, "num_layers": 3, "layers": ["nsa", "dense", "nsa"]}
).layers


def run_of(out: Path, **changes: Any) -> Path:
    sections: dict[str, dict[str, Any]] = {
        "train": {"steps": 4, "eval_every": 0, **changes.pop("train", {})},
        "log": {"every": 2, "probe_every": 0},
    }
    config = replace(config_of(**sections), model=replace(MODEL, **changes))
    out.mkdir()
    write_resolved(out, config)
    trained(config, out)
    return out


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_of(tmp_path_factory.mktemp("blocks") / "run", num_layers=2)


def kept(run: Path, file: Path, *more: str) -> tuple[dict[str, Any], dict[str, Any]]:
    words = ["blocks", str(run), "--out", str(file), "--tokens", str(TOKENS), *more]
    assert cli.invoke(words) == TrainExit.OK
    with np.load(file, allow_pickle=False) as arrays:
        about = json.loads(str(arrays["about"]))
        return about, {name: arrays[name] for name in arrays.files if name != "about"}


def test_blocks_are_those_that_the_layers_choose(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """q and the compressed keys are taken out of a forward of the checkpoint."""
    text = tmp_path / "text"
    text.write_bytes(TEXT)
    about, arrays = kept(run, tmp_path / "b.npz", "--text", str(text))
    assert sorted(arrays) == ["blocks_0", "blocks_1"] and about["format"] == 1
    model, _ = load_run(run, checkpoint_of(run, "auto"))
    queries: list[Tensor] = []
    keys: list[Tensor] = []
    rotate, compress = attention.rotate, attention.compress_kv

    def rotated(t: Tensor, *rest: Any, **options: Any) -> Tensor:
        queries.append(rotate(t, *rest, **options))
        return queries[-1]

    def compressed(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        keys.append(compress(*args, **options)[0])
        return compress(*args, **options)

    monkeypatch.setattr(attention, "rotate", rotated)
    monkeypatch.setattr(attention, "compress_kv", compressed)
    with torch.no_grad():
        logits = model(torch.tensor([list(TEXT[:TOKENS])]))
    for layer in (0, 1):
        q = queries[2 * layer]  # then the keys
        wanted = nsa.select_blocks(q, keys[layer], config=model.config.nsa)
        got = arrays[f"blocks_{layer}"]
        assert got.dtype == np.int16 and got.shape == (TOKENS, 2, 5)
        np.testing.assert_array_equal(got, wanted[0].numpy())
    assert not np.array_equal(arrays["blocks_0"], arrays["blocks_1"])
    labels = torch.tensor(list(TEXT[1:TOKENS]))
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], labels).item()
    assert about["held_out"]["loss_nats"] == pytest.approx(loss, rel=1e-5)
    assert about["text"]["source"] == "text"
    assert about["text"]["sha256"] == hashlib.sha256(TEXT).hexdigest()


def test_the_file_says_what_it_is_of(run: Path, tmp_path: Path) -> None:
    about, arrays = kept(run, tmp_path / "deep" / "b.npz", "--layers", "1")
    assert list(arrays) == ["blocks_1"] and list(about["layers"]) == ["1"]
    checkpoint = checkpoint_of(run, "auto")
    manifest = (checkpoint / "manifest.json").read_bytes()
    assert about["checkpoint"] == {
        "name": "step-00000004",
        "step": 4,
        "manifest_sha256": hashlib.sha256(manifest).hexdigest(),
    }
    resolved = json.loads((run / "config.json").read_text())
    assert about["run"] == {"name": "run", "config_sha256": resolved["sha256"]}
    geometry = about["layers"]["1"]["nsa"]
    assert (geometry["sel_block"], geometry["num_selected"], geometry["window"]) == (16, 5, 24)
    seed = resolved["config"]["data"]["seed"]
    ids = Language("synthetic", seed, held_out=True).ids(0, 0, 1, TOKENS + 1)[:, :-1]
    assert about["text"]["ids_sha256"] == hashlib.sha256(ids.astype("<i4").tobytes()).hexdigest()
    assert about["text"]["source"] == "held out" and about["tokens"] == TOKENS
    assert [one.name for one in (tmp_path / "deep").iterdir()] == ["b.npz"]


def test_each_layers_summary_is_its_own(run: Path, tmp_path: Path) -> None:
    about, arrays = kept(run, tmp_path / "b.npz")
    for layer, one in about["layers"].items():
        blocks = arrays[f"blocks_{layer}"]
        same = (blocks[1:] == blocks[:-1]).all(-1).mean()
        summary = one["summary"]
        assert summary["rows"] == TOKENS * 2 and summary["gate_rows"] == TOKENS * 4
        assert summary["same_as_previous_share"] == pytest.approx(same)
        assert summary["blocks_mean"] == pytest.approx((blocks >= 0).sum(-1).mean())
    first, second = (about["layers"][layer]["summary"] for layer in "01")
    assert first["branch_share"] != second["branch_share"]


def looped(
    blocks: list[list[list[int]]], sel_block: int, initial: int, local: int
) -> dict[str, Any]:
    """The same numbers, a query and a head at a time."""
    T, G, N = len(blocks), len(blocks[0]), len(blocks[0][0])
    spread: Counter[int] = Counter()
    hot = [Counter[int]() for _ in range(G)]
    shared = asked = equal = choosing = 0
    for t in range(T):
        current = t // sel_block
        if current + 1 <= N:
            continue
        choosing += 1
        equal += all(row == blocks[t][0] for row in blocks[t])
        for g in range(G):
            for j in blocks[t][g]:
                if not initial <= j <= current - local:
                    continue
                spread[int(math.log2(current - j))] += 1
                hot[g][j] += 1
                if (t - 1) // sel_block + 1 > N:
                    asked += 1
                    shared += j in blocks[t - 1][g]
    top = max(1, int(((T - 1) // sel_block - local - initial + 1) / 100))
    of_heads = [[count for _, count in one.most_common()] for one in hot]
    return {
        "queries_that_choose": choosing,
        "spread": {octave: n / spread.total() for octave, n in spread.items()},
        "shared": shared / asked,
        "equal": equal / choosing,
        "hottest": sum(one[0] / sum(one) for one in of_heads) / G,
        "top": sum(sum(one[:top]) / sum(one) for one in of_heads) / G,
    }


@pytest.mark.parametrize("alike", [False, True])
def test_statistics_are_those_of_a_loop(alike: bool) -> None:
    """450 queries of 2 tokens a block: 225 blocks, of which two are a hundredth."""
    T, sel_block, initial, local, N = 450, 2, 1, 2, 6
    rng = np.random.default_rng(5)
    rows = []
    for t in range(T):
        current = t // sel_block
        heads = []
        for _ in range(2):
            forced = {j for j in range(current + 1) if j < initial or j > current - local}
            free = sorted(set(range(current + 1)) - forced)
            num = min(N - len(forced), len(free))
            chances = np.arange(len(free), 0, -1.0) ** 3
            drawn = rng.choice(free, num, replace=False, p=chances / chances.sum()) if num else []
            row = sorted(forced | set(map(int, drawn)))
            heads.append(row + [-1] * (N - len(row)))
        rows.append([heads[0], heads[0] if alike and t % 3 else heads[1]])
    found = block_statistics(
        np.array(rows, np.int16), sel_block=sel_block, num_initial=initial, num_local=local
    )
    wanted = looped(rows, sel_block, initial, local)
    names = ["1", "2-3", "4-7", "8-15", "16-31", "32-63", "64-127", "128-255"]
    assert found["queries_that_choose"] == wanted["queries_that_choose"] == T - 2 * N
    assert found["distance_share"] == pytest.approx(
        {name: wanted["spread"].get(octave, 0.0) for octave, name in enumerate(names)}
    )
    assert found["shared_with_previous_share"] == pytest.approx(wanted["shared"])
    assert found["equal_in_all_heads_share"] == pytest.approx(wanted["equal"])
    assert found["hottest_block_share"] == pytest.approx(wanted["hottest"])
    assert found["hottest_1pct_share"] == pytest.approx(wanted["top"])
    assert found["hottest_1pct_share"] > found["hottest_block_share"]


def test_where_no_query_chooses_there_are_no_shares() -> None:
    blocks = np.array([[[0, -1]], [[0, 1]]], np.int16)
    found = block_statistics(blocks, sel_block=1, num_initial=1, num_local=1)
    assert (found["queries_that_choose"], found["free_blocks"]) == (0, 0)
    assert found["distance_share"] == {}
    assert {found[name] for name in found if name.endswith("_share") and name[0] != "d"} == {None}


def test_a_layer_that_attends_to_everything_is_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mixed = run_of(tmp_path / "mixed", num_layers=3, layers=LAYERS)
    capsys.readouterr()
    about, arrays = kept(mixed, tmp_path / "b.npz", "--json")
    shown = capsys.readouterr()
    assert json.loads(shown.out) == {key: about[key] for key in about if key != "format"}
    assert "layer 1 attends to everything, so it has no blocks\n" in shown.err
    assert sorted(arrays) == ["blocks_0", "blocks_2"] and about["attend_to_everything"] == [1]


def test_the_table_shows_the_layers_in_columns(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    about, _ = kept(run, tmp_path / "b.npz")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("run run, step 4: 300 tokens (held out), ")
    assert lines[1].split() == ["layer", "0", "layer", "1"]
    shares = [about["layers"][layer]["blocks"]["shared_with_previous_share"] for layer in "01"]
    row = next(line for line in lines if line.startswith("free blocks shared with it"))
    assert row.split()[-4:] == [word for one in shares for word in f"{100 * one:.1f} %".split()]
    assert len({len(line) for line in lines[1:]}) == 1


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        (["--layers", "0,2"], TrainExit.USAGE, "--layers 2: the model's layers are 0 to 1"),
        (["--layers", "a"], TrainExit.USAGE, "--layers 'a': wanted numbers of layers"),
        (["--tokens", "80"], TrainExit.USAGE, "all blocks fit into its 5 slots; wanted --tokens"),
        (["--tokens", "0"], TrainExit.USAGE, "--tokens 0 must be a number >= 2"),
        (["--text", "gone"], TrainExit.DATA, "--text gone cannot be read: No such file"),
        (["--text", "short"], TrainExit.DATA, "--text short has 40 tokens; wanted 300 in one row"),
        (["--checkpoint", "gone"], TrainExit.CHECKPOINT, "--checkpoint gone is no folder"),
        (["--out", "short"], TrainExit.USAGE, "short is there already; wanted a new file"),
        (["--out", "short/b.npz"], TrainExit.USAGE, "cannot write short/b.npz: "),
    ],
)
def test_what_cannot_be_kept_is_one_line(
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    more: list[str],
    code: TrainExit,
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("short").write_bytes(TEXT[:40])
    words = ["blocks", str(run), "--out", "b.npz", "--tokens", "300", *more]
    assert cli.invoke(words) == code
    shown = capsys.readouterr()
    assert said in shown.err and shown.err.count("\n") == 1 and not shown.out
    assert [one.name for one in tmp_path.iterdir()] == ["short"]


def test_the_dense_twin_chooses_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense = run_of(tmp_path / "dense", train={"attention": "dense", "path": "auto"})
    capsys.readouterr()
    assert cli.invoke(["blocks", str(dense), "--out", str(tmp_path / "b")]) == TrainExit.USAGE
    assert "trained the dense twin, which chooses no blocks" in capsys.readouterr().err


def test_a_write_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "b.npz"
    file.write_text("older")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez_compressed", full)
    with pytest.raises(TrainError, match=r"cannot write .*: No space left on device"):
        write_blocks(file, {}, {})
    assert file.read_text() == "older" and len(list(tmp_path.iterdir())) == 1
