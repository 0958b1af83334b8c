"""Matrices: cells and their stable ids, --only, expectations, files, the schema."""

import json
import pathlib
from collections.abc import Callable

import pytest

from nsa import routing
from nsa.config import preset
from perfbench.errors import Exit, PerfbenchError
from perfbench.matrix import matrix as matrices
from perfbench.matrix import matrix_schema, strict_yaml
from perfbench.records import AXES, BUILT_IN, Cell, torch_dtype_name
from tests import effort
from tests.perfbench.matrix_text import VALID, edited, parse

ROOT = pathlib.Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "matrices").glob("*.yaml"))


def ids(matrix: matrices.Matrix) -> list[str]:
    return [one.cell.cell_id for one in matrices.cells(matrix)[0]]


# --- cells


def test_product_minus_exclude_plus_include() -> None:
    kept, excluded = matrices.cells(parse())
    # dense once for both values of fa2; reference for both workloads
    assert len(kept) == 2 * 3 * (2 + 2 + 1) - 4 + 2
    assert [e.cell_id for e in excluded][:1] == ["fa2=on,path=v1,seq_len=512,workload=train"]
    assert {e.reason for e in excluded} == {"too slow"}
    assert len(excluded) == 4


def test_cell_id_is_sorted_and_omits_defaults() -> None:
    assert Cell("train", 128, "v2").cell_id == "path=v2,seq_len=128,workload=train"
    assert (
        Cell("train", 128, "v2", "on", 4, "fp32").cell_id
        == "batch=4,dtype=fp32,fa2=on,path=v2,seq_len=128,workload=train"
    )


def test_cell_id_percent_encodes_values() -> None:
    assert (
        Cell("a,b=c/d|\n", 1, "é").cell_id == "path=%C3%A9,seq_len=1,workload=a%2Cb%3Dc%2Fd%7C%0A"
    )


@pytest.mark.parametrize("path", routing.DENSE_KINDS)
def test_dense_cells_record_fa2_as_not_applicable(path: str) -> None:
    assert Cell("train", 8, path, "on") == Cell("train", 8, path, "off") == Cell("train", 8, path)
    assert Cell("train", 8, path, "on").fa2 == "n/a"
    assert "fa2" not in Cell("train", 8, path, "on").cell_id


def test_other_cells_cannot_record_not_applicable() -> None:
    with pytest.raises(ValueError, match="belongs to dense paths"):
        Cell("train", 8, "v2", "n/a")


def test_axes_of_a_cell_are_complete_and_match_the_registry() -> None:
    axes = Cell("train", 128, "v2").to_mapping()
    defaults = {
        "fa2": "auto",
        "batch": 1,
        "dtype": "bf16",
        "l2": "warm",
        "chunk": 2048,
        "compile": "off",
        "cuda_graph": "off",
    }
    assert axes == {
        "workload": "train",
        "seq_len": 128,
        "path": "v2",
        **defaults,
        "selection": "own",
        "without": "none",
    }
    # the others are named where a cell turns them
    assert set(axes) == set(AXES) - {"world_size", "parallel", "cache"}
    assert set(AXES["path"].choices) == {
        *map(str, routing.Path),
        "auto",
        "adaptive",
        *routing.DENSE_KINDS,
        *routing.CACHED_DENSE_KINDS,
        *BUILT_IN,
    }
    assert [torch_dtype_name(d) for d in AXES["dtype"].choices] == [
        "bfloat16",
        "float16",
        "float32",
    ]


def test_include_returns_an_excluded_cell() -> None:
    matrix = parse(
        edited("include:\n", "include:\n  - {path: v1, seq_len: 512, workload: train, fa2: off}\n")
    )
    kept, excluded = matrices.cells(matrix)
    assert "fa2=off,path=v1,seq_len=512,workload=train" in [c.cell.cell_id for c in kept]
    assert "fa2=off,path=v1,seq_len=512,workload=train" not in [e.cell_id for e in excluded]


def test_every_reason_of_an_excluded_cell_is_given() -> None:
    matrix = parse(edited("include:", "  - {path: v1, seq_len: [512], reason: not here}\ninclude:"))
    assert {e.reason for e in matrices.cells(matrix)[1]} == {"too slow; not here"}


@pytest.mark.parametrize(
    ("spec", "left"),
    [
        ('">=256"', {128}),
        ('">256"', {128, 256}),
        ('"<=256"', {512}),
        ('"< 256"', {256, 512}),
        ("256", {128, 512}),
        ('[128, ">256"]', {256}),
    ],
)
def test_comparisons_of_a_match(spec: str, left: set[int]) -> None:
    matrix = parse(
        edited(
            '{path: v1, seq_len: ">256", reason: "too slow"}',
            f"{{path: v1, seq_len: {spec}, reason: r}}",
        )
    )
    assert {c.cell.seq_len for c in matrices.cells(matrix)[0] if c.cell.path == "v1"} == left


def test_expectations_are_the_union_of_matching_rules() -> None:
    matrix = parse()
    assert matrices.expect_for(matrix, Cell("train", 128, "v2", "on")).engaged == [
        "sel.v2",
        "sel.fa2",
        "win.fa2",
    ]
    assert matrices.expect_for(matrix, Cell("train", 128, "v2", "on")).forbidden == ["sel.v1"]
    assert matrices.expect_for(matrix, Cell("train", 128, "v2", "off")).engaged == ["sel.v2"]
    assert matrices.expect_for(matrix, Cell("train", 128, "dense")).engaged == []


def test_config_hash_follows_what_is_measured_only() -> None:
    cell = Cell("train", 128, "v2", "on").cell_id
    base = matrices.config_sha256(parse(), cell)
    assert matrices.config_sha256(parse(edited("processes: 3", "processes: 7")), cell) == base
    assert (
        matrices.config_sha256(parse(edited("model: tiny", "model: {preset: tiny}")), cell) == base
    )
    assert (
        matrices.config_sha256(
            parse(edited("model: tiny", "model: {preset: tiny, num_layers: 3}")), cell
        )
        != base
    )
    assert matrices.config_sha256(parse(), Cell("train", 128, "v2", "off").cell_id) != base


def test_inline_model() -> None:
    matrix = parse(
        edited("model: tiny", "model: {preset: tiny, n_heads: 8, nsa: {w: 32, rope_base: 5000}}")
    )
    assert (matrix.model.num_heads, matrix.model.nsa.window, matrix.model.nsa.rope_base) == (
        8,
        32,
        5000,
    )
    assert matrix.model.dim == preset("tiny").dim
    assert matrix.model_name.startswith("inline-")
    assert parse().model_name == "tiny"


def test_an_inline_model_may_checkpoint_layers() -> None:
    matrix = parse(edited("model: tiny", "model: {preset: tiny, checkpoint_layers: [0, 1]}"))
    assert matrix.model.checkpoint_layers == (0, 1)


def test_the_text_is_kept_and_parses_again() -> None:
    matrix = parse()
    again = matrices.parse_matrix(matrix.text, matrix.path)
    assert again == matrix
    assert len(matrix.sha256) == 64


def test_loading_and_expanding_grows_with_the_cells_and_not_with_their_square() -> None:
    """Up to 10,000 of them; a quadratic step would be 16."""

    def loading(count: int) -> Callable[[], None]:
        lengths = ", ".join(str(64 * i) for i in range(1, count + 1))
        text = edited("seq_len: [128, 256, 512]", f"seq_len: [{lengths}]")
        text = text.replace("path: [v1, v2, dense]", "path: [v1, v2]").replace(
            "exclude:", "exclude:\n  - {seq_len: 64, reason: r}"
        )

        def work() -> None:
            kept, excluded = matrices.cells(parse(text))
            assert len(kept) + len(excluded) == 8 * count + 2

        return work

    assert effort.growth(loading, 312) < 8


# --- --only


@pytest.mark.parametrize(
    ("only", "count"),
    [
        ([], 28),
        (["path=v2"], 12),
        (["path=v2", "path=dense"], 18),
        (["path=v2", "path=dense", "workload=train"], 9),
        (["seq_len>=256", "path=v2"], 8),
        (["seq_len=>=256", "path=v2"], 8),
        (["seq_len=64"], 2),
        (["fa2=n/a"], 6),
        (["cell=path=dense,seq_len=128,workload=train"], 1),
        (
            [
                "cell=path=dense,seq_len=128,workload=train",
                "cell=path=dense,seq_len=256,workload=train",
            ],
            2,
        ),
    ],
)
def test_only(only: list[str], count: int) -> None:
    assert len(matrices.cells(parse(), only)[0]) == count


@pytest.mark.parametrize(
    ("only", "message"),
    [
        (["paht=v2"], "did you mean 'path'"),
        (["path=masqued"], "did you mean 'masked'"),
        (["path=masked"], "they have path: dense, reference, v1, v2"),
        (["seq_len=777", "seq_len=128"], "they have seq_len: 64, 128, 256, 512"),
        (["seq_len=1e3"], "comparison such as"),
        (["seq_len=true"], "comparison such as"),
        (["path>=v2"], "got the text '>=v2'"),
        (["path"], "is not AXIS=VALUE"),
        ([""], "is not AXIS=VALUE"),
        (["path=v2", "seq_len=64"], "no cell meets all of"),
        (
            ["cell=path=dense,seq_len=128,workload=trian"],
            "did you mean 'path=dense,seq_len=128,workload=train'",
        ),
    ],
)
def test_only_that_cannot_be_served(only: list[str], message: str) -> None:
    with pytest.raises(PerfbenchError, match=message.replace("[", r"\[")) as caught:
        matrices.cells(parse(), only)
    assert caught.value.exit_code is Exit.USAGE


# --- files


def test_missing_unreadable_and_oversized_files(tmp_path: pathlib.Path) -> None:
    large = tmp_path / "large.yaml"
    large.write_bytes(b"#" * (2**20 + 1))
    for path, message in (
        (tmp_path / "absent.yaml", "No such file"),
        (tmp_path, "Is a directory"),
        ("a\0b", "cannot read"),
        (large, "larger"),
    ):
        with pytest.raises(PerfbenchError, match=message) as caught:
            matrices.load_matrix(path)
        assert caught.value.exit_code is Exit.USAGE


def test_bytes_that_are_not_utf8_are_located(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "m.yaml"
    file.write_bytes(b"version: 1\nname: \xe9\n")
    with pytest.raises(PerfbenchError, match=r"m\.yaml:2: byte 0xe9 is not UTF-8"):
        matrices.load_matrix(file)


@pytest.mark.parametrize("change", [lambda t: "\ufeff" + t, lambda t: t.replace("\n", "\r\n")])
def test_byte_order_mark_and_crlf_are_read(tmp_path: pathlib.Path, change) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "m.yaml"
    file.write_bytes(change(VALID).encode())
    assert ids(matrices.load_matrix(file)) == ids(parse())


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.name)
def test_shipped_matrices_load(path: pathlib.Path) -> None:
    matrix = matrices.load_matrix(path)
    assert matrix.name == path.stem
    assert matrices.warnings(matrix) == []


def test_shipped_matrices_are_all_there() -> None:
    cards = [
        "a100",
        "cpu",
        "cpu-gate",
        "h100-demo",
        "h100-gate",
        "h100",
        "h200-demo",
        "h200-gate",
        "rtx4090",
    ]
    topics = [
        "ablation-h200",
        "chain-h200",
        "ddp-cpu",
        "ddp-h200",
        "decode-h100",
        "decode-h200",
        "founding-cpu",
        "founding-h200",
        "host-h200",
        "kernels-b-h200",
        "kernels-h100",
        "kernels-h200",
        "long-h200",
        "memory-h200",
        "memory-loop-h200",
        "nightly-decode-h200",
        "nightly-gate-h200",
        "nightly-kernels-h200",
        "nightly-train-h200",
        "peers-h200",
        "selections-h200",
        "train-h100",
        "train-h200",
        "train-loop-h200",
    ]
    assert sorted(p.stem for p in SHIPPED) == sorted(cards + topics)


# --- schema


def test_json_schema_lists_every_axis_and_section() -> None:
    schema = matrix_schema()
    json.dumps(schema)
    assert set(schema["properties"]["axes"]["properties"]) == set(AXES)
    assert schema["properties"]["axes"]["required"] == ["workload", "seq_len"]
    assert schema["properties"]["axes"]["properties"]["fa2"]["items"] == {
        "enum": ["on", "off", "auto"]
    }
    assert schema["additionalProperties"] is False
    assert {"reason", *AXES} == set(schema["properties"]["exclude"]["items"]["properties"])
    assert {"version", "name", "target", "axes"} == set(schema["required"])


# --- overrides, aliases, sentinels

EXTRA = """\
overrides:
  - {match: {path: v1}, gate: {tolerance_pct: 20}, reason: "a Python loop"}
  - {match: {seq_len: ">=256", path: v1}, gate: {min_effect_pct: 9}, reason: "longer loops"}
aliases: {"path=old,seq_len=256,workload=train": "path=dense,seq_len=256,workload=train"}
sentinels: [gemm, copy]
gate:"""


def test_overrides_aliases_and_sentinels_reach_the_gate() -> None:
    matrix = parse(edited("gate:", EXTRA))
    found = matrices.policies(matrix)
    loop, long_loop, other = (
        f"fa2=on,path={path},seq_len={n},workload=train"
        for path, n in (("v1", 128), ("v1", 256), ("v2", 256))
    )
    assert [
        (found.of(cell).tolerance_pct, found.of(cell).min_effect_pct)
        for cell in (loop, long_loop, other)
    ] == [
        (20, 3),
        (20, 9),
        (5, 3),
    ]
    assert matrix.sentinels == ("gemm", "copy") and parse().sentinels == ()
    alias = found.aliases["path=old,seq_len=256,workload=train"]
    dense = next(
        one
        for one in matrices.cells(matrix)[0]
        if one.cell.cell_id == "path=dense,seq_len=256,workload=train"
    )
    assert (alias.cell_id, alias.config_sha256) == (dense.cell.cell_id, dense.config_sha256)
    assert alias.former_config_sha256 != alias.config_sha256
    # How a cell is judged is not what it measures.
    assert matrices.config_sha256(parse(), dense.cell.cell_id) == alias.config_sha256


def test_the_schema_knows_overrides_aliases_and_sentinels() -> None:
    schema = matrix_schema()
    gate = schema["$defs"]["OverrideSection"]["properties"]["gate"]
    assert (
        "tolerance_pct" in gate["properties"]
        and "alpha_confirm" not in gate["properties"]
        and gate["additionalProperties"] is False
    )
    assert schema["properties"]["sentinels"]["items"] == {
        "enum": ["gemm", "copy", "sdpa_frozen", "all_reduce"]
    }


def test_what_a_caller_changes_in_a_document_is_not_what_the_next_one_gets() -> None:
    """A text that was parsed before is not parsed again."""
    first = strict_yaml.parse("axes:\n  batch: [1]\n", "a.yaml")
    first.data["axes"]["batch"].append(2)
    first.lines.clear()
    second = strict_yaml.parse("axes:\n  batch: [1]\n", "a.yaml")
    assert second.data == {"axes": {"batch": [1]}} and second.line(("axes", "batch")) == 2
    other = strict_yaml.parse("axes:\n  batch: [1]\n", "b.yaml")
    with pytest.raises(PerfbenchError, match=r"^b\.yaml:2: axes\.batch: no"):
        other.fail(("axes", "batch"), "no")
