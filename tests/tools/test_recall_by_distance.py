"""tools/recall_by_distance.py on models whose answers are known, and on the folder of a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nsa.chosen_blocks import record
from nsa.config import NSAConfig, preset
from nsa.train.config import RunConfig
from nsa.train.data.generated import Language
from nsa.train.data.recall import RecallRows, num_pairs_for
from nsa.train.run_folder import write_resolved
from tests.nsa.train.test_loop import trained
from tools import recall_by_distance as tool

GEOMETRY = NSAConfig(cmp_block=8, cmp_stride=4, sel_block=16, num_selected=5, window=24)
LENGTH = 256
CPU = torch.device("cpu")


def rows_of(count: int = 3, length: int = LENGTH) -> RecallRows:
    return Language("recall", 0, held_out=True).questions(0, 0, count, length)


class Known(nn.Module):
    """Right where ``is_right``; says that kv head 1 of layer 1 chose the blocks of ``chosen``."""

    def __init__(self, rows: RecallRows, is_right: np.ndarray, chosen: np.ndarray) -> None:
        super().__init__()
        self.config: Any = SimpleNamespace(config_of=lambda layer: GEOMETRY)
        self.rows, self.is_right, self.chosen = rows, is_right, chosen
        self.calls = 0

    def forward(self, ids: Tensor) -> Tensor:
        first = self.calls
        self.calls += len(ids)
        part = slice(first, self.calls)
        assert ids.tolist() == self.rows.ids[part].tolist()
        answers = np.where(self.is_right, self.rows.labels, 0)[part].clip(min=0)
        blocks = np.full((*ids.shape, 2, 1), -1)
        blocks[..., 1, 0] = np.where(self.chosen, self.rows.stated // 16, -1)[part]
        record(torch.full((*ids.shape, 2, 1), -1))
        record(torch.from_numpy(blocks))
        return nn.functional.one_hot(torch.from_numpy(answers).long(), 256).float()


def test_questions_are_far_where_no_key_of_the_window_and_no_forced_block_holds_the_pair() -> None:
    rows = rows_of(60)
    far = tool.is_far(rows, GEOMETRY)
    for row, stated in enumerate(rows.stated.tolist()):
        for at, value in enumerate(stated):
            pair = {value - 1, value}
            window = set(range(at - 23, at + 1))
            block = at // 16 * 16
            forced = {*range(16), *range(block - 16, block + 16)}
            assert far[row, at] == (value > 0 and not pair & window and not pair & forced)
    assert 0 < far.sum() < (rows.stated > 0).sum()


def test_accuracy_is_of_its_distances_and_the_best_layer_is_named() -> None:
    rows = rows_of()
    distance = np.arange(LENGTH) - rows.stated
    near = (rows.stated > 0) & (distance < 24)
    model: Any = Known(rows, near, rows.stated % 3 > 0)
    found = {one.distance: one for one in tool.recalled(model, rows, 32, CPU)}
    assert list(found) == ["1 to 23", "24 to 255", "all", "far"]
    assert (found["1 to 23"].right_pct, found["24 to 255"].right_pct) == (100.0, 0.0)
    assert found["all"].questions == 3 * LENGTH // 8
    assert found["all"].right_pct == pytest.approx(100 * near.sum() / (3 * LENGTH // 8))
    assert found["far"].guess_pct == 100 / 32
    far = tool.is_far(rows, GEOMETRY)
    share = 100 * float((rows.stated % 3 > 0)[far].mean())
    assert found["far"].chosen_pct == pytest.approx(share)
    assert found["far"].chosen_by == "layer 1, kv head 1"


def test_layers_that_divide_the_pairs_choose_together() -> None:
    rows = rows_of()
    odd = rows.stated % 2 == 1

    class Divided(Known):
        def forward(self, ids: Tensor) -> Tensor:
            logits = super().forward(ids)
            blocks = torch.from_numpy(np.where(odd, -1, rows.stated // 16)[: len(ids)])
            record(blocks[..., None, None].expand(*ids.shape, 2, 1))
            return logits

    model: Any = Divided(rows, odd, odd & (rows.stated % 3 > 0))
    found = tool.recalled(model, rows, 32, CPU)[-1]
    far = tool.is_far(rows, GEOMETRY)
    assert found.chosen_pct == pytest.approx(100 * float((~odd)[far].mean()))
    assert found.chosen_by == "layer 2, kv head 0"
    together = ~odd | (rows.stated % 3 > 0)
    assert found.chosen_by_any_pct == pytest.approx(100 * float(together[far].mean()))
    assert found.chosen_pct < found.chosen_by_any_pct < 100


def test_many_rows_are_several_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "TOKENS_A_FORWARD", LENGTH)
    rows = rows_of()
    model: Any = Known(rows, rows.labels >= 0, rows.labels >= 0)
    assert tool.recalled(model, rows, 32, CPU)[-1].right_pct == 100.0
    assert model.calls == 3


def run_of(out: Path, data: dict[str, Any]) -> Path:
    config = RunConfig(
        model=replace(preset("tiny"), dim=32, head_dim=8),
        data=replace(RunConfig().data, workers=0, **data),
        train=replace(
            RunConfig().train, steps=1, seq_len=128, batch=1, precision="fp32", device="cpu"
        ),
    )
    out.mkdir()
    write_resolved(out, config)
    trained(config, out)
    return out


def test_a_run_is_evaluated_from_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, file = run_of(tmp_path / "run", {"kind": "recall"}), tmp_path / "found.json"
    words = [str(run), "--lengths", "64", "256", "--questions", "20", "--json", str(file)]
    assert tool.main(words) == 0
    found = json.loads(file.read_text())
    assert [(one["length"], one["questions"]) for one in found if one["distance"] == "all"] == [
        (64, 24),
        (256, 32),
    ]
    assert all(one["guess_pct"] == 100 / num_pairs_for(one["length"]) for one in found)
    assert "layer" in capsys.readouterr().out
    assert tool.main([str(run), "--lengths", "8"]) == 2
    assert "--lengths 8 holds no 2 pairs" in capsys.readouterr().err


def test_a_run_of_copying_is_evaluated_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, file = run_of(tmp_path / "run", {"kind": "copying"}), tmp_path / "found.json"
    words = [str(run), "--lengths", "64", "--questions", "20", "--json", str(file)]
    assert tool.main(words) == 0
    found = json.loads(file.read_text())
    assert [one["questions"] for one in found if one["distance"] == "all"] == [24]
    assert {one["guess_pct"] for one in found} == {100 / 16}  # tokens of a kind
    capsys.readouterr()
    assert tool.main([str(run), "--lengths", "16"]) == 2
    assert "--lengths 16 holds no token of each kind; wanted rows of 32" in capsys.readouterr().err


def test_a_run_of_other_data_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(tmp_path / "run", {"kind": "synthetic"})
    assert tool.main([str(run)]) == 2
    assert "data.kind=synthetic; wanted recall or copying" in capsys.readouterr().err
