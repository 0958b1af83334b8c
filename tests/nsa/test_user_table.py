"""`auto` on cards that nobody measured: by the user's own table, which is reported where it is not
used, else by an estimate.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from nsa import settings
from nsa.capability import assumed
from nsa.config import preset
from nsa.routing import Capability, CardEntry, Problem, Request, Route, UserTable, plan, route
from nsa.settings import Setting, load, table_file
from nsa.thresholds_file import (
    UserTableWarning,
    default_file,
    kernels_sha256,
    parse,
    read,
    table_text,
)

A100 = dataclasses.replace(
    assumed("a100"),
    fa2_provider="torch.varlen 2.11.0",
    fa2_reason="",
    torch_version="2.11.0",
    triton_provider="triton 3.6.0",
    triton_reason="",
)
RTX4090 = dataclasses.replace(A100, device_name="NVIDIA GeForce RTX 4090", sm=(8, 9))
H200 = dataclasses.replace(A100, device_name="NVIDIA H200", sm=(9, 0))
ENTRY = CardEntry(
    device_name=A100.device_name,
    sm=(8, 0),
    dtype="bfloat16",
    num_heads=12,
    num_kv_heads=2,
    head_dim=64,
    v_head_dim=64,
    triton_min_tokens=2048,
    fa2_min_len_win=1024,
    longest_tokens=8192,
    run_id="20261129T220000Z-ab12cd",
    commit="c0ffee",
    nsa_sha256="0" * 64,
    kernels_sha256=kernels_sha256(),
    torch="2.11.0",
    triton="3.6.0",
    date="2026-11-29T22:00:00+00:00",
)


def table(*entries: CardEntry) -> UserTable:
    return parse(table_text(entries).encode(), "mine.json")


def at(
    tokens: int,
    capability: Capability = A100,
    *,
    by: UserTable | None = None,
    model: str = "m7c_125m",
    **request: str,
) -> Route:
    return plan(
        Request(table=by, **request),
        preset(model),
        batch=1,
        tokens=tokens,
        dtype="bfloat16",
        capability=capability,
    )


def taken(found: Route) -> str:
    return found.branch("sel").implementation


# The estimate.


def test_the_estimate_crosses_where_dense_attention_reads_three_times_as_many_keys() -> None:
    """By hand: S / 2 = 3 (S / 32 + 16 * 64 + 512) at S = 11,342.8."""
    assert taken(at(11_342)) != "triton"
    found = at(11_343)
    assert found.counters == ("cmp.triton", "score.triton", "sel.triton", "win.triton")
    for part in ("estimated, not measured on this card", "`perfbench tune --apply` measures it"):
        assert part in found.branch("sel").reason
        assert part.split(",")[0] in str(at(11_342).rejected)
    # a decode step reads all S keys in dense attention: S = 3 (S / 16 + 1536) at 5,671.4
    one = Problem.of(preset("m7c_125m"), batch=1, tokens=5_672, dtype="bfloat16")
    step = dataclasses.replace(one, q_tokens=1, whole=False)
    assert taken(route(Request(), step, A100)) == "triton"
    assert taken(route(Request(), dataclasses.replace(step, k_tokens=5_671), A100)) != "triton"


@pytest.mark.parametrize("sm", [(8, 0), (8, 6), (8, 9), (10, 0), (12, 0)])
def test_every_card_that_the_kernels_are_compiled_for_is_estimated(sm: tuple[int, int]) -> None:
    assert taken(at(65_536, dataclasses.replace(A100, sm=sm))) == "triton"


def test_what_was_measured_needs_no_estimate() -> None:
    assert "thresholds names" in at(2_112, H200).branch("sel").reason
    assert "estimated" not in str(at(256, H200))


@pytest.mark.parametrize(
    ("changes", "sm", "said"),
    [
        ({}, (13, 0), "its kernels were never compiled for SM 13.0"),
        ({"kept_tokens": None}, (8, 0), "a branch alone names no sizes"),
        ({"sel_block": 128}, (8, 0), "selection blocks of more than 64 tokens may spill"),
        ({"head_dim": 256, "v_head_dim": 256}, (8, 9), "116,736 bytes of shared memory"),
        ({"dtype": "float32"}, (8, 0), "in float32 its exact products are for tests"),
        ({}, (7, 5), "SM 7.5 is below 8.0"),
    ],
)
def test_where_nothing_can_be_estimated_the_route_says_why(
    changes: dict[str, object], sm: tuple[int, int], said: str
) -> None:
    problem = Problem.of(preset("m7c_125m"), batch=1, tokens=65_536, dtype="bfloat16")
    problem = dataclasses.replace(problem, **changes)
    found = route(Request(), problem, dataclasses.replace(A100, sm=sm))
    assert taken(found) in ("v2", "masked")
    (reason,) = [one.reason for one in found.rejected if one.alternative == "triton"]
    assert said in reason


# The table.


def test_the_table_decides_on_its_card_and_the_route_names_it() -> None:
    mine = table(ENTRY)
    assert taken(at(2_047, by=mine)) != "triton" and taken(at(2_048, by=mine)) == "triton"
    reason = at(2_048, by=mine).branch("sel").reason
    wanted = f"auto: by the user's table mine.json (measured on {A100.device_name}, run 2026"
    assert reason.startswith(wanted) and "may say otherwise" not in reason
    against = str(at(2_047, by=mine).rejected)
    assert "fewer than 2048 keys, where it is not the fastest by the user's table" in against
    # explicit requests do not ask it
    assert taken(at(1_024, by=mine, path="triton")) == "triton"
    assert taken(at(8_192, by=mine, path="masked")) == "masked"


def test_the_table_outranks_what_the_package_knows() -> None:
    never = dataclasses.replace(
        ENTRY, device_name=H200.device_name, sm=(9, 0), triton_min_tokens=8_193
    )
    assert taken(at(8_192, H200, by=table(never))) != "triton"
    assert taken(at(8_193, H200, by=table(never))) == "triton"


def test_the_table_says_from_where_fa2_serves_the_window() -> None:
    mine = table(dataclasses.replace(ENTRY, triton_min_tokens=1 << 20))
    assert at(1_024, by=mine).branch("win").kernel == "fa2"
    short = at(1_023, by=mine)
    assert short.branch("win").kernel == "sdpa"
    assert "fewer than 1024 keys, where SDPA is as fast by the user's table" in str(short.rejected)
    assert at(1_023, by=mine, fa2="on").branch("win").kernel == "fa2"


def test_another_card_is_not_decided_by_it_and_the_route_says_so() -> None:
    found = at(4_096, RTX4090, by=table(ENTRY))
    assert taken(found) != "triton"
    assert any("holds nothing of NVIDIA GeForce RTX 4090" in note for note in found.notes)
    renamed = dataclasses.replace(A100, device_name="NVIDIA A100-PCIE-40GB")
    assert taken(at(4_096, renamed, by=table(ENTRY))) != "triton"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kernels_sha256": "1" * 64}, "with other kernels of nsa than these"),
        ({"torch": "2.13.0"}, "with torch 2.13.0"),
        ({"triton": "3.7.1"}, "with triton 3.7.1"),
    ],
)
def test_a_table_of_other_software_is_used_and_the_route_says_so(
    changes: dict[str, str], said: str
) -> None:
    found = at(2_048, by=table(dataclasses.replace(ENTRY, **changes)))
    assert taken(found) == "triton" and said in found.branch("sel").reason
    assert "may say otherwise now" in found.branch("sel").reason


def test_a_shape_that_was_not_measured_takes_the_most_reluctant_entry() -> None:
    wide = dataclasses.replace(ENTRY, num_heads=64, head_dim=128, triton_min_tokens=4_096)
    mine = table(ENTRY, wide)
    problem = Problem.of(preset("m7c_125m"), batch=1, tokens=3_000, dtype="bfloat16")
    wider = dataclasses.replace(problem, head_dim=192, v_head_dim=192)
    assert taken(route(Request(table=mine), problem, A100)) == "triton"
    assert taken(route(Request(table=mine), wider, A100)) != "triton"
    longer = dataclasses.replace(wider, q_tokens=4_096, k_tokens=4_096)
    found = route(Request(table=mine), longer, A100)
    assert "for 64 heads on 2 of 128, not this shape" in found.branch("sel").reason
    # 8 heads of 2, dim 60, pad to the same tiles as 6 of 64
    alike = dataclasses.replace(problem, num_heads=16, head_dim=60, v_head_dim=60)
    assert "not this shape" not in route(Request(table=mine), alike, A100).branch("sel").reason


def test_its_own_dtype_outranks_the_other() -> None:
    half = dataclasses.replace(ENTRY, dtype="float16", triton_min_tokens=4_096)
    problem = Problem.of(preset("m7c_125m"), batch=1, tokens=3_000, dtype="bfloat16")
    in_half = dataclasses.replace(problem, dtype="float16")
    for entries in ((ENTRY, half), (half, ENTRY)):
        request = Request(table=dataclasses.replace(table(), entries=entries))
        assert taken(route(request, problem, A100)) == "triton"
        assert taken(route(request, in_half, A100)) != "triton"
    # where one alone was measured, it stands for both
    assert taken(route(Request(table=table(half)), problem, A100)) != "triton"
    assert taken(route(Request(table=table(ENTRY)), in_half, A100)) == "triton"


# The file.


def test_a_written_table_is_read_again() -> None:
    other = dataclasses.replace(ENTRY, dtype="float16", fa2_min_len_win=None, commit=None)
    assert set(table(ENTRY, other).entries) == {ENTRY, other}


def broken(**changes: object) -> str:
    return json.dumps(
        {"schema": 1, "cards": [{**json.loads(table_text((ENTRY,)))["cards"][0], **changes}]}
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "got no JSON"),
        ("\udcff", "got no JSON"),
        ("[" * 100_000, "got no JSON"),
        ("[]", "got no schema"),
        ('{"schema": true, "cards": []}', "got no schema"),
        ('{"schema": 2, "cards": []}', "got schema 2, wanted 1; update nsa"),
        ('{"schema": 0, "cards": []}', "got schema 0, wanted 1; `perfbench tune --apply`"),
        ('{"schema": 1}', "got no list of cards"),
        ('{"schema": 1, "cards": [3]}', "card 1: got int, wanted device_name"),
        (broken(extra=1), "wanted device_name, sm"),
        (broken(sm=[8]), "got sm [8]"),
        (broken(sm=[8, "0"]), "got sm [8, '0']"),
        (broken(triton_min_tokens=-1), "got triton_min_tokens -1"),
        (broken(triton_min_tokens=True), "got triton_min_tokens True"),
        (broken(triton_min_tokens=1.5), "got triton_min_tokens 1.5"),
        (broken(torch=None), "got torch None, wanted str"),
        (broken(num_kv_heads=0), "are no model's"),
        (broken(num_kv_heads=5), "are no model's"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_warning_and_no_table(
    tmp_path: Path, text: str, said: str
) -> None:
    file = tmp_path / "thresholds.json"
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.warns(UserTableWarning) as caught:
        tables = [read(str(file)), read(str(file))]
    assert tables == [None, None]
    (line,) = [str(one.message) for one in caught]
    assert said in line and str(file) in line and "\n" not in line
    assert line.startswith("the user's table is ignored: ") and "NSA_THRESHOLDS=off" in line


def test_two_entries_of_one_card_and_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="two entries of one card, dtype and shape"):
        table(ENTRY, dataclasses.replace(ENTRY, triton_min_tokens=1))
    with pytest.warns(UserTableWarning, match="No such file"):
        assert read(str(tmp_path / "none.json")) is None


def test_a_pipe_is_never_read_since_that_may_not_end(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    reader = "import sys; from nsa.thresholds_file import read; assert read(sys.argv[1]) is None"
    ended = subprocess.run(
        [sys.executable, "-c", reader, str(pipe)], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0
    assert f"{pipe}: got a pipe or a device, wanted a file" in ended.stderr
    with pytest.warns(UserTableWarning, match="got Is a directory, wanted a file"):
        assert read(str(tmp_path)) is None


def test_where_the_file_lies(tmp_path: Path) -> None:
    assert default_file({}) is None
    assert default_file({"HOME": "/h"}) == Path("/h/.config/nsa/thresholds.json")
    assert default_file({"HOME": "/h", "XDG_CONFIG_HOME": "/x"}) == Path("/x/nsa/thresholds.json")
    assert default_file({"HOME": "/h", "XDG_CONFIG_HOME": "x"}) == default_file({"HOME": "/h"})


def test_the_settings_name_one_file(tmp_path: Path) -> None:
    file = default_file({"XDG_CONFIG_HOME": str(tmp_path)})
    assert file is not None
    home = {"XDG_CONFIG_HOME": str(tmp_path)}
    assert load(home).thresholds == Setting() and load(home).user_table() is None
    file.parent.mkdir()
    file.write_text(table_text((ENTRY,)), encoding="utf-8")
    found = load(home)
    mine = found.user_table()
    assert found.thresholds == Setting(str(file)) and found.given() == {}
    assert found.request().table is mine is not None
    assert mine.entries == (ENTRY,)
    for off in ("off", "0", "OFF"):
        settled = load({**home, "NSA_THRESHOLDS": off})
        assert settled.user_table() is None and settled.given() == {"NSA_THRESHOLDS": "off"}
    other = tmp_path / "Other.json"
    other.write_text(table_text(()), encoding="utf-8")
    named = load({**home, "NSA_THRESHOLDS": f" {other} "})
    empty = named.user_table()
    assert empty is not None and empty.entries == ()
    assert named.given() == {"NSA_THRESHOLDS": str(other)}


def test_where_a_table_would_be_written(tmp_path: Path) -> None:
    assert table_file({"HOME": "/h"}) == Path("/h/.config/nsa/thresholds.json")
    assert table_file({"HOME": "/h", "NSA_THRESHOLDS": "/t.json"}) == Path("/t.json")
    with pytest.raises(ValueError, match="NSA_THRESHOLDS=off .* allows no table; unset it"):
        table_file({"HOME": "/h", "NSA_THRESHOLDS": "off"})
    with pytest.raises(ValueError, match="neither XDG_CONFIG_HOME nor HOME"):
        table_file({})
    with pytest.raises(ValueError, match="must be off, or an absolute path"):
        load({"NSA_THRESHOLDS": "mine.json"})


def test_a_table_without_this_card_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "mine.json"
    file.write_text(table_text((ENTRY,)), encoding="utf-8")
    monkeypatch.setattr(settings, "current", lambda: load({"NSA_THRESHOLDS": str(file)}))
    problem = Problem.of(preset("m7c_125m"), batch=1, tokens=4_096, dtype="bfloat16")
    with pytest.warns(UserTableWarning) as caught:
        routes = [settings.decide(problem, RTX4090), settings.decide(problem, RTX4090)]
    assert routes[0] is routes[1]
    (line,) = [str(one.message) for one in caught]
    assert f"got {A100.device_name}, wanted NVIDIA GeForce RTX 4090; run `perfbench tune" in line
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        settings.decide(problem, A100)
        settings.decide(problem, assumed("none"))


COMPILED = """
import dataclasses, sys, torch
from nsa import functional, settings
from nsa.config import NSAConfig
from tests.nsa.test_user_table import A100, at

settings.current = lambda: settings.load({"NSA_THRESHOLDS": sys.argv[1]})
functional.capability.probe = lambda device: A100

def call(q):
    found = functional.route_for(
        q, 2, 64, q.shape[1], branches=("cmp", "sel", "win"), q_start=0, path="auto", fa2="off",
        config=NSAConfig(),
    )
    return q + (1 if found.has("score") else 0)

compiled = torch.compile(call, fullgraph=True, backend="eager", dynamic=True)
for tokens in map(int, sys.argv[2:]):
    q = torch.zeros(1, tokens, 12, 64, dtype=torch.bfloat16)
    print(int(compiled(q).max()), end=" ")
print(torch._dynamo.utils.counters["stats"]["unique_graphs"])
"""


@pytest.mark.parametrize(
    ("named", "lengths", "wanted"),
    [
        ("off", [8_000, 9_000, 12_000, 13_000], "0 0 1 1 2"),
        ("table", [1_000, 1_500, 2_048, 3_000], "0 0 1 1 2"),
    ],
)
def test_the_decision_is_traced_with_one_guard(
    tmp_path: Path, named: str, lengths: list[int], wanted: str
) -> None:
    """In a process of its own; one graph for shorter and one for longer sequences."""
    file = tmp_path / "mine.json"
    file.write_text(table_text((ENTRY,)), encoding="utf-8")
    arguments = [str(file) if named == "table" else named, *map(str, lengths)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPILED, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == wanted.split()
