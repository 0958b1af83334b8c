"""Every test that asks for an ``address`` runs on SQLite, and with `--require postgres` on a
PostgreSQL server, too; one that asks for a ``postgres_address`` exists there alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from perfbench.history.store import History
from tests.perfbench.history import postgres

NUMBERS = count()
NAMES = "fixturenames"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "address" in metafunc.fixturenames:
        asked = metafunc.config.getoption("--require") == "postgres"
        metafunc.parametrize("address", ["sqlite", "postgres"][: 1 + asked], indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--require") != "postgres":
        items[:] = [one for one in items if "postgres_address" not in getattr(one, NAMES, ())]


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    try:
        with postgres.running("-c fsync=off") as made:
            yield made.address
    except postgres.NoServer as error:
        pytest.fail(f"--require postgres was given, and no server runs: {error}")


@pytest.fixture
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database of its own."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/history.db"
    return str(request.getfixturevalue("postgres_address"))


@pytest.fixture
def postgres_address(server: str) -> str:
    name = f"history_{next(NUMBERS)}"
    driver = server.replace("postgresql:", "postgresql+psycopg:")
    engine = create_engine(f"{driver}postgres", isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    engine.dispose()
    return f"{server}{name}"


@pytest.fixture
def history(address: str) -> Iterator[History]:
    with History.open(address, create=True) as made:
        yield made
