"""Change points that were reported, and what somebody decided about them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_table(
        "changes",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("series", sa.Integer, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("before_run_id", sa.Text, nullable=False),
        sa.Column("run", sa.Integer, nullable=False),
        sa.Column("before_commit", sa.Text),
        sa.Column("commit_sha", sa.Text),
        sa.Column("measured_utc", sa.BigInteger, nullable=False),
        sa.Column("size_pct", sa.Double, nullable=False),
        sa.Column("low_pct", sa.Double, nullable=False),
        sa.Column("high_pct", sa.Double, nullable=False),
        sa.Column("is_worse", sa.Boolean),
        sa.Column("p", sa.Double),
        sa.PrimaryKeyConstraint("id", name="pk_changes"),
        sa.ForeignKeyConstraint(["series"], ["series.id"], name="fk_changes_series"),
        sa.ForeignKeyConstraint(["run"], ["runs.id"], name="fk_changes_run", ondelete="CASCADE"),
    )
    op.create_index("ix_changes_series", "changes", ["series"])
    op.create_index("ix_changes_run", "changes", ["run"])
    op.create_table(
        "decisions",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("run", sa.Integer, nullable=False),
        sa.Column("note", sa.Text, nullable=False),
        sa.Column("author", sa.Text, nullable=False),
        sa.Column("created_utc", sa.BigInteger, nullable=False),
        *(sa.Column(name, sa.Text) for name in ("suite", "card", "cell_id", "metric")),
        sa.PrimaryKeyConstraint("id", name="pk_decisions"),
        sa.ForeignKeyConstraint(["run"], ["runs.id"], name="fk_decisions_run", ondelete="CASCADE"),
    )
    op.create_index("ix_decisions_run", "decisions", ["run"])
