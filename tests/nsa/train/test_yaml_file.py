"""Strict YAML: what it takes, and the line of what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from nsa.train.errors import TrainError, TrainExit
from nsa.train.yaml_file import MAX_BYTES, read_config

CONFIG = """\
# a comment
out: runs/x
model:
  preset: tiny
  n_layers: 4
  nsa: {l: 16, d: 4}
data:
  kind: text
  paths:
    - a.txt
    - "010"
train:
  batch_size: 3
  lr: 1e-3
  cuda_graph: on
  compile: true
runtime: {precision: fp32, device: cpu}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG, encoding="utf-8")
    return path


def refused(path: Path, *sets: str) -> str:
    """The message, with the file's path as FILE."""
    with pytest.raises(TrainError) as caught:
        read_config(str(path), sets)
    assert caught.value.code == TrainExit.USAGE
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(str(path), "FILE")


def refused_text(tmp_path: Path, text: str) -> str:
    path = tmp_path / "wrong.yaml"
    path.write_text(text, encoding="utf-8")
    return refused(path)


def test_values_are_those_of_yaml_12_and_names_the_founding_ones(file: Path) -> None:
    config = read_config(str(file))
    assert (config.model.num_layers, config.model.dim) == (4, 64)
    assert (config.model.nsa.cmp_block, config.model.nsa.cmp_stride) == (16, 4)
    assert config.data.paths == ("a.txt", "010")
    assert (config.train.batch, config.train.lr, config.train.cuda_graph) == (3, 0.001, "on")
    assert config.train.compile is True
    assert (config.train.precision, config.train.device) == ("fp32", "cpu")
    assert config.out == "runs/x"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("train.seq_len=2048", 2048),
        ("train.lr=1e-3", 0.001),
        ("train.lr=1E6", 1e6),
        ("train.lr=.5", 0.5),
        ("train.lr=3", 3),
        ("train.cuda_graph=on", "on"),
        ("train.cuda_graph='off'", "off"),
        ("train.compile=false", False),
        ("data.paths=[a, b]", ("a", "b")),
        ("data.paths=c", ("c",)),
        ("data.tokenizer_path=~", None),
        ("data.tokenizer_path=1.5.json", "1.5.json"),
        ("train.sample_prompt='x: {y}'", "x: {y}"),
        ("train.sample_prompt=a=b", "a=b"),
        ("model.checkpoint_layers=[0, 2]", (0, 2)),
        ("model.nsa.n_sel=7", 7),
        ("out=elsewhere", "elsewhere"),
    ],
)
def test_a_set_value_is_a_scalar_of_yaml(file: Path, text: str, value: object) -> None:
    config = read_config(str(file), [text])
    name = text.split("=")[0].replace("n_sel", "num_selected")
    found: object = config
    for part in name.split("."):
        found = getattr(found, part)
    assert found == value and type(found) is type(value)


def test_the_last_set_holds_and_outranks_another_name_in_the_file(file: Path) -> None:
    assert read_config(str(file), ["train.batch=5", "train.batch=6"]).train.batch == 6
    assert read_config(str(file), ["train.batch_size=7"]).train.batch == 7
    assert read_config(str(file), ["train.batch=5", "train.batch_size=8"]).train.batch == 8
    assert read_config(str(file), ["model.num_layers=2"]).model.num_layers == 2
    assert read_config(str(file), ["model.nsa.cmp_block=32"]).model.nsa.cmp_block == 32
    assert read_config(str(file), ["train.precision=bf16"]).train.precision == "bf16"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train.seqlen=4", "train.seqlen is not known; did you mean 'seq_len'?"),
        ("trian.lr=4", "trian is no section; did you mean 'train'?"),
        ("model.presett=tiny", "model has no key 'presett'"),
        ("model.preset=tinny", "no model preset 'tinny'; did you mean 'tiny'?"),
        ("train.cuda_graph=of", "train.cuda_graph='of' is not known; did you mean 'off'?"),
        ("train.compile=on", "train.compile='on' must be true or false"),
        ("train.steps=1e6", "train.steps=1000000.0 must be a whole number >= 1"),
        ("train.steps=010", "010 is a number that readers take for another one"),
        ("train.lr", "wanted section.key=value"),
        ("=3", "wanted section.key=value"),
        ("train.lr.more=3", "lr is 0.001, which has no keys"),
        ("train.lr=[1", "not valid YAML"),
        ("train.lr=!!float 1", "the tag 'tag:yaml.org,2002:float' is not used"),
        ("train=5", "train=5 must be a mapping"),
        ("data.tokenizer_path=5", "data.tokenizer_path=5 must be a text; quote it"),
    ],
)
def test_a_wrong_set_is_refused_by_its_own_text(file: Path, text: str, message: str) -> None:
    found = refused(file, text)
    assert found.startswith(f"--set {text}: ") and message in found


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("lr: 1e-3", "lrr: 1e-3", 14, "train.lrr is not known; did you mean 'lr'?"),
        ("train:", "trian:", 12, "trian is no section; did you mean 'train'?"),
        ("{l: 16,", "{ll: 16,", 6, "nsa has no key 'll'; did you mean 'l'?"),
        ("l: 16", "l: 15", 6, "NSAConfig.cmp_block=15 must be a multiple"),
        ("n_layers: 4", "n_layers: 0", 5, "ModelConfig.num_layers=0 must be"),
        ("batch_size: 3", "batch_size: 0", 13, "train.batch=0 must be"),
        ("batch_size: 3", "batch_size: 3\n  batch: 4", 14, "train.batch is given twice"),
        ("lr: 1e-3", "batch_size: 4", 14, "train.batch_size is given twice, first at FILE:13"),
        ("kind: text", "kind: texts", 8, "data.kind='texts' is not known; did you mean 'text'?"),
        ("compile: true", "compile: yes", 16, "train.compile='yes' must be true or false"),
        ("out: runs/x", "out: 5", 2, "out=5 must be a path"),
        ("kind: text", "text_column: 5", 8, "data.text_column=5 must be a text; quote it"),
        ("{precision: fp32,", "{precisoin: fp32,", 17, "runtime is no section"),
        ("    - a.txt", "\t- a.txt", 10, "not valid YAML: a TAB; use spaces"),
        ("    - a.txt", "    - [a.txt", 12, "not valid YAML"),
        ("lr: 1e-3", "lr: &x 1e-3", 14, "anchors (&) and aliases (*) are not used"),
        ("lr: 1e-3", "lr: !!float 1", 14, "the tag 'tag:yaml.org,2002:float' is not used"),
        ("lr: 1e-3", "5: 1e-3", 14, "a key must be text"),
        ("lr: 1e-3", "[lr]: 1e-3", 14, "a key must be text"),
        ("# a comment", "%YAML 1.1\n---", 1, "a YAML directive; remove it"),
        ("runtime: {", "---\nruntime: {", 17, "found another document"),
    ],
)
def test_what_is_wrong_has_a_file_and_a_line(
    tmp_path: Path, old: str, new: str, line: int, message: str
) -> None:
    assert old in CONFIG
    found = refused_text(tmp_path, CONFIG.replace(old, new, 1))
    assert found.startswith(f"FILE:{line}: ") and message in found, found


@pytest.mark.parametrize(
    "number",
    ["010", "-010", "0x10", "0o10", "0b1", "1_000", "+5", "+.5", "1:30", ".inf", "-.INF", ".nan"],
)
def test_a_number_that_readers_take_for_another_is_refused(tmp_path: Path, number: str) -> None:
    found = refused_text(tmp_path, f"train:\n  lr: {number}\n")
    assert found.startswith(f"FILE:2: {number} is a number that readers take for another one")


def test_a_number_beyond_the_range_is_refused(tmp_path: Path) -> None:
    assert "1e999 is beyond the range" in refused_text(tmp_path, "train: {lr: 1e999}\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "FILE:1: the file is empty"),
        ("# nothing\n", "FILE:1: the file is empty"),
        ("- a\n", "FILE:1: the top is no mapping"),
        ("text\n", "FILE:1: the top is no mapping"),
        ("a: \x07\n", "FILE: not valid YAML"),
        ("train: " + "{a: " * 40 + "}" * 40 + "\n", "FILE:1: nested deeper than 16 levels"),
        ("train: " + "[" * 5000 + "\n", "FILE:1: nested deeper than 16 levels"),
    ],
)
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, text: str, message: str) -> None:
    assert refused_text(tmp_path, text).startswith(message)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    assert refused(tmp_path).startswith("FILE is a folder; wanted a config")
    assert "No such file" in refused(tmp_path / "gone.yaml")
    assert "embedded null" in refused(tmp_path / "a\0b")
    (tmp_path / "bytes.yaml").write_bytes(b"out: a\nmodel: \xff\n")
    assert refused(tmp_path / "bytes.yaml").startswith("FILE:2: byte 0xff is not UTF-8")
    (tmp_path / "large.yaml").write_bytes(b"#" * (MAX_BYTES + 1))
    assert "which no config has" in refused(tmp_path / "large.yaml")


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    path = tmp_path / "bom.yaml"
    path.write_bytes(b"\xef\xbb\xbfout: here\n")
    assert read_config(str(path)).out == "here"


def test_a_shipped_config_is_named() -> None:
    path = Path(__file__).parents[3] / "configs" / "tiny-cpu.yaml"
    assert read_config("@tiny-cpu", ["train.steps=3"]) == read_config(str(path), ["train.steps=3"])
    with pytest.raises(TrainError, match=r"'@tiny-cp' names no config .* did you mean 'tiny-cpu'"):
        read_config("@tiny-cp")
