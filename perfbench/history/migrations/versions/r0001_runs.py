"""Runs, their cells, and points."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def _id() -> sa.Column[int]:
    return sa.Column("id", sa.Integer, primary_key=True)


def _digest() -> sa.Column[str]:
    return sa.Column("digest", sa.Text, nullable=False)


def _text(*names: str, nullable: bool = False) -> list[sa.Column[str]]:
    return [sa.Column(name, sa.Text, nullable=nullable) for name in names]


def _references(**tables: str) -> list[sa.Column[int]]:
    return [sa.Column(name, sa.Integer, nullable=False) for name in tables]


def _keys(table: str, *, cascade: str = "", **tables: str) -> list[sa.ForeignKeyConstraint]:
    return [
        sa.ForeignKeyConstraint(
            [name],
            [f"{other}.id"],
            name=f"fk_{table}_{name}",
            ondelete="CASCADE" if name == cascade else None,
        )
        for name, other in tables.items()
    ]


def _found_by_digest(table: str, *columns: sa.Column[str]) -> None:
    op.create_table(
        table,
        _id(),
        _digest(),
        *columns,
        sa.PrimaryKeyConstraint("id", name=f"pk_{table}"),
        sa.UniqueConstraint("digest", name=f"uq_{table}_digest"),
    )


def upgrade() -> None:
    _found_by_digest("metrics", *_text("name", "title", "unit", "better"))
    _found_by_digest("segments", *_text("mapping"))
    _found_by_digest("texts", *_text("body"))
    config = _text("config_sha256", nullable=True)
    _found_by_digest("definitions", *_text("axes", "reproduce"), *config)
    _found_by_digest("cells", *_text("suite", "card", "cell_id"))
    op.create_table(
        "series",
        _id(),
        *_references(cell="cells", metric="metrics"),
        sa.PrimaryKeyConstraint("id", name="pk_series"),
        *_keys("series", cell="cells", metric="metrics"),
        sa.UniqueConstraint("cell", "metric", name="uq_series_cell_metric"),
    )
    op.create_table(
        "runs",
        _id(),
        _digest(),
        *_text("run_id", "content_sha256", "origin", "suite", "card"),
        sa.Column("measured_utc", sa.BigInteger, nullable=False),
        *_text("commit_sha", nullable=True),
        sa.Column("commit_utc", sa.BigInteger),
        *_text("branch", nullable=True),
        sa.Column("is_dirty", sa.Boolean),
        *_references(segment="segments"),
        *_text("command", "headline"),
        sa.Column("exit_code", sa.Integer),
        *_text("injections", "folder"),
        sa.PrimaryKeyConstraint("id", name="pk_runs"),
        *_keys("runs", segment="segments"),
        sa.UniqueConstraint("digest", name="uq_runs_digest"),
    )
    op.create_index("ix_runs_measured_utc", "runs", ["measured_utc"])
    op.create_table(
        "reports",
        *_references(run="runs"),
        *_text("body"),
        sa.PrimaryKeyConstraint("run", name="pk_reports"),
        *_keys("reports", cascade="run", run="runs"),
    )
    _outcomes()
    _points()


def _outcomes() -> None:
    texts = {"verdict": "texts", "reason": "texts", "definition": "definitions"}
    op.create_table(
        "outcomes",
        *_references(cell="cells", run="runs"),
        sa.Column("place", sa.Integer, nullable=False),
        sa.Column("verdict", sa.Integer),
        *_references(reason="texts", definition="definitions"),
        sa.PrimaryKeyConstraint(
            "cell", "run", name="pk_outcomes", postgresql_include=["verdict", "reason"]
        ),
        *_keys("outcomes", cascade="run", cell="cells", run="runs", **texts),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_outcomes_run", "outcomes", ["run"])


def _points() -> None:
    op.create_table(
        "points",
        *_references(series="series"),
        sa.Column("measured_utc", sa.BigInteger, nullable=False),
        *_references(run="runs"),
        sa.Column("value", sa.Double),
        sa.Column("low", sa.Double),
        sa.Column("high", sa.Double),
        sa.Column("count", sa.Integer, nullable=False),
        sa.Column("reason", sa.Integer),
        sa.PrimaryKeyConstraint(
            "series",
            "measured_utc",
            "run",
            name="pk_points",
            postgresql_include=["value", "low", "high", "count", "reason"],
        ),
        *_keys("points", cascade="run", series="series", run="runs", reason="texts"),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_points_run", "points", ["run"])
