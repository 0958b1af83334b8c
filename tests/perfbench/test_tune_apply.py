"""`perfbench tune --apply`: the user's own table, from proved runs of this very card alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import nsa
import nsa.settings
from nsa.config import preset
from nsa.routing import CardEntry, Request, plan
from nsa.thresholds_file import kernels_sha256, parse, table_text
from perfbench.commands import app, measuring
from perfbench.machine import environment
from perfbench.records import Environment
from perfbench.records.rows import Status
from tests.perfbench import builders
from tests.perfbench.test_tune import CARD, H100, FakeExecutor, crossing_times, machine

NSA = Path(nsa.__file__).parent
OTHER = CardEntry(
    device_name="NVIDIA L40S",
    sm=(8, 9),
    dtype="bfloat16",
    num_heads=12,
    num_kv_heads=2,
    head_dim=64,
    v_head_dim=64,
    triton_min_tokens=1024,
    fa2_min_len_win=None,
    longest_tokens=8192,
    run_id="other",
    commit=None,
    nsa_sha256="0" * 64,
    kernels_sha256="0" * 64,
    torch="2.11.0",
    triton="3.6.0",
    date="2026-11-01T00:00:00+00:00",
)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeExecutor:
    """An H100 that is not there, with a home of its own."""
    fake = machine(monkeypatch, tmp_path, gpu=True)
    fake.step_ms = crossing_times
    (tmp_path / "nsa").mkdir()  # the measured code, whose digest is below
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("NSA_THRESHOLDS", raising=False)
    monkeypatch.setattr("perfbench.machine.source.package_sha256", lambda folder: "f" * 64)
    monkeypatch.setattr("perfbench.machine.package_sha256", lambda folder: "f" * 64)
    return fake


def tune(*argv: str) -> int:
    return app.invoke(["tune", "--lengths", "256,1024,4096", "--seed", "1", *argv])


def written() -> Path:
    return Path("config/nsa/thresholds.json").absolute()


def stored() -> str:
    (folder,) = (one for one in Path("reports/runs").iterdir() if one.is_dir())
    return str(folder)


def test_what_is_decided_is_written_and_auto_takes_it(
    card: FakeExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune("--apply") == 0
    out, err = capsys.readouterr()
    assert out == (Path(stored()) / "tune.md").read_text(encoding="utf-8")
    assert f"wrote {written()}" in err
    assert "- your own table, which `auto` reads on this card: `perfbench tune --from" in out
    # the package's own table takes path triton at every length on an H100
    triton = "cmp.triton score.triton sel.triton win.triton"
    wanted = "path=auto, 256 tokens: cmp.triton sel.dense win.dense -> cmp.sdpa sel.dense win.dense"
    assert wanted in err
    assert f"path=auto, 4096 tokens: {triton}, as before" in err
    table = parse(written().read_bytes(), "t")
    (entry,) = table.entries
    assert (entry.device_name, entry.sm, entry.dtype) == (CARD, (9, 0), "bfloat16")
    assert (entry.triton_min_tokens, entry.fa2_min_len_win, entry.longest_tokens) == (
        1024,
        4096,
        4096,
    )
    assert (entry.nsa_sha256, entry.kernels_sha256) == ("f" * 64, kernels_sha256())
    assert entry.run_id in Path(stored()).name or entry.run_id in out
    model = preset("m7c_125m")
    for tokens in (1023, 1024):
        found = plan(
            Request(table=table), model, batch=1, tokens=tokens, dtype="bfloat16", capability=H100
        )
        assert (found.branch("cmp").implementation == "triton") == (tokens == 1024)


def test_a_stored_run_is_applied_and_other_entries_are_kept(card: FakeExecutor) -> None:
    assert tune() == 0 and not written().exists()
    written().parent.mkdir(parents=True)
    older = replace(OTHER, device_name=CARD, sm=(9, 0), triton_min_tokens=7)
    fp16 = replace(older, dtype="float16")
    written().write_text(table_text((older, fp16, OTHER)), encoding="utf-8")
    assert app.invoke(["tune", "--from", stored(), "--apply"]) == 0
    entries = parse(written().read_bytes(), "t").entries
    assert {OTHER, fp16} < set(entries) and older not in entries and len(entries) == 3
    assert [one.name for one in written().parent.iterdir()] == ["thresholds.json"]
    before = written().read_bytes()
    assert app.invoke(["tune", "--from", stored(), "--apply"]) == 0
    assert written().read_bytes() == before


def test_a_run_that_is_not_proved_writes_nothing(
    card: FakeExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    card.ends = {("triton", "off", 4096): Status.PARITY}
    assert tune("--apply") == 2
    err = capsys.readouterr().err
    assert "this run decides no table: it is exit 5" in err and not written().exists()
    assert "path=triton" in err and "PARITY" in err


@pytest.mark.parametrize("what", ["card", "code", "edited", "nothing judged"])
def test_a_run_of_something_else_writes_nothing(
    card: FakeExecutor,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    what: str,
) -> None:
    if what == "nothing judged":
        machine(monkeypatch, tmp_path, gpu=False)
        assert tune("--model", "tiny", "--apply") == 2
        said = "path triton was not judged"
    else:
        assert tune() == 0
        said = {
            "card": f"it is of {CARD}, and this machine has NVIDIA H200",
            "code": "it measured another nsa than the one that is installed here",
            "edited": "it carries no digests",
        }[what]
        if what == "card":
            other = replace(H100, device_name="NVIDIA H200")
            monkeypatch.setattr("perfbench.machine.capability_here", lambda fit: other)
        elif what == "code":
            monkeypatch.setattr("perfbench.machine.package_sha256", lambda folder: "e" * 64)
        else:
            monkeypatch.setattr("perfbench.records.rows.DIGESTS_SINCE", 10**6)
        assert app.invoke(["tune", "--from", stored(), "--apply"]) == 2
    err = capsys.readouterr().err
    assert said in err and "Next: `perfbench tune --apply` on an idle card" in err
    assert not written().exists()


def test_a_run_under_settings_of_nsa_decides_nothing(
    card: FakeExecutor, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Everybody's `auto` reads the table, without the setting that it was measured with."""
    env = builders.environment(nsa_settings={"NSA_STRICT_ASSERTS": "1"})
    monkeypatch.setattr(measuring, "collect_environment", lambda device: env)
    assert tune() == 0
    assert app.invoke(["tune", "--from", stored(), "--apply"]) == 2
    assert "it was measured with NSA_STRICT_ASSERTS=1" in capsys.readouterr().err
    assert not written().exists()


def test_a_table_that_is_named_is_written_again(
    card: FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It decides for auto alone, and every cell of such a run names its path."""
    env = builders.environment(nsa_settings={"NSA_THRESHOLDS": "sha256:" + "0" * 64})
    monkeypatch.setattr(measuring, "collect_environment", lambda device: env)
    assert tune("--apply") == 0 and written().exists()


@pytest.mark.parametrize(
    ("content", "variable", "said"),
    [
        ("{}", None, "got no schema"),
        ('{"schema": 2, "cards": []}', None, "update nsa"),
        (None, "off", "NSA_THRESHOLDS=off (environment) allows no table"),
    ],
)
def test_what_cannot_be_written_is_said_before_anything_is_measured(
    card: FakeExecutor,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    content: str | None,
    variable: str | None,
    said: str,
) -> None:
    if variable is not None:
        monkeypatch.setenv("NSA_THRESHOLDS", variable)
    if content is not None:
        written().parent.mkdir(parents=True)
        written().write_text(content, encoding="utf-8")
    assert tune("--apply") == 2
    assert said in capsys.readouterr().err and card.jobs == []
    assert content is None or written().read_text(encoding="utf-8") == content


def test_the_table_is_shown_and_reset(
    card: FakeExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.invoke(["tune", "--show"]) == 0
    assert "there is no table at" in capsys.readouterr().err
    written().parent.mkdir(parents=True)
    mine = replace(OTHER, device_name=CARD, sm=(9, 0), fa2_min_len_win=512)
    written().write_text(table_text((mine, OTHER)), encoding="utf-8")
    assert app.invoke(["tune", "--show"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{written()}, sha256 ") and len(lines) == 2
    assert "path triton from 1024 keys, FA-2 in the window from 512;" in lines[0]
    assert "with other kernels than these" in lines[0]
    assert app.invoke(["tune", "--reset"]) == 0
    assert parse(written().read_bytes(), "t").entries == (OTHER,)
    assert app.invoke(["tune", "--reset"]) == 0
    assert f"holds nothing of {CARD}" in capsys.readouterr().err
    assert app.invoke(["tune", "--show", "--apply"]) == 2
    assert "stand alone" in capsys.readouterr().err


# What perfbench measures with.


def given(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    monkeypatch.setattr(nsa.settings, "current", lambda: nsa.settings.load(variables))


def test_a_table_of_the_home_is_neither_used_nor_recorded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from perfbench.commands.options import nsa_settings

    home = {"XDG_CONFIG_HOME": str(tmp_path)}
    (tmp_path / "nsa").mkdir()
    (tmp_path / "nsa" / "thresholds.json").write_text(table_text((OTHER,)), encoding="utf-8")
    given(monkeypatch, home)
    assert nsa.settings.current().request().table is not None
    assert nsa_settings().request().table is None
    assert environment.nsa_settings() == {}
    monkeypatch.delenv("NSA_THRESHOLDS", raising=False)
    assert environment.without_users_table() == {"NSA_THRESHOLDS": "off"}
    monkeypatch.setattr(nsa.settings, "MEANINGS", {})
    assert environment.without_users_table() == {}, "an older nsa refuses a name it does not know"


def test_a_named_table_is_used_recorded_and_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from perfbench.commands.options import nsa_settings

    def recorded(file: Path) -> Environment:
        given(monkeypatch, {"NSA_THRESHOLDS": str(file)})
        found = environment.collect_environment("cpu")
        assert found.thresholds_file == str(file)
        return found

    one, same, other = (tmp_path / name for name in ("one", "same", "other"))
    for file, entries in ((one, (OTHER,)), (same, (OTHER,)), (other, ())):
        file.write_text(table_text(entries), encoding="utf-8")
    assert recorded(one).settings() == recorded(same).settings() != recorded(other).settings()
    assert recorded(one).nsa_settings == {
        "NSA_THRESHOLDS": f"sha256:{parse(one.read_bytes(), 'x').sha256}"
    }
    assert nsa_settings().request().table is not None
    monkeypatch.setenv("NSA_THRESHOLDS", str(one))
    assert environment.without_users_table() == {}
    given(monkeypatch, {"NSA_THRESHOLDS": "off"})
    assert environment.nsa_settings() == {}
    assert environment.collect_environment("cpu").thresholds_file is None


def test_a_named_table_that_cannot_be_used_ends_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from perfbench.errors import PerfbenchError

    (tmp_path / "bad").write_text("{}", encoding="utf-8")
    for name, said in (("bad", "got no schema"), ("none", "cannot be read: No such file")):
        given(monkeypatch, {"NSA_THRESHOLDS": str(tmp_path / name)})
        with pytest.raises(PerfbenchError, match=said):
            environment.nsa_settings()
