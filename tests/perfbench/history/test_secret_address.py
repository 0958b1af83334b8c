"""No message holds the password of an address, whatever is wrong with the address."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as some

from perfbench.errors import Exit, PerfbenchError
from perfbench.history.store import History
from perfbench.text import shown_address

HUSH = "hush"
# The password begins and ends with HUSH, so that no part of it may be left.
INSIDE = some.text("hx@:/?#&=%;+[]\"' \\\x00\udcff", max_size=6)
PLACES = (
    *(
        "127.0.0.1:1/db",
        "127.0.0.1:notaport/db",
        "[bad/db",
        "",
        "/",
        "127.0.0.1:1",
        "127.0.0.1:1:2",
    ),
    *("127.0.0.1:99999999/db", "127.0.0.1:1/db?sslmode=wrong", "127.0.0.1:1/db?frob=1"),
)
SCHEMES = (
    *("postgresql://", "postgres://", "postgresql+psycopg://", "mysql://", "nothing://", "://"),
    *(" postgresql://", "'postgresql://", "postgresql:", ""),
)
OPTIONS = ("password", "sslpassword", "passwd", "pass%77ord", "paswsord", "pwd", "Password")
KNOWN = ("", "sslmode=disable&", "connect_timeout=1&")
AFTER = ("", "&sslmode=disable", "&frob=1")


@some.composite
def addresses(draw: some.DrawFn) -> str:
    secret = f"{HUSH}{draw(INSIDE)}{HUSH}"
    if draw(some.booleans()):
        secret = quote(secret.encode(errors="surrogatepass"), safe="")
    if draw(some.booleans()):
        user = draw(some.sampled_from(("u", "", "u%40v", "u/v")))
        return (
            f"{draw(some.sampled_from(SCHEMES))}{user}:{secret}@{draw(some.sampled_from(PLACES))}"
        )
    who = draw(some.sampled_from(("", "u@", "u:p@")))
    option = f"{draw(some.sampled_from(KNOWN))}{draw(some.sampled_from(OPTIONS))}={secret}"
    scheme = draw(some.sampled_from([one for one in SCHEMES if "://" in one]))
    return f"{scheme}{who}127.0.0.1:1/db?{option}{draw(some.sampled_from(AFTER))}"


@settings(max_examples=300, deadline=None)
@given(written=addresses())
@example("postgresql://u/v:hush?hush@127.0.0.1:1/db")
@example("postgresql://u/v:hush/hush@127.0.0.1:1/db")
@example("postgresql://u@127.0.0.1:1/db?password=hush@hush")
def test_no_message_holds_the_password(written: str) -> None:
    assert HUSH not in shown_address(written)
    try:
        History.open(written).close()
    except PerfbenchError as error:
        assert HUSH not in str(error) and "\n" not in str(error)
        cause = error.__cause__
        assert cause is None or HUSH not in str(cause)
    else:
        pytest.fail("nobody serves these addresses")


@pytest.mark.parametrize(
    ("given_address", "shown"),
    [
        ("reports/h.sqlite", "reports/h.sqlite"),
        ("a b%20?x=1#y.db", "a b%20?x=1#y.db"),
        ("sqlite:////srv/h.db", "sqlite:////srv/h.db"),
        ("postgresql://me@h/d", "postgresql://me@h/d"),
        ("postgresql://me:secret@h/d", "postgresql://me:***@h/d"),
        ("postgresql://me:se@cr/et@[bad/d", "postgresql://me:***@[bad/d"),
        ("postgresql://h:5432/d?sslmode=require", "postgresql://h:5432/d?sslmode=require"),
        ("postgresql://[::1]:5432/d", "postgresql://[::1]:5432/d"),
        ("postgresql://h/d?user=me&password=x&a=b", "postgresql://h/d?user=me&password=***"),
        ("postgresql://h/d?password=x@y", "postgresql://***"),
        ("postgresql://u:secret", "postgresql://***"),
    ],
)
def test_what_is_no_secret_is_shown(given_address: str, shown: str) -> None:
    assert shown_address(given_address) == shown


def test_an_option_that_postgresql_does_not_know() -> None:
    with pytest.raises(PerfbenchError) as refused:
        History.open("postgresql://u@127.0.0.1:1/db?frob=1")
    assert refused.value.exit_code is Exit.USAGE
    assert 'invalid connection option "frob"' in str(refused.value)
    assert "Next: correct the address" in str(refused.value)


def test_a_path_object_that_is_an_address() -> None:
    with pytest.raises(PerfbenchError) as refused:
        History.open(Path("postgresql://u:hush@h/db?password=hush"))
    assert HUSH not in str(refused.value)
