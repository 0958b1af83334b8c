"""What the documentation shows runs, and does what it says: README's block and the examples."""

from __future__ import annotations

import ast
import math
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from examples import llama, train_text

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"


pytestmark = pytest.mark.usefixtures("one_thread")


def test_readme_block_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Exactly the code that is printed there; its results are those of the layer on whole and on
    single documents.
    """
    section = README.read_text(encoding="utf-8").partition("## NSA in your model\n")[2]
    code = section.partition("```python\n")[2].partition("```")[0]
    statements = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.stmt)]
    imports = [node for node in statements if isinstance(node, ast.Import | ast.ImportFrom)]
    assert len(statements) - len(imports) == 10
    torch.manual_seed(0)
    shown: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), shown)

    layer, x = shown["layer"], shown["x"]
    promised = code.partition("print(ran.counts)  # ")[2].partition(" on a CPU")[0]
    assert capsys.readouterr().out == f"{promised}\n"
    assert all(
        parameter.grad is not None and bool(parameter.grad.abs().sum() > 0)
        for parameter in layer.parameters()
    )
    with torch.no_grad():
        whole = layer(x[:, :1001])
        documents = torch.cat([layer(x[:1, :300]), layer(x[:1, 300:])], 1)
        one_document = layer(x[:1])
    packed = shown["packed"].detach()
    torch.testing.assert_close(
        torch.cat([shown["prefill"], shown["decode"]], 1), whole, atol=1e-5, rtol=0
    )
    torch.testing.assert_close(packed, documents, atol=1e-5, rtol=0)
    assert float((packed - one_document)[:, 300:].abs().max()) > 1e-2


def test_training_on_a_text_learns_and_writes(capsys: pytest.CaptureFixture[str]) -> None:
    """In 60 short steps already below what the bytes' frequencies give, and the sample continues
    the prompt.
    """
    outcome = train_text.run(README, steps=60, seq_len=128, prompt="## ", seed=0, max_new_tokens=20)
    count = Counter(README.read_bytes())
    by_hand = -sum(n / count.total() * math.log(n / count.total()) for n in count.values())
    assert outcome.unigram == pytest.approx(by_hand, abs=1e-9)
    # nearly ln 256: nothing is known yet
    assert len(outcome.losses) == 60 and outcome.losses[0] > 5.0
    assert sum(outcome.losses[-10:]) / 10 < by_hand - 0.3
    assert outcome.text.startswith("## ") and len(outcome.text) > len("## ")

    out = capsys.readouterr().out
    # planned, and run by both layers
    assert "sel: masked (sdpa, torch" in out and "'sel.masked': 2" in out
    assert out.count("tok/s") == 10 and outcome.text in out


def test_training_repeats_with_its_seed(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(bytes(range(256)) * 2)
    first, again, other = (
        train_text.run(file, steps=3, seq_len=64, prompt=None, seed=seed, max_new_tokens=5)
        for seed in (1, 1, 2)
    )
    assert first == again and first.losses != other.losses


@pytest.mark.parametrize(
    ("size", "arguments", "message"),
    [
        (None, [], "which is not a file; wanted a text"),
        (
            200,
            [],
            (
                "has 200 bytes; wanted at least 1139 for --seq-len 512; give a longer file or lower"
                " --seq-len"
            ),
        ),
        (72, ["--seq-len", "32"], "has 72 bytes; wanted at least 73"),
        (2000, ["--seq-len", "8"], "--seq-len 8; wanted at least 1 and 32"),
        (2000, ["--steps", "0"], "--steps 0"),
        (2000, ["--prompt", ""], "--prompt is empty"),
    ],
)
def test_training_says_what_is_missing(
    size: int | None,
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "text"
    if size is not None:
        file.write_bytes(b"a" * size)
    with pytest.raises(SystemExit) as exit_:
        train_text.main([str(file), *arguments])
    assert exit_.value.code == 2 and message in capsys.readouterr().err


def test_smallest_text_trains(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"ab" * 36 + b"a")
    assert train_text.main([str(tmp_path / "text"), "--seq-len", "32", "--steps", "1"]) == 0


def test_llama_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """FAULTS "models that are saved": the example's gates come back."""
    llama.main()
    equal, sparse, saved = capsys.readouterr().out.splitlines()
    assert float(equal.rpartition(" ")[2]) < 1e-4 and "'sel.masked': 2" in sparse
    assert saved == "from disk: 25 of 25 tensors bit for bit, gates included"


@pytest.mark.parametrize(
    ("example", "launcher"),
    [
        ("lightning_step.py", ""),
        ("accelerate_step.py", ""),
        (
            "accelerate_step.py",
            "-m accelerate.commands.launch --cpu --num_processes 1 --num_machines 1"
            " --dynamo_backend no --mixed_precision bf16",
        ),
    ],
    ids=["lightning", "accelerate", "accelerate-bf16"],
)
def test_a_trainer_of_somebody_elses_trains(
    example: str, launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From another folder, as a program of its own: six steps on the same rows, each below the one
    before, from nothing known (ln 256 = 5.5, and what a new head adds) to well below; it writes no
    file.
    """
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    ran = subprocess.run(
        [sys.executable, *launcher.split(), str(ROOT / "examples" / example)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    losses = [float(x) for x in re.findall(r"^step \d+: loss (\S+)$", ran.stdout, re.M)]
    assert len(losses) == 6 and losses == sorted(losses, reverse=True)
    assert math.log(256) - 0.5 < losses[0] < 6.5 and losses[-1] < 4
    assert list(tmp_path.iterdir()) == []
