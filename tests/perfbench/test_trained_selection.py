"""`selection: trained`: the blocks of a file, in the matrix, its hashes, the proof, the timed step
and a whole run.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from nsa.capability import assumed
from nsa.config import ModelConfig, preset
from nsa.train.blocks_file import write_blocks
from perfbench.commands import app
from perfbench.errors import Exit, PerfbenchError
from perfbench.matrix import (
    check_configs,
    load_matrix,
    matrix_schema,
    parse_matrix,
    stored_matrix,
    trained_for,
)
from perfbench.matrix import matrix as matrices
from perfbench.matrix.trained import blocks_path
from perfbench.records import Cell, Job, Manifest, Status, TrainedBlocks, read_run
from perfbench.runner import checked_out, plan_of_version
from perfbench.worker.parity import proof, sizes
from perfbench.worker.workloads import block_patterns, trained, workload
from perfbench.worker.workloads.attention import NUM_INPUTS
from tests.docs.blocks import blocks_of
from tests.perfbench import builders
from tests.perfbench.measure_cases import run as measured
from tests.perfbench.test_attention_workload import seen
from tests.perfbench.test_selected_workload import alone

pytestmark = pytest.mark.usefixtures("one_thread", "light")
ROOT = Path(__file__).parents[2]
TINY = preset("tiny")  # blocks of 16, 5 slots: 1 initial, 2 local, 2 free; 2 kv heads
TOKENS = 320
MATRIX = """\
version: 1
name: small
target: {gpu: none}
model: tiny
trained_blocks: b.npz
axes:
  workload: [selected]
  seq_len: [96, 128]
  path: [masked]
  selection: [own, trained]
  dtype: [fp32]
measure: {processes: 1, warmup_s: 0.02, max_s: 0.1, min_sample_ms: 5}
gate: {min_replicates: 1}
"""


def chosen(model: ModelConfig = TINY, seed: int = 3, tokens: int = TOKENS) -> NDArray[np.int16]:
    q = torch.empty(1, tokens, model.num_heads, 1)
    made = block_patterns.chosen(
        "random",
        q,
        config=model.nsa,
        num_kv_heads=model.num_kv_heads,
        generator=torch.Generator().manual_seed(seed),
    )
    return made[0].to(torch.int16).numpy()


def written(
    file: Path, blocks: NDArray[Any] | None = None, *, layers: tuple[int, ...] = (1,), **nsa: Any
) -> Path:
    geometry = {"sel_block": 16, "num_selected": 5, "num_initial": 1, "num_local": 2, **nsa}
    made = chosen() if blocks is None else blocks
    about = {"layers": {str(layer): {"nsa": geometry} for layer in layers}}
    write_blocks(file, about, dict.fromkeys(layers, made))
    return file


@pytest.fixture
def matrix(tmp_path: Path) -> Path:
    written(tmp_path / "b.npz")
    (tmp_path / "m.yaml").write_text(MATRIX)
    return tmp_path / "m.yaml"


def hashes(matrix: matrices.Matrix) -> dict[str, str]:
    return {one.cell.cell_id: one.config_sha256 for one in matrices.cells(matrix)[0]}


OWN, TRAINED = (
    f"dtype=fp32,path=masked,{kind}seq_len=128,workload=selected"
    for kind in ("", "selection=trained,")
)


# --- the matrix


def test_the_content_and_the_layer_are_in_the_hash_and_the_place_is_not(
    matrix: Path, tmp_path: Path
) -> None:
    first = hashes(load_matrix(matrix))
    without = MATRIX.replace("trained_blocks: b.npz\n", "").replace("[own, trained]", "[own]")
    assert hashes(parse_matrix(without, "m.yaml")) == {
        cell_id: first[cell_id] for cell_id in first if "trained" not in cell_id
    }
    written(tmp_path / "deep" / "other.npz")
    matrix.write_text(MATRIX.replace("b.npz", "deep/other.npz"))
    assert hashes(load_matrix(matrix)) == first
    matrix.write_text(MATRIX.replace("b.npz", "{file: deep/other.npz, layer: 1}"))
    assert hashes(load_matrix(matrix)) == first
    for blocks, layers in ((chosen(seed=4), (1,)), (chosen(), (2,))):
        written(tmp_path / "deep" / "other.npz", blocks, layers=layers)
        matrix.write_text(MATRIX.replace("b.npz", "deep/other.npz"))
        now = hashes(load_matrix(matrix))
        assert now[OWN] == first[OWN] and now[TRAINED] != first[TRAINED]
    written(tmp_path / "b.npz", layers=(1, 2))
    by_layer = []
    for layer in (1, 2):
        matrix.write_text(MATRIX.replace("b.npz", f"{{file: b.npz, layer: {layer}}}"))
        by_layer.append(hashes(load_matrix(matrix)))
    assert by_layer[0][OWN] == by_layer[1][OWN] and by_layer[0][TRAINED] != by_layer[1][TRAINED]


def test_a_path_is_relative_to_the_matrix(matrix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_matrix(matrix)
    assert loaded.trained is not None
    assert (loaded.trained.path, loaded.trained.layer, loaded.trained.tokens) == ("b.npz", 1, 320)
    monkeypatch.chdir(matrix.parents[1])
    relative = load_matrix(f"{matrix.parent.name}/m.yaml")
    by_kind = {
        one.cell.selection: trained_for(relative, one.cell) for one in matrices.cells(relative)[0]
    }
    assert by_kind["own"] is None and by_kind["trained"] is not None
    assert by_kind["trained"].path == str(matrix.with_name("b.npz"))
    assert blocks_path("@cpu", "b.npz") == ROOT / "matrices" / "b.npz"
    assert blocks_path("m.yaml", "/b.npz") == Path("/b.npz")


def damaged(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 255
    file.write_bytes(content)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:400])


def no_array(file: Path) -> None:
    with zipfile.ZipFile(file, "w") as members:
        members.writestr("about.npy", b"text")


def spoilt(row: tuple[int, int], **changes: int) -> Callable[[Path], None]:
    def spoil(file: Path) -> None:
        blocks = chosen()
        for slot, block in changes.items():
            blocks[(*row, int(slot[1:]))] = block
        written(file, blocks)

    return spoil


def swapped(file: Path) -> None:
    blocks = chosen()
    blocks[300, 1, [1, 2]] = blocks[300, 1, [2, 1]]
    written(file, blocks)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (Path.unlink, "cannot read {file}: No such file or directory; `python -m nsa.train blocks"),
        (damaged, "{file} is damaged, or no file of `python -m nsa.train blocks`: "),
        (cut, "{file} is damaged, or no file of `python -m nsa.train blocks`: "),
        (no_array, "{file} is damaged, or no file of `python -m nsa.train blocks`: "),
        (lambda file: written(file, layers=(0, 7)), "{file} holds layers 0, 7; wanted one"),
        (lambda file: written(file, sel_block=32), "chosen with sel_block=32 (the model: 16)"),
        (lambda file: written(file, num_local=1), "chosen with num_local=1 (the model: 2)"),
        (lambda file: written(file, chosen()[..., :4]), "num_selected=4 (the model: 5)"),
        (lambda file: written(file, chosen()[:, :1]), "num_kv_heads=1 (the model: 2)"),
        (lambda file: written(file, chosen()[:127]), "holds 127 tokens, and cell dtype=fp32,path"),
        (spoilt((300, 1), s1=-1), "layer 1, token 300, KV head 1 are [0, -1, "),
        (spoilt((300, 0), s0=1), "token 300, KV head 0 are [1, "),
        (spoilt((300, 0), s4=19), "token 300, KV head 0 are [0, "),
        (spoilt((300, 0), s3=16), "token 300, KV head 0 are [0, "),
        (spoilt((20, 0), s2=2), "token 20, KV head 0 are [0, 1, 2, -1, -1]"),
        (spoilt((100, 1), s1=9), "token 100, KV head 1 are [0, 9, "),
        (swapped, "token 300, KV head 1 are [0, "),
    ],
)
def test_a_file_that_does_not_fit_is_one_line(
    matrix: Path, change: Callable[[Path], object], said: str
) -> None:
    file = matrix.with_name("b.npz")
    change(file)
    with pytest.raises(PerfbenchError) as caught:
        load_matrix(matrix)
    message = str(caught.value)
    assert caught.value.exit_code is Exit.USAGE and "\n" not in message
    assert message.startswith(f"{matrix}:5: trained_blocks: ")
    assert said.format(file=file) in message


@pytest.mark.parametrize(
    ("old", "new", "line", "said"),
    [
        ("trained_blocks: b.npz\n", "", 9, "add `trained_blocks: PATH, or {file: PATH, layer: N}`"),
        ("[own, trained]", "[own]", 5, "no cell has selection: trained"),
        ("[selected]", "[forward]", 5, "no cell has selection: trained"),
        ("b.npz", "{file: b.npz, layer: 0}", 5, "holds layers 1; got layer 0"),
        ("b.npz", "{file: b.npz, layer: x}", 5, "trained_blocks.layer: got the text 'x', wanted"),
        ("b.npz", "{file: b.npz, layer: true}", 5, "got the truth value true"),
        ("b.npz", "{file: b.npz, lyer: 1}", 5, "trained_blocks.lyer: unknown key"),
        ("b.npz", "[b.npz]", 5, "wanted PATH, or {file: PATH, layer: N}"),
        ("b.npz", "", 5, "got nothing, wanted PATH"),
        ("b.npz", ".", 5, "Is a directory; `python -m nsa.train blocks"),
        (
            "model: tiny",
            "model: {preset: tiny, nsa: {adaptive_num_selected: true}}",
            5,
            "set it to false",
        ),
        ("trained_blocks: b", "trained_block: b", 5, "unknown key; did you mean 'trained_blocks'"),
    ],
)
def test_a_mistake_in_the_key_is_one_line(
    matrix: Path, old: str, new: str, line: int, said: str
) -> None:
    assert old in MATRIX
    matrix.write_text(MATRIX.replace(old, new, 1))
    with pytest.raises(PerfbenchError) as caught:
        load_matrix(matrix)
    message = str(caught.value)
    assert said in message and "\n" not in message
    assert message.startswith(f"{matrix}:{line}: ")


def test_the_schema_knows_the_key() -> None:
    known = matrix_schema()["properties"]["trained_blocks"]["anyOf"]
    assert known[0]["type"] == "string" and set(known[1]["properties"]) == {"file", "layer"}


def test_the_example_of_the_page_is_valid(tmp_path: Path) -> None:
    page = blocks_of(ROOT / "docs" / "matrix.md")
    (example,) = (b for b in page if b.language == "yaml" and "trained_blocks" in b.text)
    large = preset("m7c_125m")
    geometry = {"sel_block": 64, "num_selected": 16, "num_initial": 1, "num_local": 2}
    written(tmp_path / "blocks.npz", chosen(large, tokens=16384), layers=(0, 5, 11), **geometry)
    head = "version: 1\nname: m\ntarget: {gpu: none}\nmodel: m7c_125m\n"
    path = tmp_path / "m.yaml"
    path.write_text(head + example.text.replace("axes:", "axes:\n  path: [v2]"))
    kinds = {cell.selection for cell in matrices.cells_of(load_matrix(path))}
    assert kinds == {"own", "trained", "local", "hot"}
    shipped = (ROOT / "matrices" / "selections-h200.yaml").read_text()
    assert "\n# trained_blocks: {file: blocks.npz, layer: 5}\n" in shipped
    uncommented = shipped.replace("# trained_blocks", "trained_blocks")
    path.write_text(uncommented.replace("hot]", "hot, trained]").replace("65536", "16384"))
    assert load_matrix(path).trained == named(tmp_path / "blocks.npz", 5)


def test_the_shipped_blocks_are_of_the_run_in_the_learning_report() -> None:
    folder = ROOT / "reports" / "learning"
    read = load_matrix(folder / "selections-trained-h200.yaml").trained
    assert read is not None and (read.layer, read.tokens) == (5, 32768)
    with np.load(folder / read.path, allow_pickle=False) as arrays:
        run = json.loads(str(arrays["about"]))["run"]
    report = (folder / "report.md").read_text(encoding="utf-8")
    assert f"| {run['name']} | nsa | 0 |" in report
    assert f"`{run['config_sha256'][:12]}`" in report


def named(file: Path, layer: int) -> TrainedBlocks:
    content = hashlib.sha256(file.read_bytes()).hexdigest()
    return TrainedBlocks(path=file.name, layer=layer, sha256=content, tokens=16384)


def manifest_of(matrix: matrices.Matrix, **changes: Any) -> Manifest:
    cells = [
        builders.planned_cell(one.cell).model_copy(update={"config_sha256": one.config_sha256})
        for one in matrices.cells(matrix)[0]
    ]
    values = {"matrix_text": matrix.text, "matrix_path": matrix.path, **changes}
    return builders.manifest(cells, gpu=False, trained_blocks=matrix.trained, **values)


def test_a_run_is_judged_by_its_manifest_without_the_file(matrix: Path) -> None:
    loaded = load_matrix(matrix)
    stored = Manifest.model_validate_json(manifest_of(loaded).model_dump_json())
    matrix.with_name("b.npz").unlink()
    assert hashes(stored_matrix(stored)) == hashes(loaded)
    check_configs(stored_matrix(stored), stored.cells, "run")
    bare = stored.model_copy(update={"trained_blocks": None})
    with pytest.raises(PerfbenchError, match="the run's manifest keeps no file of blocks"):
        stored_matrix(bare)
    other = stored.model_copy(
        update={"trained_blocks": stored.trained_blocks.model_copy(update={"layer": 2})}  # type: ignore[union-attr]
    )
    with pytest.raises(PerfbenchError, match="CORRUPT: cell .*selection=trained"):
        check_configs(stored_matrix(other), other.cells, "run")


def test_another_version_plans_the_same_hashes(matrix: Path) -> None:
    loaded = load_matrix(matrix)
    matrix.with_name("b.npz").unlink()  # its process reads no file
    with checked_out("HEAD", ROOT) as one:
        planned = plan_of_version(one, loaded, [], assumed("none"))
    assert {cell.cell_id: cell.config_sha256 for cell in planned.plan.cells} == hashes(loaded)


# --- the measuring process


def job_of(matrix: Path, seq_len: int = 128, **changes: Any) -> Job:
    asked = alone("masked", "trained", seq_len=seq_len, **changes)
    return asked.model_copy(update={"trained_blocks": trained_for(load_matrix(matrix), asked.axes)})


@pytest.mark.parametrize("tokens", [96, 128])
def test_a_step_has_the_first_rows_of_the_file(matrix: Path, tokens: int) -> None:
    inputs = seen(workload.build(job_of(matrix, tokens, batch=3)), NUM_INPUTS)
    for args, _ in inputs:
        assert args[3].dtype == torch.int32 and args[3].shape == (3, tokens, 2, 5)
        for row in args[3]:
            np.testing.assert_array_equal(row.numpy(), chosen()[:tokens])
    assert not torch.equal(inputs[0][0][0], inputs[1][0][0]), "q, k and v are others"


def test_a_prefix_reads_as_many_keys_as_other_kinds() -> None:
    blocks = torch.from_numpy(chosen()).int()
    q = torch.empty(2, 150, TINY.num_heads, 1)
    options: dict[str, Any] = {
        "config": TINY.nsa,
        "num_kv_heads": 2,
        "generator": torch.Generator().manual_seed(1),
    }
    taken, hot = (
        block_patterns.chosen(kind, q, trained=blocks, **options) for kind in ("trained", "hot")
    )
    assert torch.equal((taken >= 0).sum(-1), (hot >= 0).sum(-1))
    for short in (None, blocks[:149], blocks[:, :1], blocks[..., :4]):
        with pytest.raises(ValueError, match=r"wanted at least \[150, 2, 5\]"):
            block_patterns.chosen("trained", q, trained=short, **options)


def test_the_proof_is_over_the_blocks_of_the_file(
    matrix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[torch.Tensor] = []
    real = proof.selected_attention

    def noted(blocks: torch.Tensor) -> torch.Tensor:
        taken.append(blocks)
        return blocks

    monkeypatch.setattr(
        proof,
        "selected_attention",
        lambda q, k, v, blocks, **o: real(q, k, v, noted(blocks), **o),
    )
    row = measured(job_of(matrix))
    assert row.status is Status.OK and row.parity is not None and row.length_proof is not None
    assert row.parity.tokens == (5 + 4) * 16 + 1 and row.parity.tensors["blocks"] == 0
    assert {blocks.shape[1] for blocks in taken} == {145, 128}
    for blocks in taken:
        np.testing.assert_array_equal(blocks[0].numpy(), chosen()[: blocks.shape[1]])


def test_a_short_file_is_proved_at_its_own_length(matrix: Path) -> None:
    written(matrix.with_name("b.npz"), chosen()[:130])
    row = measured(job_of(matrix))
    assert row.status is Status.OK and row.parity is not None
    assert row.parity.tokens == 130 and not row.parity.own_length


def test_wrong_blocks_are_never_timed(matrix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = trained.blocks_of
    monkeypatch.setattr(trained, "blocks_of", lambda job: real(job).flip(-1))  # type: ignore[union-attr]
    row = measured(job_of(matrix))
    assert row.status is Status.PARITY and "blocks" in row.reason


def test_a_file_that_changed_since_the_plan_is_not_measured(matrix: Path) -> None:
    job = job_of(matrix)
    written(matrix.with_name("b.npz"), chosen(seed=9))
    with pytest.raises(ValueError, match="was planned with"):
        workload.build(job)


def test_the_usual_proof_of_other_cells_has_its_usual_length(matrix: Path) -> None:
    assert sizes.standard_tokens(replace(TINY.nsa)) == 145
    assert trained.blocks_of(alone("masked", "random")) is None
    assert Cell("selected", 64, "v2", selection="trained").cell_id.startswith("path=v2,selection=")


# --- a whole run


def test_a_run_from_the_command_to_its_report(
    matrix: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    matrix.write_text(MATRIX.replace("[96, 128]", "[128]"))
    monkeypatch.chdir(matrix.parent)
    assert app.invoke(["run", "m.yaml", "--out", "runs"]) == Exit.OK
    (out,) = Path("runs").iterdir()
    run = read_run(out)
    assert {row.cell_id: row.status for row in run.replicates} == {
        OWN: Status.OK,
        TRAINED: Status.OK,
    }
    assert run.manifest.trained_blocks == load_matrix(matrix).trained
    written(Path("b.npz"), chosen(seed=4))
    capsys.readouterr()
    assert app.invoke(["run", "m.yaml", "--resume", str(out)]) == Exit.USAGE
    assert f"the configuration of cell {TRAINED} has changed" in capsys.readouterr().err
    Path("b.npz").unlink()
    assert app.invoke(["report", str(out)]) == Exit.OK
    verdict = json.loads((out / "verdict.json").read_text())
    assert {one["cell_id"] for one in verdict["cells"]} == {OWN, TRAINED}
    assert "| trained |" in (out / "report.md").read_text()
