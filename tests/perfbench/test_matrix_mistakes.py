"""Every mistake in a matrix has a message with file, line and next step; no bytes make a
traceback.
"""

import json
import pathlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfbench.errors import Exit, PerfbenchError
from perfbench.matrix import matrix as matrices
from tests.perfbench.matrix_text import VALID, edited, error_of, parse

TWO = (
    "match: {path: v1}, gate: {power: 0.9}, reason: x}\n  - {match: {fa2: on}, gate: {power: 0.8},"
    " reason: x"
)
CELL = "path=dense,seq_len=256,workload=train"


def over(body: str) -> str:
    return f"overrides:\n  - {{{body}}}\ngate:"


def alias(*lines: str) -> str:
    return "\n  ".join(["aliases:", *lines]) + "\ngate:"


MISTAKES = [
    # keys
    ("gate:", "gaet:", "m.yaml:18: gaet: unknown key; did you mean 'gate'?"),
    (
        "gate: {tolerance_pct: 5}",
        "gate: {tolerance: 5}",
        "m.yaml:18: gate.tolerance: unknown key; did you mean 'tolerance_pct'?",
    ),
    (
        "gate: {tolerance_pct: 5}",
        "gate: {min_efect_pct: 5}",
        "gate.min_efect_pct: unknown key; did you mean 'min_effect_pct'?",
    ),
    (
        "processes: 3",
        "proceses: 3",
        "m.yaml:17: measure.proceses: unknown key; did you mean 'processes'?",
    ),
    ("{gpu: none}", "{gpus: none}", "m.yaml:3: target.gpus: unknown key; did you mean 'gpu'?"),
    (
        "engaged: [sel.v2]",
        "engagd: [sel.v2]",
        "m.yaml:15: expect[0].engagd: unknown key; did you mean 'engaged'?",
    ),
    (
        "gate:",
        "sentinels: [gem]\ngate:",
        "m.yaml:18: sentinels[0]: no sentinel 'gem'; did you mean 'gemm'?",
    ),
    ("gate:", "sentinels: [gemm, gemm]\ngate:", "m.yaml:18: sentinels[1]: gemm is given twice"),
    (
        "gate:",
        over("match: {path: v1}, gate: {tolerance: 5}, reason: x"),
        "m.yaml:19: overrides[0].gate.tolerance: unknown key; did you",
    ),
    (
        "gate:",
        over("match: {path: v1}, gate: {power: 2}, reason: x"),
        "m.yaml:19: overrides[0].gate.power: got 2: input should be less",
    ),
    (
        "gate:",
        over("match: {path: v1}, gate: {missing: wrn}, reason: x"),
        "gate.missing: got the text 'wrn', wanted fail, warn",
    ),
    (
        "gate:",
        over("match: {path: v1}, gate: {alpha_confirm: 0.1}, reason: x"),
        "overrides[0].gate.alpha_confirm: holds for the whole run",
    ),
    (
        "gate:",
        over("match: {path: v1}, gate: {}, reason: x"),
        "m.yaml:19: overrides[0].gate: changes nothing",
    ),
    (
        "gate:",
        over("match: {}, gate: {power: 0.9}, reason: x"),
        "m.yaml:19: overrides[0].match: names no axis",
    ),
    (
        "gate:",
        over("match: {paht: v1}, gate: {power: 0.9}, reason: x"),
        "overrides[0].match.paht: no axis 'paht'; did you mean 'path'?",
    ),
    (
        "gate:",
        over("match: {path: v1}, gate: {power: 0.9}, reason: ' '"),
        "reason: got the text ' ', wanted a sentence",
    ),
    (
        "gate:",
        over("match: {path: v1}, gate: {power: 0.9}"),
        "m.yaml:19: overrides[0].reason: missing",
    ),
    (
        "gate:",
        over("match: {path: v1}, gaet: {power: 0.9}, reason: x"),
        "overrides[0].gaet: unknown key; did you mean 'gate'?",
    ),
    (
        "gate:",
        over("match: {path: masked}, gate: {power: 0.9}, reason: x"),
        "m.yaml:19: overrides[0]: dead rule: {path: masked}",
    ),
    (
        "gate:",
        over(TWO),
        (
            "m.yaml:20: overrides[1].gate.power: cell fa2=on,path=v1,seq_len=128,workload=train:"
            " power is 0.8"
        ),
    ),
    (
        "gate:",
        alias("old: 'path=dense,seq_len=129,workload=train'"),
        "in this matrix; did you mean 'path=dense,seq_len=",
    ),
    (
        "gate:",
        alias("old: 'path=dense,seq_len=129,workload=train'"),
        "m.yaml:19: aliases.old: no cell 'path=dense,seq_len=129",
    ),
    (
        "gate:",
        alias(f"'path=dense,seq_len=128,workload=train': '{CELL}'"),
        "seq_len=128,workload=train: this cell still exists",
    ),
    (
        "gate:",
        alias(f"a: '{CELL}'", f"b: '{CELL}'"),
        f"m.yaml:20: aliases.b: {CELL} is the new name of a already",
    ),
    (
        "name: demo",
        "name: demo\nname: other",
        "m.yaml:3: duplicate key 'name', first given in line 2",
    ),
    (
        "fa2: [on, off]\n",
        "fa2: [on, off]\n  fa2: [on]\n",
        "m.yaml:10: duplicate key 'fa2', first given in line 9",
    ),
    ("{gpu: none}", "{gpu: none, gpu: H100}", "m.yaml:3: duplicate key 'gpu'"),
    ("name: demo\n", "", "name: missing; add `name:`"),
    ("version: 1\n", "", "version: missing; add `version:`"),
    ("name: demo", "1: demo", "m.yaml:2: a key must be text"),
    ("name: demo", "? [a]\n: demo", "m.yaml:2: a key must be text"),
    (
        "  seq_len: [128, 256, 512]\n",
        "",
        "m.yaml:5: axes: axis 'seq_len' is missing and has no default",
    ),
    # version
    ("version: 1", "version: 2\nnovelty: 1", "m.yaml:1: version: version 2 is newer than 1"),
    ("version: 1", "version: 0", "m.yaml:1: version: got 0, wanted 1"),
    ("version: 1", "version: true", "m.yaml:1: version: got the truth value true, wanted 1"),
    ("version: 1", "version: '1'", "m.yaml:1: version: got the text '1', wanted 1"),
    # axes
    ("  fa2:", "  f2a:", "m.yaml:9: axes.f2a: no axis 'f2a'; did you mean 'fa2'?"),
    ("[128, 256, 512]", "[]", "m.yaml:7: axes.seq_len: empty axis"),
    ("[128, 256, 512]", "128", "m.yaml:7: axes.seq_len: got 128"),
    (
        "[128, 256, 512]",
        "['1e6']",
        "m.yaml:7: axes.seq_len[0]: got the text '1e6', wanted a whole number >= 1",
    ),
    (
        "[128, 256, 512]",
        "[1e6]",
        "m.yaml:7: axes.seq_len[0]: got 1000000.0, wanted a whole number >= 1",
    ),
    (
        "[128, 256, 512]",
        "[128,\n    010]",
        "m.yaml:8: 010 is a number that readers take for another one",
    ),
    ("[128, 256, 512]", "[0x80]", "m.yaml:7: 0x80 is a number that readers take for another one"),
    ("[128, 256, 512]", "[1_000]", "m.yaml:7: axes.seq_len[0]: got the text '1_000'"),
    ("[128, 256, 512]", "[true]", "m.yaml:7: axes.seq_len[0]: got the truth value true"),
    ("[128, 256, 512]", "[0]", "m.yaml:7: axes.seq_len[0]: got 0, wanted a whole number >= 1"),
    ("[128, 256, 512]", "[-1]", "m.yaml:7: axes.seq_len[0]: got -1"),
    ("[128, 256, 512]", "[~]", "m.yaml:7: axes.seq_len[0]: got nothing"),
    ("[128, 256, 512]", "[.inf]", "m.yaml:7: .inf is a number"),
    ("[128, 256, 512]", "[1e999]", "m.yaml:7: 1e999 is beyond the range"),
    ("[128, 256, 512]", f"[{'9' * 5000}]", "m.yaml:7: 999"),
    ("[128, 256, 512]", "[128, 128]", "m.yaml:7: axes.seq_len[1]: 128 is given twice"),
    (
        "fa2: [on, off]",
        "fa2: [true, false]",
        "axes.fa2[0]: got the truth value true, wanted one of on, off, auto; on and off are text",
    ),
    (
        "fa2: [on, off]",
        "fa2: [yes]",
        "m.yaml:9: axes.fa2[0]: got the text 'yes', wanted one of on, off, auto",
    ),
    ("fa2: [on, off]", "fa2: [n/a]", "m.yaml:9: axes.fa2[0]: n/a is what dense paths record"),
    ("[v1, v2, dense]", "[v1, v2, masqued]", "m.yaml:8: axes.path[2]: got the text 'masqued'"),
    ("[v1, v2, dense]", "[v1, v2, masqued]", "did you mean 'masked'?"),
    ("[train, forward]", "[train, foward]", "did you mean 'forward'?"),
    ("fa2: [on, off]", "dtype: [bf61]", "did you mean 'bf16'?"),
    # exclude, include, expect
    (', reason: "too slow"', "", "m.yaml:11: exclude[0]: reason: got nothing"),
    ('path: v1, seq_len: ">256", ', "", "m.yaml:11: exclude[0]: names no axis"),
    ('">256"', '">=many"', "m.yaml:11: exclude[0].seq_len: got the text '>=many'"),
    (
        'seq_len: ">256"',
        "seq_len: []",
        "m.yaml:11: exclude[0].seq_len: an empty list matches nothing",
    ),
    (
        '{path: v1, seq_len: ">256"',
        "{paht: v1",
        "m.yaml:11: exclude[0].paht: no axis 'paht'; did you mean 'path'?",
    ),
    ("{path: reference, seq_len: 64, fa2: off}", "{}", "m.yaml:13: include[0]: names no axis"),
    ("path: reference", "path: refrence", "did you mean 'reference'?"),
    (
        "forbidden: [sel.v1]",
        "forbidden: [sel.v11]",
        "m.yaml:15: expect[0].forbidden[0]: no counter 'sel.v11'; did you mean 'sel.v1'?",
    ),
    ("forbidden: [sel.v1]", "forbidden: [sel.v2]", "sel.v2 is both engaged and forbidden"),
    (
        "engaged: [sel.v2], forbidden: [sel.v1]",
        "engaged: []",
        "m.yaml:15: expect[0]: expects nothing",
    ),
    (
        "match: {path: v2, fa2: on}",
        "match: {path: masked}",
        "m.yaml:16: expect[1]: dead rule: {path: masked} matches none of the 28 cells",
    ),
    # model
    (
        "model: tiny",
        "model: tiney",
        "m.yaml:4: model: no model preset 'tiney'; did you mean 'tiny'?",
    ),
    (
        "model: tiny",
        "model:\n  preset: tiny\n  nheads: 4",
        "m.yaml:6: model.nheads: model has no key 'nheads'; did you mean",
    ),
    (
        "model: tiny",
        "model:\n  preset: tiny\n  num_heads: 3",
        "m.yaml:6: model.num_heads: num_heads=3 must be a multiple of",
    ),
    (
        "model: tiny",
        "model:\n  preset: tiny\n  nsa:\n    l_sel: 15",
        "m.yaml:7: model.nsa.l_sel: NSAConfig.sel_block=15 must be",
    ),
    (
        "model: tiny",
        "model: {dim: '64'}",
        "m.yaml:4: model.dim: got the text '64', wanted a whole number",
    ),
    ("model: tiny", "model: {dim: true}", "m.yaml:4: model.dim: got the truth value true"),
    (
        "model: tiny",
        "model: {preset: tiny, layers: [nsa, dense]}",
        "m.yaml:4: model.layers: got layers of several kinds, wanted one kind",
    ),
    (
        "model: tiny",
        "model: {preset: tiny, nsa: {softcap: 30.0}}",
        "m.yaml:4: model.nsa.softcap: got softcap, which the harness's own oracle and twin do not"
        " compute; wanted none; leave softcap out",
    ),
    (
        "model: tiny",
        "model: {preset: tiny, nsa: {sinks: true}}",
        "m.yaml:4: model.nsa.sinks: got sinks, which the harness's own oracle",
    ),
    ("model: tiny", "model: {nsa: 3}", "m.yaml:4: model.nsa: got 3, wanted a mapping"),
    (
        "model: tiny",
        "model: {nsa: {branches: 3}}",
        "m.yaml:4: model.nsa.branches: got 3, wanted a list",
    ),
    (
        "model: tiny",
        "model: {nsa: {branches: [[sel]]}}",
        "m.yaml:4: model.nsa.branches: got [['sel']], wanted a list",
    ),
    (
        "model: tiny",
        "model: {nsa: {rope_base: big}}",
        "m.yaml:4: model.nsa.rope_base: got the text 'big', wanted a number",
    ),
    (
        "model: tiny",
        "model: {preset: tiny, checkpoint_layers: 2}",
        "m.yaml:4: model.checkpoint_layers: ModelConfig.checkpoint_layers=2 must be (first, stop)",
    ),
    ("model: tiny", "model: {preset: [tiny]}", "m.yaml:4: model.preset: got ['tiny'], wanted text"),
    ("model: tiny", "model: 3", "m.yaml:4: model: got 3, wanted a preset"),
    ("model: tiny", "model:", "m.yaml:4: model: got nothing, wanted a preset"),
    # sections
    (
        "processes: 3",
        "processes: 0",
        "m.yaml:17: measure.processes: got 0: input should be greater than or equal to 1",
    ),
    ("processes: 3", "processes: '3'", "m.yaml:17: measure.processes: got the text '3'"),
    ("processes: 3", "processes: true", "m.yaml:17: measure.processes: got the truth value true"),
    (
        "warmup_s: 1",
        "warmup_s: -1",
        "m.yaml:17: measure.warmup_s: got -1: input should be greater than or equal to 0",
    ),
    ("tolerance_pct: 5", "tolerance_pct: 0", "m.yaml:18: gate.tolerance_pct: got 0"),
    (
        "{gpu: none}",
        "{gpu: none, on_mismatch: refuze}",
        "got the text 'refuze', wanted refuse, warn, skip; did you mean 'refuse'?",
    ),
    ("{gpu: none}", "{gpu: ~}", "m.yaml:3: target.gpu: got nothing"),
    (
        "name: demo",
        "name: ../demo",
        "m.yaml:2: name: got the text '../demo', wanted letters, digits",
    ),
    ("name: demo", 'name: "demo\\n"', "m.yaml:2: name: got"),
    # YAML
    ("[128, 256, 512]", "[128, 256, 512", "m.yaml:8: not valid YAML"),
    ("name: demo", "name: de\tmo: x", "m.yaml:2: not valid YAML"),
    ("name: demo", "name: &a demo", "m.yaml:2: anchors (&) and aliases (*) are not used"),
    ("name: demo", "name: *a", "m.yaml:2: anchors (&) and aliases (*) are not used"),
    ("name: demo", "name: !!python/object:os.system demo", "m.yaml:2: the tag"),
    ("name: demo", 'name: "\\UFFFFFFFF"', "not valid YAML"),
    ("name: demo", "name: \x00", "m.yaml:2: not valid YAML"),
    ("name: demo", "name: \ud800", "m.yaml:2: not valid YAML"),
    ("name: demo", "name: " + "[" * 3000, "m.yaml:2: nested deeper than"),
    (
        "version: 1",
        "%YAML 1.1\n---\nversion: 1",
        "m.yaml:1: a line that begins with % is a YAML directive",
    ),
    ("gate:", "---\ngate:", "m.yaml:18: a second document begins here"),
]


@pytest.mark.parametrize(("old", "new", "message"), MISTAKES)
def test_mistakes_are_named_with_their_line(old: str, new: str, message: str) -> None:
    assert message in error_of(edited(old, new))


@pytest.mark.parametrize("text", ["", "\n# nothing\n", "3", "[1]", "~"])
def test_a_file_that_is_not_a_mapping(text: str) -> None:
    assert "a mapping that begins with `version: 1`" in error_of(text)


def test_several_mistakes_are_reported_together_by_line() -> None:
    text = edited("name: demo", "name: 3").replace("gate:", "gaet:")
    first, second = error_of(text).splitlines()
    assert first.startswith("m.yaml:2: name")
    assert second.startswith("m.yaml:18: gaet")


def test_all_cells_excluded_names_the_exclusions() -> None:
    text = edited(
        '{path: v1, seq_len: ">256", reason: "too slow"}',
        '{workload: [train, forward], reason: "holiday"}',
    )
    text = text.replace("include:\n  - {path: reference, seq_len: 64, fa2: off}\n", "")
    message = error_of(text)
    assert message.startswith("m.yaml:10: exclude: all 30 cells are excluded")
    assert "line 11 {workload: train|forward}: holiday" in message


def test_a_product_beyond_reason_is_refused() -> None:
    numbers = ", ".join(map(str, range(1, 400)))
    text = edited("fa2: [on, off]", f"fa2: [on, off]\n  batch: [{numbers}]").replace(
        "[128, 256, 512]", f"[{numbers}]"
    )
    assert "more than 100000" in error_of(text)


def test_dead_exclude_and_include_are_warnings() -> None:
    assert matrices.warnings(parse()) == []
    text = edited(
        "include:\n",
        "  - {path: v2, seq_len: 999, reason: r}\ninclude:\n  - {path: v2, seq_len: 128}\n",
    )
    assert [w.split(";")[0] for w in matrices.warnings(parse(text))] == [
        "m.yaml:12: exclude {path: v2, seq_len: 999} matches no cell",
        "m.yaml:14: include adds no cell",
    ]


@pytest.mark.parametrize(
    "old, new, words",
    [
        (
            "processes: 3",
            "processes: 2",
            "m.yaml:18: gate.min_replicates: got min_replicates=3",
        ),
        (
            "{tolerance_pct: 5}",
            "{min_replicates: 4}",
            "measure.processes=3, wanted at most",
        ),
        (
            "{tolerance_pct: 5}",
            "{tolerance_pct: 5}\noverrides:\n"
            '  - {match: {path: v1}, gate: {min_replicates: 5}, reason: "x"}',
            "got min_replicates=5 of cell fa2=",
        ),
    ],
)
def test_too_few_replicates_for_the_gate_are_refused(
    old: str, new: str, words: str, tmp_path: Path
) -> None:
    """FAULTS "cannot judge, measures all the same": every cell would be WATCH, exit 0; of a run
    that was made its matrix is read all the same.
    """
    text = edited(old, new)
    path = tmp_path / "m.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(PerfbenchError, match=words) as caught:
        matrices.load_matrix(path)
    assert caught.value.exit_code is Exit.USAGE
    assert parse(text).name == "demo"


# --- no bytes make a traceback


def survives(path: pathlib.Path, raw: bytes) -> None:
    """Load the bytes: success, or the one error that users may see."""
    path.write_bytes(raw)
    caught = None
    try:
        matrices.cells(matrices.load_matrix(path))
    except PerfbenchError as error:
        caught = error
    assert caught is None or (caught.exit_code is Exit.USAGE and str(path) in str(caught))


YAML_PIECES = st.sampled_from(
    [
        "&a ",
        "*a",
        "!!int ",
        "!<x> ",
        "? ",
        ": ",
        "- ",
        "{",
        "}",
        "[",
        "]",
        ",",
        "|\n",
        ">\n",
        "---\n",
        "...\n",
        "%YAML 1.2\n",
        "#",
        "'",
        '"',
        "\\",
        "\t",
        "\n",
        "\n  ",
        "~",
        "<<: ",
        "=",
        "0",
        "1e9",
        ".nan",
        "true",
        "\x85",
        "\u2028",
        "\ufeff",
        "\x00",
        "\ud7ff",
        "é",
        "\\x41",
        "\\UFFFFFFFF",
        "@",
        "`",
    ]
)


@given(st.binary(max_size=80))
@settings(max_examples=300, deadline=None)
def test_no_traceback_for_any_bytes(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    survives(tmp_path_factory.getbasetemp() / "fuzz.yaml", raw)


@given(st.lists(YAML_PIECES, max_size=14))
@settings(max_examples=400, deadline=None)
def test_no_traceback_for_any_yaml_pieces(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[str]
) -> None:
    survives(tmp_path_factory.getbasetemp() / "fuzz.yaml", "".join(pieces).encode())


@given(st.data())
@settings(max_examples=250, deadline=None)
def test_no_traceback_for_mutated_matrices(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    raw = VALID
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(raw)))
        end = min(len(raw), start + data.draw(st.integers(0, 12)))
        raw = (
            raw[:start]
            + data.draw(YAML_PIECES | st.text(max_size=3).filter(lambda t: t.isprintable()))
            + raw[end:]
        )
    survives(tmp_path_factory.getbasetemp() / "fuzz.yaml", raw.encode())


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.floats(allow_nan=False, allow_infinity=False)
)
VALUES = st.recursive(
    SCALARS | st.sampled_from(["", "v2", "on", "n/a", ">=3"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["path", "seq_len", "reason", "match", "nsa", "x"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)
SECTIONS = [
    "version",
    "name",
    "target",
    "model",
    "axes",
    "exclude",
    "include",
    "expect",
    "measure",
    "limits",
    "gate",
]


@given(st.sampled_from(SECTIONS), VALUES)
@settings(max_examples=250, deadline=None)
def test_no_traceback_for_any_value_of_a_section(
    tmp_path_factory: pytest.TempPathFactory, key: str, value: object
) -> None:
    kept = [
        block
        for block in VALID.replace("\n ", "\0 ").splitlines()
        if not block.startswith(f"{key}:")
    ]
    text = "\n".join([*kept, f"{key}: {json.dumps(value)}"]).replace("\0", "\n")
    survives(tmp_path_factory.getbasetemp() / "fuzz.yaml", text.encode())
